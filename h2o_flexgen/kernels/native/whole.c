/* y = x w^T for weights of 4 or 8 bits, in whole numbers: x is rounded to 8 bits too, as GGML's products do.

   An instruction multiplies 64 pairs of 8 bits (whole.h), where that of bfloat16 does 32, and weights need no rounding: their codes
   go in as they are. COLS outputs make a panel; DEPTH of its inputs at a time are turned into vectors that have four
   inputs of 16 outputs, and stay in the first cache while all rows pass. Turning takes as long as three rows do.

   Inputs that share a scale of the weights, at most MOST_SPAN, are a span: x has a scale for each. A span's sums stay whole;
   then they are multiplied by both scales. Codes are unsigned numbers, so what they stand for is `offset` less: sums
   start at -offset times the sum of x. Other lows are multiplied by that sum, in float32.

   Scales of K-quants are whole numbers, times one for 256 inputs. Where an instruction adds up two sums of 16 bits as it
   multiplies them, it does so by these numbers, and a span has all groups of MOST_SPAN inputs. Codes of 4 bits in groups of
   16 that have other scales, or elsewhere, are the halves of units, each scaled apart. */

#define OF_BYTES
#include "team.h"
#include "tiles.h"
#include "whole.h"

/* Whether `whole` can do products with such weights. */
int takes_whole(const Packed *w) {
    const int signed_halves = has_halves(w) && w->levels > E2M1;
    return w->levels != E4M3 && (!signed_halves || has_whole_scales(w)) && w->ins % unit_of(w) == 0;
}

static int is_grouped(const Packed *w) {
    return has_halves(w) || (BY_TWOS && has_whole_scales(w) && w->levels != IQ3S);
}

/* Inputs that share a scale of x. */
int span_of(const Packed *w) {
    const int64_t grouped = BY_TWOS ? MOST_SPAN : 32;
    return (int)(is_grouped(w) ? grouped : w->group ? least(MOST_SPAN, w->group & -w->group) : MOST_SPAN);
}

enum {
    VECTORS_OUT = 4,
    COLS = VECTORS_OUT * LANES, /* outputs of a panel */
    DEPTH = 256,                /* inputs: 16 KiB of a panel */
    HEIGHT = BY_FOURS ? 6 : 4,  /* rows of a tile, and */
    PASS = IS_WIDE ? COLS : LANES, /* outputs at a time: as many sums as there are registers for */
    LEAST_ROWS = 96, MOST_ROWS = 512, /* of a share of x */
    LINE = 64,
    STEP = COLS * 4, /* bytes of four inputs of a panel */
};

/* Codes of a panel: of 8 bits; of 4 bits, and those in groups of 16; of levels up to 30, and signed ones; the latter in groups
   of 16; groups of 16 whose scales are no whole numbers; of a byte each, from -32 to 31. Tiles that add up in 16 bits tell
   levels of 4 bits, these scales and small bytes apart. */
enum { BYTES, UP_TO_15, HALVES, UP_TO_30, SIGNED, SIGNED_HALVES, SCALED_HALVES, SIX_BITS };
INLINE int are_halves(const int kind) { return kind == HALVES || kind == SIGNED_HALVES || kind == SCALED_HALVES; }

#include "whole_rounding.h"

/* ---- a panel of weights */

typedef struct {
    uint8_t *codes;       /* (DEPTH / 4, COLS, 4): unit by unit, of 4 bits the even inputs first */
    float *scale, *low;   /* (spans, COLS) where there are whole scales, else (parts, COLS); (parts, COLS) */
    float *whole;         /* (parts, COLS): the whole scales of grouped spans, twice in 16 bits each */
    float *super, *sums;  /* room: (blocks, COLS) and (rows of a share, COLS) */
    int64_t out;          /* its first output; -1: none yet */
    int six_bits;         /* whether codes of a byte are from -32 to 31, as far as known */
} Panel;

/* Numbers of 16 outputs: `count` each, written to `each` places, to no more than `end`. They are multiplied by one number,
   or by those of each output that lie at (count >> shift, COLS). */
