/* attention: what the Hopper forward kernels share (docs/numerics.md, section 5), D = 128.
 *
 * Warp-specialised: a producer warpgroup and two or three consumer warpgroups. A tile is 64 query rows of one head for
 * each consumer warpgroup. The grid is persistent and takes tiles from a counter, longest first. In warpgroup 0 one
 * thread takes tiles and issues all TMA loads (Q of the next tile while the last key blocks of this one are computed),
 * and one thread for each consumer warpgroup stores its output. Keys run from the last block of 128 to the first, so
 * that only the first iterations mask. Where rows do not fill tiles of 192, tile 0 (causal: the shortest) begins before
 * row 0. */
#pragma once

#include "attention/sm90_maps.cuh"

enum {
    TILE = 128, /* keys of a block, features */
    WARPGROUP = 128,
    PANEL = TILE * 128, /* bytes of 128 rows of 128 bytes */
};

/* Named barriers; + consumer warpgroup. */
enum { BARRIER_TURN = 1, BARRIER_ROWS = 5 };

/* k_two: K in boxes of two rows, for BLOCKED keys. */
struct fwd_maps {
    CUtensorMap q, k, v, out;
    CUtensorMap k_two = {};
};

struct fwd_args {
    float *lse_log2;
    unsigned int *counter;                          /* of tiles taken, beyond the first of each block */
    const float *q_inverse, *k_inverse, *v_inverse; /* per head: value = code times this; where there are codes */
    float c;                                        /* base-2 score = c q.k */
    int tokens, heads, kv_heads, group, all_heads, section_heads;
    int blocks, key_blocks, tiles, row0; /* row0: first row of tile 0, <= 0 */
    int k_batch;                         /* BLOCKED keys: batch stride of K in token strides; -1: two rows at a time */
    bool causal;
};

/* A tile, as the producer announces it to the consumers. */
struct alignas(16) fwd_tile {
    int head, row;  /* head counts (batch, query head), -1: no more; row: the first, may be negative */
    float c, value; /* a product of operands times c is a base-2 score; value of V's code 1 */
};

/* Shared memory. SCORES8: Q and K are E4M3, else BF16. CODES: V is an E4M3 column view of 128 features and eight rows
 * of ones, by which the product P V also sums the codes of P (row r has ones at positions r modulo 8); else BF16.
 * BLOCKED_KEYS: row 8 j + 2 c + e of a block of K is key 32 c + 2 j + e, so that thread c of a quad has the scores of
 * 32 consecutive keys, one MXFP4 block; the words of V's column view are transposed to match (attention_sm90.h). */
template <bool SCORES8, bool CODES, bool BLOCKED_KEYS = false> struct fwd_layout {
    enum {
        BLOCKED = BLOCKED_KEYS,
        CONSUMERS = CODES ? 3 : 2, /* warpgroups */
        ROWS = 64 * CONSUMERS,
        END = CODES ? 64 : ROWS, /* tiles end at a multiple of it */
        WARPS = 4 * CONSUMERS,
        THREADS = WARPGROUP * (1 + CONSUMERS),
        /* 24 + 2 x 240 = 3 x 168 and 32 + 3 x 160 = 4 x 128: what a block of so many threads has. */
        PRODUCER_REGISTERS = CODES ? 32 : 24,
        CONSUMER_REGISTERS = CODES ? 160 : 240,
        ROW_BYTES = SCORES8 ? 128 : 256, /* of Q and K */
        Q_PANEL = ROWS * 128,
        Q_BYTES = ROWS * ROW_BYTES,
        K_BYTES = TILE * ROW_BYTES,
        V_BYTES = CODES ? PANEL : 2 * PANEL,
        V_SLOT = CODES ? PANEL + 1024 : 2 * PANEL,
        STAGES = SCORES8 ? 4 : 2,
    };
    /* Q is double buffered: that of the next tile arrives while one is computed. A tile's output is staged where its Q
     * was; E4M3 Q is half as large, so features 64 to 127 then go to `out`. */
    struct shared {
        alignas(1024) unsigned char q[2][Q_BYTES], k[STAGES][K_BYTES], v[STAGES][V_SLOT], out[SCORES8 ? Q_PANEL : 16];
        struct fwd_tile tile[2];
        uint64_t q_full[2], q_empty[2], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES],
            staged[2][CONSUMERS];
    };
};

