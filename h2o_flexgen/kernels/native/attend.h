/* The parts of attend.c that know nothing of a step: vectors of one token, exponentials, values, scores. */

#include "simd.h"
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define UNROLL _Pragma("GCC unroll 16")

enum { LANES = 16, VECTOR = 64, BLOCK = 32, FEW_BYTES = 1 << 15, AHEAD = 4096 };

/* What a row's slots follow from, beside the step. Occupied are the slots before min(held + step + 1, limit). */
typedef struct {
    int64_t held;   /* tokens that came into its slots before step 0 */
    int64_t limit;  /* slots that the row ever occupies */
    int64_t prompt; /* position of step 0's token */
    int64_t ring;   /* the slot that follows the last one */
    int64_t sinks;  /* first positions, which never go */
    int64_t hides;  /* and how many of them, in the first slots, are not seen once they have left the window */
    int64_t recent; /* last positions, which do not go */
    int64_t evicts; /* the first step that lets a token go by its score */
} Row;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

/* ---- vectors of one token: 64 bytes, 32 bfloat16 or 16 float32 numbers; the last of `nv` may be partial */

INLINE uint64_t vector_mask(int64_t dim, int bf16, int nv, int v) {
    int64_t numbers = bf16 ? 32 : 16;
    return v < nv - 1 ? ~0ull : ~0ull >> (64 - (dim - (nv - 1) * numbers));
}

INLINE __m512i load(const char *at, int bf16, uint64_t mask) {
    return bf16 ? _mm512_maskz_loadu_epi16((__mmask32)mask, at) : _mm512_maskz_loadu_epi32((__mmask16)mask, at);
}

INLINE __m512 dot(__m512 sum, __m512i a, __m512i b, int bf16) {
    return bf16 ? _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b)
                : _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
}

/* The stretches of memory that a head's turn reads, `size` bytes each, one after the other: keys, values, next keys. */
typedef struct {
    const char *keys, *values, *next;
    int64_t size;
} Path;

/* Asks for what lies AHEAD bytes after the token at `from` on the path. The processor's own prefetching stops at the
   end of each stretch, and most are short. Into the second cache: fetching into the first was slower. */
INLINE void fetch(const Path *path, int64_t from, int64_t bytes) {
    int64_t at = from + AHEAD;
    const char *stretch = at < path->size ? path->keys : path->values - path->size;
    stretch = at < 2 * path->size ? stretch : path->next - 2 * path->size;
    for (int64_t i = 0; i < bytes; i += VECTOR) _mm_prefetch(stretch + at + i, _MM_HINT_T1);
}

/* The sums of 16 vectors, one per lane: the same tree of additions for each. Overwrites x. */
INLINE __m512 sums_of(__m512 *x) {
    UNROLL for (int i = 0; i < 8; i++)
        x[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
    UNROLL for (int i = 0; i < 4; i++) {
        __m512d a = _mm512_castps_pd(x[2 * i]), b = _mm512_castps_pd(x[2 * i + 1]);
        x[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    for (int count = 2; count; count /= 2)
        UNROLL for (int i = 0; i < count; i++)
            x[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0x88),
                                 _mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0xDD));
    return x[0];
}

/* Logits of one query with `left` keys, at most 16; -inf in the lanes after them. */
INLINE __m512 logits_of(const char *q, const char *k, int64_t left, int64_t dim, float scale, int bf16, int nv) {
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
    __m512 logits = _mm512_mul_ps(sums_of(sums), _mm512_set1_ps(scale));
    return _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), first_lanes(left), logits);
}

