/* attention: the backward of the CPU reference (docs/numerics.md, sections 7 and 8).
 *
 * Every mode is one scheme: dO' = decoded w dO, dP = dO' V^T, dS = P (dP - r), with w = 2^-f where P is rebuilt from
 * codes relative to n = floor(LSE2) (f = LSE2 - n), else 1. Stored dS is held times `lift`. */
#include "attention/attention_cpu.h"
#include "core/gemm.h"
#include "numerics/blocks.h"
#include "numerics/formats.h"

#include <math.h>
#include <string.h>

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
    float *r;                /* R */
    float *reference, *fold; /* R: n and w, or LSE2 and 1 */
};

struct bwd_unit {
    const struct attention_bwd *a;
    const struct attention_cpu_options *options;
    struct bwd_lane lane;
    struct attention_saved saved;
    struct attention_stats *stats;
    int64_t batch, kv, T, D, R, W;
    float c; /* base-2 score of q.k */
    float do_lift, lift, q_lift;
    struct rows k, k_view;
    struct value_operand v;
    float v_unit;
};

static int64_t round_up(int64_t n)
{
    return (n + ATTENTION_BLOCK - 1) / ATTENTION_BLOCK * ATTENTION_BLOCK;
}

/* dS takes P unrounded in the BF16 route (as flash attention does) and with the statistic of the unrounded P. */
static bool ds_takes_exact(const struct attention_recipe *recipe)
{
    return recipe->backward == BWD_BF16 || recipe->bwd_stat == BWD_STAT_EXACT;
}

static struct bwd_lane lane_carve(const struct attention_shape *shape, const struct attention_recipe *recipe,
                                  const struct attention_cpu_options *options, struct carve *carve)
{
    size_t head = (size_t)(shape->tokens * shape->head_dim);
    size_t R = (size_t)options->query_rows;
    size_t tile = R * (size_t)round_up(shape->tokens);
    return (struct bwd_lane){
        .q = carve_take(carve, head * sizeof(bf16)),
        .k = carve_take(carve, head * sizeof(bf16)),
        .v = carve_take(carve, recipe->bwd_v == BWD_V_E4M3 ? head * sizeof(bf16) : 0),
        .diag = carve_take(carve, recipe->v_diag == V_DIAG_FP8 ? head * sizeof(bf16) : 0),
        .dout = carve_take(carve, R * (size_t)shape->head_dim * sizeof(bf16)),
        .staging = carve_take(carve, head * sizeof(float)),
        .p = carve_take(carve, tile * sizeof(float)),
        .p_ds = carve_take(carve, ds_takes_exact(recipe) ? tile * sizeof(float) : 0),
        .ds = carve_take(carve, tile * sizeof(float)),
        .dk = carve_take(carve, head * sizeof(float)),
        .dv = carve_take(carve, head * sizeof(float)),
        .r = carve_take(carve, R * sizeof(float)),
        .reference = carve_take(carve, R * sizeof(float)),
        .fold = carve_take(carve, R * sizeof(float)),
    };
}

size_t attention_bwd_lane_bytes(const struct attention_shape *shape, const struct attention_recipe *recipe,
                                const struct attention_cpu_options *options)
{
    struct carve carve = {0};
    (void)lane_carve(shape, recipe, options, &carve);
    return carve.used;
}

/* ---- operands ---------------------------------------------------------------------------------------------------- */

static struct rows saved_head(bf16 *saved, int64_t head, const struct bwd_unit *u)
{
    return (struct rows){saved + head * u->T * u->D, u->D};
}

/* The represented score operands of the forward. */
static struct rows score_query(const struct bwd_unit *u, int64_t head)
{
    return u->saved.q != NULL ? saved_head(u->saved.q, u->batch * u->a->shape.heads + head, u)
                              : head_rows(&u->a->q, u->batch, head);
}

static struct rows score_key(const struct bwd_unit *u)
{
    return u->saved.k != NULL ? saved_head(u->saved.k, u->batch * u->a->shape.kv_heads + u->kv, u)
                              : head_rows(&u->a->k, u->batch, u->kv);
}

