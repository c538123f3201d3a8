/* The operations of a forward pass between its matrix products, in float32, each in one pass over memory: see
 * kernels.py.
 *
 * Rows of the inputs may have strides (in numbers); the numbers of a row are contiguous. The order of summation does not
 * depend on what the other rows hold. Non-finite numbers stay non-finite, and stay in their row.
 */

#include "products.h"

#include <stdlib.h>

/* total = x + update (total and update may be NULL), out = its norm; all [rows, size]. */
void add_rms_norm(float *out, float *total, const float *x, const float *update, const float *weight, float eps,
                  int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *summed = x + row * size;
        if (update != NULL) {
            float *own = total + row * size;
#pragma omp simd
            for (int64_t i = 0; i < size; i++) own[i] = summed[i] + update[row * size + i];
            summed = own;
        }
        float inverse = 1.0f / sqrtf(squares(summed, size) / (float)size + eps);
#pragma omp simd
        for (int64_t i = 0; i < size; i++) out[row * size + i] = summed[i] * inverse * weight[i];
    }
}

/* Maps x [rows, heads, size], rows `stride` apart, to contiguous out: each head normed, if there are weights [size] (or
 * [heads, size]: `weight_stride` is then size, else 0), and rotated by cos [rows, size] and sin [rows, size / 2]. */
void rotate_heads(float *out, const float *x, int64_t stride, const float *weight, int64_t weight_stride, float eps,
                  const float *cosines, const float *sines, int64_t rows, int64_t heads, int64_t size,
                  int64_t rotated, int threads) {
    int64_t half = rotated / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *cosine = cosines + row * rotated, *sine = sines + row * half;
        for (int64_t head = 0; head < heads; head++) {
            const float *first = x + row * stride + head * size, *second = first + half;
            float *to = out + (row * heads + head) * size;
            if (weight != NULL) {
                const float *w = weight + head * weight_stride;
                float inverse = 1.0f / sqrtf(squares(first, size) / (float)size + eps);
#pragma omp simd
                for (int64_t i = 0; i < half; i++) {
                    float real = first[i] * inverse * w[i], imaginary = second[i] * inverse * w[half + i];
                    to[i] = real * cosine[i] - imaginary * sine[i];
                    to[half + i] = imaginary * cosine[half + i] + real * sine[i];
                }
                for (int64_t i = rotated; i < size; i++) to[i] = first[i] * inverse * w[i];
            } else {
#pragma omp simd
                for (int64_t i = 0; i < half; i++) {
                    to[i] = first[i] * cosine[i] - second[i] * sine[i];
                    to[half + i] = second[i] * cosine[half + i] + first[i] * sine[i];
                }
                for (int64_t i = rotated; i < size; i++) to[i] = first[i];
            }
        }
    }
}

/* out [rows, size] = silu(gate) * up; the rows of gate and up are `stride` apart. */
void swiglu(float *out, const float *gate, const float *up, int64_t stride, int64_t rows, int64_t size,
            int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *g = gate + row * stride, *u = up + row * stride;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) out[row * size + i] = g[i] / (1.0f + exponential(-g[i])) * u[i];
    }
}

/* Tiles of dot products have up to this many rows and columns. */
#define DOT_ROWS 4
#define DOT_COLUMNS 3
/* Threads share the columns in parts of this many, a multiple of DOT_COLUMNS and of WIDE. */
#define PART_COLUMNS 48

/* A tile of y [rows, columns] = x [rows, inner] w', or is added to; w is [columns, inner]. x_step is 1. */
static inline __attribute__((always_inline)) void tile_of_dots(const int rows, const int columns, float *y,
                                                               int64_t y_stride, const float *x, int64_t x_stride,
                                                               int64_t x_step, const float *w, int64_t w_stride,
                                                               int64_t inner, int adds) {
    wide sums[DOT_ROWS][DOT_COLUMNS] = {{{0}}};
    int64_t k = 0;
    for (; k + WIDE <= inner; k += WIDE) {
        wide weights[DOT_COLUMNS];
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) {
            weights[c] = WIDE_AT(w + c * w_stride + k);
            /* The tile after the next. */
            if (columns == DOT_COLUMNS) __builtin_prefetch(w + (c + 2 * DOT_COLUMNS) * w_stride + k);
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            wide numbers = WIDE_AT(x + r * x_stride + k);
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) sums[r][c] += numbers * weights[c];
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) {
            float sum = sum_of(sums[r][c]);
            for (int64_t i = k; i < inner; i++) sum += x[r * x_stride + i] * w[c * w_stride + i];
            y[r * y_stride + c] = adds ? y[r * y_stride + c] + sum : sum;
        }
}

