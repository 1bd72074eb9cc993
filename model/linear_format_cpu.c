/* model: operands of projections in FP8 and NVFP4; numerics knows the formats, this file walks the matrices. */
#include "model/linear_format.h"

#include "core/rng.h"
#include "numerics/blocks.h"
#include "numerics/convert.h"
#include "numerics/hadamard.h"

/* Elements, or columns of a strip of rows, that one thread takes at a time. */
enum { PIECE = 4096, COLUMNS = 64 };

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Magnitudes order like their bits, NaN above Inf above all: the maximum propagates them, in any order. */
static float amax_bf16(const bf16 *x, int64_t n)
{
    uint32_t max = 0;
#pragma omp parallel for simd reduction(max : max)
    for (int64_t i = 0; i < n; i++) {
        uint32_t magnitude = x[i] & 0x7fffu;
        max = magnitude > max ? magnitude : max;
    }
    return bf16_to_float((bf16)max);
}

static float amax_f32(const float *x, int64_t n)
{
    uint32_t max = 0;
#pragma omp parallel for simd reduction(max : max)
    for (int64_t i = 0; i < n; i++) {
        uint32_t magnitude = float_bits(x[i]) & ~FLOAT_SIGN;
        max = magnitude > max ? magnitude : max;
    }
    return float_from_bits(max);
}

/* True, and y is NaN, if amax is NaN or Inf: saturating formats would hide it. */
static bool is_broken(float amax, int64_t n, bf16 *y)
{
    bool broken = float_bits(amax) >= FLOAT_INF;
    for (int64_t i = 0; broken && i < n; i++) {
        y[i] = 0x7fff;
    }
    return broken;
}

static void round_fp8(const bf16 *x, int64_t n, float limit, void (*round)(const float *, float, float *, int64_t),
                      bf16 *y)
{
    float amax = amax_bf16(x, n);
    if (is_broken(amax, n, y)) {
        return;
    }
    float m = pow2_scale(amax, limit);
#pragma omp parallel for
    for (int64_t i = 0; i < n; i += PIECE) {
        float piece[PIECE];
        int64_t count = least(n - i, PIECE);
        bf16_to_float_array(x + i, piece, count);
        round(piece, m, piece, count);
        bf16_from_float_array(piece, y + i, count);
    }
}

void linear_round_e4m3(const bf16 *x, int64_t n, bf16 *y)
{
    round_fp8(x, n, E4M3_MAX, e4m3_round_array, y);
}

void linear_round_e5m2(const bf16 *x, int64_t n, bf16 *y)
{
    round_fp8(x, n, E5M2_MAX, e5m2_round_array, y);
}

/* Copies between a matrix and a tile whose rows lie COLUMNS apart. */
static void tile_load(const bf16 *x, int64_t rows, int64_t cols, int64_t stride, float *tile)
{
    for (int64_t r = 0; r < rows; r++) {
        bf16_to_float_array(x + r * stride, tile + r * COLUMNS, cols);
    }
}

static void tile_store(const float *tile, int64_t rows, int64_t cols, int64_t stride, bf16 *y)
{
    for (int64_t r = 0; r < rows; r++) {
        bf16_from_float_array(tile + r * COLUMNS, y + r * stride, cols);
    }
}

void linear_round_tiles(const bf16 *x, int64_t rows, int64_t cols, bf16 *y)
{
    float amax = amax_bf16(x, rows * cols);
    if (is_broken(amax, rows * cols, y)) {
        return;
    }
    float g = nvfp4_global_scale(amax);
#pragma omp parallel for collapse(2)
    for (int64_t r = 0; r < rows; r += LINEAR_BLOCK) {
        for (int64_t c = 0; c < cols; c += COLUMNS) {
            float tile[LINEAR_BLOCK * COLUMNS];
            int64_t n_rows = least(rows - r, LINEAR_BLOCK), n_cols = least(cols - c, COLUMNS);
            tile_load(x + r * cols + c, n_rows, n_cols, cols, tile);
            for (int64_t k = 0; k < n_cols; k += LINEAR_BLOCK) {
                nvfp4_round_tile16(tile + k, (int)n_rows, (int)least(n_cols - k, LINEAR_BLOCK), COLUMNS, g, tile + k);
            }
            tile_store(tile, n_rows, n_cols, cols, y + r * cols + c);
        }
    }
}

