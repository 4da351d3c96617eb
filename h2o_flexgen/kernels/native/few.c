/* Products of a few rows in whole numbers, bound by how fast the codes come from memory: several outputs at a time, from
   as many stretches of memory, each in the order its codes lie.

   A vector of 64 bytes holds 128 codes of 4 bits, or 64 of 8; of 4 bits each byte is an even input's and an odd one's.
   Its sums are in 16 lanes, four for each of its units, and are multiplied by the products of both scales before they are
   added up. These products are made for all spans of an output beforehand, with the terms of its lows and its offset.

   Scales of K-quants are whole numbers, and are read where they lie: they multiply whole sums, the scales of x what becomes
   of these, and the scale of 256 inputs all that they add up to. */

#define OF_BYTES
#include "whole.h"

#include "team.h"

/* Scales of an output's groups: of spans, of half a unit each, or whole numbers. */
enum { OF_SPANS, OF_HALVES, ARE_WHOLE };

enum {
    PIECE = 384,      /* outputs that a thread takes at a time, less where it would take */
    TURNS = 4,        /* fewer times than this */
    AHEAD = 4096,     /* bytes of codes that are asked for before they are used, */
    SCALES_AHEAD = 4, /* and outputs whose scales are */
    MOST_SUMS = REGISTERS == 32 ? 16 : 4, /* vectors that stay in registers */
    TOGETHER = 4, /* outputs at most; as scales are read where they lie, 2 */
};

/* The state that all threads share. */
typedef struct {
    const Whole *all;
    int64_t blocks, spans, groups; /* vectors of codes; spans, halves of units, or lanes of all vectors, up to whole vectors */
    int shift;                     /* of a span to its group */
    int kind, each;                /* of scales: if they are whole, x has scales of all lanes; scales of a vector */
    __m512i which, within;         /* of the spans from a block's first on each lane's; of the groups from a span's on */
    __m512i bytes;                 /* of the whole scales from a block's first on each lane's */
    float *scale, *start;          /* (rows, spans) of x, in steps of the weights; the start of whole sums, or of groups' sums */
    float *sum;                    /* (rows, groups up to whole vectors) of x */
} Few;

/* A start, of halves perhaps of 16 bits twice, in one number. */
static int32_t start_of(int32_t start, int kind) {
    return BY_TWOS && kind == OF_HALVES ? (int16_t)start + (start >> 16) : start;
}

static void describe(Few *f) {
    const Whole *all = f->all;
    const int64_t padded = up(f->groups, LANES), each = all->p.packed->group ? all->p.packed->group : all->padded;
    const float step = whole_step(all->p.packed);
    memset(f->start, 0, (size_t)(all->p.rows * (f->spans + padded)) * sizeof(float)); /* and `sum` */
    for (int64_t r = 0; r < all->p.rows; r++) {
        for (int64_t s = 0; s < f->spans; s++) {
            const int64_t span = f->kind == ARE_WHOLE ? s / 4 >> all->log_units : f->kind == OF_HALVES ? s >> all->log_parts : s;
            f->scale[r * f->spans + s] = span < all->spans ? step * all->scale[r * all->spans + span] : 0;
            if (f->kind != ARE_WHOLE && span < all->spans)
                f->start[r * f->spans + s] = (float)start_of(all->start[r * all->starts + s], f->kind);
        }
        for (int64_t s = 0, g; s < all->parts && (g = s * (all->padded / all->parts) / each) < f->groups; s++)
            f->sum[r * padded + g] += all->sum[r * all->parts + s];
        for (int64_t g = 0; f->kind == ARE_WHOLE && g < f->groups; g++)
            f->start[r * f->spans + g] = -step * (float)all->offset * f->sum[r * padded + g];
    }
}

/* Lanes of a vector by what they have in common, `lanes` at a time. */
static __m512i each_of(int lanes) {
    int32_t which[LANES];
    for (int i = 0; i < LANES; i++) which[i] = i / lanes;
    return _mm512_loadu_si512(which);
}

