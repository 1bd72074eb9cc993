/* tests: arrays on the GPU. Every test program opens it once; device arrays carry a guard of NaN codes behind them, and
 * outputs start as NaN codes, so that what was never written, or written past the end, is seen. */
#pragma once

#include "core/cuda.h"
#include "tests/test.h"

#include <stdlib.h>
#include <string.h>

enum { GPU_GUARD = 256 };

/* Whether --small was given. */
static inline bool *gpu_small(void)
{
    static bool small;
    return &small;
}

/* The command line of a test program: [--small] [PATTERN]. The pattern chooses tests by name ('*length*'). --small is
 * for compute-sanitizer, under which kernels run hundreds of times slower: tests named *_large are left out, and tables
 * that ask gpu_leaves_out run a sample. */
static inline void gpu_arguments(int argc, char **argv)
{
    *gpu_small() = argc > 1 && strcmp(argv[1], "--small") == 0;
    int pattern = *gpu_small() ? 2 : 1;
    if (*gpu_small()) {
        cmocka_set_skip_filter("*_large");
    }
    if (argc > pattern) {
        cmocka_set_test_filter(argv[pattern]);
    }
}

/* Counts the cases of a table; with --small true for all but one in n. Take a prime that no inner loop has as its
 * length: then the sample meets all values of each loop. */
static inline bool gpu_leaves_out(int n)
{
    static int count;
    return *gpu_small() && count++ % n != 0;
}

static inline struct cuda *gpu_open(void)
{
    struct cuda *cuda;
    if (cuda_open(&cuda, 0) != OK) {
        fail_msg("no GPU: %s", status_last_message());
    }
    return cuda;
}

/* `bytes` of device memory and a guard, all 0xff; then `host` (if any) copied in. */
static inline void *gpu_array(const struct cuda *cuda, const void *host, size_t bytes)
{
    void *device;
    unsigned char *fill = malloc(bytes + GPU_GUARD);
    assert_non_null(fill);
    memset(fill, 0xff, bytes + GPU_GUARD);
    if (host != NULL) {
        memcpy(fill, host, bytes);
    }
    assert_int_equal(cuda_alloc(&device, bytes + GPU_GUARD, "test array"), OK);
    cuda_upload(cuda, device, fill, bytes + GPU_GUARD);
    assert_int_equal(cuda_sync(cuda, "test upload"), OK);
    free(fill);
    return device;
}

/* Waits, copies back, checks the guard. */
static inline void gpu_fetch(const struct cuda *cuda, void *host, const void *device, size_t bytes)
{
    unsigned char guard[GPU_GUARD];
    cuda_download(cuda, host, device, bytes);
    cuda_download(cuda, guard, (const char *)device + bytes, GPU_GUARD);
    assert_int_equal(cuda_sync(cuda, "test kernels"), OK);
    for (int i = 0; i < GPU_GUARD; i++) {
        assert_int_equal(guard[i], 0xff);
    }
}