typedef struct {
    int64_t count, each, end;
    const float *by;
    int shift; /* negative: one number */
} Turn;

/* Of numbers that share a lane of 32 bits one. */
INLINE __m512 number_in(__m512i lanes, const int kind, const int bits, const int from) {
    const __m512i later = _mm512_srli_epi32(lanes, from);
    const __m512i whole = _mm512_srai_epi32(_mm512_slli_epi32(lanes, 32 - bits - from), 32 - bits);
    switch (kind) {
    case BFLOAT16: return from ? odd_halves(lanes) : even_halves(lanes);
    case FLOAT16: return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(later));
    case FLOAT32: return _mm512_castsi512_ps(lanes);
    case E8M0: return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_and_si512(later, _mm512_set1_epi32(255)), 23));
    case E4M3_OF_ROW: return e4m3(_mm512_cvtsepi32_epi8(whole));
    default: return _mm512_cvtepi32_ps(whole);
    }
}

/* Of numbers of 8 bits that share a lane one, in both halves of the lane. */
INLINE __m512 twice_in(__m512i lanes, const int from) {
    const __m512i number = _mm512_srai_epi32(_mm512_slli_epi32(lanes, 24 - from), 24);
    const __m512i lower = _mm512_and_si512(number, _mm512_set1_epi32(0xFFFF));
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_slli_epi32(number, 16), lower));
}

INLINE void turn_kind(const void *numbers, int64_t out, int64_t outs, Turn t, float *to, const int kind, const int twice) {
    const int size = (int)size_of(kind), shares = 4 / size;
    const int64_t row = t.count * size;
    for (int64_t at = 0; at < row; at += LINE) {
        const uint8_t *from = (const uint8_t *)numbers + out * row + at;
        const int near_end = (out + LANES - 1) * row + at + LINE > outs * row;
        uint8_t some[LANES * LINE];
        for (int64_t i = 0; near_end && i < LANES; i++) /* the last row stands in for those beyond it */
            memcpy(some + i * LINE, from + least(i, outs - 1 - out) * row, (size_t)least(LINE, row - at));
        __m512i lanes[LANES];
        load_columns(near_end ? some : from, near_end ? LINE : row, lanes);
        const int64_t first = at / size, here = least(LINE / size, t.count - first);
        for (int64_t i = 0; i * shares < here; i++)
            UNROLL for (int share = 0; share < shares; share++) {
                const int64_t n = first + i * shares + share;
                if (n >= t.count) continue;
                const __m512 by = t.shift < 0 ? _mm512_set1_ps(*t.by) : _mm512_load_ps(t.by + (n >> t.shift) * COLS);
                const __m512 number = twice ? twice_in(lanes[i], 8 * share)
                                            : _mm512_mul_ps(number_in(lanes[i], kind, 8 * size, 8 * size * share), by);
                const int64_t last = least((n + 1) * t.each, t.end);
                for (int64_t s = n * t.each; s < last; s++) _mm512_store_ps(to + s * COLS, number);
            }
    }
}

static void turn(int64_t kind, const void *numbers, int64_t out, int64_t outs, Turn t, float *to) {
    switch (kind) {
    case BFLOAT16: turn_kind(numbers, out, outs, t, to, BFLOAT16, 0); return;
    case FLOAT16: turn_kind(numbers, out, outs, t, to, FLOAT16, 0); return;
    case FLOAT32: turn_kind(numbers, out, outs, t, to, FLOAT32, 0); return;
    case E8M0: turn_kind(numbers, out, outs, t, to, E8M0, 0); return;
    case E4M3_OF_ROW: turn_kind(numbers, out, outs, t, to, E4M3_OF_ROW, 0); return;
    case SUPER: turn_kind(numbers, out, outs, t, to, SUPER, 0); return;
    default: turn_kind(numbers, out, outs, t, to, ZERO, 0);
    }
}

