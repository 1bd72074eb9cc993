/* attention: operands of the FP8 backward on Hopper (docs/numerics.md, sections 7 and 8). For attention_bwd_sm90*.cu.
 *
 * Operands are published in tiles laid out as in shared memory, so that one bulk copy loads a tile.
 *   queries (b, h, tile of 64):  dO row  64 x 128 E4M3 or E5M2, SWIZZLE_128B
 *                                dO col 128 x 64, queries of each 16 in order pi1, SWIZZLE_64B
 *                                Q col  128 x 64 E4M3, likewise
 *   keys (b, kv head, block of 128): V row 128 x 128 E4M3, SWIZZLE_128B
 *                                K col 128 x 128 E4M3, keys of each 16 in order pi2, SWIZZLE_128B
 *   dS (launch's query head, pair of tiles, block of keys, tile): 64 queries x 128 keys E4M3, keys of each 16 in order
 *                                pi2, SWIZZLE_128B
 * Where rules.query_rows: dO col and Q col in order pi2, rows of V row BLOCKED (row_tokens in attention_bwd_sm90.cuh),
 * keys of K col and dS in natural order, rows of dS SWAPPED, so that two rows, stored at a time, meet all banks.
 * pi1 = 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15: two accumulator groups of S^T, packed, are an A register of the next
 * product. pi2 = 0 8 1 9 2 10 .. 7 15: two packed registers, rows g and g + 8, are an element of a transposing
 * stmatrix. Rows beyond the sequence are zero. */
#pragma once

#include "attention/attention_bwd_sm90.cuh"

extern "C" {
#include "attention/attention_cuda.h"
}

enum {
    BWD8_ROW = BWD_TILE,         /* bytes of dO row, dO col, Q col */
    BWD8_QUERIES = 3 * BWD8_ROW, /* of a tile of queries */
    BWD8_KEYS = 2 * BWD_KEYS * BWD_FEATURES,
    BWD8_DS = BWD_QUERIES * BWD_KEYS, /* of dS of a tile of queries and a block of keys */
    BWD8_PAIR = 2 * BWD8_DS,          /* of two tiles: 128 queries */
};

/* The powers of two of one kv head. */
struct bwd_lifts {
    float dout, q, k, v, ds;
};

/* Maxima over one kv head and its query heads, as bits of non-negative floats; zero to begin with. */
struct bwd_facts {
    uint32_t dout, dout_norm, q, k, v, v_norm; /* _norm: largest norm of a row */
    uint32_t measured;                         /* blocks that went into them, plus 1 when lifts are known */
    uint32_t begun;                            /* in the first entry: blocks of the kernel that have begun */
    struct bwd_lifts lifts;
};

/* The recipe, as kernels ask for it. */
struct bwd_rules {
    bool codes;                 /* P is rebuilt relative to floor(LSE2), dO carries 2^-f; else exp2(t - LSE2) */
    bool raw_statistic;         /* r from the unrounded dO */
    bool dout_e5m2, dout_fixed; /* format; multiplier 4 */
    bool ds_fixed;
    bool view_fixed;  /* gradient views of Q and K times 4 */
    bool value_e4m3;  /* V = E4M3(4 v), or a smaller lift where 4 |v| > 448; else v is represented already */
    bool score_e4m3;  /* qk = nvfp4_e4m3: scores are an FP8 product too */
    bool query_rows;  /* codes of MXFP4: rows of accumulators are queries (attention_bwd_sm90_mxfp4.cu) */
    float value_unit; /* v holds that many times V */
};

struct bwd8_plan {
    struct bwd_plan b;
    struct bwd_rules rules;
    float shift; /* codes of P are 2^shift P; times ds_factor, dv_factor they are the P in dS, in dV */
    float ds_factor, dv_factor;
    struct bwd_facts *facts; /* of each (b, kv head) */
    uint8_t *queries, *keys;
    const float *q_inverse, *k_inverse; /* score_e4m3: multipliers of the codes that scores multiply, of each head */
    /* dS is kept for `together` units at a time, so that scratch stays bounded. */
    uint8_t *ds;
    int together;
    float *sums; /* FP32 sums of dK and dV (attention_bwd_sm90_beside.cuh) */
};

