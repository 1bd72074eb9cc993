/* model: forward on the GPU. Everything is enqueued; nothing waits or allocates. */
#include "core/cuda.h"
#include "model/cross_entropy.h"
#include "model/embedding.h"
#include "model/linear_format.h"
#include "model/model_cuda.h"
#include "model/rmsnorm.h"
#include "model/rope.h"
#include "model/swiglu.h"

#include <nvtx3/nvToolsExt.h>
#include <stdio.h>

/* ---- ranges ---------------------------------------------------------------------------------------------------- */

void model_range_open(const char *name)
{
    nvtxRangePushA(name);
}

void model_range_close(void)
{
    nvtxRangePop();
}

void model_group_open(const struct model *m, const char *name)
{
    const struct model_trace *trace = m->options.trace;
    nvtxRangePushA(name);
    if (trace) {
        trace->mark(trace->context, name);
    }
}

void model_group_close(const struct model *m)
{
    const struct model_trace *trace = m->options.trace;
    if (trace) {
        trace->mark(trace->context, NULL);
    }
    nvtxRangePop();
}

/* ---- operators of a layer -------------------------------------------------------------------------------------- */

void model_norm_cuda(const struct pass *w, const struct norm *norm)
{
    const struct model *m = w->m;
    int64_t width = m->config.width;
    model_group_open(m, norm->branch ? "add, norm" : "norm");
    rmsnorm_fwd_cuda(&(struct rmsnorm_fwd){.rows = w->n,
                                           .groups = 1,
                                           .width = width,
                                           .x_stride = width,
                                           .y_stride = width,
                                           .x = norm->x,
                                           .gain = m->weights + norm->gain,
                                           .eps = m->config.norm_eps,
                                           .y = norm->y,
                                           .inv_rms = m->gpu->inv_rms,
                                           .branch = norm->branch,
                                           .sum = norm->sum,
                                           .amax = norm->amax},
                     m->options.cuda);
    model_group_close(m);
}

void model_project_cuda(const struct pass *w, int layer, enum projection p, const bf16 *x, bf16 *y)
{
    static const char *const names[PROJECTIONS] = {"qkv", "o", "gate_up", "down"};
    const struct model *m = w->m;
    model_group_open(m, names[p]);
    linear_fwd_cuda(&(struct linear_fwd){.linear = &m->layers[layer].linear[p],
                                         .rows = w->n,
                                         .x = x,
                                         .y = y,
                                         .scratch = m->gpu->tool,
                                         .x_amax = model_amax_cuda(m, layer, p, false)},
                    m->options.cuda);
    model_group_close(m);
}

/* The norm of Q's heads (first = 0) or of K's, which lie behind them. */
static void norm_heads(const struct pass *w, const struct kept *k, int64_t first, int64_t heads, size_t gain,
                       float *inv)
{
    const struct model *m = w->m;
    const struct model_config *c = &m->config;
    struct heads h = model_heads(c);
    rmsnorm_fwd_cuda(&(struct rmsnorm_fwd){.rows = w->n,
                                           .groups = heads,
                                           .width = c->head_dim,
                                           .x_stride = h.qkv_stride,
                                           .y_stride = h.qk_stride,
                                           .x = k->qkv + first * c->head_dim,
                                           .gain = m->weights + gain,
                                           .eps = c->norm_eps,
                                           .y = k->rotated + first * c->head_dim,
                                           .inv_rms = inv},
                     m->options.cuda);
}

void model_rotate_cuda(const struct pass *w, bf16 *x, int64_t stride, bool inverse, const struct rope_largest *largest)
{
    const struct model *m = w->m;
    const struct model_config *c = &m->config;
    const struct rope_apply rope = {.x = x,
                                    .rows = w->n,
                                    .row_stride = stride,
                                    .heads = c->heads + c->kv_heads,
                                    .head_dim = c->head_dim,
                                    .cosine = m->cosine,
                                    .sine = m->sine,
                                    .inverse = inverse};
    if (largest) {
        rope_measure_cuda(&rope, largest, w->batch->length, m->options.cuda);
    } else {
        rope_apply_cuda(&rope, w->batch->length, m->options.cuda);
    }
}

