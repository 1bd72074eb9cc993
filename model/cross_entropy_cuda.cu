/* model: head and cross entropy on the GPU, a chunk of rows at a time: logits by a matrix product, then one kernel that
 * turns a row of logits into its loss and its gradient, then the two products of backward.
 *
 * A row of the 8B vocabulary is half a megabyte, cut into four slices. For the gradient a cluster of four blocks takes
 * the row, so that each holds its slice in registers between the sum and the gradient: the logits are read once, and
 * each exponential is taken once. For the loss alone one block takes the slices in turn, with the same sums. Blocks
 * stay for many rows, with the next slice and half of the one after in flight to shared memory. PTX ISA: clusters,
 * distributed shared memory, cp.async. */
#include "core/cuda.cuh"
#include "model/exponential.cuh"

extern "C" {
#include "core/gemm_cuda.h"
#include "model/cross_entropy.h"
}

/* A thread holds 8 fours of logits, so a slice has up to 32768: four slices for rows of up to 131072, eight for rows of
 * up to 262144. One block of all registers a multiprocessor: half as large ones in clusters of eight left a tenth of
 * the multiprocessors out and waited longer for their slowest block. */
enum {
    HELD = 8,
    THREADS = 1024,
    WARPS = THREADS / 32,
    SLICE = HELD * THREADS, /* fours */
    HALVES = 3              /* of a slice, in shared memory */
};

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

/* x[i] becomes exp(x[i] - base of their maximum); their maximum and sum. */
__device__ __forceinline__ running exponentials(float *x)
{
    float max[4], sum[4];
#pragma unroll
    for (int i = 0; i < 4 * HELD; i++) {
        max[i % 4] = i < 4 ? x[i] : fmaxf(max[i % 4], x[i]);
    }
    const float most = fmaxf(fmaxf(max[0], max[1]), fmaxf(max[2], max[3])), base = base_of(most);
#pragma unroll
    for (int i = 0; i < 4 * HELD; i++) {
        x[i] = exponential_fast(x[i] - base);
        sum[i % 4] = i < 4 ? x[i] : sum[i % 4] + x[i];
    }
    return {most, (sum[0] + sum[1]) + (sum[2] + sum[3])};
}

/* The part of a warp's slice to all blocks of the cluster, or to the only one. */
template <int SLICES, bool CLUSTER> __device__ __forceinline__ void part_give(running r, float2 *parts, int slice)
{
    const int lane = threadIdx.x & 31;
    float2 *mine = parts + slice * WARPS + (threadIdx.x >> 5);
    if constexpr (!CLUSTER) {
        if (lane == 0) {
            *mine = make_float2(r.max, r.sum);
        }
    } else if (lane < SLICES) {
        uint32_t theirs;
        asm("mapa.shared::cluster.u32 %0, %1, %2;"
            : "=r"(theirs)
            : "r"((uint32_t)__cvta_generic_to_shared(mine)), "r"(lane));
        asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(theirs), "f"(r.max), "f"(r.sum) : "memory");
    }
}

/* All parts of a row, in a fixed tree, in every thread. */
template <int SLICES> __device__ __forceinline__ running parts_join(const float2 *parts)
{
    running all = {-INFINITY, 0.0f};
#pragma unroll
    for (int i = 0; i < SLICES; i++) {
        const float2 part = parts[i * WARPS + (threadIdx.x & 31)];
        all = running_join(all, {part.x, part.y});
    }
    return warp_join(all);
}

/* ---- slices ---- */

struct slice {
    int first, n; /* fours of the row */
};

template <int SLICES> __device__ __forceinline__ slice slice_at(int64_t vocab, int number)
{
    const int fours = 2 * (int)((vocab / 8 + SLICES - 1) / SLICES), first = number * fours;
    return {first, min(fours, (int)(vocab / 4) - first)};
}

