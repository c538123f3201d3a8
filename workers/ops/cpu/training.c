/* What training passes compute between their matrix products, in float32, with gradients: see kernels.py.
 *
 * Rows of the inputs may have strides (in numbers); the numbers of a row are contiguous. The order of summation does not
 * depend on the other rows, or sequences of attention. Non-finite numbers stay non-finite, and stay in their row.
 */

#include "products.h"

#include <stdlib.h>

/* out [rows, size] = the gradient of the input x of a norm with weight [size], given the gradient of its output, plus
 * addend, which may be NULL. */
void rms_norm_gradient(float *out, const float *grad, const float *addend, const float *x, const float *weight,
                       float eps, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *g = grad + row * size, *from = x + row * size, *other = addend + row * size;
        float *to = out + row * size, inverse = 1.0f / sqrtf(squares(from, size) / (float)size + eps), along = 0.0f;
#pragma omp simd reduction(+ : along)
        for (int64_t i = 0; i < size; i++) along += g[i] * weight[i] * from[i];
        along *= -inverse * inverse * inverse / (float)size;
        if (addend == NULL) {
#pragma omp simd
            for (int64_t i = 0; i < size; i++) to[i] = g[i] * weight[i] * inverse + from[i] * along;
        } else {
#pragma omp simd
            for (int64_t i = 0; i < size; i++) to[i] = g[i] * weight[i] * inverse + from[i] * along + other[i];
        }
    }
}

/* out [rows, heads, size] = the gradient of the input x of rotate_heads (kernels.c), given the gradient of its output.
 * Without a weight heads are not normed, and x is not read. */
void rotate_heads_gradient(float *out, const float *grad, int64_t grad_stride, const float *x, int64_t x_stride,
                           const float *weight, int64_t weight_stride, float eps, const float *cosines,
                           const float *sines, int64_t rows, int64_t heads, int64_t size, int64_t rotated,
                           int threads) {
    int64_t half = rotated / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *cosine = cosines + row * rotated, *sine = sines + row * half;
        for (int64_t head = 0; head < heads; head++) {
            const float *first = grad + row * grad_stride + head * size, *second = first + half;
            float *to = out + (row * heads + head) * size;
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                to[i] = first[i] * cosine[i] + second[i] * sine[i];
                to[half + i] = second[i] * cosine[half + i] - first[i] * sine[i];
            }
            for (int64_t i = rotated; i < size; i++) to[i] = first[i];
            if (weight == NULL) continue;
            const float *from = x + row * x_stride + head * size, *w = weight + head * weight_stride;
            float inverse = 1.0f / sqrtf(squares(from, size) / (float)size + eps), along = 0.0f;
#pragma omp simd reduction(+ : along)
            for (int64_t i = 0; i < size; i++) along += to[i] * w[i] * from[i];
            along *= -inverse * inverse * inverse / (float)size;
#pragma omp simd
            for (int64_t i = 0; i < size; i++) to[i] = to[i] * w[i] * inverse + from[i] * along;
        }
    }
}

/* Replaces gate and up [rows, size], whose rows are `stride` apart, by the gradients of silu(gate) * up. */
void swiglu_gradient(const float *grad, int64_t grad_stride, float *gate, float *up, int64_t stride, int64_t rows,
                     int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *from = grad + row * grad_stride;
        float *g = gate + row * stride, *u = up + row * stride;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            float sigmoid = 1.0f / (1.0f + exponential(-g[i])), active = g[i] * sigmoid;
            float of_active = from[i] * u[i];
            u[i] = from[i] * active;
            g[i] = of_active * sigmoid * (1.0f + g[i] * (1.0f - sigmoid));
        }
    }
}

/* Exponentials are summed in parts of this many, so that sums over a large vocabulary stay exact. */
#define PART 1024

/* out = the logarithms of the softmax over each row of x; both [rows, size]. */
void log_softmax(float *out, const float *x, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * size;
        float *to = out + row * size, largest = -INFINITY;
        double total = 0.0;
#pragma omp simd reduction(max : largest)
        for (int64_t i = 0; i < size; i++) largest = from[i] > largest ? from[i] : largest;
        for (int64_t start = 0; start < size; start += PART) {
            int64_t stop = start + PART < size ? start + PART : size;
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = start; i < stop; i++) sum += exponential(from[i] - largest);
            total += sum;
        }
        float logarithm = (float)log(total);
#pragma omp simd
        for (int64_t i = 0; i < size; i++) to[i] = from[i] - largest - logarithm;
    }
}

