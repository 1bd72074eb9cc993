/* The whole model on the GPU against the CPU's, with the same weights and batch; and what must not change a bit.
 *
 * Tolerances. Both models round the same values to BF16 at the same places and differ in the order of FP32 sums alone:
 * a sum that lands near the middle between two BF16 numbers rounds otherwise, by 2^-8 of itself, in a few of a hundred
 * elements, and layers hand such differences on: up to .02 of a tensor (measured: .001 to .012). In small formats an
 * element near a boundary takes the next code, a step of 2^-3 or 1/2 of itself; that moves all of the next operand, and
 * soon the difference is that of the format. How far roundings go in the model at hand the CPU says: the GPU may be as
 * far from the CPU as the CPU from itself with an embedding that differs in last places. Weights are small there, so
 * that this is little. Leaving out or doubling one term of any backward moves a tensor by more than .1
 * (tests/model/test_model_gradient.c). */
#include "tests/model/attention_host.h"
#include "tests/model/check.h"
#include "tests/model/fixture_cuda.h"

#include "tests/gpu.h"

#include <math.h>
#include <stdio.h>

enum { TOKENS = 48, SAMPLES = 2, VOCAB = 80 };
static const float scale = 1.0f / 64;
static const double bf16_limit = 0.02;
static const enum linear_format formats[] = {LINEAR_BF16, LINEAR_NVFP4, LINEAR_FP8};
enum { FORMATS = sizeof formats / sizeof *formats };
static struct cuda *cuda;

/* A device for each test: an error that was kept does not reach the next. */
static int open_cuda(void **state)
{
    (void)state;
    cuda = gpu_open();
    return 0;
}

static int close_cuda(void **state)
{
    (void)state;
    cuda_close(cuda);
    return 0;
}

static struct model_config gpu_config(void)
{
    struct model_config c = small_config();
    c.width = 64;
    c.head_dim = 32;
    c.ffn = 96;
    c.vocab = VOCAB;
    return c;
}

static struct model_options gpu_options(int64_t batch)
{
    struct model_options o = small_options(batch, TOKENS);
    o.variant = &attention_variant_host;
    return o;
}

struct data {
    int32_t tokens[SAMPLES * TOKENS], targets[SAMPLES * TOKENS];
};

static struct data data_make(void)
{
    struct data d;
    fill_tokens(d.tokens, d.targets, SAMPLES * TOKENS, VOCAB, 2);
    return d;
}

static struct model_batch batch_of(const struct data *d, int64_t first, int64_t count, int64_t length)
{
    return (struct model_batch){.tokens = d->tokens + first * length,
                                .targets = d->targets + first * length,
                                .batch = count,
                                .length = length,
                                .sample = 100 + (uint64_t)first,
                                .update = 3};
}

static struct attention_recipe route(enum pv_format pv)
{
    struct attention_recipe recipe = attention_recipe_bf16();
    if (pv != PV_BF16) {
        recipe.qk = QK_NVFP4;
        recipe.pv = pv;
        recipe.mx_rule = MX_OCP;
        attention_recipe_preset(&recipe, pv == PV_FP8 ? BWD_REPRESENTED : BWD_EXACT_STAT);
    }
    return recipe;
}

/* Largest relative L2 error of a tensor, and which. NaN counts as infinite. */
static double worst_tensor(const struct param_list *params, const float *got, const float *want, const char **name)
{
    double worst = -1;
    for (int i = 0; i < params->count; i++) {
        const struct param *p = &params->params[i];
        double error = 0, norm = 0;
        for (size_t k = p->offset; k < p->offset + (size_t)(p->rows * p->cols); k++) {
            double e = (double)got[k] - (double)want[k];
            error += e * e;
            norm += (double)want[k] * (double)want[k];
        }
        double relative = norm > 0 ? sqrt(error / norm) : error > 0 ? INFINITY : 0;
        if (!(relative <= worst)) {
            worst = isnan(relative) ? INFINITY : relative;
            *name = p->name;
        }
    }
    return worst;
}

/* First element whose bytes differ, or -1. */
static int64_t first_difference(const struct gpu_fixture *f, const void *a, const void *b)
{
    const unsigned char *x = a, *y = b;
    for (size_t i = 0; i < f->grad_bytes; i++) {
        if (x[i] != y[i]) {
            return (int64_t)(i / dtype_bytes(f->options.grad_type));
        }
    }
    return -1;
}

