/* model: the teams of threads that normalise on the GPU. For rmsnorm's .cu files only.
 *
 * A team takes one group of `width` neighbours (an item): the lanes of a part of a warp for heads and tiny models, one
 * vector of eight a lane, or a block for wide rows, two vectors a lane, four beyond a width of 8192. */
#pragma once

#include "core/cuda.cuh"

enum {
    NARROW_WIDTH = 256,   /* up to here a part of a warp takes an item */
    NARROW_THREADS = 256, /* of a block of such teams, at most */
    WIDE_THREADS = 512,   /* at most */
};

struct team {
    int lane, lanes;
    int index; /* among the teams of the block */
};

__device__ __forceinline__ bf16x8 bf16x8_zeros()
{
    return {make_uint4(0, 0, 0, 0)};
}

template <bool NARROW> __device__ __forceinline__ team team_here(int lanes)
{
    if (NARROW) {
        return {(int)threadIdx.x & (lanes - 1), lanes, (int)threadIdx.x / lanes};
    }
    return {(int)threadIdx.x, (int)blockDim.x, 0};
}

template <bool NARROW> __device__ __forceinline__ float team_sum(float x, int lanes)
{
    if constexpr (NARROW) {
        for (int o = lanes / 2; o > 0; o /= 2) {
            x += __shfl_xor_sync(0xffffffffu, x, o);
        }
        return x;
    } else {
        return block_sum(x);
    }
}

/* Lanes of a team: the vectors of an item, up to a power of two or (wide) a whole number of warps. */
static inline int team_lanes(int64_t width, bool narrow, int vectors)
{
    int64_t needed = (width / 8 + vectors - 1) / vectors;
    if (!narrow) {
        return (int)((needed + 31) / 32 * 32);
    }
    int lanes = 1;
    while (lanes < needed) {
        lanes *= 2;
    }
    return lanes;
}
