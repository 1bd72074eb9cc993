/* The whole model on the GPU against the CPU's, with the same weights and batch, and the contract of model.h there.
 *
 * Tolerances. Both models round the same values to BF16 at the same places and differ in the order of FP32 sums alone:
 * a sum that lands near the middle between two BF16 numbers rounds otherwise, by 2^-8 of itself, in a few of a hundred
 * elements, and layers hand such differences on: up to .02 of a tensor (measured: .001 to .012). In small formats an
 * element near a boundary takes the next code, a step of 2^-3 or 1/2 of itself; that moves all of the next operand, and
 * soon the difference is that of the format. How far roundings go in the model at hand the CPU says: the GPU may be as
 * far from the CPU as the CPU from itself with an embedding that differs in last places. Weights are small there, so
 * that this is little. Leaving out or doubling one term of any backward moves a tensor by more than .1
 * (tests/model/test_model_gradient.c). */
#include "model/model_cuda.h"
#include "tests/model/model_cases_cuda.h"

#include <stdlib.h>
#include <string.h>

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

/* Not counted: the variant's code without statistics, which may be other kernels with other roundings. */
static void compare(const char *name, const struct model_config *c, const struct model_options *o, int64_t length,
                    bool counted)
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
    model_count_stats(gpu.model, counted);
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
    double limit = bf16_limit + (is_quantised(o) || !counted ? sensitivity(&cpu, &batch) : 0);
    printf("%-44s loss %.1e  worst gradient %.1e of %.1e %s (%s%s)\n", name, loss, worst, limit, tensor,
           gpu.options.variant->name, counted ? "" : ", not counted");
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
            compare(name, &c, &o, TOKENS, true);
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
        compare(B == 1 ? "37 of 48 tokens" : "37 of 48 tokens, 2 samples", &c, &o, 37, true);
    }
    finish();
}

/* The GPU's own attention, in each route. A score near a boundary takes another code: quantised routes err more. */
static void test_routes_of_the_gpus_attention(void **state)
{
    (void)state;
    char name[96];
    for (int r = 0; r < ROUTES; r++) {
        for (int wide = 0; wide < 2; wide++) {
            for (int i = 0; i < (wide ? 1 : FORMATS); i++) {
                enum linear_format format = formats[i];
                struct model_config c = wide ? wide_heads() : gpu_config();
                struct model_options o = gpu_options(1);
                o.variant = NULL;
                o.attention = route(r);
                o.linear.attn = o.linear.mlp = format;
                snprintf(name, sizeof name, "attention %s, D %d, linear %s", routes[r].name, c.head_dim,
                         linear_format_names[format]);
                compare(name, &c, &o, TOKENS, true);
                if (wide) {
                    compare(name, &c, &o, TOKENS, false);
                }
            }
        }
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

    struct attention_stats stats[2], zero[2] = {{0}};
    model_stats_reset(gpu.model);
    model_count_stats(gpu.model, false);
    gpu_fixture_run(&gpu, &batch, false);
    cuda_download(cuda, stats, model_stats(gpu.model), sizeof stats);
    assert_int_equal(cuda_sync(cuda, "statistics"), OK);
    expect(memcmp(stats, zero, sizeof zero) == 0, "statistics", "were counted");

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

/* The sums of samples alone, longer and shorter than a block of threads; also what racecheck sees of this kernel. */
static void test_losses_of_samples(void **state)
{
    enum { BATCH = 3, LONGEST = 700 };
    static const int64_t lengths[] = {1, 255, 256, LONGEST};
    float losses[BATCH * LONGEST];
    int32_t targets[BATCH * LONGEST];
    (void)state;
    for (int i = 0; i < BATCH * LONGEST; i++) {
        losses[i] = (float)(i * 7919 % 1000) * 0x1p-7f;
        targets[i] = i % 5 == 3 ? -1 : i;
    }
    float *d_losses = gpu_array(cuda, losses, sizeof losses);
    int32_t *d_targets = gpu_array(cuda, targets, sizeof targets);
    struct model_loss_row *d_rows = gpu_array(cuda, NULL, BATCH * sizeof *d_rows), rows[BATCH];
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        model_loss_rows_cuda(d_losses, d_targets, BATCH, lengths[i], d_rows, cuda);
        gpu_fetch(cuda, rows, d_rows, sizeof rows);
        for (int64_t b = 0; b < BATCH; b++) { /* sums of few bits: exact in any order */
            struct model_loss_row want = {0};
            for (int64_t t = b * lengths[i]; t < (b + 1) * lengths[i]; t++) {
                want.loss_sum += targets[t] < 0 ? 0 : (double)losses[t];
                want.valid += targets[t] >= 0;
            }
            expect(rows[b].loss_sum == want.loss_sum && rows[b].valid == want.valid, "losses", "of a sample");
        }
    }
    cuda_free(d_losses);
    cuda_free(d_targets);
    cuda_free(d_rows);
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

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        GPU_TEST(test_shapes_the_gpu_refuses),       GPU_TEST(test_gradients_are_those_of_the_cpu),
        GPU_TEST(test_odd_lengths_and_batches),      GPU_TEST(test_a_batch_is_near_the_sum_of_its_samples),
        GPU_TEST(test_evaluation_and_logits),        GPU_TEST(test_layers_are_announced_when_they_are_final),
        GPU_TEST(test_routes_of_the_gpus_attention), GPU_TEST(test_losses_of_samples),
    };
    cases_start(argc, argv);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
