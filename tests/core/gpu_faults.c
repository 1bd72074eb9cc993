/* What is said when the GPU or cuBLASLt refuses work: the cause, once. Each case breaks a process of its own; this one
 * never touches CUDA, which must start after a fork. */
#include "core/gemm_cuda.h"

#include "tests/gpu.h"

#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int in_a_process(int (*role)(struct cuda *cuda))
{
    int status;
    if (fork() == 0) {
        struct cuda *cuda;
        _exit(cuda_open(&cuda, 0) != OK ? 99 : role(cuda));
    }
    assert_true(wait(&status) > 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 100;
}

static bool said(const char *words)
{
    return strstr(status_last_message(), words) != NULL;
}

/* C (m, n) = A (m, 64) B^T, all in one piece of memory or at C's own address. */
static struct gemm_cuda product(int64_t m, int64_t n, void *memory, void *c)
{
    return (struct gemm_cuda){.m = m,
                              .n = n,
                              .k = 64,
                              .a = memory,
                              .b = memory,
                              .c = c,
                              .lda = 64,
                              .ldb = 64,
                              .ldc = n,
                              .a_type = DTYPE_BF16,
                              .b_type = DTYPE_BF16,
                              .c_type = DTYPE_BF16,
                              .trans_b = true,
                              .alpha = 1};
}

enum { MEMORY_BYTES = 1 << 20 };

/* More rows than cuBLASLt counts. Planned: an error of the call. Enqueued: kept for the next wait. */
static int role_refused(struct cuda *cuda)
{
    void *memory;
    if (cuda_alloc(&memory, MEMORY_BYTES, "test") != OK) {
        return 1;
    }
    struct gemm_cuda g = product((int64_t)1 << 40, 64, memory, memory);
    if (gemm_cuda_plan(cuda, &g) != ERR_UNSUPPORTED || !said("matrix product 1099511627776 x 64 x 64: cuBLASLt") ||
        !said("CUBLAS_STATUS_")) {
        return 2;
    }
    if (cuda_sync(cuda, "nothing") != OK) { /* a refusal leaves the GPU as it was */
        return 3;
    }
    gemm_cuda(cuda, &g);
    return cuda_sync(cuda, "test") == ERR_DEVICE && said("matrix product 1099511627776 x 64 x 64, CUBLAS_STATUS_") &&
                   said("noticed after test")
               ? 0
               : 4;
}

/* A product writes where nothing is; later ones of other shapes, which ask cuBLASLt anew, must not be what is blamed.
 */
static int role_fault(struct cuda *cuda)
{
    void *memory;
    if (cuda_alloc(&memory, MEMORY_BYTES, "test") != OK) {
        return 1;
    }
    struct gemm_cuda bad = product(64, 128, memory, (void *)(uintptr_t)0x7000000000),
                     after = product(128, 64, memory, memory), planned = product(192, 64, memory, memory);
    gemm_cuda(cuda, &bad);
    nanosleep(&(struct timespec){.tv_nsec = 500000000}, NULL);
    gemm_cuda(cuda, &after);
    if (cuda_sync(cuda, "test") != ERR_DEVICE || said("not supported") || !said("(cudaError") || !said("after test")) {
        return 2;
    }
    return gemm_cuda_plan(cuda, &planned) == ERR_DEVICE && !said("not supported") && said("(cudaError") ? 0 : 3;
}

static void test_a_refused_product_is_named(void **state)
{
    (void)state;
    assert_int_equal(in_a_process(role_refused), 0);
}

static void test_a_fault_is_told_as_what_it_is(void **state)
{
    (void)state;
    assert_int_equal(in_a_process(role_fault), 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_refused_product_is_named),
        cmocka_unit_test(test_a_fault_is_told_as_what_it_is),
    };
    gpu_arguments(argc, argv);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