#define DOTS(columns)                                                                                             \
    OF_SIZE(tile_of_dots, 1, columns)                                                                             \
    OF_SIZE(tile_of_dots, 2, columns)                                                                             \
    OF_SIZE(tile_of_dots, 3, columns)                                                                             \
    OF_SIZE(tile_of_dots, 4, columns)                                                                             \
    static tile_function *const dots_##columns[DOT_ROWS] = {tile_of_dots_1_##columns, tile_of_dots_2_##columns,   \
                                                            tile_of_dots_3_##columns, tile_of_dots_4_##columns};
DOTS(1)
DOTS(3)

/* Transposes w [8, 8] into panel. */
static inline __attribute__((always_inline)) void transpose(float *panel, int64_t panel_stride, const float *w,
                                                            int64_t w_stride) {
#define EIGHT(pointer, row, stride) (*(eight *)((pointer) + (row) * (stride)))
#pragma GCC unroll 2
    for (int half = 0; half < 8; half += 4) {
        eight by_four[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            eight low = EIGHT(w, i, w_stride), high = EIGHT(w, i + 4, w_stride);
            by_four[i] = half == 0 ? __builtin_shufflevector(low, high, 0, 1, 2, 3, 8, 9, 10, 11)
                                   : __builtin_shufflevector(low, high, 4, 5, 6, 7, 12, 13, 14, 15);
        }
        eight pairs[4];
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            eight a = by_four[2 * i], b = by_four[2 * i + 1];
            pairs[i] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13);
            pairs[i + 2] = __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            eight a = pairs[2 * i], b = pairs[2 * i + 1];
            EIGHT(panel, half + 2 * i, panel_stride) = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
            EIGHT(panel, half + 2 * i + 1, panel_stride) = __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
        }
    }
}

/* So many numbers of the inner dimension are transposed at a time, to stay in the nearest cache. */
#define DEPTH 256

/* Transposes w [columns, depth] into panel [depth, columns]; columns is a multiple of 8. */
static void fill_panel(float *panel, const float *w, int64_t w_stride, int64_t depth, int64_t columns) {
    int64_t k = 0;
    for (; k + 8 <= depth; k += 8)
        for (int64_t c = 0; c < columns; c += 8) {
            const float *from = w + c * w_stride + k;
            /* A panel has more streams than processors read ahead: the next one. */
            if (k % 16 == 0)
                for (int64_t i = 0; i < 8; i++) __builtin_prefetch(from + (columns + i) * w_stride);
            transpose(panel + k * columns + c, columns, from, w_stride);
        }
    for (; k < depth; k++)
        for (int64_t c = 0; c < columns; c++) panel[k * columns + c] = w[c * w_stride + k];
}

/* With fewer rows than this, transposing takes longer than summing across vectors. */
#define WORTH_TRANSPOSING 12

