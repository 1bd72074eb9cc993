/* attention: the last steps of the CUDA backward: dQ is scaled and rounded once, and sums of the rows of dS go to the
 * statistics; dK less its mean over keys; the statistics of the call. */
#include "attention/attention_cuda_bwd.cuh"

enum { MEAN_THREADS = 1024, STATS_THREADS = 256 };

/* ---- dQ ---------------------------------------------------------------------------------------------------- */

__device__ __forceinline__ double warp_sum_double(double x)
{
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) {
        x += __shfl_xor_sync(0xffffffffu, x, o);
    }
    return x;
}

/* The statistics of 64 rows, thread r has row r. */
__device__ __forceinline__ void close_rows(const struct bwd_args &a, int64_t rows, int row, float lift, double *to)
{
    __shared__ double half[BWD_SUMS];
    double x[BWD_SUMS] = {};
    if (threadIdx.x < GRADIENT_ROWS && row < a.tokens) {
        const double *s = a.row_sums + (rows + row) * 4;
        const float fold = a.p_codes ? bwd_fold(a.lse[rows + row]) : 1.0f;
        const double r = (double)(a.stat[rows + row] / fold);
        x[LEAK_ABS] = fabs(s[0]);
        x[DS_ABS] = s[1];
        x[LEAK_STORED_ABS] = fabs(s[2]) / (double)lift;
        x[DS_STORED_ABS] = s[3] / (double)lift;
        x[LEAK_R] = s[0] * r;
        x[R_R] = r * r;
    }
#pragma unroll
    for (int i = 0; i < BWD_SUMS; i++) {
        x[i] = warp_sum_double(x[i]);
        if (threadIdx.x == 32) {
            half[i] = x[i];
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < BWD_SUMS; i++) {
        if (threadIdx.x == 0) {
            to[i] = x[i] + half[i];
        }
    }
}

/* A block of threads has a tile of 64 rows; its warps hold it as those of the gradient kernel did. */
template <int D> static __global__ void attention_bwd_dq_kernel(const __grid_constant__ struct bwd_args a)
{
    __shared__ __align__(128) bf16 tile[GRADIENT_ROWS * D];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3;
    const int64_t batch = blockIdx.y / a.heads, head = blockIdx.y % a.heads;
    const int64_t unit = batch * a.kv_heads + head / (a.heads / a.kv_heads),
                  block = (int64_t)blockIdx.y * gridDim.x + blockIdx.x;
    const int row0 = (int)blockIdx.x * GRADIENT_ROWS;
    const float lift = a.units[unit].lift, factor = a.softmax_scale / lift;
    const float4 *x = reinterpret_cast<const float4 *>(a.dq_sums) + (block * GRADIENT_WARPS + warp) * (D / 16 * 32);
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < D / 32; n++) {
            const float4 y = x[(m * (D / 32) + n) * 32 + lane];
            const int row = 32 * (warp >> 2) + 16 * m + g, column = D / 4 * (warp & 3) + 8 * n;
            bwd_put(tile_chunk<D>(shared_address(tile), row, column) + 4 * c, bf16_pair(y.x * factor, y.y * factor));
            bwd_put(tile_chunk<D>(shared_address(tile), row + 8, column) + 4 * c,
                    bf16_pair(y.z * factor, y.w * factor));
        }
    }
    __syncthreads();
    const int bad =
        bwd_tile_store<GRADIENT_ROWS, D, GRADIENT_THREADS>(shared_address(tile), a, a.dq, batch, head, row0);
    if (a.counters != nullptr) {
        bwd_count(a.counters, NON_FINITE, bad);
        close_rows(a, (int64_t)blockIdx.y * a.tokens, row0 + (int)threadIdx.x, lift, a.sums + block * BWD_SUMS);
    }
}

void bwd_finish_dq(const struct cuda *on, const struct bwd_args *a, int64_t batch)
{
    const dim3 grid(cuda_blocks(a->tokens, GRADIENT_ROWS), (unsigned int)(batch * a->heads));
    if (a->head_dim > 64) {
        attention_bwd_dq_kernel<128><<<grid, GRADIENT_THREADS, 0, on->stream>>>(*a);
    } else {
        attention_bwd_dq_kernel<64><<<grid, GRADIENT_THREADS, 0, on->stream>>>(*a);
    }
    cuda_launched(on, "attention_bwd_dq");
}