/* What a block takes: units, each a slice of a row, two halves each. */
template <int SLICES, bool CLUSTER> struct work {
    int64_t first_row, rows_apart; /* this block's, or its cluster's */
    int rank;                      /* of the block in its cluster */

    __device__ __forceinline__ int64_t row_of(int unit) const
    {
        return first_row + (CLUSTER ? unit : unit / SLICES) * rows_apart;
    }

    __device__ __forceinline__ int slice_of(int unit) const
    {
        return CLUSTER ? rank : unit % SLICES;
    }
};

/* Starts the copy of half a unit to shared memory. A thread copies and uses every THREADS-th four, so that no barrier
 * is needed between copy and use, and accesses coalesce. Behind the last row there is nothing to copy. */
template <int SLICES, bool CLUSTER>
__device__ __forceinline__ void half_start(const cross_entropy_rows &a, float4 *held, const work<SLICES, CLUSTER> &w,
                                           int half)
{
    const int64_t row = w.row_of(half / 2);
    const slice s = slice_at<SLICES>(a.vocab, w.slice_of(half / 2));
    const int at = half % 2 * (SLICE / 2) + (int)threadIdx.x;
    const float *from = a.logits + row * a.vocab + 4 * (int64_t)(s.first + at);
    const uint32_t to = (uint32_t)__cvta_generic_to_shared(held + half % HALVES * (SLICE / 2) + threadIdx.x);
#pragma unroll
    for (int h = 0; h < HELD / 2; h++) {
        if (at + h * THREADS < s.n && row < a.rows) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + h * THREADS * 16),
                         "l"(from + h * THREADS * 4)
                         : "memory");
        }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* What this thread copied itself, of the unit whose first half this is; -Inf, which adds nothing, behind the slice's
 * end. */
__device__ __forceinline__ void unit_read(float *x, const float4 *held, const slice &s, int half)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(HALVES - 2) : "memory");
#pragma unroll
    for (int h = 0; h < HELD; h++) {
        const float4 *from = held + (half + 2 * h / HELD) % HALVES * (SLICE / 2) + h % (HELD / 2) * THREADS;
        const float4 none = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
        const float4 four = h * THREADS + (int)threadIdx.x < s.n ? from[threadIdx.x] : none;
        x[4 * h] = four.x, x[4 * h + 1] = four.y, x[4 * h + 2] = four.z, x[4 * h + 3] = four.w;
    }
}

/* Does this thread hold the target's logit? Then *logit = it. */
__device__ __forceinline__ bool target_find(const float *x, const slice &s, int target, float *logit)
{
    const int at = target / 4 - s.first;
    if (target < 0 || at < 0 || at >= s.n || at % THREADS != (int)threadIdx.x) {
        return false;
    }
#pragma unroll
    for (int i = 0; i < 4 * HELD; i++) {
        *logit = i == at / THREADS * 4 + target % 4 ? x[i] : *logit;
    }
    return true;
}

/* factor times what exponentials left in x; zeros where the row does not count. */
__device__ __forceinline__ void dlogits_store(bf16 *row, const float *x, const slice &s, float factor, bool counts)
{
#pragma unroll
    for (int h = 0; h < HELD; h++) {
        const int i = h * THREADS + (int)threadIdx.x;
        if (i < s.n) {
            __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(factor * x[4 * h], factor * x[4 * h + 1]),
                                       __floats2bfloat162_rn(factor * x[4 * h + 2], factor * x[4 * h + 3])};
            const uint2 codes = *reinterpret_cast<uint2 *>(pairs);
            *reinterpret_cast<uint2 *>(row + 4 * (int64_t)(s.first + i)) = counts ? codes : make_uint2(0, 0);
        }
    }
}

/* ---- rows ---- */

/* CLUSTER: SLICES blocks take a row, with its gradient; else one block, the loss only. Who takes which rows changes no
 * bit. */
