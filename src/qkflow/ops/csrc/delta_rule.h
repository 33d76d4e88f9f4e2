/* The parts of the delta rule's kernel (delta_rule.c): chunks, their tiles, and what is done with triangles of pairs.

   Matrices of a chunk have as many rows as it has tokens, padded to whole groups of DOWN; leading dimensions K, V and T (of
   a chunk's tokens) are padded to whole vectors. X and Q lie one behind the other, so that what happens to both is one
   product. */

#include "gemm_tiles.h"

enum { MARKS = 16, MOST = 128, WIDEST = 256 }; /* chunks between two memories that are kept; tokens of a chunk; keys */
#define NOTHING (-1000.0) /* a log decay of which nothing is left in either precision */

#if defined(__GNUC__) && !defined(__clang__)
enum { SHUFFLES = 1 };
#define SHUFFLE(x, y, places) __builtin_shuffle(x, y, places)
#else
enum { SHUFFLES = 0 };
#define SHUFFLE(x, y, places) (x)
#endif
typedef __typeof__((vector){0} == (vector){0}) Places;
typedef struct { /* how two rows of a square swap their halves, their quarters, ...: what the upper and the lower become */
    Places low[4], high[4];
    Places below[LANES], until[LANES]; /* and masks of the places below the i-th, without and with it */
} Swaps;

typedef struct {
    long rows, tokens;
    int heads, key, value, chunk, K, V, T;
    int most; /* heads that are taken side by side: as many as have their memories in the cache together */
    double scale;
    const real *q, *k, *v, *beta, *log_alpha, *lam; /* [rows, tokens, heads, ...]; the last two may be missing */
    Swaps swaps;
} Rule;

typedef struct { /* of one chunk of one head: where it lies, and what is read from its gates */
    long row, first; /* the first of its tokens */
    int head, count, all; /* tokens, and rows of its tiles */
    double G[MOST];
    real beta[MOST], lam[MOST], decay[MOST], rest[MOST], last; /* e^G, e^(G_C - G), e^G_C */
} Chunk;

static Swaps swaps(void) {
    Swaps s;
    for (int half = LANES / 2, n = 0; half; half /= 2, n++)
        for (int l = 0; l < LANES; l++) {
            s.low[n][l] = l & half ? LANES + l - half : l;
            s.high[n][l] = l & half ? LANES + l : l + half;
        }
    for (int i = 0; i < LANES; i++)
        for (int l = 0; l < LANES; l++) {
            s.below[i][l] = l < i ? -1 : 0;
            s.until[i][l] = l <= i ? -1 : 0;
        }
    return s;
}

static int grouped(int n) { return (n + DOWN - 1) / DOWN * DOWN; }

static Rule rule(long rows, long tokens, int heads, int key, int value, int chunk, double scale) {
    Rule r = {.rows = rows, .tokens = tokens, .heads = heads, .key = key, .value = value, .chunk = chunk, .scale = scale};
    r.K = padded(grouped(key)), r.V = padded(value), r.T = padded(grouped(chunk));
    long many = (1L << 18) / ((long)sizeof(real) * r.K * r.V);
    r.most = many < 1 ? 1 : many < heads ? (int)many : heads;
    r.swaps = swaps();
    return r;
}

/* rows and heads are counted in one: the end of those of the same row from `one` on that are taken together */
static long together(const Rule *r, long one, long end) {
    long next = one + r->most, row = (one / r->heads + 1) * r->heads;
    next = next < row ? next : row;
    return next < end ? next : end;
}

static long place(const Rule *r, long row, int head, long token) { return (row * r->tokens + token) * r->heads + head; }

