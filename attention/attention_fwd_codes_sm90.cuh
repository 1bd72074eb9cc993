/* attention: from scores to codes of P on Hopper (docs/numerics.md, section 5 steps 2 to 4), as the A registers of the
 * product P V. A thread has 32 of the 128 keys of two rows (layout: sm90.cuh). For MXFP4 these are consecutive keys,
 * one block (BLOCKED keys, attention_fwd_sm90.cuh): a thread finds the exponents of its two blocks by itself. */
#pragma once

#include "attention/attention_fwd_sm90.cuh"
#include "attention/direct_p_sm90.cuh"

/* How P becomes codes: E4M3 of 2^(t - a + 8), or E2M1 with a power of two per 32 keys, carried in E5M2 as
 * q 2^(E - a + 13). A block with E below a - 26 is coded as if E were a - 26. */
enum code_kind { CODES_FP8, CODES_MX_EXACT, CODES_MX_CODE_SPACE, CODES_MX_AFFINE };

#define FP8_LIFT 8.0f
#define MX_LIFT 13.0f
#define MX_RANGE 26.0f

/* Of the recipe, for MXFP4. */
struct mx_rule {
    float bias;      /* a block's exponent is floor(max + bias): 1 - log2 1.5, to the nearest power of two; OCP: -2 */
    float amplitude; /* added to x: log2 6; OCP 0 */
    struct direct_line line;
    uint32_t ones; /* a pair of 1 in FP16 that ptxas cannot take for a constant */
};

/* What a thread keeps of its two rows: the running integer anchors, plus WHOLE, and the factors that rescale earlier
 * sums to them. MXFP4's anchor is the largest block exponent so far. */
struct code_rows {
    float anchor[2], factor[2];
};

/* While the tensor cores are busy, an ALU instruction (maximum, conversion, PRMT, logic, shift) takes four clocks of a
 * scheduler instead of two, and so do IMAD and HFMA2; ex2 takes nine instead of eight; FP32 additions and multiply-adds
 * stay near one. So the code below saves ALU instructions.
 *
 * Warpgroups take turns at the first exponentials of a block: take() waits for the turn, give() hands it on. Without
 * turns they fall into step, and the tensor cores idle while all of them make codes.
 *
 * Integer maxima are right unless all scores of a thread are negative. They are used speculatively: a warp vote, whose
 * result arrives during the first exponentials, repeats these if a maximum was wrong. */

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

/* Largest of the thread's 32 scores of each row, where that is not negative. Floats are ordered like integers unless
 * both are negative, where the order is the other way round. A positive NaN, as tensor cores make it, is largest. */
__device__ __forceinline__ void largest_scores(const float (&s)[64], int (&largest)[2])
{
    largest[0] = reduced<max3>(s, 0);
    largest[1] = reduced<max3>(s, 1);
}

/* ---- MXFP4 ------------------------------------------------------------------------------------------------- */

/* E5M2 bytes of the E2M1 values 6 6 4 3 2 1.5 1 .5 times a power of two that keeps all normal. */
struct code_table {
    uint32_t low, high;
};

/* The power of two is 2^(exponent - anchor + MX_LIFT). */
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

/* A selector is eight codes of a row, value i in nibble i, as 8 less the E2M1 code (for 6: 0 or 1). As a selector of
 * bytes_by 0 to 7 pick a value of the table, and 8, code 0, replicates the sign of byte 0, which is zero.
 *
 * x: eight values y 2^-14, y below 10. The least normal number of FP16 is 2^-14, so that the upper byte b of a
 * truncated FP16 code is an E2M1 code with one more mantissa bit: (b + 1) / 2 rounds it (exact ties go up; 2^x has one
 * only at x = -2), and 8 - (b + 1) / 2 = (16 - b) / 2 is never negative. PACK: to FP16. */
template <uint32_t (*PACK)(float, float)> __device__ __forceinline__ uint32_t e2m1_selector(const float (&x)[8])
{
    const uint32_t even = upper_bytes(PACK(x[0], x[2]), PACK(x[4], x[6]));
    const uint32_t odd = upper_bytes(PACK(x[1], x[3]), PACK(x[5], x[7]));
    return bits_of_either(0x0f0f0f0fu, (0x10101010u - even) >> 1, 0x80808080u - 8u * odd);
}

