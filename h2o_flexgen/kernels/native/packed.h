/* Prompts of unequal lengths, packed one after the other. */
#ifndef PACKED_H
#define PACKED_H

#include <stdint.h>

/* `PackedRow` in types.py has the same fields in the same order. */
typedef struct {
    int64_t first;  /* its first token among those that are packed */
    int64_t length; /* tokens */
    int64_t place;  /* the row of the cache that it goes to */
    int64_t total;  /* tokens that may stay there: */
    int64_t heavy, recent, sinks;
} PackedRow;

#endif
