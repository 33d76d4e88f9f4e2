/* The delta rule chunk by chunk, forward and backward: the equations of qkflow/ops/delta_rule/chunked.py, for one row and
   head at a time, so that a chunk and the state H = S^T (k x v) stay in the cache.

   Rows and heads are independent and each belongs to one thread: results do not depend on the number of threads. The
   forward pass saves the errors N and a checkpoint of the state every CHECKPOINT_CHUNKS chunks; the backward pass
   recomputes the states in between, which takes one product per chunk. */

#include "delta_rule.h"

enum { NO_MEMORY = 1, BAD_GATES = 2 };
#define MAX_FINITE ((real)(sizeof(real) == 4 ? 3.4028234663852886e38 : 1.7976931348623157e308))

/* whether a gate is out of range or NaN: see check_gates in qkflow/ops/delta_rule/inputs.py */
static int out_of_range(const Rule *r) {
    long count = r->rows * r->tokens * r->heads;
    const real *decays = r->channel_log_alpha ? r->channel_log_alpha : r->log_alpha;
    int invalid = 0;
    for (long i = 0; i < count; i++) invalid |= !(r->beta[i] >= 0 && r->beta[i] <= 2);
    for (long i = 0; r->lam && i < count; i++) invalid |= !(r->lam[i] >= -MAX_FINITE && r->lam[i] <= MAX_FINITE);
    count *= r->channel_log_alpha ? r->key : 1;
    for (long i = 0; decays && i < count; i++) invalid |= !(decays[i] >= -MAX_FINITE && decays[i] <= 0);
    return invalid;
}

/* `log_alpha` and `erase` hold one number per token and head, or one per key channel as well */
static void set_inputs(Rule *r, const real *q, const real *k, const real *v, const real *beta, const real *log_alpha,
                       const real *erase, int decay_channels, int erase_channels) {
    r->q = q, r->k = k, r->v = v, r->beta = beta;
    r->log_alpha = decay_channels ? NULL : log_alpha, r->channel_log_alpha = decay_channels ? log_alpha : NULL;
    r->lam = erase_channels ? NULL : erase, r->x = erase_channels ? erase : NULL;
}

/* all rows and heads, split among threads, each with a buffer of `room` numbers */
static int for_each_head(const Rule *r, int threads, size_t room,
                void (*heads)(const Rule *, long row, int first, int many, const void *, real *), const void *what) {
    long all = r->rows * r->heads;
    if (threads > all) threads = (int)all;
    room = (room + 15) / 16 * 16;
    real *memory = aligned(room * threads);
    if (!memory) return NO_MEMORY;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int thread = 0; thread < threads; thread++) {
        Mode mode = flush();
        for (long one = all * thread / threads, end = all * (thread + 1) / threads, next; one < end; one = next) {
            next = together(r, one, end);
            heads(r, one / r->heads, (int)(one % r->heads), (int)(next - one), what, memory + room * thread);
        }
        restore(mode);
    }
    free(memory);
    return 0;
}

/* offset of a checkpoint: states of a row and head every CHECKPOINT_CHUNKS chunks, [key, value] each */
static long checkpoint_offset(const Rule *r, const Chunk *c, long group) {
    long groups = (r->tokens + (long)r->chunk * CHECKPOINT_CHUNKS - 1) / ((long)r->chunk * CHECKPOINT_CHUNKS);
    return ((c->row * r->heads + c->head) * groups + group) * r->key * r->value;
}

typedef struct {
    const real *state;
    real *o, *final, *errors, *checkpoints; /* the last two are saved for the backward pass, or null */
} Results;

static size_t forward_memory(const Rule *r) {
    size_t C = r->T, K = r->K, V = r->V;
    return C * K * 4 + C * V * 3 + C * C * 3 + r->most * K * V + channels_memory(r);
}

