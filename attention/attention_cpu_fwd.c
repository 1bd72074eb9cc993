/* attention: the forward of the CPU reference (docs/numerics.md, section 5). */
#include "attention/attention_cpu.h"
#include "core/gemm.h"

#include <math.h>
#include <string.h>

/* Scratch of one lane. R = rows of a block, W = keys of a tile; tiles are (R, W), FP32. */
struct fwd_lane {
    bf16 *q, *k, *v;                        /* published operands where the caller keeps none */
    bf16 *diag, *v8;                        /* V in E4M3: for diagonal blocks; for O' */
    bf16 *samples;                          /* the keys that anchor = sampled looks at */
    float *staging;                         /* T x D */
    float *score;                           /* t, then P */
    float *exact;                           /* 2^(t - a), unrounded */
    float *sampled;                         /* R x ATTENTION_SAMPLES */
    float *o, *o_exact;                     /* R x D */
    float *anchor, *sum, *sum_exact, *lost; /* R */
};

/* One unit of work and what is fixed for it. */
struct fwd_unit {
    const struct attention_fwd *a;
    const struct attention_cpu_options *options;
    struct fwd_lane lane;
    struct attention_saved saved;
    struct attention_stats *stats;
    int64_t batch, kv, T, D, R, W;
    bool wants_exact; /* for LSE2', O' or the lost mass */
    float c;          /* base-2 score of q.k */
    struct rows k, samples;
    struct value_operand v, v_exact;
};

static int64_t tile_keys(const struct attention_shape *shape, const struct attention_cpu_options *options)
{
    int64_t T = attention_whole_blocks(shape->tokens);
    return options->key_tile > 0 && options->key_tile < T ? options->key_tile : T;
}

static struct fwd_lane lane_carve(const struct attention_shape *shape, const struct attention_recipe *recipe,
                                  const struct attention_cpu_options *options, struct carve *carve)
{
    size_t head = (size_t)(shape->tokens * shape->head_dim);
    size_t R = (size_t)options->query_rows;
    size_t D = (size_t)shape->head_dim;
    size_t tile = R * (size_t)tile_keys(shape, options);
    return (struct fwd_lane){
        .q = carve_take(carve, head * sizeof(bf16)),
        .k = carve_take(carve, head * sizeof(bf16)),
        .v = carve_take(carve, head * sizeof(bf16)),
        .diag = carve_take(carve, recipe->v_diag == V_DIAG_FP8 ? head * sizeof(bf16) : 0),
        .v8 = carve_take(carve, recipe->bwd_stat == BWD_STAT_EXACT ? head * sizeof(bf16) : 0),
        .samples = carve_take(carve, ATTENTION_SAMPLES * D * sizeof(bf16)),
        .staging = carve_take(carve, head * sizeof(float)),
        .score = carve_take(carve, tile * sizeof(float)),
        .exact = carve_take(carve, tile * sizeof(float)),
        .sampled = carve_take(carve, R * ATTENTION_SAMPLES * sizeof(float)),
        .o = carve_take(carve, R * D * sizeof(float)),
        .o_exact = carve_take(carve, R * D * sizeof(float)),
        .anchor = carve_take(carve, R * sizeof(float)),
        .sum = carve_take(carve, R * sizeof(float)),
        .sum_exact = carve_take(carve, R * sizeof(float)),
        .lost = carve_take(carve, R * sizeof(float)),
    };
}

size_t attention_fwd_lane_bytes(const struct attention_shape *shape, const struct attention_recipe *recipe,
                                const struct attention_cpu_options *options)
{
    struct carve carve = {0};
    (void)lane_carve(shape, recipe, options, &carve);
    return carve.used;
}

/* ---- operands --------------------------------------------------------------------------------------------- */

/* The part of a saved tensor (B, heads, T, D) that belongs to one head, or the lane's own memory. */
static bf16 *head_of(bf16 *saved, bf16 *own, int64_t head, const struct fwd_unit *u)
{
    return saved != NULL ? saved + head * u->T * u->D : own;
}

