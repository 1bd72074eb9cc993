/* model: RoPE on the GPU, in place. The same FP32 operations as rope_cpu.c, none contracted: equal bits.
 *
 * A thread turns eight pairs of several heads of one row, so that the angles are read once for those heads and several
 * loads are on their way at a time. */
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
    const int64_t angle_at = row % length * half + feature;
    load8(a.cosine + angle_at, cosine);
    load8(a.sine + angle_at, sine);
    if (a.inverse) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            sine[i] = -sine[i];
        }
    }
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
    const int vectors = (int)a->head_dim / 16, head_groups = (int)(a->heads + ROPE_HEADS - 1) / ROPE_HEADS;
    const int64_t threads = a->rows * vectors * head_groups;
    if (threads > 0) {
        rope_apply_kernel<<<cuda_blocks(threads, ROPE_THREADS), ROPE_THREADS, 0, on->stream>>>(*a, length, vectors,
                                                                                               head_groups);
        cuda_launched(on, "rope_apply");
    }
}

/* ---- with largest magnitudes ------------------------------------------------------------------------------- */

enum { MEASURE_ROWS = 4 }; /* of a thread, one after the other: fewer atomics */

__device__ __forceinline__ uint32_t larger_pair(uint32_t pair, bf16x8 x)
{
    const uint32_t low = __vmaxu2(x.words.x & 0x7fff7fffu, x.words.y & 0x7fff7fffu);
    const uint32_t high = __vmaxu2(x.words.z & 0x7fff7fffu, x.words.w & 0x7fff7fffu);
    return __vmaxu2(pair, __vmaxu2(low, high));
}

/* Over the `vectors` lanes that share a head; magnitudes order like their bits. NaN counts as Inf. */
__device__ __forceinline__ void raise(uint32_t *amax, uint32_t pair, int vectors, bool writes)
{
    for (int o = vectors / 2; o > 0; o >>= 1) {
        pair = __vmaxu2(pair, __shfl_xor_sync(0xffffffffu, pair, o));
    }
    if (writes) {
        atomicMax(amax, min(max(pair & 0xffffu, pair >> 16), 0x7f80u) << 16);
    }
}

/* Threads run over (sample, slice of its rows, group of heads, eight pairs), the last fastest. Groups: those that turn,
 * then those beside. */
struct measure_shape {
    int64_t length, slices, threads;
    int vectors, groups, beside_groups;
};

static __global__ void __launch_bounds__(ROPE_THREADS)
    rope_measure_kernel(const rope_apply a, const rope_beside beside, const measure_shape s, uint32_t *amax)
{
    const int64_t thread = blockIdx.x * (int64_t)ROPE_THREADS + threadIdx.x;
    const int per_row = s.vectors * (s.groups + s.beside_groups), half = (int)a.head_dim / 2;
    const int64_t slice = thread / per_row, sample = slice / s.slices, first = slice % s.slices * MEASURE_ROWS;
    const int in_row = (int)(thread - slice * per_row), vector = in_row % s.vectors, group = in_row / s.vectors;
    const bool turns = group < s.groups, exists = thread < s.threads;
    const int head = (turns ? group : group - s.groups) * ROPE_HEADS;
    const int heads = exists ? (int)min((int64_t)ROPE_HEADS, (turns ? a.heads : beside.heads) - head) : 0;
    const int64_t stride = turns ? a.row_stride : beside.row_stride;
    const bf16 *x = (turns ? a.x : beside.x) + (sample * s.length + first) * stride + head * a.head_dim + vector * 8;
    uint32_t largest[ROPE_HEADS] = {};
    const int rows = exists ? (int)min((int64_t)MEASURE_ROWS, s.length - first) : 0;
    for (int r = 0; r < rows; r++, x += stride) {
        bf16x8 low[ROPE_HEADS], high[ROPE_HEADS];
#pragma unroll
        for (int h = 0; h < ROPE_HEADS; h++) {
            if (h < heads) {
                low[h] = bf16x8_load(x + h * a.head_dim);
                high[h] = bf16x8_load(x + h * a.head_dim + half);
            }
        }
        float cosine[8], sine[8];
        if (turns) {
            load8(a.cosine + (first + r) * half + vector * 8, cosine);
            load8(a.sine + (first + r) * half + vector * 8, sine);
        }
#pragma unroll
        for (int h = 0; h < ROPE_HEADS; h++) {
            if (h < heads) {
                if (turns) {
                    turn8(low[h], high[h], cosine, sine);
                    bf16 *to = const_cast<bf16 *>(x) + h * a.head_dim; /* of a.x */
                    bf16x8_store(to, low[h]);
                    bf16x8_store(to + half, high[h]);
                }
                largest[h] = larger_pair(larger_pair(largest[h], low[h]), high[h]);
            }
        }
    }
    uint32_t *to = amax + sample * (a.heads + beside.heads) + (turns ? 0 : a.heads) + head;
#pragma unroll
    for (int h = 0; h < ROPE_HEADS; h++) {
        raise(to + h, largest[h], s.vectors, vector == 0 && h < heads);
    }
}

static int groups_of(int64_t heads)
{
    return (int)((heads + ROPE_HEADS - 1) / ROPE_HEADS);
}

void rope_measure_cuda(const rope_apply *a, const rope_beside *beside, int64_t length, float *amax, const cuda *on)
{
    ASSERT(length > 0 && a->rows % length == 0 && a->head_dim % 16 == 0 && a->row_stride % 8 == 0 && !a->inverse);
    measure_shape s = {};
    s.length = length;
    s.slices = (length + MEASURE_ROWS - 1) / MEASURE_ROWS;
    s.vectors = (int)a->head_dim / 16;
    s.groups = groups_of(a->heads);
    s.beside_groups = groups_of(beside->heads);
    ASSERT(s.vectors > 0 && 32 % s.vectors == 0 && beside->row_stride % 8 == 0);
    s.threads = a->rows / length * s.slices * s.vectors * (s.groups + s.beside_groups);
    if (s.threads > 0) {
        cuda_zero(on, amax, (size_t)(a->rows / length * (a->heads + beside->heads)) * sizeof *amax);
        rope_measure_kernel<<<cuda_blocks(s.threads, ROPE_THREADS), ROPE_THREADS, 0, on->stream>>>(
            *a, *beside, s, reinterpret_cast<uint32_t *>(amax));
        cuda_launched(on, "rope_measure");
    }
}
