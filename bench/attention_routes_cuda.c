/* bench: every route of attention in every GPU variant that accepts it, in TF/s: 4 B H T^2 D operations forward (half
 * if causal), 2.5 times that backward. A call's time includes publishing its operands.
 *   build/release/bench/attention_routes_cuda [variant | all] [route | all] [forward | backward | both] [runs] [tokens]
 * Medians of events, random inputs. The first line is the rate of a device copy in the same run. */
#include "attention/attention.h"
#include "bench/gpu.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RUNS_MAX = 100, HEADS = 32, KV_HEADS = 8, HEAD_DIM = 128 };

struct route {
    const char *name;
    enum qk_format qk;
    enum qk_scale qk_scale;
    enum pv_format pv;
    enum mx_family mx_rule;
    enum p_map p_map;
    enum p_anchor anchor;
    enum backward_preset backward;
};

/* Arms of one pv format differ in one switch each, so that the cost of a switch can be read off. */
static const struct route routes[] = {
    {.name = "bf16", .pv = PV_BF16, .backward = BWD_BF16},
    {.name = "nvfp4_bf16", .qk = QK_NVFP4, .pv = PV_BF16, .backward = BWD_REPRESENTED},
    {.name = "nvfp4_fp8", .qk = QK_NVFP4, .pv = PV_FP8, .backward = BWD_REPRESENTED},
    {.name = "nvfp4mse_fp8", .qk = QK_NVFP4, .qk_scale = QK_SCALE_MSE, .pv = PV_FP8, .backward = BWD_REPRESENTED},
    {.name = "e4m3_fp8", .qk = QK_NVFP4_E4M3, .pv = PV_FP8, .backward = BWD_REPRESENTED},
    {.name = "fp8_recentred", .qk = QK_NVFP4, .pv = PV_FP8, .backward = BWD_RECENTRED},
    {.name = "fp8_exact_stat", .qk = QK_NVFP4, .pv = PV_FP8, .backward = BWD_EXACT_STAT},
    {.name = "fp8_saved_output", .qk = QK_NVFP4, .pv = PV_FP8, .backward = BWD_SAVED_OUTPUT},
    {.name = "nvfp4_mxfp4", .qk = QK_NVFP4, .pv = PV_MXFP4, .backward = BWD_REPRESENTED},
    {.name = "mxfp4_ocp", .qk = QK_NVFP4, .pv = PV_MXFP4, .mx_rule = MX_OCP, .backward = BWD_REPRESENTED},
    {.name = "mxfp4_code_space", .qk = QK_NVFP4, .pv = PV_MXFP4, .p_map = P_CODE_SPACE, .backward = BWD_REPRESENTED},
    {.name = "mxfp4_affine", .qk = QK_NVFP4, .pv = PV_MXFP4, .p_map = P_AFFINE, .backward = BWD_REPRESENTED},
    {.name = "mxfp4_sampled", .qk = QK_NVFP4, .pv = PV_MXFP4, .anchor = ANCHOR_SAMPLED, .backward = BWD_REPRESENTED},
    {.name = "mxfp4_saved", .qk = QK_NVFP4, .pv = PV_MXFP4, .backward = BWD_SAVED_OUTPUT},
    {.name = "nvfp4_nvfp4", .qk = QK_NVFP4, .pv = PV_NVFP4, .backward = BWD_REPRESENTED},
    {.name = "nvfp4_ue5m3", .qk = QK_NVFP4, .pv = PV_FP4_UE5M3, .backward = BWD_REPRESENTED},
};

static const struct {
    int64_t batch, tokens;
    bool causal;
} sizes[] = {{4, 4096, true}, {2, 8192, true}, {1, 16384, true}, {4, 4096, false}};

struct timer {
    struct cuda_event *from, *to;
    double ms[RUNS_MAX];
    int n;
};

struct tensors {
    bf16 *qkv, *out, *dout, *dqkv;
    float *lse;
    struct attention_stats *stats;
};

static struct attention_shape shape_of(size_t size)
{
    return (struct attention_shape){.batch = sizes[size].batch,
                                    .tokens = sizes[size].tokens,
                                    .heads = HEADS,
                                    .kv_heads = KV_HEADS,
                                    .head_dim = HEAD_DIM,
                                    .causal = sizes[size].causal,
                                    .softmax_scale = 1.0f / sqrtf(HEAD_DIM)};
}

