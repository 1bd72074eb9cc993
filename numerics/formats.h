/* numerics: scalar conversions between FP32 and the small formats (docs/numerics.md, sections 1 and 2).
 *
 *   X_from_float(x)          the code: round to nearest even, saturate (+-Inf too), NaN -> NaN code (E2M1: +6)
 *   X_to_float(code)         the value, exact
 *   X_round(x)               X_to_float(X_from_float(x)) in one go, the same bits
 *   X_from_float_sr(x, bits), X_round_sr: stochastic. With f the fraction of the way from the neighbour nearer to zero
 *                            to the other one: away from zero if u < f, u = (bits + 1/2) / 2^32. Saturates.
 *
 * Everything is branch-free integer and FP32 arithmetic without tables, so that compilers vectorise loops over these
 * functions. Valid as C11 and CUDA C++. Needs FP32 subnormals (no flush-to-zero) and the default rounding mode. */
#pragma once

#include "core/tensor.h"

#include <string.h>

#ifdef __CUDACC__
#define FORMATS_FN static inline __host__ __device__
#else
#define FORMATS_FN static inline
#endif

#define E2M1_MAX 6.0f
#define E4M3_MAX 448.0f
#define E5M2_MAX 57344.0f
#define UE4M3_MAX 448.0f
#define UE5M3_MAX 61440.0f

/* ---- the common algorithm ---- */

FORMATS_FN uint32_t float_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

FORMATS_FN float float_from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

#define FLOAT_SIGN 0x80000000u
#define FLOAT_INF 0x7f800000u
#define FLOAT_NAN 0x7fc00000u

/* |x| as bits, at most max. NaN becomes max too: callers that have a NaN code select it at the end. */
FORMATS_FN uint32_t minifloat_clamp(float x, float max)
{
    uint32_t magnitude = float_bits(x) & ~FLOAT_SIGN;
    return magnitude < float_bits(max) ? magnitude : float_bits(max);
}

/* Bits of 2^max(floor(log2 |x|), min_exponent): the binade whose grid x is rounded on. */
FORMATS_FN uint32_t minifloat_binade(uint32_t magnitude, int min_exponent)
{
    uint32_t smallest = (uint32_t)(min_exponent + 127) << 23;
    uint32_t binade = magnitude & FLOAT_INF;
    return binade > smallest ? binade : smallest;
}

/* A number so large that the last mantissa bit of |x| + magic is one step of the grid: the FP32 adder then makes the
 * rounding to nearest even, subnormals of the small format included. */
FORMATS_FN float minifloat_magic(uint32_t binade, int mantissa_bits)
{
    return float_from_bits(binade + ((uint32_t)(23 - mantissa_bits) << 23));
}

/* The code of a clamped magnitude. The low bits of the sum hold |x| in steps, 0 .. 2^(mantissa_bits + 1) inclusive;
 * steps + (binades above the smallest) * 2^mantissa_bits is the code, since a carry of the mantissa bumps the exponent.
 */
FORMATS_FN uint32_t minifloat_encode(uint32_t magnitude, int mantissa_bits, int min_exponent)
{
    uint32_t binade = minifloat_binade(magnitude, min_exponent);
    uint32_t steps = float_bits(float_from_bits(magnitude) + minifloat_magic(binade, mantissa_bits)) & 0x7fffffu;
    return steps + ((binade - ((uint32_t)(min_exponent + 127) << 23)) >> (23 - mantissa_bits));
}

FORMATS_FN uint32_t minifloat_round(uint32_t magnitude, int mantissa_bits, int min_exponent)
{
    float magic = minifloat_magic(minifloat_binade(magnitude, min_exponent), mantissa_bits);
    return float_bits((float_from_bits(magnitude) + magic) - magic);
}

/* As minifloat_encode, rounded stochastically. The fraction is exact in FP32, its comparison exact in FP64. */
FORMATS_FN uint32_t minifloat_encode_sr(uint32_t magnitude, int mantissa_bits, int min_exponent, uint32_t random)
{
    uint32_t binade = minifloat_binade(magnitude, min_exponent);
    uint32_t inverse_step = ((254u + (uint32_t)mantissa_bits) << 23) - binade;
    float steps = float_from_bits(magnitude) * float_from_bits(inverse_step);
    uint32_t lower = (uint32_t)(int32_t)steps;
    double fraction = (double)(steps - (float)(int32_t)lower) * 4294967296.0;
    uint32_t code = lower + ((binade - ((uint32_t)(min_exponent + 127) << 23)) >> (23 - mantissa_bits));
    return code + ((double)random + 0.5 < fraction ? 1u : 0u);
}

