/* What prompt.c is asked, prompt by prompt where they are packed, and what each of its threads has. */
#ifndef PROMPT_TASK_H
#define PROMPT_TASK_H

#include "packed.h"
#include "prompt_tiles.h"

#define CHUNK 128 /* keys whose weights in bfloat16 stay in the first cache, with their values */

/* Strides in elements. `prompt.py` has the same fields in the same order. */
typedef struct {
    const bf16 *q, *k, *v, *past_k, *past_v;
    bf16 *out;     /* (rows, length, kv_heads x group, d), contiguous */
    float *sums;   /* (parts, rows, kv_heads, before + length), or NULL */
    char *scratch; /* workers x prompt_scratch() bytes, at a multiple of 64 */
    int64_t q_row, q_head, q_token, k_row, k_head, k_token, v_row, v_head, v_token;
    int64_t past_k_head, past_k_token, past_v_head, past_v_token;
    int64_t rows, kv_heads, group, length, before, d;
    int64_t window;  /* keys that a query sees at most; 0: all up to itself */
    int64_t queries; /* tokens per block */
    int64_t parts;   /* tasks that the blocks of a row and head are divided into */
    int64_t workers; /* that have scratch */
    int64_t prompts; /* that are packed, if `packed` says where: `rows` is 1 then, and `length` that of the longest */
    double scale;    /* positive */
    const PackedRow *packed; /* sums of each lie from `first` x kv_heads on, (kv_heads, its length) */
} Prompt;

/* One thread's buffers, and what is packed in them: blocks of LANES keys. */
typedef struct {
    bf16 *k, *v, *q, *p;
    float *x, *o, *sums, *top, *total;
    int64_t stride; /* of x */
    int64_t head, row, past_from, own_from, own_to;
    int64_t next_head, next_row;
} Worker;

/* One of those that are packed, by itself. */
static Prompt prompt_of(const Prompt *p, int64_t index) {
    Prompt one = *p;
    if (p->packed == NULL) return one;
    int64_t first = p->packed[index].first;
    one.length = p->packed[index].length;
    one.q += first * p->q_token, one.k += first * p->k_token, one.v += first * p->v_token;
    one.out += first * p->kv_heads * p->group * p->d;
    if (p->sums != NULL) one.sums += first * p->kv_heads;
    return one;
}

/* Cuts the buffers of one worker out of `at`; returns the bytes they take, a multiple of 64. */
static int64_t buffers(const Prompt *p, Worker *w, char *at) {
    int64_t room = up(p->before + p->length, LANES), d = p->d, rows = up(p->queries * p->group, TILE);
    char *start = at;
    w->stride = room + LANES; /* rows of logits do not all begin in one set of the cache */
    w->k = (bf16 *)at, at += room * d * sizeof(bf16);
    w->v = (bf16 *)at, at += room * d * sizeof(bf16);
    w->q = (bf16 *)at, at += rows * d * sizeof(bf16);
    w->p = (bf16 *)at, at += rows * CHUNK * sizeof(bf16);
    w->x = (float *)at, at += rows * w->stride * sizeof(float);
    w->o = (float *)at, at += rows * d * sizeof(float);
    w->sums = (float *)at, at += room * sizeof(float);
    w->top = (float *)at, at += rows * LANES * sizeof(float);
    w->total = (float *)at, at += rows * LANES * sizeof(float);
    return at - start;
}

#endif
