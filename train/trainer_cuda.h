/* train: what a trainer holds on a GPU. For trainer_cuda.c and step_cuda.c only; everybody else knows engine.h. */
#pragma once

#include "core/cuda.h"
#include "core/nvml.h"
#include "dist/comm_nccl.h"
#include "train/trainer.h"

/* What the host looks at once per update, gathered in one block of device memory and fetched by one copy. */
struct gpu_results {
    struct gradnorm *norm;
    struct model_loss_row *losses; /* (local) */
    struct attention_stats *stats; /* (layers), summed over the rank's samples */
};

struct gpu {
    struct cuda *cuda;      /* owns */
    struct comm_nccl *nccl; /* owns; NULL with one rank */
    struct nvml *nvml;      /* owns; run.mode = step_time only */
    struct adamw_cuda adamw;
    struct gradnorm_cuda norm;
    void *adamw_plan, *grads;
    int32_t *tokens, *targets; /* device: one micro-batch */
    void *results;             /* device: gpu_results in a row */
    size_t results_bytes;
    float *master_piece; /* device: FP32 master weights between arrays and a checkpoint */
    void *pinned;        /* owns; page-locked: results_host, the trainer's batch, staging */
    void *results_host;
    void *staging; /* `store.piece` bytes */
    struct checkpoint_store store;
    struct gpu_place *places; /* owns; of the tensors of a checkpoint */
    int64_t micro_batches;
    struct cuda_graph *forward[2][2], *backward[2][2]; /* [statistics are made][not the update's first micro-batch] */
    struct cuda_event **events;                        /* owns; see step_cuda.c */
    bool warm, stepped;                                /* products are chosen; an update was applied */
};

/* The results as they lie in memory, on the device or fetched. */
struct gpu_results gpu_results_at(const struct trainer *t, void *block);

/* Is `update` one whose statistics of attention are made? */
bool gpu_counts(const struct trainer *t, int64_t update);

/* engine.prepare: rank 0 reads or times the algorithms of all products, the others take its. */
MUST_CHECK enum status gpu_warm_up(struct trainer *t);

/* Waits for the stream. With several ranks a lost one ends the wait after dist.timeout_s. */
MUST_CHECK enum status gpu_wait(struct trainer *t, const char *what);

enum status gpu_gradients(struct trainer *t, struct step_result *r, struct step_gradients *g);
enum status gpu_apply(struct trainer *t, struct step_result *r, float clip_scale);
enum status gpu_evaluate(struct trainer *t, struct model *model, struct model_loss *loss);

MUST_CHECK enum status gpu_events_open(struct gpu *gpu);
void gpu_events_close(struct gpu *gpu);
