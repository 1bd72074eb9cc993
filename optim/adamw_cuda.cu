/* optim: AdamW on the GPU: the FP32 operations of adamw_cpu.c, one by one and none contracted, so that masters and
 * moments have its bits. One kernel over the plan's blocks; every byte of the state is read once and written once.
 *
 * With BF16 moments memory can feed an element a clock and multiprocessor; divisions and roots as the compiler makes
 * them would be the limit, since each has a branch for the ends of the range. Here four or eight elements share one
 * branch: where all their moments are sound (neither tiny nor huge), the same correctly rounded results are made
 * without; else by the intrinsics. */
#include "core/cuda.cuh"
#include "optim/adamw_divide.cuh"
#include "optim/adamw_fours.cuh"
#include "optim/adamw_master.cuh"
#include "optim/adamw_plan.cuh"

extern "C" {
#include "optim/adamw.h"
#include "optim/adamw_terms.h"
}

enum {
    ADAMW_QUADS = 2, /* groups of four elements that a thread has in flight */
    PHILOX_ROUNDS = 10,
};

/* ---- four elements ---- */

/* By value into the kernel. */
struct update {
    struct adamw_terms terms;
    float inverse1, inverse2; /* of the corrections, */
    int divide_steps;         /* and what their quotients need, see divide_by */
    bool sound;               /* eps and the corrections lie within the bounds of sound_m and sound_v */
    struct adamw_cuda state;
    const void *grads;
    float weight_decay;
    uint32_t keys[2 * PHILOX_ROUNDS]; /* of the rounds of Philox, from the seed */
    uint32_t number;
    bool stochastic;
};

struct quad {
    float w[4], m[4], v[4], g[4];
};

template <bool MASTER, bool MOMENTS_BF16, bool GRADS_BF16, bool FULL>
__device__ __forceinline__ void quad_load(quad &q, const update &u, uint64_t at, int n)
{
    if constexpr (MASTER) {
        const uint2 w = codes_load<FULL>(u.state.weights, at, n), rest = codes_load<FULL>(u.state.remainder, at, n);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            q.w[i] = master_join(code_at(w, i), (int16_t)code_at(rest, i));
        }
    } else {
        load4<true, FULL>(u.state.weights, at, n, q.w);
    }
    load4<MOMENTS_BF16, FULL>(u.state.m, at, n, q.m);
    load4<MOMENTS_BF16, FULL>(u.state.v, at, n, q.v);
    load4<GRADS_BF16, FULL>(u.grads, at, n, q.g);
}

static bool sound_terms(const struct adamw_terms *t)
{
    return t->eps >= 0x1p-60f && t->eps <= 1.0f && t->correction1 >= 0x1p-20f && t->correction1 <= 1.0f &&
           t->correction2 >= 0x1p-20f && t->correction2 <= 1.0f;
}

__device__ __forceinline__ float weight_of(float w, float step, float lr, float decay)
{
    return __fsub_rn(w, __fmul_rn(lr, __fadd_rn(step, __fmul_rn(decay, w))));
}

/* The weights of 4 QUADS elements whose moments are sound. */
template <int QUADS, int STEPS> __device__ __forceinline__ void weights_sound(quad *quads, const update &u, float decay)
{
    const struct adamw_terms &t = u.terms;
#pragma unroll
    for (int i = 0; i < 4 * QUADS; i++) {
        quad &q = quads[i / 4];
        const float root = root_sound(divide_by<STEPS>(q.v[i % 4], t.correction2, u.inverse2));
        const float m = divide_by<STEPS>(q.m[i % 4], t.correction1, u.inverse1);
        q.w[i % 4] = weight_of(q.w[i % 4], divide_sound(m, __fadd_rn(root, t.eps)), t.lr, decay);
    }
}