static const char *tensor_at(const struct param_list *params, int64_t element)
{
    const char *name = "a gap before the first";
    for (int i = 0; i < params->count && (int64_t)params->params[i].offset <= element; i++) {
        name = params->params[i].name;
    }
    return name;
}

static int failures;

static void expect(bool holds, const char *name, const char *what)
{
    if (!holds) {
        printf("FAIL %s: %s\n", name, what);
        failures++;
    }
}

static void finish(void)
{
    int seen = failures;
    failures = 0;
    assert_int_equal(seen, 0);
}

static void expect_same(const struct gpu_fixture *f, const char *name, const char *what, const void *a, const void *b)
{
    int64_t at = first_difference(f, a, b);
    if (at >= 0) {
        printf("FAIL %s: %s: differ first at element %ld, %s\n", name, what, (long)at, tensor_at(&f->params, at));
        failures++;
    }
}

/* ---- against the CPU ------------------------------------------------------------------------------------------- */

/* Weights of projections and head, in both models, times `factor`. */
static void soften(struct fixture *cpu, struct gpu_fixture *gpu, float factor)
{
    for (int i = 0; i < cpu->params.count; i++) {
        const struct param *p = &cpu->params.params[i];
        for (size_t k = p->offset; k < p->offset + (size_t)(p->rows * p->cols); k++) {
            if (p->kind != PARAM_NORM && p->kind != PARAM_EMBED) {
                cpu->weights[k] = bf16_from_float(factor * bf16_to_float(cpu->weights[k]));
            }
        }
    }
    model_set_weights(cpu->model, cpu->weights);
    cuda_upload(cuda, gpu->weights, cpu->weights, cpu->params.elements * sizeof *cpu->weights);
    model_set_weights(gpu->model, gpu->weights);
}

/* How far the CPU's gradients move when a quarter of the embedding moves by one unit in the last place: what roundings
 * of any origin become in this model. */
static double sensitivity(struct fixture *cpu, const struct model_batch *batch)
{
    size_t bytes = cpu->params.elements * sizeof *cpu->grads;
    float *before = malloc(bytes);
    const struct param *embed = &cpu->params.params[0];
    const char *tensor;
    memcpy(before, cpu->grads, bytes);
    for (int64_t i = 0; i < embed->rows * embed->cols; i++) {
        bf16 *w = &cpu->weights[embed->offset + (size_t)i];
        *w = (bf16)(*w + (i % 4 == 0));
    }
    model_set_weights(cpu->model, cpu->weights);
    fixture_run(cpu, batch, scale, false);
    double worst = worst_tensor(&cpu->params, cpu->grads, before, &tensor);
    free(before);
    return worst;
}

static bool is_quantised(const struct model_options *o)
{
    return o->linear.attn != LINEAR_BF16 || o->attention.pv != PV_BF16;
}

static void compare(const char *name, const struct model_config *c, const struct model_options *o, int64_t length)
{
    struct fixture cpu;
    struct gpu_fixture gpu;
    struct model_options cpu_options = *o;
    cpu_options.recompute = RECOMPUTE_NONE;
    cpu_options.grad_type = DTYPE_F32;
    if (!gpu_fixture_open(&gpu, cuda, c, o)) {
        printf("%-44s refused: %s\n", name, status_last_message());
        return;
    }
    fixture_open(&cpu, c, &cpu_options);
    if (is_quantised(o)) {
        soften(&cpu, &gpu, 0.2f);
    }
    struct data d = data_make();
    struct model_batch batch = batch_of(&d, 0, o->batch, length);
    struct model_loss want = fixture_run(&cpu, &batch, scale, false);
    struct model_batch on_gpu = gpu_fixture_batch(&gpu, &batch, scale);
    gpu_fixture_run(&gpu, &on_gpu, false);
    struct model_loss got = gpu_fixture_loss(&gpu);
    float *grads = gpu_fixture_grads_f32(&gpu);
    const char *tensor = "";
    double worst = worst_tensor(&gpu.params, grads, cpu.grads, &tensor);
    double loss = fabs(got.loss_sum - want.loss_sum) / want.loss_sum;
    double limit = bf16_limit + (is_quantised(o) ? sensitivity(&cpu, &batch) : 0);
    printf("%-44s loss %.1e  worst gradient %.1e of %.1e %s (%s)\n", name, loss, worst, limit, tensor,
           o->variant ? o->variant->name : gpu.options.variant->name);
    expect(got.valid == want.valid, name, "count of targets");
    expect(loss < limit / 10, name, "loss");
    expect(worst < limit, name, "gradient");
    for (size_t i = 0, end = 0; i < (size_t)gpu.params.count; i++) { /* gaps are zeros */
        const struct param *p = &gpu.params.params[i];
        for (size_t k = end; k < p->offset; k++) {
            expect(grads[k] == 0, name, "gap");
        }
        end = p->offset + (size_t)(p->rows * p->cols);
    }
    free(grads);
    fixture_close(&cpu);
    gpu_fixture_close(&gpu);
}

