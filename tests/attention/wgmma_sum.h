/* tests/attention: the sum of a Hopper wgmma with FP8 operands, bit for bit (docs/numerics.md, section 17; found and
 * checked by bench/sums_sm90). CPU only.
 *
 * One k step adds 32 products to an accumulator. Its 33 terms are aligned to the largest exponent among them, what lies
 * below 13 fraction bits of that exponent is cut off each term, towards zero; the sum is exact, and is then cut to 13
 * fraction bits of its own. The exponent of a product is the sum of its operands' exponents (a product of 1.75 and 1.75
 * counts as 2^0), that of a subnormal operand the least normal one. */
#pragma once

#include <stdint.h>

enum { WGMMA_STEP = 32 };

/* Operand formats. */
enum wgmma_format { WGMMA_E4M3, WGMMA_E5M2 };

/* d = c + sum a b over `terms` products of finite codes, a multiple of 32, k step by k step; c and all sums finite. */
float wgmma_sum(enum wgmma_format a_format, const uint8_t *a, enum wgmma_format b_format, const uint8_t *b, int terms,
                float c);