/* n / d and n % d for 0 <= n < 2^24 and d > 0, in few registers: the producer has 24 or 32. */
__device__ __forceinline__ int divide(int n, int d, int &rest)
{
    int q = (int)__fdividef((float)n, (float)d);
    rest = n - q * d;
    int under = rest < 0 ? 1 : 0, over = rest >= d ? 1 : 0;
    rest += (under - over) * d;
    return q - under + over;
}

/* Tiles are ordered by sections of heads whose K and V stay in L2 together, within a section longest first. */
template <class LAYOUT> __device__ __forceinline__ struct fwd_tile tile_of(const struct fwd_args &a, int index)
{
    int rest, head, section = divide(index, a.section_heads * a.blocks, rest), first = section * a.section_heads;
    int turn = divide(rest, min(a.section_heads, a.all_heads - first), head);
    return {first + head, a.row0 + (a.blocks - 1 - turn) * LAYOUT::ROWS, a.c, 1.0f};
}

/* Blocks of keys that some row of the tile sees. */
template <class LAYOUT> __device__ __forceinline__ int key_blocks(const struct fwd_args &a, struct fwd_tile t)
{
    return a.causal ? min((t.row + LAYOUT::ROWS - 1) / TILE + 1, a.key_blocks) : a.key_blocks;
}

