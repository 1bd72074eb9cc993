/* attention: what the Hopper backward does before its kernel where nothing is published (the BF16 route): statistics of
 * rows and, for sums in any order, a zero dQ; and after it the rounding of dQ. */
#include "attention/attention_bwd_sm90_fp8.cuh"

/* Sixteen neighbouring lanes. */
static __device__ __forceinline__ float sum16(float x)
{
#pragma unroll
    for (int o = 8; o > 0; o >>= 1) {
        x += __shfl_xor_sync(0xffffffffu, x, o);
    }
    return x;
}

/* Block: one tile of 64 queries of one head. r = <O, dO>, the tile's LSE2, and, where asked, a zero dQ. */
static __global__ void __launch_bounds__(256)
    prepare_kernel(struct bwd_plan p, struct head_view out, struct head_view dout, const float *lse, bool zero_dq)
{
    const int tile = blockIdx.x, head = blockIdx.y, batch = blockIdx.z, part = threadIdx.x & 15;
    const int64_t at = ((int64_t)batch * p.heads + head) * p.tiles + tile;
    const bf16 *o = out.data + batch * out.batch_stride + head * out.head_stride + part * 8;
    const bf16 *g = dout.data + batch * dout.batch_stride + head * dout.head_stride + part * 8;
    float *stats = p.stats + at * BWD_STATISTICS;
    if (zero_dq) {
        float4 *dq = reinterpret_cast<float4 *>(p.dq + at * BWD_TILE);
#pragma unroll
        for (int i = 0; i < BWD_TILE / 4 / 256; i++) {
            dq[i * 256 + threadIdx.x] = make_float4(0, 0, 0, 0);
        }
    }
    if (threadIdx.x < 2) {
        p.turns[at * 2 + threadIdx.x] = 0;
    }
    if (at == 0 && threadIdx.x == 0) {
        *p.begun = 0;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = i * 16 + threadIdx.x / 16;
        const int64_t token = (int64_t)tile * BWD_QUERIES + row;
        float x[8], y[8], r = 0;
        if (token < p.tokens) {
            bf16x8_unpack(bf16x8_load(o + token * out.token_stride), x);
            bf16x8_unpack(bf16x8_load(g + token * dout.token_stride), y);
#pragma unroll
            for (int d = 0; d < 8; d++) {
                r = fmaf(x[d], y[d], r);
            }
        }
        r = sum16(r);
        if (part == 0) {
            float l = token < p.tokens ? lse[((int64_t)batch * p.heads + head) * p.tokens + token] : -INFINITY;
            stats[row] = l == -INFINITY ? INFINITY : l;
            stats[BWD_QUERIES + row] = r;
        }
    }
}

/* Block: one tile. dQ in its place, times softmax_scale, rounded once. */
static __global__ void __launch_bounds__(256) finish_kernel(struct bwd_plan p, struct head_view dq)
{
    __shared__ __align__(16) bf16 rows[BWD_QUERIES][BWD_FEATURES + 8];
    const int tile = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
    const int64_t at = ((int64_t)batch * p.heads + head) * p.tiles + tile;
    const float4 *x = reinterpret_cast<const float4 *>(p.dq + at * BWD_TILE);
#pragma unroll
    for (int i = 0; i < BWD_TILE / 4 / 256; i++) {
        const int n = i * 256 + threadIdx.x, lane = n & 31, j = (n >> 5) & 7, warp = (n >> 8) & 3;
        const int row = 16 * warp + (lane >> 2), column = (n >> 10) * 64 + 8 * j + 2 * (lane & 3);
        float4 v = x[n];
        *reinterpret_cast<uint32_t *>(&rows[row][column]) = pack_bf16(v.x * p.scale, v.y * p.scale);
        *reinterpret_cast<uint32_t *>(&rows[row + 8][column]) = pack_bf16(v.z * p.scale, v.w * p.scale);
    }
    __syncthreads();
    bf16 *y = dq.data + batch * dq.batch_stride + head * dq.head_stride;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = i * 16 + threadIdx.x / 16, part = threadIdx.x & 15;
        const int64_t token = (int64_t)tile * BWD_QUERIES + row;
        if (token < p.tokens) {
            bf16x8_store(y + token * dq.token_stride + part * 8, bf16x8_load(&rows[row][part * 8]));
        }
    }
}

static dim3 tiles_of(const struct bwd_plan &p)
{
    return dim3((unsigned int)p.tiles, (unsigned int)p.heads, (unsigned int)(p.units / p.kv_heads));
}

void bwd_prepare(const struct attention_bwd *a, const struct bwd_plan &p)
{
    prepare_kernel<<<tiles_of(p), 256, 0, a->cuda->stream>>>(p, a->out, a->dout, a->lse_log2, a->unordered);
    cuda_launched(a->cuda, "attention backward, statistics");
}

void bwd_finish(const struct attention_bwd *a, const struct bwd_plan &p)
{
    finish_kernel<<<tiles_of(p), 256, 0, a->cuda->stream>>>(p, a->dq);
    cuda_launched(a->cuda, "attention backward, dQ");
}
