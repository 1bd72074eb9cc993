/* model: forward and backward on the CPU.
 *
 * A batch is a loop over samples. So nothing can depend on which samples share a call: scales, random numbers and the
 * order of gradient sums (sample after sample, each complete before it is added) are those of single calls. */
#include "model/cross_entropy.h"
#include "model/embedding.h"
#include "model/model_state.h"
#include "model/rmsnorm.h"
#include "model/rope.h"
#include "model/swiglu.h"

#include <string.h>

/* ---- one layer ------------------------------------------------------------------------------------------------- */

static void project(const struct model *m, int layer, enum projection p, int64_t rows, const bf16 *x, bf16 *y)
{
    linear_fwd_cpu(&(struct linear_fwd){
        .linear = &m->layers[layer].linear[p], .rows = rows, .x = x, .y = y, .scratch = m->scratch.linear});
}

static void norm(const struct model *m, int64_t rows, size_t gain, const bf16 *x, bf16 *y, float *inv_rms)
{
    int64_t width = m->config.width;
    rmsnorm_fwd_cpu(&(struct rmsnorm_fwd){.rows = rows,
                                          .groups = 1,
                                          .width = width,
                                          .x_stride = width,
                                          .y_stride = width,
                                          .x = x,
                                          .gain = m->weights + gain,
                                          .eps = m->config.norm_eps,
                                          .y = y,
                                          .inv_rms = inv_rms});
}

/* The norm of Q's heads (first = 0) or of K's, which lie behind them. */
static void norm_heads(const struct model *m, const struct block *k, int64_t rows, int64_t first, int64_t heads,
                       size_t gain, float *inv)
{
    const struct model_config *c = &m->config;
    struct heads h = model_heads(c);
    rmsnorm_fwd_cpu(&(struct rmsnorm_fwd){.rows = rows,
                                          .groups = heads,
                                          .width = c->head_dim,
                                          .x_stride = h.qkv_stride,
                                          .y_stride = h.qk_stride,
                                          .x = k->qkv + first * c->head_dim,
                                          .gain = m->weights + gain,
                                          .eps = c->norm_eps,
                                          .y = k->rotated + first * c->head_dim,
                                          .inv_rms = inv});
}

static void rotate(const struct model *m, bf16 *x, int64_t rows, int64_t stride, bool inverse)
{
    const struct model_config *c = &m->config;
    rope_apply_cpu(&(struct rope_apply){.x = x,
                                        .rows = rows,
                                        .row_stride = stride,
                                        .heads = c->heads + c->kv_heads,
                                        .head_dim = c->head_dim,
                                        .cosine = m->cosine,
                                        .sine = m->sine,
                                        .inverse = inverse});
}

static void attend(struct model *m, const struct block *k, int64_t T, bool keep, struct attention_stats *stats)
{
    const struct model_config *c = &m->config;
    struct heads h = model_heads(c);
    m->options.variant->fwd(
        &(struct attention_fwd){.shape = model_attention_shape(c, 1, T),
                                .recipe = &m->options.attention,
                                .q = model_head_view(k->rotated, T, h.qk_stride, c->head_dim),
                                .k = model_head_view(k->rotated + h.q, T, h.qk_stride, c->head_dim),
                                .v = model_head_view(k->qkv + h.q + h.kv, T, h.qkv_stride, c->head_dim),
                                .out = model_head_view(k->attended, T, h.q, c->head_dim),
                                .lse_log2 = k->lse_log2,
                                .saved = keep ? k->attention : NULL,
                                .scratch = m->scratch.attention,
                                .stats = stats});
}

