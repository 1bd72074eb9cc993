/* tests/attention: the backward of docs/numerics.md, sections 7 and 8, in slow FP64; and exact attention. See oracle.h.
 */
#include "tests/attention/oracle.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* What the query heads of one kv head share. */
struct group {
    const struct oracle_problem *p;
    const bf16 *out;
    const float *lse_log2;
    const struct oracle_fwd *exact; /* LSE2' and O' */
    int64_t first, count;           /* query heads */
    double *k_grad;                 /* (T, D): the gradient view of K */
    double m_q, m_do, m_ds;
    struct oracle_bwd *b;
};

static double *load_bf16(const bf16 *x, int64_t tokens, int64_t heads, int64_t d, int64_t head)
{
    double *y = malloc(sizeof(double) * (size_t)(tokens * d));
    for (int64_t i = 0; i < tokens; i++) {
        for (int64_t e = 0; e < d; e++) {
            y[i * d + e] = (double)bf16_to_float(x[(i * heads + head) * d + e]);
        }
    }
    return y;
}

static double amax(const double *x, int64_t n)
{
    double m = 0;
    for (int64_t i = 0; i < n; i++) {
        m = fmax(m, fabs(x[i]));
    }
    return m;
}

static double norm(const double *x, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += x[i] * x[i];
    }
    return sqrt(sum);
}

static double dot(const double *x, const double *y, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += x[i] * y[i];
    }
    return sum;
}

/* Decodes of dO, and of the gradient views of Q and K: x becomes RNE(m x) / m. */
static void round_scaled(double *x, int64_t n, enum oracle_format format, double m)
{
    for (int64_t i = 0; i < n; i++) {
        x[i] = oracle_round(format, m * x[i]) / m;
    }
}

static bool is_bf16(const struct oracle_problem *p)
{
    return p->recipe->backward == BWD_BF16;
}

static enum oracle_format dout_format(const struct attention_recipe *r)
{
    return r->do_format == DO_E5M2 ? ORACLE_E5M2 : r->do_format == DO_BF16 ? ORACLE_BF16 : ORACLE_E4M3;
}

/* The paper's lift of the gradient views by 4. */
static bool has_fixed_views(const struct attention_recipe *r)
{
    return r->qk_grad == QK_GRAD_LIFT && r->ds_scale == DS_SCALE_FIXED;
}

/* The query's gradient view before rounding: the BF16 original, or the decoded score operand. */
static double *query_view(const struct oracle_problem *p, const struct oracle_head *o, int64_t head)
{
    const struct attention_shape *s = &p->shape;
    double *x = load_bf16(p->q, s->tokens, s->heads, s->head_dim, head);
    for (int64_t i = 0; p->recipe->qk_grad == QK_GRAD_LIFT && i < s->tokens * s->head_dim; i++) {
        x[i] = o->q[i] / o->g_q;
    }
    return x;
}

/* Scales of section 8, one per (batch, kv head). */
static void group_scales(struct group *g, const struct oracle_head *o)
{
    const struct oracle_problem *p = g->p;
    const struct attention_shape *s = &p->shape;
    int64_t d = s->head_dim;
    double do_max = 0;
    double do_norm = 0;
    double v_norm = 0;
    double q_max = 0;
    for (int64_t h = g->first; h < g->first + g->count; h++) {
        struct oracle_head own;
        oracle_head_open(&own, p, h);
        double *dout = load_bf16(p->dout, s->tokens, s->heads, d, h);
        double *q = query_view(p, &own, h);
        do_max = fmax(do_max, amax(dout, s->tokens * d));
        q_max = fmax(q_max, amax(q, s->tokens * d));
        for (int64_t i = 0; i < s->tokens; i++) {
            do_norm = fmax(do_norm, norm(dout + i * d, d));
        }
        free(dout);
        free(q);
        oracle_head_close(&own);
    }
    for (int64_t j = 0; j < s->tokens; j++) { /* the last row sees V as most rows do */
        v_norm = fmax(v_norm, norm(oracle_backward_value_row(p, o, s->tokens - 1, j), d));
    }
    enum oracle_format format = dout_format(p->recipe);
    double limit = format == ORACLE_E5M2 ? 57344 : 448;
    g->m_q = has_fixed_views(p->recipe) ? 4 : oracle_pow2_scale(q_max, 448);
    g->m_do = p->recipe->do_scale == DO_SCALE_FIXED ? 4 : oracle_pow2_scale(do_max, limit);
    g->m_ds = 16 * oracle_pow2_scale(2 * do_norm * v_norm, 448);
    if (do_norm * v_norm == 0) {
        g->m_ds = 1;
    }
    if (p->recipe->ds_scale == DS_SCALE_FIXED) {
        g->m_ds = 256 * (double)s->softmax_scale;
    }
}

