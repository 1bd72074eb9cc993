/* Projections in bf16, fp8 and nvfp4: forward and both gradients against plain FP64 products of operands that
 * represent.c quantises on its own; the errors that docs/numerics.md section 14 expects; unbiased stochastic rounding.
 */
#include "model/linear.h"

#include "core/rng.h"
#include "tests/model/check.h"
#include "tests/model/represent.h"

#include "tests/test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Two blocks of tokens and a short one; sizes that differ. */
enum { ROWS = 39, IN = 48, OUT = 80, STREAM = 77, SEED = 9, SAMPLE = 5, UPDATE = 2 };

struct problem {
    bf16 w[OUT * IN], represented[OUT * IN], x[ROWS * IN], dy[ROWS * OUT], y[ROWS * OUT], dx[ROWS * IN];
    float dw[OUT * IN];
    double wd[OUT * IN], xd[ROWS * IN], dyd[ROWS * OUT]; /* the same numbers */
};

static struct linear linear_make(struct problem *p, enum linear_format format)
{
    struct linear l = {.format = format, .in = IN, .out = OUT, .weight = p->w, .stream = STREAM};
    if (format != LINEAR_BF16) {
        linear_represent_weight_cpu(format, p->w, OUT, IN, p->represented);
        l.weight = p->represented;
    }
    return l;
}

static void fill(struct problem *p)
{
    fill_bf16(p->w, OUT * IN, 1, 0.05f);
    fill_bf16(p->x, ROWS * IN, 2, 1.5f);
    fill_bf16(p->dy, ROWS * OUT, 3, 1e-4f);
    bf16_to_double(p->w, p->wd, OUT * IN);
    bf16_to_double(p->x, p->xd, ROWS * IN);
    bf16_to_double(p->dy, p->dyd, ROWS * OUT);
}

static void run(struct problem *p, enum linear_format format, uint32_t update, bool accumulate)
{
    struct linear l = linear_make(p, format);
    void *scratch = malloc(linear_scratch_bytes(format, ROWS, IN, OUT) + 1);
    linear_fwd_cpu(&(struct linear_fwd){.linear = &l, .rows = ROWS, .x = p->x, .y = p->y, .scratch = scratch});
    linear_bwd_cpu(&(struct linear_bwd){.linear = &l,
                                        .rows = ROWS,
                                        .x = p->x,
                                        .dy = p->dy,
                                        .dx = p->dx,
                                        .dw = p->dw,
                                        .accumulate = accumulate,
                                        .seed = SEED,
                                        .sample = SAMPLE,
                                        .update = update,
                                        .scratch = scratch});
    free(scratch);
}

/* c (m, n) = sum over k of a(i, k) b(k, j), with strides. */
static void product(int64_t m, int64_t n, int64_t k, const double *a, int64_t a_row, int64_t a_k, const double *b,
                    int64_t b_k, int64_t b_col, double *c)
{
    for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < n; j++) {
            double sum = 0;
            for (int64_t t = 0; t < k; t++) {
                sum += a[i * a_row + t * a_k] * b[t * b_k + j * b_col];
            }
            c[i * n + j] = sum;
        }
    }
}

/* y, dx, dw of the represented operator. */
struct restated {
    double y[ROWS * OUT], dx[ROWS * IN], dw[OUT * IN];
};

static void multiply(const double *w, const double *x_y, const double *dy_dx, const double *x_dw, const double *dy_dw,
                     struct restated *r)
{
    product(ROWS, OUT, IN, x_y, IN, 1, w, 1, IN, r->y);
    product(ROWS, IN, OUT, dy_dx, OUT, 1, w, IN, 1, r->dx);
    product(OUT, IN, ROWS, dy_dw, 1, OUT, x_dw, IN, 1, r->dw);
}