/* One sample: the meanings are the same in every format. */
static void test_gradients_are_those_of_the_cpu(void **state)
{
    (void)state;
    char name[96];
    for (int i = 0; i < FORMATS; i++) {
        for (int k = 0; k < 4; k++) {
            enum linear_format format = formats[i];
            struct model_config c = gpu_config();
            struct model_options o = gpu_options(1);
            o.linear.attn = o.linear.mlp = format;
            c.tied = k & 1;
            c.qk_norm = k >> 1;
            o.grad_type = k == 1 || k == 2 ? DTYPE_BF16 : DTYPE_F32;
            snprintf(name, sizeof name, "%s%s%s%s", linear_format_names[format], c.tied ? " tied" : "",
                     c.qk_norm ? " qk_norm" : "", o.grad_type == DTYPE_BF16 ? " grads bf16" : "");
            compare(name, &c, &o, TOKENS);
        }
    }
    finish();
}

/* A short, odd call of a model that was planned for more; two samples of it. */
static void test_odd_lengths_and_batches(void **state)
{
    (void)state;
    struct model_config c = gpu_config();
    for (int64_t B = 1; B <= SAMPLES; B++) {
        struct model_options o = gpu_options(B);
        compare(B == 1 ? "37 of 48 tokens" : "37 of 48 tokens, 2 samples", &c, &o, 37);
    }
    finish();
}

/* The GPU's own attention, in each route. A score near a boundary takes another code: quantised routes err more. */
static void test_routes_of_the_gpus_attention(void **state)
{
    (void)state;
    static const enum pv_format routes[] = {PV_BF16, PV_FP8, PV_MXFP4};
    char name[96];
    for (size_t r = 0; r < sizeof routes / sizeof *routes; r++) {
        for (int wide = 0; wide < 2; wide++) {
            for (int i = 0; i < (wide ? 1 : FORMATS); i++) {
                enum linear_format format = formats[i];
                struct model_config c = gpu_config();
                struct model_options o = gpu_options(1);
                o.variant = NULL;
                o.attention = route(routes[r]);
                o.linear.attn = o.linear.mlp = format;
                if (wide) {
                    c.head_dim = 128;
                    c.heads = 2;
                    c.kv_heads = 1;
                }
                snprintf(name, sizeof name, "attention %s, D %d, linear %s", pv_format_names[routes[r]], c.head_dim,
                         linear_format_names[format]);
                compare(name, &c, &o, TOKENS);
            }
        }
    }
    finish();
}

/* ---- bits ------------------------------------------------------------------------------------------------------ */

static void open_format(struct gpu_fixture *f, enum linear_format format, enum recompute recompute, int64_t batch)
{
    struct model_config c = gpu_config();
    struct model_options o = gpu_options(batch);
    o.linear.attn = o.linear.mlp = format;
    o.recompute = recompute;
    o.grad_type = format == LINEAR_FP8 ? DTYPE_BF16 : DTYPE_F32;
    c.tied = format == LINEAR_FP8;
    c.qk_norm = format == LINEAR_NVFP4;
    assert_true(gpu_fixture_open(f, cuda, &c, &o));
}

