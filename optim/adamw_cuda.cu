/* optim: AdamW on the GPU: the FP32 operations of adamw_cpu.c, one by one and none contracted, so that masters and
 * moments have its bits. One kernel over the plan's blocks; every byte of the state is read once and written once.
 *
 * Split master. A BF16 weight w and a signed 16-bit remainder r stand for the FP32 number with the bits (w << 16) + r.
 * With w rounded to nearest and exact ties away from zero, r is just the lower half of the master's bits, and each FP32
 * number has exactly one (w, r). Rounding ties to even would not leave room: an even w would have 65537 masters. So all
 * bits of the master are kept, and w differs from RNE(master) only where the master lies exactly between two BF16
 * numbers and the lower one is even: one in 2^17 masters, by a rounding that is as near. */
#include "core/cuda.cuh"
#include "optim/adamw_plan.cuh"

extern "C" {
#include "numerics/formats.h"
#include "optim/adamw.h"
#include "optim/adamw_terms.h"
}

#include <stdlib.h>

enum { ADAMW_THREADS = 256, ADAMW_QUADS = 2 /* groups of four elements that a thread has on their way */ };

/* ---- the plan ---- */

static int64_t blocks_of(const struct adamw_segment *segment)
{
    return (int64_t)((segment->elements + PLAN_BLOCK - 1) / PLAN_BLOCK);
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
    return (size_t)blocks_sum(segments, n_segments) * sizeof(plan_block) + (size_t)n_segments * sizeof(plan_segment);
}

/* The blocks of segment blockIdx.y. */
static __global__ void adamw_plan_kernel(void *plan, int64_t blocks)
{
    const plan_segment *s = plan_segments(plan, blocks) + blockIdx.y;
    const uint64_t n = (s->elements + PLAN_BLOCK - 1) / PLAN_BLOCK;
    for (uint64_t b = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; b < n; b += (uint64_t)gridDim.x * blockDim.x) {
        static_cast<plan_block *>(plan)[s->first_block + b] = {blockIdx.y, (uint32_t)b};
    }
}

void adamw_plan_cuda(struct adamw_cuda *state, const struct adamw_config *config, const struct adamw_segment *segments,
                     int n_segments, void *memory, const cuda *on)
{
    ASSERT(state->weights != NULL && (state->remainder != NULL) == config->master_fp32);
    ASSERT(n_segments >= 0 && n_segments < 65536);
    state->plan = memory;
    state->blocks = blocks_sum(segments, n_segments);
    ASSERT(state->blocks < INT32_MAX);
    if (n_segments == 0) {
        return;
    }
    plan_segment *table = (plan_segment *)calloc((size_t)n_segments, sizeof *table);
    ASSERT(table != NULL); /* a few kilobytes */
    uint64_t first_block = 0;
    for (int s = 0; s < n_segments; s++) {
        const struct adamw_streams streams = adamw_streams_of(segments[s].name);
        ASSERT(segments[s].elements <= RNG_ELEMENTS_MAX);
        table[s].offset = segments[s].offset;
        table[s].elements = segments[s].elements;
        table[s].first_block = first_block;
        table[s].weights_stream = streams.weights;
        table[s].moments_stream = streams.moments;
        table[s].decays = segments[s].decays;
        first_block += (uint64_t)blocks_of(&segments[s]);
    }
    cuda_upload(on, (plan_segment *)plan_segments(memory, state->blocks), table, (size_t)n_segments * sizeof *table);
    free(table);
    adamw_plan_kernel<<<dim3(64, (unsigned int)n_segments), 256, 0, on->stream>>>(memory, state->blocks);
    cuda_launched(on, "adamw_plan");
}

/* ---- the split master ---- */

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

/* ---- four neighbours ---- */

/* By value into the kernel. */
struct update {
    struct adamw_terms terms;
    struct adamw_cuda state;
    const void *grads;
    float weight_decay;
    uint64_t seed;
    uint32_t number;
    bool stochastic;
};

struct quad {
    float w[4], m[4], v[4], g[4];
};

