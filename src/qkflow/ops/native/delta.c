/* The delta rule chunk by chunk, there and back: the formulas of qkflow/ops/delta/chunked.py, for one row and head at a
   time, so that a chunk and the memory H = S^T (k x v) stay in the cache.

   Rows and heads are independent and each belongs to one thread: results do not depend on the number of threads. The
   forward pass keeps the errors N and a memory every MARKS chunks; the backward pass makes the memories between again,
   which is one product a chunk. Matrices of a chunk have C rows, padded to whole groups of DOWN; leading dimensions K, V
   and T (of a chunk's tokens) are padded to whole vectors. X and Q lie one behind the other, so that what happens to
   both is one product. */

#include "tiles.h"

enum { MARKS = 8 };

typedef struct {
    long rows, tokens;
    int heads, key, value, chunk, K, V, T;
    double scale;
    const real *q, *k, *v, *beta, *log_alpha, *lam; /* [rows, tokens, heads, ...]; the last two may be missing */
} Rule;

typedef struct { /* of one chunk: its tokens, and what is read from its gates */
    long first; /* token */
    int count, all;
    double G[128];
    real beta[128], lam[128], decay[128], rest[128], last; /* e^G, e^(G_C - G), e^G_C */
} Chunk;

static int groups_of(int n) { return (n + DOWN - 1) / DOWN * DOWN; }

static long tokens_at(const Rule *r, long row, int head, long token) {
    return (row * r->tokens + token) * r->heads + head;
}

