/* The arguments of a decode step of attention, and a row and KV head on its way through it. */
#ifndef ATTEND_H
#define ATTEND_H

#include <math.h>

#include "packed_attend.h"
#include "vectors.h"
#include "victims.h"

/* The rules that compare slots: by their scores, which add up the probabilities, are running means of them, inertiakv's,
   or count the queries that paid less than evenly, scissorhands'; by keydiff's differences of keys that are not packed; by
   roco's means of steady tokens; by the means of all. `RankedBy` in types.py has them in this order. */
enum { BY_SCORE, BY_FADING, BY_RARE, BY_DIFFERENCE, BY_STEADY, BY_MEAN };

typedef struct {
    const char *at;
    int64_t row, head; /* bytes from one to the next */
} Vectors;

typedef struct {
    int64_t rows, kv_heads, group, capacity, dim, bf16, k_bits, v_bits, block, threads;
    int64_t step;
    int64_t window;         /* tokens that a query sees, itself included; 0: all */
    int64_t adds;           /* whether the scores grow by the probabilities, or as `by` says */
    int64_t masks;          /* whether ranked slots other than sinks may hold tokens that have left the window */
    double scale, cap;      /* of logits; cap: see `soft_capped`, 0: there is none */
    char *k, *v;            /* (rows, kv_heads, capacity, dim), or pieces where there are bits */
    char *out;              /* (rows, kv_heads * group, dim) */
    Vectors new_q, new_k, new_v;
    const Row *rule;        /* (rows) */
    int64_t *used;          /* (rows, kv_heads): takes the slot of the new token, counted from its head's first */
    const int64_t *given;   /* (rows, kv_heads): where that is, as `next`, if the caller frees slots; else NULL */
    float *probs;           /* (rows, kv_heads, width): the probabilities, 0 where not occupied; may be NULL */
    int64_t width;
    /* Of ranked slots, else NULL: */
    int64_t *next;          /* (rows, kv_heads): the free slot, counted from the first of all rows */
    float *score;           /* (rows, kv_heads, capacity), never negative */
    int32_t *pos;           /* as `score`: positions */
    const float *fresh;     /* (rows, kv_heads): scores of the new tokens; NULL: 0 */
    const float *sinks;     /* (kv_heads * group): of each head a logit that is no token's; NULL: there is none */
    int64_t by;             /* the rule that compares ranked slots */
    float *squares;         /* as `score`, BY_STEADY: sums of squared probabilities beside the sums */
    const int64_t *scopes;  /* (rows): of how many, the steadiest, the one that goes is chosen */
    /* Of packed keys and values, the rounding errors of the newest tokens and the first, packed as well: */
    int64_t mended, newest_at; /* how many; which of them the new token is, -1: none */
    uint8_t *lost_k, *lost_v; /* (rows, kv_heads, mended, bytes of a piece) */
    int32_t *lost_slots;      /* (rows, kv_heads, mended): where they lie; -1: nowhere any more */
    /* Of packed keys, in the dtype of new ones, (rows, kv_heads, dim): */
    const char *key_means;  /* subtracted from new keys; NULL: none */
    const char *key_scales; /* powers of two that new keys are then multiplied by, and queries divided by; NULL: 1 */
} Step;

/* Where a head is in a step. */
typedef struct {
    const Row *rule;
    int64_t row, head, task, base;       /* its number, and its first slot, among all */
    int64_t now, count, first, n, pitch; /* position; slots: occupied, first and how many that are seen */
    int64_t slot;                        /* of the new token */
} Head;

/* Slots that one thread attends to at a time: the mixtures of a head's parts are added up in their order. */
enum { PART = 2048 };

typedef struct {
    Head h;
    float *x, *sums;   /* (group, pitch): logits, then exponentials, and the sums of these */
    float *mixed;      /* (parts, group, size_of_mixture) */
    float *ranks;      /* see `room_for` */
    const char *asked; /* the first of its queries, and */
    Query *q;          /* all of them as packed keys are asked */
    Path path;
} HeadStep;

INLINE Pieces keys_of(const Step *s) { return (Pieces){s->dim, s->k_bits, !s->bf16, s->block}; }
INLINE Pieces values_of(const Step *s) { return (Pieces){s->dim, s->v_bits, !s->bf16, s->block}; }
INLINE int64_t vectors_of(const Step *s) { return up(s->dim, s->bf16 ? 32 : 16) / (s->bf16 ? 32 : 16); }

/* Numbers of a query's mixture; of a packed one as `transform` takes them. */
static int64_t size_of_mixture(const Step *s) {
    return s->k_bits ? up(s->dim, 2 * LANES) : vectors_of(s) * LANES * (s->bf16 ? 2 : 1);
}

/* Logits of products with `left` keys, at most 16; -inf in the lanes after them. */
INLINE __m512 logits_of(const Step *s, __m512 products, int64_t left) {
    __m512 logits = _mm512_mul_ps(products, _mm512_set1_ps((float)s->scale));
    if (s->cap > 0) logits = soft_capped(logits, (float)s->cap);
    return _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), first_lanes(left), logits);
}

#endif
