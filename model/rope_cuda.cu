/* model: RoPE on the GPU, in place. The same FP32 operations as rope_cpu.c, none contracted: equal bits.
 *
 * A thread rotates eight pairs of several heads of one row, so that the angles are read once for those heads and
 * several loads are in flight at a time. */
#include "core/cuda.cuh"

extern "C" {
#include "model/rope.h"
}

enum { ROPE_THREADS = 256, ROPE_HEADS = 4 };

__device__ __forceinline__ void load8(const float *p, float *y)
{
    const float4 a = reinterpret_cast<const float4 *>(p)[0], b = reinterpret_cast<const float4 *>(p)[1];
    y[0] = a.x, y[1] = a.y, y[2] = a.z, y[3] = a.w;
    y[4] = b.x, y[5] = b.y, y[6] = b.z, y[7] = b.w;
}

/* low and high become the turned pairs. */
__device__ __forceinline__ void turn8(bf16x8 &low, bf16x8 &high, const float *cosine, const float *sine)
{
    float x[8], y[8], turned_x[8], turned_y[8];
    bf16x8_unpack(low, x);
    bf16x8_unpack(high, y);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        turned_x[i] = __fsub_rn(__fmul_rn(x[i], cosine[i]), __fmul_rn(y[i], sine[i]));
        turned_y[i] = __fadd_rn(__fmul_rn(y[i], cosine[i]), __fmul_rn(x[i], sine[i]));
    }
    low = bf16x8_pack(turned_x);
    high = bf16x8_pack(turned_y);
}

__device__ __forceinline__ void load_angles(const rope_apply &a, int64_t at, float *cosine, float *sine)
{
    load8(a.cosine + at, cosine);
    load8(a.sine + at, sine);
    if (a.inverse) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            sine[i] = -sine[i];
        }
    }
}

static int groups_of(int64_t heads)
{
    return (int)((heads + ROPE_HEADS - 1) / ROPE_HEADS);
}

/* Threads run over (row, group of heads, eight pairs), the last fastest. */
static __global__ void __launch_bounds__(ROPE_THREADS)
    rope_apply_kernel(const rope_apply a, int64_t length, int vectors, int head_groups)
{
    const int64_t thread = blockIdx.x * (int64_t)ROPE_THREADS + threadIdx.x;
    const int per_row = vectors * head_groups;
    const int64_t row = thread / per_row;
    if (row >= a.rows) {
        return;
    }
    const int in_row = (int)(thread - row * per_row);
    const int head = in_row / vectors * ROPE_HEADS, half = a.head_dim / 2, feature = in_row % vectors * 8;
    bf16 *x = a.x + row * a.row_stride + (int64_t)head * a.head_dim + feature;

    bf16x8 low[ROPE_HEADS], high[ROPE_HEADS];
#pragma unroll
    for (int h = 0; h < ROPE_HEADS; h++) {
        if (head + h < a.heads) {
            low[h] = bf16x8_load(x + h * a.head_dim);
            high[h] = bf16x8_load(x + h * a.head_dim + half);
        }
    }
    float cosine[8], sine[8];
    load_angles(a, row % length * half + feature, cosine, sine);
#pragma unroll
    for (int h = 0; h < ROPE_HEADS; h++) {
        if (head + h < a.heads) {
            turn8(low[h], high[h], cosine, sine);
            bf16x8_store(x + h * a.head_dim, low[h]);
            bf16x8_store(x + h * a.head_dim + half, high[h]);
        }
    }
}

void rope_apply_cuda(const rope_apply *a, int64_t length, const cuda *on)
{
    ASSERT(length > 0 && a->head_dim > 0 && a->head_dim % 16 == 0 && a->row_stride % 8 == 0);
    const int vectors = (int)a->head_dim / 16, head_groups = groups_of(a->heads);
    const int64_t threads = a->rows * vectors * head_groups;
    if (threads > 0) {
        rope_apply_kernel<<<cuda_blocks(threads, ROPE_THREADS), ROPE_THREADS, 0, on->stream>>>(*a, length, vectors,
                                                                                               head_groups);
        cuda_launched(on, "rope_apply");
    }
}

/* ---- with largest magnitudes ------------------------------------------------------------------------------- */

/* A block has ROPE_THREADS / vectors rows of one sample and a group of heads, those that turn first, then those beside.
 * Neighbouring blocks have neighbouring groups: rows are touched whole. */
struct measure_shape {
    int64_t length, slices;          /* blocks of rows a sample */
    int vectors, groups, all_groups; /* groups: of heads that turn */
};

__device__ __forceinline__ uint32_t larger_pair(uint32_t pair, bf16x8 x)
{
    const uint32_t low = __vmaxu2(x.words.x & 0x7fff7fffu, x.words.y & 0x7fff7fffu);
    const uint32_t high = __vmaxu2(x.words.z & 0x7fff7fffu, x.words.w & 0x7fff7fffu);
    return __vmaxu2(pair, __vmaxu2(low, high));
}

