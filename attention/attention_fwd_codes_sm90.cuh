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

/* ---- maxima ------------------------------------------------------------------------------------------------ */

/* Largest of keys 32 b .. 32 b + 32 COUNT of the thread's row h. */
template <int COUNT> __device__ __forceinline__ float largest(const float (&s)[64], int h, int b)
{
    float max = s[16 * b + 2 * h];
#pragma unroll
    for (int j = 4 * b; j < 4 * (b + COUNT); j++) {
        max = max_or_nan(max, max_or_nan(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
    }
    return quad_max(max);
}

/* Moves anchors to cover these scores. A NaN stays. */
template <enum code_kind KIND>
__device__ __forceinline__ void codes_anchor(const float (&s)[64], struct code_rows &r, float c,
                                             const struct mx_rule &rule)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float max;
        if (KIND == CODES_FP8) {
            max = largest<4>(s, h, 0);
        } else {
#pragma unroll
            for (int b = 0; b < 4; b++) {
                float block = largest<1>(s, h, b), t = block * c, k = floorf(t);
                max = b == 0 ? block : max_or_nan(max, block);
                r.e[h][b] = k + (t - k > rule.up ? 1.0f : rule.lower);
            }
        }
        float anchor = max_or_nan(r.anchor[h], ceilf(max * c));
        r.factor[h] = exp2_fast(r.anchor[h] - anchor);
        r.anchor[h] = anchor;
    }
}

/* ---- codes ------------------------------------------------------------------------------------------------- */

/* y >= 0 to the nearest E2M1 value times `scale` (a power of two), ties to even: spacings are half the binade of y, but
 * never less than scale / 2. Adding 1.5 2^22 binades drops all but the multiples of the spacing. */
__device__ __forceinline__ float e2m1_scaled(float y, float scale, float most)
{
    const float magic = 0x1.8p22f;
    float binade = fmaxf(__uint_as_float(__float_as_uint(y) & 0x7f800000u), scale);
    float rounded = fmaf(binade, -magic, fmaf(binade, magic, y));
    return fminf(rounded, most);
}

/* u = 2 x + 2.37 to a code by the floor, small codes by their own boundaries, and the code to its value. */
__device__ __forceinline__ float code_space_value(float u)
{
    float code = fminf(fmaxf(u, 2.0f), 7.5f); /* codes 2 .. 7: value 2^(code / 2 - 1) (1 + code % 2 / 2) */
    float y = __uint_as_float(__float_as_uint(__fadd_rd(code, 8388608.0f + 252.0f)) << 22);
    y = u >= 1.539926f ? y : 0.5f;
    return u >= -1.63f ? y : 0.0f;
}

/* One score of row h and block b to its value, as carried. */
template <enum code_kind KIND>
__device__ __forceinline__ float code_value(float s, const struct code_rows &r, int h, int b, float c,
                                            const struct mx_rule &rule)
{
    if (KIND == CODES_FP8) {
        return exp2_fast(fmaf(s, c, FP8_LIFT - r.anchor[h]));
    }
    const float scale = exp2_fast(r.e[h][b] - r.anchor[h] + MX_LIFT);
    if (KIND == CODES_MX_EXACT) {
        float y = exp2_fast(fmaf(s, c, rule.amplitude + MX_LIFT - r.anchor[h]));
        return e2m1_scaled(y, scale, 6 * scale);
    }
    const float x = fmaf(s, c, rule.amplitude - r.e[h][b]);
    if (KIND == CODES_MX_CODE_SPACE) {
        return code_space_value(fmaf(2.0f, x, 2.37f)) * scale;
    }
    return e2m1_scaled(fmaxf(fmaf(rule.a, x, rule.b), 0.0f), 1.0f, 6.0f) * scale;
}

/* Scores to the A registers of P V: keys 2 c, 2 c + 1, 8 + 2 c, 8 + 2 c + 1 of each 16, the order pi1 of the column
 * view of V. */
template <enum code_kind KIND>
__device__ __forceinline__ void codes_make(const float (&s)[64], const struct code_rows &r, float c,
                                           const struct mx_rule &rule, uint32_t (&p)[16])
{
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int h = i % 2, b = i / 4;
        float x[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            x[k] = code_value<KIND>(s[8 * (i / 2) + 2 * h + 4 * (k / 2) + k % 2], r, h, b, c, rule);
        }
        p[i] = KIND == CODES_FP8 ? pack_e4m3(x[0], x[1], x[2], x[3]) : pack_e5m2(x[0], x[1], x[2], x[3]);
    }
}
