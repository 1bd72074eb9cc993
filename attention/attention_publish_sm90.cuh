/* attention: rounding of operands on Hopper, with the bits of attention_cuda_operands.cuh in fewer instructions. For
 * attention_publish_sm90.cu and attention_publish_rows_sm90.cu.
 *
 * An NVFP4 block is 16 features in one thread, as eight pairs of BF16. Heads with an ordinary amax (quick) take
 * shortcuts that are right as long as nothing leaves the normal numbers. All shortcuts were compared with the
 * definitions on every mantissa and scale. */
#pragma once

#include "attention/attention_cuda_operands.cuh"
#include "attention/sm90.cuh"

extern "C" {
#include "attention/attention_sm90.h"
}

#include <cuda_fp16.h>

#define BF16_NAN 0x7fff7fffu
#define E4M3_NAN 0x7f7f7f7fu

/* ---- powers of two ----------------------------------------------------------------------------------------- */

/* How the multiplier of a head follows from its amax. */
enum multiplier { MULTIPLIER_FP8, MULTIPLIER_NEAREST, MULTIPLIER_OCP, MULTIPLIER_ROWS };

/* The exponent of the power of two that represented values are multiplied with before they become E4M3.
 * fp8: they are E4M3 over m_V = 4, or over the largest 2^k with 2^k amax <= 448 where amax > 112. mxfp4: at most 6
 * alpha, alpha at most the binade above amax (nearest), or 6 2^(binade - 2) (ocp): so that 6 becomes 6 2^6 = 384. rows:
 * E4M3 values whose amax has the binade 8 (256 .. 448) or, after rounding, 7: amax of the decoded is given. */
__device__ __forceinline__ int multiplier_exponent(enum multiplier kind, float amax)
{
    const uint32_t bits = __float_as_uint(amax);
    if (bits == 0 || bits >= FLOAT_INF) {
        return 0;
    }
    const int binade = (int)(bits >> 23) - 127; /* below the normal numbers any: k is at its end */
    const int fill = 8 - binade - ((bits & 0x7fffffu) > 0x600000u ? 1 : 0); /* 2^fill amax in (224, 448] */
    int k = kind == MULTIPLIER_FP8       ? (amax > 112.0f ? fill : 2)
            : kind == MULTIPLIER_NEAREST ? 5 - binade
            : kind == MULTIPLIER_OCP     ? 8 - binade
                                         : fill;
    return min(max(k, -126), 126);
}

__device__ __forceinline__ float power_of_two(int k)
{
    return __uint_as_float((uint32_t)(k + 127) << 23);
}

/* ---- memory ------------------------------------------------------------------------------------------------- */

