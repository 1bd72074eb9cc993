/* attention: what needs whole rows of P and dP before dS can be made: the statistic of `recentred`, and the planted
 * error of debug_leak. Rare, so it is a pass of its own over the keys.
 *
 * A block of threads owns 128 query rows of one head, 32 for each of its four warps, and walks over the keys that they
 * see, 32 at a time. */
#include "attention/attention_cuda_bwd.cuh"
#include "attention/attention_cuda_bwd_codes.cuh"

enum { ROWS = 128, KEYS = 32, THREADS = 128 };

template <int D> struct stat_shared {
    bf16 q[ROWS * D], dout[ROWS * D];
    bf16 k[2][KEYS * D], v[2][KEYS * D];
};

template <int D>
__device__ __forceinline__ void load_keys(const struct bwd_args &a, struct stat_shared<D> *s, int stage, int64_t batch,
                                          int64_t kv, int64_t key)
{
    tile_load<KEYS, D, THREADS>(shared_address(s->k[stage]), bwd_head(a.k, batch, kv), a.k.token_stride, key, a.tokens,
                                a.head_dim);
    tile_load<KEYS, D, THREADS>(shared_address(s->v[stage]), bwd_head(a.v, batch, kv), a.v.token_stride, key, a.tokens,
                                a.head_dim);
}

/* Scores become P as dS takes it. */
template <bool CODES>
__device__ __forceinline__ void make_p(const struct bwd_args &a, float (*x)[4][4], const struct bwd_tile &t,
                                       const struct bwd_rows &reference, int64_t rows)
{
    if (CODES) {
        bwd_codes<ROUTE_CODES>(a, x, t, reference, rows, [](int, int, int, float2) {});
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

/* Of row c of the quad's four: P dP, or |P (dP - r)|; and P. A tile's part is summed in FP32, tiles in FP64. */
struct row_weights {
    double sum, weight;
};

/* The factor of the codes cancels. */
template <bool MEAN>
__device__ __forceinline__ void weigh(const struct bwd_args &a, float (*x)[4][4], float (*dp)[4][4],
                                      const struct bwd_rows &r, struct row_weights *sums)
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
    sums->sum += (double)bwd_keep_row(part);
    sums->weight += (double)bwd_keep_row(weight);
}

template <int D, bool CODES, bool MEAN>
static __global__ void __launch_bounds__(THREADS, 2)
    attention_bwd_stat_kernel(const __grid_constant__ struct bwd_args a)
{
    extern __shared__ __align__(128) unsigned char memory[];
    struct stat_shared<D> *s = reinterpret_cast<struct stat_shared<D> *>(memory);
    const int64_t batch = blockIdx.x / a.heads, head = blockIdx.x % a.heads, kv = head / (a.heads / a.kv_heads);
    const int row0 = (int)(gridDim.y - 1 - blockIdx.y) * ROWS; /* the longest first */
    const int row_w = 32 * (threadIdx.x >> 5);
    const int keys = a.causal && row0 + ROWS < a.tokens ? row0 + ROWS : a.tokens;
    const int64_t rows = (batch * a.heads + head) * a.tokens;
    const uint32_t q_tile = shared_address(s->q), dout_tile = shared_address(s->dout);

    tile_load<ROWS, D, THREADS>(q_tile, bwd_head(a.q, batch, head), a.q.token_stride, row0, a.tokens, a.head_dim);
    tile_load<ROWS, D, THREADS>(dout_tile, bwd_head(a.dout, batch, head), a.dout.token_stride, row0, a.tokens,
                                a.head_dim);
    load_keys<D>(a, s, 0, batch, kv, 0);
    copies_commit();
    const struct bwd_rows reference = bwd_rows_load(a.reference + rows, row0 + row_w, a.tokens, CUDART_INF_F);
    struct bwd_rows r = {};
    if (!MEAN) {
        r = bwd_rows_load(a.stat + rows, row0 + row_w, a.tokens, 0.0f);
    }
    struct row_weights sums = {};
    for (int key = 0, stage = 0; key < keys; key += KEYS, stage ^= 1) {
        copies_wait<0>();
        __syncthreads(); /* the tiles are there, and nobody reads the other stage any more */
        if (key + KEYS < keys) {
            load_keys<D>(a, s, stage ^ 1, batch, kv, key + KEYS);
        }
        copies_commit();
        const struct bwd_tile t = {row0 + row_w, key, a.tokens, a.causal};
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
        weigh<MEAN>(a, x, dp, r, &sums);
    }
    copies_wait<0>();
    const int lane = threadIdx.x & 31;
    const int row = row0 + row_w + 8 * (lane & 3) + (lane >> 2); /* the row that this lane keeps sums of */
    if (row < a.tokens) {
        const double mean = sums.weight > 0.0 ? sums.sum / sums.weight : 0.0;
        float *stat = a.stat + rows + row;
        *stat = MEAN ? (float)mean : *stat - (float)((double)a.debug_leak * mean);
    }
}

template <int D, bool CODES, bool MEAN>
static void launch(const struct cuda *on, const struct bwd_args *a, int64_t batch)
{
    const size_t bytes = sizeof(struct stat_shared<D>);
    cudaFuncSetAttribute(attention_bwd_stat_kernel<D, CODES, MEAN>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         (int)bytes);
    const dim3 grid((unsigned int)(batch * a->heads), cuda_blocks(a->tokens, ROWS));
    attention_bwd_stat_kernel<D, CODES, MEAN><<<grid, THREADS, bytes, on->stream>>>(*a);
    cuda_launched(on, "attention_bwd_stat");
}

template <bool MEAN> static void choose(const struct cuda *on, const struct bwd_args *a, int64_t batch)
{
    const bool codes = a->p_codes && !a->ds_exact; /* P of dS alone: unrounded P needs no codes */
    struct bwd_args own = *a;
    own.reference = a->ds_exact && a->p_codes ? a->exact : a->reference;
    if (a->head_dim > 64) {
        codes ? launch<128, true, MEAN>(on, &own, batch) : launch<128, false, MEAN>(on, &own, batch);
    } else {
        codes ? launch<64, true, MEAN>(on, &own, batch) : launch<64, false, MEAN>(on, &own, batch);
    }
}

void bwd_launch_stat(const struct cuda *on, const struct bwd_args *a, int64_t batch, bool planted)
{
    planted ? choose<false>(on, a, batch) : choose<true>(on, a, batch);
}