/* As compute() of adamw_cpu.c, for 4 QUADS elements. True if all results are sound: finite, above all. */
template <int QUADS> __device__ __forceinline__ bool quads_update(quad *quads, const update &u, float decay)
{
    const struct adamw_terms &t = u.terms;
    bool sound = u.sound;
#pragma unroll
    for (int i = 0; i < 4 * QUADS; i++) {
        quad &q = quads[i / 4];
        const float g = __fmul_rn(q.g[i % 4], t.grad_scale);
        float &m = q.m[i % 4], &v = q.v[i % 4];
        m = __fadd_rn(__fmul_rn(t.beta1, m), __fmul_rn(t.rest1, g));
        v = __fadd_rn(__fmul_rn(t.beta2, v), __fmul_rn(t.rest2, __fmul_rn(g, g)));
        sound = sound & sound_m(m) & sound_v(v);
    }
    if (sound && u.divide_steps == 0) {
        weights_sound<QUADS, 0>(quads, u, decay);
    } else if (sound && u.divide_steps == 1) {
        weights_sound<QUADS, 1>(quads, u, decay);
    } else if (sound) {
        weights_sound<QUADS, 2>(quads, u, decay);
    } else {
#pragma unroll
        for (int i = 0; i < 4 * QUADS; i++) {
            quad &q = quads[i / 4];
            const float root = __fsqrt_rn(__fdiv_rn(q.v[i % 4], t.correction2));
            const float m = __fdiv_rn(q.m[i % 4], t.correction1);
            q.w[i % 4] = weight_of(q.w[i % 4], __fdiv_rn(m, __fadd_rn(root, t.eps)), t.lr, decay);
        }
    }
#pragma unroll
    for (int i = 0; i < 4 * QUADS; i++) {
        sound = sound & (fabsf(quads[i / 4].w[i % 4]) <= 0x1p120f);
    }
    return sound;
}

/* What a block's kernel wants of its segment, read before the first store: the compiler must assume that a store could
 * change the table. */
struct segment_terms {
    float decay;
    uint64_t offset, weights_stream, moments_stream; /* the streams for stochastic rounding only */
    uint32_t segment, seen; /* what the segment's amax held when the block began; above all if nobody asks */
};

__device__ __forceinline__ segment_terms terms_of(const update &u, const plan_block &p)
{
    segment_terms t = {p.decays ? u.weight_decay : 0.0f, 0, 0, 0, p.segment, UINT32_MAX};
    if (u.stochastic || u.state.finds_amax) {
        const plan_segment *s = plan_segments(u.state.plan, u.state.blocks) + p.segment;
        t.offset = s->offset, t.weights_stream = s->weights_stream, t.moments_stream = s->moments_stream;
        if (u.state.finds_amax) { /* of every segment alike: a branch by segment would wait for the table */
            t.seen = *reinterpret_cast<volatile unsigned int *>(s->amax);
        }
    }
    return t;
}

/* ---- the largest weight ---- */

/* A maximum has no order: atomics keep bits. Without a wait or a barrier at the block's end, and hardly any warp adds
 * to the traffic at one address: most began when it held more already. All lanes call it. */
__device__ __forceinline__ void amax_raise(const update &u, const segment_terms &t, uint32_t largest)
{
    const unsigned int code = __reduce_max_sync(0xffffffffu, max(largest >> 16, largest & 0xffffu)), bits = code << 16;
    if (threadIdx.x % 32 == 0 && bits > t.seen) {
        float *amax = plan_segments(u.state.plan, u.state.blocks)[t.segment].amax;
        atomicMax(reinterpret_cast<unsigned int *>(amax), bits);
    }
}

/* The random words of four elements, from the element-th of the segment: philox of core/cuda.cuh with keys that the
 * host has made, which every thread would make again. */
__device__ __forceinline__ void quad_random(uint32_t *c, const update &u, uint64_t stream, uint64_t element)
{
    c[0] = (uint32_t)(element / 4), c[1] = u.number, c[2] = (uint32_t)stream, c[3] = (uint32_t)(stream >> 32);
#pragma unroll
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        const uint64_t p0 = (uint64_t)0xD2511F53u * c[0], p1 = (uint64_t)0xCD9E8D57u * c[2];
        c[0] = (uint32_t)(p1 >> 32) ^ c[1] ^ u.keys[2 * round];
        c[1] = (uint32_t)p1;
        c[2] = (uint32_t)(p0 >> 32) ^ c[3] ^ u.keys[2 * round + 1];
        c[3] = (uint32_t)p0;
    }
}

