/* silu(gate) * up and its gradients in one pass: see qkflow/ops/swiglu.py. A row of `both` holds the gates, then the ups.
   Every element has its own result: nothing depends on the number of threads. Compiled once per precision (REAL). */

#include "gemm_tiles.h"

static inline real sigmoid(real x) { return 1 / (1 + NAME(exponential)(-x)); }

static void forward_row(long hidden, const real *restrict gate, const real *restrict up, real *restrict y) {
    for (long i = 0; i < hidden; i++) y[i] = gate[i] * sigmoid(gate[i]) * up[i];
}

static void backward_row(long hidden, const real *restrict gy, const real *restrict gate, const real *restrict up,
                         real *restrict ggate, real *restrict gup) {
    for (long i = 0; i < hidden; i++) {
        real s = sigmoid(gate[i]), silu = gate[i] * s;
        ggate[i] = gy[i] * up[i] * (s + silu * (1 - s));
        gup[i] = gy[i] * silu;
    }
}

/* y [rows, hidden] of both [rows, 2 hidden] */
int NAME(swiglu)(long rows, long hidden, int threads, const real *both, real *y) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long i = 0; i < rows; i++)
        forward_row(hidden, both + 2 * i * hidden, both + (2 * i + 1) * hidden, y + i * hidden);
    return 0;
}

int NAME(swiglu_backward)(long rows, long hidden, int threads, const real *gy, const real *both, real *gboth) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long i = 0; i < rows; i++)
        backward_row(hidden, gy + i * hidden, both + 2 * i * hidden, both + (2 * i + 1) * hidden,
                     gboth + 2 * i * hidden, gboth + (2 * i + 1) * hidden);
    return 0;
}