/* Turns Q and K; on the way, for an attention that takes it, the largest magnitude of every head. */
static void rotate(const struct pass *w, const struct kept *k)
{
    struct heads h = model_heads(&w->m->config);
    model_rotate_cuda(w, k->rotated, h.qk_stride, false,
                      k->head_amax ? &(struct rope_largest){.beside = k->qkv + h.q + h.kv,
                                                            .beside_stride = h.qkv_stride,
                                                            .beside_heads = w->m->config.kv_heads,
                                                            .amax = k->head_amax}
                                   : NULL);
}

static void attention(const struct pass *w, int layer, bool again)
{
    const struct model *m = w->m;
    const struct model_config *c = &m->config;
    const struct kept *k = &m->gpu->kept[layer];
    struct heads h = model_heads(c);
    int64_t T = w->batch->length, D = c->head_dim;
    bool saves = w->keep && (again || m->options.recompute != RECOMPUTE_BLOCK);
    m->options.variant->fwd(&(struct attention_fwd){.cuda = m->options.cuda,
                                                    .shape = model_attention_shape(c, w->batch->batch, T),
                                                    .recipe = &m->options.attention,
                                                    .q = model_head_view(k->rotated, T, h.qk_stride, D),
                                                    .k = model_head_view(k->rotated + h.q, T, h.qk_stride, D),
                                                    .v = model_head_view(k->qkv + h.q + h.kv, T, h.qkv_stride, D),
                                                    .out = model_head_view(k->attended, T, h.q, D),
                                                    .lse_log2 = k->lse_log2,
                                                    .saved = saves ? k->attention : NULL,
                                                    .scratch = m->gpu->tool,
                                                    .stats = model_stats_cuda(m, layer, again),
                                                    .amax = k->head_amax});
}

void model_attend_cuda(const struct pass *w, int layer, bool again)
{
    const struct model *m = w->m;
    const struct model_config *c = &m->config;
    const struct layer *x = &m->layers[layer];
    const struct kept *k = &m->gpu->kept[layer];
    model_project_cuda(w, layer, PROJECTION_QKV, m->gpu->normed, k->qkv);
    model_group_open(m, "rope");
    if (c->qk_norm) {
        norm_heads(w, k, 0, c->heads, x->q_norm, k->q_inv);
        norm_heads(w, k, c->heads, c->kv_heads, x->k_norm, k->k_inv);
    }
    rotate(w, k);
    model_group_close(m);
    model_group_open(m, "attention");
    attention(w, layer, again);
    float *amax = model_amax_cuda(m, layer, PROJECTION_O, false);
    if (amax && !again) {
        linear_amax_cuda(k->attended, w->n * model_q_width(c), amax, m->options.cuda);
    }
    model_group_close(m);
    model_project_cuda(w, layer, PROJECTION_O, k->attended, m->gpu->branch);
}

void model_gate_up_cuda(const struct pass *w, int layer)
{
    model_project_cuda(w, layer, PROJECTION_GATE_UP, w->m->gpu->normed, w->m->gpu->kept[layer].gate_up);
}

/* ---- forward --------------------------------------------------------------------------------------------------- */

/* normed: in, of what enters the layer; out, of what enters the next one, or of what leaves the last. */
static void layer_forward(const struct pass *w, int index)
{
    const struct model *m = w->m;
    const struct model_config *c = &m->config;
    struct model_cuda *g = m->gpu;
    const struct kept *k = &g->kept[index];
    bool last = index == c->layers - 1;
    char name[32];
    snprintf(name, sizeof name, "layer %d", index);
    model_range_open(name);
    model_attend_cuda(w, index, false);
    model_norm_cuda(w, &(struct norm){.gain = m->layers[index].mlp_norm,
                                      .x = model_residual_cuda(m, index),
                                      .branch = g->branch,
                                      .sum = k->middle,
                                      .y = g->normed,
                                      .amax = model_amax_cuda(m, index, PROJECTION_GATE_UP, false)});
    model_gate_up_cuda(w, index);
    model_group_open(m, "swiglu");
    swiglu_fwd_cuda(k->gate_up, w->n, c->ffn, g->activated, model_amax_cuda(m, index, PROJECTION_DOWN, false),
                    m->options.cuda);
    model_group_close(m);
    model_project_cuda(w, index, PROJECTION_DOWN, g->activated, g->branch);
    model_norm_cuda(w, &(struct norm){.gain = last ? m->final_norm : m->layers[index + 1].input_norm,
                                      .x = k->middle,
                                      .branch = g->branch,
                                      .sum = model_residual_cuda(m, index + 1),
                                      .y = last ? g->hidden : g->normed,
                                      .amax = last ? NULL : model_amax_cuda(m, index + 1, PROJECTION_QKV, false)});
    model_range_close();
}

