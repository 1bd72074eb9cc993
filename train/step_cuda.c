/* train: the step on a GPU. All of it is enqueued on one stream without waiting: batches from page-locked memory,
 * forward and backward of each micro-batch as replayed graphs, the sum over ranks, the norm. One wait an update, for
 * the numbers that the watch decides on; AdamW then runs while the host reads the next batch. */
#include "train/step.h"
#include "train/trainer_cuda.h"

#include <math.h>
#include <nvtx3/nvToolsExt.h>
#include <stdlib.h>
#include <string.h>

/* Points in time of an update; each micro-batch adds one after its forward and one after its backward. */
enum { AT_START, AT_SUMMED, AT_NORM, AT_APPLY, AT_APPLIED, AT_MICRO };

enum status gpu_events_open(struct gpu *gpu)
{
    int64_t n = AT_MICRO + 2 * gpu->micro_batches;
    gpu->events = calloc((size_t)n, sizeof *gpu->events);
    if (gpu->events == NULL) {
        return status_fail(ERR_NOMEM, "no memory for %lld events", (long long)n);
    }
    for (int64_t i = 0; i < n; i++) {
        TRY(cuda_event_open(&gpu->events[i]));
    }
    return OK;
}

void gpu_events_close(struct gpu *gpu)
{
    for (int64_t i = 0; gpu->events != NULL && i < AT_MICRO + 2 * gpu->micro_batches; i++) {
        cuda_event_close(gpu->events[i]);
    }
    free(gpu->events);
    gpu->events = NULL;
}

static void mark(const struct gpu *gpu, int64_t event)
{
    cuda_event_record(gpu->cuda, gpu->events[event]);
}

static double between(const struct gpu *gpu, int64_t from, int64_t to)
{
    return cuda_event_ms(gpu->events[from], gpu->events[to]);
}

/* ---- a micro-batch ---- */

static struct model_batch micro_batch(const struct trainer *t)
{
    return (struct model_batch){.tokens = t->gpu->tokens,
                                .targets = t->gpu->targets,
                                .batch = t->config->data.micro_batch,
                                .length = t->config->data.seq_len};
}

static void forward(struct trainer *t, bool accumulate)
{
    struct model_batch batch = micro_batch(t);
    model_forward_cuda(t->model, &batch, t->gpu->grads, accumulate);
}

static void backward(struct trainer *t, bool accumulate)
{
    struct model_batch batch = micro_batch(t);
    model_backward(t->model,
                   &(struct model_backward){.batch = &batch, .grads = t->gpu->grads, .accumulate = accumulate});
}

/* Runs `part`: recorded the first time, then as a graph, which spares the host and the GPU some thousand launches. */
static enum status run_part(struct trainer *t, const char *name, struct cuda_graph **graph,
                            void (*part)(struct trainer *, bool), bool accumulate)
{
    const struct cuda *cuda = t->gpu->cuda;
    nvtxRangePushA(name);
    enum status status = OK;
    if (!t->config->graphs) {
        part(t, accumulate);
    } else {
        if (*graph == NULL && (status = cuda_graph_begin(cuda)) == OK) {
            part(t, accumulate);
            status = cuda_graph_end(cuda, graph);
        }
        if (status == OK) {
            cuda_graph_launch(cuda, *graph);
        }
    }
    nvtxRangePop();
    return status;
}

static void plant_fault(struct trainer *t, int64_t update)
{
    size_t element;
    float value;
    if (fault_in_gradient(t, update, &element, &value)) {
        bf16 code = bf16_from_float(value);
        bool narrow = t->options.grad_type == DTYPE_BF16;
        size_t bytes = dtype_bytes(t->options.grad_type);
        cuda_upload(t->gpu->cuda, (char *)t->gpu->grads + element * bytes, narrow ? (void *)&code : (void *)&value,
                    bytes);
    }
}

/* Micro-batch k of this rank. Its step's numbers and tokens are copied where the graphs read them; the copies run in
 * order with what came before, so one device buffer does. */
static enum status run_micro_batch(struct trainer *t, const struct step_result *r, int64_t k)
{
    struct gpu *gpu = t->gpu;
    int64_t at_once = t->config->data.micro_batch, n = at_once * t->config->data.seq_len;
    struct cuda_step step = {.sample = (uint64_t)(t->samples + t->comm->rank * t->local + k * at_once),
                             .update = (uint32_t)r->update,
                             .loss_scale = (float)(1.0 / (double)r->valid)};
    cuda_set_step(gpu->cuda, &step);
    cuda_upload(gpu->cuda, gpu->tokens, t->tokens + k * n, (size_t)n * sizeof *gpu->tokens);
    cuda_upload(gpu->cuda, gpu->targets, t->targets + k * n, (size_t)n * sizeof *gpu->targets);
    TRY(run_part(t, "forward", &gpu->forward[r->counted][k > 0], forward, k > 0));
    mark(gpu, AT_MICRO + 2 * k);
    TRY(run_part(t, "backward", &gpu->backward[r->counted][k > 0], backward, k > 0));
    mark(gpu, AT_MICRO + 2 * k + 1);
    struct gpu_results results = gpu_results_at(t, gpu->results);
    cuda_copy(gpu->cuda, results.losses + k * at_once, model_losses(t->model),
              (size_t)at_once * sizeof *results.losses);
    return OK;
}

/* ---- an update ---- */

