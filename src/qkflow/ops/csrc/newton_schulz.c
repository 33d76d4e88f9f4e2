/* The Newton-Schulz iteration of Muon: see qkflow/ops/newton_schulz.py.

       X = X / |X|,   then repeatedly   A = X X^T,   B = b A + c A A,   X = a X + B X           X [m, n] with m <= n

   A and B are symmetric: only the blocks on and below the diagonal are computed. A matrix belongs to one thread: results
   do not depend on the number of threads. Compiled once per precision (REAL). */

#include "vector_rows.h"

enum { BLOCK = 64 };

static long rounded(long n) { return (n + 15) / 16 * 16; }

/* c = a b, symmetric; a is [size, depth], b [depth, size] */
static void symmetric_product(const Swaps *s, int size, int depth, const real *a, int lda, const real *b, real *c) {
    for (int j = 0; j < size; j += BLOCK) {
        int columns = size - j < BLOCK ? size - j : BLOCK;
        product(size - j, columns, depth, a + (long)j * lda, lda, 1, b + j, size, c + (long)j * size + j, size);
        for (int i = j + BLOCK; i < size; i += BLOCK) {
            int rows = size - i < BLOCK ? size - i : BLOCK;
            transpose(s, rows, columns, c + (long)i * size + j, size, c + (long)j * size + i, size);
        }
    }
}

static real norm_of(long count, const real *x) {
    vector sum = {0};
    for (long i = 0; i < count; i += LANES) sum += OF(x + i) * OF(x + i);
    return (real)sqrt(total(sum));
}

static void orthogonalize(const Swaps *s, int m, int n, int steps, const double *coefficients, int is_tall,
                          const real *from, real *to, real *memory) {
    int M = (int)rounded(m), N = (int)rounded(n);
    long size = (long)M * N, square = (long)M * M;
    real *X = memory, *XT = X + size, *BX = XT + size, *A = BX + size, *B = A + square;
    real a = (real)coefficients[0], b = (real)coefficients[1], c = (real)coefficients[2];
    memset(X, 0, sizeof(real) * size);
    if (is_tall)
        transpose(s, n, m, from, m, X, N);
    else
        for (int i = 0; i < m; i++) memcpy(X + (long)i * N, from + (long)i * n, sizeof(real) * n);
    real by = 1 / (norm_of(size, X) + (real)1e-7);
    for (long i = 0; i < size; i++) X[i] *= by;
    for (int step = 0; step < steps; step++) {
        transpose(s, M, N, X, N, XT, M);
        symmetric_product(s, M, N, X, N, XT, A);
        symmetric_product(s, M, M, A, M, A, B);
        for (long i = 0; i < square; i++) B[i] = b * A[i] + c * B[i];
        product(M, N, M, B, M, 1, X, N, BX, N);
        for (long i = 0; i < size; i++) X[i] = a * X[i] + BX[i];
    }
    if (is_tall)
        transpose(s, m, n, X, N, to, m);
    else
        for (int i = 0; i < m; i++) memcpy(to + (long)i * n, X + (long)i * N, sizeof(real) * n);
}

/* matrices [count, rows, columns]; `coefficients` are a, b and c */
int NAME(newton_schulz)(long count, int rows, int columns, int steps, int threads, const double *coefficients,
                        const real *from, real *to) {
    int is_tall = rows > columns, m = is_tall ? columns : rows, n = is_tall ? rows : columns;
    size_t room = (size_t)(3 * rounded(m) * rounded(n) + 2 * rounded(m) * rounded(m));
    Swaps s = swaps();
    if (threads > count) threads = count ? (int)count : 1;
    real *memory = aligned(room * threads);
    if (!memory) return 1;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int thread = 0; thread < threads; thread++)
        for (long i = thread; i < count; i += threads)
            orthogonalize(&s, m, n, steps, coefficients, is_tall, from + i * rows * columns, to + i * rows * columns,
                          memory + room * thread);
    free(memory);
    return 0;
}