static float view_lift(const struct attention_recipe *recipe, float amax)
{
    bool fixed = recipe->qk_grad == QK_GRAD_LIFT && recipe->ds_scale == DS_SCALE_FIXED;
    return fixed ? 4.0f : pow2_scale(amax, E4M3_MAX);
}

/* What the gradient view of a query head is made from. */
static struct rows query_source(const struct bwd_unit *u, int64_t head)
{
    return u->a->recipe->qk_grad == QK_GRAD_LIFT ? score_query(u, head) : head_rows(&u->a->q, u->batch, head);
}

static struct rows query_view(const struct bwd_unit *u, int64_t head)
{
    struct rows q = query_source(u, head);
    if (u->a->recipe->backward == BWD_BF16) {
        return q;
    }
    publish_view(q, u->T, u->D, u->q_lift, u->lane.q);
    return (struct rows){u->lane.q, u->D};
}

static struct rows key_view(const struct bwd_unit *u)
{
    const struct attention_recipe *recipe = u->a->recipe;
    struct rows k = recipe->qk_grad == QK_GRAD_LIFT ? u->k : head_rows(&u->a->k, u->batch, u->kv);
    if (recipe->qk_grad == QK_GRAD_ORIGINAL && recipe->k_center) {
        publish_centred(k, u->T, u->D, u->lane.staging, u->lane.k);
        k = (struct rows){u->lane.k, u->D};
    }
    if (recipe->backward == BWD_BF16) {
        return k;
    }
    publish_view(k, u->T, u->D, view_lift(recipe, rows_amax(k, u->T, u->D)), u->lane.k);
    return (struct rows){u->lane.k, u->D};
}

static void publish_values(struct bwd_unit *u)
{
    const struct attention_recipe *recipe = u->a->recipe;
    struct rows v = head_rows(&u->a->v, u->batch, u->kv);
    u->v = (struct value_operand){.main = v, .block = attention_p_block(recipe->pv)};
    u->v_unit = 1.0f;
    if (recipe->bwd_v == BWD_V_E4M3) {
        publish_value_e4m3(v, u->T, u->D, 1.0f, u->lane.v);
        u->v.main = (struct rows){u->lane.v, u->D};
    } else if (recipe->bwd_v == BWD_V_FORWARD && recipe->pv != PV_BF16) {
        u->v.main = saved_head(u->saved.v, u->batch * u->a->shape.kv_heads + u->kv, u);
        u->v_unit = attention_unit(recipe);
    }
    if (recipe->bwd_v == BWD_V_FORWARD && recipe->v_diag == V_DIAG_FP8) {
        publish_value_e4m3(v, u->T, u->D, u->v_unit, u->lane.diag);
        u->v.diag = (struct rows){u->lane.diag, u->D};
    }
}

/* The multipliers of section 8, one per kv head: its query heads add into the same dK and dV. */
static void choose_lifts(struct bwd_unit *u, int64_t first_head, int64_t heads)
{
    const struct attention_recipe *recipe = u->a->recipe;
    float do_max = 0;
    float do_norm = 0;
    float q_max = 0;
    for (int64_t head = first_head; head < first_head + heads; head++) {
        struct rows dout = head_rows(&u->a->dout, u->batch, head);
        do_max = fmaxf(do_max, rows_amax(dout, u->T, u->D));
        do_norm = fmaxf(do_norm, rows_norm_max(dout, u->T, u->D));
        q_max = fmaxf(q_max, rows_amax(query_source(u, head), u->T, u->D));
    }
    u->q_lift = view_lift(recipe, q_max);
    u->do_lift = recipe->do_scale == DO_SCALE_FIXED ? 4.0f
                 : recipe->do_format == DO_BF16
                     ? 1.0f
                     : pow2_scale(do_max, recipe->do_format == DO_E5M2 ? E5M2_MAX : E4M3_MAX);
    float bound = 2.0f * do_norm * rows_norm_max(u->v.main, u->T, u->D) / u->v_unit;
    u->lift = recipe->backward == BWD_BF16         ? 1.0f
              : recipe->ds_scale == DS_SCALE_FIXED ? 256.0f * u->a->shape.softmax_scale
              : bound > 0                          ? 16.0f * pow2_scale(bound, E4M3_MAX)
                                                   : 1.0f;
}

