/* Short causal convolutions, each channel by itself, with a SiLU behind: see qkflow/ops/short_conv.py.

   A task is a segment of one row; it goes through some channels at a time, so that the few tokens that a tap looks back
   lie in the nearest cache, and memory sees every token once. Sums over tokens are kept by task and added up in the
   order of tasks: the bits do not depend on the number of threads. Compiled once for each precision (REAL). */

#include "gemm_tiles.h"

enum { SEGMENT = 128, CHANNELS = 256, MOST = 64 };
/* tokens of a task, channels at once, and the most taps */

typedef struct {
    long rows, t, channels;
    int taps;
    const real *x, *tail; /* [rows, t, channels]; [rows, taps - 1, channels], or none: zeros */
    real *weight, *zeros; /* [taps, channels], a token of nothing */
} Streams;

static const real *token(const Streams *s, long row, long i) {
    if (i >= 0) return s->x + (row * s->t + i) * s->channels;
    if (s->tail) return s->tail + (row * (s->taps - 1) + i + s->taps - 1) * s->channels;
    return s->zeros;
}

static inline real sigmoid(real x) { return 1 / (1 + NAME(exponential)(-x)); }

static inline __attribute__((always_inline)) void one(const int taps, long count, long stride, const real *const *seen,
                                                      const real *restrict weight, real *restrict y) {
    for (long c = 0; c < count; c++) {
        real u = 0;
        for (int j = 0; j < taps; j++) u += weight[j * stride + c] * seen[j][c];
        y[c] = u * sigmoid(u);
    }
}

/* the gradient of u, by which one token's output depends on the taps */
static inline __attribute__((always_inline)) void slope(const int taps, long count, long stride, const real *const *seen,
                                                        const real *restrict weight, const real *restrict gy,
                                                        real *restrict gu) {
    for (long c = 0; c < count; c++) {
        real u = 0;
        for (int j = 0; j < taps; j++) u += weight[j * stride + c] * seen[j][c];
        real s = sigmoid(u);
        gu[c] = gy[c] * (s + u * s * (1 - s));
    }
}

/* what the outputs of a token and of those after it, later[j] being the slope j tokens on, say about the token itself */
static inline __attribute__((always_inline)) void gather(const int taps, long count, long stride,
                                                         const real *const *later, const real *restrict weight,
                                                         real *restrict gx) {
    for (long c = 0; c < count; c++) {
        real sum = 0;
        for (int j = 0; j < taps; j++) sum += weight[(taps - 1 - j) * stride + c] * later[j][c];
        gx[c] = sum;
    }
}

static inline __attribute__((always_inline)) void collect(const int taps, long count, long stride,
                                                          const real *const *seen, const real *restrict gu,
                                                          real *restrict gweight) {
    for (long c = 0; c < count; c++)
        for (int j = 0; j < taps; j++) gweight[j * stride + c] += gu[c] * seen[j][c];
}

static inline __attribute__((always_inline)) void forward_task(const int taps, const Streams *s, long row, long first,
                                                               long last, real *y) {
    const real *seen[MOST];
    for (long from = 0; from < s->channels; from += CHANNELS) {
        long count = s->channels - from < CHANNELS ? s->channels - from : CHANNELS;
        for (long i = first; i < last; i++) {
            for (int j = 0; j < taps; j++) seen[j] = token(s, row, i - taps + 1 + j) + from;
            one(taps, count, s->channels, seen, s->weight + from, y + (row * s->t + i) * s->channels + from);
        }
    }
}

/* Tokens from the last to the first. Those just behind the segment are looked at once more, for what they say about it;
   those of the tail, which have no outputs, follow the row's first. */
