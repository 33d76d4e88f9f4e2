/* Building blocks of delta_rule.c: chunks, their tiles, and triangular products and solves.

   Matrices of a chunk have one row per token, padded to whole groups of DOWN; leading dimensions K, V and T (tokens of a
   chunk) are padded to whole vectors. X and Q are stacked, so that products with both are one product. */

#include "vector_rows.h"

enum { CHECKPOINT_CHUNKS = 16, MAX_CHUNK = 128, MAX_KEY_WIDTH = 256 }; /* chunks between two saved states */
#define MIN_LOG_DECAY (-1000.0) /* a log decay at which nothing is left in either precision */

typedef struct {
    long rows, tokens;
    int heads, key, value, chunk, K, V, T;
    int most; /* heads processed together: as many as have their states in the cache */
    double scale;
    const real *q, *k, *v, *beta; /* [rows, tokens, heads, ...] */
    const real *log_alpha, *channel_log_alpha; /* a decay per head or per key channel; one of them or both are null */
    const real *x, *lam; /* the erase direction, or lambda in x = k + lambda q; both null if x is k */
    Swaps swaps;
} Rule;

typedef struct { /* one chunk of one head: its position and gates */
    long row, first; /* the first of its tokens */
    int head, count, all; /* tokens, and rows of its tiles */
    double G[MAX_CHUNK];
    real beta[MAX_CHUNK], lam[MAX_CHUNK], decay[MAX_CHUNK], rest[MAX_CHUNK], last; /* e^G, e^(G_C - G), e^G_C */
} Chunk;

static Rule rule(long rows, long tokens, int heads, int key, int value, int chunk, double scale) {
    Rule r = {.rows = rows, .tokens = tokens, .heads = heads, .key = key, .value = value, .chunk = chunk, .scale = scale};
    r.K = padded(grouped(key)), r.V = padded(value), r.T = padded(grouped(chunk));
    long many = (1L << 18) / ((long)sizeof(real) * r.K * r.V);
    r.most = many < 1 ? 1 : many < heads ? (int)many : heads;
    r.swaps = swaps();
    return r;
}

/* heads are counted across rows: the end of the group of heads of the same row that begins with `one` */
static long together(const Rule *r, long one, long end) {
    long next = one + r->most, row = (one / r->heads + 1) * r->heads;
    next = next < row ? next : row;
    return next < end ? next : end;
}

static long place(const Rule *r, long row, int head, long token) { return (row * r->tokens + token) * r->heads + head; }

static Chunk load_gates(const Rule *r, long row, int head, long number) {
    Chunk c = {.row = row, .head = head, .first = number * r->chunk, .last = 1};
    long left = r->tokens - c.first;
    c.count = left < r->chunk ? (int)left : r->chunk;
    c.all = grouped(c.count);
    double sum = 0;
    for (int i = 0; i < padded(c.all); i++) {
        long at = place(r, row, head, c.first + i);
        int is_token = i < c.count;
        c.beta[i] = is_token ? r->beta[at] : 0;
        c.lam[i] = is_token && r->lam ? r->lam[at] : 0;
        c.decay[i] = c.rest[i] = 1;
        double decay = is_token && r->log_alpha ? r->log_alpha[at] : 0;
        c.G[i] = sum += decay < MIN_LOG_DECAY ? MIN_LOG_DECAY : decay; /* larger sums would cancel later */
    }
    if (r->log_alpha) {
        for (int i = 0; i < c.all; i++) {
            c.decay[i] = NAME(exponential)((real)c.G[i]);
            c.rest[i] = NAME(exponential)((real)(sum - c.G[i]));
        }
        c.last = NAME(exponential)((real)sum);
    }
    return c;
}

/* copy rows of a caller's array into a tile, padded with zeros, and back */
static void load(const Rule *r, const Chunk *c, const real *from, int width, int W, real *tile) {
    long stride = (long)r->heads * width;
    from += place(r, c->row, c->head, c->first) * width;
    for (int i = 0; i < c->all; i++, tile += W) {
        int filled = i < c->count ? width : 0;
        if (filled) copy(width, from + i * stride, tile);
        for (int j = filled; j < W; j++) tile[j] = 0;
    }
}

static void store(const Rule *r, const Chunk *c, const real *tile, int width, int W, real *to) {
    long stride = (long)r->heads * width;
    to += place(r, c->row, c->head, c->first) * width;
    for (int i = 0; i < c->count; i++) copy(width, tile + (long)i * W, to + i * stride);
}

/* prefetch a token's row: rows are too far stride for the hardware prefetcher. Inline, since a compiler may remove a call
   without effects; a few at a time, since the number of outstanding loads is limited. */
static inline __attribute__((always_inline)) void prefetch(const Rule *r, const Chunk *c, int head, long token,
                                                        const real *from, int width, const int is_write) {
    enum { LINE = 64 / sizeof(real) };
    if (!from || token < 0 || token >= r->tokens) return;
    const real *at = from + place(r, c->row, head, token) * width;
    for (int j = 0; j < width; j += LINE) is_write ? __builtin_prefetch(at + j, 1, 2) : __builtin_prefetch(at + j, 0, 2);
}

/* rows per product with a triangle: fewer rows skip more zeros, more rows use the registers better */
static int step(int columns, int left) {
    int rows = columns < ACROSS * LANES ? HIGH : DOWN;
    return rows < left ? rows : left;
}

