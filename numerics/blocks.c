/* NVFP4 and what all block quantisers share. Every scale is found from magnitudes in units where the second-level scale
 * is gone (|x| G), so that all comparisons are between short exact numbers. "Exact" below is meant for BF16 inputs,
 * which have 8-bit mantissas. */
#include "numerics/blocks.h"

#include "numerics/block_copy.h"
#include "numerics/formats.h"

#include <math.h>

enum { BLOCK = 16, LANES = 8 };

float amax_of(const float *x, int64_t n, int64_t stride)
{
    /* Magnitudes order like their bits, NaN above Inf: an integer maximum vectorises and propagates NaN. */
    uint32_t amax = 0;
    if (stride == 1) {
        for (int64_t i = 0; i < n; i++) {
            uint32_t magnitude = float_bits(x[i]) & ~FLOAT_SIGN;
            amax = magnitude > amax ? magnitude : amax;
        }
    } else {
        for (int64_t i = 0; i < n; i++) {
            uint32_t magnitude = float_bits(x[i * stride]) & ~FLOAT_SIGN;
            amax = magnitude > amax ? magnitude : amax;
        }
    }
    return float_from_bits(amax);
}

float amax_of_bf16(const bf16 *x, int64_t n, int64_t stride)
{
    uint16_t amax = 0;
    if (stride == 1) {
        for (int64_t i = 0; i < n; i++) {
            uint16_t magnitude = x[i] & 0x7fffu;
            amax = magnitude > amax ? magnitude : amax;
        }
    } else {
        for (int64_t i = 0; i < n; i++) {
            uint16_t magnitude = x[i * stride] & 0x7fffu;
            amax = magnitude > amax ? magnitude : amax;
        }
    }
    return bf16_to_float(amax);
}

float pow2_scale(float amax, float limit)
{
    if (!(amax > 0.0f) || isinf(amax)) {
        return 1.0f;
    }
    int amax_exponent, limit_exponent;
    float amax_fraction = frexpf(amax, &amax_exponent);
    float limit_fraction = frexpf(limit, &limit_exponent);
    int k = limit_exponent - amax_exponent - (amax_fraction > limit_fraction ? 1 : 0);
    return ldexpf(1.0f, k < POW2_SCALE_MAX ? k : POW2_SCALE_MAX);
}

float nvfp4_global_scale(float amax)
{
    return pow2_scale(amax, E2M1_MAX * UE4M3_MAX);
}

/* ---- squared error ---- */

/* By how much coding with each of 8 scales lessens sum x^2: sum x^2 - sum (x - q s)^2 = s sum q (2 x - q s), x and q
 * without sign. Elements with code 0 drop out, the others lie within [s/4, 24 s]: each term is a multiple of 2^-9 and
 * a sum of 32 below 2^15 in units of the binade of s, so FP32 sums are exact, in any order. A quotient made
 * with the rounded reciprocal can only err on a tie between two codes, where both give the same error. */
static inline void squared_gains(const float *x, int n, const float *scale, double *gain)
{
    float inverse[LANES], sum[LANES];
    for (int j = 0; j < LANES; j++) {
        inverse[j] = 1.0f / scale[j];
        sum[j] = 0.0f;
    }
    for (int i = 0; i < n; i++) {
        for (int j = 0; j < LANES; j++) {
            float q = float_from_bits(minifloat_round(minifloat_clamp(x[i] * inverse[j], E2M1_MAX), 1, 0));
            sum[j] += q * (2.0f * x[i] - q * scale[j]);
        }
    }
    for (int j = 0; j < LANES; j++) {
        gain[j] = (double)sum[j] * (double)scale[j];
    }
}

/* ---- NVFP4 ---- */

/* Correctly rounded although the quotient is rounded twice: a tie of UE4M3 times 6 is an FP32 number, and the quotient
 * of any other FP32 number by 6 is further from the tie than half an ulp. The same holds for x / s and the ties of
 * E2M1. */
static inline uint8_t nvfp4_amax_code(float amax)
{
    return ue4m3_from_float(amax / E2M1_MAX);
}

