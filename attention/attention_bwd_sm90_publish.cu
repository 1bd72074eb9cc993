/* attention: operands and statistics of the FP8 backward on Hopper. */
#include "attention/attention_bwd_sm90_fp8.cuh"

#include <cuda_fp8.h>

enum { THREADS = 256 };

/* ---- facts ------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ float sum16(float x)
{
#pragma unroll
    for (int o = 8; o > 0; o >>= 1) {
        x += __shfl_xor_sync(0xffffffffu, x, o);
    }
    return x;
}

/* Bits of |x| grow with |x|, NaN above all. */
static __device__ __forceinline__ uint32_t magnitude(float x)
{
    return __float_as_uint(x) & 0x7fffffffu;
}

/* One atomic a block; a maximum has no order. */
static __device__ __forceinline__ void raise(uint32_t *fact, uint32_t bits)
{
    __shared__ uint32_t most;
    __syncthreads();
    if (threadIdx.x == 0) {
        most = 0;
    }
    __syncthreads();
    bits = __reduce_max_sync(0xffffffffu, bits);
    if ((threadIdx.x & 31) == 0) {
        atomicMax(&most, bits);
    }
    __syncthreads();
    if (threadIdx.x == 0 && most != 0) {
        atomicMax(fact, most);
    }
}

/* Thread: 8 features (part = threadIdx & 15) of every 16th row of a tile of `rows`. Largest magnitude, and largest
 * squared norm of a row of x times `lift` rounded to E4M3 (lift 0: as it is). */
struct extent {
    uint32_t amax, square;
};

static __device__ __forceinline__ struct extent extent_of(const struct head_view &x, int batch, int head, int first,
                                                          int rows, int tokens, float lift)
{
    const int part = threadIdx.x & 15;
    const bf16 *data = x.data + batch * x.batch_stride + head * x.head_stride + part * 8;
    struct extent e = {0, 0};
    for (int i = threadIdx.x / 16; i < rows; i += THREADS / 16) {
        float y[8], square = 0;
        if (first + i < tokens) {
            bf16x8_unpack(bf16x8_load(data + (int64_t)(first + i) * x.token_stride), y);
#pragma unroll
            for (int d = 0; d < 8; d++) {
                e.amax = max(e.amax, magnitude(y[d]));
                if (lift != 0) {
                    y[d] = float(__nv_fp8_e4m3(y[d] * lift)) / lift;
                }
                square = fmaf(y[d], y[d], square);
            }
        }
        e.square = max(e.square, magnitude(sum16(square)));
    }
    return e;
}

static __global__ void __launch_bounds__(THREADS) query_facts_kernel(struct bwd8_plan p, struct bwd8_inputs in)
{
    const int head = blockIdx.y, batch = blockIdx.z, first = blockIdx.x * BWD_QUERIES, T = p.b.tokens;
    struct bwd_facts *f = p.facts + batch * p.b.kv_heads + head / (p.b.heads / p.b.kv_heads);
    struct extent e = extent_of(in.dout, batch, head, first, BWD_QUERIES, T, 0);
    raise(&f->dout, e.amax);
    raise(&f->dout_square, e.square);
    if (!p.rules.view_fixed) {
        raise(&f->q, extent_of(in.q, batch, head, first, BWD_QUERIES, T, 0).amax);
    }
    if (p.rules.score_e4m3) {
        raise(&f->score_q, extent_of(in.score_q, batch, head, first, BWD_QUERIES, T, 0).amax);
    }
}

static __global__ void __launch_bounds__(THREADS) key_facts_kernel(struct bwd8_plan p, struct bwd8_inputs in)
{
    const int head = blockIdx.y, batch = blockIdx.z, first = blockIdx.x * BWD_KEYS, T = p.b.tokens;
    struct bwd_facts *f = p.facts + batch * p.b.kv_heads + head;
    raise(&f->k, extent_of(in.k, batch, head, first, BWD_KEYS, T, 0).amax);
    struct extent e = extent_of(in.v, batch, head, first, BWD_KEYS, T, 0);
    raise(&f->v, e.amax);
    if (!p.rules.value_e4m3) {
        raise(&f->v_square, e.square);
    }
    if (p.rules.score_e4m3) {
        raise(&f->score_k, extent_of(in.score_k, batch, head, first, BWD_KEYS, T, 0).amax);
    }
}

/* The norm of a V in E4M3, once its multiplier is known. */
static __global__ void __launch_bounds__(THREADS) value_norm_kernel(struct bwd8_plan p, struct head_view v)
{
    const int head = blockIdx.y, batch = blockIdx.z, unit = batch * p.b.kv_heads + head;
    struct bwd_facts *f = p.facts + unit;
    const float lift = lifts_of(p, unit).v;
    raise(&f->v_square, extent_of(v, batch, head, blockIdx.x * BWD_KEYS, BWD_KEYS, p.b.tokens, lift).square);
}

/* ---- operands ---------------------------------------------------------------------------------------------- */

