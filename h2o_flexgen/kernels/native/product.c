/* Which kernel a product takes. */

#include "product.h"
#include "tiles.h"

enum {
    /* Up to so many rows a product reads its weights as they lie (linear.c), beyond that it packs them first (gemm.c).
       Over shapes of OPT-125M and 1.3B, on two cores of an AMD EPYC with AVX-512 bfloat16, torch took 1.4 to 2.3 times as
       long up to 8 rows, 1.05 to 1.5 times at 32, and from 64 to 2,048 rows 0.96 to 1.08 times. Where gemm.c multiplies
       in float32 it is the faster one from 16 to 24 rows on (an Intel Xeon, shapes of LLaMA-1.1B). */
    FEW = TERMS == 2 ? 128 : 16,
    /* The same of packed weights: linear.c expands a few outputs at a time, gemm.c whole blocks of them. */
    FEW_PACKED = TERMS == 2 ? 63 : 16,
};

int product(const bf16 *x, const bf16 *w, const bf16 *bias, void *y, long rows, long outs, long ins, long x_stride,
            long y_stride, int wide, int relu, int onto, int threads, const Packed *packed, int wholly) {
    const Product p = {x, w, bias, y, rows, outs, ins, x_stride, y_stride, wide, relu, onto, packed};
    if (wholly) return whole(&p, threads);
    return rows <= (packed ? FEW_PACKED : FEW) || ins % 2 ? linear(&p, threads) : gemm(&p, threads);
}
