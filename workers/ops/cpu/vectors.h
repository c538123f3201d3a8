/* Vectors of float32 numbers and functions of them, for all kernels. */

#include <math.h>
#include <stdint.h>
#include <string.h>

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

static inline float dot(const float *a, const float *b, int64_t size) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += a[i] * b[i];
    return sum;
}

/* The numbers of one vector register. */
#ifdef __AVX512F__
#define WIDE 16
#else
#define WIDE 8
#endif
typedef float wide __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));
#define WIDE_AT(pointer) (*(wide *)(pointer))
typedef float eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef float four __attribute__((vector_size(16), aligned(4), may_alias));

#if WIDE == 16
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#else
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#endif

/* The sums of adjacent pairs, first of a, then of b. */
static inline wide neighbours(wide a, wide b) {
    return __builtin_shufflevector(a, b, EVEN) + __builtin_shufflevector(a, b, ODD);
}

static inline float sum_of(wide x) {
    for (int i = WIDE; i > 1; i /= 2) x = neighbours(x, x);
    return x[0];
}

/* The sum of each of WIDE vectors, which it overwrites. */
static inline wide sums_of(wide *vectors) {
    /* With constant bounds, since the vectors would be in memory otherwise. */
#if WIDE > 8
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) vectors[i] = neighbours(vectors[2 * i], vectors[2 * i + 1]);
#endif
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) vectors[i] = neighbours(vectors[2 * i], vectors[2 * i + 1]);
    return neighbours(neighbours(vectors[0], vectors[1]), neighbours(vectors[2], vectors[3]));
}
