/* LayerNorm of rows in bfloat16: mean, then variance about it, in float32; a row is read from memory once. */

#include <math.h>
#include <omp.h>

#include "product.h"

enum { STEP = 16, ALONE = 1 << 14 /* numbers that one thread does sooner than two can agree on it */ };

static __mmask16 lanes(long left) { return left >= STEP ? (__mmask16)-1 : (__mmask16)((1 << left) - 1); }

static __m512 read(const bf16 *at, long i, long n) { return widened(_mm256_maskz_loadu_epi16(lanes(n - i), at + i)); }

static void one_row(const bf16 *x, const bf16 *weight, const bf16 *bias, bf16 *y, long n, float eps) {
    __m512 sum = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
    for (long i = 0; i < n; i += STEP) sum = _mm512_add_ps(sum, read(x, i, n));
    const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / (float)n);
    for (long i = 0; i < n; i += STEP) {
        __m512 off = _mm512_maskz_sub_ps(lanes(n - i), read(x, i, n), mean);
        squares = _mm512_fmadd_ps(off, off, squares);
    }
    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)n + eps));
    for (long i = 0; i < n; i += STEP) {
        __m512 v = _mm512_mul_ps(_mm512_sub_ps(read(x, i, n), mean), scale);
        if (weight) v = _mm512_mul_ps(v, read(weight, i, n));
        if (bias) v = _mm512_add_ps(v, read(bias, i, n));
        _mm256_mask_storeu_epi16(y + i, lanes(n - i), (__m256i)_mm512_cvtneps_pbh(v));
    }
}

/* x (rows, n) with `stride` elements from row to row, y (rows, n); weight and bias (n) or NULL. */
void layer_norm(const bf16 *x, const bf16 *weight, const bf16 *bias, bf16 *y, long rows, long n, long stride, double eps,
                int threads) {
    if (rows * n < ALONE) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long row = 0; row < rows; row++)
        one_row(x + row * stride, weight, bias, y + row * n, n, (float)eps);
}
