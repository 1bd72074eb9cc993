/* attention: dQ of the CUDA backward, and what needs whole rows of dS: the statistic of `recentred`, the planted error
 * of debug_leak, and the sums over rows that attention_stats wants.
 *
 * A block of threads owns 128 query rows of one head, each of its four warps 32 of them, and meets the keys that they
 * see, 32 at a time. dS of a warp is at once the operand of dQ += dS K: it never leaves the registers. */
#include "attention/attention_cuda_bwd.cuh"
#include "attention/attention_cuda_bwd_codes.cuh"

/* What a pass over the keys is for. */
enum pass { PASS_MEAN, PASS_PLANTED, PASS_DQ, PASS_DQ_SUMS };

template <int D> struct dq_shared {
    bf16 q[DQ_ROWS * D], dout[DQ_ROWS * D];
    bf16 k[2][DQ_KEYS * D], v[2][DQ_KEYS * D], k_view[2][DQ_KEYS * D];
};

template <int D>
__device__ __forceinline__ void load_keys(const struct bwd_args &a, struct dq_shared<D> *s, int stage, int64_t batch,
                                          int64_t kv, int64_t key, bool view)
{
    tile_load<DQ_KEYS, D, DQ_THREADS>(shared_address(s->k[stage]), bwd_head(a.k, batch, kv), a.k.token_stride, key,
                                      a.tokens, a.head_dim);
    tile_load<DQ_KEYS, D, DQ_THREADS>(shared_address(s->v[stage]), bwd_head(a.v, batch, kv), a.v.token_stride, key,
                                      a.tokens, a.head_dim);
    if (view && a.k_view.data != a.k.data) {
        tile_load<DQ_KEYS, D, DQ_THREADS>(shared_address(s->k_view[stage]), bwd_head(a.k_view, batch, kv),
                                          a.k_view.token_stride, key, a.tokens, a.head_dim);
    }
}

/* Scores become P as dS takes it. */
template <bool CODES>
__device__ __forceinline__ void make_p(const struct bwd_args &a, float (*x)[4][4], const struct bwd_tile &t,
                                       const struct bwd_rows &reference, int64_t rows)
{
    if (CODES) {
        bwd_codes(a, x, t, reference, rows, [](int, int, int, float2) {});
        return;
    }
    bwd_exponentials(x, t, a.c, reference);
    if (a.ds_exact) {
        return;
    }
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float2 y = bwd_round_p(a.p_fp8, x[m][n][2 * h], x[m][n][2 * h + 1]);
                x[m][n][2 * h] = y.x;
                x[m][n][2 * h + 1] = y.y;
            }
        }
    }
}

/* ---- sums over rows ---------------------------------------------------------------------------------------- */

/* Lane c of a quad keeps row c of the quad's four (index 2 m + h). A tile's part is summed in FP32, tiles in FP64. */
struct row_sums {
    double sum, abs, stored, stored_abs;
};

__device__ __forceinline__ float quad_sum(float x)
{
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/* Adds the quad's sum of x[row] to the lane that keeps the row. */
__device__ __forceinline__ void keep_row(double *sum, const float *x)
{
    const int c = threadIdx.x & 3;
    float mine = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float y = quad_sum(x[i]);
        mine = c == i ? y : mine;
    }
    *sum += (double)mine;
}

struct ds_counts {
    int count, flushed, saturated;
};

__device__ __forceinline__ void count_ds(struct ds_counts *n, float y, float z, bool e4m3)
{
    n->count += y != 0.0f;
    n->flushed += y != 0.0f && z == 0.0f;
    n->saturated += e4m3 && fabsf(y) > 464.0f;
}

