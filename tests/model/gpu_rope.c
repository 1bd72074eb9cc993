/* RoPE on the GPU: the bits of the CPU function, sample after sample. */
#include "model/rope.h"

#include "tests/gpu_compare.h"
#include "tests/model/check.h"

#include <stdlib.h>

static struct cuda *cuda;

static void check_rope(int64_t rows, int64_t length, int64_t heads, int64_t head_dim, int64_t gap, bool inverse)
{
    const struct rope_config rope = {.theta = 10000.0f};
    const int64_t stride = heads * head_dim + gap, half = head_dim / 2;
    const size_t bytes = (size_t)(rows * stride) * sizeof(bf16), table = (size_t)(length * half) * sizeof(float);
    bf16 *x = malloc(bytes), *got = malloc(bytes);
    float *cosine = malloc(table), *sine = malloc(table);
    fill_bf16(x, rows * stride, 7, 3.0f);
    x[0] = 0x7fc0; /* NaN, Inf */
    x[stride - gap - 1] = 0x7f80;
    rope_table(&rope, (int)head_dim, length, cosine, sine);
    void *d_x = gpu_array(cuda, x, bytes), *d_cosine = gpu_array(cuda, cosine, table),
         *d_sine = gpu_array(cuda, sine, table);
    struct rope_apply a = {.x = d_x,
                           .rows = rows,
                           .row_stride = stride,
                           .heads = heads,
                           .head_dim = head_dim,
                           .cosine = d_cosine,
                           .sine = d_sine,
                           .inverse = inverse};
    rope_apply_cuda(&a, length, cuda);
    gpu_fetch(cuda, got, d_x, bytes);
    a.cosine = cosine;
    a.sine = sine;
    for (int64_t r = 0; r < rows; r += length) {
        a.x = x + r * stride;
        a.rows = rows - r < length ? rows - r : length;
        rope_apply_cpu(&a);
    }
    char what[96];
    snprintf(what, sizeof what, "rope rows %lld of %lld, %lld heads of %lld%s", (long long)rows, (long long)length,
             (long long)heads, (long long)head_dim, inverse ? ", inverse" : "");
    compare_bits(what, got, x, bytes, sizeof(bf16));
    free(x);
    free(got);
    free(cosine);
    free(sine);
    cuda_free(d_x);
    cuda_free(d_cosine);
    cuda_free(d_sine);
}

static void test_rope_has_the_bits_of_the_cpu(void **state)
{
    (void)state;
    for (int inverse = 0; inverse < 2; inverse++) {
        check_rope(1, 1, 1, 16, 0, inverse);
        check_rope(1, 4, 1, 128, 8, inverse);
        check_rope(37, 16, 5, 64, 64, inverse); /* two samples and a piece, five heads */
        check_rope(70, 35, 40, 128, 1024, inverse);
        check_rope(9, 9, 3, 48, 0, inverse);
    }
    compare_end();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_rope_has_the_bits_of_the_cpu)};
    gpu_arguments(argc, argv);
    cuda = gpu_open();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    cuda_close(cuda);
    return failed;
}
