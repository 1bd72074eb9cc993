/* model: RMSNorm backward on the GPU, in one pass over x, dy and the residual gradient: dx, and a part of dgain for
 * each block, which a second kernel adds in order. Bound by memory. */
#include "model/linear_cuda.cuh"
#include "model/rmsnorm_team.cuh"

extern "C" {
#include "model/rmsnorm.h"
}

/* Blocks, each with its own sum for dgain: two and three to each of 132 multiprocessors. Constants, so that bits do not
 * depend on the device. */
enum { WIDE_PARTS = 264, NARROW_PARTS = 396 };
enum { COLUMN_ROWS = 32 /* parts that the column sum adds side by side */ };

/* Sixteen bytes from global to shared memory, zeros where `in` is false; the copy is in flight until its group has
 * been waited for. PTX ISA, cp.async. */
__device__ __forceinline__ void copy16_start(uint4 *shared, const bf16 *from, bool in)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)),
                 "l"(from), "r"(in ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void copies_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until at most PENDING of this thread's groups are in flight. */
template <int PENDING> __device__ __forceinline__ void copies_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* A team's way through its items, `teams` apart, without a division for each. */
struct walk {
    int item, row, group;
};

struct walk_step {
    int item, row, group;
};

__device__ __forceinline__ void walk_on(walk &w, const walk_step &step, int groups)
{
    w.item += step.item;
    w.row += step.row;
    w.group += step.group;
    if (w.group >= groups) {
        w.group -= groups;
        w.row++;
    }
}

__device__ __forceinline__ int64_t walk_at(const walk &w, int64_t stride, int64_t width)
{
    return (int64_t)w.row * (int)stride + w.group * (int)width;
}

/* Items in flight are kept in a ring in shared memory. A thread reads only what it copied itself: no barriers. */
template <int VECTORS> struct ring {
    static const int stages = VECTORS == 4 ? 2 : 4;
    uint4 *shared; /* (stages, 3 arrays, VECTORS, threads), this thread's */

    __device__ __forceinline__ uint4 *at(int stage, int array, int v) const
    {
        return shared + ((stage * 3 + array) * VECTORS + v) * (int)blockDim.x;
    }
};

template <int VECTORS>
__device__ __forceinline__ void item_start(const ring<VECTORS> &r, int stage, const rmsnorm_bwd &a, const team &t,
                                           const walk &w, bool here)
{
    const bf16 *x = a.x, *dy = a.dy, *residual = a.residual;
    if (here) {
        x += walk_at(w, a.x_stride, a.width);
        dy += walk_at(w, a.dy_stride, a.width);
        residual += residual != NULL ? walk_at(w, a.dx_stride, a.width) : 0;
    }
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int c = 8 * (t.lane + v * t.lanes);
        const bool in = here && c < (int)a.width;
        copy16_start(r.at(stage, 0, v), x + (in ? c : 0), in);
        copy16_start(r.at(stage, 1, v), dy + (in ? c : 0), in);
        if (a.residual != NULL) {
            copy16_start(r.at(stage, 2, v), residual + (in ? c : 0), in);
        }
    }
    copies_commit();
}

/* Before the reduction: x, and gain dy, of eight elements; adds their share of dgain to `columns`. Returns the sum of
 * gain dy x added to `dot`. */
__device__ __forceinline__ float vector_begin(bf16x8 x8, bf16x8 dy8, bf16x8 gain8, float inv, float dot, float *x,
                                              float *gain_dy, float *columns)
{
    float dy[8], gain[8];
    bf16x8_unpack(x8, x);
    bf16x8_unpack(dy8, dy);
    bf16x8_unpack(gain8, gain);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        columns[i] = fmaf(dy[i], x[i] * inv, columns[i]);
        gain_dy[i] = gain[i] * dy[i];
        dot = fmaf(gain_dy[i], x[i], dot);
    }
    return dot;
}

/* After it: dx. */
__device__ __forceinline__ bf16x8 vector_finish(const float *x, const float *gain_dy, bf16x8 residual8, float inv,
                                                float slope)
{
    float residual[8], dx[8];
    bf16x8_unpack(residual8, residual);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        dx[i] = fmaf(inv, fmaf(-x[i], slope, gain_dy[i]), residual[i]);
    }
    return bf16x8_pack(dx);
}

