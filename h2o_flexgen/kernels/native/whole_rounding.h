/* x of whole.c's products rounded to 8 bits, span by span, with the sums that offsets and lows of weights are multiplied by. */
#ifndef WHOLE_ROUNDING_H
#define WHOLE_ROUNDING_H

static int64_t tiles_in(int64_t rows) { return (rows + HEIGHT - 1) / HEIGHT; }

/* How rows are cut into tiles, as evenly as can be: `taller` of them, the first ones, have a row more than `height`. */
typedef struct {
    int64_t height, taller;
} Cut;

static Cut cut(int64_t rows) { return (Cut){rows / tiles_in(rows), rows % tiles_in(rows)}; }

/* A row among those that are woven: `rows` from the `first` on, each with a number in turn. */
typedef struct {
    int64_t first, rows, turn;
} Woven;

/* Where number n of a row is, of `count` that each row has. */
INLINE int64_t woven(Woven row, int64_t count, int64_t n) { return row.first * count + n * row.rows + row.turn; }

/* 16 numbers of a row, rounded to steps, which begin with its `four`th four. Returns them. */
INLINE __m512i put_numbers(const Whole *all, __m512 numbers, __m512 steps, Woven row, int64_t four) {
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(numbers, steps));
    const __m128i bytes = _mm512_cvtsepi32_epi8(whole);
    int8_t *at = all->x + 4 * woven(row, all->padded / 4, four);
    if (row.rows == 1) {
        _mm_storeu_si128((__m128i *)at, bytes);
    } else {
        int32_t fours[4];
        _mm_storeu_si128((__m128i *)fours, bytes);
        UNROLL for (int i = 0; i < 4; i++) memcpy(at + 4 * i * row.rows, fours + i, sizeof *fours);
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

/* Where sums of codes start that are 32 too large, of 16 numbers of x: in 16 bits for the first two of each four, and for
   the others. */
#if BY_TWOS
INLINE int32_t six_bits_start(__m512i numbers) {
    const __m256i eight = _mm256_add_epi32(numbers.a, numbers.b);
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i start = _mm_mullo_epi32(_mm_hadd_epi32(four, four), _mm_set1_epi32(-32));
    return _mm_cvtsi128_si32(_mm_packs_epi32(start, start));
}
#else
INLINE int32_t six_bits_start(__m512i numbers) { return 0; }
#endif

/* The sums and starts of a unit's halves: of numbers that each are an even and an odd input's together. */
INLINE void put_halves(const Whole *all, __m512i numbers, float scale, Woven row, int64_t unit) {
    uint32_t each[LANES]; /* numbers that are not finite may overflow */
    _mm512_storeu_si512(each, numbers);
    for (int64_t half = 0; half < 2; half++) {
        const uint32_t *n = each + 8 * half, first = n[0] + n[1] + n[4] + n[5], second = n[2] + n[3] + n[6] + n[7];
        const uint32_t starts[2] = {first * (uint32_t)-all->offset, second * (uint32_t)-all->offset}; /* of lanes of 16 bits */
        const int64_t part = woven(row, all->parts, 2 * unit + half);
        all->sum[part] = scale * (float)(int32_t)(first + second);
        all->start[part] = (int32_t)(BY_TWOS ? (starts[0] & 0xFFFF) | starts[1] << 16 : starts[0] + starts[1]);
    }
}

/* A span of a row: its numbers, their scale, and the start of sums with it. Numbers that are not finite make the scale so. */
INLINE void round_span(const Whole *all, Woven row, int64_t span, const int nibbles) {
    const int64_t first = span * all->span, at = woven(row, all->spans, span), left = all->p.ins - first;
    const bf16 *from = all->p.x + (row.first + row.turn) * all->p.x_stride + first;
    bf16 padded[MOST_SPAN];
    if (left < all->span) {
        memset(padded, 0, sizeof padded);
        from = memcpy(padded, from, (size_t)most(0, left) * sizeof *from);
    }
    const float largest = largest_of(from, all->span), scale = largest / 127 + (largest - largest);
    const __m512 steps = _mm512_set1_ps(largest > 0 ? 127 / largest : 0);
    const int halves = nibbles && has_halves(all->p.packed), few = all->p.rows <= FEW_ROWS;
    __m512i total = _mm512_setzero_si512();
    for (int64_t i = 0; i < all->span; i += nibbles ? 32 : 16) {
        const int64_t unit = (first + i) >> (nibbles ? 5 : 4);
        __m512i numbers;
        if (nibbles) {
            const int64_t even = few ? (unit & -UNITS) * 8 + (unit & (UNITS - 1)) * 4 : unit * 8;
            const __m512i pairs = _mm512_loadu_si512(from + i);
            numbers = put_numbers(all, even_halves(pairs), steps, row, even);
            numbers = _mm512_add_epi32(numbers, put_numbers(all, odd_halves(pairs), steps, row, even + (few ? 16 : 4)));
        } else {
            numbers = put_numbers(all, widened(_mm256_loadu_si256((const __m256i *)(from + i))), steps, row, (first + i) / 4);
            if (BY_TWOS) all->start[woven(row, all->starts, unit)] = six_bits_start(numbers);
        }
        total = _mm512_add_epi32(total, numbers);
        if (halves) put_halves(all, numbers, scale, row, unit);
        else if (all->grouped) all->sum[woven(row, all->parts, unit)] = scale * (float)_mm512_reduce_add_epi32(numbers);
    }
    const int whole = _mm512_reduce_add_epi32(total);
    all->scale[at] = scale;
    if (!all->grouped) all->sum[at] = scale * (float)whole;
    if (!halves && (nibbles || !BY_TWOS)) all->start[at] = -all->offset * whole;
}

static void round_row(const Whole *all, Woven row) {
    for (int64_t span = 0; span < all->spans; span++)
        if (all->unit == 32) round_span(all, row, span, 1);
        else round_span(all, row, span, 0);
}

/* Tiles, woven, or of few rows each by itself. Rows of a tile share lines of memory: two threads would take these from each
   other. */
static void round_tiles(void *task, int64_t tile, int64_t end, void *room) {
    const Whole here = *(const Whole *)task; /* bytes that are stored might be any other's fields */
    const int64_t all_rows = here.p.rows, each = all_rows <= FEW_ROWS ? all_rows : tiles_in(here.share);
    for (; tile < end; tile++) {
        const int64_t from = tile / each * here.share, turn = tile % each;
        const Cut c = all_rows <= FEW_ROWS ? (Cut){1, 0} : cut(least(here.share, all_rows - from));
        const int64_t first = from + turn * c.height + least(turn, c.taller), rows = c.height + (turn < c.taller);
        for (int64_t i = 0; i < rows; i++) round_row(&here, (Woven){first, rows, i});
    }
}

#endif
