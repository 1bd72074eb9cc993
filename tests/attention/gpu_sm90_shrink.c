/* Long sums of the FP8 backward on Hopper: dV of a key that every query looks at. FP8 products are cut towards zero
 * (docs/numerics.md, section 17), so the sum shrinks as soon as its terms have a sign in common: never by more than the
 * model of the tensor core's sum says for one chain over all queries of the group. The table in the log is what section
 * 17 quotes. */
#include "tests/attention/gpu_sm90_check.h"
#include "tests/attention/wgmma_sum.h"

#include "attention/attention_cpu.h"
#include "core/rng.h"
#include "numerics/blocks.h"
#include "numerics/formats.h"

enum { HEADS = 4, MEANS = 5 };

/* Of dO over its standard deviation, in features d with d % MEANS of that number. */
static const float means[MEANS] = {0, 0.03f, 0.1f, 0.3f, 1};

/* All queries of all heads, one head after the other, as the kernel adds them: codes of P of key 0, of dO. */
struct column {
    int n;
    uint8_t *p, *dout[D];
    float unit; /* dV = unit times the sum of the codes' products */
};

static void draw_dout(struct attention_case *c)
{
    const uint64_t stream = rng_stream("test/shrink");
    for (int64_t i = 0; i < case_queries(c); i++) {
        c->dout[i] = bf16_from_float(0.01f * (rng_normal(3, stream, (uint64_t)i) + means[i % D % MEANS]));
    }
}

static float dot(const bf16 *x, const bf16 *y)
{
    float sum = 0;
    for (int d = 0; d < D; d++) {
        sum += bf16_to_float(x[d]) * bf16_to_float(y[d]);
    }
    return sum;
}

static struct column column_open(const struct gpu_case *g)
{
    const struct attention_case *c = g->c;
    const int64_t T = c->shape.tokens;
    const struct attention_saved saved =
        attention_saved_carve(&c->shape, &c->recipe, &(struct carve){.base = g->got_saved});
    const float factor = (float)((double)c->shape.softmax_scale * M_LOG2E);
    const float m = pow2_scale(rows_amax((struct rows){c->dout, D}, T * HEADS, D), E4M3_MAX);
    struct column x = {.n = (int)(HEADS * T), .unit = 0x1p-7f / m};
    x.p = malloc((size_t)x.n);
    for (int d = 0; d < D; d++) {
        x.dout[d] = malloc((size_t)x.n);
    }
    for (int64_t i = 0; i < x.n; i++) {
        const float t = factor * dot(saved.q + i * D, saved.k), lse = g->got_lse[i], n = floorf(lse);
        x.p[i] = e4m3_from_float(exp2f(t - n + 7));
        for (int d = 0; d < D; d++) {
            const float dout = bf16_to_float(c->dout[(i % T * HEADS + i / T) * D + d]);
            x.dout[d][i] = e4m3_from_float(dout * exp2f(n - lse) * m);
        }
    }
    return x;
}

static void column_close(struct column *x)
{
    free(x->p);
    for (int d = 0; d < D; d++) {
        free(x->dout[d]);
    }
}

static double exact_sum(const struct column *x, int d)
{
    double sum = 0;
    for (int i = 0; i < x->n; i++) {
        sum += (double)e4m3_to_float(x->p[i]) * (double)e4m3_to_float(x->dout[d][i]);
    }
    return sum * (double)x->unit;
}

/* By mean of dO: how much smaller magnitudes are. */
struct shrinkage {
    double exact, model, got;
    int same, features;
};

/* 2^-8: one rounding to BF16, 2^-9, and as much for a few codes that lie on a boundary. */
static int judge_column(const struct gpu_case *g, const struct column *x)
{
    struct shrinkage s[MEANS] = {0};
    double squares = 0, exact[D];
    int bad = 0;
    for (int d = 0; d < D; d++) {
        exact[d] = exact_sum(x, d);
        squares += exact[d] * exact[d] / D;
    }
    for (int d = 0; d < D; d++) {
        const float sum = x->unit * wgmma_sum(WGMMA_E4M3, x->p, WGMMA_E4M3, x->dout[d], x->n, 0);
        const double model = (double)sum, got = (double)bf16_to_float(g->got[OUT_DV][d]);
        const double sign = exact[d] < 0 ? -1 : 1;
        struct shrinkage *to = &s[d % MEANS];
        to->exact += fabs(exact[d]);
        to->model += sign * model;
        to->got += sign * got;
        to->same += g->got[OUT_DV][d] == bf16_from_float(sum);
        to->features++;
        bad += !(fabs(got - exact[d]) <= fabs(model - exact[d]) + 0x1p-8 * fabs(exact[d]) + 0x1p-10 * sqrt(squares));
    }
    for (int i = 0; i < MEANS; i++) {
        print_message(
            "%6d products, dO about %4.2f: dV too small by %6.2f %%, by the model %6.2f %%; %d of %d have the "
            "model's bits\n",
            x->n, (double)means[i], 100 * (1 - s[i].got / s[i].exact), 100 * (1 - s[i].model / s[i].exact), s[i].same,
            s[i].features);
    }
    return bad;
}

static int sink_column(struct gpu *gpu, int64_t tokens)
{
    const struct attention_shape shape = shape_of(1, tokens, HEADS, 1, true);
    const struct attention_recipe recipe = recipe_of(PV_FP8, BWD_REPRESENTED);
    struct attention_case c;
    struct gpu_case g;
    case_open(&c, &shape, &recipe, INPUT_SINK, 5);
    draw_dout(&c);
    gpu_case_open(&g, gpu, &c, APART, BOTH);
    int bad = gpu_case_run(&g);
    struct column x = column_open(&g);
    bad += judge_column(&g, &x);
    column_close(&x);
    gpu_case_close(&g);
    case_close(&c);
    return bad;
}

static void short_column(void **state)
{
    assert_int_equal(sink_column(*state, 640), 0);
}

static void columns_large(void **state)
{
    assert_int_equal(sink_column(*state, 4096) + sink_column(*state, 16384), 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(short_column), cmocka_unit_test(columns_large)};
    gpu_arguments(argc, argv);
    return cmocka_run_group_tests(tests, gpu_open_state, gpu_close_state);
}