static void keys_make(uint32_t *keys, uint64_t seed)
{
    for (uint32_t round = 0; round < PHILOX_ROUNDS; round++) {
        keys[2 * round] = (uint32_t)seed + round * 0x9E3779B9u;
        keys[2 * round + 1] = (uint32_t)(seed >> 32) + round * 0xBB67AE85u;
    }
}

template <bool FULL, bool SOUND>
__device__ __forceinline__ uint2 master_store(const float *x, const update &u, uint64_t at, int n)
{
    uint2 w, rest;
    if constexpr (SOUND) { /* master_split of four */
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            words[i] = __float_as_uint(x[i]) + 0x8000u;
        }
        w = upper_halves(words), rest = lower_halves(words);
        rest.x ^= 0x80008000u, rest.y ^= 0x80008000u; /* the carry's bit: the lower halves as they were */
    } else {
        bf16 code[4];
        int16_t low[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            master_split(x[i], &code[i], &low[i]);
        }
        w = make_uint2(code[0] | (uint32_t)code[1] << 16, code[2] | (uint32_t)code[3] << 16);
        rest = make_uint2((uint16_t)low[0] | (uint32_t)(uint16_t)low[1] << 16,
                          (uint16_t)low[2] | (uint32_t)(uint16_t)low[3] << 16);
    }
    codes_store<FULL>(u.state.remainder, at, n, rest);
    return w;
}

template <bool MASTER, bool MOMENTS_BF16, bool FULL, bool SOUND>
__device__ __forceinline__ void quad_store(const quad &q, const update &u, const segment_terms &t, uint64_t at, int n,
                                           uint32_t &largest)
{
    uint32_t random[4];
    uint2 w;
    if constexpr (MASTER) {
        w = master_store<FULL, SOUND>(q.w, u, at, n);
    } else if (u.stochastic) {
        quad_random(random, u, t.weights_stream, at - t.offset);
        w = codes_stochastic<SOUND, false>(q.w, random);
    } else {
        w = codes_nearest(q.w);
    }
    codes_store<FULL>(u.state.weights, at, n, w);
    magnitudes_add<FULL>(largest, w, n);
    if constexpr (!MOMENTS_BF16) {
        floats_store<FULL>(static_cast<float *>(u.state.m), at, n, q.m);
        floats_store<FULL>(static_cast<float *>(u.state.v), at, n, q.v);
    } else if (u.stochastic) {
        quad_random(random, u, t.moments_stream, at - t.offset);
        codes_store<FULL>(u.state.m, at, n, codes_stochastic<SOUND, true>(q.m, random));
        codes_store<FULL>(u.state.v, at, n, codes_stochastic<SOUND, false>(q.v, random));
    } else {
        codes_store<FULL>(u.state.m, at, n, codes_nearest(q.m));
        codes_store<FULL>(u.state.v, at, n, codes_nearest(q.v));
    }
}

/* ---- the update ---- */

/* Of a block; measured. With BF16 moments and no master, where arithmetic is the limit, small blocks lose less at their
 * ends. */
__host__ __device__ constexpr int threads_of(bool master, bool moments_bf16)
{
    return moments_bf16 && !master ? 128 : 256;
}

/* ADAMW_QUADS groups of four a thread, `stride` elements apart, the first at `first` of the block's n elements. */
template <bool MASTER, bool MOMENTS_BF16, bool GRADS_BF16, bool FULL>
__device__ __forceinline__ void quads_step(const update &u, const segment_terms &t, const plan_block &p, int first,
                                           uint32_t &largest)
{
    /* With a split master there are registers for one group in the arithmetic and more blocks; measured. */
    constexpr int together = MASTER ? 1 : ADAMW_QUADS;
    const int stride = 4 * threads_of(MASTER, MOMENTS_BF16);
    quad q[ADAMW_QUADS];
#pragma unroll
    for (int k = 0; k < ADAMW_QUADS; k++) {
        const int i = first + k * stride;
        quad_load<MASTER, MOMENTS_BF16, GRADS_BF16, FULL>(q[k], u, p.at + i, min((int)p.n - i, 4));
    }
#pragma unroll
    for (int k0 = 0; k0 < ADAMW_QUADS; k0 += together) {
        const bool sound = quads_update<together>(q + k0, u, t.decay);
#pragma unroll
        for (int k = k0; k < k0 + together; k++) {
            const int i = first + k * stride, n = min((int)p.n - i, 4);
            if (sound) {
                quad_store<MASTER, MOMENTS_BF16, FULL, true>(q[k], u, t, p.at + i, n, largest);
            } else {
                quad_store<MASTER, MOMENTS_BF16, FULL, false>(q[k], u, t, p.at + i, n, largest);
            }
        }
    }
}