static inline float squared_error(const float *x, int n, float scale)
{
    float inverse = 1.0f / scale, sum[LANES] = {0};
    for (int i = 0; i < n; i += LANES) {
        for (int j = 0; j < LANES; j++) {
            float q = float_from_bits(minifloat_round(minifloat_clamp(x[i + j] * inverse, E2M1_MAX), 1, 0));
            float d = x[i + j] - q * scale;
            sum[j] += d * d;
        }
    }
    return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

/* The UE4M3 code with the least squared error among those in [.25, 1.25] amax / 6; the amax rule's if there is none (at
 * the ends of the range). Codes so small that clipping the largest element alone costs more than the whole error of the
 * amax rule's code cannot win: on normal inputs about six of twenty remain. */
static uint8_t nvfp4_mse_code(const float *x, float amax)
{
    int first = ue4m3_from_float(amax / 24.0f), last = ue4m3_from_float(5.0f * amax / 24.0f);
    first += 24.0 * (double)ue4m3_to_float((uint8_t)first) < (double)amax ? 1 : 0;
    last -= 24.0 * (double)ue4m3_to_float((uint8_t)last) > 5.0 * (double)amax ? 1 : 0;
    uint8_t start = nvfp4_amax_code(amax);
    if (first > last) {
        return start;
    }
    start = start < last ? start : (uint8_t)last;
    float bound = 1.0001f * squared_error(x, BLOCK, ue4m3_to_float(start));
    while (first < start) {
        float clipped = amax - E2M1_MAX * ue4m3_to_float((uint8_t)first);
        if (!(clipped > 0.0f && clipped * clipped > bound)) {
            break;
        }
        first++;
    }
    int best = first;
    double best_gain = -1.0;
    for (int code = first; code <= last; code += LANES) {
        float scale[LANES];
        double gain[LANES];
        for (int j = 0; j < LANES; j++) {
            scale[j] = ue4m3_to_float((uint8_t)(code + j <= last ? code + j : last));
        }
        squared_gains(x, BLOCK, scale, gain);
        for (int j = 0; j < LANES && code + j <= last; j++) {
            if (gain[j] > best_gain) {
                best_gain = gain[j];
                best = code + j;
            }
        }
    }
    return (uint8_t)best;
}

static inline uint8_t nvfp4_scale_code(const float *block, float g, enum nvfp4_rule rule)
{
    float amax = amax_of(block, BLOCK, 1) * g;
    if (rule == NVFP4_AMAX || amax == 0.0f) {
        return nvfp4_amax_code(amax);
    }
    float magnitude[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        magnitude[i] = float_from_bits(float_bits(block[i] * g) & ~FLOAT_SIGN);
    }
    return nvfp4_mse_code(magnitude, amax);
}

/* Encodes and decodes n elements under a scale code; y may be x. */
static inline void nvfp4_apply(const float *x, int n, float g, uint8_t code, float *y)
{
    float scale = ue4m3_to_float(code), step = scale / g;
    if (code == 0) {
        memset(y, 0, (size_t)n * sizeof *y);
        return;
    }
    for (int i = 0; i < n; i++) {
        y[i] = e2m1_round(x[i] * g / scale) * step;
    }
}

void nvfp4_encode(const float *x, int n, int64_t stride, float g, enum nvfp4_rule rule, uint8_t *scale, uint8_t *codes)
{
    float block[BLOCK];
    block_load(x, n, stride, BLOCK, block);
    *scale = nvfp4_scale_code(block, g, rule);
    float divisor = ue4m3_to_float(*scale);
    for (int i = 0; i < n; i++) {
        codes[i * stride] = *scale ? e2m1_from_float(block[i] * g / divisor) : 0;
    }
}

void nvfp4_round(const float *x, int n, int64_t stride, float g, enum nvfp4_rule rule, float *y)
{
    float block[BLOCK];
    block_load(x, n, stride, BLOCK, block);
    nvfp4_apply(block, BLOCK, g, nvfp4_scale_code(block, g, rule), block);
    block_store(block, n, stride, BLOCK, y);
}

void nvfp4_round_sr(const float *x, int n, int64_t stride, float g, const uint32_t *bits, float *y)
{
    float block[BLOCK];
    block_load(x, n, stride, BLOCK, block);
    uint8_t code = nvfp4_scale_code(block, g, NVFP4_AMAX);
    float scale = ue4m3_to_float(code), step = scale / g;
    for (int i = 0; i < n; i++) {
        y[i * stride] = code ? e2m1_round_sr(block[i] * g / scale, bits[i]) * step : 0.0f;
    }
}

void nvfp4_round_tile16(const float *x, int rows, int cols, int64_t stride, float g, float *y)
{
    float amax = 0.0f;
    for (int r = 0; r < rows; r++) {
        float row_amax = amax_of(x + r * stride, cols, 1);
        /* Written so that a NaN wins. */
        amax = row_amax <= amax ? amax : row_amax;
    }
    uint8_t code = nvfp4_amax_code(amax * g);
    for (int r = 0; r < rows; r++) {
        nvfp4_apply(x + r * stride, cols, g, code, y + r * stride);
    }
}

void nvfp4_round_folded(const float *x, float g, float *y)
{
    static const float multipliers[] = {.25f, .3125f, .375f, .4375f, .5f, .625f, .75f, .875f, 1.0f, 1.125f, 1.25f};
    enum { COUNT = sizeof multipliers / sizeof *multipliers, PADDED = (COUNT + LANES - 1) / LANES * LANES };
    for (int b = 0; b < 64; b += BLOCK) {
        float magnitude[2 * BLOCK];
        for (int i = 0; i < BLOCK; i++) {
            magnitude[i] = fabsf(x[b + i] * g);
            magnitude[BLOCK + i] = fabsf(x[64 + b + i] * g);
        }
        float amax = amax_of(magnitude, 2 * BLOCK, 1);
        uint8_t codes[PADDED];
        float scales[PADDED];
        double gains[PADDED];
        for (int j = 0; j < PADDED; j++) {
            codes[j] = ue4m3_from_float(multipliers[j < COUNT ? j : COUNT - 1] * amax / E2M1_MAX);
            scales[j] = codes[j] ? ue4m3_to_float(codes[j]) : 1.0f;
        }
        for (int j = 0; j < PADDED; j += LANES) {
            squared_gains(magnitude, 2 * BLOCK, scales + j, gains + j);
        }
        int best = 0;
        for (int j = 0; j < COUNT; j++) {
            /* A zero scale gains nothing. */
            gains[j] = codes[j] ? gains[j] : 0.0;
            best = gains[j] > gains[best] ? j : best;
        }
        nvfp4_apply(x + b, BLOCK, g, codes[best], y + b);
        nvfp4_apply(x + 64 + b, BLOCK, g, codes[best], y + 64 + b);
    }
}