/* Logits, loss and, where backward follows, the head's gradients: each logit exists once. */
static void head_forward(const struct pass *w)
{
    const struct model *m = w->m;
    const struct model_config *c = &m->config;
    struct model_cuda *g = m->gpu;
    unsigned char *dweight = w->grads;
    model_group_open(m, w->keep ? "head" : "head, forward only");
    cross_entropy_cuda(
        &(struct cross_entropy_cuda){.rows = w->n,
                                     .width = c->width,
                                     .vocab = c->vocab,
                                     .chunk = g->head_rows,
                                     .hidden = g->hidden,
                                     .weight = m->weights + m->head,
                                     .targets = w->batch->targets,
                                     .losses = g->losses,
                                     .lse = g->lse,
                                     .dhidden = w->keep ? g->branch : NULL,
                                     .dweight = w->keep ? dweight + m->head * dtype_bytes(m->options.grad_type) : NULL,
                                     .grad_type = m->options.grad_type,
                                     .accumulate = w->accumulate,
                                     .logits = g->logits,
                                     .dlogits = g->dlogits},
        m->options.cuda);
    model_loss_rows_cuda(g->losses, w->batch->targets, w->batch->batch, w->batch->length, g->loss_rows,
                         m->options.cuda);
    model_group_close(m);
}

static void check_call(const struct model *m, const struct model_batch *batch)
{
    ASSERT(m->options.device == DEVICE_CUDA && m->weights && batch->batch >= 1 && batch->length >= 1);
    ASSERT(batch->batch <= m->options.batch && batch->length <= m->options.tokens);
    struct attention_shape shape = model_attention_shape(&m->config, batch->batch, batch->length);
    ASSERT(m->options.variant->saved_bytes(&shape, &m->options.attention) <= m->attention_saved_bytes);
    ASSERT(m->options.variant->scratch_bytes(&shape, &m->options.attention) <= m->attention_scratch_bytes);
}

void model_forward_cuda(struct model *m, const struct model_batch *batch, void *grads, bool accumulate)
{
    check_call(m, batch);
    const struct model_config *c = &m->config;
    struct model_cuda *g = m->gpu;
    struct pass w = {.m = m,
                     .batch = batch,
                     .n = batch->batch * batch->length,
                     .keep = grads != NULL,
                     .grads = grads,
                     .accumulate = accumulate};
    model_range_open("forward");
    cuda_zero(m->options.cuda, g->amax, (size_t)(2 * c->layers) * PROJECTIONS * sizeof *g->amax);
    model_group_open(m, "embedding");
    embedding_fwd_cuda(m->weights + m->embed, batch->tokens, w.n, c->vocab, c->width, model_residual_cuda(m, 0),
                       m->options.cuda);
    model_group_close(m);
    model_norm_cuda(&w, &(struct norm){.gain = m->layers[0].input_norm,
                                       .x = model_residual_cuda(m, 0),
                                       .y = g->normed,
                                       .amax = model_amax_cuda(m, 0, PROJECTION_QKV, false)});
    for (int l = 0; l < c->layers; l++) {
        layer_forward(&w, l);
    }
    head_forward(&w);
    model_range_close();
    m->batch = batch->batch;
    m->length = batch->length;
    m->kept = w.keep;
    g->grads = grads;
    g->accumulate = accumulate;
}
