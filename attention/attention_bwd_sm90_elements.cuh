/* attention: what the computing warpgroups of the FP8 backward on Hopper do with the elements of a tile: scores to P, P
 * and dP to dS; and long sums to the threads beside them. For attention_bwd_sm90_fp8.cu; attention_bwd_sm90_mxfp4.cu
 * takes products and sums, its elements are in attention_bwd_sm90_mxfp4.cuh. */
#pragma once

#include "attention/attention_bwd_sm90_beside.cuh"

/* ---- products of both kernels ------------------------------------------------------------------------------- */

/* S^T (64 keys x 64 queries), or with QUERY_ROWS S (64 queries x 64 keys): rows times columns, of which one is 64 rows
 * of K, the other a tile of Q. */
template <class R>
static __device__ __forceinline__ void product_scores(float (&x)[32], uint64_t rows, uint64_t columns)
{
    constexpr int panel = (R::QUERY_ROWS ? R::ROWS_Q : R::ROWS_K) / 2;
    constexpr int other = (R::QUERY_ROWS ? R::ROWS_K : R::ROWS_Q) / 2;
#pragma unroll
    for (int i = 0; i < (R::QK8 ? 4 : 8); i++) {
        if (R::QK8) {
            wgmma_e4m3<64>::ss(x, operand_advance(rows, i * 32), operand_advance(columns, i * 32), i > 0);
        } else {
            wgmma_bf16<64>::ss<0, 0>(x, operand_advance(rows, (i >> 2) * panel + (i & 3) * 32),
                                     operand_advance(columns, (i >> 2) * other + (i & 3) * 32), i > 0);
        }
    }
    wgmma_commit();
}

/* dP^T (64 keys x 64 queries), or with QUERY_ROWS dP; E5M2: columns are. */
template <bool E5M2> static __device__ __forceinline__ void product_dp(float (&x)[32], uint64_t rows, uint64_t columns)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (E5M2) {
            wgmma_e4m3_e5m2<64>::ss(x, operand_advance(rows, i * 32), operand_advance(columns, i * 32), i > 0);
        } else {
            wgmma_e4m3<64>::ss(x, operand_advance(rows, i * 32), operand_advance(columns, i * 32), i > 0);
        }
    }
    wgmma_commit();
}

/* ---- elements ----------------------------------------------------------------------------------------------- */

/* This thread's queries' statistics of a tile: group j of the accumulators. */
static __device__ __forceinline__ void read_statistics(float2 (&y)[8], uint32_t from)
{
#pragma unroll
    for (int j = 0; j < 8; j++) {
        /* volatile: read where it stands, long before it is used */
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(y[j].x), "=f"(y[j].y) : "r"(from + 32 * j) : "memory");
    }
}

static __device__ __forceinline__ float read_float(uint32_t from)
{
    float y;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(y) : "r"(from) : "memory");
    return y;
}

/* c s - from. */
static __device__ __forceinline__ void distances(float (&x)[32], const float2 (&from)[8], float c)
{
#pragma unroll
    for (int j = 0; j < 32; j++) {
        x[j] = fmaf(x[j], c, -(j & 1 ? from[j >> 2].y : from[j >> 2].x));
    }
}

/* First of the accumulators that make register i of an operand, queries in order pi1: y[4 k + h + 2 u] takes groups
 * 4 k + 2 u and the next. */
static __device__ __forceinline__ constexpr int packed_at(int i)
{
    return 4 * (4 * (i >> 2) + 2 * ((i >> 1) & 1)) + 2 * (i & 1);
}

/* 2^x as A registers. */
static __device__ __forceinline__ void fp8_codes(const float (&x)[32], uint32_t (&y)[8])
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int j = packed_at(i);
        y[i] = pack_e4m3(exp2_fast(x[j]), exp2_fast(x[j + 1]), exp2_fast(x[j + 4]), exp2_fast(x[j + 5]));
    }
}

