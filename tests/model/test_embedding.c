/* Embedding: rows are copied; gradients of a repeated token are its rows' sum in token order, added once. */
#include "model/embedding.h"

#include "tests/model/check.h"

#include "tests/test.h"

#include <string.h>

enum { V = 11, C = 70, T = 9 };
static const int32_t tokens[T] = {3, 10, 3, 0, 3, 10, 7, 0, 3};

static void test_rows_are_copied(void **state)
{
    (void)state;
    bf16 weight[V * C], out[T * C];
    fill_bf16(weight, V * C, 1, 1);
    embedding_fwd_cpu(weight, tokens, T, V, C, out);
    for (int t = 0; t < T; t++) {
        assert_memory_equal(out + t * C, weight + tokens[t] * C, C * sizeof *out);
    }
}

static void test_gradient_sums_tokens_in_order_then_adds_once(void **state)
{
    (void)state;
    bf16 dout[T * C];
    float dweight[V * C], want[V * C];
    int32_t last_seen[V], next[T];
    fill_bf16(dout, T * C, 1, 1);
    memset(last_seen, 0x7f, sizeof last_seen); /* scratch: its content must not matter */
    for (int i = 0; i < V * C; i++) {
        dweight[i] = want[i] = (float)(i % 13) * 0.37f;
    }
    for (int v = 0; v < V; v++) {
        for (int c = 0; c < C; c++) {
            float sum = 0;
            for (int t = 0; t < T; t++) {
                sum += tokens[t] == v ? bf16_to_float(dout[t * C + c]) : 0;
            }
            want[v * C + c] += sum;
        }
    }
    embedding_bwd_cpu(&(struct embedding_bwd){.tokens = tokens,
                                              .count = T,
                                              .vocab = V,
                                              .width = C,
                                              .dout = dout,
                                              .dweight = dweight,
                                              .last_seen = last_seen,
                                              .next = next});
    assert_memory_equal(dweight, want, sizeof want);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows_are_copied),
        cmocka_unit_test(test_gradient_sums_tokens_in_order_then_adds_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
