/* Products of a tall matrix, one row per token, with the small weight of a linear layer: see qkflow/ops/linear.py.

       y = x W^T                  gx = gy W                  gW = gy^T x                    x [n, i], y [n, o], W [o, i]

   A tile of the result stays in registers while the kernel passes over the depth; the right factor is read as whole
   vectors, from a padded copy where its rows are not. A tile belongs to one thread and its sum has a fixed order:
   results do not depend on the number of threads. Compiled once per precision (REAL). */

#include "vector_rows.h"

enum { ROWS = 256, DEPTH = 512 }; /* rows per task, of x and y; depth of a pass for gW */

typedef struct { /* a matrix [rows, depth] whose element i, l is at i * row + l * column */
    const real *at;
    long row, column;
} Left;

static inline void store(vector x, int count, real *to) {
    if (count >= LANES)
        *(loose *)to = x;
    else
        for (int i = 0; i < count; i++) to[i] = x[i];
}

static inline vector load(int count, const real *from) {
    if (count >= LANES) return *(const loose *)from;
    vector x = {0};
    for (int i = 0; i < count; i++) x[i] = from[i];
    return x;
}

/* c (+)= a b for a tile; `columns` vectors, of which the last has `tail` columns; b has whole vectors */
static inline __attribute__((always_inline)) void tile(const int add, const int rows, const int columns, int tail, long depth,
                                                       Left a, const real *b, long ldb, real *c, long ldc) {
    vector sum[HIGH][ACROSS] = {{{0}}};
#pragma GCC unroll 4
    for (long l = 0; l < depth; l++) {
        vector row[ACROSS];
#pragma GCC unroll 4
        for (int j = 0; j < columns; j++) row[j] = *(const loose *)(b + l * ldb + j * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            real x = a.at[i * a.row + l * a.column];
#pragma GCC unroll 4
            for (int j = 0; j < columns; j++) sum[i][j] += x * row[j];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < columns; j++) {
            real *to = c + i * ldc + j * LANES;
            int count = j == columns - 1 ? tail : LANES;
            store(add ? load(count, to) + sum[i][j] : sum[i][j], count, to);
        }
}

static inline __attribute__((always_inline)) void panel(const int add, const int columns, int tail, long rows, long depth,
                                                        Left a, const real *b, long ldb, real *c, long ldc) {
    long i = 0;
#define TILE(count)                                                                  \
    tile(add, count, columns, tail, depth, (Left){a.at + i * a.row, a.row, a.column}, b, ldb, c + i * ldc, ldc)
    if (columns * HIGH <= SUMS)
        for (; i + HIGH <= rows; i += HIGH) TILE(HIGH);
    for (; i + DOWN <= rows; i += DOWN) TILE(DOWN);
    for (; i < rows; i++) TILE(1);
#undef TILE
}

/* c (+)= a b for `width` columns, of which a panel of at most ACROSS vectors is computed at a time */
static inline __attribute__((always_inline)) void multiply_panels(const int add, long rows, long width, long depth, Left a,
                                                                  const real *b, long ldb, real *c, long ldc) {
    for (long j = 0; j < width;) {
        long left = (width - j + LANES - 1) / LANES;
        int now = left <= ACROSS ? (int)left : left < 2 * ACROSS ? (int)(left + 1) / 2 : ACROSS; /* no narrow last panel */
        long end = j + now * LANES;
        int tail = end <= width ? LANES : LANES - (int)(end - width);
        if (now == 1)
            panel(add, 1, tail, rows, depth, a, b + j, ldb, c + j, ldc);
        else if (now == 2)
            panel(add, 2, tail, rows, depth, a, b + j, ldb, c + j, ldc);
        else if (now == 3)
            panel(add, 3, tail, rows, depth, a, b + j, ldb, c + j, ldc);
        else
            panel(add, ACROSS, tail, rows, depth, a, b + j, ldb, c + j, ldc);
        j = end;
    }
}

static __attribute__((noinline)) void set_product(long rows, long width, long depth, Left a, const real *b, long ldb,
                                                  real *c, long ldc) {
    multiply_panels(0, rows, width, depth, a, b, ldb, c, ldc);
}

static __attribute__((noinline)) void increase_product(long rows, long width, long depth, Left a, const real *b, long ldb,
                                                       real *c, long ldc) {
    multiply_panels(1, rows, width, depth, a, b, ldb, c, ldc);
}

/* rows padded with zeros to whole vectors; the caller frees them */
static real *pad_rows(long rows, long width, const real *from) {
    long all = padded((int)width);
    real *to = aligned((size_t)rows * all);
    for (long i = 0; to && i < rows; i++) memcpy(to + i * all, from + i * width, sizeof(real) * width);
    return to;
}

/* y = a b, or y += a b, for a [n, depth] and b [depth, width] with rows of whole vectors */
static void tall_product(long n, long width, long depth, const real *a, const real *b, real *y, int add, int threads) {
    long tasks = (n + ROWS - 1) / ROWS, ldb = padded((int)width);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long task = 0; task < tasks; task++) {
        long first = task * ROWS, rows = n - first < ROWS ? n - first : ROWS;
        (add ? increase_product : set_product)(rows, width, depth, (Left){a + first * depth, depth, 1}, b, ldb,
                                               y + first * width, width);
    }
}

int NAME(linear)(long n, long inputs, long outputs, int threads, const real *x, const real *weight, real *y) {
    long all = padded((int)outputs);
    Swaps s = swaps();
    real *transposed = aligned((size_t)inputs * all);
    if (!transposed) return 1;
    transpose(&s, (int)outputs, (int)inputs, weight, (int)inputs, transposed, (int)all);
    tall_product(n, outputs, inputs, x, transposed, y, 0, threads);
    free(transposed);
    return 0;
}

/* gx (+)= gy W */
int NAME(linear_input_backward)(long n, long inputs, long outputs, int add, int threads, const real *gy, const real *weight,
                                real *gx) {
    real *copy = inputs % LANES ? pad_rows(outputs, inputs, weight) : 0;
    if (inputs % LANES && !copy) return 1;
    tall_product(n, inputs, outputs, gy, copy ? copy : weight, gx, add, threads);
    free(copy);
    return 0;
}

int NAME(linear_weight_backward)(long n, long inputs, long outputs, int threads, const real *gy, const real *x,
                                 real *gweight) {
    enum { OUTPUTS = 48 }; /* outputs per task */
    long tasks = (outputs + OUTPUTS - 1) / OUTPUTS, ldx = padded((int)inputs);
    real *copy = inputs % LANES ? pad_rows(n, inputs, x) : 0;
    if (inputs % LANES && !copy) return 1;
    if (copy) x = copy;
    memset(gweight, 0, sizeof(real) * inputs * outputs);
    for (long l = 0; l < n; l += DEPTH) {
        long depth = n - l < DEPTH ? n - l : DEPTH;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (long task = 0; task < tasks; task++) {
            long first = task * OUTPUTS, rows = outputs - first < OUTPUTS ? outputs - first : OUTPUTS;
            increase_product(rows, inputs, depth, (Left){gy + l * outputs + first, 1, outputs}, x + l * ldx, ldx,
                             gweight + first * inputs, inputs);
        }
    }
    free(copy);
    return 0;
}
