/* A head's step on keys and values as they are: bfloat16 or float32 numbers. */
#ifndef ATTEND_PLAIN_H
#define ATTEND_PLAIN_H

#include "attend.h"

enum { BLOCK = 32 }; /* slots */

INLINE __m512 dot(__m512 sum, __m512i a, __m512i b, int bf16) {
    return bf16 ? _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b)
                : _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
}

/* Products of one query with `left` keys, at most 16. */
INLINE __m512 products_of(const char *q, const char *k, int64_t left, int64_t dim, int bf16, int nv) {
    int64_t bytes = dim * (bf16 ? 2 : 4);
    __m512 sums[LANES];
    UNROLL for (int i = 0; i < LANES; i++) sums[i] = _mm512_setzero_ps();
    for (int v = 0; v < nv; v++) {
        uint64_t mask = vector_mask(dim, bf16, nv, v);
        __m512i query = load(q + v * VECTOR, bf16, mask);
        if (left >= LANES) {
            UNROLL for (int i = 0; i < LANES; i++)
                sums[i] = dot(sums[i], load(k + i * bytes + v * VECTOR, bf16, mask), query, bf16);
        } else { /* the last key stands for those that are missing */
            UNROLL for (int i = 0; i < LANES; i++)
                sums[i] = dot(sums[i], load(k + least(i, left - 1) * bytes + v * VECTOR, bf16, mask), query, bf16);
        }
    }
    return sums_of(sums);
}

/* mixed (heads, accs vectors) += the values of `n` slots times p (heads, `pitch` apart). Of bfloat16 numbers, those in
   even places and those in odd ones have a sum each: a shift or a mask makes float32 of them. */
INLINE void mix(float *mixed, const char *v, const float *p, int64_t pitch, int64_t n, int64_t dim, int heads, int bf16,
                int nv, const Path *path) {
    const int accs = bf16 ? 2 * nv : nv;
    int64_t bytes = dim * (bf16 ? 2 : 4);
    __m512 sums[heads * accs];
    UNROLL for (int i = 0; i < heads * accs; i++) sums[i] = _mm512_loadu_ps(mixed + i * LANES);
    for (int64_t s = 0; s < n; s++, v += bytes) {
        if (path) fetch(path, path->size + (v - path->values), bytes);
        UNROLL for (int j = 0; j < nv; j++) {
            __m512i raw = load(v + j * VECTOR, bf16, vector_mask(dim, bf16, nv, j));
            __m512 one = bf16 ? even_halves(raw) : _mm512_castsi512_ps(raw), two = odd_halves(raw);
            UNROLL for (int h = 0; h < heads; h++) {
                __m512 weight = _mm512_set1_ps(p[h * pitch + s]), *sum = sums + h * accs + (bf16 ? 2 * j : j);
                sum[0] = _mm512_fmadd_ps(weight, one, sum[0]);
                if (bf16) sum[1] = _mm512_fmadd_ps(weight, two, sum[1]);
            }
        }
    }
    UNROLL for (int i = 0; i < heads * accs; i++) _mm512_storeu_ps(mixed + i * LANES, sums[i]);
}

INLINE void write_out(char *out, const float *mixed, float sum, int64_t dim, int bf16, int nv) {
    __m512 share = _mm512_set1_ps(1.0f / sum);
    for (int j = 0; j < nv; j++) {
        uint64_t mask = vector_mask(dim, bf16, nv, j);
        __m512 one = _mm512_mul_ps(_mm512_loadu_ps(mixed + (bf16 ? 2 * j : j) * LANES), share);
        if (bf16) {
            __m512 two = _mm512_mul_ps(_mm512_loadu_ps(mixed + (2 * j + 1) * LANES), share);
            __m512i low = _mm512_cvtepu16_epi32(rounded(one)), high = _mm512_cvtepu16_epi32(rounded(two));
            __m512i both = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
            _mm512_mask_storeu_epi16(out + j * VECTOR, (__mmask32)mask, both);
        } else {
            _mm512_mask_storeu_ps(out + j * VECTOR, (__mmask16)mask, one);
        }
    }
}

INLINE void plain_logits(const Step *s, const HeadStep *w, int64_t first, int64_t n, const int bf16, const int nv) {
    const HeadStep here = *w; /* numbers that are stored might be any other's fields */
    const int64_t bytes = s->dim * (bf16 ? 2 : 4), apart = s->new_q.head;
    for (int64_t i = first; i < first + n; i += LANES) {
        UNROLL for (int64_t j = 0; j < LANES; j += 4) fetch(&here.path, (i + j) * bytes, 4 * bytes);
        for (int64_t g = 0; g < s->group; g++) {
            const char *q = here.asked + g * apart, *k = here.path.keys + i * bytes;
            const __m512 products = products_of(q, k, here.h.n - i, s->dim, bf16, nv);
            _mm512_storeu_ps(here.x + g * here.h.pitch + i, logits_of(s, products, here.h.n - i));
        }
    }
}

INLINE void plain_mix(const Step *s, const HeadStep *w, int64_t first, int64_t n, float *mixed, float *room,
                      const int bf16, const int nv) {
    const int accs = bf16 ? 2 * nv : nv, together = accs > 8 ? 1 : 16 / accs;
    const int64_t bytes = s->dim * (bf16 ? 2 : 4), pitch = w->h.pitch, group = s->group, each = accs * LANES;
    const Path path = w->path;
    const float *x = w->x;
    memset(mixed, 0, (size_t)(group * each) * sizeof(float));
    const int64_t block = group == 1 ? n : BLOCK; /* that stays in the first cache while the heads take turns */
    for (int64_t i = first; i < first + n; i += block) {
        int64_t g = 0, some = least(block, first + n - i);
        const char *v = path.values + i * bytes;
        for (; g + together <= group; g += together)
            mix(mixed + g * each, v, x + g * pitch + i, pitch, some, s->dim, together, bf16, nv, g ? NULL : &path);
        for (; g < group; g++)
            mix(mixed + g * each, v, x + g * pitch + i, pitch, some, s->dim, 1, bf16, nv, g ? NULL : &path);
    }
}

#endif
