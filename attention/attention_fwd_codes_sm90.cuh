/* attention: from scores to codes of P on Hopper (docs/numerics.md, section 5 steps 2 to 4), in the registers that the
 * product P V takes them from. See sm90.cuh for who holds what: a thread has 32 of the 128 keys of two rows. For MXFP4
 * these are neighbours, one block (BLOCKED keys, attention_fwd_sm90.cuh), so that a thread finds the exponents of its
 * two blocks alone. */
#pragma once

#include "attention/attention_fwd_sm90.cuh"
#include "attention/direct_p_sm90.cuh"

/* How P becomes codes: E4M3 of 2^(t - a + 8), or E2M1 with a power of two per 32 keys, carried in E5M2 as
 * q 2^(E - a + 13). A block with E below a - 26 is coded as if E were that. */
enum code_kind { CODES_FP8, CODES_MX_EXACT, CODES_MX_CODE_SPACE, CODES_MX_AFFINE };

#define FP8_LIFT 8.0f
#define MX_LIFT 13.0f
#define MX_RANGE 26.0f

/* Of the recipe, for MXFP4. */
struct mx_rule {
    float bias;      /* a block's exponent is floor(max + bias): 1 - log2 1.5, to the nearest power of two; OCP: -2 */
    float amplitude; /* added to x: log2 6; OCP 0 */
    struct direct_line line;
};

/* floor and ceil by the rounding of one addition, for magnitudes below 2^22 (the instruction made for it has the
 * throughput of ex2): floor(x) = __fadd_rd(x, WHOLE) - WHOLE. Differences of such sums are differences of their bits.
 */
#define WHOLE 0x1.8p23f

/* What a thread keeps of its two rows: integer anchors plus WHOLE, the factor that brings older sums to them, and for
 * MXFP4 the exponents of its present two blocks, plus WHOLE. MXFP4's anchor is the largest exponent so far. */
struct code_rows {
    float anchor[2], factor[2], exponent[2];
};

/* ---- maxima ------------------------------------------------------------------------------------------------ */

/* Reduces the thread's 32 scores of row h, as integers, three at a time. */
template <int (*REDUCE)(int, int, int)> __device__ __forceinline__ int reduced(const float (&s)[64], int h)
{
    int x[32], chain[4];
#pragma unroll
    for (int i = 0; i < 32; i++) {
        x[i] = __float_as_int(s[i / 2 * 4 + 2 * h + i % 2]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        chain[i] = REDUCE(x[8 * i], x[8 * i + 1], x[8 * i + 2]);
        chain[i] = REDUCE(chain[i], x[8 * i + 3], x[8 * i + 4]);
        chain[i] = REDUCE(chain[i], x[8 * i + 5], x[8 * i + 6]);
    }
    chain[0] = REDUCE(chain[0], x[7], chain[1]);
    chain[2] = REDUCE(chain[2], x[23], chain[3]);
    chain[0] = REDUCE(chain[0], x[15], x[31]);
    return REDUCE(chain[0], chain[2], chain[2]);
}

__device__ __forceinline__ int max3(int a, int b, int c)
{
    return __vimax3_s32(a, b, c);
}

__device__ __forceinline__ int min3(int a, int b, int c)
{
    return __vimin3_s32(a, b, c);
}

/* Largest of the thread's 32 keys of each row. Codes of floats are ordered like integers unless both are negative,
 * where the order is the other way round: the largest integer will do unless it is negative. A NaN is one if positive,
 * as tensor cores make it. */
__device__ __forceinline__ void largest_integers(const float (&s)[64], float (&max)[2])
{
    int x[2] = {reduced<max3>(s, 0), reduced<max3>(s, 1)};
    if (__any_sync(0xffffffffu, min(x[0], x[1]) < 0)) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            x[h] = x[h] < 0 ? reduced<min3>(s, h) : x[h];
        }
    }
    max[0] = __int_as_float(x[0]);
    max[1] = __int_as_float(x[1]);
}

