/* Products of a few rows with FP8 weights, bound by how fast these come from memory: codes become float32 numbers in
   registers, and groups' sums are multiplied by their scales. */

#include "product.h"
#include "team.h"

enum {
    FEW_ROWS = 8,
    TOGETHER = 4, /* rows that codes become numbers for */
    PIECE = 192,  /* outputs that a thread takes at a time, less where it would take */
    TURNS = 4,    /* fewer times than this */
    AHEAD = 4096, /* bytes of codes that are asked for before they are used */
    LINE = 64,
    SUMS = 2, /* that need not wait for each other */
};

/* The state that all threads share. */
typedef struct {
    const Product *p;
    const float *x; /* (rows, padded): 0 behind the last input */
    int64_t padded, group;
} Few;

/* sum (rows) += LANES inputs of x times codes. */
INLINE void add_codes(const Few *f, const float *x, const uint8_t *codes, __m512 *sum, const int rows) {
    const __m512 w = _mm512_cvtph_ps(e4m3_bits(_mm_loadu_si128((const __m128i *)codes)));
    UNROLL for (int r = 0; r < rows; r++) sum[r] = _mm512_fmadd_ps(w, _mm512_load_ps(x + r * f->padded), sum[r]);
}

/* total (rows) += the group of inputs from `in` on, of x times an output's codes. */
INLINE void add_group(const Few *f, const float *x, const uint8_t *codes, int64_t in, float scale, __m512 *total,
                      const int rows) {
    const int64_t end = least(in + f->group, f->p->ins);
    const __m256i size = _mm256_set1_epi8(0x7F);
    __m256i none = _mm256_setzero_si256();
    __m512 sum[SUMS][TOGETHER];
    UNROLL for (int s = 0; s < SUMS; s++) UNROLL for (int r = 0; r < rows; r++) sum[s][r] = _mm512_setzero_ps();
    for (; in + LINE <= end; in += LINE) {
        _mm_prefetch((const char *)codes + in + AHEAD, _MM_HINT_T1);
        UNROLL for (int j = 0; j < LINE; j += 32) {
            const __m256i some = _mm256_loadu_si256((const __m256i *)(codes + in + j));
            none = _mm256_or_si256(none, _mm256_cmpeq_epi8(_mm256_and_si256(some, size), size));
        }
        UNROLL for (int j = 0; j < LINE / LANES; j++)
            add_codes(f, x + in + j * LANES, codes + in + j * LANES, sum[j % (rows > 2 ? 1 : SUMS)], rows);
    }
    uint8_t each[32], is_none = 0;
    _mm256_storeu_si256((__m256i *)each, none);
    for (int i = 0; i < 32; i++) is_none |= each[i];
    for (; in < end; in += LANES) {
        uint8_t last[LANES] = {0};
        memcpy(last, codes + in, (size_t)least(LANES, end - in));
        for (int i = 0; i < LANES; i++) is_none |= (last[i] & 0x7F) == 0x7F;
        add_codes(f, x + in, last, sum[0], rows);
    }
    const __m512 by = _mm512_set1_ps(is_none ? __builtin_nanf("") : 256 * scale);
    UNROLL for (int r = 0; r < rows; r++) total[r] = _mm512_fmadd_ps(_mm512_add_ps(sum[0][r], sum[1][r]), by, total[r]);
}

/* sums (rows, PIECE) of outputs [first, last) and of rows at x. */
INLINE void sum_outputs(const Few *f, const float *x, int64_t first, int64_t last, float *scales, float *sums, const int rows) {
    const Packed *w = f->p->packed;
    for (int64_t out = first; out < last; out++) {
        const uint8_t *codes = w->codes + out * w->ins;
        __m512 total[TOGETHER];
        UNROLL for (int r = 0; r < rows; r++) total[r] = _mm512_setzero_ps();
        group_scales(w, out, scales, NULL);
        for (int64_t in = 0; in < w->ins; in += f->group) add_group(f, x, codes, in, scales[in / f->group], total, rows);
        UNROLL for (int r = 0; r < rows; r++) sums[r * PIECE + out - first] = _mm512_reduce_add_ps(total[r]);
    }
}

static void some_outputs(void *task, int64_t first, int64_t last, void *room) {
    const Few *f = task;
    float *sums = room, *scales = sums + f->p->rows * PIECE;
    for (int64_t row = 0; row < f->p->rows; row += TOGETHER) {
        const float *x = f->x + row * f->padded;
        KNOWN(N, least(TOGETHER, f->p->rows - row), sum_outputs(f, x, first, last, scales, sums + row * PIECE, N))
    }
    finish(f->p, sums, PIECE, 0, f->p->rows, first, last - first);
}

int takes_fp8(const Packed *w, long rows) { return w->levels == E4M3 && w->low_kind == NONE && rows <= FEW_ROWS; }

int few_fp8(const Product *p, int threads) {
    const Packed *w = p->packed;
    const int64_t padded = up(p->ins, LANES), share = p->outs / (TURNS * threads) / LANES * LANES;
    float *x = aligned_alloc(64, (size_t)(p->rows * padded) * sizeof *x);
    if (!x) return 1;
    for (int64_t r = 0; r < p->rows; r++)
        for (int64_t i = 0; i < p->ins; i += LANES) _mm512_store_ps(x + r * padded + i, bf16_at(p->x + r * p->x_stride, i, p->ins));
    Few f = {p, x, padded, w->group ? w->group : padded};
    const int64_t floats = p->rows * PIECE + groups_of(w) + LANES;
    const int failed = team_share(some_outputs, &f, p->outs, most(LANES, least(share, PIECE)), floats * (int64_t)sizeof *x, threads);
    free(x);
    return failed;
}
