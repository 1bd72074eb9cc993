/* model: the represented values of a projection's operands. Outputs are exact in BF16; an input with a NaN or Inf gives
 * NaN everywhere. */
#pragma once

#include "core/tensor.h"

#include <stdbool.h>

struct cuda;

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

/* ---- CUDA: the same values on device memory. Pointers are multiples of 16 bytes, `cols` of 16. ----
 * amax: one number in device memory: at least max |x|, NaN or Inf if x has one; from linear_amax_cuda, or from the
 * kernel that made x. */

/* *amax = max |x| of n elements (a multiple of 8). */
void linear_amax_cuda(const bf16 *x, int64_t n, float *amax, const struct cuda *on);

/* The codes of x (rows, cols) in E4M3 or E5M2 as it lies, transposed, or both in one pass over x. The value of a code
 * is code * *scale; *scale is NaN if amax is not finite. */
struct linear_codes {
    const bf16 *x;
    int64_t rows, cols;
    const float *amax;
    float *scale;
    uint8_t *codes;  /* (rows, cols), or NULL */
    uint8_t *turned; /* (cols, linear_padded(rows)), or NULL: zeros behind the last row */
};
void linear_encode_e4m3_cuda(const struct linear_codes *a, const struct cuda *on);
void linear_encode_e5m2_cuda(const struct linear_codes *a, const struct cuda *on);

/* The contraction of an FP8 product must be a multiple of this. */
static inline int64_t linear_padded(int64_t rows)
{
    return (rows + LINEAR_BLOCK - 1) / LINEAR_BLOCK * LINEAR_BLOCK;
}

/* NVFP4, values in BF16. random: stochastic rounding with the stream that rng_words(seed, stream, on->step->sample)
 * names, at on->step->update; NULL rounds to nearest. */
struct linear_random {
    uint64_t seed, stream;
};
struct linear_values {
    const bf16 *x;
    int64_t rows, cols;
    const float *amax; /* of x; of the transformed x for the last */
    const struct linear_random *random;
    bf16 *y;
};
void linear_round_tiles_cuda(const struct linear_values *a,
                             const struct cuda *on); /* rows: a multiple of 16; nearest */
void linear_round_rows_cuda(const struct linear_values *a, const struct cuda *on);
void linear_round_hadamard_cuda(const struct linear_values *a, const struct cuda *on);
void linear_amax_hadamard_cuda(const bf16 *x, int64_t rows, int64_t cols, float *amax, const struct cuda *on);