/* A position in a ring of barriers. */
struct ring {
    int stage, parity;
    __device__ __forceinline__ void next(int stages)
    {
        if (++stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

__device__ __forceinline__ uint32_t at(const uint64_t &barrier)
{
    return shared_address(&barrier);
}

/* This warp arrives (sm90.cuh, WARP_ARRIVALS). */
__device__ __forceinline__ void release(uint32_t barrier)
{
    if (WARP_ARRIVALS == 32 || elect_one()) {
        mbarrier_arrive(barrier);
    }
}

template <class LAYOUT> __device__ __forceinline__ void open_barriers(typename LAYOUT::shared &s)
{
    for (int i = 0; i < LAYOUT::STAGES; i++) {
        mbarrier_init(at(s.k_full[i]), 1);
        mbarrier_init(at(s.v_full[i]), 1);
        mbarrier_init(at(s.k_empty[i]), LAYOUT::WARPS * WARP_ARRIVALS);
        mbarrier_init(at(s.v_empty[i]), LAYOUT::WARPS * WARP_ARRIVALS);
    }
    for (int i = 0; i < 2; i++) {
        mbarrier_init(at(s.q_full[i]), 1);
        mbarrier_init(at(s.q_empty[i]), LAYOUT::CONSUMERS);
        for (int j = 0; j < LAYOUT::CONSUMERS; j++) {
            mbarrier_init(at(s.staged[i][j]), WARPGROUP);
        }
    }
    mbarriers_ready();
}

/* ---- producer ---------------------------------------------------------------------------------------------- */

/* Rows of Q, K or (BF16) V: one panel of 128 bytes a row, or two. */
template <int ROW_BYTES>
__device__ __forceinline__ void load_rows(const void *to, const CUtensorMap *map, const uint64_t &barrier, int rows,
                                          int token, int head, int batch)
{
    mbarrier_expect(at(barrier), rows * ROW_BYTES);
    tma_load_4d(shared_address(to), map, at(barrier), 0, token, head, batch);
    if (ROW_BYTES == 256) {
        tma_load_4d(shared_address(to) + rows * 128, map, at(barrier), 64, token, head, batch);
    }
}

/* A block of K with BLOCKED keys: one box a panel; two rows at a time where the sequence ends inside the block, so that
 * nothing behind it is read, and where k_batch is -1. */
template <class LAYOUT>
__device__ __forceinline__ void load_blocked_keys(const struct fwd_maps &maps, const struct fwd_args &a,
                                                  const unsigned char *to, const uint64_t &barrier, int first, int head,
                                                  int batch)
{
    mbarrier_expect(at(barrier), LAYOUT::K_BYTES);
#pragma unroll 1
    for (int panel = 0; panel < LAYOUT::ROW_BYTES / 128; panel++) {
        const uint32_t base = shared_address(to) + panel * PANEL;
        if (first + TILE <= a.tokens && a.k_batch >= 0) {
            tma_load_5d(base, &maps.k, at(barrier), panel * 64, batch * a.k_batch + first, 0, 0, head);
            continue;
        }
#pragma unroll 1
        for (int i = 0; i < TILE / 2; i++) {
            tma_load_4d(base + i * 256, &maps.k_two, at(barrier), panel * 64, first + i % 4 * 32 + i / 4 * 2, head,
                        batch);
        }
    }
}

/* Loads Q, announces the tile, then loads K and V block by block. */
template <class LAYOUT>
__device__ __forceinline__ void produce_tile(const struct fwd_maps &maps, const struct fwd_args &a,
                                             typename LAYOUT::shared &s, struct fwd_tile t, int slot, struct ring &kv)
{
    int head, in_group, batch = divide(t.head, a.heads, head), kv_head = divide(head, a.group, in_group);
    tma_load_4d(shared_address(s.q[slot]), &maps.q, at(s.q_full[slot]), 0, t.row, head, batch);
    if (LAYOUT::ROW_BYTES == 256) {
        tma_load_4d(shared_address(s.q[slot]) + LAYOUT::Q_PANEL, &maps.q, at(s.q_full[slot]), 64, t.row, head, batch);
    }
    if (LAYOUT::V_BYTES == PANEL) {
        t.value = a.v_inverse[batch * a.kv_heads + kv_head];
    }
    if (LAYOUT::ROW_BYTES == 128) {
        t.c *= a.q_inverse[t.head] * a.k_inverse[batch * a.kv_heads + kv_head];
        t.c = fmaxf(t.c, 0x1p-126f); /* not 0 where both are tiny: a masked score is -Inf, and 0 times that a NaN */
    }
    s.tile[slot] = t;
    mbarrier_expect(at(s.q_full[slot]), LAYOUT::Q_BYTES);
#pragma unroll 1 /* fewer registers */
    for (int j = key_blocks<LAYOUT>(a, t) - 1; j >= 0; j--) {
        mbarrier_wait(at(s.k_empty[kv.stage]), kv.parity);
        if (LAYOUT::BLOCKED) {
            load_blocked_keys<LAYOUT>(maps, a, s.k[kv.stage], s.k_full[kv.stage], j * TILE, kv_head, batch);
        } else {
            load_rows<LAYOUT::ROW_BYTES>(s.k[kv.stage], &maps.k, s.k_full[kv.stage], TILE, j * TILE, kv_head, batch);
        }
        mbarrier_wait(at(s.v_empty[kv.stage]), kv.parity);
        if (LAYOUT::V_BYTES == PANEL) {
            mbarrier_expect(at(s.v_full[kv.stage]), PANEL);
            tma_load_3d(shared_address(s.v[kv.stage]), &maps.v, at(s.v_full[kv.stage]), j * TILE, 0,
                        batch * a.kv_heads + kv_head);
        } else {
            load_rows<256>(s.v[kv.stage], &maps.v, s.v_full[kv.stage], TILE, j * TILE, kv_head, batch);
        }
        kv.next(LAYOUT::STAGES);
    }
}

/* The loading thread. */
template <class LAYOUT>
__device__ __forceinline__ void produce(const struct fwd_maps &maps, const struct fwd_args &a,
                                        typename LAYOUT::shared &s)
{
    struct ring kv = {0, 1};
    int index = (int)blockIdx.x;
#pragma unroll 1
    for (int count = 0;; count++) { /* tiles before this one */
        const int slot = count & 1;
        mbarrier_wait(at(s.q_empty[slot]), (count >> 1 & 1) ^ 1);
        if (index >= a.tiles) {
            s.tile[slot].head = -1;
            mbarrier_arrive(at(s.q_full[slot]));
            return;
        }
        int next = (int)(atomicAdd(a.counter, 1u) + gridDim.x); /* its latency passes under the loads */
        produce_tile<LAYOUT>(maps, a, s, tile_of<LAYOUT>(a, index), slot, kv);
        index = next;
    }
}

/* ---- consumers --------------------------------------------------------------------------------------------- */

/* This block's tile number `count`. */
template <class SHARED> __device__ __forceinline__ struct fwd_tile read_tile(const SHARED &s, int count)
{
    const float4 t = *reinterpret_cast<const float4 *>(&s.tile[count & 1]);
    return {__float_as_int(t.x), __float_as_int(t.y), t.z, t.w};
}

/* The same, waiting until it and its Q have arrived. */
template <class SHARED> __device__ __forceinline__ struct fwd_tile take_tile(SHARED &s, int count)
{
    mbarrier_wait(at(s.q_full[count & 1]), count >> 1 & 1);
    return read_tile(s, count);
}

/* By all threads of a warpgroup: its output is staged, and the tile's Q and fwd_tile are no longer needed. */
template <class SHARED> __device__ __forceinline__ void rows_staged(SHARED &s, int count, int warpgroup)
{
    mbarrier_arrive(at(s.staged[count & 1][warpgroup]));
}

/* Where a warpgroup stages its 64 rows: features 0 to 63, 64 to 127. */
template <class LAYOUT>
__device__ __forceinline__ uint32_t staged_low(typename LAYOUT::shared &s, int slot, int warpgroup)
{
    return shared_address(s.q[slot]) + warpgroup * (PANEL / 2);
}

template <class LAYOUT>
__device__ __forceinline__ uint32_t staged_high(typename LAYOUT::shared &s, int slot, int warpgroup)
{
    return LAYOUT::ROW_BYTES == 128 ? shared_address(s.out) + warpgroup * (PANEL / 2)
                                    : staged_low<LAYOUT>(s, slot, warpgroup) + LAYOUT::Q_PANEL;
}

/* One thread for each consumer warpgroup: stores what the warpgroup has staged, then frees the slot. */
template <class LAYOUT>
__device__ __forceinline__ void send_rows(const struct fwd_maps &maps, const struct fwd_args &a,
                                          typename LAYOUT::shared &s, int warpgroup)
{
#pragma unroll 1
    for (int count = 0;; count++) {
        const int slot = count & 1;
        const struct fwd_tile t = take_tile(s, count);
        if (t.head < 0) {
            break;
        }
        mbarrier_wait(at(s.staged[slot][warpgroup]), count >> 1 & 1);
        const int first = t.row + 64 * warpgroup;
        if (first >= 0) { /* TMA loads rows before 0 as zeros, but a store must not start there */
            int head, batch = divide(t.head, a.heads, head);
            tma_store_4d(&maps.out, staged_low<LAYOUT>(s, slot, warpgroup), 0, first, head, batch);
            tma_store_4d(&maps.out, staged_high<LAYOUT>(s, slot, warpgroup), 64, first, head, batch);
            tma_store_commit();
            tma_store_wait_read<0>();
        }
        mbarrier_arrive(at(s.q_empty[slot]));
    }
    tma_store_wait<0>();
}

/* score = Q K^T, 64 rows x 128 keys. */
template <bool SCORES8, int Q_PANEL> __device__ __forceinline__ void scores(float (&score)[64], uint64_t q, uint64_t k)
{
#pragma unroll
    for (int step = 0; step < (SCORES8 ? 4 : 8); step++) {
        const uint64_t a = operand_advance(q, step / 4 * Q_PANEL + step % 4 * 32);
        const uint64_t b = operand_advance(k, step / 4 * PANEL + step % 4 * 32);
        if (SCORES8) {
            wgmma_e4m3<128>::ss(score, a, b, step > 0);
        } else {
            wgmma_bf16<128>::ss<0, 0>(score, a, b, step > 0);
        }
    }
    wgmma_commit();
}

/* Row of the tile that h = 0 of this thread owns; h = 1 is 8 further. */
__device__ __forceinline__ int own_row(int warpgroup)
{
    const int thread = threadIdx.x % WARPGROUP;
    return 64 * warpgroup + thread / 32 * 16 + thread % 32 / 4;
}

/* -Inf for scores of keys after the row (causal) or beyond the sequence. first_key: of the block. */
template <bool BLOCKED = false>
__device__ __forceinline__ void mask(float (&score)[64], const struct fwd_args &a, int row, int first_key)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int visible = (a.causal ? min(row + 8 * h + 1, a.tokens) : a.tokens) - first_key;
        visible -= (int)(threadIdx.x % 4) * (BLOCKED ? 32 : 2);
#pragma unroll
        for (int j = 0; j < 16; j++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &s = score[4 * j + 2 * h + e];
                s = (BLOCKED ? 2 : 8) * j + e < visible ? s : -INFINITY;
            }
        }
    }
}