/* The same of eight values of code_space's line. The 1536 in each FP16 code is taken off the sum, modulo 2^32. */
__device__ __forceinline__ uint32_t code_space_selector(const float (&y)[8])
{
    uint32_t whole[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        whole[i] = pack_f16_down(code_space_whole(y[i]), code_space_whole(y[i + 4]));
    }
    const uint32_t sum = (whole[0] + 16u * whole[1]) + 256u * (whole[2] + 16u * whole[3]);
    return 0x88888888u + 0x1111u * 0x10001u * HALF_1536 - sum;
}

/* Scores of row h for words 2 b and 2 b + 1 of a thread's eight, with BLOCKED keys: word q has keys
 * 16 (q / 4) + 2 (q % 4) + 0, 1, 8, 9 of 32. */
__device__ __forceinline__ void scores_of_words(const float (&s)[64], int b, int h, float (&x)[8])
{
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const int q = 2 * b + k / 4, j = q / 4 * 8 + k / 2 % 2 * 4 + q % 4;
        x[k] = s[4 * j + 2 * h + k % 2];
    }
}

/* The selector of words 2 b and 2 b + 1. */
template <enum code_kind KIND>
__device__ __forceinline__ uint32_t mx_selector(const float (&s)[64], int b, int h, float c, float exponent,
                                                const struct mx_rule &rule)
{
    const bool exact = KIND == CODES_MX_EXACT;
    const float base = rule.amplitude - (exact ? 14.0f : 0.0f) - (exponent - WHOLE);
    const float slope = exact ? c : rule.line.slope * c;
    const float offset = exact ? base : fmaf(rule.line.slope, base, rule.line.offset);
    float x[8];
    scores_of_words(s, b, h, x);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        x[k] = fmaf(x[k], slope, offset);
        x[k] = exact ? exp2_fast(x[k]) : x[k];
    }
    return exact                     ? e2m1_selector<pack_f16_down>(x)
           : KIND == CODES_MX_AFFINE ? e2m1_selector<pack_f16_positive>(x)
                                     : code_space_selector(x);
}

/* The upper half of a selector, moved to the lower half, which is the one that prmt reads, by an FP16 multiplication
 * with 1, which the ALU has no part in. No half is a NaN (nibbles are at most 8), and subnormal numbers stay. */
__device__ __forceinline__ uint32_t upper_half(uint32_t selector, const struct mx_rule &rule)
{
    uint32_t y;
    asm("{\n\t.reg .b16 low, high;\n\t.reg .b32 twice;\n\tmov.b32 {low, high}, %1;\n\tmov.b32 twice, {high, high};\n\t"
        "mul.rn.f16x2 %0, twice, %2;\n\t}"
        : "=r"(y)
        : "r"(selector), "r"(rule.ones));
    return y;
}

/* A block's exponent from its largest score, plus WHOLE. */
__device__ __forceinline__ float mx_exponent(int largest, float c, const struct mx_rule &rule)
{
    return __fadd_rd(fmaf(__int_as_float(largest), c, rule.bias), WHOLE);
}

/* Scores to the A registers of P V. A thread has a block of 32 keys of each row, so that exponents and codes need no
 * other thread; only the anchor, and so the E5M2 byte of a code, does. The speculation includes that exponents are
 * within MX_RANGE of the anchor. */
template <enum code_kind KIND, bool SCORES8, class TAKE, class GIVE>
__device__ __forceinline__ void codes_mx(const float (&s)[64], struct code_rows &r, float c, const struct mx_rule &rule,
                                         const TAKE &take, const GIVE &give, uint32_t (&p)[16])
{
    enum { EARLY = SCORES8 ? 1 : 2 }; /* selectors: by measurement */
    uint32_t early[EARLY];
    int largest[2];
    float exponent[2], anchor[2];
    largest_scores(s, largest);
    exponent[0] = mx_exponent(largest[0], c, rule);
    take();
#pragma unroll
    for (int b = 0; b < EARLY; b++) {
        early[b] = mx_selector<KIND>(s, b, 0, c, exponent[0], rule);
    }
    exponent[1] = mx_exponent(largest[1], c, rule);
    anchor[0] = max_or_nan(r.anchor[0], quad_max(exponent[0]));
    anchor[1] = max_or_nan(r.anchor[1], quad_max(exponent[1]));
    const bool plain = min(largest[0], largest[1]) >= 0 && exponent[0] >= anchor[0] - MX_RANGE &&
                       exponent[1] >= anchor[1] - MX_RANGE; /* not where one is a NaN */
    if (!__all_sync(0xffffffffu, plain)) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            largest[h] = largest[h] < 0 ? reduced<min3>(s, h) : largest[h]; /* negative: the least integer */
            exponent[h] = mx_exponent(largest[h], c, rule);
            anchor[h] = max_or_nan(r.anchor[h], quad_max(exponent[h]));
            exponent[h] = fmaxf(exponent[h], anchor[h] - MX_RANGE);
        }
