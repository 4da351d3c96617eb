/* LayerNorm and RMSNorm of rows in bfloat16: statistics in float32; a row is read from memory once.

   Zhang and Sennrich, arXiv 1910.07467, for the second. */

#include <math.h>

#include "product.h"
#include "team.h"

enum {
    STEP = 16,
    ALONE = 1 << 14, /* numbers that one thread does sooner than two can agree on it */
    TURNS = 4,       /* of a thread */
};

static __m512 read(const bf16 *at, long i, long n) {
    return widened(_mm256_maskz_loadu_epi16(first_lanes(n - i), at + i));
}

static void one_row(const bf16 *x, const bf16 *weight, const bf16 *bias, bf16 *y, long n, float eps) {
    __m512 sum = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
    for (long i = 0; i < n; i += STEP) sum = _mm512_add_ps(sum, read(x, i, n));
    const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / (float)n);
    for (long i = 0; i < n; i += STEP) {
        __m512 off = _mm512_maskz_sub_ps(first_lanes(n - i), read(x, i, n), mean);
        squares = _mm512_fmadd_ps(off, off, squares);
    }
    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)n + eps));
    for (long i = 0; i < n; i += STEP) {
        __m512 v = _mm512_mul_ps(_mm512_sub_ps(read(x, i, n), mean), scale);
        if (weight) v = _mm512_mul_ps(v, read(weight, i, n));
        if (bias) v = _mm512_add_ps(v, read(bias, i, n));
        _mm256_mask_storeu_epi16(y + i, first_lanes(n - i), (__m256i)_mm512_cvtneps_pbh(v));
    }
}

/* x over its root mean square, rounded, times weight. With an offset to the weight nothing is rounded in between. */
static void one_rms(const bf16 *x, const bf16 *weight, bf16 *y, long n, float eps, float offset) {
    __m512 squares = _mm512_setzero_ps();
    for (long i = 0; i < n; i += STEP) squares = _mm512_fmadd_ps(read(x, i, n), read(x, i, n), squares);
    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)n + eps));
    for (long i = 0; i < n; i += STEP) {
        __m512 v = _mm512_mul_ps(read(x, i, n), scale);
        if (weight && offset == 0) v = widened((__m256i)_mm512_cvtneps_pbh(v));
        if (weight) v = _mm512_mul_ps(v, _mm512_add_ps(read(weight, i, n), _mm512_set1_ps(offset)));
        _mm256_mask_storeu_epi16(y + i, first_lanes(n - i), (__m256i)_mm512_cvtneps_pbh(v));
    }
}

typedef struct {
    const bf16 *x, *weight, *bias;
    bf16 *y;
    long rows, n, stride, turn; /* rows taken at a time */
    float eps, offset;
    int rms;
    int64_t next; /* row that nobody has taken */
} Norm;

static void take_rows(void *task, int member) {
    Norm *all = task;
    (void)member;
    for (long first; (first = claim(&all->next, all->turn)) < all->rows;)
        for (long row = first; row < all->rows && row < first + all->turn; row++) {
            const bf16 *x = all->x + row * all->stride;
            bf16 *y = all->y + row * all->n;
            if (all->rms) one_rms(x, all->weight, y, all->n, all->eps, all->offset);
            else one_row(x, all->weight, all->bias, y, all->n, all->eps);
        }
}

/* x (rows, n) with `stride` elements from row to row, y (rows, n); weight and bias (n) or NULL. `rms`: RMSNorm, which
   knows no bias, but an offset to its weight. */
void norm(const bf16 *x, const bf16 *weight, const bf16 *bias, bf16 *y, long rows, long n, long stride, double eps,
          double offset, int rms, int threads) {
    const long turn = rows / (TURNS * threads) + 1;
    Norm all = {x, weight, bias, y, rows, n, stride, turn, (float)eps, (float)offset, rms, 0};
    team_run(take_rows, &all, rows * n < ALONE ? 1 : threads);
}