/* y [rows, columns] = x [rows, inner] w', or is added to; w is [columns, inner]. */
static void matmul_transposed(float *y, int64_t y_stride, const float *x, int64_t x_stride, const float *w,
                              int64_t w_stride, int64_t rows, int64_t inner, int64_t columns, int adds) {
    int64_t c = 0;
    while (rows >= WORTH_TRANSPOSING && c + WIDE <= columns) {
        int64_t width = c + TILE_COLUMNS * WIDE <= columns ? TILE_COLUMNS * WIDE : WIDE;
        for (int64_t k = 0; k < inner; k += DEPTH) {
            float panel[DEPTH * TILE_COLUMNS * WIDE] __attribute__((aligned(64)));
            int64_t depth = inner - k < DEPTH ? inner - k : DEPTH;
            fill_panel(panel, w + c * w_stride + k, w_stride, depth, width);
            matmul(y + c, y_stride, x + k, x_stride, 1, panel, width, rows, depth, width, adds || k > 0);
        }
        c += width;
    }
    for (; c + DOT_COLUMNS <= columns; c += DOT_COLUMNS)
        in_tiles(dots_3, DOT_ROWS, y + c, y_stride, x, x_stride, 1, w + c * w_stride, w_stride, rows, inner, adds);
    for (; c < columns; c++)
        in_tiles(dots_1, DOT_ROWS, y + c, y_stride, x, x_stride, 1, w + c * w_stride, w_stride, rows, inner, adds);
}

/* Multiplies rows of x [rows, inner], sorted by group, with their groups' matrices; the products overwrite y [rows,
 * columns], with zeros for rows of no group, or are added to it. bounds [groups + 1] has where the rows of each group
 * begin. The matrices are `group_stride` apart, and their rows `w_stride`: [inner, columns], or [columns, inner] if
 * transposed. */
void grouped_matmul(float *y, int64_t y_stride, const float *x, int64_t x_stride, const float *matrices,
                    int64_t group_stride, int64_t w_stride, int transposed, const int64_t *bounds, int64_t rows_in_all,
                    int64_t groups, int64_t inner, int64_t columns, int adds, int threads) {
    for (int64_t row = bounds[groups]; row < rows_in_all && !adds; row++)
        memset(y + row * y_stride, 0, columns * sizeof(float));
    int64_t parts = (columns + PART_COLUMNS - 1) / PART_COLUMNS;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t group = 0; group < groups; group++)
        for (int64_t part = 0; part < parts; part++) {
            int64_t start = bounds[group], rows = bounds[group + 1] - start, first = part * PART_COLUMNS;
            if (rows == 0) continue;
            int64_t width = columns - first < PART_COLUMNS ? columns - first : PART_COLUMNS;
            float *to = y + start * y_stride + first;
            const float *from = x + start * x_stride, *w = matrices + group * group_stride;
            if (transposed)
                matmul_transposed(to, y_stride, from, x_stride, w + first * w_stride, w_stride, rows, inner, width,
                                  adds);
            else
                matmul(to, y_stride, from, x_stride, 1, w + first, w_stride, rows, inner, width, adds);
        }
}

/* The float32 numbers that a vector register holds. */
int register_size(void) { return WIDE; }

/* Adds x [rows, inner] a b to y [rows, columns], for a [inner, rank] and b [rank, columns]; the rows of each have a
 * stride. Returns 0, or 1 if out of memory. */
int add_low_rank(float *y, int64_t y_stride, const float *x, int64_t x_stride, const float *a, int64_t a_stride,
                 const float *b, int64_t b_stride, int64_t rows, int64_t inner, int64_t rank, int64_t columns) {
    float *reduced = malloc(rows * rank * sizeof(float));
    if (reduced == NULL) return 1;
    matmul(reduced, rank, x, x_stride, 1, a, a_stride, rows, inner, rank, 0);
    matmul(y, y_stride, reduced, rank, 1, b, b_stride, rows, rank, columns, 1);
    free(reduced);
    return 0;
}

/* Sorts pairs of token and expert by group, keys[pair] - first; pairs of other groups come last. tokens [pairs] are the
 * tokens of the sorted pairs, of which each has `per_token`, places [pairs] where each pair went, and counts [groups]
 * the pairs of each group. Returns 0, or 1 if out of memory. */
