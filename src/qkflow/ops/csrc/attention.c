/* Softmax attention forward and backward: the equations of qkflow/ops/attention/naive.py, tile by tile.

   A tile holds the scores of QUERIES queries and KEYS keys, one row per key and one lane per query. So a query keeps to
   its lane: maxima, sums and exponentials are vertical, and of all matrices only queries, outputs and their gradients
   are transposed, once per block of queries. Scores are in units of log 2, for exponentials with base 2:

       S = K Q^T,   P = 2^(S - L),   O^T = V^T P           with Q scaled by log2(e) / sqrt(k), L the log-sum-exp     (1)
       dV = P dO,   dS = P (V dO^T - D),   dK = dS Q,   dQ^T = K^T dS      with D the products of rows o . do        (2)

   The forward pass takes the largest score so far in place of L and corrects what it has summed whenever that grows.

   A block of queries (forward) or a key head (backward) belongs to one thread, and its sums have a fixed order: results
   do not depend on the number of threads. */

#include "vector_rows.h"

#if defined(__AVX__)
#include <immintrin.h>
#endif

enum { QUERIES = 64, KEYS = 64, STRIP = 16 }; /* a partly visible tile is computed in strips of keys */
enum { FEW = 4, SPLIT = 256, NO_MEMORY = 1 }; /* queries of a decoding step; keys of a unit of its work */
#define LOWEST ((real)(sizeof(real) == 4 ? -1e38 : -1e307)) /* a hidden score: finite, since inf - inf is NaN */
#define LOG2_E 1.4426950408889634

typedef struct { /* a caller's array [rows, tokens, heads, width]; the width is contiguous */
    long row, token, head;
} Strides;

typedef struct {
    long rows, queries, keys, heads, groups, key, value; /* `groups` heads of keys and values; `key`, `value`: widths */
    long window; /* query i sees the last `window` keys up to its own, i + keys - queries; 0: it sees all keys */
    Strides q, k, v, go;
} Shape; /* as passed by the caller, in longs */

typedef struct {
    Shape s;
    int K, V; /* padded widths */
    long shared; /* query heads per value head, for a few queries */
    real scale;
    const real *q, *k, *v;
    Swaps swaps; /* not for a few queries */
    Lanes lanes; /* 0, 1, ... */
} Attention;

typedef struct { /* a range of columns or rows of a tile */
    int from, to;
} Range;

static Attention attention(const long *shape, double scale, const real *q, const real *k, const real *v) {
    Attention a = {.scale = (real)scale, .q = q, .k = k, .v = v};
    memcpy(&a.s, shape, sizeof(Shape));
    a.shared = a.s.heads / a.s.groups;
    a.K = padded(grouped((int)a.s.key)), a.V = padded(grouped((int)a.s.value));
    for (int l = 0; l < LANES; l++) a.lanes[l] = l;
    return a;
}

/* all units of work, shared out among threads as they get ready, each thread with a buffer of `room` numbers */
static int for_each_unit(const Attention *a, long units, int threads, size_t room,
                         void (*work)(const Attention *, long unit, const void *, real *), const void *what) {
    long next = 0;
    if (threads > units) threads = (int)units;
    room = (room + 15) / 16 * 16;
    real *memory = aligned(room * threads);
    if (!memory) return NO_MEMORY;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int thread = 0; thread < threads; thread++) {
        Mode mode = flush();
        for (long unit; (unit = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < units;)
            work(a, unit, what, memory + room * thread);
        restore(mode);
    }
    free(memory);
    return 0;
}

static inline vector choose(Lanes which, vector x, vector otherwise) {
    return (vector)(((Lanes)x & which) | ((Lanes)otherwise & ~which));
}

static inline vector fill(real x) { return (vector){0} + x; }

/* the larger number; NaN if y is NaN */
static inline vector larger(vector x, vector y) {
#if defined(__AVX512F__)
    return sizeof(real) == 4 ? (vector)_mm512_max_ps((__m512)x, (__m512)y) : (vector)_mm512_max_pd((__m512d)x, (__m512d)y);
#elif defined(__AVX__)
    return sizeof(real) == 4 ? (vector)_mm256_max_ps((__m256)x, (__m256)y) : (vector)_mm256_max_pd((__m256d)x, (__m256d)y);
#else
    return choose(x > y, x, y);
#endif
}

