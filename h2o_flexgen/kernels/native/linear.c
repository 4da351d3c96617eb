/* y[r, o] = sum over i of x[r, i] * w[o, i], plus bias[o]: bfloat16 products of few rows, sums in float32.

   Such a product is bound by how fast its weights come from memory, up to about 12 rows, and by the dot product
   instruction beyond that. So:
   - Weights are read in the order they lie in, once: threads take pieces of outputs in turns, and stream each.
   - A tile of rows x outputs keeps its sums in registers, 16 partial sums each, folded into one at the end. Up to 4 rows
     make one tile; more are cut into several, which pass over 6 outputs one after another while these are in the cache.
   - The processor's own prefetching gives up at the end of every row of a tile. Each tile asks for a share of the next
     outputs, a few lines per step, so that the requests are spread evenly over all tiles of the current outputs.
   - Rows of w are often a multiple of 4 KiB long. All lines of them that a tile reads in one step then have the same
     place in the first cache, which holds 8 such: where rows of x have it too, each thread copies them elsewhere.
   - Where terms are float32 numbers (tiles.h) each thread copies x in any case: of every 32 inputs first the even ones,
     then the odd ones, as the halves of the pairs of weights are.

   To the processor's bfloat16 instruction, where it is used, denormal numbers count as zero. */

#include <stdlib.h>
#include <string.h>

#include "product.h"
#include "team.h"
#include "tiles.h"

enum {
    STEP = 32,        /* inputs of one dot product instruction */
    LINE = 64,        /* bytes of a cache line: as many as a step has */
    MAX_SUMS = 24,    /* of a tile: 32 registers, less those of its operands */
    TILE_ROWS = 4,    /* of a tile at most, and */
    SEVERAL_ROWS = REGS == 32 ? 4 : 2, /* where there are several; sums fill three quarters of registers, */
    TILE_OUTS = 6,    /* then, of so many outputs */
    BLOCK_ROWS = 128, /* sums are collected for so many rows and */
    BLOCK_OUTS = 48,  /* outputs, then finished: a multiple of 16 and of the outputs of any tile */
    PIECE = 1 << 19,  /* bytes of weights that a thread takes at a time, less where it would take */
    TURNS = 4,        /* fewer times than this */
    ALONE = 1 << 16,  /* products that one thread does sooner than two can agree on it */
    WAY = 1 << 12,    /* addresses that far apart have the same place in the first cache */
    ENOUGH = 512,     /* outputs of a thread, beside which copying x for it takes little time */
};

/* x as tiles read it: rows `stride` terms apart. */
typedef struct {
    const term *at;
    long stride;
} Terms;

/* Where a tile is: its first row of x and output of w, where its sums go, and what is to be fetched meanwhile. */
typedef struct {
    Terms x;
    const bf16 *w;
    long ins;
    float *sums; /* (rows, BLOCK_OUTS) */
    const char *ahead;
} Place;

/* One step of a tile: 32 inputs, less where masked. */
INLINE void step(reg *sums, const Place *at, long i, __mmask32 mask, const int rows, const int outs) {
#ifdef PAIRS
    __m512bh kept[TILE_ROWS];
    UNROLL for (int r = 0; r < rows; r++)
        kept[r] = (__m512bh)_mm512_maskz_loadu_epi16(mask, at->x.at + r * at->x.stride + i);
    UNROLL for (int o = 0; o < outs; o++) {
        __m512bh w = (__m512bh)_mm512_maskz_loadu_epi16(mask, at->w + o * at->ins + i);
        UNROLL for (int r = 0; r < rows; r++)
            sums[r * outs + o] = _mm512_dpbf16_ps(sums[r * outs + o], kept[r], w);
    }
#else
    UNROLL for (int part = 0; part < STEP / REG; part++) { /* even terms, then odd ones */
        const bf16 *from = at->w + i;
        const float *x = at->x.at + i + REG * part;
        /* Compilers that keep weights from the even terms for the odd ones have no registers for sums. */
        __asm__ volatile("" : "+r"(from));
#if REGS == 16
        if (rows == 2) { /* both rows stay in registers: compilers would load them for each output */
            reg some[2] = {reg_load(x), reg_load(x + at->x.stride)};
            __asm__ volatile("" : HELD(some[0]), HELD(some[1]));
            UNROLL for (int o = 0; o < outs; o++) {
                const reg w = reg_terms(_mm512_maskz_loadu_epi16(mask, from + o * at->ins), part);
                UNROLL for (int r = 0; r < 2; r++) sums[r * outs + o] = reg_fma(w, some[r], sums[r * outs + o]);
            }
            continue;
        }
#endif
        reg w[8];
        UNROLL for (int o = 0; o < outs; o++) w[o] = reg_terms(_mm512_maskz_loadu_epi16(mask, from + o * at->ins), part);
        UNROLL for (int r = 0; r < rows; r++) {
            const reg some = reg_load(x + r * at->x.stride);
            UNROLL for (int o = 0; o < outs; o++) sums[r * outs + o] = reg_fma(w[o], some, sums[r * outs + o]);
        }
    }
#endif
}