int sort_pairs(int64_t *tokens, int64_t *places, int64_t *counts, const int64_t *keys, int64_t first, int64_t pairs,
               int64_t per_token, int64_t groups) {
    int64_t *next = calloc(groups + 2, sizeof(int64_t));
    if (next == NULL) return 1;
    for (int64_t pair = 0; pair < pairs; pair++) {
        int64_t key = keys[pair] - first;
        next[(key < 0 || key > groups ? groups : key) + 1]++;
    }
    memcpy(counts, next + 1, groups * sizeof(int64_t));
    for (int64_t group = 1; group <= groups; group++) next[group] += next[group - 1];
    for (int64_t pair = 0; pair < pairs; pair++) {
        int64_t key = keys[pair] - first, place = next[key < 0 || key > groups ? groups : key]++;
        tokens[place] = pair / per_token;
        places[pair] = place;
    }
    free(next);
    return 0;
}

/* out [tokens, size] = the sums over each token's pairs of x [pairs, size], weighted by weights [tokens, per_token]; a
 * pair's row is at places [tokens, per_token]. */
void combine_pairs(float *out, const float *x, const int64_t *places, const float *weights, int64_t tokens,
                   int64_t per_token, int64_t size) {
    for (int64_t token = 0; token < tokens; token++) {
        float *to = out + token * size;
        memset(to, 0, size * sizeof(float));
        for (int64_t pair = token * per_token; pair < (token + 1) * per_token; pair++) {
            const float *from = x + places[pair] * size, weight = weights[pair];
#pragma omp simd
            for (int64_t i = 0; i < size; i++) to[i] += weight * from[i];
        }
    }
}

/* Attention processes this many keys at a time. */
#define TILE 64

/* A query in progress: over the keys so far, the largest score, the sum of exp(score - largest), and the values [size]
 * weighted by exp(score - largest). A sink is a first score without a value. */
struct query {
    const float *vector;
    float *weighed, largest, sum;
};

/* The dot products of a query with keys [WIDE, size]; size is a multiple of WIDE. */
static inline wide dots_of(const float *query, const float *keys, int64_t size) {
    wide sums[WIDE] = {{0}};
    for (int64_t d = 0; d < size; d += WIDE) {
        wide q = WIDE_AT(query + d);
#pragma GCC unroll 16
        for (int t = 0; t < WIDE; t++) sums[t] += q * WIDE_AT(keys + t * size + d);
    }
    return sums_of(sums);
}

/* Computes the scores of `count` keys [count, size]; the memory after them has `room` for more keys. */
static inline void score(float *scores, const float *query, const float *keys, int64_t count, int64_t room,
                         int64_t size) {
    int64_t t = 0;
    if (size % WIDE == 0)
        for (; t < count && count + room - t >= WIDE; t += WIDE)
            WIDE_AT(scores + t) = dots_of(query, keys + t * size, size);
    for (; t < count; t++) scores[t] = dot(query, keys + t * size, size);
}

/* weighed[d] += weights[t] * values[t, d], for `width` vectors of d. */
static inline __attribute__((always_inline)) void weigh_wide(const int width, float *weighed, const float *weights,
                                                             const float *values, int64_t count, int64_t size) {
    wide sums[8];
    for (int i = 0; i < width; i++) sums[i] = WIDE_AT(weighed + i * WIDE);
    for (int64_t t = 0; t < count; t++)
        for (int i = 0; i < width; i++) sums[i] += weights[t] * WIDE_AT(values + t * size + i * WIDE);
    for (int i = 0; i < width; i++) WIDE_AT(weighed + i * WIDE) = sums[i];
}

/* weighed[d] += weights[t] * values[t, d], for all d. */
static inline void weigh(float *weighed, const float *weights, const float *values, int64_t count, int64_t size) {
    int64_t d = 0;
    for (; d + 8 * WIDE <= size; d += 8 * WIDE) weigh_wide(8, weighed + d, weights, values + d, count, size);
    for (; d + 4 * WIDE <= size; d += 4 * WIDE) weigh_wide(4, weighed + d, weights, values + d, count, size);
    for (; d + 2 * WIDE <= size; d += 2 * WIDE) weigh_wide(2, weighed + d, weights, values + d, count, size);
    for (; d + WIDE <= size; d += WIDE) weigh_wide(1, weighed + d, weights, values + d, count, size);
    for (; d < size; d++)
        for (int64_t t = 0; t < count; t++) weighed[d] += weights[t] * values[t * size + d];
}

