/* attention: from scores to represented probabilities on the GPU (docs/numerics.md, section 5 step 3): a block of 32
 * keys of one row, spread over a few lanes of a warp. The arithmetic of attention_cpu_probability.c, operation for
 * operation: equal scores give equal codes. Included by the kernels of both passes and by tests. */
#pragma once

#include "core/cuda.cuh"

extern "C" {
#include "attention/attention_cuda.h"
#include "numerics/formats.h"
}

#include <cuda_fp16.h>

/* ---- how a block of 32 keys of one row lies in a warp; lane = 4 g + c ------------------------------------- */

/* Scores with queries as rows of the accumulator: four neighbouring 16 x 8 tiles; the row's 32 keys lie in the 4 lanes
 * of a quad, value i is key 8 (i / 2) + 2 c + i % 2. Keys 0..15 are the first half of the values. */
struct keys_in_quad {
    enum { N = 8 };
    static __device__ __forceinline__ int key(int i)
    {
        return 8 * (i / 2) + 2 * (int)(threadIdx.x & 3) + i % 2;
    }
    static __device__ __forceinline__ float max(float x)
    {
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
        return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
    }
    static __device__ __forceinline__ float sum(float x)
    {
        x += __shfl_xor_sync(0xffffffffu, x, 1);
        return x + __shfl_xor_sync(0xffffffffu, x, 2);
    }
};

/* Scores transposed, with keys as rows: two 16 x 8 tiles one below the other; the column's 32 keys lie in the 8 lanes
 * of equal c, value i is key 8 i + g. */
struct keys_in_column {
    enum { N = 4 };
    static __device__ __forceinline__ int key(int i)
    {
        return 8 * i + (int)((threadIdx.x & 31) >> 2);
    }
    static __device__ __forceinline__ float max(float x)
    {
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 4));
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 8));
        return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 16));
    }
    static __device__ __forceinline__ float sum(float x)
    {
        x += __shfl_xor_sync(0xffffffffu, x, 4);
        x += __shfl_xor_sync(0xffffffffu, x, 8);
        return x + __shfl_xor_sync(0xffffffffu, x, 16);
    }
};

/* ---- what a recipe asks of P; by value into kernels, the same for all threads ----------------------------- */

struct p_rule {
    enum pv_format pv;
    enum p_map p_map;
    enum p_anchor anchor;
    bool amplitude; /* of MXFP4 */
    bool rebuilt;   /* backward: P reaches 2, lifts are one binade lower */
    float affine_a, affine_b;
    int64_t sink_keys;
    float unit; /* represented P come times this (attention_unit) */
};

static inline struct p_rule p_rule_of(const struct attention_recipe *recipe, bool rebuilt)
{
    struct p_rule rule;
    rule.pv = recipe->pv;
    rule.p_map = recipe->p_map;
    rule.anchor = recipe->anchor;
    rule.amplitude = recipe->mx_rule == MX_NEAREST;
    rule.rebuilt = rebuilt;
    rule.affine_a = recipe->affine_a;
    rule.affine_b = recipe->affine_b;
    rule.sink_keys = recipe->sink_keys_fp8;
    rule.unit = attention_unit(recipe);
    return rule;
}

/* ---- powers of two ---------------------------------------------------------------------------------------- */

/* 2^e for an integer e; below -126 zero, above 127 Inf; NaN gives zero. */
__device__ __forceinline__ float p_pow2(float e)
{
    e = fminf(fmaxf(e, -127.0f), 128.0f);
    return __uint_as_float((uint32_t)((int)e + 127) << 23);
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

/* 2^(t + shift) for an integer shift. */
__device__ __forceinline__ float p_exp2(float t, float shift)
{
    const float k = rintf(t);
    return __fmul_rn(p_exp2_fraction(__fsub_rn(t, k)), p_pow2(__fadd_rn(k, shift)));
}

/* max that keeps NaN */
__device__ __forceinline__ float p_max_nan(float x, float y)
{
    float m;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(x), "f"(y));
    return m;
}

/* p_exp2 of n values with one shift, the same bits, for t + shift < 128 (but for t = -inf: 0, not NaN). Adding 1.5 2^23
 * rounds to an integer and leaves it in the low bits, which is faster than conversions; that needs |t| < 2^22, so a far
 * shift is taken off first (exactly: what it meets is as far, or lies outside the range that matters). y may be t. */
