/* y = x w^T for weights of 4 or 8 bits, in whole numbers: x is rounded to 8 bits too, as GGML's products do.

   An instruction multiplies 64 pairs of 8 bits (whole.h), where that of bfloat16 does 32, and weights need no rounding: their codes
   go in as they are. COLS outputs make a panel; DEPTH of its inputs at a time are turned into vectors that have four
   inputs of 16 outputs, and stay in the first cache while all rows pass. Turning takes as long as three rows do.

   Inputs that share a scale of the weights, at most MOST_SPAN, are a span: x has a scale for each. A span's sums stay whole;
   then they are multiplied by both scales. Codes are unsigned numbers, so what they stand for is `offset` less: sums
   start at -offset times the sum of x. Other lows are multiplied by that sum, in float32. */

#define OF_BYTES
#include "team.h"
#include "tiles.h"
#include "whole.h"

/* Whether `whole` can do products with such weights. */
int takes_whole(const Packed *w) {
    return w->levels != E4M3 && !(has_nibbles(w) && w->group == 16) && w->ins % unit_of(w) == 0;
}

/* Inputs that share a scale of x at most. */
int most_span(void) { return MOST_SPAN; }

enum {
    VECTORS_OUT = 4,
    COLS = VECTORS_OUT * LANES, /* outputs of a panel */
    DEPTH = 256,                /* inputs: 16 KiB of a panel */
    HEIGHT = BY_FOURS ? 6 : 4,  /* rows of a tile, and */
    PASS = IS_WIDE ? COLS : LANES, /* outputs at a time: as many sums as there are registers for */
    MOST_ROWS = 512,            /* whose sums are kept at a time */
    LINE = 64,
    STEP = COLS * 4, /* bytes of four inputs of a panel */
};

/* Codes of a panel: of 8 bits; of 4 bits, of levels up to 30, and signed ones; of a byte each, up to 32 and up to 64. The
   latter two, and that there is a difference between the others of 4 bits, are for tiles that add up in 16 bits. */
enum { BYTES, UP_TO_15, UP_TO_30, SIGNED, UP_TO_32, UP_TO_64 };

/* ---- x */

/* How rows are cut into tiles, as evenly as can be: `taller` of them, the first ones, have a row more than `height`. */
typedef struct {
    int64_t height, taller;
} Cut;

static Cut cut(int64_t rows) {
    const int64_t turns = (rows + HEIGHT - 1) / HEIGHT;
    return (Cut){rows / turns, rows % turns};
}

/* Where the numbers of a row are: the first four, and how far those that follow lie behind. */
typedef struct {
    int8_t *at;
    int64_t step;
} Fours;

static Fours fours_of(const Whole *all, int64_t row) {
    if (all->p.rows <= FEW_ROWS) return (Fours){all->x + row * all->padded, 4};
    const int64_t from = row / MOST_ROWS * MOST_ROWS, within = row - from;
    const Cut c = cut(least(MOST_ROWS, all->p.rows - from));
    const int64_t behind = within - c.taller * (c.height + 1), height = c.height + (behind < 0);
    const int64_t place = (behind < 0 ? within : behind) % height;
    return (Fours){all->x + (row - place) * all->padded + 4 * place, 4 * height};
}

/* 16 numbers of a row, rounded to steps, from the `first` one on. Returns them. */
INLINE __m512i put_numbers(__m512 numbers, __m512 steps, Fours row, int64_t first) {
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(numbers, steps));
    const __m128i bytes = _mm512_cvtsepi32_epi8(whole);
    int8_t *at = row.at + (first >> 2) * row.step;
    if (row.step == 4) {
        _mm_storeu_si128((__m128i *)at, bytes);
    } else {
        int32_t fours[4];
        _mm_storeu_si128((__m128i *)fours, bytes);
        UNROLL for (int i = 0; i < 4; i++) memcpy(at + i * row.step, fours + i, sizeof *fours);
    }
    return whole;
}

