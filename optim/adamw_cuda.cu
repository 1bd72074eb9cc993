/* optim: AdamW on the GPU: the FP32 operations of adamw_cpu.c, one by one and none contracted, so that masters and
 * moments have its bits. One kernel over the plan's blocks; every byte of the state is read once and written once.
 *
 * With BF16 moments memory can feed an element a clock and multiprocessor; divisions and roots as the compiler makes
 * them would be the limit, since each has a branch for the ends of the range. Here four or eight elements share one
 * branch: where all their moments are sound (neither tiny nor huge), the same correctly rounded results are made
 * without; else by the intrinsics. */
#include "core/cuda.cuh"
#include "optim/adamw_master.cuh"
#include "optim/adamw_plan.cuh"

extern "C" {
#include "numerics/formats.h"
#include "optim/adamw.h"
#include "optim/adamw_terms.h"
}

enum { ADAMW_THREADS = 256, ADAMW_QUADS = 2 /* groups of four elements that a thread has on their way */ };

/* ---- four neighbours ---- */

/* By value into the kernel. */
struct update {
    struct adamw_terms terms;
    float inverse1, inverse2; /* of the corrections */
    bool sound;               /* eps and the corrections lie within the bounds of sound_m and sound_v */
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

/* Four codes of 16 bits, the first in the lowest half. FULL: at an aligned address. Else the first n of four, anywhere;
 * the others are 0. */
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

/* ---- correctly rounded, for numbers far from the ends of the range ----
 * An approximation y of 1 / b within one unit in the last place, refined once, makes a quotient within one unit; its
 * remainder is exact in a fused multiply-add, and the corrected quotient is the nearest (Markstein, IBM J. R&D 34,
 * 1990; nvcc's division has the same steps behind its branch). Compared with the intrinsics by tests/optim/gpu_adamw.c,
 * through the bits of the state. */

/* a / b, y the nearest number to 1 / b. */
__device__ __forceinline__ float divide_by(float a, float b, float y)
{
    float q = __fmul_rn(a, y);
    q = __fmaf_rn(__fmaf_rn(-b, q, a), y, q);
    return __fmaf_rn(__fmaf_rn(-b, q, a), y, q);
}

__device__ __forceinline__ float divide_sound(float a, float b)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(b));
    y = __fmaf_rn(__fmaf_rn(-b, y, 1.0f), y, y);
    return divide_by(a, b, y);
}

__device__ __forceinline__ float root_sound(float x)
{
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    const float root = __fmul_rn(x, y);
    return x == 0.0f ? 0.0f : __fmaf_rn(__fmaf_rn(-root, root, x), __fmul_rn(0.5f, y), root);
}

/* +0, or neither tiny nor huge. With eps in [2^-60, 1] and the corrections in [2^-20, 1] the root is at most 2^40, the
 * quotient of m lies between 2^-121 and 2^110, and remainders, 2^-47 of their dividends, are exact. */
__device__ __forceinline__ bool sound_m(float m)
{
    return (fabsf(m) >= 0x1p-80f & fabsf(m) <= 0x1p30f) | (__float_as_uint(m) == 0u);
}