/* 2^x for x <= 0, to about one unit in the last place; at least the smallest normal number, and NaN for NaN */
static inline vector exp2_vector(vector x) {
    const real round = (real)(sizeof(real) == 4 ? 12582912.0 : 6755399441055744.0); /* 1.5 2^23, 1.5 2^52 */
    x = larger(fill(sizeof(real) == 4 ? -126 : -1022), x);
    vector shifted = x + round, r = x - (shifted - round), y; /* the last bits of `shifted` are the nearest integer */
    if (sizeof(real) == 4) {
        y = fill((real)1.5453162945120690e-4);
        y = y * r + (real)1.3390863364671234e-3;
        y = y * r + (real)9.6180825572778515e-3;
        y = y * r + (real)5.5503571142190778e-2;
        y = y * r + (real)2.4022650760568127e-1;
        y = y * r + (real)6.9314718802622878e-1;
    } else {
        y = fill((real)4.454960598186518394e-10);
        y = y * r + (real)7.0725859492692237e-9;
        y = y * r + (real)1.017806244584577352e-7;
        y = y * r + (real)1.321544258792168965e-6;
        y = y * r + (real)1.525273382983611839e-5;
        y = y * r + (real)1.540353044173605015e-4;
        y = y * r + (real)1.333355814641693531e-3;
        y = y * r + (real)9.618129107606888527e-3;
        y = y * r + (real)5.550410866482159434e-2;
        y = y * r + (real)2.402265069591009822e-1;
        y = y * r + (real)6.931471805599453094e-1;
    }
    y = y * r + 1;
    return (vector)((Lanes)y + ((Lanes)shifted << (sizeof(real) == 4 ? 23 : 52)));
}

/* ---- what is visible. `ahead` is the position of the tile's first query minus that of its first key */

static inline long clamp(long x, long low, long high) { return x < low ? low : x > high ? high : x; }

/* the keys that the queries [first, first + count) see */
static void visible_keys(const Attention *a, long first, long count, long *from, long *to) {
    long position = first + a->s.keys - a->s.queries;
    *from = a->s.window ? clamp(position - a->s.window + 1, 0, a->s.keys) : 0;
    *to = a->s.window ? clamp(position + count, 0, a->s.keys) : a->s.keys;
}

static int is_full(const Attention *a, long ahead, int count, int columns) {
    return !a->s.window || (ahead >= count - 1 && ahead + columns - 1 < a->s.window);
}

/* whole vectors of queries that see any of the keys [j, j + many) */
static Range columns_of(const Attention *a, long ahead, int j, int many, int columns) {
    long from = clamp(j - ahead, 0, columns), to = clamp(a->s.window + j + many - 1 - ahead, 0, columns);
    return (Range){(int)from / LANES * LANES, padded((int)to)};
}

/* keys of the strips that any query of the vector at column c sees */
static Range rows_of(const Attention *a, long ahead, int c, int count) {
    long from = clamp(ahead + c - a->s.window + 1, 0, count), to = clamp(ahead + c + LANES, 0, count);
    to = (to + STRIP - 1) / STRIP * STRIP;
    return (Range){(int)from / STRIP * STRIP, to < count ? (int)to : count};
}

/* x where a query of the vector at column c sees the key, `hidden` elsewhere, for the keys j */
static void hide(const Attention *a, long ahead, int c, Range j, real hidden, real *x) {
    for (int i = j.from; i < j.to; i++) {
        long distance = ahead + c - i;
        if (distance >= 0 && distance + LANES <= a->s.window) continue;
        int from = (int)clamp(-distance, 0, LANES), to = (int)clamp(a->s.window - distance, 0, LANES);
        real *row = x + (long)i * QUERIES + c;
        AT(row) = choose((a->lanes >= from) & (a->lanes < to), AT(row), fill(hidden));
    }
}

/* to = rows Q^T of a tile, where visible */
static void scores(const Attention *a, long ahead, int count, int columns, int depth, const real *rows, int width,
                   const real *transposed, real *to) {
    if (is_full(a, ahead, count, columns)) {
        product(grouped(count), columns, depth, rows, width, 1, transposed, QUERIES, to, QUERIES);
        return;
    }
    for (int j = 0; j < count; j += STRIP) {
        int many = count - j < STRIP ? count - j : STRIP;
        Range c = columns_of(a, ahead, j, many, columns);
        if (c.from < c.to)
            product(grouped(many), c.to - c.from, depth, rows + (long)j * width, width, 1, transposed + c.from, QUERIES,
                    to + (long)j * QUERIES + c.from, QUERIES);
    }
}