__device__ __forceinline__ void prefetch(const void *array, uint64_t byte)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char *>(array) + byte));
}

/* Prefetches what quads_step will load into the L2 cache: there are no registers for it. */
template <bool MASTER, bool MOMENTS_BF16, bool GRADS_BF16>
__device__ __forceinline__ void quads_prefetch(const update &u, uint64_t at)
{
#pragma unroll
    for (int k = 0; k < ADAMW_QUADS; k++, at += 4 * threads_of(MASTER, MOMENTS_BF16)) {
        prefetch(u.state.weights, 2 * at);
        if constexpr (MASTER) {
            prefetch(u.state.remainder, 2 * at);
        }
        prefetch(u.state.m, (MOMENTS_BF16 ? 2 : 4) * at);
        prefetch(u.state.v, (MOMENTS_BF16 ? 2 : 4) * at);
        prefetch(u.grads, (GRADS_BF16 ? 2 : 4) * at);
    }
}

template <bool MASTER, bool MOMENTS_BF16, bool GRADS_BF16>
static __global__ void __launch_bounds__(threads_of(MASTER, MOMENTS_BF16),
                                         (MOMENTS_BF16 ? 1024 : 768) / threads_of(MASTER, MOMENTS_BF16))
    adamw_step_kernel(const __grid_constant__ update u)
{
    const plan_block p = plan_find(u.state.plan, blockIdx.x);
    const segment_terms t = terms_of(u, p);
    const int round = 4 * threads_of(MASTER, MOMENTS_BF16) * ADAMW_QUADS;
    uint32_t largest = 0;
    for (int first = 0; first < p.n; first += round) {
        if (first + 2 * round <= p.n) {
            quads_prefetch<MASTER, MOMENTS_BF16, GRADS_BF16>(u, p.at + first + round + 4 * (int)threadIdx.x);
        }
        if (p.at % 4 == 0 && first + round <= p.n) {
            quads_step<MASTER, MOMENTS_BF16, GRADS_BF16, true>(u, t, p, first + 4 * (int)threadIdx.x, largest);
        } else {
            quads_step<MASTER, MOMENTS_BF16, GRADS_BF16, false>(u, t, p, first + 4 * (int)threadIdx.x, largest);
        }
    }
    amax_raise(u, t, largest);
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
    u.inverse1 = 1.0f / u.terms.correction1;
    u.inverse2 = 1.0f / u.terms.correction2;
    u.divide_steps =
        max(divide_steps_of(u.terms.correction1, u.inverse1), divide_steps_of(u.terms.correction2, u.inverse2));
    u.sound = sound_terms(&u.terms);
    u.state = *state;
    u.grads = grads;
    u.weight_decay = config->weight_decay;
    keys_make(u.keys, config->seed);
    u.number = number;
    u.stochastic = config->stochastic_rounding;
    const bool bf16_grads = grad_type == DTYPE_BF16;
    adamw_kernel *kernel =
        config->master_fp32
            ? (config->moments_bf16 ? kernel_for<true, true>(bf16_grads) : kernel_for<true, false>(bf16_grads))
            : (config->moments_bf16 ? kernel_for<false, true>(bf16_grads) : kernel_for<false, false>(bf16_grads));
    kernel<<<(unsigned int)state->blocks, threads_of(config->master_fp32, config->moments_bf16), 0, on->stream>>>(u);
    cuda_launched(on, "adamw_step");
}