/* The sums of rows x outs, over all inputs; `lines` are asked for in each step, from at->ahead on. */
INLINE void tile(const Place *at, const int rows, const int outs, const int lines) {
    reg sums[MAX_SUMS];
    UNROLL for (int s = 0; s < (int)up(rows * outs, 4); s++) sums[s] = reg_set1(0);
    const long whole = at->ins & -STEP;
    const char *ahead = at->ahead;
    for (long i = 0; i < whole; i += STEP) {
        UNROLL for (int line = 0; line < lines; line++) _mm_prefetch(ahead + line * LINE, _MM_HINT_T1);
        ahead += lines * LINE;
        step(sums, at, i, (__mmask32)-1, rows, outs);
    }
    if (whole < at->ins) step(sums, at, whole, ((__mmask32)1 << (at->ins - whole)) - 1, rows, outs);

    float folded[MAX_SUMS];
    fold(sums, folded, rows * outs);
    UNROLL for (int r = 0; r < rows; r++)
        memcpy(at->sums + r * BLOCK_OUTS, folded + r * outs, (size_t)outs * sizeof(float));
}

typedef void Tile(const Place *);

#define MAKE(ROWS, OUTS, LINES) \
    static void tile_##ROWS##x##OUTS##_##LINES(const Place *at) { tile(at, ROWS, OUTS, LINES); }

