/* model: head and cross entropy on the GPU, a chunk of rows at a time: logits by a matrix product, then one kernel that
 * turns a row of logits into its loss and its gradient, then the two products of backward.
 *
 * A row of the 8B vocabulary is half a megabyte. A cluster of eight blocks takes it, so that each block holds its slice
 * in registers between the sum and the gradient: the logits are read once. The cluster stays for many rows; the next
 * row is on its way to shared memory meanwhile. PTX ISA: clusters, distributed shared memory, cp.async. */
#include "core/cuda.cuh"
#include "model/exponential.cuh"

extern "C" {
#include "core/gemm_cuda.h"
#include "model/cross_entropy.h"
}

/* A thread holds 8 fours of logits and two blocks share a multiprocessor, for rows of up to 8 * 512 * 8 * 4 = 131072
 * logits; longer rows, of up to 262144, take twice the registers and one block. */
enum { CLUSTER = 8, THREADS = 512 };

/* ---- the cluster ---- */

__device__ __forceinline__ void cluster_arrive()
{
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait()
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* The float at the same place in shared memory of block `rank` of the cluster. */
__device__ __forceinline__ float cluster_read(const float *mine, uint32_t rank)
{
    uint32_t address = (uint32_t)__cvta_generic_to_shared(mine), theirs;
    float x;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(theirs) : "memory");
    return x;
}

/* ---- running log-sum-exp: as struct running of the CPU file ---- */

struct running {
    float max, sum; /* sum of exp(x - max); NaN once a logit is NaN or +Inf */
};

/* exp(x - max), 0 for x = -Inf whatever the maximum. */
__device__ __forceinline__ float weight_of(float x, float max)
{
    return exponential_fast(x - (max == -INFINITY ? 0.0f : max));
}

/* The same bits with a and b exchanged. */
__device__ __forceinline__ running running_join(running a, running b)
{
    const float max = fmaxf(a.max, b.max);
    return {max, __fadd_rn(__fmul_rn(a.sum, weight_of(a.max, max)), __fmul_rn(b.sum, weight_of(b.max, max)))};
}

template <int LANES> __device__ __forceinline__ running lanes_join(running r)
{
#pragma unroll
    for (int o = LANES / 2; o > 0; o /= 2) {
        r = running_join(r, {__shfl_xor_sync(0xffffffffu, r.max, o), __shfl_xor_sync(0xffffffffu, r.sum, o)});
    }
    return r;
}

__device__ __forceinline__ running running_add(running r, const float *x)
{
    float max = r.max;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        max = fmaxf(max, x[i]);
    }
    const float from = max == -INFINITY ? 0.0f : max; /* as in weight_of */
    float e[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        e[i] = exponential_fast(x[i] - from);
    }
    const float sum = ((e[0] + e[1]) + (e[2] + e[3])) + ((e[4] + e[5]) + (e[6] + e[7]));
    return {max, r.sum * exponential_fast(r.max - from) + sum};
}

/* Joins all threads of the cluster, in a fixed tree. `turn` alternates from call to call: who still reads the result of
 * one call has passed before the next but one writes. */
__device__ __forceinline__ running cluster_join(running r, int turn)
{
    __shared__ float part[2][THREADS / 32], whole[2][2], everywhere[2];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    r = lanes_join<32>(r);
    if (lane == 0) {
        part[0][warp] = r.max;
        part[1][warp] = r.sum;
    }
    __syncthreads();
    if (warp == 0) {
        r = lanes_join<THREADS / 32>({part[0][lane % (THREADS / 32)], part[1][lane % (THREADS / 32)]});
        if (lane == 0) {
            whole[turn][0] = r.max;
            whole[turn][1] = r.sum;
        }
    }
    cluster_arrive();
    cluster_wait();
    if (warp == 0) {
        r = lanes_join<CLUSTER>(
            {cluster_read(&whole[turn][0], lane % CLUSTER), cluster_read(&whole[turn][1], lane % CLUSTER)});
        if (lane == 0) {
            everywhere[0] = r.max;
            everywhere[1] = r.sum;
        }
    }
    __syncthreads();
    return {everywhere[0], everywhere[1]};
}

/* ---- a row ---- */

struct rows {
    int64_t rows, vocab;
    const float *logits; /* (rows, V) */
    const int32_t *targets;
    float *losses, *lse;
    bf16 *dlogits; /* (rows, V), NULL: none wanted */
    const struct cuda_step *step;
};