/* to += rows^T P of a tile */
static void add_transposed(const Attention *a, long ahead, int count, int columns, int height, const real *rows,
                           int width, const real *P, real *to) {
    if (is_full(a, ahead, count, columns)) {
        add_product(grouped(height), columns, count, rows, 1, width, P, QUERIES, to, QUERIES);
        return;
    }
    EACH(c, columns) {
        Range j = rows_of(a, ahead, c, count);
        if (j.from < j.to)
            add_product(grouped(height), LANES, j.to - j.from, rows + (long)j.from * width, 1, width,
                        P + (long)j.from * QUERIES + c, QUERIES, to + c, QUERIES);
    }
}

/* ---- rows of the caller's arrays */

static const real *at(const real *x, Strides by, long row, long token, long head) {
    return x + row * by.row + token * by.token + head * by.head;
}

/* rows of a caller's array, padded with zeros to `W` columns and `all` rows */
static void load(const real *from, long stride, long count, long all, int width, int W, real *to) {
    for (long i = 0; i < all; i++, to += W) {
        int filled = i < count ? width : 0;
        if (filled) copy(width, from + i * stride, to);
        for (int j = filled; j < W; j++) to[j] = 0;
    }
}

/* rows as columns of a tile, times `by`; missing rows are zero */
static void load_transposed(const Attention *a, const real *from, long stride, int count, int width, real by, real *to) {
    int columns = padded(count);
    transpose(&a->swaps, count, width, from, (int)stride, to, QUERIES);
    for (int j = 0; j < width; j++, to += QUERIES) {
        for (int i = count; i < columns; i++) to[i] = 0;
        scale(columns, by, to);
    }
}

/* ---- forward */

typedef struct {
    real *o, *lse; /* [rows, queries, heads, value], [rows, heads, queries] or null */
    long unit; /* queries per unit of work: more of them share a copy of the keys and values */
} Results;

static long all_keys(const Attention *a) { return (a->s.keys + 2 * DOWN - 1) / DOWN * DOWN; } /* with room for a group */

static size_t forward_memory(const Attention *a) {
    return (size_t)(all_keys(a) + QUERIES) * (a->K + a->V) + QUERIES * KEYS;
}

/* S becomes P; the largest score, the sum and the output follow. One vector of queries. */
static void softmax(const Attention *a, int c, Range j, real *S, real *largest, real *sum, real *OT) {
    vector before = AT(largest + c), m = before, l = {0};
#pragma GCC unroll 4
    for (int i = j.from; i < j.to; i++) m = larger(AT(S + (long)i * QUERIES + c), m);
#pragma GCC unroll 4
    for (int i = j.from; i < j.to; i++) {
        vector p = exp2_vector(AT(S + (long)i * QUERIES + c) - m);
        l += p;
        AT(S + (long)i * QUERIES + c) = p;
    }
    if (memcmp(&m, &before, sizeof m)) {
        vector by = exp2_vector(before - m);
        AT(largest + c) = m;
        AT(sum + c) = AT(sum + c) * by + l;
        for (long d = 0; d < a->s.value; d++) AT(OT + d * QUERIES + c) *= by;
    } else
        AT(sum + c) += l;
}

