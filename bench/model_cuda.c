/* bench: one micro-batch of the 8B shape on the GPU, forward and backward, by group of operators.
 *
 *   build/release/bench/model_cuda [layers=2] [batch=1] [tokens=4096] [linear=bf16|fp8|nvfp4] [pv=bf16|fp8|mxfp4]
 *                                  [recompute=none|gate_up|block] [variant=auto] [unordered=0] [stats=0]
 *
 * Weights are random numbers, tokens are spread over the vocabulary. Medians of ROUNDS rounds. The table is of plain
 * calls with events around each group; below it the same work as a graph, without events. GB/s count what a group must
 * read and write at least, TF/s what the model needs (attention: half of T x T). */
#include "bench/gpu.h"
#include "core/log.h"
#include "core/rng.h"
#include "model/model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROUNDS = 5, MARKS_MAX = 8192, GROUPS_MAX = 64, BLOCK = 1 << 24 };

struct group {
    const char *name;
    int calls;         /* a round */
    double ms[ROUNDS]; /* sums over calls */
};

struct bench {
    struct cuda *cuda;
    struct model_config config;
    struct model_options options;
    struct param_list params;
    struct arena arena;
    struct model *model;
    struct model_batch batch;
    bf16 *weights;
    void *grads;
    struct cuda_event *marks[MARKS_MAX];
    const char *names[MARKS_MAX]; /* NULL: the end of a group */
    int mark_count;
    bool tracing;
    struct group groups[GROUPS_MAX];
    int group_count;
};

static void mark(void *context, const char *name)
{
    struct bench *b = context;
    if (b->tracing) {
        ASSERT(b->mark_count < MARKS_MAX);
        cuda_event_record(b->cuda, b->marks[b->mark_count]);
        b->names[b->mark_count++] = name;
    }
}

/* ---- what a group must do -------------------------------------------------------------------------------------- */

struct work {
    double flops, bytes; /* of one call; 0: not counted */
};

static struct work product(double n, double in, double out, bool backward)
{
    return (struct work){.flops = (backward ? 4 : 2) * n * in * out};
}

static struct work work_of(const struct bench *b, const char *name)
{
    const struct model_config *c = &b->config;
    double n = (double)(b->batch.batch * b->batch.length), T = (double)b->batch.length, C = c->width, F = c->ffn;
    double q = (double)c->heads * c->head_dim, kv = (double)c->kv_heads * c->head_dim, V = c->vocab;
    bool back = strstr(name, "backward") != NULL;
    const struct {
        const char *name;
        struct work work;
    } table[] = {{"qkv", product(n, C, q + 2 * kv, back)},
                 {"o", product(n, q, C, back)},
                 {"gate_up", product(n, C, 2 * F, back)},
                 {"down", product(n, F, C, false)},
                 {"down dx", product(n, F, C, false)},
                 {"down dw", product(n, F, C, false)},
                 {"attention", {.flops = (back ? 5 : 2) * n * T * q}},
                 {"head", {.flops = 6 * n * C * V}},
                 {"add, norm", {.bytes = 8 * n * C}},
                 {"norm", {.bytes = (back ? 8 : 4) * n * C}},
                 {"swiglu", {.bytes = (back ? 12 : 6) * n * F}},
                 {"rope", {.bytes = 4 * n * (q + kv)}},
                 {"embedding", {.bytes = back ? 2 * (n + V) * C : 4 * n * C}}};
    size_t length = back ? strlen(name) - strlen(" backward") : strlen(name);
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        if (strlen(table[i].name) == length && strncmp(table[i].name, name, length) == 0) {
            return table[i].work;
        }
    }
    return (struct work){0};
}

/* ---- rounds ---------------------------------------------------------------------------------------------------- */

static void micro_batch(struct bench *b)
{
    model_forward_cuda(b->model, &b->batch, b->grads, true);
    model_backward(b->model, &(struct model_backward){.batch = &b->batch, .grads = b->grads, .accumulate = true});
}

static struct group *group_of(struct bench *b, const char *name)
{
    for (int i = 0; i < b->group_count; i++) {
        if (strcmp(b->groups[i].name, name) == 0) {
            return &b->groups[i];
        }
    }
    ASSERT(b->group_count < GROUPS_MAX);
    b->groups[b->group_count] = (struct group){.name = name};
    return &b->groups[b->group_count++];
}

static enum status trace_round(struct bench *b, int round)
{
    b->mark_count = 0;
    b->tracing = true;
    micro_batch(b);
    b->tracing = false;
    TRY(cuda_sync(b->cuda, "micro-batch"));
    for (int i = 0; i + 1 < b->mark_count; i += 2) {
        struct group *g = group_of(b, b->names[i]);
        g->ms[round] += cuda_event_ms(b->marks[i], b->marks[i + 1]);
        g->calls += round == 0;
    }
    return OK;
}

