/* attention: the inside of the CPU reference, for its own files and for tests. Others use attention/attention.h.
 *
 * One unit of work is a (batch, kv head) with its group of query heads. Units share nothing and run in parallel;
 * inside, a block of query rows meets all visible keys, so that no T x T array exists. Represented values live in FP32
 * tiles: their products are exact emulation.
 *
 * Sums. Over keys (P V, the normaliser): partial sums of ATTENTION_BLOCK keys at absolute positions, added in order.
 * Over query rows (dK, dV): partial sums of ATTENTION_BLOCK rows, likewise, query heads one after the other. dQ: the
 * partial sums of gemm_cpu. Masked keys add exact zeros. So no bit depends on the tile sizes. */
#pragma once

#include "attention/attention.h"

enum {
    ATTENTION_BLOCK = 32,     /* keys or query rows of a partial sum; the block of MXFP4; tiles are multiples of it */
    ATTENTION_SAMPLES = 128,  /* keys that anchor = sampled looks at */
    ATTENTION_LANES_MAX = 16, /* units in flight, each with its own scratch */
};

/* What a tile of represented P holds, for tests. Row-major (B, H, T, T) and (B, H, T, block of keys); NULL: not wanted.
 * Codes are E2M1 or E4M3 magnitudes, none for pv = bf16. Exponents: MXFP4 the absolute E of section 5 (16 bits are
 * enough for |t| < 30000), NVFP4 and UE5M3 the byte of the scale; blocks of attention_p_block keys. */
struct attention_cpu_probe {
    uint8_t *codes;
    int16_t *exponents;
};

struct attention_cpu_options {
    int query_rows; /* rows of a block */
    int key_tile;   /* forward: keys between two looks at the online anchor; 0: all visible keys, that is two passes */
    struct attention_cpu_probe *probe; /* NULL: none. Forward: P as multiplied; backward: bwd_p = codes, as rebuilt */
};
#define ATTENTION_CPU_DEFAULT ((struct attention_cpu_options){.query_rows = 64})

extern const struct attention_variant attention_variant_cpu;

const char *attention_refuses_cpu(const struct attention_shape *shape, const struct attention_recipe *recipe);
size_t attention_saved_bytes_cpu(const struct attention_shape *shape, const struct attention_recipe *recipe);
size_t attention_scratch_bytes_cpu_with(const struct attention_shape *shape, const struct attention_recipe *recipe,
                                        const struct attention_cpu_options *options);
void attention_fwd_cpu_with(const struct attention_fwd *a, const struct attention_cpu_options *options);
void attention_bwd_cpu_with(const struct attention_bwd *a, const struct attention_cpu_options *options);

/* n rounded up to whole blocks: the stride of tiles. */
static inline int64_t attention_whole_blocks(int64_t n)
{
    return (n + ATTENTION_BLOCK - 1) / ATTENTION_BLOCK * ATTENTION_BLOCK;
}

/* ---- memory ----------------------------------------------------------------------------------------------- */

/* Takes 64-byte aligned pieces of one block; with base NULL it only counts. */
struct carve {
    unsigned char *base;
    size_t used;
};
void *carve_take(struct carve *carve, size_t bytes);

/* T rows of D BF16 values, `stride` elements apart. data NULL: none. */
struct rows {
    bf16 *data;
    int64_t stride;
};

/* The saved state, all (B, heads or kv heads, T, ...) contiguous; NULL where the recipe needs none.
 * q, k, v are the represented operands of the forward (v times attention_unit), exact in BF16. */
struct attention_saved {
    bf16 *q, *k, *v;
    bf16 *out_exact;  /* O' of bwd_stat exact */
    float *lse_exact; /* LSE2' of bwd_stat recentred and exact */
};
struct attention_saved attention_saved_carve(const struct attention_shape *shape, const struct attention_recipe *recipe,
                                             struct carve *carve);
bool attention_wants_exact(const struct attention_recipe *recipe); /* LSE2' */

/* 6 for the amplitude family of MXFP4, whose values are alpha q / 6: tiles of P and V then hold six times the value, a
 * small multiple of a power of two, and the products are divided once. Else 1. */
float attention_unit(const struct attention_recipe *recipe);

/* Keys of a block of P and V that shares a scale: 32, 16, or 1 for formats without one. */
int attention_p_block(enum pv_format pv);