__device__ __forceinline__ float quad_max(float x)
{
    x = max_or_nan(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return max_or_nan(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x)
{
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/* Stages 64 x 128 outputs, times factor[h], as BF16 in two swizzled panels of 64 rows, for send_rows. By a whole
 * warpgroup; `count`: tiles before this one. */
template <class LAYOUT>
__device__ __forceinline__ void stage_rows(typename LAYOUT::shared &s, const float *o, const float (&factor)[2],
                                           int count, int warpgroup)
{
    const int thread = threadIdx.x % WARPGROUP, lane = thread % 32, slot = count & 1;
    if (LAYOUT::ROW_BYTES == 128 && count > 0) { /* until the last tile's `out` is stored */
        mbarrier_wait(at(s.q_empty[slot ^ 1]), count - 1 >> 1 & 1);
    }
    named_barrier_sync(BARRIER_ROWS + warpgroup, WARPGROUP); /* nobody multiplies the warpgroup's Q any more */
    const uint32_t row = (uint32_t)(thread / 32 * 16 + lane % 16), half = (uint32_t)lane / 16;
    const uint32_t low = staged_low<LAYOUT>(s, slot, warpgroup), high = staged_high<LAYOUT>(s, slot, warpgroup);
#pragma unroll
    for (int j = 0; j < 16; j += 2) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *d = o + 4 * (j + i / 2) + 2 * (i % 2);
            x[i] = pack_bf16(d[0] * factor[i % 2], d[1] * factor[i % 2]);
        }
        stmatrix_x4((j < 8 ? low : high) + swizzle_128(row, (j % 8 + half) * 16), x[0], x[1], x[2], x[3]);
    }
    fence_async_proxy();
    rows_staged(s, count, warpgroup);
}

/* LSE2 of the thread's two rows. */
__device__ __forceinline__ void store_lse(const struct fwd_args &a, struct fwd_tile t, int warpgroup,
                                          const float (&lse)[2])
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int row = t.row + own_row(warpgroup) + 8 * h;
        if (threadIdx.x % 4 == 0 && row >= 0 && row < a.tokens) {
            a.lse_log2[(int64_t)t.head * a.tokens + row] = lse[h];
        }
    }
}

