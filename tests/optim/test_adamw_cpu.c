/* AdamW against the formula of optim/adamw.h in FP64, and the rules that a trained model cannot show any more: what
 * decays, what stochastic rounding does on average, and that nothing depends on threads. */
#include "tests/test.h"

#include "optim/adamw.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

enum { N = 5000, GAIN = 70, FLAT = N + 64 + GAIN }; /* a matrix of many blocks, a gap, and a gain */

/* Builds without OpenMP (ThreadSanitizer) run the same tests on one thread. */
static void use_threads(int n)
{
#ifdef _OPENMP
    omp_set_num_threads(n);
#else
    (void)n;
#endif
}

static const struct adamw_segment segments[] = {
    {.name = "model.layers.0.mlp.up_proj.weight", .offset = 0, .elements = N, .decays = true},
    {.name = "model.norm.weight", .offset = N + 64, .elements = GAIN, .decays = false},
};

static const struct adamw_config base = {
    .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f, .clip = 1.0f, .master_fp32 = true, .seed = 42};

struct arrays {
    struct adamw_state state;
    float *grads;
};

/* Values that look random; a test's own generator, so that core/rng is not needed to test core/rng's user. */
static float noise(uint32_t i)
{
    uint32_t x = i * 2654435761u + 12345u;
    x ^= x >> 15;
    x *= 2246822519u;
    x ^= x >> 13;
    return (float)(int32_t)x * 0x1p-31f;
}

static struct arrays arrays_open(const struct adamw_config *config)
{
    struct arrays a = {.state = {.weights = calloc(FLAT, sizeof(bf16)),
                                 .m = calloc(FLAT, adamw_moment_bytes(config)),
                                 .v = calloc(FLAT, adamw_moment_bytes(config)),
                                 .master = config->master_fp32 ? calloc(FLAT, sizeof(float)) : NULL},
                       .grads = calloc(FLAT, sizeof(float))};
    for (uint32_t i = 0; i < FLAT; i++) {
        float w = 0.02f * noise(i);
        a.state.weights[i] = bf16_from_float(w);
        if (a.state.master) {
            a.state.master[i] = w;
        }
    }
    return a;
}

static void arrays_close(struct arrays *a)
{
    free(a->state.master);
    free(a->state.weights);
    free(a->state.m);
    free(a->state.v);
    free(a->grads);
}

static void fill_grads(struct arrays *a, uint32_t update)
{
    for (uint32_t i = 0; i < FLAT; i++) {
        a->grads[i] = 0.3f * noise(i + update * 100003u) * (1.0f + (float)(i % 7));
    }
}

static double stored(const void *x, bool is_bf16, size_t i)
{
    return is_bf16 ? (double)bf16_to_float(((const bf16 *)x)[i]) : (double)((const float *)x)[i];
}

static double weight_of(const struct arrays *a, size_t i)
{
    return a->state.master ? (double)a->state.master[i] : (double)bf16_to_float(a->state.weights[i]);
}

/* Distance between BF16 neighbours at x. */
static double bf16_step(double x)
{
    return x == 0.0 ? 0x1p-133 : ldexp(1.0, ilogb(x) - 7);
}

/* One update from the stored state in FP64; what is stored next must lie within rounding of it: half a BF16 step to
 * nearest, a whole one stochastically, FP32 rounding otherwise. */
