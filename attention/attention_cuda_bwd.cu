/* attention: the backward of the variant "cuda": its scratch, and the order of its kernels. What each route means:
 * attention_cpu_bwd.c, whose functions these mirror. */
#include "attention/attention_cuda_bwd.cuh"

#include <math.h>

/* Everything but `fixed` is there only where the recipe wants it. */
struct bwd_scratch {
    struct bwd_unit_state *units;
    unsigned long long *counters; /* from units to turns: cleared together */
    uint32_t *ticket, *turns;
    size_t clear_bytes;
    struct head_facts *facts; /* of V */
    bf16 *q_view, *k_view, *v, *diag, *dout;
    float *reference, *exact, *stat; /* (B, H, T) */
    float *dq_sums, *dk_sums;
    double *row_sums, *sums;
};

static bool wants_views(const struct attention_recipe *recipe)
{
    return recipe->backward != BWD_BF16;
}

/* The BF16 original of K, centred, is not at hand where the saved operand is a quantised one. */
static bool wants_centred_key(const struct attention_recipe *recipe)
{
    return recipe->k_center && recipe->qk_grad == QK_GRAD_ORIGINAL && recipe->qk != QK_BF16;
}

static bool wants_diagonal(const struct attention_recipe *recipe)
{
    return recipe->bwd_v == BWD_V_FORWARD && recipe->v_diag == V_DIAG_FP8;
}

/* dO' is dO itself. */
static bool dout_as_it_is(const struct attention_recipe *recipe)
{
    return recipe->do_format == DO_BF16 && recipe->bwd_p != BWD_P_CODES;
}

static bool ds_takes_exact(const struct attention_recipe *recipe)
{
    return recipe->backward == BWD_BF16 || recipe->bwd_stat == BWD_STAT_EXACT;
}

static struct bwd_scratch scratch_carve(const struct attention_shape *s, const struct attention_recipe *recipe,
                                        struct carve *carve)
{
    const size_t units = (size_t)(s->batch * s->kv_heads), rows = (size_t)(s->batch * s->heads * s->tokens);
    const size_t tiles = (size_t)(s->batch * s->heads * bwd_row_tiles(s)), width = s->head_dim > 64 ? 128 : 64;
    const size_t D = (size_t)s->head_dim, q = rows * D * sizeof(bf16), k = units * (size_t)s->tokens * D * sizeof(bf16);
    struct bwd_scratch x = {};
    x.units = (struct bwd_unit_state *)carve_take(carve, units * sizeof *x.units);
    x.counters = (unsigned long long *)carve_take(carve, BWD_COUNTERS * sizeof *x.counters);
    x.ticket = (uint32_t *)carve_take(carve, sizeof *x.ticket);
    x.turns = (uint32_t *)carve_take(carve, tiles * GRADIENT_WARPS * sizeof *x.turns);
    x.clear_bytes = carve->used;
    x.facts = (struct head_facts *)carve_take(carve, units * sizeof *x.facts);
    x.q_view = (bf16 *)carve_take(carve, wants_views(recipe) ? q : 0);
    x.k_view = (bf16 *)carve_take(carve, wants_views(recipe) || wants_centred_key(recipe) ? k : 0);
    x.v = (bf16 *)carve_take(carve, recipe->bwd_v == BWD_V_E4M3 ? k : 0);
    x.diag = (bf16 *)carve_take(carve, wants_diagonal(recipe) ? k : 0);
    x.dout = (bf16 *)carve_take(carve, dout_as_it_is(recipe) ? 0 : q);
    x.reference = (float *)carve_take(carve, rows * sizeof(float));
    x.exact = (float *)carve_take(carve, ds_takes_exact(recipe) ? rows * sizeof(float) : 0);
    x.stat = (float *)carve_take(carve, rows * sizeof(float));
    x.dq_sums = (float *)carve_take(carve, tiles * GRADIENT_ROWS * width * sizeof(float));
    x.dk_sums = (float *)carve_take(carve, recipe->dk_center ? 2 * k : 0);
    x.row_sums = (double *)carve_take(carve, rows * 4 * sizeof(double));
    x.sums = (double *)carve_take(carve, tiles * BWD_SUMS * sizeof(double));
    return x;
}

