/* train: legality and the plan. */
#include "train/plan.h"

#include "core/log.h"
#include "model/model.h"
#include "train/trainer.h"

#include <glob.h>
#include <string.h>

typedef long long ll;

/* What the CPU cannot: sums in other orders, several samples at once, recomputing one product. */
static enum status check_cpu(const struct config *config, int ranks)
{
    if (config->run.deterministic != DETERMINISTIC_AUTO && config->run.deterministic != DETERMINISTIC_ANY) {
        return status_fail(ERR_UNSUPPORTED,
                           "run.deterministic: off and layout allow sums in other orders for speed, which no CPU code "
                           "does: remove the key or set any");
    }
    if (config->data.micro_batch != 1) {
        return status_fail(ERR_UNSUPPORTED,
                           "data.micro_batch = %lld: run.deterministic = any sums gradients sample by sample, so 1 "
                           "sequence runs at a time: remove the key or set 1",
                           (ll)config->data.micro_batch);
    }
    if (config->recompute == RECOMPUTE_GATE_UP) {
        return status_fail(ERR_UNSUPPORTED, "device.recompute = gate_up: on CUDA only; on the CPU set none or block");
    }
    if ((ranks & (ranks - 1)) != 0) {
        int below = 1;
        while (2 * below <= ranks) {
            below *= 2;
        }
        return status_fail(
            ERR_CONFIG,
            "%d ranks: run.deterministic = any adds gradients in a binary tree and needs a power of two: "
            "start %d or %d",
            ranks, below, 2 * below);
    }
    return OK;
}

/* On CUDA samples of a micro-batch are summed inside of products, and NCCL adds ranks in an order of its own. */
static enum status check_cuda(const struct config *config, int ranks)
{
    int64_t local = config->data.batch / ranks, micro = config->data.micro_batch;
    if (config->run.deterministic == DETERMINISTIC_ANY) {
        return status_fail(ERR_UNSUPPORTED,
                           "run.deterministic = any: sums that do not depend on ranks exist on the CPU only: remove "
                           "the key or set layout, or set device.kind = cpu");
    }
    if (local % micro != 0) {
        int64_t below = micro < local ? micro : local, above = micro;
        while (local % below != 0) {
            below--;
        }
        while (above < local && local % above != 0) {
            above++;
        }
        return status_fail(ERR_CONFIG,
                           "data.micro_batch = %lld does not divide the %lld sequences of a rank: the nearest valid "
                           "values are %lld and %lld",
                           (ll)micro, (ll)local, (ll)below, (ll)(above < local ? above : local));
    }
    return OK;
}

/* How samples are shared. Each message holds the numbers and the nearest values that would do. */
static enum status check_batch(const struct config *config, int ranks, const struct device *device)
{
    int64_t batch = config->data.batch;
    if (device->kind == DEVICE_CPU) {
        TRY(check_cpu(config, ranks));
    }
    if (batch % ranks != 0) {
        int64_t below = batch / ranks * ranks;
        return status_fail(ERR_CONFIG,
                           "data.batch = %lld sequences cannot be shared equally by %d ranks: the nearest valid values "
                           "are %lld and %lld",
                           (ll)batch, ranks, (ll)(below > 0 ? below : ranks), (ll)(below + ranks));
    }
    return device->kind == DEVICE_CUDA ? check_cuda(config, ranks) : OK;
}

/* Lengths and counts over keys of different sections. */
static enum status check_lengths(struct config *config)
{
    if (config->data.seq_len > config->model.context) {
        return status_fail(ERR_CONFIG, "data.seq_len = %lld is longer than model.context = %d: raise model.context",
                           (ll)config->data.seq_len, config->model.context);
    }
    if (config->eval_every > 0 && config->data.val[0] == '\0') {
        return status_fail(ERR_CONFIG, "eval.every = %lld, but data.val names no shards", (ll)config->eval_every);
    }
    if (config->schedule.steps >= INT32_MAX) {
        return status_fail(ERR_CONFIG, "%lld updates: too many to count; at most %d", (ll)config->schedule.steps,
                           INT32_MAX - 1);
    }
    int64_t longest = config->schedule.steps > 1 ? config->schedule.steps - 1 : 0;
    if (config->schedule.warmup > longest) {
        log_info("notice: schedule.warmup = %lld does not fit into %lld updates: cut to %lld",
                 (ll)config->schedule.warmup, (ll)config->schedule.steps, (ll)longest);
        config->schedule.warmup = longest;
    }
    return OK;
}