/* The largest of `count` numbers without their signs; of what is not finite infinity or NaN. */
INLINE float largest_of(const bf16 *from, int64_t count) {
    const __m256i size = _mm256_set1_epi16(INT16_MAX);
    __m256i top = _mm256_setzero_si256();
    for (int64_t i = 0; i < count; i += LANES)
        top = _mm256_max_epi16(top, _mm256_and_si256(size, _mm256_loadu_si256((const __m256i *)(from + i))));
    const __m128i eight = _mm_max_epi16(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
    const __m128i less = _mm_minpos_epu16(_mm_sub_epi16(_mm_set1_epi16(INT16_MAX), eight));
    return wide_number((bf16)(INT16_MAX - _mm_extract_epi16(less, 0)));
}

/* A span of a row: its numbers, their scale, and what sums with it start at. What is not finite makes the scale so. */
INLINE void round_span(const Whole *all, int64_t row, Fours to, int64_t span, const int nibbles) {
    const int64_t first = span * all->span, at = row * all->spans + span, left = all->p.ins - first;
    const bf16 *from = all->p.x + row * all->p.x_stride + first;
    bf16 padded[MOST_SPAN];
    if (left < all->span) {
        memset(padded, 0, sizeof padded);
        from = memcpy(padded, from, (size_t)most(0, left) * sizeof *from);
    }
    const float largest = largest_of(from, all->span);
    const __m512 steps = _mm512_set1_ps(largest > 0 ? 127 / largest : 0);
    __m512i total = _mm512_setzero_si512();
    for (int64_t i = 0; i < all->span; i += nibbles ? 32 : 16) {
        if (nibbles) {
            const int64_t unit = (first + i) >> 5, even = (unit & -UNITS) * 32 + (unit & (UNITS - 1)) * 16;
            const __m512i pairs = _mm512_loadu_si512(from + i);
            total = _mm512_add_epi32(total, put_numbers(even_halves(pairs), steps, to, even));
            total = _mm512_add_epi32(total, put_numbers(odd_halves(pairs), steps, to, even + 64));
        } else {
            const __m512 numbers = widened(_mm256_loadu_si256((const __m256i *)(from + i)));
            total = _mm512_add_epi32(total, put_numbers(numbers, steps, to, first + i));
        }
    }
    const int whole = _mm512_reduce_add_epi32(total);
    all->scale[at] = largest / 127 + (largest - largest);
    all->sum[at] = all->scale[at] * (float)whole;
    all->start[at] = -all->offset * whole;
}

static void round_rows(void *task, int64_t row, int64_t end, void *room) {
    const Whole here = *(const Whole *)task, *all = &here; /* bytes that are stored might be any other's fields */
    (void)room;
    for (; row < end; row++) {
        const Fours to = fours_of(all, row);
        for (int64_t span = 0; span < all->spans; span++)
            if (all->unit == 32) round_span(all, row, to, span, 1);
            else round_span(all, row, to, span, 0);
    }
}

/* ---- a panel of weights */

typedef struct {
    uint8_t *codes;       /* (DEPTH / 4, COLS, 4): unit by unit, of 4 bits the even inputs first */
    float *scale, *low;   /* (spans, COLS) */
    float *groups, *sums; /* room: (LANES, 2, groups) and (MOST_ROWS, COLS) */
    int offset;           /* what sums start at is times this */
} Panel;

/* Numbers of a group to all its spans, `each` of a group. */
INLINE void put(int64_t each, int64_t spans, int64_t group, __m512 numbers, float *to) {
    const int64_t end = least((group + 1) * each, spans);
    for (int64_t s = group * each; s < end; s++) _mm512_store_ps(to + s * COLS, numbers);
}

/* bfloat16 numbers of 16 outputs from `out` on, `groups` each, times `step`, two groups a lane. */
static void turn_pairs(const Whole *all, const bf16 *from, int64_t out, int64_t groups, __m512 step, float *to) {
    const int64_t each = all->each, spans = all->spans, most_groups = 2 * LANES, count = least(most_groups, groups);
    const int64_t left = all->p.outs - out;
    for (int64_t group = 0; group < groups; group += count) {
        __m512i r[LANES];
        group = least(group, groups - count); /* some twice, so that none are left over */
        if (left >= LANES && count == most_groups) {
            load_columns(from + out * groups + group, groups * (int64_t)sizeof *from, r);
        } else {
            const __mmask32 mask = count < most_groups ? (1u << count) - 1 : ~0u;
            for (int64_t i = 0; i < LANES; i++)
                r[i] = _mm512_maskz_loadu_epi16(mask, from + (out + least(i, left - 1)) * groups + group);
            transpose(r);
        }
        for (int64_t i = 0; 2 * i < count; i++) {
            put(each, spans, group + 2 * i, _mm512_mul_ps(step, even_halves(r[i])), to);
            if (2 * i + 1 < count) put(each, spans, group + 2 * i + 1, _mm512_mul_ps(step, odd_halves(r[i])), to);
        }
    }
}

/* The same of numbers of any kind, and of their lows if there are any. */
static void turn_any(const Whole *all, int64_t out, int64_t groups, __m512 step, float *room, float *scale, float *low) {
    const int64_t pitch = up(groups, LANES);
    for (int64_t i = 0; i < LANES; i++) {
        float *to = room + 2 * i * pitch;
        group_scales(all->p.packed, least(out + i, all->p.outs - 1), to, all->lows ? to + pitch : NULL);
    }
    for (int lows = 0; lows <= all->lows; lows++)
        for (int64_t group = 0; group < groups; group += LANES) {
            __m512i r[LANES];
            for (int i = 0; i < LANES; i++) r[i] = _mm512_loadu_si512(room + (2 * i + lows) * pitch + group);
            transpose(r);
            for (int64_t i = 0; i < least(LANES, groups - group); i++) {
                const __m512 v = _mm512_castsi512_ps(r[i]);
                put(all->each, all->spans, group + i, lows ? v : _mm512_mul_ps(v, step), lows ? low : scale);
            }
        }
}

/* The scales and lows of outputs from `out` on, by span. */
static void take_scales(const Whole *all, int64_t out, const Panel *panel) {
    const Packed *w = all->p.packed;
    const int64_t groups = groups_of(w);
    const __m512 one = _mm512_set1_ps(1), step = _mm512_set1_ps(whole_step(w));
    for (int64_t col = 0; col < COLS; col += LANES) {
        if (w->scale_kind == BFLOAT16 && (!all->lows || w->low_kind == BFLOAT16)) {
            turn_pairs(all, w->scale, out + col, groups, step, panel->scale + col);
            if (all->lows) turn_pairs(all, w->low, out + col, groups, one, panel->low + col);
        } else {
            turn_any(all, out + col, groups, step, panel->groups, panel->scale + col, panel->low + col);
        }
        for (int64_t s = groups * all->each; s < all->spans; s++) /* beyond the last input */
            for (int low = 0; low <= all->lows; low++)
                _mm512_store_ps((low ? panel->low : panel->scale) + s * COLS + col, _mm512_setzero_ps());
    }
}

/* Codes of a row are 64 bytes, of 16 outputs that lie `apart` bytes apart: to a panel at `to`. Of 4 bits even inputs go first. */
#if IS_WIDE
INLINE void turn_codes(const void *from, int64_t apart, uint8_t *to, const int nibbles, const int tabled, __m512i table) {
    const int steps = nibbles ? 8 : 4;
    __m512i r[LANES];
    load_columns(from, apart, r);
    UNROLL for (int i = 0; i < LANES; i++) {
        uint8_t *even = to + (i / 4 * steps + i % 4) * STEP;
        if (nibbles) {
            _mm512_store_si512(even, whole_levels(r[i], tabled, table));
            _mm512_store_si512(even + 4 * STEP, whole_levels(_mm512_srli_epi16(r[i], 4), tabled, table));
        } else {
            _mm512_store_si512(even, whole_bytes(r[i]));
        }
    }
}
#else
/* Four columns are stored as soon as they are turned: there are not registers for all of them. */
INLINE void store_eight(void *to, __m256i codes, const int nibbles, const int tabled, __m512i table) {
    const __m512i both = joined_i(codes, codes);
    _mm256_store_si256(to, (nibbles ? whole_levels(both, tabled, table) : whole_bytes(both)).a);
}
INLINE void turn_codes(const void *from, int64_t apart, uint8_t *to, const int nibbles, const int tabled, __m512i table) {
    const int steps = nibbles ? 8 : 4;
    UNROLL for (int i = 0; i < 8; i++) {
        const int half = i % 2, four = i / 2;
        __m256i column[4];
        four_columns((const uint8_t *)from + 8 * half * apart + 16 * four, apart, column);
        UNROLL for (int s = 0; s < 4; s++) {
            uint8_t *even = to + (four * steps + s) * STEP + 32 * half;
            store_eight(even, column[s], nibbles, tabled, table);
            if (nibbles) store_eight(even + 4 * STEP, _mm256_srli_epi16(column[s], 4), nibbles, tabled, table);
        }
    }
}
#endif

/* Inputs [in, end) of outputs from `out` on. Half as many bytes from `ahead` on are asked for. */
INLINE void take_codes(const Whole *all, int64_t out, int64_t in, int64_t end, uint8_t *to, const uint8_t *ahead,
                       const int nibbles, const int tabled) {
    const __m512i table = whole_table(all->p.packed);
    const int inputs = nibbles ? 128 : 64;
    const int64_t row_bytes = nibbles ? all->p.ins / 2 : all->p.ins;
    for (; in < end; in += inputs, to += inputs * COLS)
        for (int64_t col = 0; col < COLS; col += LANES, ahead += LANES / 2 * LINE) {
            const int64_t at = in / inputs * 64, left = row_bytes - at, rows = all->p.outs - out - col;
            const uint8_t *from = all->p.packed->codes + least(out + col, all->p.outs - 1) * row_bytes + at;
            const uint8_t *then = col + LANES < COLS ? from + LANES * row_bytes : from - col * row_bytes + LINE;
            for (int i = 0; i < LANES; i++) _mm_prefetch((const char *)then + i * row_bytes, _MM_HINT_T0);
            for (int i = 0; i < LANES / 2; i++) _mm_prefetch((const char *)ahead + i * LINE, _MM_HINT_T1);
            if (rows >= LANES && left >= LINE) {
                turn_codes(from, row_bytes, to + col * 4, nibbles, tabled, table);
                continue;
            }
            __m512i some[LANES]; /* the last row stands in for those beyond it */
            for (int64_t i = 0; i < LANES; i++)
                some[i] = _mm512_maskz_loadu_epi8(left >= LINE ? ~0ull : (1ull << left) - 1,
                                                  from + most(0, least(i, rows - 1)) * row_bytes);
            turn_codes(some, LINE, to + col * 4, nibbles, tabled, table);
        }
}

static void take_inputs(const Whole *all, int64_t out, int64_t in, uint8_t *to, const uint8_t *ahead) {
    const int64_t end = least(in + DEPTH, all->padded), levels = all->p.packed->levels;
    if (levels == UINT4)
        take_codes(all, out, in, end, to, ahead, 1, 0);
    else if (levels <= IQ2)
        take_codes(all, out, in, end, to, ahead, 1, 1);
    else
        take_codes(all, out, in, end, to, ahead, 0, 0);
}

/* ---- sums */

/* What a span's sums are multiplied by and start at: of 16 outputs or more, and of a row; others' lie `spans` behind. */
typedef struct {
    const float *scale, *low, *x, *sum;
    const int32_t *start;
    int times;
} Scales;

#if IS_WIDE
#include "whole_wide.h"
#else
#include "whole_narrow.h"
#endif

/* sums (rows, COLS) = or += rows of x from `row` on times what the panel holds, from input `in` on. Where it `asks`,
   half of the panel's bytes from `ahead` on are asked for, some at each step: many at once would wait for each other. */
INLINE void tile(const Whole *all, const Panel *panel, int64_t row, int64_t in, float *sums, const uint8_t *ahead,
                 const int rows, const int kind, const int asks) {
    /* No divisions: some processors take 90 cycles for each. */
    const int64_t first = in >> all->log_span, last = least(in + DEPTH, all->padded) >> all->log_span;
    const int8_t *x = all->x + row * all->padded;
    for (int64_t col = 0; col < COLS; col += PASS) {
        const uint8_t *codes = panel->codes + 4 * col;
        UNROLL for (int r = 0; r < rows && !in; r++)
            UNROLL for (int v = 0; v < PASS; v += LANES) _mm512_store_ps(sums + r * COLS + col + v, _mm512_setzero_ps());
        for (int64_t span = first; span < last; span++, codes += all->span * COLS) {
            const int64_t at = span * COLS + col, behind = row * all->spans + span;
            const Scales by = {panel->scale + at, panel->low + at, all->scale + behind, all->sum + behind, all->start + behind,
                               panel->offset};
            if (all->log_units == 0)
                take_span(all, x, (uint64_t)span, 1, codes, &ahead, &by, sums + col, rows, kind, asks);
            else
                take_span(all, x, (uint64_t)span << all->log_units, 1ull << all->log_units, codes, &ahead, &by, sums + col, rows,
                          kind, asks);
        }
    }
}

typedef void Tile(const Whole *, const Panel *, int64_t, int64_t, float *, const uint8_t *);
#define ONE_TILE(ROWS, KIND, ASKS) \
    static void tile_##ROWS##_##KIND##_##ASKS(const Whole *all, const Panel *panel, int64_t row, int64_t in, float *sums, \
                                              const uint8_t *ahead) { \
        tile(all, panel, row, in, sums, ahead, ROWS, KIND, ASKS); \
    }
