/* bench: rates of the instructions that attention on Hopper is built of (docs/results/attention_sm90.md).
 *
 *   build/release/bench/instructions_sm90
 *
 * Clocks of one multiprocessor by its own counter, eight warps at work, all 132 busy; for wgmma also the share of the
 * dense rate (4096 BF16 or 8192 FP8 operations a clock). Additions to global memory in TB/s by events. */
#include "attention/sm90.cuh"
#include "core/cuda.cuh"

#include <cstdio>
#include <cstdlib>

enum { WARPS = 8, THREADS = 32 * WARPS, SHARED = 200 * 1024, ROUNDS = 1000 };

static void must(const char *what, cudaError_t error)
{
    if (error != cudaSuccess) {
        fprintf(stderr, "instructions_sm90: %s: %s\n", what, cudaGetErrorString(error));
        exit(1);
    }
}

/* ---- wgmma: each of two warpgroups multiplies 64 x N by 128 bytes of K, ROUNDS times ---- */

enum operands { BF16_SS, BF16_RS, E4M3_SS, E4M3_RS, E5M2_RS };

template <int N, operands KIND>
__global__ void __launch_bounds__(THREADS, 1) product_kernel(float *out, long long *clocks)
{
    extern __shared__ unsigned char raw[];
    uint32_t base = (shared_address(raw) + 1023) / 1024 * 1024;
    for (int i = threadIdx.x; i < 128 * 1024 / 4; i += THREADS) {
        reinterpret_cast<uint32_t *>(raw)[i] = 0x38380000u + (uint32_t)(i * 2654435761u >> 20);
    }
    fence_async_proxy();
    __syncthreads();
    float d[N / 2] = {};
    uint32_t p[16];
    for (int i = 0; i < 16; i++) {
        p[i] = 0x38383838u + threadIdx.x + i;
    }
    uint64_t a = operand_k_major(base + threadIdx.x / 128 * 16384), b = operand_k_major(base + 65536);
    long long start = clock64();
    for (int round = 0; round < ROUNDS; round++) {
        wgmma_pin(d);
        wgmma_pin(p);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint64_t a_k = operand_advance(a, 32 * k), b_k = operand_advance(b, 32 * k);
            if constexpr (KIND == BF16_SS) {
                wgmma_bf16<N>::template ss<0, 0>(d, a_k, b_k, 1);
            } else if constexpr (KIND == BF16_RS) {
                wgmma_bf16<N>::template rs<0>(d, p + 4 * k, b_k, 1);
            } else if constexpr (KIND == E4M3_SS) {
                wgmma_e4m3<N>::ss(d, a_k, b_k, 1);
            } else if constexpr (KIND == E4M3_RS) {
                wgmma_e4m3<N>::rs(d, p + 4 * k, b_k, 1);
            } else {
                wgmma_e5m2_e4m3<N>::rs(d, p + 4 * k, b_k, 1);
            }
        }
        wgmma_commit();
        wgmma_wait<0>();
    }
    long long stop = clock64();
    float sum = 0;
    for (int i = 0; i < N / 2; i++) {
        sum += d[i];
    }
    out[blockIdx.x * THREADS + threadIdx.x] = sum;
    if (threadIdx.x == 0) {
        clocks[blockIdx.x] = stop - start;
    }
}

struct bench {
    float *out;
    long long *clocks;
    int blocks;
};

/* The second of two launches. */
template <class KERNEL, class... ARGS>
static double clocks_of(const bench &b, KERNEL kernel, size_t shared, ARGS... args)
{
    long long clocks = 0;
    must("shared memory", cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    for (int run = 0; run < 2; run++) {
        kernel<<<b.blocks, THREADS, shared>>>(b.out, b.clocks, args...);
        must("kernel", cudaMemcpy(&clocks, b.clocks, sizeof clocks, cudaMemcpyDeviceToHost));
    }
    return (double)clocks / ROUNDS;
}

template <int N, operands KIND> static void product(const bench &b, const char *name)
{
    bool wide = KIND == BF16_SS || KIND == BF16_RS;
    double clocks = clocks_of(b, product_kernel<N, KIND>, SHARED),
           ideal = 2.0 * 64 * N * 2 * (wide ? 64 / 4096.0 : 128 / 8192.0);
    printf("| m64n%-3d %-30s | %7.1f | %5.2f of the dense rate |\n", N, name, clocks, ideal / clocks);
}

/* ---- other instructions: 64 independent ones a round in each warp ---- */

enum instruction { EX2, FMA, MAX, ADD, E4M3_F16, PRMT, SHFL, INSTRUCTIONS };
static const char *const instruction_names[] = {"ex2.approx.ftz.f32", "fma.rn.f32", "max.f32",  "add.f32",
                                                "cvt f16x2.e4m3x2",   "prmt.b32",   "shfl.bfly"};

template <int KIND>
__global__ void __launch_bounds__(THREADS, 1) instruction_kernel(float *out, long long *clocks, float c)
{
    float x[16];
    uint32_t u[16];
    for (int i = 0; i < 16; i++) {
        x[i] = (float)threadIdx.x * 0.01f + (float)i * c;
        u[i] = __float_as_uint(x[i]);
    }
    long long start = clock64();
    for (int round = 0; round < ROUNDS; round++) {
#pragma unroll
        for (int i = 0; i < 64; i++) {
            float &f = x[i % 16];
            uint32_t &w = u[i % 16];
            const float g = x[(i + 5) % 16];
            if (KIND == EX2) {
                asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(f));
            } else if (KIND == FMA) {
                asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(f) : "f"(c), "f"(g));
            } else if (KIND == MAX) {
                asm volatile("max.f32 %0, %0, %1;" : "+f"(f) : "f"(g));
            } else if (KIND == ADD) {
                asm volatile("add.f32 %0, %0, %1;" : "+f"(f) : "f"(g));
            } else if (KIND == E4M3_F16) {
                unsigned short half = (unsigned short)w;
                asm volatile("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(w) : "h"(half));
            } else if (KIND == PRMT) {
                asm volatile("prmt.b32 %0, %0, %1, 0x5410;" : "+r"(w) : "r"(u[(i + 5) % 16]));
            } else {
                asm volatile("shfl.sync.bfly.b32 %0, %0, 1, 31, 0xffffffff;" : "+f"(f));
            }
        }
    }
    long long stop = clock64();
    float sum = 0;
    for (int i = 0; i < 16; i++) {
        sum += x[i] + __uint_as_float(u[i]);
    }
    out[blockIdx.x * THREADS + threadIdx.x] = sum;
    if (threadIdx.x == 0) {
        clocks[blockIdx.x] = stop - start;
    }
}