/* Magnitudes order like their bits; a maximum has no order. NaN counts as Inf. pair: of head h, of this thread. */
__device__ __forceinline__ void raise(uint32_t *amax, const uint32_t (&pair)[ROPE_HEADS], int heads, bool of_all)
{
    __shared__ uint32_t part[ROPE_THREADS / 32][ROPE_HEADS];
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int h = 0; h < ROPE_HEADS; h++) {
        const uint32_t largest = __reduce_max_sync(0xffffffffu, max(pair[h] & 0xffffu, pair[h] >> 16));
        if (threadIdx.x % 32 == 0) {
            part[warp][h] = largest;
        }
    }
    __syncthreads();
    if (threadIdx.x < heads) {
        uint32_t largest = 0;
#pragma unroll
        for (int w = 0; w < ROPE_THREADS / 32; w++) {
            largest = max(largest, part[w][threadIdx.x]);
        }
        largest = min(largest, 0x7f80u) << 16;
        uint32_t *to = amax + (of_all ? 0 : threadIdx.x);
        if (largest > *reinterpret_cast<volatile uint32_t *>(to)) {
            atomicMax(to, largest);
        }
    }
}

static __global__ void __launch_bounds__(ROPE_THREADS, 3)
    rope_measure_kernel(const rope_apply a, const rope_largest largest, const measure_shape s)
{
    const int group = (int)(blockIdx.x % s.all_groups), half = (int)a.head_dim / 2;
    const int feature = (int)threadIdx.x % s.vectors * 8;
    const bool turns = group < s.groups;
    const int head = (turns ? group : group - s.groups) * ROPE_HEADS;
    const int heads = (int)min((int64_t)ROPE_HEADS, (turns ? a.heads : largest.beside_heads) - head);
    const int64_t rows = blockIdx.x / s.all_groups, sample = rows / s.slices, slice = rows % s.slices;
    const int64_t position = slice * (ROPE_THREADS / s.vectors) + threadIdx.x / s.vectors;
    const int64_t row = sample * s.length + position;
    uint32_t pair[ROPE_HEADS] = {};
    if (position < s.length && row < a.rows) {
        const bf16 *x = turns ? a.x + row * a.row_stride : largest.beside + row * largest.beside_stride;
        x += head * a.head_dim + feature;
        bf16x8 low[ROPE_HEADS], high[ROPE_HEADS];
#pragma unroll
        for (int h = 0; h < ROPE_HEADS; h++) {
            if (h < heads) {
                low[h] = bf16x8_load(x + h * a.head_dim);
                high[h] = bf16x8_load(x + h * a.head_dim + half);
            }
        }
        if (turns) {
            float cosine[8], sine[8];
            load_angles(a, position * half + feature, cosine, sine);
            bf16 *to = a.x + row * a.row_stride + head * a.head_dim + feature;
#pragma unroll
            for (int h = 0; h < ROPE_HEADS; h++) {
                if (h < heads) {
                    turn8(low[h], high[h], cosine, sine);
                    bf16x8_store(to + h * a.head_dim, low[h]);
                    bf16x8_store(to + h * a.head_dim + half, high[h]);
                }
            }
        }
#pragma unroll
        for (int h = 0; h < ROPE_HEADS; h++) {
            pair[h] = h < heads ? larger_pair(larger_pair(0, low[h]), high[h]) : 0;
        }
    }
    const int64_t first = sample * (a.heads + largest.beside_heads) + (turns ? 0 : a.heads) + head;
    raise(reinterpret_cast<uint32_t *>(largest.amax) + (largest.of_all ? 0 : first), pair, heads, largest.of_all);
}

void rope_measure_cuda(const rope_apply *a, const rope_largest *largest, int64_t length, const cuda *on)
{
    measure_shape s = {};
    s.vectors = (int)a->head_dim / 16;
    ASSERT(length > 0 && rope_measures(a->head_dim) && a->row_stride % 8 == 0 && largest->beside_stride % 8 == 0);
    ASSERT(largest->of_all || a->rows % length == 0);
    const int64_t samples = (a->rows + length - 1) / length, heads = a->heads + largest->beside_heads;
    s.length = length;
    s.slices = (length * s.vectors + ROPE_THREADS - 1) / ROPE_THREADS;
    s.groups = groups_of(a->heads);
    s.all_groups = s.groups + groups_of(largest->beside_heads);
    const int64_t blocks = samples * s.slices * s.all_groups;
    if (blocks > 0) {
        cuda_zero(on, largest->amax, (largest->of_all ? 1 : (size_t)(samples * heads)) * sizeof *largest->amax);
        rope_measure_kernel<<<(unsigned int)blocks, ROPE_THREADS, 0, on->stream>>>(*a, *largest, s);
        cuda_launched(on, "rope_measure");
    }
}
