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

/* What a thread keeps of its two rows: integer anchors, the factor that brings older sums to them, and for MXFP4 the
 * exponents of the present four blocks. */
struct code_rows {
    float anchor[2], factor[2], e[2][4];
};

/* floor and ceil by the rounding of one addition, for magnitudes below 2^22: the instruction made for it has the
 * throughput of ex2. */
__device__ __forceinline__ float floor_fast(float x)
{
    return __fadd_rd(x, 0x1.8p23f) - 0x1.8p23f;
}

__device__ __forceinline__ float ceil_fast(float x)
{
    return __fadd_ru(x, 0x1.8p23f) - 0x1.8p23f;
}

/* ---- maxima ------------------------------------------------------------------------------------------------ */

/* Largest of the thread's 8 keys of row h and block b. */
__device__ __forceinline__ float largest(const float (&s)[64], int h, int b)
{
    float pair[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        pair[j] = max_or_nan(s[16 * b + 4 * j + 2 * h], s[16 * b + 4 * j + 2 * h + 1]);
    }
    return max_or_nan(max_or_nan(pair[0], pair[1]), max_or_nan(pair[2], pair[3]));
}

/* Moves anchors to cover these scores. A NaN stays. */
template <enum code_kind KIND>
__device__ __forceinline__ void codes_anchor(const float (&s)[64], struct code_rows &r, float c,
                                             const struct mx_rule &rule)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float block[4];
#pragma unroll
        for (int b = 0; b < 4; b++) {
            block[b] = largest(s, h, b);
            if (KIND != CODES_FP8) {
                block[b] = quad_max(block[b]);
                const float t = block[b] * c, k = floor_fast(t);
                r.e[h][b] = k + (t - k > rule.up ? 1.0f : rule.lower);
            }
        }
        float max = max_or_nan(max_or_nan(block[0], block[1]), max_or_nan(block[2], block[3]));
        if (KIND == CODES_FP8) {
            max = quad_max(max);
        }
        const float anchor = max_or_nan(r.anchor[h], ceil_fast(max * c));
        r.factor[h] = exp2_fast(r.anchor[h] - anchor);
        r.anchor[h] = anchor;
    }
}

/* ---- codes ------------------------------------------------------------------------------------------------- */

/* E5M2 bytes of the eight E2M1 values times 2^shift; all zero below the normal range, that is for shift < -13. */
struct code_table {
    uint32_t low, high;
};

__device__ __forceinline__ struct code_table code_table_of(float shift)
{
    const int n = __float_as_int(fmaxf(shift, -20.0f) + 0x1.8p23f) - 0x4b400000;
    if (n < -13) {
        return {0, 0};
    }
    return {0x3e3c3800u + 0x04040400u * n, 0x46444240u + 0x04040404u * n};
}

/* Four values y 2^-14 (y in [0, 16)) to E2M1(y), looked up. Truncation to FP16 has 2^-14 as its least normal number, so
 * that codes are the rounded upper bits of FP16 codes; ties cannot occur in 2^x but for x = -2. x2 and x3 lie 16 bits
 * above x0 and x1 until the codes, a nibble each, select the bytes. */
__device__ __forceinline__ uint32_t e2m1_bytes(float x0, float x1, float x2, float x3, struct code_table table)
{
    const uint32_t even = __vminu2(pack_f16_down(x0, x2) + 0x01000100u, 0x0fff0fffu) >> 9;
    const uint32_t odd = __vminu2(pack_f16_down(x1, x3) + 0x01000100u, 0x0fff0fffu) >> 5;
    const uint32_t nibbles = (even & 0x000f000fu) | (odd & ~0x000f000fu);
    return __byte_perm(table.low, table.high, __byte_perm(nibbles, 0, 0x4420));
}

/* y in [0, 16) to the nearest E2M1 value, ties to even: spacings are half the binade of y, but never less than 1/2.
 * Adding 1.5 2^22 binades drops all but the multiples of the spacing. */
__device__ __forceinline__ float e2m1_nearest(float y)
{
    const float magic = 0x1.8p22f;
    const float binade = fmaxf(__uint_as_float(__float_as_uint(y) & 0x7f800000u), 1.0f);
    return fminf(fmaf(binade, -magic, fmaf(binade, magic, y)), 6.0f);
}

/* u = 2 x + 2.37 to a code by the floor, small codes by their own boundaries, and the code to its value. */
__device__ __forceinline__ float code_space_value(float u)
{
    const float code = fminf(fmaxf(u, 2.0f), 7.5f); /* codes 2 .. 7: value 2^(code / 2 - 1) (1 + code % 2 / 2) */
    float y = __uint_as_float(__float_as_uint(__fadd_rd(code, 8388608.0f + 252.0f)) << 22);
    y = u >= 1.539926f ? y : 0.5f;
    return u >= -1.63f ? y : 0.0f;
}

/* Four scores of row h and block b to four bytes. */
template <enum code_kind KIND>
__device__ __forceinline__ uint32_t code_bytes(const float (&s)[4], const struct code_rows &r, int h, int b, float c,
                                               const struct mx_rule &rule)
{
    float x[4];
    if (KIND == CODES_FP8) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            x[k] = exp2_fast(fmaf(s[k], c, FP8_LIFT - r.anchor[h]));
        }
        return pack_e4m3(x[0], x[1], x[2], x[3]);
    }
    const float shift = r.e[h][b] - r.anchor[h] + MX_LIFT;
    if (KIND == CODES_MX_EXACT) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            x[k] = exp2_fast(fmaf(s[k], c, rule.amplitude - 14.0f - r.e[h][b]));
        }
        return e2m1_bytes(x[0], x[1], x[2], x[3], code_table_of(shift));
    }
    const float scale = exp2_fast(shift);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        x[k] = fmaf(s[k], c, rule.amplitude - r.e[h][b]);
        x[k] = KIND == CODES_MX_CODE_SPACE ? code_space_value(fmaf(2.0f, x[k], 2.37f))
                                           : e2m1_nearest(fmaxf(fmaf(rule.a, x[k], rule.b), 0.0f));
        x[k] *= scale;
    }
    return pack_e5m2(x[0], x[1], x[2], x[3]);
}

/* Scores to the A registers of P V: keys 2 c, 2 c + 1, 8 + 2 c, 8 + 2 c + 1 of each 16, the order pi1 of the column
 * view of V. */
template <enum code_kind KIND>
__device__ __forceinline__ void codes_make(const float (&s)[64], const struct code_rows &r, float c,
                                           const struct mx_rule &rule, uint32_t (&p)[16])
{
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int first = 8 * (i / 2) + 2 * (i % 2);
        const float four[4] = {s[first], s[first + 1], s[first + 4], s[first + 5]};
        p[i] = code_bytes<KIND>(four, r, i % 2, i / 4, c, rule);
    }
}
