/* keydiff's ranks: see difference.h. Written once; sizes of heads that are common have code of their own. */

#include "difference.h"
#include "vectors.h"

/* A vector of a key as float32: numbers in even places, and in odd ones where they are bfloat16. */
INLINE __m512 even_part(const char *at, int bf16, uint64_t mask, __m512 *odd) {
    const __m512i raw = load(at, bf16, mask);
    *odd = bf16 ? odd_halves(raw) : _mm512_setzero_ps();
    return bf16 ? even_halves(raw) : _mm512_castsi512_ps(raw);
}

/* The products of up to 16 keys with an anchor (nv, 2) vectors, or with themselves where that is NULL. */
INLINE __m512 products(const char *keys, int64_t left, const __m512 *anchor, int64_t dim, int bf16, int nv) {
    const int64_t size = dim * (bf16 ? 2 : 4);
    __m512 sums[LANES], odd;
    UNROLL for (int i = 0; i < LANES; i++) {
        const char *key = keys + least(i, left - 1) * size;
        sums[i] = _mm512_setzero_ps();
        for (int v = 0; v < nv; v++) {
            const __m512 even = even_part(key + v * VECTOR, bf16, vector_mask(dim, bf16, nv, v), &odd);
            sums[i] = _mm512_fmadd_ps(even, anchor ? anchor[2 * v] : even, sums[i]);
            if (bf16) sums[i] = _mm512_fmadd_ps(odd, anchor ? anchor[2 * v + 1] : odd, sums[i]);
        }
    }
    return sums_of(sums);
}

INLINE __m512 inverse_root(__m512 squares) {
    return _mm512_div_ps(_mm512_set1_ps(1), _mm512_max_ps(_mm512_sqrt_ps(squares), _mm512_set1_ps(1e-12f)));
}

INLINE void differ(const char *keys, int64_t n, const int32_t *pos, int64_t dim, int bf16, int nv, float *rank) {
    const int64_t size = dim * (bf16 ? 2 : 4);
    __m512 mean[2 * nv], square = _mm512_setzero_ps();
    UNROLL for (int v = 0; v < 2 * nv; v++) mean[v] = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += LANES) {
        const int64_t some = least(LANES, n - i);
        const __m512 shortness = inverse_root(products(keys + i * size, some, NULL, dim, bf16, nv));
        _mm512_mask_storeu_ps(rank + i, first_lanes(some), shortness);
        for (int64_t j = i; j < i + some; j++) {
            if (pos && pos[j] < 0) continue;
            const __m512 weight = _mm512_set1_ps(rank[j]);
            UNROLL for (int v = 0; v < nv; v++) {
                __m512 odd, even = even_part(keys + j * size + v * VECTOR, bf16, vector_mask(dim, bf16, nv, v), &odd);
                mean[2 * v] = _mm512_fmadd_ps(weight, even, mean[2 * v]);
                if (bf16) mean[2 * v + 1] = _mm512_fmadd_ps(weight, odd, mean[2 * v + 1]);
            }
        }
    }
    UNROLL for (int v = 0; v < 2 * nv; v++) square = _mm512_fmadd_ps(mean[v], mean[v], square);
    const __m512 length = inverse_root(_mm512_set1_ps(_mm512_reduce_add_ps(square)));
    UNROLL for (int v = 0; v < 2 * nv; v++) mean[v] = _mm512_mul_ps(mean[v], length);
    for (int64_t i = 0; i < n; i += LANES) {
        const __mmask16 here = first_lanes(n - i);
        const __m512 near = products(keys + i * size, least(LANES, n - i), mean, dim, bf16, nv);
        const __m512 shortness = _mm512_maskz_loadu_ps(here, rank + i);
        const __m512 far = _mm512_fnmadd_ps(near, shortness, _mm512_set1_ps(1));
        _mm512_mask_storeu_ps(rank + i, here, _mm512_max_ps(far, _mm512_setzero_ps()));
    }
}

void differences(const char *keys, int64_t n, const int32_t *pos, int64_t dim, int bf16, float *rank) {
    const int nv = (int)((dim * (bf16 ? 2 : 4) + VECTOR - 1) / VECTOR);
    if (bf16 && nv == 2) differ(keys, n, pos, dim, 1, 2, rank);
    else if (bf16 && nv == 4) differ(keys, n, pos, dim, 1, 4, rank);
    else differ(keys, n, pos, dim, bf16, nv, rank);
}
