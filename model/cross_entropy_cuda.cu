/* model: head and cross entropy on the GPU, a chunk of rows at a time: logits by a matrix product, then one kernel that
 * turns a row of logits into its loss and its gradient, then the two products of backward.
 *
 * A row of the 8B vocabulary is half a megabyte. A cluster of eight blocks takes it, so that each block holds its slice
 * in registers between the sum and the gradient: the logits are read once, and each exponential is taken once. The
 * cluster stays for many rows; the next row and half of the one after are on their way to shared memory meanwhile, so
 * that no warp has to ask for more just when it waits for the slowest of the cluster. PTX ISA: clusters, distributed
 * shared memory, cp.async. */
#include "core/cuda.cuh"
#include "model/exponential.cuh"

extern "C" {
#include "core/gemm_cuda.h"
#include "model/cross_entropy.h"
}

/* A thread holds 8 fours of logits and two blocks share a multiprocessor, for rows of up to 8 * 512 * 8 * 4 = 131072
 * logits; longer rows, of up to 262144, take twice the registers and one block. */
enum { CLUSTER = 8, THREADS = 512, WARPS = THREADS / 32, PARTS = 3 /* halves of a slice in shared memory */ };

__device__ __forceinline__ void cluster_arrive()
{
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait()
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* ---- running log-sum-exp: as struct running of the CPU file ---- */

struct running {
    float max, sum; /* sum of exp(x - max); NaN once a logit is NaN or +Inf */
};

/* What is subtracted from logits below `max`: exp(-Inf - ...) must be 0 whatever the maximum. */
__device__ __forceinline__ float base_of(float max)
{
    return max == -INFINITY ? 0.0f : max;
}

/* The same bits with a and b exchanged. */
__device__ __forceinline__ running running_join(running a, running b)
{
    const float max = fmaxf(a.max, b.max), base = base_of(max);
    return {max, __fadd_rn(__fmul_rn(a.sum, exponential_fast(a.max - base)),
                           __fmul_rn(b.sum, exponential_fast(b.max - base)))};
}

__device__ __forceinline__ running warp_join(running r)
{
#pragma unroll
    for (int o = 16; o > 0; o /= 2) {
        r = running_join(r, {__shfl_xor_sync(0xffffffffu, r.max, o), __shfl_xor_sync(0xffffffffu, r.sum, o)});
    }
    return r;
}

/* Joins all threads of the cluster in a fixed tree, in every one of them: each warp hands its part to all blocks, one
 * barrier, then each warp joins all parts. `turn` alternates from call to call: who still reads the parts of one call
 * has passed the barrier of the next before anybody writes for the next but one. */
__device__ __forceinline__ running cluster_join(running r, int turn)
{
    __shared__ __align__(8) float2 parts[2][CLUSTER * WARPS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    r = warp_join(r);
    if (lane < CLUSTER) {
        const uint32_t block = blockIdx.x % CLUSTER;
        const uint32_t mine = (uint32_t)__cvta_generic_to_shared(&parts[turn][block * WARPS + warp]);
        uint32_t theirs;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(mine), "r"(lane));
        asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(theirs), "f"(r.max), "f"(r.sum) : "memory");
    }
    cluster_arrive();
    cluster_wait();
    running all = {-INFINITY, 0.0f};
#pragma unroll
    for (int i = 0; i < CLUSTER * WARPS; i += 32) {
        const float2 part = parts[turn][i + lane];
        all = running_join(all, {part.x, part.y});
    }
    return warp_join(all);
}

/* ---- the slices of a cluster's rows ---- */

/* Fours of logits in the slice of a block. A thread copies and uses every THREADS-th: no barrier between copy and use,
 * and neighbours copy neighbours, so that no sector is asked for twice. */
__host__ __device__ static inline int slice_fours(int64_t vocab)
{
    return 2 * (int)((vocab / 8 + CLUSTER - 1) / CLUSTER);
}

struct slice {
    int first, n; /* fours */
};

__device__ __forceinline__ slice slice_of(int64_t vocab)
{
    const int fours = slice_fours(vocab), first = (int)(blockIdx.x % CLUSTER) * fours;
    return {first, min(fours, (int)(vocab / 4) - first)};
}

/* Half a slice on its way to shared memory; `half` counts this cluster's halves from its first row on. Behind the last
 * row there is nothing to wait for. */
