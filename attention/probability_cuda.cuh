/* attention: from scores to represented probabilities on the GPU (docs/numerics.md, section 5 step 3): a block of 32
 * keys of one row, spread over a few lanes of a warp. Equal scores give the codes of attention_cpu_probability.c.
 * Included by the kernels of both passes. */
#pragma once

#include "attention/probability_values_cuda.cuh"

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

/* ---- anchors and maxima ----------------------------------------------------------------------------------- */

/* ceil(max) for anchor = row; 0; or the paper's lifted reference. */
__device__ __forceinline__ float p_anchor_of(const p_rule &rule, float max)
{
    if (rule.anchor == ANCHOR_ZERO) {
        return 0.0f;
    }
    const float up = ceilf(max);
    return rule.anchor == ANCHOR_ROW ? up : __fadd_rn(up, 110.0f) - (rule.amplitude ? 0.0f : 2.0f);
}

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

/* ---- one block of 32 keys of one row: scores in, represented P times the unit out ------------------------- */

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

/* E4M3(2^(t + lift)) 2^-lift times the unit; RAW: times 2^lift. `exact`: 2^t (RAW: times 2^lift), if EXACT. */
template <class KEYS, bool EXACT, bool RAW>
__device__ __forceinline__ void p_fp8_block(const p_rule &rule, float reference, float *t, float *exact)
{
    const float lift = rule.rebuilt ? 7.0f : 8.0f, down = rule.rebuilt ? 0x1p-7f : 0x1p-8f;
    const float down_unit = down * rule.unit;
    p_exp2_row<KEYS::N>(t, lift - reference, t);
#pragma unroll
    for (int i = 0; EXACT && i < KEYS::N; i++) {
        exact[i] = RAW ? t[i] : __fmul_rn(t[i], down);
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
 * RAW, for pv = fp8: P and `exact` times 2^8 (rebuilt: 2^7) instead, which saves products.
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
