/* Tokens that are drawn, and log-probabilities of tokens and of the likeliest ones.

   A row's token is drawn by one number of its own, with what most rows ask of transformers' `generate`, in its order: scores
   are divided by a temperature; the `top_k` highest stay, equal ones included; of these the likeliest that have `top_p` of
   the probability together; of these, tokens at least `min_p` times as likely as the likeliest. The token is the first at
   which the sum of probabilities, in the vocabulary's order, is above the number.

   No row is sorted: few of its numbers can be the least that stays, and that is looked for among them. */

#include <math.h>

#include "simd.h"
#include "team.h"

enum {
    BLOCK = 256,  /* numbers that have a sum of their own, or that are passed over where none is large enough */
    FEW = 1 << 10 /* numbers that are looked at one by one */
};

typedef struct {
    const float *scores;
    int64_t n, stride, top_k; /* 0 or n: all stay */
    double temperature, top_p, min_p;
    const int64_t *rows;      /* whose tokens are drawn */
    const double *numbers;    /* of each of these, from 0 to below 1, */
    const int64_t *allowed;   /* and where the bits of its tokens that a grammar allows are, or 0 */
    int64_t *drawn;           /* -1 where no score is finite, -2 where for `top_p` only some of equal ones stay: transformers'
                                 sort says which */
} Draw;

/* The tokens of a row that are left. */
typedef struct {
    int64_t n;
    float *x;        /* scores, then likelihoods beside the likeliest token's, 1 */
    float *some;     /* room for some of them, or for twice `top_k` */
    int32_t *tokens; /* whose they are; NULL: all of the vocabulary's */
    double *sums;    /* of blocks */
} Left;

/* Cuts x [from, end) by a number that is among them, the `*pivot`: larger ones, equal ones from *same on, smaller ones from
   *smaller on. */
static void part(float *x, int64_t from, int64_t end, float *pivot, int64_t *same, int64_t *smaller) {
    const float a = x[from], b = x[from + (end - from) / 2], c = x[end - 1];
    *pivot = fmaxf(fminf(a, b), fminf(fmaxf(a, b), c));
    *same = from, *smaller = end;
    for (int64_t i = from; i < *smaller;) {
        const float each = x[i];
        if (each > *pivot) x[i++] = x[*same], x[(*same)++] = each;
        else if (each < *pivot) x[i] = x[--*smaller], x[*smaller] = each;
        else i++;
    }
}

/* The count-th largest of x, of which so many come to lie in front. */
static float front_of(float *x, int64_t n, int64_t count) {
    float pivot = 0;
    for (int64_t from = 0, end = n, same, smaller; from < end;) {
        part(x, from, end, &pivot, &same, &smaller);
        if (count <= same) end = same;
        else if (count > smaller) from = smaller;
        else break;
    }
    return pivot;
}

/* The largest number of x [i, end). */
INLINE float top_of(const float *x, int64_t i, int64_t end) {
    __m512 top = _mm512_set1_ps(-INFINITY);
    for (; i < end; i += LANES) top = _mm512_mask_mov_ps(top, first_lanes(end - i), _mm512_max_ps(top, number_at(x, 0, i, end)));
    return _mm512_reduce_max_ps(top);
}

/* The count-th highest score; -infinity where fewer are higher than that. */
static float highest_of(const float *scores, int64_t n, int64_t count, float *some) {
    float lowest = -INFINITY;
    int64_t found = 0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t end = least(n, start + BLOCK);
        if (!(top_of(scores, start, end) > lowest)) continue;
        for (int64_t i = start; i < end; i++) {
            if (!(scores[i] > lowest)) continue;
            some[found++] = scores[i];
            if (found == 2 * count) lowest = front_of(some, found, count), found = count;
        }
    }
    return found < count ? -INFINITY : front_of(some, found, count);
}

/* Leaves the highest scores, and those that are as high once they are divided. */
static void leave_highest(const Draw *all, const float *scores, Left *left) {
    const float by = (float)all->temperature, lowest = highest_of(scores, all->n, all->top_k, left->some);
    const float divided = lowest / by, near = lowest - fabsf(lowest) * 1e-6f; /* what is lower is so divided, too */
    for (int64_t start = 0; start < all->n; start += BLOCK) {
        const int64_t end = least(all->n, start + BLOCK);
        if (!(top_of(scores, start, end) >= near)) continue;
        for (int64_t i = start; i < end; i++)
            if (scores[i] >= near && scores[i] / by >= divided)
                left->tokens[left->n] = (int32_t)i, left->x[left->n++] = scores[i];
    }
}