template <int N> __device__ __forceinline__ void p_exp2_row(const float *t, float shift, float *y)
{
    constexpr float MAGIC = 0x1.8p23f;
    constexpr int MAGIC_BITS = 0x4b400000;
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
    const int bias = ((int)shift + 127 - MAGIC_BITS) << 23;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float u = p_max_nan(x[i], low), r = __fadd_rn(u, MAGIC);
        const float p = p_exp2_fraction(__fsub_rn(u, __fsub_rn(r, MAGIC)));
        y[i] = __fmul_rn(p, __uint_as_float(((uint32_t)__float_as_int(r) << 23) + (uint32_t)bias));
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

/* ceil(max) for anchor = row; 0; or the paper's lifted reference. */
__device__ __forceinline__ float p_anchor_of(const p_rule &rule, float max)
{
    if (rule.anchor == ANCHOR_ZERO) {
        return 0.0f;
    }
    const float up = ceilf(max);
    return rule.anchor == ANCHOR_ROW ? up : __fadd_rn(up, 110.0f) - (rule.amplitude ? 0.0f : 2.0f);
}

/* ---- maxima ----------------------------------------------------------------------------------------------- */

/* Largest scores of a block and of its halves, in all lanes of the row. Halves are made for PV with blocks of 16. NaN
 * is passed over: callers see it by magnitudes. */
struct p_max {
    float all, half[2];
};

template <enum pv_format PV, class KEYS> __device__ __forceinline__ p_max p_block_max(const float *t)
{
    p_max m;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        m.half[h] = t[h * (KEYS::N / 2)];
#pragma unroll
        for (int i = 1; i < KEYS::N / 2; i++) {
            m.half[h] = fmaxf(m.half[h], t[h * (KEYS::N / 2) + i]);
        }
    }
    if (PV == PV_NVFP4 || PV == PV_FP4_UE5M3) {
        m.half[0] = KEYS::max(m.half[0]);
        m.half[1] = KEYS::max(m.half[1]);
        m.all = fmaxf(m.half[0], m.half[1]);
    } else {
        m.all = KEYS::max(fmaxf(m.half[0], m.half[1]));
    }
    return m;
}

/* ---- producers: E2M1(2^x) as values ----------------------------------------------------------------------- */