/* FULL: four elements at an aligned address. Else the first n of four, anywhere; the others are 0. */
template <bool BF16, bool FULL> __device__ __forceinline__ void load4(const void *from, uint64_t at, int n, float *x)
{
    if constexpr (FULL && BF16) {
        const uint2 two = *reinterpret_cast<const uint2 *>(static_cast<const bf16 *>(from) + at);
        x[0] = __uint_as_float(two.x << 16), x[1] = __uint_as_float(two.x & 0xffff0000u);
        x[2] = __uint_as_float(two.y << 16), x[3] = __uint_as_float(two.y & 0xffff0000u);
    } else if constexpr (FULL) {
        const float4 four = *reinterpret_cast<const float4 *>(static_cast<const float *>(from) + at);
        x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[i] = 0.0f;
            if (i < n) {
                x[i] = BF16 ? bf16_value(static_cast<const bf16 *>(from)[at + i])
                            : static_cast<const float *>(from)[at + i];
            }
        }
    }
}

template <bool FULL> __device__ __forceinline__ void store_codes4(uint16_t *to, uint64_t at, int n, const uint16_t *x)
{
    if constexpr (FULL) {
        *reinterpret_cast<uint2 *>(to + at) = make_uint2(x[0] | (uint32_t)x[1] << 16, x[2] | (uint32_t)x[3] << 16);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i < n) {
                to[at + i] = x[i];
            }
        }
    }
}

template <bool FULL> __device__ __forceinline__ void store_floats4(float *to, uint64_t at, int n, const float *x)
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

template <bool MASTER, bool MOMENTS_BF16, bool GRADS_BF16, bool FULL>
__device__ __forceinline__ void quad_load(quad &q, const update &u, uint64_t at, int n)
{
    load4<true, FULL>(u.state.weights, at, n, q.w);
    if constexpr (MASTER) {
        float rest[4]; /* as the upper half of a word */
        load4<true, FULL>(u.state.remainder, at, n, rest);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            q.w[i] = master_join((bf16)(__float_as_uint(q.w[i]) >> 16), (int16_t)(__float_as_uint(rest[i]) >> 16));
        }
    }
    load4<MOMENTS_BF16, FULL>(u.state.m, at, n, q.m);
    load4<MOMENTS_BF16, FULL>(u.state.v, at, n, q.v);
    load4<GRADS_BF16, FULL>(u.grads, at, n, q.g);
}

/* As compute() of adamw_cpu.c. */
__device__ __forceinline__ void quad_update(quad &q, const struct adamw_terms &t, float decay)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float g = __fmul_rn(q.g[i], t.grad_scale), w = q.w[i];
        const float m = __fadd_rn(__fmul_rn(t.beta1, q.m[i]), __fmul_rn(t.rest1, g));
        const float v = __fadd_rn(__fmul_rn(t.beta2, q.v[i]), __fmul_rn(t.rest2, __fmul_rn(g, g)));
        const float root = __fsqrt_rn(__fdiv_rn(v, t.correction2));
        const float step = __fdiv_rn(__fdiv_rn(m, t.correction1), __fadd_rn(root, t.eps));
        q.w[i] = __fsub_rn(w, __fmul_rn(t.lr, __fadd_rn(step, __fmul_rn(decay, w))));
        q.m[i] = m;
        q.v[i] = v;
    }
}

/* The random words of four elements of the segment. */
__device__ __forceinline__ void quad_random(uint32_t *random, const update &u, uint64_t stream, uint64_t element)
{
    const uint4 words = philox(u.seed, stream, (uint64_t)u.number << 32 | element / 4);
    random[0] = words.x, random[1] = words.y, random[2] = words.z, random[3] = words.w;
}