/* ---- one block of query rows
 * ------------------------------------------------------------------------------------------- */

struct row_block {
    int64_t head, first, rows, keys;
    struct rows q, q_view;
};

static int64_t visible_keys(const struct bwd_unit *u, int64_t row)
{
    return u->a->shape.causal ? row + 1 : u->T;
}

static float decode_dout(const struct attention_recipe *recipe, float x, float m)
{
    switch (recipe->do_format) {
    case DO_E4M3:
        return e4m3_round(x * m) / m;
    case DO_E5M2:
        return e5m2_round(x * m) / m;
    case DO_BF16:
        return bf16_to_float(bf16_from_float(x));
    }
    return x;
}

/* n and 2^-f, or LSE2 and 1; then dO' of the block. */
static void open_rows(const struct bwd_unit *u, const struct row_block *b)
{
    const struct attention_recipe *recipe = u->a->recipe;
    struct rows dout = head_rows(&u->a->dout, u->batch, b->head);
    int64_t at = (u->batch * u->a->shape.heads + b->head) * u->T + b->first;
    bool codes = recipe->bwd_p == BWD_P_CODES;
    int64_t count = 0;
    int64_t flushed = 0;
    for (int64_t r = 0; r < b->rows; r++) {
        float lse = u->a->lse_log2[at + r];
        bool lost = lse == -INFINITY; /* every code was zero: so are all gradients */
        float n = lost ? 0.0f : floorf(lse);
        u->lane.fold[r] = codes && !lost ? exp2f(n - lse) : 1.0f;
        u->lane.reference[r] = codes ? n : attention_wants_exact(recipe) ? u->saved.lse_exact[at + r] : lse;
        const bf16 *x = dout.data + (b->first + r) * dout.stride;
        for (int64_t d = 0; d < u->D; d++) {
            float y = decode_dout(recipe, bf16_to_float(x[d]) * u->lane.fold[r], u->do_lift);
            u->lane.dout[r * u->D + d] = bf16_from_float(y);
            count += (x[d] & 0x7fff) != 0;
            flushed += (x[d] & 0x7fff) != 0 && y == 0.0f;
        }
    }
    u->stats->do_count += (double)count;
    u->stats->do_flushed += (double)flushed;
}

static void scores(const struct bwd_unit *u, const struct row_block *b)
{
    gemm_cpu(&(struct gemm){.m = b->rows,
                            .n = b->keys,
                            .k = u->D,
                            .a = b->q.data + b->first * b->q.stride,
                            .a_type = DTYPE_BF16,
                            .lda = b->q.stride,
                            .b = u->k.data,
                            .b_type = DTYPE_BF16,
                            .ldb = u->k.stride,
                            .trans_b = true,
                            .c = u->lane.p,
                            .ldc = u->W,
                            .alpha = u->c});
}

static void dprobability_part(const struct bwd_unit *u, struct rows v, int64_t row, int64_t rows, int64_t key,
                              int64_t keys)
{
    gemm_cpu(&(struct gemm){.m = rows,
                            .n = keys,
                            .k = u->D,
                            .a = u->lane.dout + row * u->D,
                            .a_type = DTYPE_BF16,
                            .lda = u->D,
                            .b = v.data + key * v.stride,
                            .b_type = DTYPE_BF16,
                            .ldb = v.stride,
                            .trans_b = true,
                            .c = u->lane.ds + row * u->W + key,
                            .ldc = u->W,
                            .alpha = 1.0f / u->v_unit});
}

/* dP; rows whose own block of V is another one are made again there. */
static void dprobability(const struct bwd_unit *u, const struct row_block *b)
{
    dprobability_part(u, u->v.main, 0, b->rows, 0, b->keys);
    for (int64_t r = 0; u->v.diag.data != NULL && r < b->rows; r += u->v.block) {
        int64_t key = b->first + r;
        int64_t rows = b->rows - r < u->v.block ? b->rows - r : u->v.block;
        int64_t keys = b->keys - key < u->v.block ? b->keys - key : u->v.block;
        dprobability_part(u, u->v.diag, r, rows, key, keys);
    }
}

