/* attention: the Hopper instructions that the kernels use, one named wrapper each. For *_sm90.cu files only.
 *
 * Names in brackets are sections of the PTX ISA. Addresses of shared memory are 32-bit (shared_address). Layout facts
 * that callers rely on:
 *
 * Accumulators of m64nN: thread 32 w + 4 g + c of a warpgroup holds d[4 j + 2 h + e] = row 16 w + g + 8 h, column
 * 8 j + 2 c + e. BF16 A registers of a k16 step: a[h + 2 u] = row g + 8 h, k = 8 u + 2 c, 8 u + 2 c + 1 (so they are
 * pairs of two neighbouring accumulator groups). FP8 A registers of a k32 step: a[h + 2 u] = row g + 8 h, k = 16 u + 4
 * c .. + 3.
 *
 * Tiles in shared memory lie as TMA writes them with SWIZZLE_128B: panels 128 bytes wide (64 BF16 or 128 FP8), one row
 * after the other, 16-byte chunk q of row r at chunk q ^ (r & 7); the panel starts at a multiple of 1024. */
#pragma once

#include "core/cuda.cuh"

extern "C" {
#include "attention/attention.h"
}

#include <cuda.h>

/* ---- shared memory, barriers ------------------------------------------------------------------------------ */

__device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* [mbarrier.init] One thread; then mbarriers_ready() and a barrier of the block. */
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/* [fence.mbarrier_init] Makes initialised barriers visible to TMA too. */
__device__ __forceinline__ void mbarriers_ready()
{
    asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async;" ::: "memory");
}

/* [mbarrier.arrive] */
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* How many lanes of a warp arrive at an mbarrier when the warp has read, or written, what it guards. One is enough
 * after __syncwarp, which orders the other lanes' accesses before it. racecheck does not follow that order: built with
 * ARRIVE_BY_LANE (make sanitize-gpu) every lane arrives for itself. */
#ifdef ARRIVE_BY_LANE
enum { WARP_ARRIVALS = 32 };
#else
enum { WARP_ARRIVALS = 1 };
#endif

