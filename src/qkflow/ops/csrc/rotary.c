/* Rotary positions in one pass: see qkflow/ops/rotary.py. Every pair has its own result: nothing depends on the number
   of threads. Compiled once per precision (REAL). */

#include "gemm_tiles.h"

/* `to` may be `from` */
static inline void rotate(long width, real sign, const real *factors, const real *from, real *to) {
#pragma GCC ivdep
    for (long i = 0; i < width; i += 2) {
        real even = from[i], odd = from[i + 1], cosine = factors[i], sine = sign * factors[i + 1];
        to[i] = even * cosine - odd * sine;
        to[i + 1] = even * sine + odd * cosine;
    }
}

/* x is [rows, t, heads, width]. The factors of token i of row r are at r * row_stride + i * token_stride, the same for
   all heads; `inverse` rotates back. */
int NAME(rotary)(long rows, long t, long heads, long width, long row_stride, long token_stride, int inverse, int threads,
                 const real *factors, const real *from, real *to) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long i = 0; i < rows * t; i++)
        for (long h = 0; h < heads; h++)
            rotate(width, inverse ? -1 : 1, factors + i / t * row_stride + i % t * token_stride,
                   from + (i * heads + h) * width, to + (i * heads + h) * width);
    return 0;
}
