/* NCCL behind dist: one rank is a no-op; two ranks, where there are two GPUs, add exactly, repeat, agree, do not wait
 * for ever, and do not blame each other for time when they were stopped. Ranks are two processes joined by a socket, so
 * that no MPI is needed; CUDA starts after the fork. */
#include "core/cuda.h"
#include "core/rng.h"
#include "dist/comm_nccl.h"
#include "tests/dist/sockets.h"
#include "tests/test.h"

#include <cuda_runtime_api.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { ELEMENTS = 3000001, BUCKET = 1 << 20 }; /* several buckets, the last one short */

/* Element i of rank r: whole numbers that BF16 holds, so that any order of sums is exact. */
static float whole_number(int rank, size_t i)
{
    return (float)((int)(i % 61) - 30) * (float)(rank + 1);
}

static bool exact_sums(struct comm_nccl *nccl, const struct cuda *cuda, int rank, enum dtype dtype)
{
    size_t bytes = dtype_bytes(dtype);
    char *host = malloc(ELEMENTS * bytes);
    void *device;
    if (host == NULL || cuda_alloc(&device, ELEMENTS * bytes, "test") != OK) {
        return false;
    }
    for (size_t i = 0; i < ELEMENTS; i++) {
        float x = whole_number(rank, i);
        bf16 code = bf16_from_float(x);
        memcpy(host + i * bytes, dtype == DTYPE_F32 ? (void *)&x : (void *)&code, bytes);
    }
    cuda_upload(cuda, device, host, ELEMENTS * bytes);
    comm_nccl_sum(nccl, device, dtype, ELEMENTS);
    cuda_download(cuda, host, device, ELEMENTS * bytes);
    bool right = comm_nccl_wait(nccl, cuda, "test") == OK;
    for (size_t i = 0; i < ELEMENTS && right; i++) {
        float x, wanted = whole_number(0, i) + whole_number(1, i);
        bf16 code;
        memcpy(&x, host + i * bytes, dtype == DTYPE_F32 ? bytes : 0);
        memcpy(&code, host + i * bytes, sizeof code);
        x = dtype == DTYPE_F32 ? x : bf16_to_float(code);
        if (x != wanted) {
            fprintf(stderr, "rank %d, element %zu: expected %g, found %g\n", rank, i, (double)wanted, (double)x);
            right = false;
        }
    }
    free(host);
    cuda_free(device);
    return right;
}

/* Random numbers: twice the same bits, and the same on both ranks. */
static bool repeated_sums(struct comm_nccl *nccl, const struct cuda *cuda, struct comm *comm)
{
    float *host = malloc(2 * ELEMENTS * sizeof *host), *first = host, *second = host + ELEMENTS;
    void *device;
    if (host == NULL || cuda_alloc(&device, ELEMENTS * sizeof *host, "test") != OK) {
        return false;
    }
    for (int run = 0; run < 2; run++) {
        float *x = run == 0 ? first : second;
        rng_normals(1, (uint64_t)comm->rank, 0, ELEMENTS, x);
        cuda_upload(cuda, device, x, ELEMENTS * sizeof *x);
        comm_nccl_sum(nccl, device, DTYPE_F32, ELEMENTS);
        cuda_download(cuda, x, device, ELEMENTS * sizeof *x);
        if (comm_nccl_wait(nccl, cuda, "test") != OK) {
            return false;
        }
    }
    int64_t hash = 0;
    for (size_t i = 0; i < ELEMENTS; i++) {
        uint32_t bits;
        memcpy(&bits, &first[i], sizeof bits);
        hash = (int64_t)((uint64_t)hash * 31 + bits) & INT64_MAX;
    }
    int64_t extremes[2] = {hash, -hash};
    bool right = memcmp(first, second, ELEMENTS * sizeof *first) == 0 && comm_max_i64(comm, extremes, 2) == OK &&
                 extremes[0] == -extremes[1];
    free(host);
    cuda_free(device);
    return right;
}

static int role_sums(struct comm *comm)
{
    struct cuda *cuda;
    struct comm_nccl *nccl;
    if (cuda_open(&cuda, comm->rank) != OK || comm_nccl_open(&nccl, comm, cuda, BUCKET) != OK) {
        return 1;
    }
    /* Waiting asks the runtime whether the GPU is ready, often in vain: that must leave no error behind for the next
     * launch to find. */
    int failed = !exact_sums(nccl, cuda, comm->rank, DTYPE_F32)    ? 2
                 : !exact_sums(nccl, cuda, comm->rank, DTYPE_BF16) ? 3
                 : !repeated_sums(nccl, cuda, comm)                ? 4
                 : cudaPeekAtLastError() != cudaSuccess            ? 5
                                                                   : 0;
    comm_nccl_close(nccl);
    cuda_close(cuda);
    return failed;
}

