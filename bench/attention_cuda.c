/* bench: the forward on the GPU: its kernel in TF/s (4 B H T^2 D operations, half if causal), and the publishing of its
 * operands in ms, and in bytes that it must move against a copy in the same run. Largest magnitudes come with Q, K and
 * V, as RoPE finds them in the model; what publishing takes without is shown beside. Usage: attention_cuda [runs
 * [causal | publish]]: only causal shapes; publishing alone. A line a shape and recipe; medians of CUDA events; random
 * inputs as slices of one fused projection. */
#include "attention/attention_sm90.h"
#include "bench/gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RUNS_MAX = 100 };

/* Device memory of one shape. */
struct tensors {
    bf16 *qkv, *copy; /* (B, T, H + 2 Hkv, D) */
    bf16 *out;
    void *lse, *saved, *scratch;
    float *amax;
    double copy_rate; /* bytes read and written a second */
};

/* One thing to time. */
struct job {
    enum { JOB_WHOLE, JOB_KERNEL, JOB_PUBLISH, JOB_MEASURE_PUBLISH, JOB_COPY } kind;
    const struct attention_fwd *call;
    const struct attention_operands_sm90 *operands;
    const struct tensors *tensors;
};

static size_t qkv_bytes(const struct attention_shape *s)
{
    return (size_t)(s->batch * s->tokens * (s->heads + 2 * s->kv_heads) * s->head_dim) * sizeof(bf16);
}

/* As the model calls it: amax came with Q, K and V. */
static void job_run(const struct job *j)
{
    struct attention_fwd call = *j->call;
    call.amax = j->tensors->amax;
    switch (j->kind) {
    case JOB_KERNEL:
        attention_fwd_codes_sm90(&call, j->operands);
        break;
    case JOB_PUBLISH:
        attention_fwd_publish_sm90(&call);
        break;
    case JOB_MEASURE_PUBLISH:
        call.amax = NULL;
        attention_fwd_publish_sm90(&call);
        break;
    case JOB_COPY:
        cuda_copy(call.cuda, j->tensors->copy, j->tensors->qkv, qkv_bytes(&call.shape));
        break;
    default:
        attention_fwd_sm90(&call);
    }
}