/* Bytes that are the last ones of lanes of 32 bits, and where sums are of 16 bits of both halves; the others are 0. */
static __m512i bytes_of(int lanes) {
    int32_t which[LANES];
    for (int i = 0; i < LANES; i++)
        which[i] = (int32_t)((uint32_t)(i / lanes) << 24 | (BY_TWOS ? 0x800080u | (uint32_t)(i / lanes) << 8 : 0x808080u));
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

/* The products of scales of output `out` and x's: to `by`, of rows `spans` apart. To `sum` what is known without codes. */
INLINE void take_scales(const Few *f, int64_t out, Room room, float *by, __m512 *sum, const int rows) {
    Numbers scales, lows;
    numbers_of(f, out, room, &scales, &lows);
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

/* Whole scales or lows of an output's groups, and in float32 what they are times for 256 inputs each. LANES more of the
   former and one more of the latter may be read. */
typedef struct {
    const int8_t *whole;
    const float *super;
} Grouped;

static Grouped grouped(const Few *f, int64_t out, const int8_t *whole, const uint16_t *super, float *room) {
    const int64_t blocks = blocks_of(f->all->p.packed), outs = f->all->p.outs - out, padded = up(blocks + 1, LANES);
    whole += out * f->groups, super += out * blocks;
    for (int64_t b = 0; b < blocks; b += LANES) {
        const int64_t left = outs * blocks - b;
        const __m256i halves = left < LANES ? _mm256_maskz_loadu_epi16(first_lanes(left), super + b)
                                            : _mm256_loadu_si256((const __m256i *)(super + b));
        _mm512_storeu_ps(room + b, _mm512_cvtph_ps(halves));
    }
    room[blocks] = 0;
    return (Grouped){outs * f->groups < f->groups + LANES ? memcpy(room + padded, whole, (size_t)f->groups) : whole, room};
}

/* sum += the groups' numbers times `by`, of rows `apart`. */
INLINE void add_groups(const Few *f, Grouped n, const float *by, int64_t apart, const float sign, __m512 *sum, const int rows) {
    const int shift = __builtin_ctzll(256 / (uint64_t)f->all->p.packed->group);
    for (int64_t g = 0; g < f->groups; g += LANES) {
        const __m512 whole = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(n.whole + g))));
        const float first = sign * n.super[g >> shift], second = sign * n.super[(g + LANES / 2) >> shift];
        const __m512 number = _mm512_mul_ps(whole, joined(_mm256_set1_ps(first), _mm256_set1_ps(second)));
        UNROLL for (int r = 0; r < rows; r++) sum[r] = _mm512_fmadd_ps(number, _mm512_load_ps(by + r * apart + g), sum[r]);
    }
}

/* The scales of output `out`, some of which in its own room, to `sum` what is known without codes. */
INLINE Grouped take_grouped(const Few *f, int64_t out, Room room, float *own, __m512 *sum, const int rows) {
    const Packed *w = f->all->p.packed;
    const Grouped scales = grouped(f, out, w->scale, w->super_scale, own);
    UNROLL for (int r = 0; r < rows; r++) sum[r] = _mm512_setzero_ps();
    if (f->all->offset) add_groups(f, scales, f->start, f->spans, 1, sum, rows);
    if (f->all->lows) add_groups(f, grouped(f, out, w->low, w->super_low, room.lows), f->sum, up(f->groups, LANES), -1, sum, rows);
    return scales;
}

/* Sums of codes times x, in lanes of 32 bits; of 16 bits they are multiplied, as they are widened. */
INLINE __m512i whole_sums(const __m512i w[2], const int8_t *x, const int nibbles, const int tabled, __m512i by) {
    const __m512i first = _mm512_load_si512(x), second = nibbles ? _mm512_load_si512(x + 64) : first;
#if BY_TWOS
    if (nibbles && tabled != 2)
        return I2(two_by(w[0].a, first.a, w[1].a, second.a, by.a), two_by(w[0].b, first.b, w[1].b, second.b, by.b));
    const __m512i sum = EACH3(signed_by, w[0], first, by);
    return nibbles ? _mm512_add_epi32(sum, EACH3(signed_by, w[1], second, by)) : sum;
#else
    const __m512i none = _mm512_setzero_si512();
    return nibbles ? dot_nibbles_512(none, w[0], first, w[1], second) : dot_bytes_512(none, w[0], first);
#endif
}

