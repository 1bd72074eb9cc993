/* model: SwiGLU on the GPU: eight neighbours a thread, bound by memory. */
#include "core/cuda.cuh"
#include "model/exponential.cuh"
#include "model/linear_cuda.cuh"

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

/* silu(g) u, for forward and for backward alike. */
__device__ __forceinline__ bf16x8 gated(const float *g, const float *sigmoid, const float *u)
{
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        y[i] = g[i] * sigmoid[i] * u[i];
    }
    return bf16x8_pack(y);
}

static __global__ void __launch_bounds__(SWIGLU_THREADS)
    swiglu_fwd_kernel(const bf16 *gate_up, int64_t ffn, bf16 *out, float *amax, unsigned int blocks_per_row)
{
    const place at = place_here(blocks_per_row);
    uint32_t max = 0;
    if (at.column < ffn) {
        const bf16 *gate = gate_up + at.row * 2 * ffn + at.column;
        bf16x8 gate8 = bf16x8_load(gate), up8 = bf16x8_load(gate + ffn);
        float g[8], s[8], u[8];
        bf16x8_unpack(gate8, g);
        bf16x8_unpack(up8, u);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            s[i] = sigmoid_fast(g[i]);
        }
        const bf16x8 y = gated(g, s, u);
        bf16x8_store(out + at.row * ffn + at.column, y);
        max = magnitude_max8(max, y);
    }
    if (amax != NULL) {
        amax_publish(magnitude_of(max), amax);
    }
}

static __global__ void __launch_bounds__(SWIGLU_THREADS)
    swiglu_bwd_kernel(const swiglu_bwd a, unsigned int blocks_per_row)
{
    const place at = place_here(blocks_per_row);
    uint32_t max = 0;
    if (at.column < a.ffn) {
        const int64_t gate_at = at.row * 2 * a.ffn + at.column, out_at = at.row * a.ffn + at.column;
        bf16x8 gate8 = bf16x8_load(a.gate_up + gate_at), up8 = bf16x8_load(a.gate_up + gate_at + a.ffn);
        bf16x8 dout8 = bf16x8_load(a.dout + out_at);
        float g[8], s[8], u[8], d[8];
        bf16x8_unpack(gate8, g);
        bf16x8_unpack(up8, u);
        bf16x8_unpack(dout8, d);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            s[i] = sigmoid_fast(g[i]);
        }
        if (a.out != NULL) {
            bf16x8_store(a.out + out_at, gated(g, s, u));
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u[i] = d[i] * u[i] * s[i] * (1.0f + g[i] * (1.0f - s[i]));
            d[i] = d[i] * g[i] * s[i];
        }
        const bf16x8 dgate8 = bf16x8_pack(u), dup8 = bf16x8_pack(d);
        bf16x8_store(a.dgate_up + gate_at, dgate8);
        bf16x8_store(a.dgate_up + gate_at + a.ffn, dup8);
        max = magnitude_max8(magnitude_max8(max, dgate8), dup8);
    }
    if (a.amax != NULL) {
        amax_publish(magnitude_of(max), a.amax);
    }
}

static unsigned int blocks_per_row(int64_t rows, int64_t ffn)
{
    ASSERT(ffn > 0 && ffn % 8 == 0);
    int64_t blocks = cuda_blocks(ffn, 8 * SWIGLU_THREADS);
    ASSERT(rows * blocks < INT64_C(1) << 31); /* the grid's limit */
    return (unsigned int)blocks;
}

void swiglu_fwd_cuda(const bf16 *gate_up, int64_t rows, int64_t ffn, bf16 *out, float *amax, const cuda *on)
{
    const unsigned int blocks = blocks_per_row(rows, ffn);
    if (rows > 0) {
        swiglu_fwd_kernel<<<(unsigned int)rows * blocks, SWIGLU_THREADS, 0, on->stream>>>(gate_up, ffn, out, amax,
                                                                                          blocks);
        cuda_launched(on, "swiglu_fwd");
    }
}

void swiglu_bwd_cuda(const swiglu_bwd *a, const cuda *on)
{
    ASSERT(a->dgate_up != a->gate_up);
    const unsigned int blocks = blocks_per_row(a->rows, a->ffn);
    if (a->rows > 0) {
        swiglu_bwd_kernel<<<(unsigned int)a->rows * blocks, SWIGLU_THREADS, 0, on->stream>>>(*a, blocks);
        cuda_launched(on, "swiglu_bwd");
    }
}
