/* Products of a few rows in whole numbers, bound by how fast the codes come from memory: several outputs at a time, from
   as many stretches of memory, each in the order its codes lie.

   A vector of 64 bytes holds 128 codes of 4 bits, or 64 of 8; of 4 bits each byte is an even input's and an odd one's.
   Its sums are in 16 lanes, four for each of its units, and are multiplied by the products of both scales before they are
   added up. These products are made for all spans of an output beforehand, with the terms of its lows and its offset. */

#define OF_BYTES
#include "whole.h"

#include "team.h"

enum {
    PIECE = 384,      /* outputs that a thread takes at a time, less where it would take */
    TURNS = 4,        /* fewer times than this */
    AHEAD = 4096,     /* bytes of codes that are asked for before they are used, */
    SCALES_AHEAD = 4, /* and outputs whose scales are */
    MOST_SUMS = REGISTERS == 32 ? 16 : 4, /* vectors that stay in registers */
    TOGETHER = 4, /* outputs at most */
};

/* The state that all threads share. */
typedef struct {
    const Whole *all;
    int64_t blocks, spans, groups; /* spans up to whole vectors */
    int shift;                     /* of a span to its group */
    __m512i which, within;         /* of the spans from a block's first on each lane's; of the groups from a span's on */
    float *scale, *start;          /* (rows, spans) of x, in steps of the weights; the start of whole sums */
    float *sum;                    /* (rows, groups up to whole vectors) of x */
} Few;

static void describe(Few *f) {
    const Whole *all = f->all;
    const int64_t padded = up(f->groups, LANES);
    const float step = whole_step(all->p.packed);
    for (int64_t r = 0; r < all->p.rows; r++) {
        const int64_t from = r * all->spans;
        for (int64_t s = 0; s < f->spans; s++) {
            f->scale[r * f->spans + s] = s < all->spans ? step * all->scale[from + s] : 0;
            f->start[r * f->spans + s] = s < all->spans ? (float)all->start[from + s] : 0;
        }
        for (int64_t g = 0; g < padded; g++) f->sum[r * padded + g] = 0;
        for (int64_t s = 0; s < all->spans && s >> f->shift < f->groups; s++)
            f->sum[r * padded + (s >> f->shift)] += all->sum[from + s];
    }
}

/* Lanes of a vector by what they have in common, `lanes` at a time. */
static __m512i each_of(int lanes) {
    int32_t which[LANES];
    for (int i = 0; i < LANES; i++) which[i] = i / lanes;
    return _mm512_loadu_si512(which);
}

/* Scales or lows of an output's groups, of a kind that is read where it lies, or else float32. There are LANES more. */
typedef struct {
    const void *at;
    int64_t kind;
} Numbers;

