/* optim: four neighbours of the optimizer's arrays on the GPU: as they lie in memory, as FP32 values, as BF16 codes.
 * FULL: at an aligned address; else the first n of four, anywhere, and the others are 0. For .cu files only. */
#pragma once

#include "core/cuda.cuh"

extern "C" {
#include "numerics/formats.h"
}

/* ---- memory ---- */

/* Four codes of 16 bits, the first in the lowest half. */
template <bool FULL> __device__ __forceinline__ uint2 codes_load(const void *from, uint64_t at, int n)
{
    const uint16_t *p = static_cast<const uint16_t *>(from) + at;
    if constexpr (FULL) {
        return *reinterpret_cast<const uint2 *>(p);
    } else {
        return make_uint2((n > 0 ? p[0] : 0u) | (n > 1 ? (uint32_t)p[1] << 16 : 0u),
                          (n > 2 ? p[2] : 0u) | (n > 3 ? (uint32_t)p[3] << 16 : 0u));
    }
}

template <bool FULL> __device__ __forceinline__ void codes_store(void *to, uint64_t at, int n, uint2 codes)
{
    uint16_t *p = static_cast<uint16_t *>(to) + at;
    if constexpr (FULL) {
        *reinterpret_cast<uint2 *>(p) = codes;
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i < n) {
                p[i] = (uint16_t)((i < 2 ? codes.x : codes.y) >> 16 * (i % 2));
            }
        }
    }
}

/* Upper, lower halves of four words. */
__device__ __forceinline__ uint2 upper_halves(const uint32_t *words)
{
    return make_uint2(__byte_perm(words[0], words[1], 0x7632), __byte_perm(words[2], words[3], 0x7632));
}

__device__ __forceinline__ uint2 lower_halves(const uint32_t *words)
{
    return make_uint2(__byte_perm(words[0], words[1], 0x5410), __byte_perm(words[2], words[3], 0x5410));
}

__device__ __forceinline__ bf16 code_at(uint2 codes, int i)
{
    return (bf16)((i < 2 ? codes.x : codes.y) >> 16 * (i % 2));
}

template <bool BF16, bool FULL> __device__ __forceinline__ void load4(const void *from, uint64_t at, int n, float *x)
{
    if constexpr (BF16) {
        const uint2 codes = codes_load<FULL>(from, at, n);
        x[0] = __uint_as_float(codes.x << 16), x[1] = __uint_as_float(codes.x & 0xffff0000u);
        x[2] = __uint_as_float(codes.y << 16), x[3] = __uint_as_float(codes.y & 0xffff0000u);
    } else if constexpr (FULL) {
        const float4 four = *reinterpret_cast<const float4 *>(static_cast<const float *>(from) + at);
        x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[i] = i < n ? static_cast<const float *>(from)[at + i] : 0.0f;
        }
    }
}

template <bool FULL> __device__ __forceinline__ void floats_store(float *to, uint64_t at, int n, const float *x)
{
    if constexpr (FULL) {
        *reinterpret_cast<float4 *>(to + at) = make_float4(x[0], x[1], x[2], x[3]);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i < n) {
                to[at + i] = x[i];
            }
        }
    }
}

/* ---- BF16 ---- */

__device__ __forceinline__ uint2 codes_nearest(const float *x)
{
    __nv_bfloat162 first = __floats2bfloat162_rn(x[0], x[1]), second = __floats2bfloat162_rn(x[2], x[3]);
    return make_uint2(*reinterpret_cast<uint32_t *>(&first), *reinterpret_cast<uint32_t *>(&second));
}

/* bf16_from_float_sr of numerics/formats.h with the upper halves of `random`, or the LOWER ones: up if that half is
 * below the lower half of x, that is if its complement carries. Only a NaN, which is not SOUND, must not carry. */
template <bool SOUND, bool LOWER>
__device__ __forceinline__ uint2 codes_stochastic(const float *x, const uint32_t *random)
{
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (SOUND) {
            words[i] = __float_as_uint(x[i]) + 0xffffu - (LOWER ? random[i] & 0xffffu : random[i] >> 16);
        } else {
            words[i] = (uint32_t)bf16_from_float_sr(x[i], LOWER ? random[i] << 16 : random[i]) << 16;
        }
    }
    return upper_halves(words);
}

/* The larger magnitudes of two pairs of BF16 codes, after the first n of four more: they order like their bits. */
template <bool FULL> __device__ __forceinline__ void magnitudes_add(uint32_t &largest, uint2 codes, int n)
{
    if constexpr (!FULL) { /* what lies behind the segment's end may be anything */
        codes.x = n > 1 ? codes.x : n > 0 ? codes.x & 0xffffu : 0u;
        codes.y = n > 3 ? codes.y : n > 2 ? codes.y & 0xffffu : 0u;
    }
    largest = __vmaxu2(largest, codes.x & 0x7fff7fffu);
    largest = __vmaxu2(largest, codes.y & 0x7fff7fffu);
}