/* `next_head` and `next_offset` (in tokens) locate the next chunk, which is prefetched */
static void forward_chunk(const Rule *r, const Chunk *c, int next_head, int next_offset, const Results *to, real *H, real *memory) {
    int K = r->K, V = r->V, T = r->T, all = c->all;
    real *keys = memory, *XQ = keys + (long)T * K, *KT = XQ + 2L * T * K, *N = KT + (long)K * T, *RO = N + (long)T * V,
         *O = RO + (long)all * V, *M = RO + 2L * T * V, *P = M + (long)all * T, *D = M + 2L * T * T;
    Channels d = channels(r, D + (long)T * T);
    load_keys(r, c, keys, XQ, KT);
    load(r, c, r->v, r->value, V, N);
    if (r->channel_log_alpha) { /* the scores first, then the read-out of the past with e^G x and e^G q */
        load_channels(r, c, &d);
        channel_scores(r, c, &d, XQ, KT, M);
        multiply_rows(all * K, d.decay, XQ);
        multiply_rows(all * K, d.decay, XQ + (long)all * K);
    } else
        scores(r, c, r->key, XQ, K, KT, M);
    product(2 * all, V, r->key, XQ, K, 1, H, V, RO, V);
    for (int i = 0; i < all; i++) {
        add_scaled(V, -c->decay[i], RO + (long)i * V, N + (long)i * V);
        scale(V, (real)r->scale * c->decay[i], O + (long)i * V);
        prefetch(r, c, c->head, c->first + i, to->o, r->value, 1);
        prefetch(r, c, c->head, c->first + i, to->errors, r->value, 1);
    }
    decay_matrix(r, c, 1, D);
    apply_decays(r, c, D, -1, (real)r->scale, M, P);
    for (int i = 0; i < all; i += DOWN) { /* N = (I + M diag(beta))^-1 N, one group of rows after the other */
        for (int l = 0; l < DOWN; l++) {
            prefetch(r, c, next_head, c->first + next_offset + i + l, r->k, r->key, 0);
            prefetch(r, c, next_head, c->first + next_offset + i + l, r->q, r->key, 0);
            prefetch(r, c, next_head, c->first + next_offset + i + l, r->x, r->key, 0);
            prefetch(r, c, next_head, c->first + next_offset + i + l, r->channel_log_alpha, r->key, 0);
            prefetch(r, c, next_head, c->first + next_offset + i + l, r->v, r->value, 0);
        }
        if (i) add_product(DOWN, V, i, M + (long)i * T, T, 1, N, V, N + (long)i * V, V);
        substitute(V, M + (long)i * T + i, T, 1, N + (long)i * V, V);
    }
    add_lower(all, V, P, T, N, V, O, V);
    write_state(r, c, &d, keys, N, H, H);
    store(r, c, O, r->value, V, to->o);
    if (to->errors) store(r, c, N, r->value, V, to->errors);
}

/* several adjacent heads of a row */
static void forward_heads(const Rule *r, long row, int first, int many, const void *what, real *memory) {
    const Results *to = what;
    long size = (long)r->key * r->value, matrix = (long)r->K * r->V, at = (row * r->heads + first) * size;
    memset(memory, 0, sizeof(real) * matrix * many);
    for (int i = 0; i < many && to->state; i++)
        transpose(&r->swaps, r->value, r->key, to->state + at + i * size, r->key, memory + i * matrix, r->V);
    for (long number = 0; number * r->chunk < r->tokens; number++)
        for (int i = 0; i < many; i++) {
            Chunk c = load_gates(r, row, first + i, number);
            real *H = memory + i * matrix;
            if (to->checkpoints && number % CHECKPOINT_CHUNKS == 0)
                for (int j = 0; j < r->key; j++)
                    copy(r->value, H + (long)j * r->V, to->checkpoints + checkpoint_offset(r, &c, number / CHECKPOINT_CHUNKS) + (long)j * r->value);
            forward_chunk(r, &c, first + (i + 1) % many, i + 1 < many ? 0 : r->chunk, to, H, memory + r->most * matrix);
        }
    for (int i = 0; i < many; i++)
        transpose(&r->swaps, r->key, r->value, memory + i * matrix, r->V, to->final + at + i * size, r->key);
}

int NAME(delta_forward)(long rows, long tokens, int heads, int key, int value, int chunk, int decay_channels, int erase_channels, double scale,
                        int threads, const real *q, const real *k, const real *v, const real *beta, const real *log_alpha,
                        const real *erase, const real *state, real *o, real *final, real *errors, real *checkpoints) {
    Rule r = rule(rows, tokens, heads, key, value, chunk, scale);
    set_inputs(&r, q, k, v, beta, log_alpha, erase, decay_channels, erase_channels);
    Results to = {state, o, final, errors, checkpoints};
    if (out_of_range(&r)) return BAD_GATES;
    return for_each_head(&r, threads, forward_memory(&r), forward_heads, &to);
}

