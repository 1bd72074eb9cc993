/* bench: what a p_map costs on Hopper: both passes of MXFP4 attention with exact codes, affine and code_space ones, one
 * call of each in turns, so that all meet the same clocks; medians of CUDA events over whole calls, publishing
 * included. Usage: attention_maps_cuda [runs [tokens [batch]]]. One line for each qk, pass and map; "of exact" is the
 * ratio of medians. */
#include "attention/attention_bwd_sm90.h"
#include "attention/attention_sm90.h"
#include "bench/gpu.h"

#include <stdio.h>
#include <stdlib.h>

enum { RUNS_MAX = 100, D = 128, HEADS = 32, KV_HEADS = 8, ARMS = 4, PASSES = 3 };

static const struct {
    enum pv_format pv;
    enum p_map map;
} kinds[ARMS] = {{PV_MXFP4, P_EXACT}, {PV_MXFP4, P_AFFINE}, {PV_MXFP4, P_CODE_SPACE}, {PV_FP8, P_EXACT}};
static const char *const passes[PASSES] = {"forward", "backward, any order", "backward, in order"};

/* One kind's calls: the backward takes its own forward's O, LSE2 and saved state. */
struct arm {
    struct attention_recipe recipe;
    struct attention_fwd fwd;
    struct attention_bwd bwd;
    double ms[PASSES][RUNS_MAX];
};

/* The inputs of one shape and the outputs that nobody reads, on the device. */
struct tensors {
    bf16 *q, *k, *v, *dout, *dq, *dk, *dv;
    void *scratch;
    float *amax;
};

static struct head_view view_of(bf16 *data, const struct attention_shape *s, int64_t heads)
{
    return (struct head_view){data, s->tokens * heads * D, heads * D, D};
}

static void arm_open(struct arm *a, struct cuda *cuda, const struct attention_shape *s, enum qk_format qk, int kind,
                     const struct tensors *x)
{
    const size_t rows = (size_t)(s->batch * HEADS * s->tokens);
    a->recipe = attention_recipe_bf16();
    a->recipe.qk = qk;
    a->recipe.pv = kinds[kind].pv;
    a->recipe.p_map = kinds[kind].map;
    attention_recipe_preset(&a->recipe, BWD_REPRESENTED);
    const char *why = attention_bwd_refuses_sm90(s, &a->recipe);
    if (why != NULL) {
        printf("%s: %s\n", p_map_names[kinds[kind].map], why);
        exit(1);
    }
    a->fwd = (struct attention_fwd){.cuda = cuda, .shape = *s, .recipe = &a->recipe, .scratch = x->scratch};
    a->bwd = (struct attention_bwd){.cuda = cuda, .shape = *s, .recipe = &a->recipe, .scratch = x->scratch};
    a->fwd.q = a->bwd.q = view_of(x->q, s, HEADS);
    a->fwd.k = a->bwd.k = view_of(x->k, s, KV_HEADS);
    a->fwd.v = a->bwd.v = view_of(x->v, s, KV_HEADS);
    a->fwd.out = a->bwd.out = view_of(device_memory(rows * D * sizeof(bf16)), s, HEADS);
    a->fwd.lse_log2 = device_memory(rows * sizeof(float));
    a->bwd.lse_log2 = a->fwd.lse_log2;
    a->fwd.saved = device_memory(attention_variant_sm90.saved_bytes(s, &a->recipe));
    a->bwd.saved = a->fwd.saved;
    a->fwd.amax = a->bwd.amax = x->amax;
    a->bwd.dout = view_of(x->dout, s, HEADS);
    a->bwd.dq = view_of(x->dq, s, HEADS);
    a->bwd.dk = view_of(x->dk, s, KV_HEADS);
    a->bwd.dv = view_of(x->dv, s, KV_HEADS);
}

static void arm_close(struct arm *a)
{
    cuda_free(a->fwd.out.data);
    cuda_free(a->fwd.lse_log2);
    cuda_free(a->fwd.saved);
}

