/* The numbers of one token in vectors: 64 bytes, 32 bfloat16 or 16 float32 numbers; the last of `nv` may be partial. */
#ifndef VECTORS_H
#define VECTORS_H

#include <math.h>

#include "simd.h"

enum { VECTOR = 64 };

INLINE uint64_t vector_mask(int64_t dim, int bf16, int nv, int v) {
    int64_t numbers = bf16 ? 32 : 16;
    return v < nv - 1 ? ~0ull : ~0ull >> (64 - (dim - (nv - 1) * numbers));
}

INLINE __m512i load(const char *at, int bf16, uint64_t mask) {
    return bf16 ? _mm512_maskz_loadu_epi16((__mmask32)mask, at) : _mm512_maskz_loadu_epi32((__mmask16)mask, at);
}

/* The stretches of memory that a head's turn reads, one after the other: keys, values, next keys. */
typedef struct {
    const char *keys, *values, *next;
    int64_t size, both, ahead; /* bytes of the keys, and of keys and values; how far ahead they are asked for */
} Path;

/* Asks for what lies `ahead` bytes after the token at `from` on the path. The processor's own prefetching stops at the
   end of each stretch, and most are short. Into the second cache: fetching into the first was slower. */
INLINE void fetch(const Path *path, int64_t from, int64_t bytes) {
    int64_t at = from + path->ahead;
    const char *stretch = at < path->size ? path->keys : path->values - path->size;
    stretch = at < path->both ? stretch : path->next - path->both;
    for (int64_t i = 0; i < bytes; i += VECTOR) _mm_prefetch(stretch + at + i, _MM_HINT_T1);
}

/* The sums of each four vectors' lanes, by fours. Overwrites x. */
INLINE void sums_by_fours(__m512 *x, const int count) {
    UNROLL for (int i = 0; i < count / 2; i++)
        x[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
    UNROLL for (int i = 0; i < count / 4; i++) {
        __m512d a = _mm512_castps_pd(x[2 * i]), b = _mm512_castps_pd(x[2 * i + 1]);
        x[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
}

INLINE __m512 sum_of_lanes(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
}

/* The sums of 16 vectors, one per lane: the same tree of additions for each. Overwrites x. */
INLINE __m512 sums_of(__m512 *x) {
    sums_by_fours(x, LANES);
    return sum_of_lanes(sum_of_lanes(x[0], x[1]), sum_of_lanes(x[2], x[3]));
}

/* Logits become the exponentials of their distance to the largest; returns the sum, that of `sink` included, if there
   is one. `n` is padded with -inf. */
INLINE float exponentials(float *x, int64_t n, const float *sink) {
    __m512 largest = _mm512_loadu_ps(x), sum = _mm512_setzero_ps();
    for (int64_t i = LANES; i < n; i += LANES) largest = _mm512_max_ps(largest, _mm512_loadu_ps(x + i));
    largest = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
    for (int64_t i = 0; i < n; i += LANES) {
        __m512 y = exp_of(_mm512_sub_ps(_mm512_loadu_ps(x + i), largest));
        _mm512_storeu_ps(x + i, y);
        sum = _mm512_add_ps(sum, y);
    }
    const float rest = sink ? expf(*sink - _mm512_reduce_max_ps(largest)) : 0;
    return _mm512_reduce_add_ps(sum) + rest;
}

#endif