size_t attention_bwd_cuda_scratch(const struct attention_shape *shape, const struct attention_recipe *recipe)
{
    struct carve carve = {};
    (void)scratch_carve(shape, recipe, &carve);
    return carve.used;
}

/* A (B, heads, T, D) array. */
static struct head_view contiguous(const struct attention_shape *s, bf16 *data, int64_t heads)
{
    return {data, heads * s->tokens * s->head_dim, s->head_dim, s->tokens * s->head_dim};
}

/* ---- operands ------------------------------------------------------------------------------------------------ */

static void prepare_views(const struct attention_bwd *a, const struct bwd_prepare *p, const struct bwd_scratch *x,
                          struct bwd_args *b)
{
    const struct attention_recipe *recipe = a->recipe;
    const bool lift = recipe->qk_grad == QK_GRAD_LIFT;
    struct head_view k = lift ? b->k : a->k;
    b->q_view = lift ? b->q : a->q;
    if (!lift && recipe->k_center) {
        k = b->k; /* qk = bf16: the operand is the centred K */
        if (wants_centred_key(recipe)) {
            const struct head_tensor original = {a->k, a->shape.batch, a->shape.tokens, a->shape.kv_heads,
                                                 a->shape.head_dim};
            attention_centre_cuda(a->cuda, &original, x->k_view);
            k = contiguous(&a->shape, x->k_view, a->shape.kv_heads);
        }
    }
    b->k_view = k;
    if (wants_views(recipe)) {
        bwd_view_query(a->cuda, p, &b->q_view, x->q_view);
        bwd_view_key(a->cuda, p, &k, x->k_view);
        b->q_view = contiguous(&a->shape, x->q_view, a->shape.heads);
        b->k_view = contiguous(&a->shape, x->k_view, a->shape.kv_heads);
    }
}

/* V of dP. Returns its unit. */
static float prepare_values(const struct attention_bwd *a, const struct bwd_scratch *x,
                            const struct attention_saved *saved, struct bwd_args *b)
{
    const struct attention_recipe *recipe = a->recipe;
    const struct head_tensor v = {a->v, a->shape.batch, a->shape.tokens, a->shape.kv_heads, a->shape.head_dim};
    float unit = 1.0f;
    b->v = a->v;
    b->v_block = attention_p_block(recipe->pv);
    if (recipe->bwd_v == BWD_V_E4M3 || wants_diagonal(recipe)) {
        attention_measure_cuda(a->cuda, &v, x->facts);
    }
    if (recipe->bwd_v == BWD_V_E4M3) {
        attention_value_e4m3_cuda(a->cuda, &v, x->facts, 1.0f, x->v);
        b->v = contiguous(&a->shape, x->v, a->shape.kv_heads);
    } else if (recipe->bwd_v == BWD_V_FORWARD && recipe->pv != PV_BF16) {
        b->v = contiguous(&a->shape, saved->v, a->shape.kv_heads);
        unit = attention_unit(recipe);
    }
    if (wants_diagonal(recipe)) {
        attention_value_e4m3_cuda(a->cuda, &v, x->facts, unit, x->diag);
        b->v_diag = contiguous(&a->shape, x->diag, a->shape.kv_heads);
    }
    return unit;
}

static void prepare_rows(const struct attention_bwd *a, const struct bwd_scratch *x,
                         const struct attention_saved *saved, struct bwd_args *b)
{
    const struct attention_recipe *recipe = a->recipe;
    struct bwd_rows_args r = {};
    r.tokens = b->tokens;
    r.heads = b->heads;
    r.kv_heads = b->kv_heads;
    r.head_dim = b->head_dim;
    r.dout = a->dout;
    if (recipe->bwd_stat == BWD_STAT_EXACT) {
        r.o = contiguous(&a->shape, saved->out_exact, a->shape.heads);
    } else if (recipe->bwd_stat != BWD_STAT_RECENTRED) {
        r.o = a->out;
    }
    r.codes = b->p_codes;
    r.stat_raw = recipe->bwd_stat == BWD_STAT_SAVED_RAW;
    r.do_format = recipe->do_format;
    r.lse = a->lse_log2;
    r.lse_exact = saved->lse_exact;
    r.units = x->units;
    r.decoded = x->dout;
    r.reference = x->reference;
    r.exact = x->exact;
    r.stat = x->stat;
    r.counters = b->counters;
    b->dout = contiguous(&a->shape, x->dout, a->shape.heads);
    if (dout_as_it_is(recipe)) {
        r.decoded = NULL;
        b->dout = a->dout;
    }
    if (!ds_takes_exact(recipe)) {
        r.exact = NULL;
    }
    bwd_rows(a->cuda, &r, a->shape.batch);
}