/* Replaces x by exp(x) * factors[row]; x is [rows, size]. */
void scaled_exponentials(float *x, const float *factors, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        float *own = x + row * size, factor = factors[row];
#pragma omp simd
        for (int64_t i = 0; i < size; i++) own[i] = exponential(own[i]) * factor;
    }
}

/* The gradients of combine_pairs (kernels.c): grad_x [pairs, size] and grad_weights [tokens, per_token] for the gradient
 * grad [tokens, size] of its output. */
void combine_pairs_gradient(float *grad_x, float *grad_weights, const float *grad, const float *x,
                            const int64_t *places, const float *weights, int64_t tokens, int64_t per_token,
                            int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t pair = 0; pair < tokens * per_token; pair++) {
        const float *g = grad + pair / per_token * size, *from = x + places[pair] * size;
        float *to = grad_x + places[pair] * size, weight = weights[pair], along = 0.0f;
#pragma omp simd reduction(+ : along)
        for (int64_t i = 0; i < size; i++) {
            along += g[i] * from[i];
            to[i] = g[i] * weight;
        }
        grad_weights[pair] = along;
    }
}

/* Attention processes this many queries and keys at a time. */
#define QUERIES 36
#define KEYS 128
#define ROUND_UP(number) (((number) + 2 * WIDE - 1) / (2 * WIDE) * (2 * WIDE))

/* The distance of rows of this size in memory: an odd multiple of 16 numbers, for else many rows would share few places
 * of the cache. */
#define APART(size) (((size) + 15) / 16 * 16 | 16)

/* The strides of a packed row's queries, keys, values and outputs' gradients between tokens, and the sizes of heads. */
struct attention {
    int64_t q_stride, k_stride, v_stride, grad_stride, heads, kv_heads, size, value_size, window;
    float scaling;
};

/* out = x [rows, size], and zeros up to the next row of out. */
static void copy_rows(float *out, const float *x, int64_t stride, int64_t rows, int64_t size) {
    for (int64_t r = 0; r < rows; r++) memcpy(out + r * APART(size), x + r * stride, size * sizeof(float));
}

/* out [size, APART(length)] = x [length, size] transposed, with zeros behind. */
static void transpose(float *out, const float *x, int64_t stride, int64_t length, int64_t size) {
    int64_t apart = APART(length);
    for (int64_t d = 0; d < size; d++, out += apart) {
        for (int64_t t = 0; t < length; t++) out[t] = x[t * stride + d];
        memset(out + length, 0, (apart - length) * sizeof(float));
    }
}

/* The first key that queries from `first` see, rounded down to a whole tile. */
static inline int64_t first_key(int64_t first, int64_t window) {
    return window && first >= window ? (first + 1 - window) / (2 * WIDE) * (2 * WIDE) : 0;
}

/* The keys that a query sees among `count`: from `begin` to before `end`; and the same in whole vectors. */
struct span {
    int64_t begin, end, first, last;
};

/* For a query at `place` from the first key, or before it. */
static inline struct span seen(int64_t place, int64_t count, int64_t window) {
    int64_t end = place < 0 ? 0 : place < count ? place + 1 : count;
    int64_t begin = window && place >= window ? place + 1 - window : 0;
    begin = begin < end ? begin : end;
    return (struct span){begin, end, begin / WIDE * WIDE, (end + WIDE - 1) / WIDE * WIDE};
}

/* Sets numbers that are in the vectors but not in the span. */
static inline void set_outside(float *numbers, struct span span, float value) {
    for (int64_t t = span.first; t < span.begin; t++) numbers[t] = value;
    for (int64_t t = span.end; t < span.last; t++) numbers[t] = value;
}

/* Sets the numbers among `count` that are not in the vectors to 0. */
static inline void clear_outside(float *numbers, struct span span, int64_t count) {
    for (int64_t t = 0; t < span.first; t++) numbers[t] = 0.0f;
    for (int64_t t = span.last; t < count; t++) numbers[t] = 0.0f;
}

/* Queries in progress: over the keys so far, the largest score of each, the sum of exp(score - largest), and the sum of
 * the values [QUERIES, value_size] weighted by it. */
struct progress {
    float largest[QUERIES], sums[QUERIES], *weighed;
};

/* Adds `count` keys, of which `scores` are the products with the queries, and their values. The first query is at `place`
 * from the first key. */