/* a block of queries of one head, given its keys and values from key `from` on */
static void forward_block(const Attention *a, long row, long head, long first, long from, const real *keys,
                          const real *values, const Results *to, real *memory) {
    const Shape *s = &a->s;
    int count = (int)clamp(s->queries - first, 0, QUERIES), columns = padded(count);
    long place = (row * s->queries + first) * s->heads + head, start, until;
    real *QT = memory, *OT = QT + (long)QUERIES * a->K, *S = OT + (long)QUERIES * a->V;
    real largest[QUERIES] __attribute__((aligned(64))), sum[QUERIES] __attribute__((aligned(64)));
    for (int i = 0; i < columns; i++) largest[i] = LOWEST, sum[i] = 0;
    memset(OT, 0, sizeof(real) * QUERIES * a->V);
    load_transposed(a, at(a->q, s->q, row, first, head), s->q.token, count, (int)s->key, a->scale * (real)LOG2_E, QT);
    visible_keys(a, first, count, &start, &until);
    for (; start < until; start += KEYS) {
        int many = (int)clamp(until - start, 0, KEYS);
        long ahead = first + s->keys - s->queries - start;
        int full = is_full(a, ahead, many, columns);
        scores(a, ahead, many, columns, (int)s->key, keys + (start - from) * a->K, a->K, QT, S);
        EACH(c, columns) {
            Range j = full ? (Range){0, many} : rows_of(a, ahead, c, many);
            if (!full) hide(a, ahead, c, j, LOWEST, S);
            softmax(a, c, j, S, largest, sum, OT);
            if (!full) hide(a, ahead, c, j, 0, S);
        }
        add_transposed(a, ahead, many, columns, (int)s->value, values + (start - from) * a->V, a->V, S, OT);
    }
    EACH(c, columns) {
        vector by = 1 / AT(sum + c);
        for (long d = 0; d < s->value; d++) AT(OT + d * QUERIES + c) *= by;
    }
    transpose(&a->swaps, (int)s->value, count, OT, QUERIES, to->o + place * s->value, (int)(s->heads * s->value));
    for (int i = 0; i < count && to->lse; i++)
        to->lse[(row * s->heads + head) * s->queries + first + i] = largest[i] + (real)log2(sum[i]);
}

/* some queries of one head */
static void forward_unit(const Attention *a, long unit, const void *what, real *memory) {
    const Results *to = what;
    const Shape *s = &a->s;
    long units = (s->queries + to->unit - 1) / to->unit, first = (units - 1 - unit % units) * to->unit, from, until;
    long head = unit / units % s->heads, row = unit / units / s->heads, group = head / (s->heads / s->groups);
    long end = first + to->unit < s->queries ? first + to->unit : s->queries;
    visible_keys(a, first, end - first, &from, &until);
    long many = until - from;
    real *keys = memory, *values = keys + all_keys(a) * a->K, *rest = values + all_keys(a) * a->V;
    load(at(a->k, s->k, row, from, group), s->k.token, many, (many + DOWN - 1) / DOWN * DOWN, (int)s->key, a->K, keys);
    load(at(a->v, s->v, row, from, group), s->v.token, many, many, (int)s->value, a->V, values);
    for (; first < end; first += QUERIES) forward_block(a, row, head, first, from, keys, values, to, rest);
}

/* ---- forward for a few queries: one lane per coordinate, since most lanes of a tile would be empty */

typedef struct {
    real *partial; /* per unit, query and head: the sum of weighted values, the largest score and the sum of weights */
    long splits; /* of the keys: each is a unit of work, and their results are added in order */
} Splits;

/* p = K q for `many` keys of all heads, [heads, KEYS]: token by token, as they are stored. Fetches the values too. */
static void decode_scores(const Attention *a, int many, const real *k, const real *v, const real *q, real *p) {
    const Shape *s = &a->s;
    long shared = s->heads / s->groups;
    for (int j = 0; j < many; j++, k += s->k.token, v += s->v.token)
        for (long head = 0; head < s->heads; head++) {
            const real *key = k + head / shared * s->k.head, *value = v + head / a->shared * s->v.head;
            vector dots = {0};
            int c = 0;
            for (; c + LANES <= s->key; c += LANES) dots += OF(q + head * a->K + c) * *(const loose *)(key + c);
            real rest = 0;
            for (; c < s->key; c++) rest += q[head * a->K + c] * key[c];
            p[head * KEYS + j] = total(dots) + rest;
            if (head % a->shared == 0)
                for (c = 0; c < s->value; c += 64 / sizeof(real)) __builtin_prefetch(value + c, 0, 2);
        }
}

