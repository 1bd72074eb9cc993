/* attention: shared memory of the BF16 backward on Hopper, and dQ, which blocks of keys sum in global memory. For
 * attention_bwd_sm90.cu.
 *
 * Sums of dQ are FP32, laid out as accumulators lie in registers: tile (b, h, t) holds two halves of 64 features;
 * float4 number ((half * 4 + warp) * 8 + j) * 32 + lane is d[4 j .. 4 j + 3] of that thread (attention/sm90.cuh).
 * Unordered: each warp adds its part as soon as it has it. Ordered: blocks take turns. */
#pragma once

#include "attention/attention_bwd_sm90.cuh"

/* ---- shared memory and barriers --------------------------------------------------------------------------- */

/* The product dQ = dS K needs the halves of dS of both warpgroups. It runs one tile late, so that neither waits for the
 * other. A warpgroup that writes dS of tile i has seen the other's of tile i - 2, which the other wrote after its
 * product of tile i - 4: hence four buffers. */
enum {
    BWD_STAGES = 2, /* tiles of queries in shared memory */
    BWD_DS_BUFFERS = 4,
};

/* mbarriers: a stage is loaded (FULL), is free again (EMPTY); a buffer of dS is written; keys are loaded; ordered sums,
 * for each warpgroup: its half of dQ is staged, is added. */
enum {
    FULL = 0,
    EMPTY = BWD_STAGES,
    DS_FULL = 2 * BWD_STAGES,
    KEYS = DS_FULL + BWD_DS_BUFFERS,
    STAGED,
    ADDED = STAGED + 2,
    BARRIERS = ADDED + 2
};

/* `at`: offset of the mbarriers, behind the tiles. Ends with __syncthreads. */
static __device__ __forceinline__ struct shared shared_open(char *raw, int at)
{
    char *memory = raw + ((1024 - (shared_address(raw) & 1023)) & 1023);
    const struct shared s = {shared_address(memory), shared_address(memory) + at, memory};
    if (threadIdx.x == 0) {
        for (int i = 0; i < BWD_STAGES; i++) {
            mbarrier_init(barrier_at(s, FULL + i), 1);
            mbarrier_init(barrier_at(s, EMPTY + i), 8 * WARP_ARRIVALS); /* of the computing warps */
        }
        for (int i = 0; i < BWD_DS_BUFFERS; i++) {
            mbarrier_init(barrier_at(s, DS_FULL + i), 8);
        }
        mbarrier_init(barrier_at(s, KEYS), 1);
        for (int wg = 0; wg < 2; wg++) {
            mbarrier_init(barrier_at(s, STAGED + wg), 4);
            mbarrier_init(barrier_at(s, ADDED + wg), 1);
        }
        mbarriers_ready();
    }
    __syncthreads();
    return s;
}

/* This warp has written its part of dS of tile `step`. */
static __device__ __forceinline__ void ds_written(const struct shared &s, int step)
{
    fence_async_proxy();
    __syncwarp();
    if ((threadIdx.x & 31) == 0) {
        mbarrier_arrive(barrier_at(s, DS_FULL + step % BWD_DS_BUFFERS));
    }
}

static __device__ __forceinline__ void ds_wait(const struct shared &s, int step)
{
    mbarrier_wait(barrier_at(s, DS_FULL + step % BWD_DS_BUFFERS), step / BWD_DS_BUFFERS & 1);
}

/* ---- dQ: sums in global memory ---------------------------------------------------------------------------- */

enum { BWD_STAGING = 4096 }; /* bytes of one warp's part of a tile of dQ */

/* Adds this warp's part of tile `at`; step: tiles of the unit before this one; staging: of all warps. ORDERED: stages
 * it for add_in_order. */
template <bool ORDERED>
static __device__ __forceinline__ void add_dq(const struct bwd_plan &p, const struct shared &s, int at, int wg,
                                              int step, const float (&x)[32], int staging)
{
    const int lane = threadIdx.x & 31, warp = wg * 4 + ((threadIdx.x >> 5) & 3);
    const int own = staging + warp * BWD_STAGING;
    if (ORDERED) {
        mbarrier_wait(barrier_at(s, ADDED + wg), (step & 1) ^ 1); /* of the tile before */
    } else {
        if (lane == 0) {
            tma_store_wait_read<0>();
        }
        __syncwarp();
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
        *reinterpret_cast<float4 *>(s.memory + own + (j * 32 + lane) * 16) =
            make_float4(x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
        if (ORDERED) {
            mbarrier_arrive(barrier_at(s, STAGED + wg));
        } else {
            bulk_add_f32(p.dq + (int64_t)at * BWD_TILE + warp * (BWD_STAGING / 4), s.base + own, BWD_STAGING);
            tma_store_commit();
        }
    }
}

/* After the last tile: waits until the staging has been read. */
template <bool ORDERED> static __device__ __forceinline__ void add_dq_close()
{
    if (!ORDERED && (threadIdx.x & 31) == 0) {
        tma_store_wait_read<0>();
    }
}

/* Blocks that wait for lower numbers take their number as they begin, since CUDA promises no order of blockIdx. By all
 * threads. */
static __device__ __forceinline__ int number_taken(const struct bwd_plan &p)
{
    __shared__ int number;
    if (threadIdx.x == 0) {
        number = (int)atomicAdd(p.begun, 1u);
    }
    __syncthreads();
    return number;
}

/* The first one stores instead of adding, so that dQ need not be zero before. */
static __device__ __forceinline__ void add_in_turn(float *to, uint32_t from, uint32_t bytes, bool first)
{
    if (first) {
        bulk_store(to, from, bytes);
    } else {
        bulk_add_f32(to, from, bytes);
    }
    tma_store_commit();
}

/* Ordered sums, by one lane for each warpgroup: adds what the warpgroup staged once the blocks of keys before have
 * added theirs (the last block goes first), waits until the sums are in memory, and hands the turn on. It reads the
 * next tile's turn while the sums are in flight. */
static __device__ __forceinline__ void add_in_order(const struct bwd_plan &p, const struct unit &u,
                                                    const struct shared &s, int wg, int staging)
{
    uint32_t *turns = p.turns + wg;
    struct walk w = walk_start(p, u, true);
    uint32_t now = turn_of(turns + (int64_t)w.at * 2);
    uint32_t parity = 0;
#pragma unroll 1 /* few registers here */
    for (int left = walk_length(p, u); left > 0; left--) {
        const int at = w.at;
        const uint32_t before = (p.causal ? w.tile / (BWD_KEYS / BWD_QUERIES) : p.blocks - 1) - u.block;
        while (now != before) {
            now = turn_of(turns + (int64_t)at * 2);
        }
        mbarrier_wait(barrier_at(s, STAGED + wg), parity);
        add_in_turn(p.dq + (int64_t)at * BWD_TILE + wg * (BWD_TILE / 2), s.base + staging + wg * 4 * BWD_STAGING,
                    4 * BWD_STAGING, before == 0);
        walk_next(p, u, w);
        now = left > 1 ? turn_of(turns + (int64_t)w.at * 2) : 0;
        tma_store_wait<0>();
        mbarrier_arrive(barrier_at(s, ADDED + wg));
        asm volatile(
            "fence.proxy.async.global;\n\tred.release.gpu.global.add.u32 [%0], 1;" ::"l"(turns + (int64_t)at * 2)
            : "memory");
        parity ^= 1;
    }
}
