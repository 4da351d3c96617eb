/* Products of a few rows with weights of 4 or 8 bits: see few.c. */
#ifndef FEW_H
#define FEW_H

#include "product.h"

#define FEW_ROWS 6

/* Whether `few` can do this one. */
int takes_few(const Product *p);
/* Returns 0, or 1 where memory is short. */
int few(const Product *p, int threads);

#endif