static void check_update(const struct adamw_config *c, uint32_t update)
{
    struct arrays a = arrays_open(c);
    const double lr = 3e-3, scale = 0.25;
    for (uint32_t u = 1; u < update; u++) {
        fill_grads(&a, u);
        adamw_step(c, &a.state, segments, 2, a.grads, (float)scale, (float)lr, u);
    }
    struct arrays before = arrays_open(c);
    memcpy(before.state.m, a.state.m, FLAT * adamw_moment_bytes(c));
    memcpy(before.state.v, a.state.v, FLAT * adamw_moment_bytes(c));
    memcpy(before.state.weights, a.state.weights, FLAT * sizeof(bf16));
    if (c->master_fp32) {
        memcpy(before.state.master, a.state.master, FLAT * sizeof(float));
    }
    fill_grads(&a, update);
    adamw_step(c, &a.state, segments, 2, a.grads, (float)scale, (float)lr, update);
    const double units = c->stochastic_rounding ? 1.0 : 0.5;
    const double b1 = (double)c->beta1, b2 = (double)c->beta2;
    for (int s = 0; s < 2; s++) {
        for (size_t i = segments[s].offset; i < segments[s].offset + segments[s].elements; i++) {
            double g = scale * (double)a.grads[i], w0 = weight_of(&before, i);
            double m = b1 * stored(before.state.m, c->moments_bf16, i) + (1.0 - b1) * g;
            double v = b2 * stored(before.state.v, c->moments_bf16, i) + (1.0 - b2) * g * g;
            double hat = m / (1.0 - pow(b1, update)) / (sqrt(v / (1.0 - pow(b2, update))) + (double)c->eps);
            double w = w0 - lr * (hat + (segments[s].decays ? (double)c->weight_decay * w0 : 0.0));
            double of_m = c->moments_bf16 ? units * bf16_step(m) : 0.0;
            double of_v = c->moments_bf16 ? units * bf16_step(v) : 0.0;
            double of_w = c->master_fp32 ? 0.0 : units * bf16_step(w);
            assert_true(fabs(stored(a.state.m, c->moments_bf16, i) - m) <= of_m + 1e-6 * (fabs(m) + fabs(g)));
            assert_true(fabs(stored(a.state.v, c->moments_bf16, i) - v) <= of_v + 1e-6 * v);
            assert_true(fabs(weight_of(&a, i) - w) <= of_w + 1e-6 * (fabs(w0) + lr));
            if (c->master_fp32) {
                assert_int_equal(a.state.weights[i], bf16_from_float(a.state.master[i]));
            }
        }
    }
    arrays_close(&before);
    arrays_close(&a);
}

static void test_every_mode_follows_the_formula_in_fp64(void **state)
{
    (void)state;
    for (int mode = 0; mode < 8; mode++) {
        struct adamw_config c = base;
        c.master_fp32 = mode & 1;
        c.moments_bf16 = mode & 2;
        c.stochastic_rounding = mode & 4;
        check_update(&c, 1);
        check_update(&c, 2);
        check_update(&c, 9);
    }
}

static void test_fp32_state_follows_fp64_over_many_updates(void **state)
{
    (void)state;
    struct arrays a = arrays_open(&base);
    double *w = calloc(FLAT, sizeof *w), *m = calloc(FLAT, sizeof *m), *v = calloc(FLAT, sizeof *v);
    for (size_t i = 0; i < FLAT; i++) {
        w[i] = (double)a.state.master[i];
    }
    for (uint32_t u = 1; u <= 50; u++) {
        fill_grads(&a, u);
        adamw_step(&base, &a.state, segments, 2, a.grads, 1.0f, 1e-3f, u);
        for (size_t i = 0; i < N; i++) {
            double g = (double)a.grads[i], b1 = (double)base.beta1, b2 = (double)base.beta2;
            m[i] = b1 * m[i] + (1.0 - b1) * g;
            v[i] = b2 * v[i] + (1.0 - b2) * g * g;
            double hat = m[i] / (1.0 - pow(b1, u)) / (sqrt(v[i] / (1.0 - pow(b2, u))) + (double)base.eps);
            w[i] -= (double)1e-3f * (hat + (double)base.weight_decay * w[i]);
        }
    }
    for (size_t i = 0; i < N; i++) {
        assert_true(fabs((double)a.state.master[i] - w[i]) < 1e-6);
    }
    free(w);
    free(m);
    free(v);
    arrays_close(&a);
}

static void test_without_gradients_matrices_shrink_and_gains_keep_their_bits(void **state)
{
    (void)state;
    for (int master = 0; master < 2; master++) {
        struct adamw_config c = base;
        c.master_fp32 = master;
        c.stochastic_rounding = !master;
        struct arrays a = arrays_open(&c), before = arrays_open(&c);
        const float lr = 0.125f;
        adamw_step(&c, &a.state, segments, 2, a.grads, 1.0f, lr, 1);
        for (size_t i = 0; i < N; i++) {
            double w = weight_of(&before, i), shrunk = w * (1.0 - (double)lr * (double)c.weight_decay);
            double rounding = master ? 1e-7 * fabs(w) : bf16_step(shrunk);
            assert_true(fabs(weight_of(&a, i) - shrunk) <= rounding);
        }
        for (size_t i = N; i < FLAT; i++) {
            assert_int_equal(a.state.weights[i], before.state.weights[i]);
            if (master) {
                assert_memory_equal(&a.state.master[i], &before.state.master[i], sizeof(float));
            }
        }
        arrays_close(&a);
        arrays_close(&before);
    }
}