/* scores become weights, 2^(p - largest); returns the factor of what has been summed before */
static real decode_weights(const Attention *a, int many, real *p, real *largest, real *sum) {
    vector m = fill(*largest), l = {0};
    real before = *largest, now = before;
    for (int j = many; j < padded(many); j++) p[j] = LOWEST;
    EACH(j, many) m = larger(AT(p + j), m);
    for (int c = 0; c < LANES; c++) now = m[c] > now ? m[c] : now;
    EACH(j, many) {
        AT(p + j) = exp2_vector(AT(p + j) - now);
        if (j + LANES > many) AT(p + j) = (vector)((Lanes)AT(p + j) & (a->lanes < many - j));
        l += AT(p + j);
    }
    real by = exp2_vector(fill(before - now))[0];
    *largest = now, *sum = *sum * by + total(l);
    return by;
}

/* o = by o + V p */
static void decode_values(const Attention *a, int many, const real *v, const real *p, real by, real *o) {
    long stride = a->s.v.token;
    int width = (int)a->s.value, c = 0;
    for (; c + LANES <= width; c += LANES) {
        vector even = AT(o + c) * by, odd = {0};
        int j = 0;
        for (; j + 2 <= many; j += 2) {
            even += p[j] * *(const loose *)(v + j * stride + c);
            odd += p[j + 1] * *(const loose *)(v + (j + 1) * stride + c);
        }
        if (j < many) even += p[j] * *(const loose *)(v + j * stride + c);
        AT(o + c) = even + odd;
    }
    for (; c < width; c++) {
        real sum = o[c] * by;
        for (int j = 0; j < many; j++) sum += p[j] * v[j * stride + c];
        o[c] = sum;
    }
}

/* SPLIT keys of one row */
static void decode_unit(const Attention *a, long unit, const void *what, real *memory) {
    const Splits *to = what;
    const Shape *s = &a->s;
    long row = unit / to->splits, begin = unit % to->splits * SPLIT, width = a->V + LANES, from, until;
    real *q = memory, *p = q + s->heads * a->K;
    for (long i = 0; i < s->queries; i++) {
        real *o = to->partial + (unit * s->queries + i) * s->heads * width;
        memset(o, 0, sizeof(real) * s->heads * width);
        for (long head = 0; head < s->heads; head++) {
            load(at(a->q, s->q, row, i, head), 0, 1, 1, (int)s->key, a->K, q + head * a->K);
            scale(a->K, a->scale * (real)LOG2_E, q + head * a->K);
            o[head * width + a->V] = LOWEST;
        }
        visible_keys(a, i, 1, &from, &until);
        from = from < begin ? begin : from, until = until < begin + SPLIT ? until : begin + SPLIT;
        for (; from < until; from += KEYS) {
            int many = (int)clamp(until - from, 0, KEYS);
            decode_scores(a, many, at(a->k, s->k, row, from, 0), at(a->v, s->v, row, from, 0), q, p);
            for (long head = 0; head < s->heads; head++) {
                real *sums = o + head * width, *weights = p + head * KEYS;
                real by = decode_weights(a, many, weights, sums + a->V, sums + a->V + 1);
                decode_values(a, many, at(a->v, s->v, row, from, head / a->shared), weights, by, sums);
            }
        }
    }
}

static int decode(const Attention *a, int threads, real *o) {
    const Shape *s = &a->s;
    Splits to = {.splits = (s->keys + SPLIT - 1) / SPLIT};
    long units = s->rows * to.splits, width = a->V + LANES, next = s->queries * s->heads * width;
    to.partial = aligned(units * next);
    if (!to.partial) return NO_MEMORY;
    int status = for_each_unit(a, units, threads, (size_t)s->heads * (a->K + KEYS), decode_unit, &to);
    for (long one = 0; one < s->rows * s->queries * s->heads && !status; one++) { /* add the splits to the first */
        long row = one / (s->queries * s->heads);
        real *first = to.partial + row * to.splits * next + one % (s->queries * s->heads) * width, *other = first + next;
        for (long split = 1; split < to.splits; split++, other += next) {
            real m = other[a->V] > first[a->V] ? other[a->V] : first[a->V];
            real by = exp2_vector(fill(first[a->V] - m))[0], other_by = exp2_vector(fill(other[a->V] - m))[0];
            first[a->V] = m, first[a->V + 1] = by * first[a->V + 1] + other_by * other[a->V + 1];
            EACH(c, a->V) AT(first + c) = by * AT(first + c) + other_by * AT(other + c);
        }
        scale(a->V, 1 / first[a->V + 1], first);
        copy((int)s->value, first, o + one * s->value);
    }
    free(to.partial);
    return status;
}