/* All that backward reads of a layer, from the residual stream that enters it. Recomputation calls this again. */
static void block_forward(struct model *m, int index, int64_t T, const bf16 *in, struct block *k, bool keep,
                          struct attention_stats *stats)
{
    const struct model_config *c = &m->config;
    const struct layer *layer = &m->layers[index];
    norm(m, T, layer->input_norm, in, k->normed, k->inv_rms);
    project(m, index, PROJECTION_QKV, T, k->normed, k->qkv);
    if (c->qk_norm) {
        norm_heads(m, k, T, 0, c->heads, layer->q_norm, k->q_inv);
        norm_heads(m, k, T, c->heads, c->kv_heads, layer->k_norm, k->k_inv);
    }
    rotate(m, k->rotated, T, model_heads(c).qk_stride, false);
    attend(m, k, T, keep, stats);
    project(m, index, PROJECTION_O, T, k->attended, m->scratch.branch);
    residual_add_cpu(in, m->scratch.branch, k->middle, T * c->width);
    norm(m, T, layer->mlp_norm, k->middle, k->mlp_normed, k->mlp_inv_rms);
    project(m, index, PROJECTION_GATE_UP, T, k->mlp_normed, k->gate_up);
    swiglu_fwd_cpu(k->gate_up, T, c->ffn, k->activated);
}

static void block_finish(struct model *m, int index, int64_t T, const struct block *k, bf16 *out)
{
    project(m, index, PROJECTION_DOWN, T, k->activated, m->scratch.branch);
    residual_add_cpu(k->middle, m->scratch.branch, out, T * m->config.width);
}

/* ---- forward --------------------------------------------------------------------------------------------------- */

static struct cross_entropy head_of(const struct model *m, const struct model_batch *batch, int64_t b)
{
    const struct model_config *c = &m->config;
    return (struct cross_entropy){.rows = batch->length,
                                  .width = c->width,
                                  .vocab = c->vocab,
                                  .columns = m->columns,
                                  .hidden = m->hidden + b * batch->length * c->width,
                                  .weight = m->weights + m->head,
                                  .targets = batch->targets + b * batch->length,
                                  .lse = m->lse + b * m->options.tokens,
                                  .logits = m->scratch.logits};
}

static void sample_forward(struct model *m, const struct model_batch *batch, int64_t b, bool keep,
                           struct model_loss *loss)
{
    const struct model_config *c = &m->config;
    int64_t T = batch->length;
    embedding_fwd_cpu(m->weights + m->embed, batch->tokens + b * T, T, c->vocab, c->width, model_residual(m, b, 0));
    for (int l = 0; l < c->layers; l++) {
        struct block *k = model_block(m, b, l);
        block_forward(m, l, T, model_residual(m, b, l), k, keep, &m->stats[l]);
        block_finish(m, l, T, k, model_residual(m, b, l + 1));
    }
    norm(m, T, m->final_norm, model_residual(m, b, c->layers), m->hidden + b * T * c->width,
         m->final_inv_rms + b * m->options.tokens);
    struct cross_entropy_fwd head = {
        .shape = head_of(m, batch, b), .sum = m->scratch.exp_sum, .target_logit = m->scratch.target_logit};
    int64_t valid;
    loss->loss_sum += cross_entropy_fwd_cpu(&head, &valid);
    loss->valid += valid;
}

void model_forward(struct model *m, const struct model_batch *batch, bool keep, struct model_loss *loss)
{
    ASSERT(m->options.device == DEVICE_CPU && m->weights && batch->batch >= 1 && batch->length >= 1);
    ASSERT(batch->batch <= m->options.batch && batch->length <= m->options.tokens);
    struct attention_shape shape = model_attention_shape(&m->config, 1, batch->length);
    ASSERT(m->options.variant->saved_bytes(&shape, &m->options.attention) <= m->attention_saved_bytes);
    ASSERT(m->options.variant->scratch_bytes(&shape, &m->options.attention) <= m->attention_scratch_bytes);
    struct model_loss sum = {0};
    for (int64_t b = 0; b < batch->batch; b++) {
        sample_forward(m, batch, b, keep, &sum);
    }
    m->batch = batch->batch;
    m->length = batch->length;
    m->kept = keep;
    *loss = sum;
}

void model_logits_cpu(struct model *m, int64_t first_row, int64_t rows, float *logits)
{
    const struct model_config *c = &m->config;
    cross_entropy_logits_cpu(m->hidden + first_row * c->width, m->weights + m->head, rows, c->width, c->vocab, logits);
}

/* ---- backward -------------------------------------------------------------------------------------------------- */

/* One sample's way back. `add`: its gradients are added to earlier samples', not the first to be written. */
struct backward {
    const struct model_backward *call;
    int64_t sample, T;
    bool add;
};