static void test_the_gap_between_segments_stays_as_it_is(void **state)
{
    (void)state;
    struct arrays a = arrays_open(&base), before = arrays_open(&base);
    fill_grads(&a, 1);
    adamw_step(&base, &a.state, segments, 2, a.grads, 1.0f, 0.1f, 1);
    assert_memory_equal(a.state.master + N, before.state.master + N, 64 * sizeof(float));
    assert_memory_equal(a.state.weights + N, before.state.weights + N, 64 * sizeof(bf16));
    arrays_close(&a);
    arrays_close(&before);
}

/* A step of a quarter of the BF16 spacing vanishes to nearest; stochastically it arrives on average. Over n updates of
 * many weights the mean has standard deviation spacing sqrt(n p (1 - p) / weights). */
static void test_stochastic_rounding_is_unbiased(void **state)
{
    (void)state;
    struct adamw_config c = base;
    c.master_fp32 = false;
    c.weight_decay = 0.0f;
    const int updates = 16;
    const double spacing = 0x1p-7, quarter = spacing / 4;
    for (int stochastic = 0; stochastic < 2; stochastic++) {
        c.stochastic_rounding = stochastic;
        struct arrays a = arrays_open(&c);
        for (size_t i = 0; i < FLAT; i++) {
            a.state.weights[i] = bf16_from_float(1.5f);
            a.grads[i] = -1.0f; /* a constant gradient gives steps of lr */
        }
        for (uint32_t u = 1; u <= (uint32_t)updates; u++) {
            adamw_step(&c, &a.state, segments, 1, a.grads, 1.0f, (float)quarter, u);
        }
        double mean = 0.0;
        for (size_t i = 0; i < N; i++) {
            mean += weight_of(&a, i) / N;
        }
        if (stochastic) {
            double sigma = spacing * sqrt(updates * 0.25 * 0.75 / N);
            assert_true(fabs(mean - (1.5 + updates * quarter)) < 4 * sigma);
        } else {
            assert_true(fabs(mean - 1.5) < 1e-12);
        }
        arrays_close(&a);
    }
}

/* The random numbers belong to (seed, name, update, element): the same ones whatever else is updated beside. */
static void test_rounding_depends_on_name_update_and_seed_only(void **state)
{
    (void)state;
    struct adamw_config c = base;
    c.master_fp32 = false;
    c.moments_bf16 = c.stochastic_rounding = true;
    struct arrays a = arrays_open(&c), b = arrays_open(&c), other = arrays_open(&c);
    fill_grads(&a, 1);
    memcpy(b.grads, a.grads, FLAT * sizeof(float));
    memcpy(other.grads, a.grads, FLAT * sizeof(float));
    adamw_step(&c, &a.state, segments, 2, a.grads, 1.0f, 1e-4f, 7);
    adamw_step(&c, &b.state, segments + 1, 1, b.grads, 1.0f, 1e-4f, 7);
    adamw_step(&c, &b.state, segments, 1, b.grads, 1.0f, 1e-4f, 7);
    assert_memory_equal(a.state.weights, b.state.weights, FLAT * sizeof(bf16));
    assert_memory_equal(a.state.m, b.state.m, FLAT * sizeof(bf16));
    assert_memory_equal(a.state.v, b.state.v, FLAT * sizeof(bf16));
    c.seed++;
    adamw_step(&c, &other.state, segments, 2, other.grads, 1.0f, 1e-4f, 7);
    assert_memory_not_equal(a.state.weights, other.state.weights, N * sizeof(bf16));
    assert_memory_not_equal(a.state.v, other.state.v, N * sizeof(bf16));
    arrays_close(&a);
    arrays_close(&b);
    arrays_close(&other);
}

