/* The token that a row takes whose likeliest one its grammar forbids: the next best of those that are allowed. */

#include <math.h>

#include "simd.h"

enum { STRETCH = 1 << 12 /* numbers in which the best is looked for a second time, for where it stands */ };

/* Where the first of the largest of n scores is, of those whose bits in `allowed` are set; -1 where these are all
   -infinity, or none is set. No score is NaN. */
int64_t likeliest(const float *scores, const uint16_t *allowed, int64_t n) {
    const __m512 none = _mm512_set1_ps(-INFINITY);
    float best = -INFINITY;
    int64_t from = -1;
    for (int64_t start = 0; start < n; start += STRETCH) {
        const int64_t end = least(n, start + STRETCH);
        __m512 top = none;
        for (int64_t i = start; i < end; i += LANES) {
            const __mmask16 bits = allowed[i / LANES] & first_lanes(end - i);
            if (!bits) continue;
            const __m512 some = _mm512_maskz_loadu_ps(first_lanes(end - i), scores + i);
            top = _mm512_max_ps(top, _mm512_mask_mov_ps(none, bits, some));
        }
        const float largest = _mm512_reduce_max_ps(top);
        if (largest > best) best = largest, from = start;
    }
    if (from < 0) return -1;
    while (!(allowed[from / LANES] >> from % LANES & 1) || scores[from] != best) from++;
    return from;
}