int NAME(attention_forward)(const long *shape, double scale, int threads, const real *q, const real *k, const real *v,
                            real *o, real *lse) {
    Attention a = attention(shape, scale, q, k, v);
    if (a.s.queries <= FEW && !lse) return decode(&a, threads, o);
    a.swaps = swaps();
    long blocks = (a.s.queries + QUERIES - 1) / QUERIES, heads = a.s.rows * a.s.heads;
    long unit = clamp(blocks * heads / (4 * threads), 1, 16) * QUERIES, units = (a.s.queries + unit - 1) / unit;
    Results to = {o, lse, unit};
    return for_each_unit(&a, heads * units, threads, forward_memory(&a), forward_unit, &to);
}

/* ---- one token of a whole layer: project, couple, rotate, append to the cache, attend, project */

int NAME(linear_few)(long rows, long inputs, int count, int threads, const long *outputs, const real *const *weights,
                     const real *x, real *y); /* few_rows.c */
int NAME(norm_few)(long rows, long width, double eps, const real *x, const real *weight, real *y);
int NAME(drift_kick_few)(long rows, int width, int hidden, int activation, int steps, int threads, double dt,
                         const double *coefficients, const real *w1, const real *b1, const real *w2, const real *b2,
                         const real *q, const real *k, real *q_out, real *k_out); /* symplectic.c */

typedef struct { /* as passed by the caller */
    long rows, width, heads, groups, key, values, value; /* `width` of the stream; heads of queries, keys and values */
    long slot, first, capacity; /* where the token is stored, and the first slot that it sees, of `capacity` slots */
    long hidden, activation, steps; /* of the coupling */
} Step;

typedef struct {
    const real *x, *projections[3], *output; /* queries, keys and values */
    real *keys, *values; /* the cache, [rows, capacity, groups, key or value] */
    const real *rotation; /* cosine and sine per pair of coordinates, or null */
    const double *coefficients; /* of the coupling, or null; then its force */
    const real *w1, *b1, *w2, *b2;
    const real *head_norm; /* of differential attention, or null */
    real *y;
} StepArrays;

static void rotate(long rows, long width, const real *rotation, real *x) {
    for (; rotation && rows; rows--, x += width)
        for (long i = 0; i < width; i += 2) {
            real even = x[i], odd = x[i + 1], cosine = rotation[i], sine = rotation[i + 1];
            x[i] = even * cosine - odd * sine, x[i + 1] = even * sine + odd * cosine;
        }
}

/* differential attention: the first of each pair of maps minus `lam` times the second, normalized and scaled */
static void subtract_maps(long pairs, long width, double lam, double by, const real *norm, real *o) {
    for (long i = 0; i < pairs; i++)
        for (long j = 0; j < width; j++) o[i * width + j] = o[2 * i * width + j] - (real)lam * o[(2 * i + 1) * width + j];
    NAME(norm_few)(pairs, width, 1e-5, o, norm, o);
    for (long i = 0; i < pairs * width; i++) o[i] *= (real)by;
}

int NAME(attention_layer_few)(double scale, double dt, double lam, double norm_scale, int threads, int linear_threads, const Step *s,
                              const StepArrays *to) {
    long q_size = s->heads * s->key, k_size = s->groups * s->key, v_size = s->values * s->value, o_size = s->heads * s->value;
    long sizes[] = {q_size, k_size, v_size};
    real *q = aligned(s->rows * (q_size + k_size + v_size + o_size));
    if (!q) return NO_MEMORY;
    real *k = q + s->rows * q_size, *v = k + s->rows * k_size, *o = v + s->rows * v_size;
    int status = NAME(linear_few)(s->rows, s->width, 3, linear_threads, sizes, to->projections, to->x, q);
    if (to->coefficients)
        status |= NAME(drift_kick_few)(s->rows * s->heads, (int)s->key, (int)s->hidden, (int)s->activation, (int)s->steps, 1,
                                       dt, to->coefficients, to->w1, to->b1, to->w2, to->b2, q, k, q, k);
    rotate(s->rows * s->heads, s->key, to->rotation, q);
    rotate(s->rows * s->groups, s->key, to->rotation, k);
    for (long row = 0; row < s->rows; row++) {
        long at = row * s->capacity + s->slot;
        memcpy(to->keys + at * k_size, k + row * k_size, sizeof(real) * k_size);
        memcpy(to->values + at * v_size, v + row * v_size, sizeof(real) * v_size);
    }
    long shape[] = {s->rows, 1, s->slot + 1 - s->first, s->heads, s->groups, s->key, s->value, 0,
                    q_size, q_size, s->key, s->capacity * k_size, k_size, s->key, s->capacity * v_size, v_size, s->value, 0, 0, 0};
    Attention a = attention(shape, scale, q, to->keys + s->first * k_size, to->values + s->first * v_size);
    a.shared = s->heads / s->values;
    status |= decode(&a, threads, o);
    if (to->head_norm) subtract_maps(s->rows * s->heads / 2, s->value, lam, norm_scale, to->head_norm, o), o_size /= 2;
    status |= NAME(linear_few)(s->rows, o_size, 1, linear_threads, &s->width, &to->output, o, to->y);
    free(q);
    return status;
}

