/* Products of a few rows in whole numbers, bound by how fast the codes come from memory: outputs one after another, each
   in the order its codes lie.

   A vector of 64 bytes holds 128 codes of 4 bits, or 64 of 8; of 4 bits each byte is an even input's and an odd one's.
   Its sums are in 16 lanes, four for each of its units, and are multiplied by the units' scales before they are added
   up: x's scales and what sums start at are spread over lanes once, weights' scales by a permutation. */

#include "whole.h"

#ifdef WHOLE_NUMBERS
#include "team.h"

enum {
    PIECE = 48,      /* outputs that are finished together, */
    TURNS = 4,       /* and pieces that a thread takes, at least */
    AHEAD = 4096,    /* bytes of codes that are asked for before they are used, */
    SCALES_AHEAD = 4, /* and outputs whose scales are */
};

/* What threads share. */
typedef struct {
    const Whole *all;
    int64_t blocks, groups;
    __m512i which;  /* of the scales from a block's first on: each lane's */
    float *scale;   /* (rows, blocks, LANES) of x */
    int32_t *start; /* the same, in the first lane of each span */
    float *sum;     /* (rows, groups up to whole vectors) of x */
    int64_t next;   /* output that no thread has taken */
    int64_t piece;
    int failed;
} Few;

static void spread(const Few *f) {
    const Whole *all = f->all;
    const int64_t lanes = all->span / all->unit * 4, padded = up(f->groups, LANES);
    for (int64_t r = 0; r < all->p.rows; r++) {
        const int64_t from = r * all->spans;
        for (int64_t s = 0; s < all->spans; s++)
            for (int64_t lane = 0; lane < lanes; lane++) {
                const int64_t to = r * f->blocks * LANES + s * lanes + lane;
                f->scale[to] = all->scale[from + s];
                f->start[to] = lane ? 0 : all->start[from + s];
            }
        for (int64_t g = 0; g < padded; g++) f->sum[r * padded + g] = 0;
        for (int64_t s = 0; s < all->spans && s / all->each < f->groups; s++) f->sum[r * padded + s / all->each] += all->sum[from + s];
    }
}

/* Which of the scales from a block's first on each lane wants. */
static __m512i lanes_of(const Whole *all) {
    const int64_t group = all->p.packed->group, lanes = group ? least(group / all->unit * 4, LANES) : LANES;
    int32_t which[LANES];
    for (int i = 0; i < LANES; i++) which[i] = i / (int)lanes;
    return _mm512_loadu_si512(which);
}

/* Of four numbers each lane's. */
INLINE __m512 spread_four(__m128 four, __m512i which) {
#ifdef NARROW
    const __m256 twice = _mm256_set_m128(four, four);
    return F2(_mm256_permutevar_ps(twice, which.a), _mm256_permutevar_ps(twice, which.b));
#else
    return _mm512_permutexvar_ps(which, _mm512_broadcast_f32x4(four));
#endif
}

/* Scales or lows of an output's groups, of a kind that is read where it lies, or else float32. */
typedef struct {
    const void *at;
    int64_t kind;
} Numbers;

INLINE __m128 four_of(Numbers n, int64_t i) {
    if (n.kind == FLOAT32) return _mm_loadu_ps((const float *)n.at + i);
    const __m128i four = _mm_loadl_epi64((const __m128i *)((const uint16_t *)n.at + i));
    return n.kind == FLOAT16 ? _mm_cvtph_ps(four) : _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(four), 16));
}

/* Of 16 those that a mask leaves. */
INLINE __m512 sixteen_of(Numbers n, int64_t i, __mmask16 mask) {
    if (n.kind == FLOAT32) return _mm512_maskz_loadu_ps(mask, (const float *)n.at + i);
    const uint16_t *at = (const uint16_t *)n.at + i;
    const __m256i halves = mask == (__mmask16)-1 ? _mm256_loadu_si256((const __m256i *)at) : _mm256_maskz_loadu_epi16(mask, at);
    if (n.kind == FLOAT16) return _mm512_cvtph_ps(halves);
    return widened(halves);
}