static struct rows publish_key(const struct fwd_unit *u)
{
    const struct attention_recipe *recipe = u->a->recipe;
    struct rows k = head_rows(&u->a->k, u->batch, u->kv);
    bf16 *y = head_of(u->saved.k, u->lane.k, u->batch * u->a->shape.kv_heads + u->kv, u);
    if (recipe->k_center) {
        publish_centred(k, u->T, u->D, u->lane.staging, y);
        k = (struct rows){y, u->D};
    }
    if (recipe->qk != QK_BF16) {
        publish_scores(recipe, k, u->T, u->D, u->lane.staging, y);
        k = (struct rows){y, u->D};
    }
    return k;
}

static struct rows publish_query(const struct fwd_unit *u, int64_t head)
{
    struct rows q = head_rows(&u->a->q, u->batch, head);
    if (u->a->recipe->qk == QK_BF16) {
        return q;
    }
    bf16 *y = head_of(u->saved.q, u->lane.q, u->batch * u->a->shape.heads + head, u);
    publish_scores(u->a->recipe, q, u->T, u->D, u->lane.staging, y);
    return (struct rows){y, u->D};
}

static struct rows gather_samples(const struct fwd_unit *u)
{
    for (int64_t s = 0; s < anchor_samples(u->T); s++) {
        const bf16 *key = u->k.data + anchor_sample(s, u->T) * u->k.stride;
        memcpy(u->lane.samples + s * u->D, key, (size_t)u->D * sizeof(bf16));
    }
    return (struct rows){u->lane.samples, u->D};
}

static void publish_values(struct fwd_unit *u)
{
    const struct attention_recipe *recipe = u->a->recipe;
    struct rows v = head_rows(&u->a->v, u->batch, u->kv);
    u->v = (struct value_operand){.main = v, .block = attention_p_block(recipe->pv)};
    if (recipe->pv != PV_BF16) {
        bf16 *y = head_of(u->saved.v, u->lane.v, u->batch * u->a->shape.kv_heads + u->kv, u);
        publish_value(recipe, v, u->T, u->D, u->lane.staging, y);
        u->v.main = (struct rows){y, u->D};
    }
    if (recipe->v_diag == V_DIAG_FP8) {
        publish_value_e4m3(v, u->T, u->D, attention_unit(recipe), u->lane.diag);
        u->v.diag = (struct rows){u->lane.diag, u->D};
    }
    u->v_exact = u->v; /* bwd_v = forward */
    if (recipe->bwd_stat == BWD_STAT_EXACT && recipe->bwd_v == BWD_V_E4M3) {
        publish_value_e4m3(v, u->T, u->D, 1.0f, u->lane.v8);
        u->v_exact = (struct value_operand){.main = {u->lane.v8, u->D}};
    } else if (recipe->bwd_v == BWD_V_BF16) {
        u->v_exact = (struct value_operand){.main = v};
    }
}

/* ---- P V: acc (rows, D) += P (rows, keys) V, in partial sums of 32 keys ----------------------------------- */

struct pv_tile {
    const float *p;
    float *acc;
    int64_t first_row, rows; /* absolute */
    int64_t first_key, keys;
    int64_t stride; /* of p */
};

static void multiply(const struct fwd_unit *u, const struct pv_tile *t, struct rows v, int64_t row0, int64_t row1,
                     int64_t key, int64_t keys)
{
    row0 = row0 > t->first_row ? row0 : t->first_row;
    row1 = row1 < t->first_row + t->rows ? row1 : t->first_row + t->rows;
    if (row0 >= row1 || keys <= 0) {
        return;
    }
    gemm_cpu(&(struct gemm){.m = row1 - row0,
                            .n = u->D,
                            .k = keys,
                            .a = t->p + (row0 - t->first_row) * t->stride + (key - t->first_key),
                            .lda = t->stride,
                            .b = v.data + key * v.stride,
                            .b_type = DTYPE_BF16,
                            .ldb = v.stride,
                            .c = t->acc + (row0 - t->first_row) * u->D,
                            .ldc = u->D,
                            .alpha = 1.0f,
                            .beta = 1.0f});
}

