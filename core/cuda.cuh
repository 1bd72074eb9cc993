/* core: what every kernel file shares: 16-byte vectors of BF16, reductions in a fixed order, random numbers, launches.
 * For .cu files only. */
#pragma once

extern "C" {
#include "core/cuda.h"
#include "core/rng.h"
}

#include <cuda_bf16.h>
#include <cuda_runtime.h>

/* After every launch: keeps the error for cuda_sync. */
static inline void cuda_launched(const struct cuda *on, const char *kernel)
{
    cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) {
        cuda_note(on, kernel, (int)error);
    }
}

static inline unsigned int cuda_blocks(int64_t n, int64_t per_block)
{
    return (unsigned int)((n + per_block - 1) / per_block);
}

/* ---- BF16 ---- */

/* The value of a BF16 code; the code of a value as core/tensor.h rounds (NaN gives 0x7fff, Inf stays). */
__device__ __forceinline__ float bf16_value(bf16 x)
{
    return __uint_as_float((uint32_t)x << 16);
}

__device__ __forceinline__ bf16 bf16_code(float x)
{
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

/* Eight neighbours in one 16-byte access; the address must be a multiple of 16. */
struct bf16x8 {
    uint4 words;
};

__device__ __forceinline__ bf16x8 bf16x8_load(const bf16 *p)
{
    return {*reinterpret_cast<const uint4 *>(p)};
}

__device__ __forceinline__ void bf16x8_store(bf16 *p, bf16x8 x)
{
    *reinterpret_cast<uint4 *>(p) = x.words;
}

__device__ __forceinline__ void bf16x8_unpack(bf16x8 x, float *y)
{
    const uint32_t w[4] = {x.words.x, x.words.y, x.words.z, x.words.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        y[2 * i] = __uint_as_float(w[i] << 16);
        y[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
    }
}

__device__ __forceinline__ bf16x8 bf16x8_pack(const float *y)
{
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        __nv_bfloat162 pair = __floats2bfloat162_rn(y[2 * i], y[2 * i + 1]);
        w[i] = *reinterpret_cast<uint32_t *>(&pair);
    }
    return {make_uint4(w[0], w[1], w[2], w[3])};
}

/* ---- reductions: butterflies, so the order is fixed and every lane has the result ---- */

__device__ __forceinline__ float warp_sum(float x)
{
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) {
        x += __shfl_xor_sync(0xffffffffu, x, o);
    }
    return x;
}

/* Sum over the block in every thread. blockDim.x: a multiple of 32, at most 1024. Ends with a barrier passed. */
__device__ __forceinline__ float block_sum(float x)
{
    __shared__ float part[32];
    const unsigned int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    x = warp_sum(x);
    __syncthreads(); /* an earlier call may still be reading */
    if (lane == 0) {
        part[warp] = x;
    }
    __syncthreads();
    return warp_sum(lane < warps ? part[lane] : 0.0f);
}

/* ---- random numbers: Philox 4x32-10, the same words as rng_words of core/rng.h ---- */

__device__ __forceinline__ uint4 philox(uint64_t seed, uint64_t stream, uint64_t counter)
{
    uint32_t c0 = (uint32_t)counter, c1 = (uint32_t)(counter >> 32), c2 = (uint32_t)stream,
             c3 = (uint32_t)(stream >> 32), k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        uint32_t h0 = __umulhi(0xD2511F53u, c0), l0 = 0xD2511F53u * c0;
        uint32_t h1 = __umulhi(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
        c0 = h1 ^ c1 ^ k0;
        c1 = l1;
        c2 = h0 ^ c3 ^ k1;
        c3 = l0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return make_uint4(c0, c1, c2, c3);
}
