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
    NARROW_ITEMS = 4,     /* that a team of forward takes */
    WIDE_THREADS = 512,   /* at most; two vectors a lane, four beyond 8192 */
    WIDE_PARTS = 264,     /* blocks of backward, each with its own sum for dgain: two a multiprocessor of 132. A */
    NARROW_PARTS = 396,   /* constant, so that bits do not depend on the device */
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

/* Where vector v of this thread lies: of a wide row the next piece, of narrow items the same piece of another item, so
 * that several are on their way at a time. */
struct fwd_place {
    int64_t item, column, x, y; /* x, y: offsets */
    bool in;
};

template <bool NARROW>
__device__ __forceinline__ fwd_place fwd_place_of(const rmsnorm_fwd &a, const team &t, int v, int vectors)
{
    const int64_t teams = NARROW ? NARROW_THREADS / t.lanes : 1;
    const int64_t item = NARROW ? (blockIdx.x * (int64_t)vectors + v) * teams + t.index : (int64_t)blockIdx.x;
    const int64_t row = a.groups == 1 ? item : (uint32_t)item / (uint32_t)a.groups;
    const int64_t column = 8 * (t.lane + (NARROW ? 0 : (int64_t)v * t.lanes)),
                  in_row = (item - row * a.groups) * a.width;
    const bool in = column < a.width && item < a.rows * a.groups;
    return {item, column, row * a.x_stride + in_row + column, row * a.y_stride + in_row + column, in};
}

/* x + branch rounded, kept where it belongs. */
__device__ __forceinline__ bf16x8 branch_join(const rmsnorm_fwd &a, const fwd_place &p, bf16x8 x8, bf16x8 branch8)
{
    float x[8], branch[8];
    bf16x8_unpack(x8, x);
    bf16x8_unpack(branch8, branch);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        x[i] += branch[i];
    }
    x8 = bf16x8_pack(x);
    if (p.in) {
        bf16x8_store(a.sum + p.x, x8);
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

__device__ __forceinline__ void normalised_store(const rmsnorm_fwd &a, const fwd_place &p, bf16x8 x8, float inv)
{
    if (p.in) {
        float x[8], gain[8];
        bf16x8_unpack(x8, x);
        bf16x8_unpack(bf16x8_load(a.gain + p.column), gain);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] = x[i] * inv * gain[i];
        }
        bf16x8_store(a.y + p.y, bf16x8_pack(x));
        if (p.column == 0) {
            a.inv_rms[p.item] = inv;
        }
    }
}

template <int VECTORS, bool NARROW>
static __global__ void __launch_bounds__(WIDE_THREADS) rmsnorm_fwd_kernel(const rmsnorm_fwd a, int lanes)
{
    const bf16x8 zeros = {make_uint4(0, 0, 0, 0)};
    const team t = team_here<NARROW>(lanes);
    bf16x8 x[VECTORS], branch[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const fwd_place p = fwd_place_of<NARROW>(a, t, v, VECTORS);
        x[v] = p.in ? bf16x8_load(a.x + p.x) : zeros;
        branch[v] = p.in && a.branch != NULL ? bf16x8_load(a.branch + p.item * a.width + p.column) : zeros;
    }
    float squares = 0.0f, inv = 0.0f;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const fwd_place p = fwd_place_of<NARROW>(a, t, v, VECTORS);
        if (a.branch != NULL) { /* what is kept is what is normalised */
            x[v] = branch_join(a, p, x[v], branch[v]);
        }
        squares = squares_add(NARROW ? 0.0f : squares, x[v]);
        if (NARROW || v == VECTORS - 1) {
            inv = 1.0f / sqrtf(team_sum<NARROW>(squares, t.lanes) / (float)a.width + a.eps);
        }
        if (NARROW) {
            normalised_store(a, p, x[v], inv);
        }
    }
#pragma unroll
    for (int v = 0; v < VECTORS && !NARROW; v++) {
        normalised_store(a, fwd_place_of<NARROW>(a, t, v, VECTORS), x[v], inv);
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
    if (a->width <= NARROW_WIDTH) {
        int lanes = team_lanes(a->width, true, 1);
        rmsnorm_fwd_kernel<NARROW_ITEMS, true>
            <<<cuda_blocks(items, NARROW_ITEMS * (NARROW_THREADS / lanes)), NARROW_THREADS, 0, on->stream>>>(*a, lanes);
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

/* Sixteen bytes from global to shared memory, zeros where `in` is false; the copy is on its way until its group has
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

/* Waits until at most `pending` of this thread's groups are on their way. */
template <int PENDING> __device__ __forceinline__ void copies_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* Where an item's numbers lie: offsets of its first element, without the column. */
struct item_place {
    int64_t x, dy, dx;
};

__device__ __forceinline__ item_place place_of(const rmsnorm_bwd &a, int64_t item)
{
    int64_t row = item, in_row = 0;
    if (a.groups > 1) {
        row = (uint32_t)item / (uint32_t)a.groups;
        in_row = (item - row * a.groups) * a.width;
    }
    return {row * a.x_stride + in_row, row * a.dy_stride + in_row, row * a.dx_stride + in_row};
}

/* Items on their way are kept in a ring in shared memory. A thread reads only what it copied itself: no barriers. */
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
                                           int64_t item, bool here)
{
    const item_place p = place_of(a, here ? item : 0);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int64_t c = 8 * (t.lane + (int64_t)v * t.lanes);
        const bool in = here && c < a.width;
        copy16_start(r.at(stage, 0, v), a.x + p.x + (in ? c : 0), in);
        copy16_start(r.at(stage, 1, v), a.dy + p.dy + (in ? c : 0), in);
        if (a.residual != NULL) {
            copy16_start(r.at(stage, 2, v), a.residual + p.dx + (in ? c : 0), in);
        }
    }
    copies_commit();
}