/* The scales, or the lows, of 16 outputs, `count` each. */
static void take_numbers(const Whole *all, int64_t out, int lows, int64_t count, const Panel *panel, float *to) {
    const Packed *w = all->p.packed;
    const int64_t blocks = blocks_of(w), kind = lows ? w->low_kind : w->scale_kind, groups = groups_of(w);
    const int64_t each = w->group ? w->group * count / all->padded : count;
    const float factor = !lows ? whole_step(w) : kind == SUPER ? -1 : kind == ZERO ? -1 / whole_step(w) : 1;
    Turn t = {groups, each, count, &factor, -1}, super = {blocks, 1, blocks, &factor, -1};
    if (kind == SUPER) {
        turn(FLOAT16, lows ? w->super_low : w->super_scale, out, all->p.outs, super, panel->super);
        t.by = panel->super, t.shift = __builtin_ctzll(256 / (uint64_t)w->group);
    }
    if (kind == E4M3_OF_ROW) {
        turn(FLOAT32, w->super_scale, out, all->p.outs, (Turn){1, 1, 1, &factor, -1}, panel->super);
        t.by = panel->super, t.shift = 62;
    }
    turn(kind, lows ? w->low : w->scale, out, all->p.outs, t, to);
    const __m512 none = _mm512_setzero_ps();
    for (int64_t s = groups * each; s < count; s++) _mm512_store_ps(to + s * COLS, none); /* no inputs */
}

/* The scales of 16 outputs' blocks by span, and by part the whole numbers of their groups. */
static void take_grouped(const Whole *all, int64_t out, float *scale, float *whole) {
    const Packed *w = all->p.packed;
    const float one = 1, step = whole_step(w);
    const int64_t blocks = blocks_of(w), groups = groups_of(w);
    const Turn by_span = {blocks, 256 / all->span, all->spans, &step, -1};
    const Turn by_part = {groups, (w->group << all->log_parts) / all->span, all->parts, &one, -1};
    turn(FLOAT16, w->super_scale, out, all->p.outs, by_span, scale);
    turn_kind(w->scale, out, all->p.outs, by_part, whole, SUPER, 1); /* those without inputs may be any */
}

/* The scales and lows of outputs from `out` on. */
static void take_scales(const Whole *all, int64_t out, const Panel *panel) {
    for (int64_t col = 0; col < COLS; col += LANES) {
        const int64_t first = least(out + col, all->p.outs - 1);
        float *scale = panel->scale + col, *low = panel->low + col;
        if (all->by_whole) take_grouped(all, first, scale, panel->whole + col);
        else take_numbers(all, first, 0, all->parts, panel, scale);
        if (all->lows) take_numbers(all, first, 1, all->parts, panel, low);
        const int64_t times = all->lows && all->p.packed->low_kind == ZERO ? all->parts * COLS : 0; /* so many scales */
        for (int64_t s = 0; s < times; s += COLS)
            _mm512_store_ps(low + s, _mm512_mul_ps(_mm512_load_ps(low + s), _mm512_load_ps(scale + s)));
    }
}

/* Rows that lie a multiple of this apart share so few places of the first cache that 16 of them drive each other out. */
enum { CROWDED = 1024 };

/* LINE bytes of each of 16 rows, to be copied side by side; `to` is NULL where rows are turned where they lie. */
typedef struct {
    const uint8_t *from;
    int64_t apart;
    __m512i *to;
} Copy;

INLINE void copy_lines(Copy c, const int from, const int end) {
    UNROLL for (int i = from; i < end; i++) c.to[i] = _mm512_loadu_si512(c.from + i * c.apart);
}

/* Codes of a row are LINE bytes, of 16 outputs that lie `apart` bytes apart: to a panel at `to`, while `then` is copied.
   Of 4 bits even inputs go first; codes become `more`, and if so `any` collects them. */