/* Rows of the same 32 positions as the keys: their own block of V is the E4M3 one. Partial sums are per block here. */
static void multiply_diagonal(const struct fwd_unit *u, const struct pv_tile *t, const struct value_operand *v,
                              int64_t key0, int64_t end)
{
    for (int64_t row = key0; row < key0 + ATTENTION_BLOCK; row += v->block) {
        for (int64_t key = key0; key < end; key += v->block) {
            int64_t keys = end - key < v->block ? end - key : v->block;
            multiply(u, t, row == key ? v->diag : v->main, row, row + v->block, key, keys);
        }
    }
}

static void accumulate(const struct fwd_unit *u, const struct pv_tile *t, const struct value_operand *v)
{
    bool causal = u->a->shape.causal;
    for (int64_t key = t->first_key; key < t->first_key + t->keys; key += ATTENTION_BLOCK) {
        int64_t end = t->first_key + t->keys;
        end = key + ATTENTION_BLOCK < end ? key + ATTENTION_BLOCK : end;
        if (v->diag.data == NULL) {
            multiply(u, t, v->main, causal ? key : 0, u->T, key, end - key);
            continue;
        }
        multiply(u, t, v->main, causal ? key : 0, key, key, end - key); /* earlier rows: none if causal */
        multiply_diagonal(u, t, v, key, end);
        multiply(u, t, v->main, key + ATTENTION_BLOCK, u->T, key, end - key);
    }
}

/* ---- one block of query rows ------------------------------------------------------------------------------ */

struct row_block {
    int64_t head, first, rows;
    struct rows q;
};

static void scores(const struct fwd_unit *u, const struct row_block *b, struct rows k, int64_t first_key, int64_t keys,
                   float *t, int64_t stride)
{
    gemm_cpu(&(struct gemm){.m = b->rows,
                            .n = keys,
                            .k = u->D,
                            .a = b->q.data + b->first * b->q.stride,
                            .a_type = DTYPE_BF16,
                            .lda = b->q.stride,
                            .b = k.data + first_key * k.stride,
                            .b_type = DTYPE_BF16,
                            .ldb = k.stride,
                            .trans_b = true,
                            .c = t,
                            .ldc = stride,
                            .alpha = u->c});
}

static int64_t visible_keys(const struct fwd_unit *u, int64_t row)
{
    return u->a->shape.causal ? row + 1 : u->T;
}

/* Anchors before the first tile: none yet, or the final ones of `zero` and `sampled`. */
static void open_rows(const struct fwd_unit *u, const struct row_block *b)
{
    const struct attention_recipe *recipe = u->a->recipe;
    int64_t samples = anchor_samples(u->T);
    if (recipe->anchor == ANCHOR_SAMPLED) {
        scores(u, b, u->samples, 0, samples, u->lane.sampled, ATTENTION_SAMPLES);
    }
    for (int64_t r = 0; r < b->rows; r++) {
        float max = -INFINITY;
        for (int64_t s = 0; recipe->anchor == ANCHOR_SAMPLED && s < samples; s++) {
            float t = u->lane.sampled[r * ATTENTION_SAMPLES + s];
            max = anchor_sample(s, u->T) < visible_keys(u, b->first + r) && !(t <= max) ? t : max;
        }
        u->lane.anchor[r] = recipe->anchor == ANCHOR_ROW ? -INFINITY : anchor_of(recipe, max);
        u->lane.sum[r] = 0;
        u->lane.sum_exact[r] = 0;
        u->lane.lost[r] = 0;
    }
    memset(u->lane.o, 0, (size_t)(b->rows * u->D) * sizeof(float));
    memset(u->lane.o_exact, 0, (size_t)(b->rows * u->D) * sizeof(float));
}

/* The online step: a larger maximum moves the anchor by an integer, which rescales sums and outputs exactly. */
static void move_anchor(const struct fwd_unit *u, int64_t r, float max)
{
    struct fwd_lane lane = u->lane;
    if (u->a->recipe->anchor != ANCHOR_ROW || anchor_of(u->a->recipe, max) <= lane.anchor[r]) {
        return;
    }
    float before = lane.anchor[r];
    lane.anchor[r] = anchor_of(u->a->recipe, max);
    if (before == -INFINITY) {
        return;
    }
    float factor = exp2f(before - lane.anchor[r]);
    lane.sum[r] *= factor;
    lane.sum_exact[r] *= factor;
    lane.lost[r] *= factor;
    for (int64_t d = 0; d < u->D; d++) {
        lane.o[r * u->D + d] *= factor;
        lane.o_exact[r * u->D + d] *= factor;
    }
}

