/* model: backward on the GPU. The head's part was made in forward; what was not kept is recomputed, layer by layer. */
#include "core/cuda.h"
#include "model/embedding.h"
#include "model/linear_format.h"
#include "model/model_cuda.h"
#include "model/rmsnorm.h"
#include "model/rope.h"
#include "model/swiglu.h"

#include <stdio.h>

/* The gradient of the parameter at `offset`. */
static void *gradient(const struct pass *w, size_t offset)
{
    return (unsigned char *)w->grads + offset * dtype_bytes(w->m->options.grad_type);
}

/* dx and the weight's gradient. Down makes them in two calls: without x only dx, without dx only the other. */
static void project_back(const struct pass *w, int layer, enum projection p, const bf16 *x, const bf16 *dy, bf16 *dx)
{
    static const char *const both[PROJECTIONS] = {"qkv backward", "o backward", "gate_up backward"};
    const struct model *m = w->m;
    model_group_open(m, x == NULL ? "down dx" : dx == NULL ? "down dw" : both[p]);
    linear_bwd_cuda(&(struct linear_bwd){.linear = &m->layers[layer].linear[p],
                                         .rows = w->n,
                                         .x = x,
                                         .dy = dy,
                                         .dx = dx,
                                         .dw = x ? gradient(w, m->layers[layer].matrix[p]) : NULL,
                                         .grad_type = m->options.grad_type,
                                         .accumulate = w->accumulate,
                                         .seed = m->options.seed,
                                         .scratch = m->gpu->tool,
                                         .x_amax = model_amax_cuda(m, layer, p, false),
                                         .dy_amax = model_amax_cuda(m, layer, p, true)},
                    m->options.cuda);
    model_group_close(m);
}

/* Adds to d (n, C), the gradient of the residual stream, what comes back through a norm (whose output's gradient lies
 * in branch): d += its dx, or d = dx for the final norm, which no residual bypasses. amax: of the new d. */
static void norm_back(const struct pass *w, size_t gain, const bf16 *x, bool passes_by, float *amax)
{
    const struct model *m = w->m;
    struct model_cuda *g = m->gpu;
    int64_t width = m->config.width;
    model_group_open(m, "norm backward");
    rmsnorm_bwd_cuda(&(struct rmsnorm_bwd){.rows = w->n,
                                           .groups = 1,
                                           .width = width,
                                           .x_stride = width,
                                           .dy_stride = width,
                                           .dx_stride = width,
                                           .x = x,
                                           .gain = m->weights + gain,
                                           .dy = g->branch,
                                           .residual = passes_by ? g->d : NULL,
                                           .inv_rms = g->inv_rms,
                                           .dx = g->d,
                                           .dgain = gradient(w, gain),
                                           .grad_type = m->options.grad_type,
                                           .accumulate = w->accumulate,
                                           .scratch = g->tool,
                                           .amax = amax},
                     m->options.cuda);
    model_group_close(m);
}

static void norm_heads_back(const struct pass *w, const struct kept *k, int64_t first, int64_t heads, size_t gain,
                            const float *inv)
{
    const struct model *m = w->m;
    const struct model_config *c = &m->config;
    struct heads h = model_heads(c);
    bf16 *d = m->gpu->dqkv + first * c->head_dim;
    rmsnorm_bwd_cuda(&(struct rmsnorm_bwd){.rows = w->n,
                                           .groups = heads,
                                           .width = c->head_dim,
                                           .x_stride = h.qkv_stride,
                                           .dy_stride = h.qkv_stride,
                                           .dx_stride = h.qkv_stride,
                                           .x = k->qkv + first * c->head_dim,
                                           .gain = m->weights + gain,
                                           .dy = d,
                                           .inv_rms = inv,
                                           .dx = d,
                                           .dgain = gradient(w, gain),
                                           .grad_type = m->options.grad_type,
                                           .accumulate = w->accumulate,
                                           .scratch = m->gpu->tool},
                     m->options.cuda);
}

