/* attention: the forward of the variant "cuda": scratch, operands, launches. */
#include "attention/attention_cuda_fwd.cuh"

#include <math.h>

/* Scratch. q, k, v: operands where the caller keeps none. */
struct fwd_scratch {
    bf16 *q, *k, *v, *diag, *v_exact;
    struct head_facts *q_facts, *k_facts, *centred_facts, *v_facts, *sink_facts, *decoded;
    struct attention_stats *parts;
};

static int64_t row_blocks_of(const struct attention_shape *shape)
{
    return (shape->tokens + ROWS - 1) / ROWS;
}

static struct fwd_scratch scratch_carve(const struct attention_shape *shape, const struct attention_recipe *recipe,
                                        struct carve *carve)
{
    const size_t heads = (size_t)(shape->batch * shape->heads), kv_heads = (size_t)(shape->batch * shape->kv_heads);
    const size_t head = (size_t)(shape->tokens * shape->head_dim) * sizeof(bf16), fact = sizeof(struct head_facts);
    struct fwd_scratch s;
    s.q = (bf16 *)carve_take(carve, recipe->qk != QK_BF16 ? heads * head : 0);
    s.k = (bf16 *)carve_take(carve, recipe->qk != QK_BF16 || recipe->k_center ? kv_heads * head : 0);
    s.v = (bf16 *)carve_take(carve, recipe->pv != PV_BF16 ? kv_heads * head : 0);
    s.diag = (bf16 *)carve_take(carve, recipe->v_diag == V_DIAG_FP8 ? kv_heads * head : 0);
    s.v_exact = (bf16 *)carve_take(carve, recipe->bwd_stat == BWD_STAT_EXACT ? kv_heads * head : 0);
    s.q_facts = (struct head_facts *)carve_take(carve, heads * fact);
    s.k_facts = (struct head_facts *)carve_take(carve, kv_heads * fact);
    s.centred_facts = (struct head_facts *)carve_take(carve, kv_heads * fact);
    s.v_facts = (struct head_facts *)carve_take(carve, kv_heads * fact);
    s.sink_facts = (struct head_facts *)carve_take(carve, kv_heads * fact);
    s.decoded = (struct head_facts *)carve_take(carve, heads * fact);
    s.parts = (struct attention_stats *)carve_take(carve, heads * (size_t)row_blocks_of(shape) * sizeof *s.parts);
    return s;
}

size_t attention_fwd_cuda_scratch(const struct attention_shape *shape, const struct attention_recipe *recipe)
{
    struct carve carve = {NULL, 0};
    (void)scratch_carve(shape, recipe, &carve);
    return carve.used;
}

static struct head_tensor tensor_of(const struct attention_shape *shape, struct head_view view, int64_t heads)
{
    ASSERT((uintptr_t)view.data % 16 == 0 && view.batch_stride % 8 == 0 && view.token_stride % 8 == 0 &&
           view.head_stride % 8 == 0);
    return {view, shape->batch, shape->tokens, heads, shape->head_dim};
}

static struct operand view_operand(const struct head_view *view)
{
    return {view->data, view->batch_stride, view->head_stride, view->token_stride};
}

/* The operands of the scores; K may lose its mean first. */
static void publish_scores_of(const struct attention_fwd *a, const struct fwd_scratch *s,
                              const struct attention_saved *saved, struct fwd_call *f)
{
    const struct attention_shape *shape = &a->shape;
    const struct attention_recipe *recipe = a->recipe;
    struct head_tensor q = tensor_of(shape, a->q, shape->heads), k = tensor_of(shape, a->k, shape->kv_heads);
    const struct head_facts *k_facts = s->k_facts;
    const bool measured = recipe->qk != QK_BF16;
    if (measured || a->stats != NULL) {
        attention_measure_cuda(a->cuda, &q, s->q_facts);
        attention_measure_cuda(a->cuda, &k, s->k_facts);
    }
    bf16 *own_q = saved->q != NULL ? saved->q : s->q, *own_k = saved->k != NULL ? saved->k : s->k;
    if (recipe->k_center) {
        attention_centre_cuda(a->cuda, &k, own_k);
        k.view = own_view(shape, own_k, shape->kv_heads);
        k_facts = s->centred_facts;
        if (measured) {
            attention_measure_cuda(a->cuda, &k, s->centred_facts);
        }
    }
    if (measured) {
        attention_scores_cuda(a->cuda, recipe, &q, s->q_facts, s->decoded, own_q);
        attention_scores_cuda(a->cuda, recipe, &k, k_facts, s->decoded, own_k);
        q.view = own_view(shape, own_q, shape->heads);
        k.view = own_view(shape, own_k, shape->kv_heads);
    }
    f->q = view_operand(&q.view);
    f->k = view_operand(&k.view);
}

