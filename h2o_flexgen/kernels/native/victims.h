/* Which token of a row goes. */
#ifndef VICTIMS_H
#define VICTIMS_H

#include "simd.h"

/* The numbers that a row's slots follow from, beside the step. Slots before min(held + step + 1, limit) are occupied. */
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

/* Among `count` slots: a token that has left the window, if it is no sink; else the lowest score outside the last
   `recent` positions, of equal ones the highest position. Scores compare by their bits, as they are never negative.
   Sinks have the score +inf, or where they do not they are `masked`. */
INLINE int64_t victim(const float *score, const int32_t *pos, int64_t count, const Row *row, int64_t now,
                      int64_t window, const int masked) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i protects = _mm512_set1_epi32((int32_t)(now - row->recent));
    const int64_t leaving = window ? now + 1 - window : -1;
    const int leaves = window && leaving >= row->sinks;
    const __m512i stays = _mm512_set1_epi32((int32_t)leaving + 1), sinks = _mm512_set1_epi32((int32_t)row->sinks);
    __m512i lowest = _mm512_set1_epi32(INT32_MAX), highest = _mm512_set1_epi32(INT32_MIN);
    __m512i slot = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; i += LANES) {
        __mmask16 here = first_lanes(count - i);
        __m512i bits = _mm512_maskz_loadu_epi32(here, score + i), at = _mm512_maskz_loadu_epi32(here, pos + i);
        bits = _mm512_mask_mov_epi32(bits, _mm512_cmpgt_epi32_mask(at, protects), _mm512_set1_epi32(INT32_MAX));
        if (masked)
            bits = _mm512_mask_mov_epi32(bits, _mm512_cmplt_epi32_mask(at, sinks), _mm512_set1_epi32(INT32_MAX));
        if (leaves)
            bits = _mm512_mask_mov_epi32(
                bits, _mm512_cmplt_epi32_mask(at, stays) & (__mmask16)~_mm512_cmplt_epi32_mask(at, sinks),
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

/* Of the tokens at `at` the queries that have seen them, at least one, where the next one is at `next`. */
INLINE __m512 ages(__m512i next, __m512i at) {
    return _mm512_cvtepi32_ps(_mm512_max_epi32(_mm512_sub_epi32(next, at), _mm512_set1_epi32(1)));
}

/* The means of n sums, by the queries that have seen each. */
static void means(const float *sums, const int32_t *pos, int64_t n, int64_t now, float *mean) {
    for (int64_t i = 0; i < n; i += LANES) {
        const __mmask16 here = first_lanes(n - i);
        const __m512 age = ages(_mm512_set1_epi32((int32_t)now + 1), _mm512_maskz_loadu_epi32(here, pos + i));
        _mm512_storeu_ps(mean + i, _mm512_div_ps(_mm512_maskz_loadu_ps(here, sums + i), age));
    }
}

/* How many of n numbers are `top` at the most; the numbers behind them, up to the next 16, must be more. */
INLINE int64_t up_to(const int32_t *x, int64_t n, int32_t top) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += LANES)
        count += __builtin_popcount(_mm512_cmple_epi32_mask(_mm512_loadu_si512(x + i), _mm512_set1_epi32(top)));
    return count;
}

/* The means of n sums, and 2 for tokens that are not among the `scope` whose deviation is lowest, of equal ones the
   later: of those that may go. `spread` is room for n, both up to the next 16. */
static void steady_means(const float *sums, const float *squares, const int32_t *pos, int64_t n, const Row *row,
                         int64_t now, int64_t scope, float *mean, int32_t *spread) {
    const __m512i never = _mm512_set1_epi32(INT32_MAX), next = _mm512_set1_epi32((int32_t)now + 1);
    const __m512i sinks = _mm512_set1_epi32((int32_t)row->sinks), recent = _mm512_set1_epi32((int32_t)(now - row->recent));
    for (int64_t i = 0; i < n; i += LANES) {
        const __mmask16 here = first_lanes(n - i);
        const __m512i at = _mm512_maskz_loadu_epi32(here, pos + i);
        const __m512 age = ages(next, at), m = _mm512_div_ps(_mm512_maskz_loadu_ps(here, sums + i), age);
        const __m512 square = _mm512_div_ps(_mm512_maskz_loadu_ps(here, squares + i), age);
        const __m512 deviation = _mm512_max_ps(_mm512_sub_ps(square, _mm512_mul_ps(m, m)), _mm512_setzero_ps());
        const __mmask16 fixed = _mm512_cmplt_epi32_mask(at, sinks) | _mm512_cmpgt_epi32_mask(at, recent) | (__mmask16)~here;
        _mm512_storeu_ps(mean + i, m);
        _mm512_storeu_si512(spread + i, _mm512_mask_mov_epi32(_mm512_castps_si512(deviation), fixed, never));
    }
    const int64_t wanted = least(scope, n);
    uint32_t low = 0, high = INT32_MAX; /* the lowest that as many are within as are wanted */
    while (low < high) {
        const uint32_t middle = (low + high) / 2;
        if (up_to(spread, n, (int32_t)middle) >= wanted) high = middle;
        else low = middle + 1;
    }
    if (low == INT32_MAX) return;
    const int32_t bound = (int32_t)low;
    const int64_t open = bound ? wanted - up_to(spread, n, bound - 1) : wanted;
    int32_t from = 0, last = up_to(spread, n, bound) == wanted ? 0 : (int32_t)now; /* of those that tie */
    while (from < last) {
        const int32_t middle = from + (last - from + 1) / 2;
        int32_t later = 0;
        for (int64_t i = 0; i < n; i++) later += (spread[i] == bound) & (pos[i] >= middle);
        if (later >= open) from = middle;
        else last = middle - 1;
    }
    for (int64_t i = 0; i < n; i++)
        if (spread[i] > bound || (spread[i] == bound && pos[i] < from)) mean[i] = 2;
}

#endif
