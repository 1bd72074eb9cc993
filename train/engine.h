/* train: what of a trainer depends on where its arrays live. One table a device; trainer_open picks one. */
#pragma once

#include "checkpoint/checkpoint.h"
#include "model/model.h"
#include "optim/gradnorm.h"

struct trainer;
struct step_result;

/* What an update's gradients are like, the same in every rank. */
struct step_gradients {
    struct gradnorm norm;
    int64_t bad_sample; /* first sample of the update whose loss (CPU: or gradient) is not finite; else INT64_MAX */
};

enum state_array { STATE_WEIGHTS, STATE_MASTER, STATE_M, STATE_V };

struct engine {
    /* Opens the device, before anything is planned. */
    enum status (*open)(struct trainer *t);

    /* Carves state, gradients and batch, from `arena` where the model computes and from `host` (on the CPU one arena).
     * The same calls measure and take. `release` frees what carve made beside the arenas; it may be called without
     * carve. */
    enum status (*carve)(struct trainer *t, struct arena *arena, struct arena *host);
    void (*release)(struct trainer *t);
    void (*close)(struct trainer *t);

    /* Initial weights from run.seed, the same bits on every device; moments zero. */
    enum status (*initialise)(struct trainer *t);

    /* Forward, loss and backward of t->tokens, sums over ranks, norm. Fills this rank's part of t->sample_loss and
     * t->sample_stats (others zero) and the times of `r`. */
    enum status (*gradients)(struct trainer *t, struct step_result *r, struct step_gradients *g);

    /* Applies the update with these gradients, and tells the model of the new weights. */
    enum status (*apply)(struct trainer *t, struct step_result *r, float clip_scale);

    /* Before the first update or evaluation, by all ranks: chooses the GEMM algorithms of t's model. (Another model,
     * and a single sample where data.micro_batch is more, take cuBLASLt's first proposal, the same in every run.) */
    enum status (*prepare)(struct trainer *t);

    /* Loss of one sample of t->tokens, nothing kept. `model` may be another one over the same weights. */
    enum status (*evaluate)(struct trainer *t, struct model *model, struct model_loss *loss);

    /* Weights from element `first` as host memory, *n of them or fewer, until the next call. */
    enum status (*weights)(struct trainer *t, size_t first, size_t *n, const bf16 **values);

    /* One weight becomes NaN (debug.fault). */
    void (*spoil_weight)(struct trainer *t, size_t element);

    /* The memory of a checkpoint's tensor, parameter number `param` of an array: fills data and store. */
    void (*expose)(struct trainer *t, enum state_array array, int param, struct checkpoint_tensor *tensor);

    /* Takes the GEMM algorithms of a checkpoint (file `path`), before the first update. */
    enum status (*recall)(struct trainer *t, const char *path);

    /* GiB: the most that this process ever held; of a GPU, what is in use on it. */
    double (*memory_gib)(const struct trainer *t);
};

extern const struct engine engine_cpu;
#if WITH_CUDA
extern const struct engine engine_cuda;
#endif