/* The sums of the teams of a block, added in the order of the teams. */
__device__ __forceinline__ void teams_add(const float *columns, const team &t, int teams, int64_t width, float *part)
{
    __shared__ float shared[NARROW_THREADS * 8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        shared[8 * threadIdx.x + i] = columns[i]; /* team after team, their columns in order */
    }
    __syncthreads();
    for (int64_t c = threadIdx.x; c < width; c += NARROW_THREADS) {
        float sum = 0.0f;
        for (int k = 0; k < teams; k++) {
            sum += shared[k * 8 * t.lanes + c];
        }
        part[c] = sum;
    }
}

/* A block takes `per_block` items in order. */
template <int VECTORS, bool NARROW>
static __global__ void __launch_bounds__(NARROW ? NARROW_THREADS : WIDE_THREADS, NARROW ? 3 : 1)
    rmsnorm_bwd_kernel(const rmsnorm_bwd a, int per_block, int lanes, float inverse_width)
{
    extern __shared__ uint4 ring_memory[];
    const ring<VECTORS> r = {ring_memory + threadIdx.x};
    const team t = team_here<NARROW>(lanes);
    const int teams = NARROW ? NARROW_THREADS / lanes : 1, groups = (int)a.groups;
    const int begin = (int)blockIdx.x * per_block, end = min(begin + per_block, (int)a.rows * (int)a.groups);
    const walk_step step = {teams, teams / groups, teams % groups};

    walk now = {begin + t.index, (begin + t.index) / groups, (begin + t.index) % groups}, ahead = now;
    for (int stage = 0; stage < r.stages - 1; stage++, walk_on(ahead, step, groups)) {
        item_start(r, stage, a, t, ahead, ahead.item < end);
    }
    bf16x8 gain[VECTORS];
    float columns[8 * VECTORS] = {};
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int c = 8 * (t.lane + v * t.lanes);
        gain[v] = c < (int)a.width ? bf16x8_load(a.gain + c) : bf16x8_zeros();
    }
    float inv_ahead = now.item < end ? a.inv_rms[now.item] : 0.0f;
    uint32_t max = 0;
    int stage = 0, last = r.stages - 1;
    for (int first = begin; first < end; first += teams) { /* the same trips for all teams: they shuffle together */
        const bool here = now.item < end;
        const float inv = inv_ahead;
        inv_ahead = now.item + teams < end ? a.inv_rms[now.item + teams] : 0.0f;
        item_start(r, last, a, t, ahead, ahead.item < end);
        walk_on(ahead, step, groups);
        copies_wait<ring<VECTORS>::stages - 1>();
        float dot = 0.0f, x[VECTORS][8], gain_dy[VECTORS][8];
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            dot = vector_begin({*r.at(stage, 0, v)}, {*r.at(stage, 1, v)}, gain[v], inv, dot, x[v], gain_dy[v],
                               columns + 8 * v);
        }
        const float slope = team_sum<NARROW>(dot, t.lanes) * inverse_width * inv * inv;
        bf16 *dx = a.dx + walk_at(now, a.dx_stride, a.width);
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const int c = 8 * (t.lane + v * t.lanes);
            const bf16x8 residual = a.residual != NULL ? bf16x8{*r.at(stage, 2, v)} : bf16x8_zeros();
            if (here && c < (int)a.width) {
                const bf16x8 result = vector_finish(x[v], gain_dy[v], residual, inv, slope);
                bf16x8_store(dx + c, result);
                max = magnitude_max8(max, result);
            }
        }
        walk_on(now, step, groups);
        last = stage;
        stage = stage + 1 < r.stages ? stage + 1 : 0;
    }
    copies_wait<0>();
    if (a.amax != NULL) {
        amax_publish(magnitude_of(max), a.amax);
    }
    float *part = a.scratch + blockIdx.x * a.width;
    if constexpr (NARROW) {
        teams_add(columns, t, teams, a.width, part);
    } else {
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const int64_t c = 8 * (t.lane + (int64_t)v * t.lanes);
            if (c < a.width) {
                const float *s = columns + 8 * v;
                reinterpret_cast<float4 *>(part + c)[0] = make_float4(s[0], s[1], s[2], s[3]);
                reinterpret_cast<float4 *>(part + c)[1] = make_float4(s[4], s[5], s[6], s[7]);
            }
        }
    }
}

