/* bench: the training step of a tiny model on the CPU, by phase, for each attention route; ratios to the BF16 route of
 * the same run. Exit status 1 if an emulated route costs more than 4 times the BF16 route.
 *
 *   build/release/bench/step [updates per round]        from the root of the repository
 *
 * Attention is timed beside it, on its own, at the step's shape: `attn` is its share of forward and backward. */
#include "attention/attention.h"
#include "core/clock.h"
#include "core/log.h"
#include "core/rng.h"
#include "train/plan.h"
#include "train/step_time.h"
#include "train/trainer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROUNDS = 3, ATTENTION_CALLS = 3 };
static const double ratio_max = 4;

static const char *const arms[] = {"configs/arms/bf16.toml", "configs/arms/nvfp4_fp8.toml",
                                   "configs/arms/nvfp4_fp8_saved.toml", "configs/arms/nvfp4_mxfp4.toml",
                                   "configs/arms/nvfp4_mxfp4_saved.toml"};
enum { ARMS = sizeof arms / sizeof arms[0] };

struct result {
    struct config config;
    struct step_times times; /* of the fastest round */
    double attention_fwd_ms, attention_bwd_ms;
};

static enum status read_config(struct config *config, const char *arm, const char *updates, const struct device *device)
{
    char steps[64];
    char *overrides[] = {steps, "data.seq_len=256", "run.mode=step_time", "data.val=", "eval.every=0"};
    snprintf(steps, sizeof steps, "run.steps=%s", updates);
    config_init(config);
    TRY(config_add_file(config, "configs/tiny_cpu.toml"));
    TRY(config_add_file(config, arm));
    TRY(config_add_overrides(config, overrides, sizeof overrides / sizeof overrides[0]));
    TRY(config_finish(config));
    return plan_check(config, 1, device);
}

static struct head_view new_view(const struct attention_shape *s, int64_t heads, const char *name)
{
    int64_t n = s->tokens * heads * s->head_dim;
    bf16 *data = malloc((size_t)n * sizeof *data);
    ASSERT(data != NULL);
    for (int64_t i = 0; i < n; i++) {
        data[i] = bf16_from_float(rng_normal(1, rng_stream(name), (uint64_t)i));
    }
    return (struct head_view){
        .data = data, .batch_stride = n, .token_stride = heads * s->head_dim, .head_stride = s->head_dim};
}

/* Milliseconds of attention in one update: all layers, all samples. */
static enum status time_attention(struct result *r, const struct device *device)
{
    struct attention_shape s = trainer_attention_shape(&r->config, device);
    const struct attention_recipe *recipe = &r->config.attention;
    const struct attention_variant *variant;
    TRY(attention_choose(&s, recipe, DEVICE_CPU, "auto", &variant));
    struct head_view q = new_view(&s, s.heads, "q"), k = new_view(&s, s.kv_heads, "k"),
                     v = new_view(&s, s.kv_heads, "v"), out = new_view(&s, s.heads, "o"),
                     dout = new_view(&s, s.heads, "do"), dq = new_view(&s, s.heads, "dq"),
                     dk = new_view(&s, s.kv_heads, "dk"), dv = new_view(&s, s.kv_heads, "dv");
    float *lse = malloc((size_t)(s.heads * s.tokens) * sizeof *lse);
    void *saved = aligned_alloc(64, (variant->saved_bytes(&s, recipe) + 127) / 64 * 64);
    void *scratch = aligned_alloc(64, (variant->scratch_bytes(&s, recipe) + 127) / 64 * 64);
    struct attention_stats stats = {0};
    ASSERT(lse != NULL && saved != NULL && scratch != NULL);
    struct attention_fwd fwd = {.shape = s,
                                .recipe = recipe,
                                .q = q,
                                .k = k,
                                .v = v,
                                .out = out,
                                .lse_log2 = lse,
                                .saved = saved,
                                .scratch = scratch,
                                .stats = &stats};
    struct attention_bwd bwd = {.shape = s,
                                .recipe = recipe,
                                .q = q,
                                .k = k,
                                .v = v,
                                .out = out,
                                .dout = dout,
                                .dq = dq,
                                .dk = dk,
                                .dv = dv,
                                .lse_log2 = lse,
                                .saved = saved,
                                .scratch = scratch,
                                .stats = &stats};
    double calls = (double)(r->config.model.layers * r->config.data.batch);
    r->attention_fwd_ms = r->attention_bwd_ms = INFINITY;
    for (int i = 0; i < ATTENTION_CALLS; i++) {
        double start = clock_s();
        variant->fwd(&fwd);
        double middle = clock_s();
        variant->bwd(&bwd);
        r->attention_fwd_ms = fmin(r->attention_fwd_ms, 1e3 * calls * (middle - start));
        r->attention_bwd_ms = fmin(r->attention_bwd_ms, 1e3 * calls * (clock_s() - middle));
    }
    struct head_view views[] = {q, k, v, out, dout, dq, dk, dv};
    for (size_t i = 0; i < sizeof views / sizeof views[0]; i++) {
        free(views[i].data);
    }
    free(lse);
    free(saved);
    free(scratch);
    return OK;
}

