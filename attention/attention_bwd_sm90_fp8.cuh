/* attention: operands of the FP8 backward on Hopper (docs/numerics.md, sections 7 and 8). For attention_bwd_sm90*.cu.
 *
 * Operands are published tile by tile, as shared memory holds them, so that one bulk copy fetches a tile.
 *   queries (b, h, tile of 64):  dO row  64 x 128 E4M3 or E5M2, SWIZZLE_128B
 *                                dO col 128 x 64, queries of each 16 in order pi1, SWIZZLE_64B
 *                                Q col  128 x 64 E4M3, likewise
 *   keys (b, kv head, block of 128): V row 128 x 128 E4M3, SWIZZLE_128B
 *                                K col 128 x 128 E4M3, keys of each 16 in order pi2, SWIZZLE_128B
 * pi1 = 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15: two accumulator groups of S^T, packed, are an A register of the next
 * product. pi2 = 0 8 1 9 2 10 .. 7 15: two packed registers, rows g and g + 8, are an element of a transposing
 * stmatrix. Rows beyond the sequence are zero. */
#pragma once

#include "attention/attention_bwd_sm90.cuh"

enum {
    BWD8_ROW = BWD_TILE,         /* bytes of dO row, dO col, Q col */
    BWD8_QUERIES = 3 * BWD8_ROW, /* of a tile of queries */
    BWD8_KEYS = 2 * BWD_KEYS * BWD_FEATURES,
};

/* The powers of two of one kv head. */
struct bwd_lifts {
    float dout, q, k, v, ds, score_q, score_k;
};

/* Maxima over one kv head and its query heads, as bits of non-negative floats; zero to begin with. */
struct bwd_facts {
    uint32_t dout, dout_norm, q, k, v, v_norm; /* _norm: largest norm of a row */
    uint32_t score_q, score_k;                 /* operands of the scores, where those are E4M3 */
    uint32_t measured;                         /* blocks that went into them, plus 1 when lifts are known */
    uint32_t begun;                            /* of the first: blocks of publishing that have begun */
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
    float value_unit; /* v holds that many times V */
};

struct bwd8_plan {
    struct bwd_plan b;
    struct bwd_rules rules;
    float shift; /* the code of P is 2^shift P, times ds_factor and dv_factor the value that dS, dV take */
    float ds_factor, dv_factor;
    struct bwd_facts *facts; /* of each (b, kv head) */
    uint8_t *queries, *keys;
    uint8_t *score_q, *score_k; /* rows of Q and K as E4M3, tile by tile, SWIZZLE_128B; NULL unless score_e4m3 */
};

static __device__ __forceinline__ struct bwd_lifts lifts_of(const struct bwd8_plan &p, int unit)
{
    return p.facts[unit].lifts;
}

/* Enqueues everything up to the operands, statistics and, where asked, a zero dQ. K and V as the recipe's views want
 * them. */
struct bwd8_inputs {
    struct head_view q, k, v, out, dout; /* q, k: of the gradient views; v: of dP */
    struct head_view score_q, score_k;   /* as scores multiply them */
    const float *lse;
    bool zero_dq = true;      /* ordered sums need none: add_in_turn */
    const float *amax = NULL; /* (B, H + 2 Hkv) of a head of q, k (attention_bwd.amax), or NULL: found */
};
void bwd8_publish(const struct cuda *on, const struct bwd8_plan &p, const struct bwd8_inputs &in);

/* The kernel's half of the plan (attention_bwd_sm90_fp8.cu), and the bytes of scratch it takes. run publishes, and
 * leaves dK, dV, and dQ in p.b.dq, the latter times lifts. */
struct bwd8_plan bwd8_plan_of(const struct bwd_plan &base, const struct attention_recipe *recipe, void *scratch,
                              size_t *bytes);
void bwd8_run(const struct attention_bwd *a, const struct bwd8_plan &p);
extern "C" const char *attention_bwd_fp8_refuses_sm90(const struct attention_recipe *recipe);

/* Before and after the kernel (attention_bwd_sm90_rows.cu): statistics and a zero dQ of the BF16 route; dQ in its
 * place, rounded once, on every route (facts NULL: no lifts). */
void bwd_prepare(const struct attention_bwd *a, const struct bwd_plan &p);
void bwd_finish(const struct attention_bwd *a, const struct bwd8_plan &p);
