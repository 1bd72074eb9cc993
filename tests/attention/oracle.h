/* tests/attention: the operator of docs/numerics.md written down a second time, slowly.
 *
 * One sequence, FP64, plain loops, own encoders (a search over the codes). It makes every rounding that the law names
 * and no other, so it differs from attention/ by FP32 accumulation and by the codes that such an error flips. It shares
 * with attention/ the recipe's names only. Sections are those of docs/numerics.md. */
#pragma once

#include "attention/attention.h"

/* Formats by the magnitudes of their codes. BF16 has too many codes to search: oracle_round knows it apart. */
enum oracle_format { ORACLE_E2M1, ORACLE_E4M3, ORACLE_E5M2, ORACLE_UE4M3, ORACLE_UE5M3, ORACLE_BF16 };

double oracle_value(enum oracle_format format, int code);
int oracle_code(enum oracle_format format, double magnitude); /* nearest, ties to the even code, saturating */
double oracle_round(enum oracle_format format, double x);     /* keeps the sign */
double oracle_pow2_scale(double amax, double limit);          /* largest 2^k with 2^k amax <= limit; 1 if amax is 0 */
float fl32(double x);                                         /* one FP32 rounding */

/* All tensors contiguous, without a batch: q, dout, out (T, H, D); k, v (T, Hkv, D); lse (H, T). shape.batch is 1. */
struct oracle_problem {
    struct attention_shape shape;
    const struct attention_recipe *recipe;
    const bf16 *q, *k, *v, *dout;
};

struct oracle_fwd {
    double *out;       /* (T, H, D), not rounded to BF16 */
    double *lse2;      /* (H, T) */
    double *out_exact; /* (T, H, D): O' of section 7, unrounded P times the V of bwd_v */
    double *lse2_exact;
    uint8_t *codes;   /* (H, T, T): magnitude codes of P, E2M1 or E4M3; 0 where masked */
    double *value;    /* (H, T, T): represented P relative to 2^anchor */
    double lost_mass; /* exact probability whose code is zero, summed over rows */
    double logit_max; /* largest |softmax_scale q.k| of the represented operands, visible keys */
};

/* What a row of dS keeps (section 7), before and after it is stored. */
struct oracle_leak {
    double leak_abs, ds_abs, leak_stored_abs, ds_stored_abs, leak_r, r_r;
    double ds_count, ds_flushed, ds_saturated;
};

struct oracle_bwd {
    double *dq, *dk, *dv; /* not rounded to BF16 */
    uint8_t *codes;       /* (H, T, T) as rebuilt */
    struct oracle_leak leak;
};

/* Results are allocated by the call and freed by the caller. */
void oracle_forward(const struct oracle_problem *p, struct oracle_fwd *f);
void oracle_forward_free(struct oracle_fwd *f);

/* `out` and `lse_log2` are the saved state of the forward under test, as BF16 and FP32: they are inputs here, so that a
 * disagreement in forward is not counted twice. The statistics with a prime are the oracle's own. */
void oracle_backward(const struct oracle_problem *p, const bf16 *out, const float *lse_log2, struct oracle_bwd *b);
void oracle_backward_free(struct oracle_bwd *b);

/* Exact attention of the BF16 inputs (exact.c): no rounding at all. dq, dk and dv may be NULL together. */
void oracle_exact(const struct oracle_problem *p, double *out, double *dq, double *dk, double *dv);

/* Shared by the two passes (oracle.c). */

/* The operands of one query head. */
struct oracle_head {
    double *q, *k;                  /* (T, D): payload times block scale, without 1/G */
    double *k_input;                /* (T, D): K before quantisation, centred where the recipe says so */
    double *v, *v_blocked, *v_e4m3; /* (T, D): V as given, the forward's, and its FP8 stand-in */
    double g_q, g_k, m_v;
    float c;
};
void oracle_head_open(struct oracle_head *o, const struct oracle_problem *p, int64_t head);
void oracle_head_close(struct oracle_head *o);

/* t_ij = fl32(c s_ij) for the visible keys of row i; returns their number. */
int64_t oracle_scores(const struct oracle_problem *p, const struct oracle_head *o, int64_t i, float *t);

/* V of key j as row i of the forward multiplies it. */
const double *oracle_value_row(const struct oracle_problem *p, const struct oracle_head *o, int64_t i, int64_t j);

/* The same in the backward's dP: by bwd_v. */
const double *oracle_backward_value_row(const struct oracle_problem *p, const struct oracle_head *o, int64_t i,
                                        int64_t j);

/* The represented probabilities of a row relative to 2^reference: forward (reference is the anchor) or rebuilt in
 * backward (reference is floor(LSE2), lifts one binade less). */
void oracle_probabilities(const struct oracle_problem *p, const float *t, int64_t n, int reference, bool rebuilt,
                          double *value, uint8_t *codes);

/* Exact LSE2' of a row: log2 of sum 2^t. */
double oracle_exact_lse2(const float *t, int64_t n);