/* Rounds go through all arms in turn, so that a slow moment of the machine does not fall on one of them. */
static enum status measure(struct result *results, struct comm *comm, const struct device *device, const char *updates)
{
    for (int round = 0; round < ROUNDS; round++) {
        for (int a = 0; a < ARMS; a++) {
            struct result *r = &results[a];
            struct step_times times;
            TRY(read_config(&r->config, arms[a], updates, device));
            TRY(step_time_measure(&r->config, comm, device, &times));
            if (round == 0 || times.median[PHASE_STEP] < r->times.median[PHASE_STEP]) {
                r->times = times;
            }
        }
    }
    for (int a = 0; a < ARMS; a++) {
        TRY(time_attention(&results[a], device));
    }
    return OK;
}

static int print(const struct result *results, const struct device *device)
{
    const struct config *config = &results[0].config;
    int slow = 0;
    printf("%s, %d threads; %d layers, width %d, T %lld, %lld sequences an update; best of %d rounds, medians, ms\n",
           device->name, device->threads, config->model.layers, config->model.width, (long long)config->data.seq_len,
           (long long)config->data.batch, ROUNDS);
    printf("%-20s %9s %8s %6s", "arm", "tokens/s", "step", "ratio");
    for (int p = 0; p < PHASE_STEP; p++) {
        printf(" %8s", step_phase_names[p]);
    }
    printf(" %9s %9s %6s\n", "attn fwd", "attn bwd", "attn");
    for (int a = 0; a < ARMS; a++) {
        const struct result *r = &results[a];
        const char *name = strrchr(arms[a], '/') + 1;
        double ratio = r->times.median[PHASE_STEP] / results[0].times.median[PHASE_STEP];
        double attention = r->attention_fwd_ms + r->attention_bwd_ms;
        slow += ratio > ratio_max;
        printf("%-20.*s %9.0f %8.2f %6.2f", (int)strcspn(name, "."), name, r->times.tokens_per_s,
               r->times.median[PHASE_STEP], ratio);
        for (int p = 0; p < PHASE_STEP; p++) {
            printf(" %8.2f", r->times.median[p]);
        }
        printf(" %9.2f %9.2f %5.0f%%\n", r->attention_fwd_ms, r->attention_bwd_ms,
               100 * attention / (r->times.median[PHASE_FORWARD] + r->times.median[PHASE_BACKWARD]));
    }
    printf("limit of the ratio: %.1f: %s\n", ratio_max, slow > 0 ? "exceeded" : "kept");
    return slow > 0;
}

int main(int argc, char **argv)
{
    struct comm comm;
    struct device device;
    struct result *results = calloc(ARMS, sizeof *results);
    log_set_level(LOG_WARN);
    ASSERT(results != NULL);
    enum status status = comm_open(&comm, &argc, &argv, 60);
    if (status == OK) {
        status = device_open(&device, "cpu", 0);
    }
    if (status == OK) {
        status = measure(results, &comm, &device, argc > 1 ? argv[1] : "12");
    }
    int slow = status == OK ? print(results, &device) : 0;
    free(results);
    return status != OK ? status_exit_code(status) : slow;
}