/* Stored dS as A registers: represented P, as it was packed, times dP factor - r. */
static __device__ __forceinline__ void ds_codes(const float (&dp)[32], const uint32_t (&p)[8], const float2 (&r)[8],
                                                float factor, uint32_t (&ds)[8])
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int j = packed_at(i), g = j >> 2;
        uint32_t low, high;
        unpack_e4m3(p[i], low, high);
        const float2 a = __half22float2(*reinterpret_cast<__half2 *>(&low));
        const float2 b = __half22float2(*reinterpret_cast<__half2 *>(&high));
        ds[i] = pack_e4m3(a.x * fmaf(dp[j], factor, -r[g].x), a.y * fmaf(dp[j + 1], factor, -r[g].y),
                          b.x * fmaf(dp[j + 4], factor, -r[g + 1].x), b.y * fmaf(dp[j + 5], factor, -r[g + 1].y));
    }
}

/* dS^T to its buffer: stmatrix lane 8 i + r gives the row of query 8 i + r; 16 keys of a warp are a chunk. */
static __device__ __forceinline__ void write_ds(uint32_t buffer, int own, const uint32_t (&ds)[8])
{
    const int lane = threadIdx.x & 31;
    const uint32_t to = buffer + lane * 128 + ((own ^ (lane & 7)) << 4);
#pragma unroll
    for (int k = 0; k < 2; k++) {
        /* Keys g and g + 8 of one query side by side; 8 queries a register. */
        const uint32_t *a = ds + 4 * k;
        stmatrix_x4_transposed(to + k * 4096, __byte_perm(a[0], a[1], 0x5140), __byte_perm(a[0], a[1], 0x7362),
                               __byte_perm(a[2], a[3], 0x5140), __byte_perm(a[2], a[3], 0x7362));
    }
}

/* From the products of codes to dP in units of stored dS over the code of P. */
static __device__ __forceinline__ float dp_factor_of(const struct bwd8_plan &p, int unit)
{
    const struct bwd_lifts l = lifts_of(p, unit);
    return p.ds_factor * l.ds / (l.dout * l.v * p.rules.value_unit);
}

/* Read anew, so that what follows from it is not kept in registers. */
static __device__ __forceinline__ int lane_now()
{
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

/* ---- long sums ---------------------------------------------------------------------------------------------- */

/* Half of the features, H = 0 or 1, and what was there before, to the staging; zero from here on. */
template <int H>
static __device__ __forceinline__ void stage_quarter(float (&x)[64], const float (&before)[32], float4 *staging)
{
    wgmma_pin(x);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float *y = x + 32 * H + 4 * j;
        const float *z = before + 4 * j;
        staging[j * 128] = make_float4(y[0] + z[0], y[1] + z[1], y[2] + z[2], y[3] + z[3]);
        y[0] = y[1] = y[2] = y[3] = 0;
    }
    wgmma_pin(x);
}

/* i: flushes before this one. All products are complete; `before` is free. A fence and the arrival at SUMS_STAGED
 * follow later. */
static __device__ __forceinline__ void flush(float (&dk)[64], float (&dv)[64], float (&before)[32],
                                             const struct shared &s, char *memory, int wg, uint32_t i)
{
    float4 *staging = reinterpret_cast<float4 *>(memory) + (threadIdx.x & 127);
    mbarrier_wait(barrier_at(s, SUMS_READY + wg), i & 1);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float4 y = i < QUARTERS ? make_float4(0, 0, 0, 0) : staging[j * 128];
        before[4 * j] = y.x;
        before[4 * j + 1] = y.y;
        before[4 * j + 2] = y.z;
        before[4 * j + 3] = y.w;
    }
    switch (i % QUARTERS) {
    case 0:
        stage_quarter<0>(dk, before, staging);
        break;
    case 1:
        stage_quarter<1>(dk, before, staging);
        break;
    case 2:
        stage_quarter<0>(dv, before, staging);
        break;
    default:
        stage_quarter<1>(dv, before, staging);
    }
}

/* x += the sums of its two quarters, as far as there are any. */
static __device__ __forceinline__ void add_sums(float (&x)[64], const float *sums, int quarters)
{
    const float4 *from = reinterpret_cast<const float4 *>(sums) + (threadIdx.x & 127);
#pragma unroll
    for (int j = 0; j < 16; j++) {
        if (j / 8 < quarters) {
            const float4 y = __ldcg(from + j * 128);
            x[4 * j] += y.x;
            x[4 * j + 1] += y.y;
            x[4 * j + 2] += y.z;
            x[4 * j + 3] += y.w;
        }
    }
}