/* Sums of the likelihoods that are not below `lowest`, and the `*count` of these; returns the sum of all. */
static double add_up(const Left *left, float lowest, int64_t *count) {
    const __m512i from = _mm512_castps_si512(_mm512_set1_ps(lowest)); /* of numbers without a sign bits have their order */
    double total = *count = 0;
    for (int64_t start = 0; start < left->n; start += BLOCK) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t i = start; i < least(left->n, start + BLOCK); i += LANES) {
            const __m512 some = number_at(left->x, 0, i, left->n);
            const __mmask16 stay = _mm512_cmple_epi32_mask(from, _mm512_castps_si512(some));
            *count += __builtin_popcount(stay);
            sum = _mm512_add_ps(sum, _mm512_mask_mov_ps(_mm512_setzero_ps(), stay, some));
        }
        total += left->sums[start / BLOCK] = _mm512_reduce_add_ps(sum);
    }
    return total;
}

/* Scores as likelihoods. */
static void weigh(const Draw *all, const float *scores, Left *left) {
    const __m512 by = _mm512_set1_ps((float)all->temperature), top = _mm512_set1_ps(top_of(scores, 0, left->n));
    const __m512 highest = _mm512_div_ps(top, by);
    for (int64_t i = 0; i < left->n; i += LANES) {
        const __m512 divided = _mm512_div_ps(number_at(scores, 0, i, left->n), by);
        put_number(left->x, 0, i, left->n, exp_of(_mm512_sub_ps(divided, highest)));
    }
}

/* The least likelihood that stays for `top_p`; -1 where of the tokens that have it only some do. */
static float least_likely(const Left *left, double total, double top_p) {
    const double bound = (float)(1 - top_p) * total; /* what may go, from the least likely token on */
    /* It is from `low` on, below `high`: so many times `low` is less than what may go. */
    float low = (float)(bound / (double)left->n * 0.999999), high = 1 + 0x1p-23f;
    int64_t count, above = 0;
    double gone = total - add_up(left, low, &count);
    for (int round = 0; count - above > FEW && round < 40; round++) {
        const float middle = sqrtf(low * high);
        int64_t more;
        const double below = total - add_up(left, middle, &more);
        if (below <= bound) low = middle, gone = below, count = more;
        else high = middle, above = more;
    }
    int64_t found = 0;
    const __m512i from = _mm512_castps_si512(_mm512_set1_ps(low)), end = _mm512_castps_si512(_mm512_set1_ps(high));
    for (int64_t i = 0; i < left->n; i += LANES) {
        const __m512i some = _mm512_castps_si512(number_at(left->x, 0, i, left->n));
        uint32_t bits = _mm512_cmple_epi32_mask(from, some) & _mm512_cmplt_epi32_mask(some, end);
        for (; bits; bits &= bits - 1) left->some[found++] = left->x[i + __builtin_ctz(bits)];
    }
    float pivot = 1;
    for (int64_t from = 0, end = found, same, smaller; from < end;) {
        part(left->some, from, end, &pivot, &same, &smaller);
        double lower = gone;
        for (int64_t i = smaller; i < end; i++) lower += left->some[i];
        if (lower > bound) {
            from = smaller;
            continue;
        }
        const double equal = (double)(smaller - same);
        if (lower + pivot > bound || (pivot == 1 && equal == 1)) break; /* the likeliest token stays */
        if (pivot == 1 || lower + equal * pivot > bound) return -1;
        gone = lower + equal * pivot, end = same;
    }
    return pivot;
}

/* The first token at which the sum of likelihoods is above that share of the total. */
static int64_t token_at(const Left *left, float lowest, double target) {
    int64_t block = 0, last = -1;
    for (const int64_t blocks = (left->n - 1) / BLOCK; block < blocks && target >= left->sums[block]; block++)
        target -= left->sums[block];
    for (; last < 0 && block >= 0; block--, target = INFINITY) /* behind the sum of all, as rounded, there may be none */
        for (int64_t i = block * BLOCK; i < least(left->n, (block + 1) * BLOCK); i++) {
            if (left->x[i] < lowest || left->x[i] == 0) continue;
            last = i, target -= left->x[i];
            if (target < 0) break;
        }
    return left->tokens ? left->tokens[last] : last;
}

/* Scores of tokens that are not allowed become -infinity. */
static void bar(const float *scores, const uint16_t *allowed, int64_t n, float *to) {
    for (int64_t i = 0; i < n; i += LANES) {
        const __mmask16 bits = allowed[i / LANES];
        put_number(to, 0, i, n, _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), bits, number_at(scores, 0, i, n)));
    }
}