static void read_times(const struct gpu *gpu, struct step_result *r)
{
    int64_t before = AT_START;
    for (int64_t k = 0; k < gpu->micro_batches; k++) {
        r->forward_ms += between(gpu, before, AT_MICRO + 2 * k);
        r->backward_ms += between(gpu, AT_MICRO + 2 * k, AT_MICRO + 2 * k + 1);
        before = AT_MICRO + 2 * k + 1;
    }
    r->comm_ms += between(gpu, before, AT_SUMMED);
    r->optim_ms = between(gpu, AT_SUMMED, AT_NORM) + (gpu->stepped ? between(gpu, AT_APPLY, AT_APPLIED) : NAN);
}

/* This rank's losses, by sample; its statistics, which are sums over its samples, at the place of its first sample. */
static void read_results(struct trainer *t, struct step_gradients *g)
{
    struct gpu_results results = gpu_results_at(t, t->gpu->results_host);
    int64_t first = t->comm->rank * t->local, layers = t->config->model.layers;
    g->norm = *results.norm;
    g->bad_sample = INT64_MAX;
    for (int64_t k = t->local - 1; k >= 0; k--) {
        t->sample_loss[first + k] = results.losses[k].loss_sum;
        if (!isfinite(results.losses[k].loss_sum)) {
            g->bad_sample = first + k;
        }
    }
    memcpy(t->sample_stats + first * layers, results.stats, (size_t)layers * sizeof *results.stats);
}

/* Every rank computed the norm of what should be one sum: ranks that differ would drift apart unseen. */
static enum status check_ranks_agree(struct trainer *t, double norm)
{
    double extremes[2] = {norm, -norm};
    if (t->comm->size == 1) {
        return OK;
    }
    TRY(comm_max_f64(t->comm, extremes, 2));
    if (!isnan(norm) && extremes[0] != -extremes[1]) {
        return status_fail(
            ERR_COMM,
            "the ranks' gradient norms differ, %.17g to %.17g, after NCCL summed the gradients: a GPU or "
            "a link is broken",
            -extremes[1], extremes[0]);
    }
    return OK;
}

enum status gpu_gradients(struct trainer *t, struct step_result *r, struct step_gradients *g)
{
    struct gpu *gpu = t->gpu;
    struct gpu_results results = gpu_results_at(t, gpu->results);
    mark(gpu, AT_START);
    r->counted = gpu_counts(t, r->update);
    model_count_stats(t->model, r->counted);
    model_stats_reset(t->model);
    for (int64_t k = 0; k < gpu->micro_batches; k++) {
        TRY(run_micro_batch(t, r, k));
        if (k == 0) {
            plant_fault(t, r->update);
        }
    }
    /* Some kilobytes; zeros in an update that made none. */
    cuda_copy(gpu->cuda, results.stats, model_stats(t->model), (size_t)t->config->model.layers * sizeof *results.stats);
    nvtxRangePushA("sum over ranks, norm");
    comm_nccl_sum(gpu->nccl, gpu->grads, t->options.grad_type, t->params.elements);
    mark(gpu, AT_SUMMED);
    gradnorm_cuda(&gpu->norm, gpu->cuda);
    mark(gpu, AT_NORM);
    cuda_download(gpu->cuda, gpu->results_host, gpu->results, gpu->results_bytes);
    struct nvml_sample sample = nvml_read(gpu->nvml); /* now that the GPU has much to do */
    r->sm_mhz = sample.sm_mhz;
    r->watts = sample.watts;
    enum status status = gpu_wait(t, "forward and backward");
    nvtxRangePop();
    TRY(status);
    read_times(gpu, r);
    read_results(t, g);
    return check_ranks_agree(t, g->norm.norm);
}

enum status gpu_apply(struct trainer *t, struct step_result *r, float clip_scale)
{
    struct gpu *gpu = t->gpu;
    nvtxRangePushA("AdamW");
    mark(gpu, AT_APPLY);
    model_weight_amax_reset(t->model);
    adamw_step_cuda(&t->config->optim, &gpu->adamw, gpu->grads, t->options.grad_type, clip_scale, (float)r->lr,
                    (uint32_t)r->update, gpu->cuda);
    model_weights_updated(t->model);
    mark(gpu, AT_APPLIED);
    nvtxRangePop();
    gpu->stepped = true;
    return OK;
}

/* One sample and one wait: evaluations are rare, and equal bits for any micro-batch are worth more. */
enum status gpu_evaluate(struct trainer *t, struct model *model, struct model_loss *loss)
{
    struct gpu *gpu = t->gpu;
    int64_t T = t->config->data.seq_len;
    struct model_batch batch = {.tokens = gpu->tokens, .targets = gpu->targets, .batch = 1, .length = T};
    struct model_loss_row *row = gpu->results_host;
    cuda_upload(gpu->cuda, gpu->tokens, t->tokens, (size_t)T * sizeof *gpu->tokens);
    cuda_upload(gpu->cuda, gpu->targets, t->targets, (size_t)T * sizeof *gpu->targets);
    model_count_stats(model, false); /* the next update says what it wants */
    model_forward_cuda(model, &batch, NULL, false);
    cuda_download(gpu->cuda, row, model_losses(model), sizeof *row);
    TRY(cuda_sync(gpu->cuda, "evaluation"));
    *loss = (struct model_loss){.loss_sum = row->loss_sum, .valid = row->valid};
    return OK;
}