typedef struct {
    const real *go, *gfinal, *o, *errors, *checkpoints;
    real *gq, *gk, *gv, *gbeta, *glog_alpha, *gerase, *gstate;
} Gradients;

typedef struct { /* of one chunk; `transposed` is K^T, then o or v, then U^T; `gK` is first diag(e^(G_C - G)) K */
    real *keys, *XQ, *gXQ, *gK, *N, *U, *hat, *gNO, *W, *transposed, *MP, *gMP, *D, *HT, *gHT, *H; /* H: CHECKPOINT_CHUNKS + 1 of them */
    Channels d;
} Tiles;

static size_t backward_memory(const Rule *r) {
    size_t C = r->T, K = r->K, V = r->V;
    return C * K * 6 + C * V * 7 + C * (K > V ? K : V) + C * C * 5 + K * V * (CHECKPOINT_CHUNKS + 3) + r->most * K * V
           + channels_memory(r);
}

static Tiles tiles(const Rule *r, real *memory) {
    long K = (long)r->T * r->K, V = (long)r->T * r->V, T = (long)r->T * r->T, matrix = (long)r->K * r->V;
    Tiles t = {.keys = memory};
    t.XQ = t.keys + K, t.gXQ = t.XQ + 2 * K, t.gK = t.gXQ + 2 * K;
    t.N = t.gK + K, t.U = t.N + V, t.hat = t.U + V, t.gNO = t.hat + V, t.W = t.gNO + 2 * V, t.transposed = t.W + 2 * V;
    t.MP = t.transposed + (K > V ? K : V), t.gMP = t.MP + 2 * T, t.D = t.gMP + 2 * T;
    t.HT = t.D + T, t.gHT = t.HT + matrix, t.H = t.gHT + matrix;
    t.d = channels(r, t.H + (CHECKPOINT_CHUNKS + 1) * matrix);
    return t;
}

/* recompute the states of CHECKPOINT_CHUNKS chunks from the checkpoint before them */
static void recompute_states(const Rule *r, long row, int head, long begin, long end, const Gradients *g, const Tiles *t) {
    long matrix = (long)r->K * r->V;
    memset(t->H, 0, sizeof(real) * matrix);
    for (long number = begin; number < end; number++) {
        Chunk c = load_gates(r, row, head, number);
        real *next = t->H + (number - begin + 1) * matrix;
        for (int i = 0; i < r->key && number == begin; i++)
            copy(r->value, g->checkpoints + checkpoint_offset(r, &c, begin / CHECKPOINT_CHUNKS) + (long)i * r->value, t->H + (long)i * r->V);
        if (r->channel_log_alpha) load_channels(r, &c, &t->d);
        load(r, &c, r->k, r->key, r->K, t->keys);
        load(r, &c, g->errors, r->value, r->V, t->N);
        for (int i = 0; i < c.count; i++) {
            prefetch(r, &c, head, c.first + r->chunk + i, r->k, r->key, 0);
            prefetch(r, &c, head, c.first + r->chunk + i, g->errors, r->value, 0);
        }
        write_state(r, &c, &t->d, t->keys, t->N, next - matrix, next);
    }
}

/* hat = (I + M^T diag(beta))^-1 (P^T gO + K' gH) with K' = diag(e^(G_C - G)) K, from the last group of rows to the first;
   also U and the other products with gates */