/* Of whole scales from `at` on each lane's, twice where sums are of 16 bits. */
INLINE __m512i spread_whole(const int8_t *at, __m512i bytes) {
    int64_t eight;
    memcpy(&eight, at, sizeof eight);
    const __m512i spread = _mm512_shuffle_epi8(_mm512_set1_epi64(eight), bytes);
    return BY_TWOS ? _mm512_srai_epi16(spread, 8) : _mm512_srai_epi32(spread, 24);
}

/* A vector of x, and the bytes that rows of codes have from it on. */
typedef struct {
    const int8_t *x;
    int64_t left;
} Vector;

INLINE Vector vector_of(const Few *f, int64_t i, const int nibbles) {
    const int64_t ins = f->all->p.ins;
    return (Vector){f->all->x + i * (nibbles ? 128 : 64), (nibbles ? ins / 2 : ins) - i * 64};
}

/* sum (rows) += a vector of an output's codes times x. */
INLINE void add_vector(const Few *f, Vector v, const uint8_t *at, const float *by, const int8_t *scales, __m512 *sum,
                       const int nibbles, const int tabled, const int kind, const int rows) {
    const __m512i bytes = v.left >= 64 ? _mm512_loadu_si512(at) : _mm512_maskz_loadu_epi8((1ull << v.left) - 1, at);
    const __m512i table = whole_table(f->all->p.packed);
    _mm_prefetch((const char *)at + AHEAD, _MM_HINT_T1);
    __m512i w[2];
    if (nibbles) {
        w[0] = whole_levels(bytes, tabled, table);
        w[1] = whole_levels(_mm512_srli_epi16(bytes, 4), tabled, table);
    } else {
        w[0] = whole_bytes(bytes);
    }
    const __m512i times = kind == ARE_WHOLE ? spread_whole(scales, f->bytes) : _mm512_set1_epi32(0x10001);
    const __m512 scale = _mm512_cvtepi32_ps(times);
#if !IS_WIDE
    __asm__ volatile("" : "+r"(v.x)); /* else compilers keep x for the next output: there are no registers for it */
#endif
    const int64_t spans = f->spans, padded = f->all->padded;
    UNROLL for (int r = 0; r < rows; r++) {
        const __m512i whole = whole_sums(w, v.x + r * padded, nibbles, tabled, times);
        const float *own = by + r * spans;
        __m512 lanes = kind == ARE_WHOLE   ? _mm512_load_ps(own)
                       : kind == OF_HALVES ? spread_eight(_mm256_load_ps(own), f->which)
                                           : spread_four(own, f->which);
        if (kind == ARE_WHOLE && !BY_TWOS) lanes = _mm512_mul_ps(scale, lanes);
        sum[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), lanes, sum[r]);
    }
}

/* sum (rows) += the vectors from `first` on that share a block's scale times x. */
INLINE void add_block(const Few *f, int64_t first, const uint8_t *codes, Grouped scales, __m512 *sum, const int nibbles,
                      const int tabled, const int rows) {
    const int each = nibbles ? 2 : 4;
    __m512 part[FEW_ROWS];
    UNROLL for (int r = 0; r < rows; r++) part[r] = _mm512_setzero_ps();
    UNROLL for (int v = 0; v < each; v++)
        if (first + v < f->blocks)
            add_vector(f, vector_of(f, first + v, nibbles), codes + (first + v) * 64, f->scale + (first + v) * LANES,
                       scales.whole + (first + v) * f->each, part, nibbles, tabled, ARE_WHOLE, rows);
    const __m512 super = _mm512_set1_ps(scales.super[first / each]);
    UNROLL for (int r = 0; r < rows; r++) sum[r] = _mm512_fmadd_ps(part[r], super, sum[r]);
}