/* ---- backward */

typedef struct {
    const real *go, *o, *lse;
    real *gq, *gk, *gv; /* contiguous */
} Gradients;

typedef struct { /* of a key head: keys, values and their gradients; of a block: queries, output gradients, scores */
    real *keys, *values, *gkeys, *gvalues, *Q, *QT, *gQT, *gO, *gOT, *P, *gS, *L, *D;
} Tiles;

static size_t backward_memory(const Attention *a) {
    return 2 * (size_t)all_keys(a) * (a->K + a->V) + (size_t)QUERIES * (3 * a->K + 2 * a->V + 2 * KEYS + 2);
}

static Tiles tiles(const Attention *a, real *memory) {
    long K = (long)QUERIES * a->K, V = (long)QUERIES * a->V, keys = all_keys(a);
    Tiles t = {.keys = memory};
    t.values = t.keys + keys * a->K, t.gkeys = t.values + keys * a->V, t.gvalues = t.gkeys + keys * a->K;
    t.Q = t.gvalues + keys * a->V, t.QT = t.Q + K, t.gQT = t.QT + K, t.gO = t.gQT + K, t.gOT = t.gO + V;
    t.P = t.gOT + V, t.gS = t.P + QUERIES * KEYS, t.L = t.gS + QUERIES * KEYS, t.D = t.L + QUERIES;
    return t;
}

/* P from S, and dS from V dO^T, in place; one vector of queries */
static void score_gradients(int c, Range j, const Tiles *t) {
    vector L = AT(t->L + c), D = AT(t->D + c);
#pragma GCC unroll 4
    for (int i = j.from; i < j.to; i++) {
        real *P = t->P + (long)i * QUERIES + c, *gS = t->gS + (long)i * QUERIES + c;
        vector p = exp2_vector(AT(P) - L);
        AT(P) = p;
        AT(gS) = p * (AT(gS) - D);
    }
}

/* to += P rows, for the rows of queries that are visible */
static void add_rows(const Attention *a, long ahead, int many, int count, int columns, const real *P, const real *rows,
                     int width, real *to) {
    if (is_full(a, ahead, many, columns)) {
        add_product(grouped(many), width, count, P, QUERIES, 1, rows, width, to, width);
        return;
    }
    for (int j = 0; j < many; j += STRIP) {
        int some = many - j < STRIP ? many - j : STRIP;
        Range c = columns_of(a, ahead, j, some, columns);
        if (c.to > count) c.to = count;
        if (c.from < c.to)
            add_product(grouped(some), width, c.to - c.from, P + (long)j * QUERIES + c.from, QUERIES, 1,
                        rows + (long)c.from * width, width, to + (long)j * width, width);
    }
}

static real dot_loose(int count, const real *x, const real *y) {
    vector sums = {0};
    int i = 0;
    for (; i + LANES <= count; i += LANES) sums += *(const loose *)(x + i) * *(const loose *)(y + i);
    real sum = total(sums);
    for (; i < count; i++) sum += x[i] * y[i];
    return sum;
}