/* The anchor that the forward had, from the same scores. */
static float forward_anchor(const struct bwd_unit *u, const float *t, int64_t visible)
{
    float max = -INFINITY;
    float magnitude;
    if (u->a->recipe->anchor == ANCHOR_SAMPLED) {
        for (int64_t s = 0; s < anchor_samples(u->T); s++) {
            int64_t key = anchor_sample(s, u->T);
            max = key < visible && t[key] > max ? t[key] : max;
        }
    } else if (u->a->recipe->anchor == ANCHOR_ROW && u->a->recipe->pv == PV_MXFP4) {
        score_range(t, visible, &max, &magnitude);
    } else {
        return 0; /* no other format looks at it */
    }
    return anchor_of(u->a->recipe, max);
}

static void rebuild_codes(const struct bwd_unit *u, const struct row_block *b, int64_t r, int64_t visible)
{
    const struct attention_cpu_probe *probe = u->options->probe;
    int64_t at = (u->batch * u->a->shape.heads + b->head) * u->T + b->first + r;
    int64_t block = attention_p_block(u->a->recipe->pv);
    float *t = u->lane.p + r * u->W;
    struct p_row p = {
        .t = t,
        .visible = visible,
        .n = b->keys,
        .reference = u->lane.reference[r],
        .anchor = forward_anchor(u, t, visible),
        .rebuilt = true,
        .codes = probe != NULL && probe->codes != NULL ? probe->codes + at * u->T : NULL,
        .exponents =
            probe != NULL && probe->exponents != NULL ? probe->exponents + at * ((u->T + block - 1) / block) : NULL,
    };
    p_row_publish(u->a->recipe, &p);
}

/* 2^fl32(t - lse), t a row of scores; y may be t. */
static void exact_row(const float *t, int64_t n, float lse, float *y)
{
    for (int64_t j = 0; j < n; j++) {
        y[j] = t[j] - lse;
    }
    exp2_row(y, n, 0.0f, y);
}

/* P of one row, for dS and for dV, from its scores. */
static void probability_row(const struct bwd_unit *u, const struct row_block *b, int64_t r)
{
    const struct attention_recipe *recipe = u->a->recipe;
    int64_t visible = visible_keys(u, b->first + r);
    visible = visible < b->keys ? visible : b->keys;
    int64_t width = round_up(b->keys);
    float *p = u->lane.p + r * u->W;
    float lse = u->lane.reference[r];
    int64_t at = (u->batch * u->a->shape.heads + b->head) * u->T + b->first + r;
    if (u->a->lse_log2[at] == -INFINITY) {
        memset(p, 0, (size_t)width * sizeof *p);
        if (ds_takes_exact(recipe)) {
            memset(u->lane.p_ds + r * u->W, 0, (size_t)width * sizeof *p);
        }
        return;
    }
    for (int64_t j = visible; j < width; j++) {
        p[j] = ATTENTION_MASKED;
    }
    if (ds_takes_exact(recipe)) {
        /* In the folded scheme P carries 2^f. */
        float *exact = u->lane.p_ds + r * u->W;
        exact_row(p, width, attention_wants_exact(recipe) ? u->saved.lse_exact[at] : u->a->lse_log2[at], exact);
        for (int64_t j = 0; u->lane.fold[r] != 1.0f && j < width; j++) {
            exact[j] /= u->lane.fold[r];
        }
    }
    if (recipe->bwd_p == BWD_P_CODES) {
        rebuild_codes(u, b, r, visible);
        return;
    }
    exact_row(p, width, lse, p);
    for (int64_t j = 0; j < width; j++) {
        p[j] = recipe->bwd_p == BWD_P_FP8 ? e4m3_round(256.0f * p[j]) * 0x1p-8f : bf16_to_float(bf16_from_float(p[j]));
    }
}

