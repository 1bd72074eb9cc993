/* attention: Direct-P on Hopper, what both passes share: E2M1 codes from a straight line in the score, without an
 * exponential (docs/numerics.md, section 5 step 3, producers affine and code_space). For the kernels with MXFP4 codes.
 *
 * The line is y = a x + b, where exact codes round 2^x; the block's exponent is subtracted in x. affine: y is the
 * value, scaled by 2^-14, so that truncated FP16 codes of it are E2M1 codes with more mantissa bits (2^-14 is the least
 * normal number of FP16). code_space: y = 2 x + 2.37 is the code, and truncating 1536 + y to FP16 takes its floor:
 * between 1024 and 2048 the grid of FP16 is the integers. */
#pragma once

#include "attention/sm90.cuh"

extern "C" {
#include "attention/recipe.h"
}

enum { HALF_1536 = 0x6600 }; /* the FP16 code of 1536 */

/* [cvt, .relu] Towards zero; negative values become zero. */
__device__ __forceinline__ uint32_t pack_f16_positive(float low, float high)
{
    uint32_t y;
    asm("cvt.rz.relu.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

/* 1536 + y, rounded down: the floor of y >= 0 is the code (8 counts as 7). Codes 1 and 2 begin at x = -2 and -.415037
 * (y = -1.63 and 1.539926), as a flatter line has them, which lies below y from y = 2.3 on. Floats of which one is not
 * negative are ordered like integers. (Tried in place of the maximum: saturating FMAs, which do not use the ALU, were
 * no faster; 1536 inside both lines was, by 4 %, but their roundings move 2 codes of 100,000.) */
__device__ __forceinline__ float code_space_whole(float y)
{
    const float flat = fmaf(y, 1.0f / 3.169926f, 1.0f + 1.63f / 3.169926f);
    const int most = __vimax_s32_relu(__float_as_int(y), __float_as_int(flat));
    return __fadd_rd(__int_as_float(most), 1536.0f);
}

/* Added to x: log2 6 in the amplitude family, 0 in OCP's. */
static inline float amplitude_of(const struct attention_recipe *recipe)
{
    return recipe->mx_rule == MX_NEAREST ? 0x1.4ae00ep+1f : 0.0f; /* fl32(log2 6) */
}

/* A block's exponent is floor(max + this): to the nearest power of two (log2 1.5 is where the next one is nearer), or
 * OCP's. */
static inline float exponent_bias_of(const struct attention_recipe *recipe)
{
    return recipe->mx_rule == MX_NEAREST ? 1.0f - 0x1.2b8034p-1f : -2.0f;
}

/* The line of a recipe's map, slope and offset on x; affine times 2^-14. */
struct direct_line {
    float slope, offset;
};

static inline struct direct_line direct_line_of(const struct attention_recipe *recipe)
{
    struct direct_line line = {2.0f, 2.37f};
    if (recipe->p_map == P_AFFINE) {
        line.slope = recipe->affine_a * 0x1p-14f;
        line.offset = recipe->affine_b * 0x1p-14f;
    }
    return line;
}