/* From dattended to dqkv. */
static void attention_back(const struct pass *w, int index)
{
    const struct model *m = w->m;
    const struct model_config *c = &m->config;
    const struct kept *k = &m->gpu->kept[index];
    struct model_cuda *g = m->gpu;
    struct heads h = model_heads(c);
    int64_t T = w->batch->length, D = c->head_dim;
    model_group_open(m, "attention backward");
    m->options.variant->bwd(&(struct attention_bwd){.cuda = m->options.cuda,
                                                    .shape = model_attention_shape(c, w->batch->batch, T),
                                                    .recipe = &m->options.attention,
                                                    .q = model_head_view(k->rotated, T, h.qk_stride, D),
                                                    .k = model_head_view(k->rotated + h.q, T, h.qk_stride, D),
                                                    .v = model_head_view(k->qkv + h.q + h.kv, T, h.qkv_stride, D),
                                                    .out = model_head_view(k->attended, T, h.q, D),
                                                    .dout = model_head_view(g->dattended, T, h.q, D),
                                                    .dq = model_head_view(g->dqkv, T, h.qkv_stride, D),
                                                    .dk = model_head_view(g->dqkv + h.q, T, h.qkv_stride, D),
                                                    .dv = model_head_view(g->dqkv + h.q + h.kv, T, h.qkv_stride, D),
                                                    .lse_log2 = k->lse_log2,
                                                    .saved = k->attention,
                                                    .scratch = g->tool,
                                                    .stats = model_stats_cuda(m, index, false),
                                                    .amax = k->head_amax,
                                                    .unordered = m->options.unordered});
    model_group_close(m);
    model_group_open(m, "rope backward");
    /* With norms of heads, dQ and dK are not final yet. */
    float *amax = model_amax_cuda(m, index, PROJECTION_QKV, true);
    bool measured = amax && !c->qk_norm && rope_measures(D);
    model_rotate_cuda(w, g->dqkv, h.qkv_stride, true,
                      measured ? &(struct rope_largest){.beside = g->dqkv + h.q + h.kv,
                                                        .beside_stride = h.qkv_stride,
                                                        .beside_heads = c->kv_heads,
                                                        .amax = amax,
                                                        .of_all = true}
                               : NULL);
    if (c->qk_norm) {
        const struct layer *layer = &m->layers[index];
        norm_heads_back(w, k, 0, c->heads, layer->q_norm, k->q_inv);
        norm_heads_back(w, k, c->heads, c->kv_heads, layer->k_norm, k->k_inv);
    }
    if (amax && !measured) {
        linear_amax_cuda(g->dqkv, w->n * h.qkv_stride, amax, m->options.cuda);
    }
    model_group_close(m);
}

/* Makes again what forward had after the layer's second norm, normed and its inverse RMS included, and gate_up unless
 * it was kept. amax values are those of forward. */
static void recompute(const struct pass *w, int index)
{
    const struct model *m = w->m;
    const struct layer *layer = &m->layers[index];
    struct model_cuda *g = m->gpu;
    const struct kept *k = &g->kept[index];
    if (m->options.recompute == RECOMPUTE_BLOCK) {
        const bf16 *in = model_residual_cuda(m, index);
        model_norm_cuda(w, &(struct norm){.gain = layer->input_norm, .x = in, .y = g->normed});
        model_attend_cuda(w, index, true);
        model_norm_cuda(
            w, &(struct norm){.gain = layer->mlp_norm, .x = in, .branch = g->branch, .sum = k->middle, .y = g->normed});
    } else {
        model_norm_cuda(w, &(struct norm){.gain = layer->mlp_norm, .x = k->middle, .y = g->normed});
    }
    if (m->options.recompute != RECOMPUTE_NONE) {
        model_gate_up_cuda(w, index);
    }
}

