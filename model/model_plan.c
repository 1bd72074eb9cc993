/* model: what planning has in common wherever the model runs, and the way from model.h to the device's code. */
#include "core/rng.h"
#include "model/model_state.h"

#include <stdio.h>
#include <stdlib.h>

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
    const int64_t in[PROJECTIONS] = {c->width, model_q_width(c), c->width, c->ffn};
    const int64_t out[PROJECTIONS] = {model_q_width(c) + 2 * model_kv_width(c), c->width, 2 * (int64_t)c->ffn,
                                      c->width};
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

static enum status check_options(const struct model_config *c, const struct model_options *o,
                                 const struct model_backend *backend)
{
    ASSERT(o->variant && o->variant->device == o->device);
    if (o->batch < 1 || o->tokens < 1 || o->tokens > c->context) {
        return status_fail(ERR_CONFIG,
                           "model: %lld samples of %lld tokens: needs at least one of each, and at most model.context "
                           "= %d tokens",
                           (long long)o->batch, (long long)o->tokens, c->context);
    }
    TRY(backend->check(c, o));
    struct attention_shape shape = model_largest_attention(c, o);
    const char *why = o->variant->refuses(&shape, &o->attention);
    return why ? status_fail(ERR_UNSUPPORTED, "attention variant %s: %s", o->variant->name, why) : OK;
}

static const struct model_backend *backend_of(enum device_kind device)
{
#if WITH_CUDA
    return device == DEVICE_CUDA ? &model_backend_cuda : &model_backend_cpu;
#else
    return device == DEVICE_CUDA ? NULL : &model_backend_cpu;
#endif
}

enum status model_plan(struct model **model, struct arena *arena, const struct model_config *c,
                       const struct param_list *params, const struct model_options *o)
{
    *model = NULL;
    const struct model_backend *backend = backend_of(o->device);
    if (!backend) {
        return status_fail(ERR_UNSUPPORTED, "model: this build has no device cuda: build with CUDA=1, or use cpu");
    }
    TRY(model_config_check(c, &o->linear));
    TRY(check_options(c, o, backend));
    struct model *m = calloc(1, sizeof *m);
    *model = m;
    if (!m) {
        return status_fail(ERR_NOMEM, "model: out of memory");
    }
    m->backend = backend;
    m->config = *c;
    m->options = *o;
    m->params = params;
    m->embed = place_of(params, -1, "model.embed_tokens");
    m->final_norm = place_of(params, -1, "model.norm");
    m->head = c->tied ? m->embed : place_of(params, -1, "lm_head");
    struct attention_shape shape = model_largest_attention(c, o);
    m->attention_saved_bytes = o->variant->saved_bytes(&shape, &o->attention);
    m->attention_scratch_bytes = o->variant->scratch_bytes(&shape, &o->attention);
    m->layers = calloc((size_t)c->layers, sizeof *m->layers);
    if (!m->layers) {
        return status_fail(ERR_NOMEM, "model: out of memory for its tables");
    }
    for (int l = 0; l < c->layers; l++) {
        layer_plan(m, l);
    }
    return backend->take(m, arena);
}

void model_close(struct model *m)
{
    if (m) {
        m->backend->release(m);
        free(m->layers);
        free(m);
    }
}

/* ---- what is the same wherever the model runs ---- */

void model_set_weights(struct model *m, const bf16 *weights)
{
    m->weights = weights;
    m->kept = false;
    for (int l = 0; l < m->config.layers; l++) {
        for (enum projection p = 0; p < PROJECTIONS; p++) {
            struct layer *layer = &m->layers[l];
            const bf16 *w = weights + layer->matrix[p];
            if (layer->linear[p].format == LINEAR_BF16) {
                layer->linear[p].weight = w;
            } else {
                m->backend->represent(m, layer, p, w);
            }
        }
    }
}

void model_backward(struct model *m, const struct model_backward *call)
{
    ASSERT(m->kept && call->batch->batch == m->batch && call->batch->length == m->length);
    m->backend->backward(m, call);
}

void model_logits(struct model *m, int64_t first_row, int64_t rows, float *logits)
{
    /* Replays of a graph are not seen here: on CUDA the last forward may have been larger than the last call. */
    const bool gpu = m->options.device == DEVICE_CUDA;
    const int64_t most = gpu ? m->options.batch * m->options.tokens : m->batch * m->length;
    ASSERT(first_row >= 0 && rows >= 0 && first_row + rows <= most);
    m->backend->logits(m, first_row, rows, logits);
}

const struct attention_stats *model_stats(const struct model *m)
{
    return m->stats;
}

void model_stats_reset(struct model *m)
{
    m->backend->stats_reset(m);
}