/* ---- host -------------------------------------------------------------------------------------------------- */

/* What follows from the shape; kv_bytes: of K and V as loaded, of one token and kv head. */
template <class LAYOUT> static inline struct fwd_args fwd_args_of(const struct attention_fwd *a, int64_t kv_bytes)
{
    const int64_t section_bytes = 32 << 20; /* of K and V that L2 keeps beside what streams through it */
    const struct attention_shape *shape = &a->shape;
    struct fwd_args args = {};
    args.lse_log2 = a->lse_log2;
    args.c = (float)((double)shape->softmax_scale * 1.44269504088896340736);
    args.tokens = (int)shape->tokens;
    args.heads = (int)shape->heads;
    args.kv_heads = (int)shape->kv_heads;
    args.group = args.heads / args.kv_heads;
    const int last = (args.tokens + LAYOUT::END - 1) / LAYOUT::END * LAYOUT::END;
    args.blocks = (last + LAYOUT::ROWS - 1) / LAYOUT::ROWS;
    args.row0 = last - args.blocks * LAYOUT::ROWS;
    args.key_blocks = (args.tokens + TILE - 1) / TILE;
    args.all_heads = (int)(shape->batch * shape->heads);
    const int64_t kv_heads = section_bytes / (shape->tokens * kv_bytes);
    args.section_heads = (int)(kv_heads > 1 ? kv_heads : 1) * args.group;
    args.section_heads = args.section_heads < args.all_heads ? args.section_heads : args.all_heads;
    args.tiles = args.blocks * args.all_heads;
    args.causal = shape->causal;
    return args;
}

template <class LAYOUT, class... RULE>
static inline void fwd_launch(const struct cuda *on, void (*kernel)(struct fwd_maps, struct fwd_args, RULE...),
                              const struct fwd_maps &maps, const struct fwd_args &args, RULE... rule)
{
    const int bytes = (int)sizeof(typename LAYOUT::shared) + 1024; /* the struct starts at a multiple of 1024 */
    const int grid = args.tiles < on->multiprocessors ? args.tiles : on->multiprocessors;
    if (args.tiles == 0) {
        return;
    }
    cuda_note(on, "attention_fwd_sm90: shared memory",
              (int)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    cuda_zero(on, args.counter, sizeof *args.counter);
    kernel<<<grid, LAYOUT::THREADS, bytes, on->stream>>>(maps, args, rule...);
    cuda_launched(on, "attention_fwd_sm90");
}