static inline __attribute__((always_inline)) void backward_task(const int taps, const Streams *s, long row, long first,
                                                                long last, const real *gy, real *gx, real *gtail,
                                                                real *gweight, real *work) {
    const long stride = s->channels, behind = last + taps - 1 < s->t ? last + taps - 1 : s->t;
    const real *seen[MOST], *later[MOST];
    for (long from = 0; from < stride; from += CHANNELS) {
        long count = stride - from < CHANNELS ? stride - from : CHANNELS;
        const real *weight = s->weight + from;
        memset(work, 0, sizeof(real) * taps * CHANNELS);
        for (long i = behind - 1; i >= (first || !gtail ? first : 1 - taps); i--) {
            real *now = work + (i + taps) % taps * CHANNELS;
            for (int j = 0; j < taps; j++) later[j] = work + (i + j + taps) % taps * CHANNELS;
            if (i < 0) {
                memset(now, 0, sizeof(real) * CHANNELS);
                gather(taps, count, stride, later, weight, gtail + (row * (taps - 1) + i + taps - 1) * stride + from);
                continue;
            }
            for (int j = 0; j < taps; j++) seen[j] = token(s, row, i - taps + 1 + j) + from;
            slope(taps, count, stride, seen, weight, gy + (row * s->t + i) * stride + from, now);
            if (i >= last) continue;
            gather(taps, count, stride, later, weight, gx + (row * s->t + i) * stride + from);
            collect(taps, count, stride, seen, now, gweight + from);
        }
    }
}

static int begin(Streams *s, const real *weight) {
    long size = s->taps * s->channels;
    if (!(s->weight = aligned(size + s->channels))) return 1;
    s->zeros = s->weight + size;
    for (long c = 0; c < s->channels; c++)
        for (int j = 0; j < s->taps; j++) s->weight[j * s->channels + c] = weight[c * s->taps + j];
    return 0;
}

/* y = silu(u); weight is [channels, taps] */
int NAME(short_conv)(long rows, long t, long channels, int taps, int threads, const real *x, const real *weight,
                     const real *tail, real *y) {
    Streams s = {.rows = rows, .t = t, .channels = channels, .taps = taps, .x = x, .tail = tail};
    if (begin(&s, weight)) return 1;
    long segments = (t + SEGMENT - 1) / SEGMENT;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long task = 0; task < rows * segments; task++) {
        long row = task / segments, first = task % segments * SEGMENT, last = first + SEGMENT < t ? first + SEGMENT : t;
        if (taps == 4)
            forward_task(4, &s, row, first, last, y);
        else
            forward_task(taps, &s, row, first, last, y);
    }
    free(s.weight);
    return 0;
}

/* gtail may be none */
int NAME(short_conv_backward)(long rows, long t, long channels, int taps, int threads, const real *gy, const real *x,
                              const real *weight, const real *tail, real *gx, real *gweight, real *gtail) {
    Streams s = {.rows = rows, .t = t, .channels = channels, .taps = taps, .x = x, .tail = tail};
    if (begin(&s, weight)) return 1;
    long segments = (t + SEGMENT - 1) / SEGMENT, tasks = rows * segments, size = taps * channels;
    int failed = 0;
    real *sums = aligned((tasks ? tasks : 1) * size); /* zeros, which is the gradient where there are no tokens */
    if (!sums) {
        free(s.weight);
        return 1;
    }
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        real *work = aligned((long)taps * CHANNELS);
        if (!work) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static)
        for (long task = 0; task < tasks; task++) {
            if (!work) continue;
            long row = task / segments, first = task % segments * SEGMENT;
            long last = first + SEGMENT < t ? first + SEGMENT : t;
            real *sum = sums + task * size;
            if (taps == 4)
                backward_task(4, &s, row, first, last, gy, gx, gtail, sum, work);
            else
                backward_task(taps, &s, row, first, last, gy, gx, gtail, sum, work);
        }
        free(work);
    }
    for (long task = 1; task < tasks; task++)
        for (long i = 0; i < size; i++) sums[i] += sums[task * size + i];
    for (long c = 0; c < channels; c++)
        for (int j = 0; j < taps; j++) gweight[c * taps + j] = sums[j * channels + c];
    free(sums);
    free(s.weight);
    return failed;
}
