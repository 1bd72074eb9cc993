/* attention: tensor core products of BF16 tiles in shared memory, for the plain CUDA kernels: mma.sync m16n8k16 with
 * FP32 accumulation, ldmatrix and cp.async (PTX ISA, "Matrix fragments for mma.m16n8k16", "ldmatrix", "cp.async"). Runs
 * on every GPU since sm_80.
 *
 * Fragments. lane = 4 g + c, g = 0..7, c = 0..3.
 *   accumulator d[0..3]   (row g, columns 2c, 2c+1), (row g + 8, columns 2c, 2c+1) of a 16 x 8 tile
 *   A a[0..3]             (g, k 2c..), (g + 8, k 2c..), (g, k 2c + 8..), (g + 8, k 2c + 8..): two neighbouring
 *                         accumulator tiles, rounded to BF16 pairs, are the A operand of the next product
 *   B b[0..1]             (k 2c.., column g), (k 2c + 8.., column g)
 *
 * A tile in shared memory has rows of W values, W a multiple of 64, in 16-byte chunks; chunk i of row r lies at chunk
 * i ^ (r & 7), so that ldmatrix meets no bank twice. */
#pragma once

#include "core/cuda.cuh"

__device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Address of the 16-byte chunk that holds column `column` (a multiple of 8) of row `row`. */
template <int W> __device__ __forceinline__ uint32_t tile_chunk(uint32_t tile, int row, int column)
{
    return tile + (uint32_t)(row * (2 * W) + (((column >> 3) ^ (row & 7)) << 4));
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t *r, uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t *r, uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* d += a b */
__device__ __forceinline__ void mma_bf16(float *d, const uint32_t *a, const uint32_t *b)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* A of rows row0.., k k0.. of a tile stored (rows, k). */
template <int W> __device__ __forceinline__ void fragment_a(uint32_t *a, uint32_t tile, int row0, int k0)
{
    const int lane = threadIdx.x & 31;
    ldmatrix_x4(a, tile_chunk<W>(tile, row0 + (lane & 15), k0 + ((lane >> 4) << 3)));
}

/* The same of a tile stored (k, rows): its transpose is multiplied. */
template <int W> __device__ __forceinline__ void fragment_a_trans(uint32_t *a, uint32_t tile, int row0, int k0)
{
    const int lane = threadIdx.x & 31;
    ldmatrix_x4_trans(a, tile_chunk<W>(tile, k0 + (lane & 7) + ((lane >> 4) << 3), row0 + (lane & 8)));
}

/* B of columns n0 .. n0 + 15, k k0.., as two operands b[0..1], b[2..3], of a tile stored (columns, k). */
template <int W> __device__ __forceinline__ void fragment_b(uint32_t *b, uint32_t tile, int n0, int k0)
{
    const int lane = threadIdx.x & 31;
    ldmatrix_x4(b, tile_chunk<W>(tile, n0 + (lane & 7) + ((lane >> 4) << 3), k0 + (lane & 8)));
}

/* The same of a tile stored (k, columns). */
template <int W> __device__ __forceinline__ void fragment_b_trans(uint32_t *b, uint32_t tile, int n0, int k0)
{
    const int lane = threadIdx.x & 31;
    ldmatrix_x4_trans(b, tile_chunk<W>(tile, k0 + (lane & 15), n0 + ((lane >> 4) << 3)));
}

/* Two values as a BF16 pair, the first in the low half, as fragments want them. */
__device__ __forceinline__ uint32_t bf16_pair(float low, float high)
{
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&pair);
}

/* 16 bytes from global to shared memory, in the background; zeros if `valid` is false (the address must be readable
 * nevertheless: it is not read). */
__device__ __forceinline__ void copy16_async(uint32_t to, const void *from, bool valid)
{
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy4_async(uint32_t to, const void *from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copies_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until at most N of this thread's committed groups are in flight; others see the data after a barrier. */
template <int N> __device__ __forceinline__ void copies_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* Rows first .. first + R - 1 of `x` (`stride` apart) into a tile; rows from `end` on and columns from `columns` on (a
 * multiple of 8) as zeros. All threads of the block take part. */
template <int R, int W, int THREADS>
__device__ __forceinline__ void tile_load(uint32_t tile, const bf16 *x, int64_t stride, int64_t first, int64_t end,
                                          int columns)
{
    constexpr int CHUNKS = W / 8;
    static_assert(R * CHUNKS % THREADS == 0, "whole turns");
#pragma unroll
    for (int i = 0; i < R * CHUNKS / THREADS; i++) {
        const int at = i * THREADS + (int)threadIdx.x, row = at / CHUNKS, chunk = at % CHUNKS;
        const bool valid = first + row < end && chunk * 8 < columns;
        const bf16 *from = x + (valid ? (first + row) * stride + chunk * 8 : 0);
        copy16_async(tile_chunk<W>(tile, row, chunk * 8), from, valid);
    }
}

/* A barrier in shared memory where arriving and waiting are apart (PTX ISA, "mbarrier"): `threads` threads arrive, then
 * its phase is over; phases count from 0. One thread makes it, before a barrier of the block. */
__device__ __forceinline__ void barrier_init(uint32_t barrier, int threads)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/* What this thread read and wrote before is done. */
__device__ __forceinline__ void barrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Waits for the end of a phase of this parity, the one under way or the one before. */
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity)
{
    uint32_t over;
    do {
        asm volatile("{\n\t.reg .pred p;\n\t"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, p;\n\t}"
                     : "=r"(over)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (over == 0);
}
