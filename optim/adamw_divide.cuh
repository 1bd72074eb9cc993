/* optim: quotients and roots on the GPU, correctly rounded, for numbers far from the ends of the range: without the
 * branches of the compiler's. For .cu files only.
 *
 * An approximation y of 1 / b within one unit in the last place, refined once, makes a quotient within one unit; its
 * remainder is exact in a fused multiply-add, and the corrected quotient is the nearest (Markstein, IBM J. R&D 34,
 * 1990; nvcc's division has the same steps behind its branch). Compared with the intrinsics by tests/optim/gpu_adamw.c,
 * through the bits of the state. */
#pragma once

#include <math.h>

/* a / b, y the nearest number to 1 / b: a product, corrected STEPS times. How often b needs it: never if y is exact, as
 * of the corrections in all but the first updates, which are 1. Once if y errs by .9 2^-24 at most: the product then
 * errs by less than 1.4 units, so that only a quotient about half a unit away could be rounded wrongly. Its remainder
 * is exact and its correction errs by less than 2^-25 units, but no quotient of two such numbers lies as close to the
 * middle of two others. Else twice. */
template <int STEPS> __device__ __forceinline__ float divide_by(float a, float b, float y)
{
    float q = __fmul_rn(a, y);
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        q = __fmaf_rn(__fmaf_rn(-b, q, a), y, q);
    }
    return q;
}

static int divide_steps_of(float b, float y)
{
    const double error = fabs((double)b * (double)y - 1.0); /* exact */
    return error == 0.0 ? 0 : error <= 0.9 * 0x1p-24 ? 1 : 2;
}

__device__ __forceinline__ float divide_sound(float a, float b)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(b));
    y = __fmaf_rn(__fmaf_rn(-b, y, 1.0f), y, y);
    return divide_by<2>(a, b, y);
}

__device__ __forceinline__ float root_sound(float x)
{
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(fmaxf(x, 0x1p-126f))); /* of 0 it would be Inf */
    const float root = __fmul_rn(x, y);
    return __fmaf_rn(__fmaf_rn(-root, root, x), __fmul_rn(0.5f, y), root);
}

/* +0, or neither tiny nor huge. With eps in [2^-60, 1] and the corrections in [2^-20, 1] the root is at most 2^40, the
 * quotient of m lies between 2^-121 and 2^110, and remainders, 2^-47 of their dividends, are exact. */
__device__ __forceinline__ bool sound_m(float m)
{
    return (fabsf(m) >= 0x1p-80f & fabsf(m) <= 0x1p30f) | (__float_as_uint(m) == 0u);
}

__device__ __forceinline__ bool sound_v(float v)
{
    return (v >= 0x1p-100f & v <= 0x1p60f) | (__float_as_uint(v) == 0u);
}