/* P of row i: for_ds multiplies dP - r, for_dv makes dV. From codes both are relative to 2^n (section 7). */
static void backward_probabilities(const struct group *g, int64_t head, int64_t i, const float *t, int64_t n,
                                   double *for_ds, double *for_dv)
{
    const struct attention_recipe *r = g->p->recipe;
    int64_t row = head * g->p->shape.tokens + i;
    float saved = g->lse_log2[row];
    bool primed = r->bwd_stat == BWD_STAT_RECENTRED || r->bwd_stat == BWD_STAT_EXACT;
    float lse = primed ? fl32(g->exact->lse2_exact[row]) : saved;
    if (r->bwd_p == BWD_P_CODES) {
        oracle_probabilities(g->p, t, n, (int)floorf(saved), true, for_dv, g->b->codes + row * g->p->shape.tokens);
    }
    double fold = r->bwd_p == BWD_P_CODES ? exp2((double)saved - (double)floorf(saved)) : 1;
    for (int64_t j = 0; j < n; j++) {
        double exact = exp2((double)fl32((double)t[j] - (double)lse));
        if (r->bwd_p == BWD_P_FP8) {
            for_dv[j] = oracle_round(ORACLE_E4M3, 256 * exact) / 256;
        } else if (r->bwd_p == BWD_P_BF16) {
            for_dv[j] = oracle_round(ORACLE_BF16, exact);
        }
        for_ds[j] = r->bwd_stat == BWD_STAT_EXACT || is_bf16(g->p) ? fold * exact : for_dv[j];
    }
}

/* r of row i; d is the decoded dO (folded if P is rebuilt from codes), raw the same before its rounding. */
static double row_statistic(const struct group *g, int64_t head, int64_t i, const double *d, const double *raw,
                            const double *prob, const double *dp, int64_t n)
{
    const struct attention_shape *s = &g->p->shape;
    int64_t at = (i * s->heads + head) * s->head_dim;
    double sum = 0;
    switch (g->p->recipe->bwd_stat) {
    case BWD_STAT_RECENTRED: {
        double total = 0;
        for (int64_t j = 0; j < n; j++) {
            sum += prob[j] * dp[j];
            total += prob[j];
        }
        return total > 0 ? sum / total : 0;
    }
    case BWD_STAT_EXACT:
        for (int64_t e = 0; e < s->head_dim; e++) {
            sum += oracle_round(ORACLE_BF16, g->exact->out_exact[at + e]) * d[e];
        }
        return sum;
    case BWD_STAT_SAVED:
        raw = d;
        break;
    case BWD_STAT_SAVED_RAW:
        break;
    }
    for (int64_t e = 0; e < s->head_dim; e++) {
        sum += (double)bf16_to_float(g->out[at + e]) * raw[e];
    }
    return sum;
}

static void add_leak(struct oracle_leak *leak, double rho, double rho_stored, double r)
{
    leak->leak_abs += fabs(rho);
    leak->leak_stored_abs += fabs(rho_stored);
    leak->leak_r += rho * r;
    leak->r_r += r * r;
}