#if IS_WIDE
INLINE void turn_codes(const void *from, int64_t apart, Copy then, uint8_t *to, const int nibbles, const int tabled,
                       __m512i table, const int more, __m512i *any) {
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
INLINE void turn_codes(const void *from, int64_t apart, Copy then, uint8_t *to, const int nibbles, const int tabled,
                       __m512i table, const int more, __m512i *any) {
    const int steps = nibbles ? 8 : 4;
    UNROLL for (int i = 0; i < 8; i++) {
        const int half = i % 2, four = i / 2;
        __m256i column[4];
        if (then.to) copy_lines(then, 2 * i, 2 * i + 2);
        four_columns((const uint8_t *)from + 8 * half * apart + 16 * four, apart, column);
        UNROLL for (int s = 0; s < 4; s++) {
            uint8_t *even = to + (four * steps + s) * STEP + 32 * half;
            if (BY_TWOS && more) {
                column[s] = _mm256_add_epi8(column[s], _mm256_set1_epi8((char)more));
                any->a = _mm256_or_si256(any->a, column[s]);
            }
            store_eight(even, column[s], nibbles, tabled, table);
            if (nibbles) store_eight(even + 4 * STEP, _mm256_srli_epi16(column[s], 4), nibbles, tabled, table);
        }
    }
}
#endif

/* Inputs [in, end) of outputs from `out` on, as codes that are `more`; if so, returns the bits of any. Half as many bytes from
   `ahead` on are asked for. */
INLINE int take_codes(const Whole *all, int64_t out, int64_t in, int64_t end, uint8_t *to, const uint8_t *ahead,
                      const int more, const int nibbles, const int tabled) {
    const __m512i table = whole_table(all->p.packed);
    __m512i any = _mm512_setzero_si512(), lines[2][LANES];
    const int inputs = nibbles ? 128 : 64;
    const int64_t row_bytes = nibbles ? all->p.ins / 2 : all->p.ins;
    const int copies = !IS_WIDE && row_bytes % CROWDED == 0 && out + COLS <= all->p.outs;
    Copy copy = {all->p.packed->codes + out * row_bytes + in / inputs * LINE, row_bytes, copies ? lines[0] : NULL};
    if (copies) copy_lines(copy, 0, LANES);
    for (; in < end; in += inputs, to += inputs * COLS)
        for (int64_t col = 0; col < COLS; col += LANES, ahead += LANES / 2 * LINE) {
            const int64_t at = in / inputs * LINE, left = row_bytes - at, rows = all->p.outs - out - col;
            const uint8_t *from = all->p.packed->codes + least(out + col, all->p.outs - 1) * row_bytes + at;
            const uint8_t *then = col + LANES < COLS ? from + LANES * row_bytes : from - col * row_bytes + LINE;
            for (int i = 0; i < LANES / 2; i++) _mm_prefetch((const char *)ahead + i * LINE, _MM_HINT_T1);
            if (copies) {
                const void *copied = copy.to;
                copy.from = col + LANES < COLS || in + inputs < end ? then : from;
                copy.to = lines[copied == lines];
                turn_codes(copied, LINE, copy, to + col * 4, nibbles, tabled, table, more, &any);
                continue;
            }
            for (int i = 0; i < LANES; i++) _mm_prefetch((const char *)then + i * row_bytes, _MM_HINT_T0);
            if (rows >= LANES && left >= LINE) {
                turn_codes(from, row_bytes, copy, to + col * 4, nibbles, tabled, table, more, &any);
                continue;
            }
            __m512i some[LANES]; /* the last row stands in for those beyond it */
            for (int64_t i = 0; i < LANES; i++)
                some[i] = _mm512_maskz_loadu_epi8(left >= LINE ? ~0ull : (1ull << left) - 1,
                                                  from + most(0, least(i, rows - 1)) * row_bytes);
            turn_codes(some, LINE, copy, to + col * 4, nibbles, tabled, table, more, &any);
        }
    uint8_t bits[64];
    int found = 0;
    _mm512_storeu_si512(bits, any);
    for (int i = 0; i < 64; i++) found |= bits[i];
    return found;
}

/* DEPTH inputs of a panel from `in` on. Returns their kind. */
static int take_inputs(const Whole *all, Panel *panel, int64_t in, const uint8_t *ahead) {
    const int64_t end = least(in + DEPTH, all->padded), levels = all->p.packed->levels;
    uint8_t *to = panel->codes;
    if (levels == UINT4) {
        take_codes(all, panel->out, in, end, to, ahead, 0, 1, 0);
    } else if (levels < INT8) {
        take_codes(all, panel->out, in, end, to, ahead, 0, 1, 1);
    } else if (!BY_TWOS || !panel->six_bits) {
        take_codes(all, panel->out, in, end, to, ahead, 0, 0, 0);
    } else if (take_codes(all, panel->out, in, end, to, ahead, 32, 0, 0) > 63) {
        panel->six_bits = 0; /* nor are others that follow */
        for (int64_t i = 0; i < COLS * (end - in); i++) to[i] -= 32;
    }
    const int is_signed = BY_TWOS && has_signed_levels(all->p.packed), other = BY_TWOS && levels != UINT4;
    if (BY_TWOS && has_halves(all->p.packed) && !all->by_whole) return SCALED_HALVES;
    if (has_halves(all->p.packed)) return is_signed ? SIGNED_HALVES : HALVES;
    if (has_nibbles(all->p.packed)) return is_signed ? SIGNED : other ? UP_TO_30 : UP_TO_15;
    return BY_TWOS && panel->six_bits ? SIX_BITS : BYTES;
}

/* ---- sums */

/* The factors and starts of a span's sums: of 16 outputs or more, and of the first row; other rows' lie behind. Of codes in
   16 bits a part's sums are multiplied by whole numbers: the next part's lie `step` behind. */
typedef struct {
    const float *scale, *low, *x, *sum, *whole;
    const int32_t *start;
    int64_t step;
} Scales;
static const int32_t ONES[LANES] __attribute__((aligned(64))) = {[0 ... LANES - 1] = 0x10001};

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
    const int64_t parts = 1 << all->log_parts, starts = 1 << all->log_starts, part = first * parts, start = first * starts;
    for (int64_t col = 0; col < COLS; col += PASS) {
        const uint8_t *codes = panel->codes + 4 * col;
        const int8_t *x = all->x + row * all->padded + rows * in;
        Scales by = {panel->scale + (all->by_whole ? first : part) * COLS + col, panel->low + part * COLS + col,
                     all->scale + row * all->spans + rows * first, all->sum + row * all->parts + rows * part,
                     all->by_whole ? panel->whole + part * COLS + col : (const float *)ONES,
                     all->start + row * all->starts + rows * start, all->by_whole ? COLS : 0};
        UNROLL for (int r = 0; r < rows && !in; r++)
            UNROLL for (int v = 0; v < PASS; v += LANES) _mm512_store_ps(sums + r * COLS + col + v, _mm512_setzero_ps());
        for (int64_t span = first; span < last; span++) {
            if (all->log_units == 0) take_span(all, x, 1, codes, &ahead, &by, sums + col, rows, kind, asks);
            else take_span(all, x, 1ull << all->log_units, codes, &ahead, &by, sums + col, rows, kind, asks);
            codes += all->span * COLS, x += all->span * rows;
            by.scale += all->by_whole ? COLS : parts * COLS, by.low += parts * COLS, by.whole += parts * by.step;
            by.x += rows, by.sum += parts * rows, by.start += starts * rows;
        }
    }
}

