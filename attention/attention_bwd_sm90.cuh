/* attention: what the files of the Hopper backward share (head_dim 128). For attention_bwd_sm90*.cu only.
 *
 * A block of threads has one unit of work: 128 keys of one kv head. It walks over the 64-query tiles of each query head
 * of the GQA group and accumulates dK and dV. dQ: on the BF16 route its tiles are summed in global memory
 * (attention_bwd_sm90_bf16.cuh); on FP8 routes dS is stored, and a second kernel makes dQ (attention_bwd_sm90_dq.cu).
 */
#pragma once

#include "attention/sm90_maps.cuh"

enum {
    BWD_KEYS = 128,   /* of a unit of work */
    BWD_QUERIES = 64, /* of a tile */
    BWD_FEATURES = 128,
    BWD_TILE = BWD_QUERIES * BWD_FEATURES,
    BWD_THREADS = 384, /* one warpgroup that loads, two that compute */
    BARRIER_BOTH = 1,  /* named barriers: both warpgroups; one (2, 3) */
    BARRIER_HALF = 2,
    BWD_STATISTICS = 2 * BWD_QUERIES, /* floats of a tile: LSE2, then r; LSE2 is +Inf where a row has no gradient */
};

struct bwd_plan {
    int tokens, heads, kv_heads, units; /* units: batch x kv heads */
    int tiles, blocks;                  /* of queries, of keys */
    int heads_together;                 /* kv heads whose blocks are in flight at the same time, for the L2 cache */
    bool causal;
    float c, scale;  /* base-2 score = c q.k; softmax_scale */
    float *dq;       /* BF16: (B, H, tiles, BWD_TILE); zero before the kernel only where sums have no order */
    float *stats;    /* (B, H, tiles, BWD_STATISTICS) */
    uint32_t *turns; /* BF16, ordered sums: (B, H, tiles, 2): blocks of keys added so far, of each half of features */
    uint32_t *begun; /* BF16: blocks of the kernel that have begun */
    struct head_view dk, dv;
};

/* ---- the walk of a unit of work --------------------------------------------------------------------------- */

struct unit {
    int block, batch, kv, first; /* first tile of queries that sees the block */
};

/* The unit of a block of threads: those of the same few heads are neighbours. Causal: the longest walk first, or, where
 * sums are ordered, the shortest, so that each block finds its predecessor two tiles ahead. */
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

/* The tiles of one query head after the other. Without a mask, and with unordered sums, each block starts at another
 * tile and wraps around, so that fewer blocks add to one tile of dQ at a time. */
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

struct shared {
    uint32_t base, barriers; /* base: a multiple of 1024 */
    char *memory;            /* the same place as base */
};

static __device__ __forceinline__ uint32_t barrier_at(const struct shared &s, int number)
{
    return s.barriers + 8 * number;
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

/* ---- scores ------------------------------------------------------------------------------------------------ */

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

/* ---- memory between blocks --------------------------------------------------------------------------------- */

/* [ld.acquire] A counter of other blocks; what they wrote before they counted is visible afterwards. */
static __device__ __forceinline__ uint32_t turn_of(const uint32_t *turn)
{
    uint32_t x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(turn) : "memory");
    return x;
}

/* ---- dK, dV -------------------------------------------------------------------------------------------------- */

/* Orders of 64 tokens as rows. BLOCKED: row 8 j + 2 c + e is token 16 c + 2 j + e, so that a thread of a quad has 16
 * neighbours. SWAPPED: bits 0 and 2 of a token's number are exchanged. */
enum row_tokens { IN_ORDER, BLOCKED, SWAPPED };

static __device__ __forceinline__ int blocked_token(int row)
{
    return (row >> 1 & 3) * 16 + (row >> 3) * 2 + (row & 1);
}

/* Where a token of 128 goes, each 64 BLOCKED. */
static __device__ __forceinline__ int blocked_row(int token)
{
    return (token & 65) | (token & 14) << 2 | (token >> 3 & 6);
}

static __device__ __forceinline__ int swapped_token(int row)
{
    return (row & 58) | (row & 1) << 2 | (row >> 2 & 1);
}

/* Rounds this warpgroup's 64 rows once and stores them to y, through 16 KB of shared memory. */
template <enum row_tokens ORDER = IN_ORDER>
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
        const int key = key0 + (ORDER == BLOCKED ? blocked_token(r) : ORDER == SWAPPED ? swapped_token(r) : r);
        if (key < p.tokens) {
            *reinterpret_cast<uint4 *>(y + (int64_t)key * stride + part * 8) =
                *reinterpret_cast<const uint4 *>(memory + r * 256 + ((part ^ (r & 7)) << 4));
        }
    }
}
