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
