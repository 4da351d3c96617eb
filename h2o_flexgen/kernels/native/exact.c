/* y = x w^T in float32 for packed weights, whose numbers are those of `expand_row_wide`: the exact mode's products.

   A thread expands some rows of weights at a time and takes all rows of x with them: DEPTH inputs of PART rows of weights,
   which stay in the first cache meanwhile, a tile of both in registers. Each sum has its own lanes, which are added up after
   DEPTH inputs, and so takes all of them in one order: no result depends on the tile it is made in. */

#include <stdlib.h>

#include "simd.h"
#include "team.h"
#include "weights.h"

#ifdef __AVX512BF16__
typedef __m512 Vector;
#define load(at) _mm512_loadu_ps(at)
#define load_first(at, count) _mm512_maskz_loadu_ps(first_lanes(count), at)
#define add_product(x, y, z) _mm512_fmadd_ps(x, y, z)
#define half_of(x) halved(x)
enum {
    TILE_OUTS = 6,
    DEPTH = 2048, /* inputs, a multiple of WIDTH */
    PART = 24,    /* outputs, a multiple of TILE_OUTS: 24 KiB of weights, or as many as are expanded at a time */
#else
typedef __m256 Vector;
#define load(at) _mm256_loadu_ps(at)
#define load_first(at, count) as_f(load_half(at, (size_t)(count) * sizeof(float)))
#define add_product(x, y, z) _mm256_fmadd_ps(x, y, z)
#define half_of(x) (x)
enum {
    TILE_OUTS = 3,
    DEPTH = 512,
    PART = 12,
#endif
    TILE_ROWS = 4,
    WIDTH = sizeof(Vector) / sizeof(float),
    OUTS = 24,  /* expanded at a time, a multiple of PART: */
    MANY = 16,  /* of more rows than this twice as many, so that x is read less often, */
    ROWS = 128, /* and so many rows of x are taken with them */
    APART = 16, /* numbers between rows, which would else have the same places of the first cache */
};

typedef struct {
    const float *x, *bias; /* (rows, ins), (outs) or NULL */
    float *y;              /* (rows, outs) */
    long rows, outs, ins, x_stride, y_stride;
    int relu, onto;
    const Packed *packed;
    long some;    /* outputs that a thread takes at a time */
    int64_t next; /* output that no thread has taken */
    int failed;
} Exact;

/* sums (rows, 2 OUTS apart) += `depth` inputs of rows of x and of TILE_OUTS rows of expanded weights, `pitch` apart. */
INLINE void tile(const Exact *e, const float *x, const float *w, int64_t pitch, int64_t depth, float *sums, const int rows) {
    enum { COUNT = TILE_ROWS * TILE_OUTS };
    Vector sum[COUNT];
    float folded[COUNT];
    UNROLL for (int s = 0; s < COUNT; s++) sum[s] = (Vector){0};
    const int64_t whole = depth & -WIDTH;
    for (int64_t i = 0; i < whole; i += WIDTH) {
        Vector some[TILE_OUTS];
        UNROLL for (int o = 0; o < TILE_OUTS; o++) some[o] = load(w + o * pitch + i);
        UNROLL for (int r = 0; r < rows; r++) {
            const Vector one = load(x + r * e->x_stride + i);
            UNROLL for (int o = 0; o < TILE_OUTS; o++) sum[r * TILE_OUTS + o] = add_product(one, some[o], sum[r * TILE_OUTS + o]);
        }
    }
    if (whole < depth)
        UNROLL for (int s = 0; s < rows * TILE_OUTS; s++)
            sum[s] = add_product(load_first(x + s / TILE_OUTS * e->x_stride + whole, depth - whole),
                                 load_first(w + s % TILE_OUTS * pitch + whole, depth - whole), sum[s]);
    UNROLL for (int s = 0; s < COUNT; s += 4) {
        __m256 halves[4];
        UNROLL for (int i = 0; i < 4; i++) halves[i] = half_of(sum[s + i]);
        _mm_storeu_ps(folded + s, sums_of_four(halves));
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int o = 0; o < TILE_OUTS; o++) sums[r * 2 * OUTS + o] += folded[r * TILE_OUTS + o];
}

typedef void Tile(const Exact *, const float *, const float *, int64_t, int64_t, float *);
#define TILES(ROWS) \
    static void tile_of_##ROWS(const Exact *e, const float *x, const float *w, int64_t pitch, int64_t depth, float *sums) { \
        tile(e, x, w, pitch, depth, sums, ROWS); \
    }