static void solve_backward(const Rule *r, const Chunk *c, const Gradients *g, const Tiles *t, const real *gH) {
    int K = r->K, V = r->V, T = r->T, all = c->all;
    real *M = t->MP, *gO = t->gNO + (long)all * V, *hat = t->hat;
    for (int i = 0; i < all; i++) {
        scaled(V, c->beta[i], t->N + (long)i * V, t->U + (long)i * V);
        scaled(K, c->rest[i], t->keys + (long)i * K, t->gK + (long)i * K);
        scale(T, c->beta[i], M + (long)i * T);
        prefetch(r, c, c->head, c->first + i, r->log_alpha ? g->o : NULL, r->value, 0);
        prefetch(r, c, c->head, c->first + i, r->log_alpha ? r->v : NULL, r->value, 0);
    }
    if (r->channel_log_alpha) multiply_rows(all * K, t->d.rest, t->gK);
    product(all, V, r->key, t->gK, K, 1, gH, V, hat, V);
    add_upper(all, V, M + (long)all * T, T, gO, V, hat, V);
    for (int i = all - DOWN; i >= 0; i -= DOWN) {
        int below = i + DOWN, last = i + DOWN - 1; /* inside a group, rows and columns of M are reversed */
        for (int l = 0; l < DOWN; l++) {
            prefetch(r, c, c->head, c->first - r->chunk + i + l, r->q, r->key, 0);
            prefetch(r, c, c->head, c->first - r->chunk + i + l, r->x, r->key, 0);
            prefetch(r, c, c->head, c->first - r->chunk + i + l, g->go, r->value, 0);
            prefetch(r, c, c->head, c->first + i + l, g->gv, r->value, 1);
        }
        if (below < all)
            add_product(DOWN, V, all - below, M + (long)below * T + i, 1, T, hat + (long)below * V, V, hat + (long)i * V, V);
        substitute(V, M + (long)last * T + last, -1, -T, hat + (long)last * V, -V);
    }
    for (int i = 0; i < all; i++) {
        scaled(V, c->beta[i], hat + (long)i * V, t->gNO + (long)i * V);
        scaled(V, -c->beta[i] * c->decay[i], hat + (long)i * V, t->W + (long)i * V);
        scaled(V, (real)r->scale * c->decay[i], gO + (long)i * V, t->W + (long)(all + i) * V);
    }
}

/* gradients of the log decays: o . go - v . gv for each G, plus <H', gH'> for the last, summed from the end */
static void decay_backward(const Rule *r, const Chunk *c, const Gradients *g, const Tiles *t, const real *after, const real *gH) {
    int V = r->V;
    real *gO = t->gNO + (long)c->all * V, each[MAX_CHUNK];
    double sum = 0;
    for (int i = 0; i < r->key; i++) sum += dot(V, after + (long)i * V, gH + (long)i * V);
    load(r, c, g->o, r->value, V, t->transposed);
    for (int i = 0; i < c->count; i++) each[i] = dot(V, gO + (long)i * V, t->transposed + (long)i * V);
    load(r, c, r->v, r->value, V, t->transposed);
    for (int i = c->count - 1; i >= 0; i--) {
        sum += each[i] - dot(V, t->gNO + (long)i * V, t->transposed + (long)i * V);
        g->glog_alpha[place(r, c->row, c->head, c->first + i)] = (real)sum;
    }
}

/* gradients of the scores, and of queries and keys; gH moves to the beginning of the chunk */
static void inputs_backward(const Rule *r, const Chunk *c, const Gradients *g, const Tiles *t, const real *before, real *gH) {
    int K = r->K, V = r->V, T = r->T, all = c->all, deep = grouped(r->key);
    real *gM = t->gMP, *gP = t->gMP + (long)all * T, *Q = t->XQ + (long)all * K, *gX = t->gXQ, *gQ = t->gXQ + (long)all * K;
    transpose(&r->swaps, all, r->value, t->U, V, t->transposed, T);
    scores(r, c, r->value, t->gNO, V, t->transposed, t->gMP);
    apply_decays(r, c, t->D, -1, (real)r->scale, gM, gP);
    transpose(&r->swaps, deep, r->value, before, V, t->HT, K);
    transpose(&r->swaps, deep, r->value, gH, V, t->gHT, K);
    product(2 * all, K, r->value, t->W, V, 1, t->HT, K, t->gXQ, K);
    if (!r->channel_log_alpha) {
        add_lower(all, K, gM, T, t->keys, K, gX, K);
        add_lower(all, K, gP, T, t->keys, K, gQ, K);
    }
    for (int i = 0; i < all; i++) {
        scale(V, c->rest[i], t->U + (long)i * V);
        prefetch(r, c, c->head, c->first + i, g->gq, r->key, 1);
        prefetch(r, c, c->head, c->first + i, g->gk, r->key, 1);
        prefetch(r, c, c->head, c->first + i, r->x ? g->gerase : NULL, r->key, 1);
    }
    product(all, K, r->value, t->U, V, 1, t->gHT, K, t->gK, K);
    if (r->channel_log_alpha) {
        multiply_rows(all * K, t->d.decay, gX);
        multiply_rows(all * K, t->d.decay, gQ);
        channel_scores_backward(r, c, &t->d, t->keys, t->XQ, t->gMP, t->gXQ, t->gK);
        channel_decay_backward(r, c, t->keys, t->XQ, t->gXQ, t->gK, before + (long)K * V, gH, g->glog_alpha, t->d.scaled);
    } else {
        add_upper(all, K, gM, T, t->XQ, K, t->gK, K);
        add_upper(all, K, gP, T, Q, K, t->gK, K);
    }
    for (int i = 0; i < c->count; i++) {
        long at = place(r, c->row, c->head, c->first + i);
        if (!r->x) add_scaled(K, 1, gX + (long)i * K, t->gK + (long)i * K);
        if (r->lam) {
            g->gerase[at] = dot(K, gX + (long)i * K, Q + (long)i * K);
            add_scaled(K, c->lam[i], gX + (long)i * K, gQ + (long)i * K);
        }
        g->gbeta[at] = dot(V, t->hat + (long)i * V, t->N + (long)i * V);
    }
    if (r->channel_log_alpha) {
        multiply_rows(all * K, t->d.decay, t->XQ);
        multiply_rows(all * K, t->d.decay, Q);
    }
    decay_state(r, c, &t->d, gH, gH);
    add_product(deep, V, 2 * all, t->XQ, 1, K, t->W, V, gH, V);
}

