/* Scores of the delta rule with a decay per key channel, and their gradients: see qkflow/ops/delta_rule/channel_decay.py.

   A chunk is split into blocks of BLOCK tokens. Pairs of different blocks are split about the start of the later block
   and computed by products; pairs of the same block directly, where the decays from j to i are multiplied one by one. */

enum { BLOCK = 16 };

typedef struct { /* of one chunk, [token, K] each */
    real *alpha; /* the decays */
    real *local; /* products of the decays from the start of a token's block to the token */
    real *decay, *rest; /* e^G, e^(G_C - G) */
    real *keys; /* keys decayed to the start of a later block */
    real *scaled; /* X and Q times `local`, stacked as in XQ */
    real *some; /* BLOCK rows */
} Channels;

static size_t channels_memory(const Rule *r) { return r->channel_log_alpha ? (size_t)r->K * (7L * r->T + BLOCK) : 0; }

static Channels channels(const Rule *r, real *memory) {
    long K = (long)r->T * r->K;
    return (Channels){memory, memory + K, memory + 2 * K, memory + 3 * K, memory + 4 * K, memory + 5 * K, memory + 7 * K};
}

static inline void multiply_rows(int count, const real *by, real *x) { EACH(i, count) AT(x + i) *= OF(by + i); }

/* the decays of a chunk; tokens past the end and padding have a decay of one */
static void load_channels(const Rule *r, const Chunk *c, const Channels *d) {
    int K = r->K;
    load(r, c, r->channel_log_alpha, r->key, K, d->alpha);
    for (long i = 0; i < (long)c->all * K; i++) d->alpha[i] = NAME(exponential)(d->alpha[i]);
    for (int i = 0; i < c->all; i++) {
        const real *alpha = d->alpha + (long)i * K;
        real *local = d->local + (long)i * K, *decay = d->decay + (long)i * K;
        EACH(l, K) {
            AT(local + l) = i % BLOCK ? OF(alpha + l) * OF(local - K + l) : OF(alpha + l);
            AT(decay + l) = i ? OF(alpha + l) * OF(decay - K + l) : OF(alpha + l);
        }
    }
    for (int i = c->all - 1; i >= 0; i--) {
        real *rest = d->rest + (long)i * K;
        EACH(l, K) AT(rest + l) = i + 1 < c->all ? OF(rest + K + l) * OF(d->alpha + (long)(i + 1) * K + l) : (vector){0} + 1;
    }
}

static int block_end(const Chunk *c, int start) { return start + BLOCK < c->all ? start + BLOCK : c->all; }

/* X and Q decayed from the start of their blocks */
static void scale_queries(const Rule *r, const Chunk *c, const Channels *d, const real *XQ) {
    long half = (long)c->all * r->K;
    for (long i = 0; i < half; i += LANES) {
        AT(d->scaled + i) = OF(XQ + i) * OF(d->local + i);
        AT(d->scaled + half + i) = OF(XQ + half + i) * OF(d->local + i);
    }
}

/* move the decayed keys from the start of a block to its end, and add those of the block itself */
static void pass_block(const Rule *r, const Channels *d, const real *keys, int start, int end) {
    int K = r->K;
    for (int j = 0; j < start; j++) multiply_rows(K, d->local + (long)(end - 1) * K, d->keys + (long)j * K);
    EACH(l, K) {
        vector by = (vector){0} + 1;
        for (int j = end - 1; j >= start; j--) {
            AT(d->keys + (long)j * K + l) = by * OF(keys + (long)j * K + l);
            by *= OF(d->alpha + (long)j * K + l);
        }
    }
}

/* scores of X and Q with the keys, valid up to the diagonal. KT holds the transposed keys, and returns them decayed. */
static void channel_scores(const Rule *r, const Chunk *c, const Channels *d, const real *XQ, real *KT, real *MP) {
    int K = r->K, T = r->T, all = c->all;
    const real *X = XQ, *Q = XQ + (long)all * K;
    real *M = MP, *P = MP + (long)all * T;
    scale_queries(r, c, d, XQ);
    for (int start = 0, end; start < all; start = end) {
        end = block_end(c, start);
        if (start) {
            product(end - start, padded(start), r->key, d->scaled + (long)start * K, K, 1, KT, T, M + (long)start * T, T);
            product(end - start, padded(start), r->key, d->scaled + (long)(all + start) * K, K, 1, KT, T, P + (long)start * T, T);
        }
        for (int part = start; part < end; part += LANES) /* keys of this block: one row after the other decays them */
            for (int i = part; i < end; i++) {
                const real *alpha = d->alpha + (long)i * K, *x = X + (long)i * K, *q = Q + (long)i * K;
                const Lanes *earlier = i - part < LANES ? &r->swaps.below[i - part] : &r->swaps.until[LANES - 1];
                vector m[2] = {{0}}, p[2] = {{0}};
                for (int l = 0; l < grouped(r->key); l += 2)
#pragma GCC unroll 2
                    for (int n = 0; n < 2; n++) {
                        real *key = KT + (long)(l + n) * T + part;
                        vector now = (vector)(((Lanes)(AT(key) * alpha[l + n]) & *earlier) | ((Lanes)AT(key) & ~*earlier));
                        AT(key) = now;
                        m[n] += x[l + n] * now;
                        p[n] += q[l + n] * now;
                    }
                AT(M + (long)i * T + part) = m[0] + m[1];
                AT(P + (long)i * T + part) = p[0] + p[1];
            }
        for (int l = 0; l < r->key && start && end < all; l++) scale(start, d->local[(long)(end - 1) * K + l], KT + (long)l * T);
    }
}

