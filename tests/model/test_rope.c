/* RoPE: the table against FP64 for Llama 3's parameters, known positions, and the rotation with its way back. */
#include "model/rope.h"

#include "tests/model/check.h"
#include "tests/model/oracle.h"

#include "tests/test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static struct rope_config llama3(float factor)
{
    return (struct rope_config){.theta = 500000,
                                .scaling = ROPE_LLAMA3,
                                .factor = factor,
                                .low_freq_factor = 1,
                                .high_freq_factor = 4,
                                .original_context = 8192};
}

static void test_inverse_frequencies_match_fp64(void **state)
{
    (void)state;
    struct rope_config ropes[] = {llama3(8), llama3(32), {.theta = 500000}, {.theta = 10000}};
    for (int r = 0; r < 4; r++) {
        float got[64];
        rope_inverse_frequencies(&ropes[r], 128, got);
        for (int i = 0; i < 64; i++) {
            double want = oracle_inverse_frequency(&ropes[r], 128, i);
            assert_true(fabs((double)got[i] - want) <= 1e-6 * want);
        }
    }
}

/* The three regimes are all there: kept, mixed, divided by the factor. */
static void test_llama3_scaling_stretches_long_waves_only(void **state)
{
    (void)state;
    struct rope_config plain = {.theta = 500000}, scaled = llama3(8);
    float a[64], b[64];
    rope_inverse_frequencies(&plain, 128, a);
    rope_inverse_frequencies(&scaled, 128, b);
    int kept = 0, mixed = 0, stretched = 0;
    for (int i = 0; i < 64; i++) {
        float ratio = a[i] / b[i];
        kept += ratio == 1;
        stretched += fabsf(ratio - 8) < 1e-5f;
        mixed += ratio > 1 && ratio < 7.999f;
    }
    assert_int_equal(kept + mixed + stretched, 64);
    /* 8192 / (2 pi 500000^(i/64)) turns: 4 are left at i = 28.2, 1 at i = 35. */
    assert_int_equal(kept, 29);
    assert_int_equal(mixed, 6);
}

static void test_table_at_known_positions(void **state)
{
    (void)state;
    struct rope_config rope = llama3(8);
    float *cosine = malloc(sizeof *cosine * 101 * 64), *sine = malloc(sizeof *sine * 101 * 64);
    rope_table(&rope, 128, 101, cosine, sine);
    static const int positions[] = {0, 1, 100};
    for (int k = 0; k < 3; k++) {
        for (int i = 0; i < 64; i++) {
            double angle = positions[k] * oracle_inverse_frequency(&rope, 128, i);
            int at = positions[k] * 64 + i;
            /* The FP32 angle errs by 2^-24 of itself for the frequency and once more for the product. */
            double bound = 0x1p-23 * angle + 0x1p-24;
            assert_true(fabs((double)cosine[at] - cos(angle)) <= bound);
            assert_true(fabs((double)sine[at] - sin(angle)) <= bound);
        }
    }
    for (int i = 0; i < 64; i++) {
        assert_true(cosine[i] == 1 && sine[i] == 0);
    }
    assert_true(cosine[64] == cosf(1) && sine[64] == sinf(1)); /* pair 0 turns by one radian a token */
    free(cosine);
    free(sine);
}

enum { ROWS = 7, HEADS = 3, D = 32, STRIDE = HEADS * D + 5 };

static void test_rotation_of_halves_and_back(void **state)
{
    (void)state;
    struct rope_config rope = {.theta = 100};
    float cosine[ROWS * D / 2], sine[ROWS * D / 2];
    bf16 x[ROWS * STRIDE], y[ROWS * STRIDE];
    double want[D];
    rope_table(&rope, D, ROWS, cosine, sine);
    fill_bf16(x, ROWS * STRIDE, 1, 1);
    memcpy(y, x, sizeof y);
    struct rope_apply apply = {
        .x = y, .rows = ROWS, .row_stride = STRIDE, .heads = HEADS, .head_dim = D, .cosine = cosine, .sine = sine};
    rope_apply_cpu(&apply);
    for (int t = 0; t < ROWS; t++) {
        for (int h = 0; h < HEADS; h++) {
            const bf16 *from = x + t * STRIDE + h * D;
            for (int i = 0; i < D; i++) {
                double angle = t * pow(100.0, -2.0 * (i % (D / 2)) / D);
                double own = (double)bf16_to_float(from[i]);
                double other = (double)bf16_to_float(from[(i + D / 2) % D]) * (i < D / 2 ? -1 : 1);
                want[i] = own * cos(angle) + other * sin(angle);
            }
            check_rounded_once(y + t * STRIDE + h * D, want, D, 1e-5);
        }
        for (int i = HEADS * D; i < STRIDE; i++) {
            assert_int_equal(y[t * STRIDE + i], x[t * STRIDE + i]);
        }
    }
    /* Back again: two roundings of a pair whose length is kept. */
    apply.inverse = true;
    rope_apply_cpu(&apply);
    for (int t = 0; t < ROWS; t++) {
        for (int i = 0; i < HEADS * D; i++) {
            float a = bf16_to_float(x[t * STRIDE + i]), b = bf16_to_float(y[t * STRIDE + i]);
            int pair = i % D < D / 2 ? i + D / 2 : i - D / 2;
            float length = fabsf(a) + fabsf(bf16_to_float(x[t * STRIDE + pair]));
            assert_true(fabsf(a - b) <= 0x1p-6f * length);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_inverse_frequencies_match_fp64),
        cmocka_unit_test(test_llama3_scaling_stretches_long_waves_only),
        cmocka_unit_test(test_table_at_known_positions),
        cmocka_unit_test(test_rotation_of_halves_and_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