static void test_runs_and_recomputation_give_equal_bits(void **state)
{
    (void)state;
    for (int i = 0; i < FORMATS; i++) {
        enum linear_format format = formats[i];
        void *first = NULL;
        struct model_loss want = {0};
        struct attention_stats stats[2], want_stats[2];
        for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_GATE_UP; recompute++) {
            struct gpu_fixture f;
            char name[64];
            snprintf(name, sizeof name, "%s, recompute %s", linear_format_names[format], recompute_names[recompute]);
            open_format(&f, format, (enum recompute)recompute, SAMPLES);
            struct data d = data_make();
            struct model_batch host = batch_of(&d, 0, SAMPLES, TOKENS), batch = gpu_fixture_batch(&f, &host, scale);
            for (int run = 0; run < 2; run++) {
                gpu_fixture_run(&f, &batch, false);
                struct model_loss loss = gpu_fixture_loss(&f);
                void *grads = gpu_fixture_grads(&f);
                if (!first) {
                    first = grads;
                    want = loss;
                    continue;
                }
                expect_same(&f, name, run ? "second run" : "first run", first, grads);
                expect(loss.loss_sum == want.loss_sum && isfinite(loss.loss_sum), name, "loss");
                free(grads);
            }
            cuda_download(cuda, stats, model_stats(f.model), sizeof stats);
            assert_int_equal(cuda_sync(cuda, name), OK);
            if (recompute == RECOMPUTE_NONE) {
                memcpy(want_stats, stats, sizeof stats);
                expect(stats[0].r_r > 0 && stats[1].r_r > 0, name, "no statistics");
            }
            expect(memcmp(stats, want_stats, sizeof stats) == 0, name, "statistics of two runs");
            gpu_fixture_close(&f);
        }
        free(first);
    }
    finish();
}

/* One call of two samples, and two calls of one sample that accumulate: BF16 rounds the same values but for the order
 * of sums. */
static void test_a_batch_is_near_the_sum_of_its_samples(void **state)
{
    (void)state;
    struct gpu_fixture two, one;
    open_format(&two, LINEAR_BF16, RECOMPUTE_NONE, 2);
    open_format(&one, LINEAR_BF16, RECOMPUTE_NONE, 1);
    struct data d = data_make();
    struct model_batch host = batch_of(&d, 0, 2, TOKENS), batch = gpu_fixture_batch(&two, &host, scale);
    gpu_fixture_run(&two, &batch, false);
    struct model_loss whole = gpu_fixture_loss(&two), sum = {0};
    for (int b = 0; b < 2; b++) {
        host = batch_of(&d, b, 1, TOKENS);
        batch = gpu_fixture_batch(&one, &host, scale);
        gpu_fixture_run(&one, &batch, b > 0);
        struct model_loss loss = gpu_fixture_loss(&one);
        sum.loss_sum += loss.loss_sum;
        sum.valid += loss.valid;
    }
    float *together = gpu_fixture_grads_f32(&two), *apart = gpu_fixture_grads_f32(&one);
    const char *tensor = "";
    double worst = worst_tensor(&one.params, apart, together, &tensor);
    printf("two samples at once or accumulated: loss %.1e, worst gradient %.2e %s\n",
           fabs(whole.loss_sum / sum.loss_sum - 1), worst, tensor);
    expect(worst < bf16_limit, "two samples", "gradient");
    expect(whole.valid == sum.valid && fabs(whole.loss_sum / sum.loss_sum - 1) < 2e-3, "two samples", "loss");
    free(together);
    free(apart);
    gpu_fixture_close(&two);
    gpu_fixture_close(&one);
    finish();
}

