/* What the kernels share: vectors as wide as the processor's, products of small matrices, memory, and an exponential.
   Compiled once for each precision (REAL); rows are padded to whole vectors with zeros. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define PASTE(a, b) a##_##b
#define WITH(a, b) PASTE(a, b)
#define NAME(a) WITH(a, REAL)
typedef REAL real;

#if defined(__AVX512F__)
enum { BYTES = 64, ACROSS = 4, PIECES = 4 };
#elif defined(__AVX__)
enum { BYTES = 32, ACROSS = 2, PIECES = 4 };
#else
enum { BYTES = 16, ACROSS = 2, PIECES = 2 };
#endif
enum { LANES = BYTES / sizeof(real), DOWN = 4 };
typedef real vector __attribute__((vector_size(BYTES)));

static int padded(int n) { return (n + LANES - 1) / LANES * LANES; }

static real *aligned(size_t count) {
    size_t bytes = (count * sizeof(real) + 63) / 64 * 64;
    real *memory = aligned_alloc(64, bytes ? bytes : 64);
    if (memory) memset(memory, 0, bytes);
    return memory;
}

/* c[i, j] += sum_l a[i, l] b[l, j] for DOWN rows and some whole vectors of columns; a[i, l] lies at a[i * ai + l * al] */
static inline __attribute__((always_inline)) void block(const int columns, int depth, const real *a, long ai, long al,
                                                        const real *b, int ldb, real *c, int ldc) {
    vector sum[DOWN][ACROSS];
#pragma GCC unroll 4
    for (int i = 0; i < DOWN; i++)
#pragma GCC unroll 4
        for (int j = 0; j < columns; j++) sum[i][j] = *(vector *)(c + (long)i * ldc + j * LANES);
    for (int l = 0; l < depth; l++) {
        vector row[ACROSS];
#pragma GCC unroll 4
        for (int j = 0; j < columns; j++) row[j] = *(const vector *)(b + (long)l * ldb + j * LANES);
#pragma GCC unroll 4
        for (int i = 0; i < DOWN; i++) {
            real x = a[i * ai + l * al];
#pragma GCC unroll 4
            for (int j = 0; j < columns; j++) sum[i][j] += x * row[j];
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < DOWN; i++)
#pragma GCC unroll 4
        for (int j = 0; j < columns; j++) *(vector *)(c + (long)i * ldc + j * LANES) = sum[i][j];
}

static void add_product(int rows, int columns, int depth, const real *a, long ai, long al, const real *b, int ldb, real *c,
                        int ldc) {
    for (int j = 0; j < columns;) {
        int left = (columns - j) / LANES, now = left >= ACROSS ? ACROSS : left >= 2 ? 2 : 1;
        for (int i = 0; i < rows; i += DOWN) {
            const real *at = a + i * ai;
            real *to = c + (long)i * ldc + j;
            if (now == ACROSS)
                block(ACROSS, depth, at, ai, al, b + j, ldb, to, ldc);
            else if (now == 2)
                block(2, depth, at, ai, al, b + j, ldb, to, ldc);
            else
                block(1, depth, at, ai, al, b + j, ldb, to, ldc);
        }
        j += now * LANES;
    }
}

static inline float exponential_float(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = rintf(x * 1.44269504f), r = x - n * 0.693359375f + n * 2.12194440e-4f, y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    union { int bits; float value; } power = {((int)n + 127) << 23};
    return y * power.value;
}

static inline double exponential_double(double x) { return exp(x); }