static Chunk gates(const Rule *r, long row, int head, long number) {
    Chunk c = {.first = number * r->chunk, .last = 1};
    long left = r->tokens - c.first;
    c.count = left < r->chunk ? (int)left : r->chunk;
    c.all = groups_of(c.count);
    double sum = 0;
    for (int i = 0; i < c.all; i++) {
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

static void load(const Rule *r, long row, int head, const Chunk *c, const real *from, int width, int W, real *tile) {
    for (int i = 0; i < c->all; i++) {
        int there = i < c->count ? width : 0;
        memcpy(tile + (long)i * W, from + tokens_at(r, row, head, c->first + i) * width, sizeof(real) * there);
        memset(tile + (long)i * W + there, 0, sizeof(real) * (W - there));
    }
}

static void store(const Rule *r, long row, int head, const Chunk *c, const real *tile, int width, int W, real *to) {
    for (int i = 0; i < c->count; i++)
        memcpy(to + tokens_at(r, row, head, c->first + i) * width, tile + (long)i * W, sizeof(real) * width);
}

/* b[j, i] = a[i, j] */
static void transpose(int rows, int columns, const real *restrict a, int lda, real *restrict b, int ldb) {
    enum { SIDE = 8 };
    for (int i = 0; i < rows; i += SIDE)
        for (int j = 0; j < columns; j++)
            for (int l = 0; l < SIDE && i + l < rows; l++) b[(long)j * ldb + i + l] = a[(long)(i + l) * lda + j];
}

static void scaled(int count, real by, const real *restrict x, real *restrict to) {
    for (int i = 0; i < count; i++) to[i] = by * x[i];
}

static void scale(int count, real by, real *x) {
    for (int i = 0; i < count; i++) x[i] *= by;
}

static void add_scaled(int count, real by, const real *restrict x, real *restrict to) {
    for (int i = 0; i < count; i++) to[i] += by * x[i];
}

static real dot(int count, const real *restrict x, const real *restrict y) {
    vector sum = {0};
    for (int i = 0; i < count; i += LANES) sum += *(const vector *)(x + i) * *(const vector *)(y + i);
    real all = 0;
    for (int i = 0; i < LANES; i++) all += sum[i];
    return all;
}

/* products of triangles: row i of c takes columns of a up to i (lower), or from i on (upper), in groups of DOWN; `a` has
   zeros in what is left over of the groups. `a` may have two such triangles side by side, `halves` columns apart. */
static void add_lower(int rows, int columns, const real *a, long lda, const real *b, int ldb, real *c, int ldc) {
    for (int i = 0; i < rows; i += DOWN)
        add_product(DOWN, columns, i + DOWN, a + i * lda, lda, 1, b, ldb, c + (long)i * ldc, ldc);
}

static void add_upper(int rows, int columns, const real *a, long lda, const real *b, int ldb, real *c, int ldc) {
    for (int i = 0; i < rows; i += DOWN)
        add_product(DOWN, columns, rows - i, a + i * lda + i, 1, lda, b + (long)i * ldb, ldb, c + (long)i * ldc, ldc);
}

/* scores of X and of Q with K, below the diagonal and with it, times e^(G_i - G_j), `m` and `p`; above it zero. With
   `by_beta` columns come times beta_j. */
static void weigh(const Rule *r, const Chunk *c, int by_beta, real m, real p, real *M, real *P) {
    int T = r->T;
    for (int i = 0; i < c->all; i++) {
        real *mi = M + (long)i * T, *pi = P + (long)i * T, D[128];
        for (int j = 0; j <= i; j++) D[j] = by_beta ? c->beta[j] : 1;
        if (r->log_alpha)
            for (int j = 0; j <= i; j++) D[j] *= NAME(exponential)((real)(c->G[i] - c->G[j]));
        for (int j = 0; j <= i; j++) {
            mi[j] *= m * D[j];
            pi[j] *= p * D[j];
        }
        mi[i] = 0;
        memset(mi + i + 1, 0, sizeof(real) * (T - i - 1));
        memset(pi + i + 1, 0, sizeof(real) * (T - i - 1));
    }
}

static void score(const Rule *r, const Chunk *c, const real *XQ, const real *KT, real *MP) {
    int K = r->K, T = r->T;
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < c->all; i += DOWN) {
            real *to = MP + ((long)half * c->all + i) * T;
            int columns = padded(i + DOWN);
            for (int l = 0; l < DOWN; l++) memset(to + (long)l * T, 0, sizeof(real) * columns);
            add_product(DOWN, columns, r->key, XQ + ((long)half * c->all + i) * K, K, 1, KT, T, to, T);
        }
}

static void load_keys(const Rule *r, long row, int head, const Chunk *c, real *keys, real *XQ, real *KT) {
    int K = r->K;
    real *Q = XQ + (long)c->all * K;
    load(r, row, head, c, r->k, r->key, K, keys);
    load(r, row, head, c, r->q, r->key, K, Q);
    for (int i = 0; i < c->all; i++)
        for (int j = 0; j < K; j++) XQ[(long)i * K + j] = keys[(long)i * K + j] + c->lam[i] * Q[(long)i * K + j];
    transpose(c->all, r->key, keys, K, KT, r->T);
}

/* H = e^G_C H + K'^T N with K' = diag(e^(G_C - G) beta) K, which is left in `keys` */
static void write(const Rule *r, const Chunk *c, real *keys, const real *N, real *H) {
    for (int i = 0; i < c->all; i++) scale(r->K, c->rest[i] * c->beta[i], keys + (long)i * r->K);
    if (r->log_alpha) scale(r->K * r->V, c->last, H);
    add_product(groups_of(r->key), r->V, c->count, keys, 1, r->K, N, r->V, H, r->V);
}

static size_t forward_memory(const Rule *r) {
    size_t C = r->T;
    return C * r->K * 3 + (size_t)r->K * r->T + C * r->V * 3 + C * r->T * 2 + (size_t)r->K * r->V;
}

static void forward_one(const Rule *r, long row, int head, const real *state, real *o, real *final, real *errors,
                        real *marks, real *memory) {
    int K = r->K, V = r->V, T = r->T, groups = (int)((r->tokens + (long)r->chunk * MARKS - 1) / ((long)r->chunk * MARKS));
    long one = row * r->heads + head, size = (long)r->key * r->value;
    real *keys = memory, *XQ = keys + (long)T * K, *KT = XQ + 2L * T * K, *N = KT + (long)K * T, *RO = N + (long)T * V,
         *MP = RO + 2L * T * V, *H = MP + 2L * T * T;
    memset(H, 0, sizeof(real) * K * V);
    if (state) transpose(r->value, r->key, state + one * size, r->key, H, V);
    for (long number = 0; number * r->chunk < r->tokens; number++) {
        Chunk c = gates(r, row, head, number);
        real *M = MP, *P = MP + (long)c.all * T, *O = RO + (long)c.all * V;
        if (marks && number % MARKS == 0)
            for (int i = 0; i < r->key; i++)
                memcpy(marks + ((one * groups + number / MARKS) * r->key + i) * r->value, H + (long)i * V,
                       sizeof(real) * r->value);
        load_keys(r, row, head, &c, keys, XQ, KT);
        load(r, row, head, &c, r->v, r->value, V, N);
        memset(RO, 0, sizeof(real) * 2 * c.all * V);
        add_product(2 * c.all, V, r->key, XQ, K, 1, H, V, RO, V);
        for (int i = 0; i < c.all; i++) {
            add_scaled(V, -c.decay[i], RO + (long)i * V, N + (long)i * V);
            scale(V, (real)r->scale * c.decay[i], O + (long)i * V);
        }
        score(r, &c, XQ, KT, MP);
        weigh(r, &c, 1, -1, (real)r->scale, M, P);
        for (int i = 0; i < c.all; i += DOWN) { /* N = (I + M diag(beta))^-1 N, a group of rows after the other */
            if (i) add_product(DOWN, V, i, M + (long)i * T, T, 1, N, V, N + (long)i * V, V);
            for (int l = 1; l < DOWN; l++)
                for (int j = 0; j < l; j++)
                    add_scaled(V, M[(long)(i + l) * T + i + j], N + (long)(i + j) * V, N + (long)(i + l) * V);
        }
        add_lower(c.all, V, P, T, N, V, O, V);
        write(r, &c, keys, N, H);
        store(r, row, head, &c, O, r->value, V, o);
        if (errors) store(r, row, head, &c, N, r->value, V, errors);
    }
    transpose(r->key, r->value, H, V, final + one * size, r->key);
}


int NAME(delta_forward)(long rows, long tokens, int heads, int key, int value, int chunk, double scale, int threads,
                        const real *q, const real *k, const real *v, const real *beta, const real *log_alpha,
                        const real *lam, const real *state, real *o, real *final, real *errors, real *marks) {
    Rule r = {rows, tokens, heads, key, value, chunk, padded(groups_of(key)), padded(value), padded(groups_of(chunk)), scale,
              q, k, v, beta, log_alpha, lam};
    long tasks = rows * heads;
    if (threads > tasks) threads = (int)tasks;
    size_t each = (forward_memory(&r) + 15) / 16 * 16;
    real *memory = aligned(each * threads);
    if (!memory) return 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int thread = 0; thread < threads; thread++)
        for (long task = tasks * thread / threads; task < tasks * (thread + 1) / threads; task++)
            forward_one(&r, task / heads, (int)(task % heads), state, o, final, errors, marks, memory + each * thread);
    free(memory);
    return 0;
}