/* ---- the statistic r
 * ------------------------------------------------------------------------------------------------------ */

static double dot_bf16(const bf16 *x, const bf16 *y, int64_t n)
{
    double sum = 0;
    for (int64_t d = 0; d < n; d++) {
        sum += (double)bf16_to_float(x[d]) * (double)bf16_to_float(y[d]);
    }
    return sum;
}

static float mean_dprobability(const float *p, const float *dp, int64_t n)
{
    double sum = 0;
    double weight = 0;
    for (int64_t j = 0; j < n; j++) {
        sum += (double)p[j] * (double)dp[j];
        weight += (double)p[j];
    }
    return weight > 0 ? (float)(sum / weight) : 0.0f;
}

static float row_statistic(const struct bwd_unit *u, const struct row_block *b, int64_t r, const float *p,
                           const float *dp)
{
    struct rows out = head_rows(&u->a->out, u->batch, b->head);
    struct rows dout = head_rows(&u->a->dout, u->batch, b->head);
    int64_t row = b->first + r;
    int64_t at = (u->batch * u->a->shape.heads + b->head) * u->T + row;
    const bf16 *decoded = u->lane.dout + r * u->D;
    switch (u->a->recipe->bwd_stat) {
    case BWD_STAT_SAVED_RAW:
        return (float)dot_bf16(out.data + row * out.stride, dout.data + row * dout.stride, u->D) * u->lane.fold[r];
    case BWD_STAT_SAVED:
        return (float)dot_bf16(out.data + row * out.stride, decoded, u->D);
    case BWD_STAT_RECENTRED:
        return mean_dprobability(p, dp, b->keys);
    case BWD_STAT_EXACT:
        return (float)dot_bf16(u->saved.out_exact + at * u->D, decoded, u->D);
    }
    return 0;
}

/* ---- dS
 * ---------------------------------------------------------------------------------------------------------------- */

/* Sums of one row in 32 interleaved parts. Loops of 32 are what compilers vectorise; shorter ones they unroll first. */
enum { LANES = 32 };

struct ds_sums {
    double sum[LANES], abs[LANES], stored[LANES], stored_abs[LANES];
    int32_t count[LANES], flushed[LANES], saturated[LANES];
};

static inline float ds_store(float y, bool e4m3)
{
    return e4m3 ? e4m3_round(y) : bf16_to_float(bf16_from_float(y));
}

/* n entries, a multiple of 32: ds becomes the stored lift P (dP - r); what is lost on the way is counted. */
static inline void ds_row(const float *p, float *ds, int64_t n, float r, float factor, float lift, bool e4m3,
                          struct ds_sums *s)
{
    for (int64_t j = 0; j < n; j += LANES) {
        for (int l = 0; l < LANES; l++) {
            float x = p[j + l] * factor * (ds[j + l] - r);
            float y = lift * x;
            float z = ds_store(y, e4m3);
            ds[j + l] = z;
            s->sum[l] += (double)x;
            s->abs[l] += (double)fabsf(x);
            s->stored[l] += (double)z;
            s->stored_abs[l] += (double)fabsf(z);
            s->count[l] += y != 0.0f;
            s->flushed[l] += y != 0.0f && z == 0.0f;
            s->saturated[l] += e4m3 && fabsf(y) > 464.0f;
        }
    }
}

static double lanes_sum(const double *x)
{
    double sum = 0;
    for (int l = 0; l < LANES; l++) {
        sum += x[l];
    }
    return sum;
}

static void count_ds(const struct bwd_unit *u, const struct ds_sums *s, float r)
{
    struct attention_stats *stats = u->stats;
    double rho = lanes_sum(s->sum);
    stats->leak_abs += fabs(rho);
    stats->ds_abs += lanes_sum(s->abs);
    stats->leak_stored_abs += fabs(lanes_sum(s->stored)) / (double)u->lift;
    stats->ds_stored_abs += lanes_sum(s->stored_abs) / (double)u->lift;
    stats->leak_r += rho * (double)r;
    stats->r_r += (double)r * (double)r;
    for (int l = 0; l < LANES; l++) {
        stats->ds_count += s->count[l];
        stats->ds_flushed += s->flushed[l];
        stats->ds_saturated += s->saturated[l];
    }
}