/* Bits of the value of an unsigned code. A subnormal m 2^(min_exponent - mantissa_bits) is made as a normal number with
 * a hidden bit, which is then subtracted; for other codes zero is. */
FORMATS_FN uint32_t minifloat_decode(uint32_t code, int mantissa_bits, int min_exponent)
{
    uint32_t hidden = code >> mantissa_bits == 0u ? (uint32_t)(min_exponent + 127) << 23 : 0u;
    uint32_t exponent = (uint32_t)(min_exponent + 126) << 23;
    uint32_t bits = (code << (23 - mantissa_bits)) + (hidden ? hidden : exponent);
    return float_bits(float_from_bits(bits) - float_from_bits(hidden));
}

FORMATS_FN uint32_t float_sign(float x)
{
    return float_bits(x) & FLOAT_SIGN;
}

FORMATS_FN bool float_is_nan(float x)
{
    return (float_bits(x) & ~FLOAT_SIGN) > FLOAT_INF;
}

/* ---- E2M1: 0 .5 1 1.5 2 3 4 6, sign 8 ---- */

/* The sign that E2M1 keeps: NaN is +6. */
FORMATS_FN uint32_t e2m1_sign(float x)
{
    return float_is_nan(x) ? 0u : float_sign(x);
}

FORMATS_FN uint8_t e2m1_from_float(float x)
{
    return (uint8_t)(minifloat_encode(minifloat_clamp(x, E2M1_MAX), 1, 0) | e2m1_sign(x) >> 28);
}

FORMATS_FN float e2m1_to_float(uint8_t code)
{
    return float_from_bits(minifloat_decode(code & 7u, 1, 0) | (uint32_t)(code & 8u) << 28);
}

FORMATS_FN float e2m1_round(float x)
{
    return float_from_bits(minifloat_round(minifloat_clamp(x, E2M1_MAX), 1, 0) | e2m1_sign(x));
}

FORMATS_FN uint8_t e2m1_from_float_sr(float x, uint32_t bits)
{
    return (uint8_t)(minifloat_encode_sr(minifloat_clamp(x, E2M1_MAX), 1, 0, bits) | e2m1_sign(x) >> 28);
}

FORMATS_FN float e2m1_round_sr(float x, uint32_t bits)
{
    return e2m1_to_float(e2m1_from_float_sr(x, bits));
}

/* Storage: element 2i in the low nibble of byte i, element 2i + 1 in the high one. */
FORMATS_FN uint8_t e2m1_pack(uint8_t even, uint8_t odd)
{
    return (uint8_t)((even & 15u) | (uint32_t)odd << 4);
}

FORMATS_FN uint8_t e2m1_unpack_even(uint8_t byte)
{
    return byte & 15u;
}

FORMATS_FN uint8_t e2m1_unpack_odd(uint8_t byte)
{
    return (uint8_t)(byte >> 4);
}

/* ---- E4M3: subnormal step 2^-9, normal 2^-6 .. 448, NaN 0x7f and 0xff, no Inf. NaN is stored as 0x7f ---- */

FORMATS_FN uint8_t e4m3_from_float(float x)
{
    uint32_t code = minifloat_encode(minifloat_clamp(x, E4M3_MAX), 3, -6) | float_sign(x) >> 24;
    return (uint8_t)(float_is_nan(x) ? 0x7fu : code);
}

FORMATS_FN float e4m3_to_float(uint8_t code)
{
    uint32_t value = minifloat_decode(code & 0x7fu, 3, -6);
    value = value > float_bits(E4M3_MAX) ? FLOAT_NAN : value;
    return float_from_bits(value | (uint32_t)(code & 0x80u) << 24);
}

FORMATS_FN float e4m3_round(float x)
{
    uint32_t value = minifloat_round(minifloat_clamp(x, E4M3_MAX), 3, -6) | float_sign(x);
    return float_from_bits(float_is_nan(x) ? FLOAT_NAN : value);
}

FORMATS_FN uint8_t e4m3_from_float_sr(float x, uint32_t bits)
{
    uint32_t code = minifloat_encode_sr(minifloat_clamp(x, E4M3_MAX), 3, -6, bits) | float_sign(x) >> 24;
    return (uint8_t)(float_is_nan(x) ? 0x7fu : code);
}

FORMATS_FN float e4m3_round_sr(float x, uint32_t bits)
{
    return e4m3_to_float(e4m3_from_float_sr(x, bits));
}

/* ---- E5M2: subnormal step 2^-16, normal 2^-14 .. 57344, Inf 0x7c (never produced), NaN stored as 0x7f ---- */