#pragma unroll
        for (int b = 0; b < EARLY; b++) {
            early[b] = mx_selector<KIND>(s, b, 0, c, exponent[0], rule);
        }
    }
    give();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const struct code_table table = code_table_of(exponent[h], anchor[h]);
        r.factor[h] = exp2_fast(r.anchor[h] - anchor[h]);
        r.anchor[h] = anchor[h];
#pragma unroll
        for (int b = 0; b < 4; b++) {
            const uint32_t selector =
                h == 0 && b < EARLY ? early[b % EARLY] : mx_selector<KIND>(s, b, h, c, exponent[h], rule);
            p[4 * b + h] = bytes_by(table.low, table.high, selector);
            p[4 * b + h + 2] = bytes_by(table.low, table.high, upper_half(selector, rule));
        }
    }
}

/* ---- FP8 --------------------------------------------------------------------------------------------------- */

__device__ __forceinline__ uint32_t fp8_bytes(const float *s, float c, float shift)
{
    return pack_e4m3(exp2_fast(fmaf(s[0], c, shift)), exp2_fast(fmaf(s[1], c, shift)), exp2_fast(fmaf(s[4], c, shift)),
                     exp2_fast(fmaf(s[5], c, shift)));
}

/* Word i of P: keys 2 c, 2 c + 1, 8 + 2 c, 8 + 2 c + 1 of 16, the order pi1 of the column view of V. */
__device__ __forceinline__ uint32_t fp8_word(const float (&s)[64], int i, float c, const float (&anchor)[2])
{
    const int h = i % 2;
    return fp8_bytes(s + i / 4 * 16 + i / 2 % 2 * 8 + 2 * h, c, FP8_LIFT + WHOLE - anchor[h]);
}

/* The largest of the thread's 32 scores of a row, whatever their signs. */
__device__ __forceinline__ float largest_of_any(const float (&s)[64], int h)
{
    float chain[4];
#pragma unroll
    for (int j = 0; j < 16; j++) {
        const float pair = max_or_nan(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]);
        chain[j % 4] = j < 4 ? pair : max_or_nan(chain[j % 4], pair);
    }
    return max_or_nan(max_or_nan(chain[0], chain[1]), max_or_nan(chain[2], chain[3]));
}

/* The running anchor, raised to cover this largest score. A NaN stays. */
__device__ __forceinline__ float fp8_anchor(float before, float largest, float c)
{
    return max_or_nan(before, quad_max(__fmaf_ru(largest, c, WHOLE)));
}

/* Scores to the A registers of P V. An anchor that is not negative is right: where an integer maximum is wrong, the
 * true one is negative too, and would not have raised the anchor. */
template <class TAKE, class GIVE>
__device__ __forceinline__ void codes_fp8(const float (&s)[64], struct code_rows &r, float c, const TAKE &take,
                                          const GIVE &give, uint32_t (&p)[16])
{
    enum { EARLY = 4 }; /* words */
    int largest[2];
    float anchor[2];
    largest_scores(s, largest);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        anchor[h] = fp8_anchor(r.anchor[h], __int_as_float(largest[h]), c);
    }
    take();
#pragma unroll
    for (int i = 0; i < EARLY; i++) {
        p[i] = fp8_word(s, i, c, anchor);
    }
    if (!__all_sync(0xffffffffu, anchor[0] >= WHOLE && anchor[1] >= WHOLE)) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            anchor[h] = fp8_anchor(r.anchor[h], largest_of_any(s, h), c);
        }
#pragma unroll
        for (int i = 0; i < EARLY; i++) {
            p[i] = fp8_word(s, i, c, anchor);
        }
    }
    give();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        r.factor[h] = exp2_fast(r.anchor[h] - anchor[h]);
        r.anchor[h] = anchor[h];
    }
#pragma unroll
    for (int i = EARLY; i < 16; i++) {
        p[i] = fp8_word(s, i, c, anchor);
    }
}
