/* attention: from scores to codes of P on Hopper (docs/numerics.md, section 5 steps 2 to 4), in the registers that the
 * product P V takes them from. See sm90.cuh for who holds what: a thread has 32 of the 128 keys of two rows, and the 32
 * keys of a block of MXFP4 lie in a quad. */
#pragma once

#include "attention/attention_fwd_sm90.cuh"

/* How P becomes codes: E4M3 of 2^(t - a + 8), or E2M1 with a power of two per 32 keys, carried in E5M2 as
 * q 2^(E - a + 13): exact for E >= a - 26, zero below. */
enum code_kind { CODES_FP8, CODES_MX_EXACT, CODES_MX_CODE_SPACE, CODES_MX_AFFINE };

#define FP8_LIFT 8.0f
#define MX_LIFT 13.0f

/* Of the recipe, for MXFP4. */
struct mx_rule {
    float bias;      /* a block's exponent is floor(max + bias): 1 - log2 1.5, to the nearest power of two; OCP: -2 */
    float amplitude; /* added to x: log2 6; OCP 0 */
    float a, b;      /* of the affine map */
};

/* floor and ceil by the rounding of one addition, for magnitudes below 2^22 (the instruction made for it has the
 * throughput of ex2): floor(x) = __fadd_rd(x, WHOLE) - WHOLE. Differences of such sums are differences of their bits.
 */
#define WHOLE 0x1.8p23f

/* What a thread keeps of its two rows: integer anchors, the factor that brings older sums to them, and for MXFP4 the
 * exponents of the present four blocks, each plus WHOLE. */
struct code_rows {
    float anchor[2], factor[2], whole_e[2][4];
};

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
                r.whole_e[h][b] = __fadd_rd(fmaf(block[b], c, rule.bias), WHOLE);
            }
        }
        float max = max_or_nan(max_or_nan(block[0], block[1]), max_or_nan(block[2], block[3]));
        if (KIND == CODES_FP8) {
            max = quad_max(max);
        }
        const float anchor = max_or_nan(r.anchor[h], __fadd_ru(max * c, WHOLE) - WHOLE);
        r.factor[h] = exp2_fast(r.anchor[h] - anchor);
        r.anchor[h] = anchor;
    }
}

/* ---- codes ------------------------------------------------------------------------------------------------- */

/* E5M2 bytes of the eight E2M1 values 0 .5 1 1.5 2 3 4 6 times 2^shift; shift >= -13, which keeps all normal. */
struct code_table {
    uint32_t low, high;
};

__device__ __forceinline__ struct code_table code_table_of(int shift)
{
    return {0x3e3c3800u + 0x04040400u * (uint32_t)shift, 0x46444240u + 0x04040404u * (uint32_t)shift};
}

/* Four values y 2^-14 (y in [0, 16)) to E2M1(y), looked up. Truncation to FP16 has 2^-14 as its least normal number, so
 * that codes are the rounded upper bits of FP16 codes; ties cannot occur in 2^x but for x = -2. Codes of x0 and x1 go
 * to bits 8 and 12, those of x2 and x3 to bits 24 and 28; then, a nibble each, they select the bytes. */
__device__ __forceinline__ uint32_t e2m1_bytes(float x0, float x1, float x2, float x3, struct code_table table)
{
    const uint32_t even = __viaddmin_u16x2(pack_f16_down(x0, x2), 0x01000100u, 0x0fff0fffu) >> 1;
    const uint32_t odd = __viaddmin_u16x2(pack_f16_down(x1, x3), 0x01000100u, 0x0fff0fffu) << 3;
    return bytes_by(table.low, table.high, bytes_by(bits_of_either(0xf000f000u, odd, even), 0, 0x4431));
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

/* The scores of row h and 32 keys b in this thread, s[0] the first, to two A registers of P V. */
template <enum code_kind KIND>
__device__ __forceinline__ void code_block(const float *s, const struct code_rows &r, int h, int b, float c,
                                           const struct mx_rule &rule, uint32_t &p0, uint32_t &p1)
{
    const float e = r.whole_e[h][b] - WHOLE;
    const int shift = __float_as_int(r.whole_e[h][b]) - __float_as_int(r.anchor[h] + WHOLE) + (int)MX_LIFT;
    float x[8];
    if (KIND == CODES_MX_EXACT) {
        /* A block whose values would not be normal in E5M2 becomes zero: it lies 2^26 below the row's largest. */
        const float offset = shift < -13 ? -INFINITY : rule.amplitude - 14.0f - e;
        const struct code_table table = code_table_of(max(shift, -13));
#pragma unroll
        for (int k = 0; k < 8; k++) {
            x[k] = exp2_fast(fmaf(s[k / 2 * 4 + k % 2], c, offset));
        }
        p0 = e2m1_bytes(x[0], x[1], x[2], x[3], table);
        p1 = e2m1_bytes(x[4], x[5], x[6], x[7], table);
        return;
    }
    const float scale = exp2_fast((float)shift);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        x[k] = fmaf(s[k / 2 * 4 + k % 2], c, rule.amplitude - e);
        x[k] = KIND == CODES_MX_CODE_SPACE ? code_space_value(fmaf(2.0f, x[k], 2.37f))
                                           : e2m1_nearest(fmaxf(fmaf(rule.a, x[k], rule.b), 0.0f));
        x[k] *= scale;
    }
    p0 = pack_e5m2(x[0], x[1], x[2], x[3]);
    p1 = pack_e5m2(x[4], x[5], x[6], x[7]);
}

__device__ __forceinline__ uint32_t fp8_bytes(const float *s, float c, float shift)
{
    return pack_e4m3(exp2_fast(fmaf(s[0], c, shift)), exp2_fast(fmaf(s[1], c, shift)), exp2_fast(fmaf(s[4], c, shift)),
                     exp2_fast(fmaf(s[5], c, shift)));
}

/* Scores to the A registers of P V: keys 2 c, 2 c + 1, 8 + 2 c, 8 + 2 c + 1 of each 16, the order pi1 of the column
 * view of V. */
template <enum code_kind KIND>
__device__ __forceinline__ void codes_make(const float (&s)[64], const struct code_rows &r, float c,
                                           const struct mx_rule &rule, uint32_t (&p)[16])
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int b = i / 2, h = i % 2;
        const float *first = s + 16 * b + 2 * h;
        if (KIND == CODES_FP8) {
            p[4 * b + h] = fp8_bytes(first, c, FP8_LIFT - r.anchor[h]);
            p[4 * b + h + 2] = fp8_bytes(first + 8, c, FP8_LIFT - r.anchor[h]);
        } else {
            code_block<KIND>(first, r, h, b, c, rule, p[4 * b + h], p[4 * b + h + 2]);
        }
    }
}