static void ds_block(const struct bwd_unit *u, const struct row_block *b)
{
    const struct attention_recipe *recipe = u->a->recipe;
    bool exact = ds_takes_exact(recipe);
    /* Codes come times the unit of their family. */
    float factor = exact || recipe->bwd_p != BWD_P_CODES ? 1.0f : 1.0f / attention_unit(recipe);
    for (int64_t r = 0; r < b->rows; r++) {
        const float *p = (exact ? u->lane.p_ds : u->lane.p) + r * u->W;
        float *ds = u->lane.ds + r * u->W;
        int64_t width = round_up(b->keys);
        for (int64_t j = b->keys; j < width; j++) {
            ds[j] = 0;
        }
        float stat = row_statistic(u, b, r, p, ds);
        struct ds_sums sums = {0};
        if (recipe->backward == BWD_BF16) {
            ds_row(p, ds, width, stat, factor, u->lift, false, &sums);
        } else {
            ds_row(p, ds, width, stat, factor, u->lift, true, &sums);
        }
        count_ds(u, &sums, stat / u->lane.fold[r]);
    }
}

/* ---- products of the gradients
 * ------------------------------------------------------------------------------------------- */

/* dV += P^T dO', dK += dS^T Q, in partial sums of 32 query rows. */
static void accumulate(const struct bwd_unit *u, const struct row_block *b)
{
    for (int64_t r = 0; r < b->rows; r += ATTENTION_BLOCK) {
        int64_t rows = b->rows - r < ATTENTION_BLOCK ? b->rows - r : ATTENTION_BLOCK;
        struct gemm g = {.m = visible_keys(u, b->first + r + rows - 1),
                         .n = u->D,
                         .k = rows,
                         .trans_a = true,
                         .lda = u->W,
                         .b_type = DTYPE_BF16,
                         .ldc = u->D,
                         .alpha = 1.0f,
                         .beta = 1.0f};
        g.a = u->lane.p + r * u->W;
        g.b = u->lane.dout + r * u->D;
        g.ldb = u->D;
        g.c = u->lane.dv;
        gemm_cpu(&g);
        g.a = u->lane.ds + r * u->W;
        g.b = b->q_view.data + (b->first + r) * b->q_view.stride;
        g.ldb = b->q_view.stride;
        g.c = u->lane.dk;
        gemm_cpu(&g);
    }
    struct rows dq = head_rows(&u->a->dq, u->batch, b->head);
    gemm_cpu(&(struct gemm){.m = b->rows,
                            .n = u->D,
                            .k = b->keys,
                            .a = u->lane.ds,
                            .lda = u->W,
                            .b = u->k_view.data,
                            .b_type = DTYPE_BF16,
                            .ldb = u->k_view.stride,
                            .c = dq.data + b->first * dq.stride,
                            .c_type = DTYPE_BF16,
                            .ldc = dq.stride,
                            .alpha = u->a->shape.softmax_scale / u->lift});
}

static void run_block(const struct bwd_unit *u, struct row_block *b)
{
    b->keys = visible_keys(u, b->first + b->rows - 1);
    open_rows(u, b);
    scores(u, b);
    for (int64_t r = 0; r < b->rows; r++) {
        probability_row(u, b, r);
    }
    dprobability(u, b);
    ds_block(u, b);
    accumulate(u, b);
}