__device__ __forceinline__ float vector_dot(bf16x8 x8, bf16x8 dy8, bf16x8 gain8, float dot)
{
    float x[8], dy[8], g[8];
    bf16x8_unpack(x8, x);
    bf16x8_unpack(dy8, dy);
    bf16x8_unpack(gain8, g);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        dot = fmaf(g[i] * dy[i], x[i], dot);
    }
    return dot;
}

/* dx of eight elements; adds their share of dgain to `columns`. */
__device__ __forceinline__ bf16x8 vector_finish(bf16x8 x8, bf16x8 dy8, bf16x8 gain8, const uint4 *residual, float inv,
                                                float slope, float *columns)
{
    float x[8], dy[8], gain[8], rest[8];
    bf16x8_unpack(x8, x);
    bf16x8_unpack(dy8, dy);
    bf16x8_unpack(gain8, gain);
    if (residual != NULL) {
        bf16x8_unpack({*residual}, rest);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        columns[i] = fmaf(dy[i], x[i] * inv, columns[i]);
        float d = inv * (gain[i] * dy[i] - x[i] * slope);
        x[i] = residual != NULL ? rest[i] + d : d;
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

/* A block takes `per_block` items in order. */
template <int VECTORS, bool NARROW>
static __global__ void __launch_bounds__(NARROW ? NARROW_THREADS : WIDE_THREADS, NARROW ? 3 : 1)
    rmsnorm_bwd_kernel(const rmsnorm_bwd a, int64_t per_block, int lanes)
{
    extern __shared__ uint4 ring_memory[];
    const ring<VECTORS> r = {ring_memory + threadIdx.x};
    const team t = team_here<NARROW>(lanes);
    const int64_t teams = NARROW ? NARROW_THREADS / lanes : 1;
    const int64_t items = a.rows * a.groups, begin = blockIdx.x * per_block;
    const int64_t end = begin + per_block < items ? begin + per_block : items;

    int64_t ahead = begin + t.index;
    for (int stage = 0; stage < r.stages - 1; stage++, ahead += teams) {
        item_start(r, stage, a, t, ahead, ahead < end);
    }
    bf16x8 gain[VECTORS];
    float columns[8 * VECTORS] = {};
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int64_t c = 8 * (t.lane + (int64_t)v * t.lanes);
        gain[v] = c < a.width ? bf16x8_load(a.gain + c) : bf16x8{make_uint4(0, 0, 0, 0)};
    }
    float inv_ahead = begin + t.index < end ? a.inv_rms[begin + t.index] : 0.0f;
    int stage = 0;
    for (int64_t first = begin; first < end; first += teams) { /* the same trips for all teams: they shuffle together */
        const int64_t item = first + t.index;
        const bool here = item < end;
        const float inv = inv_ahead;
        inv_ahead = item + teams < end ? a.inv_rms[item + teams] : 0.0f;
        item_start(r, (stage + r.stages - 1) % r.stages, a, t, ahead, ahead < end);
        ahead += teams;
        copies_wait<ring<VECTORS>::stages - 1>();
        float dot = 0.0f;
        bf16x8 x[VECTORS], dy[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            x[v].words = *r.at(stage, 0, v);
            dy[v].words = *r.at(stage, 1, v);
            dot = vector_dot(x[v], dy[v], gain[v], dot);
        }
        dot = team_sum<NARROW>(dot, t.lanes);
        const float slope = dot / (float)a.width * inv * inv;
        const int64_t dx_at = place_of(a, here ? item : 0).dx;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const int64_t c = 8 * (t.lane + (int64_t)v * t.lanes);
            const uint4 *residual = a.residual != NULL ? r.at(stage, 2, v) : NULL;
            bf16x8 dx = vector_finish(x[v], dy[v], gain[v], residual, inv, slope, columns + 8 * v);
            if (here && c < a.width) {
                bf16x8_store(a.dx + dx_at + c, dx);
            }
        }
        stage = (stage + 1) % r.stages;
    }
    copies_wait<0>();
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
    rmsnorm_bwd_kernel<VECTORS, NARROW>
        <<<(unsigned int)cut.blocks, threads, shared, on->stream>>>(*a, cut.per_block, lanes);
    cuda_launched(on, "rmsnorm_bwd");
}

void rmsnorm_bwd_cuda(const rmsnorm_bwd *a, const cuda *on)
{
    ASSERT(a->width > 0 && a->width % 8 == 0 && a->width <= (int64_t)WIDE_THREADS * 32 && a->scratch != NULL);
    ASSERT(a->x_stride % 8 == 0 && a->dy_stride % 8 == 0 && a->dx_stride % 8 == 0 && a->dx != a->x);
    ASSERT(a->rows * a->groups > 0 && a->rows * a->groups < INT32_MAX);
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