template <int KIND> static void instructions(const bench &b)
{
    /* 64 instructions of two warps a scheduler. */
    printf("| %-38s | %7.2f | clocks a warp instruction and scheduler |\n", instruction_names[KIND],
           clocks_of(b, instruction_kernel<KIND>, 0, 1.5f) / (64 * WARPS / 4));
    if constexpr (KIND + 1 < INSTRUCTIONS) {
        instructions<KIND + 1>(b);
    }
}

/* ---- additions to an FP32 array in global memory: by threads, 16 bytes each, or in bulk from shared memory ---- */

enum { TILE_BYTES = 16 * 1024 };

static __global__ void __launch_bounds__(THREADS) red_kernel(float *sum, int64_t tiles)
{
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        for (int i = threadIdx.x; i < TILE_BYTES / 16; i += THREADS) {
            float *to = sum + tile * (TILE_BYTES / 4) + i * 4;
            asm volatile("red.global.add.v4.f32 [%0], {%1, %1, %1, %1};" ::"l"(to), "f"(1.0f) : "memory");
        }
    }
}

static __global__ void __launch_bounds__(THREADS) bulk_kernel(float *sum, int64_t tiles)
{
    extern __shared__ __align__(128) float staged[];
    for (int i = threadIdx.x; i < TILE_BYTES / 4; i += THREADS) {
        staged[i] = 1.0f;
    }
    fence_async_proxy();
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            bulk_add_f32(sum + tile * (TILE_BYTES / 4), shared_address(staged), TILE_BYTES);
            tma_store_commit();
        }
        tma_store_wait<0>();
    }
}

template <class KERNEL> static void additions(const bench &b, KERNEL kernel, const char *name, int64_t bytes)
{
    float *sum, ms = 0;
    cudaEvent_t from, to;
    must("array", cudaMalloc(&sum, (size_t)bytes));
    must("zeros", cudaMemset(sum, 0, (size_t)bytes));
    must("event", cudaEventCreate(&from));
    must("event", cudaEventCreate(&to));
    for (int run = 0; run < 2; run++) {
        must("event", cudaEventRecord(from));
        for (int i = 0; i < 10; i++) {
            kernel<<<2 * b.blocks, THREADS, TILE_BYTES>>>(sum, bytes / TILE_BYTES);
        }
        must("event", cudaEventRecord(to));
        must("kernel", cudaEventSynchronize(to));
        must("time", cudaEventElapsedTime(&ms, from, to));
    }
    printf("| %-26s over %3lld MiB | %7.2f | TB/s added |\n", name, (long long)(bytes >> 20),
           10e-9 * (double)bytes / (double)ms);
    cudaEventDestroy(from);
    cudaEventDestroy(to);
    cudaFree(sum);
}

int main()
{
    bench b = {};
    must("blocks", cudaDeviceGetAttribute(&b.blocks, cudaDevAttrMultiProcessorCount, 0));
    must("output", cudaMalloc(&b.out, (size_t)b.blocks * THREADS * sizeof *b.out));
    must("clocks", cudaMalloc(&b.clocks, (size_t)b.blocks * sizeof *b.clocks));
    printf("| instruction | clocks | |\n|---|---|---|\n");
    product<64, BF16_SS>(b, "bf16, A and B in shared memory");
    product<96, BF16_SS>(b, "bf16, A and B in shared memory");
    product<128, BF16_SS>(b, "bf16, A and B in shared memory");
    product<64, BF16_RS>(b, "bf16, A in registers");
    product<128, BF16_RS>(b, "bf16, A in registers");
    product<64, E4M3_SS>(b, "e4m3, A and B in shared memory");
    product<128, E4M3_SS>(b, "e4m3, A and B in shared memory");
    product<64, E4M3_RS>(b, "e4m3, A in registers");
    product<128, E4M3_RS>(b, "e4m3, A in registers");
    product<128, E5M2_RS>(b, "e5m2 x e4m3, A in registers");
    instructions<0>(b);
    additions(b, red_kernel, "red.global.add.v4.f32", 16 << 20);
    additions(b, red_kernel, "red.global.add.v4.f32", 256 << 20);
    additions(b, bulk_kernel, "cp.reduce.async.bulk", 16 << 20);
    additions(b, bulk_kernel, "cp.reduce.async.bulk", 256 << 20);
    return 0;
}
