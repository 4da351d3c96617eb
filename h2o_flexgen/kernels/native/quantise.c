/* Packs rows of float32 numbers: 4 bits with a scale and a low per group, or 8 bits with a scale, all in bfloat16.

   Of 4 bits, the least and greatest number of a group give a first scale (Sheng et al. 2023, "FlexGen", section 5). Then
   codes and line are improved in turns: for given codes the scale and low of the least squared error follow from a 2 x 2
   system; for a given line the nearest codes are best. Several ranges, each a bit narrower than the last, are tried as a
   start, since a few outliers may be worth clipping. The line with the least error, once rounded, is kept.

   An error counts by the weight of its input: how large that input is in the mean of its squares, where it is known. */

#include <math.h>

#include "simd.h"
#include "team.h"

enum { STARTS = 6, TURNS = 2 };

typedef struct {
    float scale, low;
} Line;

static Line rounded_line(Line line) { return (Line){wide_number(to_bf16(line.scale)), wide_number(to_bf16(line.low))}; }

/* A group: n numbers, a multiple of LANES, and what their errors weigh. Where there are fewer, the last is repeated and
   weighs nothing. */
typedef struct {
    float *x, *weight, *codes;
    int n;
} Group;

static void load_group(Group *group, const float *x, const float *weight, int64_t n) {
    group->n = (int)up(n, LANES);
    for (int i = 0; i < group->n; i++) {
        group->x[i] = x[least(i, n - 1)];
        group->weight[i] = i >= n ? 0 : weight ? weight[i] : 1;
    }
}

/* The nearest codes, as floats, and the weighted squared error. */
static float codes_for(Group *group, Line line, float top) {
    const __m512 low = _mm512_set1_ps(line.low), scale = _mm512_set1_ps(line.scale), most_code = _mm512_set1_ps(top);
    const __m512 step = _mm512_set1_ps(line.scale > 0 ? 1 / line.scale : 0);
    __m512 error = _mm512_setzero_ps();
    for (int i = 0; i < group->n; i += LANES) {
        const __m512 x = _mm512_load_ps(group->x + i);
        const __m512 nearest = _mm512_roundscale_ps(_mm512_mul_ps(_mm512_sub_ps(x, low), step), 8);
        const __m512 code = _mm512_min_ps(_mm512_max_ps(nearest, _mm512_setzero_ps()), most_code);
        const __m512 off = _mm512_sub_ps(_mm512_fmadd_ps(code, scale, low), x);
        _mm512_store_ps(group->codes + i, code);
        error = _mm512_fmadd_ps(_mm512_mul_ps(off, off), _mm512_load_ps(group->weight + i), error);
    }
    return _mm512_reduce_add_ps(error);
}

/* The line of the least weighted squared error for the group's codes; `before` where they are all the same. */
static Line fitted(const Group *group, Line before) {
    __m512 weights = _mm512_setzero_ps(), codes = weights, squares = weights, numbers = weights, products = weights;
    for (int i = 0; i < group->n; i += LANES) {
        const __m512 x = _mm512_load_ps(group->x + i), code = _mm512_load_ps(group->codes + i);
        const __m512 weight = _mm512_load_ps(group->weight + i), weighted = _mm512_mul_ps(weight, code);
        weights = _mm512_add_ps(weights, weight);
        codes = _mm512_add_ps(codes, weighted);
        squares = _mm512_fmadd_ps(weighted, code, squares);
        numbers = _mm512_fmadd_ps(weight, x, numbers);
        products = _mm512_fmadd_ps(weighted, x, products);
    }
    const float n = _mm512_reduce_add_ps(weights), c = _mm512_reduce_add_ps(codes);
    const float cc = _mm512_reduce_add_ps(squares), x = _mm512_reduce_add_ps(numbers);
    const float cx = _mm512_reduce_add_ps(products), det = n * cc - c * c;
    if (!(det > 0)) return before;
    const Line line = {(n * cx - c * x) / det, (cc * x - c * cx) / det};
    return line.scale > 0 && line.scale < INFINITY && fabsf(line.low) < INFINITY ? line : before;
}

