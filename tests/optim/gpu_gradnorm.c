/* The gradient norm on the GPU: the bits of the CPU function, and the same first bad gradient. */
#include "optim/gradnorm.h"

#include "tests/gpu_compare.h"

#include <stdlib.h>

static struct cuda *cuda;

/* Beside whole blocks: pieces, an empty segment, one at an odd address, one of more than 1024 blocks. */
enum { FIRST = 4096 * 5 + 3, SECOND = 70, THIRD = 4096 * 1100 + 8, GAP = 61, FLAT = FIRST + GAP + SECOND + THIRD };
static const struct adamw_segment segments[] = {
    {.name = "a", .offset = 0, .elements = FIRST},
    {.name = "empty", .offset = FIRST, .elements = 0},
    {.name = "b", .offset = FIRST + GAP, .elements = SECOND},
    {.name = "c", .offset = FIRST + GAP + SECOND, .elements = THIRD},
};
enum { SEGMENTS = sizeof segments / sizeof *segments };

static void fill(float *grads, enum dtype type)
{
    for (uint32_t i = 0; i < FLAT; i++) {
        float x = (float)(int32_t)(i * 2654435761u) * 0x1p-31f * (i % 5 == 0 ? 1e-19f : i % 7 == 0 ? 1e3f : 1.0f);
        grads[i] = type == DTYPE_BF16 ? bf16_to_float(bf16_from_float(x)) : x;
    }
    for (size_t i = FIRST; i < FIRST + GAP; i++) {
        grads[i] = NAN; /* outside all segments: not looked at */
    }
}

static void check_norm(const char *what, const float *grads, enum dtype type)
{
    const size_t bytes = FLAT * dtype_bytes(type), plan_bytes = adamw_plan_bytes_cuda(segments, SEGMENTS);
    struct adamw_cuda planned = {.weights = (bf16 *)grads}; /* the plan does not look at it */
    struct gradnorm got, again, want = gradnorm_of(grads, segments, SEGMENTS);
    bf16 *narrow = malloc(FLAT * sizeof *narrow);
    for (size_t i = 0; i < FLAT; i++) {
        narrow[i] = bf16_from_float(grads[i]);
    }
    void *plan = gpu_array(cuda, NULL, plan_bytes), *result = gpu_array(cuda, NULL, sizeof got);
    void *d_grads = gpu_array(cuda, type == DTYPE_BF16 ? (const void *)narrow : grads, bytes);
    adamw_plan_cuda(&planned, &(struct adamw_config){0}, segments, SEGMENTS, plan, cuda);
    const size_t scratch_bytes = gradnorm_scratch_bytes_cuda(planned.blocks, SEGMENTS);
    void *scratch = gpu_array(cuda, NULL, scratch_bytes);
    struct gradnorm_cuda a = {.plan = planned.plan,
                              .blocks = planned.blocks,
                              .n_segments = SEGMENTS,
                              .grads = d_grads,
                              .grad_type = type,
                              .scratch = scratch,
                              .result = result};
    gradnorm_cuda(&a, cuda);
    gpu_fetch(cuda, &got, result, sizeof got);
    gradnorm_cuda(&a, cuda);
    gpu_fetch(cuda, &again, result, sizeof again);
    compare_guard(cuda, scratch, scratch_bytes);
    const bool same_norm = got.norm == want.norm || (isnan(got.norm) && isnan(want.norm));
    if (!same_norm || got.non_finite != want.non_finite || got.bad_segment != want.bad_segment ||
        got.bad_element != want.bad_element) {
        printf("  FAILED %s: norm %.17g, %lld bad, first %d:%zu; expected %.17g, %lld, %d:%zu\n", what, got.norm,
               (long long)got.non_finite, got.bad_segment, got.bad_element, want.norm, (long long)want.non_finite,
               want.bad_segment, want.bad_element);
        compare_failures++;
    }
    if (!isnan(got.norm)) {
        compare_bits("norm twice", &again.norm, &got.norm, sizeof got.norm, sizeof got.norm);
    }
    free(narrow);
    void *device[] = {plan, result, d_grads, scratch};
    for (int i = 0; i < 4; i++) {
        cuda_free(device[i]);
    }
}

static void test_norm_has_the_bits_of_the_cpu(void **state)
{
    (void)state;
    float *grads = malloc(FLAT * sizeof *grads);
    for (int t = 0; t < 2; t++) {
        const enum dtype type = t ? DTYPE_BF16 : DTYPE_F32;
        fill(grads, type);
        check_norm(t ? "bf16" : "fp32", grads, type);
        grads[FLAT - 1] = INFINITY;
        check_norm("last is Inf", grads, type);
        grads[FIRST + GAP + SECOND + 4096 * 1024 + 77] = -INFINITY;
        grads[FIRST + GAP + SECOND + 4096 * 1024 + 79] = NAN;
        check_norm("three in the last segment", grads, type);
        grads[FIRST + GAP + 5] = NAN;
        check_norm("one more in a short segment", grads, type);
        for (int i = 4096 * 5; i < FIRST; i++) {
            grads[i] = INFINITY;
        }
        check_norm("the last piece of the first segment", grads, type);
        grads[0] = NAN;
        check_norm("the first of all", grads, type);
    }
    free(grads);
    compare_end();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_norm_has_the_bits_of_the_cpu)};
    gpu_arguments(argc, argv);
    cuda = gpu_open();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    cuda_close(cuda);
    return failed;
}