/* Random bits of n neighbours from `element` on: four of them share one Philox block. */
static void random_bits(const struct linear_rounding *rounding, uint64_t element, int64_t n, uint32_t *bits)
{
    ASSERT(element + (uint64_t)n <= RNG_ELEMENTS_MAX);
    struct rng_words words = {{0}};
    for (int64_t i = 0; i < n; i++) {
        uint64_t at = element + (uint64_t)i;
        if (i == 0 || at % 4 == 0) {
            words = rng_words(rounding->seed, rounding->stream, (uint64_t)rounding->update << 32 | at / 4);
        }
        bits[i] = words.w[at % 4];
    }
}

void linear_round_rows(const bf16 *x, int64_t rows, int64_t cols, const struct linear_rounding *rounding, bf16 *y)
{
    float amax = amax_bf16(x, rows * cols);
    if (is_broken(amax, rows * cols, y)) {
        return;
    }
    float g = nvfp4_global_scale(amax);
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < cols; c += COLUMNS) {
            float piece[COLUMNS];
            uint32_t bits[COLUMNS];
            int64_t n = least(cols - c, COLUMNS), at = r * cols + c;
            bf16_to_float_array(x + at, piece, n);
            if (rounding->stochastic) {
                random_bits(rounding, (uint64_t)at, n, bits);
            }
            for (int64_t k = 0; k < n; k += LINEAR_BLOCK) {
                int count = (int)least(n - k, LINEAR_BLOCK);
                if (rounding->stochastic) {
                    nvfp4_round_sr(piece + k, count, 1, g, bits + k, piece + k);
                } else {
                    nvfp4_round(piece + k, count, 1, g, NVFP4_AMAX, piece + k);
                }
            }
            bf16_from_float_array(piece, y + at, n);
        }
    }
}

static void transform(const bf16 *x, int64_t rows, int64_t cols, float *transformed)
{
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r += HADAMARD_TOKENS) {
        int64_t n = least(rows - r, HADAMARD_TOKENS);
        float *group = transformed + r * cols;
        bf16_to_float_array(x + r * cols, group, n * cols);
        hadamard16_rows(group, n, cols, cols, group);
    }
}

/* Blocks of n tokens by up to COLUMNS columns, in place; element: the number of the first. The blocks are gathered, for
 * a column's elements lie `stride` apart. */
static void round_columns(float *x, int n, int64_t cols, int64_t stride, float g,
                          const struct linear_rounding *rounding, uint64_t element)
{
    uint32_t bits[LINEAR_BLOCK][COLUMNS], block_bits[LINEAR_BLOCK];
    for (int r = 0; rounding->stochastic && r < n; r++) {
        random_bits(rounding, element + (uint64_t)(r * stride), cols, bits[r]);
    }
    for (int64_t c = 0; c < cols; c++) {
        float block[LINEAR_BLOCK];
        for (int r = 0; r < n; r++) {
            block[r] = x[r * stride + c];
            block_bits[r] = rounding->stochastic ? bits[r][c] : 0;
        }
        if (rounding->stochastic) {
            nvfp4_round_sr(block, n, 1, g, block_bits, block);
        } else {
            nvfp4_round(block, n, 1, g, NVFP4_AMAX, block);
        }
        for (int r = 0; r < n; r++) {
            x[r * stride + c] = block[r];
        }
    }
}

void linear_round_hadamard(const bf16 *x, int64_t rows, int64_t cols, const struct linear_rounding *rounding,
                           float *transformed, bf16 *y)
{
    transform(x, rows, cols, transformed);
    float amax = amax_f32(transformed, rows * cols);
    if (is_broken(amax, rows * cols, y)) {
        return;
    }
    float g = nvfp4_global_scale(amax);
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r += LINEAR_BLOCK) {
        int n = (int)least(rows - r, LINEAR_BLOCK);
        float *group = transformed + r * cols;
        for (int64_t c = 0; c < cols; c += COLUMNS) {
            round_columns(group + c, n, least(cols - c, COLUMNS), cols, g, rounding, (uint64_t)(r * cols + c));
        }
        bf16_from_float_array(group, y + r * cols, n * cols);
    }
}
