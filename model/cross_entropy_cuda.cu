/* model: head and cross entropy on the GPU, a chunk of rows at a time: logits by a matrix product, then one kernel that
 * turns a row of logits into its loss and its gradient, then the two products of backward.
 *
 * A row of the 8B vocabulary is half a megabyte. A cluster of eight blocks takes it, so that each block holds its slice
 * in registers between the sum and the gradient: the logits are read once. PTX ISA, clusters and distributed shared
 * memory. */
#include "core/cuda.cuh"
#include "model/exponential.cuh"

extern "C" {
#include "core/gemm_cuda.h"
#include "model/cross_entropy.h"
}

enum {
    CLUSTER = 8,
    THREADS = 512,
    HELD = 4, /* vectors of eight logits that a thread holds: 8 * 512 * 32 = 131072 logits a row; longer rows are read
                 again for the gradient */
};

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
    float sum = r.sum * weight_of(r.max, max);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        sum += weight_of(x[i], max);
    }
    return {max, sum};
}

/* Joins all threads of the cluster, in a fixed tree. Ends with an arrival at the cluster's barrier: the caller waits
 * before it leaves, since others may still be reading here. */
__device__ __forceinline__ running cluster_join(running r)
{
    __shared__ float part[2][THREADS / 32], whole[2], everywhere[2];
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
            whole[0] = r.max;
            whole[1] = r.sum;
        }
    }
    cluster_arrive();
    cluster_wait();
    if (warp == 0) {
        r = lanes_join<CLUSTER>({cluster_read(&whole[0], lane % CLUSTER), cluster_read(&whole[1], lane % CLUSTER)});
        if (lane == 0) {
            everywhere[0] = r.max;
            everywhere[1] = r.sum;
        }
    }
    __syncthreads();
    cluster_arrive();
    return {everywhere[0], everywhere[1]};
}

/* ---- a row ---- */

struct rows {
    const float *logits; /* (rows, V) */
    const int32_t *targets;
    float *losses, *lse;
    bf16 *dlogits; /* (rows, V), NULL: none wanted */
    int64_t vocab;
    const struct cuda_step *step;
};

/* Eight logits; -Inf, which adds nothing, behind the slice. */
__device__ __forceinline__ void logits_load(float *x, const float *row, int vector, int end)
{
    float4 a = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY), b = a;
    if (vector < end) {
        a = __ldcs(reinterpret_cast<const float4 *>(row) + 2 * vector);
        b = __ldcs(reinterpret_cast<const float4 *>(row) + 2 * vector + 1);
    }
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
    x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

__device__ __forceinline__ void dlogits_store(bf16 *row, int vector, const float *x, float lse, float scale, int target)
{
    float d[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        d[i] = scale * (exponential_fast(x[i] - lse) - (8 * vector + i == target ? 1.0f : 0.0f));
    }
    bf16x8_store(row + 8 * vector, bf16x8_pack(d));
}

__device__ __forceinline__ void row_ignore(const rows &a, int64_t row, int first, int end)
{
    if (first == 0 && threadIdx.x == 0) {
        a.losses[row] = 0.0f;
        a.lse[row] = -INFINITY;
    }
    for (int v = first + threadIdx.x; v < end && a.dlogits != NULL; v += THREADS) {
        bf16x8_store(a.dlogits + row * a.vocab + 8 * (int64_t)v, bf16x8{make_uint4(0, 0, 0, 0)});
    }
}

static __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 2) cross_entropy_kernel(const rows a)
{
    const int64_t row = blockIdx.x / CLUSTER;
    const int vectors = (int)(a.vocab / 8), slice = (vectors + CLUSTER - 1) / CLUSTER;
    const int first = (int)(blockIdx.x % CLUSTER) * slice, end = min(first + slice, vectors);
    const int target = a.targets[row];
    if (target < 0) {
        row_ignore(a, row, first, end);
        return; /* all blocks of the cluster do */
    }
    const float *logits = a.logits + row * a.vocab;
    const bool once = slice <= HELD * THREADS;

    float x[HELD][8];
    running r = {-INFINITY, 0.0f};
    for (int at = first; at < end; at += HELD * THREADS) {
#pragma unroll
        for (int h = 0; h < HELD; h++) {
            logits_load(x[h], logits, at + h * THREADS + threadIdx.x, end);
        }
#pragma unroll
        for (int h = 0; h < HELD; h++) {
            r = running_add(r, x[h]);
        }
    }
    r = cluster_join(r);
    const float lse = r.max + logf(r.sum);
    if (first == 0 && threadIdx.x == 0) {
        a.losses[row] = lse - logits[target];
        a.lse[row] = lse;
    }
    if (a.dlogits != NULL) {
        const float scale = a.step->loss_scale;
        bf16 *dlogits = a.dlogits + row * a.vocab;
        for (int at = first; at < end; at += HELD * THREADS) {
#pragma unroll
            for (int h = 0; h < HELD; h++) {
                const int vector = at + h * THREADS + threadIdx.x;
                if (!once) {
                    logits_load(x[h], logits, vector, end);
                }
                if (vector < end) {
                    dlogits_store(dlogits, vector, x[h], lse, scale, target);
                }
            }
        }
    }
    cluster_wait();
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
    ASSERT(a->chunk * CLUSTER < INT32_MAX && (a->dhidden == NULL || (a->dlogits != NULL && a->dweight != NULL)));
    for (int64_t r0 = 0; r0 < a->rows; r0 += a->chunk) {
        const int64_t n = a->rows - r0 < a->chunk ? a->rows - r0 : a->chunk;
        rows r = {};
        r.logits = a->logits, r.targets = a->targets + r0, r.losses = a->losses + r0, r.lse = a->lse + r0;
        r.dlogits = a->dhidden != NULL ? a->dlogits : NULL;
        r.vocab = a->vocab;
        r.step = on->step;
        logits_make(a, r0, n, on);
        cross_entropy_kernel<<<(unsigned int)(n * CLUSTER), THREADS, 0, on->stream>>>(r);
        cuda_launched(on, "cross_entropy");
        if (a->dhidden != NULL) {
            dhidden_make(a, r0, n, on);
            dweight_make(a, r0, n, on);
        }
    }
}
