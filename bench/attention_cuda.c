/* bench: attention on the GPU in TF/s: 4 B H T^2 D operations forward (half if causal), 2.5 times that backward.
 * Usage: attention_cuda [runs [causal]], with the second only causal shapes. One line a shape and recipe; medians of
 * CUDA events; random inputs. */
#include "attention/attention_sm90.h"
#include "bench/gpu.h"

#include <stdio.h>
#include <stdlib.h>

enum { RUNS_MAX = 100 };

static struct head_view view_of(bf16 *data, const struct attention_shape *s, int64_t heads)
{
    return (struct head_view){data, s->tokens * heads * s->head_dim, heads * s->head_dim, s->head_dim};
}

/* One forward to time: the whole call, or with operands as already published the kernel alone. */
struct forward {
    struct attention_fwd call;
    const struct attention_operands_sm90 *operands; /* NULL: the whole call */
};

static void forward_run(const struct forward *f)
{
    if (f->operands != NULL) {
        attention_fwd_codes_sm90(&f->call, f->operands);
    } else {
        attention_fwd_sm90(&f->call);
    }
}

static double forward_ms(struct cuda *cuda, const struct forward *f, int runs)
{
    struct cuda_event *from[RUNS_MAX];
    struct cuda_event *to[RUNS_MAX];
    double ms[RUNS_MAX];
    forward_run(f);
    for (int i = 0; i < runs; i++) {
        must(cuda_event_open(&from[i]));
        must(cuda_event_open(&to[i]));
        cuda_event_record(cuda, from[i]);
        forward_run(f);
        cuda_event_record(cuda, to[i]);
    }
    must(cuda_sync(cuda, "bench"));
    for (int i = 0; i < runs; i++) {
        ms[i] = cuda_event_ms(from[i], to[i]);
        cuda_event_close(from[i]);
        cuda_event_close(to[i]);
    }
    return median(ms, runs);
}

/* Device memory of one shape. */
struct tensors {
    struct head_view q, k, v, out;
    void *lse, *saved, *scratch, *counter, *facts, *q8, *k8, *column, *inverse;
};

static void tensors_open(struct cuda *cuda, const struct attention_shape *s, struct tensors *t)
{
    struct attention_recipe most = attention_recipe_bf16();
    int64_t queries = s->batch * s->tokens * s->heads * s->head_dim;
    int64_t keys = s->batch * s->tokens * s->kv_heads * s->head_dim;
    most.qk = QK_NVFP4_E4M3;
    most.pv = PV_MXFP4;
    t->q = view_of(device_normal(cuda, queries, 1, 1), s, s->heads);
    t->k = view_of(device_normal(cuda, keys, 2, 1), s, s->kv_heads);
    t->v = view_of(device_normal(cuda, keys, 3, 1), s, s->kv_heads);
    t->out = view_of(device_normal(cuda, queries, 4, 1), s, s->heads);
    t->lse = device_memory((size_t)(s->batch * s->heads * s->tokens) * sizeof(float));
    t->saved = device_memory(attention_variant_sm90.saved_bytes(s, &most));
    t->scratch = device_memory(attention_fwd_scratch_bytes_sm90(s, &most));
    t->counter = device_memory(64);
    t->facts = device_memory((size_t)(s->batch * s->heads) * sizeof(struct head_facts));
    t->q8 = device_memory((size_t)queries);
    t->k8 = device_memory((size_t)keys);
    t->column = device_memory((size_t)keys);
    t->inverse = device_memory((size_t)(s->batch * s->heads) * sizeof(float));
}

static void tensors_close(struct tensors *t)
{
    void *all[] = {t->q.data,  t->k.data, t->v.data, t->out.data, t->lse,    t->saved,  t->scratch,
                   t->counter, t->facts,  t->q8,     t->k8,       t->column, t->inverse};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        cuda_free(all[i]);
    }
}

