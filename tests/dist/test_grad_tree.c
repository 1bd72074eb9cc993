/* grad_tree: against a plain recursion over all leaves, in one process and over ranks. */
#include "core/rng.h"
#include "core/tensor.h"
#include "dist/grad_tree.h"
#include "tests/dist/ranks.h"
#include "tests/test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ELEMENTS = 1003, LEAVES_MAX = 16 };

/* Wide exponents and both signs: every order of adding gives other bits. */
static float leaf_value(int64_t leaf, size_t i)
{
    float u = rng_uniform(11, rng_stream("leaf"), (uint32_t)leaf, i);
    return (u - 0.5f) * exp2f((float)(i % 20) - 10.0f * u);
}

static float rounded(float x, bool to_bf16)
{
    return to_bf16 ? bf16_to_float(bf16_from_float(x)) : x;
}

/* The tree over leaves [first, first + n), restated from its definition: halves while n is even; an odd n is padded to
 * `width`, a power of two. NaN stands for padding. */
static float padded_tree(int64_t first, int64_t n, int64_t width, size_t i, bool to_bf16)
{
    if (n <= 0) {
        return NAN;
    }
    if (width == 1) {
        return rounded(leaf_value(first, i), to_bf16);
    }
    float left = padded_tree(first, n < width / 2 ? n : width / 2, width / 2, i, to_bf16);
    float right = padded_tree(first + width / 2, n - width / 2, width / 2, i, to_bf16);
    return isnan(right) ? left : rounded(left + right, to_bf16);
}

static float plain_tree(int64_t first, int64_t n, size_t i, bool to_bf16)
{
    if (n % 2 == 0) {
        return rounded(plain_tree(first, n / 2, i, to_bf16) + plain_tree(first + n / 2, n / 2, i, to_bf16), to_bf16);
    }
    int64_t width = 1;
    while (width < n) {
        width *= 2;
    }
    return padded_tree(first, n, width, i, to_bf16);
}

/* Reduces `leaves` leaves of this rank twice (a tree is used again for the next update); counts elements that differ
 * from the recursion over the leaves of all ranks. -1: a call failed. */
static int differences(struct comm *comm, int64_t leaves, bool to_bf16)
{
    struct arena measure, arena;
    struct grad_tree tree;
    arena_measure(&measure, "gradients");
    if (grad_tree_plan(&tree, &measure, comm, ELEMENTS, leaves, to_bf16) != OK) {
        return -1;
    }
    grad_tree_close(&tree);
    if (arena_open(&arena, "gradients", measure.used) != OK ||
        grad_tree_plan(&tree, &arena, comm, ELEMENTS, leaves, to_bf16) != OK) {
        return -1;
    }
    int wrong = 0;
    for (int update = 0; update < 2; update++) {
        for (int64_t k = 0; k < leaves; k++) {
            float *leaf = grad_tree_leaf(&tree);
            for (size_t i = 0; i < ELEMENTS; i++) {
                leaf[i] = leaf_value(comm->rank * leaves + k, i);
            }
            grad_tree_push(&tree);
        }
        float *sum = NULL;
        if (grad_tree_sum(&tree, &sum) != OK) {
            return -1;
        }
        for (size_t i = 0; i < ELEMENTS; i++) {
            float expected = plain_tree(0, leaves * comm->size, i, to_bf16);
            wrong += memcmp(&expected, &sum[i], sizeof expected) != 0;
        }
    }
    grad_tree_close(&tree);
    arena_close(&arena);
    return wrong;
}

static void test_one_rank_equals_the_recursion(void **state)
{
    (void)state;
    struct comm comm;
    assert_int_equal(comm_open(&comm, NULL, NULL, 5), OK);
    for (int64_t leaves = 1; leaves <= LEAVES_MAX; leaves++) {
        assert_int_equal(differences(&comm, leaves, false), 0);
        assert_int_equal(differences(&comm, leaves, true), 0);
    }
    comm_close(&comm);
}

static void test_buffers_are_log2_of_the_leaves_plus_one(void **state)
{
    (void)state;
    struct comm comm;
    assert_int_equal(comm_open(&comm, NULL, NULL, 5), OK);
    for (int64_t leaves = 1, levels = 1; leaves <= 1024; leaves *= 2, levels++) {
        struct arena measure;
        struct grad_tree tree;
        arena_measure(&measure, "gradients");
        assert_int_equal(grad_tree_plan(&tree, &measure, &comm, 64, leaves, false), OK);
        assert_int_equal(tree.levels, levels);
        grad_tree_close(&tree);
    }
    comm_close(&comm);
}

static void test_no_leaves_are_refused(void **state)
{
    (void)state;
    struct comm comm;
    struct arena measure;
    struct grad_tree tree;
    assert_int_equal(comm_open(&comm, NULL, NULL, 5), OK);
    arena_measure(&measure, "gradients");
    assert_int_equal(grad_tree_plan(&tree, &measure, &comm, 64, 0, false), ERR_CONFIG);
    assert_non_null(strstr(status_last_message(), "at least 1"));
    comm_close(&comm);
}

static void test_2_and_4_ranks_equal_the_recursion(void **state)
{
    (void)state;
    assert_int_equal(ranks_run(2, "tree"), 0);
    assert_int_equal(ranks_run(4, "tree"), 0);
}

static void test_3_ranks_are_refused_with_the_remedy(void **state)
{
    (void)state;
    assert_int_equal(ranks_run(3, "tree"), 1);
    assert_non_null(strstr(ranks_output, "found 3: start 2 or 4"));
}

static void test_unequal_leaves_are_refused_with_the_remedy(void **state)
{
    (void)state;
    assert_int_equal(ranks_run(2, "unequal"), 1);
    assert_non_null(strstr(ranks_output, "found 3 to 4"));
}

static int run_role(const char *role, int *argc, char ***argv)
{
    struct comm comm = {0};
    if (comm_open(&comm, argc, argv, 20) != OK) {
        return 100;
    }
    bool unequal = strcmp(role, "unequal") == 0;
    for (int64_t leaves = 1; leaves * comm.size <= LEAVES_MAX; leaves++) {
        for (int to_bf16 = 0; to_bf16 < 2; to_bf16++) {
            int wrong = differences(&comm, unequal ? 3 + comm.rank : leaves, to_bf16 == 1);
            if (wrong != 0) {
                comm_abort(&comm, wrong < 0 ? 1 : 9);
            }
        }
    }
    comm_close(&comm);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc > 1) {
        return run_role(argv[1], &argc, &argv);
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_rank_equals_the_recursion),
        cmocka_unit_test(test_buffers_are_log2_of_the_leaves_plus_one),
        cmocka_unit_test(test_no_leaves_are_refused),
        cmocka_unit_test(test_2_and_4_ranks_equal_the_recursion),
        cmocka_unit_test(test_3_ranks_are_refused_with_the_remedy),
        cmocka_unit_test(test_unequal_leaves_are_refused_with_the_remedy),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
