/* attention: from scores to codes of P on Hopper (docs/numerics.md, section 5 steps 2 to 4), in the registers that the
 * product P V takes them from. See sm90.cuh for who holds what: a thread has 32 of the 128 keys of two rows, and the 32
 * keys of a block of MXFP4 lie in a quad. */
#pragma once

#include "attention/attention_fwd_sm90.cuh"

/* How P becomes codes: E4M3 of 2^(t - a + 8), or E2M1 with a power of two per 32 keys, carried in E5M2 as q 2^(E - a +
 * 13): exact for E >= a - 28. */
enum code_kind { CODES_FP8, CODES_MX_EXACT, CODES_MX_CODE_SPACE, CODES_MX_AFFINE };

#define FP8_LIFT 8.0f
#define MX_LIFT 13.0f

/* Of the recipe, for MXFP4. */
struct mx_rule {
    float up;        /* fractions of the block maximum above it round the exponent up; OCP: 2, that is never */
    float lower;     /* added to the exponent: 0; OCP -2 */
    float amplitude; /* added to x: log2 6; OCP 0 */
    float a, b;      /* of the affine map */
};

/* What a thread keeps of its two rows: integer anchors, and factors that bring sums to them. */
struct code_rows {
    float anchor[2], factor[2];
};

__device__ __forceinline__ void move_anchor(struct code_rows &r, int h, float max, float c)
{
    float anchor = max_or_nan(r.anchor[h], ceilf(max * c));
    r.factor[h] = exp2_fast(r.anchor[h] - anchor);
    r.anchor[h] = anchor;
}

__device__ __forceinline__ void codes_fp8(float (&s)[64], struct code_rows &r, float c)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float max = s[2 * h];
#pragma unroll
        for (int j = 0; j < 16; j++) {
            max = max_or_nan(max, max_or_nan(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
        }
        move_anchor(r, h, quad_max(max), c);
        const float shift = FP8_LIFT - r.anchor[h];
#pragma unroll
        for (int j = 0; j < 16; j++) {
            s[4 * j + 2 * h] = exp2_fast(fmaf(s[4 * j + 2 * h], c, shift));
            s[4 * j + 2 * h + 1] = exp2_fast(fmaf(s[4 * j + 2 * h + 1], c, shift));
        }
    }
}

/* y >= 0 to the nearest E2M1 value times `scale` (a power of two), ties to even: spacings are half the binade of y, but
 * never less than scale / 2. Adding 1.5 2^22 binades drops all but the multiples of the spacing. */
__device__ __forceinline__ float e2m1_scaled(float y, float scale, float most)
{
    const float magic = 0x1.8p22f;
    float binade = fmaxf(__uint_as_float(__float_as_uint(y) & 0x7f800000u), scale);
    float rounded = fmaf(binade, -magic, fmaf(binade, magic, y));
    return fminf(rounded, most);
}

/* 2 x + 2.37 to a code by the floor, small codes by their own boundaries, and the code to its value. */
__device__ __forceinline__ float code_space_value(float u)
{
    float code = fminf(fmaxf(u, 2.0f), 7.5f); /* codes 2 .. 7: value 2^(code / 2 - 1) (1 + code % 2 / 2) */
    float y = __uint_as_float(__float_as_uint(__fadd_rd(code, 8388608.0f + 252.0f)) << 22);
    y = u >= 1.539926f ? y : 0.5f;
    return u >= -1.63f ? y : 0.0f;
}

/* Eight keys of a block in this thread, E the block's exponent: scores to q 2^(E - a + 13). */
template <enum code_kind KIND>
__device__ __forceinline__ void mx_block(float *s, float e, float anchor, float c, const struct mx_rule &rule)
{
    const float scale = exp2_fast(e - anchor + MX_LIFT), most = 6 * scale;
    const float x = rule.amplitude - e; /* added to t */
#pragma unroll
    for (int i = 0; i < 16; i += i % 4 == 1 ? 3 : 1) { /* 0 1 4 5 8 9 12 13 */
        if (KIND == CODES_MX_EXACT) {
            s[i] = e2m1_scaled(exp2_fast(fmaf(s[i], c, rule.amplitude + MX_LIFT - anchor)), scale, most);
        } else if (KIND == CODES_MX_CODE_SPACE) {
            s[i] = code_space_value(fmaf(2.0f, fmaf(s[i], c, x), 2.37f)) * scale;
        } else {
            float y = fmaxf(fmaf(rule.a, fmaf(s[i], c, x), rule.b), 0.0f);
            s[i] = e2m1_scaled(y, 1.0f, 6.0f) * scale;
        }
    }
}

template <enum code_kind KIND>
__device__ __forceinline__ void codes_mx(float (&s)[64], struct code_rows &r, float c, const struct mx_rule &rule)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float block[4];
#pragma unroll
        for (int b = 0; b < 4; b++) {
            float max = s[16 * b + 2 * h];
#pragma unroll
            for (int j = 4 * b; j < 4 * b + 4; j++) {
                max = max_or_nan(max, max_or_nan(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
            }
            block[b] = quad_max(max);
        }
        move_anchor(r, h, max_or_nan(max_or_nan(block[0], block[1]), max_or_nan(block[2], block[3])), c);
#pragma unroll
        for (int b = 0; b < 4; b++) {
            const float max = block[b] * c, k = floorf(max);
            const float e = k + (max - k > rule.up ? 1.0f : rule.lower);
            mx_block<KIND>(s + 16 * b + 2 * h, e, r.anchor[h], c, rule);
        }
    }
}

template <enum code_kind KIND>
__device__ __forceinline__ void codes_of(float (&s)[64], struct code_rows &r, float c, const struct mx_rule &rule)
{
    if (KIND == CODES_FP8) {
        codes_fp8(s, r, c);
    } else {
        codes_mx<KIND>(s, r, c, rule);
    }
}

/* A registers of P V: keys 2 c, 2 c + 1, 8 + 2 c, 8 + 2 c + 1 of each 16, the order pi1 of the column view of V. */
template <enum code_kind KIND> __device__ __forceinline__ void codes_pack(const float (&s)[64], uint32_t (&p)[16])
{
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float *x = s + 8 * (i / 2) + 2 * (i % 2);
        p[i] = KIND == CODES_FP8 ? pack_e4m3(x[0], x[1], x[4], x[5]) : pack_e5m2(x[0], x[1], x[4], x[5]);
    }
}