__device__ __forceinline__ bool sound_v(float v)
{
    return (v >= 0x1p-100f & v <= 0x1p60f) | (__float_as_uint(v) == 0u);
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
    if (sound) {
#pragma unroll
        for (int i = 0; i < 4 * QUADS; i++) {
            quad &q = quads[i / 4];
            const float root = root_sound(divide_by(q.v[i % 4], t.correction2, u.inverse2));
            const float m = divide_by(q.m[i % 4], t.correction1, u.inverse1);
            q.w[i % 4] = weight_of(q.w[i % 4], divide_sound(m, __fadd_rn(root, t.eps)), t.lr, decay);
        }
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
    uint32_t segment, seen; /* what the segment's amax held when the block began; above all where nobody asks */
};

__device__ __forceinline__ segment_terms terms_of(const update &u, const plan_block &p)
{
    segment_terms t = {p.decays ? u.weight_decay : 0.0f, 0, 0, 0, p.segment, UINT32_MAX};
    if (u.stochastic || u.state.finds_amax) {
        const plan_segment *s = plan_segments(u.state.plan, u.state.blocks) + p.segment;
        t.offset = s->offset, t.weights_stream = s->weights_stream, t.moments_stream = s->moments_stream;
        if (s->amax != NULL) {
            t.seen = *reinterpret_cast<volatile unsigned int *>(s->amax);
        }
    }
    return t;
}

/* ---- the largest weight ---- */

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

/* The random words of four elements, from the element-th of the segment. */
__device__ __forceinline__ void quad_random(uint32_t *random, const update &u, uint64_t stream, uint64_t element)
{
    const uint4 words = philox(u.seed, stream, (uint64_t)u.number << 32 | element / 4);
    random[0] = words.x, random[1] = words.y, random[2] = words.z, random[3] = words.w;
}

__device__ __forceinline__ uint2 codes_nearest(const float *x)
{
    __nv_bfloat162 first = __floats2bfloat162_rn(x[0], x[1]), second = __floats2bfloat162_rn(x[2], x[3]);
    return make_uint2(*reinterpret_cast<uint32_t *>(&first), *reinterpret_cast<uint32_t *>(&second));
}

/* bf16_from_float_sr of numerics/formats.h with the upper halves of `random`: up if the random half is below the lower
 * half of x, that is if its complement carries. Only a NaN, which is not SOUND, must not carry. */
template <bool SOUND> __device__ __forceinline__ uint2 codes_stochastic(const float *x, const uint32_t *random)
{
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (SOUND) {
            words[i] = __float_as_uint(x[i]) + (~random[i] >> 16);
        } else {
            words[i] = (uint32_t)bf16_from_float_sr(x[i], random[i]) << 16;
        }
    }
    return upper_halves(words);
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
    uint32_t random[4], shifted[4];
    uint2 w;
    if constexpr (MASTER) {
        w = master_store<FULL, SOUND>(q.w, u, at, n);
    } else if (u.stochastic) {
        quad_random(random, u, t.weights_stream, at - t.offset);
        w = codes_stochastic<SOUND>(q.w, random);
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
#pragma unroll
        for (int i = 0; i < 4; i++) {
            shifted[i] = random[i] << 16;
        }
        codes_store<FULL>(u.state.m, at, n, codes_stochastic<SOUND>(q.m, shifted));
        codes_store<FULL>(u.state.v, at, n, codes_stochastic<SOUND>(q.v, random));
    } else {
        codes_store<FULL>(u.state.m, at, n, codes_nearest(q.m));
        codes_store<FULL>(u.state.v, at, n, codes_nearest(q.v));
    }
}

/* ---- the update ---- */

/* ADAMW_QUADS groups of four a thread, `stride` elements apart, the first at `first` of the block's n elements. */
template <bool MASTER, bool MOMENTS_BF16, bool GRADS_BF16, bool FULL>
__device__ __forceinline__ void quads_step(const update &u, const segment_terms &t, const plan_block &p, int first,
                                           uint32_t &largest)
{
    /* With a split master there are registers for one group in the arithmetic and more blocks; measured. */
    constexpr int together = MASTER ? 1 : ADAMW_QUADS;
    const int stride = 4 * ADAMW_THREADS;
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

template <bool MASTER, bool MOMENTS_BF16, bool GRADS_BF16>
static __global__ void __launch_bounds__(ADAMW_THREADS, MOMENTS_BF16 ? 4 : 3)
    adamw_step_kernel(const __grid_constant__ update u)
{
    const plan_block p = plan_find(u.state.plan, blockIdx.x);
    const segment_terms t = terms_of(u, p);
    const int round = 4 * ADAMW_THREADS * ADAMW_QUADS;
    uint32_t largest = 0;
    for (int first = 0; first < p.n; first += round) {
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
    u.sound = sound_terms(&u.terms);
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
