/* optim: the device tables of a plan: what adamw_plan_cuda makes, and the kernels of the update and the norm read.
 * A block of the plan is at most GRADNORM_BLOCK neighbours of one segment; segments are cut from their first element.
 * For .cu files only. */
#pragma once

extern "C" {
#include "optim/gradnorm.h"
}

struct plan_segment {
    uint64_t offset, elements, first_block;
    uint64_t weights_stream, moments_stream; /* of random numbers */
    float *amax;                             /* a dummy where it is not wanted */
    uint64_t decays;
};

/* All that a kernel must know before its first load, in one access of 16 bytes. */
struct __align__(16) plan_block
{
    uint64_t at; /* first element, in the flat arrays */
    uint32_t segment;
    uint16_t n, decays; /* elements; as of the segment */
};

/* In memory: the segments' table behind the blocks' table, then the dummy. */
__host__ __device__ __forceinline__ const plan_segment *plan_segments(const void *plan, int64_t blocks)
{
    return reinterpret_cast<const plan_segment *>(static_cast<const plan_block *>(plan) + blocks);
}

__device__ __forceinline__ plan_block plan_find(const void *plan, int64_t block)
{
    const uint4 words = static_cast<const uint4 *>(plan)[block];
    return {(uint64_t)words.y << 32 | words.x, words.z, (uint16_t)words.w, (uint16_t)(words.w >> 16)};
}
