/* model: the memory plan, and the weights in their formats. */
#include "core/rng.h"
#include "model/cross_entropy.h"
#include "model/model_state.h"
#include "model/rope.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static int64_t q_width(const struct model_config *c)
{
    return (int64_t)c->heads * c->head_dim;
}

static int64_t kv_width(const struct model_config *c)
{
    return (int64_t)c->kv_heads * c->head_dim;
}

static size_t place_of(const struct param_list *params, int layer, const char *name)
{
    char full[sizeof params->params->name];
    if (layer < 0) {
        snprintf(full, sizeof full, "%s.weight", name);
    } else {
        snprintf(full, sizeof full, "model.layers.%d.%s.weight", layer, name);
    }
    const struct param *p = param_list_find(params, full);
    ASSERT(p);
    return p->offset;
}

static void layer_plan(struct model *m, int index)
{
    static const char *const first[PROJECTIONS] = {"self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj",
                                                   "mlp.down_proj"};
    const struct model_config *c = &m->config;
    const int64_t in[PROJECTIONS] = {c->width, q_width(c), c->width, c->ffn};
    const int64_t out[PROJECTIONS] = {q_width(c) + 2 * kv_width(c), c->width, 2 * (int64_t)c->ffn, c->width};
    struct layer_formats formats = model_layer_formats(c, &m->options.linear, index);
    struct layer *layer = &m->layers[index];
    layer->input_norm = place_of(m->params, index, "input_layernorm");
    layer->mlp_norm = place_of(m->params, index, "post_attention_layernorm");
    if (c->qk_norm) {
        layer->q_norm = place_of(m->params, index, "self_attn.q_norm");
        layer->k_norm = place_of(m->params, index, "self_attn.k_norm");
    }
    for (int p = 0; p < PROJECTIONS; p++) {
        bool is_mlp = p == PROJECTION_GATE_UP || p == PROJECTION_DOWN;
        char stream[64];
        snprintf(stream, sizeof stream, "linear/%d.%s", index, first[p]);
        layer->matrix[p] = place_of(m->params, index, first[p]);
        layer->linear[p] = (struct linear){
            .format = is_mlp ? formats.mlp : formats.attn, .in = in[p], .out = out[p], .stream = rng_stream(stream)};
    }
}

static void take_weights(struct model *m, struct arena *arena)
{
    for (int l = 0; l < m->config.layers; l++) {
        for (int p = 0; p < PROJECTIONS; p++) {
            const struct linear *linear = &m->layers[l].linear[p];
            if (linear->format != LINEAR_BF16) {
                m->layers[l].represented[p] =
                    arena_take(arena, "weights in fp8, nvfp4", (size_t)(linear->out * linear->in) * sizeof(bf16));
            }
        }
    }
}

static bf16 *take_bf16(struct arena *arena, const char *label, int64_t n)
{
    return arena_take(arena, label, (size_t)n * sizeof(bf16));
}

static float *take_f32(struct arena *arena, const char *label, int64_t n)
{
    return arena_take(arena, label, (size_t)n * sizeof(float));
}

static void take_block(struct model *m, struct block *k, struct arena *arena)
{
    const struct model_config *c = &m->config;
    const char *label = "activations";
    int64_t T = m->options.tokens, q = q_width(c), kv = kv_width(c);
    k->normed = take_bf16(arena, label, T * c->width);
    k->qkv = take_bf16(arena, label, T * (q + 2 * kv));
    k->rotated = c->qk_norm ? take_bf16(arena, label, T * (q + kv)) : k->qkv;
    k->attended = take_bf16(arena, label, T * q);
    k->middle = take_bf16(arena, label, T * c->width);
    k->mlp_normed = take_bf16(arena, label, T * c->width);
    k->gate_up = take_bf16(arena, label, T * 2 * c->ffn);
    k->activated = take_bf16(arena, label, T * c->ffn);
    k->inv_rms = take_f32(arena, label, T);
    k->q_inv = c->qk_norm ? take_f32(arena, label, T * c->heads) : NULL;
    k->k_inv = c->qk_norm ? take_f32(arena, label, T * c->kv_heads) : NULL;
    k->mlp_inv_rms = take_f32(arena, label, T);
    k->lse_log2 = take_f32(arena, label, T * c->heads);
    k->attention = arena_take(arena, "attention state", m->attention_saved_bytes);
}

static void take_scratch(struct model *m, struct arena *arena)
{
    const struct model_config *c = &m->config;
    struct model_scratch *s = &m->scratch;
    const char *label = "scratch";
    int64_t T = m->options.tokens, q = q_width(c), kv = kv_width(c);
    size_t linear = 0;
    for (int l = 0; l < c->layers; l++) {
        for (int p = 0; p < PROJECTIONS; p++) {
            const struct linear *x = &m->layers[l].linear[p];
            size_t bytes = linear_scratch_bytes(x->format, T, x->in, x->out);
            linear = bytes > linear ? bytes : linear;
        }
    }
    s->linear = arena_take(arena, "scratch of projections", linear);
    s->attention = arena_take(arena, "scratch of attention", m->attention_scratch_bytes);
    s->logits = take_f32(arena, "scratch of logits", T * m->columns);
    s->dlogits = take_bf16(arena, "scratch of logits", T * m->columns);
    s->branch = take_bf16(arena, label, T * c->width);
    s->exp_sum = take_f32(arena, label, T);
    s->target_logit = take_f32(arena, label, T);
    s->d = take_bf16(arena, label, T * c->width);
    s->dnormed = take_bf16(arena, label, T * c->width);
    s->dactivated = take_bf16(arena, label, T * c->ffn);
    s->dgate_up = take_bf16(arena, label, T * 2 * c->ffn);
    s->dattended = take_bf16(arena, label, T * q);
    s->dqkv = take_bf16(arena, label, T * (q + 2 * kv));
    s->dhidden_sum = take_f32(arena, label, T * c->width);
    s->last_seen = arena_take(arena, label, (size_t)c->vocab * sizeof *s->last_seen);
    s->next = arena_take(arena, label, (size_t)T * sizeof *s->next);
    s->tied = c->tied ? take_f32(arena, "gradient of tied embedding", (int64_t)c->vocab * c->width) : NULL;
}

