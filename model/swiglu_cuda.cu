/* model: SwiGLU on the GPU: eight neighbours a thread, bound by memory. */
#include "core/cuda.cuh"
#include "model/exponential.cuh"

extern "C" {
#include "model/swiglu.h"
}

enum { SWIGLU_THREADS = 256 };

__device__ __forceinline__ float sigmoid_fast(float x)
{
    return reciprocal_fast(1.0f + exponential_fast(-x));
}

/* Blocks of a row lie side by side: the row and the columns of this thread. */
struct place {
    int64_t row, column;
};

__device__ __forceinline__ place place_here(unsigned int blocks_per_row)
{
    const unsigned int row = blockIdx.x / blocks_per_row;
    return {(int64_t)row, 8 * ((int64_t)(blockIdx.x - row * blocks_per_row) * SWIGLU_THREADS + threadIdx.x)};
}

static __global__ void __launch_bounds__(SWIGLU_THREADS)
    swiglu_fwd_kernel(const bf16 *gate_up, int64_t ffn, bf16 *out, unsigned int blocks_per_row)
{
    const place at = place_here(blocks_per_row);
    if (at.column >= ffn) {
        return;
    }
    const bf16 *gate = gate_up + at.row * 2 * ffn + at.column;
    bf16x8 gate8 = bf16x8_load(gate), up8 = bf16x8_load(gate + ffn);
    float g[8], u[8];
    bf16x8_unpack(gate8, g);
    bf16x8_unpack(up8, u);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        u[i] = g[i] * sigmoid_fast(g[i]) * u[i];
    }
    bf16x8_store(out + at.row * ffn + at.column, bf16x8_pack(u));
}

static __global__ void __launch_bounds__(SWIGLU_THREADS)
    swiglu_bwd_kernel(const bf16 *gate_up, const bf16 *dout, int64_t ffn, bf16 *dgate_up, unsigned int blocks_per_row)
{
    const place at = place_here(blocks_per_row);
    if (at.column >= ffn) {
        return;
    }
    const int64_t gate_at = at.row * 2 * ffn + at.column;
    bf16x8 gate8 = bf16x8_load(gate_up + gate_at), up8 = bf16x8_load(gate_up + gate_at + ffn);
    bf16x8 dout8 = bf16x8_load(dout + at.row * ffn + at.column);
    float g[8], u[8], d[8];
    bf16x8_unpack(gate8, g);
    bf16x8_unpack(up8, u);
    bf16x8_unpack(dout8, d);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float s = sigmoid_fast(g[i]);
        u[i] = d[i] * u[i] * s * (1.0f + g[i] * (1.0f - s));
        d[i] = d[i] * g[i] * s;
    }
    bf16x8_store(dgate_up + gate_at, bf16x8_pack(u));
    bf16x8_store(dgate_up + gate_at + ffn, bf16x8_pack(d));
}

static unsigned int blocks_per_row(int64_t rows, int64_t ffn)
{
    ASSERT(ffn > 0 && ffn % 8 == 0);
    int64_t blocks = cuda_blocks(ffn, 8 * SWIGLU_THREADS);
    ASSERT(rows * blocks < INT64_C(1) << 31); /* the grid's limit */
    return (unsigned int)blocks;
}

void swiglu_fwd_cuda(const bf16 *gate_up, int64_t rows, int64_t ffn, bf16 *out, const cuda *on)
{
    const unsigned int blocks = blocks_per_row(rows, ffn);
    if (rows > 0) {
        swiglu_fwd_kernel<<<(unsigned int)rows * blocks, SWIGLU_THREADS, 0, on->stream>>>(gate_up, ffn, out, blocks);
        cuda_launched(on, "swiglu_fwd");
    }
}

void swiglu_bwd_cuda(const bf16 *gate_up, const bf16 *dout, int64_t rows, int64_t ffn, bf16 *dgate_up, const cuda *on)
{
    ASSERT(dgate_up != gate_up);
    const unsigned int blocks = blocks_per_row(rows, ffn);
    if (rows > 0) {
        swiglu_bwd_kernel<<<(unsigned int)rows * blocks, SWIGLU_THREADS, 0, on->stream>>>(gate_up, dout, ffn, dgate_up,
                                                                                          blocks);
        cuda_launched(on, "swiglu_bwd");
    }
}