/* Fours of logits in the slice of a block. A thread copies and uses every THREADS-th: no barrier between copy and use,
 * and neighbours copy neighbours, so that no sector is asked for twice. */
__host__ __device__ static inline int slice_fours(int64_t vocab)
{
    return 2 * (int)((vocab / 8 + CLUSTER - 1) / CLUSTER);
}

__device__ __forceinline__ void four_start(float4 *held, const float *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(held)), "l"(from)
                 : "memory");
}

/* The gradient of logits 4 v to 4 v + 3. */
__device__ __forceinline__ void dlogits_store(bf16 *row, int v, float4 x, float lse, float scale, int target)
{
    const float logits[4] = {x.x, x.y, x.z, x.w};
    float d[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        d[i] = scale * (exponential_fast(logits[i] - lse) - (4 * v + i == target ? 1.0f : 0.0f));
    }
    __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(d[0], d[1]), __floats2bfloat162_rn(d[2], d[3])};
    *reinterpret_cast<uint2 *>(row + 4 * (int64_t)v) = *reinterpret_cast<uint2 *>(pairs);
}

/* An ignored row: all blocks of its cluster come here, and none waits for another. */
__device__ __forceinline__ void row_ignore(const rows &a, int64_t row, int first, int end)
{
    if (first == 0 && threadIdx.x == 0) {
        a.losses[row] = 0.0f;
        a.lse[row] = -INFINITY;
    }
    for (int v = first + (int)threadIdx.x; v < end && a.dlogits != NULL; v += THREADS) {
        *reinterpret_cast<uint2 *>(a.dlogits + row * a.vocab + 4 * (int64_t)v) = make_uint2(0, 0);
    }
}

/* The slice of a row on its way to `held`. A row beyond the last, or an ignored one, is nothing to wait for. */
__device__ __forceinline__ void row_start(const rows &a, float4 *held, int64_t row, int target, int first, int n)
{
    if (target >= 0) {
        const float *from = a.logits + row * a.vocab + 4 * (int64_t)first;
        for (int i = (int)threadIdx.x; i < n; i += THREADS) {
            four_start(held + i, from + 4 * i);
        }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Loss, log-sum-exp and gradient of a row whose slice is in x. */
template <int HELD>
__device__ __forceinline__ void row_finish(const rows &a, int64_t row, int target, const float4 *x, int first, int n,
                                           int turn)
{
    const int lane = (int)threadIdx.x;
    running r = {-INFINITY, 0.0f};
#pragma unroll
    for (int h = 0; h < HELD; h += 2) {
        const float eight[8] = {x[h].x, x[h].y, x[h].z, x[h].w, x[h + 1].x, x[h + 1].y, x[h + 1].z, x[h + 1].w};
        r = running_add(r, eight);
    }
    r = cluster_join(r, turn);
    const float lse = r.max + logf(r.sum);
    if (first == 0 && lane == 0) {
        a.losses[row] = lse - a.logits[row * a.vocab + target];
        a.lse[row] = lse;
    }
    if (a.dlogits != NULL) {
        const float scale = a.step->loss_scale;
#pragma unroll
        for (int h = 0; h < HELD; h++) {
            if (lane + h * THREADS < n) {
                dlogits_store(a.dlogits + row * a.vocab, first + lane + h * THREADS, x[h], lse, scale, target);
            }
        }
    }
}

/* Cluster k of n takes rows k, k + n, ... Every row's bits are its own. */
template <int HELD, int BLOCKS>
static __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, BLOCKS)
    cross_entropy_kernel(const rows a)
{
    extern __shared__ float4 held[];
    const int64_t clusters = gridDim.x / CLUSTER;
    const int first = (int)(blockIdx.x % CLUSTER) * slice_fours(a.vocab), lane = (int)threadIdx.x;
    const int end = min(first + slice_fours(a.vocab), (int)(a.vocab / 4)), n = end - first;
    int64_t row = blockIdx.x / CLUSTER;
    int target = row < a.rows ? a.targets[row] : -1, turn = 0;
    row_start(a, held, row, target, first, n);
    while (row < a.rows) {
        const int64_t next = row + clusters;
        const int next_target = next < a.rows ? a.targets[next] : -1;
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        float4 x[HELD];
#pragma unroll
        for (int h = 0; h < HELD; h++) { /* what this thread copied itself; -Inf adds nothing */
            const int i = lane + h * THREADS;
            x[h] = i < n ? held[i] : make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
        }
        row_start(a, held, next, next_target, first, n);
        if (target < 0) { /* for all blocks of the cluster */
            row_ignore(a, row, first, end);
        } else {
            row_finish<HELD>(a, row, target, x, first, n, turn);
            turn ^= 1;
        }
        row = next;
        target = next_target;
    }
    cluster_arrive(); /* nobody leaves while others read its shared memory */
    cluster_wait();
}

template <int HELD, int BLOCKS> static void rows_launch(const rows &a, const cuda *on)
{
    auto kernel = cross_entropy_kernel<HELD, BLOCKS>;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(CLUSTER);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = (size_t)slice_fours(a.vocab) * sizeof(float4);
    config.stream = on->stream;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, HELD * THREADS * (int)sizeof(float4));
    int clusters = 0; /* that the device runs at a time */
    cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
    if (error != cudaSuccess || clusters == 0) {
        cuda_note(on, "cross_entropy: clusters", (int)(error != cudaSuccess ? error : cudaErrorInvalidConfiguration));
        return;
    }
    const int64_t wanted = a.rows < clusters ? a.rows : clusters;
    kernel<<<(unsigned int)(wanted * CLUSTER), THREADS, config.dynamicSmemBytes, on->stream>>>(a);
    cuda_launched(on, "cross_entropy");
}