typedef void Tile(const Whole *, const Panel *, int64_t, int64_t, float *, const uint8_t *);
#define ONE_TILE(ROWS, KIND, ASKS) \
    static void tile_##ROWS##_##KIND##_##ASKS(const Whole *all, const Panel *panel, int64_t row, int64_t in, float *sums, \
                                              const uint8_t *ahead) { \
        tile(all, panel, row, in, sums, ahead, ROWS, KIND, ASKS); \
    }
#define NAME(ROWS, KIND, ASKS) tile_##ROWS##_##KIND##_##ASKS,
#if BY_FOURS
#define HEIGHTS(DO, ...) \
    DO(1, __VA_ARGS__) DO(2, __VA_ARGS__) DO(3, __VA_ARGS__) DO(4, __VA_ARGS__) DO(5, __VA_ARGS__) DO(6, __VA_ARGS__)
#else
#define HEIGHTS(DO, ...) DO(1, __VA_ARGS__) DO(2, __VA_ARGS__) DO(3, __VA_ARGS__) DO(4, __VA_ARGS__)
#endif
#if BY_TWOS
#define KINDS(DO) DO(BYTES) DO(UP_TO_15) DO(HALVES) DO(UP_TO_30) DO(SIGNED) DO(SIGNED_HALVES) DO(SCALED_HALVES) DO(SIX_BITS)
#else
#define KINDS(DO) DO(BYTES) DO(UP_TO_15) DO(HALVES)
#endif
#define SOME_TILES(KIND, ASKS) \
    HEIGHTS(ONE_TILE, KIND, ASKS) static Tile *const tiles_##KIND##_##ASKS[HEIGHT] = {HEIGHTS(NAME, KIND, ASKS)};