INLINE __m256 eight_of(Numbers n, int64_t i) {
    if (n.kind == FLOAT32) return _mm256_loadu_ps((const float *)n.at + i);
    const __m128i halves = _mm_loadu_si128((const __m128i *)((const uint16_t *)n.at + i));
    return n.kind == FLOAT16 ? _mm256_cvtph_ps(halves) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

/* The others than the first `count` are 0. */
INLINE __m512 sixteen_of(Numbers n, int64_t i, int64_t count) {
    __m512 x;
    if (n.kind == FLOAT32) {
        x = _mm512_loadu_ps((const float *)n.at + i);
    } else {
        const __m256i halves = _mm256_loadu_si256((const __m256i *)((const uint16_t *)n.at + i));
        x = n.kind == FLOAT16 ? _mm512_cvtph_ps(halves) : widened(halves);
    }
    return count >= LANES ? x : _mm512_mask_mov_ps(_mm512_setzero_ps(), first_lanes(count), x);
}

/* The products of an output's scales and x's: to `by`, of rows `spans` apart. To `sum` what is known without codes. */
INLINE void take_scales(const Few *f, Numbers scales, Numbers lows, float *by, __m512 *sum, const int rows) {
    UNROLL for (int r = 0; r < rows; r++) sum[r] = _mm512_setzero_ps();
    for (int64_t s = 0; s < f->spans; s += LANES) {
        const __m512 scale = f->shift ? spread_eight(eight_of(scales, s >> f->shift), f->within)
                                      : sixteen_of(scales, s, f->groups - s);
        UNROLL for (int r = 0; r < rows; r++) {
            const __m512 both = _mm512_mul_ps(scale, _mm512_load_ps(f->scale + r * f->spans + s));
            _mm512_store_ps(by + r * f->spans + s, both);
            if (f->all->offset) sum[r] = _mm512_fmadd_ps(both, _mm512_load_ps(f->start + r * f->spans + s), sum[r]);
        }
    }
    const int64_t padded = up(f->groups, LANES);
    for (int64_t g = 0; f->all->lows && g < f->groups; g += LANES) {
        const __m512 low = sixteen_of(lows, g, f->groups - g);
        UNROLL for (int r = 0; r < rows; r++) sum[r] = _mm512_fmadd_ps(low, _mm512_load_ps(f->sum + r * padded + g), sum[r]);
    }
}

/* Room of a thread: numbers of one output that have to be made, `by` of TOGETHER outputs, sums (rows, PIECE). */
typedef struct {
    float *scales, *lows, *by, *sums;
} Room;

INLINE int64_t room_of_groups(const Few *f) { return up(f->groups, LANES) + LANES; }

/* Numbers of 16 bits that mean what they are. */
static int is_read_in_place(int64_t kind) { return kind == BFLOAT16 || kind == FLOAT16; }

/* The scales and lows of output `out`: where they lie, if others lie behind them, or in `room`. */
static void numbers_of(const Few *f, int64_t out, Room room, Numbers *scale, Numbers *low) {
    const Packed *w = f->all->p.packed;
    const int lows = f->all->lows, lie = is_read_in_place(w->scale_kind) && (!lows || is_read_in_place(w->low_kind));
    *scale = (Numbers){room.scales, FLOAT32}, *low = (Numbers){room.lows, FLOAT32};
    if (!lie || (f->all->p.outs - out - 1) * f->groups < LANES) {
        group_scales(w, out, room.scales, lows ? room.lows : NULL);
        return;
    }
    *scale = (Numbers){(const uint16_t *)w->scale + out * f->groups, w->scale_kind};
    if (lows) *low = (Numbers){(const uint16_t *)w->low + out * f->groups, w->low_kind};
}

/* Outputs [first, last), as many at a time as there are registers for: room.sums (rows, PIECE). */
INLINE void sum_outputs(const Few *f, int64_t first, int64_t last, Room room, const int nibbles, const int tabled,
                        const int rows) {
    const int count = MOST_SUMS / rows < TOGETHER ? MOST_SUMS / rows : TOGETHER;
    const Whole *all = f->all;
    const Packed *packed = all->p.packed;
    const int64_t row_bytes = nibbles ? all->p.ins / 2 : all->p.ins, per = (nibbles ? 128 : 64) / all->span;
    const __m512i table = whole_table(packed);
    const int64_t apart = (last - first + count - 1) / count;
    for (int64_t i = 0; i < apart; i++) {
        __m512 sum[TOGETHER][FEW_ROWS];
        const uint8_t *codes[TOGETHER];
        UNROLL for (int o = 0; o < count; o++) {
            const int64_t out = least(first + o * apart + i, last - 1);
            Numbers scale, low;
            numbers_of(f, out, room, &scale, &low);
            take_scales(f, scale, low, room.by + o * rows * f->spans, sum[o], rows);
            ask_scales(packed, out + SCALES_AHEAD, 1);
            codes[o] = packed->codes + out * row_bytes;
        }
        for (int64_t b = 0; b < f->blocks; b++) {
            const int64_t left = row_bytes - b * 64;
            const int8_t *x = all->x + b * (nibbles ? 128 : 64);
            UNROLL for (int o = 0; o < count; o++) {
                const uint8_t *at = codes[o] + b * 64;
                const __m512i bytes = left >= 64 ? _mm512_loadu_si512(at) : _mm512_maskz_loadu_epi8((1ull << left) - 1, at);
                _mm_prefetch((const char *)at + AHEAD, _MM_HINT_T1);
                __m512i w[2];
                if (nibbles) {
                    w[0] = whole_levels(bytes, tabled, table);
                    w[1] = whole_levels(_mm512_srli_epi16(bytes, 4), tabled, table);
                } else {
                    w[0] = whole_bytes(bytes);
                }
                UNROLL for (int r = 0; r < rows; r++) {
                    const __m512i some = _mm512_load_si512(x + r * all->padded), none = _mm512_setzero_si512();
                    const __m512i whole = nibbles ? dot_nibbles_512(none, w[0], some, w[1],
                                                                    _mm512_load_si512(x + r * all->padded + 64), tabled == 2)
                                                  : dot_bytes_512(none, w[0], some);
                    const float *by = room.by + (o * rows + r) * f->spans + b * per;
                    sum[o][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), spread_four(by, f->which), sum[o][r]);
                }
            }
        }
        UNROLL for (int r = 0; r < rows; r++) {
            __m256 halves[TOGETHER];
            float sums[TOGETHER];
            UNROLL for (int o = 0; o < TOGETHER; o++) halves[o] = o < count ? halved(sum[o][r]) : _mm256_setzero_ps();
            _mm_storeu_ps(sums, sums_of_four(halves));
            UNROLL for (int o = 0; o < count; o++) room.sums[r * PIECE + least(o * apart + i, last - first - 1)] = sums[o];
        }
    }
}