static void run(struct arm *a, int pass)
{
    if (pass == 0) {
        attention_fwd_sm90(&a->fwd);
    } else {
        a->bwd.unordered = pass == 1;
        attention_bwd_sm90(&a->bwd);
    }
}

static void bench(struct cuda *cuda, const struct attention_shape *s, enum qk_format qk, const struct tensors *x,
                  int runs)
{
    static struct arm arms[ARMS];
    struct cuda_event *from;
    struct cuda_event *to;
    must(cuda_event_open(&from));
    must(cuda_event_open(&to));
    for (int m = 0; m < ARMS; m++) {
        arm_open(&arms[m], cuda, s, qk, m, x);
    }
    for (int i = -2; i < runs; i++) {
        for (int pass = 0; pass < PASSES; pass++) {
            for (int m = 0; m < ARMS; m++) {
                cuda_event_record(cuda, from);
                run(&arms[m], pass);
                cuda_event_record(cuda, to);
                must(cuda_sync(cuda, "bench"));
                arms[m].ms[pass][i < 0 ? 0 : i] = cuda_event_ms(from, to);
            }
        }
    }
    for (int pass = 0; pass < PASSES; pass++) {
        const double exact = median(arms[0].ms[pass], runs);
        for (int m = 0; m < ARMS; m++) {
            const double ms = median(arms[m].ms[pass], runs);
            printf("B%d T%d causal %-10s %-19s %-5s %-10s: %7.3f ms, %.3f of exact\n", (int)s->batch, (int)s->tokens,
                   qk_format_names[qk], passes[pass], pv_format_names[kinds[m].pv], p_map_names[kinds[m].map], ms,
                   ms / exact);
        }
    }
    fflush(stdout);
    for (int m = 0; m < ARMS; m++) {
        arm_close(&arms[m]);
    }
    cuda_event_close(from);
    cuda_event_close(to);
}

int main(int argc, char **argv)
{
    const int runs = argc > 1 ? atoi(argv[1]) : 10;
    const int64_t tokens = argc > 2 ? atoi(argv[2]) : 4096, batch = argc > 3 ? atoi(argv[3]) : 1;
    const struct attention_shape s = {batch, tokens, HEADS, KV_HEADS, D, true, 0.08838834764f};
    const int64_t queries = batch * tokens * HEADS * D, keys = batch * tokens * KV_HEADS * D;
    struct attention_recipe largest = attention_recipe_bf16();
    struct cuda *cuda;
    must(cuda_open(&cuda, 0));
    largest.qk = QK_NVFP4_E4M3;
    largest.pv = PV_MXFP4;
    attention_recipe_preset(&largest, BWD_REPRESENTED);
    const struct tensors x = {
        .q = device_normal(cuda, queries, 1, 1),
        .k = device_normal(cuda, keys, 2, 1),
        .v = device_normal(cuda, keys, 3, 1),
        .dout = device_normal(cuda, queries, 4, 0x1p-10f),
        .dq = device_memory((size_t)queries * sizeof(bf16)),
        .dk = device_memory((size_t)keys * sizeof(bf16)),
        .dv = device_memory((size_t)keys * sizeof(bf16)),
        .scratch = device_memory(attention_variant_sm90.scratch_bytes(&s, &largest)),
        .amax = device_memory((size_t)(batch * (HEADS + 2 * KV_HEADS)) * sizeof(float)),
    };
    const struct attention_publish_sm90 all = {.shape = s,
                                               .recipe = &largest,
                                               .q = view_of(x.q, &s, HEADS),
                                               .k = view_of(x.k, &s, KV_HEADS),
                                               .v = view_of(x.v, &s, KV_HEADS)};
    attention_measure_heads_sm90(cuda, &all, x.amax);
    bench(cuda, &s, QK_NVFP4, &x, runs < 1 ? 1 : runs > RUNS_MAX ? RUNS_MAX : runs);
    bench(cuda, &s, QK_NVFP4_E4M3, &x, runs < 1 ? 1 : runs > RUNS_MAX ? RUNS_MAX : runs);
    cuda_close(cuda); /* and with it everything else */
    return 0;
}