/* Adds `count` keys and values, at most TILE, to a query; the memory after them has `room` for more. Scores are
 * multiplied by `scaling`, and then approach `cap` at most, if that is not 0. */
static inline void see(struct query *query, const float *keys, const float *values, int64_t count, int64_t room,
                       int64_t size, float scaling, float cap) {
    float scores[TILE], largest = query->largest, sum = 0.0f;
    score(scores, query->vector, keys, count, room, size);
    if (cap != 0.0f) {
        float inner = scaling / cap;
#pragma omp simd
        for (int64_t t = 0; t < count; t++) scores[t] = hyperbolic_tangent(scores[t] * inner);
        scaling = cap;
    }
#pragma omp simd reduction(max : largest)
    for (int64_t t = 0; t < count; t++) {
        scores[t] *= scaling;
        largest = scores[t] > largest ? scores[t] : largest;
    }
    if (largest > query->largest) {
        float smaller = exponential(query->largest - largest);
        query->largest = largest;
        query->sum *= smaller;
#pragma omp simd
        for (int64_t d = 0; d < size; d++) query->weighed[d] *= smaller;
    }
#pragma omp simd reduction(+ : sum)
    for (int64_t t = 0; t < count; t++) {
        scores[t] = exponential(scores[t] - largest);
        sum += scores[t];
    }
    query->sum += sum;
    weigh(query->weighed, scores, values, count, size);
}

/* A decode step: one new token for each of many sequences. Its key and value are stored after the lengths[row] tokens in
 * slot slots[row], and its query sees them and itself, or the last `window` of them if that is not 0. sinks is [heads],
 * or NULL if there are none. For scaling and cap see `see`.
 *
 * query and out are [rows, heads, size], key and value [rows, kv_heads, size], each with its stride between rows; out is
 * contiguous. keys and values are [slots, kv_heads, capacity, size].
 *
 * order [rows] lists the rows group by group; bounds [groups + 1] has the start of each group. The sequences of a group
 * share their first shared[group] tokens, which are read from the slot of the group's first row. Returns 0, or 1 if out
 * of memory.
 */
int decode_attention(float *out, const float *query, int64_t query_stride, const float *key, int64_t key_stride,
                const float *value, int64_t value_stride, float *keys, float *values, const float *sinks,
                const int64_t *slots, const int64_t *lengths, const int64_t *order, const int64_t *bounds, const int64_t *shared,
                int64_t groups, int64_t heads, int64_t kv_heads, int64_t size, int64_t capacity, int64_t window,
                float scaling, float cap, int threads) {
    int64_t per_row = heads / kv_heads;
    int failed = 0;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads) if (threads > 1) reduction(| : failed)
    for (int64_t group = 0; group < groups; group++)
        for (int64_t kv_head = 0; kv_head < kv_heads; kv_head++) {
            const int64_t *members = order + bounds[group];
            int64_t num_rows = bounds[group + 1] - bounds[group], num = num_rows * per_row;
            struct query *queries = malloc(num * sizeof(struct query));
            float *weighed = calloc(num * size, sizeof(float));
            if (queries == NULL || weighed == NULL) {
                failed = 1;
                free(queries), free(weighed);
                continue;
            }
            for (int64_t q = 0; q < num; q++) {
                int64_t head = kv_head * per_row + q % per_row;
                const float *vector = query + members[q / per_row] * query_stride + head * size;
                queries[q] = (struct query){vector, weighed + q * size, sinks == NULL ? -INFINITY : sinks[head],
                                            sinks == NULL ? 0.0f : 1.0f};
            }
            int64_t common = window || num_rows == 1 ? 0 : shared[group] / TILE * TILE;
            int64_t first = (slots[members[0]] * kv_heads + kv_head) * capacity * size;
            for (int64_t t = 0; t < common; t += TILE)
                for (int64_t q = 0; q < num; q++)
                    see(queries + q, keys + first + t * size, values + first + t * size, TILE, 0, size, scaling, cap);
            for (int64_t member = 0; member < num_rows; member++) {
                int64_t row = members[member], last = lengths[row];
                int64_t slot = (slots[row] * kv_heads + kv_head) * capacity * size;
                float *k = keys + slot, *v = values + slot;
                memcpy(k + last * size, key + row * key_stride + kv_head * size, size * sizeof(float));
                memcpy(v + last * size, value + row * value_stride + kv_head * size, size * sizeof(float));
                struct query *own = queries + member * per_row;
                for (int64_t t = window && last >= window ? last + 1 - window : common; t <= last; t += TILE) {
                    int64_t count = last + 1 - t < TILE ? last + 1 - t : TILE;
                    for (int64_t q = 0; q < per_row; q++)
                        see(own + q, k + t * size, v + t * size, count, capacity - t - count, size, scaling, cap);
                }
                for (int64_t q = 0; q < per_row; q++) {
                    float *to = out + (row * heads + kv_head * per_row + q) * size, inverse = 1.0f / own[q].sum;
#pragma omp simd
                    for (int64_t d = 0; d < size; d++) to[d] = own[q].weighed[d] * inverse;
                }
            }
            free(queries), free(weighed);
        }
    return failed;
}

