/* Layers of a model for a few rows, as in decoding, without packing: see qkflow/ops/few_rows.py.
   A sum belongs to one thread: results do not depend on the number of threads. Compiled once per precision (REAL). */

#include "vector_rows.h"

enum { NO_MEMORY = 1, NOT_FINITE = 2 };

int NAME(points)(long count, int threads, const real *x, real *y); /* phase.c */

static inline real sigmoid(real x) { return 1 / (1 + NAME(exponential)(-x)); }

/* y[i, o] = w[o] . x[i], or with `add` += */
static void linear(int add, long rows, long inputs, long outputs, int threads, const real *w, const real *x, real *y) {
    long whole = inputs / LANES * LANES;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long first = 0; first < outputs; first += DOWN) {
        const real *row[DOWN];
        for (int o = 0; o < DOWN; o++) row[o] = w + (first + o < outputs ? first + o : outputs - 1) * inputs;
        for (long i = 0; i < rows; i++) {
            vector sums[DOWN] = {{0}};
            real rest[DOWN] = {0};
            for (long j = 0; j < whole; j += LANES) {
                vector at = *(const loose *)(x + i * inputs + j);
#pragma GCC unroll 4
                for (int o = 0; o < DOWN; o++) sums[o] += *(const loose *)(row[o] + j) * at;
            }
            for (long j = whole; j < inputs; j++)
                for (int o = 0; o < DOWN; o++) rest[o] += row[o][j] * x[i * inputs + j];
            for (int o = 0; o < DOWN && first + o < outputs; o++) {
                real *to = y + i * outputs + first + o;
                *to = (add ? *to : 0) + rest[o] + total(sums[o]);
            }
        }
    }
}

/* y = weight x / sqrt(mean(x^2) + eps) for each row; a null weight is 1 */
static void normalize(long rows, long width, double eps, const real *x, const real *weight, real *y) {
    for (long i = 0; i < rows; i++, x += width, y += width) {
        vector sums = {0};
        real sum = 0;
        long j = 0;
        for (; j + LANES <= width; j += LANES) sums += *(const loose *)(x + j) * *(const loose *)(x + j);
        for (; j < width; j++) sum += x[j] * x[j];
        real by = 1 / (real)sqrt((sum + total(sums)) / width + eps);
        for (j = 0; j < width; j++) y[j] = weight ? weight[j] * (x[j] * by) : x[j] * by;
    }
}

int NAME(norm_few)(long rows, long width, double eps, const real *x, const real *weight, real *y) {
    normalize(rows, width, eps, x, weight, y);
    return 0;
}

/* y holds one array [rows, outputs[i]] per weight, one after the other */
int NAME(linear_few)(long rows, long inputs, int count, int threads, const long *outputs, const real *const *weights,
                     const real *x, real *y) {
    for (int i = 0; i < count; y += rows * outputs[i++]) linear(0, rows, inputs, outputs[i], threads, weights[i], x, y);
    return 0;
}

/* y = x + output (silu(gate u) up u), where u is the norm of x; without a norm it is x, or the points of x if there are
   twice as many inputs */
int NAME(swiglu_few)(long rows, long width, long inputs, long hidden, int threads, double eps, const real *x,
                     const real *norm, const real *gate, const real *up, const real *output, real *y) {
    real *memory = aligned(rows * (inputs + 2 * hidden)), *a = memory + rows * inputs, *b = a + rows * hidden;
    if (!memory) return NO_MEMORY;
    const real *u = memory;
    int not_finite = 0;
    if (norm)
        normalize(rows, width, eps, x, norm, memory);
    else if (inputs == 2 * width)
        not_finite = NAME(points)(rows * width, 1, x, memory);
    else
        u = x;
    linear(0, rows, inputs, hidden, threads, gate, u, a);
    linear(0, rows, inputs, hidden, threads, up, u, b);
    for (long i = 0; i < rows * hidden; i++) a[i] *= sigmoid(a[i]) * b[i];
    memcpy(y, x, sizeof(real) * rows * width);
    linear(1, rows, hidden, width, threads, output, a, y);
    free(memory);
    return not_finite ? NOT_FINITE : 0;
}

/* ---- one token of a layer with a delta rule: project, convolve, couple, normalize, update the memory, gate, project.
   The equations are those of qkflow/mechanisms/delta_rule.py and delta_family.py. */

int NAME(drift_kick_few)(long rows, int width, int hidden, int activation, int steps, int threads, double dt,
                         const double *coefficients, const real *w1, const real *b1, const real *w2, const real *b2,
                         const real *q, const real *k, real *q_out, real *k_out); /* symplectic.c */
int NAME(delta_recurrent)(long rows, long tokens, int heads, int key, int value, int decay_channels, int erase_channels,
                          double scale, const real *q, const real *k, const real *v, const real *beta,
                          const real *log_alpha, const real *erase, const real *state, real *o, real *final);

enum { Q, K, V, OWN, BETA, RATE, LAM, GATE, PROJECTIONS, CONVOLVED = 4 };

typedef struct { /* as passed by the caller */
    long rows, width, heads, key, value, taps; /* `width` of the stream */
    long erase_first; /* a step that erases along OWN precedes the write; its gate is LAM */
    long hidden, activation, steps; /* of the coupling */
} DeltaStep;

typedef struct {
    const real *x, *projections[PROJECTIONS]; /* OWN, RATE, LAM and GATE may be null */
    const real *convs[CONVOLVED], *states[CONVOLVED], *memory; /* null for OWN if it is not projected */
    const real *rate_up, *A_log, *dt_bias; /* of the decay; with rate_up, [keys, key], it has one number per key channel */
    const real *feedback, *correction; /* null, or per head: erase along x = sigmoid(feedback) k, read with q - correction x */
    const real *head_norm, *output;
    const double *coefficients; /* of the coupling, or null; then its force */
    const real *w1, *b1, *w2, *b2;
    real *tails[CONVOLVED], *final, *y;
} DeltaStepArrays;

