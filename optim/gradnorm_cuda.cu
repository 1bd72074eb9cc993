/* optim: the global gradient norm on the GPU: the FP64 sums and trees of gradnorm.c, so its bits.
 *
 * A block of 4096 elements has eight chains of 512 additions (element i in chain i mod 8): too few for the machine, so
 * a warp takes four blocks at a time, a tile of each through shared memory, the next tile in flight meanwhile. */
#include "core/cuda.cuh"
#include "optim/adamw_plan.cuh"

enum {
    CHAINS = 8,
    BLOCKS_PER_WARP = 32 / CHAINS,
    TILE = 256, /* elements of each block at a time */
    WARPS = 8,  /* of a block of threads */
    TREE_THREADS = 512,
    TREE_LEAVES = 1024,           /* a warp sums */
    TREE_PARTS = 4 * TREE_LEAVES, /* of them make a tree: 2^22 leaves, 2^34 elements */
};

/* Zeroed first. `first` is the complement of (segment << 34 | element), so that the first bad element is its maximum.
 */
struct bad {
    unsigned long long count, first;
};
enum { BAD_SHIFT = 34 };

/* Scratch: `bad`, a sum for each block, a sum for each segment. */
struct norm_scratch {
    bad *non_finite;
    double *blocks, *segments;
};

static norm_scratch scratch_at(void *memory, int64_t blocks)
{
    bad *b = (bad *)memory;
    return {b, (double *)(b + 1), (double *)(b + 1) + blocks};
}

size_t gradnorm_scratch_bytes_cuda(int64_t blocks, int n_segments)
{
    return sizeof(bad) + (size_t)(blocks + n_segments) * sizeof(double);
}

/* ---- blocks ---- */

template <bool BF16> struct grad_type_of {
    typedef float element;
};
template <> struct grad_type_of<true> {
    typedef bf16 element;
};

__device__ __forceinline__ float grad_value(float x)
{
    return x;
}

__device__ __forceinline__ float grad_value(bf16 x)
{
    return bf16_value(x);
}

/* A lane's share of a tile: 16-byte pieces, eight lanes side by side. Elements behind the block's n are 0. */
template <typename T> struct piece {
    static const int elements = 16 / sizeof(T), per_lane = TILE / (16 / (int)sizeof(T)) / CHAINS;
    uint4 words[per_lane];
};

template <typename T>
__device__ __forceinline__ void piece_load(piece<T> &p, const T *block, int n, int tile, int lane, bool aligned)
{
#pragma unroll
    for (int j = 0; j < p.per_lane; j++) {
        const int at = tile + (j * CHAINS + lane) * p.elements;
        uint4 words = make_uint4(0, 0, 0, 0);
        if (aligned && at + p.elements <= n) {
            words = *reinterpret_cast<const uint4 *>(block + at);
        } else if (at < n) {
            uint32_t w[4] = {0, 0, 0, 0};
            for (int i = 0; i < p.elements && at + i < n; i++) {
                if constexpr (sizeof(T) == 2) {
                    w[i / 2] |= (uint32_t)block[at + i] << 16 * (i % 2);
                } else {
                    w[i] = __float_as_uint(block[at + i]);
                }
            }
            words = make_uint4(w[0], w[1], w[2], w[3]);
        }
        p.words[j] = words;
    }
}

/* Sum over the eight lanes of a group, in each of them: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). */
__device__ __forceinline__ double chains_sum(double x)
{
#pragma unroll
    for (int o = 1; o < CHAINS; o *= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, o);
    }
    return x;
}

/* Counts what is not finite in a block whose sum is not, and finds the first. All lanes of a warp call it; `look`: this
 * lane's block is one. */
template <typename T>
__device__ __forceinline__ void bad_count(bad *total, const plan_segment *segments, const T *block, const plan_block &p,
                                          int lane, bool look)
{
    unsigned int count = 0, first = UINT32_MAX;
    for (int i = lane; look && i < p.n; i += CHAINS) {
        if (!isfinite(grad_value(block[i]))) {
            count++;
            first = min(first, (unsigned int)i);
        }
    }
#pragma unroll
    for (int o = 1; o < CHAINS; o *= 2) {
        count += __shfl_xor_sync(0xffffffffu, count, o);
        first = min(first, __shfl_xor_sync(0xffffffffu, first, o));
    }
    if (look && lane == 0) {
        atomicAdd(&total->count, count);
        const uint64_t element = p.at - segments[p.segment].offset + first;
        atomicMax(&total->first, ~((unsigned long long)p.segment << BAD_SHIFT | element));
    }
}