static double time_copy(struct bench *b, size_t bytes)
{
    double ms[ROUNDS];
    unsigned char *grads = b->grads;
    for (int i = 0; i < ROUNDS; i++) {
        cuda_event_record(b->cuda, b->marks[0]);
        cuda_copy(b->cuda, grads, grads + bytes, bytes);
        cuda_event_record(b->cuda, b->marks[1]);
        if (cuda_sync(b->cuda, "copy") != OK) {
            return NAN;
        }
        ms[i] = cuda_event_ms(b->marks[0], b->marks[1]);
    }
    return 2e-6 * (double)bytes / median(ms, ROUNDS); /* GB/s, read and written */
}

static enum status time_graph(struct bench *b, double *ms)
{
    struct cuda_graph *graph;
    double rounds[ROUNDS];
    TRY(cuda_graph_begin(b->cuda));
    micro_batch(b);
    TRY(cuda_graph_end(b->cuda, &graph));
    for (int i = -1; i < ROUNDS; i++) {
        cuda_event_record(b->cuda, b->marks[0]);
        cuda_graph_launch(b->cuda, graph);
        cuda_event_record(b->cuda, b->marks[1]);
        TRY(cuda_sync(b->cuda, "graph"));
        if (i >= 0) {
            rounds[i] = cuda_event_ms(b->marks[0], b->marks[1]);
        }
    }
    *ms = median(rounds, ROUNDS);
    cuda_graph_close(graph);
    return OK;
}

/* ---- the model ------------------------------------------------------------------------------------------------- */

static enum status fill_weights(struct bench *b)
{
    bf16 *block = malloc(BLOCK * sizeof *block), *ones = malloc((size_t)b->config.width * sizeof *ones);
    if (block == NULL || ones == NULL) {
        return status_fail(ERR_NOMEM, "bench: out of memory");
    }
    for (size_t i = 0; i < BLOCK; i++) {
        block[i] = bf16_from_float(0.03f * ((float)(rng_bits(1, 2, 0, i) >> 8) * 0x1p-23f - 1));
    }
    for (int i = 0; i < b->config.width; i++) {
        ones[i] = bf16_from_float(1);
    }
    for (size_t at = 0; at < b->params.elements; at += BLOCK) {
        size_t left = b->params.elements - at, bytes = (left < BLOCK ? left : BLOCK) * sizeof *block;
        if (at == 0) {
            cuda_upload(b->cuda, b->weights, block, bytes);
        } else {
            cuda_copy(b->cuda, b->weights + at, b->weights, bytes);
        }
    }
    for (int i = 0; i < b->params.count; i++) {
        const struct param *p = &b->params.params[i];
        if (p->kind == PARAM_NORM) {
            cuda_upload(b->cuda, b->weights + p->offset, ones, (size_t)p->cols * sizeof *ones);
        }
    }
    enum status status = cuda_sync(b->cuda, "weights");
    free(block);
    free(ones);
    return status;
}

static enum status fill_tokens(struct bench *b)
{
    size_t n = (size_t)(b->options.batch * b->options.tokens);
    int32_t *host = malloc(2 * n * sizeof *host);
    void *device;
    if (host == NULL) {
        return status_fail(ERR_NOMEM, "bench: out of memory");
    }
    for (size_t i = 0; i < 2 * n; i++) {
        host[i] = (int32_t)(rng_bits(3, 4, 0, i) % (uint32_t)b->config.vocab);
    }
    TRY(cuda_alloc(&device, 2 * n * sizeof *host, "tokens"));
    cuda_upload(b->cuda, device, host, 2 * n * sizeof *host);
    enum status status = cuda_sync(b->cuda, "tokens");
    free(host);
    b->batch = (struct model_batch){
        .tokens = device, .targets = (int32_t *)device + n, .batch = b->options.batch, .length = b->options.tokens};
    return status;
}

static enum status open_model(struct bench *b, const char *variant)
{
    const struct model_config *c = &b->config;
    struct attention_shape shape = {.batch = b->options.batch,
                                    .tokens = b->options.tokens,
                                    .heads = c->heads,
                                    .kv_heads = c->kv_heads,
                                    .head_dim = c->head_dim,
                                    .causal = true,
                                    .softmax_scale = 1 / sqrtf((float)c->head_dim)};
    struct model *throw_away;
    TRY(attention_choose(&shape, &b->options.attention, DEVICE_CUDA, variant, &b->options.variant));
    TRY(param_list_open(&b->params, c));
    arena_measure(&b->arena, "model");
    TRY(model_plan(&throw_away, &b->arena, c, &b->params, &b->options));
    model_close(throw_away);
    size_t bytes = b->arena.high_water;
    arena_report(&b->arena);
    TRY(arena_open_on(&b->arena, "model", bytes, DEVICE_CUDA));
    TRY(model_plan(&b->model, &b->arena, c, &b->params, &b->options));
    TRY(cuda_alloc((void **)&b->weights, b->params.elements * sizeof(bf16), "weights"));
    TRY(cuda_alloc(&b->grads, b->params.elements * dtype_bytes(b->options.grad_type), "gradients"));
    TRY(fill_weights(b));
    TRY(fill_tokens(b));
    model_set_weights(b->model, b->weights);
    for (int i = 0; i < MARKS_MAX; i++) {
        TRY(cuda_event_open(&b->marks[i]));
    }
    return OK;
}

