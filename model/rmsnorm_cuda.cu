/* model: RMSNorm forward on the GPU, and residual sums. Bound by memory: every tensor is read or written once, in
 * 16-byte accesses; an item stays in registers between its reduction and its result. */
#include "model/linear_cuda.cuh"
#include "model/rmsnorm_team.cuh"

extern "C" {
#include "model/rmsnorm.h"
}

enum { NARROW_ITEMS = 2 /* that a team has in flight */ };

/* One unit in the last place beside the CPU's 1 / sqrt. */
__device__ __forceinline__ float inverse_rms(float squares, float inverse_width, float eps)
{
    return rsqrtf(fmaf(squares, inverse_width, eps));
}

/* x + branch rounded, kept where it belongs. */
__device__ __forceinline__ bf16x8 branch_join(bf16x8 x8, bf16x8 branch8, bf16 *sum, bool in)
{
    float x[8], branch[8];
    bf16x8_unpack(x8, x);
    bf16x8_unpack(branch8, branch);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        x[i] += branch[i];
    }
    x8 = bf16x8_pack(x);
    if (in) {
        bf16x8_store(sum, x8);
    }
    return x8;
}

__device__ __forceinline__ float squares_add(float sum, bf16x8 x8)
{
    float x[8];
    bf16x8_unpack(x8, x);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        sum = fmaf(x[i], x[i], sum);
    }
    return sum;
}

__device__ __forceinline__ bf16x8 normalised(bf16x8 x8, float inv, bf16x8 gain8)
{
    float x[8], gain[8];
    bf16x8_unpack(x8, x);
    bf16x8_unpack(gain8, gain);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        x[i] = x[i] * inv * gain[i];
    }
    return bf16x8_pack(x);
}

/* A block takes an item. Registers are kept for all the threads that a multiprocessor can have: they are the loads on
 * their way. */
template <int VECTORS, bool BRANCH>
static __global__ void __launch_bounds__(WIDE_THREADS, VECTORS == 2 ? 3 : 2)
    rmsnorm_fwd_wide_kernel(const rmsnorm_fwd a, float inverse_width)
{
    const int64_t row = a.groups == 1 ? blockIdx.x : blockIdx.x / (uint32_t)a.groups;
    const int64_t in_row = (blockIdx.x - row * a.groups) * a.width;
    const bf16 *from = a.x + row * a.x_stride + in_row;
    bf16x8 x[VECTORS], other[VECTORS]; /* other: the branch, then the gain */
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int c = 8 * (int)(threadIdx.x + v * blockDim.x);
        x[v] = c < a.width ? bf16x8_load(from + c) : bf16x8_zeros();
        if (BRANCH) {
            other[v] = c < a.width ? bf16x8_load(a.branch + row * a.width + c) : bf16x8_zeros();
        }
    }
    float squares = 0.0f;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int c = 8 * (int)(threadIdx.x + v * blockDim.x);
        if (BRANCH) { /* what is kept is what is normalised */
            x[v] = branch_join(x[v], other[v], a.sum + row * a.x_stride + c, c < a.width);
        }
        squares = squares_add(squares, x[v]);
        other[v] = c < a.width ? bf16x8_load(a.gain + c) : bf16x8_zeros();
    }
    const float inv = inverse_rms(block_sum(squares), inverse_width, a.eps);
    if (threadIdx.x == 0) {
        a.inv_rms[blockIdx.x] = inv;
    }
    uint32_t max = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int c = 8 * (int)(threadIdx.x + v * blockDim.x);
        if (c < a.width) {
            const bf16x8 y = normalised(x[v], inv, other[v]);
            bf16x8_store(a.y + row * a.y_stride + in_row + c, y);
            max = magnitude_max8(max, y);
        }
    }
    if (a.amax != NULL) {
        amax_publish(magnitude_of(max), a.amax);
    }
}

