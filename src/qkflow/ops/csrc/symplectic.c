/* Drifts and kicks of (q, k) with the force W2 phi(W1 q + b1) + b2. qkflow/ops/symplectic/naive.py defines the motion,
   reversible.py has the equations of the backward pass.

   Rows are independent, so a tile of rows stays in the cache for the whole motion, whatever the number of steps. Widths
   are padded with zeros to whole vectors. Threads own contiguous tiles and separate sums, added in thread order: results
   are deterministic for a given number of threads. Compiled once per precision (REAL). */

#include "gemm_tiles.h"

enum { TILE = 96 };
enum { SILU = 0, SIGMOID = 1 };

typedef struct {
    long rows;
    int width, hidden, activation, steps;
    const double *coefficients; /* steps + 1 drifts, in units of dt */
    double dt;
    const real *w1, *b1, *w2, *b2;
} Motion;

typedef struct { /* packed weights; leading dimensions W (width) and M (hidden), padded */
    int W, M;
    real *inner, *inner_back, *outer, *outer_back, *undo, *bias, *shift, *memory;
} Packed;

static int pack(const Motion *m, Packed *p) {
    int W = p->W = padded(m->width), M = p->M = padded(m->hidden);
    size_t matrix = (size_t)W * M;
    if (!(p->memory = aligned(5 * matrix + M + W))) return 1;
    p->inner = p->memory;               /* W x M: W1 transposed */
    p->inner_back = p->inner + matrix;  /* M x W: W1 */
    p->outer = p->inner_back + matrix;  /* M x W: dt W2 transposed */
    p->undo = p->outer + matrix;        /* the same, negative */
    p->outer_back = p->undo + matrix;   /* W x M: dt W2 */
    p->bias = p->outer_back + matrix;
    p->shift = p->bias + M;
    real dt = (real)m->dt;
    for (int j = 0; j < m->hidden; j++) {
        p->bias[j] = m->b1[j];
        for (int i = 0; i < m->width; i++) {
            real in = m->w1[(size_t)j * m->width + i], out = dt * m->w2[(size_t)i * m->hidden + j];
            p->inner[(size_t)i * M + j] = p->inner_back[(size_t)j * W + i] = in;
            p->outer[(size_t)j * W + i] = p->outer_back[(size_t)i * M + j] = out;
            p->undo[(size_t)j * W + i] = -out;
        }
    }
    for (int i = 0; i < m->width; i++) p->shift[i] = dt * m->b2[i];
    return 0;
}

static inline real sigmoid(real x) { return 1 / (1 + NAME(exponential)(-x)); }

static void activate(int activation, int count, real *restrict z) {
    if (activation == SILU)
        for (int i = 0; i < count; i++) z[i] *= sigmoid(z[i]);
    else
        for (int i = 0; i < count; i++) z[i] = sigmoid(z[i]);
}

/* z becomes the activation, g the gradient of z */
static void activate_back(int activation, int count, real *restrict z, real *restrict g) {
    if (activation == SILU)
        for (int i = 0; i < count; i++) {
            real s = sigmoid(z[i]), y = z[i] * s;
            g[i] *= s + y * (1 - s);
            z[i] = y;
        }
    else
        for (int i = 0; i < count; i++) {
            real s = sigmoid(z[i]);
            g[i] *= s * (1 - s);
            z[i] = s;
        }
}

static void add_rows(int rows, int width, const real *restrict row, real *restrict to) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < width; j++) to[(long)i * width + j] += row[j];
}

static void set_rows(int rows, int width, const real *restrict row, real *restrict to) {
    for (int i = 0; i < rows; i++) memcpy(to + (long)i * width, row, sizeof(real) * width);
}

static void add_scaled(int count, real by, const real *restrict x, real *restrict to) {
    for (int i = 0; i < count; i++) to[i] += by * x[i];
}

static void sum_rows(int rows, int width, const real *restrict x, real *restrict sum) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < width; j++) sum[j] += x[(long)i * width + j];
}

static double dot(int rows, int width, const real *restrict x, const real *restrict y) {
    double all = 0;
    for (int i = 0; i < rows; i++) {
        real row = 0;
        for (int j = 0; j < width; j++) row += x[(long)i * width + j] * y[(long)i * width + j];
        all += row;
    }
    return all;
}

/* copy rows of a caller's array into a tile, padded with zeros, and back */
static void load(int rows, int all, int width, int W, const real *from, real *tile) {
    for (int i = 0; i < all; i++) {
        int filled = from && i < rows ? width : 0;
        memcpy(tile + (long)i * W, from ? from + (long)i * width : tile, sizeof(real) * filled);
        memset(tile + (long)i * W + filled, 0, sizeof(real) * (W - filled));
    }
}

static void store(int rows, int width, int W, const real *tile, real *to) {
    if (to)
        for (int i = 0; i < rows; i++) memcpy(to + (long)i * width, tile + (long)i * W, sizeof(real) * width);
}

static const real *at(const real *x, long row, int width) { return x ? x + row * width : NULL; }

