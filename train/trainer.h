/* train: everything that one training run holds in memory, planned and carved in one place. */
#pragma once

#include "checkpoint/checkpoint.h"
#include "core/device.h"
#include "data/loader.h"
#include "dist/grad_tree.h"
#include "model/model.h"
#include "train/config.h"
#include "train/engine.h"
#include "train/fault.h"

struct trainer {
    const struct config *config;
    const struct device *device;
    struct comm *comm;
    const struct engine *engine; /* of the device */
    struct gpu *gpu;             /* engine_cuda's own; NULL on the CPU */
    int64_t local;               /* samples of this rank in an update */
    struct param_list params;
    struct adamw_segment *segments; /* owns; one per parameter */
    struct model_options options;
    struct arena arena; /* state, gradients and model, in the device's memory */
    struct arena host;  /* CUDA: what stays in memory of the host; on the CPU `arena` holds all */
    struct model *model;
    struct adamw_state state;             /* CUDA: device memory; the master lies in gpu */
    struct grad_tree tree;                /* CPU */
    float *grads;                         /* CPU: of this update, once summed */
    int32_t *tokens, *targets;            /* this rank's samples of an update, memory of the host */
    double *sample_loss;                  /* (batch): loss sums of the update's samples, in sample order */
    struct attention_stats *sample_stats; /* (batch, layers) */
    struct loader *train, *val;           /* val NULL without data.val */
    struct watch *watch;
    int64_t update;                    /* updates made */
    int64_t samples;                   /* consumed: the whole state of the data */
    double last_loss;                  /* of the last update made; NaN before the first */
    struct checkpoint_damaged damaged; /* rank 0: named by rotation */
    struct fault fault;
};

/* The attention of one call: a sample on the CPU, a micro-batch on CUDA. */
struct attention_shape trainer_attention_shape(const struct config *config, const struct device *device);

/* Describes all arrays to measuring arenas: their bytes, by label; `host` stays empty on the CPU. Opens no data and no
 * device. */
MUST_CHECK enum status trainer_measure(const struct config *config, struct comm *comm, const struct device *device,
                                       struct arena *arena, struct arena *host);

/* Allocates, opens the shards, initialises weights from run.seed. All ranks call it; all fail if one does. Close in
 * every case in which this process goes on. */
MUST_CHECK enum status trainer_open(struct trainer *trainer, const struct config *config, struct comm *comm,
                                    const struct device *device);

/* All ranks call it; after an error that is one rank's alone, ranks_leave comes before. */
void trainer_close(struct trainer *trainer);

/* Where the data goes on after trainer->samples was set. */
void trainer_seek(struct trainer *trainer);

/* Tells the model of new weights: after initialisation, loading and every update. */
void trainer_weights_changed(struct trainer *trainer);