MAKE(1, 1, 0) MAKE(2, 1, 0) MAKE(3, 1, 0) MAKE(4, 1, 0)
#define SEVERAL(ROWS, OUTS) MAKE(ROWS, OUTS, 0) MAKE(ROWS, OUTS, 1) MAKE(ROWS, OUTS, 2) MAKE(ROWS, OUTS, 3)
#define NAMES(ROWS, OUTS) \
    {tile_##ROWS##x##OUTS##_0, tile_##ROWS##x##OUTS##_1, tile_##ROWS##x##OUTS##_2, tile_##ROWS##x##OUTS##_3}

/* All by rows, from 1 on. The only tile, and how many outputs it has; one of several, that asks for 0 to 3 lines in
   each step; and a single output, for those left over. */
#if REGS == 16
MAKE(1, 8, 8) MAKE(2, 6, 6) MAKE(3, 4, 4) MAKE(4, 3, 3)
SEVERAL(1, 6) MAKE(2, 6, 0) MAKE(2, 6, 1) MAKE(2, 6, 2) MAKE(2, 6, 3)
static Tile *const only[TILE_ROWS] = {tile_1x8_8, tile_2x6_6, tile_3x4_4, tile_4x3_3};
static const int only_outs[TILE_ROWS] = {8, 6, 4, 3};
static Tile *const several[TILE_ROWS][4] = {NAMES(1, 6), NAMES(2, 6)};
#else
MAKE(1, 8, 8) MAKE(2, 8, 8) MAKE(3, 8, 8) MAKE(4, 6, 6)
SEVERAL(2, 6) SEVERAL(3, 6) SEVERAL(4, 6)
static Tile *const only[TILE_ROWS] = {tile_1x8_8, tile_2x8_8, tile_3x8_8, tile_4x6_6};
static const int only_outs[TILE_ROWS] = {8, 8, 8, 6};
static Tile *const several[TILE_ROWS][4] = {{NULL}, NAMES(2, 6), NAMES(3, 6), NAMES(4, 6)};
#endif
static Tile *const single[TILE_ROWS] = {tile_1x1_0, tile_2x1_0, tile_3x1_0, tile_4x1_0};

/* How rows are cut into tiles: the first `taller` of them have a row more. */
typedef struct {
    int tiles, height, taller;
} Cut;

/* The sums of `outs` outputs for all rows, from at on. */
static void sum_rows(Place at, Cut cut, int outs, int asks) {
    const int lines = asks ? (TILE_OUTS + cut.tiles - 1) / cut.tiles : 0;
    const char *enough = at.ahead + outs * at.ins * (long)sizeof(bf16);
    for (int t = 0; t < cut.tiles; t++) {
        const int height = cut.height + (t < cut.taller);
        if (outs == 1) {
            single[height - 1](&at);
        } else if (cut.tiles == 1) {
            only[height - 1](&at);
        } else {
            const int wanted = at.ahead < enough ? lines : 0;
            several[height - 1][wanted](&at);
            at.ahead += at.ins / STEP * LINE * wanted;
        }
        at.x.at += height * at.x.stride;
        at.sums += height * BLOCK_OUTS;
    }
}

/* All outputs from `first` to `last`, for at most BLOCK_ROWS rows from `row` on; `following`: the output to go on at.
   Packed weights are expanded into `room`, of a tile's outputs, and nothing is asked for. */
static void stretch(const Product *p, Terms x, long row, long rows, long first, long last, long following, bf16 *room) {
    float sums[BLOCK_ROWS * BLOCK_OUTS] __attribute__((aligned(64)));
    const int tiles = rows <= TILE_ROWS ? 1 : (int)((rows + SEVERAL_ROWS - 1) / SEVERAL_ROWS);
    const Cut cut = {tiles, (int)rows / tiles, (int)rows % tiles};
    const int outs = tiles == 1 ? only_outs[rows - 1] : TILE_OUTS;
    for (long block = first; block < last; block += BLOCK_OUTS) {
        const long end = block + BLOCK_OUTS < last ? block + BLOCK_OUTS : last;
        for (long o = block, n; o < end; o += n) {
            n = end - o >= outs ? outs : 1;
            const bf16 *w = bf16_rows(p->w, p->packed, p->ins, o, n, room, scales_behind(room, only_outs[0], p->ins));
            const bf16 *ahead = room || o + n < last ? w + n * p->ins : p->w + following * p->ins;
            const Place at = {{x.at + row * x.stride, x.stride}, w, p->ins, sums + (o - block), (const char *)ahead};
            sum_rows(at, cut, (int)n, !room);
        }
        finish(p, sums, BLOCK_OUTS, row, rows, block, end - block);
    }
}

/* Whether rows of w and of x compete for a few places of the first cache. */
static int crowded(const Product *p) {
    const uintptr_t behind = ((uintptr_t)p->x - (uintptr_t)p->w) % WAY, row = (uintptr_t)p->ins * sizeof(bf16);
    const uintptr_t x_row = (uintptr_t)p->x_stride * sizeof(bf16);
    return row % WAY == 0 && x_row % WAY == 0 && (behind < WAY / 4 || behind > WAY - WAY / 4);
}

/* A row of x, in the order of its terms: float32 ones fill whole steps. */
static void copy_row(const bf16 *from, long ins, term *to) {
#ifdef PAIRS
    memcpy(to, from, (size_t)ins * sizeof(bf16));
#else
    copy_halves(from, ins, to);
#endif
}

/* Copies x into memory of the calling thread, a quarter and three quarters of a WAY behind w, in turns. NULL where there
   is no memory. */
static Terms copied(const Product *p) {
    static _Thread_local char *held;
    static _Thread_local size_t size;
    const size_t row = (size_t)up(p->ins, STEP) * sizeof(term), apart = row + WAY / 2;
    const size_t wanted = ((size_t)p->rows * apart + 2 * WAY) & -(size_t)WAY;
    if (size < wanted) {
        free(held);
        held = aligned_alloc(WAY, wanted);
        size = held ? wanted : 0;
    }
    if (!held) return (Terms){NULL, 0};
    char *to = held + ((uintptr_t)p->w + WAY / 4) % WAY / LINE * LINE;
    for (long r = 0; r < p->rows; r++) copy_row(p->x + r * p->x_stride, p->ins, (term *)(to + (size_t)r * apart));
    return (Terms){(const term *)to, (long)(apart / sizeof(term))};
}

/* x where it lies, or copied; NULL where that takes memory that is not there. */
static Terms terms_of(const Product *p, int copies) {
    const Terms elsewhere = copies ? copied(p) : (Terms){NULL, 0};
    return elsewhere.at || TERMS == 1 ? elsewhere : (Terms){(const term *)p->x, p->x_stride};
}

/* How many outputs a thread takes at a time: whole blocks of them. */
static long piece_of(const Product *p, int threads) {
    const long most = PIECE / (p->ins * (long)sizeof(bf16)), share = p->outs / (TURNS * threads);
    const long blocks = (most < share ? most : share) / BLOCK_OUTS;
    return (blocks ? blocks : 1) * BLOCK_OUTS;
}

/* Outputs from `first` to `last` for all rows, which are cut evenly: no part of them is a few that use the weights
   badly. */
static void take(const Product *p, Terms x, long first, long last, long following, bf16 *room) {
    const long parts = (p->rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    for (long part = 0; part < parts; part++) {
        const long row = part * p->rows / parts;
        stretch(p, x, row, (part + 1) * p->rows / parts - row, first, last, part + 1 < parts ? first : following,
                room);
    }
}

typedef struct {
    Product p;
    long piece;
    int copies; /* x is copied */
    int64_t next; /* output that no thread has taken */
    int failed;
} Pieces;

static void take_pieces(void *task, int member) {
    Pieces *all = task;
    const Product p = all->p;
    /* The piece that follows is taken early, so that its first weights are asked for in time. */
    long first = claim(&all->next, all->piece);
    if (first >= p.outs) return;
    bf16 *room = p.packed ? room_for(only_outs[0], p.ins) : NULL;
    const Terms x = terms_of(&p, all->copies);
    const int able = x.at && (room || !p.packed);
    if (!able) __atomic_store_n(&all->failed, 1, __ATOMIC_RELAXED);
    while (able && first < p.outs) {
        const long following = claim(&all->next, all->piece), end = first + all->piece;
        take(&p, x, first, end < p.outs ? end : p.outs, following < p.outs ? following : first, room);
        first = following;
    }
    free(room);
}

int linear(const Product *p, int threads) {
    Pieces all = {.p = *p};
    if (p->rows * p->outs * p->ins < ALONE) threads = 1;
    all.piece = piece_of(p, threads);
    all.copies = TERMS == 1 || (!p->packed && crowded(p) && p->outs >= ENOUGH * (long)threads);
    team_run(take_pieces, &all, threads);
    return all.failed;
}
