/* model: the represented values of a projection's operands. Outputs are exact in BF16; an input with a NaN or Inf gives
 * NaN everywhere. */
#pragma once

#include "core/tensor.h"

#include <stdbool.h>

enum { LINEAR_BLOCK = 16 };

/* y = E4M3 or E5M2 (m x) / m with the largest power of two m that keeps amax in range. */
void linear_round_e4m3(const bf16 *x, int64_t n, bf16 *y);
void linear_round_e5m2(const bf16 *x, int64_t n, bf16 *y);

/* NVFP4 in tiles of 16 x 16; smaller at the edges. */
void linear_round_tiles(const bf16 *x, int64_t rows, int64_t cols, bf16 *y);

/* How FP4 rounds: to nearest, or stochastically, element e with rng_bits(seed, stream, update, e). */
struct linear_rounding {
    bool stochastic;
    uint64_t seed, stream;
    uint32_t update;
};

/* NVFP4 in blocks of 16 along each row; a row's last block may be short. */
void linear_round_rows(const bf16 *x, int64_t rows, int64_t cols, const struct linear_rounding *rounding, bf16 *y);

/* The Hadamard transform of 16 tokens (numerics/hadamard.h) of x (rows, cols), then NVFP4 in blocks of 16 along tokens.
 * The transform is orthogonal: it cancels in a product over tokens of two operands that both had it. A short last group
 * is not transformed and makes a short block. transformed (rows, cols) fp32 is scratch. */
void linear_round_hadamard(const bf16 *x, int64_t rows, int64_t cols, const struct linear_rounding *rounding,
                           float *transformed, bf16 *y);
