/* model: e^x in FP32 for loops that compilers should vectorise; the same bits with every libm. */
#pragma once

#include "numerics/formats.h"

#include <math.h>

/* Within 2 units in the last place; 0 and Inf beyond the range, NaN stays NaN.
 * e^x = 2^k e^r with r = x - k ln 2, |r| <= 0.347, where the Taylor series to r^7 errs by 6e-9. ln 2 is cut in two so
 * that k times its upper part is exact. 2^k is applied in two factors: k may lie beyond a single exponent. */
static inline float exponential(float x)
{
    float clamped = x < 90.0f ? x : 90.0f;
    clamped = clamped > -105.0f ? clamped : -105.0f;
    float k = rintf(clamped * 0x1.715476p+0f);
    float r = __builtin_fmaf(k, -0x1.62e400p-1f, clamped);
    r = __builtin_fmaf(k, -0x1.7f7d1cp-20f, r);
    float p = 1.0f / 5040.0f;
    p = __builtin_fmaf(p, r, 1.0f / 720.0f);
    p = __builtin_fmaf(p, r, 1.0f / 120.0f);
    p = __builtin_fmaf(p, r, 1.0f / 24.0f);
    p = __builtin_fmaf(p, r, 1.0f / 6.0f);
    p = __builtin_fmaf(p, r, 0.5f);
    p = __builtin_fmaf(p, r, 1.0f);
    p = __builtin_fmaf(p, r, 1.0f);
    int32_t whole = (int32_t)k, half = whole >> 1;
    float first = float_from_bits((uint32_t)(half + 127) << 23);
    float second = float_from_bits((uint32_t)(whole - half + 127) << 23);
    return x == x ? p * first * second : x;
}