/* CHECKPOINT_CHUNKS chunks, from the last to the first */
static void backward_group(const Rule *r, long row, int head, long group, const Gradients *g, real *gH, real *memory) {
    long matrix = (long)r->K * r->V, chunks = (r->tokens + r->chunk - 1) / r->chunk;
    long begin = group * CHECKPOINT_CHUNKS, end = begin + CHECKPOINT_CHUNKS < chunks ? begin + CHECKPOINT_CHUNKS : chunks;
    Tiles t = tiles(r, memory);
    recompute_states(r, row, head, begin, end, g, &t);
    for (long number = end - 1; number >= begin; number--) {
        Chunk c = load_gates(r, row, head, number);
        real *before = t.H + (number - begin) * matrix, *gO = t.gNO + (long)c.all * r->V;
        load_keys(r, &c, t.keys, t.XQ, t.transposed);
        load(r, &c, g->errors, r->value, r->V, t.N);
        if (g->go)
            load(r, &c, g->go, r->value, r->V, gO);
        else
            memset(gO, 0, sizeof(real) * c.all * r->V);
        if (r->channel_log_alpha) {
            load_channels(r, &c, &t.d);
            channel_scores(r, &c, &t.d, t.XQ, t.transposed, t.MP);
        } else
            scores(r, &c, r->key, t.XQ, r->K, t.transposed, t.MP);
        decay_matrix(r, &c, 0, t.D);
        apply_decays(r, &c, t.D, -1, (real)r->scale, t.MP, t.MP + (long)c.all * r->T);
        solve_backward(r, &c, g, &t, gH);
        if (r->log_alpha) decay_backward(r, &c, g, &t, before + matrix, gH);
        inputs_backward(r, &c, g, &t, before, gH);
        store(r, &c, t.gXQ + (long)c.all * r->K, r->key, r->K, g->gq);
        store(r, &c, t.gK, r->key, r->K, g->gk);
        if (r->x) store(r, &c, t.gXQ, r->key, r->K, g->gerase);
        store(r, &c, t.gNO, r->value, r->V, g->gv);
    }
}

static void backward_heads(const Rule *r, long row, int first, int many, const void *what, real *memory) {
    const Gradients *g = what;
    long size = (long)r->key * r->value, matrix = (long)r->K * r->V, at = (row * r->heads + first) * size;
    memset(memory, 0, sizeof(real) * matrix * many);
    for (int i = 0; i < many && g->gfinal; i++)
        transpose(&r->swaps, r->value, r->key, g->gfinal + at + i * size, r->key, memory + i * matrix, r->V);
    for (long group = (r->tokens - 1) / ((long)r->chunk * CHECKPOINT_CHUNKS); group >= 0; group--)
        for (int i = 0; i < many; i++)
            backward_group(r, row, first + i, group, g, memory + i * matrix, memory + r->most * matrix);
    for (int i = 0; i < many; i++)
        transpose(&r->swaps, r->key, r->value, memory + i * matrix, r->V, g->gstate + at + i * size, r->key);
}