static void see(struct progress *queries, float *scores, const float *values, int64_t rows, int64_t place,
                int64_t count, const struct attention *of) {
    for (int64_t r = 0; r < rows; r++) {
        struct span span = seen(place + r, count, of->window);
        float *own = scores + r * APART(KEYS), largest = queries->largest[r], sum = 0.0f;
        set_outside(own, span, -INFINITY);
#pragma omp simd reduction(max : largest)
        for (int64_t t = span.first; t < span.last; t++) {
            own[t] *= of->scaling;
            largest = own[t] > largest ? own[t] : largest;
        }
        if (largest > queries->largest[r]) {
            float smaller = exponential(queries->largest[r] - largest);
            float *weighed = queries->weighed + r * APART(of->value_size);
#pragma omp simd
            for (int64_t d = 0; d < of->value_size; d++) weighed[d] *= smaller;
            queries->largest[r] = largest;
            queries->sums[r] *= smaller;
        }
#pragma omp simd reduction(+ : sum)
        for (int64_t t = span.first; t < span.last; t++) {
            own[t] = exponential(own[t] - largest);
            sum += own[t];
        }
        clear_outside(own, span, count);
        queries->sums[r] += sum;
    }
    matmul(queries->weighed, APART(of->value_size), scores, APART(KEYS), 1, values, APART(of->value_size), rows, count,
           of->value_size, 1);
}

/* Causal attention of sequences, whose first tokens are bounds [sequences + 1]: out [tokens, heads, value_size] and the
 * logarithms of the sums of exp(score), log_sums [heads, tokens]. A query sees the last `window` keys up to its own, or
 * all if that is 0. Returns 0, or 1 if out of memory. */
int attention(float *out, float *log_sums, const float *q, const float *k, const float *v, const int32_t *bounds,
              int64_t sequences, const struct attention *of, int threads) {
    int64_t per_kv_head = of->heads / of->kv_heads, tokens = bounds[sequences];
    int failed = 0;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads) if (threads > 1) reduction(| : failed)
    for (int64_t sequence = 0; sequence < sequences; sequence++)
        for (int64_t kv_head = 0; kv_head < of->kv_heads; kv_head++) {
            int64_t start = bounds[sequence], length = bounds[sequence + 1] - start, apart = APART(length);
            int64_t of_keys = of->size * apart, of_values = length * APART(of->value_size);
            int64_t of_queries = QUERIES * (APART(of->size) + APART(KEYS) + APART(of->value_size));
            float *keys = malloc((of_keys + of_values + of_queries) * sizeof(float));
            if (keys == NULL) {
                failed = 1;
                continue;
            }
            float *values = keys + of_keys, *queries = values + of_values, *scores = queries + QUERIES * APART(of->size);
            transpose(keys, k + start * of->k_stride + kv_head * of->size, of->k_stride, length, of->size);
            copy_rows(values, v + start * of->v_stride + kv_head * of->value_size, of->v_stride, length, of->value_size);
            for (int64_t head = kv_head * per_kv_head; head < (kv_head + 1) * per_kv_head; head++)
                for (int64_t first = 0; first < length; first += QUERIES) {
                    int64_t rows = length - first < QUERIES ? length - first : QUERIES, token = start + first;
                    struct progress progress = {.weighed = scores + QUERIES * APART(KEYS)};
                    for (int64_t r = 0; r < rows; r++) progress.largest[r] = -INFINITY;
                    memset(progress.weighed, 0, rows * APART(of->value_size) * sizeof(float));
                    copy_rows(queries, q + token * of->q_stride + head * of->size, of->q_stride, rows, of->size);
                    for (int64_t t = first_key(first, of->window); t < first + rows; t += KEYS) {
                        int64_t count = first + rows - t < KEYS ? first + rows - t : KEYS;
                        matmul(scores, APART(KEYS), queries, APART(of->size), 1, keys + t, apart, rows, of->size,
                               ROUND_UP(count), 0);
                        see(&progress, scores, values + t * APART(of->value_size), rows, first - t, count, of);
                    }
                    for (int64_t r = 0; r < rows; r++) {
                        float *to = out + ((token + r) * of->heads + head) * of->value_size;
                        const float *from = progress.weighed + r * APART(of->value_size);
                        float inverse = 1.0f / progress.sums[r];
#pragma omp simd
                        for (int64_t d = 0; d < of->value_size; d++) to[d] = from[d] * inverse;
                        log_sums[head * tokens + token + r] = progress.largest[r] + logf(progress.sums[r]);
                    }
                }
            free(keys);
        }
    return failed;
}

/* Replaces scores by weights exp(score - log_sum), and the weights' gradients by the scores'. along [rows] has the products
 * of each output with its gradient. For place and count see `see`. */
