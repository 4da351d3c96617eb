/* Keys and values of fewer bits: each one a piece of bytes, as config/model/packing.py describes `CachePacking`. */
#ifndef PIECES_H
#define PIECES_H

#include "simd.h"

enum { PIECE_GROUP = 64, MOST_DIM = 256 };

typedef struct {
    int64_t dim, bits; /* numbers of a vector, at most MOST_DIM, and the bits of each; 0 bits: it is no piece */
    int wide;          /* the numbers that it comes from and becomes are float32, not bfloat16 */
    int64_t block;     /* numbers that a Hadamard transform mixes before they are packed; 0: none are */
} Pieces;

INLINE int64_t piece_groups(const Pieces *p) { return (p->dim + PIECE_GROUP - 1) / PIECE_GROUP; }
/* Bytes of a vector as numbers, and as it is kept. */
INLINE int64_t vector_bytes(const Pieces *p) { return p->dim * (p->wide ? 4 : 2); }
INLINE int64_t kept_bytes(const Pieces *p) {
    return p->bits ? p->dim * p->bits / 8 + 4 * piece_groups(p) : vector_bytes(p);
}

/* A vector's numbers by the Hadamard transform of each of its blocks, in place; its own inverse. There is room for whole
   pairs of vectors of LANES behind the last number. */
void transform(const Pieces *p, float *x);

/* x as LANES of a vector's numbers from number d on, and as all of them. */
INLINE void store_at(const Pieces *p, char *to, int64_t d, __m512 x) { put_number(to, !p->wide, d, p->dim, x); }
INLINE void store_numbers(const Pieces *p, const float *x, char *to) {
    for (int64_t d = 0; d < p->dim; d += LANES) store_at(p, to, d, _mm512_loadu_ps(x + d));
}

/* LANES of a vector's numbers from number d on, 0 behind its last. */
INLINE __m512 numbers_at(const Pieces *p, const char *from, int64_t d) { return number_at(from, !p->wide, d, p->dim); }

/* All of them. There is room for whole vectors. */
INLINE void load_numbers(const Pieces *p, const char *from, float *to) {
    for (int64_t d = 0; d < p->dim; d += LANES) _mm512_storeu_ps(to + d, numbers_at(p, from, d));
}

/* The key k less its head's mean, rounded, if there is one, times its scales. */
INLINE void scaled_key(const Pieces *p, const char *k, const char *mean, const char *scales, char *to) {
    for (int64_t d = 0; d < p->dim; d += LANES) {
        if (mean) store_at(p, to, d, _mm512_sub_ps(numbers_at(p, k, d), numbers_at(p, mean, d)));
        store_at(p, to, d, _mm512_mul_ps(numbers_at(p, mean ? to : k, d), numbers_at(p, scales, d)));
    }
}

/* One vector of numbers as it is kept; where it is no piece, as it is. Packed, what that has cost it goes to `lost`, a
   piece as well, which may be NULL. */
void keep_vector(const Pieces *p, const void *from, uint8_t *to, uint8_t *lost);

/* Numbers of `count` vectors whose pieces lie one after the other, transformed as they are kept. */
void expand_pieces(const Pieces *p, const uint8_t *from, int64_t count, void *to);

#endif