/* Without gradients an update is decay alone, the same one for every name and update: what differs is the rounding. */
static void test_every_name_and_update_rounds_in_its_own_way(void **state)
{
    (void)state;
    struct adamw_config c = base;
    c.master_fp32 = false;
    c.stochastic_rounding = true;
    const char *names[] = {"a", "b", "a"};
    const uint32_t updates[] = {1, 1, 2};
    struct arrays a[3];
    for (int i = 0; i < 3; i++) {
        const struct adamw_segment segment = {.name = names[i], .elements = N, .decays = true};
        a[i] = arrays_open(&c);
        adamw_step(&c, &a[i].state, &segment, 1, a[i].grads, 1.0f, 1e-2f, updates[i]);
    }
    assert_memory_not_equal(a[0].state.weights, a[1].state.weights, N * sizeof(bf16));
    assert_memory_not_equal(a[0].state.weights, a[2].state.weights, N * sizeof(bf16));
    for (int i = 0; i < 3; i++) {
        arrays_close(&a[i]);
    }
}

/* m and v share a random word: each must be rounded up as often as its fraction says, and both as if independent. */
static void test_moments_are_rounded_without_bias_and_independently(void **state)
{
    (void)state;
    struct adamw_config c = base;
    c.moments_bf16 = c.stochastic_rounding = true;
    struct arrays a = arrays_open(&c);
    const float g = 0.7f;
    for (size_t i = 0; i < N; i++) {
        a.grads[i] = g;
    }
    adamw_step(&c, &a.state, segments, 1, a.grads, 1.0f, 1e-3f, 1);
    const double exact[2] = {(double)(1.0f - c.beta1) * (double)g, (double)(1.0f - c.beta2) * (double)g * (double)g};
    const void *moments[2] = {a.state.m, a.state.v};
    double up[2] = {0}, fraction[2], both = 0.0;
    for (int k = 0; k < 2; k++) {
        fraction[k] = exact[k] / bf16_step(exact[k]) - floor(exact[k] / bf16_step(exact[k]));
        for (size_t i = 0; i < N; i++) {
            up[k] += stored(moments[k], true, i) > exact[k] ? 1.0 / N : 0.0;
        }
        assert_true(fabs(up[k] - fraction[k]) < 4.0 * sqrt(fraction[k] * (1.0 - fraction[k]) / N));
    }
    for (size_t i = 0; i < N; i++) {
        both += stored(moments[0], true, i) > exact[0] && stored(moments[1], true, i) > exact[1] ? 1.0 / N : 0.0;
    }
    double expected = fraction[0] * fraction[1];
    assert_true(fabs(both - expected) < 4.0 * sqrt(expected * (1.0 - expected) / N));
    arrays_close(&a);
}

static void test_bits_do_not_depend_on_threads(void **state)
{
    (void)state;
    for (int mode = 0; mode < 4; mode++) {
        struct adamw_config c = base;
        c.master_fp32 = mode & 1;
        c.moments_bf16 = c.stochastic_rounding = mode & 2;
        struct arrays a[2] = {arrays_open(&c), arrays_open(&c)};
        for (int threads = 1; threads <= 2; threads++) {
            struct arrays *one = &a[threads - 1];
            use_threads(threads);
            for (uint32_t u = 1; u <= 3; u++) {
                fill_grads(one, u);
                adamw_step(&c, &one->state, segments, 2, one->grads, 0.5f, 1e-3f, u);
            }
        }
        assert_memory_equal(a[0].state.weights, a[1].state.weights, FLAT * sizeof(bf16));
        assert_memory_equal(a[0].state.m, a[1].state.m, FLAT * adamw_moment_bytes(&c));
        assert_memory_equal(a[0].state.v, a[1].state.v, FLAT * adamw_moment_bytes(&c));
        arrays_close(&a[0]);
        arrays_close(&a[1]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_mode_follows_the_formula_in_fp64),
        cmocka_unit_test(test_fp32_state_follows_fp64_over_many_updates),
        cmocka_unit_test(test_without_gradients_matrices_shrink_and_gains_keep_their_bits),
        cmocka_unit_test(test_the_gap_between_segments_stays_as_it_is),
        cmocka_unit_test(test_stochastic_rounding_is_unbiased),
        cmocka_unit_test(test_rounding_depends_on_name_update_and_seed_only),
        cmocka_unit_test(test_every_name_and_update_rounds_in_its_own_way),
        cmocka_unit_test(test_moments_are_rounded_without_bias_and_independently),
        cmocka_unit_test(test_bits_do_not_depend_on_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