/* equation (2) for a block of queries of one head: adds to the gradients of keys and values */
static void backward_block(const Attention *a, long row, long head, long first, const Gradients *g, const Tiles *t) {
    const Shape *s = &a->s;
    int count = (int)clamp(s->queries - first, 0, QUERIES), columns = padded(count);
    long start, until, place = (row * s->queries + first) * s->heads + head;
    const real *q = at(a->q, s->q, row, first, head), *go = at(g->go, s->go, row, first, head);
    load(q, s->q.token, count, count, (int)s->key, a->K, t->Q);
    load_transposed(a, q, s->q.token, count, (int)s->key, a->scale * (real)LOG2_E, t->QT);
    load(go, s->go.token, count, count, (int)s->value, a->V, t->gO);
    load_transposed(a, go, s->go.token, count, (int)s->value, 1, t->gOT);
    memset(t->gQT, 0, sizeof(real) * QUERIES * a->K);
    for (int i = 0; i < columns; i++) {
        t->D[i] = i < count ? dot_loose((int)s->value, g->o + (place + i * s->heads) * s->value, t->gO + (long)i * a->V) : 0;
        t->L[i] = i < count ? g->lse[(row * s->heads + head) * s->queries + first + i] : 0;
    }
    visible_keys(a, first, count, &start, &until);
    for (; start < until; start += KEYS) {
        int many = (int)clamp(until - start, 0, KEYS);
        long ahead = first + s->keys - s->queries - start;
        int full = is_full(a, ahead, many, columns);
        scores(a, ahead, many, columns, (int)s->key, t->keys + start * a->K, a->K, t->QT, t->P);
        scores(a, ahead, many, columns, (int)s->value, t->values + start * a->V, a->V, t->gOT, t->gS);
        EACH(c, columns) {
            Range j = full ? (Range){0, many} : rows_of(a, ahead, c, many);
            score_gradients(c, j, t);
            if (!full) hide(a, ahead, c, j, 0, t->P), hide(a, ahead, c, j, 0, t->gS);
        }
        for (int i = many; i < grouped(many); i++) /* keys of another tile */
            for (int c = 0; c < columns; c++) t->P[(long)i * QUERIES + c] = t->gS[(long)i * QUERIES + c] = 0;
        add_rows(a, ahead, many, count, columns, t->P, t->gO, a->V, t->gvalues + start * a->V);
        add_rows(a, ahead, many, count, columns, t->gS, t->Q, a->K, t->gkeys + start * a->K);
        add_transposed(a, ahead, many, columns, (int)s->key, t->keys + start * a->K, a->K, t->gS, t->gQT);
    }
    for (long j = 0; j < s->key; j++) scale(columns, a->scale, t->gQT + j * QUERIES);
    transpose(&a->swaps, (int)s->key, count, t->gQT, QUERIES, g->gq + place * s->key, (int)(s->heads * s->key));
}

/* a key head and the query heads that share it */
static void backward_group(const Attention *a, long unit, const void *what, real *memory) {
    const Gradients *g = what;
    const Shape *s = &a->s;
    long row = unit / s->groups, group = unit % s->groups, shared = s->heads / s->groups, keys = s->keys;
    Tiles t = tiles(a, memory);
    load(at(a->k, s->k, row, 0, group), s->k.token, keys, all_keys(a), (int)s->key, a->K, t.keys);
    load(at(a->v, s->v, row, 0, group), s->v.token, keys, all_keys(a), (int)s->value, a->V, t.values);
    memset(t.gkeys, 0, sizeof(real) * all_keys(a) * (a->K + a->V));
    for (long head = group * shared; head < (group + 1) * shared; head++)
        for (long first = 0; first < s->queries; first += QUERIES) backward_block(a, row, head, first, g, &t);
    for (long j = 0; j < keys; j++) {
        long place = (row * keys + j) * s->groups + group;
        scale(a->K, a->scale, t.gkeys + j * a->K);
        copy((int)s->key, t.gkeys + j * a->K, g->gk + place * s->key);
        copy((int)s->value, t.gvalues + j * a->V, g->gv + place * s->value);
    }
}

int NAME(attention_backward)(const long *shape, double scale, int threads, const real *q, const real *k, const real *v,
                             const real *go, const real *o, const real *lse, real *gq, real *gk, real *gv) {
    Attention a = attention(shape, scale, q, k, v);
    a.swaps = swaps();
    Gradients g = {go, o, lse, gq, gk, gv};
    return for_each_unit(&a, a.s.rows * a.s.groups, threads, backward_memory(&a), backward_group, &g);
}
