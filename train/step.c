/* train: the step, from top to bottom. */
#include "train/step.h"

#include "core/log.h"

#include <math.h>
#include <string.h>
#include <time.h>
#include <xxhash.h>

double step_clock_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static double lap_ms(double *since)
{
    double now = step_clock_s(), ms = 1e3 * (now - *since);
    *since = now;
    return ms;
}

/* Reads this rank's samples. The number of valid targets of the whole update is known before the first forward: it is
 * the one divisor of every gradient. The batch's hash is the sum of its samples' hashes modulo 2^64, so that it does
 * not depend on ranks; it travels as two halves, whose sums stay in range. */
static enum status next_batch(struct trainer *t, struct step_result *r)
{
    int64_t local = t->tree.leaves, T = t->config->data.seq_len;
    uint64_t first = (uint64_t)(t->comm->rank * local), hash = 0;
    TRY(loader_next(t->train, t->tokens, t->targets, NULL));
    int64_t valid = 0;
    for (int64_t i = 0; i < local * T; i++) {
        valid += t->targets[i] >= 0;
    }
    for (int64_t k = 0; k < local; k++) {
        const int32_t *sample = t->tokens + k * T;
        hash += XXH3_64bits_withSeed(sample, (size_t)T * sizeof *sample, first + (uint64_t)k);
    }
    int64_t sums[3] = {valid, (int64_t)(hash >> 32), (int64_t)(hash & 0xffffffff)};
    TRY(comm_sum_i64(t->comm, sums, 3));
    r->valid = sums[0];
    r->batch_hash = ((uint64_t)sums[1] << 32) + (uint64_t)sums[2];
    if (r->valid == 0) {
        return status_fail(ERR_DATA, "update %lld: no target of its %lld sequences counts: check data.train",
                           (long long)r->update, (long long)t->config->data.batch);
    }
    return OK;
}

/* By exponent bits, without branches: this runs over every gradient of every sample, to name the rank and sample of a
 * NaN that the sum over samples would hide. */
static bool all_finite(const float *x, size_t n)
{
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        bad |= (bits & 0x7f800000U) == 0x7f800000U;
    }
    return bad == 0;
}

/* Forward and backward of this rank's samples, each a leaf of the gradient tree. *bad_sample: the first sample of the
 * update whose loss or gradient is not finite, INT64_MAX if none. */
static void run_samples(struct trainer *t, struct step_result *r, int64_t *bad_sample)
{
    int64_t local = t->tree.leaves, T = t->config->data.seq_len, layers = t->config->model.layers;
    size_t batch = (size_t)t->config->data.batch;
    memset(t->sample_loss, 0, batch * sizeof *t->sample_loss);
    memset(t->sample_stats, 0, batch * (size_t)layers * sizeof *t->sample_stats);
    *bad_sample = INT64_MAX;
    double clock = step_clock_s();
    for (int64_t k = 0; k < local; k++) {
        int64_t g = t->comm->rank * local + k;
        struct model_batch batch_k = {.tokens = t->tokens + k * T,
                                      .targets = t->targets + k * T,
                                      .batch = 1,
                                      .length = T,
                                      .sample = (uint64_t)(t->samples + g),
                                      .update = (uint32_t)r->update};
        struct model_loss loss;
        float *leaf = grad_tree_leaf(&t->tree);
        model_stats_reset(t->model);
        model_forward(t->model, &batch_k, true, &loss);
        r->forward_ms += lap_ms(&clock);
        struct model_backward backward = {
            .batch = &batch_k, .loss_scale = (float)(1.0 / (double)r->valid), .grads = leaf};
        model_backward(t->model, &backward);
        if (k == 0) {
            fault_in_gradient(t, r->update, leaf);
        }
        t->sample_loss[g] = loss.loss_sum;
        memcpy(t->sample_stats + g * layers, model_stats(t->model), (size_t)layers * sizeof *t->sample_stats);
        bool finite = isfinite(loss.loss_sum);
        for (int i = 0; i < t->params.count && finite; i++) {
            finite = all_finite(leaf + t->segments[i].offset, t->segments[i].elements);
        }
        if (!finite && g < *bad_sample) {
            *bad_sample = g;
        }
        grad_tree_push(&t->tree);
        r->backward_ms += lap_ms(&clock);
    }
}

/* Gradients, losses and statistics of all ranks, in every rank. Each sample's numbers come from one rank and are zero
 * on the others, so that their sum over ranks is exact; samples are then added in order. */
static enum status reduce(struct trainer *t, struct step_result *r, float **grads, int64_t *bad_sample)
{
    int64_t batch = t->config->data.batch, layers = t->config->model.layers;
    int words = (int)(sizeof(struct attention_stats) / sizeof(double));
    TRY(grad_tree_sum(&t->tree, grads));
    TRY(comm_sum_f64(t->comm, t->sample_loss, (int)batch));
    TRY(comm_sum_f64(t->comm, (double *)t->sample_stats, (int)(batch * layers) * words));
    int64_t first = -*bad_sample;
    TRY(comm_max_i64(t->comm, &first, 1));
    *bad_sample = -first;
    double loss_sum = 0;
    for (int64_t g = 0; g < batch; g++) {
        loss_sum += t->sample_loss[g];
        for (int64_t l = 0; l < layers && g > 0; l++) {
            attention_stats_add(&t->sample_stats[l], &t->sample_stats[g * layers + l]);
        }
    }
    r->loss = loss_sum / (double)r->valid;
    r->layer_stats = t->sample_stats;
    return OK;
}

