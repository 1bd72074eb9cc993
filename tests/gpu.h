/* tests: arrays on the GPU. Every test program opens it once; device arrays carry a guard of NaN codes behind them, and
 * outputs start as NaN codes, so that what was never written, or written past the end, is seen. */
#pragma once

#include "core/cuda.h"
#include "tests/test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GPU_GUARD = 256 };

/* What --small asked for: part `part` of `parts` of the sample. */
struct gpu_sample {
    bool small;
    int part, parts;
};

static inline struct gpu_sample *gpu_sample(void)
{
    static struct gpu_sample sample;
    return &sample;
}

/* Whether --small was given. */
static inline bool *gpu_small(void)
{
    return &gpu_sample()->small;
}

/* The command line of a test program: [--small[=PART/PARTS]] [PATTERN]. The pattern chooses tests by name ('*length*').
 * --small is for compute-sanitizer, under which kernels run hundreds of times slower: tests named *_large are left out,
 * and tables that ask gpu_leaves_out run a sample, or one of several parts of it (0/4, 1/4, 2/4, 3/4), which may run
 * side by side. */
static inline void gpu_arguments(int argc, char **argv)
{
    struct gpu_sample *sample = gpu_sample();
    *sample = (struct gpu_sample){argc > 1 && strncmp(argv[1], "--small", 7) == 0, 0, 1};
    if (sample->small) {
        cmocka_set_skip_filter("*_large");
        if (argv[1][7] != 0 && (sscanf(argv[1], "--small=%d/%d", &sample->part, &sample->parts) != 2 ||
                                sample->part < 0 || sample->part >= sample->parts)) {
            fprintf(stderr, "%s: expected --small=PART/PARTS, from 0/PARTS on, not %s\n", argv[0], argv[1]);
            exit(2);
        }
    }
    const int pattern = sample->small ? 2 : 1;
    if (argc > pattern) {
        cmocka_set_test_filter(argv[pattern]);
    }
}

/* Counts the cases of a table; with --small true for all but one in n, and of those for all but one in `parts`. Take a
 * prime that no inner loop has as its length: then the sample meets all values of each loop. 1: all are in the sample.
 */
static inline bool gpu_leaves_out(int n)
{
    static int count, taken;
    const struct gpu_sample *sample = gpu_sample();
    return sample->small && (count++ % n != 0 || taken++ % sample->parts != sample->part);
}

/* With --small the GPU counts as one of few multiprocessors: kernels that launch as many blocks as there are have them
 * take one tile after the other, as in large cases. */
static inline struct cuda *gpu_open(void)
{
    struct cuda *cuda;
    if (cuda_open(&cuda, 0) != OK) {
        fail_msg("no GPU: %s", status_last_message());
    }
    cuda->multiprocessors = *gpu_small() ? 5 : cuda->multiprocessors;
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