/* Logits become the exponentials of their distance to the largest; returns the sum. `n` is padded with -inf. */
static float exponentials(float *x, int64_t n) {
    __m512 largest = _mm512_loadu_ps(x), sum = _mm512_setzero_ps();
    for (int64_t i = LANES; i < n; i += LANES) largest = _mm512_max_ps(largest, _mm512_loadu_ps(x + i));
    largest = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
    for (int64_t i = 0; i < n; i += LANES) {
        __m512 y = exp_of(_mm512_sub_ps(_mm512_loadu_ps(x + i), largest));
        _mm512_storeu_ps(x + i, y);
        sum = _mm512_add_ps(sum, y);
    }
    return _mm512_reduce_add_ps(sum);
}

/* ---- values */

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
            __m512 one = _mm512_castsi512_ps(bf16 ? _mm512_slli_epi32(raw, 16) : raw);
            __m512 two = _mm512_castsi512_ps(_mm512_and_si512(raw, _mm512_set1_epi32((int)0xFFFF0000)));
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
            __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(one));
            __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(two));
            __m512i both = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
            _mm512_mask_storeu_epi16(out + j * VECTOR, (__mmask32)mask, both);
        } else {
            _mm512_mask_storeu_ps(out + j * VECTOR, (__mmask16)mask, one);
        }
    }
}

/* ---- scores */

/* The mean over the heads of x (group, `pitch` apart), each divided by its sum; it takes the first one's place. */
static void average(float *x, const float *sums, int64_t group, int64_t pitch) {
    for (int64_t i = 0; i < pitch; i += LANES) {
        __m512 total = _mm512_div_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(sums[0]));
        for (int64_t g = 1; g < group; g++)
            total = _mm512_add_ps(total, _mm512_div_ps(_mm512_loadu_ps(x + g * pitch + i), _mm512_set1_ps(sums[g])));
        _mm512_storeu_ps(x + i, group == 1 ? total : _mm512_div_ps(total, _mm512_set1_ps((float)group)));
    }
}

/* Among `count` slots: a token that has just left the window, if it is no sink; else the lowest score outside the last
   `recent` positions, of equal ones the highest position. Scores compare by their bits, as they are never negative. */
static int64_t victim(const float *score, const int32_t *pos, int64_t count, const Row *row, int64_t now,
                      int64_t window) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i protects = _mm512_set1_epi32((int32_t)(now - row->recent));
    const int64_t leaving = window ? now + 1 - window : -1;
    const int leaves = window && leaving >= row->sinks;
    __m512i lowest = _mm512_set1_epi32(INT32_MAX), highest = _mm512_set1_epi32(INT32_MIN);
    __m512i slot = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; i += LANES) {
        __mmask16 here = first_lanes(count - i);
        __m512i bits = _mm512_maskz_loadu_epi32(here, score + i), at = _mm512_maskz_loadu_epi32(here, pos + i);
        bits = _mm512_mask_mov_epi32(bits, _mm512_cmpgt_epi32_mask(at, protects), _mm512_set1_epi32(INT32_MAX));
        if (leaves)
            bits = _mm512_mask_mov_epi32(bits, _mm512_cmpeq_epi32_mask(at, _mm512_set1_epi32((int32_t)leaving)),
                                         _mm512_set1_epi32(-1));
        __mmask16 less = _mm512_cmplt_epi32_mask(bits, lowest);
        less |= _mm512_cmpeq_epi32_mask(bits, lowest) & _mm512_cmpgt_epi32_mask(at, highest);
        less &= here;
        lowest = _mm512_mask_mov_epi32(lowest, less, bits);
        highest = _mm512_mask_mov_epi32(highest, less, at);
        slot = _mm512_mask_mov_epi32(slot, less, _mm512_add_epi32(lanes, _mm512_set1_epi32((int32_t)i)));
    }
    __mmask16 best = _mm512_cmpeq_epi32_mask(lowest, _mm512_set1_epi32(_mm512_reduce_min_epi32(lowest)));
    best &= _mm512_cmpeq_epi32_mask(highest, _mm512_set1_epi32(_mm512_mask_reduce_max_epi32(best, highest)));
    return _mm512_mask_reduce_min_epi32(best, slot);
}
