/* The delta rule chunk by chunk, there and back: the formulas of qkflow/ops/delta/chunked.py, for one row and head at a
   time, so that a chunk and the memory H = S^T (k x v) stay in the cache.

   Rows and heads are independent and each belongs to one thread: results do not depend on the number of threads. The
   forward pass keeps the errors N and a memory every MARKS chunks; the backward pass makes the memories between again,
   which is one product a chunk. Matrices of a chunk have C rows, padded to whole groups of DOWN; leading dimensions K, V
   and T (of a chunk's tokens) are padded to whole vectors. X and Q lie one behind the other, so that what happens to
   both is one product. */

#include "tiles.h"

enum { NO_MEMORY = 1, GATES = 2 };
#define HUGE_FINITE ((real)(sizeof(real) == 4 ? 3.4028234663852886e38 : 1.7976931348623157e308))
enum { MARKS = 16, MOST = 128 }; /* chunks between two memories that are kept; tokens of a chunk */

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

typedef struct { /* of one chunk: its tokens, and what is read from its gates */
    long first; /* token */
    int count, all;
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

static int groups_of(int n) { return (n + DOWN - 1) / DOWN * DOWN; }

static Rule rule(long rows, long tokens, int heads, int key, int value, int chunk, double scale) {
    Rule r = {.rows = rows, .tokens = tokens, .heads = heads, .key = key, .value = value, .chunk = chunk, .scale = scale};
    r.K = padded(groups_of(key)), r.V = padded(value), r.T = padded(groups_of(chunk));
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

static long tokens_at(const Rule *r, long row, int head, long token) {
    return (row * r->tokens + token) * r->heads + head;
}

static Chunk gates(const Rule *r, long row, int head, long number) {
    Chunk c = {.first = number * r->chunk, .last = 1};
    long left = r->tokens - c.first;
    c.count = left < r->chunk ? (int)left : r->chunk;
    c.all = groups_of(c.count);
    double sum = 0;
    for (int i = 0; i < padded(c.all); i++) {
        long at = tokens_at(r, row, head, c.first + i);
        int there = i < c.count;
        c.beta[i] = there ? r->beta[at] : 0;
        c.lam[i] = there && r->lam ? r->lam[at] : 0;
        c.decay[i] = c.rest[i] = 1;
        c.G[i] = sum += there && r->log_alpha ? r->log_alpha[at] : 0;
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
static void load(const Rule *r, long row, int head, const Chunk *c, const real *from, int width, int W, real *tile) {
    long apart = (long)r->heads * width;
    from += tokens_at(r, row, head, c->first) * width;
    for (int i = 0; i < c->all; i++, tile += W) {
        int there = i < c->count ? width : 0;
        if (there) copy(width, from + i * apart, tile);
        for (int j = there; j < W; j++) tile[j] = 0;
    }
}

static void store(const Rule *r, long row, int head, const Chunk *c, const real *tile, int width, int W, real *to) {
    long apart = (long)r->heads * width;
    to += tokens_at(r, row, head, c->first) * width;
    for (int i = 0; i < c->count; i++) copy(width, tile + (long)i * W, to + i * apart);
}

/* ask for a token's row before it is wanted: rows lie too far apart for the processor to guess. Inline, since a compiler
   may take a call that only asks for one that does nothing; a few at a time, since no more can be under way. */
static inline __attribute__((always_inline)) void fetch(const Rule *r, long row, int head, long token, const real *from,
                                                        int width, const int change) {
    enum { LINE = 64 / sizeof(real) };
    if (!from || token < 0 || token >= r->tokens) return;
    const real *at = from + tokens_at(r, row, head, token) * width;
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
        for (int i = 0; i < c->all; i += LANES * DOWN) {
            long at = (long)half * c->all + i;
            int now = c->all - i < LANES * DOWN ? c->all - i : LANES * DOWN;
            for (int l = 0; l < now; l += HIGH) {
                int rows = now - l < HIGH ? now - l : HIGH;
                product(rows, padded(i + l + rows), depth, a + (at + l) * lda, lda, 1, b, r->T, to + (at + l) * r->T, r->T);
            }
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

static void load_keys(const Rule *r, long row, int head, const Chunk *c, real *keys, real *XQ, real *KT) {
    int K = r->K;
    real *Q = XQ + (long)c->all * K;
    load(r, row, head, c, r->k, r->key, K, keys);
    load(r, row, head, c, r->q, r->key, K, Q);
    for (int i = 0; i < c->all; i++)
        for (int j = 0; j < K; j++) XQ[(long)i * K + j] = keys[(long)i * K + j] + c->lam[i] * Q[(long)i * K + j];
    transpose(&r->swaps, c->all, r->key, keys, K, KT, r->T);
}

/* to = e^G_C H + K'^T N with K' = diag(e^(G_C - G) beta) K, which is left in `keys` */
static void write(const Rule *r, const Chunk *c, real *keys, const real *N, const real *H, real *to) {
    for (int i = 0; i < c->all; i++) scale(r->K, c->rest[i] * c->beta[i], keys + (long)i * r->K);
    if (r->log_alpha || to != H) scaled(r->K * r->V, c->last, H, to);
    add_product(groups_of(r->key), r->V, c->count, keys, 1, r->K, N, r->V, to, r->V);
}

/* whether a gate is out of range or no number: see qkflow/ops/delta/gates.py */
static int out_of_range(long count, const real *beta, const real *log_alpha, const real *lam) {
    int wrong = 0;
    for (long i = 0; i < count; i++) wrong |= !(beta[i] >= 0 && beta[i] <= 2);
    for (long i = 0; log_alpha && i < count; i++) wrong |= !(log_alpha[i] >= -HUGE_FINITE && log_alpha[i] <= 0);
    for (long i = 0; lam && i < count; i++) wrong |= !(lam[i] >= -HUGE_FINITE && lam[i] <= HUGE_FINITE);
    return wrong;
}

typedef struct {
    const real *state;
    real *o, *final, *errors, *marks; /* the last two only if a backward pass will come */
} Results;

static size_t forward_memory(const Rule *r) {
    size_t C = r->T;
    return C * r->K * 3 + (size_t)r->K * r->T + C * r->V * 3 + C * C * 3;
}

/* `then` is the head, and `later` the tokens further on, that come next */
static void forward_chunk(const Rule *r, long row, int head, long number, int then, int later, const Results *to, real *H,
                          real *memory) {
    int K = r->K, V = r->V, T = r->T;
    real *keys = memory, *XQ = keys + (long)T * K, *KT = XQ + 2L * T * K, *N = KT + (long)K * T, *RO = N + (long)T * V,
         *MP = RO + 2L * T * V, *D = MP + 2L * T * T;
    Chunk c = gates(r, row, head, number);
    real *M = MP, *P = MP + (long)c.all * T, *O = RO + (long)c.all * V;
    if (to->marks && number % MARKS == 0) {
        long groups = (r->tokens + (long)r->chunk * MARKS - 1) / ((long)r->chunk * MARKS);
        real *mark = to->marks + ((row * r->heads + head) * groups + number / MARKS) * r->key * r->value;
        for (int i = 0; i < r->key; i++) memcpy(mark + (long)i * r->value, H + (long)i * V, sizeof(real) * r->value);
    }
    load_keys(r, row, head, &c, keys, XQ, KT);
    load(r, row, head, &c, r->v, r->value, V, N);
    product(2 * c.all, V, r->key, XQ, K, 1, H, V, RO, V);
    for (int i = 0; i < c.all; i++) {
        add_scaled(V, -c.decay[i], RO + (long)i * V, N + (long)i * V);
        scale(V, (real)r->scale * c.decay[i], O + (long)i * V);
        fetch(r, row, head, c.first + i, to->o, r->value, 1);
        fetch(r, row, head, c.first + i, to->errors, r->value, 1);
    }
    pairs(r, &c, r->key, XQ, K, KT, MP);
    decays(r, &c, 1, D);
    weigh(r, &c, D, -1, (real)r->scale, M, P);
    for (int i = 0; i < c.all; i += DOWN) { /* N = (I + M diag(beta))^-1 N, a group of rows after the other */
        for (int l = 0; l < DOWN; l++) {
            fetch(r, row, then, c.first + later + i + l, r->k, r->key, 0);
            fetch(r, row, then, c.first + later + i + l, r->q, r->key, 0);
            fetch(r, row, then, c.first + later + i + l, r->v, r->value, 0);
        }
        if (i) add_product(DOWN, V, i, M + (long)i * T, T, 1, N, V, N + (long)i * V, V);
        chain(V, M + (long)i * T + i, T, 1, N + (long)i * V, V);
    }
    add_lower(c.all, V, P, T, N, V, O, V);
    write(r, &c, keys, N, H, H);
    store(r, row, head, &c, O, r->value, V, to->o);
    if (to->errors) store(r, row, head, &c, N, r->value, V, to->errors);
}

/* some heads of a row side by side, as they lie in memory */
static void forward_heads(const Rule *r, long row, int first, int many, const Results *to, real *memory) {
    long size = (long)r->key * r->value, matrix = (long)r->K * r->V, at = (row * r->heads + first) * size;
    memset(memory, 0, sizeof(real) * matrix * many);
    for (int i = 0; i < many && to->state; i++)
        transpose(&r->swaps, r->value, r->key, to->state + at + i * size, r->key, memory + i * matrix, r->V);
    for (long number = 0; number * r->chunk < r->tokens; number++)
        for (int i = 0; i < many; i++)
            forward_chunk(r, row, first + i, number, first + (i + 1) % many, i + 1 < many ? 0 : r->chunk, to,
                          memory + i * matrix, memory + r->most * matrix);
    for (int i = 0; i < many; i++)
        transpose(&r->swaps, r->key, r->value, memory + i * matrix, r->V, to->final + at + i * size, r->key);
}

int NAME(delta_forward)(long rows, long tokens, int heads, int key, int value, int chunk, double scale, int threads,
                        const real *q, const real *k, const real *v, const real *beta, const real *log_alpha,
                        const real *lam, const real *state, real *o, real *final, real *errors, real *marks) {
    Rule r = rule(rows, tokens, heads, key, value, chunk, scale);
    r.q = q, r.k = k, r.v = v, r.beta = beta, r.log_alpha = log_alpha, r.lam = lam;
    Results to = {state, o, final, errors, marks};
    if (out_of_range(rows * tokens * heads, beta, log_alpha, lam)) return GATES;
    long tasks = rows * heads;
    if (threads > tasks) threads = (int)tasks;
    size_t each = (forward_memory(&r) + (size_t)r.most * r.K * r.V + 15) / 16 * 16;
    real *memory = aligned(each * threads);
    if (!memory) return NO_MEMORY;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int thread = 0; thread < threads; thread++)
        for (long one = tasks * thread / threads, end = tasks * (thread + 1) / threads, next; one < end; one = next) {
            next = together(&r, one, end);
            forward_heads(&r, one / heads, (int)(one % heads), (int)(next - one), &to, memory + each * thread);
        }
    free(memory);
    return 0;
}

static size_t backward_memory(const Rule *r) {
    size_t C = r->T, K = r->K, V = r->V;
    return C * K * 6 + C * V * 7 + C * (K > V ? K : V) + C * C * 5 + K * V * (MARKS + 3);
}

typedef struct {
    const real *go, *gfinal, *o, *final, *errors, *marks;
    real *gq, *gk, *gv, *gbeta, *glog_alpha, *glam, *gstate;
} Gradients;

/* MARKS chunks, from the last to the first */
static void backward_group(const Rule *r, long row, int head, long group, const Gradients *g, real *gH, real *memory) {
    int K = r->K, V = r->V, T = r->T, deep = groups_of(r->key);
    long matrix = (long)K * V, chunks = (r->tokens + r->chunk - 1) / r->chunk, groups = (chunks + MARKS - 1) / MARKS;
    real *keys = memory, *XQ = keys + (long)T * K, *gXQ = XQ + 2L * T * K, *gK = gXQ + 2L * T * K, *kept = gK,
         *N = gK + (long)T * K, *U = N + (long)T * V, *hat = U + (long)T * V, *gNO = hat + (long)T * V,
         *W = gNO + 2L * T * V, *turned = W + 2L * T * V, *KT = turned, *UT = turned, *spare = turned,
         *MP = turned + (long)T * (K > V ? K : V), *gMP = MP + 2L * T * T, *D = gMP + 2L * T * T, *HT = D + (long)T * T,
         *gHT = HT + matrix, *H = gHT + matrix; /* MARKS + 1 of them */
    long begin = group * MARKS, end = begin + MARKS < chunks ? begin + MARKS : chunks;
    memset(H, 0, sizeof(real) * matrix);
    for (int i = 0; i < r->key; i++)
        memcpy(H + (long)i * V, g->marks + (((row * r->heads + head) * groups + group) * r->key + i) * r->value, sizeof(real) * r->value);
    for (long number = begin; number < end; number++) { /* the memories of the group, once more */
        Chunk c = gates(r, row, head, number);
        real *next = H + (number - begin + 1) * matrix;
        load(r, row, head, &c, r->k, r->key, K, keys);
        load(r, row, head, &c, g->errors, r->value, V, N);
        for (int i = 0; i < c.count; i++) {
            fetch(r, row, head, c.first + r->chunk + i, r->k, r->key, 0);
            fetch(r, row, head, c.first + r->chunk + i, g->errors, r->value, 0);
        }
        write(r, &c, keys, N, next - matrix, next);
    }
    for (long number = end - 1; number >= begin; number--) {
        Chunk c = gates(r, row, head, number);
        int all = c.all;
        real *before = H + (number - begin) * matrix, *after = before + matrix, *Q = XQ + (long)all * K,
             *M = MP, *P = MP + (long)all * T, *gM = gMP, *gP = gMP + (long)all * T, *gV = gNO,
             *gO = gNO + (long)all * V, *gX = gXQ, *gQ = gXQ + (long)all * K;
        load_keys(r, row, head, &c, keys, XQ, KT);
        load(r, row, head, &c, g->errors, r->value, V, N);
        if (g->go)
            load(r, row, head, &c, g->go, r->value, V, gO);
        else
            memset(gO, 0, sizeof(real) * all * V);
        pairs(r, &c, r->key, XQ, K, KT, MP);
        decays(r, &c, 0, D);
        weigh(r, &c, D, -1, (real)r->scale, M, P);
        for (int i = 0; i < all; i++) {
            scaled(V, c.beta[i], N + (long)i * V, U + (long)i * V);
            scaled(K, c.rest[i], keys + (long)i * K, kept + (long)i * K);
            scale(T, c.beta[i], M + (long)i * T);
            fetch(r, row, head, c.first + i, g->glog_alpha ? g->o : NULL, r->value, 0);
            fetch(r, row, head, c.first + i, g->glog_alpha ? r->v : NULL, r->value, 0);
        }
        /* hat = (I + M^T diag(beta))^-1 (P^T gO + K' gH), from the last group of rows to the first */
        product(all, V, r->key, kept, K, 1, gH, V, hat, V);
        add_upper(all, V, P, T, gO, V, hat, V);
        for (int i = all - DOWN; i >= 0; i -= DOWN) {
            int below = i + DOWN;
            for (int l = 0; l < DOWN; l++) {
                fetch(r, row, head, c.first - r->chunk + i + l, r->q, r->key, 0);
                fetch(r, row, head, c.first - r->chunk + i + l, g->go, r->value, 0);
                fetch(r, row, head, c.first + i + l, g->gv, r->value, 1);
            }
            if (below < all)
                add_product(DOWN, V, all - below, M + (long)below * T + i, 1, T, hat + (long)below * V, V,
                            hat + (long)i * V, V);
            int last = i + DOWN - 1; /* rows and columns of M in reverse */
            chain(V, M + (long)last * T + last, -1, -T, hat + (long)last * V, -V);
        }
        for (int i = 0; i < all; i++) {
            scaled(V, c.beta[i], hat + (long)i * V, gV + (long)i * V);
            scaled(V, -c.decay[i], gV + (long)i * V, W + (long)i * V);
            scaled(V, (real)r->scale * c.decay[i], gO + (long)i * V, W + (long)(all + i) * V);
        }
        if (g->glog_alpha) {
            double sum = 0;
            for (int i = 0; i < r->key; i++) sum += dot(V, after + (long)i * V, gH + (long)i * V);
            load(r, row, head, &c, g->o, r->value, V, spare);
            real each[MOST];
            for (int i = 0; i < c.count; i++) each[i] = dot(V, gO + (long)i * V, spare + (long)i * V);
            load(r, row, head, &c, r->v, r->value, V, spare);
            for (int i = c.count - 1; i >= 0; i--) {
                sum += each[i] - dot(V, gV + (long)i * V, spare + (long)i * V);
                g->glog_alpha[tokens_at(r, row, head, c.first + i)] = (real)sum;
            }
        }
        /* gradients of the scores */
        transpose(&r->swaps, all, r->value, U, V, UT, T);
        pairs(r, &c, r->value, gNO, V, UT, gMP);
        weigh(r, &c, D, -1, (real)r->scale, gM, gP);
        /* and what follows from them and from the memory */
        transpose(&r->swaps, deep, r->value, before, V, HT, K);
        transpose(&r->swaps, deep, r->value, gH, V, gHT, K);
        product(2 * all, K, r->value, W, V, 1, HT, K, gXQ, K);
        add_lower(all, K, gM, T, keys, K, gX, K);
        add_lower(all, K, gP, T, keys, K, gQ, K);
        for (int i = 0; i < all; i++) {
            scale(V, c.rest[i], U + (long)i * V);
            fetch(r, row, head, c.first + i, g->gq, r->key, 1);
            fetch(r, row, head, c.first + i, g->gk, r->key, 1);
        }
        product(all, K, r->value, U, V, 1, gHT, K, gK, K);
        add_upper(all, K, gM, T, XQ, K, gK, K);
        add_upper(all, K, gP, T, Q, K, gK, K);
        if (r->log_alpha) scale((int)matrix, c.last, gH);
        add_product(deep, V, 2 * all, XQ, 1, K, W, V, gH, V);
        for (int i = 0; i < c.count; i++) {
            long at = tokens_at(r, row, head, c.first + i);
            add_scaled(K, 1, gX + (long)i * K, gK + (long)i * K);
            if (g->glam) {
                g->glam[at] = dot(K, gX + (long)i * K, Q + (long)i * K);
                add_scaled(K, c.lam[i], gX + (long)i * K, gQ + (long)i * K);
            }
            g->gbeta[at] = dot(V, hat + (long)i * V, N + (long)i * V);
        }
        store(r, row, head, &c, gQ, r->key, K, g->gq);
        store(r, row, head, &c, gK, r->key, K, g->gk);
        store(r, row, head, &c, gV, r->value, V, g->gv);
    }
}

static void backward_heads(const Rule *r, long row, int first, int many, const Gradients *g, real *memory) {
    long size = (long)r->key * r->value, matrix = (long)r->K * r->V, at = (row * r->heads + first) * size;
    memset(memory, 0, sizeof(real) * matrix * many);
    for (int i = 0; i < many && g->gfinal; i++)
        transpose(&r->swaps, r->value, r->key, g->gfinal + at + i * size, r->key, memory + i * matrix, r->V);
    for (long group = (r->tokens - 1) / ((long)r->chunk * MARKS); group >= 0; group--)
        for (int i = 0; i < many; i++)
            backward_group(r, row, first + i, group, g, memory + i * matrix, memory + r->most * matrix);
    for (int i = 0; i < many; i++)
        transpose(&r->swaps, r->key, r->value, memory + i * matrix, r->V, g->gstate + at + i * size, r->key);
}

int NAME(delta_backward)(long rows, long tokens, int heads, int key, int value, int chunk, double scale, int threads,
                         const real *q, const real *k, const real *v, const real *beta, const real *log_alpha,
                         const real *lam, const real *go, const real *gfinal, const real *o, const real *final,
                         const real *errors, const real *marks, real *gq, real *gk, real *gv, real *gbeta,
                         real *glog_alpha, real *glam, real *gstate) {
    Rule r = rule(rows, tokens, heads, key, value, chunk, scale);
    r.q = q, r.k = k, r.v = v, r.beta = beta, r.log_alpha = log_alpha, r.lam = lam;
    Gradients g = {go, gfinal, o, final, errors, marks, gq, gk, gv, gbeta, glog_alpha, glam, gstate};
    long tasks = rows * heads;
    if (threads > tasks) threads = (int)tasks;
    size_t each = (backward_memory(&r) + (size_t)r.most * r.K * r.V + 15) / 16 * 16;
    real *memory = aligned(each * threads);
    if (!memory) return NO_MEMORY;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int thread = 0; thread < threads; thread++)
        for (long one = tasks * thread / threads, end = tasks * (thread + 1) / threads, next; one < end; one = next) {
            next = together(&r, one, end);
            backward_heads(&r, one / heads, (int)(one % heads), (int)(next - one), &g, memory + each * thread);
        }
    free(memory);
    return 0;
}

/* a few tokens, as in decoding: the recurrence itself, along the rows of S as they lie, each read and written once */
int NAME(delta_few)(long rows, long tokens, int heads, int key, int value, double scale, const real *q, const real *k,
                    const real *v, const real *beta, const real *log_alpha, const real *lam, const real *state, real *o,
                    real *final) {
    real x[256];
    if (out_of_range(rows * tokens * heads, beta, log_alpha, lam)) return GATES;
    for (long one = 0; one < rows * heads; one++) {
        const real *from = state ? state + one * key * value : NULL;
        real *S = final + one * key * value;
        for (long token = 0; token < tokens; token++, from = S) {
            long at = (one / heads * tokens + token) * heads + one % heads;
            const real *qi = q + at * key, *ki = k + at * key;
            real alpha = log_alpha ? (real)exp(log_alpha[at]) : 1, mix = lam ? lam[at] : 0;
            for (int j = 0; j < key; j++) x[j] = ki[j] + mix * qi[j];
            for (int i = 0; i < value; i++) {
                const real *s = from ? from + (long)i * key : NULL;
                real *to = S + (long)i * key, found = 0, seen = 0;
                if (s)
                    for (int j = 0; j < key; j++) found += s[j] * x[j];
                real by = beta[at] * (v[at * value + i] - alpha * found);
                for (int j = 0; j < key; j++) {
                    to[j] = (s ? alpha * s[j] : 0) + by * ki[j];
                    seen += to[j] * qi[j];
                }
                o[at * value + i] = (real)scale * seen;
            }
        }
    }
    return 0;
}
