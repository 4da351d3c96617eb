/* y = x w^T for a few rows of x and weights of 4 or 8 bits, bound by how fast the codes come from memory.

   A vector of 64 bytes holds 128 codes of 4 bits; those of one place within 16 bits are 32 levels, by one shift and one
   permutation of a table. They belong to every fourth input, so x is put in that order once. A code of 8 bits is the
   sum of two such levels, of its halves. Sums of a vector's inputs are multiplied by the scales of its four units and
   added up; lows are multiplied by the sums of x over units. Levels are exact in bfloat16: unlike in `linear` and
   `gemm`, scaled weights are not rounded.

   A row may end with half a vector: x and scales have zeros for the other half, whose codes are those of the next row,
   or, of the last one, the scales that lie behind all codes. */

#include "few.h"

#ifdef __AVX512BF16__
#include "team.h"

enum {
    PLACES = 4,     /* of 4 bits within 16 */
    UNITS = 4,      /* of a vector of codes: inputs that share a scale */
    OUTS = 4,       /* outputs of a tile, */
    LONG = 4096,    /* inputs, from which on there are several: of short rows that would be too many streams */
    PIECE = 48,     /* outputs that are finished together, */
    TURNS = 4,      /* and pieces that a thread takes, at least */
    AHEAD = 8192,   /* bytes of codes that are asked for before they are used, */
    ROWS_AHEAD = 8, /* and outputs whose scales are */
};

/* What threads share. */
typedef struct {
    Product p;
    const bf16 *x;     /* (rows, ins): of each vector the inputs of the first code in 16 bits, of the second, ... */
    const float *sums; /* (rows, units) of x */
    __m512i table[2];  /* levels, twice, of even and odd places; where lows are -8 times the scale they have them */
    int64_t units;     /* of a row of weights; `sums` and scales have 0 for those that the last vector lacks */
    int lows;          /* whether there are others */
    int64_t next;      /* output that no thread has taken */
    int64_t piece;
    int failed;
} Few;

/* Scales and lows of a tile's outputs. */
typedef struct {
    float *scale[OUTS], *low[OUTS];
    int lows;
} Scales;

/* The sums of `rows` x `outs` from output `out` on: to (rows, PIECE). `halves`: a code has 8 bits. */
INLINE void tile(const Few *f, const Scales *s, int64_t out, const int halves, const int rows, const int outs,
                 float *to) {
    const int64_t block = halves ? 64 : 128, ins = up(f->p.ins, block), blocks = ins / block, units = blocks * UNITS;
    const int64_t row_bytes = halves ? f->p.ins : f->p.ins / 2;
    const __m512i spread = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const uint8_t *codes = f->p.packed->codes + out * row_bytes;
    __m512 acc[FEW_ROWS][OUTS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int o = 0; o < outs; o++) acc[r][o] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; b++) {
        UNROLL for (int o = 0; o < outs; o++) {
            const uint8_t *at = codes + o * row_bytes + b * 64;
            const __m512i packed = _mm512_loadu_si512(at);
            _mm_prefetch((const char *)at + AHEAD, _MM_HINT_T0);
            __m512bh level[PLACES];
            level[0] = (__m512bh)_mm512_permutexvar_epi16(packed, f->table[0]);
            level[1] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(packed, 4), f->table[1]);
            level[2] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(packed, 8), f->table[0]);
            level[3] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(packed, 12), f->table[1]);
            const __m512 four = _mm512_broadcast_f32x4(_mm_loadu_ps(s->scale[o] + b * UNITS));
            const __m512 scale = _mm512_permutexvar_ps(spread, four);
            UNROLL for (int r = 0; r < rows; r++) {
                const bf16 *x = f->x + r * ins + b * block;
                __m512 sum = _mm512_setzero_ps();
                UNROLL for (int place = 0; place < PLACES; place++) {
                    const int vector = halves ? place / 2 : place;
                    sum = _mm512_dpbf16_ps(sum, level[place], (__m512bh)_mm512_loadu_si512(x + vector * 2 * LANES));
                }
                acc[r][o] = _mm512_fmadd_ps(sum, scale, acc[r][o]);
            }
        }
    }
    UNROLL for (int o = 0; o < outs; o++) {
        for (int64_t u = 0; s->lows && u < units; u += LANES) {
            const __mmask16 mask = first_lanes(units - u);
            const __m512 low = _mm512_maskz_loadu_ps(mask, s->low[o] + u);
            UNROLL for (int r = 0; r < rows; r++) {
                const __m512 sums = _mm512_maskz_loadu_ps(mask, f->sums + r * units + u);
                acc[r][o] = _mm512_fmadd_ps(low, sums, acc[r][o]);
            }
        }
        UNROLL for (int r = 0; r < rows; r++) to[r * PIECE + o] = _mm512_reduce_add_ps(acc[r][o]);
    }
}

#define TILES(HALVES, R) \
    static void tile_##HALVES##_##R(const Few *f, const Scales *s, int64_t out, int outs, float *to) { \
        if (outs == OUTS) \
            tile(f, s, out, HALVES, R, OUTS, to); \
        else \
            for (int o = 0; o < outs; o++) { \
                const Scales one = {{s->scale[o]}, {s->low[o]}, s->lows}; \
                tile(f, &one, out + o, HALVES, R, 1, to + o); \
            } \
    }
