/* The counter RNG against the published known answers of Random123 and the properties that the trainer counts on. */
#include "core/rng.h"

#include "tests/test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Philox 4x32-10 of Random123's kat_vectors: counter, key, result. Our counter is (counter, stream), our key the seed.
 */
static void test_known_answers_of_philox(void **state)
{
    (void)state;
    static const struct {
        uint64_t counter, stream, seed;
        uint32_t expected[4];
    } answers[] = {
        {0, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {UINT64_MAX, UINT64_MAX, UINT64_MAX, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {0x85a308d3243f6a88, 0x0370734413198a2e, 0x299f31d0a4093822, {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (int i = 0; i < 3; i++) {
        struct rng_words words = rng_words(answers[i].seed, answers[i].stream, answers[i].counter);
        assert_memory_equal(words.w, answers[i].expected, sizeof words.w);
    }
}

static void test_streams_are_fnv_1a(void **state)
{
    (void)state;
    /* Published test values of FNV-1a, 64 bits. */
    assert_true(rng_stream("") == 0xcbf29ce484222325u);
    assert_true(rng_stream("a") == 0xaf63dc4c8601ec8cu);
    assert_true(rng_stream("foobar") == 0x85944171f73967e8u);
}

static void test_four_elements_share_a_block_and_updates_do_not(void **state)
{
    (void)state;
    struct rng_words words = rng_words(5, 6, (uint64_t)9 << 32 | 3);
    for (uint64_t i = 0; i < 4; i++) {
        assert_int_equal(rng_bits(5, 6, 9, 12 + i), words.w[i]);
    }
    assert_int_not_equal(rng_bits(5, 6, 9, 12), rng_bits(5, 6, 10, 12));
    assert_int_not_equal(rng_bits(5, 6, 9, 12), rng_bits(5, 7, 9, 12));
    assert_int_not_equal(rng_bits(5, 6, 9, 12), rng_bits(4, 6, 9, 12));
    /* The last element that fits does not reach into the update. */
    struct rng_words last = rng_words(5, 6, 0xffffffffu);
    assert_int_equal(rng_bits(5, 6, 0, RNG_ELEMENTS_MAX - 1), last.w[3]);
}

static void test_order_of_evaluation_does_not_matter(void **state)
{
    (void)state;
    enum { COUNT = 1000 };
    static float forward[COUNT];
    for (uint64_t i = 0; i < COUNT; i++) {
        forward[i] = rng_normal(1, 2, i);
    }
    for (uint64_t i = COUNT; i-- > 0;) {
        float again = rng_normal(1, 2, i);
        assert_memory_equal(&again, &forward[i], sizeof again);
    }
}

static void test_uniforms_fill_the_interval_and_stay_below_one(void **state)
{
    (void)state;
    enum { COUNT = 1 << 20, BINS = 64 };
    int bins[BINS] = {0};
    for (uint64_t i = 0; i < COUNT; i++) {
        float x = rng_uniform(11, 12, 3, i);
        assert_true(x >= 0 && x < 1);
        bins[(int)(x * BINS)]++;
    }
    double chi2 = 0;
    for (int i = 0; i < BINS; i++) {
        double off = bins[i] - (double)COUNT / BINS;
        chi2 += off * off / ((double)COUNT / BINS);
    }
    /* 63 degrees of freedom: mean 63, standard deviation 11.2. */
    assert_true(chi2 > 25 && chi2 < 120);
}

static void test_normals_have_the_moments_of_a_normal(void **state)
{
    (void)state;
    enum { COUNT = 1 << 20 };
    double sums[5] = {0};
    double neighbours = 0;
    double previous = 0;
    int beyond3 = 0;
    for (uint64_t i = 0; i < COUNT; i++) {
        double x = (double)rng_normal(3, rng_stream("init/test"), i);
        assert_true(isfinite(x));
        double power = 1;
        for (int p = 1; p <= 4; p++) {
            sums[p] += power *= x;
        }
        neighbours += x * previous;
        previous = x;
        beyond3 += fabs(x) > 3;
    }
    /* 5 standard errors of each mean: 1, sqrt 2, sqrt 15, sqrt 96, and 1 of the product of neighbours. */
    double error = 5 / sqrt(COUNT);
    assert_true(fabs(sums[1] / COUNT) < error);
    assert_true(fabs(sums[2] / COUNT - 1) < error * sqrt(2));
    assert_true(fabs(sums[3] / COUNT) < error * sqrt(15));
    assert_true(fabs(sums[4] / COUNT - 3) < error * sqrt(96));
    assert_true(fabs(neighbours / COUNT) < error);
    /* P(|x| > 3) = 0.0027: 2831 expected, standard deviation 53. */
    assert_true(abs(beyond3 - 2831) < 265);
}

/* Any first element and any length: the bits of one call an element. */
static void test_many_normals_are_the_single_ones(void **state)
{
    (void)state;
    float values[64];
    for (uint64_t first = 0; first < 9; first++) {
        for (int64_t n = 0; n < 20; n++) {
            values[n] = 77.0f;
            rng_normals(5, 6, first, n, values);
            for (int64_t i = 0; i < n; i++) {
                assert_true(values[i] == rng_normal(5, 6, first + (uint64_t)i));
            }
            assert_true(values[n] == 77.0f);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_known_answers_of_philox),
        cmocka_unit_test(test_streams_are_fnv_1a),
        cmocka_unit_test(test_four_elements_share_a_block_and_updates_do_not),
        cmocka_unit_test(test_order_of_evaluation_does_not_matter),
        cmocka_unit_test(test_uniforms_fill_the_interval_and_stay_below_one),
        cmocka_unit_test(test_normals_have_the_moments_of_a_normal),
        cmocka_unit_test(test_many_normals_are_the_single_ones),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
