/* Points of circles and what pulls them along: see qkflow/ops/kuramoto.py. A point is two numbers, cosine and sine.
   Compiled once for each precision (REAL). */

#include "tiles.h"

enum { SPAN = 512 }; /* angles of a task */

/* The angle less the nearest quarter turns, in three pieces, and two short series around 0; within an ulp or two, up to
   FAR. */
static const float FAR = 20000.0f;

static inline __attribute__((always_inline)) void quarter(float x, float *cosine, float *sine) {
    float n = rintf(x * 0.636619772f);
    float r = x - n * 1.5703125f - n * 4.83751296997e-4f - n * 7.54978995489e-8f, rr = r * r;
    float s = r + r * rr * (-1.6666654611e-1f + rr * (8.3321608736e-3f - rr * 1.9515295891e-4f));
    float c = 1.0f - 0.5f * rr + rr * rr * (4.166664568298827e-2f + rr * (-1.388731625493765e-3f + rr * 2.443315711809948e-5f));
    int q = (int)n;
    float even = q & 1 ? s : c, odd = q & 1 ? c : s;
    *cosine = (q + 1) & 2 ? -even : even;
    *sine = q & 2 ? -odd : odd;
}

static inline void around_float(long count, const float *restrict x, float *restrict y) {
    float widest = 0;
    for (long i = 0; i < count; i++) widest = fabsf(x[i]) > widest ? fabsf(x[i]) : widest;
    if (widest > FAR) {
        for (long i = 0; i < count; i++) y[2 * i] = cosf(x[i]), y[2 * i + 1] = sinf(x[i]);
        return;
    }
    for (long i = 0; i < count; i++) quarter(x[i], &y[2 * i], &y[2 * i + 1]);
}

static inline void around_double(long count, const double *restrict x, double *restrict y) {
    for (long i = 0; i < count; i++) y[2 * i] = cos(x[i]), y[2 * i + 1] = sin(x[i]);
}

/* y = (cos x, sin x); answers how many spans have angles that are not finite */
int NAME(points)(long count, int threads, const real *x, real *y) {
    int lost = 0;
#pragma omp parallel for schedule(static) reduction(+ : lost) num_threads(threads) if (threads > 1)
    for (long first = 0; first < count; first += SPAN) {
        long own = count - first < SPAN ? count - first : SPAN;
        real nothing = 0;
        for (long i = 0; i < own; i++) nothing += x[first + i] * 0;
        if (nothing != 0) lost++; /* infinity or none times zero is no number */
        NAME(around)(own, x + first, y + 2 * first);
    }
    return lost;
}

/* y = cos S - sin C, for points (cos, sin) and means (C, S) */
int NAME(tangent)(long count, int threads, const real *restrict point, const real *restrict mean, real *restrict y) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long i = 0; i < count; i++) y[i] = point[2 * i] * mean[2 * i + 1] - point[2 * i + 1] * mean[2 * i];
    return 0;
}

int NAME(tangent_backward)(long count, int threads, const real *restrict gy, const real *restrict point,
                           const real *restrict mean, real *restrict gpoint, real *restrict gmean) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long i = 0; i < count; i++) {
        gpoint[2 * i] = gy[i] * mean[2 * i + 1];
        gpoint[2 * i + 1] = -gy[i] * mean[2 * i];
        gmean[2 * i] = -gy[i] * point[2 * i + 1];
        gmean[2 * i + 1] = gy[i] * point[2 * i];
    }
    return 0;
}
