/* bench: clocks of a kernel by the counter of its own multiprocessor, all multiprocessors busy. For *_sm90.cu. */
#pragma once

#include "attention/sm90.cuh"

#include <cstdio>
#include <cstdlib>

enum { WARPS = 8, THREADS = 32 * WARPS, ROUNDS = 1000 };

struct bench {
    float *out;        /* THREADS for each block: sums, so that no result is unused */
    long long *clocks; /* of each block */
    int blocks;        /* one for each multiprocessor */
};

static inline void must(const char *what, cudaError_t error)
{
    if (error != cudaSuccess) {
        fprintf(stderr, "bench: %s: %s\n", what, cudaGetErrorString(error));
        exit(1);
    }
}

static inline struct bench bench_open()
{
    struct bench b = {};
    must("blocks", cudaDeviceGetAttribute(&b.blocks, cudaDevAttrMultiProcessorCount, 0));
    must("output", cudaMalloc(&b.out, (size_t)b.blocks * THREADS * sizeof *b.out));
    must("clocks", cudaMalloc(&b.clocks, (size_t)b.blocks * sizeof *b.clocks));
    return b;
}

/* Clocks of a round of block 0, in the second of two launches. */
template <class KERNEL, class... ARGS>
static double clocks_of(const struct bench &b, KERNEL kernel, size_t shared, ARGS... args)
{
    long long clocks = 0;
    must("shared memory", cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    for (int run = 0; run < 2; run++) {
        kernel<<<b.blocks, THREADS, shared>>>(b.out, b.clocks, args...);
        must("kernel", cudaMemcpy(&clocks, b.clocks, sizeof clocks, cudaMemcpyDeviceToHost));
    }
    return (double)clocks / ROUNDS;
}