int NAME(delta_backward)(long rows, long tokens, int heads, int key, int value, int chunk, int decay_channels, int erase_channels, double scale,
                         int threads, const real *q, const real *k, const real *v, const real *beta, const real *log_alpha,
                         const real *erase, const real *go, const real *gfinal, const real *o, const real *errors,
                         const real *checkpoints, real *gq, real *gk, real *gv, real *gbeta, real *glog_alpha, real *gerase,
                         real *gstate) {
    Rule r = rule(rows, tokens, heads, key, value, chunk, scale);
    set_inputs(&r, q, k, v, beta, log_alpha, erase, decay_channels, erase_channels);
    Gradients g = {go, gfinal, o, errors, checkpoints, gq, gk, gv, gbeta, glog_alpha, gerase, gstate};
    return for_each_head(&r, threads, backward_memory(&r), backward_heads, &g);
}

/* one token and head: s' = alpha s + beta (v - alpha s . x) k and o = scale s' . q for each row s of S, in one pass.
   With a decay per channel, x is already decayed and `by_channel` holds the decays, else alpha is the decay. */
static inline __attribute__((always_inline)) void one_token(const int channels, int key, int value, real alpha,
                                                            const real *by_channel, real beta, real scale, const real *q,
                                                            const real *k, const real *x, const real *v, const real *from,
                                                            real *S, real *o) {
    int whole = key / LANES * LANES;
    for (int i = 0; i < value; i++, S += key) {
        const real *s = from ? from + (long)i * key : NULL;
        vector sum = {0}, seen = {0};
        real found = 0, rest = 0;
        if (s) {
            for (int j = 0; j < whole; j += LANES) sum += *(const loose *)(s + j) * *(const loose *)(x + j);
            for (int j = whole; j < key; j++) found += s[j] * x[j];
            found += total(sum);
        }
        real by = beta * (v[i] - (channels ? found : alpha * found));
        for (int j = 0; j < whole; j += LANES) {
            vector now = by * *(const loose *)(k + j);
            if (s && channels) now += *(const loose *)(by_channel + j) * *(const loose *)(s + j);
            if (s && !channels) now += alpha * *(const loose *)(s + j);
            *(loose *)(S + j) = now;
            seen += now * *(const loose *)(q + j);
        }
        for (int j = whole; j < key; j++) {
            S[j] = by * k[j] + (s ? (channels ? by_channel[j] : alpha) * s[j] : 0);
            rest += S[j] * q[j];
        }
        o[i] = scale * (total(seen) + rest);
    }
}

/* a few tokens, as in decoding: the recurrence, on one thread */
int NAME(delta_recurrent)(long rows, long tokens, int heads, int key, int value, int decay_channels, int erase_channels, double scale, const real *q,
                          const real *k, const real *v, const real *beta, const real *log_alpha, const real *erase,
                          const real *state, real *o, real *final) {
    Rule r = {.rows = rows, .tokens = tokens, .heads = heads, .key = key};
    real by_channel[MAX_KEY_WIDTH], x[MAX_KEY_WIDTH];
    set_inputs(&r, q, k, v, beta, log_alpha, erase, decay_channels, erase_channels);
    if (out_of_range(&r)) return BAD_GATES;
    Mode mode = flush();
    for (long one = 0; one < rows * heads; one++) {
        const real *from = state ? state + one * key * value : NULL;
        real *S = final + one * key * value;
        for (long token = 0; token < tokens; token++, from = S) {
            long at = (one / heads * tokens + token) * heads + one % heads;
            const real *qi = q + at * key, *ki = k + at * key, *vi = v + at * value, *xi = r.x ? r.x + at * key : ki;
            if (r.lam) {
                for (int j = 0; j < key; j++) x[j] = ki[j] + r.lam[at] * qi[j];
                xi = x;
            }
            if (r.channel_log_alpha) {
                for (int j = 0; j < key; j++) by_channel[j] = NAME(exponential)(log_alpha[at * key + j]);
                for (int j = 0; j < key; j++) x[j] = by_channel[j] * xi[j];
                one_token(1, key, value, 1, by_channel, beta[at], (real)scale, qi, ki, x, vi, from, S, o + at * value);
            } else
                one_token(0, key, value, log_alpha ? (real)exp(log_alpha[at]) : 1, NULL, beta[at], (real)scale, qi, ki, xi, vi,
                          from, S, o + at * value);
        }
    }
    restore(mode);
    return 0;
}