/* c += a b for a lower triangle a, or c += a^T b (add_upper), skipping the zeros by groups of rows */
static void add_lower(int rows, int columns, const real *a, long lda, const real *b, int ldb, real *c, int ldc) {
    for (int i = 0, now; i < rows; i += now) {
        now = step(columns, rows - i);
        add_product(now, columns, i + now, a + i * lda, lda, 1, b, ldb, c + (long)i * ldc, ldc);
    }
}

static void add_upper(int rows, int columns, const real *a, long lda, const real *b, int ldb, real *c, int ldc) {
    for (int i = 0, now; i < rows; i += now) {
        now = step(columns, rows - i);
        add_product(now, columns, rows - i, a + i * lda + i, 1, lda, b + (long)i * ldb, ldb, c + (long)i * ldc, ldc);
    }
}

/* scores of the chunk's tokens: two stacked matrices times one, up to the vectors that hold the diagonal */
static void scores(const Rule *r, const Chunk *c, int depth, const real *a, int lda, const real *b, real *to) {
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < c->all; i += HIGH) {
            int rows = c->all - i < HIGH ? c->all - i : HIGH;
            long at = (long)half * c->all + i;
            product(rows, padded(i + rows), depth, a + at * lda, lda, 1, b, r->T, to + at * r->T, r->T);
        }
}

/* D: e^(G_i - G_j), optionally times beta_j */
static void decay_matrix(const Rule *r, const Chunk *c, int by_beta, real *restrict D) {
    for (int i = 0; i < c->all; i++) {
        int some = padded(i + 1);
        real *restrict row = D + (long)i * r->T;
        if (r->log_alpha) {
            double G = c->G[i];
            for (int j = 0; j < some; j++) row[j] = NAME(exponential)((real)(G - c->G[j]));
        } else
            for (int j = 0; j < some; j++) row[j] = 1;
        if (by_beta)
            for (int j = 0; j < some; j++) row[j] *= c->beta[j];
    }
}

/* multiply the scores by D and a factor; set the diagonal of M and everything above both diagonals to zero */
static void apply_decays(const Rule *r, const Chunk *c, const real *D, real m, real p, real *M, real *P) {
    int T = r->T;
    for (int i = 0; i < c->all; i++) {
        real *mi = M + (long)i * T, *pi = P + (long)i * T;
        const real *di = D + (long)i * T;
        int edge = i / LANES * LANES;
        EACH(j, edge) {
            AT(mi + j) *= m * OF(di + j);
            AT(pi + j) *= p * OF(di + j);
        }
        AT(mi + edge) = (vector)((Lanes)(AT(mi + edge) * m * OF(di + edge)) & r->swaps.below[i - edge]);
        AT(pi + edge) = (vector)((Lanes)(AT(pi + edge) * p * OF(di + edge)) & r->swaps.until[i - edge]);
        for (int j = edge + LANES; j < T; j += LANES) AT(mi + j) = AT(pi + j) = (vector){0};
    }
}

/* forward substitution in DOWN rows: x[i] += sum_{j < i} a[i, j] x[j]; a[i, j] is a[i * ai + j * aj] */
static void substitute(int columns, const real *a, long ai, long aj, real *x, long ldx) {
    EACH(l, columns) {
        vector row[DOWN];
#pragma GCC unroll 4
        for (int i = 0; i < DOWN; i++) {
            row[i] = AT(x + i * ldx + l);
#pragma GCC unroll 4
            for (int j = 0; j < i; j++) row[i] += a[i * ai + j * aj] * row[j];
            AT(x + i * ldx + l) = row[i];
        }
    }
}

static void load_keys(const Rule *r, const Chunk *c, real *keys, real *XQ, real *KT) {
    int K = r->K;
    real *Q = XQ + (long)c->all * K;
    load(r, c, r->k, r->key, K, keys);
    load(r, c, r->q, r->key, K, Q);
    if (r->x)
        load(r, c, r->x, r->key, K, XQ);
    else
        for (int i = 0; i < c->all; i++)
            for (int j = 0; j < K; j++) XQ[(long)i * K + j] = keys[(long)i * K + j] + c->lam[i] * Q[(long)i * K + j];
    transpose(&r->swaps, c->all, r->key, keys, K, KT, r->T);
}

#include "channel_decay.h"

/* to = e^G_C H, whose rows are key channels */
static void decay_state(const Rule *r, const Chunk *c, const Channels *d, const real *H, real *to) {
    if (r->channel_log_alpha)
        for (int i = 0; i < r->key; i++) scaled(r->V, d->decay[(long)(c->all - 1) * r->K + i], H + (long)i * r->V, to + (long)i * r->V);
    else if (r->log_alpha || to != H)
        scaled(r->K * r->V, c->last, H, to);
}

/* to = e^G_C H + K'^T N with K' = diag(e^(G_C - G) beta) K, which is stored in `keys` */
static void write_state(const Rule *r, const Chunk *c, const Channels *d, real *keys, const real *N, const real *H, real *to) {
    for (int i = 0; i < c->all; i++) scale(r->K, c->rest[i] * c->beta[i], keys + (long)i * r->K);
    if (r->channel_log_alpha) multiply_rows(c->all * r->K, d->rest, keys);
    decay_state(r, c, d, H, to);
    add_product(grouped(r->key), r->V, c->count, keys, 1, r->K, N, r->V, to, r->V);
}