static void forward_tile(const Motion *m, const Packed *p, int rows, const real *q, const real *k, real *q_out, real *k_out,
                         real *memory) {
    int all = (rows + DOWN - 1) / DOWN * DOWN, W = p->W, M = p->M;
    real *Q = memory, *K = Q + TILE * W, *Z = K + TILE * W;
    load(rows, all, m->width, W, q, Q);
    load(rows, all, m->width, W, k, K);
    for (int step = 0; step < m->steps; step++) {
        if (m->coefficients[step] != 0) add_scaled(all * W, (real)(m->coefficients[step] * m->dt), K, Q);
        set_rows(all, M, p->bias, Z);
        add_product(all, M, m->width, Q, W, 1, p->inner, M, Z, M);
        activate(m->activation, all * M, Z);
        add_rows(all, W, p->shift, K);
        add_product(all, W, m->hidden, Z, M, 1, p->outer, W, K, W);
    }
    if (m->coefficients[m->steps] != 0) add_scaled(all * W, (real)(m->coefficients[m->steps] * m->dt), K, Q);
    store(rows, m->width, W, Q, q_out);
    store(rows, m->width, W, K, k_out);
}

int NAME(drift_kick)(long rows, int width, int hidden, int activation, int steps, int threads, double dt,
                     const double *coefficients, const real *w1, const real *b1, const real *w2, const real *b2,
                     const real *q,
                    const real *k, real *q_out, real *k_out) {
    Motion m = {rows, width, hidden, activation, steps, coefficients, dt, w1, b1, w2, b2};
    Packed p;
    if (pack(&m, &p)) return 1;
    long tiles = (rows + TILE - 1) / TILE;
    size_t each = (size_t)TILE * (2 * p.W + p.M);
    real *memory = aligned(each * threads);
    if (memory) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (int thread = 0; thread < threads; thread++)
            for (long tile = tiles * thread / threads; tile < tiles * (thread + 1) / threads; tile++) {
                long first = tile * TILE, size = (long)width;
                int now = rows - first < TILE ? (int)(rows - first) : TILE;
                forward_tile(&m, &p, now, q + first * size, k + first * size, q_out ? q_out + first * size : NULL,
                             k_out + first * size, memory + each * thread);
            }
    }
    free(memory);
    free(p.memory);
    return memory == NULL;
}

/* y[i] += by * (bias[i] + sum_j matrix[i, j] x[j]), DOWN rows at a time, for independent sums */
static void add_affine(int rows, int columns, const real *matrix, const real *bias, const real *x, real by, real *y) {
    typedef real loose __attribute__((vector_size(BYTES), aligned(sizeof(real))));
    for (int first = 0; first < rows; first += DOWN) {
        vector sums[DOWN] = {{0}};
        real sum[DOWN] = {0};
        const real *row[DOWN];
        for (int i = 0; i < DOWN; i++) row[i] = matrix + (long)(first + i < rows ? first + i : rows - 1) * columns;
        int j = 0;
        for (; j + LANES <= columns; j += LANES) {
            loose at = *(const loose *)(x + j);
#pragma GCC unroll 4
            for (int i = 0; i < DOWN; i++) sums[i] += *(const loose *)(row[i] + j) * at;
        }
        for (; j < columns; j++)
            for (int i = 0; i < DOWN; i++) sum[i] += row[i][j] * x[j];
        for (int i = 0; i < DOWN; i++) sum[i] += total(sums[i]);
        for (int i = 0; i < DOWN && first + i < rows; i++) y[first + i] += by * (bias[first + i] + sum[i]);
    }
}

/* the same motion for a few rows, as in decoding: without packing and threads */
int NAME(drift_kick_few)(long rows, int width, int hidden, int activation, int steps, int threads, double dt,
                     const double *coefficients, const real *w1, const real *b1, const real *w2, const real *b2,
                     const real *q,
                        const real *k, real *q_out, real *k_out) {
    (void)threads;
    real *memory = aligned((size_t)width + hidden);
    if (!memory) return 1;
    for (long row = 0; row < rows; row++) {
        real *Q = q_out ? q_out + row * width : memory, *K = k_out + row * width, *Z = memory + width;
        memmove(Q, q + row * width, sizeof(real) * width); /* in place if the caller wishes */
        memmove(K, k + row * width, sizeof(real) * width);
        for (int step = 0; step <= steps; step++) {
            if (coefficients[step] != 0) add_scaled(width, (real)(coefficients[step] * dt), K, Q);
            if (step == steps) break;
            memset(Z, 0, sizeof(real) * hidden);
            add_affine(hidden, width, w1, b1, Q, 1, Z);
            activate(activation, hidden, Z);
            add_affine(width, hidden, w2, b2, Z, (real)dt, K);
        }
    }
    free(memory);
    return 0;
}

typedef struct { /* the sums of one thread, padded */
    real *inner, *bias, *outer, *shift;
    double dt;
} Sums;