/* [mbarrier.arrive, expect-tx] Arrives, and makes the phase wait for `bytes` of TMA transfers too. */
__device__ __forceinline__ void mbarrier_expect(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

/* [mbarrier.try_wait] Returns once the phase of this parity is complete. A fresh barrier is in phase 0, so that
 * waiting for parity 1 returns at once. */
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity)
{
    asm volatile("{\n\t.reg .pred done;\n"
                 "again:\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
                 "@done bra complete;\n\t"
                 "bra again;\n"
                 "complete:\n\t}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

/* [mbarrier.test_wait] Whether the phase of this parity is complete. */
__device__ __forceinline__ bool mbarrier_test(uint32_t barrier, uint32_t parity)
{
    uint32_t complete;
    asm volatile("{\n\t.reg .pred done;\n\t"
                 "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, done;\n\t}"
                 : "=r"(complete)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return complete != 0;
}

/* [bar.sync, bar.arrive] Named barriers 1 .. 15 (0 is __syncthreads): `threads` counts those that arrive or wait. */
__device__ __forceinline__ void named_barrier_sync(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* [fence.proxy.async] By every thread that wrote shared memory for wgmma or TMA to read, before the barrier between. */
__device__ __forceinline__ void fence_async_proxy()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* [fence.proxy.async] Orders accesses of TMA to global memory and ordinary ones. */
__device__ __forceinline__ void fence_async_global()
{
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

/* [elect.sync] True in one lane of a converged warp. */
__device__ __forceinline__ bool elect_one()
{
    uint32_t elected;
    asm volatile("{\n\t.reg .pred p;\n\telect.sync _|p, 0xffffffff;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(elected));
    return elected != 0;
}

/* [setmaxnreg] By all warps of a warpgroup; multiples of 8. Ignored by ptxas (C7508) without __launch_bounds__(n, 1).
 */
template <int N> __device__ __forceinline__ void registers_raise()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N> __device__ __forceinline__ void registers_lower()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

/* ---- TMA [cp.async.bulk.tensor]: one thread; coordinates innermost first --------------------------------- */

__device__ __forceinline__ void tma_load_2d(uint32_t to, const CUtensorMap *map, uint32_t barrier, int x, int y)
{
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            to),
        "l"(map), "r"(barrier), "r"(x), "r"(y)
        : "memory");
}

__device__ __forceinline__ void tma_load_3d(uint32_t to, const CUtensorMap *map, uint32_t barrier, int x, int y, int z)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

__device__ __forceinline__ void tma_load_4d(uint32_t to, const CUtensorMap *map, uint32_t barrier, int x, int y, int z,
                                            int w)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

__device__ __forceinline__ void tma_load_5d(uint32_t to, const CUtensorMap *map, uint32_t barrier, int x, int y, int z,
                                            int w, int v)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
                 : "memory");
}

__device__ __forceinline__ void tma_store_4d(const CUtensorMap *map, uint32_t from, int x, int y, int z, int w)
{
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(from), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

/* [cp.reduce.async.bulk] global[0 .. bytes) += shared, FP32; joins the same groups as stores. */
__device__ __forceinline__ void bulk_add_f32(float *to, uint32_t from, uint32_t bytes)
{
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}

/* [cp.async.bulk] global[0 .. bytes) = shared; joins the same groups. */
__device__ __forceinline__ void bulk_store(void *to, uint32_t from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}

/* [cp.async.bulk] Plain copy of contiguous bytes, a multiple of 16. */
__device__ __forceinline__ void bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

/* [cp.async.bulk.commit_group, wait_group] By the thread that issued the stores. Returns when at most N groups are
 * still to be read from shared memory (wait_read), or to become visible in global memory (wait). */
__device__ __forceinline__ void tma_store_commit()
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

template <int N> __device__ __forceinline__ void tma_store_wait_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

template <int N> __device__ __forceinline__ void tma_store_wait()
{
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

/* ---- matrices of 8 x 8 b16 between registers and shared memory [stmatrix] ---------------------------------- */

/* Lane 8 i + r gives the address of row r of matrix i; thread 4 g + c holds elements 2 c, 2 c + 1 of row g. With
 * `transposed` it holds column g, rows 2 c, 2 c + 1. */
__device__ __forceinline__ void stmatrix_x4(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

__device__ __forceinline__ void stmatrix_x4_transposed(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

/* [st.shared] 16 bytes. */
__device__ __forceinline__ void store_shared(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

/* Offset of byte `byte` of row `row` in a panel with SWIZZLE_128B (rows of 128 bytes), or with SWIZZLE_64B (rows of 64
 * bytes: chunk q of row r lies at q ^ (r >> 1 & 3)). */
__device__ __forceinline__ uint32_t swizzle_128(uint32_t row, uint32_t byte)
{
    return row * 128 + (byte ^ ((row & 7) << 4));
}

__device__ __forceinline__ uint32_t swizzle_64(uint32_t row, uint32_t byte)
{
    return row * 64 + (byte ^ ((row >> 1 & 3) << 4));
}

/* ---- numbers ----------------------------------------------------------------------------------------------- */

/* [ex2] 2^x within 2^-22; subnormal results are zero. */
__device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* [lop3] Bits of a where mask has ones, else of b: one instruction. */
__device__ __forceinline__ uint32_t bits_of_either(uint32_t mask, uint32_t a, uint32_t b)
{
    uint32_t y;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(y) : "r"(mask), "r"(a), "r"(b));
    return y;
}

/* floor and ceil by the rounding of one addition, for magnitudes below 2^22 (the dedicated instruction has only the
 * throughput of ex2): floor(x) = __fadd_rd(x, WHOLE) - WHOLE. Differences of such sums are differences of their bits.
 */
#define WHOLE 0x1.8p23f

/* [vimax3, vimin3] Of three. */
__device__ __forceinline__ int max3(int a, int b, int c)
{
    return __vimax3_s32(a, b, c);
}

__device__ __forceinline__ int min3(int a, int b, int c)
{
    return __vimin3_s32(a, b, c);
}

/* [prmt] Each nibble of the lower half of `selector` picks a byte of {low, high}; with bit 3 set it replicates that
 * byte's sign bit. (__byte_perm clears bit 3, by one more instruction.) */
__device__ __forceinline__ uint32_t bytes_by(uint32_t low, uint32_t high, uint32_t selector)
{
    uint32_t y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(low), "r"(high), "r"(selector));
    return y;
}

/* [max, .NaN] The larger one; NaN if either is. */
__device__ __forceinline__ float max_or_nan(float x, float y)
{
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

/* [cvt] Two values to BF16 or, saturating, to FP8; `low` in the lower half. */
__device__ __forceinline__ uint32_t pack_bf16(float low, float high)
{
    uint32_t y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

/* Two values to FP16, towards zero. */
__device__ __forceinline__ uint32_t pack_f16_down(float low, float high)
{
    uint32_t y;
    asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

__device__ __forceinline__ uint32_t pack_e4m3(float x0, float x1, float x2, float x3)
{
    uint32_t y;
    asm("{\n\t.reg .b16 lo, hi;\n\t"
        "cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;\n\t"
        "cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;\n\t"
        "mov.b32 %0, {lo, hi};\n\t}"
        : "=r"(y)
        : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
    return y;
}

__device__ __forceinline__ uint32_t pack_e5m2(float x0, float x1, float x2, float x3)
{
    uint32_t y;
    asm("{\n\t.reg .b16 lo, hi;\n\t"
        "cvt.rn.satfinite.e5m2x2.f32 lo, %2, %1;\n\t"
        "cvt.rn.satfinite.e5m2x2.f32 hi, %4, %3;\n\t"
        "mov.b32 %0, {lo, hi};\n\t}"
        : "=r"(y)
        : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
    return y;
}

/* Four E4M3 codes as two FP16 pairs (exact). */
__device__ __forceinline__ void unpack_e4m3(uint32_t codes, uint32_t &low, uint32_t &high)
{
    asm("{\n\t.reg .b16 lo, hi;\n\tmov.b32 {lo, hi}, %2;\n\t"
        "cvt.rn.f16x2.e4m3x2 %0, lo;\n\tcvt.rn.f16x2.e4m3x2 %1, hi;\n\t}"
        : "=r"(low), "=r"(high)
        : "r"(codes));
}

/* ---- wgmma [Asynchronous Warpgroup Level Matrix Instructions] ---------------------------------------------- */

/* Before the first product that uses registers which ordinary instructions wrote. */
__device__ __forceinline__ void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* At most N groups stay in flight. Until then no other instruction may touch their accumulators or A registers. */
template <int N> __device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* Keeps the compiler from moving uses of accumulators across a wait or a fence. */
template <int N> __device__ __forceinline__ void wgmma_pin(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        asm volatile("" : "+f"(d[i])::"memory");
    }
}

template <int N> __device__ __forceinline__ void wgmma_pin(uint32_t (&a)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        asm volatile("" : "+r"(a[i])::"memory");
    }
}

enum operand_swizzle { OPERAND_SWIZZLE_128 = 1, OPERAND_SWIZZLE_64 = 2 };

/* [Matrix Descriptor] `leading` and `stride` in bytes.
 * K-major: stride = distance of groups of 8 rows (1024 with SWIZZLE_128, 512 with SWIZZLE_64), leading unused; a k step
 * (16 BF16, 32 FP8) adds 32 bytes to the address inside a panel.
 * MN-major (BF16): a panel is 64 MN elements wide, its rows are k; stride = distance of groups of 8 k (1024), leading =
 * distance of panels; a k step of 16 adds 2048 bytes. */
__device__ __forceinline__ uint64_t operand_descriptor(uint32_t address, uint32_t leading, uint32_t stride,
                                                       enum operand_swizzle swizzle)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32 |
           (uint64_t)swizzle << 62;
}

__device__ __forceinline__ uint64_t operand_k_major(uint32_t address)
{
    return operand_descriptor(address, 16, 1024, OPERAND_SWIZZLE_128);
}

__device__ __forceinline__ uint64_t operand_mn_major(uint32_t address, uint32_t panel_bytes)
{
    return operand_descriptor(address, panel_bytes, 1024, OPERAND_SWIZZLE_128);
}

/* The same operand `bytes` further on (a multiple of 16; no carry out of the address field can occur). */
__device__ __forceinline__ uint64_t operand_advance(uint64_t descriptor, uint32_t bytes)
{
    return descriptor + (bytes >> 4);
}

/* wgmma_bf16<N>, wgmma_e4m3<N>, ...: d (64 x N) = A B + (keep ? d : 0), k = 16 (BF16) or 32 (FP8).
 *   ss(d, a, b, keep): A and B by descriptor;  rs(d, a, b, keep): A in registers.
 * TRANS_A, TRANS_B (BF16): the operand is MN-major. FP8 operands are K-major. B is N x k seen as rows of k. */
template <int N> struct wgmma_bf16;
template <int N> struct wgmma_e4m3;
template <int N> struct wgmma_e5m2_e4m3; /* A in E5M2, B in E4M3 */
template <int N> struct wgmma_e4m3_e5m2; /* A in E4M3, B in E5M2 */

// clang-format off
#define WGMMA_TEXT_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_TEXT_32 WGMMA_TEXT_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_TEXT_36 WGMMA_TEXT_32 ", %32, %33, %34, %35"
#define WGMMA_TEXT_48 WGMMA_TEXT_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_TEXT_64 WGMMA_TEXT_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_TEXT_68 WGMMA_TEXT_64 ", %64, %65, %66, %67"
#define WGMMA_D8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
                       "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_D16(d) WGMMA_D8(d, 0), WGMMA_D8(d, 8)
#define WGMMA_D32(d) WGMMA_D16(d), WGMMA_D8(d, 16), WGMMA_D8(d, 24)
#define WGMMA_D36(d) WGMMA_D32(d), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define WGMMA_D48(d) WGMMA_D32(d), WGMMA_D8(d, 32), WGMMA_D8(d, 40)
#define WGMMA_D64(d) WGMMA_D48(d), WGMMA_D8(d, 48), WGMMA_D8(d, 56)
#define WGMMA_D68(d) WGMMA_D64(d), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])

/* R = N / 2 accumulators; R0 .. R5 the numbers of the operands behind them. */
#define WGMMA_SS(SHAPE, FLAGS, R, R0, R1, R2, ...) \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #R2 ", 0;\n\twgmma.mma_async.sync.aligned." SHAPE " {" \
                 WGMMA_TEXT_##R "}, %" #R0 ", %" #R1 ", p, 1, 1" FLAGS ";\n\t}" \
                 : WGMMA_D##R(d) : "l"(a), "l"(b), "r"(keep) __VA_ARGS__)
#define WGMMA_RS(SHAPE, FLAGS, R, R0, R1, R2, R3, R4, R5, ...) \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #R5 ", 0;\n\twgmma.mma_async.sync.aligned." SHAPE " {" \
                 WGMMA_TEXT_##R "}, {%" #R0 ", %" #R1 ", %" #R2 ", %" #R3 "}, %" #R4 ", p, 1, 1" FLAGS ";\n\t}" \
                 : WGMMA_D##R(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep) __VA_ARGS__)
#define WGMMA_COMMA ,

#define WGMMA_BF16(N, R, R0, R1, R2, R3, R4, R5, R6) \
    template <> struct wgmma_bf16<N> { \
        template <int TRANS_A, int TRANS_B> \
        static __device__ __forceinline__ void ss(float (&d)[R], uint64_t a, uint64_t b, int keep) \
        { \
            WGMMA_SS("m64n" #N "k16.f32.bf16.bf16", ", %" #R3 ", %" #R4, R, R0, R1, R2, \
                     WGMMA_COMMA "n"(TRANS_A) WGMMA_COMMA "n"(TRANS_B)); \
        } \
        template <int TRANS_B> \
        static __device__ __forceinline__ void rs(float (&d)[R], const uint32_t *a, uint64_t b, int keep) \
        { \
            WGMMA_RS("m64n" #N "k16.f32.bf16.bf16", ", %" #R6, R, R0, R1, R2, R3, R4, R5, WGMMA_COMMA "n"(TRANS_B)); \
        } \
    }
#define WGMMA_FP8(NAME, TYPES, N, R, R0, R1, R2, R3, R4, R5) \
    template <> struct NAME<N> { \
        static __device__ __forceinline__ void ss(float (&d)[R], uint64_t a, uint64_t b, int keep) \
        { \
            WGMMA_SS("m64n" #N "k32.f32." TYPES, "", R, R0, R1, R2, ); \
        } \
        static __device__ __forceinline__ void rs(float (&d)[R], const uint32_t *a, uint64_t b, int keep) \
        { \
            WGMMA_RS("m64n" #N "k32.f32." TYPES, "", R, R0, R1, R2, R3, R4, R5, ); \
        } \
    }
#define WGMMA_ALL(N, R, R0, R1, R2, R3, R4, R5, R6) \
    WGMMA_BF16(N, R, R0, R1, R2, R3, R4, R5, R6); \
    WGMMA_FP8(wgmma_e4m3, "e4m3.e4m3", N, R, R0, R1, R2, R3, R4, R5); \
    WGMMA_FP8(wgmma_e5m2_e4m3, "e5m2.e4m3", N, R, R0, R1, R2, R3, R4, R5); \
    WGMMA_FP8(wgmma_e4m3_e5m2, "e4m3.e5m2", N, R, R0, R1, R2, R3, R4, R5)

WGMMA_ALL(32, 16, 16, 17, 18, 19, 20, 21, 22);
WGMMA_ALL(64, 32, 32, 33, 34, 35, 36, 37, 38);
WGMMA_ALL(72, 36, 36, 37, 38, 39, 40, 41, 42);
WGMMA_ALL(96, 48, 48, 49, 50, 51, 52, 53, 54);
WGMMA_ALL(128, 64, 64, 65, 66, 67, 68, 69, 70);
WGMMA_ALL(136, 68, 68, 69, 70, 71, 72, 73, 74);
// clang-format on
