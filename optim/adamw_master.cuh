/* optim: the split master: an FP32 number as a BF16 weight and a signed 16-bit remainder. For .cu files only.
 *
 * A BF16 weight w and a signed 16-bit remainder r stand for the FP32 number with the bits (w << 16) + r.
 * With w rounded to nearest and exact ties away from zero, r is just the lower half of the master's bits, and each FP32
 * number has exactly one (w, r). Rounding ties to even would not leave room: an even w would have 65537 masters. So all
 * bits of the master are kept, and w differs from RNE(master) only where the master lies exactly between two BF16
 * numbers and the lower one is even: one in 2^17 masters, by a rounding that is as near. */
#pragma once

#include "core/cuda.cuh"

__device__ __forceinline__ float master_join(bf16 w, int16_t remainder)
{
    return __uint_as_float(((uint32_t)w << 16) + (uint32_t)(int32_t)remainder);
}

/* NaN becomes the NaN 0x7fff with remainder 0: a carry must not make a number of it. */
__device__ __forceinline__ void master_split(float master, bf16 *w, int16_t *remainder)
{
    const uint32_t bits = __float_as_uint(master);
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    *w = nan ? (bf16)0x7fff : (bf16)((bits + 0x8000u) >> 16);
    *remainder = nan ? (int16_t)0 : (int16_t)(bits & 0xffffu);
}