/* Rank 1 joins and then does nothing until rank 0 has given up and left, which must not take longer than the time-out.
 */
static int role_lost(struct comm *comm)
{
    struct cuda *cuda;
    struct comm_nccl *nccl;
    void *device;
    comm->timeout_s = 3;
    if (cuda_open(&cuda, comm->rank) != OK || comm_nccl_open(&nccl, comm, cuda, BUCKET) != OK ||
        cuda_alloc(&device, ELEMENTS * sizeof(float), "test") != OK) {
        return 1;
    }
    char word = 0;
    if (comm->rank == 1) {
        return comm_recv(comm, &word, 1, 0) == OK ? 0 : 3;
    }
    time_t start = time(NULL);
    comm_nccl_sum(nccl, device, DTYPE_F32, ELEMENTS);
    enum status status = comm_nccl_wait(nccl, cuda, "test");
    bool named = strstr(status_last_message(), "one has died or hangs") != NULL;
    comm_nccl_close(nccl); /* does not wait either, though the sum is still on the GPU */
    bool right = status == ERR_COMM && named && time(NULL) - start < 8;
    return comm_send(comm, &word, 1, 1) == OK && right ? 0 : 2;
}

/* Rank 0 waits for rank 1, and is itself stopped for longer than the time-out: it must wait on when it wakes. The sum
 * that it waits for is enqueued soon after. */
static int role_stopped(struct comm *comm)
{
    struct cuda *cuda;
    struct comm_nccl *nccl;
    void *device;
    if (cuda_open(&cuda, comm->rank) != OK || comm_nccl_open(&nccl, comm, cuda, BUCKET) != OK ||
        cuda_alloc(&device, ELEMENTS * sizeof(float), "test") != OK) {
        return 1;
    }
    comm_nccl_sum(nccl, device, DTYPE_F32, ELEMENTS); /* the first joins the GPUs, which takes its time */
    if (comm_nccl_wait(nccl, cuda, "first sum") != OK) {
        return 2;
    }
    int64_t pid = getpid();
    comm->timeout_s = 4;
    if (comm->rank == 0 && comm_send(comm, &pid, sizeof pid, 1) != OK) {
        return 3;
    }
    if (comm->rank == 1) {
        if (comm_recv(comm, &pid, sizeof pid, 0) != OK) {
            return 3;
        }
        nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
        kill((pid_t)pid, SIGSTOP);
        nanosleep(&(struct timespec){.tv_sec = 5}, NULL);
        kill((pid_t)pid, SIGCONT);
        nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
    }
    comm_nccl_sum(nccl, device, DTYPE_F32, ELEMENTS);
    if (comm_nccl_wait(nccl, cuda, "second sum") != OK) {
        return 4;
    }
    comm_nccl_close(nccl);
    cuda_free(device);
    cuda_close(cuda);
    return 0;
}

static void test_two_ranks_add(void **state)
{
    (void)state;
    if (!sockets_two_gpus()) {
        skip();
    }
    assert_int_equal(sockets_run(role_sums), 0);
}

static void test_a_lost_rank_ends_the_wait(void **state)
{
    (void)state;
    if (!sockets_two_gpus()) {
        skip();
    }
    assert_int_equal(sockets_run(role_lost), 0);
}

static void test_a_stopped_rank_waits_on(void **state)
{
    (void)state;
    if (!sockets_two_gpus()) {
        skip();
    }
    assert_int_equal(sockets_run(role_stopped), 0);
}

/* Last: from here on this process has CUDA. */
static void test_one_rank_needs_no_library(void **state)
{
    (void)state;
    struct comm comm = {.rank = 0, .size = 1, .timeout_s = 60};
    struct comm_nccl *nccl = (struct comm_nccl *)1;
    struct cuda *cuda;
    float x = 1.5F, y = 0;
    void *device;
    assert_int_equal(cuda_open(&cuda, 0), OK);
    assert_int_equal(cuda_alloc(&device, sizeof x, "test"), OK);
    assert_int_equal(comm_nccl_open(&nccl, &comm, cuda, BUCKET), OK);
    assert_null(nccl);
    cuda_upload(cuda, device, &x, sizeof x);
    comm_nccl_sum(nccl, device, DTYPE_F32, 1);
    cuda_download(cuda, &y, device, sizeof y);
    assert_int_equal(cuda_sync(cuda, "test"), OK);
    assert_true(x == y);
    comm_nccl_close(nccl);
    cuda_free(device);
    cuda_close(cuda);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_two_ranks_add),
        cmocka_unit_test(test_a_lost_rank_ends_the_wait),
        cmocka_unit_test(test_a_stopped_rank_waits_on),
        cmocka_unit_test(test_one_rank_needs_no_library),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