/* Warm-up, then two micro-batches, by plain calls and by graphs captured with other numbers in the step. */
static void check_replay(enum linear_format format)
{
    struct gpu_fixture f;
    struct model_config c = gpu_config();
    struct model_options o = gpu_options(1);
    char name[64];
    o.variant = NULL;
    o.attention = route(PV_FP8);
    o.linear.attn = o.linear.mlp = format;
    snprintf(name, sizeof name, "graph, %s", linear_format_names[format]);
    if (!gpu_fixture_open(&f, cuda, &c, &o)) {
        printf("%s: refused: %s\n", name, status_last_message());
        return;
    }
    assert_int_equal(model_warm_up(f.model, f.grads), OK);
    struct attention_stats stats[2], again[2], zero = {0};
    size_t stats_bytes = (size_t)c.layers * sizeof *stats;
    cuda_download(cuda, stats, model_stats(f.model), stats_bytes);
    assert_int_equal(cuda_sync(cuda, name), OK);
    assert_memory_equal(stats, &zero, sizeof zero);

    struct data d = data_make();
    struct model_batch batch = {0};
    for (int k = 0; k < 2; k++) {
        struct model_batch host = batch_of(&d, k, 1, TOKENS);
        batch = gpu_fixture_batch(&f, &host, scale);
        gpu_fixture_run(&f, &batch, k > 0);
    }
    struct model_loss want = gpu_fixture_loss(&f);
    void *eager = gpu_fixture_grads(&f);
    cuda_download(cuda, stats, model_stats(f.model), stats_bytes);
    assert_int_equal(cuda_sync(cuda, name), OK);

    struct cuda_graph *graphs[2];
    cuda_set_step(cuda, &(struct cuda_step){.sample = 77, .update = 78, .loss_scale = 79});
    assert_int_equal(cuda_sync(cuda, name), OK);
    for (int k = 0; k < 2; k++) {
        assert_int_equal(cuda_graph_begin(cuda), OK);
        if (k == 0) {
            model_stats_reset(f.model);
        }
        gpu_fixture_run(&f, &batch, k > 0);
        assert_int_equal(cuda_graph_end(cuda, &graphs[k]), OK);
    }
    cuda_zero(cuda, f.grads, f.grad_bytes);
    for (int round = 0; round < 2; round++) { /* replays may be repeated */
        for (int k = 0; k < 2; k++) {
            struct model_batch host = batch_of(&d, k, 1, TOKENS);
            gpu_fixture_batch(&f, &host, scale);
            cuda_graph_launch(cuda, graphs[k]);
        }
        struct model_loss got = gpu_fixture_loss(&f);
        void *replayed = gpu_fixture_grads(&f);
        cuda_download(cuda, again, model_stats(f.model), stats_bytes);
        assert_int_equal(cuda_sync(cuda, name), OK);
        expect(got.loss_sum == want.loss_sum, name, "loss");
        expect(memcmp(stats, again, stats_bytes) == 0, name, "statistics");
        expect_same(&f, name, "replay", eager, replayed);
        free(replayed);
    }
    cuda_graph_close(graphs[0]);
    cuda_graph_close(graphs[1]);
    free(eager);
    gpu_fixture_close(&f);
}

static void test_replayed_graphs_give_the_bits_of_calls(void **state)
{
    (void)state;
    for (int i = 0; i < FORMATS; i++) {
        check_replay(formats[i]);
    }
    finish();
}

/* ---- the contract ---------------------------------------------------------------------------------------------- */

static void test_evaluation_and_logits(void **state)
{
    (void)state;
    struct fixture cpu;
    struct gpu_fixture gpu;
    struct model_config c = gpu_config();
    struct model_options o = gpu_options(SAMPLES);
    fixture_open(&cpu, &c, &(struct model_options){.attention = o.attention, .batch = SAMPLES, .tokens = TOKENS});
    assert_true(gpu_fixture_open(&gpu, cuda, &c, &o));
    struct data d = data_make();
    struct model_batch host = batch_of(&d, 0, SAMPLES, TOKENS), batch = gpu_fixture_batch(&gpu, &host, scale);
    struct model_loss want, kept, evaluated;
    model_forward(cpu.model, &host, false, &want);
    gpu_fixture_run(&gpu, &batch, false);
    kept = gpu_fixture_loss(&gpu);
    void *before = gpu_fixture_grads(&gpu);
    model_forward_cuda(gpu.model, &batch, NULL, false);
    evaluated = gpu_fixture_loss(&gpu);
    void *after = gpu_fixture_grads(&gpu);
    expect(kept.loss_sum == evaluated.loss_sum, "evaluation", "loss");
    expect_same(&gpu, "evaluation", "gradients were touched", before, after);

    /* Losses sample by sample. */
    struct model_loss_row rows[SAMPLES];
    cuda_download(cuda, rows, model_losses(gpu.model), sizeof rows);
    assert_int_equal(cuda_sync(cuda, "losses"), OK);
    for (int b = 0; b < SAMPLES; b++) {
        struct model_batch one = batch_of(&d, b, 1, TOKENS);
        struct model_loss loss;
        model_forward(cpu.model, &one, false, &loss);
        expect(rows[b].valid == loss.valid && fabs(rows[b].loss_sum / loss.loss_sum - 1) < 2e-3, "losses", "a sample");
    }

    enum { FIRST = TOKENS - 5, ROWS = 11 };
    float want_logits[ROWS * VOCAB], got_logits[ROWS * VOCAB];
    float *logits = gpu_array(cuda, NULL, sizeof got_logits);
    model_forward(cpu.model, &host, false, &want);
    model_logits(cpu.model, FIRST, ROWS, want_logits);
    model_logits(gpu.model, FIRST, ROWS, logits);
    gpu_fetch(cuda, got_logits, logits, sizeof got_logits);
    double wide[ROWS * VOCAB];
    for (int i = 0; i < ROWS * VOCAB; i++) {
        wide[i] = (double)want_logits[i];
    }
    double error = rel_l2_f32(got_logits, wide, ROWS * VOCAB);
    printf("logits: relative L2 %.2e\n", error);
    expect(error < 0.01, "logits", "error");
    cuda_free(logits);
    free(before);
    free(after);
    fixture_close(&cpu);
    gpu_fixture_close(&gpu);
    finish();
}