static enum status check_options(const struct model_config *c, const struct model_options *o)
{
    ASSERT(o->variant);
    if (o->batch < 1 || o->tokens < 1 || o->tokens > c->context) {
        return status_fail(ERR_CONFIG,
                           "model: %lld samples of %lld tokens: needs at least one of each, and at most model.context "
                           "= %d tokens",
                           (long long)o->batch, (long long)o->tokens, c->context);
    }
    if (o->logit_columns < 0) {
        return status_fail(ERR_CONFIG, "model: logit_columns = %lld: must be 0 (default) or more",
                           (long long)o->logit_columns);
    }
    struct attention_shape shape = model_attention_shape(c, o->tokens);
    const char *why = o->variant->refuses(&shape, &o->attention);
    return why ? status_fail(ERR_UNSUPPORTED, "attention variant %s: %s", o->variant->name, why) : OK;
}

static enum status allocate(struct model **model, const struct model_config *c, const struct model_options *o)
{
    struct model *m = calloc(1, sizeof *m);
    *model = m;
    if (!m) {
        return status_fail(ERR_NOMEM, "model: out of memory");
    }
    size_t blocks = o->recompute == RECOMPUTE_BLOCK ? 1 : (size_t)o->batch * (size_t)c->layers;
    m->layers = calloc((size_t)c->layers, sizeof *m->layers);
    m->blocks = calloc(blocks, sizeof *m->blocks);
    m->stats = calloc((size_t)c->layers, sizeof *m->stats);
    return m->layers && m->blocks && m->stats ? OK : status_fail(ERR_NOMEM, "model: out of memory for its tables");
}

enum status model_plan(struct model **model, struct arena *arena, const struct model_config *c,
                       const struct param_list *params, const struct model_options *o)
{
    *model = NULL;
    TRY(model_config_check(c, &o->linear));
    TRY(check_options(c, o));
    TRY(allocate(model, c, o));
    struct model *m = *model;
    m->config = *c;
    m->options = *o;
    m->params = params;
    m->embed = place_of(params, -1, "model.embed_tokens");
    m->final_norm = place_of(params, -1, "model.norm");
    m->head = c->tied ? m->embed : place_of(params, -1, "lm_head");
    int64_t columns = o->logit_columns ? o->logit_columns : CROSS_ENTROPY_COLUMNS;
    m->columns = columns < c->vocab ? columns : c->vocab;
    struct attention_shape shape = model_attention_shape(c, o->tokens);
    m->attention_saved_bytes = o->variant->saved_bytes(&shape, &o->attention);
    m->attention_scratch_bytes = o->variant->scratch_bytes(&shape, &o->attention);
    for (int l = 0; l < c->layers; l++) {
        layer_plan(m, l);
    }
    int64_t B = o->batch, T = o->tokens;
    take_weights(m, arena);
    m->cosine = take_f32(arena, "rope table", T * (c->head_dim / 2));
    m->sine = take_f32(arena, "rope table", T * (c->head_dim / 2));
    m->residual = take_bf16(arena, "residual stream", B * (c->layers + 1) * T * c->width);
    m->hidden = take_bf16(arena, "activations", B * T * c->width);
    m->final_inv_rms = take_f32(arena, "activations", B * T);
    m->lse = take_f32(arena, "activations", B * T);
    for (int64_t k = 0; k < (o->recompute == RECOMPUTE_BLOCK ? 1 : B * c->layers); k++) {
        take_block(m, &m->blocks[k], arena);
    }
    take_scratch(m, arena);
    if (m->cosine) {
        rope_table(&c->rope, c->head_dim, T, m->cosine, m->sine);
    }
    return OK;
}

void model_close(struct model *m)
{
    if (m) {
        free(m->layers);
        free(m->blocks);
        free(m->stats);
        free(m);
    }
}

void model_set_weights(struct model *m, const bf16 *weights)
{
    m->weights = weights;
    m->kept = false;
    for (int l = 0; l < m->config.layers; l++) {
        for (int p = 0; p < PROJECTIONS; p++) {
            struct layer *layer = &m->layers[l];
            struct linear *linear = &layer->linear[p];
            const bf16 *w = weights + layer->matrix[p];
            if (linear->format != LINEAR_BF16) {
                linear_represent_weight_cpu(linear->format, w, linear->out, linear->in, layer->represented[p]);
            }
            linear->weight = linear->format == LINEAR_BF16 ? w : layer->represented[p];
        }
    }
}