#define NAME(ROWS, KIND, ASKS) tile_##ROWS##_##KIND##_##ASKS
#if BY_FOURS
#define TALL_TILES(KIND, ASKS) ONE_TILE(5, KIND, ASKS) ONE_TILE(6, KIND, ASKS)
#define TALL_NAMES(KIND, ASKS) , NAME(5, KIND, ASKS), NAME(6, KIND, ASKS)
#else
#define TALL_TILES(KIND, ASKS)
#define TALL_NAMES(KIND, ASKS)
#endif
#define SOME_TILES(KIND, ASKS) \
    ONE_TILE(1, KIND, ASKS) ONE_TILE(2, KIND, ASKS) ONE_TILE(3, KIND, ASKS) ONE_TILE(4, KIND, ASKS) \
    TALL_TILES(KIND, ASKS) \
    static Tile *const tiles_##KIND##_##ASKS[HEIGHT] = {NAME(1, KIND, ASKS), NAME(2, KIND, ASKS), NAME(3, KIND, ASKS), \
                                                        NAME(4, KIND, ASKS) TALL_NAMES(KIND, ASKS)};
#define TILES(KIND) SOME_TILES(KIND, 0) SOME_TILES(KIND, 1)
#define BOTH(KIND) {tiles_##KIND##_0, tiles_##KIND##_1}
TILES(BYTES) TILES(UP_TO_15)
#if IS_WIDE
static Tile *const *const tiles[][2] = {BOTH(BYTES), BOTH(UP_TO_15)};
#else
TILES(UP_TO_30) TILES(SIGNED)
#if !BY_FOURS
TILES(UP_TO_32) TILES(UP_TO_64)
#endif
static Tile *const *const tiles[][2] = {BOTH(BYTES), BOTH(UP_TO_15), BOTH(UP_TO_30), BOTH(SIGNED),
#if !BY_FOURS
                                        BOTH(UP_TO_32), BOTH(UP_TO_64)
#endif
};
#endif