template <int HELD>
__device__ __forceinline__ void half_start(const cross_entropy_rows &a, float4 *held, const slice &s, int half)
{
    const int64_t row = blockIdx.x / CLUSTER + half / 2 * (gridDim.x / CLUSTER);
    if (row < a.rows) {
        const float *from = a.logits + row * a.vocab + 4 * (int64_t)s.first;
        float4 *to = held + half % PARTS * (HELD / 2 * THREADS);
#pragma unroll
        for (int h = 0; h < HELD / 2; h++) {
            const int at = h * THREADS + (int)threadIdx.x, i = at + (int)(half % 2) * (HELD / 2 * THREADS);
            if (i < s.n) {
                asm volatile(
                    "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(to + at)),
                    "l"(from + 4 * (int64_t)i)
                    : "memory");
            }
        }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* What this thread copied itself; -Inf, which adds nothing, behind the slice's end. */
template <int HELD> __device__ __forceinline__ void slice_read(float *x, const float4 *held, const slice &s, int half)
{
    const float4 *from[2] = {held + half % PARTS * (HELD / 2 * THREADS),
                             held + (half + 1) % PARTS * (HELD / 2 * THREADS)};
#pragma unroll
    for (int h = 0; h < HELD; h++) {
        const int lane = (int)threadIdx.x;
        const float4 none = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
        const float4 four = h * THREADS + lane < s.n ? from[2 * h / HELD][h % (HELD / 2) * THREADS + lane] : none;
        x[4 * h] = four.x, x[4 * h + 1] = four.y, x[4 * h + 2] = four.z, x[4 * h + 3] = four.w;
    }
}

/* ---- a row ---- */

/* x[i] becomes exp(x[i] - base of their maximum); their maximum and sum. */
template <int N> __device__ __forceinline__ running exponentials(float *x)
{
    float max[4], sum[4];
#pragma unroll
    for (int i = 0; i < N; i++) {
        max[i % 4] = i < 4 ? x[i] : fmaxf(max[i % 4], x[i]);
    }
    const float most = fmaxf(fmaxf(max[0], max[1]), fmaxf(max[2], max[3])), base = base_of(most);
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] = exponential_fast(x[i] - base);
        sum[i % 4] = i < 4 ? x[i] : sum[i % 4] + x[i];
    }
    return {most, (sum[0] + sum[1]) + (sum[2] + sum[3])};
}

/* scale times the probabilities of the thread's logits; x: as exponentials leaves it. */
template <int HELD>
__device__ __forceinline__ void dlogits_store(bf16 *row, const float *x, const slice &s, float factor)
{
#pragma unroll
    for (int h = 0; h < HELD; h++) {
        const int i = h * THREADS + (int)threadIdx.x;
        if (i < s.n) {
            __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(factor * x[4 * h], factor * x[4 * h + 1]),
                                       __floats2bfloat162_rn(factor * x[4 * h + 2], factor * x[4 * h + 3])};
            *reinterpret_cast<uint2 *>(row + 4 * (int64_t)(s.first + i)) = *reinterpret_cast<uint2 *>(pairs);
        }
    }
}

/* Loss, log-sum-exp and gradient of a row whose slice is in x. */
template <int HELD>
__device__ __forceinline__ void row_finish(const cross_entropy_rows &a, int64_t row, int target, float *x,
                                           const slice &s, int turn, float loss_scale)
{
    /* The thread that holds the target's logit, and the logit. */
    const int at = target / 4 - s.first;
    const bool holds = at >= 0 && at < s.n && at % THREADS == (int)threadIdx.x;
    float logit = 0.0f;
    if (holds) {
#pragma unroll
        for (int i = 0; i < 4 * HELD; i++) {
            logit = i == at / THREADS * 4 + target % 4 ? x[i] : logit;
        }
    }
    const running mine = exponentials<4 * HELD>(x), all = cluster_join(mine, turn);
    const float lse = all.max + logf(all.sum);
    if (a.dlogits != NULL) {
        dlogits_store<HELD>(a.dlogits + row * a.vocab, x, s, loss_scale * exponential_fast(base_of(mine.max) - lse));
    }
    if (holds) {
        a.losses[row] = lse - logit;
        a.lse[row] = lse;
        if (a.dlogits != NULL) {
            a.dlogits[row * a.vocab + target] = bf16_code(loss_scale * (exponential_fast(logit - lse) - 1.0f));
        }
    }
}