/* dgain of 32 columns a block: row y of the block adds every COLUMN_ROWS-th part, then the rows are added in order. */
static __global__ void __launch_bounds__(32 * COLUMN_ROWS)
    rmsnorm_dgain_kernel(const float *parts, int64_t n_parts, int64_t width, void *dgain, bool is_bf16, bool accumulate)
{
    __shared__ float rows[COLUMN_ROWS][32];
    const int64_t c = blockIdx.x * 32 + threadIdx.x;
    float sum = 0.0f;
    for (int64_t p = threadIdx.y; p < n_parts && c < width; p += COLUMN_ROWS) {
        sum += parts[p * width + c];
    }
    rows[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || c >= width) {
        return;
    }
    for (int y = 1; y < COLUMN_ROWS; y++) {
        sum += rows[y][threadIdx.x];
    }
    if (is_bf16) {
        bf16 *out = (bf16 *)dgain + c;
        *out = bf16_code(accumulate ? bf16_value(*out) + sum : sum);
    } else {
        float *out = (float *)dgain + c;
        *out = accumulate ? *out + sum : sum;
    }
}

/* How backward is cut: items a block, and blocks. */
struct backward_cut {
    int64_t per_block, blocks;
};

static backward_cut cut_of(int64_t items, int64_t teams, int64_t parts)
{
    int64_t rounds = (items + teams - 1) / teams;
    int64_t per_block = (rounds + parts - 1) / parts * teams;
    return {per_block, (items + per_block - 1) / per_block};
}

static int64_t parts_of(int64_t width)
{
    return width <= NARROW_WIDTH ? NARROW_PARTS : WIDE_PARTS;
}

size_t rmsnorm_bwd_scratch_bytes_cuda(int64_t rows, int64_t groups, int64_t width)
{
    int64_t items = rows * groups, parts = parts_of(width); /* no more parts than items, whatever the team */
    return (size_t)((items < parts ? items : parts) * width) * sizeof(float);
}

template <int VECTORS, bool NARROW>
static void backward_launch(const rmsnorm_bwd *a, const backward_cut &cut, int lanes, const cuda *on)
{
    const int threads = NARROW ? (int)NARROW_THREADS : lanes;
    const size_t shared = (size_t)ring<VECTORS>::stages * 3 * VECTORS * threads * sizeof(uint4);
    cudaFuncSetAttribute(rmsnorm_bwd_kernel<VECTORS, NARROW>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    rmsnorm_bwd_kernel<VECTORS, NARROW><<<(unsigned int)cut.blocks, threads, shared, on->stream>>>(
        *a, (int)cut.per_block, lanes, 1.0f / (float)a->width);
    cuda_launched(on, "rmsnorm_bwd");
}

void rmsnorm_bwd_cuda(const rmsnorm_bwd *a, const cuda *on)
{
    ASSERT(a->width > 0 && a->width % 8 == 0 && a->width <= (int64_t)WIDE_THREADS * 32 && a->scratch != NULL);
    ASSERT(a->x_stride % 8 == 0 && a->dy_stride % 8 == 0 && a->dx_stride % 8 == 0 && a->dx != a->x);
    ASSERT(a->rows * a->groups > 0 && a->rows * a->groups < INT32_MAX);
    ASSERT(a->x_stride < INT32_MAX && a->dy_stride < INT32_MAX && a->dx_stride < INT32_MAX);
    ASSERT(a->grad_type == DTYPE_F32 || a->grad_type == DTYPE_BF16);
    const bool narrow = a->width <= NARROW_WIDTH;
    const int vectors = narrow ? 1 : a->width <= WIDE_THREADS * 16 ? 2 : 4;
    const int lanes = team_lanes(a->width, narrow, vectors);
    const backward_cut cut = cut_of(a->rows * a->groups, narrow ? NARROW_THREADS / lanes : 1, parts_of(a->width));
    if (narrow) {
        backward_launch<1, true>(a, cut, lanes, on);
    } else if (vectors == 2) {
        backward_launch<2, false>(a, cut, lanes, on);
    } else {
        backward_launch<4, false>(a, cut, lanes, on);
    }
    rmsnorm_dgain_kernel<<<cuda_blocks(a->width, 32), dim3(32, COLUMN_ROWS), 0, on->stream>>>(
        a->scratch, cut.blocks, a->width, a->dgain, a->grad_type == DTYPE_BF16, a->accumulate);
    cuda_launched(on, "rmsnorm_dgain");
}