static void restate(const struct problem *p, enum linear_format format, struct restated *r)
{
    static double w[OUT * IN], x[ROWS * IN], dy[ROWS * OUT], x_dw[ROWS * IN], dy_dw[ROWS * OUT], turned[ROWS * OUT];
    if (format == LINEAR_BF16) {
        multiply(p->wd, p->xd, p->dyd, p->xd, p->dyd, r);
    } else if (format == LINEAR_FP8) {
        represent_fp8(p->wd, OUT * IN, 3, w);
        represent_fp8(p->xd, ROWS * IN, 3, x);
        represent_fp8(p->dyd, ROWS * OUT, 2, dy);
        multiply(w, x, dy, x, dy, r);
    } else {
        struct rng_words to_dx = rng_words(SEED, STREAM, SAMPLE), to_dw = rng_words(SEED, STREAM + 1, SAMPLE);
        struct randomness dx_random = {SEED, (uint64_t)to_dx.w[1] << 32 | to_dx.w[0], UPDATE};
        struct randomness dw_random = {SEED, (uint64_t)to_dw.w[1] << 32 | to_dw.w[0], UPDATE};
        represent_nvfp4(p->wd, OUT, IN, 16, 16, NULL, w);
        represent_nvfp4(p->xd, ROWS, IN, 1, 16, NULL, x);
        represent_nvfp4(p->dyd, ROWS, OUT, 1, 16, &dx_random, dy);
        represent_hadamard(p->xd, ROWS, IN, turned);
        represent_nvfp4(turned, ROWS, IN, 16, 1, NULL, x_dw);
        represent_hadamard(p->dyd, ROWS, OUT, turned);
        represent_nvfp4(turned, ROWS, OUT, 16, 1, &dw_random, dy_dw);
        multiply(w, x, dy, x_dw, dy_dw, r);
    }
}

static void test_products_are_those_of_the_represented_operands(void **state)
{
    (void)state;
    static struct problem p;
    static struct restated r;
    fill(&p);
    for (int format = LINEAR_BF16; format <= LINEAR_NVFP4; format++) {
        run(&p, (enum linear_format)format, UPDATE, false);
        restate(&p, (enum linear_format)format, &r);
        /* One rounding to BF16; FP32 sums of 80 terms err by about 1e-6 of their largest partial sum. */
        check_rounded_once(p.y, r.y, ROWS * OUT, 3e-6);
        check_rounded_once(p.dx, r.dx, ROWS * IN, 1e-10);
        assert_true(rel_l2_f32(p.dw, r.dw, OUT * IN) < 1e-6);
        float once[OUT * IN];
        memcpy(once, p.dw, sizeof once);
        run(&p, (enum linear_format)format, UPDATE, true);
        for (int i = 0; i < OUT * IN; i++) {
            assert_true(p.dw[i] == once[i] + once[i]);
        }
    }
}

/* A tile holds the same values whichever way the matrix lies. */
static void test_nvfp4_weight_equals_its_transpose(void **state)
{
    (void)state;
    static bf16 w[OUT * IN], turned[OUT * IN], a[OUT * IN], b[OUT * IN];
    fill_bf16(w, OUT * IN, 1, 1);
    for (int i = 0; i < OUT * IN; i++) {
        turned[i % IN * OUT + i / IN] = w[i];
    }
    linear_represent_weight_cpu(LINEAR_NVFP4, w, OUT, IN, a);
    linear_represent_weight_cpu(LINEAR_NVFP4, turned, IN, OUT, b);
    for (int i = 0; i < OUT * IN; i++) {
        assert_int_equal(a[i], b[i % IN * OUT + i / IN]);
    }
}

/* A projection like Q|K|V: Gaussian activations and weights. */
static void test_expected_errors_of_a_projection(void **state)
{
    (void)state;
    enum { TOKENS = 64, WIDTH = 512, WIDE = 256 };
    static bf16 w[WIDE * WIDTH], represented[WIDE * WIDTH], x[TOKENS * WIDTH], y[TOKENS * WIDE];
    static double wd[WIDE * WIDTH], xd[TOKENS * WIDTH], exact[TOKENS * WIDE];
    fill_bf16(w, WIDE * WIDTH, 1, 0.02f);
    fill_bf16(x, TOKENS * WIDTH, 2, 1);
    bf16_to_double(w, wd, WIDE * WIDTH);
    bf16_to_double(x, xd, TOKENS * WIDTH);
    product(TOKENS, WIDE, WIDTH, xd, WIDTH, 1, wd, 1, WIDTH, exact);
    const double expected[] = {0.0016, 0.0375, 0.146}, tolerance[] = {0.0005, 0.002, 0.01};
    for (int format = LINEAR_BF16; format <= LINEAR_NVFP4; format++) {
        struct linear l = {.format = (enum linear_format)format, .in = WIDTH, .out = WIDE, .weight = w};
        if (format != LINEAR_BF16) {
            linear_represent_weight_cpu(l.format, w, WIDE, WIDTH, represented);
            l.weight = represented;
        }
        void *scratch = malloc(linear_scratch_bytes(l.format, TOKENS, WIDTH, WIDE) + 1);
        linear_fwd_cpu(&(struct linear_fwd){.linear = &l, .rows = TOKENS, .x = x, .y = y, .scratch = scratch});
        free(scratch);
        double error = rel_l2_bf16(y, exact, TOKENS * WIDE);
        print_message("%s: relative L2 error %.4f\n", linear_format_names[format], error);
        assert_true(fabs(error - expected[format]) < tolerance[format]);
    }
}