static size_t backward_memory(const Rule *r) {
    size_t C = r->T, K = r->K, V = r->V;
    return C * K * 7 + K * C + C * V * 8 + V * C + C * C * 4 + K * V * (MARKS + 2) + 2 * K * V;
}

typedef struct {
    const real *go, *gfinal, *o, *final, *errors, *marks;
    real *gq, *gk, *gv, *gbeta, *glog_alpha, *glam, *gstate;
} Gradients;

static void backward_one(const Rule *r, long row, int head, const Gradients *g, real *memory) {
    int K = r->K, V = r->V, T = r->T, groups = (int)((r->tokens + (long)r->chunk * MARKS - 1) / ((long)r->chunk * MARKS));
    long one = row * r->heads + head, size = (long)r->key * r->value, matrix = (long)K * V;
    int deep = groups_of(r->key);
    real *keys = memory, *XQ = keys + (long)T * K, *gXQ = XQ + 2L * T * K, *gK = gXQ + 2L * T * K, *kept = gK + (long)T * K,
         *KT = kept + (long)T * K, *N = KT + (long)K * T, *U = N + (long)T * V, *hat = U + (long)T * V,
         *gNO = hat + (long)T * V, *W = gNO + 2L * T * V, *spare = W + 2L * T * V, *UT = spare + (long)T * V,
         *MP = UT + (long)V * T, *gMP = MP + 2L * T * T, *gH = gMP + 2L * T * T, *HT = gH + matrix,
         *gHT = HT + matrix, *H = gHT + matrix; /* MARKS + 1 of them */
    memset(gH, 0, sizeof(real) * matrix);
    if (g->gfinal) transpose(r->value, r->key, g->gfinal + one * size, r->key, gH, V);
    long chunks = (r->tokens + r->chunk - 1) / r->chunk;
    for (long group = groups - 1; group >= 0; group--) {
        long begin = group * MARKS, end = begin + MARKS < chunks ? begin + MARKS : chunks;
        memset(H, 0, sizeof(real) * matrix);
        for (int i = 0; i < r->key; i++)
            memcpy(H + (long)i * V, g->marks + ((one * groups + group) * r->key + i) * r->value, sizeof(real) * r->value);
        for (long number = begin; number < end; number++) { /* the memories of the group, once more */
            Chunk c = gates(r, row, head, number);
            real *next = H + (number - begin + 1) * matrix;
            memcpy(next, next - matrix, sizeof(real) * matrix);
            load(r, row, head, &c, r->k, r->key, K, keys);
            load(r, row, head, &c, g->errors, r->value, V, N);
            write(r, &c, keys, N, next);
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
            score(r, &c, XQ, KT, MP);
            weigh(r, &c, 0, -1, (real)r->scale, M, P);
            for (int i = 0; i < all; i++) {
                scaled(V, c.beta[i], N + (long)i * V, U + (long)i * V);
                scaled(K, c.rest[i], keys + (long)i * K, kept + (long)i * K);
                scale(T, c.beta[i], M + (long)i * T);
            }
            /* hat = (I + M^T diag(beta))^-1 (P^T gO + K' gH), from the last group of rows to the first */
            memset(hat, 0, sizeof(real) * all * V);
            add_product(all, V, r->key, kept, K, 1, gH, V, hat, V);
            add_upper(all, V, P, T, gO, V, hat, V);
            for (int i = all - DOWN; i >= 0; i -= DOWN) {
                int below = i + DOWN;
                if (below < all)
                    add_product(DOWN, V, all - below, M + (long)below * T + i, 1, T, hat + (long)below * V, V,
                                hat + (long)i * V, V);
                for (int l = DOWN - 2; l >= 0; l--)
                    for (int j = l + 1; j < DOWN; j++)
                        add_scaled(V, M[(long)(i + j) * T + i + l], hat + (long)(i + j) * V, hat + (long)(i + l) * V);
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
                real each[128];
                for (int i = 0; i < c.count; i++) each[i] = dot(V, gO + (long)i * V, spare + (long)i * V);
                load(r, row, head, &c, r->v, r->value, V, spare);
                for (int i = c.count - 1; i >= 0; i--) {
                    sum += each[i] - dot(V, gV + (long)i * V, spare + (long)i * V);
                    g->glog_alpha[tokens_at(r, row, head, c.first + i)] = (real)sum;
                }
            }
            /* gradients of the scores */
            transpose(all, r->value, U, V, UT, T);
            memset(gMP, 0, sizeof(real) * 2 * all * T);
            for (int half = 0; half < 2; half++)
                for (int i = 0; i < all; i += DOWN)
                    add_product(DOWN, padded(i + DOWN), r->value, gNO + ((long)half * all + i) * V, V, 1, UT, T,
                                gMP + ((long)half * all + i) * T, T);
            weigh(r, &c, 0, -1, (real)r->scale, gM, gP);
            /* and what follows from them and from the memory */
            transpose(deep, r->value, before, V, HT, K);
            transpose(deep, r->value, gH, V, gHT, K);
            memset(gXQ, 0, sizeof(real) * 2 * all * K);
            add_product(2 * all, K, r->value, W, V, 1, HT, K, gXQ, K);
            add_lower(all, K, gM, T, keys, K, gX, K);
            add_lower(all, K, gP, T, keys, K, gQ, K);
            for (int i = 0; i < all; i++) scale(V, c.rest[i], U + (long)i * V);
            memset(gK, 0, sizeof(real) * all * K);
            add_product(all, K, r->value, U, V, 1, gHT, K, gK, K);
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
    transpose(r->key, r->value, gH, V, g->gstate + one * size, r->key);
}

int NAME(delta_backward)(long rows, long tokens, int heads, int key, int value, int chunk, double scale, int threads,
                         const real *q, const real *k, const real *v, const real *beta, const real *log_alpha,
                         const real *lam, const real *go, const real *gfinal, const real *o, const real *final,
                         const real *errors, const real *marks, real *gq, real *gk, real *gv, real *gbeta,
                         real *glog_alpha, real *glam, real *gstate) {
    Rule r = {rows, tokens, heads, key, value, chunk, padded(groups_of(key)), padded(value), padded(groups_of(chunk)), scale,
              q, k, v, beta, log_alpha, lam};
    Gradients g = {go, gfinal, o, final, errors, marks, gq, gk, gv, gbeta, glog_alpha, glam, gstate};
    long tasks = rows * heads;
    if (threads > tasks) threads = (int)tasks;
    size_t each = (backward_memory(&r) + 15) / 16 * 16;
    real *memory = aligned(each * threads);
    if (!memory) return 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int thread = 0; thread < threads; thread++)
        for (long task = tasks * thread / threads; task < tasks * (thread + 1) / threads; task++)
            backward_one(&r, task / heads, (int)(task % heads), &g, memory + each * thread);
    free(memory);
    return 0;
}

/* a few tokens, as in decoding: the recurrence itself, along the rows of S as they lie, each read and written once */
int NAME(delta_few)(long rows, long tokens, int heads, int key, int value, double scale, const real *q, const real *k,
                    const real *v, const real *beta, const real *log_alpha, const real *lam, const real *state, real *o,
                    real *final) {
    real x[256];
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