/* The same, two at a time: twice the instructions, but nothing that waits for a vote. */
__device__ __forceinline__ void largest_floats(const float (&s)[64], float (&max)[2])
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float chain[4];
#pragma unroll
        for (int j = 0; j < 16; j++) {
            const float pair = max_or_nan(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]);
            chain[j % 4] = j < 4 ? pair : max_or_nan(chain[j % 4], pair);
        }
        max[h] = max_or_nan(max_or_nan(chain[0], chain[1]), max_or_nan(chain[2], chain[3]));
    }
}

/* Moves anchors to cover these scores. A NaN stays. Instructions are what MXFP4 and E4M3 scores are short of. */
template <enum code_kind KIND, bool SCORES8>
__device__ __forceinline__ void codes_anchor(const float (&s)[64], struct code_rows &r, float c,
                                             const struct mx_rule &rule)
{
    float max[2];
    if constexpr (KIND == CODES_FP8 && !SCORES8) {
        largest_floats(s, max);
    } else {
        largest_integers(s, max);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float whole =
            KIND == CODES_FP8 ? __fmaf_ru(max[h], c, WHOLE) : __fadd_rd(fmaf(max[h], c, rule.bias), WHOLE);
        const float anchor = max_or_nan(r.anchor[h], quad_max(whole));
        r.factor[h] = exp2_fast(r.anchor[h] - anchor);
        r.anchor[h] = anchor;
        r.exponent[h] = fmaxf(whole, anchor - MX_RANGE);
    }
}

/* ---- codes ------------------------------------------------------------------------------------------------- */

/* E5M2 bytes of the E2M1 values 6 6 4 3 2 1.5 1 .5 times a power of two, which keeps all normal. */
struct code_table {
    uint32_t low, high;
};

/* 2^(exponent - anchor + MX_LIFT) */
__device__ __forceinline__ struct code_table code_table_of(float exponent, float anchor)
{
    const uint32_t shift = __float_as_uint(exponent) - __float_as_uint(anchor);
    return {0x42444646u + 0x04040404u * (uint32_t)MX_LIFT + 0x04040404u * shift,
            0x383c3e40u + 0x04040404u * (uint32_t)MX_LIFT + 0x04040404u * shift};
}

/* Bytes 1 and 3 of both. */
__device__ __forceinline__ uint32_t upper_bytes(uint32_t low, uint32_t high)
{
    return bytes_by(low, high, 0x7531);
}

/* Eight values y 2^-14, y below 10, to E2M1(y) as the table says, four a register. Truncation to FP16 has 2^-14 as its
 * least normal number, so that upper bytes b of FP16 codes are E2M1 codes with one more bit of mantissa: (b + 1) / 2
 * rounds (exact ties, which go up, cannot occur in 2^x but for x = -2), and 8 - (b + 1) / 2 = (16 - b) / 2, never
 * negative, counts from the largest: 8, a zero, as a selector of bytes takes the sign of byte 0, 1 to 7 and 0 (6 for 8)
 * a value. Values 0, 2, 4, 6 come to the lower nibbles of bytes, the others to the upper ones. PACK: to FP16. */
template <uint32_t (*PACK)(float, float)>
__device__ __forceinline__ void e2m1_bytes(const float (&x)[8], struct code_table table, uint32_t &p0, uint32_t &p1)
{
    const uint32_t even = upper_bytes(PACK(x[0], x[2]), PACK(x[4], x[6]));
    const uint32_t odd = upper_bytes(PACK(x[1], x[3]), PACK(x[5], x[7]));
    const uint32_t selector = bits_of_either(0x0f0f0f0fu, (0x10101010u - even) >> 1, 0x80808080u - 8u * odd);
    p0 = bytes_by(table.low, table.high, selector);
    p1 = bytes_by(table.low, table.high, selector >> 16);
}