/* The matrices of groups, see grouped_matmul. */
struct matrices {
    const float *numbers;
    int64_t group_stride, row_stride;
    int transposed;
};

/* What adapters add to experts with gates: for each expert and adapter, B' of gate and of up, and A of down, [rank,
 * features] each. reduced [tokens, 2 * width] has the tokens' products with A of gate, then of up. */
struct expert_terms {
    const float *reduced, *gate, *up, *down;
    int64_t width, rank, adapters;
};

/* out [tokens, hidden] = the sums over each token's experts of down silu(gate x) * up x, weighted by weights [tokens,
 * per_token], for x [tokens, hidden]; between [tokens, width] = the sums of what `terms` (NULL if there are none) make
 * of the experts' features. keys [tokens, per_token] are as in sort_pairs: expert * kinds + adapter, if there are terms,
 * with one kind more than adapters. gate_up has the gates' features first. Returns 0, or 1 if out of memory. */
int run_experts(float *out, float *between, const float *x, const int64_t *keys, const float *weights,
                const struct matrices *gate_up, const struct matrices *down, const struct expert_terms *terms,
                int64_t first, int64_t tokens, int64_t per_token, int64_t experts, int64_t hidden, int64_t features,
                int threads) {
    int64_t pairs = tokens * per_token, adapters = terms ? terms->adapters : 0, kinds = terms ? adapters + 1 : 1;
    int64_t width = terms ? terms->width : 0, of_row = hidden + 3 * features + hidden + 3 * width;
    float *rows = malloc((pairs * of_row + 1) * sizeof(float));
    int64_t *sorted = malloc((2 * pairs + experts * kinds + experts * (adapters + 1) + 2) * sizeof(int64_t));
    int failed = rows == NULL || sorted == NULL;
    int64_t *places = sorted + pairs, *counts = places + pairs, *bounds = counts + experts * kinds;
    if (failed || sort_pairs(sorted, places, counts, keys, first, pairs, per_token, experts * kinds)) {
        free(rows), free(sorted);
        return 1;
    }
    float *wide = rows + pairs * hidden, *active = wide + pairs * 2 * features, *y = active + pairs * features;
    float *reduced = y + pairs * hidden, *z = reduced + pairs * 2 * width;
    /* Of the experts' rows, and of those of each adapter at an expert. */
    int64_t *of_adapters = bounds + experts + 1;
    bounds[0] = of_adapters[0] = 0;
    for (int64_t expert = 0; expert < experts; expert++) {
        bounds[expert + 1] = bounds[expert];
        for (int64_t kind = 0; kind < kinds; kind++) {
            bounds[expert + 1] += counts[expert * kinds + kind];
            if (kind < adapters) of_adapters[expert * adapters + kind + 1] = bounds[expert + 1];
        }
    }
    int64_t own = bounds[experts];
    for (int64_t row = 0; row < own; row++) {
        memcpy(rows + row * hidden, x + sorted[row] * hidden, hidden * sizeof(float));
        if (terms) memcpy(reduced + row * 2 * width, terms->reduced + sorted[row] * 2 * width, 2 * width * sizeof(float));
    }
    grouped_matmul(wide, 2 * features, rows, hidden, gate_up->numbers, gate_up->group_stride, gate_up->row_stride,
                   gate_up->transposed, bounds, own, experts, hidden, 2 * features, 0, threads);
    int64_t of_group = terms ? terms->rank * features : 0, groups = experts * adapters;
    for (int kind = 0; kind < 2 && terms; kind++)
        grouped_matmul(wide + kind * features, 2 * features, reduced + kind * width, 2 * width,
                       kind ? terms->up : terms->gate, of_group, features, 0, of_adapters, own, groups, terms->rank,
                       features, 1, 1);
    swiglu(active, wide, wide + features, 2 * features, own, features, threads);
    memset(y + own * hidden, 0, (pairs - own) * hidden * sizeof(float));
    grouped_matmul(y, hidden, active, features, down->numbers, down->group_stride, down->row_stride, down->transposed,
                   bounds, own, experts, features, hidden, 0, threads);
    combine_pairs(out, y, places, weights, tokens, per_token, hidden);
    if (terms) {
        memset(z, 0, pairs * width * sizeof(float));
        grouped_matmul(z, width, active, features, terms->down, of_group, features, 1, of_adapters, own, groups,
                       features, terms->rank, 0, 1);
        combine_pairs(between, z, places, weights, tokens, per_token, width);
    }
    free(rows), free(sorted);
    return 0;
}