/* An ignored row: all blocks of its cluster come here, and none waits for another. */
__device__ __forceinline__ void row_ignore(const cross_entropy_rows &a, int64_t row, const slice &s)
{
    if (s.first == 0 && threadIdx.x == 0) {
        a.losses[row] = 0.0f;
        a.lse[row] = -INFINITY;
    }
    for (int i = (int)threadIdx.x; i < s.n && a.dlogits != NULL; i += THREADS) {
        *reinterpret_cast<uint2 *>(a.dlogits + row * a.vocab + 4 * (int64_t)(s.first + i)) = make_uint2(0, 0);
    }
}

/* Cluster k of n takes rows k, k + n, ... Every row's bits are its own. */
template <int HELD, int BLOCKS>
static __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, BLOCKS)
    cross_entropy_kernel(const __grid_constant__ cross_entropy_rows a, const struct cuda_step *step)
{
    extern __shared__ float4 held[];
    const slice s = slice_of(a.vocab);
    const float loss_scale = step->loss_scale;
    int half = 0, turn = 0;
    cluster_arrive(); /* nobody writes to a block that has not begun */
    for (int first = 0; first < PARTS; first++) {
        half_start<HELD>(a, held, s, first);
    }
    cluster_wait();
    for (int64_t row = blockIdx.x / CLUSTER; row < a.rows; row += gridDim.x / CLUSTER, half += 2) {
        const int target = a.targets[row];
        asm volatile("cp.async.wait_group %0;" ::"n"(PARTS - 2) : "memory");
        float x[4 * HELD];
        slice_read<HELD>(x, held, s, half);
        half_start<HELD>(a, held, s, half + PARTS);
        half_start<HELD>(a, held, s, half + PARTS + 1);
        if (target < 0) { /* for all blocks of the cluster */
            row_ignore(a, row, s);
        } else {
            row_finish<HELD>(a, row, target, x, s, turn, loss_scale);
            turn ^= 1;
        }
    }
    cluster_arrive(); /* nobody leaves while others write to its shared memory */
    cluster_wait();
}

template <int HELD, int BLOCKS> static void rows_launch(const cross_entropy_rows &a, const cuda *on)
{
    auto kernel = cross_entropy_kernel<HELD, BLOCKS>;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(CLUSTER);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = (size_t)PARTS * (HELD / 2) * THREADS * sizeof(float4);
    config.stream = on->stream;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)config.dynamicSmemBytes);
    int clusters = 0; /* that the device runs at a time */
    cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
    if (error != cudaSuccess || clusters == 0) {
        cuda_note(on, "cross_entropy: clusters", (int)(error != cudaSuccess ? error : cudaErrorInvalidConfiguration));
        return;
    }
    const int64_t wanted = a.rows < clusters ? a.rows : clusters;
    kernel<<<(unsigned int)(wanted * CLUSTER), THREADS, config.dynamicSmemBytes, on->stream>>>(a, on->step);
    cuda_launched(on, "cross_entropy");
}

void cross_entropy_rows_cuda(const struct cross_entropy_rows *a, const cuda *on)
{
    ASSERT(a->vocab % 8 == 0 && slice_fours(a->vocab) <= 16 * THREADS);
    if (a->rows == 0) {
        return;
    }
    if (slice_fours(a->vocab) <= 8 * THREADS) {
        rows_launch<8, 2>(*a, on);
    } else {
        rows_launch<16, 1>(*a, on);
    }
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
    ASSERT(a->dhidden == NULL || (a->dlogits != NULL && a->dweight != NULL));
    for (int64_t r0 = 0; r0 < a->rows; r0 += a->chunk) {
        const int64_t n = a->rows - r0 < a->chunk ? a->rows - r0 : a->chunk;
        struct cross_entropy_rows r = {};
        r.rows = n, r.vocab = a->vocab;
        r.logits = a->logits, r.targets = a->targets + r0, r.losses = a->losses + r0, r.lse = a->lse + r0;
        r.dlogits = a->dhidden != NULL ? a->dlogits : NULL;
        logits_make(a, r0, n, on);
        cross_entropy_rows_cuda(&r, on);
        if (a->dhidden != NULL) {
            dhidden_make(a, r0, n, on);
            dweight_make(a, r0, n, on);
        }
    }
}