/* Codes of the plain inputs (q and k become E4M3 values): as busy as those of a real call. */
static void codes_make(struct cuda *cuda, const struct attention_shape *s, const struct attention_recipe *recipe,
                       struct tensors *t, struct attention_operands_sm90 *x)
{
    struct head_tensor v = {t->v, s->batch, s->tokens, s->kv_heads, s->head_dim};
    attention_measure_cuda(cuda, &v, t->facts);
    attention_value_column_sm90(cuda, s, recipe, t->v.data, t->facts, t->column, t->inverse);
    attention_lower_rows_sm90(cuda, t->k.data, s->batch * s->kv_heads, s->tokens, t->facts, t->k8, t->inverse);
    struct head_tensor q = {t->q, s->batch, s->tokens, s->heads, s->head_dim};
    attention_measure_cuda(cuda, &q, t->facts);
    attention_lower_rows_sm90(cuda, t->q.data, s->batch * s->heads, s->tokens, t->facts, t->q8, t->inverse);
    *x = (struct attention_operands_sm90){.q = t->q,
                                          .k = t->k,
                                          .v_column = t->column,
                                          .q_inverse = t->inverse,
                                          .k_inverse = t->inverse,
                                          .v_inverse = t->inverse,
                                          .counter = t->counter};
    if (recipe->qk == QK_NVFP4_E4M3) {
        x->q8 = t->q8;
        x->k8 = t->k8;
    }
}

static void bench_recipe(struct cuda *cuda, const struct attention_shape *s, struct tensors *t, enum qk_format qk,
                         enum pv_format pv, enum p_map map, int runs)
{
    struct attention_recipe recipe = attention_recipe_bf16();
    struct attention_operands_sm90 x;
    double operations =
        4.0 * (double)(s->batch * s->heads * s->tokens) * (double)(s->tokens * s->head_dim) * (s->causal ? 0.5 : 1.0);
    recipe.qk = qk;
    recipe.pv = pv;
    recipe.p_map = map;
    struct forward f = {.call = {.cuda = cuda,
                                 .shape = *s,
                                 .recipe = &recipe,
                                 .q = t->q,
                                 .k = t->k,
                                 .v = t->v,
                                 .out = t->out,
                                 .lse_log2 = t->lse,
                                 .saved = t->saved,
                                 .scratch = t->scratch}};
    double whole = forward_ms(cuda, &f, runs);
    double kernel = whole;
    if (pv != PV_BF16) {
        codes_make(cuda, s, &recipe, t, &x);
        f.operands = &x;
        kernel = forward_ms(cuda, &f, runs);
    }
    printf("fwd B%d T%-5d %s %-10s %-5s %-10s: kernel %7.3f ms %5.0f TF/s; published %7.3f ms %5.0f TF/s\n",
           (int)s->batch, (int)s->tokens, s->causal ? "causal" : "full  ", qk_format_names[qk], pv_format_names[pv],
           p_map_names[map], kernel, operations / kernel * 1e-9, whole, operations / whole * 1e-9);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    static const int64_t shapes[][2] = {{4, 4096}, {2, 8192}, {1, 16384}, {1, 32768}};
    int runs = argc > 1 ? atoi(argv[1]) : 20;
    struct cuda *cuda;
    runs = runs < 1 ? 1 : runs > RUNS_MAX ? RUNS_MAX : runs;
    must(cuda_open(&cuda, 0));
    const size_t step = argc > 2 ? 2 : 1;
    for (size_t i = 0; i < 2 * sizeof shapes / sizeof *shapes; i += step) {
        const int64_t *shape = shapes[i / 2];
        struct attention_shape s = {shape[0], shape[1], 32, 8, 128, i % 2 == 0, 0.08838834764f};
        struct tensors t;
        tensors_open(cuda, &s, &t);
        bench_recipe(cuda, &s, &t, QK_BF16, PV_BF16, P_EXACT, runs);
        bench_recipe(cuda, &s, &t, QK_NVFP4, PV_FP8, P_EXACT, runs);
        bench_recipe(cuda, &s, &t, QK_NVFP4, PV_MXFP4, P_EXACT, runs);
        bench_recipe(cuda, &s, &t, QK_NVFP4_E4M3, PV_FP8, P_EXACT, runs);
        bench_recipe(cuda, &s, &t, QK_NVFP4_E4M3, PV_MXFP4, P_EXACT, runs);
        for (enum p_map map = P_CODE_SPACE; i == 2 && map <= P_AFFINE; map++) {
            bench_recipe(cuda, &s, &t, QK_NVFP4, PV_MXFP4, map, runs);
            bench_recipe(cuda, &s, &t, QK_NVFP4_E4M3, PV_MXFP4, map, runs);
        }
        tensors_close(&t);
    }
    cuda_close(cuda);
    return 0;
}
