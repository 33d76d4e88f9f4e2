/* Points of circles and what pulls them along: see qkflow/ops/kuramoto.py. A point is two numbers, cosine and sine.
   Compiled once for each precision (REAL). */

#include "gemm_tiles.h"

enum { SPAN = 512, TOKENS = 64 }; /* angles, or tokens, of a task */

/* The bits of the widest of some numbers, whose order is that of their widths: no numbers and infinities come last. */
static inline int bits_float(long count, const float *x) {
    int widest = 0;
    for (long i = 0; i < count; i++) {
        int bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffff;
        widest = bits > widest ? bits : widest;
    }
    return widest;
}

static inline int bits_double(long count, const double *x) {
    int widest = 0;
    for (long i = 0; i < count; i++) {
        long bits;
        memcpy(&bits, x + i, sizeof bits);
        int high = bits >> 32 & 0x7fffffff;
        widest = high > widest ? high : widest;
    }
    return widest;
}

enum { ENDLESS_float = 0x7f800000, ENDLESS_double = 0x7ff00000, FAR = 0x469c4000 /* 20,000 */ };

/* The angle less the nearest quarter turns, in three pieces, and two short series around 0: within 1e-7 up to FAR. */
static inline __attribute__((always_inline)) void quarter(float x, float *cosine, float *sine) {
    float n = rintf(x * 0.636619772f);
    float r = x - n * 1.5703125f - n * 4.83751296997e-4f - n * 7.54978995489e-8f, rr = r * r;
    float s = r + r * rr * (-1.6666654611e-1f + rr * (8.3321608736e-3f - rr * 1.9515295891e-4f));
    float c = 4.166664568298827e-2f + rr * (-1.388731625493765e-3f + rr * 2.443315711809948e-5f);
    c = 1.0f - 0.5f * rr + rr * rr * c;
    int q = (int)n;
    float even = q & 1 ? s : c, odd = q & 1 ? c : s;
    *cosine = (q + 1) & 2 ? -even : even;
    *sine = q & 2 ? -odd : odd;
}

static inline void around_float(long count, int widest, const float *restrict x, float *restrict y) {
    if (widest > FAR) {
        for (long i = 0; i < count; i++) y[2 * i] = cosf(x[i]), y[2 * i + 1] = sinf(x[i]);
        return;
    }
    float cosine[SPAN], sine[SPAN]; /* apart at first: then they are made by vectors */
    for (long i = 0; i < count; i++) quarter(x[i], &cosine[i], &sine[i]);
    for (long i = 0; i < count; i++) y[2 * i] = cosine[i], y[2 * i + 1] = sine[i];
}

static inline void around_double(long count, int widest, const double *restrict x, double *restrict y) {
    (void)widest;
    for (long i = 0; i < count; i++) y[2 * i] = cos(x[i]), y[2 * i + 1] = sin(x[i]);
}

/* y = (cos x, sin x); answers how many spans have angles that are not finite */
int NAME(points)(long count, int threads, const real *x, real *y) {
    int lost = 0;
#pragma omp parallel for schedule(static) reduction(+ : lost) num_threads(threads) if (threads > 1)
    for (long first = 0; first < count; first += SPAN) {
        long own = count - first < SPAN ? count - first : SPAN;
        int widest = NAME(bits)(own, x + first);
        lost += widest >= NAME(ENDLESS);
        NAME(around)(own, widest, x + first, y + 2 * first);
    }
    return lost;
}

/* y = cos S - sin C, for points (cos, sin) and means (C, S) */
int NAME(tangent)(long count, int threads, const real *restrict point, const real *restrict mean, real *restrict y) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long i = 0; i < count; i++) y[i] = point[2 * i] * mean[2 * i + 1] - point[2 * i + 1] * mean[2 * i];
    return 0;
}

/* y = along (cos S - sin C) + across (cos C + sin S), where along and across are those of a token's coordinates; across
   may be none */
int NAME(phase_increment)(long tokens, long size, int threads, const real *point, const real *mean, const real *along,
               const real *across, real *y) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long t = 0; t < tokens; t++) {
        const real *restrict p = point + 2 * t * size, *restrict m = mean + 2 * t * size;
        real *restrict to = y + t * size;
        if (across)
            for (long j = 0; j < size; j++)
                to[j] = along[j] * (p[2 * j] * m[2 * j + 1] - p[2 * j + 1] * m[2 * j]) +
                        across[j] * (p[2 * j] * m[2 * j] + p[2 * j + 1] * m[2 * j + 1]);
        else
            for (long j = 0; j < size; j++)
                to[j] = along[j] * (p[2 * j] * m[2 * j + 1] - p[2 * j + 1] * m[2 * j]);
    }
    return 0;
}