/* Units, and lanes of scratch: lane l works through units l, l + lanes, .. one after the other. */
int64_t attention_units(const struct attention_shape *shape);
int64_t attention_lanes(const struct attention_shape *shape);
size_t attention_fwd_lane_bytes(const struct attention_shape *shape, const struct attention_recipe *recipe,
                                const struct attention_cpu_options *options);
size_t attention_bwd_lane_bytes(const struct attention_shape *shape, const struct attention_recipe *recipe,
                                const struct attention_cpu_options *options);

/* V as a product sees it. */
struct value_operand {
    struct rows main, diag; /* diag.data NULL, or E4M3 rows for the block that holds the query (v_diag = fp8) */
    int64_t block;          /* length of that block */
};

/* ---- operands (attention_cpu_operands.c) ------------------------------------------------------------------ */

struct rows head_rows(const struct head_view *view, int64_t batch, int64_t head);

/* NaNs and infinities among T x D values. */
int64_t rows_count_non_finite(struct rows x, int64_t T, int64_t D);

/* The score operand of one head, in the recipe's format (qk = bf16: a copy). `staging`: T x D floats. A head with a
 * non-finite value becomes NaN as a whole: FP4 would hide it. */
void publish_scores(const struct attention_recipe *recipe, struct rows x, int64_t T, int64_t D, float *staging,
                    bf16 *y);

/* K less its mean over keys, rounded to BF16. */
void publish_centred(struct rows x, int64_t T, int64_t D, float *staging, bf16 *y);

/* V of the forward, times attention_unit: sink keys in E4M3, else the recipe's blocks along keys. */
void publish_value(const struct attention_recipe *recipe, struct rows x, int64_t T, int64_t D, float *staging, bf16 *y);

/* V in E4M3, decoded, times `unit`: the FP8 route, diagonal blocks, sinks, and bwd_v = e4m3. */
void publish_value_e4m3(struct rows x, int64_t T, int64_t D, float unit, bf16 *y);

/* E4M3(m x) / m: a gradient view. */
void publish_view(struct rows x, int64_t T, int64_t D, float m, bf16 *y);

float rows_amax(struct rows x, int64_t T, int64_t D);
float rows_norm_max(struct rows x, int64_t T, int64_t D); /* largest 2-norm of a row */

/* ---- probabilities (attention_cpu_probability.c) ---------------------------------------------------------- */

/* The score of a masked key: its probability is zero in every format. */
#define ATTENTION_MASKED -1e30f

/* 2^(t + shift) for an integer shift: the same mantissa whatever the shift; below 2^-126 zero, above 2^127 Inf. */
void exp2_row(const float *t, int64_t n, float shift, float *y);

/* One row of scores against a tile of keys. The row is processed in whole blocks: t has room for n rounded up to 32,
 * and entries from `visible` on hold ATTENTION_MASKED. */
struct p_row {
    float *t; /* in: base-2 scores; out: represented P times attention_unit, relative to 2^reference */
    int64_t first_key;
    int64_t visible, n;
    float reference;    /* the anchor in forward, floor(LSE2) in backward */
    float anchor;       /* the forward's, which decides where a block exponent underflows */
    bool rebuilt;       /* backward: P reaches 2, lifts are one binade lower */
    float *exact;       /* out: 2^(t - reference) unrounded; NULL: not wanted, nor the two sums that need it */
    float sum;          /* in and out: normaliser, times attention_unit; block sums are added in order */
    float sum_exact;    /* in and out: sum of `exact` */
    float lost;         /* in and out: sum of `exact` where the code is zero */
    uint8_t *codes;     /* of this row from first_key on; NULL: not wanted */
    int16_t *exponents; /* of this row, of the block of first_key on */
};
void p_row_publish(const struct attention_recipe *recipe, struct p_row *row);

/* Largest entry and largest magnitude of n scores; NaN if any is. */
void score_range(const float *t, int64_t n, float *max, float *magnitude);

/* ceil(max) for anchor = row; 0; or, from the largest sampled score, the paper's lifted reference. */
float anchor_of(const struct attention_recipe *recipe, float max);
/* Position of sample s among T keys. */
int64_t anchor_sample(int64_t s, int64_t T);
int64_t anchor_samples(int64_t T);
