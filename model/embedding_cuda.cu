/* model: token embedding on the GPU.
 *
 * Backward sums the rows of each token in order: the FP32 additions of embedding_cpu.c, so equal bits, whatever order
 * blocks run in. A first kernel counts tokens; the second sums. Most tokens occur once: their row is loaded together
 * with the gradient that it is added to. The count keeps up to SHORT_LIST places of a token, in an order that differs
 * from run to run; the block that sums them sorts them. The few tokens with more are summed by blocks that search all
 * tokens for them, start first, and keep many rows in flight: the chain of one frequent token is the longest path of
 * the whole. */
#include "core/cuda.cuh"

extern "C" {
#include "model/embedding.h"
}

enum {
    THREADS = 256,
    SHORT_LIST = 16, /* places of a token that the count keeps */
    GROUP = 4,       /* neighbouring places whose tokens a block of the short lists loads together */
    STEP = 4,        /* rows of a short list that are loaded together */
    LONG_COLUMNS = 2 * THREADS,
    LONG_ROWS = 8,      /* of a long list that are copied together ... */
    LONG_STEPS = 4,     /* ... in so many groups, one of them in use: 32 KB */
    LONG_WINDOW = 4096, /* tokens that are looked through at a time */
    LONG_BLOCKS = 264,  /* take the longer lists in turn; changes no bit */
};

/* Scratch, in this order: `used` and `count` are zeroed together. */
struct lists {
    int32_t *used;    /* long lists, 3 unused */
    int32_t *count;   /* (V): how often a token occurs */
    int32_t *arrival; /* (T): how many of the same token came before */
    int32_t *longs;   /* (T / SHORT_LIST): tokens with long lists */
    int32_t *places;  /* (V, SHORT_LIST): the first to arrive */
    int64_t length;   /* T */
};

static int64_t fours(int64_t n)
{
    return (n + 3) / 4 * 4;
}

static lists lists_at(void *scratch, int64_t count, int64_t vocab)
{
    lists l;
    l.used = (int32_t *)scratch;
    l.count = l.used + 4;
    l.arrival = l.count + fours(vocab);
    l.longs = l.arrival + fours(count);
    l.places = l.longs + fours(count / SHORT_LIST);
    l.length = count;
    return l;
}

size_t embedding_bwd_scratch_bytes_cuda(int64_t count, int64_t vocab)
{
    const int64_t ints = 4 + fours(vocab) + fours(count) + fours(count / SHORT_LIST) + vocab * SHORT_LIST;
    return (size_t)ints * sizeof(int32_t);
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

static __global__ void __launch_bounds__(THREADS) embedding_count_kernel(const int32_t *tokens, lists l)
{
    const int64_t t = blockIdx.x * (int64_t)THREADS + threadIdx.x;
    if (t < l.length) {
        const int64_t token = tokens[t];
        const int32_t arrival = atomicAdd(&l.count[token], 1);
        l.arrival[t] = arrival;
        if (arrival < SHORT_LIST) {
            l.places[token * SHORT_LIST + arrival] = (int32_t)t;
        } else if (arrival == SHORT_LIST) {
            l.longs[atomicAdd(l.used, 1)] = (int32_t)token;
        }
    }
}

/* ---- backward: what sums share ---- */

/* Eight gradients: loaded early, together with the rows, and stored with `sum` added. */
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

/* ---- backward: short lists ---- */

/* The place of a list that lane i of every warp has: the i-th in order. A warp at least as long as the list calls it.
 */
__device__ __forceinline__ int32_t places_sorted(const int32_t *places, int length)
{
    const int lane = threadIdx.x & 31;
    const int32_t place = lane < length ? places[lane] : INT32_MAX;
    int rank = 0;
    for (int i = 0; i < length; i++) {
        rank += __shfl_sync(0xffffffffu, place, i) < place;
    }
    int32_t sorted = 0;
    for (int i = 0; i < length; i++) { /* lane i hands its place to the lane of its rank */
        const int32_t theirs = __shfl_sync(0xffffffffu, place, i);
        sorted = __shfl_sync(0xffffffffu, rank, i) == lane ? theirs : sorted;
    }
    return sorted;
}

/* Eight columns of a list of 2 to SHORT_LIST places. `here`: the thread has such columns; idle lanes shuffle on. */
template <bool BF16>
__device__ __forceinline__ void short_sum(const bf16 *dout, int64_t width, void *dweight, int64_t token, int64_t c,
                                          bool here, const int32_t *places, int length)
{
    const int32_t place = places_sorted(places, length);
    gradient8<BF16> gradient;
    float sum[8] = {};
    if (here) {
        gradient.load(dweight, token * width + c);
    }
    for (int first = 0; first < length; first += STEP) {
        bf16x8 row[STEP];
#pragma unroll
        for (int i = 0; i < STEP; i++) {
            const int64_t from = __shfl_sync(0xffffffffu, place, first + i);
            if (here && first + i < length) {
                row[i] = bf16x8_load(dout + from * width + c);
            }
        }
#pragma unroll
        for (int i = 0; i < STEP; i++) {
            if (here && first + i < length) {
                sum_row(sum, row[i]);
            }
        }
    }
    if (here) {
        gradient.store_sum(dweight, token * width + c, sum);
    }
}

/* A block sums 2048 columns of the tokens that come first at GROUP neighbouring places, a thread eight of them. */
template <bool BF16>
__device__ __forceinline__ void shorts_sum(const int32_t *tokens, const bf16 *dout, int64_t width, void *dweight,
                                           const lists &l, int64_t t0, int64_t c)
{
    const bool here = c < width;
    int32_t token[GROUP];
    int length[GROUP]; /* 0: somebody else's */
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
        const bool inside = t0 + g < l.length;
        const int32_t here_token = inside ? tokens[t0 + g] : 0, arrival = inside ? l.arrival[t0 + g] : 1;
        token[g] = arrival == 0 ? here_token : -1;
    }
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
        length[g] = token[g] >= 0 ? l.count[token[g]] : 0;
    }
    gradient8<BF16> gradient[GROUP];
    bf16x8 row[GROUP];
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
        if (here && length[g] == 1) {
            gradient[g].load(dweight, token[g] * width + c);
            row[g] = bf16x8_load(dout + (t0 + g) * width + c);
        }
    }
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
        if (here && length[g] == 1) {
            float sum[8] = {};
            sum_row(sum, row[g]);
            gradient[g].store_sum(dweight, token[g] * width + c, sum);
        }
    }
    for (int g = 0; g < GROUP; g++) {
        if (length[g] > 1 && length[g] <= SHORT_LIST) {
            short_sum<BF16>(dout, width, dweight, token[g], c, here, l.places + (int64_t)token[g] * SHORT_LIST,
                            length[g]);
        }
    }
}

