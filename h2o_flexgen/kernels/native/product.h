/* What products of bfloat16 numbers have in common: what is multiplied, and what becomes of the sums. */
#ifndef PRODUCT_H
#define PRODUCT_H

#include "simd.h"
#include "weights.h"

typedef struct {
    const bf16 *x, *w, *bias; /* (rows, ins), (outs, ins) contiguous, (outs) or NULL */
    void *y;                  /* (rows, outs) */
    long rows, outs, ins;
    long x_stride, y_stride; /* elements from row to row */
    int wide;                /* y is float32, not bfloat16 */
    int relu;                /* what is negative becomes 0 */
    int onto;                /* the rounded product is added to what y holds; not with `wide` */
    const Packed *packed;    /* the weights, where they are not in w */
} Product;

/* None of the tensors is empty. Each returns 0, or 1 where memory is short. `gemm` takes an even number of inputs, `whole`
   packed weights that `takes_whole` says. */
int linear(const Product *p, int threads);
int gemm(const Product *p, int threads);
int whole(const Product *p, int threads);
int takes_whole(const Packed *w);

/* A `Product`, field by field, by one of these: by `whole` if `wholly`. */
int product(const bf16 *x, const bf16 *w, const bf16 *bias, void *y, long rows, long outs, long ins, long x_stride,
            long y_stride, int wide, int relu, int onto, int threads, const Packed *packed, int wholly);

/* Writes y for `rows` and `outs` from `row` and `out` on; rows of sums are `pitch` apart. Bias is added, results are
   rounded to nearest even, NaN stays NaN. Row by row: whole cache lines are written at once. */
static inline void finish(const Product *p, const float *sums, long pitch, long row, long rows, long out, long outs) {
    for (long r = 0; r < rows; r++)
        for (long o = 0; o < outs; o += LANES) {
            const __mmask16 mask = first_lanes(outs - o);
            const long to = (row + r) * p->y_stride + out + o;
            __m512 v = _mm512_maskz_loadu_ps(mask, sums + r * pitch + o);
            if (p->bias) v = _mm512_add_ps(v, bf16_at(p->bias + out, o, outs));
            if (p->relu) v = _mm512_max_ps(_mm512_setzero_ps(), v);
            if (p->wide) {
                _mm512_mask_storeu_ps((float *)p->y + to, mask, v);
                continue;
            }
            bf16 *y = (bf16 *)p->y + to;
            if (p->onto) v = _mm512_add_ps(widened(_mm256_maskz_loadu_epi16(mask, y)), widened(rounded(v)));
            _mm256_mask_storeu_epi16(y, mask, rounded(v));
        }
}

#endif