/* d: in, the gradient of what leaves the layer; out, of what enters it. */
static void layer_backward(const struct pass *w, int index)
{
    const struct model *m = w->m;
    const struct layer *layer = &m->layers[index];
    struct model_cuda *g = m->gpu;
    const struct kept *k = &g->kept[index];
    const bf16 *in = model_residual_cuda(m, index);
    char name[32];
    snprintf(name, sizeof name, "layer %d", index);
    model_range_open(name);
    recompute(w, index);

    /* The pass over gate_up that needs dactivated also recomputes activated: the weight's gradient comes after it. */
    project_back(w, index, PROJECTION_DOWN, NULL, g->d, g->dactivated);
    model_group_open(m, "swiglu backward");
    swiglu_bwd_cuda(&(struct swiglu_bwd){.rows = w->n,
                                         .ffn = m->config.ffn,
                                         .gate_up = k->gate_up,
                                         .dout = g->dactivated,
                                         .dgate_up = g->dgate_up,
                                         .out = g->activated,
                                         .amax = model_amax_cuda(m, index, PROJECTION_GATE_UP, true)},
                    m->options.cuda);
    model_group_close(m);
    project_back(w, index, PROJECTION_DOWN, g->activated, g->d, NULL);
    project_back(w, index, PROJECTION_GATE_UP, g->normed, g->dgate_up, g->branch);
    norm_back(w, layer->mlp_norm, k->middle, true, model_amax_cuda(m, index, PROJECTION_O, true));

    project_back(w, index, PROJECTION_O, k->attended, g->d, g->dattended);
    attention_back(w, index);
    model_norm_cuda(w, &(struct norm){.gain = layer->input_norm, .x = in, .y = g->normed});
    project_back(w, index, PROJECTION_QKV, g->normed, g->dqkv, g->branch);
    norm_back(w, layer->input_norm, in, true, index > 0 ? model_amax_cuda(m, index - 1, PROJECTION_DOWN, true) : NULL);
    model_range_close();
}

static void embedding_back(const struct pass *w)
{
    const struct model *m = w->m;
    const struct model_config *c = &m->config;
    void *grads = gradient(w, m->embed);
    model_group_open(m, "embedding backward");
    if (!c->tied && !w->accumulate) { /* a tied matrix holds the head's share already */
        cuda_zero(m->options.cuda, grads, (size_t)c->vocab * (size_t)c->width * dtype_bytes(m->options.grad_type));
    }
    embedding_bwd_cuda(&(struct embedding_bwd){.tokens = w->batch->tokens,
                                               .count = w->n,
                                               .vocab = c->vocab,
                                               .width = c->width,
                                               .dout = m->gpu->d,
                                               .dweight = grads,
                                               .grad_type = m->options.grad_type,
                                               .scratch = m->gpu->tool},
                       m->options.cuda);
    model_group_close(m);
}

static void zero_gap(void *pass, size_t at, size_t n)
{
    const struct pass *w = pass;
    cuda_zero(w->m->options.cuda, gradient(w, at), n * dtype_bytes(w->m->options.grad_type));
}

static void notify(const struct model_backward *call, int layer)
{
    if (call->on_layer) {
        call->on_layer(call->context, layer);
    }
}

void model_backward_cuda(struct model *m, const struct model_backward *call)
{
    struct pass w = {.m = m,
                     .batch = call->batch,
                     .n = m->batch * m->length,
                     .keep = true,
                     .grads = call->grads,
                     .accumulate = call->accumulate};
    int layers = m->config.layers;
    ASSERT(call->grads == m->gpu->grads && call->accumulate == m->gpu->accumulate);
    m->kept = false; /* the residual stream's gradient is consumed */
    model_range_open("backward");
    if (!w.accumulate) {
        model_each_gap(m->params, zero_gap, &w);
    }
    norm_back(&w, m->final_norm, model_residual_cuda(m, layers), false,
              model_amax_cuda(m, layers - 1, PROJECTION_DOWN, true));
    notify(call, layers);
    for (int l = layers - 1; l >= 0; l--) {
        layer_backward(&w, l);
        notify(call, l);
    }
    embedding_back(&w);
    notify(call, -1);
    model_range_close();
}
