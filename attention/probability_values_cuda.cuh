/* attention: single values on the way from a score to its code, on the GPU: powers of two, E4M3, E2M1. The arithmetic
 * of attention_cpu_probability.c, operation for operation, but where "fast" says otherwise. Included by
 * probability_cuda.cuh only. */
#pragma once

#include "core/cuda.cuh"

extern "C" {
#include "attention/attention_cuda.h"
#include "numerics/formats.h"
}

#include <cuda_fp16.h>

/* ---- powers of two ---------------------------------------------------------------------------------------- */

/* Adding this rounds a number below 2^22 to an integer, which the low bits of the sum then hold. Faster than
 * conversions, which have a sixteenth of the rate. */
#define P_MAGIC 0x1.8p23f
#define P_MAGIC_BITS 0x4b400000u

/* 2^e for an integer e; below -126 zero, above 127 Inf; NaN gives zero. */
__device__ __forceinline__ float p_pow2(float e)
{
    e = fminf(fmaxf(e, -127.0f), 128.0f);
    return __uint_as_float((__float_as_uint(__fadd_rn(e, P_MAGIC)) + 127u - P_MAGIC_BITS) << 23);
}

/* 2^f for |f| <= 1/2: the polynomial of the CPU reference. */
__device__ __forceinline__ float p_exp2_fraction(float f)
{
    float p = 0x1.44138ap-13f;
    p = __fmaf_rn(p, f, 0x1.5f0890p-10f);
    p = __fmaf_rn(p, f, 0x1.3b2a54p-7f);
    p = __fmaf_rn(p, f, 0x1.c6af6cp-5f);
    p = __fmaf_rn(p, f, 0x1.ebfbe0p-3f);
    p = __fmaf_rn(p, f, 0x1.62e430p-1f);
    return __fmaf_rn(p, f, 1.0f);
}

/* max that keeps NaN */
__device__ __forceinline__ float p_max_nan(float x, float y)
{
    float m;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(x), "f"(y));
    return m;
}

/* 2^(t + shift) of n values, for an integer shift and t + shift < 128: the bits of the CPU's exp2_row, but for t = -inf
 * (0, not NaN). P_MAGIC needs |t| < 2^22, so a large shift is subtracted first (exact, since t is then as large, or
 * outside the range that matters). y may be t. */
template <int N> __device__ __forceinline__ void p_exp2_row(const float *t, float shift, float *y)
{
    float x[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] = t[i];
    }
    if (fabsf(shift) >= 0x1p21f) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            x[i] = __fadd_rn(x[i], shift);
        }
        shift = 0.0f;
    }
    const float low = -127.0f - shift; /* beyond: 0 */
    const uint32_t bias = (__float_as_uint(__fadd_rn(shift, P_MAGIC)) + 127u - 2 * P_MAGIC_BITS) << 23;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float u = p_max_nan(x[i], low), r = __fadd_rn(u, P_MAGIC);
        const float p = p_exp2_fraction(__fsub_rn(u, __fsub_rn(r, P_MAGIC)));
        y[i] = __fmul_rn(p, __uint_as_float((__float_as_uint(r) << 23) + bias));
    }
}

/* The hardware's 2^x, within 2^-22: for values that are no codes. */
__device__ __forceinline__ float p_exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* E4M3 of two non-negative values, decoded. */
__device__ __forceinline__ void p_e4m3_pair(float *x)
{
    uint16_t codes;
    uint32_t halves;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(x[1]), "f"(x[0]));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
    const float2 pair = __half22float2(*reinterpret_cast<const __half2 *>(&halves));
    x[0] = pair.x;
    x[1] = pair.y;
}

/* ---- producers: E2M1(2^x) as values ----------------------------------------------------------------------- */

/* 1 or 0: one instruction, where a selection takes two. */
__device__ __forceinline__ float p_at_least(float x, float y)
{
    float f;
    asm("set.ge.f32.f32 %0, %1, %2;" : "=f"(f) : "f"(x), "f"(y));
    return f;
}

__device__ __forceinline__ float p_equal(float x, float y)
{
    float f;
    asm("set.eq.f32.f32 %0, %1, %2;" : "=f"(f) : "f"(x), "f"(y));
    return f;
}

__device__ __forceinline__ float p_above(float x, float y)
{
    float f;
    asm("set.gt.f32.f32 %0, %1, %2;" : "=f"(f) : "f"(x), "f"(y));
    return f;
}

/* Twice the value, by the FP32 numbers x from which on 2^x rounds to the next one (docs/numerics.md, section 5). */
__device__ __forceinline__ float p_exact_twice(float x)
{
    float q = p_at_least(x, -0x1.fffffep+0f) + p_at_least(x, -0x1.a8ff96p-2f);
    q += p_at_least(x, 0x1.49a786p-2f);
    q += p_at_least(x, 0x1.9d5dap-1f);
    q = __fmaf_rn(2.0f, p_at_least(x, 0x1.5269e2p+0f), q);
    q = __fmaf_rn(2.0f, p_at_least(x, 0x1.ceaedp+0f), q);
    return __fmaf_rn(4.0f, p_at_least(x, 0x1.2934f2p+1f), q);
}

__device__ __forceinline__ float p_affine_value(float x, float a, float b)
{
    const float u = __fmaf_rn(a, x, b);
    return e2m1_round(u > 0.0f ? u : 0.0f);
}

__device__ __forceinline__ float p_code_space_value(float x)
{
    float code = floorf(__fmaf_rn(2.0f, x, 2.37f));
    code = fminf(fmaxf(code, 0.0f), 7.0f);
    code = x >= -2.0f && code < 1.0f ? 1.0f : code;
    code = x >= -0.415037f && code < 2.0f ? 2.0f : code;
    /* Codes to values: 0 .5 1 1.5 2 3 4 6. */
    return 0.5f * code + (code > 4.0f ? 0.5f * (code - 4.0f) : 0.0f) + (code > 6.0f ? 1.0f : 0.0f);
}

/* Which keys of block s = index mod 4 the producer `accurate` rounds exactly: pairs {s, s + 8, 4, 12} of 16. */
__device__ __forceinline__ bool p_accurate_key(int key, int64_t block)
{
    const int pair = key / 2, s = (int)(block & 3);
    return pair == s || pair == s + 8 || pair == 4 || pair == 12;
}

/* Twice E2M1(p / s) for p >= 0: p is compared with boundaries times s, which are exact. */
__device__ __forceinline__ float p_quotient_twice(float p, const float *boundary)
{
    float q = p_above(p, boundary[0]) + p_at_least(p, boundary[1]);
    q += p_above(p, boundary[2]);
    q += p_at_least(p, boundary[3]);
    q = __fmaf_rn(2.0f, p_above(p, boundary[4]), q);
    q = __fmaf_rn(2.0f, p_at_least(p, boundary[5]), q);
    return __fmaf_rn(4.0f, p_above(p, boundary[6]), q);
}

/* x / 6, correctly rounded for normal x (tried on every mantissa). */
__device__ __forceinline__ float p_sixth(float x)
{
    const float q = __fmul_rn(x, 1.0f / 6.0f);
    return __fmaf_rn(__fmaf_rn(-6.0f, q, x), 1.0f / 6.0f, q);
}