/* P and dP of a tile become stored dS (in x); sums and counts if wanted. */
template <bool SUMS>
__device__ __forceinline__ void make_ds(const struct bwd_args &a, float (*x)[4][4], float (*dp)[4][4],
                                        const struct bwd_rows &r, float lift, struct row_sums *sums,
                                        struct ds_counts *counts)
{
    float part[4][4] = {};
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = 2 * m + h;
                float *p = &x[m][n][2 * h];
                const float *d = &dp[m][n][2 * h];
                const float x0 = bwd_ds(a, p[0], d[0], r.x[row]), x1 = bwd_ds(a, p[1], d[1], r.x[row]);
                const float y0 = lift * x0, y1 = lift * x1;
                const float2 z = bwd_store_ds(a.ds_e4m3, y0, y1);
                p[0] = z.x;
                p[1] = z.y;
                if (SUMS) {
                    part[0][row] += x0 + x1;
                    part[1][row] += fabsf(x0) + fabsf(x1);
                    part[2][row] += z.x + z.y;
                    part[3][row] += fabsf(z.x) + fabsf(z.y);
                    count_ds(counts, y0, z.x, a.ds_e4m3);
                    count_ds(counts, y1, z.y, a.ds_e4m3);
                }
            }
        }
    }
    if (SUMS) {
        keep_row(&sums->sum, part[0]);
        keep_row(&sums->abs, part[1]);
        keep_row(&sums->stored, part[2]);
        keep_row(&sums->stored_abs, part[3]);
    }
}

/* sum += P dP, or |P (dP - r)|; abs += P. The factor of the codes cancels. */
template <bool MEAN>
__device__ __forceinline__ void weigh(const struct bwd_args &a, float (*x)[4][4], float (*dp)[4][4],
                                      const struct bwd_rows &r, struct row_sums *sums)
{
    float part[4] = {}, weight[4] = {};
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int row = 2 * m + (e >> 1);
                const float d = dp[m][n][e] * a.v_factor;
                part[row] += MEAN ? x[m][n][e] * d : fabsf(x[m][n][e] * (d - r.x[row]));
                weight[row] += x[m][n][e];
            }
        }
    }
    keep_row(&sums->sum, part);
    keep_row(&sums->abs, weight);
}

__device__ __forceinline__ double warp_sum_double(double x)
{
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) {
        x += __shfl_xor_sync(0xffffffffu, x, o);
    }
    return x;
}

/* The block's sums of rows into a.sums, in the order of lanes and warps. */
__device__ __forceinline__ void close_sums(const struct bwd_args &a, const struct row_sums &s,
                                           const struct ds_counts &n, int bad, int64_t rows, int row, float lift)
{
    __shared__ double warps[BWD_SUMS][DQ_THREADS / 32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    double x[BWD_SUMS] = {};
    if (row < a.tokens) {
        const float fold = a.p_codes ? bwd_fold(a.lse[rows + row]) : 1.0f;
        const double r = (double)(a.stat[rows + row] / fold);
        x[LEAK_ABS] = fabs(s.sum);
        x[DS_ABS] = s.abs;
        x[LEAK_STORED_ABS] = fabs(s.stored) / (double)lift;
        x[DS_STORED_ABS] = s.stored_abs / (double)lift;
        x[LEAK_R] = s.sum * r;
        x[R_R] = r * r;
    }
#pragma unroll
    for (int i = 0; i < BWD_SUMS; i++) {
        const double y = warp_sum_double(x[i]);
        if (lane == 0) {
            warps[i][warp] = y;
        }
    }
    __syncthreads();
    const int64_t block = (int64_t)blockIdx.y * gridDim.x + blockIdx.x;
    if (threadIdx.x < BWD_SUMS) {
        const double *y = warps[threadIdx.x];
        a.sums[block * BWD_SUMS + threadIdx.x] = ((y[0] + y[1]) + y[2]) + y[3];
    }
    const int counts[4] = {n.count, n.flushed, n.saturated, bad};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int total = __reduce_add_sync(0xffffffffu, counts[i]);
        if (lane == 0) {
            atomicAdd(a.counters + DS_COUNT + i, (unsigned long long)total);
        }
    }
}