static void fill(float *x, int64_t n, float value)
{
    for (int64_t j = 0; j < n; j++) {
        x[j] = value;
    }
}

/* Scores of one row against one tile become P. */
static void publish_row(const struct fwd_unit *u, const struct row_block *b, int64_t r, int64_t first_key, int64_t keys)
{
    const struct attention_cpu_probe *probe = u->options->probe;
    int64_t row = b->first + r;
    int64_t width = attention_whole_blocks(keys);
    float *t = u->lane.score + r * u->W;
    float *exact = u->lane.exact + r * u->W;
    int64_t visible = visible_keys(u, row) - first_key;
    visible = visible < keys ? visible : keys;
    if (visible <= 0) {
        fill(t, width, 0);
        fill(exact, width, 0);
        return;
    }
    float max;
    float magnitude;
    score_range(t, visible, &max, &magnitude);
    double logit = (double)magnitude * M_LN2;
    if (logit > u->stats->logit_max || isnan(logit)) {
        u->stats->logit_max = logit;
    }
    move_anchor(u, r, max);
    if (!(fabsf(max) < INFINITY) || !(fabsf(u->lane.anchor[r]) < INFINITY)) {
        u->lane.anchor[r] = NAN; /* nothing sound can come of this row: let it be seen */
        fill(t, width, NAN);
        fill(exact, width, NAN);
        u->lane.sum[r] = NAN;
        return;
    }
    fill(t + visible, width - visible, ATTENTION_MASKED);
    int64_t at = (u->batch * u->a->shape.heads + b->head) * u->T + row;
    int64_t block = attention_p_block(u->a->recipe->pv);
    struct p_row p = {
        .t = t,
        .first_key = first_key,
        .visible = visible,
        .n = keys,
        .reference = u->lane.anchor[r],
        .anchor = u->lane.anchor[r],
        .exact = u->wants_exact ? exact : NULL,
        .sum = u->lane.sum[r],
        .sum_exact = u->lane.sum_exact[r],
        .lost = u->lane.lost[r],
        .codes = probe != NULL && probe->codes != NULL ? probe->codes + at * u->T + first_key : NULL,
        .exponents = probe != NULL && probe->exponents != NULL
                         ? probe->exponents + at * ((u->T + block - 1) / block) + first_key / block
                         : NULL,
    };
    p_row_publish(u->a->recipe, &p);
    u->lane.sum[r] = p.sum;
    u->lane.sum_exact[r] = p.sum_exact;
    u->lane.lost[r] = p.lost;
}

static void close_rows(const struct fwd_unit *u, const struct row_block *b)
{
    struct fwd_lane lane = u->lane;
    const struct attention_recipe *recipe = u->a->recipe;
    struct rows out = head_rows(&u->a->out, u->batch, b->head);
    float unit = attention_unit(recipe);
    float unit_exact = recipe->bwd_v == BWD_V_FORWARD ? unit : 1.0f;
    int64_t at = (u->batch * u->a->shape.heads + b->head) * u->T + b->first;
    for (int64_t r = 0; r < b->rows; r++) {
        float sum = lane.sum[r];
        /* P and L both carry the unit, V once more. */
        float divisor = sum * unit;
        for (int64_t d = 0; d < u->D; d++) {
            float o = sum == 0 ? 0.0f : lane.o[r * u->D + d] / divisor;
            out.data[(b->first + r) * out.stride + d] = bf16_from_float(o);
        }
        u->a->lse_log2[at + r] = sum == 0 ? -INFINITY : lane.anchor[r] + log2f(sum / unit);
        if (u->saved.lse_exact != NULL) {
            u->saved.lse_exact[at + r] = lane.anchor[r] + log2f(lane.sum_exact[r]);
        }
        for (int64_t d = 0; u->saved.out_exact != NULL && d < u->D; d++) {
            float o = lane.o_exact[r * u->D + d] / (lane.sum_exact[r] * unit_exact);
            u->saved.out_exact[(at + r) * u->D + d] = bf16_from_float(o);
        }
        u->stats->p_rows += 1;
        u->stats->p_lost_mass += recipe->pv == PV_BF16 ? 0.0 : (double)(lane.lost[r] / lane.sum_exact[r]);
    }
}