struct row_buffers {
    double fold; /* 2^-f where dO carries it, else 1 */
    float *t;
    double *for_ds, *for_dv, *dp, *d, *raw;
};

/* dO of row i, times 2^-f where P is rebuilt from codes (section 7, folding the normaliser), and its rounding. */
static void load_dout(const struct group *g, int64_t head, int64_t i, struct row_buffers *w)
{
    const struct attention_shape *s = &g->p->shape;
    float lse = g->lse_log2[head * s->tokens + i];
    bool folded = g->p->recipe->bwd_p == BWD_P_CODES;
    w->fold = folded ? (double)fl32(exp2((double)floorf(lse) - (double)lse)) : 1;
    for (int64_t e = 0; e < s->head_dim; e++) {
        bf16 x = g->p->dout[(i * s->heads + head) * s->head_dim + e];
        w->raw[e] = (double)fl32((double)bf16_to_float(x) * w->fold);
        w->d[e] = w->raw[e];
    }
    enum oracle_format format = dout_format(g->p->recipe);
    round_scaled(w->d, s->head_dim, format, format == ORACLE_BF16 ? 1 : g->m_do);
}

/* debug_leak: the change of r that moves sum_j dS_ij by that share of sum_j |dS_ij|. */
static double planted_error(const struct attention_recipe *recipe, const double *p, const double *dp, int64_t n,
                            double r)
{
    double abs = 0;
    double weight = 0;
    for (int64_t j = 0; j < n; j++) {
        abs += fabs(p[j] * (dp[j] - r));
        weight += p[j];
    }
    return weight > 0 ? (double)recipe->debug_leak * abs / weight : 0;
}

static void backward_row(const struct group *g, const struct oracle_head *o, const double *q_grad, int64_t head,
                         int64_t i, struct row_buffers *w)
{
    const struct attention_shape *s = &g->p->shape;
    int64_t d = s->head_dim;
    int64_t kv = head / g->count;
    struct oracle_leak *leak = &g->b->leak;
    int64_t n = oracle_scores(g->p, o, i, w->t);
    if (g->lse_log2[head * s->tokens + i] == -INFINITY) { /* every code was zero: no gradient */
        return;
    }
    load_dout(g, head, i, w);
    backward_probabilities(g, head, i, w->t, n, w->for_ds, w->for_dv);
    for (int64_t j = 0; j < n; j++) {
        w->dp[j] = dot(w->d, oracle_backward_value_row(g->p, o, i, j), d);
    }
    double r = row_statistic(g, head, i, w->d, w->raw, w->for_ds, w->dp, n);
    r -= planted_error(g->p->recipe, w->for_ds, w->dp, n, r);
    double rho = 0;
    double rho_stored = 0;
    for (int64_t j = 0; j < n; j++) {
        double ds = w->for_ds[j] * (w->dp[j] - r);
        double stored =
            is_bf16(g->p) ? oracle_round(ORACLE_BF16, ds) : oracle_round(ORACLE_E4M3, g->m_ds * ds) / g->m_ds;
        rho += ds;
        rho_stored += stored;
        leak->ds_abs += fabs(ds);
        leak->ds_stored_abs += fabs(stored);
        leak->ds_count += ds != 0;
        leak->ds_flushed += ds != 0 && stored == 0;
        leak->ds_saturated += !is_bf16(g->p) && fabs(g->m_ds * ds) > 464;
        double scaled = (double)s->softmax_scale * stored;
        for (int64_t e = 0; e < d; e++) {
            g->b->dv[(j * s->kv_heads + kv) * d + e] += w->for_dv[j] * w->d[e];
            g->b->dq[(i * s->heads + head) * d + e] += scaled * g->k_grad[j * d + e];
            g->b->dk[(j * s->kv_heads + kv) * d + e] += scaled * q_grad[i * d + e];
        }
    }
    add_leak(leak, rho, rho_stored, r / w->fold);
}