template <bool MASTER, bool FULL>
__device__ __forceinline__ void weights_store(const quad &q, const update &u, const plan_segment *s, uint64_t at,
                                              uint64_t element, int n)
{
    bf16 w[4];
    if constexpr (MASTER) {
        int16_t rest[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            master_split(q.w[i], &w[i], &rest[i]);
        }
        store_codes4<FULL>(reinterpret_cast<uint16_t *>(u.state.remainder), at, n, reinterpret_cast<uint16_t *>(rest));
    } else if (u.stochastic) {
        uint32_t random[4];
        quad_random(random, u, s->weights_stream, element);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w[i] = bf16_from_float_sr(q.w[i], random[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w[i] = bf16_code(q.w[i]);
        }
    }
    store_codes4<FULL>(u.state.weights, at, n, w);
}

template <bool MOMENTS_BF16, bool FULL>
__device__ __forceinline__ void moments_store(const quad &q, const update &u, const plan_segment *s, uint64_t at,
                                              uint64_t element, int n)
{
    if constexpr (!MOMENTS_BF16) {
        store_floats4<FULL>(static_cast<float *>(u.state.m), at, n, q.m);
        store_floats4<FULL>(static_cast<float *>(u.state.v), at, n, q.v);
    } else {
        bf16 m[4], v[4];
        uint32_t random[4];
        if (u.stochastic) {
            quad_random(random, u, s->moments_stream, element);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            m[i] = u.stochastic ? bf16_from_float_sr(q.m[i], random[i] << 16) : bf16_code(q.m[i]);
            v[i] = u.stochastic ? bf16_from_float_sr(q.v[i], random[i]) : bf16_code(q.v[i]);
        }
        store_codes4<FULL>(static_cast<bf16 *>(u.state.m), at, n, m);
        store_codes4<FULL>(static_cast<bf16 *>(u.state.v), at, n, v);
    }
}

/* ---- the update ---- */

/* ADAMW_QUADS groups of four a thread, `stride` elements apart, the first at `first` of the block's n elements. */
template <bool MASTER, bool MOMENTS_BF16, bool GRADS_BF16, bool FULL>
__device__ __forceinline__ void quads_step(const update &u, const plan_segment *s, const plan_place &p, float decay,
                                           int first)
{
    quad q[ADAMW_QUADS];
    const int stride = 4 * ADAMW_THREADS;
#pragma unroll
    for (int k = 0; k < ADAMW_QUADS; k++) {
        const int i = first + k * stride;
        quad_load<MASTER, MOMENTS_BF16, GRADS_BF16, FULL>(q[k], u, p.at + i, min(p.n - i, 4));
    }
#pragma unroll
    for (int k = 0; k < ADAMW_QUADS; k++) {
        const int i = first + k * stride, n = min(p.n - i, 4);
        quad_update(q[k], u.terms, decay);
        weights_store<MASTER, FULL>(q[k], u, s, p.at + i, p.element + i, n);
        moments_store<MOMENTS_BF16, FULL>(q[k], u, s, p.at + i, p.element + i, n);
    }
}

template <bool MASTER, bool MOMENTS_BF16, bool GRADS_BF16>
static __global__ void __launch_bounds__(ADAMW_THREADS) adamw_step_kernel(const __grid_constant__ update u)
{
    const plan_place p = plan_find(u.state.plan, u.state.blocks, blockIdx.x);
    const plan_segment *s = plan_segments(u.state.plan, u.state.blocks) + p.segment;
    const float decay = s->decays ? u.weight_decay : 0.0f;
    const int round = 4 * ADAMW_THREADS * ADAMW_QUADS;
    for (int first = 0; first < p.n; first += round) {
        if (p.at % 4 == 0 && first + round <= p.n) {
            quads_step<MASTER, MOMENTS_BF16, GRADS_BF16, true>(u, s, p, decay, first + 4 * (int)threadIdx.x);
        } else {
            quads_step<MASTER, MOMENTS_BF16, GRADS_BF16, false>(u, s, p, decay, first + 4 * (int)threadIdx.x);
        }
    }
}

typedef void adamw_kernel(update);

template <bool MASTER, bool MOMENTS_BF16> static adamw_kernel *kernel_for(bool grads_bf16)
{
    return grads_bf16 ? adamw_step_kernel<MASTER, MOMENTS_BF16, true> : adamw_step_kernel<MASTER, MOMENTS_BF16, false>;
}

void adamw_step_cuda(const struct adamw_config *config, const struct adamw_cuda *state, const void *grads,
                     enum dtype grad_type, float grad_scale, float lr, uint32_t number, const cuda *on)
{
    ASSERT((state->remainder != NULL) == config->master_fp32 && state->m != NULL && state->v != NULL);
    ASSERT(grad_type == DTYPE_F32 || grad_type == DTYPE_BF16);
    if (state->blocks == 0) {
        return;
    }
    update u = {};
    u.terms = adamw_terms_of(config, grad_scale, lr, number);
    u.state = *state;
    u.grads = grads;
    u.weight_decay = config->weight_decay;
    u.seed = config->seed;
    u.number = number;
    u.stochastic = config->stochastic_rounding;
    const bool bf16_grads = grad_type == DTYPE_BF16;
    adamw_kernel *kernel =
        config->master_fp32
            ? (config->moments_bf16 ? kernel_for<true, true>(bf16_grads) : kernel_for<true, false>(bf16_grads))
            : (config->moments_bf16 ? kernel_for<false, true>(bf16_grads) : kernel_for<false, false>(bf16_grads));
    kernel<<<(unsigned int)state->blocks, ADAMW_THREADS, 0, on->stream>>>(u);
    cuda_launched(on, "adamw_step");
}
