/* SwiGLU against FP64, its gradients against central differences; the far ends of the sigmoid. */
#include "model/swiglu.h"

#include "tests/model/check.h"

#include "tests/test.h"

#include <math.h>

enum { ROWS = 3, F = 29, N = ROWS * F };

struct form {
    double gate_up[2 * N], dout[N];
};

static double out_at(const struct form *f, int r, int c)
{
    double g = f->gate_up[r * 2 * F + c], u = f->gate_up[r * 2 * F + F + c];
    return g / (1 + exp(-g)) * u;
}

static double weighted_sum(const void *context)
{
    const struct form *f = context;
    double sum = 0;
    for (int r = 0; r < ROWS; r++) {
        for (int c = 0; c < F; c++) {
            sum += f->dout[r * F + c] * out_at(f, r, c);
        }
    }
    return sum;
}

static void test_output_and_gradients(void **state)
{
    (void)state;
    struct form f;
    bf16 gate_up[2 * N], dout[N], out[N], dgate_up[2 * N];
    double want[2 * N];
    fill_bf16(gate_up, 2 * N, 1, 3);
    fill_bf16(dout, N, 2, 1);
    bf16_to_double(gate_up, f.gate_up, 2 * N);
    bf16_to_double(dout, f.dout, N);
    swiglu_fwd_cpu(gate_up, ROWS, F, out);
    for (int r = 0; r < ROWS; r++) {
        for (int c = 0; c < F; c++) {
            want[r * F + c] = out_at(&f, r, c);
        }
    }
    check_rounded_once(out, want, N, 1e-6);
    swiglu_bwd_cpu(gate_up, dout, ROWS, F, dgate_up);
    for (int i = 0; i < 2 * N; i++) {
        want[i] = central_difference(weighted_sum, &f, &f.gate_up[i], 1e-4);
    }
    check_rounded_once(dgate_up, want, 2 * N, 1e-6);
}

static void test_large_gates_do_not_overflow(void **state)
{
    (void)state;
    bf16 gate_up[4] = {bf16_from_float(1e4f), bf16_from_float(-1e4f), bf16_from_float(2), bf16_from_float(2)};
    bf16 dout[2] = {bf16_from_float(1), bf16_from_float(1)}, out[2], d[4];
    swiglu_fwd_cpu(gate_up, 1, 2, out);
    assert_int_equal(out[0], bf16_from_float(bf16_to_float(gate_up[0]) * 2));
    assert_true(bf16_to_float(out[1]) == 0);
    swiglu_bwd_cpu(gate_up, dout, 1, 2, d);
    assert_true(bf16_to_float(d[0]) == 2 && bf16_to_float(d[1]) == 0);
    assert_int_equal(d[2], gate_up[0]);
    assert_true(bf16_to_float(d[3]) == 0);
}

static void test_nan_stays_nan(void **state)
{
    (void)state;
    bf16 gate_up[2] = {0x7fc0, bf16_from_float(1)}, dout = bf16_from_float(1), out, d[2];
    swiglu_fwd_cpu(gate_up, 1, 1, &out);
    swiglu_bwd_cpu(gate_up, &dout, 1, 1, d);
    assert_true(isnan(bf16_to_float(out)) && isnan(bf16_to_float(d[0])) && isnan(bf16_to_float(d[1])));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_output_and_gradients),
        cmocka_unit_test(test_large_gates_do_not_overflow),
        cmocka_unit_test(test_nan_stays_nan),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