/* What breaks a run on purpose must be asked for twice. */
static enum status check_debug(const struct config *config, int ranks)
{
    struct fault fault;
    const char *planted = config->debug_fault[0] != '\0'         ? "debug.fault"
                          : config->attention.debug_leak != 0.0F ? "attention.debug_leak"
                                                                 : NULL;
    if (planted != NULL && !config->debug_allow) {
        return status_fail(ERR_CONFIG, "%s is set: it breaks a run on purpose; set debug.allow = 1 if that is meant",
                           planted);
    }
    return fault_parse(&fault, config->debug_fault, ranks);
}

/* Cheap questions of this room first, then those of the rooms that own shapes and recipes. */
enum status plan_check(struct config *config, int ranks, const struct device *device)
{
    TRY(check_batch(config, ranks, device));
    TRY(check_lengths(config));
    TRY(check_debug(config, ranks));
    TRY(model_config_check(&config->model, &config->linear));
    return attention_recipe_check(&config->attention, config->model.head_dim);
}

static void print_bytes(FILE *out, const char *name, double bytes)
{
    fprintf(out, "  %-40s %12.2f MiB\n", name, bytes / 0x1p20);
}

void plan_advice(const struct config *config, const struct device *device, char *text, size_t bytes)
{
    bool gpu = device->kind == DEVICE_CUDA;
    snprintf(text, bytes, "%s%s%s%s%s%s a smaller model or a shorter data.seq_len",
             gpu && config->data.micro_batch > 1 ? " data.micro_batch = 1," : "",
             gpu && config->recompute == RECOMPUTE_NONE ? " device.recompute = gate_up or" : "",
             config->recompute != RECOMPUTE_BLOCK
                 ? (gpu && config->recompute == RECOMPUTE_NONE ? " block," : " device.recompute = block,")
                 : "",
             config->optim.moments_bf16 ? "" : " optim.moments = bf16,",
             gpu && !config->optim.grads_bf16 ? " optim.grads = bf16," : "",
             config->optim.master_fp32 ? " optim.master = none," : "");
}

/* The classes are the labels of the arenas that the run itself will carve, so the table cannot drift from the run. */
static void print_memory(FILE *out, const struct config *config, const struct arena *arena, const struct device *device)
{
    int64_t reserve = device->kind == DEVICE_CUDA ? DEVICE_RESERVE : 0;
    double need = (double)arena->high_water, have = (double)(device->memory_bytes - reserve);
    char advice[PLAN_ADVICE];
    fprintf(out, "memory of a rank (by class)\n");
    for (int i = 0; i < arena->n_labels; i++) {
        print_bytes(out, arena->labels[i].name, (double)arena->labels[i].bytes);
    }
    print_bytes(out, "total", need);
    if (reserve > 0) {
        fprintf(out, "  device: %s, %.2f GiB without %.1f GiB for the runtime and its libraries: ", device->name,
                have / 0x1p30, (double)reserve / 0x1p30);
    } else {
        fprintf(out, "  device: %s, %d threads, %.2f GiB: ", device->name, device->threads, have / 0x1p30);
    }
    if (need <= have) {
        fprintf(out, "fits (per rank%s)\n", reserve > 0 ? "" : "; ranks on one machine share it");
        return;
    }
    fprintf(out, "DOES NOT FIT: needs %.2f GiB, %.2f times what there is\n", need / 0x1p30, need / have);
    for (int i = 0; i < arena->n_labels; i++) {
        if ((double)arena->labels[i].bytes > have) {
            fprintf(out, "  %s alone is too large\n", arena->labels[i].name);
        }
    }
    plan_advice(config, device, advice, sizeof advice);
    fprintf(out, "  try:%s\n", advice);
}

/* Shards are counted, not read: a plan is made before the data is there. */
static void print_data(FILE *out, const char *name, const char *globs)
{
    char copy[CONFIG_GLOBS], *rest = copy;
    size_t files = 0;
    snprintf(copy, sizeof copy, "%s", globs);
    for (char *word; (word = strtok_r(rest, " ", &rest)) != NULL;) {
        glob_t found;
        if (glob(word, 0, NULL, &found) == 0) {
            files += found.gl_pathc;
            globfree(&found);
        }
    }
    fprintf(out, "  %-12s %zu shards%s%s\n", name, files, files == 0 ? ": nothing there yet at " : "",
            files == 0 ? globs : "");
}