/* One access, which the compiler may not split: predicated stores of words that are computed apart come out as four. */
__device__ __forceinline__ void store_words(void *to, const uint4 &x)
{
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

__device__ __forceinline__ uint4 load_words(const bf16 *from, bool exists)
{
    return exists ? bf16x8_load(from).words : make_uint4(0, 0, 0, 0);
}

/* ---- pairs of BF16 ----------------------------------------------------------------------------------------- */

__device__ __forceinline__ uint32_t add_bf16x2(uint32_t x, uint32_t y)
{
    uint32_t z;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

__device__ __forceinline__ uint32_t sub_bf16x2(uint32_t x, uint32_t y)
{
    uint32_t z;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t x, uint32_t y)
{
    uint32_t z;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

__device__ __forceinline__ uint32_t add_f16x2(uint32_t x, uint32_t y)
{
    uint32_t z;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

__device__ __forceinline__ uint32_t sub_f16x2(uint32_t x, uint32_t y)
{
    uint32_t z;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

__device__ __forceinline__ uint32_t mul_f16x2(uint32_t x, uint32_t y)
{
    uint32_t z;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

__device__ __forceinline__ uint32_t pack_f16(float low, float high)
{
    uint32_t y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

/* Two pairs of FP16. */
__device__ __forceinline__ uint32_t pack_e4m3_f16(uint32_t first, uint32_t second)
{
    uint32_t y;
    asm("{\n\t.reg .b16 lo, hi;\n\t"
        "cvt.rn.satfinite.e4m3x2.f16x2 lo, %1;\n\t"
        "cvt.rn.satfinite.e4m3x2.f16x2 hi, %2;\n\t"
        "mov.b32 %0, {lo, hi};\n\t}"
        : "=r"(y)
        : "r"(first), "r"(second));
    return y;
}

__device__ __forceinline__ float low_value(uint32_t pair)
{
    return __uint_as_float(pair << 16);
}

__device__ __forceinline__ float high_value(uint32_t pair)
{
    return __uint_as_float(pair & 0xffff0000u);
}

/* Largest magnitude of n pairs, both halves apart. */
template <int N> __device__ __forceinline__ uint32_t largest_pair(const uint32_t *x)
{
    uint32_t y = x[0] & 0x7fff7fffu;
#pragma unroll
    for (int i = 1; i < N; i++) {
        y = __vmaxu2(y, x[i] & 0x7fff7fffu);
    }
    return y;
}

/* Of a pair of magnitudes: the larger one, as FP32 bits; those of Inf for NaN. */
__device__ __forceinline__ uint32_t larger_bits(uint32_t pair)
{
    return min(max(pair & 0xffffu, pair >> 16), 0x7f80u) << 16;
}

/* Four E4M3 codes decoded, times `inverse` (a power of two), as BF16: exact. */
__device__ __forceinline__ uint2 decoded_bf16(uint32_t codes, float inverse)
{
    uint32_t low, high;
    unpack_e4m3(codes, low, high);
    const float2 a = __half22float2(*reinterpret_cast<__half2 *>(&low));
    const float2 b = __half22float2(*reinterpret_cast<__half2 *>(&high));
    return make_uint2(pack_bf16(a.x * inverse, a.y * inverse), pack_bf16(b.x * inverse, b.y * inverse));
}

/* 16 values y, of one head, become E4M3(m y) / m; their codes. */
__device__ __forceinline__ uint4 lower16(uint32_t (&y)[8], float m, float back)
{
    uint32_t codes[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        codes[i] = pack_e4m3(low_value(y[2 * i]) * m, high_value(y[2 * i]) * m, low_value(y[2 * i + 1]) * m,
                             high_value(y[2 * i + 1]) * m);
        const uint2 values = decoded_bf16(codes[i], back);
        y[2 * i] = values.x;
        y[2 * i + 1] = values.y;
    }
    return make_uint4(codes[0], codes[1], codes[2], codes[3]);
}

/* ---- NVFP4 ------------------------------------------------------------------------------------------------- */

/* What one head's blocks have in common. */
struct score_head {
    float g, back_g; /* second-level scale, and 1 / g */
    float m, back;   /* to E4M3, and 1 / m */
    bool broken;     /* something is not finite */
    bool quick;      /* nothing leaves the normal numbers of BF16 on the shortcuts */
};

template <bool E4M3> __device__ __forceinline__ score_head score_head_of(float amax)
{
    score_head h = {};
    h.broken = !(amax < FLOAT_INFINITY);
    h.quick = amax > 0x1p-60f && amax < 0x1p20f;
    h.g = pow2_scale_of(amax, E2M1_MAX * UE4M3_MAX);
    h.back_g = power_of_two(127 - (int)(__float_as_uint(h.g) >> 23));
    if (E4M3) {
        float decoded = h.broken ? 0.0f : amax;
        nvfp4_apply<1>(&decoded, h.g, nvfp4_amax_code(__fmul_rn(decoded, h.g)));
        const int k = multiplier_exponent(MULTIPLIER_ROWS, bf16_value(bf16_code(decoded)));
        h.m = power_of_two(k);
        h.back = power_of_two(-k);
    }
    return h;
}

/* The scale of a block, a = g amax. By FP16, whose 11 bits hold every tie of UE4M3 and keep its neighbours apart: a has
 * 8 bits and a tie times 6 has 7. */
__device__ __forceinline__ float nvfp4_amax_scale(float a)
{
    const __half h = __float2half_rn(a * (1.0f / 6.0f));
    uint16_t code;
    asm("{\n\t.reg .b32 x;\n\tmov.b32 x, {%1, %1};\n\tcvt.rn.satfinite.e4m3x2.f16x2 %0, x;\n\t}"
        : "=h"(code)
        : "h"(__half_as_ushort(h)));
    uint32_t low, high;
    unpack_e4m3(code, low, high);
    return __low2float(*reinterpret_cast<__half2 *>(&low));
}

/* Magnitudes to E2M1 by the BF16 adder, as minifloat_round does it in FP32. */
__device__ __forceinline__ uint32_t e2m1_pair(uint32_t p)
{
    const uint32_t clamped = __vminu2(p & 0x7fff7fffu, 0x40c040c0u);
    const uint32_t magic = __vmaxu2(clamped & 0x7f807f80u, 0x3f803f80u) + 0x03000300u;
    return sub_bf16x2(add_bf16x2(clamped, magic), magic);
}

/* The same in FP16. */
__device__ __forceinline__ uint32_t e2m1_pair_f16(uint32_t p)
{
    const uint32_t clamped = __vminu2(p & 0x7fff7fffu, 0x46004600u);
    const uint32_t magic = __vmaxu2(clamped & 0x7c007c00u, 0x3c003c00u) + 0x24002400u;
    return sub_f16x2(add_f16x2(clamped, magic), magic);
}

/* A block under its scale s, decoded. The quotient x g / s comes from a rounded reciprocal and is rounded to BF16
 * before E2M1: x has 8 bits and a tie times s at most 7, so that a tie becomes itself and everything else stays on its
 * side. */
__device__ __forceinline__ void nvfp4_decoded(uint32_t (&x)[8], float scale, const score_head &h)
{
    const uint32_t sign = scale > 0.0f ? 0x80008000u : 0; /* a block of scale 0 is +0 */
    const float inverse = scale > 0.0f ? __fdividef(1.0f, scale) : 0.0f, step = scale * h.back_g;
    if (h.quick) {
        const float up = inverse * h.g;
        const uint32_t one = __float_as_uint(step) >> 16, steps = one | one << 16;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t p = pack_bf16(low_value(x[i]) * up, high_value(x[i]) * up);
            x[i] = mul_bf16x2(e2m1_pair(p) | (p & sign), steps);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t p = pack_bf16(low_value(x[i]) * h.g * inverse, high_value(x[i]) * h.g * inverse);
        const uint32_t q = e2m1_pair(p) | (p & sign);
        x[i] = pack_bf16(low_value(q) * step, high_value(q) * step);
    }
}

/* A block of a quick head, as nvfp4_decoded and lower16 have it: in FP16, where E4M3 comes from. m y is q s m / g, with
 * m / g an eighth or a quarter. An E4M3 value in FP16, moved three bits down, is 2^-112 of it in BF16. */
__device__ __forceinline__ uint4 nvfp4_lowered(uint32_t (&x)[8], float scale, const score_head &h)
{
    const uint32_t sign = scale > 0.0f ? 0x80008000u : 0;
    const float up = scale > 0.0f ? __fdividef(h.g, scale) : 0.0f, step = scale * (h.back_g * h.m);
    const float down = h.back * 0x1p112f;
    const uint32_t steps = pack_f16(step, step), downs = pack_bf16(down, down);
    uint32_t codes[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t y[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const uint32_t pair = x[2 * i + j], p = pack_f16(low_value(pair) * up, high_value(pair) * up);
            y[j] = mul_f16x2(e2m1_pair_f16(p) | (p & sign), steps);
        }
        codes[i] = pack_e4m3_f16(y[0], y[1]);
        unpack_e4m3(codes[i], y[0], y[1]);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            x[2 * i + j] = mul_bf16x2((y[j] & 0x7fff7fffu) >> 3 | (y[j] & 0x80008000u), downs);
        }
    }
    return make_uint4(codes[0], codes[1], codes[2], codes[3]);
}

/* ---- the search for a scale -------------------------------------------------------------------------------- */

/* Magnitudes of a block times g, also doubled. In FP16 those are exact that any scale of the search codes as more than
 * zero: between 2^-11 and 2688. */
struct searched_block {
    uint32_t half[8];
    float twice[QK_BLOCK], amax;
};

__device__ __forceinline__ searched_block searched_block_of(const uint32_t (&x)[8], float g)
{
    searched_block b;
    b.amax = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float low = fabsf(low_value(x[i])) * g, high = fabsf(high_value(x[i])) * g;
        b.half[i] = pack_f16(low, high);
        b.twice[2 * i] = 2.0f * low;
        b.twice[2 * i + 1] = 2.0f * high;
        b.amax = fmaxf(b.amax, fmaxf(low, high));
    }
    return b;
}

/* Calls take(i, q) for each element, q its code under `scale`. Quotients in FP16, by a rounded reciprocal, are off by
 * less than 2^-9 of themselves: what is no tie stays on its side; of a tie either neighbour comes, with equal errors.
 */
template <class TAKE> __device__ __forceinline__ void searched_codes(const searched_block &b, float scale, TAKE take)
{
    const float inverse = __fdividef(1.0f, scale);
    const uint32_t inverses = pack_f16(inverse, inverse);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t q = e2m1_pair_f16(mul_f16x2(b.half[i], inverses));
        take(2 * i, __low2float(*reinterpret_cast<const __half2 *>(&q)));
        take(2 * i + 1, __high2float(*reinterpret_cast<const __half2 *>(&q)));
    }
}

/* By how much coding with `scale` reduces the sum of squares, over the scale; exact, see numerics/blocks.c. */
__device__ __forceinline__ float searched_gain(const searched_block &b, float scale)
{
    float sum = 0.0f;
    searched_codes(b, scale, [&](int i, float q) { sum += q * (b.twice[i] - q * scale); });
    return sum;
}

__device__ __forceinline__ float searched_error(const searched_block &b, float scale)
{
    float sum = 0.0f;
    searched_codes(b, scale, [&](int i, float q) {
        const float error = 0.5f * b.twice[i] - q * scale;
        sum += error * error;
    });
    return sum;
}

template <enum qk_scale RULE>
__device__ __forceinline__ float nvfp4_searched_scale(const uint32_t (&x)[8], const score_head &h)
{
    const searched_block b = searched_block_of(x, h.g);
    if constexpr (RULE == QK_SCALE_MSE) {
        const uint8_t code = nvfp4_mse_code(
            b.amax, [&b](float scale) { return (double)searched_gain(b, scale) * (double)scale; },
            [&b](float scale) { return searched_error(b, scale); });
        return b.amax > 0.0f ? ue4m3_to_float(code) : 0.0f;
    } else {
        /* The partner lies 64 features on: four blocks, eight lanes. FP32 sums of 32 are exact. */
        const float pair_amax = fmaxf(b.amax, __shfl_xor_sync(0xffffffffu, b.amax, 8));
        return ue4m3_to_float(nvfp4_folded_code(pair_amax, [&b](float scale) {
            const float sum = searched_gain(b, scale);
            return (double)(sum + __shfl_xor_sync(0xffffffffu, sum, 8)) * (double)scale;
        }));
    }
}

/* x: a block. */
template <enum qk_scale RULE> __device__ __forceinline__ float nvfp4_scale(const uint32_t (&x)[8], const score_head &h)
{
    if constexpr (RULE == QK_SCALE_AMAX) {
        return nvfp4_amax_scale(__uint_as_float(larger_bits(largest_pair<8>(x))) * h.g);
    } else {
        return nvfp4_searched_scale<RULE>(x, h);
    }
}

/* What a block becomes; its codes, if those are E4M3. */
template <enum qk_scale RULE, bool E4M3>
__device__ __forceinline__ uint4 publish_block(uint32_t (&x)[8], const score_head &h)
{
    if (h.broken) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] = BF16_NAN;
        }
        return make_uint4(E4M3_NAN, E4M3_NAN, E4M3_NAN, E4M3_NAN);
    }
    const float scale = nvfp4_scale<RULE>(x, h);
    if (E4M3 && h.quick) {
        return nvfp4_lowered(x, scale, h);
    }
    nvfp4_decoded(x, scale, h);
    return E4M3 ? lower16(x, h.m, h.back) : make_uint4(0, 0, 0, 0);
}

/* ---- Q and K as operands ----------------------------------------------------------------------------------- */

enum { FEATURES = 128 };

/* Q or K. */
struct score_operand {
    head_view from;
    int64_t heads;
    bf16 *to;            /* NULL where rows hold the values exactly */
    uint8_t *rows;       /* E4M3, or NULL */
    float *inverse;      /* with rows */
    head_facts *decoded; /* of each head, zero to begin with: largest decoded magnitude; or NULL */
};

static inline score_operand score_operand_q(const struct attention_publish_sm90 *a)
{
    return {a->q, a->shape.heads, a->own_q, a->q8, a->q_inverse, NULL};
}

static inline score_operand score_operand_k(const struct attention_publish_sm90 *a)
{
    return {a->k, a->shape.kv_heads, a->own_k, a->k8, a->k_inverse, NULL};
}

/* The step to E4M3 where the largest decoded value had to be found: `to` is rounded once more, `rows` and `inverse`
 * follow from `decoded` (attention_publish_rows_sm90.cu). */
void publish_lower_rows(const struct cuda *on, const struct attention_shape *shape, const score_operand &o);