/* One token of a causal convolution: out [rows, channels], which may be followed by silu, for x [rows, channels], whose
 * rows are x_stride apart. states [slots, channels, width - 1] has the last inputs of each slot, weight is [channels,
 * width], and bias [channels] or NULL. */
void convolve_step(float *out, const float *x, int64_t x_stride, float *states, const int64_t *slots,
                   const float *weight, const float *bias, int64_t rows, int64_t channels, int64_t width, int silu,
                   int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *in = x + row * x_stride;
        float *to = out + row * channels, *state = states + slots[row] * channels * (width - 1);
        for (int64_t c = 0; c < channels; c++, state += width - 1) {
            const float *taps = weight + c * width;
            float sum = (bias == NULL ? 0.0f : bias[c]) + taps[width - 1] * in[c];
            for (int64_t i = 0; i < width - 1; i++) {
                sum += taps[i] * state[i];
                state[i] = i == width - 2 ? in[c] : state[i + 1];
            }
            to[c] = sum;
        }
        if (silu) {
#pragma omp simd
            for (int64_t c = 0; c < channels; c++) to[c] = to[c] / (1.0f + exponential(-to[c]));
        }
    }
}

/* The head of a key or query, scaled to this length. */
static inline void normalize(float *out, const float *x, int64_t size, float length) {
    float factor = length / sqrtf(squares(x, size) + 1e-6f);
#pragma omp simd
    for (int64_t i = 0; i < size; i++) out[i] = x[i] * factor;
}

/* One token of the gated delta rule, see recurrences/gated_delta.py: out [rows, value_heads, value_size] for q and k
 * [rows, key_heads, key_size] and v [rows, value_heads, value_size], each with its stride between rows, and g and beta
 * [rows, value_heads]. Updates states [slots, value_heads, key_size, value_size]. Returns 0, or 1 if out of memory. */