/* One token of a short convolution (short_conv.c) and the next state, [taps - 1, channels]; taps > 1 */
static void convolve(long channels, long taps, const real *weight, const real *state, real *x, real *tail) {
    long before = (taps - 1) * channels;
    memcpy(tail, state + channels, sizeof(real) * (before - channels));
    memcpy(tail + before - channels, x, sizeof(real) * channels);
    for (long c = 0; c < channels; c++) {
        real u = weight[c * taps + taps - 1] * x[c];
        for (long j = 0; j < taps - 1; j++) u += weight[c * taps + j] * state[j * channels + c];
        x[c] = u;
    }
    for (long c = 0; c < channels; c++) x[c] *= sigmoid(x[c]);
}

int NAME(delta_layer_few)(double dt, double lam, double lam_bias, int threads, const DeltaStep *s, const DeltaStepArrays *to) {
    long rows = s->rows, keys = s->heads * s->key, values = s->heads * s->value, gates = rows * s->heads;
    long decays = to->rate_up ? keys : s->heads; /* per row */
    long sizes[] = {keys, keys, values, keys, s->heads, decays, s->heads, values}, total = values + s->key;
    for (int i = 0; i < PROJECTIONS; i++) total += sizes[i];
    real *memory = aligned(rows * total), *at[PROJECTIONS + 1] = {memory};
    if (!memory) return NO_MEMORY;
    for (int i = 0; i < PROJECTIONS; i++) {
        at[i + 1] = at[i] + rows * sizes[i];
        if (!to->projections[i] || (i == RATE && to->rate_up)) continue;
        linear(0, rows, s->width, sizes[i], threads, to->projections[i], to->x, at[i]);
    }
    if (to->rate_up) {
        real *inner = at[PROJECTIONS] + rows * values;
        linear(0, rows, s->width, s->key, threads, to->projections[RATE], to->x, inner);
        linear(0, rows, s->key, keys, threads, to->rate_up, inner, at[RATE]);
    }
    for (int i = 0; i < CONVOLVED; i++)
        for (long row = 0; row < rows && to->projections[i]; row++) {
            long before = row * (s->taps - 1) * sizes[i];
            convolve(sizes[i], s->taps, to->convs[i], to->states[i] + before, at[i] + row * sizes[i], to->tails[i] + before);
        }
    int status = 0;
    if (to->coefficients)
        status = NAME(drift_kick_few)(gates, (int)s->key, (int)s->hidden, (int)s->activation, (int)s->steps, 1, dt,
                                      to->coefficients, to->w1, to->b1, to->w2, to->b2, at[Q], at[K], at[Q], at[K]);
    for (int i = Q; i <= OWN; i++) { /* x / sqrt(|x|^2 + 1e-6) */
        if (i == V || !to->projections[i]) continue;
        normalize(gates, s->key, 1e-6 / s->key, at[i], NULL, at[i]);
        for (long j = 0; j < rows * keys; j++) at[i][j] *= 1 / (real)sqrt(s->key);
    }
    for (long i = 0; i < gates; i++) {
        at[BETA][i] = (real)(1 / (1 + exp(-(double)at[BETA][i])));
        at[LAM][i] = (real)(to->projections[LAM] ? 1 / (1 + exp(-(at[LAM][i] + lam_bias))) : lam);
    }
    for (long i = 0; to->projections[RATE] && i < rows * decays; i++) {
        double rate = (double)at[RATE][i] + to->dt_bias[i % decays], A = exp(to->A_log[i % decays * s->heads / decays]);
        at[RATE][i] = (real)(-A * (fmax(rate, 0) + log1p(exp(-fabs(rate)))));
    }
    const real *decay = to->projections[RATE] ? at[RATE] : NULL, *erase = to->projections[LAM] || lam != 0 ? at[LAM] : NULL;
    const real *before = to->memory;
    real *z = at[PROJECTIONS], *gate = at[GATE];
    int erase_channels = to->feedback || (to->projections[OWN] && !s->erase_first);
    if (erase_channels) {
        for (long i = 0; i < rows * keys; i++) {
            long one = i / s->key, head = one % s->heads;
            if (to->feedback) {
                at[OWN][i] = at[K][i] / (1 + (real)exp(-(double)to->feedback[head]));
                at[Q][i] -= to->correction[head] * at[OWN][i];
            } else
                at[OWN][i] = at[K][i] + at[LAM][one] * at[OWN][i];
        }
        erase = at[OWN];
    }
    if (s->erase_first) { /* a write of zero, so z can be both the values and the output, which is not needed */
        memset(z, 0, sizeof(real) * rows * values);
        status |= NAME(delta_recurrent)(rows, 1, (int)s->heads, (int)s->key, (int)s->value, to->rate_up != NULL, 0, 1, at[Q],
                                        at[OWN], z, at[LAM], decay, NULL, before, z, to->final);
        decay = erase = NULL;
        before = to->final;
    }
    status |= NAME(delta_recurrent)(rows, 1, (int)s->heads, (int)s->key, (int)s->value, decay && to->rate_up, erase_channels,
                                    1 / sqrt(s->key), at[Q], at[K], at[V], at[BETA], decay, erase, before, z, to->final);
    normalize(gates, s->value, 1e-5, z, to->head_norm, z);
    for (long i = 0; to->projections[GATE] && i < rows * values; i++) z[i] *= gate[i] * sigmoid(gate[i]);
    linear(0, rows, values, s->width, threads, to->output, z, to->y);
    free(memory);
    return status;
}