/* Output `out`: the sums of all rows to `to`, PIECE apart. */
INLINE void sum_output(const Few *f, int64_t out, Numbers scales, Numbers lows, const int nibbles, const int tabled,
                       const int rows, float *to) {
    const Whole *all = f->all;
    const int64_t group = all->p.packed->group, row_bytes = nibbles ? all->p.ins / 2 : all->p.ins;
    const int inputs = nibbles ? 128 : 64;
    const __m512i table = whole_table(all->p.packed);
    const uint8_t *codes = all->p.packed->codes + out * row_bytes;
    const int64_t shift = group ? __builtin_ctzll((uint64_t)group) : 62;
    __m512 sum[FEW_ROWS];
    UNROLL for (int r = 0; r < rows; r++) sum[r] = _mm512_setzero_ps();
    for (int64_t b = 0; b < f->blocks; b++, codes += 64) {
        const int64_t left = row_bytes - b * 64;
        const __m512i packed = left >= 64 ? _mm512_loadu_si512(codes) : _mm512_maskz_loadu_epi8((1ull << left) - 1, codes);
        _mm_prefetch((const char *)codes + AHEAD, _MM_HINT_T0);
        __m512i w[2];
        if (nibbles)
            w[0] = whole_levels(packed, tabled, table), w[1] = whole_levels(_mm512_srli_epi16(packed, 4), tabled, table);
        else
            w[0] = whole_bytes(packed);
        const __m512 scale = spread_four(four_of(scales, b * inputs >> shift), f->which);
        UNROLL for (int r = 0; r < rows; r++) {
            const int8_t *x = all->x + r * all->padded + b * inputs;
            const int64_t at = (r * f->blocks + b) * LANES;
            const __m512i start = _mm512_load_si512(f->start + at), first = _mm512_load_si512(x);
            const __m512i whole = nibbles ? dot_nibbles_512(start, w[0], first, w[1], _mm512_load_si512(x + 64), tabled == 2)
                                          : dot_bytes_512(start, w[0], first);
            const __m512 both = _mm512_mul_ps(scale, _mm512_load_ps(f->scale + at));
            sum[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), both, sum[r]);
        }
    }
    const int64_t padded = up(f->groups, LANES);
    if (tabled) { /* a power of two */
        const __m512 step = _mm512_set1_ps(whole_step(all->p.packed));
        UNROLL for (int r = 0; r < rows; r++) sum[r] = _mm512_mul_ps(step, sum[r]);
    }
    for (int64_t g = 0; all->lows && g < f->groups; g += LANES) {
        const __m512 low = sixteen_of(lows, g, first_lanes(f->groups - g));
        UNROLL for (int r = 0; r < rows; r++) sum[r] = _mm512_fmadd_ps(low, _mm512_loadu_ps(f->sum + r * padded + g), sum[r]);
    }
    UNROLL for (int r = 0; r < rows; r++) to[r * PIECE] = _mm512_reduce_add_ps(sum[r]);
}

#define OUTPUTS(ROWS) \
    static void output_##ROWS(const Few *f, int64_t out, Numbers scales, Numbers lows, float *to) { \
        const int64_t levels = f->all->p.packed->levels; \
        if (levels == UINT4) \
            sum_output(f, out, scales, lows, 1, 0, ROWS, to); \
        else if (has_signed_levels(f->all->p.packed)) \
            sum_output(f, out, scales, lows, 1, 2, ROWS, to); \
        else if (levels <= IQ2) \
            sum_output(f, out, scales, lows, 1, 1, ROWS, to); \
        else \
            sum_output(f, out, scales, lows, 0, 0, ROWS, to); \
    }
OUTPUTS(1) OUTPUTS(2) OUTPUTS(3) OUTPUTS(4)
static void (*const outputs[FEW_ROWS])(const Few *, int64_t, Numbers, Numbers, float *) = {output_1, output_2, output_3,
                                                                                           output_4};

/* Numbers of 16 bits that mean what they are. */
static int is_read_in_place(int64_t kind) { return kind == BFLOAT16 || kind == FLOAT16; }

static void take_piece(const Few *f, int64_t first, int64_t last, float *scales, float *lows) {
    const Product *p = &f->all->p;
    const Packed *w = p->packed;
    const int lie = is_read_in_place(w->scale_kind) && (!f->all->lows || is_read_in_place(w->low_kind));
    float sums[FEW_ROWS * PIECE];
    for (int64_t block = first; block < last; block += PIECE) {
        const int64_t end = least(block + PIECE, last);
        for (int64_t out = block; out < end; out++) {
            Numbers scale = {(const uint16_t *)w->scale + out * f->groups, w->scale_kind}, low = {NULL, w->low_kind};
            if (f->all->lows) low.at = (const uint16_t *)w->low + out * f->groups;
            ask_scales(w, out + SCALES_AHEAD);
            if (!lie || out + 1 == p->outs) { /* behind the last one's there may be nothing to be read */
                group_scales(w, out, scales, f->all->lows ? lows : NULL);
                scale = (Numbers){scales, FLOAT32}, low = (Numbers){lows, FLOAT32};
            }
            outputs[p->rows - 1](f, out, scale, low, sums + (out - block));
        }
        finish(p, sums, PIECE, 0, p->rows, block, end - block);
    }
}

static void take_pieces(void *task, int member) {
    Few *f = task;
    (void)member;
    const int64_t outs = f->all->p.outs, room = up(f->groups, LANES) + LANES;
    int64_t first = claim(&f->next, f->piece);
    if (first >= outs) return;
    float *held = calloc((size_t)(2 * room), sizeof *held);
    if (!held) __atomic_store_n(&f->failed, 1, __ATOMIC_RELAXED);
    for (; held && first < outs; first = claim(&f->next, f->piece))
        take_piece(f, first, least(first + f->piece, outs), held, held + room);
    free(held);
}

int few(const Whole *all, int threads) {
    const Product *p = &all->p;
    Few f = {.all = all, .blocks = all->padded / all->block, .groups = groups_of(p->packed), .which = lanes_of(all)};
    const int64_t lanes = p->rows * f.blocks * LANES, share = p->outs / (TURNS * threads) / PIECE;
    f.scale = aligned_alloc(64, (size_t)(2 * lanes + p->rows * up(f.groups, LANES)) * sizeof(float));
    if (!f.scale) return 1;
    f.start = (int32_t *)(f.scale + lanes), f.sum = f.scale + 2 * lanes;
    f.piece = most(1, least(share, 8)) * PIECE;
    spread(&f);
    team_run(take_pieces, &f, threads);
    free(f.scale);
    return f.failed;
}
#endif