/* ---- the kernel -------------------------------------------------------------------------------------------- */

/* acc (32 rows, D) += dS (32, 32) K. */
template <int D> __device__ __forceinline__ void accumulate(float (*acc)[D / 8][4], float (*ds)[4][4], uint32_t k_tile)
{
#pragma unroll
    for (int k = 0; k < 2; k++) {
        uint32_t a[2][4];
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *pair = &ds[m][2 * k + (i >> 1)][2 * (i & 1)];
                a[m][i] = bf16_pair(pair[0], pair[1]);
            }
        }
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            uint32_t b[4];
            fragment_b_trans<D>(b, k_tile, 16 * n, 16 * k);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                mma_bf16(acc[m][2 * n], a[m], b);
                mma_bf16(acc[m][2 * n + 1], a[m], b + 2);
            }
        }
    }
}

/* A warp's dQ through its own rows of the Q tile to memory. */
template <int D>
__device__ __forceinline__ int store_dq(const struct bwd_args &a, float (*acc)[D / 8][4], float factor, uint32_t tile,
                                        int64_t batch, int64_t head, int row0)
{
    const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint32_t address = tile_chunk<D>(tile, 16 * m + 8 * h + g, 8 * n) + (uint32_t)(4 * c);
                const uint32_t pair = bf16_pair(acc[m][n][2 * h] * factor, acc[m][n][2 * h + 1] * factor);
                asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(pair) : "memory");
            }
        }
    }
    __syncwarp();
    return bwd_tile_store<32, D, 32>(tile, a, a.dq, batch, head, row0);
}

template <int D, bool CODES, enum pass PASS>
static __global__ void __launch_bounds__(DQ_THREADS, 2)
    attention_bwd_dq_kernel(const __grid_constant__ struct bwd_args a)
{
    constexpr bool DQ = PASS == PASS_DQ || PASS == PASS_DQ_SUMS;
    extern __shared__ __align__(128) unsigned char memory[];
    struct dq_shared<D> *s = reinterpret_cast<struct dq_shared<D> *>(memory);
    const int64_t batch = blockIdx.x / a.heads, head = blockIdx.x % a.heads;
    const int64_t kv = head / (a.heads / a.kv_heads), unit = batch * a.kv_heads + kv;
    const int row0 = (int)(gridDim.y - 1 - blockIdx.y) * DQ_ROWS; /* the longest first */
    const int row_w = 32 * (threadIdx.x >> 5);
    const int keys = a.causal && row0 + DQ_ROWS < a.tokens ? row0 + DQ_ROWS : a.tokens;
    const int steps = (keys + DQ_KEYS - 1) / DQ_KEYS;
    const int64_t rows = (batch * a.heads + head) * a.tokens;
    const float lift = a.units[unit].lift;
    const uint32_t q_tile = shared_address(s->q), dout_tile = shared_address(s->dout);

    tile_load<DQ_ROWS, D, DQ_THREADS>(q_tile, bwd_head(a.q, batch, head), a.q.token_stride, row0, a.tokens, a.head_dim);
    tile_load<DQ_ROWS, D, DQ_THREADS>(dout_tile, bwd_head(a.dout, batch, head), a.dout.token_stride, row0, a.tokens,
                                      a.head_dim);
    load_keys<D>(a, s, 0, batch, kv, 0, DQ);
    copies_commit();

    const struct bwd_rows reference = bwd_rows_load(a.reference + rows, row0 + row_w, a.tokens, CUDART_INF_F);
    struct bwd_rows r = {};
    if (PASS != PASS_MEAN) {
        r = bwd_rows_load(a.stat + rows, row0 + row_w, a.tokens, 0.0f);
    }
    struct row_sums sums = {};
    struct ds_counts counts = {};
    float dq[2][D / 8][4] = {};
    for (int step = 0; step < steps; step++) {
        const int stage = step & 1;
        copies_wait<0>();
        __syncthreads(); /* the tiles are there, and nobody reads the other stage any more */
        if (step + 1 < steps) {
            load_keys<D>(a, s, stage ^ 1, batch, kv, (step + 1) * DQ_KEYS, DQ);
        }
        copies_commit();
        const struct bwd_tile t = {row0 + row_w, step * DQ_KEYS, a.tokens, a.causal};
        if (bwd_tile_empty(t)) {
            continue;
        }
        float x[2][4][4], dp[2][4][4];
        bwd_product<D>(x, q_tile, row_w, shared_address(s->k[stage]), 0);
        make_p<CODES>(a, x, t, reference, rows);
        bwd_product<D>(dp, dout_tile, row_w, shared_address(s->v[stage]), 0);
        if (a.v_diag.data != nullptr && t.row0 == t.key0) {
            bwd_diagonal<D>(dp, a, dout_tile, row_w, bwd_head(a.v_diag, batch, kv), t.key0);
        }
        if (DQ) {
            make_ds<PASS == PASS_DQ_SUMS>(a, x, dp, r, lift, &sums, &counts);
            const bool same = a.k_view.data == a.k.data;
            accumulate<D>(dq, x, shared_address(same ? s->k[stage] : s->k_view[stage]));
        } else {
            weigh<PASS == PASS_MEAN>(a, x, dp, r, &sums);
        }
    }
    copies_wait<0>();
    __syncthreads();

    const int lane = threadIdx.x & 31;
    const int row = row0 + row_w + 8 * (lane & 3) + (lane >> 2); /* the row that this lane keeps sums of */
    if (DQ) {
        const int bad =
            store_dq<D>(a, dq, a.softmax_scale / lift, q_tile + (uint32_t)(row_w * 2 * D), batch, head, row0 + row_w);
        if (PASS == PASS_DQ_SUMS) {
            close_sums(a, sums, counts, bad, rows, row, lift);
        }
    } else if (row < a.tokens) {
        const double mean = sums.abs > 0.0 ? sums.sum / sums.abs : 0.0;
        float *stat = a.stat + rows + row;
        *stat = PASS == PASS_MEAN ? (float)mean : *stat - (float)((double)a.debug_leak * mean);
    }
}

