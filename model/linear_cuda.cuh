/* model: what the kernels of FP8 and NVFP4 operands share, and amax_publish for kernels that write such operands. For
 * .cu files only. */
#pragma once

extern "C" {
#include "numerics/blocks.h"
#include "numerics/formats.h"
}

#include "core/cuda.cuh"

/* The larger magnitudes of two pairs of BF16: they order like their bits, NaN above Inf above all. */
__device__ __forceinline__ uint32_t magnitude_max(uint32_t max, uint32_t pair)
{
    return __vmaxu2(max, pair & 0x7fff7fffu);
}

/* Eight codes more. */
__device__ __forceinline__ uint32_t magnitude_max8(uint32_t max, bf16x8 x)
{
    max = magnitude_max(magnitude_max(max, x.words.x), x.words.y);
    return magnitude_max(magnitude_max(max, x.words.z), x.words.w);
}

/* The larger of a pair as FP32 bits. */
__device__ __forceinline__ uint32_t magnitude_of(uint32_t pair)
{
    return pair >> 16 > (pair & 0xffffu) ? pair & 0xffff0000u : pair << 16;
}

/* *amax = max(*amax, max over the block), of magnitudes as FP32 bits. A maximum has no order: atomics keep bits. Every
 * thread of the block must call it. */
__device__ __forceinline__ void amax_publish(uint32_t magnitude, float *amax)
{
    __shared__ uint32_t part[32];
    const unsigned int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    magnitude = __reduce_max_sync(0xffffffffu, magnitude);
    if (lane == 0) {
        part[warp] = magnitude;
    }
    __syncthreads();
    if (warp == 0) {
        magnitude = __reduce_max_sync(0xffffffffu, lane < blockDim.x >> 5 ? part[lane] : 0u);
        /* Many blocks at one address would wait for each other: most see that it holds more already. An old value seen
         * costs an atomic, no more. */
        if (lane == 0 && magnitude > *reinterpret_cast<volatile unsigned int *>(amax)) {
            atomicMax(reinterpret_cast<unsigned int *>(amax), magnitude);
        }
    }
}

/* NaN or Inf: the operand becomes NaN as a whole. */
__device__ __forceinline__ bool is_broken(float amax)
{
    return (float_bits(amax) & ~FLOAT_SIGN) >= FLOAT_INF;
}

/* pow2_scale of numerics/blocks.h on the bits: 2^k from the difference of exponents, one less if the fraction of amax
 * is larger. The exponent 0 of subnormal numbers gives k above the limit, as it must. */
__device__ __forceinline__ float power_scale(float amax, float limit)
{
    const uint32_t bits = float_bits(amax), limit_bits = float_bits(limit);
    int k = (int)(limit_bits >> 23) - (int)(bits >> 23) - ((bits & 0x7fffffu) > (limit_bits & 0x7fffffu) ? 1 : 0);
    k = k < POW2_SCALE_MAX ? k : POW2_SCALE_MAX;
    return bits == 0 || is_broken(amax) ? 1.0f : float_from_bits((uint32_t)(k + 127) << 23);
}