/* one token's part of it */
static inline __attribute__((always_inline)) void pulled(const int both, long size, const real *restrict gy,
                                                         const real *restrict p, const real *restrict m,
                                                         const real *restrict along, const real *restrict across,
                                                         real *restrict gx, real *restrict gm, real *restrict galong,
                                                         real *restrict gacross) {
    for (long j = 0; j < size; j++) {
        real c = p[2 * j], s = p[2 * j + 1], C = m[2 * j], S = m[2 * j + 1];
        real a = gy[j] * along[j], b = both ? gy[j] * across[j] : 0, cross = c * S - s * C, dot = c * C + s * S;
        gx[j] = b * cross - a * dot; /* by the angle itself, around which the point runs */
        gm[2 * j] = b * c - a * s;
        gm[2 * j + 1] = a * c + b * s;
        galong[j] += gy[j] * cross;
        if (both) gacross[j] += gy[j] * dot;
    }
}

/* Sums over tokens are kept by task and added up in the order of tasks: bits do not depend on the number of threads. */
int NAME(phase_increment_backward)(long tokens, long size, int threads, const real *gy, const real *point, const real *mean,
                        const real *along, const real *across, real *gx, real *gmean, real *galong, real *gacross) {
    long tasks = (tokens + TOKENS - 1) / TOKENS, both = across != NULL;
    real *sums = aligned((tasks ? tasks : 1) * 2 * size);
    if (!sums) return 1;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long task = 0; task < tasks; task++) {
        real *sum = sums + 2 * task * size;
        for (long t = task * TOKENS; t < tokens && t < (task + 1) * TOKENS; t++) {
            long at = t * size;
            if (both)
                pulled(1, size, gy + at, point + 2 * at, mean + 2 * at, along, across, gx + at, gmean + 2 * at,
                       sum, sum + size);
            else
                pulled(0, size, gy + at, point + 2 * at, mean + 2 * at, along, along, gx + at, gmean + 2 * at,
                       sum, sum + size);
        }
    }
    for (long task = 1; task < tasks; task++)
        for (long i = 0; i < 2 * size; i++) sums[i] += sums[2 * task * size + i];
    memcpy(galong, sums, sizeof(real) * size);
    if (both) memcpy(gacross, sums + size, sizeof(real) * size);
    free(sums);
    return 0;
}

static inline void turn(long size, const real *restrict p, const real *restrict by, real *restrict y) {
    for (long j = 0; j < size; j++) {
        y[2 * j] = p[2 * j] * by[2 * j] - p[2 * j + 1] * by[2 * j + 1];
        y[2 * j + 1] = p[2 * j] * by[2 * j + 1] + p[2 * j + 1] * by[2 * j];
    }
}

/* Points as keys, one token late and turned by their position; before the first stands what a call before has left,
   which may be none: zeros. `by` is [t, size] turns, or none. late is a copy of the points one token late, or none. */
int NAME(shift_points)(long rows, long t, long size, int threads, const real *point, const real *by, const real *first_key,
                const real *first_late, real *key, real *late) {
    long width = 2 * size;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long token = 0; token < rows * t; token++) {
        long row = token / t, i = token % t;
        const real *p = point + (token - 1) * width;
        real *to = key + token * width;
        if (i == 0 && first_key)
            memcpy(to, first_key + row * width, sizeof(real) * width);
        else if (i == 0)
            memset(to, 0, sizeof(real) * width);
        else if (by)
            turn(size, p, by + (i - 1) * width, to);
        else
            memcpy(to, p, sizeof(real) * width);
        if (!late) continue;
        to = late + token * width;
        if (i == 0 && first_late)
            memcpy(to, first_late + row * width, sizeof(real) * width);
        else if (i == 0)
            memset(to, 0, sizeof(real) * width);
        else
            memcpy(to, p, sizeof(real) * width);
    }
    return 0;
}

/* By the angles themselves; glate may be none. What stands before the first token takes its gradients from those of the
   first slots. */
int NAME(shift_points_backward)(long rows, long t, long size, int threads, const real *gkey, const real *glate,
                         const real *point, const real *by, real *gx) {
    long width = 2 * size;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long token = 0; token < rows * t; token++) {
        long i = token % t;
        real *restrict to = gx + token * size;
        if (i == t - 1) {
            memset(to, 0, sizeof(real) * size);
            continue;
        }
        const real *restrict g = gkey + (token + 1) * width, *restrict p = point + token * width;
        if (by) {
            const real *restrict b = by + i * width;
            for (long j = 0; j < size; j++) {
                real C = g[2 * j] * b[2 * j] + g[2 * j + 1] * b[2 * j + 1];
                real S = g[2 * j + 1] * b[2 * j] - g[2 * j] * b[2 * j + 1];
                to[j] = p[2 * j] * S - p[2 * j + 1] * C;
            }
        } else
            for (long j = 0; j < size; j++) to[j] = p[2 * j] * g[2 * j + 1] - p[2 * j + 1] * g[2 * j];
        if (!glate) continue;
        g = glate + (token + 1) * width;
        for (long j = 0; j < size; j++) to[j] += p[2 * j] * g[2 * j + 1] - p[2 * j + 1] * g[2 * j];
    }
    return 0;
}