static void print_groups(struct bench *b, double copy_rate)
{
    double sum = 0;
    printf("%-22s %6s %9s %9s %9s\n", "group", "calls", "ms", "ms/call", "rate");
    for (int i = 0; i < b->group_count; i++) {
        struct group *g = &b->groups[i];
        struct work work = work_of(b, g->name);
        double ms = median(g->ms, ROUNDS), call = ms / g->calls;
        sum += ms;
        printf("%-22s %6d %9.3f %9.4f ", g->name, g->calls, ms, call);
        if (work.flops > 0) {
            printf("%9.0f TF/s\n", 1e-9 * work.flops / call);
        } else if (work.bytes > 0) {
            double rate = 1e-6 * work.bytes / call;
            printf("%9.0f GB/s (%.2f of a copy)\n", rate, rate / copy_rate);
        } else {
            printf("\n");
        }
    }
    printf("%-22s %6s %9.3f\n", "sum", "", sum);
}

static enum status run(struct bench *b, const char *variant, bool stats)
{
    double graph_ms;
    TRY(cuda_open(&b->cuda, 0));
    b->options.cuda = b->cuda;
    TRY(open_model(b, variant));
    model_count_stats(b->model, stats);
    TRY(model_warm_up(b->model, b->grads));
    cuda_zero(b->cuda, b->grads, b->params.elements * dtype_bytes(b->options.grad_type));
    for (int round = 0; round < ROUNDS; round++) {
        TRY(trace_round(b, round));
    }
    TRY(time_graph(b, &graph_ms));
    double copy_rate = time_copy(b, (size_t)1 << 30), n = (double)(b->batch.batch * b->batch.length);
    printf("8B shape, %d layers, B %lld T %lld, linear %s, attention %s, recompute %s, variant %s; copy %.0f GB/s\n",
           b->config.layers, (long long)b->batch.batch, (long long)b->batch.length,
           linear_format_names[b->options.linear.mlp], pv_format_names[b->options.attention.pv],
           recompute_names[b->options.recompute], b->options.variant->name, copy_rate);
    print_groups(b, copy_rate);
    double flops = model_flops_per_token(&b->config, &b->params, b->batch.length) * n;
    printf("as a graph: %.3f ms, %.0f tokens/s, %.0f model TF/s; model memory %.2f GiB\n", graph_ms, 1e3 * n / graph_ms,
           1e-9 * flops / graph_ms, (double)b->arena.high_water / 0x1p30);
    return OK;
}

/* The value of "key=value", or NULL. */
static const char *option(int argc, char **argv, const char *key)
{
    for (int i = 1; i < argc; i++) {
        size_t n = strlen(key);
        if (strncmp(argv[i], key, n) == 0 && argv[i][n] == '=') {
            return argv[i] + n + 1;
        }
    }
    return NULL;
}

static int64_t number(int argc, char **argv, const char *key, int64_t otherwise)
{
    const char *text = option(argc, argv, key);
    return text ? atoll(text) : otherwise;
}

static int name_index(int argc, char **argv, const char *key, const char *const *names)
{
    const char *text = option(argc, argv, key);
    for (int i = 0; text && names[i]; i++) {
        if (strcmp(text, names[i]) == 0) {
            return i;
        }
    }
    if (text) {
        printf("%s=%s: unknown, taking %s\n", key, text, names[0]);
    }
    return 0;
}

int main(int argc, char **argv)
{
    static struct bench b;
    const char *variant = option(argc, argv, "variant");
    static const struct rope_config rope = {500000, ROPE_LLAMA3, 8, 1, 4, 8192};
    b.config = (struct model_config){.layers = (int)number(argc, argv, "layers", 2),
                                     .width = 4096,
                                     .heads = 32,
                                     .kv_heads = 8,
                                     .head_dim = 128,
                                     .ffn = 14336,
                                     .vocab = 128256,
                                     .context = 131072,
                                     .rope = rope,
                                     .norm_eps = 1e-5f,
                                     .init_std = 0.02f};
    struct attention_recipe recipe = attention_recipe_bf16();
    recipe.pv = (enum pv_format)name_index(argc, argv, "pv", pv_format_names);
    if (recipe.pv != PV_BF16) {
        recipe.qk = QK_NVFP4;
        recipe.mx_rule = MX_OCP;
        attention_recipe_preset(&recipe, BWD_REPRESENTED);
    }
    enum linear_format format = (enum linear_format)name_index(argc, argv, "linear", linear_format_names);
    struct model_trace trace = {mark, &b};
    b.options =
        (struct model_options){.linear = {.attn = format, .mlp = format},
                               .attention = recipe,
                               .recompute = (enum recompute)name_index(argc, argv, "recompute", recompute_names),
                               .device = DEVICE_CUDA,
                               .grad_type = DTYPE_BF16,
                               .batch = number(argc, argv, "batch", 1),
                               .tokens = number(argc, argv, "tokens", 4096),
                               .seed = 1,
                               .unordered = number(argc, argv, "unordered", 0) != 0,
                               .trace = &trace};
    return status_exit_code(run(&b, variant ? variant : "auto", number(argc, argv, "stats", 0) != 0));
}
