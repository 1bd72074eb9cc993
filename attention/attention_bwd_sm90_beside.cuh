/* attention: what the FP8 backward on Hopper has in shared memory, and the threads beside the computing warpgroups that
 * fill and empty it: operands come in, dS goes out, long sums of dK and dV come and go. For attention_bwd_sm90_fp8.cu
 * and attention_bwd_sm90_mxfp4.cu. */
#pragma once

#include "attention/attention_bwd_sm90_fp8.cuh"

/* ---- shared memory and barriers ---------------------------------------------------------------------------- */

enum {
    STATS_BYTES = BWD_STATISTICS * 4 + 16, /* of a stage: statistics, then the factor of scores */
    STAGES = 3,                            /* tiles of queries */
    /* Barriers: a stage is loaded, is free again; a tile of dS is written, is sent; keys are loaded; of each warpgroup:
     * there is a place for a quarter of its sums, it is staged, all are in memory; QUERY_ROWS, of each warpgroup:
     * nobody reads its P^T and dS^T any more. */
    LOADED = 0,
    FREED = LOADED + STAGES,
    WRITTEN = FREED + STAGES,
    SENT = WRITTEN + 4,
    KEYS_LOADED = SENT + 4,
    SUMS_READY,
    SUMS_STAGED = SUMS_READY + 2,
    SUMS_DONE = SUMS_STAGED + 2,
    OPERANDS_FREE = SUMS_DONE + 2,
    BARRIERS8 = OPERANDS_FREE + 2,
};

/* FP8 tensor cores keep 13 bits of a sum and cut towards zero (docs/numerics.md, section 17), so that long sums of one
 * sign shrink. Every FLUSH_TILES tiles a warpgroup's next quarter of dK and dV (dK's features in two halves, then dV's)
 * is therefore added to FP32 sums in memory, and begins again at zero: no sum is longer than 4 x FLUSH_TILES tiles. */
enum {
    FLUSH_TILES = 8,
    QUARTERS = 4,
    QUARTER = 64 * 64,             /* floats; number j * 512 + 4 t + i is accumulator 4 j + i of thread t */
    SUMS = 2 * QUARTERS * QUARTER, /* of a unit: warpgroup, quarter */
};

/* What rows of accumulators are: keys, so that P^T and dS^T are A operands from registers, or queries (QUERY_ROWS), so
 * that a thread has much of a block of 32 keys; P^T and dS^T then go through shared memory, and the two warpgroups have
 * one place for a quarter of sums in turns. */
template <bool E4M3_SCORES, bool ROWS_ARE_QUERIES> struct room {
    enum {
        QK8 = E4M3_SCORES,
        QUERY_ROWS = ROWS_ARE_QUERIES,
        DS_BUFFERS = QK8 ? 4 : 2, /* tiles of dS: what there is room for */
        ROWS_K = BWD_KEYS * BWD_FEATURES * (QK8 ? 1 : 2),
        ROWS_Q = BWD_TILE * (QK8 ? 1 : 2), /* of a tile */
        AT_K = 0,
        AT_V = AT_K + ROWS_K,
        AT_Q = AT_V + BWD8_KEYS / 2,
        AT_QUERIES = AT_Q + STAGES * ROWS_Q, /* dO row, dO col, Q col */
        AT_DS = AT_QUERIES + STAGES * BWD8_QUERIES,
        AT_SUMS = AT_DS + DS_BUFFERS * BWD8_DS,
        AT_P = AT_SUMS + (QUERY_ROWS ? 1 : 2) * QUARTER * 4, /* 64 keys x 64 queries of each warpgroup, SWIZZLE_64B */
        AT_DS_T = AT_P + (QUERY_ROWS ? BWD8_DS : 0),         /* likewise */
        AT_STATS = AT_DS_T + (QUERY_ROWS ? BWD8_DS : 0),
        AT_BARRIERS = AT_STATS + STAGES * STATS_BYTES,
        BYTES = AT_BARRIERS + BARRIERS8 * 8 + 1024,
    };
};

/* k_two: two rows of K a box, where keys are BLOCKED. */
struct bwd8_maps {
    CUtensorMap q, k, k_two;
};

template <class R> static __device__ __forceinline__ struct shared shared8_open(char *raw)
{
    char *memory = raw + ((1024 - (shared_address(raw) & 1023)) & 1023);
    const struct shared s = {shared_address(memory), shared_address(memory) + R::AT_BARRIERS, memory};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(barrier_at(s, LOADED + i), 1);
            mbarrier_init(barrier_at(s, FREED + i), 8 * WARP_ARRIVALS); /* of the computing warps */
        }
        for (int i = 0; i < R::DS_BUFFERS; i++) {
            mbarrier_init(barrier_at(s, WRITTEN + i), 8);
            mbarrier_init(barrier_at(s, SENT + i), 1);
        }
        mbarrier_init(barrier_at(s, KEYS_LOADED), 1);
        for (int wg = 0; wg < 2; wg++) {
            mbarrier_init(barrier_at(s, SUMS_READY + wg), 1);
            mbarrier_init(barrier_at(s, SUMS_STAGED + wg), 4 * WARP_ARRIVALS); /* its warps read there too */
            mbarrier_init(barrier_at(s, SUMS_DONE + wg), 1);
            mbarrier_init(barrier_at(s, OPERANDS_FREE + wg), 4 * WARP_ARRIVALS);
        }
        mbarriers_ready();
    }
    __syncthreads();
    return s;
}

