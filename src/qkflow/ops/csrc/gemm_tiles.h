/* Shared by all kernels: SIMD vectors, products of small matrices, aligned memory and an exponential.
   Compiled once per precision (REAL); rows are padded with zeros to whole vectors. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define PASTE(a, b) a##_##b
#define WITH(a, b) PASTE(a, b)
#define NAME(a) WITH(a, REAL)
typedef REAL real;

#if defined(__AVX512F__)
enum { BYTES = 64, ACROSS = 4, SUMS = 24, PIECES = 4 };
#elif defined(__AVX__)
enum { BYTES = 32, ACROSS = 3, SUMS = 12, PIECES = 4 };
#else
enum { BYTES = 16, ACROSS = 3, SUMS = 12, PIECES = 2 };
#endif
/* bytes per vector; vectors per tile row; accumulators; tile rows are multiples of DOWN, or HIGH if registers allow */
enum { LANES = BYTES / sizeof(real), DOWN = 4, HIGH = 8 };
typedef real vector __attribute__((vector_size(BYTES)));

static int padded(int n) { return (n + LANES - 1) / LANES * LANES; }

static real *aligned(size_t count) {
    size_t bytes = (count * sizeof(real) + 63) / 64 * 64;
    real *memory = aligned_alloc(64, bytes ? bytes : 64);
    if (memory) memset(memory, 0, bytes);
    return memory;
}

/* Flush denormal numbers to zero in this thread, from `flush` to `restore`: decaying values become denormal, and
   arithmetic with them is a hundred times slower. */
#if defined(__SSE2__)
typedef unsigned int Mode;
static inline Mode flush(void) {
    Mode before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before | 0x8040);
    return before;
}
static inline void restore(Mode before) { __builtin_ia32_ldmxcsr(before); }
#elif defined(__aarch64__)
typedef unsigned long Mode;
static inline Mode flush(void) {
    Mode before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(before | 1UL << 24));
    return before;
}
static inline void restore(Mode before) { __asm__ volatile("msr fpcr, %0" : : "r"(before)); }
#else
typedef int Mode;
static inline Mode flush(void) { return 0; }
static inline void restore(Mode before) { (void)before; }
#endif

/* c[i, j] (+)= sum_l a[i, l] b[l, j] for a tile of rows and whole vectors of columns; a[i, l] is a[i * ai + l * al] */
static inline __attribute__((always_inline)) void block(const int add, const int rows, const int columns, int depth,
                                                        const real *a, long ai, long al, const real *b, int ldb, real *c,
                                                        int ldc) {
    vector sum[HIGH][ACROSS] = {{{0}}};
    if (add)
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
            for (int j = 0; j < columns; j++) sum[i][j] = *(vector *)(c + (long)i * ldc + j * LANES);
#pragma GCC unroll 4
    for (int l = 0; l < depth; l++) {
        vector row[ACROSS];
#pragma GCC unroll 4
        for (int j = 0; j < columns; j++) row[j] = *(const vector *)(b + (long)l * ldb + j * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            real x = a[i * ai + l * al];
#pragma GCC unroll 4
            for (int j = 0; j < columns; j++) sum[i][j] += x * row[j];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < columns; j++) *(vector *)(c + (long)i * ldc + j * LANES) = sum[i][j];
}

/* the same for any number of rows in groups of DOWN: narrower tiles leave registers for more rows */
static inline __attribute__((always_inline)) void strip(const int add, const int columns, int rows, int depth,
                                                        const real *a, long ai, long al, const real *b, int ldb, real *c,
                                                        int ldc) {
    int i = 0;
    if (columns * HIGH <= SUMS)
        for (; i + HIGH <= rows; i += HIGH)
            block(add, HIGH, columns, depth, a + i * ai, ai, al, b, ldb, c + (long)i * ldc, ldc);
    for (; i < rows; i += DOWN) block(add, DOWN, columns, depth, a + i * ai, ai, al, b, ldb, c + (long)i * ldc, ldc);
}

static inline __attribute__((always_inline)) void multiply(const int add, int rows, int columns, int depth, const real *a,
                                                           long ai, long al, const real *b, int ldb, real *c, int ldc) {
    for (int j = 0; j < columns;) {
        int left = (columns - j) / LANES, now = left < ACROSS ? left : ACROSS;
        if (now == 1)
            strip(add, 1, rows, depth, a, ai, al, b + j, ldb, c + j, ldc);
        else if (now == 2)
            strip(add, 2, rows, depth, a, ai, al, b + j, ldb, c + j, ldc);
        else if (now == 3)
            strip(add, 3, rows, depth, a, ai, al, b + j, ldb, c + j, ldc);
        else
            strip(add, ACROSS, rows, depth, a, ai, al, b + j, ldb, c + j, ldc);
        j += now * LANES;
    }
}

/* c += a b */
static __attribute__((noinline)) void add_product(int rows, int columns, int depth, const real *a, long ai, long al,
                                                  const real *b, int ldb, real *c, int ldc) {
    multiply(1, rows, columns, depth, a, ai, al, b, ldb, c, ldc);
}

/* c = a b */
static __attribute__((noinline, unused)) void product(int rows, int columns, int depth, const real *a, long ai, long al,
                                                      const real *b, int ldb, real *c, int ldc) {
    multiply(0, rows, columns, depth, a, ai, al, b, ldb, c, ldc);
}

static inline real total(vector x) {
    typedef real piece __attribute__((vector_size(BYTES / PIECES)));
    union {
        vector whole;
        piece parts[PIECES];
    } of = {x};
    piece sums = of.parts[0] + of.parts[1];
    for (int i = 2; i < PIECES; i++) sums += of.parts[i];
    real sum = 0;
    for (int l = 0; l < LANES / PIECES; l++) sum += sums[l];
    return sum;
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
