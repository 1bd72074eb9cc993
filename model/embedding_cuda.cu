/* model: token embedding on the GPU.
 *
 * Backward first lists the places of each token in order, then sums each list: the same FP32 additions as
 * embedding_cpu.c, so equal bits, whatever order blocks run in. Integer atomics build the lists; where a token's list
 * lies in `places`, and in what order its places arrive there, differs from run to run, but each list is sorted before
 * use and lists do not meet. */
#include "core/cuda.cuh"

extern "C" {
#include "model/embedding.h"
}

enum {
    THREADS = 256,
    SUM_THREADS = 64,   /* of a block that sums: 512 columns, so that the list of a frequent token has many blocks */
    SUM_AHEAD = 16,     /* rows on their way at a time */
    SORT_BLOCKS = 1056, /* eight a multiprocessor of 132; changes no bit */
    SORT_WARP = 32,     /* longest list that a warp sorts */
    SORT_BLOCK = 2048,  /* longest list that a block sorts; of longer ones it looks through all tokens again */
};

/* The places of one token. */
struct bucket {
    int32_t token, first, length; /* places[first .. first + length - 1] */
};

/* Scratch, in this order: `used` and `start` are zeroed together. */
struct lists {
    int32_t *used;    /* places given out, buckets given out, 2 unused */
    int32_t *start;   /* (V): how often a token occurs; once it has a bucket, its first */
    int32_t *arrival; /* (T): how many of the same token came before */
    int32_t *places;  /* (T) */
    bucket *buckets;  /* (T) */
};

static lists lists_at(void *scratch, int64_t count, int64_t vocab)
{
    lists l;
    l.used = (int32_t *)scratch;
    l.start = l.used + 4;
    l.arrival = l.start + vocab;
    l.places = l.arrival + count;
    l.buckets = (bucket *)(l.places + count);
    return l;
}

size_t embedding_bwd_scratch_bytes_cuda(int64_t count, int64_t vocab)
{
    return (size_t)(4 + vocab + 2 * count) * sizeof(int32_t) + (size_t)count * sizeof(bucket);
}

/* ---- forward ---- */

/* A thread copies eight features; blockIdx.y cuts the width. */
static __global__ void __launch_bounds__(THREADS)
    embedding_fwd_kernel(const bf16 *weight, const int32_t *tokens, int64_t width, bf16 *out)
{
    const int64_t c = 8 * (blockIdx.y * (int64_t)THREADS + threadIdx.x);
    if (c < width) {
        bf16x8_store(out + blockIdx.x * width + c, bf16x8_load(weight + tokens[blockIdx.x] * width + c));
    }
}

void embedding_fwd_cuda(const bf16 *weight, const int32_t *tokens, int64_t count, int64_t vocab, int64_t width,
                        bf16 *out, const cuda *on)
{
    ASSERT(vocab > 0 && width > 0 && width % 8 == 0);
    if (count > 0) {
        embedding_fwd_kernel<<<dim3((unsigned int)count, cuda_blocks(width, 8 * THREADS)), THREADS, 0, on->stream>>>(
            weight, tokens, width, out);
        cuda_launched(on, "embedding_fwd");
    }
}

/* ---- backward: the lists ---- */

static __global__ void embedding_count_kernel(const int32_t *tokens, int64_t count, lists l)
{
    const int64_t t = blockIdx.x * (int64_t)THREADS + threadIdx.x;
    if (t < count) {
        l.arrival[t] = atomicAdd(&l.start[tokens[t]], 1);
    }
}

/* The first arrival of a token takes a bucket for it. */
static __global__ void embedding_buckets_kernel(const int32_t *tokens, int64_t count, lists l)
{
    const int64_t t = blockIdx.x * (int64_t)THREADS + threadIdx.x;
    if (t < count && l.arrival[t] == 0) {
        const int32_t token = tokens[t], length = l.start[token];
        const int32_t first = atomicAdd(&l.used[0], length);
        l.buckets[atomicAdd(&l.used[1], 1)] = {token, first, length};
        l.start[token] = first;
    }
}

static __global__ void embedding_fill_kernel(const int32_t *tokens, int64_t count, lists l)
{
    const int64_t t = blockIdx.x * (int64_t)THREADS + threadIdx.x;
    if (t < count) {
        l.places[l.start[tokens[t]] + l.arrival[t]] = (int32_t)t;
    }
}

/* A list of at most 32: each lane finds the rank of its place. All lanes of a warp call this. */
__device__ __forceinline__ void sort_in_warp(int32_t *places, int length)
{
    const int lane = threadIdx.x & 31;
    const int32_t place = lane < length ? places[lane] : INT32_MAX;
    int rank = 0;
    for (int i = 0; i < length; i++) {
        rank += __shfl_sync(0xffffffffu, place, i) < place;
    }
    if (lane < length) {
        places[rank] = place; /* every lane has read its own */
    }
}