/* V of the forward and of its diagonal blocks. */
static void publish_values_of(const struct attention_fwd *a, const struct fwd_scratch *s,
                              const struct attention_saved *saved, struct fwd_call *f)
{
    const struct attention_shape *shape = &a->shape;
    const struct attention_recipe *recipe = a->recipe;
    struct head_tensor v = tensor_of(shape, a->v, shape->kv_heads);
    if (recipe->pv != PV_BF16 || recipe->bwd_stat == BWD_STAT_EXACT || a->stats != NULL) {
        attention_measure_cuda(a->cuda, &v, s->v_facts);
    }
    f->v = view_operand(&v.view);
    f->diag = {NULL, 0, 0, 0};
    if (recipe->pv != PV_BF16) {
        if (recipe->sink_keys_fp8 > 0) {
            struct head_tensor sinks = v;
            sinks.tokens = recipe->sink_keys_fp8 < v.tokens ? recipe->sink_keys_fp8 : v.tokens;
            attention_measure_cuda(a->cuda, &sinks, s->sink_facts);
        }
        bf16 *own = saved->v != NULL ? saved->v : s->v;
        attention_values_cuda(a->cuda, recipe, &v, s->v_facts, s->sink_facts, own);
        const struct head_view view = own_view(shape, own, shape->kv_heads);
        f->v = view_operand(&view);
    }
    if (recipe->v_diag == V_DIAG_FP8) {
        attention_value_e4m3_cuda(a->cuda, &v, s->v_facts, attention_unit(recipe), s->diag);
        const struct head_view view = own_view(shape, s->diag, shape->kv_heads);
        f->diag = view_operand(&view);
    }
}

static void run(const struct attention_fwd *a, int p, const struct fwd_call *f)
{
    const int64_t blocks = a->shape.batch * a->shape.heads * f->row_blocks;
    if (blocks > 0) {
        attention_fwd_cuda_launch(a->cuda, p, f, blocks);
    }
}

/* O' = unrounded P times the V of the backward, for bwd_stat = exact. */
static void run_exact(const struct attention_fwd *a, const struct fwd_scratch *s, bf16 *out, struct fwd_call f)
{
    const struct attention_shape *shape = &a->shape;
    const struct head_tensor v = tensor_of(shape, a->v, shape->kv_heads);
    if (a->recipe->bwd_v == BWD_V_E4M3) {
        attention_value_e4m3_cuda(a->cuda, &v, s->v_facts, 1.0f, s->v_exact);
        const struct head_view view = own_view(shape, s->v_exact, shape->kv_heads);
        f.v = view_operand(&view);
    } else if (a->recipe->bwd_v == BWD_V_BF16) {
        f.v = view_operand(&v.view);
    }
    if (a->recipe->bwd_v != BWD_V_FORWARD) {
        f.diag.data = NULL;
        f.v_unit = 1.0f;
    }
    f.out = own_view(shape, out, shape->heads);
    f.parts = NULL;
    run(a, P_UNROUNDED, &f);
}

void attention_fwd_cuda(const struct attention_fwd *a)
{
    const struct attention_shape *shape = &a->shape;
    ASSERT(attention_variant_cuda.refuses(shape, a->recipe) == NULL);
    struct carve at = {(unsigned char *)a->scratch, 0}, kept = {(unsigned char *)a->saved, 0};
    const struct fwd_scratch s = scratch_carve(shape, a->recipe, &at);
    struct attention_saved_cuda saved = {};
    if (a->saved != NULL) {
        saved = attention_saved_cuda_carve(shape, a->recipe, &kept);
    }
    struct fwd_call f = {};
    publish_scores_of(a, &s, &saved.operands, &f);
    publish_values_of(a, &s, &saved.operands, &f);
    f.out = tensor_of(shape, a->out, shape->heads).view;
    f.lse = a->lse_log2;
    f.lse_exact = saved.operands.lse_exact;
    f.anchor = saved.anchor;
    f.parts = a->stats != NULL ? s.parts : NULL;
    f.heads = (int)shape->heads;
    f.group = (int)(shape->heads / shape->kv_heads);
    f.tokens = (int)shape->tokens;
    f.row_blocks = (int)row_blocks_of(shape);
    f.head_dim = (int)shape->head_dim;
    f.p_block = attention_p_block(a->recipe->pv);
    f.causal = shape->causal;
    f.c = (float)((double)shape->softmax_scale * M_LOG2E);
    f.rule = p_rule_of(a->recipe, false);
    f.v_unit = f.rule.unit;
    run(a, a->recipe->pv, &f);
    if (saved.operands.out_exact != NULL) {
        run_exact(a, &s, saved.operands.out_exact, f);
    }
    if (a->stats != NULL) {
        attention_stats_cuda(a->cuda, s.parts, shape->batch * shape->heads * f.row_blocks, a->stats);
        attention_stats_facts_cuda(a->cuda, s.q_facts, shape->batch * shape->heads, a->stats);
        attention_stats_facts_cuda(a->cuda, s.k_facts, shape->batch * shape->kv_heads, a->stats);
        attention_stats_facts_cuda(a->cuda, s.v_facts, shape->batch * shape->kv_heads, a->stats);
    }
}