/* 8 values to 8 codes. */
static __device__ __forceinline__ uint2 encode(const float *y, bool e5m2)
{
    return e5m2 ? make_uint2(pack_e5m2(y[0], y[1], y[2], y[3]), pack_e5m2(y[4], y[5], y[6], y[7]))
                : make_uint2(pack_e4m3(y[0], y[1], y[2], y[3]), pack_e4m3(y[4], y[5], y[6], y[7]));
}

static __device__ __forceinline__ void decode(uint2 codes, bool e5m2, float *y)
{
    const __nv_fp8_interpretation_t kind = e5m2 ? __NV_E5M2 : __NV_E4M3;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t word = i < 2 ? codes.x : codes.y;
        const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(word >> (16 * (i & 1))), kind);
        const float2 f = __half22float2(__half2(h));
        y[2 * i] = f.x;
        y[2 * i + 1] = f.y;
    }
}

enum { PITCH = BWD_FEATURES + 4 }; /* bytes of a row of codes in shared memory, to spread banks */

static __device__ __forceinline__ void put_row(uint8_t *codes, int row, int part, uint2 x)
{
    uint32_t *to = reinterpret_cast<uint32_t *>(codes + row * PITCH + part * 8);
    to[0] = x.x;
    to[1] = x.y;
}

/* Sixteen codes of feature d, rows from `row` on, in order pi1 or pi2. */
static __device__ __forceinline__ uint4 column(const uint8_t *codes, int row, int d, bool pi2)
{
    uint32_t w[4];
#pragma unroll
    for (int c = 0; c < 4; c++) {
        w[c] = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = pi2 ? 2 * c + (i >> 1) + 8 * (i & 1) : 2 * c + (i & 1) + 8 * (i >> 1);
            w[c] |= (uint32_t)codes[(row + r) * PITCH + d] << (8 * i);
        }
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

/* Columns of a tile of 64 rows, 64 bytes a feature. */
static __device__ __forceinline__ void put_columns_64(const uint8_t *codes, uint8_t *to)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int d = threadIdx.x / 4 + 64 * i, chunk = threadIdx.x & 3;
        *reinterpret_cast<uint4 *>(to + swizzle_64(d, chunk * 16)) = column(codes, chunk * 16, d, false);
    }
}

/* Rows of a tile of x, times lift, as E4M3 in SWIZZLE_128B. */
static __device__ __forceinline__ void put_rows(const struct head_view &x, int batch, int head, int first, int rows,
                                                int tokens, float lift, uint8_t *to)
{
    const int part = threadIdx.x & 15;
    const bf16 *data = x.data + batch * x.batch_stride + head * x.head_stride + part * 8;
    for (int row = threadIdx.x / 16; row < rows; row += THREADS / 16) {
        uint2 codes = make_uint2(0, 0);
        if (first + row < tokens) {
            float y[8];
            bf16x8_unpack(bf16x8_load(data + (int64_t)(first + row) * x.token_stride), y);
#pragma unroll
            for (int d = 0; d < 8; d++) {
                y[d] *= lift;
            }
            codes = encode(y, false);
        }
        *reinterpret_cast<uint2 *>(to + swizzle_128(row, part * 8)) = codes;
    }
}

