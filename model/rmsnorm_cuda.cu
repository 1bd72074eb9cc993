/* model: RMSNorm on the GPU. Bound by memory: every tensor is read or written once, in 16-byte accesses.
 *
 * A team normalises one group of `width` neighbours (an item): the lanes of a part of a warp for heads and tiny models,
 * a block for wide rows. The item stays in registers between its reduction and its result. */
#include "core/cuda.cuh"

extern "C" {
#include "model/rmsnorm.h"
}

enum {
    NARROW_WIDTH = 256,   /* up to here a part of a warp takes an item, one vector a lane */
    NARROW_THREADS = 256, /* threads of a block of such teams */
    WIDE_THREADS = 512,   /* at most; two vectors a lane, four beyond 8192 */
    BACKWARD_PARTS = 396, /* blocks of backward, each with its own sum for dgain: three a multiprocessor of 132. A
                             constant, so that bits do not depend on the device */
    COLUMN_ROWS = 32,     /* parts that the column sum adds side by side */
};

struct team {
    int lane, lanes;
    int64_t index; /* among the teams of the block */
};

template <bool NARROW> __device__ __forceinline__ team team_here(int lanes)
{
    if (NARROW) {
        return {(int)threadIdx.x & (lanes - 1), lanes, (int64_t)(threadIdx.x / lanes)};
    }
    return {(int)threadIdx.x, (int)blockDim.x, 0};
}

template <bool NARROW> __device__ __forceinline__ float team_sum(float x, int lanes)
{
    if constexpr (NARROW) {
        for (int o = lanes / 2; o > 0; o /= 2) {
            x += __shfl_xor_sync(0xffffffffu, x, o);
        }
        return x;
    } else {
        return block_sum(x);
    }
}

/* Lanes of a team: the vectors of an item, up to a power of two or (wide) a whole number of warps. */
static int team_lanes(int64_t width, bool narrow, int vectors)
{
    int64_t needed = (width / 8 + vectors - 1) / vectors;
    if (!narrow) {
        return (int)((needed + 31) / 32 * 32);
    }
    int lanes = 1;
    while (lanes < needed) {
        lanes *= 2;
    }
    return lanes;
}

/* ---- forward ---- */

template <int VECTORS, bool NARROW>
static __global__ void __launch_bounds__(WIDE_THREADS) rmsnorm_fwd_kernel(const rmsnorm_fwd a, int lanes)
{
    const team t = team_here<NARROW>(lanes);
    const int64_t item = NARROW ? blockIdx.x * (int64_t)(NARROW_THREADS / lanes) + t.index : (int64_t)blockIdx.x;
    const bool here = item < a.rows * a.groups;
    const int64_t row = a.groups == 1 ? item : item / a.groups, group = item - row * a.groups;
    const int64_t x_at = row * a.x_stride + group * a.width, y_at = row * a.y_stride + group * a.width;

    bf16x8 x[VECTORS], branch[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int64_t c = 8 * (t.lane + (int64_t)v * t.lanes);
        const bool in = here && c < a.width;
        x[v] = in ? bf16x8_load(a.x + x_at + c) : bf16x8{make_uint4(0, 0, 0, 0)};
        branch[v] = in && a.branch != NULL ? bf16x8_load(a.branch + row * a.width + c) : bf16x8{make_uint4(0, 0, 0, 0)};
    }
    float squares = 0.0f;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int64_t c = 8 * (t.lane + (int64_t)v * t.lanes);
        float value[8];
        bf16x8_unpack(x[v], value);
        if (a.branch != NULL) {
            float more[8];
            bf16x8_unpack(branch[v], more);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                value[i] += more[i];
            }
            x[v] = bf16x8_pack(value);
            bf16x8_unpack(x[v], value); /* what is kept is what is normalised */
            if (here && c < a.width) {
                bf16x8_store(a.sum + x_at + c, x[v]);
            }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            squares = fmaf(value[i], value[i], squares);
        }
    }
    const float inv = 1.0f / sqrtf(team_sum<NARROW>(squares, t.lanes) / (float)a.width + a.eps);
    if (!here) {
        return;
    }
    if (t.lane == 0) {
        a.inv_rms[item] = inv;
    }
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int64_t c = 8 * (t.lane + (int64_t)v * t.lanes);
        if (c < a.width) {
            float value[8], gain[8];
            bf16x8_unpack(x[v], value);
            bf16x8_unpack(bf16x8_load(a.gain + c), gain);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                value[i] = value[i] * inv * gain[i];
            }
            bf16x8_store(a.y + y_at + c, bf16x8_pack(value));
        }
    }
}