/* The first parameter whose weights are already not finite: then that is the cause, not the gradient. */
static const char *bad_weight(const struct trainer *t)
{
    for (int i = 0; i < t->params.count; i++) {
        const bf16 *w = t->state.weights + t->segments[i].offset;
        for (size_t e = 0; e < t->segments[i].elements; e++) {
            if ((w[e] & 0x7f80) == 0x7f80) {
                return t->segments[i].name;
            }
        }
    }
    return NULL;
}

/* A NaN or Inf must not reach the weights. Says what is known: step, rank, sample, tensor. */
static enum status refuse_non_finite(const struct trainer *t, const struct step_result *r, const struct gradnorm *norm,
                                     int64_t bad_sample)
{
    char where[128] = "in no single sample, only in the sum";
    int64_t local = t->tree.leaves;
    if (t->comm->rank != 0) {
        return ERR_DIVERGED; /* every rank knows the same: rank 0 says it */
    }
    if (bad_sample != INT64_MAX) {
        snprintf(where, sizeof where, "first in sample %lld of the update, rank %lld", (long long)bad_sample,
                 (long long)(bad_sample / local));
    }
    const char *weight = bad_weight(t);
    if (weight != NULL) {
        return status_fail(ERR_DIVERGED,
                           "update %lld stopped before it was applied: weight %s is not finite (loss %g, gradient norm "
                           "%g; %s); resume from an older checkpoint",
                           (long long)r->update, weight, r->loss, r->grad_norm, where);
    }
    const char *tensor = norm->bad_segment >= 0 ? t->segments[norm->bad_segment].name : "none, the loss is";
    return status_fail(ERR_DIVERGED,
                       "update %lld stopped before it was applied: loss %g, gradient norm %g; %lld gradients are not "
                       "finite, first in tensor %s, element %zu; %s; weights and moments are as before",
                       (long long)r->update, r->loss, r->grad_norm, (long long)norm->non_finite, tensor,
                       norm->bad_segment >= 0 ? norm->bad_element : 0, where);
}

/* Every number is finite, but the watch has seen enough. */
static enum status refuse_diverged(const struct trainer *t, const struct step_result *r)
{
    if (t->comm->rank != 0) {
        return ERR_DIVERGED;
    }
    return status_fail(ERR_DIVERGED, "update %lld: diverged, and divergence.stop is set: %s", (long long)r->update,
                       watch_reason(t->watch));
}

static enum verdict judge(struct trainer *t, const struct step_result *r, double partner_loss)
{
    struct watch_row row = {.update = r->update,
                            .loss = r->loss,
                            .grad_norm = r->grad_norm,
                            .non_finite = r->non_finite,
                            .partner_loss = partner_loss};
    return watch_update(t->watch, &row);
}

enum status step_run(struct trainer *t, double partner_loss, struct step_result *r)
{
    const struct config *config = t->config;
    double start = step_clock_s(), clock = start;
    float *grads;
    int64_t bad_sample;
    memset(r, 0, sizeof *r);
    r->update = t->update + 1;

    TRY(next_batch(t, r));
    r->data_ms = lap_ms(&clock);

    fault_before_update(t, r->update);
    run_samples(t, r, &bad_sample); /* forward, loss, backward */
    lap_ms(&clock);

    TRY(reduce(t, r, &grads, &bad_sample));
    r->comm_ms = lap_ms(&clock);

    struct gradnorm norm = gradnorm_of(grads, t->segments, t->params.count);
    r->grad_norm = norm.norm;
    r->non_finite = norm.non_finite + !isfinite(r->loss);
    for (int l = 0; l < config->model.layers; l++) {
        r->non_finite += (int64_t)r->layer_stats[l].non_finite;
    }
    r->lr = (double)config->optim.lr_peak * schedule_factor(&config->schedule, r->update);

    /* The watch decides before any write. All ranks hold the same numbers, so all decide alike without a word. */
    r->verdict = judge(t, r, partner_loss);
    bool finite = isfinite(r->loss) && isfinite(r->grad_norm);
    if (!finite || (r->verdict == VERDICT_DIVERGED && config->divergence_stop)) {
        r->optim_ms = lap_ms(&clock);
        r->step_ms = 1e3 * (step_clock_s() - start);
        if (!finite) {
            return refuse_non_finite(t, r, &norm, bad_sample);
        }
        return refuse_diverged(t, r);
    }

    float clip = gradnorm_clip_scale(r->grad_norm, config->optim.clip);
    adamw_step(&config->optim, &t->state, t->segments, t->params.count, grads, clip, (float)r->lr, (uint32_t)r->update);
    trainer_weights_changed(t);
    t->update = r->update;
    t->last_loss = r->loss;
    t->samples += config->data.batch;
    r->optim_ms = lap_ms(&clock);
    r->step_ms = 1e3 * (step_clock_s() - start);
    return OK;
}