int delta_step(float *out, const float *q, int64_t q_stride, const float *k, int64_t k_stride, const float *v,
               int64_t v_stride, const float *g, const float *beta, float *states, const int64_t *slots, int64_t rows,
               int64_t key_heads, int64_t value_heads, int64_t key_size, int64_t value_size, int threads) {
    int failed = 0;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(| : failed)
    for (int64_t row = 0; row < rows; row++) {
        float *query = malloc((2 * key_size + value_size) * sizeof(float));
        if (query == NULL) {
            failed = 1;
            continue;
        }
        float *key = query + key_size, *known = key + key_size;
        for (int64_t head = 0; head < value_heads; head++) {
            int64_t of_key = head / (value_heads / key_heads) * key_size, place = row * value_heads + head;
            normalize(query, q + row * q_stride + of_key, key_size, 1.0f / sqrtf((float)key_size));
            normalize(key, k + row * k_stride + of_key, key_size, 1.0f);
            const float *value = v + row * v_stride + head * value_size;
            float *state = states + (slots[row] * value_heads + head) * key_size * value_size;
            float *to = out + place * value_size, decay = exponential(g[place]);
            memset(known, 0, value_size * sizeof(float));
            memset(to, 0, value_size * sizeof(float));
            weigh(known, key, state, key_size, value_size);
#pragma omp simd
            for (int64_t d = 0; d < value_size; d++) known[d] = (value[d] - decay * known[d]) * beta[place];
            for (int64_t i = 0; i < key_size; i++) {
                float of_state = key[i], of_out = query[i], *line = state + i * value_size;
#pragma omp simd
                for (int64_t d = 0; d < value_size; d++) {
                    line[d] = decay * line[d] + of_state * known[d];
                    to[d] += of_out * line[d];
                }
            }
        }
        free(query);
    }
    return failed;
}

/* The largest number of blocks into which sampling divides a vocabulary. */
#define BLOCKS 1024

/* Computes the sum of exp((logits - largest) / temperature) for each block of `block` tokens; returns the total. */
static inline double block_sums(float *sums, const float *logits, float largest, float inverse_temperature,
                                int64_t vocab, int64_t block) {
    double total = 0.0;
    for (int64_t start = 0, i = 0; start < vocab; start += block, i++) {
        int64_t stop = start + block < vocab ? start + block : vocab;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t t = start; t < stop; t++) sum += exponential((logits[t] - largest) * inverse_temperature);
        sums[i] = sum;
        total += sum;
    }
    return total;
}

/* Returns the first token at which the cumulative exp((logits - largest) / temperature) exceeds `target`. If rounding
 * leaves none, returns the last token with any weight. */
static inline int64_t token_at(double target, const float *sums, const float *logits, float largest,
                               float inverse_temperature, int64_t vocab, int64_t block) {
    int64_t last = 0;
    double before = 0.0;
    for (int64_t start = 0, i = 0; start < vocab; start += block, i++) {
        if (before + sums[i] > target || start + block >= vocab) {
            int64_t stop = start + block < vocab ? start + block : vocab;
            double sum = before;
            for (int64_t t = start; t < stop; t++) {
                float weight = exponential((logits[t] - largest) * inverse_temperature);
                sum += weight;
                last = weight > 0.0f ? t : last;
                if (sum > target && weight > 0.0f) return t;
            }
        }
        before += sums[i];
    }
    return last;
}

/* Samples one token for each row of logits [rows, vocab]: the most likely one at temperature 0, otherwise the first at
 * which the cumulative probability exceeds uniform[row]. logprobs are those at temperature 1, NaN if any logit is. */
void choose(int64_t *tokens, float *logprobs, const float *logits, const float *temperatures, const float *uniform,
            int64_t rows, int64_t vocab, int threads) {
    int64_t block = (vocab + BLOCKS - 1) / BLOCKS;
    block = block < LANES ? LANES : (block + LANES - 1) / LANES * LANES;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *own = logits + row * vocab;
        float sums[BLOCKS], largest = -INFINITY, temperature = temperatures[row];
#pragma omp simd reduction(max : largest)
        for (int64_t t = 0; t < vocab; t++) largest = own[t] > largest ? own[t] : largest;
        double total = block_sums(sums, own, largest, 1.0f, vocab, block);
        int64_t token = 0;
        if (temperature == 0.0f) {
            while (token < vocab - 1 && own[token] != largest) token++;
        } else {
            float inverse = 1.0f / temperature;
            double mass = inverse == 1.0f ? total : block_sums(sums, own, largest, inverse, vocab, block);
            token = token_at(uniform[row] * mass, sums, own, largest, inverse, vocab, block);
        }
        tokens[row] = token;
        logprobs[row] = own[token] - largest - (float)log(total);
    }
}
