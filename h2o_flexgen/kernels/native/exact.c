/* y = x w^T in float32 for packed weights, whose numbers are those of `expand_row_wide`: the exact mode's products.

   A thread expands OUTS rows of weights at a time and takes all rows of x with them, a tile of both in registers. Each
   sum has its own 16 lanes and takes the inputs in their order, so that no result depends on the tile it is made in. */

#include <stdlib.h>

#include "simd.h"
#include "team.h"
#include "weights.h"

enum {
    OUTS = 24, /* expanded at a time: a multiple of TILE_OUTS */
#ifdef __AVX512BF16__
    TILE_ROWS = 4,
    TILE_OUTS = 6,
#else
    TILE_ROWS = 2,
    TILE_OUTS = 3,
#endif
    APART = 16, /* numbers between rows, which would else have the same places of the first cache */
};

typedef struct {
    const float *x, *bias; /* (rows, ins), (outs) or NULL */
    float *y;              /* (rows, outs) */
    long rows, outs, ins, x_stride, y_stride;
    int relu, onto;
    const Packed *packed;
    int64_t next; /* output that no thread has taken */
    int failed;
} Exact;

/* sums (rows, TILE_OUTS) of rows of x and of expanded weights, `pitch` apart. */
INLINE void tile(const Exact *e, const float *x, const float *w, int64_t pitch, float *sums, const int rows) {
    __m512 sum[TILE_ROWS][TILE_OUTS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int o = 0; o < TILE_OUTS; o++) sum[r][o] = _mm512_setzero_ps();
    const int64_t whole = e->ins & -LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        __m512 a[TILE_ROWS];
        UNROLL for (int r = 0; r < rows; r++) a[r] = _mm512_loadu_ps(x + r * e->x_stride + i);
        UNROLL for (int o = 0; o < TILE_OUTS; o++) {
            const __m512 b = _mm512_loadu_ps(w + o * pitch + i);
            UNROLL for (int r = 0; r < rows; r++) sum[r][o] = _mm512_fmadd_ps(a[r], b, sum[r][o]);
        }
    }
    if (whole < e->ins) {
        const __mmask16 mask = first_lanes(e->ins - whole);
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int o = 0; o < TILE_OUTS; o++)
                sum[r][o] = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(mask, x + r * e->x_stride + whole),
                                            _mm512_maskz_loadu_ps(mask, w + o * pitch + whole), sum[r][o]);
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int o = 0; o < TILE_OUTS; o++) sums[r * TILE_OUTS + o] = _mm512_reduce_add_ps(sum[r][o]);
}

static void tile_of_1(const Exact *e, const float *x, const float *w, int64_t pitch, float *sums) { tile(e, x, w, pitch, sums, 1); }
static void tile_of_2(const Exact *e, const float *x, const float *w, int64_t pitch, float *sums) { tile(e, x, w, pitch, sums, 2); }
#ifdef __AVX512BF16__
static void tile_of_3(const Exact *e, const float *x, const float *w, int64_t pitch, float *sums) { tile(e, x, w, pitch, sums, 3); }
static void tile_of_4(const Exact *e, const float *x, const float *w, int64_t pitch, float *sums) { tile(e, x, w, pitch, sums, 4); }
static void (*const tiles[])(const Exact *, const float *, const float *, int64_t, float *) = {tile_of_1, tile_of_2, tile_of_3,
                                                                                              tile_of_4};
#else
static void (*const tiles[])(const Exact *, const float *, const float *, int64_t, float *) = {tile_of_1, tile_of_2};
#endif

static void put(const Exact *e, long row, long out, float sum) {
    float *y = e->y + row * e->y_stride + out;
    if (e->bias) sum += e->bias[out];
    if (e->relu && sum < 0) sum = 0;
    *y = e->onto ? *y + sum : sum;
}

/* Outputs from `out` on; `room` has OUTS rows, `pitch` apart. */
static void take_outs(const Exact *e, long out, float *room, int64_t pitch, float *scales) {
    const long outs = least(OUTS, e->outs - out);
    for (long o = 0; o < OUTS; o++)
        if (o < outs)
            expand_row_wide(e->packed, out + o, room + o * pitch, scales, scales + units_room(e->ins));
        else
            memset(room + o * pitch, 0, (size_t)e->ins * sizeof(float));
    for (long row = 0, height; row < e->rows; row += height) {
        height = least(TILE_ROWS, e->rows - row);
        for (long o = 0; o < outs; o += TILE_OUTS) {
            float sums[TILE_ROWS * TILE_OUTS];
            tiles[height - 1](e, e->x + row * e->x_stride, room + o * pitch, pitch, sums);
            for (long r = 0; r < height; r++)
                for (long i = 0; i < least(TILE_OUTS, outs - o); i++) put(e, row + r, out + o + i, sums[r * TILE_OUTS + i]);
        }
    }
}

static void take_pieces(void *task, int member) {
    Exact *e = task;
    (void)member;
    long out = claim(&e->next, OUTS);
    if (out >= e->outs) return;
    const int64_t pitch = up(e->ins, LANES) + APART, numbers = OUTS * pitch + 2 * units_room(e->ins);
    float *room = aligned_alloc(64, (size_t)up(numbers, 16) * sizeof(float));
    if (!room) __atomic_store_n(&e->failed, 1, __ATOMIC_RELAXED);
    for (; room && out < e->outs; out = claim(&e->next, OUTS)) take_outs(e, out, room, pitch, room + OUTS * pitch);
    free(room);
}

/* Strides in numbers. `onto`: the product is added to what y holds. Returns 0, or 1 where memory is short. */
int exact(const float *x, const float *bias, float *y, long rows, long outs, long ins, long x_stride, long y_stride, int relu,
          int onto, int threads, const Packed *packed) {
    Exact e = {x, bias, y, rows, outs, ins, x_stride, y_stride, relu, onto, packed, 0, 0};
    team_run(take_pieces, &e, threads);
    return e.failed;
}
