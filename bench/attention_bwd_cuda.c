/* bench: the attention backward of the variant sm90 in TF/s: 10 B H T^2 D operations, half if causal; the whole call,
 * with everything published; largest magnitudes of Q and K are known, as in the model. Usage: attention_bwd_cuda [runs
 * [causal [centred]]], with the second only causal shapes. One line a shape and recipe, dQ summed in any order and in
 * one order; with the third instead dQ in one order, then dk_center, then k_center too, run in turns. Medians of CUDA
 * events; the saved state is that of the forward on random inputs. */
#include "attention/attention_bwd_sm90.h"
#include "attention/attention_sm90.h"
#include "bench/gpu.h"

#include <stdio.h>
#include <stdlib.h>

enum { RUNS_MAX = 100, CALLS_MAX = 3, D = 128, HEADS = 32, KV_HEADS = 8 };

static struct head_view view_of(bf16 *data, const struct attention_shape *s, int64_t heads)
{
    return (struct head_view){data, s->tokens * heads * D, heads * D, D};
}

/* Of n calls, in turns. */
static void backward_ms(struct cuda *cuda, const struct attention_bwd *calls, int n, int runs, double *medians)
{
    struct cuda_event *from;
    struct cuda_event *to;
    double ms[CALLS_MAX][RUNS_MAX];
    must(cuda_event_open(&from));
    must(cuda_event_open(&to));
    for (int i = -2; i < runs; i++) {
        for (int call = 0; call < n; call++) {
            cuda_event_record(cuda, from);
            attention_bwd_sm90(&calls[call]);
            cuda_event_record(cuda, to);
            must(cuda_sync(cuda, "bench"));
            if (i >= 0) {
                ms[call][i] = cuda_event_ms(from, to);
            }
        }
    }
    for (int call = 0; call < n; call++) {
        medians[call] = median(ms[call], runs);
    }
    cuda_event_close(from);
    cuda_event_close(to);
}

/* The inputs of one shape, on the device. */
struct inputs {
    bf16 *q, *k, *v, *out, *dout, *dq, *dk, *dv;
    float *amax;
};

/* A backward after its forward; lse and saved are its own. */
static struct attention_bwd call_open(struct cuda *cuda, const struct attention_shape *s, const struct inputs *x,
                                      const struct attention_recipe *recipe, void *scratch)
{
    void *saved = device_memory(attention_variant_sm90.saved_bytes(s, recipe));
    float *lse = device_memory((size_t)(s->batch * HEADS * s->tokens) * sizeof(float));
    struct attention_fwd fwd = {.cuda = cuda, .shape = *s, .recipe = recipe, .lse_log2 = lse, .saved = saved};
    struct attention_bwd bwd = {.cuda = cuda, .shape = *s, .recipe = recipe, .lse_log2 = lse, .saved = saved};
    fwd.q = bwd.q = view_of(x->q, s, HEADS);
    fwd.k = bwd.k = view_of(x->k, s, KV_HEADS);
    fwd.v = bwd.v = view_of(x->v, s, KV_HEADS);
    fwd.out = bwd.out = view_of(x->out, s, HEADS);
    bwd.dout = view_of(x->dout, s, HEADS);
    bwd.dq = view_of(x->dq, s, HEADS);
    bwd.dk = view_of(x->dk, s, KV_HEADS);
    bwd.dv = view_of(x->dv, s, KV_HEADS);
    fwd.amax = bwd.amax = x->amax;
    fwd.scratch = bwd.scratch = scratch;
    attention_fwd_sm90(&fwd);
    return bwd;
}

static void call_close(struct attention_bwd *call)
{
    cuda_free((void *)(uintptr_t)call->saved);
    cuda_free((void *)(uintptr_t)call->lse_log2);
}