/* ---- dK less its mean over keys ----------------------------------------------------------------------------- */

/* A block has one (batch, kv head): the threads of a feature take every PARTS-th key each. */
static __global__ void attention_bwd_dk_kernel(const struct bwd_args a)
{
    __shared__ double part[MEAN_THREADS];
    const int64_t unit = blockIdx.x, batch = unit / a.kv_heads, kv = unit % a.kv_heads;
    const int parts = MEAN_THREADS / a.head_dim, d = threadIdx.x % a.head_dim, mine = threadIdx.x / a.head_dim;
    const float *x = a.dk_sums + unit * a.tokens * a.head_dim + d;
    double sum = 0;
    for (int64_t j = mine; mine < parts && j < a.tokens; j += parts) {
        sum += (double)x[j * a.head_dim];
    }
    part[threadIdx.x] = sum;
    __syncthreads();
    if (mine >= parts) {
        return;
    }
    sum = 0;
    for (int i = 0; i < parts; i++) {
        sum += part[i * a.head_dim + d];
    }
    const float mean = (float)(sum / (double)a.tokens), factor = a.softmax_scale / a.units[unit].lift;
    bf16 *y = a.dk.data + batch * a.dk.batch_stride + kv * a.dk.head_stride + d;
    int bad = 0;
    for (int64_t j = mine; j < a.tokens; j += parts) {
        const bf16 z = bf16_code((x[j * a.head_dim] - mean) * factor);
        y[j * a.dk.token_stride] = z;
        bad += (z & 0x7f80) == 0x7f80;
    }
    if (a.counters != nullptr && bad > 0) {
        atomicAdd(a.counters + NON_FINITE, (unsigned long long)bad);
    }
}

void bwd_finish_dk(const struct cuda *on, const struct bwd_args *a, int64_t batch)
{
    attention_bwd_dk_kernel<<<(unsigned int)(batch * a->kv_heads), MEAN_THREADS, 0, on->stream>>>(*a);
    cuda_launched(on, "attention_bwd_dk");
}

/* ---- statistics --------------------------------------------------------------------------------------------- */

static __global__ void attention_bwd_stats_kernel(const double *sums, int64_t blocks,
                                                  const unsigned long long *counters, struct attention_stats *stats)
{
    __shared__ double part[STATS_THREADS];
    double total[BWD_SUMS];
    for (int s = 0; s < BWD_SUMS; s++) {
        double x = 0;
        for (int64_t i = threadIdx.x; i < blocks; i += STATS_THREADS) {
            x += sums[i * BWD_SUMS + s];
        }
        part[threadIdx.x] = x;
        __syncthreads();
        for (int o = STATS_THREADS / 2; o > 0; o /= 2) {
            if ((int)threadIdx.x < o) {
                part[threadIdx.x] += part[threadIdx.x + o];
            }
            __syncthreads();
        }
        total[s] = part[0];
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        stats->leak_abs += total[LEAK_ABS];
        stats->ds_abs += total[DS_ABS];
        stats->leak_stored_abs += total[LEAK_STORED_ABS];
        stats->ds_stored_abs += total[DS_STORED_ABS];
        stats->leak_r += total[LEAK_R];
        stats->r_r += total[R_R];
        stats->do_count += (double)counters[DO_COUNT];
        stats->do_flushed += (double)counters[DO_FLUSHED];
        stats->ds_count += (double)counters[DS_COUNT];
        stats->ds_flushed += (double)counters[DS_FLUSHED];
        stats->ds_saturated += (double)counters[DS_SATURATED];
        stats->non_finite += (double)counters[NON_FINITE];
    }
}

void bwd_finish_stats(const struct cuda *on, const struct bwd_args *a, int64_t blocks, struct attention_stats *stats)
{
    attention_bwd_stats_kernel<<<1, STATS_THREADS, 0, on->stream>>>(a->sums, blocks, a->counters, stats);
    cuda_launched(on, "attention_bwd_stats");
}