/* Leaves the codes of the line that it returns. */
static Line best_line(Group *group, float top, int searches) {
    float low = INFINITY, high = -INFINITY, least_error = INFINITY;
    for (int i = 0; i < group->n; i++)
        if (group->weight[i] > 0) low = fminf(low, group->x[i]), high = fmaxf(high, group->x[i]);
    if (low > high) low = high = group->x[0]; /* nothing weighs anything */
    Line best = rounded_line((Line){(high - low) / top, low});
    for (int start = 0; searches && high > low && start < STARTS; start++) {
        const float cut = 0.03f * (float)start * (high - low);
        Line line = {(high - low - 2 * cut) / top, low + cut};
        for (int turn = 0; turn <= TURNS; turn++) {
            const Line kept = rounded_line(line);
            const float error = codes_for(group, kept, top);
            if (error < least_error) least_error = error, best = kept;
            if (turn < TURNS) line = fitted(group, line);
        }
    }
    codes_for(group, best, top);
    return best;
}

typedef struct {
    const float *x, *weight;
    uint8_t *codes;
    bf16 *scale, *low;
    int64_t rows, ins, group;
    int bits, searches;
} Quantisation;

static void pack_four(const Quantisation *q, int64_t row) {
    const int64_t groups = (q->ins + q->group - 1) / q->group;
    const size_t size = (size_t)up(least(q->group, q->ins), LANES);
    float x[size] __attribute__((aligned(64))), weight[size] __attribute__((aligned(64)));
    float codes[size] __attribute__((aligned(64)));
    Group group = {x, weight, codes, 0};
    for (int64_t g = 0; g < groups; g++) {
        const int64_t at = g * q->group;
        const int64_t n = least(q->group, q->ins - at);
        load_group(&group, q->x + row * q->ins + at, q->weight ? q->weight + at : NULL, n);
        const Line line = best_line(&group, 15, q->searches);
        q->scale[row * groups + g] = to_bf16(line.scale);
        q->low[row * groups + g] = to_bf16(line.low);
        uint8_t *to = q->codes + (row * q->ins + at) / 2;
        for (int64_t i = 0; i < n; i += 2) to[i / 2] = (uint8_t)((int)group.codes[i] | (int)group.codes[i + 1] << 4);
    }
}

static void pack_eight(const Quantisation *q, int64_t row) {
    const int64_t groups = (q->ins + q->group - 1) / q->group;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t at = g * q->group, n = least(q->group, q->ins - at);
        const float *x = q->x + row * q->ins + at;
        float largest = 0;
        for (int64_t i = 0; i < n; i++) largest = fmaxf(largest, fabsf(x[i]));
        const float scale = wide_number(to_bf16(largest / 127)), step = scale > 0 ? 1 / scale : 0;
        q->scale[row * groups + g] = to_bf16(scale);
        for (int64_t i = 0; i < n; i++)
            q->codes[row * q->ins + at + i] = (uint8_t)(int8_t)fminf(fmaxf(rintf(x[i] * step), -127), 127);
    }
}

static void some_rows(void *task, int64_t first, int64_t last, void *room) {
    const Quantisation *q = task;
    for (int64_t row = first; row < last; row++) (q->bits == 4 ? pack_four : pack_eight)(q, row);
}

/* x (rows, ins) float32, contiguous, as codes, scales and (of 4 bits) lows. `searches`: whether for the least error.
   weight (ins), not negative: the weights of the inputs' errors then, NULL for equal ones. */
void quantise(const float *x, const float *weight, uint8_t *codes, bf16 *scale, bf16 *low, long rows, long ins,
              long group, int bits, int searches, int threads) {
    Quantisation q = {x, weight, codes, scale, low, rows, ins, group ? group : ins, bits, searches};
    team_share(some_rows, &q, rows, most(1, (1 << 14) / ins), 0, threads);
}
