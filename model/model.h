/* model: a Llama 3.1 transformer, forward and backward. Knows attention, numerics and core; neither optimizer, data,
 * ranks nor files.
 *
 * Activations and gradients of activations are BF16, accumulation is FP32, weights come in BF16, gradients of weights
 * go out in FP32 (CUDA: or BF16). The order of every sum is fixed: on the CPU bits depend on neither threads nor on the
 * batch a sample shares. */
#pragma once

#include "attention/attention.h"
#include "core/arena.h"
#include "model/params.h"

/* Called with a group's name before its operators are enqueued, with NULL after: for timing by events. Not nested. */
struct model_trace {
    void (*mark)(void *context, const char *name);
    void *context;
};

struct model_options {
    struct linear_recipe linear;
    struct attention_recipe attention;
    const struct attention_variant *variant;
    enum recompute recompute;
    enum device_kind device; /* where the model runs; the variant's device must be the same */
    const struct cuda *cuda; /* CUDA: everything is enqueued on its stream. NULL is enough to measure */
    enum dtype grad_type;    /* of gradients: FP32, on CUDA also BF16 */
    int64_t batch, tokens;   /* the largest B and T of a call */
    int64_t logit_columns;   /* CPU: vocabulary entries whose logits are held at once (bits!); 0 = the default */
    uint64_t seed;           /* for stochastic rounding inside linear recipes */
    bool unordered;          /* CUDA, run.deterministic = off: sums in any order where that is faster */
    const struct model_trace *trace; /* CUDA; NULL: none */
};

struct model; /* activations, RoPE table, quantised weight copies */

/* Carves everything from `arena` (measuring or real). Call twice, see core/arena.h. On the measuring pass *model is a
 * throw-away that must still be closed; close *model after a failure too. `params` is borrowed as long as the model
 * lives. Fails with ERR_CONFIG, ERR_UNSUPPORTED (the attention variant refuses) or ERR_NOMEM. */
MUST_CHECK enum status model_plan(struct model **model, struct arena *arena, const struct model_config *config,
                                  const struct param_list *params, const struct model_options *options);
void model_close(struct model *model);

/* New weights (flat BF16 array, borrowed until the next call): rebuilds what linear recipes derive from them, once per
 * update. Must precede the first forward. */
void model_set_weights(struct model *model, const bf16 *weights);

struct model_batch {
    const int32_t *tokens;  /* (B, T) */
    const int32_t *targets; /* (B, T); -1 = ignored */
    int64_t batch, length;
    uint64_t sample; /* index of the first sample in the run, and */
    uint32_t update; /* the update: key the random numbers of this call */
};

struct model_loss {
    double loss_sum; /* natural-log cross entropy summed over valid targets, in token order */
    int64_t valid;   /* targets that are not ignored */
};

/* CPU. Forward only (evaluation, or before backward): loss, and activations saved for backward if `keep`. Tokens lie in
 * [0, V), targets in [-1, V): the loader has checked them. A batch of B gives the bits of B calls with one sample each,
 * losses added in order. */
void model_forward(struct model *model, const struct model_batch *batch, bool keep, struct model_loss *loss);

/* Backward of loss_scale * loss_sum of the last forward (same batch, keep = true; on CUDA once a forward). grads (flat,
 * options.grad_type) is overwritten if `accumulate` is false (gaps too, with zeros), added to otherwise. On the CPU
 * each sample's gradient is complete before it is added, in sample order: a batch of B gives the bits of B calls that
 * accumulate, or of B gradients added in order. on_layer (may be NULL) is called when the gradients of a layer are
 * final (on CUDA: will be, once what is enqueued so far has run): L for the head (unless tied) and final norm, L-1 ..
 * 0, then -1 for the embedding. */
struct model_backward {
    const struct model_batch *batch;
    float loss_scale; /* 1 / valid targets of the whole update */
    void *grads;
    bool accumulate;
    void (*on_layer)(void *context, int layer);
    void *context;
};
void model_backward(struct model *model, const struct model_backward *b);

/* ---- CUDA ----
 *
 * Tokens, targets, weights, gradients, logits and the arena are device memory. All calls but model_plan, model_close
 * and model_warm_up only enqueue on the stream of options.cuda: they can be captured, one graph for the first
 * micro-batch of an update (accumulate = false) and one for the others. loss_scale, sample and update are read from
 * cuda->step when the work runs; the fields of the arguments are not looked at. All B T tokens run at once: a scale of
 * a linear recipe spans the batch, and samples are summed inside of products, so that B > 1 gives the CPU's result but
 * for rounding. Two runs give equal bits (unless `unordered`), recomputation changes none. */

/* Forward. The head's gradient is made here, where the logits are: `grads` (options.grad_type) and `accumulate` are
 * those of the model_backward that follows. grads NULL: evaluation only, nothing is kept. */
void model_forward_cuda(struct model *model, const struct model_batch *batch, void *grads, bool accumulate);

/* Losses of the last forward by sample, device memory (B), overwritten by the next one. */
struct model_loss_row {
    double loss_sum;
    int64_t valid;
};
const struct model_loss_row *model_losses(const struct model *model);

/* Before the first capture, weights being set: one forward and backward of the planned shape on made-up tokens for both
 * values of `accumulate`, not captured, so that the algorithm of each product is chosen by timing it. Leaves gradients
 * and losses undefined and the statistics zero; waits. */
MUST_CHECK enum status model_warm_up(struct model *model, void *grads);

/* Instead of another model_set_weights, after an update that changed its weights in place by an optimizer that also
 * finds the amax of each weight: saves formats that need it a pass over the weights.
 *   model_weight_amax        where that of the parameter at `offset` goes, raised from 0 as bits; parameters of a fused
 *                            matrix share a place; NULL: nobody needs it
 *   model_weight_amax_reset  zeros in all places; before the update
 *   model_weights_updated    after it. Bits are those of model_set_weights */
float *model_weight_amax(const struct model *model, size_t offset);
void model_weight_amax_reset(struct model *model);
void model_weights_updated(struct model *model);

/* Whether calls enqueued from here on gather statistics of attention: yes at first. A variant may have slower code for
 * that (sm90 does). A captured graph keeps what held when it was captured. */
void model_count_stats(struct model *model, bool on);

/* ---- both ---- */

/* Logits (rows, V) FP32 of some of the B T token rows of the last forward, for tests and export checks. With graphs:
 * of the forward that ran last, whichever call it was recorded from. */
void model_logits(struct model *model, int64_t first_row, int64_t rows, float *logits);

/* Statistics of attention by layer, added since the last model_stats_reset. Length: layers. On CUDA device memory, and
 * the reset is enqueued. Recomputed forwards are not counted again. */
const struct attention_stats *model_stats(const struct model *model);
void model_stats_reset(struct model *model);

/* FLOPs of a training token, forward and backward: 6 (N - embedding) + 12 L heads head_dim T (PaLM's count; the paper's
 * 51.47 G for 8B at T 4096). A tied matrix is multiplied as the head and counts. */
double model_flops_per_token(const struct model_config *config, const struct param_list *params, int64_t tokens);

/* A table of layer -> format of each projection, into the log. */
void model_report_formats(const struct model_config *config, const struct model_options *options);