template <int D, bool CODES, enum pass PASS>
static void launch(const struct cuda *on, const struct bwd_args *a, int64_t batch)
{
    const size_t bytes = sizeof(struct dq_shared<D>);
    cudaFuncSetAttribute(attention_bwd_dq_kernel<D, CODES, PASS>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         (int)bytes);
    const dim3 grid((unsigned int)(batch * a->heads), cuda_blocks(a->tokens, DQ_ROWS));
    attention_bwd_dq_kernel<D, CODES, PASS><<<grid, DQ_THREADS, bytes, on->stream>>>(*a);
    cuda_launched(on, "attention_bwd_dq");
}

template <enum pass PASS> static void choose(const struct cuda *on, const struct bwd_args *a, int64_t batch)
{
    const bool codes = a->p_codes && !a->ds_exact; /* dS alone: unrounded P needs no codes */
    struct bwd_args own = *a;
    own.reference = a->ds_exact && a->p_codes ? a->exact : a->reference;
    if (a->head_dim > 64) {
        codes ? launch<128, true, PASS>(on, &own, batch) : launch<128, false, PASS>(on, &own, batch);
    } else {
        codes ? launch<64, true, PASS>(on, &own, batch) : launch<64, false, PASS>(on, &own, batch);
    }
}

void bwd_launch_dq(const struct cuda *on, const struct bwd_args *a, int64_t batch)
{
    a->counters != nullptr ? choose<PASS_DQ_SUMS>(on, a, batch) : choose<PASS_DQ>(on, a, batch);
}

void bwd_launch_stat(const struct cuda *on, const struct bwd_args *a, int64_t batch, bool planted)
{
    planted ? choose<PASS_PLANTED>(on, a, batch) : choose<PASS_MEAN>(on, a, batch);
}