/* 1 or 0: one instruction, where a selection takes two. */
__device__ __forceinline__ float p_at_least(float x, float y)
{
    float f;
    asm("set.ge.f32.f32 %0, %1, %2;" : "=f"(f) : "f"(x), "f"(y));
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

/* x in, values times 1 / grid out; returns grid. The switch is outside the loops: the recipe is the same for all. */
template <class KEYS> __device__ __forceinline__ float p_produce(const p_rule &rule, int64_t block, float *x)
{
    switch (rule.p_map) {
    case P_EXACT:
    case P_THRESHOLD:
#pragma unroll
        for (int i = 0; i < KEYS::N; i++) {
            x[i] = p_exact_twice(x[i]);
        }
        return 0.5f;
    case P_CODE_SPACE:
#pragma unroll
        for (int i = 0; i < KEYS::N; i++) {
            x[i] = p_code_space_value(x[i]);
        }
        return 1.0f;
    case P_AFFINE:
#pragma unroll
        for (int i = 0; i < KEYS::N; i++) {
            x[i] = p_affine_value(x[i], rule.affine_a, rule.affine_b);
        }
        return 1.0f;
    case P_ACCURATE:
#pragma unroll
        for (int i = 0; i < KEYS::N; i++) {
            const float affine = p_affine_value(x[i], 1.65f, 0.80f);
            x[i] = p_accurate_key(KEYS::key(i), block) ? 0.5f * p_exact_twice(x[i]) : affine;
        }
        return 1.0f;
    }
    return 1.0f;
}

/* ---- one block of 32 keys of one row: scores in, represented P times the unit out ------------------------- */

/* E4M3(2^(t + lift)) 2^-lift times the unit; RAW: times 2^lift. `exact`: 2^t, if EXACT. */
template <class KEYS, bool EXACT, bool RAW>
__device__ __forceinline__ void p_fp8_block(const p_rule &rule, float reference, float *t, float *exact)
{
    const float lift = rule.rebuilt ? 7.0f : 8.0f, down = rule.rebuilt ? 0x1p-7f : 0x1p-8f;
    const float down_unit = down * rule.unit;
    p_exp2_row<KEYS::N>(t, lift - reference, t);
#pragma unroll
    for (int i = 0; EXACT && i < KEYS::N; i++) {
        exact[i] = __fmul_rn(t[i], down);
    }
#pragma unroll
    for (int i = 0; i < KEYS::N; i += 2) {
        p_e4m3_pair(t + i);
        t[i] = RAW ? t[i] : __fmul_rn(t[i], down_unit);
        t[i + 1] = RAW ? t[i + 1] : __fmul_rn(t[i + 1], down_unit);
    }
}

template <class KEYS>
__device__ __forceinline__ void p_mxfp4_block(const p_rule &rule, float reference, float anchor, int64_t block,
                                              float max, float *t)
{
    const float k = floorf(max);
    /* Above log2 1.5 the nearest power of two is the next one. */
    float e = rule.amplitude ? __fadd_rn(k, __fsub_rn(max, k) > 0x1.2b8034p-1f ? 1.0f : 0.0f) : __fsub_rn(k, 2.0f);
    float byte = __fadd_rn(__fsub_rn(e, anchor), 127.0f);
    if (rule.anchor == ANCHOR_SAMPLED && byte < 17.0f) {
        byte = 17.0f; /* coded against the floor: small probabilities vanish */
        e = __fadd_rn(17.0f - 127.0f, anchor);
    }
    /* E8M0 has neither zero nor more than 2^127: below, the block is zero; above, NaN, so that it is seen. */
    float scale = p_pow2(__fsub_rn(e, reference));
    scale = byte < 1.0f ? 0.0f : byte > 254.0f ? __uint_as_float(FLOAT_NAN) : scale;
#pragma unroll
    for (int i = 0; i < KEYS::N; i++) {
        const float y = __fsub_rn(t[i], e);
        t[i] = rule.amplitude ? __fadd_rn(y, 0x1.4ae00ep+1f) : y; /* fl32(log2 6) */
    }
    scale = __fmul_rn(scale, p_produce<KEYS>(rule, block, t));
#pragma unroll
    for (int i = 0; i < KEYS::N; i++) {
        t[i] = __fmul_rn(t[i], scale);
    }
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

template <bool WIDE, class KEYS, bool EXACT>
__device__ __forceinline__ void p_nvfp4_block(const p_rule &rule, float reference, const p_max &max, float *t,
                                              float *exact)
{
    const float g = (WIDE ? 0x1p18f : 0x1p11f) * (rule.rebuilt ? 0.5f : 1.0f);
    float scale[2];
    p_exp2_row<2>(max.half, -reference, scale);
    p_exp2_row<KEYS::N>(t, -reference, t);
#pragma unroll
    for (int i = 0; EXACT && i < KEYS::N; i++) {
        exact[i] = t[i];
    }
    scale[0] = p_sixth(__fmul_rn(g, scale[0]));
    scale[1] = p_sixth(__fmul_rn(g, scale[1]));
    if (WIDE) {
        scale[0] = ue5m3_to_float(ue5m3_from_float(scale[0]));
        scale[1] = ue5m3_to_float(ue5m3_from_float(scale[1]));
    } else {
        p_e4m3_pair(scale); /* UE4M3 is E4M3 without the sign */
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float s = __fmul_rn(scale[h], 1.0f / g); /* g is a power of two */
        const float divisor = s > 0.0f ? s : __uint_as_float(FLOAT_INF);
        const float boundary[7] = {0.25f * divisor, 0.75f * divisor, 1.25f * divisor, 1.75f * divisor,
                                   2.5f * divisor,  3.5f * divisor,  5.0f * divisor};
#pragma unroll
        for (int i = h * (KEYS::N / 2); i < (h + 1) * (KEYS::N / 2); i++) {
            t[i] = __fmul_rn(p_quotient_twice(t[i], boundary), 0.5f * s);
        }
    }
}

/* The sum is of the values before their rounding, as flash attention makes it. */
template <class KEYS> __device__ __forceinline__ float p_bf16_block(float reference, float *t)
{
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < KEYS::N; i++) {
        t[i] = p_exp2_fast(__fsub_rn(t[i], reference));
        sum += t[i];
    }
#pragma unroll
    for (int i = 0; i < KEYS::N; i++) {
        t[i] = bf16_value(bf16_code(t[i]));
    }
    return sum;
}

/* Publishes one block. All lanes of the row call it (of the warp, in fact: the branches are uniform).
 *   t          in: scores, ATTENTION_MASKED where masked; out: represented P times rule.unit, relative to 2^reference
 *   max        p_block_max of t
 *   reference  the anchor in the forward, floor(LSE2) in the backward
 *   anchor     the forward's (decides where a block exponent underflows: MXFP4 only)
 *   key0       absolute position of the first key, a multiple of 32
 *   exact      KEYS::N values, only if EXACT (no pv = bf16): 2^(t - reference) before any rounding
 * RAW, for pv = fp8: P times 2^8 (rebuilt: 2^7) instead, which saves a product.
 * Returns the lane's part of the normaliser: the sum of its P (pv = bf16: before their rounding). */
template <enum pv_format PV, class KEYS, bool EXACT = false, bool RAW = false>
__device__ __forceinline__ float p_block_publish(const p_rule &rule, float reference, float anchor, int64_t key0,
                                                 const p_max &max, float *t, float *exact = NULL)
{
    if (PV == PV_BF16) {
        return p_bf16_block<KEYS>(reference, t);
    }
    if (PV == PV_FP8) {
        p_fp8_block<KEYS, EXACT, RAW>(rule, reference, t, exact);
    } else if (key0 < rule.sink_keys) {
        float seen[KEYS::N]; /* a score of -inf is NaN in E4M3, as on the CPU */
#pragma unroll
        for (int i = 0; i < KEYS::N; i++) {
            seen[i] = t[i] - t[i];
        }
        p_fp8_block<KEYS, EXACT, false>(rule, reference, t, exact);
#pragma unroll
        for (int i = 0; i < KEYS::N; i++) {
            t[i] += seen[i];
        }
    } else if (PV == PV_MXFP4) {
#pragma unroll
        for (int i = 0; EXACT && i < KEYS::N; i++) {
            exact[i] = p_exp2_fast(__fsub_rn(t[i], reference));
        }
        p_mxfp4_block<KEYS>(rule, reference, anchor, key0 / 32, max.all, t);
    } else {
        p_nvfp4_block<PV == PV_FP4_UE5M3, KEYS, EXACT>(rule, reference, max, t, exact);
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < KEYS::N; i++) {
        sum += t[i];
    }
    return sum;
}
