/* attention: what the FP8 backward on Hopper must know of a kv head and its query heads before it can quantise: amax
 * and largest row norms over all tokens, and the power-of-two scales that follow (struct bwd_facts). For
 * attention_bwd_sm90_publish.cu.
 *
 * One kernel has measuring and publishing blocks. A publishing block waits until the facts of its kv head are complete;
 * what it reads is then still in the L2 cache. */
#pragma once

#include "attention/attention_bwd_sm90_fp8.cuh"
#include "attention/attention_cuda_operands.cuh"

#include <cuda_fp8.h>

enum {
    PUBLISH_THREADS = 256,
    PUBLISH_WARPS = PUBLISH_THREADS / 32,
    PUBLISH_ROWS = PUBLISH_THREADS / 16, /* 16 threads hold a row */
    FACT_TOKENS = 2 * PUBLISH_ROWS,      /* of a measuring block, of all heads: few, so that it ends soon */
    FACT_HEADS = 4,                      /* at a time */
};

/* ---- rows of a head ---------------------------------------------------------------------------------------- */

/* [createpolicy] L2 keeps lines that are read again soon, and gives up those that were read for the last time. */
static __device__ __forceinline__ uint64_t l2_policy(bool last)
{
    uint64_t policy;
    if (last) {
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    } else {
        asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    }
    return policy;
}

/* [ld, cache_hint] */
static __device__ __forceinline__ uint4 load_by_policy(const void *from, uint64_t policy)
{
    uint4 x;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from), "l"(policy));
    return x;
}

/* This thread's 8 features (part threadIdx & 15) of tokens first + threadIdx / 16 + 16 i; beyond the sequence the last
 * token's. `last`: nobody reads them again. Offsets from the first token take 32 bits: N x 16 strides. */
template <int N>
static __device__ __forceinline__ void load_rows(uint4 *x, const struct head_view &view, int batch, int head, int first,
                                                 int tokens, bool last)
{
    const char *tile = reinterpret_cast<const char *>(view.data + batch * view.batch_stride + head * view.head_stride +
                                                      first * view.token_stride);
    const uint32_t stride = (uint32_t)view.token_stride * sizeof(bf16);
    const uint64_t policy = l2_policy(last);
#pragma unroll
    for (int i = 0; i < N; i++) {
        const uint32_t row = min(i * PUBLISH_ROWS + (int)threadIdx.x / 16, tokens - 1 - first);
        x[i] = load_by_policy(tile + (row * stride + (threadIdx.x & 15) * 16), policy);
    }
}

/* Sums of four rows, each over the 16 lanes that hold it, in the order of a butterfly; this lane gets that of row
 * row_of_sum(). */
static __device__ __forceinline__ float sum16(const float (&x)[4])
{
    const bool high = (threadIdx.x & 8) != 0, odd = (threadIdx.x & 4) != 0;
    const float a = (high ? x[2] : x[0]) + __shfl_xor_sync(0xffffffffu, high ? x[0] : x[2], 8);
    const float b = (high ? x[3] : x[1]) + __shfl_xor_sync(0xffffffffu, high ? x[1] : x[3], 8);
    float y = (odd ? b : a) + __shfl_xor_sync(0xffffffffu, odd ? a : b, 4);
    y += __shfl_xor_sync(0xffffffffu, y, 2);
    return y + __shfl_xor_sync(0xffffffffu, y, 1);
}

static __device__ __forceinline__ int row_of_sum()
{
    return (threadIdx.x >> 2 & 2) + (threadIdx.x >> 2 & 1);
}

/* ---- powers of two ----------------------------------------------------------------------------------------- */

/* The scale of V in dP. */
static __device__ __forceinline__ float lift_of_values(const struct bwd8_plan &p, float amax)
{
    return p.rules.value_e4m3 ? value_lift(amax) : pow2_scale_of(amax, E4M3_MAX);
}

static __device__ __noinline__ struct bwd_lifts lifts_from(const struct bwd_rules r, const struct bwd_facts f, float v,
                                                           float scale)
{
    struct bwd_lifts l;
    l.dout = r.dout_fixed ? 4.0f : pow2_scale_of(__uint_as_float(f.dout), r.dout_e5m2 ? E5M2_MAX : E4M3_MAX);
    l.q = r.view_fixed ? 4.0f : pow2_scale_of(__uint_as_float(f.q), E4M3_MAX);
    l.k = r.view_fixed ? 4.0f : pow2_scale_of(__uint_as_float(f.k), E4M3_MAX);
    l.v = v;
    const float bound = 2.0f * __uint_as_float(f.dout_norm) * (__uint_as_float(f.v_norm) / r.value_unit);
    l.ds = r.ds_fixed ? 256.0f * scale : !(bound > 0) ? 1.0f : 16.0f * fminf(pow2_scale_of(bound, E4M3_MAX), 0x1p100f);
    return l;
}