/* ---- the products ---- */

static void logits_make(const struct cross_entropy_cuda *a, int64_t r0, int64_t n, const cuda *on)
{
    struct gemm_cuda g = {};
    g.m = n, g.n = a->vocab, g.k = a->width;
    g.a = a->hidden + r0 * a->width, g.b = a->weight, g.c = a->logits;
    g.lda = a->width, g.ldb = a->width, g.ldc = a->vocab;
    g.a_type = g.b_type = DTYPE_BF16, g.c_type = DTYPE_F32;
    g.trans_b = true;
    g.alpha = 1.0f;
    gemm_cuda(on, &g);
}

static void dhidden_make(const struct cross_entropy_cuda *a, int64_t r0, int64_t n, const cuda *on)
{
    struct gemm_cuda g = {};
    g.m = n, g.n = a->width, g.k = a->vocab;
    g.a = a->dlogits, g.b = a->weight, g.c = a->dhidden + r0 * a->width;
    g.lda = a->vocab, g.ldb = a->width, g.ldc = a->width;
    g.a_type = g.b_type = g.c_type = DTYPE_BF16;
    g.alpha = 1.0f;
    gemm_cuda(on, &g);
}

static void dweight_make(const struct cross_entropy_cuda *a, int64_t r0, int64_t n, const cuda *on)
{
    struct gemm_cuda g = {};
    g.m = a->vocab, g.n = a->width, g.k = n;
    g.a = a->dlogits, g.b = a->hidden + r0 * a->width, g.c = a->dweight;
    g.lda = a->vocab, g.ldb = a->width, g.ldc = a->width;
    g.a_type = g.b_type = DTYPE_BF16, g.c_type = a->grad_type;
    g.trans_a = true;
    g.alpha = 1.0f, g.beta = a->accumulate || r0 > 0 ? 1.0f : 0.0f;
    gemm_cuda(on, &g);
}

void cross_entropy_cuda(const struct cross_entropy_cuda *a, const cuda *on)
{
    ASSERT(a->chunk > 0 && a->width % 8 == 0 && a->vocab % 8 == 0 && a->vocab < INT32_MAX);
    ASSERT(slice_fours(a->vocab) <= 16 * THREADS);
    ASSERT(a->dhidden == NULL || (a->dlogits != NULL && a->dweight != NULL));
    for (int64_t r0 = 0; r0 < a->rows; r0 += a->chunk) {
        const int64_t n = a->rows - r0 < a->chunk ? a->rows - r0 : a->chunk;
        rows r = {};
        r.rows = n, r.vocab = a->vocab;
        r.logits = a->logits, r.targets = a->targets + r0, r.losses = a->losses + r0, r.lse = a->lse + r0;
        r.dlogits = a->dhidden != NULL ? a->dlogits : NULL;
        r.step = on->step;
        logits_make(a, r0, n, on);
        if (slice_fours(a->vocab) <= 8 * THREADS) {
            rows_launch<8, 2>(r, on);
        } else {
            rows_launch<16, 1>(r, on);
        }
        if (a->dhidden != NULL) {
            dhidden_make(a, r0, n, on);
            dweight_make(a, r0, n, on);
        }
    }
}
