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
    SHORT_LIST = 4,     /* lists up to here are summed by blocks of THREADS with few registers; most are of one place */
    LONG_THREADS = 64,  /* of a block that sums a longer one: 512 columns, so that a frequent token has many blocks */
    LONG_GROUP = 8,     /* rows of a longer one that are copied together ... */
    LONG_STEPS = 6,     /* ... in so many groups, one of them in use: 48 KB */
    LONG_BLOCKS = 132,  /* take the longer lists in turn; changes no bit */
    SORT_BLOCKS = 1056, /* eight a multiprocessor of 132; changes no bit */
    SORT_WARP = 32,     /* longest list that a warp sorts */
    SORT_BLOCK = 2048,  /* longest list that a block sorts; of longer ones it looks through all tokens again */
};

/* The places of one token. */
struct bucket {
    int32_t token, first, length; /* places[first .. first + length - 1]; of a single place, that place itself */
};

/* Scratch, in this order: `used` and `start` are zeroed together. */
struct lists {
    int32_t *used;    /* places, short and long buckets given out, 1 unused */
    int32_t *start;   /* (V): how often a token occurs; once it has a bucket, its first */
    int32_t *arrival; /* (T): how many of the same token came before */
    int32_t *places;  /* (T) */
    bucket *buckets;  /* (T): short lists from the front, long ones from the back */
    int64_t count;    /* T */
};