/* ---- maxima ------------------------------------------------------------------------------------------------ */

/* The facts of the rows that one thread has seen, numbered as struct bwd_facts. */
enum { FACT_DOUT, FACT_DOUT_NORM, FACT_Q, FACT_K, FACT_V, FACT_V_NORM, FACTS };

/* Maximum of `most` and the magnitudes of N x 8 BF16 values, as two maxima side by side; bits are ordered as |x| is,
 * NaN above all. */
template <int N> static __device__ __forceinline__ uint32_t amax2(uint32_t most, const uint4 *x)
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        most = __vmaxu2(most, __vmaxu2(__vmaxu2(x[i].x & 0x7fff7fffu, x[i].y & 0x7fff7fffu),
                                       __vmaxu2(x[i].z & 0x7fff7fffu, x[i].w & 0x7fff7fffu)));
    }
    return most;
}

/* The larger one, as bits of a float. */
static __device__ __forceinline__ uint32_t amax1(uint32_t two)
{
    return max(two << 16, two & 0xffff0000u);
}

/* The largest of four rows' norms, as bits: of sums of squares, each over the 16 lanes that hold a row, times `factor`.
 */
static __device__ __forceinline__ uint32_t norm_of(const float (&squares)[4], float factor)
{
    return __float_as_uint(sqrtf(sum16(squares)) * factor) & 0x7fffffffu;
}

/* norm_of 4 rows of x, in which no magnitude of the warp is above `most` (bits of a float). A power of two brings them
 * to about 1, so that squares stay within FP32. */
static __device__ __forceinline__ uint32_t norm_most(const uint4 *x, uint32_t most)
{
    const uint32_t binade = min(max(most >> 23, 1u), 253u);
    const float down = __uint_as_float((254 - binade) << 23), up = __uint_as_float(binade << 23);
    float squares[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float y[8];
        bf16x8_unpack({x[i]}, y);
#pragma unroll
        for (int d = 0; d < 8; d++) {
            y[d] *= down;
            squares[i] = fmaf(y[d], y[d], squares[i]);
        }
    }
    return norm_of(squares, up);
}

/* norm_of 4 rows as E4M3(lift x) / lift. */
static __device__ __forceinline__ uint32_t coded_norm_most(const uint4 *x, float lift)
{
    float squares[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float y[8];
        bf16x8_unpack({x[i]}, y);
#pragma unroll
        for (int d = 0; d < 8; d++) {
            y[d] = float(__nv_fp8_e4m3(y[d] * lift));
            squares[i] = fmaf(y[d], y[d], squares[i]);
        }
    }
    return norm_of(squares, 1.0f / lift);
}

/* [atom.add, acq_rel] What this thread, and those it met at barriers, wrote before is visible to who reads the count.
 */