static __device__ __forceinline__ struct bwd_lifts lifts_of(const struct bwd8_plan &p, int unit)
{
    return p.facts[unit].lifts;
}

/* Number of (pair of tiles, block of keys) of one query head; causal: of those where the block is seen. */
static __host__ __device__ __forceinline__ int64_t pairs_of_head(const struct bwd_plan &p)
{
    return p.causal ? (int64_t)p.blocks * (p.blocks + 1) / 2 : (int64_t)p.blocks * p.blocks;
}

/* Where dS of a pair of tiles lies, for block 0; the next blocks follow. head: of the launch. */
static __device__ __forceinline__ uint8_t *pair_at(const struct bwd8_plan &p, int head, int pair)
{
    const int64_t before = p.b.causal ? (int64_t)pair * (pair + 1) / 2 : (int64_t)pair * p.b.blocks;
    return p.ds + (head * pairs_of_head(p.b) + before) * BWD8_PAIR;
}

/* [Matrix Descriptor] operand_k_major of a tile `at` bytes behind `base` in stage `stage` of `bytes` bytes, by one
 * addition to what the loop keeps; and below the same with SWIZZLE_64B. */
static __device__ __forceinline__ uint64_t operand_at(uint32_t base, uint32_t at, uint32_t stage = 0,
                                                      uint32_t bytes = 0)
{
    return (uint64_t)(1024u >> 4 | OPERAND_SWIZZLE_128 << 30) << 32 |
           ((base >> 4) + (at >> 4 | 1u << 16) + stage * (bytes >> 4));
}

static __device__ __forceinline__ uint64_t operand_64_at(uint32_t base, uint32_t at, uint32_t stage, uint32_t bytes)
{
    return (uint64_t)(512u >> 4 | (uint32_t)OPERAND_SWIZZLE_64 << 30) << 32 |
           ((base >> 4) + (at >> 4 | 1u << 16) + stage * (bytes >> 4));
}

/* Enqueues the publishing of operands and statistics. */
struct bwd8_inputs {
    struct head_view q, k, v, out, dout; /* q, k: of the gradient views; v: of dP */
    const float *lse;
    const float *amax = NULL; /* (B, H + 2 Hkv) of a head of q, k (attention_bwd.amax), or NULL: found */
};
void bwd8_publish(const struct cuda *on, const struct bwd8_plan &p, const struct bwd8_inputs &in);

/* The kernels' half of the plan (attention_bwd_sm90_fp8.cu), and the bytes of scratch it takes. bwd8_run publishes, and
 * makes dQ, dK, dV. centred: bwd8_centred_bytes more. */
struct bwd8_plan bwd8_plan_of(const struct bwd_plan &base, const struct attention_recipe *recipe, void *scratch,
                              size_t *bytes);
void bwd8_run(const struct attention_bwd *a, struct bwd8_plan p, void *centred);
/* With k_center, what K's gradient view is made from: the centred original, of which only codes were saved. Else 0. */
size_t bwd8_centred_bytes(const struct attention_shape *shape, const struct attention_recipe *recipe);
extern "C" const char *attention_bwd_fp8_refuses_sm90(const struct attention_shape *shape,
                                                      const struct attention_recipe *recipe);

/* dK, dV and dS where rules.query_rows (attention_bwd_sm90_mxfp4.cu), and dQ. q: the map of rows of Q; k: rows of K
 * (B, Hkv, T, 128) for scores, E4M3 or BF16. */
void bwd8_mxfp4(const struct attention_bwd *a, const struct bwd8_plan &p, const CUtensorMap &q, const void *k);

/* dQ of `units` units from `first` on, from their dS (attention_bwd_sm90_dq.cu). */
void bwd8_dq(const struct cuda *on, const struct bwd8_plan &p, const struct head_view &dq, int first, int units);

/* Before and after the kernel of the BF16 route (attention_bwd_sm90_rows.cu): statistics and a zero dQ; dQ in its
 * place, rounded once. */
void bwd_prepare(const struct attention_bwd *a, const struct bwd_plan &p);
void bwd_finish(const struct attention_bwd *a, const struct bwd_plan &p);

/* dk_center: dK, as the kernels left it, less its mean over keys (attention_bwd_sm90_centre.cu). sums: scratch of the
 * size of bwd_plan.stats. */
void bwd_centre(const struct attention_bwd *a, float *sums);
