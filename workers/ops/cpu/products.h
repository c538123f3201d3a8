/* Products with matrices whose rows are contiguous, in float32, for all kernels. */

#include "vectors.h"

/* Products are computed in tiles whose sums are registers: of up to this many rows, and vectors of columns. */
#define TILE_ROWS 6
#define TILE_COLUMNS 2

/* Defines a tile of y [rows, columns * size] = x w, or is added to, in vectors of `size` numbers; x and w are those of
 * matmul. */
#define TILE_OF_ROWS(tile, vector, size)                                                                            \
    static inline __attribute__((always_inline)) void tile(const int rows, const int columns, float *y,             \
                                                           int64_t y_stride, const float *x, int64_t x_stride,      \
                                                           int64_t x_step, const float *w, int64_t w_stride,        \
                                                           int64_t inner, int adds) {                               \
        vector sums[TILE_ROWS][TILE_COLUMNS] = {{{0}}};                                                             \
        for (int64_t k = 0; k < inner; k++) {                                                                       \
            vector weights[TILE_COLUMNS];                                                                           \
            UNROLL(2) for (int c = 0; c < columns; c++) weights[c] = *(vector *)(w + k * w_stride + c * size);      \
            UNROLL(6) for (int r = 0; r < rows; r++) {                                                              \
                float number = x[r * x_stride + k * x_step];                                                        \
                UNROLL(2) for (int c = 0; c < columns; c++) sums[r][c] += number * weights[c];                      \
            }                                                                                                       \
        }                                                                                                           \
        UNROLL(6) for (int r = 0; r < rows; r++) UNROLL(2) for (int c = 0; c < columns; c++) {                      \
            vector *to = (vector *)(y + r * y_stride + c * size);                                                   \
            if (adds) sums[r][c] += *to;                                                                            \
            *to = sums[r][c];                                                                                       \
        }                                                                                                           \
    }
#define UNROLL(times) DO_PRAGMA(GCC unroll times)
#define DO_PRAGMA(text) _Pragma(#text)
TILE_OF_ROWS(tile_of_rows, wide, WIDE)
TILE_OF_ROWS(tile_of_four, four, 4)
#if WIDE > 8
TILE_OF_ROWS(tile_of_eight, eight, 8)
#endif

typedef void tile_function(float *, int64_t, const float *, int64_t, int64_t, const float *, int64_t, int64_t, int);

/* Tiles of constant numbers of rows and columns, each compiled by itself: inlined into one function, they would have
 * too few registers for their addresses. */
#define OF_SIZE(tile, rows, columns)                                                                              \
    static __attribute__((noinline)) void tile##_##rows##_##columns(float *y, int64_t y_stride, const float *x,   \
                                                                    int64_t x_stride, int64_t x_step,             \
                                                                    const float *w, int64_t w_stride,             \
                                                                    int64_t inner, int adds) {                    \
        tile(rows, columns, y, y_stride, x, x_stride, x_step, w, w_stride, inner, adds);                          \
    }
#define ROWS(tiles, tile, columns)                                                                                \
    OF_SIZE(tile, 1, columns)                                                                                     \
    OF_SIZE(tile, 2, columns)                                                                                     \
    OF_SIZE(tile, 3, columns)                                                                                     \
    OF_SIZE(tile, 4, columns)                                                                                     \
    OF_SIZE(tile, 5, columns)                                                                                     \
    OF_SIZE(tile, 6, columns)                                                                                     \
    static tile_function *const tiles[TILE_ROWS] = {tile##_1_##columns, tile##_2_##columns, tile##_3_##columns,   \
                                                    tile##_4_##columns, tile##_5_##columns, tile##_6_##columns};
ROWS(rows_2, tile_of_rows, 2)
ROWS(rows_1, tile_of_rows, 1)
ROWS(rows_of_four, tile_of_four, 1)
#if WIDE > 8
ROWS(rows_of_eight, tile_of_eight, 1)
#endif

/* Computes the columns of the tiles for all rows, in tiles of about as many, at most `most`. */
static void in_tiles(tile_function *const *tiles, int64_t most, float *y, int64_t y_stride, const float *x,
                     int64_t x_stride, int64_t x_step, const float *w, int64_t w_stride, int64_t rows, int64_t inner,
                     int adds) {
    for (int64_t left = (rows + most - 1) / most; left > 0; left--) {
        int64_t of_tile = (rows + left - 1) / left;
        tiles[of_tile - 1](y, y_stride, x, x_stride, x_step, w, w_stride, inner, adds);
        y += of_tile * y_stride, x += of_tile * x_stride, rows -= of_tile;
    }
}

/* y [rows, columns] = x w, or is added to, for x [rows, inner], whose rows are x_stride and numbers x_step apart, and w
 * [inner, columns]. */
static void matmul(float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t x_step, const float *w,
                   int64_t w_stride, int64_t rows, int64_t inner, int64_t columns, int adds) {
    int64_t c = 0;
    for (; c + TILE_COLUMNS * WIDE <= columns; c += TILE_COLUMNS * WIDE)
        in_tiles(rows_2, TILE_ROWS, y + c, y_stride, x, x_stride, x_step, w + c, w_stride, rows, inner, adds);
    for (; c + WIDE <= columns; c += WIDE)
        in_tiles(rows_1, TILE_ROWS, y + c, y_stride, x, x_stride, x_step, w + c, w_stride, rows, inner, adds);
#if WIDE > 8
    for (; c + 8 <= columns; c += 8)
        in_tiles(rows_of_eight, TILE_ROWS, y + c, y_stride, x, x_stride, x_step, w + c, w_stride, rows, inner, adds);
#endif
    for (; c + 4 <= columns; c += 4)
        in_tiles(rows_of_four, TILE_ROWS, y + c, y_stride, x, x_stride, x_step, w + c, w_stride, rows, inner, adds);
    for (; c < columns; c++)
        for (int64_t r = 0; r < rows; r++) {
            float sum = 0.0f;
            for (int64_t k = 0; k < inner; k++) sum += x[r * x_stride + k * x_step] * w[k * w_stride + c];
            y[r * y_stride + c] = adds ? y[r * y_stride + c] + sum : sum;
        }
}