static int64_t draw_one(const Draw *all, const float *scores, const uint16_t *allowed, double number, Left left) {
    if (allowed) {
        bar(scores, allowed, all->n, left.x);
        scores = left.x;
    }
    if (all->top_k > 0 && all->top_k < all->n) {
        leave_highest(all, scores, &left);
        scores = left.x;
    } else {
        left.n = all->n, left.tokens = NULL;
    }
    weigh(all, scores, &left);
    float lowest = (float)all->min_p;
    int64_t count;
    const double total = add_up(&left, 0, &count);
    if (!(total > 0)) return -1;
    if (all->top_p < 1) {
        const float likely = least_likely(&left, total, all->top_p);
        if (likely < 0) return -2;
        lowest = fmaxf(lowest, likely);
    }
    return token_at(&left, lowest, number * (lowest > 0 ? add_up(&left, lowest, &count) : total));
}

/* Numbers that `Left.x` has room for, and `Left.some`. */
static int64_t numbers_of(const Draw *all) { return up(most(all->n, 2 * least(all->top_k, all->n)), LANES); }

static void draw_rows(void *task, int64_t first, int64_t last, void *room) {
    const Draw *all = task;
    float *at = room;
    const int64_t numbers = numbers_of(all);
    const Left left = {0, at, at + numbers, (int32_t *)at + 2 * numbers, (double *)(void *)(at + 3 * numbers)};
    for (int64_t r = first; r < last; r++) {
        const uint16_t *allowed = (const uint16_t *)(uintptr_t)all->allowed[r];
        all->drawn[r] = draw_one(all, all->scores + all->rows[r] * all->stride, allowed, all->numbers[r], left);
    }
}

/* The tokens of `count` rows. Returns 0, or 1 where memory is short. */
int draw(const Draw *all, int64_t count, int threads) {
    const int64_t bytes = 3 * numbers_of(all) * (int64_t)sizeof(float) + (all->n / BLOCK + 1) * (int64_t)sizeof(double);
    return team_share(draw_rows, (void *)all, count, 1, bytes, threads);
}

/* ---- log-probabilities */

typedef struct {
    const float *scores;
    int64_t n, stride, count; /* how many of the likeliest, at most n */
    const int64_t *rows;      /* whose they are */
    const int64_t *tokens;    /* of each of these one; its log-probability comes first */
    float *found;             /* (rows, 1 + count): from the likeliest on, the first of equal ones first */
    int64_t *places;          /* (rows, count): which tokens they are */
} Logprobs;

/* Puts the `count` highest scores into `found`, and where they are into `places`. */
static void find_highest(const float *scores, int64_t n, int64_t count, float *some, float *found, int64_t *places) {
    const float lowest = highest_of(scores, n, count, some);
    int64_t held = 0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t end = least(n, start + BLOCK);
        if (!(top_of(scores, start, end) >= lowest)) continue;
        for (int64_t i = start; i < end; i++) {
            if (!(scores[i] >= lowest) || (held == count && scores[i] <= found[count - 1])) continue;
            int64_t at = held < count ? held++ : count - 1;
            for (; at > 0 && found[at - 1] < scores[i]; at--) found[at] = found[at - 1], places[at] = places[at - 1];
            found[at] = scores[i], places[at] = i;
        }
    }
}

static void logprobs_of(void *task, int64_t first, int64_t last, void *room) {
    const Logprobs *all = task;
    for (int64_t r = first; r < last; r++) {
        const float *scores = all->scores + all->rows[r] * all->stride, top = top_of(scores, 0, all->n);
        double total = 0;
        for (int64_t start = 0; start < all->n; start += BLOCK) {
            __m512 sum = _mm512_setzero_ps();
            for (int64_t i = start; i < least(all->n, start + BLOCK); i += LANES) {
                const __m512 e = exp_of(_mm512_sub_ps(number_at(scores, 0, i, all->n), _mm512_set1_ps(top)));
                sum = _mm512_add_ps(sum, _mm512_mask_mov_ps(_mm512_setzero_ps(), first_lanes(all->n - i), e));
            }
            total += _mm512_reduce_add_ps(sum);
        }
        float *found = all->found + r * (1 + all->count);
        const double less = (double)top + log(total);
        if (all->count) find_highest(scores, all->n, all->count, room, found + 1, all->places + r * all->count);
        found[0] = scores[all->tokens[r]];
        for (int64_t i = 0; i <= all->count; i++) found[i] = (float)((double)found[i] - less);
    }
}

/* Log-probabilities of `count` rows. Returns 0, or 1 where memory is short. */
int logprobs(const Logprobs *all, int64_t count, int threads) {
    return team_share(logprobs_of, (void *)all, count, 1, 2 * all->count * (int64_t)sizeof(float), threads);
}