TILES(0, 1) TILES(0, 2) TILES(0, 3) TILES(0, 4) TILES(0, 5) TILES(0, 6)
TILES(1, 1) TILES(1, 2) TILES(1, 3) TILES(1, 4) TILES(1, 5) TILES(1, 6)
static void (*const tiles[2][FEW_ROWS])(const Few *, const Scales *, int64_t, int, float *) = {
    {tile_0_1, tile_0_2, tile_0_3, tile_0_4, tile_0_5, tile_0_6},
    {tile_1_1, tile_1_2, tile_1_3, tile_1_4, tile_1_5, tile_1_6}};

static void take_piece(const Few *f, int64_t first, int64_t last, Scales *s) {
    float sums[FEW_ROWS * PIECE];
    for (int64_t block = first; block < last; block += PIECE) {
        const int64_t end = least(block + PIECE, last);
        for (int64_t out = block, outs; out < end; out += outs) {
            outs = f->p.ins < LONG ? 1 : least(OUTS, end - out);
            for (int o = 0; o < outs; o++) {
                ask_scales(f->p.packed, out + o + ROWS_AHEAD);
                s->lows = unit_scales(f->p.packed, out + o, s->scale[o], f->lows ? s->low[o] : NULL);
                for (int64_t u = f->units; u < up(f->units, UNITS); u++) s->scale[o][u] = s->low[o][u] = 0;
            }
            tiles[!has_nibbles(f->p.packed)][f->p.rows - 1](f, s, out, (int)outs, sums + (out - block));
        }
        finish(&f->p, sums, PIECE, 0, f->p.rows, block, end - block);
    }
}

static void take_pieces(void *task, int member) {
    Few *f = task;
    (void)member;
    int64_t first = claim(&f->next, f->piece);
    if (first >= f->p.outs) return;
    const int64_t room = units_room(f->p.ins);
    float *held = malloc((size_t)(2 * OUTS * room) * sizeof *held);
    if (!held) __atomic_store_n(&f->failed, 1, __ATOMIC_RELAXED);
    Scales s = {.lows = 0};
    for (int o = 0; o < OUTS; o++) s.scale[o] = held + 2 * o * room, s.low[o] = s.scale[o] + room;
    for (; held && first < f->p.outs; first = claim(&f->next, f->piece))
        take_piece(f, first, least(first + f->piece, f->p.outs), &s);
    free(held);
}

static int64_t block_of(const Packed *w) { return has_nibbles(w) ? 128 : 64; }

/* x as `tile` wants it, and its sums over units. */
static void arrange(const Product *p, bf16 *x, float *sums) {
    const int64_t block = block_of(p->packed), vectors = block / (2 * LANES), unit = block / UNITS;
    const int64_t ins = up(p->ins, block);
    for (int64_t r = 0; r < p->rows; r++, x += ins) {
        const bf16 *from = p->x + r * p->x_stride;
        for (int64_t i = 0; i < ins; i += block)
            for (int64_t v = 0; v < vectors; v++)
                for (int64_t j = 0; j < 2 * LANES; j++) {
                    const int64_t input = i + vectors * j + v;
                    x[i + v * 2 * LANES + j] = input < p->ins ? from[input] : 0;
                }
        for (int64_t i = 0; i < p->ins; i += unit) {
            __m512 sum = widened(_mm256_loadu_si256((const __m256i *)(from + i)));
            if (unit > LANES) sum = _mm512_add_ps(sum, widened(_mm256_loadu_si256((const __m256i *)(from + i + LANES))));
            *sums++ = _mm512_reduce_add_ps(sum);
        }
        for (int64_t i = p->ins; i < ins; i += unit) *sums++ = 0;
    }
}

int takes_few(const Product *p) {
    return p->packed && p->packed->levels != E4M3 && p->rows <= FEW_ROWS && p->ins % (block_of(p->packed) / 2) == 0;
}

static __m512i twice(__m512 levels) { return _mm512_broadcast_i64x4(rounded(levels)); }

/* What codes of 4 bits stand for, or the lower and the upper half of one of 8. */
static void set_tables(const Packed *w, __m512i *table) {
    const __m512 upper = _mm512_setr_ps(0, 16, 32, 48, 64, 80, 96, 112, -128, -112, -96, -80, -64, -48, -32, -16);
    const __m512 levels = _mm512_loadu_ps(w->levels == E2M1 ? E2M1_LEVELS : WHOLE_LEVELS);
    const float down = w->low_kind == MIDDLE ? 8 : 0;
    table[0] = twice(_mm512_sub_ps(levels, _mm512_set1_ps(down)));
    table[1] = w->levels == INT8 ? twice(upper) : table[0];
}

int few(const Product *p, int threads) {
    const int64_t block = block_of(p->packed), ins = up(p->ins, block);
    bf16 *x = aligned_alloc(64, (size_t)(p->rows * ins) * sizeof *x);
    float *sums = malloc((size_t)(p->rows * ins / block * UNITS) * sizeof *sums);
    Few all = {.p = *p, .x = x, .sums = sums, .units = p->ins * UNITS / block, .failed = !x || !sums};
    if (!all.failed) {
        arrange(p, x, sums);
        set_tables(p->packed, all.table);
        all.lows = p->packed->low_kind != MIDDLE;
        const int64_t share = p->outs / (TURNS * threads) / PIECE;
        all.piece = most(1, least(share, 8)) * PIECE;
        team_run(take_pieces, &all, threads);
    }
    free(x);
    free(sums);
    return all.failed;
}
#else
int takes_few(const Product *p) { return 0 * p->rows; }
int few(const Product *p, int threads) { return (int)p->rows + threads; }
#endif
