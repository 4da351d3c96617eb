/* Keys and values of fewer bits: each one a piece of bytes, as config/model/packing.py describes `CachePacking`. */
#ifndef PIECES_H
#define PIECES_H

#include "simd.h"

enum { PIECE_GROUP = 64, MOST_DIM = 256 };

typedef struct {
    int64_t dim, bits; /* numbers of a vector, at most MOST_DIM, and the bits of each; 0 bits: it is no piece */
    int wide;          /* the numbers that it comes from and becomes are float32, not bfloat16 */
} Pieces;

INLINE int64_t piece_groups(const Pieces *p) { return (p->dim + PIECE_GROUP - 1) / PIECE_GROUP; }
/* Bytes of a vector as numbers, and as it is kept. */
INLINE int64_t vector_bytes(const Pieces *p) { return p->dim * (p->wide ? 4 : 2); }
INLINE int64_t kept_bytes(const Pieces *p) {
    return p->bits ? p->dim * p->bits / 8 + 4 * piece_groups(p) : vector_bytes(p);
}

/* One vector of numbers as it is kept; where it is no piece, as it is. */
void keep_vector(const Pieces *p, const void *from, uint8_t *to);

/* Numbers of `count` vectors whose pieces lie one after the other. */
void expand_pieces(const Pieces *p, const uint8_t *from, int64_t count, void *to);

#endif