static __device__ __forceinline__ uint32_t count_one(uint32_t *counter)
{
    uint32_t before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

/* Raises the facts in global memory to the block's maxima (a maximum needs no order), then counts the block. Returns
 * how many were counted before. */
static __device__ __forceinline__ uint32_t raise(struct bwd_facts *f, const uint32_t (&most)[FACTS])
{
    __shared__ uint32_t warps[PUBLISH_WARPS][FACTS];
    __shared__ uint32_t before;
#pragma unroll
    for (int i = 0; i < FACTS; i++) {
        const uint32_t x = __reduce_max_sync(0xffffffffu, most[i]);
        if ((threadIdx.x & 31) == 0) {
            warps[threadIdx.x / 32][i] = x;
        }
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        if (threadIdx.x < FACTS) {
            uint32_t x = 0;
#pragma unroll
            for (int warp = 0; warp < PUBLISH_WARPS; warp++) {
                x = max(x, warps[warp][threadIdx.x]);
            }
            if (x != 0) {
                atomicMax(&f->dout + threadIdx.x, x);
            }
        }
        __syncwarp();
        if (threadIdx.x == 0) {
            before = count_one(&f->measured);
        }
    }
    __syncthreads();
    return before;
}

/* The norm of V once more, where its scale is not the one that measure() assumed. */
static __device__ __forceinline__ uint32_t norm_again(const struct head_view &v, int batch, int head, int tokens,
                                                      float lift)
{
    __shared__ uint32_t most;
    if (threadIdx.x == 0) {
        most = 0;
    }
    __syncthreads();
#pragma unroll 1
    for (int first = 0; first < tokens; first += 4 * PUBLISH_ROWS) {
        uint4 x[4];
        load_rows<4>(x, v, batch, head, first, tokens, false);
        atomicMax(&most, coded_norm_most(x, lift));
    }
    __syncthreads();
    return most;
}

/* Largest magnitudes that the caller knows: of Q over the kv head's query heads, and of K. */
static __device__ __forceinline__ void take_amax(const struct bwd8_plan &p, const float *amax, int unit,
                                                 struct bwd_facts &f)
{
    const int group = p.b.heads / p.b.kv_heads, kv = unit % p.b.kv_heads;
    amax += (int64_t)(unit / p.b.kv_heads) * (p.b.heads + 2 * p.b.kv_heads);
    for (int head = kv * group; head < (kv + 1) * group; head++) {
        f.q = max(f.q, __float_as_uint(amax[head]));
    }
    f.k = __float_as_uint(amax[p.b.heads + kv]);
}

/* By the block that measured last: computes the scales. */
static __device__ __forceinline__ void conclude(const struct bwd8_plan &p, const struct bwd8_inputs &in, int unit)
{
    struct bwd_facts *f = p.facts + unit;
    const float lift = lift_of_values(p, __uint_as_float(__ldcg(&f->v)));
    const bool again = p.rules.value_e4m3 && lift != VALUE_LIFT;
    uint32_t norm = 0;
    if (again) {
        norm = norm_again(in.v, unit / p.b.kv_heads, unit % p.b.kv_heads, p.b.tokens, lift);
    }
    if (threadIdx.x == 0) {
        struct bwd_facts all = *f;
        all.v_norm = again ? norm : all.v_norm;
        if (in.amax != NULL) {
            take_amax(p, in.amax, unit, all);
        }
        f->lifts = lifts_from(p.rules, all, lift, p.b.scale);
        count_one(&f->measured);
    }
}

/* Number of blocks that measure one kv head. */
static __host__ __device__ __forceinline__ int fact_blocks(int tokens)
{
    return (tokens + FACT_TOKENS - 1) / FACT_TOKENS;
}

/* The rows of a kv head's query heads, four heads at a time (the last one again where there are fewer). */
static __device__ __forceinline__ void load_heads(uint4 (&x)[8], const struct head_view &view, int batch, int head,
                                                  int end, int first, int tokens)
{
#pragma unroll
    for (int i = 0; i < FACT_HEADS; i++) {
        load_rows<2>(x + 2 * i, view, batch, min(head + i, end - 1), first, tokens, false);
    }
}

/* Block: FACT_TOKENS tokens of one kv head and its query heads. */
static __device__ __forceinline__ void measure(const struct bwd8_plan &p, const struct bwd8_inputs &in, int unit,
                                               int block)
{
    const int group = p.b.heads / p.b.kv_heads, batch = unit / p.b.kv_heads, kv = unit % p.b.kv_heads;
    const int first = block * FACT_TOKENS, T = p.b.tokens, end = (kv + 1) * group;
    uint32_t most[FACTS] = {};
    uint4 x[8], y[4];
#pragma unroll 1
    for (int head = kv * group; head < end; head += FACT_HEADS) {
        load_heads(x, in.dout, batch, head, end, first, T);
        const uint32_t dout = __reduce_max_sync(0xffffffffu, amax1(amax2<8>(0, x)));
        most[FACT_DOUT] = max(most[FACT_DOUT], dout);
        most[FACT_DOUT_NORM] = max(most[FACT_DOUT_NORM], max(norm_most(x, dout), norm_most(x + 4, dout)));
        if (!p.rules.view_fixed && in.amax == NULL) {
            load_heads(x, in.q, batch, head, end, first, T);
            most[FACT_Q] = amax2<8>(most[FACT_Q], x);
        }
    }
    load_rows<2>(y, in.v, batch, kv, first, T, false);
    y[2] = y[0]; /* norms are taken of four */
    y[3] = y[1];
    most[FACT_V] = __reduce_max_sync(0xffffffffu, amax1(amax2<2>(0, y)));
    most[FACT_V_NORM] = p.rules.value_e4m3 ? coded_norm_most(y, VALUE_LIFT) : norm_most(y, most[FACT_V]);
    if (!p.rules.view_fixed && in.amax == NULL) {
        load_rows<2>(y, in.k, batch, kv, first, T, false);
        most[FACT_K] = amax1(amax2<2>(0, y));
    }
    most[FACT_Q] = amax1(most[FACT_Q]);
    if (raise(p.facts + unit, most) == (uint32_t)fact_blocks(T) - 1) {
        conclude(p, in, unit);
    }
}

/* Waits, as a block, until the powers of two of a kv head are known. */
static __device__ __forceinline__ struct bwd_lifts wait_for_lifts(const struct bwd8_plan &p, int unit)
{
    if (threadIdx.x == 0) {
        while (turn_of(&p.facts[unit].measured) <= (uint32_t)fact_blocks(p.b.tokens)) {
            __nanosleep(100);
        }
    }
    __syncthreads();
    return lifts_of(p, unit);
}