TILES(1) TILES(2) TILES(3) TILES(4)
static Tile *const tiles[TILE_ROWS] = {tile_of_1, tile_of_2, tile_of_3, tile_of_4};

/* Writes y of `rows` from `row` and `outs` from `out` on. */
static void put(const Exact *e, long row, long rows, long out, long outs, const float *sums) {
    for (long r = 0; r < rows; r++)
        for (long o = 0; o < outs; o += LANES) {
            const __mmask16 mask = first_lanes(outs - o);
            float *y = e->y + (row + r) * e->y_stride + out + o;
            __m512 v = _mm512_loadu_ps(sums + r * 2 * OUTS + o);
            if (e->bias) v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, e->bias + out + o));
            if (e->relu) v = _mm512_max_ps(_mm512_setzero_ps(), v);
            if (e->onto) v = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, y), v);
            _mm512_mask_storeu_ps(y, mask, v);
        }
}

/* Outputs from `out` on; `room` has e->some rows, `pitch` apart, sums (ROWS, 2 OUTS). */
static void take_outs(const Exact *e, long out, float *room, int64_t pitch, float *scales, float *sums) {
    const long outs = least(e->some, e->outs - out);
    for (long o = 0; o < up(outs, TILE_OUTS); o++)
        if (o < outs)
            expand_row_wide(e->packed, out + o, room + o * pitch, scales, scales + units_room(e->ins));
        else
            memset(room + o * pitch, 0, (size_t)e->ins * sizeof(float));
    for (long from = 0; from < e->rows; from += ROWS) {
        const long rows = least(ROWS, e->rows - from);
        memset(sums, 0, (size_t)rows * 2 * OUTS * sizeof *sums);
        for (long in = 0; in < e->ins; in += DEPTH)
            for (long part = 0; part < outs; part += PART)
                for (long row = 0, height; row < rows; row += height) {
                    height = least(TILE_ROWS, rows - row);
                    for (long o = part; o < least(part + PART, outs); o += TILE_OUTS)
                        tiles[height - 1](e, e->x + (from + row) * e->x_stride + in, room + o * pitch + in, pitch,
                                          least(DEPTH, e->ins - in), sums + row * 2 * OUTS + o);
                }
        put(e, from, rows, out, outs, sums);
    }
}

static void take_pieces(void *task, int member) {
    Exact *e = task;
    (void)member;
    long out = claim(&e->next, e->some);
    if (out >= e->outs) return;
    const int64_t pitch = up(e->ins, LANES) + APART, rows = least(ROWS, e->rows);
    const int64_t sums = rows * 2 * OUTS, numbers = e->some * pitch + 2 * units_room(e->ins) + sums;
    float *room = aligned_alloc(64, (size_t)up(numbers, 16) * sizeof(float));
    if (!room) __atomic_store_n(&e->failed, 1, __ATOMIC_RELAXED);
    for (; room && out < e->outs; out = claim(&e->next, e->some))
        take_outs(e, out, room + sums, pitch, room + sums + e->some * pitch, room);
    free(room);
}

/* Strides in numbers. `onto`: the product is added to what y holds. Returns 0, or 1 where memory is short. */
int exact(const float *x, const float *bias, float *y, long rows, long outs, long ins, long x_stride, long y_stride, int relu,
          int onto, int threads, const Packed *packed) {
    Exact e = {x, bias, y, rows, outs, ins, x_stride, y_stride, relu, onto, packed, rows > MANY ? 2 * OUTS : OUTS, 0, 0};
    team_run(take_pieces, &e, threads);
    return e.failed;
}
