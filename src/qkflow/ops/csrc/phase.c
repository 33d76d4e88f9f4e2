/* Kernels of Kuramoto attention: see qkflow/ops/kuramoto/fused.py. A point is cosine and sine.
   Compiled once per precision (REAL). */

#include "gemm_tiles.h"

enum { SPAN = 512, TOKENS = 64 }; /* angles, or tokens, per task */

/* The bits of the largest absolute value; bits have the order of the values, with infinity and NaN last. */
static inline int bits_float(long count, const float *x) {
    int largest = 0;
    for (long i = 0; i < count; i++) {
        int bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

static inline int bits_double(long count, const double *x) {
    int largest = 0;
    for (long i = 0; i < count; i++) {
        long bits;
        memcpy(&bits, x + i, sizeof bits);
        int high = bits >> 32 & 0x7fffffff;
        largest = high > largest ? high : largest;
    }
    return largest;
}

enum { INFINITE_float = 0x7f800000, INFINITE_double = 0x7ff00000, FAR = 0x469c4000 /* 20,000 */ };

/* Range reduction by quarter turns in three parts, and two short series around 0: accurate to 1e-7 up to FAR. */
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

static inline void around_float(long count, int largest, const float *restrict x, float *restrict y) {
    if (largest > FAR) {
        for (long i = 0; i < count; i++) y[2 * i] = cosf(x[i]), y[2 * i + 1] = sinf(x[i]);
        return;
    }
    float cosine[SPAN], sine[SPAN]; /* separate arrays, so that the loop vectorizes */
    for (long i = 0; i < count; i++) quarter(x[i], &cosine[i], &sine[i]);
    for (long i = 0; i < count; i++) y[2 * i] = cosine[i], y[2 * i + 1] = sine[i];
}

static inline void around_double(long count, int largest, const double *restrict x, double *restrict y) {
    (void)largest;
    for (long i = 0; i < count; i++) y[2 * i] = cos(x[i]), y[2 * i + 1] = sin(x[i]);
}

/* y = (cos x, sin x); returns the number of spans with non-finite angles */
int NAME(points)(long count, int threads, const real *x, real *y) {
    int non_finite = 0;
#pragma omp parallel for schedule(static) reduction(+ : non_finite) num_threads(threads) if (threads > 1)
    for (long first = 0; first < count; first += SPAN) {
        long own = count - first < SPAN ? count - first : SPAN;
        int largest = NAME(bits)(own, x + first);
        non_finite += largest >= NAME(INFINITE);
        NAME(around)(own, largest, x + first, y + 2 * first);
    }
    return non_finite;
}

/* y = cos S - sin C, for points (cos, sin) and means (C, S) */
int NAME(tangent)(long count, int threads, const real *restrict point, const real *restrict mean, real *restrict y) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long i = 0; i < count; i++) y[i] = point[2 * i] * mean[2 * i + 1] - point[2 * i + 1] * mean[2 * i];
    return 0;
}

/* y = along (cos S - sin C) + across (cos C + sin S); along and across have one number per coordinate; across may be
   null */
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

/* gradients of one token */
static inline __attribute__((always_inline)) void token_backward(const int both, long size, const real *restrict gy,
                                                         const real *restrict p, const real *restrict m,
                                                         const real *restrict along, const real *restrict across,
                                                         real *restrict gx, real *restrict gm, real *restrict galong,
                                                         real *restrict gacross) {
    for (long j = 0; j < size; j++) {
        real c = p[2 * j], s = p[2 * j + 1], C = m[2 * j], S = m[2 * j + 1];
        real a = gy[j] * along[j], b = both ? gy[j] * across[j] : 0, cross = c * S - s * C, dot = c * C + s * S;
        gx[j] = b * cross - a * dot; /* gradient of the angle */
        gm[2 * j] = b * c - a * s;
        gm[2 * j + 1] = a * c + b * s;
        galong[j] += gy[j] * cross;
        if (both) gacross[j] += gy[j] * dot;
    }
}

/* Sums over tokens are per task and added in task order: results do not depend on the number of threads. */
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
                token_backward(1, size, gy + at, point + 2 * at, mean + 2 * at, along, across, gx + at, gmean + 2 * at,
                       sum, sum + size);
            else
                token_backward(0, size, gy + at, point + 2 * at, mean + 2 * at, along, along, gx + at, gmean + 2 * at,
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

static inline void rotate(long size, const real *restrict p, const real *restrict rotation, real *restrict y) {
    for (long j = 0; j < size; j++) {
        y[2 * j] = p[2 * j] * rotation[2 * j] - p[2 * j + 1] * rotation[2 * j + 1];
        y[2 * j + 1] = p[2 * j] * rotation[2 * j + 1] + p[2 * j + 1] * rotation[2 * j];
    }
}

/* Points shifted right by one token: as keys, rotated by `rotation` [t, size] (may be null), and as values, unrotated
   (may be null). The first slots come from the previous call, or are zero. */
int NAME(shift_points)(long rows, long t, long size, int threads, const real *point, const real *rotation, const real *first_key,
                const real *first_value, real *key, real *value) {
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
        else if (rotation)
            rotate(size, p, rotation + (i - 1) * width, to);
        else
            memcpy(to, p, sizeof(real) * width);
        if (!value) continue;
        to = value + token * width;
        if (i == 0 && first_value)
            memcpy(to, first_value + row * width, sizeof(real) * width);
        else if (i == 0)
            memset(to, 0, sizeof(real) * width);
        else
            memcpy(to, p, sizeof(real) * width);
    }
    return 0;
}