/* A block takes a row, a team NARROW_ITEMS of its groups at a time. */
static __global__ void __launch_bounds__(NARROW_THREADS, 6)
    rmsnorm_fwd_narrow_kernel(const rmsnorm_fwd a, float inverse_width, int lanes)
{
    const team t = team_here<true>(lanes);
    const int64_t row = blockIdx.x;
    const int teams = (int)blockDim.x / lanes, groups = (int)a.groups, width = (int)a.width, c = 8 * t.lane;
    const bf16 *from = a.x + row * a.x_stride + c;
    const bf16x8 gain = c < width ? bf16x8_load(a.gain + c) : bf16x8_zeros();
    uint32_t max = 0;
    for (int first = 0; first < groups; first += NARROW_ITEMS * teams) { /* the same trips for all lanes of a warp */
        bf16x8 x[NARROW_ITEMS];
#pragma unroll
        for (int k = 0; k < NARROW_ITEMS; k++) {
            const int group = first + k * teams + t.index;
            x[k] = c < width && group < groups ? bf16x8_load(from + group * width) : bf16x8_zeros();
        }
#pragma unroll
        for (int k = 0; k < NARROW_ITEMS; k++) {
            const int group = first + k * teams + t.index;
            const bool in = c < width && group < groups;
            if (a.branch != NULL) { /* one group */
                const bf16x8 branch = in ? bf16x8_load(a.branch + row * width + c) : bf16x8_zeros();
                x[k] = branch_join(x[k], branch, a.sum + row * a.x_stride + c, in);
            }
            const float inv = inverse_rms(team_sum<true>(squares_add(0.0f, x[k]), lanes), inverse_width, a.eps);
            if (in) {
                const bf16x8 y = normalised(x[k], inv, gain);
                bf16x8_store(a.y + row * a.y_stride + group * width + c, y);
                max = magnitude_max8(max, y);
            }
            if (in && t.lane == 0) {
                a.inv_rms[row * groups + group] = inv;
            }
        }
    }
    if (a.amax != NULL) {
        amax_publish(magnitude_of(max), a.amax);
    }
}

void rmsnorm_fwd_cuda(const rmsnorm_fwd *a, const cuda *on)
{
    ASSERT(a->width > 0 && a->width % 8 == 0 && a->x_stride % 8 == 0 && a->y_stride % 8 == 0);
    ASSERT(a->width <= (int64_t)WIDE_THREADS * 32 && (a->branch == NULL || (a->groups == 1 && a->sum != NULL)));
    const int64_t items = a->rows * a->groups;
    ASSERT(items < INT32_MAX);
    if (items == 0) {
        return;
    }
    const float inverse_width = 1.0f / (float)a->width;
    if (a->width <= NARROW_WIDTH) {
        const int lanes = team_lanes(a->width, true, 1);
        const int64_t needed = (a->groups * lanes + 31) / 32 * 32;
        const int threads = needed < NARROW_THREADS ? (int)needed : (int)NARROW_THREADS;
        rmsnorm_fwd_narrow_kernel<<<(unsigned int)a->rows, threads, 0, on->stream>>>(*a, inverse_width, lanes);
    } else {
        const bool two = a->width <= WIDE_THREADS * 16, branch = a->branch != NULL;
        auto kernel = two      ? branch ? rmsnorm_fwd_wide_kernel<2, true> : rmsnorm_fwd_wide_kernel<2, false>
                           : branch ? rmsnorm_fwd_wide_kernel<4, true>
                               : rmsnorm_fwd_wide_kernel<4, false>;
        kernel<<<(unsigned int)items, team_lanes(a->width, false, two ? 2 : 4), 0, on->stream>>>(*a, inverse_width);
    }
    cuda_launched(on, "rmsnorm_fwd");
}

/* ---- residual sums ---- */

static __global__ void residual_add_kernel(const bf16 *a, const bf16 *b, bf16 *sum, int64_t n)
{
    const int64_t i = 8 * (blockIdx.x * (int64_t)blockDim.x + threadIdx.x);
    if (i + 8 <= n) {
        float x[8], y[8];
        bf16x8_unpack(bf16x8_load(a + i), x);
        bf16x8_unpack(bf16x8_load(b + i), y);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            x[k] += y[k];
        }
        bf16x8_store(sum + i, bf16x8_pack(x));
        return;
    }
    for (int64_t k = i; k < n; k++) {
        sum[k] = bf16_code(bf16_value(a[k]) + bf16_value(b[k]));
    }
}

void residual_add_cuda(const bf16 *a, const bf16 *b, bf16 *sum, int64_t n, const cuda *on)
{
    if (n > 0) {
        residual_add_kernel<<<cuda_blocks(n, 8 * 256), 256, 0, on->stream>>>(a, b, sum, n);
        cuda_launched(on, "residual_add");
    }
}