/* ---- backward: long lists ---- */

/* Sum over the warps below of `n`, and over all of them: two barriers. */
__device__ __forceinline__ int block_before(int n, int *all)
{
    __shared__ int part[THREADS / 32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int sum = n; /* of this lane and those before */
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
        const int below = __shfl_up_sync(0xffffffffu, sum, o);
        sum += lane >= o ? below : 0;
    }
    __syncthreads(); /* an earlier call may still be reading */
    if (lane == 31) {
        part[warp] = sum;
    }
    __syncthreads();
    int before = sum - n;
    *all = 0;
#pragma unroll
    for (int w = 0; w < THREADS / 32; w++) {
        before += w < warp ? part[w] : 0;
        *all += part[w];
    }
    return before;
}

/* The places of the window from `first` on that hold the token, in order; returns how many. */
__device__ __forceinline__ int window_places(const int32_t *tokens, int64_t length, int64_t first, int32_t token,
                                             uint16_t *places)
{
    enum { EACH = LONG_WINDOW / THREADS };
    const int64_t mine = first + EACH * (int)threadIdx.x;
    uint32_t hits = 0;
    if (mine + EACH <= length) { /* a multiple of 16 bytes */
#pragma unroll
        for (int i = 0; i < EACH; i += 4) {
            const int4 four = *reinterpret_cast<const int4 *>(tokens + mine + i);
            hits |= (uint32_t)(four.x == token) << i | (uint32_t)(four.y == token) << (i + 1) |
                    (uint32_t)(four.z == token) << (i + 2) | (uint32_t)(four.w == token) << (i + 3);
        }
    } else {
        for (int i = 0; mine + i < length; i++) {
            hits |= (uint32_t)(tokens[mine + i] == token) << i;
        }
    }
    int all;
    int at = block_before(__popc(hits), &all);
    for (; hits != 0; hits &= hits - 1) {
        places[at++] = (uint16_t)(EACH * threadIdx.x + __ffs((int)hits) - 1);
    }
    __syncthreads();
    return all;
}

/* A block's shared memory: rows come through a ring, so that one block keeps many in flight. PTX ISA, cp.async. */
struct long_ring {
    uint4 rows[LONG_STEPS * LONG_ROWS][LONG_COLUMNS / 8];
    uint16_t places[LONG_WINDOW];
};

/* LONG_ROWS rows of the list from `at` on, 512 columns each from `column` on: THREADS pieces of 16 bytes, two each. */
__device__ __forceinline__ void rows_start(long_ring &ring, const bf16 *window, int64_t width, int64_t column, int at,
                                           int length)
{
    enum { PIECES = LONG_COLUMNS / 8, ROUNDS = LONG_ROWS * PIECES / THREADS };
    const int piece = threadIdx.x % PIECES;
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const int i = at + r * (THREADS / PIECES) + (int)threadIdx.x / PIECES;
        if (i < length && column + 8 * piece < width) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                             (uint32_t)__cvta_generic_to_shared(&ring.rows[i % (LONG_STEPS * LONG_ROWS)][piece])),
                         "l"(window + ring.places[i] * width + column + 8 * piece)
                         : "memory");
        }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Adds the rows of a window's list to the two columns that a thread sums. */
