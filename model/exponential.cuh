/* model: e^x on the GPU's special function unit, for softmax and sigmoid. For .cu files only. */
#pragma once

/* e^x = 2^(x log2 e); relative error at most 2^-22 + |x| 2^-24, far below the rounding to BF16 that follows. Results
 * below 2^-126 are 0. Inf and NaN as usual. PTX ISA, ex2.approx. */
__device__ __forceinline__ float exponential_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
    return y;
}

/* 1 / x within one unit in the last place; 1 / Inf = 0. PTX ISA, rcp.approx. */
__device__ __forceinline__ float reciprocal_fast(float x)
{
    float y;
    asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
