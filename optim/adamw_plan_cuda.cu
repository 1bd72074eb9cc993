/* optim: what happens to the optimizer's device memory around the updates: the plan, and masters as FP32. */
#include "core/cuda.cuh"
#include "optim/adamw_master.cuh"
#include "optim/adamw_plan.cuh"

extern "C" {
#include "core/rng.h"
#include "optim/adamw_terms.h"
}

#include <stdlib.h>

/* ---- the plan ---- */

static int64_t blocks_of(const struct adamw_segment *segment)
{
    return (int64_t)((segment->elements + GRADNORM_BLOCK - 1) / GRADNORM_BLOCK);
}

static int64_t blocks_sum(const struct adamw_segment *segments, int n_segments)
{
    int64_t sum = 0;
    for (int s = 0; s < n_segments; s++) {
        sum += blocks_of(&segments[s]);
    }
    return sum;
}

size_t adamw_plan_bytes_cuda(const struct adamw_segment *segments, int n_segments)
{
    return (size_t)blocks_sum(segments, n_segments) * sizeof(plan_block) + (size_t)n_segments * sizeof(plan_segment) +
           sizeof(float);
}

/* The blocks of segment blockIdx.y. */
static __global__ void adamw_plan_kernel(void *plan, int64_t blocks)
{
    const plan_segment *s = plan_segments(plan, blocks) + blockIdx.y;
    const uint64_t n = (s->elements + GRADNORM_BLOCK - 1) / GRADNORM_BLOCK;
    for (uint64_t b = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; b < n; b += (uint64_t)gridDim.x * blockDim.x) {
        const uint64_t left = s->elements - b * GRADNORM_BLOCK;
        static_cast<plan_block *>(plan)[s->first_block + b] = {
            s->offset + b * GRADNORM_BLOCK, blockIdx.y, (uint16_t)(left < GRADNORM_BLOCK ? left : GRADNORM_BLOCK),
            (uint16_t)s->decays};
    }
}

void adamw_plan_cuda(struct adamw_cuda *state, const struct adamw_config *config, const struct adamw_segment *segments,
                     int n_segments, void *memory, const cuda *on)
{
    ASSERT(state->weights != NULL && (state->remainder != NULL) == config->master_fp32);
    ASSERT(n_segments >= 0 && n_segments < 65536);
    state->plan = memory;
    state->finds_amax = false;
    state->blocks = blocks_sum(segments, n_segments);
    ASSERT(state->blocks < INT32_MAX);
    if (n_segments == 0) {
        return;
    }
    plan_segment *table = (plan_segment *)calloc((size_t)n_segments, sizeof *table);
    ASSERT(table != NULL); /* a few kilobytes */
    float *unread = (float *)(plan_segments(memory, state->blocks) + n_segments);
    uint64_t first_block = 0;
    for (int s = 0; s < n_segments; s++) {
        const struct adamw_streams streams = adamw_streams_of(segments[s].name);
        ASSERT(segments[s].elements <= RNG_ELEMENTS_MAX);
        table[s].offset = segments[s].offset;
        table[s].elements = segments[s].elements;
        table[s].first_block = first_block;
        table[s].weights_stream = streams.weights;
        table[s].moments_stream = streams.moments;
        table[s].amax = segments[s].amax != NULL ? segments[s].amax : unread;
        state->finds_amax = state->finds_amax || segments[s].amax != NULL;
        table[s].decays = segments[s].decays;
        first_block += (uint64_t)blocks_of(&segments[s]);
    }
    cuda_zero(on, unread, sizeof *unread);
    cuda_upload(on, (plan_segment *)plan_segments(memory, state->blocks), table, (size_t)n_segments * sizeof *table);
    free(table);
    adamw_plan_kernel<<<dim3(64, (unsigned int)n_segments), 256, 0, on->stream>>>(memory, state->blocks);
    cuda_launched(on, "adamw_plan");
}

/* ---- masters as FP32 ---- */

static __global__ void master_join_kernel(const bf16 *weights, const int16_t *remainder, float *master, size_t n)
{
    const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i < n) {
        master[i] = master_join(weights[i], remainder[i]);
    }
}

static __global__ void master_split_kernel(const float *master, bf16 *weights, int16_t *remainder, size_t n)
{
    const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i < n) {
        master_split(master[i], &weights[i], &remainder[i]);
    }
}

void adamw_master_join_cuda(const bf16 *weights, const int16_t *remainder, float *master, size_t n, const cuda *on)
{
    if (n > 0) {
        master_join_kernel<<<cuda_blocks((int64_t)n, 256), 256, 0, on->stream>>>(weights, remainder, master, n);
        cuda_launched(on, "adamw_master_join");
    }
}

void adamw_master_split_cuda(const float *master, bf16 *weights, int16_t *remainder, size_t n, const cuda *on)
{
    if (n > 0) {
        master_split_kernel<<<cuda_blocks((int64_t)n, 256), 256, 0, on->stream>>>(master, weights, remainder, n);
        cuda_launched(on, "adamw_master_split");
    }
}