/* dK and dV leave with their factors, in one BF16 rounding. */
static void close_unit(const struct bwd_unit *u)
{
    const struct attention_recipe *recipe = u->a->recipe;
    struct rows dk = head_rows(&u->a->dk, u->batch, u->kv);
    struct rows dv = head_rows(&u->a->dv, u->batch, u->kv);
    float dk_factor = u->a->shape.softmax_scale / u->lift;
    float dv_factor = recipe->bwd_p == BWD_P_CODES ? 1.0f / attention_unit(recipe) : 1.0f;
    for (int64_t d = 0; d < u->D; d++) {
        double sum = 0;
        for (int64_t j = 0; recipe->dk_center && j < u->T; j++) {
            sum += (double)u->lane.dk[j * u->D + d];
        }
        float mean = (float)(sum / (double)u->T);
        for (int64_t j = 0; j < u->T; j++) {
            dk.data[j * dk.stride + d] = bf16_from_float((u->lane.dk[j * u->D + d] - mean) * dk_factor);
            dv.data[j * dv.stride + d] = bf16_from_float(u->lane.dv[j * u->D + d] * dv_factor);
        }
    }
}

static void run_unit(struct bwd_unit *u)
{
    const struct attention_bwd *a = u->a;
    int64_t group = a->shape.heads / a->shape.kv_heads;
    size_t head_bytes = (size_t)(u->T * u->D) * sizeof(float);
    u->k = score_key(u);
    u->k_view = key_view(u);
    publish_values(u);
    choose_lifts(u, u->kv * group, group);
    memset(u->lane.dk, 0, head_bytes);
    memset(u->lane.dv, 0, head_bytes);
    int64_t bad = 0;
    for (int64_t head = u->kv * group; head < (u->kv + 1) * group; head++) {
        struct row_block b = {.head = head, .q = score_query(u, head), .q_view = query_view(u, head)};
        for (b.first = 0; b.first < u->T; b.first += u->R) {
            b.rows = u->T - b.first < u->R ? u->T - b.first : u->R;
            run_block(u, &b);
        }
        bad += rows_count_non_finite(head_rows(&a->dout, u->batch, head), u->T, u->D) +
               rows_count_non_finite(head_rows(&a->dq, u->batch, head), u->T, u->D);
    }
    close_unit(u);
    bad += rows_count_non_finite(head_rows(&a->dk, u->batch, u->kv), u->T, u->D) +
           rows_count_non_finite(head_rows(&a->dv, u->batch, u->kv), u->T, u->D);
    u->stats->non_finite += (double)bad;
}

void attention_bwd_cpu_with(const struct attention_bwd *a, const struct attention_cpu_options *options)
{
    ASSERT(attention_refuses_cpu(&a->shape, a->recipe) == NULL);
    ASSERT(options->query_rows > 0 && options->query_rows % ATTENTION_BLOCK == 0);
    int64_t units = attention_units(&a->shape);
    int64_t lanes = attention_lanes(&a->shape);
    struct carve saved_carve = {.base = (unsigned char *)(uintptr_t)a->saved};
    struct attention_saved saved = attention_saved_carve(&a->shape, a->recipe, &saved_carve);
    ASSERT(saved_carve.used == 0 || a->saved != NULL);
    struct carve scratch = {.base = a->scratch};
    struct attention_stats *stats = carve_take(&scratch, (size_t)units * sizeof *stats);
    memset(stats, 0, (size_t)units * sizeof *stats);
    size_t lane_bytes = attention_bwd_lane_bytes(&a->shape, a->recipe, options);
#pragma omp parallel for schedule(dynamic)
    for (int64_t lane = 0; lane < lanes; lane++) {
        struct carve own = {.base = scratch.base + scratch.used + (size_t)lane * lane_bytes};
        struct bwd_unit u = {
            .a = a,
            .options = options,
            .lane = lane_carve(&a->shape, a->recipe, options, &own),
            .saved = saved,
            .T = a->shape.tokens,
            .D = a->shape.head_dim,
            .R = options->query_rows,
            .W = round_up(a->shape.tokens),
            .c = (float)((double)a->shape.softmax_scale * M_LOG2E),
        };
        for (int64_t unit = lane; unit < units; unit += lanes) {
            u.batch = unit / a->shape.kv_heads;
            u.kv = unit % a->shape.kv_heads;
            u.stats = &stats[unit];
            run_unit(&u);
        }
    }
    for (int64_t unit = 0; a->stats != NULL && unit < units; unit++) {
        attention_stats_add(a->stats, &stats[unit]);
    }
}