FORMATS_FN uint8_t e5m2_from_float(float x)
{
    uint32_t code = minifloat_encode(minifloat_clamp(x, E5M2_MAX), 2, -14) | float_sign(x) >> 24;
    return (uint8_t)(float_is_nan(x) ? 0x7fu : code);
}

FORMATS_FN float e5m2_to_float(uint8_t code)
{
    uint32_t value = minifloat_decode(code & 0x7fu, 2, -14);
    value += value > float_bits(E5M2_MAX) ? FLOAT_INF - float_bits(65536.0f) : 0u;
    value = value > FLOAT_INF ? FLOAT_NAN : value;
    return float_from_bits(value | (uint32_t)(code & 0x80u) << 24);
}

FORMATS_FN float e5m2_round(float x)
{
    uint32_t value = minifloat_round(minifloat_clamp(x, E5M2_MAX), 2, -14) | float_sign(x);
    return float_from_bits(float_is_nan(x) ? FLOAT_NAN : value);
}

FORMATS_FN uint8_t e5m2_from_float_sr(float x, uint32_t bits)
{
    uint32_t code = minifloat_encode_sr(minifloat_clamp(x, E5M2_MAX), 2, -14, bits) | float_sign(x) >> 24;
    return (uint8_t)(float_is_nan(x) ? 0x7fu : code);
}

FORMATS_FN float e5m2_round_sr(float x, uint32_t bits)
{
    return e5m2_to_float(e5m2_from_float_sr(x, bits));
}

/* ---- unsigned scale formats: negatives and -0 give 0 ---- */

/* Magnitude of a source for an unsigned format. */
FORMATS_FN uint32_t unsigned_clamp(float x, float max)
{
    return float_sign(x) ? 0u : minifloat_clamp(x, max);
}

FORMATS_FN uint8_t ue4m3_from_float(float x)
{
    return (uint8_t)(float_is_nan(x) ? 0x7fu : minifloat_encode(unsigned_clamp(x, UE4M3_MAX), 3, -6));
}

FORMATS_FN float ue4m3_to_float(uint8_t code)
{
    return e4m3_to_float(code & 0x7fu);
}

/* No NaN code: NaN gives the largest value. Exponent field 31 is never produced. */
FORMATS_FN uint8_t ue5m3_from_float(float x)
{
    return (uint8_t)minifloat_encode(float_is_nan(x) ? float_bits(UE5M3_MAX) : unsigned_clamp(x, UE5M3_MAX), 3, -14);
}

FORMATS_FN float ue5m3_to_float(uint8_t code)
{
    return float_from_bits(minifloat_decode(code, 3, -14));
}

/* ---- E8M0: 2^(code - 127), NaN 0xff, no zero ---- */

enum e8m0_rounding { E8M0_FLOOR, E8M0_CEIL, E8M0_NEAREST };

/* The code of |x|, clamped to 0 .. 254 (0 too gives 0). NEAREST compares the mantissa with 1.5, ties to the even code.
 */
FORMATS_FN uint8_t e8m0_from_float(float x, enum e8m0_rounding rounding)
{
    uint32_t magnitude = float_bits(x) & ~FLOAT_SIGN;
    uint32_t code = magnitude >> 23;
    /* Bits of the largest fraction that is not rounded up. Below 2^-126 code 0 is 2^-127, mantissa bits 0x400000. */
    uint32_t fraction = magnitude & 0x7fffffu;
    uint32_t ceil_limit = code == 0u ? 0x400000u : 0u;
    uint32_t nearest_limit = code == 0u ? 0x600000u : 0x400000u - (code & 1u);
    uint32_t limit = rounding == E8M0_NEAREST ? nearest_limit : rounding == E8M0_CEIL ? ceil_limit : 0x7fffffu;
    code += fraction > limit ? 1u : 0u;
    code = code < 0xfeu ? code : 0xfeu;
    return (uint8_t)(magnitude > FLOAT_INF ? 0xffu : code);
}

FORMATS_FN float e8m0_to_float(uint8_t code)
{
    uint32_t bits = code == 0u ? 0x400000u : (uint32_t)code << 23;
    return float_from_bits(code == 0xffu ? FLOAT_NAN : bits);
}

/* ---- BF16, stochastic (to nearest: core/tensor.h) ---- */

/* Does not saturate: beyond the largest BF16 it may give Inf. NaN gives 0x7fff. */
FORMATS_FN bf16 bf16_from_float_sr(float x, uint32_t bits)
{
    uint32_t word = float_bits(x);
    uint32_t up = bits >> 16 < (word & 0xffffu) ? 1u : 0u;
    return (bf16)(float_is_nan(x) ? 0x7fffu : (word >> 16) + up);
}