static void project_back(const struct model *m, const struct backward *w, int layer, enum projection p, const bf16 *x,
                         const bf16 *dy, bf16 *dx)
{
    linear_bwd_cpu(&(struct linear_bwd){.linear = &m->layers[layer].linear[p],
                                        .rows = w->T,
                                        .x = x,
                                        .dy = dy,
                                        .dx = dx,
                                        .dw = (float *)w->call->grads + m->layers[layer].matrix[p],
                                        .accumulate = w->add,
                                        .seed = m->options.seed,
                                        .sample = w->call->batch->sample + (uint64_t)w->sample,
                                        .update = w->call->batch->update,
                                        .scratch = m->scratch.linear});
}

/* Adds to d (T, C), the gradient of the residual stream, what comes back through a norm: d += its dx, or d = dx for the
 * final norm, which no residual bypasses (`passes_by`). */
static void norm_back(const struct model *m, const struct backward *w, size_t gain, const bf16 *x, const float *inv_rms,
                      const bf16 *dy, bool passes_by)
{
    int64_t width = m->config.width;
    rmsnorm_bwd_cpu(&(struct rmsnorm_bwd){.rows = w->T,
                                          .groups = 1,
                                          .width = width,
                                          .x_stride = width,
                                          .dy_stride = width,
                                          .dx_stride = width,
                                          .x = x,
                                          .gain = m->weights + gain,
                                          .dy = dy,
                                          .residual = passes_by ? m->scratch.d : NULL,
                                          .inv_rms = inv_rms,
                                          .dx = m->scratch.d,
                                          .dgain = (float *)w->call->grads + gain,
                                          .accumulate = w->add});
}

static void norm_heads_back(const struct model *m, const struct backward *w, const struct block *k, int64_t first,
                            int64_t heads, size_t gain, const float *inv)
{
    const struct model_config *c = &m->config;
    struct heads h = model_heads(c);
    bf16 *d = m->scratch.dqkv + first * c->head_dim;
    rmsnorm_bwd_cpu(&(struct rmsnorm_bwd){.rows = w->T,
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
                                          .dgain = (float *)w->call->grads + gain,
                                          .accumulate = w->add});
}

/* From dattended to dqkv. */
static void attend_back(struct model *m, const struct backward *w, int index, const struct block *k)
{
    const struct model_config *c = &m->config;
    struct heads h = model_heads(c);
    struct model_scratch *s = &m->scratch;
    int64_t T = w->T, D = c->head_dim;
    m->options.variant->bwd(&(struct attention_bwd){.shape = model_attention_shape(c, 1, T),
                                                    .recipe = &m->options.attention,
                                                    .q = model_head_view(k->rotated, T, h.qk_stride, D),
                                                    .k = model_head_view(k->rotated + h.q, T, h.qk_stride, D),
                                                    .v = model_head_view(k->qkv + h.q + h.kv, T, h.qkv_stride, D),
                                                    .out = model_head_view(k->attended, T, h.q, D),
                                                    .dout = model_head_view(s->dattended, T, h.q, D),
                                                    .dq = model_head_view(s->dqkv, T, h.qkv_stride, D),
                                                    .dk = model_head_view(s->dqkv + h.q, T, h.qkv_stride, D),
                                                    .dv = model_head_view(s->dqkv + h.q + h.kv, T, h.qkv_stride, D),
                                                    .lse_log2 = k->lse_log2,
                                                    .saved = k->attention,
                                                    .scratch = s->attention,
                                                    .stats = &m->stats[index]});
    rotate(m, s->dqkv, T, h.qkv_stride, true);
    if (c->qk_norm) {
        const struct layer *layer = &m->layers[index];
        norm_heads_back(m, w, k, 0, c->heads, layer->q_norm, k->q_inv);
        norm_heads_back(m, w, k, c->heads, c->kv_heads, layer->k_norm, k->k_inv);
    }
}

