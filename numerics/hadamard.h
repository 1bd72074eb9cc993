/* numerics: the signed Hadamard transform of 16 tokens (docs/numerics.md, section 14). It spreads outliers before a
 * quantiser. Both operands of dW = dY^T X get the same orthogonal transform along tokens, which leaves the product. */
#pragma once

#include <stdint.h>

enum { HADAMARD_TOKENS = 16 };

/* The one fixed sign vector: bit t set flips token t of each group. */
#define HADAMARD_SIGNS 0x5a3cu

/* y = H diag(signs) x / 4 in each group of 16 consecutive rows (tokens) of x (rows, width); H is Sylvester's matrix of
 * +-1, so H H^T = 16. A last group of fewer than 16 rows is copied. Rows lie `stride` apart in x and y; y may be x. */
void hadamard16_rows(const float *x, int64_t rows, int64_t width, int64_t stride, float *y);