static void run_block(const struct fwd_unit *u, const struct row_block *b)
{
    int64_t keys = visible_keys(u, b->first + b->rows - 1);
    open_rows(u, b);
    for (int64_t key = 0; key < keys; key += u->W) {
        int64_t n = keys - key < u->W ? keys - key : u->W;
        scores(u, b, u->k, key, n, u->lane.score, u->W);
        for (int64_t r = 0; r < b->rows; r++) {
            publish_row(u, b, r, key, n);
        }
        struct pv_tile tile = {u->lane.score, u->lane.o, b->first, b->rows, key, n, u->W};
        accumulate(u, &tile, &u->v);
        if (u->saved.out_exact != NULL) {
            tile.p = u->lane.exact;
            tile.acc = u->lane.o_exact;
            accumulate(u, &tile, &u->v_exact);
        }
    }
    close_rows(u, b);
}

static void run_unit(struct fwd_unit *u)
{
    const struct attention_fwd *a = u->a;
    int64_t group = a->shape.heads / a->shape.kv_heads;
    u->k = publish_key(u);
    u->samples = a->recipe->anchor == ANCHOR_SAMPLED ? gather_samples(u) : (struct rows){0};
    publish_values(u);
    int64_t bad = rows_count_non_finite(head_rows(&a->k, u->batch, u->kv), u->T, u->D) +
                  rows_count_non_finite(head_rows(&a->v, u->batch, u->kv), u->T, u->D);
    for (int64_t head = u->kv * group; head < (u->kv + 1) * group; head++) {
        struct row_block b = {.head = head, .q = publish_query(u, head)};
        for (b.first = 0; b.first < u->T; b.first += u->R) {
            b.rows = u->T - b.first < u->R ? u->T - b.first : u->R;
            run_block(u, &b);
        }
        bad += rows_count_non_finite(head_rows(&a->q, u->batch, head), u->T, u->D) +
               rows_count_non_finite(head_rows(&a->out, u->batch, head), u->T, u->D);
    }
    u->stats->non_finite += (double)bad;
}

void attention_fwd_cpu_with(const struct attention_fwd *a, const struct attention_cpu_options *options)
{
    ASSERT(attention_refuses_cpu(&a->shape, a->recipe) == NULL);
    ASSERT(options->query_rows > 0 && options->query_rows % ATTENTION_BLOCK == 0);
    ASSERT(options->key_tile >= 0 && options->key_tile % ATTENTION_BLOCK == 0);
    int64_t units = attention_units(&a->shape);
    int64_t lanes = attention_lanes(&a->shape);
    struct attention_saved saved = {0};
    if (a->saved != NULL) {
        saved = attention_saved_carve(&a->shape, a->recipe, &(struct carve){.base = a->saved});
    }
    struct carve scratch = {.base = a->scratch};
    struct attention_stats *stats = carve_take(&scratch, (size_t)units * sizeof *stats);
    memset(stats, 0, (size_t)units * sizeof *stats);
    size_t lane_bytes = attention_fwd_lane_bytes(&a->shape, a->recipe, options);
#pragma omp parallel for schedule(dynamic)
    for (int64_t lane = 0; lane < lanes; lane++) {
        struct carve own = {.base = scratch.base + scratch.used + (size_t)lane * lane_bytes};
        struct fwd_unit u = {
            .a = a,
            .options = options,
            .lane = lane_carve(&a->shape, a->recipe, options, &own),
            .saved = saved,
            .T = a->shape.tokens,
            .D = a->shape.head_dim,
            .R = options->query_rows,
            .W = tile_keys(&a->shape, options),
            .wants_exact = saved.lse_exact != NULL || a->recipe->pv != PV_BF16,
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
