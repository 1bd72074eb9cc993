/* train: the step, from top to bottom. */
#include "train/step.h"

#include "core/clock.h"
#include "core/log.h"
#include "core/rng.h"

#include <math.h>
#include <string.h>
#include <xxhash.h>

double step_lap_ms(double *since)
{
    double now = clock_s(), ms = 1e3 * (now - *since);
    *since = now;
    return ms;
}

/* run.mode = step_time without data: any tokens do, only their number counts. */
static enum status random_batch(struct trainer *t, int64_t update)
{
    int64_t T = t->config->data.seq_len, n = t->local * T;
    uint64_t stream = rng_stream("step_time/tokens"), vocab = (uint64_t)t->config->model.vocab;
    for (int64_t i = 0; i < n; i++) {
        uint64_t bits =
            rng_bits((uint64_t)t->config->run.seed, stream, (uint32_t)update, (uint64_t)(t->comm->rank * n + i));
        t->tokens[i] = (int32_t)(bits * vocab >> 32);
    }
    for (int64_t i = 0; i < n; i++) { /* the last token of a sample is followed by its first */
        t->targets[i] = t->tokens[i % T == T - 1 ? i - T + 1 : i + 1];
    }
    return OK;
}

/* Reads this rank's samples. The number of valid targets of the whole update is known before the first forward: it is
 * the one divisor of every gradient. The batch's hash is the sum of its samples' hashes modulo 2^64, so that it does
 * not depend on ranks; it travels as two halves, whose sums stay in range. */
static enum status next_batch(struct trainer *t, struct step_result *r)
{
    int64_t local = t->local, T = t->config->data.seq_len;
    uint64_t first = (uint64_t)(t->comm->rank * local), hash = 0;
    TRY(t->train != NULL ? loader_next(t->train, t->tokens, t->targets, NULL) : random_batch(t, r->update));
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

/* Losses and statistics of all ranks, in every rank. Each sample's numbers come from one rank and are zero on the
 * others, so that their sum over ranks is exact; samples are then added in order. */
static enum status reduce_losses(struct trainer *t, struct step_result *r, int64_t *bad_sample)
{
    int64_t batch = t->config->data.batch, layers = t->config->model.layers;
    int words = (int)(sizeof(struct attention_stats) / sizeof(double));
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
static enum status find_bad_weight(struct trainer *t, const char **name)
{
    *name = NULL;
    for (int i = 0; i < t->params.count; i++) {
        size_t first = t->segments[i].offset, left = t->segments[i].elements;
        while (left > 0) {
            size_t n = left;
            const bf16 *w;
            TRY(t->engine->weights(t, first, &n, &w));
            for (size_t e = 0; e < n; e++) {
                if ((w[e] & 0x7f80) == 0x7f80) {
                    *name = t->segments[i].name;
                    return OK;
                }
            }
            first += n;
            left -= n;
        }
    }
    return OK;
}

/* A NaN or Inf must not reach the weights. Says what is known: step, rank, sample, tensor. */
static enum status refuse_non_finite(struct trainer *t, const struct step_result *r, const struct step_gradients *g)
{
    const struct gradnorm *norm = &g->norm;
    int64_t bad_sample = g->bad_sample;
    char where[128];
    snprintf(where, sizeof where, "%s",
             t->device->kind == DEVICE_CPU ? "in no single sample, only in the sum" : "every sample's loss is finite");
    if (t->comm->rank != 0) {
        return ERR_DIVERGED; /* every rank knows the same: rank 0 says it */
    }
    if (bad_sample != INT64_MAX) {
        snprintf(where, sizeof where, "first in sample %lld of the update, rank %lld", (long long)bad_sample,
                 (long long)(bad_sample / t->local));
    }
    const char *weight;
    TRY(find_bad_weight(t, &weight));
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
    double start = clock_s(), clock = start;
    size_t batch = (size_t)config->data.batch;
    struct step_gradients g;
    memset(r, 0, sizeof *r);
    r->sm_mhz = r->watts = NAN;
    memset(t->sample_loss, 0, batch * sizeof *t->sample_loss);
    memset(t->sample_stats, 0, batch * (size_t)config->model.layers * sizeof *t->sample_stats);
    r->update = t->update + 1;

    TRY(next_batch(t, r));
    r->data_ms = step_lap_ms(&clock);

    fault_before_update(t, r->update);
    TRY(t->engine->prepare(t));
    TRY(t->engine->gradients(t, r, &g)); /* forward, loss, backward, sums over ranks, norm: step_cpu.c, step_cuda.c */
    step_lap_ms(&clock);

    TRY(reduce_losses(t, r, &g.bad_sample));
    r->comm_ms += step_lap_ms(&clock);

    r->grad_norm = g.norm.norm;
    r->non_finite = g.norm.non_finite + !isfinite(r->loss);
    for (int l = 0; l < config->model.layers; l++) {
        r->non_finite += (int64_t)r->layer_stats[l].non_finite;
    }
    r->lr = (double)config->optim.lr_peak * schedule_factor(&config->schedule, r->update);

    /* The watch decides before any write. All ranks hold the same numbers, so all decide alike without a word. */
    r->verdict = judge(t, r, partner_loss);
    bool finite = isfinite(r->loss) && isfinite(r->grad_norm);
    if (!finite || (r->verdict == VERDICT_DIVERGED && config->divergence_stop)) {
        r->step_ms = 1e3 * (clock_s() - start);
        return finite ? refuse_diverged(t, r) : refuse_non_finite(t, r, &g);
    }

    TRY(t->engine->apply(t, r, gradnorm_clip_scale(r->grad_norm, config->optim.clip)));
    t->update = r->update;
    t->last_loss = r->loss;
    t->samples += config->data.batch;
    r->step_ms = 1e3 * (clock_s() - start);
    return OK;
}