static struct head_view slice(bf16 *data, int64_t tokens, int64_t width, int64_t first_head)
{
    return (struct head_view){data + first_head * HEAD_DIM, tokens * width, width, HEAD_DIM};
}

enum { QKV_WIDTH = (HEADS + 2 * KV_HEADS) * HEAD_DIM, OUT_WIDTH = HEADS * HEAD_DIM };

struct call {
    const struct cuda *cuda;
    const struct attention_variant *variant;
    struct attention_shape shape;
    struct attention_recipe recipe;
    struct tensors t;
    void *saved, *scratch;
};

static void forward(const struct call *c, bool stats)
{
    int64_t T = c->shape.tokens;
    c->variant->fwd(&(struct attention_fwd){.cuda = c->cuda,
                                            .shape = c->shape,
                                            .recipe = &c->recipe,
                                            .q = slice(c->t.qkv, T, QKV_WIDTH, 0),
                                            .k = slice(c->t.qkv, T, QKV_WIDTH, HEADS),
                                            .v = slice(c->t.qkv, T, QKV_WIDTH, HEADS + KV_HEADS),
                                            .out = slice(c->t.out, T, OUT_WIDTH, 0),
                                            .lse_log2 = c->t.lse,
                                            .saved = c->saved,
                                            .scratch = c->scratch,
                                            .stats = stats ? c->t.stats : NULL});
}

static void backward(const struct call *c, bool stats)
{
    int64_t T = c->shape.tokens;
    c->variant->bwd(&(struct attention_bwd){.cuda = c->cuda,
                                            .shape = c->shape,
                                            .recipe = &c->recipe,
                                            .q = slice(c->t.qkv, T, QKV_WIDTH, 0),
                                            .k = slice(c->t.qkv, T, QKV_WIDTH, HEADS),
                                            .v = slice(c->t.qkv, T, QKV_WIDTH, HEADS + KV_HEADS),
                                            .out = slice(c->t.out, T, OUT_WIDTH, 0),
                                            .dout = slice(c->t.dout, T, OUT_WIDTH, 0),
                                            .dq = slice(c->t.dqkv, T, QKV_WIDTH, 0),
                                            .dk = slice(c->t.dqkv, T, QKV_WIDTH, HEADS),
                                            .dv = slice(c->t.dqkv, T, QKV_WIDTH, HEADS + KV_HEADS),
                                            .lse_log2 = c->t.lse,
                                            .saved = c->saved,
                                            .scratch = c->scratch,
                                            .stats = stats ? c->t.stats : NULL});
}

static double time_pass(const struct call *c, struct timer *timer, int runs, bool is_forward, bool stats)
{
    timer->n = 0;
    for (int i = 0; i <= runs; i++) {
        cuda_event_record(c->cuda, timer->from);
        is_forward ? forward(c, stats) : backward(c, stats);
        cuda_event_record(c->cuda, timer->to);
        must(cuda_sync(c->cuda, is_forward ? "forward" : "backward"));
        if (i > 0) { /* the first one warms up */
            timer->ms[timer->n++] = cuda_event_ms(timer->from, timer->to);
        }
    }
    return median(timer->ms, timer->n);
}

static struct attention_recipe recipe_of(const struct route *r)
{
    struct attention_recipe recipe = attention_recipe_bf16();
    recipe.qk = r->qk;
    recipe.qk_scale = r->qk_scale;
    recipe.pv = r->pv;
    recipe.mx_rule = r->mx_rule;
    recipe.p_map = r->p_map;
    recipe.anchor = r->anchor;
    attention_recipe_preset(&recipe, r->backward);
    return recipe;
}

struct wish {
    const char *variant, *route, *pass;
    int runs;
    int64_t tokens; /* 0: every size */
};

static bool wanted(const char *wish, const char *name)
{
    return strcmp(wish, "all") == 0 || strcmp(wish, name) == 0;
}