static void bench_recipe(struct cuda *cuda, const struct attention_shape *s, const struct inputs *x,
                         const struct attention_recipe *recipe, int runs, bool centred)
{
    struct attention_recipe less[CALLS_MAX] = {*recipe, *recipe, *recipe};
    struct attention_bwd calls[CALLS_MAX];
    double ms[CALLS_MAX];
    less[1].dk_center = less[2].dk_center = less[2].k_center = true;
    void *scratch = device_memory(attention_variant_sm90.scratch_bytes(s, &less[2]));
    const int n = centred ? 3 : 2;
    for (int i = 0; i < n; i++) {
        calls[i] = call_open(cuda, s, x, centred ? &less[i] : recipe, scratch);
        calls[i].unordered = !centred && i == 0;
    }
    backward_ms(cuda, calls, n, runs, ms);
    double T = (double)s->tokens;
    double operations = 10.0 * (double)s->batch * HEADS * T * T * D * (s->causal ? 0.5 : 1.0) * 1e-9;
    printf("bwd B%d T%-5d %-6s %-10s %-5s %-12s:", (int)s->batch, (int)s->tokens, s->causal ? "causal" : "full",
           qk_format_names[recipe->qk], pv_format_names[recipe->pv], backward_preset_names[recipe->backward]);
    if (centred) {
        printf(" in order %7.3f ms; dk_center %7.3f ms (%+.1f %%); k_center too %7.3f ms (%+.1f %%)\n", ms[0], ms[1],
               100 * (ms[1] / ms[0] - 1), ms[2], 100 * (ms[2] / ms[0] - 1));
    } else {
        printf(" any order %7.3f ms %5.0f TF/s; in order %7.3f ms %5.0f TF/s\n", ms[0], operations / ms[0], ms[1],
               operations / ms[1]);
    }
    fflush(stdout);
    for (int i = 0; i < n; i++) {
        call_close(&calls[i]);
    }
    cuda_free(scratch);
}

static void measure(struct cuda *cuda, const struct attention_shape *s, const struct inputs *x)
{
    struct attention_recipe recipe = attention_recipe_bf16();
    recipe.qk = QK_NVFP4;
    recipe.pv = PV_FP8;
    const struct attention_publish_sm90 all = {.shape = *s,
                                               .recipe = &recipe,
                                               .q = view_of(x->q, s, HEADS),
                                               .k = view_of(x->k, s, KV_HEADS),
                                               .v = view_of(x->v, s, KV_HEADS)};
    attention_measure_heads_sm90(cuda, &all, x->amax);
}

static void bench_shape(struct cuda *cuda, const struct attention_shape *s, int runs, bool centred)
{
    static const struct {
        enum qk_format qk;
        enum pv_format pv;
        enum backward_preset backward;
    } routes[] = {
        {QK_BF16, PV_BF16, BWD_BF16},
        {QK_NVFP4, PV_FP8, BWD_REPRESENTED},
        {QK_NVFP4, PV_FP8, BWD_SAVED_OUTPUT},
        {QK_NVFP4, PV_MXFP4, BWD_REPRESENTED},
        {QK_NVFP4_E4M3, PV_FP8, BWD_REPRESENTED},
        {QK_NVFP4_E4M3, PV_MXFP4, BWD_REPRESENTED},
    };
    int64_t queries = s->batch * s->tokens * HEADS * D;
    int64_t keys = s->batch * s->tokens * KV_HEADS * D;
    struct inputs x = {
        .q = device_normal(cuda, queries, 1, 1),
        .k = device_normal(cuda, keys, 2, 1),
        .v = device_normal(cuda, keys, 3, 1),
        .dout = device_normal(cuda, queries, 4, 0x1p-10f),
        .out = device_memory((size_t)queries * sizeof(bf16)),
        .dq = device_memory((size_t)queries * sizeof(bf16)),
        .dk = device_memory((size_t)keys * sizeof(bf16)),
        .dv = device_memory((size_t)keys * sizeof(bf16)),
        .amax = device_memory((size_t)(s->batch * (HEADS + 2 * KV_HEADS)) * sizeof(float)),
    };
    measure(cuda, s, &x);
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++) {
        struct attention_recipe recipe = attention_recipe_bf16();
        recipe.qk = routes[i].qk;
        recipe.pv = routes[i].pv;
        attention_recipe_preset(&recipe, routes[i].backward);
        bench_recipe(cuda, s, &x, &recipe, runs, centred);
    }
    void *all[] = {x.q, x.k, x.v, x.dout, x.out, x.dq, x.dk, x.dv, x.amax};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        cuda_free(all[i]);
    }
}

int main(int argc, char **argv)
{
    static const int64_t shapes[][2] = {{4, 4096}, {2, 8192}, {1, 16384}, {1, 32768}};
    int runs = argc > 1 ? atoi(argv[1]) : 10;
    struct cuda *cuda;
    runs = runs < 1 ? 1 : runs > RUNS_MAX ? RUNS_MAX : runs;
    must(cuda_open(&cuda, 0));
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        for (int causal = 1; causal >= (argc > 2); causal--) {
            struct attention_shape s = {shapes[i][0], shapes[i][1], HEADS, KV_HEADS, D, causal == 1, 0.08838834764f};
            bench_shape(cuda, &s, runs, argc > 3);
        }
    }
    cuda_close(cuda);
    return 0;
}