/* The gradient of the angles; gvalue may be null. The first slots have no angle here. */
int NAME(shift_points_backward)(long rows, long t, long size, int threads, const real *gkey, const real *gvalue,
                         const real *point, const real *rotation, real *gx) {
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
        if (rotation) {
            const real *restrict b = rotation + i * width;
            for (long j = 0; j < size; j++) {
                real C = g[2 * j] * b[2 * j] + g[2 * j + 1] * b[2 * j + 1];
                real S = g[2 * j + 1] * b[2 * j] - g[2 * j] * b[2 * j + 1];
                to[j] = p[2 * j] * S - p[2 * j + 1] * C;
            }
        } else
            for (long j = 0; j < size; j++) to[j] = p[2 * j] * g[2 * j + 1] - p[2 * j + 1] * g[2 * j];
        if (!gvalue) continue;
        g = gvalue + (token + 1) * width;
        for (long j = 0; j < size; j++) to[j] += p[2 * j] * g[2 * j + 1] - p[2 * j + 1] * g[2 * j];
    }
    return 0;
}

/* ---- one token of a layer of Kuramoto attention: points, queries, drift, shift, append to the cache, attend, step.
   The equations are those of qkflow/mechanisms/kuramoto.py. */

int NAME(linear_few)(long rows, long inputs, int count, int threads, const long *outputs, const real *const *weights,
                     const real *x, real *y); /* few_rows.c */
int NAME(attention_forward)(const long *shape, double scale, int threads, const real *q, const real *k, const real *v,
                            real *o, real *lse); /* attention.c */

typedef struct { /* as passed by the caller */
    long rows, heads, angles; /* per head */
    long slot, first, capacity; /* where the token is stored, and the first slot that it sees, of `capacity` slots */
} Step;

typedef struct {
    const real *theta, *query, *temperature, *step, *lag; /* the lag may be null */
    const real *rotation; /* cosine and sine per angle, or null */
    const real *last_key, *last_value; /* of the token before; without a value, a token's own is next to the last key */
    real *keys, *values; /* the cache, [rows, capacity, heads, 2 angles] */
    real *next_key, *next_value, *y;
} StepArrays;

static void drift(long rows, long width, const real *rotation, real *x) {
    for (; rotation && rows; rows--, x += width)
        for (long i = 0; i < width; i += 2) {
            real c = x[i], s = x[i + 1];
            x[i] = c * rotation[i] - s * rotation[i + 1], x[i + 1] = c * rotation[i + 1] + s * rotation[i];
        }
}

int NAME(kuramoto_layer_few)(int threads, int linear_threads, const Step *s, const StepArrays *to) {
    long width = 2 * s->angles, size = s->heads * width, all = s->rows * size, bytes = sizeof(real) * size;
    real *point = aligned(3 * all), *q = point + all, *mean = q + all;
    if (!point) return 1;
    int not_finite = NAME(points)(all / 2, 1, to->theta, point);
    int status = NAME(linear_few)(s->rows, size, 1, linear_threads, &size, &to->query, point, q);
    for (long i = 0; i < all; i += width) {
        real tau = (real)exp(to->temperature[i / width % s->heads]);
        for (long j = 0; j < width; j++) q[i + j] *= tau;
    }
    drift(s->rows * s->heads, width, to->rotation, q);
    memcpy(to->next_key, point, bytes * s->rows);
    drift(s->rows * s->heads, width, to->rotation, to->next_key);
    if (to->next_value) memcpy(to->next_value, point, bytes * s->rows);
    const real *value = to->last_value ? to->last_value : point;
    for (long row = 0; row < s->rows; row++) {
        long slot = (row * s->capacity + s->slot) * size;
        memcpy(to->keys + slot, to->last_key + row * size, bytes);
        memcpy(to->values + slot, value + row * size, bytes);
    }
    long shape[] = {s->rows, 1, s->slot + 1 - s->first, s->heads, s->heads, width, width, 0, size, size, width,
                    s->capacity * size, size, width, s->capacity * size, size, width, 0, 0, 0};
    status |= NAME(attention_forward)(shape, 1, threads, q, to->keys + s->first * size, to->values + s->first * size, mean, NULL);
    for (long i = 0; i < all / 2; i++) {
        const real *p = point + 2 * i, *m = mean + 2 * i;
        long j = i % (size / 2);
        real along = p[0] * m[1] - p[1] * m[0], across = p[0] * m[0] + p[1] * m[1];
        to->y[i] = to->step[j] * (to->lag ? (real)cos(to->lag[j]) * along + (real)sin(to->lag[j]) * across : along);
    }
    free(point);
    return not_finite ? 2 : status;
}
