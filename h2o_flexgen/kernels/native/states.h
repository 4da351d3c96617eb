/* Layers that keep a state of a fixed size in place of keys and values: the recurrences of states.c and state_prompts.c. */
#ifndef STATES_H
#define STATES_H

#include "simd.h"

enum { MOST_KEY = 1024 /* numbers of a key */ };

/* With `delta`, of each token and head (Yang, Kautz and
   Hatamizadeh, arXiv 2412.06464, and with a decay of each number of a key, Kimi Team, arXiv 2510.26692):
       state = exp(decay) state;  state += key (beta (value - key state));  out = query state
   and without (Dao and Gu, arXiv 2405.21060), out = query state + skip value, after state += key (beta value). */
typedef struct {
    int64_t rows, tokens, heads, key_heads, key_dim, value_dim;
    int64_t bf16, delta, normed, by_channel, threads;
    /* numbers from one to the next */
    int64_t q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head;
    const void *q, *k, *v;    /* (rows, tokens, key_heads or heads, key_dim or value_dim), bfloat16 or float32 */
    const float *decay;       /* (rows, tokens, heads) logarithms, with by_channel (rows, tokens, heads, key_dim) */
    const float *beta;        /* (rows, tokens, heads) */
    const float *skip;        /* (heads) or NULL */
    float *state;             /* (rows, heads, key_dim, value_dim), without delta (rows, heads, value_dim, key_dim) */
    void *out;                /* (rows, tokens, heads, value_dim), as q, k and v are */
    double scale;             /* of queries; normed: they and keys are divided by their length before */
} States;

/* The head of a row's token. */
typedef struct {
    int64_t row, token, head;
} Place;

INLINE const void *from(const void *at, int64_t bf16, int64_t numbers) {
    return (const char *)at + numbers * (bf16 ? 2 : 4);
}

INLINE int64_t number_of(const States *s, Place p) { return (p.row * s->tokens + p.token) * s->heads + p.head; }

/* `key_dim` numbers of a key and a query, and the decays of a state's keys, in float32; up to a vector's end zeros. */
void read_token(const States *s, Place p, float *key, float *query, float *decay);

INLINE const void *value_of(const States *s, Place p) {
    return from(s->v, s->bf16, p.row * s->v_row + p.token * s->v_token + p.head * s->v_head);
}

INLINE void *out_of(const States *s, Place p) {
    return (void *)from(s->out, s->bf16, number_of(s, p) * s->value_dim);
}

#endif
