/* bench: the logits of a model's initial weights on the first sample, from the GPU and from the CPU, for comparison
 * with another implementation (bench/peer/torch_logits.py).
 *
 *   build/release/bench/peer_logits_cuda CONFIG DIR
 *
 * DIR is what bench/peer_export wrote for the same CONFIG; adds DIR/logits_cuda.f32 and DIR/logits_cpu.f32, both
 * (seq_len, vocab) FP32. */
#include "core/cuda.h"
#include "core/file.h"
#include "model/model.h"
#include "train/config.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* Arrays of one run of the program; what was not reached stays NULL. */
struct peer {
    struct config config;
    struct param_list params;
    struct cuda *cuda;
    float *values, *logits[2]; /* by device kind */
    bf16 *weights;
    int32_t *tokens;
    void *device_weights, *device_tokens, *device_logits;
};

static enum status make_weights(struct peer *p)
{
    TRY(param_list_open(&p->params, &p->config.model));
    size_t n = p->params.elements, T = (size_t)p->config.data.seq_len, V = (size_t)p->config.model.vocab;
    p->values = calloc(n, sizeof *p->values);
    p->weights = calloc(n, sizeof *p->weights);
    p->tokens = calloc(T, sizeof *p->tokens);
    p->logits[DEVICE_CPU] = calloc(T * V, sizeof(float));
    p->logits[DEVICE_CUDA] = calloc(T * V, sizeof(float));
    if (!p->values || !p->weights || !p->tokens || !p->logits[DEVICE_CPU] || !p->logits[DEVICE_CUDA]) {
        return status_fail(ERR_NOMEM, "peer_logits: no memory for %zu weights", n);
    }
    param_list_init(&p->params, &p->config.model, (uint64_t)p->config.run.seed, p->values);
    for (size_t i = 0; i < n; i++) {
        p->weights[i] = bf16_from_float(p->values[i]);
    }
    return OK;
}

static enum status read_tokens(struct peer *p, const char *folder)
{
    char path[CONFIG_PATH + 32];
    snprintf(path, sizeof path, "%s/tokens.i32", folder);
    FILE *file = fopen(path, "rbe");
    size_t T = (size_t)p->config.data.seq_len;
    size_t got = file ? fread(p->tokens, sizeof *p->tokens, T, file) : 0;
    if (file) {
        fclose(file);
    }
    return got == T ? OK : status_fail(ERR_DATA, "%s: %zu tokens, expected %zu: run peer_export first", path, got, T);
}

static enum status upload(struct peer *p)
{
    size_t n = p->params.elements * sizeof(bf16), T = (size_t)p->config.data.seq_len;
    TRY(cuda_alloc(&p->device_weights, n, "weights"));
    TRY(cuda_alloc(&p->device_tokens, T * sizeof *p->tokens, "tokens"));
    TRY(cuda_alloc(&p->device_logits, T * (size_t)p->config.model.vocab * sizeof(float), "logits"));
    cuda_upload(p->cuda, p->device_weights, p->weights, n);
    cuda_upload(p->cuda, p->device_tokens, p->tokens, T * sizeof *p->tokens);
    return cuda_sync(p->cuda, "upload");
}

/* Forward of the first sample on one device, and its logits. */
static enum status forward(struct peer *p, struct model *model, enum device_kind kind)
{
    int64_t T = p->config.data.seq_len;
    const int32_t *tokens = kind == DEVICE_CUDA ? p->device_tokens : p->tokens;
    struct model_batch batch = {.tokens = tokens, .targets = tokens, .batch = 1, .length = T};
    if (kind == DEVICE_CPU) {
        struct model_loss loss;
        model_set_weights(model, p->weights);
        model_forward(model, &batch, false, &loss);
        model_logits(model, 0, T, p->logits[kind]);
        return OK;
    }
    model_set_weights(model, p->device_weights);
    model_forward_cuda(model, &batch, NULL, false);
    model_logits(model, 0, T, p->device_logits);
    cuda_download(p->cuda, p->logits[kind], p->device_logits, (size_t)(T * p->config.model.vocab) * sizeof(float));
    return cuda_sync(p->cuda, "logits");
}

static enum status run_on(struct peer *p, enum device_kind kind)
{
    const struct model_config *c = &p->config.model;
    struct attention_shape shape = {.batch = 1,
                                    .tokens = p->config.data.seq_len,
                                    .heads = c->heads,
                                    .kv_heads = c->kv_heads,
                                    .head_dim = c->head_dim,
                                    .causal = true,
                                    .softmax_scale = 1.0F / sqrtf((float)c->head_dim)};
    struct model_options options = {.linear = p->config.linear,
                                    .attention = p->config.attention,
                                    .device = kind,
                                    .cuda = p->cuda,
                                    .batch = 1,
                                    .tokens = p->config.data.seq_len};
    struct arena measured, arena = {0};
    struct model *model = NULL;
    TRY(attention_choose(&shape, &options.attention, kind, "auto", &options.variant));
    arena_measure(&measured, "model");
    enum status status = model_plan(&model, &measured, c, &p->params, &options);
    model_close(model);
    model = NULL;
    if (status == OK) {
        status = arena_open_on(&arena, "model", measured.high_water, kind);
    }
    if (status == OK) {
        status = model_plan(&model, &arena, c, &p->params, &options);
    }
    if (status == OK) {
        status = forward(p, model, kind);
    }
    model_close(model);
    arena_close(&arena);
    return status;
}

static enum status write_logits(const struct peer *p, const char *folder, enum device_kind kind)
{
    char path[CONFIG_PATH + 32];
    snprintf(path, sizeof path, "%s/logits_%s.f32", folder, kind == DEVICE_CUDA ? "cuda" : "cpu");
    size_t n = (size_t)p->config.data.seq_len * (size_t)p->config.model.vocab;
    return file_write_atomic(path, p->logits[kind], n * sizeof(float));
}

static enum status run(struct peer *p, const char *config, const char *folder)
{
    config_init(&p->config);
    TRY(config_add_file(&p->config, config));
    TRY(config_finish(&p->config));
    TRY(make_weights(p));
    TRY(read_tokens(p, folder));
    TRY(cuda_open(&p->cuda, 0));
    TRY(upload(p));
    TRY(run_on(p, DEVICE_CPU));
    TRY(run_on(p, DEVICE_CUDA));
    TRY(write_logits(p, folder, DEVICE_CPU));
    return write_logits(p, folder, DEVICE_CUDA);
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        return status_exit_code(status_fail(ERR_USAGE, "usage: peer_logits_cuda CONFIG DIR"));
    }
    static struct peer peer; /* large */
    enum status status = run(&peer, argv[1], argv[2]);
    cuda_free(peer.device_weights);
    cuda_free(peer.device_tokens);
    cuda_free(peer.device_logits);
    cuda_close(peer.cuda);
    param_list_close(&peer.params);
    free(peer.values);
    free(peer.weights);
    free(peer.tokens);
    free(peer.logits[DEVICE_CPU]);
    free(peer.logits[DEVICE_CUDA]);
    return status_exit_code(status);
}