template <bool BF16>
static __global__ void __launch_bounds__(32 * WARPS)
    gradnorm_blocks_kernel(const void *plan, int64_t blocks, const void *grads, double *sums, bad *non_finite)
{
    typedef typename grad_type_of<BF16>::element T;
    const int gap = 32 / (int)sizeof(T); /* puts the four groups of a warp on different banks */
    __shared__ __align__(16) T shared[WARPS][BLOCKS_PER_WARP][TILE + gap];
    const int warp = threadIdx.x >> 5, group = (threadIdx.x & 31) / CHAINS, lane = threadIdx.x % CHAINS;
    const int64_t number = ((int64_t)blockIdx.x * WARPS + warp) * BLOCKS_PER_WARP + group;
    T *tile_of = shared[warp][group];
    plan_block p = {};
    if (number < blocks) {
        p = plan_find(plan, number);
    }
    const T *block = static_cast<const T *>(grads) + p.at;
    const bool aligned = p.at % (16 / sizeof(T)) == 0;

    piece<T> ahead;
    piece_load(ahead, block, p.n, 0, lane, aligned);
    double sum = 0.0;
    for (int tile = 0; __any_sync(0xffffffffu, tile < p.n); tile += TILE) {
        __syncwarp(); /* the last tile has been read */
#pragma unroll
        for (int j = 0; j < ahead.per_lane; j++) {
            *reinterpret_cast<uint4 *>(tile_of + (j * CHAINS + lane) * ahead.elements) = ahead.words[j];
        }
        __syncwarp();
        piece_load(ahead, block, p.n, tile + TILE, lane, aligned);
#pragma unroll 8
        for (int i = lane; i < TILE; i += CHAINS) {
            const double x = (double)grad_value(tile_of[i]);
            sum = fma(x, x, sum); /* the square of an FP32 number is exact in FP64: as a product and a sum */
        }
    }
    sum = chains_sum(sum);
    if (number < blocks && lane == 0) {
        sums[number] = sum;
    }
    const bool look = number < blocks && !isfinite(sum);
    if (__any_sync(0xffffffffu, look)) {
        bad_count(non_finite, plan_segments(plan, blocks), block, p, lane, look);
    }
}

/* ---- trees: padded with zeros, as sum_tree of gradnorm.c ---- */

__device__ __forceinline__ double tree8(const double *leaves, int64_t n)
{
    double x[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        x[i] = i < n ? leaves[i] : 0.0;
    }
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

/* The first n of TREE_LEAVES leaves, 32 a lane; the sum in every lane. */
__device__ __forceinline__ double tree_warp(const double *leaves, int64_t n)
{
    const int first = 32 * (threadIdx.x & 31);
    leaves += first;
    n -= first;
    double x =
        (tree8(leaves, n) + tree8(leaves + 8, n - 8)) + (tree8(leaves + 16, n - 16) + tree8(leaves + 24, n - 24));
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, o);
    }
    return x;
}

/* Of up to 2^22 leaves, by a block; the sum in thread 0. */
__device__ __forceinline__ double tree_block(const double *leaves, int64_t n)
{
    __shared__ double parts[TREE_PARTS], top[4];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int n_parts = (int)((n + TREE_LEAVES - 1) / TREE_LEAVES);
    for (int p = warp; p < n_parts; p += TREE_THREADS / 32) {
        const double x = tree_warp(leaves + (int64_t)p * TREE_LEAVES, n - (int64_t)p * TREE_LEAVES);
        if (lane == 0) {
            parts[p] = x;
        }
    }
    __syncthreads();
    if (warp < 4) {
        const double x = tree_warp(parts + warp * TREE_LEAVES, n_parts - warp * TREE_LEAVES);
        if (lane == 0) {
            top[warp] = x;
        }
    }
    __syncthreads();
    return (top[0] + top[1]) + (top[2] + top[3]);
}

static __global__ void __launch_bounds__(TREE_THREADS)
    gradnorm_segments_kernel(const void *plan, int64_t blocks, const double *sums, double *segment_sums)
{
    const plan_segment *s = plan_segments(plan, blocks) + blockIdx.x;
    const double sum =
        tree_block(sums + s->first_block, (int64_t)((s->elements + GRADNORM_BLOCK - 1) / GRADNORM_BLOCK));
    if (threadIdx.x == 0) {
        segment_sums[blockIdx.x] = sum;
    }
}

static __global__ void __launch_bounds__(TREE_THREADS)
    gradnorm_result_kernel(const double *segment_sums, int n_segments, const bad *non_finite, struct gradnorm *result)
{
    const double sum = tree_block(segment_sums, n_segments);
    if (threadIdx.x == 0) {
        const unsigned long long first = ~non_finite->first, count = non_finite->count;
        result->norm = sqrt(sum);
        result->non_finite = (int64_t)count;
        result->bad_segment = count > 0 ? (int)(first >> BAD_SHIFT) : -1;
        result->bad_element = count > 0 ? (size_t)(first & ((1ull << BAD_SHIFT) - 1)) : 0;
    }
}

void gradnorm_cuda(const struct gradnorm_cuda *a, const cuda *on)
{
    ASSERT(a->scratch != NULL && a->result != NULL && (a->grad_type == DTYPE_F32 || a->grad_type == DTYPE_BF16));
    const norm_scratch s = scratch_at(a->scratch, a->blocks);
    cuda_zero(on, s.non_finite, sizeof *s.non_finite);
    if (a->blocks > 0) {
        auto kernel = a->grad_type == DTYPE_BF16 ? gradnorm_blocks_kernel<true> : gradnorm_blocks_kernel<false>;
        kernel<<<cuda_blocks(a->blocks, WARPS * BLOCKS_PER_WARP), 32 * WARPS, 0, on->stream>>>(
            a->plan, a->blocks, a->grads, s.blocks, s.non_finite);
        cuda_launched(on, "gradnorm_blocks");
    }
    if (a->n_segments > 0) {
        gradnorm_segments_kernel<<<(unsigned int)a->n_segments, TREE_THREADS, 0, on->stream>>>(a->plan, a->blocks,
                                                                                               s.blocks, s.segments);
        cuda_launched(on, "gradnorm_segments");
    }
    gradnorm_result_kernel<<<1, TREE_THREADS, 0, on->stream>>>(s.segments, a->n_segments, s.non_finite, a->result);
    cuda_launched(on, "gradnorm_result");
}