static void weigh_gradients(float *scores, float *gradients, const float *log_sums, const float *along, int64_t rows,
                            int64_t place, int64_t count, const struct attention *of) {
    for (int64_t r = 0; r < rows; r++) {
        struct span span = seen(place + r, count, of->window);
        float *own = scores + r * APART(KEYS), *grad = gradients + r * APART(KEYS);
        float log_sum = log_sums[r], less = along[r];
#pragma omp simd
        for (int64_t t = span.first; t < span.last; t++) {
            own[t] = exponential(own[t] * of->scaling - log_sum);
            grad[t] = own[t] * (grad[t] - less) * of->scaling;
        }
        set_outside(own, span, 0.0f), set_outside(grad, span, 0.0f);
        clear_outside(own, span, count), clear_outside(grad, span, count);
    }
}

/* The gradients of q, k and v of `attention`, contiguous, given those of its outputs, grad [tokens, heads, value_size],
 * and its results. Returns 0, or 1 if out of memory. */
int attention_gradient(float *grad_q, float *grad_k, float *grad_v, const float *grad, const float *q, const float *k,
                       const float *v, const float *out, const float *log_sums, const int32_t *bounds,
                       int64_t sequences, const struct attention *of, int threads) {
    int64_t per_kv_head = of->heads / of->kv_heads, tokens = bounds[sequences];
    int64_t size = of->size, value_size = of->value_size, row = APART(size), value_row = APART(value_size);
    int failed = 0;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads) if (threads > 1) reduction(| : failed)
    for (int64_t sequence = 0; sequence < sequences; sequence++)
        for (int64_t kv_head = 0; kv_head < of->kv_heads; kv_head++) {
            int64_t start = bounds[sequence], length = bounds[sequence + 1] - start, apart = APART(length);
            int64_t of_keys = (size + value_size) * apart + length * (2 * row + value_row);
            int64_t of_queries = QUERIES * (row + value_row + 2 * APART(KEYS));
            float *keys = malloc((of_keys + of_queries) * sizeof(float));
            if (keys == NULL) {
                failed = 1;
                continue;
            }
            float *values = keys + size * apart, *in_rows = values + value_size * apart;
            float *of_k = in_rows + length * row, *of_v = of_k + length * row, *queries = of_v + length * value_row;
            float *of_out = queries + QUERIES * row, *scores = of_out + QUERIES * value_row;
            float *gradients = scores + QUERIES * APART(KEYS);
            const float *own_keys = k + start * of->k_stride + kv_head * size;
            transpose(keys, own_keys, of->k_stride, length, size);
            copy_rows(in_rows, own_keys, of->k_stride, length, size);
            transpose(values, v + start * of->v_stride + kv_head * value_size, of->v_stride, length, value_size);
            memset(of_k, 0, length * (row + value_row) * sizeof(float));
            for (int64_t head = kv_head * per_kv_head; head < (kv_head + 1) * per_kv_head; head++)
                for (int64_t first = 0; first < length; first += QUERIES) {
                    int64_t rows = length - first < QUERIES ? length - first : QUERIES, token = start + first;
                    int64_t begin = first_key(first, of->window), place = token * of->heads + head;
                    float *of_q = grad_q + place * size, along[QUERIES];
                    copy_rows(queries, q + token * of->q_stride + head * size, of->q_stride, rows, size);
                    copy_rows(of_out, grad + token * of->grad_stride + head * value_size, of->grad_stride, rows,
                              value_size);
                    for (int64_t r = 0; r < rows; r++)
                        along[r] = dot(of_out + r * value_row, out + (place + r * of->heads) * value_size, value_size);
                    for (int64_t t = begin; t < first + rows; t += KEYS) {
                        int64_t count = first + rows - t < KEYS ? first + rows - t : KEYS, wider = ROUND_UP(count);
                        matmul(scores, APART(KEYS), queries, row, 1, keys + t, apart, rows, size, wider, 0);
                        matmul(gradients, APART(KEYS), of_out, value_row, 1, values + t, apart, rows, value_size,
                               wider, 0);
                        weigh_gradients(scores, gradients, log_sums + head * tokens + token, along, rows, first - t,
                                        count, of);
                        matmul(of_v + t * value_row, value_row, scores, 1, APART(KEYS), of_out, value_row, count,
                               rows, value_size, 1);
                        matmul(of_k + t * row, row, gradients, 1, APART(KEYS), queries, row, count, rows, size, 1);
                        matmul(of_q, of->heads * size, gradients, APART(KEYS), 1, in_rows + t * row, row, rows, count,
                               size, t > begin);
                    }
                }
            for (int64_t t = 0; t < length; t++) {
                int64_t place = (start + t) * of->kv_heads + kv_head;
                memcpy(grad_k + place * size, of_k + t * row, size * sizeof(float));
                memcpy(grad_v + place * value_size, of_v + t * value_row, value_size * sizeof(float));
            }
            free(keys);
        }
    return failed;
}
