/* Embedding on the GPU: the bits of the CPU function, for lists of every kind: single, a warp's, a block's, longer; in
 * both gradient types, in two calls as in one. */
#include "model/embedding.h"

#include "tests/gpu_compare.h"
#include "tests/model/check.h"

#include <stdlib.h>

static struct cuda *cuda;

/* One token in `hot_every` places is token 3, one in 16 token 5, one in 200 token 7, the rest are spread. */
static void fill_tokens(int32_t *tokens, int64_t count, int64_t vocab, int hot_every)
{
    for (int64_t t = 0; t < count; t++) {
        uint32_t x = (uint32_t)t * 2654435761u;
        x ^= x >> 15;
        x *= 2246822519u;
        x ^= x >> 13;
        tokens[t] = (int32_t)(x % (uint32_t)hot_every == 0 ? 3 : x % 16 == 1 ? 5 : x % 200 == 2 ? 7 : x / 256 % vocab);
    }
}

static void check_embedding(int64_t count, int64_t vocab, int64_t width, int hot_every, enum dtype type)
{
    const int64_t weights = vocab * width;
    const size_t row_bytes = (size_t)(count * width) * sizeof(bf16), grad_bytes = (size_t)weights * dtype_bytes(type);
    const size_t scratch_bytes = embedding_bwd_scratch_bytes_cuda(count, vocab);
    int32_t *tokens = malloc((size_t)count * 4), *last_seen = malloc((size_t)vocab * 4),
            *next = malloc((size_t)count * 4);
    bf16 *weight = malloc((size_t)weights * sizeof(bf16)), *rows = malloc(row_bytes), *got_rows = malloc(row_bytes);
    float *want = malloc((size_t)weights * sizeof(float)), *got = malloc(grad_bytes), *again = malloc(grad_bytes);
    fill_tokens(tokens, count, vocab, hot_every);
    fill_bf16(weight, weights, 1, 1.0f);
    char what[96];
    snprintf(what, sizeof what, "embedding %lld tokens of %lld, width %lld, one in %d hot, %s", (long long)count,
             (long long)vocab, (long long)width, hot_every, type == DTYPE_BF16 ? "bf16" : "fp32");

    void *d_tokens = gpu_array(cuda, tokens, (size_t)count * 4),
         *d_weight = gpu_array(cuda, weight, (size_t)weights * 2);
    void *d_rows = gpu_array(cuda, NULL, row_bytes), *d_scratch = gpu_array(cuda, NULL, scratch_bytes);
    embedding_fwd_cpu(weight, tokens, count, vocab, width, rows);
    embedding_fwd_cuda(d_weight, d_tokens, count, vocab, width, d_rows, cuda);
    gpu_fetch(cuda, got_rows, d_rows, row_bytes);
    compare_bits(what, got_rows, rows, row_bytes, sizeof(bf16));

    /* The weights serve as the gradient that is added to. */
    fill_bf16(rows, count * width, 2, 1.0f);
    cuda_upload(cuda, d_rows, rows, row_bytes);
    for (int64_t i = 0; i < weights; i++) {
        want[i] = bf16_to_float(weight[i]);
    }
    const void *start = type == DTYPE_BF16 ? (const void *)weight : want;
    void *d_grad = gpu_array(cuda, start, grad_bytes);
    struct embedding_bwd a = {.tokens = d_tokens,
                              .count = count,
                              .vocab = vocab,
                              .width = width,
                              .dout = d_rows,
                              .dweight = d_grad,
                              .grad_type = type,
                              .scratch = d_scratch};
    for (int run = 0; run < 2; run++) {
        cuda_upload(cuda, d_grad, start, grad_bytes);
        embedding_bwd_cuda(&a, cuda);
        gpu_fetch(cuda, run ? again : got, d_grad, grad_bytes);
    }
    compare_guard(cuda, d_scratch, scratch_bytes);
    a.tokens = tokens;
    a.dout = rows;
    a.dweight = want;
    a.last_seen = last_seen;
    a.next = next;
    embedding_bwd_cpu(&a);
    if (type == DTYPE_BF16) {
        for (int64_t i = 0; i < weights; i++) {
            ((bf16 *)want)[i] = bf16_from_float(want[i]);
        }
    }
    compare_bits(what, got, want, grad_bytes, dtype_bytes(type));
    compare_bits("embedding twice", again, got, grad_bytes, dtype_bytes(type));
    void *host[] = {tokens, last_seen, next, weight, rows, got_rows, want, got, again};
    void *device[] = {d_tokens, d_weight, d_rows, d_scratch, d_grad};
    for (size_t i = 0; i < sizeof host / sizeof *host; i++) {
        free(host[i]);
    }
    for (size_t i = 0; i < sizeof device / sizeof *device; i++) {
        cuda_free(device[i]);
    }
}

static void test_embedding_has_the_bits_of_the_cpu(void **state)
{
    (void)state;
    for (int t = 0; t < 2; t++) {
        enum dtype type = t ? DTYPE_BF16 : DTYPE_F32;
        check_embedding(1, 8, 8, 9, type);
        check_embedding(33, 16, 64, 9, type);
        check_embedding(700, 320, 520, 9, type);
        check_embedding(5000, 4001, 264, 2, type);
        check_embedding(5000, 320, 64, 1, type); /* one token only */
    }
    check_embedding(40000, 100003, 64, 7, DTYPE_F32);
    compare_end();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_embedding_has_the_bits_of_the_cpu)};
    gpu_arguments(argc, argv);
    cuda = gpu_open();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    cuda_close(cuda);
    return failed;
}