/* Outputs [first, last), as many at a time as there are registers for: room.sums (rows, PIECE). */
INLINE void sum_outputs(const Few *f, int64_t first, int64_t last, Room room, const int nibbles, const int tabled,
                        const int kind, const int rows) {
    const int scaled = kind == ARE_WHOLE, most_outs = scaled ? TOGETHER / 2 : TOGETHER, fitting = MOST_SUMS / rows;
    const int count = fitting < most_outs ? fitting : most_outs, each = !scaled ? 1 : nibbles ? 2 : 4;
    const Packed *packed = f->all->p.packed;
    const int64_t row_bytes = nibbles ? packed->ins / 2 : packed->ins;
    const int64_t apart = (last - first + count - 1) / count;
    for (int64_t i = 0; i < apart; i++) {
        __m512 sum[TOGETHER][FEW_ROWS];
        const uint8_t *codes[TOGETHER];
        Grouped scales[TOGETHER];
        UNROLL for (int o = 0; o < count; o++) {
            const int64_t out = least(first + o * apart + i, last - 1);
            float *own = room.by + o * rows * f->spans;
            if (scaled) scales[o] = take_grouped(f, out, room, own, sum[o], rows);
            else take_scales(f, out, room, own, sum[o], rows);
            ask_scales(packed, out + SCALES_AHEAD, 1);
            codes[o] = packed->codes + out * row_bytes;
        }
        for (int64_t b = 0; b < f->blocks; b += each) {
            const Vector v = vector_of(f, b, nibbles);
            const float *by = room.by + b * f->each;
            UNROLL for (int o = 0; o < count; o++)
                if (scaled) add_block(f, b, codes[o], scales[o], sum[o], nibbles, tabled, rows);
                else add_vector(f, v, codes[o] + b * 64, by + o * rows * f->spans, NULL, sum[o], nibbles, tabled, kind, rows);
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
    const int tabled = !has_nibbles(p->packed) || p->packed->levels == UINT4 ? 0 : has_signed_levels(p->packed) ? 2 : 1;
#define SUMS_OF(NIBBLES, TABLED, KIND) KNOWN(N, p->rows, sum_outputs(f, first, last, room, NIBBLES, TABLED, KIND, N))
#define SUMS(NIBBLES, TABLED) \
    if (f->kind == ARE_WHOLE) SUMS_OF(NIBBLES, TABLED, ARE_WHOLE) \
    else if (NIBBLES && TABLED < 2 && f->kind == OF_HALVES) SUMS_OF(NIBBLES, TABLED, OF_HALVES) \
    else SUMS_OF(NIBBLES, TABLED, OF_SPANS)
    if (!has_nibbles(p->packed)) { SUMS(0, 0) }
    else if (tabled == 0) { SUMS(1, 0) }
    else if (tabled == 2) { SUMS(1, 2) }
    else { SUMS(1, 1) }
    finish(p, room.sums, PIECE, 0, p->rows, first, last - first);
}

int few(const Whole *all, int threads) {
    const Product *p = &all->p;
    const int64_t group = p->packed->group;
    Few f = {.all = all, .blocks = all->padded / all->block, .groups = groups_of(p->packed)};
    f.kind = has_whole_scales(p->packed) ? ARE_WHOLE : has_halves(p->packed) ? OF_HALVES : OF_SPANS;
    f.each = (int)(all->block / (f.kind == OF_SPANS ? all->span : group));
    f.spans = up(f.kind == OF_HALVES ? all->parts : all->spans, LANES);
    if (f.kind == ARE_WHOLE) {
        f.spans = (f.blocks + 3) * LANES, f.bytes = bytes_of((int)(4 * group / all->unit));
    } else {
        const int64_t span = f.kind == OF_HALVES ? group : all->span;
        f.shift = group ? __builtin_ctzll((uint64_t)(group / span)) : 62;
        f.which = each_of((int)(span * 4 / all->unit)), f.within = each_of(f.shift < 4 ? 1 << f.shift : LANES);
    }
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
