/* model: memory on the CPU. */
#include "model/cross_entropy.h"
#include "model/model_state.h"
#include "model/rope.h"

#include <stdlib.h>
#include <string.h>

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
    int64_t T = m->options.tokens, q = model_q_width(c), kv = model_kv_width(c);
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
    int64_t T = m->options.tokens, q = model_q_width(c), kv = model_kv_width(c);
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

static enum status check_cpu(const struct model_config *c, const struct model_options *o)
{
    (void)c;
    if (o->recompute == RECOMPUTE_GATE_UP) {
        return status_fail(ERR_UNSUPPORTED, "device.recompute = gate_up: only on device cuda; use none or block");
    }
    if (o->logit_columns < 0) {
        return status_fail(ERR_CONFIG, "model: logit_columns = %lld: must be 0 (default) or more",
                           (long long)o->logit_columns);
    }
    return OK;
}

static enum status take_cpu(struct model *m, struct arena *arena)
{
    const struct model_config *c = &m->config;
    const struct model_options *o = &m->options;
    int64_t B = o->batch, T = o->tokens, blocks = o->recompute == RECOMPUTE_BLOCK ? 1 : B * c->layers;
    m->blocks = calloc((size_t)blocks, sizeof *m->blocks);
    m->stats = calloc((size_t)c->layers, sizeof *m->stats);
    if (!m->blocks || !m->stats) {
        return status_fail(ERR_NOMEM, "model: out of memory for its tables");
    }
    int64_t columns = o->logit_columns ? o->logit_columns : CROSS_ENTROPY_COLUMNS;
    m->columns = columns < c->vocab ? columns : c->vocab;
    take_weights(m, arena);
    m->cosine = take_f32(arena, "rope table", T * (c->head_dim / 2));
    m->sine = take_f32(arena, "rope table", T * (c->head_dim / 2));
    m->residual = take_bf16(arena, "residual stream", B * (c->layers + 1) * T * c->width);
    m->hidden = take_bf16(arena, "activations", B * T * c->width);
    m->final_inv_rms = take_f32(arena, "activations", B * T);
    m->lse = take_f32(arena, "activations", B * T);
    for (int64_t k = 0; k < blocks; k++) {
        take_block(m, &m->blocks[k], arena);
    }
    take_scratch(m, arena);
    if (m->cosine) {
        rope_table(&c->rope, c->head_dim, T, m->cosine, m->sine);
    }
    return OK;
}

static void release_cpu(struct model *m)
{
    free(m->blocks);
    free(m->stats);
}

static void represent_cpu(struct model *m, struct layer *layer, enum projection p, const bf16 *weight)
{
    (void)m;
    struct linear *linear = &layer->linear[p];
    linear_represent_weight_cpu(linear->format, weight, linear->out, linear->in, layer->represented[p]);
    linear->weight = layer->represented[p];
}

static void stats_reset_cpu(struct model *m)
{
    memset(m->stats, 0, (size_t)m->config.layers * sizeof *m->stats);
}

const struct model_backend model_backend_cpu = {.check = check_cpu,
                                                .take = take_cpu,
                                                .release = release_cpu,
                                                .represent = represent_cpu,
                                                .backward = model_backward_cpu,
                                                .logits = model_logits_cpu,
                                                .stats_reset = stats_reset_cpu};
