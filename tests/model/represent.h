/* tests/model: the formats of projections again, in FP64 and from their definitions (docs/numerics.md sections 1 to 3
 * and 14), with none of numerics/ or model/: searches for the nearest value instead of bit tricks. */
#pragma once

#include "core/tensor.h"

/* Random bits for stochastic rounding of element e, or to nearest if NULL. */
struct randomness {
    uint64_t seed, stream;
    uint32_t update;
};

/* Values in FP8 with mantissa_bits 3 (E4M3) or 2 (E5M2) under one power-of-two scale. */
void represent_fp8(const double *x, int64_t n, int mantissa_bits, double *y);

/* NVFP4 blocks of height x width over (rows, cols), one G for all. */
void represent_nvfp4(const double *x, int64_t rows, int64_t cols, int64_t height, int64_t width,
                     const struct randomness *random, double *y);

/* H diag(signs) / 4 on each whole group of 16 rows, by the matrix itself. */
void represent_hadamard(const double *x, int64_t rows, int64_t cols, double *y);