struct seen {
    struct gpu_fixture *f;
    int count, layers[8];
    unsigned char *copies[8]; /* device */
};

static void on_layer(void *context, int layer)
{
    struct seen *s = context;
    assert_true(s->count < 8);
    s->copies[s->count] = gpu_array(cuda, NULL, s->f->grad_bytes);
    cuda_copy(cuda, s->copies[s->count], s->f->grads, s->f->grad_bytes);
    s->layers[s->count++] = layer;
}

static void test_layers_are_announced_when_they_are_final(void **state)
{
    (void)state;
    struct gpu_fixture f;
    open_format(&f, LINEAR_BF16, RECOMPUTE_NONE, 1);
    struct data d = data_make();
    struct model_batch host = batch_of(&d, 0, 1, TOKENS), batch = gpu_fixture_batch(&f, &host, scale);
    struct seen seen = {.f = &f};
    model_forward_cuda(f.model, &batch, f.grads, false);
    model_backward(f.model,
                   &(struct model_backward){.batch = &batch, .grads = f.grads, .on_layer = on_layer, .context = &seen});
    float *final = gpu_fixture_grads(&f), *copy = malloc(f.grad_bytes);
    static const int order[] = {2, 1, 0, -1};
    assert_int_equal(seen.count, 4);
    for (int k = 0; k < seen.count; k++) {
        assert_int_equal(seen.layers[k], order[k]);
        gpu_fetch(cuda, copy, seen.copies[k], f.grad_bytes);
        for (int i = 0; i < f.params.count; i++) {
            const struct param *p = &f.params.params[i];
            int layer = p->layer >= 0 ? p->layer : p->kind == PARAM_EMBED ? -1 : 2;
            size_t bytes = (size_t)(p->rows * p->cols) * sizeof *copy;
            expect(layer != order[k] || memcmp(copy + p->offset, final + p->offset, bytes) == 0, p->name,
                   "was announced before it was final");
        }
        cuda_free(seen.copies[k]);
    }
    free(final);
    free(copy);
    gpu_fixture_close(&f);
    finish();
}

static void test_shapes_the_gpu_refuses(void **state)
{
    (void)state;
    struct model_config c = gpu_config();
    struct model_options o = gpu_options(1);
    struct param_list params;
    struct arena arena;
    struct model *model;
    c.ffn = 100;
    o.device = DEVICE_CUDA;
    assert_int_equal(param_list_open(&params, &c), OK);
    arena_measure(&arena, "model");
    assert_int_equal(model_plan(&model, &arena, &c, &params, &o), ERR_UNSUPPORTED);
    assert_non_null(strstr(status_last_message(), "model.ffn = 100"));
    assert_non_null(strstr(status_last_message(), "nearest 104"));
    model_close(model);
    param_list_close(&params);
}

#define GPU_TEST(name) cmocka_unit_test_setup_teardown(name, open_cuda, close_cuda)

/* An argument: only the tests whose names match, as test_odd*. */
int main(int argc, char **argv)
{
    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    use_threads(1);
    const struct CMUnitTest tests[] = {
        GPU_TEST(test_shapes_the_gpu_refuses),
        GPU_TEST(test_gradients_are_those_of_the_cpu),
        GPU_TEST(test_odd_lengths_and_batches),
        GPU_TEST(test_runs_and_recomputation_give_equal_bits),
        GPU_TEST(test_a_batch_is_near_the_sum_of_its_samples),
        GPU_TEST(test_evaluation_and_logits),
        GPU_TEST(test_layers_are_announced_when_they_are_final),
        GPU_TEST(test_routes_of_the_gpus_attention),
        GPU_TEST(test_replayed_graphs_give_the_bits_of_calls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