/* ---- the warps that load and send --------------------------------------------------------------------------- */

/* From the product of Q and K, or of their codes, to base-2 scores; as in the forward never 0 (of two tiny heads), for
 * masked scores are -Inf. */
template <bool QK8>
static __device__ __forceinline__ float score_factor_of(const struct bwd8_plan &p, const struct unit &u, int head)
{
    return QK8 ? fmaxf(p.b.c * p.q_inverse[u.batch * p.b.heads + head] * p.k_inverse[u.batch * p.b.kv_heads + u.kv],
                       0x1p-126f)
               : p.b.c;
}

/* A tile of rows for scores: of E4M3 one box, of BF16 two. */
template <bool QK8>
static __device__ __forceinline__ void load_rows(uint32_t to, const CUtensorMap *map, uint32_t barrier, int row,
                                                 int head, int batch, int rows)
{
    tma_load_4d(to, map, barrier, 0, row, head, batch);
    if (!QK8) {
        tma_load_4d(to + rows * 128, map, barrier, 64, row, head, batch);
    }
}

/* K with BLOCKED keys: a box of 64 keys, or, where the sequence ends inside, two keys at a time, so that nothing behind
 * it is read. */
template <class R>
static __device__ __forceinline__ void load_blocked_keys(const struct bwd_plan &p, const struct unit &u,
                                                         const struct bwd8_maps &m, uint32_t to, uint32_t barrier)
{
    const int first = u.block * BWD_KEYS;
#pragma unroll 1
    for (int i = 0; i < (R::QK8 ? 2 : 4); i++) { /* panel, half of the keys */
        const int feature = i / 2 * 64, key0 = first + i % 2 * 64;
        const uint32_t at = to + i * 8192;
        if (first + BWD_KEYS <= p.tokens) {
            tma_load_5d(at, &m.k, barrier, feature, key0, 0, 0, u.batch * p.kv_heads + u.kv);
            continue;
        }
#pragma unroll 1
        for (int row = 0; row < 64; row += 2) {
            tma_load_4d(at + row * 128, &m.k_two, barrier, feature, key0 + blocked_token(row), u.kv, u.batch);
        }
    }
}

template <class R>
static __device__ __forceinline__ void load(const struct bwd8_plan &p, const struct unit &u, const struct bwd8_maps &m,
                                            const struct shared &s)
{
    constexpr bool QK8 = R::QK8;
    const int64_t block = ((int64_t)u.batch * p.b.kv_heads + u.kv) * p.b.blocks + u.block;
    mbarrier_expect(barrier_at(s, KEYS_LOADED), R::ROWS_K + BWD8_KEYS / 2);
    if (R::QUERY_ROWS) {
        load_blocked_keys<R>(p.b, u, m, s.base + R::AT_K, barrier_at(s, KEYS_LOADED));
    } else {
        load_rows<QK8>(s.base + R::AT_K, &m.k, barrier_at(s, KEYS_LOADED), u.block * BWD_KEYS, u.kv, u.batch, BWD_KEYS);
    }
    bulk_load(s.base + R::AT_V, p.keys + block * BWD8_KEYS, BWD8_KEYS / 2, barrier_at(s, KEYS_LOADED));
    struct walk w = walk_start(p.b, u, true);
    struct ring r = {0, 1};
    float factor = 0;
    const int n = walk_length(p.b, u);
#pragma unroll 1 /* few registers here */
    for (int i = 0; i < n; i++) {
        mbarrier_wait(barrier_at(s, FREED + r.stage), r.parity);
        const uint32_t barrier = barrier_at(s, LOADED + r.stage);
        if (QK8) { /* seen by those who wait, since the arrival follows */
            factor = i == 0 || w.tile == u.first ? score_factor_of<QK8>(p, u, w.head) : factor;
            *reinterpret_cast<float *>(s.memory + R::AT_STATS + r.stage * STATS_BYTES + BWD_STATISTICS * 4) = factor;
        }
        mbarrier_expect(barrier, R::ROWS_Q + BWD8_QUERIES + BWD_STATISTICS * 4);
        load_rows<QK8>(s.base + R::AT_Q + r.stage * R::ROWS_Q, &m.q, barrier, w.tile * BWD_QUERIES, w.head, u.batch,
                       BWD_QUERIES);
        bulk_load(s.base + R::AT_QUERIES + r.stage * BWD8_QUERIES, p.queries + (int64_t)w.at * BWD8_QUERIES,
                  BWD8_QUERIES, barrier);
        bulk_load(s.base + R::AT_STATS + r.stage * STATS_BYTES, p.b.stats + (int64_t)w.at * BWD_STATISTICS,
                  BWD_STATISTICS * 4, barrier);
        walk_next(p.b, u, w);
        ring_next<STAGES>(r);
    }
}