void rmsnorm_fwd_cuda(const rmsnorm_fwd *a, const cuda *on)
{
    ASSERT(a->width > 0 && a->width % 8 == 0 && a->x_stride % 8 == 0 && a->y_stride % 8 == 0);
    ASSERT(a->width <= (int64_t)WIDE_THREADS * 32 && (a->branch == NULL || (a->groups == 1 && a->sum != NULL)));
    const int64_t items = a->rows * a->groups;
    if (items == 0) {
        return;
    }
    if (a->width <= NARROW_WIDTH) {
        int lanes = team_lanes(a->width, true, 1);
        rmsnorm_fwd_kernel<1, true>
            <<<cuda_blocks(items, NARROW_THREADS / lanes), NARROW_THREADS, 0, on->stream>>>(*a, lanes);
    } else if (a->width <= WIDE_THREADS * 16) {
        int lanes = team_lanes(a->width, false, 2);
        rmsnorm_fwd_kernel<2, false><<<(unsigned int)items, lanes, 0, on->stream>>>(*a, lanes);
    } else {
        int lanes = team_lanes(a->width, false, 4);
        rmsnorm_fwd_kernel<4, false><<<(unsigned int)items, lanes, 0, on->stream>>>(*a, lanes);
    }
    cuda_launched(on, "rmsnorm_fwd");
}

/* ---- backward ---- */

/* Where an item's numbers lie, and what of them is loaded ahead. */
template <int VECTORS> struct item_data {
    bf16x8 x[VECTORS], dy[VECTORS];
    float inv;
};

__device__ __forceinline__ int64_t item_at(const rmsnorm_bwd &a, int64_t item, int64_t stride)
{
    const int64_t row = a.groups == 1 ? item : item / a.groups;
    return row * stride + (item - row * a.groups) * a.width;
}

template <int VECTORS>
__device__ __forceinline__ void item_load(item_data<VECTORS> &d, const rmsnorm_bwd &a, const team &t, int64_t item,
                                          bool here)
{
    const int64_t x_at = item_at(a, item, a.x_stride), dy_at = item_at(a, item, a.dy_stride);
    d.inv = here ? a.inv_rms[item] : 0.0f;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int64_t c = 8 * (t.lane + (int64_t)v * t.lanes);
        const bool in = here && c < a.width;
        d.x[v] = in ? bf16x8_load(a.x + x_at + c) : bf16x8{make_uint4(0, 0, 0, 0)};
        d.dy[v] = in ? bf16x8_load(a.dy + dy_at + c) : bf16x8{make_uint4(0, 0, 0, 0)};
    }
}

template <int VECTORS> __device__ __forceinline__ float item_dot(const item_data<VECTORS> &d, const bf16x8 *gain)
{
    float dot = 0.0f;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        float x[8], dy[8], g[8];
        bf16x8_unpack(d.x[v], x);
        bf16x8_unpack(d.dy[v], dy);
        bf16x8_unpack(gain[v], g);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            dot = fmaf(g[i] * dy[i], x[i], dot);
        }
    }
    return dot;
}

/* dx of eight elements; adds their share of dgain to `columns`. */
__device__ __forceinline__ bf16x8 vector_finish(bf16x8 x8, bf16x8 dy8, bf16x8 gain8, bf16x8 residual8, bool residual,
                                                float inv, float slope, float *columns)
{
    float x[8], dy[8], gain[8], rest[8];
    bf16x8_unpack(x8, x);
    bf16x8_unpack(dy8, dy);
    bf16x8_unpack(gain8, gain);
    bf16x8_unpack(residual8, rest);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        columns[i] = fmaf(dy[i], x[i] * inv, columns[i]);
        float d = inv * (gain[i] * dy[i] - x[i] * slope);
        x[i] = residual ? rest[i] + d : d;
    }
    return bf16x8_pack(x);
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

