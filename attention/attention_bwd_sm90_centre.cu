/* attention: dK of the Hopper backward less its mean over keys (dk_center; docs/numerics.md, sections 7 and 16).
 *
 * The kernels of both routes leave dK in BF16. Here it is rounded a second time, where the reference rounds its FP32
 * sums once. That is harmless: each rounding is .15 % of the gradient (root mean square; at most 2^-8 of an element)
 * where quantised operands cost 15 %, and the mean taken off is that of the rounded dK, so that the sum over keys is
 * zero to the second rounding alone, as it is in the reference.
 *
 * All sums are FP32 in an order that depends on the number of tokens alone: a thread's keys, the block's 16 threads of
 * a feature, the slices of a head. */
#include "attention/attention_bwd_sm90_fp8.cuh"

enum {
    CENTRE_THREADS = 256,
    CENTRE_LANES = BWD_FEATURES / 8, /* threads that hold a row */
    CENTRE_ROWS = CENTRE_THREADS / CENTRE_LANES,
    CENTRE_SLICES = 64, /* of a head at most */
};

struct centre_plan {
    struct head_view dk;
    float *sums; /* (batch x kv heads, slices, BWD_FEATURES) */
    int kv_heads, tokens, slices, slice;
};

/* This thread's 8 features of token 0 of the block's head. Grid: slices, batch x kv heads. */
static __device__ __forceinline__ bf16 *features_of(const struct centre_plan &c)
{
    const int64_t batch = blockIdx.y / c.kv_heads, kv = blockIdx.y % c.kv_heads;
    return c.dk.data + batch * c.dk.batch_stride + kv * c.dk.head_stride + threadIdx.x % CENTRE_LANES * 8;
}

static __device__ __forceinline__ int slice_end(const struct centre_plan &c)
{
    return min(((int)blockIdx.x + 1) * c.slice, c.tokens);
}

static __global__ void __launch_bounds__(CENTRE_THREADS) sum_keys_kernel(const struct centre_plan c)
{
    __shared__ float parts[CENTRE_ROWS][BWD_FEATURES];
    const bf16 *x = features_of(c);
    const int end = slice_end(c), row = threadIdx.x / CENTRE_LANES;
    float sum[8] = {};
#pragma unroll 4
    for (int token = blockIdx.x * c.slice + row; token < end; token += CENTRE_ROWS) {
        float y[8];
        bf16x8_unpack(bf16x8_load(x + token * c.dk.token_stride), y);
#pragma unroll
        for (int d = 0; d < 8; d++) {
            sum[d] += y[d];
        }
    }
#pragma unroll
    for (int d = 0; d < 8; d++) {
        parts[row][threadIdx.x % CENTRE_LANES * 8 + d] = sum[d];
    }
    __syncthreads();
    if (threadIdx.x < BWD_FEATURES) {
        float all = 0;
#pragma unroll
        for (int i = 0; i < CENTRE_ROWS; i++) {
            all += parts[i][threadIdx.x];
        }
        c.sums[((int64_t)blockIdx.y * c.slices + blockIdx.x) * BWD_FEATURES + threadIdx.x] = all;
    }
}

static __global__ void __launch_bounds__(CENTRE_THREADS) less_mean_kernel(const struct centre_plan c)
{
    __shared__ float means[BWD_FEATURES];
    bf16 *x = features_of(c);
    const int end = slice_end(c);
    if (threadIdx.x < BWD_FEATURES) {
        const float *sums = c.sums + (int64_t)blockIdx.y * c.slices * BWD_FEATURES + threadIdx.x;
        float all = 0;
#pragma unroll 16
        for (int i = 0; i < c.slices; i++) {
            all += sums[i * BWD_FEATURES];
        }
        means[threadIdx.x] = all / (float)c.tokens;
    }
    __syncthreads();
    float mean[8];
#pragma unroll
    for (int d = 0; d < 8; d++) {
        mean[d] = means[threadIdx.x % CENTRE_LANES * 8 + d];
    }
#pragma unroll 4
    for (int token = blockIdx.x * c.slice + threadIdx.x / CENTRE_LANES; token < end; token += CENTRE_ROWS) {
        bf16 *at = x + token * c.dk.token_stride;
        float y[8];
        bf16x8_unpack(bf16x8_load(at), y);
#pragma unroll
        for (int d = 0; d < 8; d++) {
            y[d] -= mean[d];
        }
        bf16x8_store(at, bf16x8_pack(y));
    }
}

void bwd_centre(const struct attention_bwd *a, float *sums)
{
    const struct attention_shape *s = &a->shape;
    struct centre_plan c;
    c.dk = a->dk;
    c.sums = sums;
    c.kv_heads = (int)s->kv_heads;
    c.tokens = (int)s->tokens;
    /* Whole tiles, so that there are never more slices than tiles. */
    c.slice = BWD_QUERIES * ((c.tokens + CENTRE_SLICES * BWD_QUERIES - 1) / (CENTRE_SLICES * BWD_QUERIES));
    c.slices = (c.tokens + c.slice - 1) / c.slice;
    const dim3 grid((unsigned int)c.slices, (unsigned int)(s->batch * s->kv_heads));
    sum_keys_kernel<<<grid, CENTRE_THREADS, 0, a->cuda->stream>>>(c);
    cuda_launched(a->cuda, "attention backward, sums of dK");
    less_mean_kernel<<<grid, CENTRE_THREADS, 0, a->cuda->stream>>>(c);
    cuda_launched(a->cuda, "attention backward, dK less its mean");
}
