/* The 16-token transform against its matrix, and that products along tokens survive it. */
#include "tests/test.h"

#include "numerics/hadamard.h"
#include "tests/numerics/oracle.h"

#include <string.h>

enum { ROWS = 16 * 3 + 5, WIDTH = 37, STRIDE = 40 };

static double entry(int row, int token)
{
    int sign = __builtin_popcount((unsigned)(row & token)) + (HADAMARD_SIGNS >> token & 1u ? 1 : 0);
    return sign % 2 ? -0.25 : 0.25;
}

static void fill(float *x, uint64_t *random)
{
    for (int i = 0; i < ROWS * STRIDE; i++) {
        x[i] = (float)((int)(oracle_random(random) % 257) - 128);
    }
}

/* Integers make every sum exact. */
static void test_matrix(void **state)
{
    (void)state;
    static float x[ROWS * STRIDE], y[ROWS * STRIDE];
    uint64_t random = 1;
    fill(x, &random);
    memset(y, 0x7f, sizeof y);
    hadamard16_rows(x, ROWS, WIDTH, STRIDE, y);
    for (int r = 0; r < ROWS; r++) {
        int group = r / 16 * 16;
        for (int c = 0; c < WIDTH; c++) {
            double sum = (double)x[r * STRIDE + c];
            if (group + 16 <= ROWS) {
                sum = 0;
                for (int t = 0; t < 16; t++) {
                    sum += entry(r - group, t) * (double)x[(group + t) * STRIDE + c];
                }
            }
            assert_true((double)y[r * STRIDE + c] == sum);
        }
        assert_int_equal(((uint8_t *)&y[r * STRIDE + WIDTH])[0], 0x7f); /* between the rows nothing is written */
    }
    hadamard16_rows(x, ROWS, WIDTH, STRIDE, x);
    for (int r = 0; r < ROWS; r++) {
        assert_memory_equal(x + r * STRIDE, y + r * STRIDE, WIDTH * sizeof *x);
    }
}

static void test_product(void **state)
{
    (void)state;
    static float a[ROWS * STRIDE], b[ROWS * STRIDE];
    uint64_t random = 2;
    double before[WIDTH] = {0}, after[WIDTH] = {0};
    fill(a, &random);
    fill(b, &random);
    for (int i = 0; i < ROWS * STRIDE; i++) {
        before[i % STRIDE % WIDTH] += i % STRIDE < WIDTH ? (double)a[i] * (double)b[i] : 0.0;
    }
    hadamard16_rows(a, ROWS, WIDTH, STRIDE, a);
    hadamard16_rows(b, ROWS, WIDTH, STRIDE, b);
    for (int i = 0; i < ROWS * STRIDE; i++) {
        after[i % STRIDE % WIDTH] += i % STRIDE < WIDTH ? (double)a[i] * (double)b[i] : 0.0;
    }
    for (int c = 0; c < WIDTH; c++) {
        assert_true(before[c] == after[c]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_matrix), cmocka_unit_test(test_product)};
    return cmocka_run_group_tests_name("numerics/hadamard", tests, NULL, NULL);
}
