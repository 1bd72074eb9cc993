/* optim: the device tables of a plan: what adamw_plan_cuda makes, and the kernels of the update and the norm read.
 * A block of the plan is at most PLAN_BLOCK neighbours of one segment; segments are cut from their first element. */
#pragma once

#include <stdint.h>

enum { PLAN_BLOCK = 4096 }; /* the block of optim/gradnorm.h */

struct plan_segment {
    uint64_t offset, elements, first_block;
    uint64_t weights_stream, moments_stream; /* of random numbers */
    uint64_t decays;
};

struct plan_block {
    uint32_t segment, index; /* of the block in its segment */
};

/* In memory: the segments' table behind the blocks' table. */
__host__ __device__ __forceinline__ const plan_segment *plan_segments(const void *plan, int64_t blocks)
{
    return reinterpret_cast<const plan_segment *>(static_cast<const plan_block *>(plan) + blocks);
}

/* Block number `block`, with all that its kernels want to know. */
struct plan_place {
    uint64_t at;      /* first element, in the flat arrays */
    uint64_t element; /* the same, in the segment */
    int n;            /* elements */
    uint32_t segment;
};

__device__ __forceinline__ plan_place plan_find(const void *plan, int64_t blocks, int64_t block)
{
    const plan_block b = static_cast<const plan_block *>(plan)[block];
    const plan_segment *s = plan_segments(plan, blocks) + b.segment;
    const uint64_t element = (uint64_t)b.index * PLAN_BLOCK, left = s->elements - element;
    return {s->offset + element, element, left < PLAN_BLOCK ? (int)left : (int)PLAN_BLOCK, b.segment};
}