/* scratch.d: in, the gradient of what leaves the layer; out, of what enters it. */
static void block_backward(struct model *m, const struct backward *w, int index, const bf16 *in, const struct block *k)
{
    const struct layer *layer = &m->layers[index];
    struct model_scratch *s = &m->scratch;
    project_back(m, w, index, PROJECTION_DOWN, k->activated, s->d, s->dactivated);
    swiglu_bwd_cpu(k->gate_up, s->dactivated, w->T, m->config.ffn, s->dgate_up);
    project_back(m, w, index, PROJECTION_GATE_UP, k->mlp_normed, s->dgate_up, s->dnormed);
    norm_back(m, w, layer->mlp_norm, k->middle, k->mlp_inv_rms, s->dnormed, true);
    project_back(m, w, index, PROJECTION_O, k->attended, s->d, s->dattended);
    attend_back(m, w, index, k);
    project_back(m, w, index, PROJECTION_QKV, k->normed, s->dqkv, s->dnormed);
    norm_back(m, w, layer->input_norm, in, k->inv_rms, s->dnormed, true);
}

static void notify(const struct backward *w, int layer)
{
    const struct model_backward *call = w->call;
    if (call->on_layer && w->sample == call->batch->batch - 1) {
        call->on_layer(call->context, layer);
    }
}

static void add_array(float *sum, const float *x, int64_t n)
{
#pragma omp parallel for simd
    for (int64_t i = 0; i < n; i++) {
        sum[i] += x[i];
    }
}

/* The gradient of the embedding; for tied models `matrix` holds the head's share already. */
static void embedding_backward(struct model *m, const struct backward *w, float *matrix)
{
    const struct model_config *c = &m->config;
    float *grads = (float *)w->call->grads + m->embed;
    int64_t n = (int64_t)c->vocab * c->width;
    if (!c->tied && !w->add) {
        memset(grads, 0, (size_t)n * sizeof *grads);
    }
    embedding_bwd_cpu(&(struct embedding_bwd){.tokens = w->call->batch->tokens + w->sample * w->T,
                                              .count = w->T,
                                              .vocab = c->vocab,
                                              .width = c->width,
                                              .dout = m->scratch.d,
                                              .dweight = matrix,
                                              .last_seen = m->scratch.last_seen,
                                              .next = m->scratch.next});
    if (matrix != grads) {
        add_array(grads, matrix, n);
    }
}

static void sample_backward(struct model *m, const struct backward *w)
{
    const struct model_config *c = &m->config;
    struct model_scratch *s = &m->scratch;
    float *grads = w->call->grads;
    int64_t T = w->T, b = w->sample;
    /* Head and embedding of a tied model are one gradient, complete only at the end: until then it must not mix with
     * earlier samples'. */
    bool aside = c->tied && w->add;
    cross_entropy_bwd_cpu(&(struct cross_entropy_bwd){.shape = head_of(m, w->call->batch, b),
                                                      .loss_scale = w->call->loss_scale,
                                                      .dhidden = s->dnormed,
                                                      .dweight = aside ? s->tied : grads + m->head,
                                                      .accumulate = w->add && !aside,
                                                      .dlogits = s->dlogits,
                                                      .dhidden_sum = s->dhidden_sum});
    norm_back(m, w, m->final_norm, model_residual(m, b, c->layers), m->final_inv_rms + b * m->options.tokens,
              s->dnormed, false);
    notify(w, c->layers);
    for (int l = c->layers - 1; l >= 0; l--) {
        struct block *k = model_block(m, b, l);
        const bf16 *in = model_residual(m, b, l);
        if (m->options.recompute == RECOMPUTE_BLOCK) {
            block_forward(m, l, T, in, k, true, NULL);
        }
        block_backward(m, w, l, in, k);
        notify(w, l);
    }
    embedding_backward(m, w, aside ? s->tied : grads + m->embed);
    notify(w, -1);
}

/* Gaps between parameters hold zeros, in gradients too. */
static void zero_gap(void *grads, size_t at, size_t n)
{
    memset((float *)grads + at, 0, n * sizeof(float));
}

void model_backward_cpu(struct model *m, const struct model_backward *call)
{
    if (!call->accumulate) {
        model_each_gap(m->params, zero_gap, call->grads);
    }
    for (int64_t b = 0; b < m->batch; b++) {
        struct backward w = {.call = call, .sample = b, .T = m->length, .add = call->accumulate || b > 0};
        sample_backward(m, &w);
    }
}
