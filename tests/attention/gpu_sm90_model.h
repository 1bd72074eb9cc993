/* tests/attention: what the Hopper kernels multiply and, on the CPU, what they make of it, their products summed as the
 * tensor cores do (wgmma_sum.h). For gpu_sm90_*.c. */
#pragma once

#include "attention/attention_cpu.h"
#include "numerics/blocks.h"
#include "numerics/formats.h"
#include "tests/attention/gpu_sm90.h"
#include "tests/attention/wgmma_sum.h"

/* ---- forward ----------------------------------------------------------------------------------------------- */

/* The operands of the forward of a call that has run, in the scratch of its image. */
static inline struct attention_operands_sm90 published_again(const struct gpu_case *g)
{
    const struct attention_fwd call = forward_of(g);
    return attention_fwd_publish_sm90(&call);
}

/* ---- backward: pv = fp8, `represented`, qk = nvfp4, batch 1, one kv head ----------------------------------- */

/* Operands as publishing makes them (docs/numerics.md, section 8). A row is a query of a head, head after head. */
struct bwd8_model {
    int rows, tokens;
    float c, scale;                    /* base-2 score of q.k; softmax_scale */
    float m_dout, m_v, m_q, m_k, m_ds; /* multipliers */
    const bf16 *score_q, *score_k;     /* (rows, D), (tokens, D) */
    uint8_t *dout, *q, *v, *k;         /* codes, likewise; q and k: the views of dK and dQ */
    float *n;                          /* floor(LSE2) */
    float *r;                          /* row statistics, in units of stored dS over the code of P */
    float dp_factor;                   /* from products of codes of V and dO to those units */
};

static inline uint8_t *bwd8_codes(const bf16 *x, int rows, int heads, int tokens, float m)
{
    uint8_t *codes = malloc((size_t)(rows * D));
    for (int i = 0; i < rows * D; i++) {
        const int row = i / D;
        codes[i] = e4m3_from_float(bf16_to_float(x[(row % tokens * heads + row / tokens) * D + i % D]) * m);
    }
    return codes;
}

/* dO times 2^(n - LSE2), which the normaliser of P leaves out, and the row statistic of what that is stored as. */
static inline void bwd8_dout_row(struct bwd8_model *m, int row, const bf16 *dout, const bf16 *out, float lse)
{
    const float fold = exp2f(m->n[row] - lse);
    double sum = 0;
    for (int d = 0; d < D; d++) {
        const uint8_t code = e4m3_from_float(bf16_to_float(dout[d]) * fold * m->m_dout);
        m->dout[row * D + d] = code;
        sum += (double)bf16_to_float(out[d]) * (double)e4m3_to_float(code);
    }
    m->r[row] = (float)sum / m->m_dout * (m->m_ds * 0x1p-7f);
}

/* c: the inputs; out (T, heads, D), lse and saved state of its forward. */
static inline struct bwd8_model bwd8_open(const struct attention_case *c, const bf16 *out, const float *lse,
                                          void *saved_state)
{
    const struct attention_shape *s = &c->shape;
    const int heads = (int)s->heads, tokens = (int)s->tokens, rows = heads * tokens;
    const struct attention_saved saved = attention_saved_carve(s, &c->recipe, &(struct carve){.base = saved_state});
    const struct rows dout = {c->dout, D}, v = {saved.v, D};
    assert_true(s->batch == 1 && s->kv_heads == 1 && c->recipe.pv == PV_FP8 && c->recipe.qk == QK_NVFP4);
    struct bwd8_model m = {
        .rows = rows,
        .tokens = tokens,
        .c = (float)((double)s->softmax_scale * M_LOG2E),
        .scale = s->softmax_scale,
        .m_dout = pow2_scale(rows_amax(dout, rows, D), E4M3_MAX),
        .m_v = pow2_scale(rows_amax(v, tokens, D), E4M3_MAX),
        .m_q = pow2_scale(rows_amax((struct rows){c->q, D}, rows, D), E4M3_MAX),
        .m_k = pow2_scale(rows_amax((struct rows){c->k, D}, tokens, D), E4M3_MAX),
        .m_ds = 16 * pow2_scale(2 * rows_norm_max(dout, rows, D) * rows_norm_max(v, tokens, D), E4M3_MAX),
        .score_q = saved.q,
        .score_k = saved.k,
    };
    m.dp_factor = m.m_ds * 0x1p-7f / (m.m_dout * m.m_v);
    m.q = bwd8_codes(c->q, rows, heads, tokens, m.m_q);
    m.k = bwd8_codes(c->k, tokens, 1, tokens, m.m_k);
    m.v = bwd8_codes(saved.v, tokens, 1, tokens, m.m_v);
    m.dout = malloc((size_t)(rows * D));
    m.n = malloc((size_t)rows * sizeof *m.n);
    m.r = malloc((size_t)rows * sizeof *m.r);
    for (int row = 0; row < rows; row++) {
        const int at = (row % tokens * heads + row / tokens) * D;
        m.n[row] = floorf(lse[row]);
        bwd8_dout_row(&m, row, c->dout + at, out + at, lse[row]);
    }
    return m;
}

static inline void bwd8_close(struct bwd8_model *m)
{
    free(m->q);
    free(m->k);
    free(m->v);
    free(m->dout);
    free(m->n);
    free(m->r);
}

/* The code of P: scores of BF16 operands have more bits than matter here. */
static inline uint8_t bwd8_p(const struct bwd8_model *m, int row, int key)
{
    double sum = 0;
    for (int d = 0; d < D; d++) {
        sum += (double)bf16_to_float(m->score_q[row * D + d]) * (double)bf16_to_float(m->score_k[key * D + d]);
    }
    return e4m3_from_float(exp2f(fmaf(m->c, (float)sum, 7 - m->n[row])));
}

static inline float bwd8_dp(const struct bwd8_model *m, int row, int key)
{
    return wgmma_sum(WGMMA_E4M3, m->v + key * D, WGMMA_E4M3, m->dout + row * D, D, 0);
}

/* dS before it is stored, from a code of P and the sum dP. */
static inline float bwd8_ds(const struct bwd8_model *m, int row, uint8_t p, float dp)
{
    return e4m3_to_float(p) * fmaf(dp, m->dp_factor, -m->r[row]);
}