__device__ __forceinline__ void sort_in_block(int32_t *places, int length)
{
    __shared__ int32_t copy[SORT_BLOCK];
    __syncthreads(); /* an earlier list may still be read */
    for (int i = threadIdx.x; i < length; i += THREADS) {
        copy[i] = places[i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < length; i += THREADS) {
        const int32_t place = copy[i];
        int rank = 0;
        for (int k = 0; k < length; k++) {
            rank += copy[k] < place;
        }
        places[rank] = place;
    }
}

/* A longer list is made again: the places that hold the token, in order. */
__device__ __forceinline__ void collect_in_block(const int32_t *tokens, int64_t count, int32_t token, int32_t *places)
{
    __shared__ int found[THREADS / 32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int before = 0;
    for (int64_t first = 0; first < count; first += THREADS) {
        const int64_t t = first + threadIdx.x;
        const bool hit = t < count && tokens[t] == token;
        const unsigned int hits = __ballot_sync(0xffffffffu, hit);
        __syncthreads(); /* the last round has been read */
        if (lane == 0) {
            found[warp] = __popc(hits);
        }
        __syncthreads();
        int at = before + __popc(hits & ((1u << lane) - 1));
        for (int w = 0; w < THREADS / 32; w++) {
            at += w < warp ? found[w] : 0;
            before += found[w];
        }
        if (hit) {
            places[at] = (int32_t)t;
        }
    }
}

static __global__ void __launch_bounds__(THREADS) embedding_sort_kernel(const int32_t *tokens, int64_t count, lists l)
{
    const int buckets = l.used[1], warps = THREADS / 32;
    for (int b = blockIdx.x * warps + (threadIdx.x >> 5); b < buckets; b += gridDim.x * warps) {
        const bucket k = l.buckets[b];
        if (k.length > 1 && k.length <= SORT_WARP) {
            sort_in_warp(l.places + k.first, k.length);
        }
    }
    for (int b = blockIdx.x; b < buckets; b += gridDim.x) {
        const bucket k = l.buckets[b];
        if (k.length > SORT_BLOCK) {
            collect_in_block(tokens, count, k.token, l.places + k.first);
        } else if (k.length > SORT_WARP) {
            sort_in_block(l.places + k.first, k.length);
        }
    }
}

/* ---- backward: the sums ---- */

__device__ __forceinline__ void row_add(void *dweight, bool is_bf16, int64_t at, const float *sum)
{
    if (is_bf16) {
        bf16 *row = (bf16 *)dweight + at;
        float old[8];
        bf16x8_unpack(bf16x8_load(row), old);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            old[i] += sum[i];
        }
        bf16x8_store(row, bf16x8_pack(old));
        return;
    }
    float4 *row = reinterpret_cast<float4 *>((float *)dweight + at);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float4 old = row[i];
        row[i] =
            make_float4(old.x + sum[4 * i], old.y + sum[4 * i + 1], old.z + sum[4 * i + 2], old.w + sum[4 * i + 3]);
    }
}

/* A block sums 512 columns of a bucket, a thread eight of them; blockIdx.y cuts the width. */
static __global__ void __launch_bounds__(SUM_THREADS)
    embedding_sum_kernel(const bf16 *dout, int64_t width, void *dweight, bool is_bf16, lists l)
{
    const int64_t c = 8 * (blockIdx.y * (int64_t)SUM_THREADS + threadIdx.x);
    if ((int)blockIdx.x >= l.used[1] || c >= width) {
        return;
    }
    const bucket k = l.buckets[blockIdx.x];
    const int32_t *places = l.places + k.first;
    float sum[8] = {};
    for (int first = 0; first < k.length; first += SUM_AHEAD) {
        bf16x8 row[SUM_AHEAD];
#pragma unroll
        for (int i = 0; i < SUM_AHEAD; i++) {
            if (first + i < k.length) {
                row[i] = bf16x8_load(dout + places[first + i] * width + c);
            }
        }
#pragma unroll
        for (int i = 0; i < SUM_AHEAD; i++) {
            if (first + i < k.length) {
                float value[8];
                bf16x8_unpack(row[i], value);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    sum[j] += value[j];
                }
            }
        }
    }
    row_add(dweight, is_bf16, k.token * width + c, sum);
}

void embedding_bwd_cuda(const embedding_bwd *a, const cuda *on)
{
    ASSERT(a->width > 0 && a->width % 8 == 0 && a->scratch != NULL && a->count <= INT32_MAX);
    ASSERT(a->grad_type == DTYPE_F32 || a->grad_type == DTYPE_BF16);
    if (a->count == 0) {
        return;
    }
    const lists l = lists_at(a->scratch, a->count, a->vocab);
    const unsigned int blocks = cuda_blocks(a->count, THREADS);
    cuda_zero(on, l.used, (size_t)(4 + a->vocab) * sizeof(int32_t));
    embedding_count_kernel<<<blocks, THREADS, 0, on->stream>>>(a->tokens, a->count, l);
    cuda_launched(on, "embedding_count");
    embedding_buckets_kernel<<<blocks, THREADS, 0, on->stream>>>(a->tokens, a->count, l);
    cuda_launched(on, "embedding_buckets");
    embedding_fill_kernel<<<blocks, THREADS, 0, on->stream>>>(a->tokens, a->count, l);
    cuda_launched(on, "embedding_fill");
    embedding_sort_kernel<<<SORT_BLOCKS, THREADS, 0, on->stream>>>(a->tokens, a->count, l);
    cuda_launched(on, "embedding_sort");
    embedding_sum_kernel<<<dim3((unsigned int)a->count, cuda_blocks(a->width, 8 * SUM_THREADS)), SUM_THREADS, 0,
                           on->stream>>>(a->dout, a->width, a->dweight, a->grad_type == DTYPE_BF16, l);
    cuda_launched(on, "embedding_sum");
}