template <int SLICES, bool CLUSTER>
static __global__ void __launch_bounds__(THREADS, 1)
    cross_entropy_kernel(const __grid_constant__ cross_entropy_rows a, const struct cuda_step *step)
{
    extern __shared__ float4 held[];
    __shared__ float2 parts[2][SLICES * WARPS]; /* in turn: who still reads one has passed the next one's barrier */
    const int team = CLUSTER ? SLICES : 1, units = CLUSTER ? 1 : SLICES;
    const work<SLICES, CLUSTER> w = {blockIdx.x / team, gridDim.x / team, (int)(blockIdx.x % team)};
    int half = 0;
    if (CLUSTER) {
        cluster_arrive(); /* nobody writes to a block that has not begun */
    }
    for (int first = 0; first < HALVES; first++) {
        half_start(a, held, w, first);
    }
    if (CLUSTER) {
        cluster_wait();
    }
    int turn = 0;
    for (int64_t row = w.first_row; row < a.rows; row += w.rows_apart, turn ^= 1) {
        const int target = a.targets[row];
        float x[4 * HELD], logit = 0.0f;
        bool holds = false;
        running mine;
        for (int unit = 0; unit < units; unit++, half += 2) {
            const int number = w.slice_of(unit);
            const slice s = slice_at<SLICES>(a.vocab, number);
            unit_read(x, held, s, half);
            half_start(a, held, w, half + HALVES);
            half_start(a, held, w, half + HALVES + 1);
            holds = target_find(x, s, target, &logit) || holds;
            mine = exponentials(x);
            part_give<SLICES, CLUSTER>(warp_join(mine), parts[turn], number);
        }
        if (CLUSTER) {
            cluster_arrive();
            cluster_wait();
        } else {
            __syncthreads();
        }
        const running all = parts_join<SLICES>(parts[turn]);
        const float lse = all.max + logf(all.sum);
        if (CLUSTER) { /* a share of -Inf only has no part: 0, where exp(0 - lse) could be Inf */
            dlogits_store(a.dlogits + row * a.vocab, x, slice_at<SLICES>(a.vocab, w.rank),
                          step->loss_scale * exponential_fast(mine.max - lse), target >= 0);
        }
        if (holds) {
            a.losses[row] = lse - logit;
            a.lse[row] = lse;
            if (CLUSTER) {
                a.dlogits[row * a.vocab + target] =
                    bf16_code(step->loss_scale * (exponential_fast(logit - lse) - 1.0f));
            }
        } else if (target < 0 && w.rank == 0 && threadIdx.x == 0) {
            a.losses[row] = 0.0f;
            a.lse[row] = -INFINITY;
        }
    }
    if (CLUSTER) { /* nobody leaves while others write to its shared memory */
        cluster_arrive();
        cluster_wait();
    }
}

template <int SLICES, bool CLUSTER> static void rows_launch(const cross_entropy_rows &a, const cuda *on)
{
    auto kernel = cross_entropy_kernel<SLICES, CLUSTER>;
    const int team = CLUSTER ? SLICES : 1;
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = team, cluster.val.clusterDim.y = 1, cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(team);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = HALVES * (SLICE / 2) * sizeof(float4);
    config.stream = on->stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)config.dynamicSmemBytes);
    int teams = 0; /* that the device runs at a time */
    cudaError_t error = cudaOccupancyMaxActiveClusters(&teams, kernel, &config);
    if (error != cudaSuccess || teams == 0) {
        cuda_note(on, "cross_entropy: clusters", (int)(error != cudaSuccess ? error : cudaErrorInvalidConfiguration));
        return;
    }
    config.gridDim = dim3((unsigned int)(a.rows < teams ? a.rows : teams) * team);
    cudaLaunchKernelEx(&config, kernel, a, (const struct cuda_step *)on->step);
    cuda_launched(on, "cross_entropy");
}

void cross_entropy_rows_cuda(const struct cross_entropy_rows *a, const cuda *on)
{
    ASSERT(a->vocab % 8 == 0 && a->vocab <= 8 * 4 * SLICE);
    if (a->rows == 0) {
        return;
    }
    const bool four = a->vocab <= 4 * 4 * SLICE;
    if (a->dlogits != NULL) {
        four ? rows_launch<4, true>(*a, on) : rows_launch<8, true>(*a, on);
    } else {
        four ? rows_launch<4, false>(*a, on) : rows_launch<8, false>(*a, on);
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