static void backward_head(struct group *g, int64_t head)
{
    const struct attention_shape *s = &g->p->shape;
    size_t tokens = (size_t)s->tokens;
    struct oracle_head o;
    oracle_head_open(&o, g->p, head);
    double *q_grad = query_view(g->p, &o, head);
    if (!is_bf16(g->p)) {
        round_scaled(q_grad, s->tokens * s->head_dim, ORACLE_E4M3, g->m_q);
    }
    struct row_buffers w = {
        1,
        malloc(sizeof(float) * tokens),
        malloc(sizeof(double) * tokens),
        malloc(sizeof(double) * tokens),
        malloc(sizeof(double) * tokens),
        malloc(sizeof(double) * (size_t)s->head_dim),
        malloc(sizeof(double) * (size_t)s->head_dim),
    };
    for (int64_t i = 0; i < s->tokens; i++) {
        backward_row(g, &o, q_grad, head, i, &w);
    }
    free(w.t);
    free(w.for_ds);
    free(w.for_dv);
    free(w.dp);
    free(w.d);
    free(w.raw);
    free(q_grad);
    oracle_head_close(&o);
}

static void open_group(struct group *g)
{
    const struct attention_shape *s = &g->p->shape;
    int64_t size = s->tokens * s->head_dim;
    struct oracle_head o;
    oracle_head_open(&o, g->p, g->first);
    group_scales(g, &o);
    bool lift = g->p->recipe->qk_grad == QK_GRAD_LIFT;
    g->k_grad = malloc(sizeof(double) * (size_t)size);
    for (int64_t i = 0; i < size; i++) {
        g->k_grad[i] = lift ? o.k[i] / o.g_k : o.k_input[i];
    }
    if (!is_bf16(g->p)) {
        double m_k = has_fixed_views(g->p->recipe) ? 4 : oracle_pow2_scale(amax(g->k_grad, size), 448);
        round_scaled(g->k_grad, size, ORACLE_E4M3, m_k);
    }
    oracle_head_close(&o);
}

/* The free safeguard of section 7: dK less its mean over keys. */
static void centre(double *dk, const struct attention_shape *s)
{
    int64_t row = s->kv_heads * s->head_dim;
    for (int64_t e = 0; e < row; e++) {
        double mean = 0;
        for (int64_t j = 0; j < s->tokens; j++) {
            mean += dk[j * row + e] / (double)s->tokens;
        }
        for (int64_t j = 0; j < s->tokens; j++) {
            dk[j * row + e] -= mean;
        }
    }
}

void oracle_backward(const struct oracle_problem *p, const bf16 *out, const float *lse_log2, struct oracle_bwd *b)
{
    const struct attention_shape *s = &p->shape;
    size_t size = (size_t)(s->tokens * s->head_dim);
    bool primed = p->recipe->bwd_stat == BWD_STAT_RECENTRED || p->recipe->bwd_stat == BWD_STAT_EXACT;
    struct oracle_fwd exact = {0};
    if (primed) {
        oracle_forward(p, &exact);
    }
    *b = (struct oracle_bwd){
        .dq = calloc(size * (size_t)s->heads, sizeof(double)),
        .dk = calloc(size * (size_t)s->kv_heads, sizeof(double)),
        .dv = calloc(size * (size_t)s->kv_heads, sizeof(double)),
        .codes = calloc((size_t)(s->heads * s->tokens * s->tokens), 1),
    };
    for (int64_t kv = 0; kv < s->kv_heads; kv++) {
        int64_t count = s->heads / s->kv_heads;
        struct group g = {p, out, lse_log2, &exact, kv * count, count, NULL, 0, 0, 0, b};
        open_group(&g);
        for (int64_t head = g.first; head < g.first + count; head++) {
            backward_head(&g, head);
        }
        free(g.k_grad);
    }
    if (p->recipe->dk_center) {
        centre(b->dk, s);
    }
    oracle_forward_free(&exact);
}

void oracle_backward_free(struct oracle_bwd *b)
{
    free(b->dq);
    free(b->dk);
    free(b->dv);
    free(b->codes);
}
