/* attention: what the files of the Hopper backward share (head_dim 128). For attention_bwd_sm90*.cu only.
 *
 * Unit of work: 128 keys of one kv head. It walks over 64-query tiles of each query head of its group; dK and dV stay
 * in registers. dQ, on the BF16 route: of a tile it is added up in global memory, FP32, in the order in which
 * accumulators lie in registers: tile (b, h, t) holds two halves of 64 features; float4 number
 * ((half * 4 + warp) * 8 + j) * 32 + lane is d[4 j .. 4 j + 3] of that thread (attention/sm90.cuh). On FP8 routes dS is
 * stored, and a second kernel makes dQ (attention_bwd_sm90_dq.cu). */
#pragma once

#include "attention/sm90.cuh"

enum {
    BWD_KEYS = 128,   /* of a unit of work */
    BWD_QUERIES = 64, /* of a tile */
    BWD_FEATURES = 128,
    BWD_TILE = BWD_QUERIES * BWD_FEATURES,
    BWD_THREADS = 384, /* one warpgroup that loads, two that compute */
    BARRIER_BOTH = 1,  /* named barriers: both warpgroups; one (2, 3); two warps (4 .. 7) */
    BARRIER_HALF = 2,
    BARRIER_PAIR = 4,
    BWD_STATISTICS = 2 * BWD_QUERIES, /* floats of a tile: LSE2, then r; LSE2 is +Inf where a row has no gradient */
};

struct bwd_plan {
    int tokens, heads, kv_heads, units; /* units: batch x kv heads */
    int tiles, blocks;                  /* of queries, of keys */
    int heads_together;                 /* kv heads whose blocks are in flight at the same time, for the L2 cache */
    bool causal;
    float c, scale;  /* base-2 score of q.k; softmax_scale */
    float *dq;       /* BF16: (B, H, tiles, BWD_TILE); zero before the kernel only where sums have no order */
    float *stats;    /* (B, H, tiles, BWD_STATISTICS) */
    uint32_t *turns; /* BF16: (B, H, tiles, 2): ordered sums: blocks that have added their half of the features */
    uint32_t *begun; /* BF16: blocks of the kernel that have begun */
    struct head_view dk, dv;
};

/* ---- the walk of a unit of work --------------------------------------------------------------------------- */

struct unit {
    int block, batch, kv, first; /* first tile of queries that sees the block */
};

/* Blocks of the same few heads come together. Causal: the longest walk first, or, where sums are ordered, the shortest,
 * so that each block finds its predecessor two tiles ahead. */
static __device__ __forceinline__ struct unit unit_of(const struct bwd_plan &p, int index, bool ordered)
{
    const int together = p.heads_together * p.blocks;
    const int group = index / together, rest = index - group * together;
    const int heads = min(p.heads_together, p.units - group * p.heads_together);
    const int place = rest / heads, head = group * p.heads_together + rest % heads;
    struct unit u;
    u.block = ordered ? p.blocks - 1 - place : place;
    u.batch = head / p.kv_heads;
    u.kv = head % p.kv_heads;
    u.first = p.causal ? u.block * (BWD_KEYS / BWD_QUERIES) : 0;
    return u;
}

/* Blocks that wait for lower numbers take theirs in the order in which they begin, since CUDA promises no order of
 * blockIdx. By all threads. */
static __device__ __forceinline__ int number_taken(const struct bwd_plan &p)
{
    __shared__ int number;
    if (threadIdx.x == 0) {
        number = (int)atomicAdd(p.begun, 1u);
    }
    __syncthreads();
    return number;
}

/* Tiles of one query head after the other. Without a mask and in any order each block starts elsewhere, and comes round
 * to the first head's early tiles last: fewer blocks add to one tile of dQ at a time. */
struct walk {
    int head, tile, at; /* at: number of the tile among all, (b * heads + head) * tiles + tile */
};

static __device__ __forceinline__ struct walk walk_start(const struct bwd_plan &p, const struct unit &u, bool ordered)
{
    struct walk w;
    w.head = u.kv * (p.heads / p.kv_heads);
    w.tile = p.causal || ordered ? u.first : u.block * (BWD_KEYS / BWD_QUERIES);
    w.at = (u.batch * p.heads + w.head) * p.tiles + w.tile;
    return w;
}

static __device__ __forceinline__ void walk_next(const struct bwd_plan &p, const struct unit &u, struct walk &w)
{
    w.at++;
    if (++w.tile == p.tiles) {
        const int group = p.heads / p.kv_heads;
        w.tile = u.first;
        w.at += u.first;
        if (++w.head == (u.kv + 1) * group) {
            w.head -= group;
            w.at -= group * p.tiles;
        }
    }
}

static __device__ __forceinline__ int walk_length(const struct bwd_plan &p, const struct unit &u)
{
    return (p.heads / p.kv_heads) * (p.tiles - u.first);
}

/* ---- shared memory and barriers --------------------------------------------------------------------------- */

/* The product dQ = dS K takes the halves of both warpgroups. It is made one tile late, so that neither waits for the
 * other. A warpgroup that writes tile i has seen the other's tile i - 2, which the other wrote when done with the
 * product of tile i - 4: hence four buffers. */
enum {
    BWD_STAGES = 2, /* tiles of queries in shared memory */
    BWD_DS_BUFFERS = 4,
};

struct shared {
    uint32_t base, barriers; /* base: a multiple of 1024 */
    char *memory;            /* the same place as base */
};

