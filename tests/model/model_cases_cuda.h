/* tests/model: cases and comparisons that the tests of the whole model on the GPU share. */
#pragma once

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
static const struct {
    const char *name;
    enum pv_format pv;
    enum backward_preset backward;
} routes[] = {{"bf16", PV_BF16, BWD_BF16},
              {"fp8", PV_FP8, BWD_REPRESENTED},
              {"mxfp4 exact", PV_MXFP4, BWD_EXACT_STAT},
              {"mxfp4", PV_MXFP4, BWD_REPRESENTED}};
enum { ROUTES = sizeof routes / sizeof *routes, ROUTE_FP8 = 1 };
static struct cuda *cuda;

/* A device for each test: an error that was kept does not reach the next. */
static inline int open_cuda(void **state)
{
    (void)state;
    cuda = gpu_open();
    return 0;
}

static inline int close_cuda(void **state)
{
    (void)state;
    cuda_close(cuda);
    return 0;
}

static inline struct model_config gpu_config(void)
{
    struct model_config c = small_config();
    c.width = 64;
    c.head_dim = 32;
    c.ffn = 96;
    c.vocab = VOCAB;
    return c;
}

static inline struct model_config wide_heads(void)
{
    struct model_config c = gpu_config();
    c.head_dim = 128;
    c.heads = 2;
    c.kv_heads = 1;
    return c;
}

static inline struct model_options gpu_options(int64_t batch)
{
    struct model_options o = small_options(batch, TOKENS);
    o.variant = &attention_variant_host;
    return o;
}

struct data {
    int32_t tokens[SAMPLES * TOKENS], targets[SAMPLES * TOKENS];
};

static inline struct data data_make(void)
{
    struct data d;
    fill_tokens(d.tokens, d.targets, SAMPLES * TOKENS, VOCAB, 2);
    return d;
}

static inline struct model_batch batch_of(const struct data *d, int64_t first, int64_t count, int64_t length)
{
    return (struct model_batch){.tokens = d->tokens + first * length,
                                .targets = d->targets + first * length,
                                .batch = count,
                                .length = length,
                                .sample = 100 + (uint64_t)first,
                                .update = 3};
}

static inline struct attention_recipe route(int index)
{
    struct attention_recipe recipe = attention_recipe_bf16();
    if (routes[index].pv != PV_BF16) {
        recipe.qk = QK_NVFP4;
        recipe.pv = routes[index].pv;
        recipe.mx_rule = MX_OCP;
        attention_recipe_preset(&recipe, routes[index].backward);
    }
    return recipe;
}

/* Largest relative L2 error of a tensor, and which. NaN counts as infinite. */
static inline double worst_tensor(const struct param_list *params, const float *got, const float *want,
                                  const char **name)
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
static inline int64_t first_difference(const struct gpu_fixture *f, const void *a, const void *b)
{
    const unsigned char *x = a, *y = b;
    for (size_t i = 0; i < f->grad_bytes; i++) {
        if (x[i] != y[i]) {
            return (int64_t)(i / dtype_bytes(f->options.grad_type));
        }
    }
    return -1;
}

static inline const char *tensor_at(const struct param_list *params, int64_t element)
{
    const char *name = "a gap before the first";
    for (int i = 0; i < params->count && (int64_t)params->params[i].offset <= element; i++) {
        name = params->params[i].name;
    }
    return name;
}

static int failures;

static inline void expect(bool holds, const char *name, const char *what)
{
    if (!holds) {
        printf("FAIL %s: %s\n", name, what);
        failures++;
    }
}

static inline void finish(void)
{
    int seen = failures;
    failures = 0;
    assert_int_equal(seen, 0);
}

static inline void expect_same(const struct gpu_fixture *f, const char *name, const char *what, const void *a,
                               const void *b)
{
    int64_t at = first_difference(f, a, b);
    if (at >= 0) {
        printf("FAIL %s: %s: differ first at element %ld, %s\n", name, what, (long)at, tensor_at(&f->params, at));
        failures++;
    }
}

/* One model for each linear format, tied, with qk_norm and BF16 gradients in turn. */
static inline void open_format(struct gpu_fixture *f, enum linear_format format, enum recompute recompute,
                               int64_t batch)
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

#define GPU_TEST(name) cmocka_unit_test_setup_teardown(name, open_cuda, close_cuda)

/* Start of main. An argument: only the tests whose names match, as test_odd*. */
static inline void cases_start(int argc, char **argv)
{
    gpu_arguments(argc, argv);
    setvbuf(stdout, NULL, _IOLBF, 0);
    use_threads(1);
}
