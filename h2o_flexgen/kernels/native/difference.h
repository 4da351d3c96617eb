/* One less the cosine of each key with the mean direction of those that are held, at least 0: keydiff's ranks. */
#ifndef DIFFERENCE_H
#define DIFFERENCE_H

#include <stdint.h>

/* Of n keys one after the other; `pos`: -1 in empty slots, which do not count; NULL: none is. Writes n ranks. Every key
   goes through the same operations wherever it lies, so that equal ones get equal ranks, bit for bit. */
void differences(const char *keys, int64_t n, const int32_t *pos, int64_t dim, int bf16, float *rank);
#endif