/* A block takes `per_block` items in order. The next item's x and dy are on their way while this one is reduced. */
template <int VECTORS, bool NARROW>
static __global__ void __launch_bounds__(WIDE_THREADS)
    rmsnorm_bwd_kernel(const rmsnorm_bwd a, int64_t per_block, int lanes)
{
    const team t = team_here<NARROW>(lanes);
    const int64_t teams = NARROW ? NARROW_THREADS / lanes : 1;
    const int64_t items = a.rows * a.groups, begin = blockIdx.x * per_block;
    const int64_t end = begin + per_block < items ? begin + per_block : items;

    bf16x8 gain[VECTORS];
    float columns[8 * VECTORS] = {};
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int64_t c = 8 * (t.lane + (int64_t)v * t.lanes);
        gain[v] = c < a.width ? bf16x8_load(a.gain + c) : bf16x8{make_uint4(0, 0, 0, 0)};
    }
    item_data<VECTORS> ahead;
    item_load(ahead, a, t, begin + t.index, begin + t.index < end);
    for (int64_t first = begin; first < end; first += teams) { /* the same trips for all teams: they shuffle together */
        const int64_t item = first + t.index;
        const bool here = item < end;
        const item_data<VECTORS> now = ahead;
        const int64_t dx_at = item_at(a, item, a.dx_stride);
        bf16x8 residual[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const int64_t c = 8 * (t.lane + (int64_t)v * t.lanes);
            const bool in = here && c < a.width && a.residual != NULL;
            residual[v] = in ? bf16x8_load(a.residual + dx_at + c) : bf16x8{make_uint4(0, 0, 0, 0)};
        }
        item_load(ahead, a, t, item + teams, item + teams < end);
        const float dot = team_sum<NARROW>(item_dot(now, gain), t.lanes);
        const float slope = dot / (float)a.width * now.inv * now.inv;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const int64_t c = 8 * (t.lane + (int64_t)v * t.lanes);
            bf16x8 dx = vector_finish(now.x[v], now.dy[v], gain[v], residual[v], a.residual != NULL, now.inv, slope,
                                      columns + 8 * v);
            if (here && c < a.width) {
                bf16x8_store(a.dx + dx_at + c, dx);
            }
        }
    }
    float *part = a.scratch + blockIdx.x * a.width;
    if constexpr (NARROW) {
        teams_add(columns, t, (int)teams, a.width, part);
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

static backward_cut cut_of(int64_t items, int64_t teams)
{
    int64_t rounds = (items + teams - 1) / teams;
    int64_t per_block = (rounds + BACKWARD_PARTS - 1) / BACKWARD_PARTS * teams;
    return {per_block, (items + per_block - 1) / per_block};
}

size_t rmsnorm_bwd_scratch_bytes_cuda(int64_t rows, int64_t groups, int64_t width)
{
    int64_t items = rows * groups; /* no more parts than items, whatever the team */
    return (size_t)((items < BACKWARD_PARTS ? items : (int64_t)BACKWARD_PARTS) * width) * sizeof(float);
}

void rmsnorm_bwd_cuda(const rmsnorm_bwd *a, const cuda *on)
{
    ASSERT(a->width > 0 && a->width % 8 == 0 && a->width <= (int64_t)WIDE_THREADS * 32 && a->scratch != NULL);
    ASSERT(a->x_stride % 8 == 0 && a->dy_stride % 8 == 0 && a->dx_stride % 8 == 0 && a->dx != a->x);
    ASSERT(a->rows * a->groups > 0 && (a->grad_type == DTYPE_F32 || a->grad_type == DTYPE_BF16));
    const bool narrow = a->width <= NARROW_WIDTH;
    const int vectors = narrow ? 1 : a->width <= WIDE_THREADS * 16 ? 2 : 4;
    const int lanes = team_lanes(a->width, narrow, vectors), threads = narrow ? (int)NARROW_THREADS : lanes;
    const backward_cut cut = cut_of(a->rows * a->groups, narrow ? NARROW_THREADS / lanes : 1);
    auto kernel = narrow         ? rmsnorm_bwd_kernel<1, true>
                  : vectors == 2 ? rmsnorm_bwd_kernel<2, false>
                                 : rmsnorm_bwd_kernel<4, false>;
    kernel<<<(unsigned int)cut.blocks, threads, 0, on->stream>>>(*a, cut.per_block, lanes);
    cuda_launched(on, "rmsnorm_bwd");
    rmsnorm_dgain_kernel<<<cuda_blocks(a->width, 32), dim3(32, COLUMN_ROWS), 0, on->stream>>>(
        a->scratch, cut.blocks, a->width, a->dgain, a->grad_type == DTYPE_BF16, a->accumulate);
    cuda_launched(on, "rmsnorm_dgain");
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