/* Block: one tile of queries of one head. */
static __global__ void __launch_bounds__(THREADS) publish_queries_kernel(struct bwd8_plan p, struct bwd8_inputs in)
{
    __shared__ __align__(16) uint8_t codes[2][BWD_QUERIES * PITCH];
    const int tile = blockIdx.x, head = blockIdx.y, batch = blockIdx.z, part = threadIdx.x & 15;
    const int64_t at = ((int64_t)batch * p.b.heads + head) * p.b.tiles + tile;
    const struct bwd_lifts l = lifts_of(p, batch * p.b.kv_heads + head / (p.b.heads / p.b.kv_heads));
    uint8_t *to = p.queries + at * BWD8_QUERIES;
    float *stats = p.b.stats + at * BWD_STATISTICS;
    float4 *dq = reinterpret_cast<float4 *>(p.b.dq + at * BWD_TILE);
#pragma unroll
    for (int i = 0; i < BWD_TILE / 4 / THREADS; i++) {
        dq[i * THREADS + threadIdx.x] = make_float4(0, 0, 0, 0);
    }
    if (threadIdx.x < 2) {
        p.b.turns[at * 2 + threadIdx.x] = 0;
    }
    const bf16 *q = in.q.data + batch * in.q.batch_stride + head * in.q.head_stride + part * 8;
    const bf16 *out = in.out.data + batch * in.out.batch_stride + head * in.out.head_stride + part * 8;
    const bf16 *dout = in.dout.data + batch * in.dout.batch_stride + head * in.dout.head_stride + part * 8;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = i * 16 + threadIdx.x / 16;
        const int64_t token = (int64_t)tile * BWD_QUERIES + row;
        float x[8], y[8], z[8], r = 0, lse = -INFINITY, n = 0, fold = 1;
        uint2 dout_codes = make_uint2(0, 0), q_codes = make_uint2(0, 0);
        if (token < p.b.tokens) {
            lse = in.lse[((int64_t)batch * p.b.heads + head) * p.b.tokens + token];
            if (p.rules.codes && lse != -INFINITY) {
                n = floorf(lse);
                fold = exp2f(n - lse);
            }
            bf16x8_unpack(bf16x8_load(q + token * in.q.token_stride), x);
#pragma unroll
            for (int d = 0; d < 8; d++) {
                x[d] *= l.q;
            }
            q_codes = encode(x, false);
            bf16x8_unpack(bf16x8_load(out + token * in.out.token_stride), x);
            bf16x8_unpack(bf16x8_load(dout + token * in.dout.token_stride), y);
#pragma unroll
            for (int d = 0; d < 8; d++) {
                z[d] = y[d] * fold * l.dout;
            }
            dout_codes = encode(z, p.rules.dout_e5m2);
            if (!p.rules.raw_statistic) {
                decode(dout_codes, p.rules.dout_e5m2, y);
            }
#pragma unroll
            for (int d = 0; d < 8; d++) {
                r = fmaf(x[d], y[d], r);
            }
            r *= p.rules.raw_statistic ? fold : 1.0f / l.dout;
        }
        put_row(codes[0], row, part, dout_codes);
        put_row(codes[1], row, part, q_codes);
        *reinterpret_cast<uint2 *>(to + swizzle_128(row, part * 8)) = dout_codes;
        r = sum16(r);
        if (part == 0) {
            /* What the kernel subtracts from base-2 scores, and from dP in units of stored dS. */
            stats[row] = lse == -INFINITY ? INFINITY : (p.rules.codes ? n : lse) - p.shift;
            stats[BWD_QUERIES + row] = r * (l.ds * p.ds_factor);
        }
    }
    __syncthreads();
    put_columns_64(codes[0], to + BWD8_ROW);
    put_columns_64(codes[1], to + 2 * BWD8_ROW);
    if (p.rules.score_e4m3) {
        put_rows(in.score_q, batch, head, tile * BWD_QUERIES, BWD_QUERIES, p.b.tokens, l.score_q,
                 p.score_q + at * BWD8_ROW);
    }
}

/* Block: 128 keys of one kv head. */
static __global__ void __launch_bounds__(THREADS) publish_keys_kernel(struct bwd8_plan p, struct bwd8_inputs in)
{
    __shared__ __align__(16) uint8_t codes[BWD_KEYS * PITCH];
    const int head = blockIdx.y, batch = blockIdx.z, part = threadIdx.x & 15, unit = batch * p.b.kv_heads + head;
    const int first = blockIdx.x * BWD_KEYS;
    const int64_t at = (int64_t)unit * p.b.blocks + blockIdx.x;
    const struct bwd_lifts l = lifts_of(p, unit);
    uint8_t *to = p.keys + at * BWD8_KEYS;
    const bf16 *k = in.k.data + batch * in.k.batch_stride + head * in.k.head_stride + part * 8;
    for (int row = threadIdx.x / 16; row < BWD_KEYS; row += THREADS / 16) {
        uint2 k_codes = make_uint2(0, 0);
        if (first + row < p.b.tokens) {
            float x[8];
            bf16x8_unpack(bf16x8_load(k + (int64_t)(first + row) * in.k.token_stride), x);
#pragma unroll
            for (int d = 0; d < 8; d++) {
                x[d] *= l.k;
            }
            k_codes = encode(x, false);
        }
        put_row(codes, row, part, k_codes);
    }
    put_rows(in.v, batch, head, first, BWD_KEYS, p.b.tokens, l.v, to);
    if (p.rules.score_e4m3) {
        put_rows(in.score_k, batch, head, first, BWD_KEYS, p.b.tokens, l.score_k, p.score_k + at * (BWD8_KEYS / 2));
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int d = threadIdx.x / 8 + 32 * i, chunk = threadIdx.x & 7;
        *reinterpret_cast<uint4 *>(to + BWD8_KEYS / 2 + swizzle_128(d, chunk * 16)) =
            column(codes, chunk * 16, d, true);
    }
}

void bwd8_publish(const struct cuda *on, const struct bwd8_plan &p, const struct bwd8_inputs &in)
{
    const dim3 tiles((unsigned int)p.b.tiles, (unsigned int)p.b.heads, (unsigned int)(p.b.units / p.b.kv_heads));
    const dim3 blocks((unsigned int)p.b.blocks, (unsigned int)p.b.kv_heads, tiles.z);
    cudaMemsetAsync(p.facts, 0, (size_t)p.b.units * sizeof *p.facts, on->stream);
    query_facts_kernel<<<tiles, THREADS, 0, on->stream>>>(p, in);
    key_facts_kernel<<<blocks, THREADS, 0, on->stream>>>(p, in);
    if (p.rules.value_e4m3) {
        value_norm_kernel<<<blocks, THREADS, 0, on->stream>>>(p, in.v);
    }
    publish_keys_kernel<<<blocks, THREADS, 0, on->stream>>>(p, in);
    publish_queries_kernel<<<tiles, THREADS, 0, on->stream>>>(p, in);
    cuda_launched(on, "attention backward, operands");
}