/* Which of the kinds are codes as they are stored. */
static int kind_of(const Packed *w) {
    if (IS_WIDE || !has_nibbles(w)) return has_nibbles(w) ? UP_TO_15 : BYTES;
    return w->levels == UINT4 ? UP_TO_15 : has_signed_levels(w) ? SIGNED : UP_TO_30;
}

static void take_panel(const Whole *all, int64_t out, int64_t following, Panel *panel) {
    const Packed *w = all->p.packed;
    const int nibbles = has_nibbles(w);
    int kind = kind_of(w); /* of bytes that of each depth */
    const int64_t row_bytes = nibbles ? w->ins / 2 : w->ins;
    const uint8_t *ahead = w->codes + following * row_bytes;
    take_scales(all, out, panel);
    for (int64_t from = 0; from < all->p.rows; from += MOST_ROWS) {
        const int64_t rows = least(MOST_ROWS, all->p.rows - from);
        const Cut c = cut(rows);
        for (int64_t in = 0; in < all->padded; in += DEPTH) {
            const uint8_t *next = ahead + in / (1 + nibbles) * COLS;
            for (int64_t i = COLS * in / all->padded; !from && i < COLS * (in + DEPTH) / all->padded; i++)
                ask_scales(w, following + i);
            take_inputs(all, out, in, panel->codes, next);
#if !IS_WIDE
            if (all->fits) kind = smaller_codes(panel->codes, COLS * least(DEPTH, all->padded - in), &panel->offset);
#endif
            for (int64_t row = 0, turn = 0, height; row < rows; row += height, turn++) {
                height = c.height + (turn < c.taller);
                const int asks = !from && !turn && in + DEPTH <= w->ins;
                tiles[kind][asks][height - 1](all, panel, from + row, in, panel->sums + row * COLS,
                                                 next + DEPTH / (1 + nibbles) * COLS / 2);
            }
        }
        finish(&all->p, panel->sums, COLS, from, rows, out, least(COLS, all->p.outs - out));
    }
}

