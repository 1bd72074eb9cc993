/* attention: rounding of operands on the GPU, in FP32, bit for bit as numerics/blocks.c and attention_cpu_operands.c do
 * (docs/numerics.md, sections 3 and 4). For the kernels that publish operands. */
#pragma once

#include "core/cuda.cuh"

extern "C" {
#include "attention/attention_cuda.h"
#include "numerics/formats.h"
}

enum { QK_BLOCK = 16 };

/* The published multiplier of V; smaller only where 4 |v| would leave E4M3. */
#define VALUE_LIFT 4.0f
#define FLOAT_INFINITY __uint_as_float(FLOAT_INF)

/* The largest 2^k with 2^k amax <= limit, k <= 126; 1 if amax is 0, Inf or NaN (numerics/blocks.h). */
__device__ __forceinline__ float pow2_scale_of(float amax, float limit)
{
    if (!(amax > 0.0f) || !(amax < FLOAT_INFINITY)) {
        return 1.0f;
    }
    int amax_exponent, limit_exponent;
    const float amax_fraction = frexpf(amax, &amax_exponent), limit_fraction = frexpf(limit, &limit_exponent);
    const int k = limit_exponent - amax_exponent - (amax_fraction > limit_fraction ? 1 : 0);
    return ldexpf(1.0f, k < 126 ? k : 126);
}

/* ---- NVFP4 rows (numerics/blocks.c) ----------------------------------------------------------------------- */

/* By how much coding n magnitudes with `scale` lessens sum x^2. The FP32 sum is exact, see numerics/blocks.c. */
template <int N> __device__ __forceinline__ double squared_gain(const float *x, float scale)
{
    const float inverse = __fdiv_rn(1.0f, scale);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float q = e2m1_round(__fmul_rn(x[i], inverse));
        sum += q * (2.0f * x[i] - q * scale);
    }
    return (double)sum * (double)scale;
}

__device__ __forceinline__ float squared_error(const float *x, float scale)
{
    const float inverse = __fdiv_rn(1.0f, scale);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < QK_BLOCK; i++) {
        const float d = x[i] - e2m1_round(__fmul_rn(x[i], inverse)) * scale;
        sum += d * d;
    }
    return sum;
}

__device__ __forceinline__ uint8_t nvfp4_amax_code(float amax)
{
    return ue4m3_from_float(__fdiv_rn(amax, E2M1_MAX));
}

/* The code with the least squared error among those in [.25, 1.25] amax / 6, the lowest on a tie. Small codes that clip
 * too much to win are passed over, by a bound with room for its own rounding. gain_of(scale), error_of(scale): of the
 * block. */
template <class GAIN, class ERROR>
__device__ __forceinline__ uint8_t nvfp4_mse_code(float amax, GAIN gain_of, ERROR error_of)
{
    int first = ue4m3_from_float(__fdiv_rn(amax, 24.0f)), last = ue4m3_from_float(__fdiv_rn(5.0f * amax, 24.0f));
    first += 24.0 * (double)ue4m3_to_float((uint8_t)first) < (double)amax ? 1 : 0;
    last -= 24.0 * (double)ue4m3_to_float((uint8_t)last) > 5.0 * (double)amax ? 1 : 0;
    int start = nvfp4_amax_code(amax);
    if (first > last) {
        return (uint8_t)start;
    }
    start = min(start, last);
    const float bound = 1.0001f * error_of(ue4m3_to_float((uint8_t)start));
    while (first < start) {
        const float clipped = amax - E2M1_MAX * ue4m3_to_float((uint8_t)first);
        if (!(clipped > 0.0f && clipped * clipped > bound)) {
            break;
        }
        first++;
    }
    int best = first;
    double best_gain = -1.0;
    for (int code = first; code <= last; code++) {
        const double gain = gain_of(ue4m3_to_float((uint8_t)code));
        best = gain > best_gain ? code : best;
        best_gain = gain > best_gain ? gain : best_gain;
    }
    return (uint8_t)best;
}

/* The code of two blocks that share one: the one that gains most, the first on a tie. gain_of(scale): of both blocks.
 * pair_amax: their largest magnitude. */
template <class GAIN> __device__ __forceinline__ uint8_t nvfp4_folded_code(float pair_amax, GAIN gain_of)
{
    uint8_t best = 0;
    double best_gain = 0.0;
    for (int j = 0; j < 11; j++) {
        /* .25 .3125 .375 .4375 .5 .625 .75 .875 1 1.125 1.25 */
        const float multiplier = j < 4 ? 0.25f + 0.0625f * (float)j : 0.5f + 0.125f * (float)(j - 4);
        const uint8_t code = ue4m3_from_float(__fdiv_rn(__fmul_rn(multiplier, pair_amax), E2M1_MAX));
        const double found = gain_of(code == 0 ? 1.0f : ue4m3_to_float(code)); /* all lanes: it may shuffle */
        const double gain = code == 0 ? 0.0 : found;                           /* a zero scale gains nothing */
        best = j == 0 || gain > best_gain ? code : best;
        best_gain = j == 0 || gain > best_gain ? gain : best_gain;
    }
    return best;
}

/* Largest magnitude times g, and the magnitudes. */
template <int N> __device__ __forceinline__ float magnitudes(const float *x, float g, float *m)
{
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++) {
        m[i] = fabsf(__fmul_rn(x[i], g));
        amax = fmaxf(amax, m[i]);
    }
    return amax;
}

/* n values under a scale code, decoded. */
template <int N> __device__ __forceinline__ void nvfp4_apply(float *x, float g, uint8_t code)
{
    const float scale = ue4m3_to_float(code), step = __fdiv_rn(scale, g);
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] = code == 0 ? 0.0f : __fmul_rn(e2m1_round(__fdiv_rn(__fmul_rn(x[i], g), scale)), step);
    }
}

/* ---- V ---- */

__device__ __forceinline__ float value_lift(float amax)
{
    return amax > E4M3_MAX / VALUE_LIFT && amax < FLOAT_INFINITY ? pow2_scale_of(amax, E4M3_MAX) : VALUE_LIFT;
}

/* E4M3(m x) / m, times the unit. */
__device__ __forceinline__ float value_e4m3(float x, float m, float inverse, float unit)
{
    return __fmul_rn(bf16_value(bf16_code(__fmul_rn(e4m3_round(__fmul_rn(x, m)), inverse))), unit);
}

/* n keys of one feature under one E8M0 scale. */
template <int N> __device__ __forceinline__ void mxfp4_column(float *x, float amax, bool nearest)
{
    int code = (int)(__float_as_uint(amax) >> 23) - 2;
    code = nearest ? e8m0_from_float(amax, E8M0_NEAREST) : max(code, 0);
    const float inverse = e8m0_to_float((uint8_t)(254 - code)), scale = e8m0_to_float((uint8_t)code);
    const float fraction = nearest ? 1.0f / 6.0f : 1.0f, grid = nearest ? E2M1_MAX : 1.0f;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float q = e2m1_round(__fmul_rn(__fmul_rn(x[i], inverse), grid));
        x[i] = amax == 0.0f ? 0.0f : __fmul_rn(scale, __fmul_rn(q, fraction));
    }
}
