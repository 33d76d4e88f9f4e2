/* Root-mean-square normalization, with or without a residual addition before it: see qkflow/ops/norm.py.

   A task is TASK rows. Sums over rows are per task and added in task order: results do not depend on the number of
   threads. Compiled once per precision (REAL). */

#include "vector_rows.h"

enum { TASK = 64 };

static real sum_of_squares(long width, const real *x) {
    vector sum = {0};
    long i = 0;
    for (; i + LANES <= width; i += LANES) {
        vector y = *(const loose *)(x + i);
        sum += y * y;
    }
    real rest = total(sum);
    for (; i < width; i++) rest += x[i] * x[i];
    return rest;
}

static real sum_of_products(long width, const real *x, const real *y, const real *z) {
    vector sum = {0};
    long i = 0;
    for (; i + LANES <= width; i += LANES)
        sum += *(const loose *)(x + i) * *(const loose *)(y + i) * *(const loose *)(z + i);
    real rest = total(sum);
    for (; i < width; i++) rest += x[i] * y[i] * z[i];
    return rest;
}

static void add_rows(long width, const real *x, const real *restrict y, real *sum) {
    for (long i = 0; i < width; i++) sum[i] = x[i] + y[i];
}

static void normalize(long width, real by, const real *restrict x, const real *restrict weight, real *restrict y) {
    for (long i = 0; i < width; i++) y[i] = x[i] * by * weight[i];
}

static void backward_row(long width, real by, real along, const real *restrict gy, const real *restrict x,
                         const real *restrict weight, real *restrict gx, real *restrict gweight) {
    for (long i = 0; i < width; i++) {
        gx[i] = by * (weight[i] * gy[i] - along * x[i]);
        gweight[i] += gy[i] * (by * x[i]);
    }
}

/* y = weight * s / root, with s = x + branch, which is stored in `sum`; without a branch (null), s = x.
   `inverse` (or null) receives 1 / root of every row. */
int NAME(rms_norm)(long rows, long width, double eps, int threads, const real *x, const real *branch, const real *weight,
                   real *sum, real *y, real *inverse) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long i = 0; i < rows; i++) {
        const real *row = x + i * width;
        if (branch) {
            add_rows(width, row, branch + i * width, sum + i * width);
            row = sum + i * width;
        }
        real by = 1 / (real)sqrt(sum_of_squares(width, row) / width + (real)eps);
        if (inverse) inverse[i] = by;
        normalize(width, by, row, weight, y + i * width);
    }
    return 0;
}

/* gx includes the gradient of the residual sum, `gsum`, if there is one */
int NAME(rms_norm_backward)(long rows, long width, int threads, const real *gy, const real *gsum, const real *x,
                            const real *weight, const real *inverse, real *gx, real *gweight) {
    long tasks = (rows + TASK - 1) / TASK;
    real *sums = aligned((size_t)(tasks ? tasks : 1) * width); /* zeros, the gradient for no rows */
    if (!sums) return 1;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long task = 0; task < tasks; task++) {
        long end = (task + 1) * TASK < rows ? (task + 1) * TASK : rows;
        for (long i = task * TASK; i < end; i++) {
            const real *g = gy + i * width, *row = x + i * width;
            real by = inverse[i], along = by * by * sum_of_products(width, row, weight, g) / width;
            backward_row(width, by, along, g, row, weight, gx + i * width, sums + task * width);
            if (gsum) add_rows(width, gx + i * width, gsum + i * width, gx + i * width);
        }
    }
    for (long task = 1; task < tasks; task++)
        for (long i = 0; i < width; i++) sums[i] += sums[task * width + i];
    memcpy(gweight, sums, sizeof(real) * width);
    free(sums);
    return 0;
}