/* gradients of X, Q (added to gXQ) and of the keys through the scores. gK holds the gradient of the keys decayed to the end
   of the chunk, and returns that of the keys. */
static void channel_scores_backward(const Rule *r, const Chunk *c, const Channels *d, const real *keys, const real *XQ,
                                    const real *gMP, real *gXQ, real *gK) {
    int K = r->K, T = r->T, all = c->all;
    const real *gM = gMP, *gP = gMP + (long)all * T, *X = XQ, *Q = XQ + (long)all * K;
    scale_queries(r, c, d, XQ);
    for (int start = 0, end; start < all; start = end) {
        end = block_end(c, start);
        for (int half = 0; half < 2 && start; half++) {
            real *to = gXQ + ((long)half * all + start) * K;
            product(end - start, K, start, gMP + ((long)half * all + start) * T, T, 1, d->keys, K, d->some, K);
            for (long l = 0; l < (long)(end - start) * K; l += LANES) AT(to + l) += OF(d->local + (long)start * K + l) * OF(d->some + l);
        }
        for (int i = start; i < end; i++)
            EACH(l, K) { /* sum_j g_ij e^(G_i - G_j) k_j */
                const real *m = gM + (long)i * T, *p = gP + (long)i * T;
                vector x = {0}, q = {0};
                for (int j = start; j < i; j++) {
                    vector key = OF(keys + (long)j * K + l), alpha = OF(d->alpha + (long)(j + 1) * K + l);
                    x = (x + m[j] * key) * alpha;
                    q = (q + p[j] * key) * alpha;
                }
                AT(gXQ + (long)i * K + l) += x;
                AT(gXQ + (long)(all + i) * K + l) += q + p[i] * OF(keys + (long)i * K + l);
            }
        if (end < all) pass_block(r, d, keys, start, end);
    }
    for (int start = (all - 1) / BLOCK * BLOCK; start >= 0; start -= BLOCK) {
        int end = block_end(c, start);
        for (int j = 0; j < start; j++) multiply_rows(K, d->local + (long)(end - 1) * K, gK + (long)j * K);
        if (start) {
            add_product(start, K, end - start, gM + (long)start * T, 1, T, d->scaled + (long)start * K, K, gK, K);
            add_product(start, K, end - start, gP + (long)start * T, 1, T, d->scaled + (long)(all + start) * K, K, gK, K);
        }
        for (int j = start; j < end; j++)
            EACH(l, K) { /* sum_i e^(G_i - G_j) (gM_ij x_i + gP_ij q_i) */
                vector sum = OF(gK + (long)j * K + l);
                for (int i = end - 1; i > j; i--) {
                    sum += gM[(long)i * T + j] * OF(X + (long)i * K + l) + gP[(long)i * T + j] * OF(Q + (long)i * K + l);
                    sum *= OF(d->alpha + (long)i * K + l);
                }
                AT(gK + (long)j * K + l) = sum + gP[(long)j * T + j] * OF(Q + (long)j * K + l);
            }
    }
}

/* gradients of the log decays: x . gx + q . gq - k . gk for each channel, plus <H', gH'> for the last, summed from the end */
static void channel_decay_backward(const Rule *r, const Chunk *c, const real *keys, const real *XQ, const real *gXQ,
                                   const real *gK, const real *after, const real *gH, real *glog_alpha, real *tile) {
    int K = r->K;
    long half = (long)c->all * K;
    real sum[MAX_KEY_WIDTH + LANES] __attribute__((aligned(64))) = {0};
    for (int l = 0; l < r->key; l++) sum[l] = dot(r->V, after + (long)l * r->V, gH + (long)l * r->V);
    for (int i = c->count - 1; i >= 0; i--)
        EACH(l, K) {
            long at = (long)i * K + l;
            AT(sum + l) += OF(XQ + at) * OF(gXQ + at) + OF(XQ + half + at) * OF(gXQ + half + at) - OF(keys + at) * OF(gK + at);
            AT(tile + at) = OF(sum + l);
        }
    store(r, c, tile, r->key, K, glog_alpha);
}
