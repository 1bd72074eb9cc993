/* attention: Direct-P in the Hopper backward: codes of MXFP4 straight from transposed scores, as direct_p_sm90.cuh
 * makes them. For attention_bwd_sm90_fp8.cu.
 *
 * d = c s - n, the score relative to floor(LSE2), is all that codes are made from: the exponent of a block is a floor
 * of its largest d, taken as FP16 truncates 1536 + d, so that two queries fit a register and maxima are maxima of
 * 16-bit integers. Both families of MXFP4 run the same code, and differ in constants (struct bwd_map). */
#pragma once

#include "attention/attention_bwd_sm90_mxfp4.cuh"
#include "attention/direct_p_sm90.cuh"

/* The exponents E that a block may have, as fields E + 29: 2^(E + 14) in FP16 is field << 10. Below E = -23 the operand
 * in E5M2 holds nothing; above 1 is only an LSE2 that does not belong to the scores. */
enum { FIELD = 29, FIELD_LEAST = FIELD - 23, FIELD_MOST = FIELD + 1, BOTH_HALVES = 0x10001 };

/* Fields of blocks of 32 keys (the rows of two warps). whole: 1536 and what the family adds before the floor. */
static __device__ __forceinline__ void block_fields(const float (&d)[32], float whole, char *shared, int wg,
                                                    uint32_t (&e)[8])
{
#pragma unroll
    for (int j = 0; j < 8; j++) {
        e[j] = pack_f16_down(__fadd_rd(fmaxf(d[4 * j], d[4 * j + 2]), whole),
                             __fadd_rd(fmaxf(d[4 * j + 1], d[4 * j + 3]), whole));
    }
    /* The least first: what lies far below is no integer, and the sum would leave 16 bits. */
    const uint32_t least = __vmaxs2(warp_largest(e), (HALF_1536 - FIELD + FIELD_LEAST) * BOTH_HALVES);
    const uint32_t field =
        __viaddmin_s16x2(least, ((FIELD - HALF_1536) & 0xffff) * (uint32_t)BOTH_HALVES, FIELD_MOST * BOTH_HALVES);
    pair_largest(field, shared, wg, e);
}

/* Two codes of one key, as FP16: E2M1 codes times 2^9, which is E2M1 values times 2^-14. `offset`: the line's, of
 * either query. */
template <enum p_code CODE>
static __device__ __forceinline__ uint32_t codes_of_lines(float d0, float d1, const float (&offset)[2],
                                                          const struct bwd_map &map)
{
    const float y0 = fmaf(d0, map.slope, offset[0]), y1 = fmaf(d1, map.slope, offset[1]);
    if (CODE == CODE_AFFINE) {
        /* Rounded by half a step (exact ties go up); below 7, so that no code is passed over. */
        return (pack_f16_positive(y0, y1) + 0x01000100u) & 0xfe00fe00u;
    }
    const uint32_t whole = pack_f16_down(code_space_whole(y0), code_space_whole(y1));
    return __viaddmin_s16x2(whole, ((0 - HALF_1536) & 0xffff) * (uint32_t)BOTH_HALVES, 7 * BOTH_HALVES) << 9;
}

/* Either half of a field as FP16 is a small number, exactly: field 2^-24. */
static __device__ __forceinline__ float2 fields_as_floats(uint32_t fields)
{
    return __half22float2(*reinterpret_cast<const __half2 *>(&fields));
}

/* As mxfp4_codes: d of all scores (masked ones, and those of rows without a gradient, -Inf) to represented P (times 6
 * for the amplitude family), as A registers in E5M2. */
template <enum p_code CODE>
static __device__ __forceinline__ void map_codes(const float (&x)[32], const struct bwd_map &map, char *shared, int wg,
                                                 uint32_t (&codes)[8])
{
    uint32_t e[8];
    block_fields(x, map.whole, shared, wg, e);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        uint32_t halves[2][2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float *d = x + 4 * (j + i);
            const float2 field = fields_as_floats(e[j + i]);
            const float offset[2] = {fmaf(field.x, map.step, map.offset), fmaf(field.y, map.step, map.offset)};
#pragma unroll
            for (int h = 0; h < 2; h++) {
                halves[i][h] =
                    multiply_halves(codes_of_lines<CODE>(d[2 * h], d[2 * h + 1], offset, map), e[j + i] << 10);
            }
        }
        codes[j] = bytes_by(halves[0][0], halves[1][0], 0x7531); /* the upper byte of FP16 is E5M2 */
        codes[j + 1] = bytes_by(halves[0][1], halves[1][1], 0x7531);
    }
}

/* x = d - E + amplitude, where E = field - FIELD. */
static struct bwd_map map_of(const struct attention_recipe *recipe)
{
    const bool nearest = recipe->mx_rule == MX_NEAREST;
    const struct direct_line line = direct_line_of(recipe);
    struct bwd_map m;
    /* 3400 2^-13 is 1 - log2 1.5 to 2e-6, and exact beside 1536. */
    m.whole = 1536.0f + (nearest ? 3400 * 0x1p-13f : -2.0f);
    m.slope = line.slope;
    m.step = line.slope * -0x1p24f; /* fields come as FP16 codes */
    m.offset = line.slope * (amplitude_of(recipe) + FIELD) + line.offset;
    return m;
}
