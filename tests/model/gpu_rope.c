/* RoPE on the GPU: the bits of the CPU function, sample after sample; and the largest magnitudes of what it made. */
#include "model/rope.h"

#include "tests/gpu_compare.h"
#include "tests/model/check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

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

/* Bits of the largest magnitude of `heads` heads of each sample of x, by the rule of the header. */
static void largest_of(const bf16 *x, int64_t samples, int64_t length, int64_t stride, int64_t heads, int64_t head_dim,
                       float *amax, int64_t amax_stride)
{
    for (int64_t i = 0; i < samples * heads; i++) {
        const bf16 *head = x + i / heads * length * stride + i % heads * head_dim;
        float most = 0;
        for (int64_t r = 0; r < length; r++) {
            for (int64_t d = 0; d < head_dim; d++) {
                float value = fabsf(bf16_to_float(head[r * stride + d]));
                most = value <= most ? most : value < INFINITY ? value : INFINITY; /* a NaN wins */
            }
        }
        amax[i / heads * amax_stride + i % heads] = most;
    }
}

/* One fused row: heads that turn, then heads beside, then a gap. */
struct measure_case {
    int64_t samples, length, heads, beside, head_dim, gap;
    bool nasty; /* a head of zeros; a NaN and an infinity in two others */
    bool of_all, inverse;
};

static void fill_nasty(bf16 *x, const struct measure_case *c, int64_t stride)
{
    const int64_t rows = c->samples * c->length;
    for (int64_t r = 0; r < rows; r++) {
        memset(x + r * stride, 0, (size_t)c->head_dim * sizeof(bf16));
    }
    x[(rows - 1) * stride + c->head_dim] = 0xffc0; /* in the second head, which turns */
    x[rows / 2 * stride + (c->heads + c->beside) * c->head_dim - 1] = 0xff80;
}

static void check_measure(const struct measure_case *c)
{
    const struct rope_config rope = {.theta = 10000.0f};
    const int64_t rows = c->samples * c->length, all = c->heads + c->beside, D = c->head_dim;
    const int64_t stride = all * D + c->gap, half = D / 2;
    const size_t bytes = (size_t)(rows * stride) * sizeof(bf16), table = (size_t)(c->length * half) * sizeof(float);
    const size_t count = (size_t)(c->samples * all), found = (c->of_all ? 1 : count) * sizeof(float);
    bf16 *x = malloc(bytes), *got = malloc(bytes);
    float *cosine = malloc(table), *sine = malloc(table), *amax = malloc(count * sizeof(float)),
          *got_amax = malloc(found);
    fill_bf16(x, rows * stride, 11, 3.0f);
    if (c->nasty) {
        fill_nasty(x, c, stride);
    }
    rope_table(&rope, (int)D, c->length, cosine, sine);
    void *d_x = gpu_array(cuda, x, bytes), *d_cosine = gpu_array(cuda, cosine, table),
         *d_sine = gpu_array(cuda, sine, table), *d_amax = gpu_array(cuda, NULL, found);
    struct rope_apply a = {.x = d_x,
                           .rows = rows,
                           .row_stride = stride,
                           .heads = c->heads,
                           .head_dim = D,
                           .cosine = d_cosine,
                           .sine = d_sine,
                           .inverse = c->inverse};
    const struct rope_largest largest = {.beside = (const bf16 *)d_x + c->heads * D,
                                         .beside_stride = stride,
                                         .beside_heads = c->beside,
                                         .amax = d_amax,
                                         .of_all = c->of_all};
    rope_measure_cuda(&a, &largest, c->length, cuda);
    gpu_fetch(cuda, got, d_x, bytes);
    gpu_fetch(cuda, got_amax, d_amax, found);
    a.cosine = cosine;
    a.sine = sine;
    a.rows = c->length;
    for (int64_t s = 0; s < c->samples; s++) {
        a.x = x + s * c->length * stride;
        rope_apply_cpu(&a);
    }
    largest_of(x, c->samples, c->length, stride, c->heads, D, amax, all);
    largest_of(x + c->heads * D, c->samples, c->length, stride, c->beside, D, amax + c->heads, all);
    for (size_t i = 1; c->of_all && i < count; i++) {
        amax[0] = amax[i] > amax[0] ? amax[i] : amax[0];
    }
    char what[96];
    snprintf(what, sizeof what, "rope measured, %lld x %lld, %lld + %lld heads of %lld%s", (long long)c->samples,
             (long long)c->length, (long long)c->heads, (long long)c->beside, (long long)D,
             c->of_all ? ", of all" : "");
    compare_bits(what, got, x, bytes, sizeof(bf16));
    compare_bits(what, got_amax, amax, found, sizeof(float));
    free(x);
    free(got);
    free(cosine);
    free(sine);
    free(amax);
    free(got_amax);
    cuda_free(d_x);
    cuda_free(d_cosine);
    cuda_free(d_sine);
    cuda_free(d_amax);
}

static void test_rope_finds_the_largest_of_each_head(void **state)
{
    (void)state;
    static const struct measure_case cases[] = {
        {1, 1, 1, 1, 16, 0, false, false, false},   {1, 1, 2, 1, 128, 8, true, false, false},
        {3, 5, 5, 3, 64, 64, false, false, true},   {2, 37, 40, 8, 128, 0, false, false, false},
        {2, 37, 40, 8, 128, 0, true, false, false}, {1, 130, 3, 2, 32, 8, true, false, false},
        {2, 9, 4, 4, 512, 0, false, true, true},    {1, 200, 10, 2, 128, 0, true, false, false},
        {2, 37, 40, 8, 128, 0, false, true, true},  {3, 33, 5, 2, 128, 8, true, true, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        check_measure(&cases[i]);
    }
    compare_end();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_rope_has_the_bits_of_the_cpu),
                                       cmocka_unit_test(test_rope_finds_the_largest_of_each_head)};
    gpu_arguments(argc, argv);
    cuda = gpu_open();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    cuda_close(cuda);
    return failed;
}