/* A stage is loaded, is free again; a buffer of dS is written; keys are loaded; ordered sums, of each warpgroup: its
 * half of dQ is staged, is added. */
enum {
    FULL = 0,
    EMPTY = BWD_STAGES,
    DS_FULL = 2 * BWD_STAGES,
    KEYS = DS_FULL + BWD_DS_BUFFERS,
    STAGED,
    ADDED = STAGED + 2,
    BARRIERS = ADDED + 2
};

static __device__ __forceinline__ uint32_t barrier_at(const struct shared &s, int number)
{
    return s.barriers + 8 * number;
}

/* `at`: where barriers lie behind the tiles. Ends with a barrier of the block. */
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

struct ring {
    int stage;
    uint32_t parity;
};

template <int STAGES> static __device__ __forceinline__ void ring_next(struct ring &r)
{
    if (++r.stage == STAGES) {
        r.stage = 0;
        r.parity ^= 1;
    }
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

/* ---- scores ------------------------------------------------------------------------------------------------ */

/* Whether some score of a unit's keys and this tile is masked. */
static __device__ __forceinline__ bool masked(const struct bwd_plan &p, const struct unit &u, int tile)
{
    return p.causal ? tile < u.first + BWD_KEYS / BWD_QUERIES : u.block * BWD_KEYS + BWD_KEYS > p.tokens;
}

/* S^T of 64 keys (this thread's: key, key + 8) x 64 queries: masked scores become -Inf. */
static __device__ __forceinline__ void mask_scores(const struct bwd_plan &p, int key, int tile, float (&x)[32])
{
    const int query = tile * BWD_QUERIES + 2 * (threadIdx.x & 3);
#pragma unroll
    for (int j = 0; j < 32; j++) {
        const int last = p.causal ? query + 8 * (j >> 2) + (j & 1) : p.tokens - 1;
        x[j] = key + 8 * ((j >> 1) & 1) <= last ? x[j] : -INFINITY;
    }
}

/* 2^(c s - from) of scores; from: the tile's first statistic, of this thread's queries. */
static __device__ __forceinline__ void exponentials(float (&x)[32], const float2 *from, float c)
{
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float2 f = from[4 * j];
        x[4 * j] = exp2_fast(fmaf(x[4 * j], c, -f.x));
        x[4 * j + 1] = exp2_fast(fmaf(x[4 * j + 1], c, -f.y));
        x[4 * j + 2] = exp2_fast(fmaf(x[4 * j + 2], c, -f.x));
        x[4 * j + 3] = exp2_fast(fmaf(x[4 * j + 3], c, -f.y));
    }
}

/* ---- dQ: sums in global memory ---------------------------------------------------------------------------- */

enum { BWD_STAGING = 4096 }; /* bytes of one warp's part of a tile of dQ */

/* Adds this warp's part of tile `at`; step: how many tiles the unit has done before; staging: of all warps. In order:
 * leaves it to add_in_order. */
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

/* After the last tile: the staging may be given up. */
template <bool ORDERED> static __device__ __forceinline__ void add_dq_close()
{
    if (!ORDERED && (threadIdx.x & 31) == 0) {
        tma_store_wait_read<0>();
    }
}

static __device__ __forceinline__ uint32_t turn_of(const uint32_t *turn)
{
    uint32_t x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(turn) : "memory");
    return x;
}

/* [fence.proxy.async] Between accesses of TMA to global memory and ordinary ones. */
static __device__ __forceinline__ void fence_async_global()
{
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

/* Who is first stores: a dQ with ordered sums need not be zero before. */
static __device__ __forceinline__ void add_in_turn(float *to, uint32_t from, uint32_t bytes, bool first)
{
    if (first) {
        bulk_store(to, from, bytes);
    } else {
        bulk_add_f32(to, from, bytes);
    }
    tma_store_commit();
}

/* Ordered sums, one lane beside each warpgroup: it adds what the warpgroup staged once the blocks of keys that come
 * before have added theirs (the last block is the first), waits until the sums are in memory, and hands the turn on.
 * Whose turn it is next is asked while the sums are on their way. */
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

/* ---- dK, dV -------------------------------------------------------------------------------------------------- */

/* One rounding of this warpgroup's 64 keys, through 16 KB of shared memory, to rows of y. */
static __device__ __forceinline__ void store_keys(const float (&x)[64], float factor, uint32_t staging,
                                                  const char *memory, int wg, int key0, const struct bwd_plan &p,
                                                  bf16 *y, int64_t stride)
{
    const int t = threadIdx.x & 127, lane = t & 31;
    const int row = 16 * (t >> 5) + (lane & 15);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            a[i] = pack_bf16(x[8 * j + 2 * i] * factor, x[8 * j + 2 * i + 1] * factor);
        }
        stmatrix_x4(staging + row * 256 + (((2 * j + (lane >> 4)) ^ (row & 7)) << 4), a[0], a[1], a[2], a[3]);
    }
    named_barrier_sync(BARRIER_HALF + wg, 128);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int r = 8 * i + (t >> 4), part = t & 15;
        if (key0 + r < p.tokens) {
            *reinterpret_cast<uint4 *>(y + (int64_t)(key0 + r) * stride + part * 8) =
                *reinterpret_cast<const uint4 *>(memory + r * 256 + ((part ^ (r & 7)) << 4));
        }
    }
}