/* first: unit whose dS comes first in memory. */
template <class R>
static __device__ __forceinline__ void send_ds(const struct bwd8_plan &p, const struct unit &u, const struct shared &s,
                                               int first)
{
    const int group = p.b.heads / p.b.kv_heads;
    const int head0 = (u.batch * p.b.kv_heads + u.kv - first) * group - u.kv * group; /* of the launch, for head 0 */
    struct walk w = walk_start(p.b, u, true);
    struct ring r = {0, 0};
#pragma unroll 1 /* few registers here */
    for (int left = walk_length(p.b, u); left > 0; left--) {
        uint8_t *to = pair_at(p, head0 + w.head, w.tile >> 1) + (int64_t)u.block * BWD8_PAIR + (w.tile & 1) * BWD8_DS;
        mbarrier_wait(barrier_at(s, WRITTEN + r.stage), r.parity);
        bulk_store(to, s.base + R::AT_DS + r.stage * BWD8_DS, BWD8_DS);
        tma_store_commit();
        walk_next(p.b, u, w);
        tma_store_wait_read<0>();
        mbarrier_arrive(barrier_at(s, SENT + r.stage));
        ring_next<R::DS_BUFFERS>(r);
    }
}

/* Warpgroup wg flushes where it begins tile i > 0 with (i + flush_phase) % FLUSH_TILES = 0. */
template <class R> static __device__ __forceinline__ int flush_phase(int wg)
{
    return R::QUERY_ROWS ? wg * (FLUSH_TILES / 2) : 0;
}

/* How often it does. */
template <class R> static __device__ __forceinline__ int flushes_of(int tiles, int wg)
{
    return (tiles - 1 + flush_phase<R>(wg)) / FLUSH_TILES;
}

static __device__ __forceinline__ float *sums_of(const struct bwd8_plan &p, const struct unit &u, int wg)
{
    const int64_t unit = u.batch * p.b.kv_heads + u.kv;
    return p.sums + (unit * p.b.blocks + u.block) * SUMS + wg * (QUARTERS * QUARTER);
}

/* Brings the sums of warpgroup wg's next quarter to its staging (the first time there are none), waits until the
 * warpgroup has added its own, and sends them back. i: flushes of the warpgroup before this one. */
static __device__ __forceinline__ void move_quarter(const struct bwd8_plan &p, const struct unit &u,
                                                    const struct shared &s, uint32_t staging, int wg, int i)
{
    float *sums = sums_of(p, u, wg) + i % QUARTERS * QUARTER;
    if (i < QUARTERS) {
        mbarrier_arrive(barrier_at(s, SUMS_READY + wg));
    } else {
        tma_store_wait<0>();
        mbarrier_expect(barrier_at(s, SUMS_READY + wg), QUARTER * 4);
        bulk_load(staging, sums, QUARTER * 4, barrier_at(s, SUMS_READY + wg));
    }
    mbarrier_wait(barrier_at(s, SUMS_STAGED + wg), i & 1);
    bulk_store(sums, staging, QUARTER * 4);
    tma_store_commit();
    tma_store_wait_read<0>();
}

/* One lane beside each warpgroup, or one for both, which flush in turns, warpgroup 1 first. */
template <class R>
static __device__ __forceinline__ void move_sums(const struct bwd8_plan &p, const struct unit &u,
                                                 const struct shared &s, int wg)
{
    const int tiles = walk_length(p.b, u);
    const uint32_t staging = s.base + R::AT_SUMS + (R::QUERY_ROWS ? 0 : wg * (QUARTER * 4));
    if (R::QUERY_ROWS) {
#pragma unroll 1 /* few registers here */
        for (int i = 1; i <= (tiles - 1) / (FLUSH_TILES / 2); i++) {
            move_quarter(p, u, s, staging, i & 1, (i - 1) / 2);
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < flushes_of<R>(tiles, wg); i++) {
            move_quarter(p, u, s, staging, wg, i);
        }
    }
    tma_store_wait<0>();
    fence_async_global();
    mbarrier_arrive(barrier_at(s, SUMS_DONE + wg));
    if (R::QUERY_ROWS) {
        mbarrier_arrive(barrier_at(s, SUMS_DONE + (wg ^ 1)));
    }
}

/* ---- host --------------------------------------------------------------------------------------------------- */

/* The kernel of dK, dV and dS, which takes the plan, the launch's first unit, maps and so on, and that of dQ. */
template <class... ARGS>
static void bwd8_launch(const struct attention_bwd *a, const struct bwd8_plan &p, int bytes,
                        void (*kernel)(struct bwd8_plan, int, ARGS...), const ARGS &...args)
{
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    for (int first = 0; first < p.b.units; first += p.together) {
        const int units = p.b.units - first < p.together ? p.b.units - first : p.together;
        kernel<<<units * p.b.blocks, BWD_THREADS, bytes, a->cuda->stream>>>(p, first, args...);
        cuda_launched(a->cuda, "attention backward, FP8, sm90");
        bwd8_dq(a->cuda, p, a->dq, first, units);
    }
}