static void run_route(const struct cuda *cuda, const struct attention_variant *variant, const struct route *route,
                      size_t size, struct tensors t, const struct wish *wish)
{
    struct call c = {.cuda = cuda, .variant = variant, .shape = shape_of(size), .recipe = recipe_of(route), .t = t};
    if (variant->refuses(&c.shape, &c.recipe) != NULL) {
        return;
    }
    struct timer timer = {0};
    must(cuda_event_open(&timer.from));
    must(cuda_event_open(&timer.to));
    c.saved = device_memory(variant->saved_bytes(&c.shape, &c.recipe));
    c.scratch = device_memory(variant->scratch_bytes(&c.shape, &c.recipe));
    double T = (double)c.shape.tokens;
    double tera = 4.0 * (double)c.shape.batch * HEADS * T * T * HEAD_DIM / (c.shape.causal ? 2.0 : 1.0) * 1e-12;
    printf("%-8s %-18s T %5.0f B %d %-6s", variant->name, route->name, T, (int)c.shape.batch,
           c.shape.causal ? "causal" : "full");
    for (int stats = 0; stats < 2; stats++) {
        if (strcmp(wish->pass, "backward") != 0) {
            double ms = time_pass(&c, &timer, wish->runs, true, stats == 1);
            printf("  fwd%s %7.3f ms %6.1f TF/s", stats ? "+stats" : "", ms, tera / (ms * 1e-3));
        } else {
            forward(&c, false);
        }
    }
    if (strcmp(wish->pass, "forward") != 0) {
        double ms = time_pass(&c, &timer, wish->runs, false, false);
        printf("  bwd %7.3f ms %6.1f TF/s", ms, 2.5 * tera / (ms * 1e-3));
    }
    printf("\n");
    fflush(stdout);
    cuda_free(c.saved);
    cuda_free(c.scratch);
    cuda_event_close(timer.from);
    cuda_event_close(timer.to);
}

static void copy_rate(const struct cuda *cuda, const struct tensors *t, size_t bytes)
{
    struct timer timer = {0};
    must(cuda_event_open(&timer.from));
    must(cuda_event_open(&timer.to));
    for (int i = 0; i < 10; i++) {
        cuda_event_record(cuda, timer.from);
        cuda_copy(cuda, t->dqkv, t->qkv, bytes);
        cuda_event_record(cuda, timer.to);
        must(cuda_sync(cuda, "copy"));
        timer.ms[timer.n++] = cuda_event_ms(timer.from, timer.to);
    }
    printf("device copy %.0f GB/s (read and written)\n", 2.0 * (double)bytes / median(timer.ms, timer.n) * 1e-6);
    cuda_event_close(timer.from);
    cuda_event_close(timer.to);
}

int main(int argc, char **argv)
{
    struct wish wish = {argc > 1 ? argv[1] : "all", argc > 2 ? argv[2] : "all", argc > 3 ? argv[3] : "both",
                        argc > 4 ? atoi(argv[4]) : 10, argc > 5 ? atoi(argv[5]) : 0};
    wish.runs = wish.runs < 1 ? 1 : wish.runs > RUNS_MAX ? RUNS_MAX : wish.runs;
    struct cuda *cuda;
    must(cuda_open(&cuda, 0));
    int64_t tokens = 16384; /* of every size */
    struct tensors t = {.qkv = device_normal(cuda, tokens * QKV_WIDTH, 1, 1.0f),
                        .out = device_memory((size_t)(tokens * OUT_WIDTH) * sizeof(bf16)),
                        .dout = device_normal(cuda, tokens * OUT_WIDTH, 2, 0x1p-10f),
                        .dqkv = device_memory((size_t)(tokens * QKV_WIDTH) * sizeof(bf16)),
                        .lse = device_memory((size_t)(tokens * HEADS) * sizeof(float)),
                        .stats = device_memory(sizeof(struct attention_stats))};
    cuda_zero(cuda, t.stats, sizeof *t.stats);
    copy_rate(cuda, &t, (size_t)(tokens * QKV_WIDTH) * sizeof(bf16));
    for (size_t size = 0; size < sizeof sizes / sizeof *sizes; size++) {
        if (wish.tokens != 0 && wish.tokens != sizes[size].tokens) {
            continue;
        }
        for (int v = 0; attention_variants[v] != NULL; v++) {
            if (attention_variants[v]->device != DEVICE_CUDA || !wanted(wish.variant, attention_variants[v]->name)) {
                continue;
            }
            for (size_t r = 0; r < sizeof routes / sizeof *routes; r++) {
                if (wanted(wish.route, routes[r].name)) {
                    run_route(cuda, attention_variants[v], &routes[r], size, t, &wish);
                }
            }
        }
    }
    cuda_free(t.qkv);
    cuda_free(t.out);
    cuda_free(t.dout);
    cuda_free(t.dqkv);
    cuda_free(t.lse);
    cuda_free(t.stats);
    cuda_close(cuda);
    return 0;
}
