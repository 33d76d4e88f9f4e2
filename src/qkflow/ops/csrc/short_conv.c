/* Short causal convolution per channel, followed by SiLU: see qkflow/ops/short_conv.py.

   A task is a segment of one row. It processes a block of channels at a time, so that the tokens of all taps stay in the
   L1 cache. Sums over tokens are per task and added in task order: results do not depend on the number of threads.
   Compiled once per precision (REAL). */

#include "gemm_tiles.h"

enum { SEGMENT = 128, CHANNELS = 256, MAX_TAPS = 64 };
/* tokens per task, channels per block, and the largest number of taps */

typedef struct {
    long rows, t, channels;
    int taps;
    const real *x, *state; /* [rows, t, channels]; [rows, taps - 1, channels], or null: zeros */
    real *weight, *zeros; /* [taps, channels], and a zero token */
} Streams;

static const real *token(const Streams *s, long row, long i) {
    if (i >= 0) return s->x + (row * s->t + i) * s->channels;
    if (s->state) return s->state + (row * (s->taps - 1) + i + s->taps - 1) * s->channels;
    return s->zeros;
}

static inline real sigmoid(real x) { return 1 / (1 + NAME(exponential)(-x)); }

static inline __attribute__((always_inline)) void convolve_token(const int taps, long count, long stride, const real *const *seen,
                                                      const real *restrict weight, real *restrict y) {
    for (long c = 0; c < count; c++) {
        real u = 0;
        for (int j = 0; j < taps; j++) u += weight[j * stride + c] * seen[j][c];
        y[c] = u * sigmoid(u);
    }
}

/* gradient of u for one token */
static inline __attribute__((always_inline)) void u_backward(const int taps, long count, long stride, const real *const *seen,
                                                        const real *restrict weight, const real *restrict gy,
                                                        real *restrict gu) {
    for (long c = 0; c < count; c++) {
        real u = 0;
        for (int j = 0; j < taps; j++) u += weight[j * stride + c] * seen[j][c];
        real s = sigmoid(u);
        gu[c] = gy[c] * (s + u * s * (1 - s));
    }
}

/* gradient of one input token; later[j] is the gradient of u, j tokens later */
static inline __attribute__((always_inline)) void x_backward(const int taps, long count, long stride,
                                                         const real *const *later, const real *restrict weight,
                                                         real *restrict gx) {
    for (long c = 0; c < count; c++) {
        real sum = 0;
        for (int j = 0; j < taps; j++) sum += weight[(taps - 1 - j) * stride + c] * later[j][c];
        gx[c] = sum;
    }
}

static inline __attribute__((always_inline)) void weight_backward(const int taps, long count, long stride,
                                                          const real *const *seen, const real *restrict gu,
                                                          real *restrict gweight) {
    for (long c = 0; c < count; c++)
        for (int j = 0; j < taps; j++) gweight[j * stride + c] += gu[c] * seen[j][c];
}

static inline __attribute__((always_inline)) void forward_task(const int taps, const Streams *s, long row, long first,
                                                               long last, real *y) {
    const real *seen[MAX_TAPS];
    for (long from = 0; from < s->channels; from += CHANNELS) {
        long count = s->channels - from < CHANNELS ? s->channels - from : CHANNELS;
        for (long i = first; i < last; i++) {
            for (int j = 0; j < taps; j++) seen[j] = token(s, row, i - taps + 1 + j) + from;
            convolve_token(taps, count, s->channels, seen, s->weight + from, y + (row * s->t + i) * s->channels + from);
        }
    }
}

/* Tokens from the last to the first, including those after the segment that read it. The tokens of the state, which have
   no outputs, come last. */
static inline __attribute__((always_inline)) void backward_task(const int taps, const Streams *s, long row, long first,
                                                                long last, const real *gy, real *gx, real *gstate,
                                                                real *gweight, real *work) {
    const long stride = s->channels, behind = last + taps - 1 < s->t ? last + taps - 1 : s->t;
    const real *seen[MAX_TAPS], *later[MAX_TAPS];
    for (long from = 0; from < stride; from += CHANNELS) {
        long count = stride - from < CHANNELS ? stride - from : CHANNELS;
        const real *weight = s->weight + from;
        memset(work, 0, sizeof(real) * taps * CHANNELS);
        for (long i = behind - 1; i >= (first || !gstate ? first : 1 - taps); i--) {
            real *now = work + (i + taps) % taps * CHANNELS;
            for (int j = 0; j < taps; j++) later[j] = work + (i + j + taps) % taps * CHANNELS;
            if (i < 0) {
                memset(now, 0, sizeof(real) * CHANNELS);
                x_backward(taps, count, stride, later, weight, gstate + (row * (taps - 1) + i + taps - 1) * stride + from);
                continue;
            }
            for (int j = 0; j < taps; j++) seen[j] = token(s, row, i - taps + 1 + j) + from;
            u_backward(taps, count, stride, seen, weight, gy + (row * s->t + i) * stride + from, now);
            if (i >= last) continue;
            x_backward(taps, count, stride, later, weight, gx + (row * s->t + i) * stride + from);
            weight_backward(taps, count, stride, seen, now, gweight + from);
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
                     const real *state, real *y) {
    Streams s = {.rows = rows, .t = t, .channels = channels, .taps = taps, .x = x, .state = state};
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

/* gstate may be null */
int NAME(short_conv_backward)(long rows, long t, long channels, int taps, int threads, const real *gy, const real *x,
                              const real *weight, const real *state, real *gx, real *gweight, real *gstate) {
    Streams s = {.rows = rows, .t = t, .channels = channels, .taps = taps, .x = x, .state = state};
    if (begin(&s, weight)) return 1;
    long segments = (t + SEGMENT - 1) / SEGMENT, tasks = rows * segments, size = taps * channels;
    int failed = 0;
    real *sums = aligned((tasks ? tasks : 1) * size); /* zeros, the gradient for an empty batch */
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
                backward_task(4, &s, row, first, last, gy, gx, gstate, sum, work);
            else
                backward_task(taps, &s, row, first, last, gy, gx, gstate, sum, work);
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