/* Averaged over updates the stochastic part of NVFP4's gradients vanishes as 1 / sqrt(n). What stays of dx is the
 * clipping above 6 of blocks whose scale was rounded down. */
static void test_stochastic_rounding_is_unbiased(void **state)
{
    (void)state;
    enum { UPDATES = 64 };
    static struct problem p;
    static double mean[ROWS * IN], w[OUT * IN], want[ROWS * IN], single[ROWS * IN];
    fill(&p);
    represent_nvfp4(p.wd, OUT, IN, 16, 16, NULL, w);
    product(ROWS, IN, OUT, p.dyd, OUT, 1, w, IN, 1, want);
    memset(mean, 0, sizeof mean);
    for (uint32_t u = 0; u < UPDATES; u++) {
        run(&p, LINEAR_NVFP4, u, false);
        bf16_to_double(p.dx, single, ROWS * IN);
        for (int i = 0; i < ROWS * IN; i++) {
            mean[i] += single[i] / UPDATES;
        }
    }
    double one = rel_l2_bf16(p.dx, want, ROWS * IN), error = 0, norm = 0;
    for (int i = 0; i < ROWS * IN; i++) {
        error += (mean[i] - want[i]) * (mean[i] - want[i]);
        norm += want[i] * want[i];
    }
    print_message("relative L2 error of dx: %.4f once, %.4f on average\n", one, sqrt(error / norm));
    assert_true(one > 0.08);
    assert_true(sqrt(error / norm) < one / 5);
}

static void test_a_non_finite_operand_becomes_nan(void **state)
{
    (void)state;
    static struct problem p;
    static const bf16 bad[] = {0x7fc0, 0x7f80, 0xff80};
    for (int format = LINEAR_FP8; format <= LINEAR_NVFP4; format++) {
        for (int k = 0; k < 3; k++) {
            fill(&p);
            p.x[5 * IN + 7] = bad[k];
            p.dy[3 * OUT + 1] = bad[k];
            run(&p, (enum linear_format)format, UPDATE, false);
            assert_true(isnan(bf16_to_float(p.y[0])) && isnan(bf16_to_float(p.dx[0])) && isnan(p.dw[0]));
            fill(&p);
            p.w[IN] = bad[k];
            run(&p, (enum linear_format)format, UPDATE, false);
            assert_true(isnan(bf16_to_float(p.y[0])) && isnan(bf16_to_float(p.dx[0])) && isfinite(p.dw[0]));
        }
    }
}

/* All zeros, and amax at both ends of BF16: no NaN, no overflow of a scale. */
static void test_extreme_magnitudes(void **state)
{
    (void)state;
    static struct problem p;
    static const float scales[] = {0, 1e-38f, 1e37f};
    for (int format = LINEAR_FP8; format <= LINEAR_NVFP4; format++) {
        for (int k = 0; k < 3; k++) {
            fill(&p);
            fill_bf16(p.x, ROWS * IN, 2, scales[k]);
            run(&p, (enum linear_format)format, UPDATE, false);
            for (int i = 0; i < ROWS * OUT; i++) {
                assert_true(isfinite(bf16_to_float(p.y[i])));
            }
            for (int i = 0; i < OUT * IN; i++) {
                assert_true(isfinite(p.dw[i]));
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_products_are_those_of_the_represented_operands),
        cmocka_unit_test(test_nvfp4_weight_equals_its_transpose),
        cmocka_unit_test(test_expected_errors_of_a_projection),
        cmocka_unit_test(test_stochastic_rounding_is_unbiased),
        cmocka_unit_test(test_a_non_finite_operand_becomes_nan),
        cmocka_unit_test(test_extreme_magnitudes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