static void print_run(FILE *out, const struct config *config, int ranks, const struct device *device)
{
    int64_t at_once = device->kind == DEVICE_CPU ? 1 : config->data.micro_batch;
    int64_t steps = config->schedule.steps, every = config->checkpoint.every;
    int64_t tokens = config->data.batch * config->data.seq_len;
    fprintf(out, "run\n  %-12s %lld of %lld sequences x %lld tokens = %lld tokens each, %.0f in all\n", "updates",
            (ll)steps, (ll)config->data.batch, (ll)config->data.seq_len, (ll)tokens, (double)steps * (double)tokens);
    fprintf(out, "  %-12s %d, %lld sequences each, run %lld at a time\n", "ranks", ranks,
            (ll)(config->data.batch / ranks), (ll)at_once);
    fprintf(out, "  %-12s %s, peak %g at update %lld, last %g\n", "schedule",
            schedule_kind_names[config->schedule.kind], (double)config->optim.lr_peak,
            (ll)(config->schedule.warmup > 1 ? config->schedule.warmup : 1),
            (double)config->optim.lr_peak * schedule_factor(&config->schedule, steps));
    int64_t saves = every > 0 ? (steps + every - 1) / every : 1;
    fprintf(out, "  %-12s %lld into %s/checkpoints, newest %d kept\n", "checkpoints", (ll)saves, config->run.out,
            config->checkpoint.keep);
    if (config->data.train[0] == '\0') {
        fprintf(out, "  %-12s random tokens\n", "data.train");
    } else {
        print_data(out, "data.train", config->data.train);
    }
    if (config->data.val[0] != '\0') {
        print_data(out, "data.val", config->data.val);
    }
}

/* Which operators run where, and what of them is emulated. */
static void print_operators(FILE *out, const struct config *config, const struct device *device,
                            const struct attention_shape *shape, const struct attention_variant *variant)
{
    const struct linear_recipe *linear = &config->linear;
    bool gpu = device->kind == DEVICE_CUDA;
    char recipe[512], route[256];
    attention_recipe_print(&config->attention, recipe, sizeof recipe);
    attention_route_print(shape, &config->attention, variant, route, sizeof route);
    fprintf(out, "operators\n  %-12s %s: %s\n", "attention", route, recipe);
    fprintf(out, "  %-12s %s: attn %s, mlp %s, head %s (%s)\n", "linear", gpu ? "cuda" : "cpu",
            linear_format_names[linear->attn], linear_format_names[linear->mlp], linear_format_names[linear->head],
            gpu ? "nvfp4 is emulated: exact values, multiplied in BF16" : "all formats but bf16 are emulated");
    fprintf(out, "  %-12s %s\n", "others", gpu ? "cuda" : "cpu");
}

enum status plan_print(const struct config *config, struct comm *comm, const struct device *device, FILE *out)
{
    struct arena arena, host;
    struct param_list params;
    const struct attention_variant *variant;
    TRY(trainer_measure(config, comm, device, &arena, &host));
    TRY(param_list_open(&params, &config->model));
    double flops = model_flops_per_token(&config->model, &params, config->data.seq_len);
    struct attention_shape shape = trainer_attention_shape(config, device);
    enum status status =
        attention_choose(&shape, &config->attention, device->kind, config->attention_variant, &variant);
    if (status == OK && comm->rank == 0) {
        fprintf(out, "plan of %s\nmodel\n  %-12s %zu (%d layers, width %d, %d/%d heads x %d, ffn %d, vocabulary %d)\n",
                config->run.name, "parameters", params.parameters, config->model.layers, config->model.width,
                config->model.heads, config->model.kv_heads, config->model.head_dim, config->model.ffn,
                config->model.vocab);
        fprintf(out, "  %-12s %.4g GFLOP a token, forward and backward\n", "work", flops / 1e9);
        print_operators(out, config, device, &shape, variant);
        print_run(out, config, comm->size, device);
        print_memory(out, config, &arena, device);
        fflush(out);
    }
    param_list_close(&params);
    return status;
}