static void backward_tile(const Motion *m, const Packed *p, int rows, int drift, const real *q, const real *k,
                          const real *gq, const real *gk, real *gq_out, real *gk_out, real *memory, Sums *sums) {
    int all = (rows + DOWN - 1) / DOWN * DOWN, W = p->W, M = p->M;
    real *Q = memory, *K = Q + TILE * W, *GQ = K + TILE * W, *GK = GQ + TILE * W, *Z = GK + TILE * W, *GZ = Z + TILE * M;
    load(rows, all, m->width, W, q, Q);
    load(rows, all, m->width, W, k, K);
    load(rows, all, m->width, W, gq, GQ);
    load(rows, all, m->width, W, gk, GK);
    for (int step = m->steps; step >= 0; step--) {
        if (step < m->steps) {
            set_rows(all, M, p->bias, Z);
            add_product(all, M, m->width, Q, W, 1, p->inner, M, Z, M);
            memset(GZ, 0, sizeof(real) * all * M);
            add_product(all, M, m->width, GK, W, 1, p->outer_back, M, GZ, M);
            activate_back(m->activation, all * M, Z, GZ);
            if (step >= drift) {
                add_product(all, W, m->hidden, Z, M, 1, p->undo, W, K, W);
                for (int i = 0; i < all; i++) add_scaled(W, -1, p->shift, K + (long)i * W);
            }
            add_product(M, W, rows, GZ, 1, M, Q, W, sums->inner, W);
            add_product(W, M, rows, GK, 1, W, Z, M, sums->outer, M);
            sum_rows(rows, M, GZ, sums->bias);
            sum_rows(rows, W, GK, sums->shift);
            add_product(all, W, m->hidden, GZ, M, 1, p->inner_back, W, GQ, W);
        }
        if (m->coefficients[step] != 0) {
            real by = (real)(m->coefficients[step] * m->dt);
            sums->dt += m->coefficients[step] * dot(rows, W, GQ, K);
            add_scaled(all * W, -by, K, Q);
            add_scaled(all * W, by, GQ, GK);
        }
    }
    store(rows, m->width, W, GQ, gq_out);
    store(rows, m->width, W, GK, gk_out);
}

/* gradients: gq and gk per row; `sums` holds those of W1, b1, W2, b2 and dt */
int NAME(drift_kick_backward)(long rows, int width, int hidden, int activation, int steps, int threads, double dt,
                     const double *coefficients, const real *w1, const real *b1, const real *w2, const real *b2,
                     const real *q,
                             const real *k, const real *gq, const real *gk, real *gq_out, real *gk_out, real *sums) {
    Motion m = {rows, width, hidden, activation, steps, coefficients, dt, w1, b1, w2, b2};
    Packed p;
    if (pack(&m, &p)) return 1;
    int drift = 0; /* the first drift: kicks after it are undone, because it needs the key before them */
    while (drift < steps && coefficients[drift] == 0) drift++;
    long tiles = (rows + TILE - 1) / TILE;
    size_t matrix = (size_t)p.W * p.M, own = 2 * matrix + p.W + p.M, each = (size_t)TILE * (4 * p.W + 2 * p.M) + own;
    real *memory = aligned(each * threads);
    Sums *all = calloc(threads, sizeof(Sums));
    int failed = !memory || !all;
    if (!failed) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (int thread = 0; thread < threads; thread++) {
            real *mine = memory + each * thread;
            Sums s = {mine, mine + matrix, mine + matrix + p.M, mine + 2 * matrix + p.M, 0};
            for (long tile = tiles * thread / threads; tile < tiles * (thread + 1) / threads; tile++) {
                long first = tile * TILE, size = (long)width;
                int now = rows - first < TILE ? (int)(rows - first) : TILE;
                backward_tile(&m, &p, now, drift, at(q, first, width), at(k, first, width), at(gq, first, width),
                              at(gk, first, width), gq_out + first * size, gk_out ? gk_out + first * size : NULL,
                              mine + own, &s);
            }
            all[thread] = s;
        }
        real *gw1 = sums, *gb1 = gw1 + (size_t)hidden * width, *gw2 = gb1 + hidden, *gb2 = gw2 + (size_t)width * hidden;
        double gdt = 0;
        memset(sums, 0, sizeof(real) * (2 * (size_t)width * hidden + width + hidden + 1));
        for (int thread = 0; thread < threads; thread++) {
            Sums s = all[thread];
            gdt += s.dt;
            for (int j = 0; j < hidden; j++) {
                gb1[j] += s.bias[j];
                for (int i = 0; i < width; i++) {
                    gw1[(size_t)j * width + i] += s.inner[(size_t)j * p.W + i];
                    gw2[(size_t)i * hidden + j] += s.outer[(size_t)i * p.M + j];
                }
            }
            for (int i = 0; i < width; i++) gb2[i] += s.shift[i];
        }
        for (size_t i = 0; i < (size_t)width * hidden; i++) { /* these are the gradients of dt W2 and dt b2 */
            gdt += (double)gw2[i] * w2[i];
            gw2[i] *= (real)dt;
        }
        for (int i = 0; i < width; i++) {
            gdt += (double)gb2[i] * b2[i];
            gb2[i] *= (real)dt;
        }
        gb2[width] = (real)gdt;
    }
    free(memory);
    free(all);
    free(p.memory);
    return failed;
}
