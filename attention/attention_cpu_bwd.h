/* attention: what the files of the CPU backward share. Nobody else includes it.
 *
 * Every mode is one scheme: dO' = decoded w dO, dP = dO' V^T, dS = P (dP - r), with w = 2^-f where P is rebuilt from
 * codes relative to n = floor(LSE2) (f = LSE2 - n), else 1. Stored dS is held times `lift`. */
#pragma once

#include "attention/attention_cpu.h"

/* Scratch of one lane. R = rows of a block, W = all keys, rounded up; tiles are (R, W), FP32. */
struct bwd_lane {
    bf16 *q, *k;             /* gradient views */
    bf16 *v, *diag;          /* V of dP in E4M3; diagonal blocks */
    bf16 *dout;              /* R x D: decoded dO' */
    float *staging;          /* T x D */
    float *p;                /* t, then P as dV takes it */
    float *p_ds;             /* P as dS takes it, where that is another one */
    float *ds;               /* dP, then lift dS */
    float *dk, *dv;          /* T x D */
    float *reference, *fold; /* R: n and w, or LSE2 and 1 */
};

struct bwd_unit {
    const struct attention_bwd *a;
    const struct attention_cpu_options *options;
    struct bwd_lane lane;
    struct attention_saved saved;
    struct attention_stats *stats;
    int64_t batch, kv, T, D, R, W;
    float c;                     /* base-2 score of q.k */
    float do_lift, lift, q_lift; /* multipliers of dO, dS and the view of Q; one for all query heads of the unit */
    struct rows k, k_view;       /* as scores read it, as dQ reads it */
    struct value_operand v;      /* of dP, times v_unit */
    float v_unit;
};

/* A block of query rows of one head, against the keys that its last row sees. */
struct row_block {
    int64_t head, first, rows, keys;
    struct rows q, q_view;
};

int64_t bwd_visible_keys(const struct bwd_unit *u, int64_t row);

/* dS takes P unrounded in the BF16 route (as flash attention does) and with the statistic of the unrounded P. */
bool bwd_ds_takes_exact(const struct attention_recipe *recipe);

/* n and w, or LSE2 and 1, of each row; then dO' of the block. */
void bwd_open_rows(const struct bwd_unit *u, const struct row_block *b);

/* The scores of a block become P, for dS and for dV. */
void bwd_probabilities(const struct bwd_unit *u, const struct row_block *b);

/* dP becomes the stored dS; what is lost on the way is counted. */
void bwd_ds(const struct bwd_unit *u, const struct row_block *b);
