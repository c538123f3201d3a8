/* The operations of a forward pass between its matrix products, in float32, each in one pass over memory: see
 * kernels.py.
 *
 * Rows of the inputs may have strides (in numbers); the numbers of a row are contiguous. The order of summation does not
 * depend on the other rows. Non-finite numbers stay non-finite, and stay in their row.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* With fewer numbers than this, waking up other threads does not pay. */
#define WORTH_THREADS 65536

/* Sixteen numbers at any address; compilers map them to the processor's vectors. */
#define LANES 16
typedef float lanes __attribute__((vector_size(64), aligned(4), may_alias));
#define AT(pointer) (*(lanes *)(pointer))

/* exp to 2 units in the last place, in a form that compilers can vectorize; 0 below the least normal number. */
static inline float exponential(float x) {
    float clamped = x > 88.0f ? 88.0f : x;
    clamped = clamped < -87.0f ? -87.0f : clamped;
    /* x = n ln 2 + r: adding and subtracting 1.5 * 2^23 rounds to a whole number. */
    float shifted = clamped * 1.44269504088896341f + 12582912.0f;
    float n = shifted - 12582912.0f;
    float r = clamped - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    /* The low bits of the shifted number are n; a NaN is kept by p. */
    bits = (bits + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : p * power;
}

/* tanh to about 3e-7 of its value, also where that is small. */
static inline float hyperbolic_tangent(float x) {
    float size = fabsf(x), square = x * x;
    float p = -5.70498872745e-3f;
    p = p * square + 2.06390887954e-2f;
    p = p * square - 5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square - 3.33332819422e-1f;
    float near = x + x * square * p, far = copysignf(1.0f - 2.0f / (exponential(2.0f * size) + 1.0f), x);
    return size < 0.625f ? near : far;
}

static inline float squares(const float *x, int64_t size) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += x[i] * x[i];
    return sum;
}

/* total = x + update (total and update may be NULL), out = its norm; all [rows, size]. */
void add_rms_norm(float *out, float *total, const float *x, const float *update, const float *weight, float eps,
                  int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > WORTH_THREADS)
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
                  int64_t rotated) {
    int64_t half = rotated / 2;
#pragma omp parallel for if (rows * heads * size > WORTH_THREADS)
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
void swiglu(float *out, const float *gate, const float *up, int64_t stride, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) {
        const float *g = gate + row * stride, *u = up + row * stride;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) out[row * size + i] = g[i] / (1.0f + exponential(-g[i])) * u[i];
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

static inline float dot(const float *a, const float *b, int64_t size) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += a[i] * b[i];
    return sum;
}

/* The sums of adjacent pairs, first of a, then of b. */
static inline lanes neighbours(lanes a, lanes b) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

/* The dot products of a query with sixteen keys [16, size]; size is a multiple of sixteen. */
static inline lanes sixteen_dots(const float *query, const float *keys, int64_t size) {
    lanes sums[LANES] = {{0}};
    for (int64_t d = 0; d < size; d += LANES) {
        lanes q = AT(query + d);
#pragma GCC unroll 16
        for (int t = 0; t < LANES; t++) sums[t] += q * AT(keys + t * size + d);
    }
#pragma GCC unroll 8
    for (int t = 0; t < 8; t++) sums[t] = neighbours(sums[2 * t], sums[2 * t + 1]);
#pragma GCC unroll 4
    for (int t = 0; t < 4; t++) sums[t] = neighbours(sums[2 * t], sums[2 * t + 1]);
    return neighbours(neighbours(sums[0], sums[1]), neighbours(sums[2], sums[3]));
}

/* Computes the scores of `count` keys [count, size]; the memory after them has `room` for more keys. */
static inline void score(float *scores, const float *query, const float *keys, int64_t count, int64_t room,
                         int64_t size) {
    int64_t t = 0;
    if (size % LANES == 0)
        for (; t < count && count + room - t >= LANES; t += LANES)
            AT(scores + t) = sixteen_dots(query, keys + t * size, size);
    for (; t < count; t++) scores[t] = dot(query, keys + t * size, size);
}

/* weighed[d] += weights[t] * values[t, d], for `width` lanes of d. */
static inline __attribute__((always_inline)) void weigh_lanes(const int width, float *weighed, const float *weights,
                                                              const float *values, int64_t count, int64_t size) {
    lanes sums[8];
    for (int i = 0; i < width; i++) sums[i] = AT(weighed + i * LANES);
    for (int64_t t = 0; t < count; t++)
        for (int i = 0; i < width; i++) sums[i] += weights[t] * AT(values + t * size + i * LANES);
    for (int i = 0; i < width; i++) AT(weighed + i * LANES) = sums[i];
}

/* weighed[d] += weights[t] * values[t, d], for all d. */
static inline void weigh(float *weighed, const float *weights, const float *values, int64_t count, int64_t size) {
    int64_t d = 0;
    for (; d + 8 * LANES <= size; d += 8 * LANES) weigh_lanes(8, weighed + d, weights, values + d, count, size);
    for (; d + 4 * LANES <= size; d += 4 * LANES) weigh_lanes(4, weighed + d, weights, values + d, count, size);
    for (; d + LANES <= size; d += LANES) weigh_lanes(1, weighed + d, weights, values + d, count, size);
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
            int64_t rows, int64_t vocab) {
    int64_t block = (vocab + BLOCKS - 1) / BLOCKS;
    block = block < LANES ? LANES : (block + LANES - 1) / LANES * LANES;
#pragma omp parallel for if (rows * vocab > WORTH_THREADS)
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
