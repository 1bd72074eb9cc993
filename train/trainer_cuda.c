/* train: a trainer's memory on a GPU: plan, first values, and the way between device and host. */
#include "train/trainer_cuda.h"

#include "core/gemm_cuda.h"
#include "core/log.h"
#include "train/run_folder.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Weights, moments and checkpoints pass through page-locked memory in pieces of this size, whatever the model's. */
enum { PIECE_BYTES = 32 << 20, PATH_BYTES = CONFIG_PATH + 64 };

/* A parameter in one of the state arrays: what a checkpoint's tensor is known by. */
struct gpu_place {
    struct trainer *trainer;
    enum state_array array;
    size_t first;
};

static size_t round_up(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

struct gpu_results gpu_results_at(const struct trainer *t, void *block)
{
    char *at = block;
    size_t losses = round_up(sizeof(struct gradnorm));
    size_t stats = losses + round_up((size_t)t->local * sizeof(struct model_loss_row));
    return (struct gpu_results){.norm = block,
                                .losses = (struct model_loss_row *)(void *)(at + losses),
                                .stats = (struct attention_stats *)(void *)(at + stats)};
}

static size_t results_bytes(const struct trainer *t)
{
    return round_up(sizeof(struct gradnorm)) + round_up((size_t)t->local * sizeof(struct model_loss_row)) +
           (size_t)t->config->model.layers * sizeof(struct attention_stats);
}

/* ---- opening ---- */

static enum status open_pinned(struct trainer *t)
{
    struct gpu *gpu = t->gpu;
    size_t row = round_up((size_t)(t->local * t->config->data.seq_len) * sizeof(int32_t));
    size_t results = round_up(gpu->results_bytes);
    TRY(cuda_host_alloc(&gpu->pinned, results + 2 * row + PIECE_BYTES, "batches, results and staging"));
    char *at = gpu->pinned;
    gpu->results_host = at;
    t->tokens = (int32_t *)(void *)(at + results);
    t->targets = (int32_t *)(void *)(at + results + row);
    gpu->staging = at + results + 2 * row;
    return OK;
}

static enum status get(const struct checkpoint_tensor *tensor, uint64_t offset, size_t n);
static enum status put(const struct checkpoint_tensor *tensor, uint64_t offset, size_t n);

static enum status open_gpu(struct trainer *t)
{
    struct gpu *gpu = t->gpu = calloc(1, sizeof *gpu);
    size_t arrays = STATE_V + 1;
    if (gpu == NULL || (gpu->places = calloc(arrays * (size_t)t->params.count, sizeof *gpu->places)) == NULL) {
        return status_fail(ERR_NOMEM, "no memory for the state of a GPU");
    }
    gpu->micro_batches = t->local / t->config->data.micro_batch;
    gpu->results_bytes = results_bytes(t);
    TRY(cuda_open(&gpu->cuda, t->device->ordinal));
    t->options.cuda = gpu->cuda;
    gpu->nvml = t->config->run.mode == MODE_STEP_TIME ? nvml_open(t->device->ordinal) : NULL;
    TRY(gpu_events_open(gpu));
    TRY(open_pinned(t));
    gpu->store = (struct checkpoint_store){.piece = PIECE_BYTES, .buffer = gpu->staging, .get = get, .put = put};
    return OK;
}

/* NCCL's ranks meet here: after every rank has its GPU. */
static enum status join(struct trainer *t)
{
    size_t bucket = (size_t)t->config->bucket_mb << 20;
    return comm_nccl_open(&t->gpu->nccl, t->comm, t->gpu->cuda, bucket);
}

static void release_gpu(struct trainer *t)
{
    (void)t; /* all that carve takes lies in the arenas */
}

static void close_gpu(struct trainer *t)
{
    struct gpu *gpu = t->gpu;
    if (gpu == NULL) {
        return;
    }
    for (int i = 0; i < 4; i++) {
        cuda_graph_close(gpu->forward[i / 2][i % 2]);
        cuda_graph_close(gpu->backward[i / 2][i % 2]);
    }
    gpu_events_close(gpu);
    comm_nccl_close(gpu->nccl);
    nvml_close(gpu->nvml);
    cuda_host_free(gpu->pinned);
    cuda_close(gpu->cuda);
    free(gpu->places);
    free(gpu);
    t->gpu = NULL;
}

/* ---- memory ---- */

static int64_t norm_blocks(const struct trainer *t)
{
    int64_t blocks = 0;
    for (int i = 0; i < t->params.count; i++) {
        blocks += (int64_t)((t->segments[i].elements + GRADNORM_BLOCK - 1) / GRADNORM_BLOCK);
    }
    return blocks;
}

static enum status carve_gpu(struct trainer *t, struct arena *arena, struct arena *host)
{
    const struct adamw_config *optim = &t->config->optim;
    size_t n = t->params.elements, moment = adamw_moment_bytes(optim);
    size_t micro = (size_t)(t->config->data.micro_batch * t->config->data.seq_len) * sizeof(int32_t);
    struct gpu none = {0}, *gpu = t->gpu != NULL ? t->gpu : &none; /* a plan needs no GPU */
    (void)host;
    t->state.weights = arena_take(arena, "weights", n * sizeof(bf16));
    gpu->adamw.remainder = optim->master_fp32 ? arena_take(arena, "master, lower halves", n * sizeof(int16_t)) : NULL;
    t->state.m = arena_take(arena, "moments", n * moment);
    t->state.v = arena_take(arena, "moments", n * moment);
    gpu->grads = arena_take(arena, "gradients", n * dtype_bytes(t->options.grad_type));
    gpu->adamw_plan = arena_take(arena, "optimizer", adamw_plan_bytes_cuda(t->segments, t->params.count));
    gpu->norm.scratch = arena_take(arena, "optimizer", gradnorm_scratch_bytes_cuda(norm_blocks(t), t->params.count));
    gpu->tokens = arena_take(arena, "batch", micro);
    gpu->targets = arena_take(arena, "batch", micro);
    gpu->results = arena_take(arena, "statistics", results_bytes(t));
    gpu->master_piece = optim->master_fp32 ? arena_take(arena, "staging", PIECE_BYTES) : NULL;
    return OK;
}

/* ---- first values ---- */

/* n weights from element `at` on, with their lower halves, from FP32 values in the staging buffer. */
static void set_master(struct trainer *t, size_t at, size_t n)
{
    struct gpu *gpu = t->gpu;
    cuda_upload(gpu->cuda, gpu->master_piece, gpu->staging, n * sizeof(float));
    adamw_master_split_cuda(gpu->master_piece, t->state.weights + at, gpu->adamw.remainder + at, n, gpu->cuda);
}

/* Values take two thirds of the staging buffer; without a master their BF16 codes take the rest. To measure step times
 * the values of the first piece serve for all: eight billion random numbers would take longer than the measurement. */
static enum status initialise_param(struct trainer *t, const struct param *p)
{
    enum { PIECE = PIECE_BYTES / (sizeof(float) + sizeof(bf16)) / 256 * 256 };
    struct gpu *gpu = t->gpu;
    size_t elements = (size_t)(p->rows * p->cols);
    bool timing = t->config->run.mode == MODE_STEP_TIME;
    float *values = gpu->staging;
    bf16 *codes = (bf16 *)(void *)(values + PIECE);
    for (size_t first = 0; first < elements; first += PIECE) {
        size_t n = elements - first < PIECE ? elements - first : PIECE, at = p->offset + first;
        if (first == 0 || !timing) {
            param_init(p, &t->config->model, (uint64_t)t->config->run.seed, first, n, values);
        }
        if (gpu->adamw.remainder != NULL) {
            set_master(t, at, n);
        } else {
#pragma omp parallel for
            for (size_t i = 0; i < n; i++) {
                codes[i] = bf16_from_float(values[i]);
            }
            cuda_upload(gpu->cuda, t->state.weights + at, codes, n * sizeof *codes);
        }
        TRY(cuda_sync(gpu->cuda, "initial weights"));
    }
    return OK;
}

static enum status initialise_gpu(struct trainer *t)
{
    struct gpu *gpu = t->gpu;
    size_t n = t->params.elements, moment = adamw_moment_bytes(&t->config->optim);
    TRY(join(t));
    cuda_zero(gpu->cuda, t->state.weights, n * sizeof(bf16));
    cuda_zero(gpu->cuda, t->state.m, n * moment);
    cuda_zero(gpu->cuda, t->state.v, n * moment);
    if (gpu->adamw.remainder != NULL) {
        cuda_zero(gpu->cuda, gpu->adamw.remainder, n * sizeof(int16_t));
    }
    for (int i = 0; i < t->params.count; i++) {
        TRY(initialise_param(t, &t->params.params[i]));
    }
    gpu->adamw.weights = t->state.weights;
    gpu->adamw.m = t->state.m;
    gpu->adamw.v = t->state.v;
    for (int i = 0; i < t->params.count; i++) {
        t->segments[i].amax = model_weight_amax(t->model, t->segments[i].offset);
    }
    adamw_plan_cuda(&gpu->adamw, &t->config->optim, t->segments, t->params.count, gpu->adamw_plan, gpu->cuda);
    ASSERT(gpu->adamw.blocks == norm_blocks(t));
    gpu->norm = (struct gradnorm_cuda){.plan = gpu->adamw.plan,
                                       .blocks = gpu->adamw.blocks,
                                       .n_segments = t->params.count,
                                       .grads = gpu->grads,
                                       .grad_type = t->options.grad_type,
                                       .scratch = gpu->norm.scratch,
                                       .result = gpu_results_at(t, gpu->results).norm};
    return cuda_sync(gpu->cuda, "initial state");
}

/* ---- between device and host ---- */

enum status gpu_wait(struct trainer *t, const char *what)
{
    return t->gpu->nccl != NULL ? comm_nccl_wait(t->gpu->nccl, t->gpu->cuda, what) : cuda_sync(t->gpu->cuda, what);
}

/* Device memory of an array's element; the master is made of two arrays. */
static char *element_at(const struct gpu_place *place, size_t element, size_t bytes)
{
    const struct trainer *t = place->trainer;
    char *const arrays[] = {[STATE_WEIGHTS] = (char *)t->state.weights, [STATE_M] = t->state.m, [STATE_V] = t->state.v};
    return arrays[place->array] + (place->first + element) * bytes;
}

static enum status get(const struct checkpoint_tensor *tensor, uint64_t offset, size_t n)
{
    const struct gpu_place *place = tensor->data;
    struct trainer *t = place->trainer;
    struct gpu *gpu = t->gpu;
    size_t bytes = dtype_bytes(tensor->dtype), element = offset / bytes, at = place->first + element;
    const void *from = gpu->master_piece;
    ASSERT(offset % bytes == 0 && n % bytes == 0 && n <= PIECE_BYTES);
    if (place->array == STATE_MASTER) {
        adamw_master_join_cuda(t->state.weights + at, gpu->adamw.remainder + at, gpu->master_piece, n / bytes,
                               gpu->cuda);
    } else {
        from = element_at(place, element, bytes);
    }
    cuda_download(gpu->cuda, gpu->staging, from, n);
    return cuda_sync(gpu->cuda, "reading a tensor");
}

static enum status put(const struct checkpoint_tensor *tensor, uint64_t offset, size_t n)
{
    const struct gpu_place *place = tensor->data;
    struct trainer *t = place->trainer;
    size_t bytes = dtype_bytes(tensor->dtype), element = offset / bytes;
    ASSERT(offset % bytes == 0 && n % bytes == 0 && n <= PIECE_BYTES);
    if (place->array == STATE_MASTER) {
        set_master(t, place->first + element, n / bytes);
    } else {
        cuda_upload(t->gpu->cuda, element_at(place, element, bytes), t->gpu->staging, n);
    }
    return cuda_sync(t->gpu->cuda, "writing a tensor");
}

static void expose_gpu(struct trainer *t, enum state_array array, int param, struct checkpoint_tensor *tensor)
{
    struct gpu_place *place = &t->gpu->places[(int)array * t->params.count + param];
    *place = (struct gpu_place){.trainer = t, .array = array, .first = t->segments[param].offset};
    tensor->data = place;
    tensor->store = &t->gpu->store;
}

static enum status weights_gpu(struct trainer *t, size_t first, size_t *n, const bf16 **values)
{
    size_t most = PIECE_BYTES / sizeof **values;
    *n = *n < most ? *n : most;
    *values = t->gpu->staging;
    cuda_download(t->gpu->cuda, t->gpu->staging, t->state.weights + first, *n * sizeof **values);
    return cuda_sync(t->gpu->cuda, "reading weights");
}

static void spoil_weight_gpu(struct trainer *t, size_t element)
{
    bf16 nan = 0x7fff;
    cuda_upload(t->gpu->cuda, t->state.weights + element, &nan, sizeof nan);
    trainer_weights_changed(t);
}

/* ---- choices of products ---- */

static enum status recall_gpu(struct trainer *t, const char *path)
{
    return gemm_cuda_load(t->gpu->cuda, path);
}

bool gpu_counts(const struct trainer *t, int64_t update)
{
    int64_t every = t->config->attention_every;
    return every > 0 && update % every == 0;
}

/* Runs all products once, so that those without a choice are timed. With and without statistics where the run has
 * updates of both kinds: kernels are loaded when they first run, better not in a capture. */
static enum status run_once(struct trainer *t)
{
    int64_t every = t->config->attention_every;
    for (int counted = 0; counted < 2; counted++) {
        if (counted ? every > 0 : every != 1) {
            model_count_stats(t->model, counted != 0);
            TRY(model_warm_up(t->model, t->gpu->grads));
        }
    }
    return OK;
}

/* Rank 0's part: reads what is there, times the rest, writes both down. */
static enum status choose(struct trainer *t)
{
    const struct cuda *cuda = t->gpu->cuda;
    const struct config *config = t->config;
    const char *given = config->gemm_choices;
    if (given[0] != '\0' && access(given, F_OK) == 0) {
        TRY(gemm_cuda_load(cuda, given));
    }
    int known = gemm_cuda_planned(cuda);
    TRY(run_once(t));
    log_info("matrix products: %d algorithms, %d of them timed now%s", gemm_cuda_planned(cuda),
             gemm_cuda_planned(cuda) - known, t->comm->size > 1 ? ", by rank 0 for all ranks" : "");
    if (config->run.mode != MODE_STEP_TIME) { /* which writes nothing unasked */
        char own[PATH_BYTES];
        snprintf(own, sizeof own, "%s/gemm.json", config->run.out);
        TRY(gemm_cuda_save(cuda, own));
    }
    return given[0] != '\0' ? gemm_cuda_save(cuda, given) : OK; /* with what it did not have */
}

/* Rank 0's choices become everybody's, whether or not the ranks share a folder: a rank that timed its own could add in
 * another order. A GPU of another kind than rank 0's says so, and times its own. */
static enum status share_choices(struct trainer *t)
{
    bool teller = t->comm->rank == 0;
    char *text = NULL;
    TRY(ranks_agree(t->comm, teller ? gemm_cuda_export(t->gpu->cuda, &text) : OK));
    int64_t bytes = teller ? (int64_t)strlen(text) + 1 : 0;
    enum status status = comm_broadcast(t->comm, &bytes, sizeof bytes, 0);
    if (status == OK && !teller && (text = malloc((size_t)bytes)) == NULL) {
        status = status_fail(ERR_NOMEM, "no memory for rank 0's choices of matrix products");
    }
    status = ranks_agree(t->comm, status);
    if (status == OK) {
        status = comm_broadcast(t->comm, text, (size_t)bytes, 0);
    }
    if (status == OK && !teller) {
        status = gemm_cuda_import(t->gpu->cuda, "rank 0", text);
    }
    free(text);
    if (status == OK && !teller) {
        status = run_once(t);
    }
    return ranks_agree(t->comm, status);
}

enum status gpu_warm_up(struct trainer *t)
{
    if (t->gpu->warm) {
        return OK;
    }
    TRY(ranks_agree(t->comm, t->comm->rank == 0 ? choose(t) : OK));
    if (t->comm->size > 1) {
        TRY(share_choices(t));
    }
    t->gpu->warm = true;
    return OK;
}

/* All memory in use on the GPU, by this process and by others. */
static double memory_gib_gpu(const struct trainer *t)
{
    int64_t left = 0;
    return cuda_memory_free(&left) == OK ? (double)(t->device->memory_bytes - left) / 0x1p30 : NAN;
}

const struct engine engine_cuda = {.open = open_gpu,
                                   .carve = carve_gpu,
                                   .release = release_gpu,
                                   .close = close_gpu,
                                   .initialise = initialise_gpu,
                                   .gradients = gpu_gradients,
                                   .apply = gpu_apply,
                                   .prepare = gpu_warm_up,
                                   .evaluate = gpu_evaluate,
                                   .weights = weights_gpu,
                                   .spoil_weight = spoil_weight_gpu,
                                   .expose = expose_gpu,
                                   .recall = recall_gpu,
                                   .memory_gib = memory_gib_gpu};
