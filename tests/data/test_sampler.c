/* The keyed permutation: a bijection for every n, different from epoch to epoch, and the same for ever: a run that is
 * resumed by a later version must read on in the same order. */
#include "tests/test.h"

#include "data/sampler.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static void check_bijection(uint64_t seed, uint64_t epoch, uint64_t n)
{
    bool *hit = calloc(n, sizeof *hit);
    for (uint64_t i = 0; i < n; i++) {
        uint64_t to = sampler_permute(seed, epoch, n, i);
        assert_true(to < n);
        assert_false(hit[to]);
        hit[to] = true;
    }
    free(hit);
}

static void test_bijection_for_every_small_n(void **state)
{
    (void)state;
    for (uint64_t n = 1; n <= 200; n++) {
        for (uint64_t epoch = 0; epoch < 3; epoch++) {
            check_bijection(42, epoch, n);
            check_bijection(n << 40, epoch, n);
        }
    }
}

static void test_bijection_at_powers_of_two_and_beside_them(void **state)
{
    (void)state;
    const uint64_t sizes[] = {1023, 1024, 1025, 4095, 4096, 4097, 65535, 65536, 65537, 300007};
    for (int i = 0; i < 10; i++) {
        check_bijection(7, 1, sizes[i]);
    }
}

/* Feistel networks invert: here distinct inputs must give distinct outputs also where no table fits. */
static int compare(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void test_large_n_stays_inside_and_distinct(void **state)
{
    (void)state;
    enum { COUNT = 20000 };
    const uint64_t sizes[] = {UINT64_C(1) << 32, (UINT64_C(1) << 40) + 5, UINT64_C(1) << 62};
    uint64_t *to = malloc(COUNT * sizeof *to);
    for (int s = 0; s < 3; s++) {
        uint64_t n = sizes[s], low_half = 0;
        for (uint64_t i = 0; i < COUNT; i++) {
            to[i] = sampler_permute(1, 0, n, i < COUNT / 2 ? i : n - COUNT + i);
            assert_true(to[i] < n);
            low_half += to[i] < n / 2;
        }
        assert_true(fabs((double)low_half - COUNT / 2) < 5 * sqrt(COUNT) / 2);
        qsort(to, COUNT, sizeof *to, compare);
        for (int i = 1; i < COUNT; i++) {
            assert_true(to[i] != to[i - 1]);
        }
    }
    free(to);
}

static void test_epochs_and_seeds_give_different_orders(void **state)
{
    (void)state;
    uint64_t same_epoch = 0, same_seed = 0, fixed = 0;
    for (uint64_t i = 0; i < 1000; i++) {
        uint64_t here = sampler_permute(42, 0, 1000, i);
        same_epoch += here == sampler_permute(42, 1, 1000, i);
        same_seed += here == sampler_permute(43, 0, 1000, i);
        fixed += here == i;
        assert_true(here == sampler_permute(42, 0, 1000, i));
    }
    /* Each count is Poisson with mean 1 for random orders. */
    assert_true(same_epoch < 10 && same_seed < 10 && fixed < 10);
}

/* Values of a separate implementation in Python, Philox included, written from docs/file_formats.md. */
static void test_values_are_those_of_the_documentation(void **state)
{
    (void)state;
    const struct {
        uint64_t seed, epoch, n, i, to;
    } values[] = {
        {42, 0, 1, 0, 0},
        {42, 0, 2, 0, 1},
        {42, 0, 10, 0, 3},
        {42, 0, 10, 1, 9},
        {42, 1, 10, 0, 4},
        {42, 0, 680, 679, 678},
        {0, 3, 1000003, 500000, 491956},
        {UINT64_MAX, UINT64_C(1) << 33, (UINT64_C(1) << 40) + 5, (UINT64_C(1) << 40) + 4, UINT64_C(90470957995)},
        {7, 0, UINT64_C(1) << 62, UINT64_C(1) << 61, UINT64_C(4026390636946093717)},
    };
    for (size_t k = 0; k < sizeof values / sizeof values[0]; k++) {
        uint64_t to = sampler_permute(values[k].seed, values[k].epoch, values[k].n, values[k].i);
        assert_true(to == values[k].to);
    }
}

/* Where window 0 goes, over epochs: every place alike (chi-square, 9 and 99 degrees of freedom, 5 sigma). */
static void test_every_place_is_equally_likely(void **state)
{
    (void)state;
    const uint64_t sizes[] = {10, 100};
    for (int s = 0; s < 2; s++) {
        uint64_t n = sizes[s], count[100] = {0}, epochs = 400 * n;
        for (uint64_t epoch = 0; epoch < epochs; epoch++) {
            count[sampler_permute(42, epoch, n, 0)]++;
        }
        double chi2 = 0.0, expected = (double)epochs / (double)n;
        for (uint64_t i = 0; i < n; i++) {
            chi2 += ((double)count[i] - expected) * ((double)count[i] - expected) / expected;
        }
        double freedom = (double)n - 1.0;
        assert_true(fabs(chi2 - freedom) < 5.0 * sqrt(2.0 * freedom));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bijection_for_every_small_n),
        cmocka_unit_test(test_bijection_at_powers_of_two_and_beside_them),
        cmocka_unit_test(test_large_n_stays_inside_and_distinct),
        cmocka_unit_test(test_epochs_and_seeds_give_different_orders),
        cmocka_unit_test(test_values_are_those_of_the_documentation),
        cmocka_unit_test(test_every_place_is_equally_likely),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
