/* attention: the backward of the CPU reference (docs/numerics.md, sections 7 and 8): operands, products, and their
 * order. */
#include "attention/attention_cpu_bwd.h"
#include "core/gemm.h"
#include "numerics/blocks.h"
#include "numerics/formats.h"

#include <math.h>
#include <string.h>

static struct bwd_lane lane_carve(const struct attention_shape *shape, const struct attention_recipe *recipe,
                                  const struct attention_cpu_options *options, struct carve *carve)
{
    size_t head = (size_t)(shape->tokens * shape->head_dim);
    size_t R = (size_t)options->query_rows;
    size_t tile = R * (size_t)attention_whole_blocks(shape->tokens);
    return (struct bwd_lane){
        .q = carve_take(carve, head * sizeof(bf16)),
        .k = carve_take(carve, head * sizeof(bf16)),
        .v = carve_take(carve, recipe->bwd_v == BWD_V_E4M3 ? head * sizeof(bf16) : 0),
        .diag = carve_take(carve, recipe->v_diag == V_DIAG_FP8 ? head * sizeof(bf16) : 0),
        .dout = carve_take(carve, R * (size_t)shape->head_dim * sizeof(bf16)),
        .staging = carve_take(carve, head * sizeof(float)),
        .p = carve_take(carve, tile * sizeof(float)),
        .p_ds = carve_take(carve, bwd_ds_takes_exact(recipe) ? tile * sizeof(float) : 0),
        .ds = carve_take(carve, tile * sizeof(float)),
        .dk = carve_take(carve, head * sizeof(float)),
        .dv = carve_take(carve, head * sizeof(float)),
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

/* ---- operands --------------------------------------------------------------------------------------------- */

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

/* The multiplier of a gradient view whose source has this amax. */
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
    if (recipe->do_scale == DO_SCALE_FIXED) {
        u->do_lift = 4.0f;
    } else if (recipe->do_format == DO_BF16) {
        u->do_lift = 1.0f;
    } else {
        u->do_lift = pow2_scale(do_max, recipe->do_format == DO_E5M2 ? E5M2_MAX : E4M3_MAX);
    }
    float bound = 2.0f * do_norm * (rows_norm_max(u->v.main, u->T, u->D) / u->v_unit);
    if (recipe->backward == BWD_BF16 || !(bound > 0)) {
        u->lift = 1.0f;
    } else {
        u->lift = 16.0f * fminf(pow2_scale(bound, E4M3_MAX), 0x1p100f);
    }
    if (recipe->ds_scale == DS_SCALE_FIXED) {
        u->lift = 256.0f * u->a->shape.softmax_scale; /* the published kernel folds the softmax scale into dS */
    }
}

/* ---- products of a block: scores and dP ------------------------------------------------------------------- */

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

/* ---- products of the gradients ---------------------------------------------------------------------------- */

/* dV += P^T dO', dK += dS^T Q, in partial sums of 32 query rows. */
static void accumulate(const struct bwd_unit *u, const struct row_block *b)
{
    for (int64_t r = 0; r < b->rows; r += ATTENTION_BLOCK) {
        int64_t rows = b->rows - r < ATTENTION_BLOCK ? b->rows - r : ATTENTION_BLOCK;
        struct gemm g = {.m = bwd_visible_keys(u, b->first + r + rows - 1),
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
    b->keys = bwd_visible_keys(u, b->first + b->rows - 1);
    bwd_open_rows(u, b);
    scores(u, b);
    bwd_probabilities(u, b);
    dprobability(u, b);
    bwd_ds(u, b);
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
            .W = attention_whole_blocks(a->shape.tokens),
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