__device__ __forceinline__ void window_sum(float *sum, long_ring &ring, const bf16 *window, int64_t width,
                                           int64_t column, int length)
{
    for (int at = 0; at < (LONG_STEPS - 1) * LONG_ROWS; at += LONG_ROWS) {
        rows_start(ring, window, width, column, at, length);
    }
    for (int first = 0; first < length; first += LONG_ROWS) {
        asm volatile("cp.async.wait_group %0;" ::"n"(LONG_STEPS - 2) : "memory");
        __syncthreads(); /* this group is there for all, and nobody reads the last one any more */
        rows_start(ring, window, width, column, first + (LONG_STEPS - 1) * LONG_ROWS, length);
#pragma unroll
        for (int i = 0; i < LONG_ROWS; i++) {
            if (first + i < length) {
                const uint32_t pair =
                    reinterpret_cast<const uint32_t *>(ring.rows[(first + i) % (LONG_STEPS * LONG_ROWS)])[threadIdx.x];
                sum[0] += __uint_as_float(pair << 16);
                sum[1] += __uint_as_float(pair & 0xffff0000u);
            }
        }
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads(); /* the next window overwrites places and rows */
}

template <bool BF16> __device__ __forceinline__ void pair_add(void *dweight, int64_t at, const float *sum)
{
    if constexpr (BF16) {
        __nv_bfloat162 *to = reinterpret_cast<__nv_bfloat162 *>(static_cast<bf16 *>(dweight) + at);
        const float2 old = __bfloat1622float2(*to);
        *to = __floats2bfloat162_rn(old.x + sum[0], old.y + sum[1]);
    } else {
        float2 *to = reinterpret_cast<float2 *>(static_cast<float *>(dweight) + at);
        const float2 old = *to;
        *to = make_float2(old.x + sum[0], old.y + sum[1]);
    }
}

/* A block sums 512 columns of a long list, a thread two of them. */
template <bool BF16>
__device__ __forceinline__ void long_sum(long_ring &ring, const int32_t *tokens, const bf16 *dout, int64_t width,
                                         void *dweight, const lists &l, int32_t token, int64_t column)
{
    float sum[2] = {};
    for (int64_t first = 0; first < l.length; first += LONG_WINDOW) {
        const int n = window_places(tokens, l.length, first, token, ring.places);
        window_sum(sum, ring, dout + first * width, width, column, n);
    }
    const int64_t c = column + 2 * (int)threadIdx.x;
    if (c < width) {
        pair_add<BF16>(dweight, token * width + c, sum);
    }
}

/* ---- backward: the sums ---- */

/* The first LONG_BLOCKS blocks have the long lists, the others GROUP places each; blockIdx.y: columns of the latter. */
template <bool BF16>
static __global__ void __launch_bounds__(THREADS, 3)
    embedding_sums_kernel(const int32_t *tokens, const bf16 *dout, int64_t width, void *dweight, lists l)
{
    __shared__ long_ring ring;
    asm volatile("griddepcontrol.wait;" ::: "memory"); /* until the counts are there: launched meanwhile */
    if (blockIdx.x >= LONG_BLOCKS) {
        shorts_sum<BF16>(tokens, dout, width, dweight, l, (int64_t)(blockIdx.x - LONG_BLOCKS) * GROUP,
                         8 * (blockIdx.y * (int64_t)THREADS + threadIdx.x));
        return;
    }
    const int pieces = (int)((width + LONG_COLUMNS - 1) / LONG_COLUMNS), lists = l.used[0];
    for (int i = (int)(blockIdx.y * LONG_BLOCKS + blockIdx.x); i < lists * pieces;
         i += (int)(gridDim.y * LONG_BLOCKS)) {
        long_sum<BF16>(ring, tokens, dout, width, dweight, l, l.longs[i / pieces],
                       (int64_t)(i % pieces) * LONG_COLUMNS);
    }
}

void embedding_bwd_cuda(const embedding_bwd *a, const cuda *on)
{
    ASSERT(a->width > 0 && a->width % 8 == 0 && a->scratch != NULL && a->count <= INT32_MAX);
    ASSERT(a->grad_type == DTYPE_F32 || a->grad_type == DTYPE_BF16);
    if (a->count == 0) {
        return;
    }
    const lists l = lists_at(a->scratch, a->count, a->vocab);
    cuda_zero(on, l.used, (size_t)(4 + a->vocab) * sizeof(int32_t));
    embedding_count_kernel<<<cuda_blocks(a->count, THREADS), THREADS, 0, on->stream>>>(a->tokens, l);
    cuda_launched(on, "embedding_count");
    const dim3 blocks(LONG_BLOCKS + cuda_blocks(a->count, GROUP), cuda_blocks(a->width, 8 * THREADS));
    auto kernel = a->grad_type == DTYPE_BF16 ? embedding_sums_kernel<true> : embedding_sums_kernel<false>;
    cudaLaunchAttribute early = {}; /* PTX ISA, griddepcontrol */
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = blocks;
    config.blockDim = dim3(THREADS);
    config.stream = on->stream;
    config.attrs = &early;
    config.numAttrs = 1;
    cudaLaunchKernelEx(&config, kernel, a->tokens, a->dout, a->width, a->dweight, l);
    cuda_launched(on, "embedding_sums");
}