static Chunk gates(const Rule *r, long row, int head, long number) {
    Chunk c = {.row = row, .head = head, .first = number * r->chunk, .last = 1};
    long left = r->tokens - c.first;
    c.count = left < r->chunk ? (int)left : r->chunk;
    c.all = grouped(c.count);
    double sum = 0;
    for (int i = 0; i < padded(c.all); i++) {
        long at = place(r, row, head, c.first + i);
        int there = i < c.count;
        c.beta[i] = there ? r->beta[at] : 0;
        c.lam[i] = there && r->lam ? r->lam[at] : 0;
        c.decay[i] = c.rest[i] = 1;
        double decay = there && r->log_alpha ? r->log_alpha[at] : 0;
        c.G[i] = sum += decay < NOTHING ? NOTHING : decay; /* more would take the digits of what follows */
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

typedef real loose __attribute__((vector_size(BYTES), aligned(sizeof(real)))); /* a vector that lies anywhere */

static inline void copy(int count, const real *from, real *to) {
    int i = 0;
    for (; i + LANES <= count; i += LANES) *(loose *)(to + i) = *(const loose *)(from + i);
    for (; i < count; i++) to[i] = from[i];
}

/* rows of a caller's array into a tile, zeros where there is none, and back */
static void load(const Rule *r, const Chunk *c, const real *from, int width, int W, real *tile) {
    long apart = (long)r->heads * width;
    from += place(r, c->row, c->head, c->first) * width;
    for (int i = 0; i < c->all; i++, tile += W) {
        int there = i < c->count ? width : 0;
        if (there) copy(width, from + i * apart, tile);
        for (int j = there; j < W; j++) tile[j] = 0;
    }
}

static void store(const Rule *r, const Chunk *c, const real *tile, int width, int W, real *to) {
    long apart = (long)r->heads * width;
    to += place(r, c->row, c->head, c->first) * width;
    for (int i = 0; i < c->count; i++) copy(width, tile + (long)i * W, to + i * apart);
}

/* ask for a token's row before it is wanted: rows lie too far apart for the processor to guess. Inline, since a compiler
   may take a call that only asks for one that does nothing; a few at a time, since no more can be under way. */
static inline __attribute__((always_inline)) void fetch(const Rule *r, const Chunk *c, int head, long token,
                                                        const real *from, int width, const int change) {
    enum { LINE = 64 / sizeof(real) };
    if (!from || token < 0 || token >= r->tokens) return;
    const real *at = from + place(r, c->row, head, token) * width;
    for (int j = 0; j < width; j += LINE) change ? __builtin_prefetch(at + j, 1, 2) : __builtin_prefetch(at + j, 0, 2);
}

/* b[j, i] = a[i, j] */
static void transpose(const Swaps *swaps, int rows, int columns, const real *restrict a, int lda, real *restrict b, int ldb) {
    int i = 0;
    for (; SHUFFLES && i + LANES <= rows; i += LANES) {
        int j = 0;
        for (; j + LANES <= columns; j += LANES) { /* a square: swap its quarters, their quarters, and so on */
            vector x[LANES];
#pragma GCC unroll 16
            for (int l = 0; l < LANES; l++) x[l] = *(const loose *)(a + (long)(i + l) * lda + j);
#pragma GCC unroll 4
            for (int half = LANES / 2, n = 0; half; half /= 2, n++)
#pragma GCC unroll 16
                for (int l = 0; l < LANES; l++)
                    if (!(l & half)) {
                        vector upper = x[l], lower = x[l + half];
                        x[l] = SHUFFLE(upper, lower, swaps->low[n]);
                        x[l + half] = SHUFFLE(upper, lower, swaps->high[n]);
                    }
#pragma GCC unroll 16
            for (int l = 0; l < LANES; l++) *(loose *)(b + (long)(j + l) * ldb + i) = x[l];
        }
        for (; j < columns; j++)
            for (int l = 0; l < LANES; l++) b[(long)j * ldb + i + l] = a[(long)(i + l) * lda + j];
    }
    for (; i < rows; i++)
        for (int j = 0; j < columns; j++) b[(long)j * ldb + i] = a[(long)i * lda + j];
}

/* rows of whole vectors: to = by x, x = by x, to += by x, x . y */
#define EACH(i, count) for (int i = 0; i < (count); i += LANES)
#define AT(x) (*(vector *)(x))
#define OF(x) (*(const vector *)(x))

static inline void scaled(int count, real by, const real *x, real *to) { EACH(i, count) AT(to + i) = by * OF(x + i); }

static inline void scale(int count, real by, real *x) { EACH(i, count) AT(x + i) *= by; }

static inline void add_scaled(int count, real by, const real *x, real *to) { EACH(i, count) AT(to + i) += by * OF(x + i); }

static inline real dot(int count, const real *x, const real *y) {
    vector sum = {0};
    EACH(i, count) sum += OF(x + i) * OF(y + i);
    return total(sum);
}

/* rows to take together in products with triangles: few leave out more of the zeros, many fill the registers better */
static int step(int columns, int left) {
    int rows = columns < ACROSS * LANES ? HIGH : DOWN;
    return rows < left ? rows : left;
}

/* c += a b for a triangle a whose zeros are left out, group by group: row i of c takes columns of a up to i (lower), or
   rows of a from i on (of which it is column i: upper) */
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

/* pairs of the chunk's tokens: two stacked matrices times one, in and below the vectors that hold the diagonal */
static void pairs(const Rule *r, const Chunk *c, int depth, const real *a, int lda, const real *b, real *to) {
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < c->all; i += HIGH) {
            int rows = c->all - i < HIGH ? c->all - i : HIGH;
            long at = (long)half * c->all + i;
            product(rows, padded(i + rows), depth, a + at * lda, lda, 1, b, r->T, to + at * r->T, r->T);
        }
}

/* D: e^(G_i - G_j), times beta_j if so asked */
static void decays(const Rule *r, const Chunk *c, int by_beta, real *restrict D) {
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

/* what `pairs` gives, times D and a factor each; the diagonal of M and what is above either's becomes zero */
static void weigh(const Rule *r, const Chunk *c, const real *D, real m, real p, real *M, real *P) {
    int T = r->T;
    for (int i = 0; i < c->all; i++) {
        real *mi = M + (long)i * T, *pi = P + (long)i * T;
        const real *di = D + (long)i * T;
        int edge = i / LANES * LANES;
        EACH(j, edge) {
            AT(mi + j) *= m * OF(di + j);
            AT(pi + j) *= p * OF(di + j);
        }
        AT(mi + edge) = (vector)((Places)(AT(mi + edge) * m * OF(di + edge)) & r->swaps.below[i - edge]);
        AT(pi + edge) = (vector)((Places)(AT(pi + edge) * p * OF(di + edge)) & r->swaps.until[i - edge]);
        for (int j = edge + LANES; j < T; j += LANES) AT(mi + j) = AT(pi + j) = (vector){0};
    }
}

/* rows of x, one after the other: x[i] += sum_{j < i} a[i, j] x[j] for DOWN of them; a[i, j] lies at a[i * ai + j * aj] */
static void chain(int columns, const real *a, long ai, long aj, real *x, long ldx) {
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
    for (int i = 0; i < c->all; i++)
        for (int j = 0; j < K; j++) XQ[(long)i * K + j] = keys[(long)i * K + j] + c->lam[i] * Q[(long)i * K + j];
    transpose(&r->swaps, c->all, r->key, keys, K, KT, r->T);
}

/* to = e^G_C H + K'^T N with K' = diag(e^(G_C - G) beta) K, which is left in `keys` */
static void write(const Rule *r, const Chunk *c, real *keys, const real *N, const real *H, real *to) {
    for (int i = 0; i < c->all; i++) scale(r->K, c->rest[i] * c->beta[i], keys + (long)i * r->K);
    if (r->log_alpha || to != H) scaled(r->K * r->V, c->last, H, to);
    add_product(grouped(r->key), r->V, c->count, keys, 1, r->K, N, r->V, to, r->V);
}
