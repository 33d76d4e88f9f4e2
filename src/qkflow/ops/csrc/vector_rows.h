/* Rows of whole vectors: copies, scaled sums, dot products and transposes. */

#include "gemm_tiles.h"

typedef __typeof__((vector){0} == (vector){0}) Lanes; /* integers of the same size */
typedef real loose __attribute__((vector_size(BYTES), aligned(sizeof(real)))); /* an unaligned vector */

static inline int grouped(int n) { return (n + DOWN - 1) / DOWN * DOWN; }

static inline void copy(int count, const real *from, real *to) {
    int i = 0;
    for (; i + LANES <= count; i += LANES) *(loose *)(to + i) = *(const loose *)(from + i);
    for (; i < count; i++) to[i] = from[i];
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

#if defined(__GNUC__) && !defined(__clang__)
enum { SHUFFLES = 1 };
#define SHUFFLE(x, y, places) __builtin_shuffle(x, y, places)
#else
enum { SHUFFLES = 0 };
#define SHUFFLE(x, y, places) (x)
#endif
typedef struct { /* shuffles that swap the halves, quarters, ... of two rows of a square: the new upper and lower row */
    Lanes low[4], high[4];
    Lanes below[LANES], until[LANES]; /* masks of the lanes below i, excluding and including i */
} Swaps;

static inline Swaps swaps(void) {
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

/* b[j, i] = a[i, j] */
static __attribute__((unused)) void transpose(const Swaps *swaps, int rows, int columns, const real *restrict a, int lda, real *restrict b, int ldb) {
    int i = 0;
    for (; SHUFFLES && i + LANES <= rows; i += LANES) {
        int j = 0;
        for (; j + LANES <= columns; j += LANES) { /* transpose a square: swap its quarters, their quarters, and so on */
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