/* Eight lines of code_space: value i is nibble i of a selector, 8 less its code. Sums of FP16 codes count modulo 2^32
 * what 1536 adds to each. */
__device__ __forceinline__ void code_space_bytes(const float (&y)[8], struct code_table table, uint32_t &p0,
                                                 uint32_t &p1)
{
    uint32_t whole[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        whole[i] = pack_f16_down(code_space_whole(y[i]), code_space_whole(y[i + 4]));
    }
    const uint32_t sum = (whole[0] + 16u * whole[1]) + 256u * (whole[2] + 16u * whole[3]);
    const uint32_t selector = 0x88888888u + 0x1111u * 0x10001u * HALF_1536 - sum;
    p0 = bytes_by(table.low, table.high, selector);
    p1 = bytes_by(table.low, table.high, selector >> 16);
}

/* Eight scores of a row, 4 in each word, to two A registers of P V. */
template <enum code_kind KIND>
__device__ __forceinline__ void code_words(float (&x)[8], float c, float exponent, struct code_table table,
                                           const struct mx_rule &rule, uint32_t &p0, uint32_t &p1)
{
    if constexpr (KIND == CODES_MX_EXACT) {
        const float offset = rule.amplitude - 14.0f - (exponent - WHOLE);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            x[k] = exp2_fast(fmaf(x[k], c, offset));
        }
        e2m1_bytes<pack_f16_down>(x, table, p0, p1);
    } else {
        const float slope = rule.line.slope * c;
        const float offset = fmaf(rule.line.slope, rule.amplitude - (exponent - WHOLE), rule.line.offset);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            x[k] = fmaf(x[k], slope, offset);
        }
        if (KIND == CODES_MX_AFFINE) {
            e2m1_bytes<pack_f16_positive>(x, table, p0, p1);
        } else {
            code_space_bytes(x, table, p0, p1);
        }
    }
}

__device__ __forceinline__ uint32_t fp8_bytes(const float *s, float c, float shift)
{
    return pack_e4m3(exp2_fast(fmaf(s[0], c, shift)), exp2_fast(fmaf(s[1], c, shift)), exp2_fast(fmaf(s[4], c, shift)),
                     exp2_fast(fmaf(s[5], c, shift)));
}

/* The keys of words 2 i and 2 i + 1 of eight that a thread has of row h, where keys are BLOCKED: word q has
 * 16 (q / 4) + 2 (q % 4) + 0, 1, 8, 9 of 32. */
__device__ __forceinline__ void scores_of_words(const float (&s)[64], int i, int h, float (&x)[8])
{
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const int q = 2 * i + k / 4, j = q / 4 * 8 + k / 2 % 2 * 4 + q % 4;
        x[k] = s[4 * j + 2 * h + k % 2];
    }
}

/* Scores to the A registers of P V. FP8: keys 2 c, 2 c + 1, 8 + 2 c, 8 + 2 c + 1 of each 16, the order pi1 of the
 * column view of V. */
template <enum code_kind KIND>
__device__ __forceinline__ void codes_make(const float (&s)[64], const struct code_rows &r, float c,
                                           const struct mx_rule &rule, uint32_t (&p)[16])
{
    struct code_table table[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        table[h] = code_table_of(r.exponent[h], r.anchor[h]);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int b = i / 2, h = i % 2;
        if (KIND == CODES_FP8) {
            const float *first = s + 16 * b + 2 * h;
            p[4 * b + h] = fp8_bytes(first, c, FP8_LIFT + WHOLE - r.anchor[h]);
            p[4 * b + h + 2] = fp8_bytes(first + 8, c, FP8_LIFT + WHOLE - r.anchor[h]);
        } else {
            float x[8];
            scores_of_words(s, b, h, x);
            code_words<KIND>(x, c, r.exponent[h], table[h], rule, p[4 * b + h], p[4 * b + h + 2]);
        }
    }
}
