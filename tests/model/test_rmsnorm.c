/* RMSNorm against FP64, its gradients against central differences of the FP64 form. */
#include "model/rmsnorm.h"

#include "tests/model/check.h"

#include "tests/test.h"

#include <math.h>
#include <string.h>

/* Groups, strides with gaps, a width that is no multiple of any vector. */
enum { ROWS = 5, GROUPS = 3, WIDTH = 37, STRIDE = GROUPS * WIDTH + 6, MAX = 4096 };
static const double eps = 1e-3;

struct form {
    int groups, width, stride;
    double x[MAX], gain[MAX], dy[MAX];
};

static double norm_at(const struct form *f, int r, int g, int c)
{
    const double *x = f->x + r * f->stride + g * f->width;
    double mean = 0;
    for (int i = 0; i < f->width; i++) {
        mean += x[i] * x[i] / f->width;
    }
    return x[c] / sqrt(mean + eps) * f->gain[c];
}

static double weighted_sum(const void *context)
{
    const struct form *f = context;
    double sum = 0;
    for (int r = 0; r < ROWS; r++) {
        for (int g = 0; g < f->groups; g++) {
            for (int c = 0; c < f->width; c++) {
                sum += f->dy[r * f->stride + g * f->width + c] * norm_at(f, r, g, c);
            }
        }
    }
    return sum;
}

static void check_norm(int groups, int width, int stride)
{
    static struct form f;
    bf16 x[MAX], gain[MAX], dy[MAX], residual[MAX], y[MAX], dx[MAX];
    float inv[ROWS * GROUPS], dgain[MAX];
    double want[MAX], slope[MAX];
    f = (struct form){.groups = groups, .width = width, .stride = stride};
    int n = ROWS * stride;
    assert_true(n <= MAX);
    fill_bf16(x, n, 1, 2);
    fill_bf16(gain, width, 2, 1);
    fill_bf16(dy, n, 3, 1);
    fill_bf16(residual, n, 4, 1);
    bf16_to_double(x, f.x, n);
    bf16_to_double(gain, f.gain, width);
    bf16_to_double(dy, f.dy, n);
    memset(y, 0, sizeof y);
    memset(dx, 0, sizeof dx);
    rmsnorm_fwd_cpu(&(struct rmsnorm_fwd){.rows = ROWS,
                                          .groups = groups,
                                          .width = width,
                                          .x_stride = stride,
                                          .y_stride = stride,
                                          .x = x,
                                          .gain = gain,
                                          .eps = (float)eps,
                                          .y = y,
                                          .inv_rms = inv});
    struct rmsnorm_bwd back = {.rows = ROWS,
                               .groups = groups,
                               .width = width,
                               .x_stride = stride,
                               .dy_stride = stride,
                               .dx_stride = stride,
                               .x = x,
                               .gain = gain,
                               .dy = dy,
                               .inv_rms = inv,
                               .dx = dx,
                               .dgain = dgain};
    rmsnorm_bwd_cpu(&back);
    for (int r = 0; r < ROWS; r++) {
        for (int g = 0; g < groups; g++) {
            int at = r * stride + g * width;
            for (int c = 0; c < width; c++) {
                want[c] = norm_at(&f, r, g, c);
                slope[at + c] = central_difference(weighted_sum, &f, &f.x[at + c], 1e-4);
            }
            check_rounded_once(y + at, want, width, 1e-6);
            check_rounded_once(dx + at, slope + at, width, 1e-6);
        }
        for (int i = groups * width; i < stride; i++) {
            assert_int_equal(y[r * stride + i], 0);
            assert_int_equal(dx[r * stride + i], 0);
        }
    }
    for (int c = 0; c < width; c++) {
        want[c] = central_difference(weighted_sum, &f, &f.gain[c], 1e-4);
    }
    check_near_f32(dgain, want, width, 1e-5, 1e-5);

    /* Added to a residual gradient with one rounding, in place of it; gains' gradients add exactly. */
    float before[MAX];
    memcpy(before, dgain, sizeof before);
    for (int i = 0; i < n; i++) {
        slope[i] += (double)bf16_to_float(residual[i]);
    }
    back.dx = residual;
    back.residual = residual;
    back.accumulate = true;
    rmsnorm_bwd_cpu(&back);
    for (int r = 0; r < ROWS; r++) {
        check_rounded_once(residual + r * stride, slope + r * stride, (int64_t)groups * width, 1e-6);
    }
    for (int c = 0; c < width; c++) {
        assert_true(dgain[c] == before[c] + before[c]);
    }
    /* dx over dy, as the norm of Q and K uses it. */
    bf16 dx_apart[MAX];
    memcpy(dx_apart, dx, sizeof dx_apart);
    back.dx = dy;
    back.residual = NULL;
    rmsnorm_bwd_cpu(&back);
    for (int r = 0; r < ROWS; r++) {
        assert_memory_equal(dy + r * stride, dx_apart + r * stride, (size_t)(groups * width) * sizeof *dy);
    }
}

static void test_norm_of_rows(void **state)
{
    (void)state;
    check_norm(1, 77, 77);
    check_norm(1, 1, 1);
    check_norm(1, 128, 130);
}

static void test_norm_of_heads(void **state)
{
    (void)state;
    check_norm(GROUPS, WIDTH, STRIDE);
}

static void test_a_row_of_zeros_is_zero(void **state)
{
    (void)state;
    bf16 x[20] = {0}, gain[20], y[20];
    float inv;
    fill_bf16(gain, 20, 1, 1);
    rmsnorm_fwd_cpu(&(struct rmsnorm_fwd){.rows = 1,
                                          .groups = 1,
                                          .width = 20,
                                          .x_stride = 20,
                                          .y_stride = 20,
                                          .x = x,
                                          .gain = gain,
                                          .eps = 1e-5f,
                                          .y = y,
                                          .inv_rms = &inv});
    for (int c = 0; c < 20; c++) {
        assert_int_equal(y[c] & 0x7fff, 0);
    }
    assert_true(isfinite(inv));
}

static void test_residual_sum_is_rounded_once(void **state)
{
    (void)state;
    bf16 a[100], b[100];
    double want[100];
    fill_bf16(a, 100, 1, 1);
    fill_bf16(b, 100, 2, 100);
    for (int i = 0; i < 100; i++) {
        want[i] = (double)bf16_to_float(a[i]) + (double)bf16_to_float(b[i]);
    }
    residual_add_cpu(a, b, a, 100);
    check_rounded_once(a, want, 100, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_norm_of_rows),
        cmocka_unit_test(test_norm_of_heads),
        cmocka_unit_test(test_a_row_of_zeros_is_zero),
        cmocka_unit_test(test_residual_sum_is_rounded_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
