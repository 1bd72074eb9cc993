/* The norm against a long double sum, what clipping makes of it, and where NaN and Inf are found. */
#include "tests/test.h"

#include "optim/gradnorm.h"

#include <math.h>
#include <stdlib.h>
#ifdef _OPENMP
#include <omp.h>
#endif

enum { FIRST = 4096 * 5 + 3, SECOND = 70, THIRD = 4096 * 1100, GAP = 61, FLAT = FIRST + GAP + SECOND + THIRD };

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
    {.name = "a", .offset = 0, .elements = FIRST},
    {.name = "b", .offset = FIRST + GAP, .elements = SECOND},
    {.name = "c", .offset = FIRST + GAP + SECOND, .elements = THIRD},
};

static float *grads_open(void)
{
    float *grads = malloc(FLAT * sizeof *grads);
    for (uint32_t i = 0; i < FLAT; i++) {
        grads[i] = (float)(int32_t)(i * 2654435761u) * 0x1p-31f;
    }
    for (size_t i = FIRST; i < FIRST + GAP; i++) {
        grads[i] = NAN; /* outside all segments: not looked at */
    }
    return grads;
}

static void test_norm_is_the_root_of_the_sum_of_squares(void **state)
{
    (void)state;
    float *grads = grads_open();
    long double sum = 0.0L;
    for (size_t i = 0; i < FLAT; i++) {
        sum += i >= FIRST && i < FIRST + GAP ? 0.0L : (long double)grads[i] * (long double)grads[i];
    }
    struct gradnorm norm = gradnorm_of(grads, segments, 3);
    assert_true(fabs(norm.norm - (double)sqrtl(sum)) < 1e-13 * norm.norm);
    assert_int_equal(norm.non_finite, 0);
    assert_int_equal(norm.bad_segment, -1);
    free(grads);
}

static void test_norm_has_the_same_bits_for_every_number_of_threads(void **state)
{
    (void)state;
    float *grads = grads_open();
    use_threads(1);
    double one = gradnorm_of(grads, segments, 3).norm;
    for (int threads = 2; threads <= 5; threads++) {
        use_threads(threads);
        double many = gradnorm_of(grads, segments, 3).norm;
        assert_memory_equal(&one, &many, sizeof one);
    }
    free(grads);
}

/* The tree of the contract, written as recursion over blocks padded to a power of two. */
static double padded_tree(const float *x, size_t elements, size_t first_block, size_t blocks)
{
    if (blocks > 1) {
        return padded_tree(x, elements, first_block, blocks / 2) +
               padded_tree(x, elements, first_block + blocks / 2, blocks / 2);
    }
    double lane[8] = {0};
    for (size_t i = first_block * 4096; i < (first_block + 1) * 4096 && i < elements; i++) {
        lane[i % 8] += (double)x[i] * (double)x[i];
    }
    return ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
}

static void test_sums_follow_the_padded_tree(void **state)
{
    (void)state;
    float *grads = grads_open();
    for (size_t i = 0; i < FLAT; i++) {
        grads[i] = ldexpf(grads[i], (int)(i * 7919 % 1009 % 23) - 11); /* so that sums round, and their order shows */
    }
    for (size_t n = 1; n < 4096; n += 29) {
        const struct adamw_segment one_block = {.name = "block", .elements = n};
        double norm = gradnorm_of(grads, &one_block, 1).norm, in_lanes = sqrt(padded_tree(grads, n, 0, 1));
        assert_memory_equal(&norm, &in_lanes, sizeof norm);
    }
    double one = gradnorm_of(grads, segments, 1).norm, expected = sqrt(padded_tree(grads, FIRST, 0, 8));
    assert_memory_equal(&one, &expected, sizeof one);
    one = gradnorm_of(grads, segments + 2, 1).norm;
    expected = sqrt(padded_tree(grads + segments[2].offset, THIRD, 0, 2048));
    assert_memory_equal(&one, &expected, sizeof one);
    free(grads);
}

static void test_norm_ten_is_clipped_to_one_and_point_99_untouched(void **state)
{
    (void)state;
    const struct adamw_segment segment = {.name = "w", .elements = 100};
    float grads[100];
    for (int i = 0; i < 100; i++) {
        grads[i] = i % 2 ? 1.0f : -1.0f;
    }
    double norm = gradnorm_of(grads, &segment, 1).norm;
    assert_true(norm == 10.0);
    float scale = gradnorm_clip_scale(norm, 1.0f);
    for (int i = 0; i < 100; i++) {
        grads[i] *= scale;
    }
    assert_true(fabs(gradnorm_of(grads, &segment, 1).norm - 1.0) < 1e-7);
    assert_true(gradnorm_clip_scale(0.99, 1.0f) == 1.0f);
    assert_true(gradnorm_clip_scale(1.0, 1.0f) == 1.0f);
    assert_true(gradnorm_clip_scale(0.0, 1.0f) == 1.0f);
    assert_true(gradnorm_clip_scale(1e9, 0.0f) == 1.0f);
    assert_true(gradnorm_clip_scale(1e9, -1.0f) == 1.0f);
}

static void test_nan_and_inf_are_located(void **state)
{
    (void)state;
    const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int kind = 0; kind < 3; kind++) {
        float *grads = grads_open();
        grads[segments[2].offset + 4096 * 600 + 17] = bad[kind];
        grads[segments[2].offset + THIRD - 1] = bad[kind];
        struct gradnorm norm = gradnorm_of(grads, segments, 3);
        assert_false(isfinite(norm.norm));
        assert_int_equal(norm.non_finite, 2);
        assert_int_equal(norm.bad_segment, 2);
        assert_int_equal(norm.bad_element, 4096 * 600 + 17);
        grads[segments[1].offset + 69] = bad[kind];
        norm = gradnorm_of(grads, segments, 3);
        assert_int_equal(norm.non_finite, 3);
        assert_int_equal(norm.bad_segment, 1);
        assert_int_equal(norm.bad_element, 69);
        free(grads);
    }
}

/* Squares of FP32 overflow in FP32; the norm of finite gradients is finite all the same. */
static void test_huge_and_tiny_gradients_have_a_finite_norm(void **state)
{
    (void)state;
    const struct adamw_segment segment = {.name = "w", .elements = 4};
    const float huge[4] = {3e38f, 3e38f, 3e38f, 3e38f}, tiny[4] = {1e-40f, 0.0f, 0.0f, 0.0f};
    assert_true(fabs(gradnorm_of(huge, &segment, 1).norm / (2.0 * (double)3e38f) - 1.0) < 1e-15);
    assert_int_equal(gradnorm_of(huge, &segment, 1).non_finite, 0);
    assert_true(fabs(gradnorm_of(tiny, &segment, 1).norm / (double)1e-40f - 1.0) < 1e-15);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_norm_is_the_root_of_the_sum_of_squares),
        cmocka_unit_test(test_norm_has_the_same_bits_for_every_number_of_threads),
        cmocka_unit_test(test_sums_follow_the_padded_tree),
        cmocka_unit_test(test_norm_ten_is_clipped_to_one_and_point_99_untouched),
        cmocka_unit_test(test_nan_and_inf_are_located),
        cmocka_unit_test(test_huge_and_tiny_gradients_have_a_finite_norm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