#define TILES(KIND) SOME_TILES(KIND, 0) SOME_TILES(KIND, 1)
#define BOTH(KIND) {tiles_##KIND##_0, tiles_##KIND##_1},
KINDS(TILES)
static Tile *const *const tiles[][2] = {KINDS(BOTH)};

/* Pieces are shares of x times panels, those of a panel one after the other. */
static int64_t panel_of(const Whole *all, int64_t piece) { return least(piece / all->shares * COLS, all->p.outs); }

/* A tile's inputs are asked for while the one before is computed: processors do not look for them as far away as they are. */
static void ask_tile(const Whole *all, int64_t row, int64_t height, int64_t in) {
    const char *x = (const char *)all->x + row * all->padded + height * in;
    for (int64_t i = 0; i < height * DEPTH; i += LINE) _mm_prefetch(x + i, _MM_HINT_T0);
}

static void take_piece(const Whole *all, int64_t piece, int64_t following, Panel *panel) {
    const Packed *w = all->p.packed;
    const int64_t out = panel_of(all, piece), then = panel_of(all, following), from = piece % all->shares * all->share;
    const int64_t rows = least(all->share, all->p.rows - from), row_bytes = has_nibbles(w) ? w->ins / 2 : w->ins;
    const int nibbles = has_nibbles(w), last = then != out;
    const uint8_t *ahead = w->codes + then * row_bytes;
    const Cut c = cut(rows);
    if (panel->out != out) take_scales(all, out, panel);
    panel->out = out;
    for (int64_t in = 0; in < all->padded; in += DEPTH) {
        const uint8_t *next = ahead + in / (1 + nibbles) * COLS;
        const int64_t asked = COLS * in / all->padded;
        if (last) ask_scales(w, then + asked, COLS * (in + DEPTH) / all->padded - asked);
        const int kind = take_inputs(all, panel, in, next);
        for (int64_t row = 0, turn = 0, height; row < rows; row += height, turn++) {
            height = c.height + (turn < c.taller);
            if (row + height < rows) ask_tile(all, from + row + height, c.height + (turn + 1 < c.taller), in);
            const int asks = last && !turn && in + DEPTH <= w->ins;
            tiles[kind][asks][height - 1](all, panel, from + row, in, panel->sums + row * COLS,
                                          next + DEPTH / (1 + nibbles) * COLS / 2);
        }
    }
    finish(&all->p, panel->sums, COLS, from, rows, out, least(COLS, all->p.outs - out));
}

/* The piece after this one, by runs that `end` there: each claim of one waits for what this thread has stored. */
static int64_t next_piece(Whole *all, int64_t piece, int64_t *end) {
    if (piece + 1 < *end) return piece + 1;
    const int64_t left = all->pieces - __atomic_load_n(&all->next, __ATOMIC_RELAXED);
    const int64_t run = most(1, left / all->runs), first = claim(&all->next, run);
    *end = first + run;
    return first;
}

