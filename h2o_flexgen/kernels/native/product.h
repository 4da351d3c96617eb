/* The common part of products of bfloat16 numbers: their arguments, and how sums are finished and written. */
#ifndef PRODUCT_H
#define PRODUCT_H

#include "simd.h"
#include "weights.h"

typedef struct {
    const bf16 *x, *w;  /* (rows, ins), (outs, ins) contiguous */
    const void *bias;   /* (outs) or NULL */
    void *y;            /* (rows, outs) */
    long rows, outs, ins;
    long x_stride, y_stride; /* elements from row to row */
    int wide;                /* y is float32, not bfloat16 */
    int relu;                /* negative results become 0 */
    int onto;                /* the product, rounded as y is, is added to what y holds */
    const Packed *packed;    /* the weights, where they are not in w */
    int exact;               /* x, bias and y are float32, and the weights float32 or packed */
} Product;

/* None of the tensors is empty. Each returns 0, or 1 where memory is short. `gemm` takes an even number of inputs, `whole`
   and `few_fp8` packed weights that `takes_whole` and `takes_fp8` say. */
int linear(const Product *p, int threads);
int gemm(const Product *p, int threads);
int several_rows(const Product *p, int threads);
int whole(const Product *p, int threads);
int exact(const Product *p, int threads);
int few_fp8(const Product *p, int threads);
int takes_whole(const Packed *w);
int takes_fp8(const Packed *w, long rows);

enum { BY_NUMBERS, WHOLLY, EXACTLY };

/* A `Product`, field by field, as `way` says. */
int product(const bf16 *x, const bf16 *w, const void *bias, void *y, long rows, long outs, long ins, long x_stride,
            long y_stride, int wide, int relu, int onto, int threads, const Packed *packed, int way);

/* Writes y for `rows` and `outs` from `row` and `out` on; rows of sums are `pitch` apart. Bias is added, results are
   rounded to nearest even, NaN stays NaN. Row by row: whole cache lines are written at once. */
static inline void finish(const Product *p, const float *sums, long pitch, long row, long rows, long out, long outs) {
    for (long r = 0; r < rows; r++)
        for (long o = 0; o < outs; o += LANES) {
            const long to = (row + r) * p->y_stride + out + o, end = to + outs - o;
            __m512 v = number_at(sums + r * pitch, 0, o, outs);
            if (p->bias) v = _mm512_add_ps(v, number_at(p->bias, !p->exact, out + o, out + outs));
            if (p->relu) v = _mm512_max_ps(_mm512_setzero_ps(), v);
            if (p->onto) v = _mm512_add_ps(number_at(p->y, !p->wide, to, end), p->wide ? v : widened(rounded(v)));
            put_number(p->y, !p->wide, to, end, v);
        }
}

#endif
