/* attention: what the files of the Hopper backward share (head_dim 128). For attention_bwd_sm90*.cu only.
 *
 * Unit of work: 128 keys of one kv head. It walks over 64-query tiles of each query head of its group; dK and dV stay
 * in registers. dQ of a tile is added up in global memory, FP32, in the order in which accumulators lie in registers:
 * tile (b, h, t) holds two halves of 64 features; float4 number (half * 8 + j) * 128 + thread is d[4 j .. 4 j + 3] of
 * that thread (attention/sm90.cuh). */
#pragma once

#include "attention/sm90.cuh"

enum {
    BWD_KEYS = 128,   /* of a unit of work */
    BWD_QUERIES = 64, /* of a tile */
    BWD_FEATURES = 128,
    BWD_TILE = BWD_QUERIES * BWD_FEATURES,
    BWD_THREADS = 384,                /* one warpgroup that loads, two that compute */
    BWD_STATISTICS = 2 * BWD_QUERIES, /* floats of a tile: LSE2, then r; LSE2 is +Inf where a row has no gradient */
};

struct bwd_plan {
    int tokens, heads, kv_heads, units; /* units: batch x kv heads */
    int tiles, blocks;                  /* of queries, of keys */
    int heads_together;                 /* kv heads whose blocks are in flight at the same time, for the L2 cache */
    bool causal;
    float c, scale;  /* base-2 score of q.k; softmax_scale */
    float *dq;       /* (B, H, tiles, BWD_TILE) */
    float *stats;    /* (B, H, tiles, BWD_STATISTICS) */
    uint32_t *turns; /* (B, H, tiles, 2): ordered sums: blocks that have added their part */
    struct head_view dk, dv;
};