static void take_pieces(void *task, int member) {
    Whole *all = task;
    int64_t end = 0, piece = next_piece(all, 0, &end);
    if (piece >= all->pieces) return;
    const int64_t supers = blocks_of(all->p.packed) * COLS, scales = all->parts * COLS, lows = all->lows * scales;
    const int64_t whole = all->by_whole * scales, floats = scales + lows + whole + supers;
    uint8_t *room = aligned_alloc(LINE, (size_t)(DEPTH * COLS + (floats + all->share * COLS) * (int64_t)sizeof(float)));
    if (!room) __atomic_store_n(&all->failed, 1, __ATOMIC_RELAXED);
    float *behind = (float *)(room + DEPTH * COLS);
    Panel panel = {room, behind, behind + scales, behind + scales + lows, behind + scales + lows + whole, behind + floats, -1, 1};
    while (room && piece < all->pieces) {
        const int64_t following = next_piece(all, piece, &end);
        take_piece(all, piece, following, &panel);
        piece = following;
    }
    free(room);
}

/* ---- the product */

/* Shares of x's rows, as even as can be: each turns a panel's codes anew. They are so many that all threads have some
   pieces, one of which may be late. */
static void divide(Whole *all) {
    const int64_t rows = all->p.rows, panels = (all->p.outs + COLS - 1) / COLS;
    const int64_t fitting = (rows + MOST_ROWS - 1) / MOST_ROWS, wanted = (all->runs + panels - 1) / panels;
    const int64_t shares = most(fitting, least(wanted, rows / LEAST_ROWS));
    all->share = (rows + shares - 1) / shares, all->shares = (rows + all->share - 1) / all->share;
    all->pieces = panels * all->shares;
}

static void describe(Whole *all) {
    const Packed *w = all->p.packed;
    all->unit = has_nibbles(w) ? 32 : 16, all->block = UNITS * all->unit;
    all->span = span_of(w), all->grouped = is_grouped(w), all->by_whole = BY_TWOS && all->grouped && has_whole_scales(w);
    all->padded = up(all->p.ins, all->block), all->spans = all->padded / all->span;
    all->log_span = __builtin_ctzll((uint64_t)all->span), all->log_units = all->log_span - __builtin_ctzll((uint64_t)all->unit);
    all->log_parts = all->grouped ? all->log_units + has_halves(w) : 0, all->parts = all->spans << all->log_parts;
    all->log_starts = has_halves(w) ? all->log_parts : BY_TWOS && !has_nibbles(w) ? all->log_units : 0;
    all->starts = all->spans << all->log_starts;
    all->offset = whole_offset(w);
    all->lows = w->low_kind != NONE && w->low_kind != MIDDLE;
}

int whole(const Product *p, int threads) {
    Whole all = {.p = *p, .runs = 8 * threads};
    describe(&all);
    divide(&all);
    const int64_t spans = up(p->rows * all.spans, LANES), parts = up(p->rows * all.parts, LANES);
    const int64_t starts = up(p->rows * all.starts, LANES), bytes = up(p->rows * all.padded, LINE);
    uint8_t *room = aligned_alloc(LINE, (size_t)(bytes + (spans + parts + starts) * (int64_t)sizeof(float)));
    if (!room) return 1;
    all.x = (int8_t *)room;
    all.scale = (float *)(room + bytes), all.sum = all.scale + spans, all.start = (int32_t *)(all.sum + parts);
    const int are_few = p->rows <= FEW_ROWS;
    const int64_t tiles = are_few ? p->rows : p->rows / all.share * tiles_in(all.share) + tiles_in(p->rows % all.share);
    team_share(round_tiles, &all, tiles, 1, 0, tiles == 1 ? 1 : threads);
    if (are_few)
        all.failed |= few(&all, threads);
    else
        team_run(take_pieces, &all, threads);
    free(room);
    return all.failed;
}