/* ---- the call ------------------------------------------------------------------------------------------------ */

static struct bwd_args open_args(const struct attention_bwd *a, const struct bwd_scratch *x,
                                 const struct attention_saved_cuda *saved)
{
    const struct attention_shape *s = &a->shape;
    const struct attention_recipe *recipe = a->recipe;
    struct bwd_args b = {};
    b.tokens = (int)s->tokens;
    b.heads = (int)s->heads;
    b.kv_heads = (int)s->kv_heads;
    b.head_dim = (int)s->head_dim;
    b.causal = s->causal;
    b.p_codes = recipe->bwd_p == BWD_P_CODES;
    b.p_fp8 = recipe->bwd_p == BWD_P_FP8;
    b.ds_exact = ds_takes_exact(recipe);
    b.ds_e4m3 = recipe->backward != BWD_BF16;
    b.c = (float)((double)s->softmax_scale * M_LOG2E);
    b.softmax_scale = s->softmax_scale;
    b.debug_leak = recipe->debug_leak;
    const float unit = b.p_codes ? attention_unit(recipe) : 1.0f;
    b.p_factor = b.ds_exact ? 1.0f : 1.0f / unit;
    b.dv_factor = 1.0f / unit;
    b.rule = p_rule_of(recipe, true);
    b.q = saved->operands.q != NULL ? contiguous(s, saved->operands.q, s->heads) : a->q;
    b.k = saved->operands.k != NULL ? contiguous(s, saved->operands.k, s->kv_heads) : a->k;
    b.dq = a->dq;
    b.dk = a->dk;
    b.dv = a->dv;
    b.dk_sums = recipe->dk_center ? x->dk_sums : NULL;
    b.reference = x->reference;
    b.exact = b.ds_exact ? x->exact : NULL;
    b.anchor = saved->anchor;
    b.lse = a->lse_log2;
    b.stat = x->stat;
    b.units = x->units;
    b.counters = a->stats != NULL ? x->counters : NULL;
    b.dq_sums = x->dq_sums;
    b.turns = x->turns;
    b.ticket = x->ticket;
    b.row_sums = x->row_sums;
    b.sums = x->sums;
    return b;
}

void attention_bwd_cuda(const struct attention_bwd *a)
{
    struct carve saved_carve = {(unsigned char *)(uintptr_t)a->saved, 0};
    struct carve carve = {(unsigned char *)a->scratch, 0};
    const struct attention_saved_cuda saved = attention_saved_cuda_carve(&a->shape, a->recipe, &saved_carve);
    const struct bwd_scratch x = scratch_carve(&a->shape, a->recipe, &carve);
    const struct bwd_prepare p = {&a->shape, a->recipe, x.units};
    ASSERT(saved_carve.used == 0 || a->saved != NULL);
    if (a->shape.batch == 0) {
        return;
    }
    cuda_zero(a->cuda, x.units, x.clear_bytes);
    struct bwd_args b = open_args(a, &x, &saved);
    prepare_views(a, &p, &x, &b);
    const float v_unit = prepare_values(a, &x, &saved.operands, &b);
    b.v_factor = 1.0f / v_unit;
    bwd_choose_lifts(a->cuda, &p, &a->dout, &b.v, v_unit);
    prepare_rows(a, &x, &saved.operands, &b);
    if (a->recipe->bwd_stat == BWD_STAT_RECENTRED) {
        bwd_launch_stat(a->cuda, &b, a->shape.batch, false);
    }
    if (a->recipe->debug_leak != 0) {
        bwd_launch_stat(a->cuda, &b, a->shape.batch, true);
    }
    bwd_launch_gradients(a->cuda, &b, a->shape.batch);
    bwd_finish_dq(a->cuda, &b, a->shape.batch);
    if (b.dk_sums != NULL) {
        bwd_finish_dk(a->cuda, &b, a->shape.batch);
    }
    if (a->stats != NULL) {
        bwd_finish_stats(a->cuda, &b, a->shape.batch * a->shape.heads * bwd_row_tiles(&a->shape), a->stats);
    }
}