static void some_outputs(void *task, int64_t first, int64_t last, void *memory) {
    const Few *f = task;
    const Product *p = &f->all->p;
    const int64_t numbers = room_of_groups(f), by = TOGETHER * p->rows * f->spans;
    float *held = memory;
    const Room room = {held, held + numbers, held + 2 * numbers, held + 2 * numbers + by};
    memset(held, 0, (size_t)(2 * numbers) * sizeof *held);
    if (!has_nibbles(p->packed)) KNOWN(N, p->rows, sum_outputs(f, first, last, room, 0, 0, N))
    else if (p->packed->levels == UINT4) KNOWN(N, p->rows, sum_outputs(f, first, last, room, 1, 0, N))
    else if (has_signed_levels(p->packed)) KNOWN(N, p->rows, sum_outputs(f, first, last, room, 1, 2, N))
    else KNOWN(N, p->rows, sum_outputs(f, first, last, room, 1, 1, N))
    finish(p, room.sums, PIECE, 0, p->rows, first, last - first);
}

int few(const Whole *all, int threads) {
    const Product *p = &all->p;
    const int64_t group = p->packed->group;
    Few f = {.all = all, .blocks = all->padded / all->block, .groups = groups_of(p->packed), .spans = up(all->spans, LANES)};
    f.shift = group ? __builtin_ctzll((uint64_t)(group / all->span)) : 62;
    f.which = each_of((int)(all->span / all->unit * 4)), f.within = each_of(f.shift < 4 ? 1 << f.shift : LANES);
    const int64_t spans = p->rows * f.spans, share = p->outs / (TURNS * threads) / LANES * LANES;
    f.scale = aligned_alloc(64, (size_t)(2 * spans + p->rows * up(f.groups, LANES)) * sizeof(float));
    if (!f.scale) return 1;
    f.start = f.scale + spans, f.sum = f.start + spans;
    describe(&f);
    const int64_t floats = 2 * room_of_groups(&f) + p->rows * (TOGETHER * f.spans + PIECE);
    const int failed = team_share(some_outputs, &f, p->outs, most(LANES, least(share, PIECE)),
                                  floats * (int64_t)sizeof(float), threads);
    free(f.scale);
    return failed;
}