static double job_ms(const struct job *j, int runs)
{
    const struct cuda *cuda = j->call->cuda;
    struct cuda_event *from[RUNS_MAX];
    struct cuda_event *to[RUNS_MAX];
    double ms[RUNS_MAX];
    job_run(j);
    for (int i = 0; i < runs; i++) {
        must(cuda_event_open(&from[i]));
        must(cuda_event_open(&to[i]));
        cuda_event_record(cuda, from[i]);
        job_run(j);
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

static void tensors_open(struct cuda *cuda, const struct attention_shape *s, struct tensors *t, int runs)
{
    struct attention_recipe most = attention_recipe_bf16();
    int64_t queries = s->batch * s->tokens * s->heads * s->head_dim;
    int64_t heads = s->heads + 2 * s->kv_heads;
    most.qk = QK_NVFP4_E4M3;
    most.pv = PV_MXFP4;
    attention_recipe_preset(&most, BWD_REPRESENTED);
    t->qkv = device_normal(cuda, (int64_t)qkv_bytes(s) / 2, 1, 1);
    t->copy = device_memory(qkv_bytes(s));
    t->out = device_memory((size_t)queries * sizeof(bf16));
    t->lse = device_memory((size_t)(s->batch * s->heads * s->tokens) * sizeof(float));
    t->saved = device_memory(attention_variant_sm90.saved_bytes(s, &most));
    t->scratch = device_memory(attention_fwd_scratch_bytes_sm90(s, &most));
    t->amax = device_memory((size_t)(s->batch * heads) * sizeof(float));
    const struct attention_publish_sm90 p = {
        .shape = *s,
        .recipe = &most,
        .q = {t->qkv, s->tokens * heads * s->head_dim, heads * s->head_dim, s->head_dim},
        .k = {t->qkv + s->heads * s->head_dim, s->tokens * heads * s->head_dim, heads * s->head_dim, s->head_dim},
        .v = {t->qkv + (s->heads + s->kv_heads) * s->head_dim, s->tokens * heads * s->head_dim, heads * s->head_dim,
              s->head_dim}};
    attention_measure_heads_sm90(cuda, &p, t->amax);
    const struct attention_fwd call = {.cuda = cuda, .shape = *s};
    double ms = job_ms(&(struct job){.kind = JOB_COPY, .call = &call, .tensors = t}, runs);
    t->copy_rate = 2.0 * (double)qkv_bytes(s) / ms * 1e3;
}

static void tensors_close(struct tensors *t)
{
    void *all[] = {t->qkv, t->copy, t->out, t->lse, t->saved, t->scratch, t->amax};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        cuda_free(all[i]);
    }
}

/* Bytes that publishing must read and write, with the magnitudes known: E4M3 rows of Q and K need no BF16 beside them.
 */
static double published_bytes(const struct attention_shape *s, const struct attention_recipe *recipe)
{
    const double scores = (double)(s->heads + s->kv_heads) * (double)s->head_dim;
    const double values = (double)s->kv_heads * (double)s->head_dim;
    const double token = (recipe->qk == QK_BF16         ? 0
                          : recipe->qk == QK_NVFP4_E4M3 ? 3
                                                        : 4) *
                             scores +
                         (recipe->pv == PV_BF16 ? 0 : 5) * values;
    return token * (double)(s->batch * s->tokens);
}

static void bench_recipe(struct cuda *cuda, const struct attention_shape *s, struct tensors *t,
                         const struct attention_recipe *recipe, int runs, bool publishing_alone)
{
    const int64_t stride = (s->heads + 2 * s->kv_heads) * s->head_dim;
    const double operations =
        4.0 * (double)(s->batch * s->heads * s->tokens) * (double)(s->tokens * s->head_dim) * (s->causal ? 0.5 : 1.0);
    struct attention_fwd call = {
        .cuda = cuda,
        .shape = *s,
        .recipe = recipe,
        .q = {t->qkv, s->tokens * stride, stride, s->head_dim},
        .k = {t->qkv + s->heads * s->head_dim, s->tokens * stride, stride, s->head_dim},
        .v = {t->qkv + (s->heads + s->kv_heads) * s->head_dim, s->tokens * stride, stride, s->head_dim},
        .out = {t->out, s->tokens * s->heads * s->head_dim, s->heads * s->head_dim, s->head_dim},
        .lse_log2 = t->lse,
        .saved = t->saved,
        .scratch = t->scratch};
    struct job job = {.call = &call, .tensors = t};
    printf("fwd B%d T%-5d %s %-10s %-5s %-10s:", (int)s->batch, (int)s->tokens, s->causal ? "causal" : "full  ",
           qk_format_names[recipe->qk], pv_format_names[recipe->pv], p_map_names[recipe->p_map]);
    if (recipe->pv != PV_BF16) {
        job.kind = JOB_MEASURE_PUBLISH;
        double measuring = job_ms(&job, runs);
        job.kind = JOB_PUBLISH;
        double ms = job_ms(&job, runs), rate = published_bytes(s, recipe) / ms * 1e3;
        printf(" publishing %.3f ms %4.0f GB/s (%.2f of a copy), %.3f without amax;", ms, rate * 1e-9,
               rate / t->copy_rate, measuring);
        struct attention_operands_sm90 x = attention_fwd_publish_sm90(&call);
        job.operands = &x;
        job.kind = JOB_KERNEL;
        if (!publishing_alone) {
            ms = job_ms(&job, runs);
            printf(" kernel %7.3f ms %5.0f TF/s;", ms, operations / ms * 1e-9);
        }
    }
    if (!publishing_alone) {
        job.kind = JOB_WHOLE;
        double ms = job_ms(&job, runs);
        printf(" whole %7.3f ms %5.0f TF/s", ms, operations / ms * 1e-9);
    }
    printf("\n");
    fflush(stdout);
}

static void bench_shape(struct cuda *cuda, const struct attention_shape *s, int runs, bool publishing_alone, bool maps)
{
    static const struct {
        enum qk_format qk;
        enum pv_format pv;
    } routes[] = {{QK_BF16, PV_BF16},
                  {QK_NVFP4, PV_FP8},
                  {QK_NVFP4, PV_MXFP4},
                  {QK_NVFP4_E4M3, PV_FP8},
                  {QK_NVFP4_E4M3, PV_MXFP4}};
    struct tensors t;
    tensors_open(cuda, s, &t, runs);
    if (publishing_alone) {
        printf("copy of Q, K, V at B%d T%d: %.0f GB/s\n", (int)s->batch, (int)s->tokens, t.copy_rate * 1e-9);
    }
    for (size_t i = publishing_alone ? 1 : 0; i < sizeof routes / sizeof *routes; i++) {
        struct attention_recipe recipe = attention_recipe_bf16();
        recipe.qk = routes[i].qk;
        recipe.pv = routes[i].pv;
        attention_recipe_preset(&recipe, recipe.pv == PV_BF16 ? BWD_BF16 : BWD_REPRESENTED);
        bench_recipe(cuda, s, &t, &recipe, runs, publishing_alone);
        for (enum p_map map = P_CODE_SPACE; maps && recipe.pv == PV_MXFP4 && map <= P_AFFINE; map++) {
            recipe.p_map = map;
            bench_recipe(cuda, s, &t, &recipe, runs, false);
        }
        for (enum qk_scale scale = QK_SCALE_MSE; publishing_alone && i == 1 && scale <= QK_SCALE_FOLDED; scale++) {
            recipe.qk_scale = scale;
            printf("%s: ", qk_scale_names[scale]);
            bench_recipe(cuda, s, &t, &recipe, runs, true);
        }
    }
    tensors_close(&t);
}

int main(int argc, char **argv)
{
    static const int64_t shapes[][2] = {{4, 4096}, {2, 8192}, {1, 16384}, {1, 32768}, {1, 4096}};
    const size_t count = sizeof shapes / sizeof *shapes;
    int runs = argc > 1 ? atoi(argv[1]) : 20;
    const bool publishing_alone = argc > 2 && strcmp(argv[2], "publish") == 0;
    struct cuda *cuda;
    runs = runs < 1 ? 1 : runs > RUNS_MAX ? RUNS_MAX : runs;
    must(cuda_open(&cuda, 0));
    for (size_t i = 0; i < count; i++) {
        for (int causal = 1; causal >= (argc > 2 ? 1 : 0); causal--) {
            struct attention_shape s = {shapes[i][0], shapes[i][1], 32, 8, 128, causal == 1, 0.08838834764f};
            bench_shape(cuda, &s, runs, publishing_alone, i == 1 && causal == 1);
        }
    }
    cuda_close(cuda);
    return 0;
}
