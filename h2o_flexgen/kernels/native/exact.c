/* y = x w^T in float32 for packed weights, whose numbers are those of `expand_row`: the exact mode's products.

   A thread expands some rows of weights at a time and takes all rows of x with them: DEPTH inputs of PART rows of weights,
   which stay in the first cache meanwhile, a tile of both in registers. Each sum has its own lanes, which are added up after
   DEPTH inputs, and so takes all of them in one order: no result depends on the tile it is made in. */

#include "product.h"
#include "sixteen.h"
#include "team.h"

enum {
    TILE_OUTS = REGS == 32 ? 6 : 3,
    DEPTH = REGS == 32 ? 2048 : 512, /* inputs, a multiple of REG */
    PART = REGS == 32 ? 24 : 12,     /* outputs, a multiple of TILE_OUTS: 24 KiB, or as many as are expanded at a time */
    TILE_ROWS = 4,
    OUTS = 24,  /* expanded at a time, a multiple of PART: */
    MANY = 16,  /* of more rows than this twice as many, so that x is read less often, */
    ROWS = 128, /* and so many rows of x are taken with them */
    APART = 16, /* numbers between rows, which would else have the same places of the first cache */
};

typedef struct {
    const Product *p;
    const float *x;
    long some; /* outputs that a thread takes at a time */
} Exact;

/* sums (rows, 2 OUTS apart) += `depth` inputs of rows of x and of TILE_OUTS rows of expanded weights, `pitch` apart. */
INLINE void tile(const Exact *e, const float *x, const float *w, int64_t pitch, int64_t depth, float *sums, const int rows) {
    enum { COUNT = TILE_ROWS * TILE_OUTS };
    reg sum[COUNT];
    float folded[COUNT];
    UNROLL for (int s = 0; s < COUNT; s++) sum[s] = reg_set1(0);
    const int64_t whole = depth & -REG;
    for (int64_t i = 0; i < whole; i += REG) {
#if REGS == 16
        if (rows == TILE_ROWS) {
            add_wide(sum, x + i, e->p->x_stride, w + i, pitch);
            continue;
        }
#endif
        reg some[TILE_OUTS];
        UNROLL for (int o = 0; o < TILE_OUTS; o++) some[o] = reg_load(w + o * pitch + i);
        UNROLL for (int r = 0; r < rows; r++) {
            const reg one = reg_load(x + r * e->p->x_stride + i);
            UNROLL for (int o = 0; o < TILE_OUTS; o++) sum[r * TILE_OUTS + o] = reg_fma(one, some[o], sum[r * TILE_OUTS + o]);
        }
    }
    if (whole < depth)
        UNROLL for (int s = 0; s < rows * TILE_OUTS; s++)
            sum[s] = reg_fma(reg_first(x + s / TILE_OUTS * e->p->x_stride + whole, depth - whole),
                             reg_first(w + s % TILE_OUTS * pitch + whole, depth - whole), sum[s]);
    fold(sum, folded, COUNT);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int o = 0; o < TILE_OUTS; o++) sums[r * 2 * OUTS + o] += folded[r * TILE_OUTS + o];
}

/* Numbers from one expanded row to the next, and of sums (rows, 2 OUTS). */
static int64_t pitch_of(const Exact *e) { return up(e->p->ins, LANES) + APART; }
static int64_t sums_of(const Exact *e) { return least(ROWS, e->p->rows) * 2 * OUTS; }

/* Outputs from `out` on. The thread's memory is for sums, `some` expanded rows, and the scales of one. */
static void some_outs(void *task, int64_t out, int64_t end, void *memory) {
    const Exact *e = task;
    const long outs = end - out;
    const int64_t pitch = pitch_of(e);
    float *sums = memory, *room = sums + sums_of(e), *scales = room + e->some * pitch;
    for (long o = 0; o < up(outs, TILE_OUTS); o++)
        if (o < outs) expand_row(e->p->packed, out + o, 1, room + o * pitch, scales);
        else memset(room + o * pitch, 0, (size_t)e->p->ins * sizeof(float));
    for (long from = 0; from < e->p->rows; from += ROWS) {
        const long rows = least(ROWS, e->p->rows - from);
        memset(sums, 0, (size_t)rows * 2 * OUTS * sizeof *sums);
        for (long in = 0; in < e->p->ins; in += DEPTH)
            for (long part = 0; part < outs; part += PART)
                for (long row = 0, height; row < rows; row += height) {
                    height = least(TILE_ROWS, rows - row);
                    for (long o = part; o < least(part + PART, outs); o += TILE_OUTS)
                        KNOWN(N, height, tile(e, e->x + (from + row) * e->p->x_stride + in, room + o * pitch + in, pitch,
                                              least(DEPTH, e->p->ins - in), sums + row * 2 * OUTS + o, N))
                }
        finish(e->p, sums, 2 * OUTS, from, rows, out, outs);
    }
}

int exact(const Product *p, int threads) {
    Exact e = {p, (const float *)(const void *)p->x, p->rows > MANY ? 2 * OUTS : OUTS};
    const int64_t floats = sums_of(&e) + e.some * pitch_of(&e) + 2 * units_room(p->ins);
    return team_share(some_outs, &e, p->outs, e.some, floats * (int64_t)sizeof(float), threads);
}