static lists lists_at(void *scratch, int64_t count, int64_t vocab)
{
    lists l;
    l.used = (int32_t *)scratch;
    l.start = l.used + 4;
    l.arrival = l.start + vocab;
    l.places = l.arrival + count;
    l.buckets = (bucket *)(l.places + count);
    l.count = count;
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

static __global__ void embedding_count_kernel(const int32_t *tokens, lists l)
{
    const int64_t t = blockIdx.x * (int64_t)THREADS + threadIdx.x;
    if (t < l.count) {
        l.arrival[t] = atomicAdd(&l.start[tokens[t]], 1);
    }
}

__device__ __forceinline__ bucket *long_bucket(const lists &l, int number)
{
    return l.buckets + l.count - 1 - number;
}

/* Numbers for the lanes that `want` one, from a counter: one addition for the warp. All lanes call it. */
__device__ __forceinline__ int32_t take(int32_t *counter, int32_t want)
{
    const int lane = threadIdx.x & 31;
    int32_t sum = want; /* of this lane and those before */
    for (int o = 1; o < 32; o *= 2) {
        const int32_t below = __shfl_up_sync(0xffffffffu, sum, o);
        sum += lane >= o ? below : 0;
    }
    int32_t first = 0;
    if (lane == 31 && sum > 0) {
        first = atomicAdd(counter, sum);
    }
    return __shfl_sync(0xffffffffu, first, 31) + sum - want;
}

/* The first arrival of a token takes a bucket for it. */
static __global__ void __launch_bounds__(THREADS) embedding_buckets_kernel(const int32_t *tokens, lists l)
{
    const int64_t t = blockIdx.x * (int64_t)THREADS + threadIdx.x;
    const bool leads = t < l.count && l.arrival[t] == 0;
    const int32_t token = leads ? tokens[t] : 0, length = leads ? l.start[token] : 0;
    const int32_t first = take(&l.used[0], length);
    const bool is_short = length <= SHORT_LIST;
    const int32_t short_number = take(&l.used[1], leads && is_short),
                  long_number = take(&l.used[2], leads && !is_short);
    if (leads) {
        *(is_short ? l.buckets + short_number : long_bucket(l, long_number)) = {token, length == 1 ? (int32_t)t : first,
                                                                                length};
        l.start[token] = first;
    }
}

static __global__ void embedding_fill_kernel(const int32_t *tokens, lists l)
{
    const int64_t t = blockIdx.x * (int64_t)THREADS + threadIdx.x;
    if (t < l.count) {
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
    __shared__ __align__(16) int32_t copy[SORT_BLOCK + 4];
    __syncthreads(); /* an earlier list may still be read */
    for (int i = threadIdx.x; i < length + 4; i += THREADS) {
        copy[i] = i < length ? places[i] : INT32_MAX; /* read in fours */
    }
    __syncthreads();
    for (int i = threadIdx.x; i < length; i += THREADS) {
        const int32_t place = copy[i];
        int rank = 0;
        for (int k = 0; k < length; k += 4) {
            const int4 four = *reinterpret_cast<const int4 *>(copy + k);
            rank += (four.x < place) + (four.y < place) + (four.z < place) + (four.w < place);
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

static __global__ void __launch_bounds__(THREADS) embedding_sort_kernel(const int32_t *tokens, lists l)
{
    const int n_short = l.used[1], n_long = l.used[2], warps = THREADS / 32;
    for (int b = blockIdx.x; b < n_long; b += gridDim.x) {
        const bucket k = *long_bucket(l, b);
        if (k.length > SORT_BLOCK) {
            collect_in_block(tokens, l.count, k.token, l.places + k.first);
        } else if (k.length > SORT_WARP) {
            sort_in_block(l.places + k.first, k.length);
        } else if (threadIdx.x < 32) {
            sort_in_warp(l.places + k.first, k.length);
        }
    }
    for (int b = blockIdx.x * warps + (threadIdx.x >> 5); b < n_short; b += gridDim.x * warps) {
        const bucket k = l.buckets[b];
        if (k.length > 1) {
            sort_in_warp(l.places + k.first, k.length);
        }
    }
}

/* ---- backward: the sums ---- */

/* Eight gradients: loaded early, so that they are on their way together with the rows, and stored with `sum` added. */
template <bool BF16> struct gradient8 {
    uint4 words[BF16 ? 1 : 2];

    __device__ __forceinline__ static uint4 *place(void *dweight, int64_t at)
    {
        return reinterpret_cast<uint4 *>(static_cast<char *>(dweight) + at * (BF16 ? 2 : 4));
    }

    __device__ __forceinline__ void load(void *dweight, int64_t at)
    {
#pragma unroll
        for (int i = 0; i < (BF16 ? 1 : 2); i++) {
            words[i] = place(dweight, at)[i];
        }
    }

    __device__ __forceinline__ void store_sum(void *dweight, int64_t at, const float *sum) const
    {
        float x[8];
        if constexpr (BF16) {
            bf16x8_unpack({words[0]}, x);
        } else {
            memcpy(x, words, sizeof x);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] += sum[i];
        }
        if constexpr (BF16) {
            place(dweight, at)[0] = bf16x8_pack(x).words;
        } else {
            uint4 back[2];
            memcpy(back, x, sizeof back);
            place(dweight, at)[0] = back[0];
            place(dweight, at)[1] = back[1];
        }
    }
};

__device__ __forceinline__ void sum_row(float *sum, bf16x8 row)
{
    float value[8];
    bf16x8_unpack(row, value);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        sum[j] += value[j];
    }
}

/* A block sums 2048 columns of a short list, a thread eight of them; blockIdx.y cuts the width. */
template <bool BF16>
static __global__ void __launch_bounds__(THREADS)
    embedding_short_kernel(const bf16 *dout, int64_t width, void *dweight, lists l)
{
    const int64_t c = 8 * (blockIdx.y * (int64_t)THREADS + threadIdx.x);
    if ((int)blockIdx.x >= l.used[1] || c >= width) {
        return;
    }
    const bucket k = l.buckets[blockIdx.x];
    gradient8<BF16> gradient;
    gradient.load(dweight, k.token * width + c);
    bf16x8 row[SHORT_LIST];
#pragma unroll
    for (int i = 0; i < SHORT_LIST; i++) {
        if (i < k.length) {
            const int64_t place = k.length == 1 ? k.first : l.places[k.first + i];
            row[i] = bf16x8_load(dout + place * width + c);
        }
    }
    float sum[8] = {};
#pragma unroll
    for (int i = 0; i < SHORT_LIST; i++) {
        if (i < k.length) {
            sum_row(sum, row[i]);
        }
    }
    gradient.store_sum(dweight, k.token * width + c, sum);
}

/* Rows of a long list come through a ring in shared memory, LONG_GROUP of them to a step, so that one block keeps many
 * on their way. A thread reads only what it copied itself. PTX ISA, cp.async. */
__device__ __forceinline__ void group_start(uint4 *ring, const bf16 *dout, int64_t width, int64_t column,
                                            int32_t places, int n)
{
#pragma unroll
    for (int i = 0; i < LONG_GROUP; i++) {
        const int64_t place = __shfl_sync(0xffffffffu, places, i); /* lane i holds the place of row i */
        if (i < n) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                             (uint32_t)__cvta_generic_to_shared(ring + i * LONG_THREADS)),
                         "l"(dout + place * width + column)
                         : "memory");
        }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* The sum of eight columns, from column c, of a long list. `here`: the thread has such columns; idle lanes shuffle on.
 */
__device__ __forceinline__ void long_sum(float *sum, uint4 *ring, const bf16 *dout, int64_t width, int64_t c, bool here,
                                         const int32_t *places, int length)
{
    const int lane = threadIdx.x & 31, slots = LONG_STEPS * LONG_GROUP;
    int ahead = 0;
    for (; ahead < slots - LONG_GROUP; ahead += LONG_GROUP) {
        group_start(ring + ahead * LONG_THREADS, dout, width, c, ahead + lane < length ? places[ahead + lane] : 0,
                    here ? length - ahead : 0);
    }
    int32_t next = ahead + lane < length ? places[ahead + lane] : 0;
    for (int first = 0; first < length; first += LONG_GROUP) {
        const int32_t starting = next;
        const int at = ahead;
        ahead += LONG_GROUP;
        next = ahead + lane < length ? places[ahead + lane] : 0;
        group_start(ring + at % slots * LONG_THREADS, dout, width, c, starting, here ? length - at : 0);
        asm volatile("cp.async.wait_group %0;" ::"n"(LONG_STEPS - 1) : "memory");
#pragma unroll
        for (int i = 0; i < LONG_GROUP; i++) {
            if (here && first + i < length) {
                sum_row(sum, {ring[(first % slots + i) * LONG_THREADS]});
            }
        }
    }
}

/* A block sums 512 columns of long lists, a thread eight of them; blockIdx.y cuts the width. */
template <bool BF16>
static __global__ void __launch_bounds__(LONG_THREADS)
    embedding_long_kernel(const bf16 *dout, int64_t width, void *dweight, lists l)
{
    __shared__ uint4 ring[LONG_STEPS * LONG_GROUP * LONG_THREADS];
    const int64_t c = 8 * (blockIdx.y * (int64_t)LONG_THREADS + threadIdx.x);
    for (int b = blockIdx.x; b < l.used[2]; b += gridDim.x) {
        const bucket k = *long_bucket(l, b);
        float sum[8] = {};
        long_sum(sum, ring + threadIdx.x, dout, width, c, c < width, l.places + k.first, k.length);
        if (c < width) {
            gradient8<BF16> gradient;
            gradient.load(dweight, k.token * width + c);
            gradient.store_sum(dweight, k.token * width + c, sum);
        }
    }
}

template <bool BF16> static void sums_launch(const embedding_bwd *a, const lists &l, const cuda *on)
{
    /* Long lists first: the longest takes longest. */
    embedding_long_kernel<BF16>
        <<<dim3(LONG_BLOCKS, cuda_blocks(a->width, 8 * LONG_THREADS)), LONG_THREADS, 0, on->stream>>>(a->dout, a->width,
                                                                                                      a->dweight, l);
    cuda_launched(on, "embedding_long");
    const dim3 blocks((unsigned int)a->count, cuda_blocks(a->width, 8 * THREADS)); /* as many lists as there may be */
    embedding_short_kernel<BF16><<<blocks, THREADS, 0, on->stream>>>(a->dout, a->width, a->dweight, l);
    cuda_launched(on, "embedding_short");
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
    embedding_count_kernel<<<blocks, THREADS, 0, on->stream>>>(a->tokens, l);
    cuda_launched(on, "embedding_count");
    embedding_buckets_kernel<<<blocks, THREADS, 0, on->stream>>>(a->tokens, l);
    cuda_launched(on, "embedding_buckets");
    embedding_fill_kernel<<<blocks, THREADS, 0, on->stream>>>(a->tokens, l);
    cuda_launched(on, "embedding_fill");
    embedding_sort_kernel<<<SORT_BLOCKS, THREADS, 0, on->stream>>>(a->tokens, l);
    cuda_launched(on, "embedding_sort");
    if (a->grad_type == DTYPE_BF16) {
        sums_launch<true>(a, l, on);
    } else {
        sums_launch<false>(a, l, on);
    }
}