static void take_panels(void *task, int member) {
    Whole *all = task;
    (void)member;
    int64_t out = claim(&all->next, COLS);
    if (out >= all->p.outs) return;
    const int64_t groups = 2 * LANES * up(groups_of(all->p.packed), LANES), scales = all->spans * COLS;
    const int64_t floats = groups + (1 + all->lows) * scales + least(MOST_ROWS, all->p.rows) * COLS;
    uint8_t *room = aligned_alloc(LINE, (size_t)(DEPTH * COLS + floats * (int64_t)sizeof(float)));
    if (!room) __atomic_store_n(&all->failed, 1, __ATOMIC_RELAXED);
    float *behind = (float *)(room + DEPTH * COLS);
    Panel panel = {room, behind, behind + all->lows * scales, behind + (1 + all->lows) * scales,
                   behind + (1 + all->lows) * scales + groups, 1};
    while (room && out < all->p.outs) {
        const int64_t following = claim(&all->next, COLS);
        take_panel(all, out, least(following, all->p.outs), &panel);
        out = following;
    }
    free(room);
}

/* ---- the product */

static void describe(Whole *all) {
    const Packed *w = all->p.packed;
    all->unit = unit_of(w), all->block = UNITS * all->unit;
    all->span = w->group ? least(MOST_SPAN, w->group & -w->group) : MOST_SPAN;
    all->padded = up(all->p.ins, all->block), all->spans = all->padded / all->span;
    all->each = w->group ? w->group / all->span : all->spans;
    all->log_span = __builtin_ctzll((uint64_t)all->span), all->log_units = all->log_span - __builtin_ctzll((uint64_t)all->unit);
    all->fits = !IS_WIDE && !BY_FOURS && !has_nibbles(w) && all->p.rows > FEW_ROWS;
    all->offset = all->fits ? 1 : whole_offset(w);
    all->lows = w->low_kind != NONE && w->low_kind != MIDDLE;
}

int whole(const Product *p, int threads) {
    Whole all = {.p = *p};
    describe(&all);
    const int64_t spans = up(p->rows * all.spans, LANES), bytes = up(p->rows * all.padded, LINE);
    uint8_t *room = aligned_alloc(LINE, (size_t)(bytes + 3 * spans * (int64_t)sizeof(float)));
    if (!room) return 1;
    all.x = (int8_t *)room;
    all.scale = (float *)(room + bytes), all.sum = all.scale + spans, all.start = (int32_t *)(all.sum + spans);
    team_share(round_rows, &all, p->rows, 1, 0, p->rows == 1 ? 1 : threads);
    if (p->rows <= FEW_ROWS)
        all.failed |= few(&all, threads);
    else
        team_run(take_panels, &all, threads);
    free(room);
    return all.failed;
}
