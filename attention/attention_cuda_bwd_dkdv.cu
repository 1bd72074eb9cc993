/* attention: dK and dV of the CUDA backward. A block of threads owns 128 keys of one kv head and meets all query rows
 * that see them, 64 at a time, the query heads of the kv head one after the other: sums stay in registers and have one
 * order.
 *
 * Eight warps. For scores and dP they lie 2 x 4 over 64 rows x 128 keys, 32 x 32 each; P and dS go through shared
 * memory, where the warps meet them again as 4 x 2 over 128 keys x D. Q, dO' and the view of Q are loaded one step
 * ahead. */
#include "attention/attention_cuda_bwd.cuh"
#include "attention/attention_cuda_bwd_codes.cuh"

template <int D> struct dkdv_shared {
    bf16 k[DKDV_KEYS * D], v[DKDV_KEYS * D];
    bf16 q[2][DKDV_ROWS * D], dout[2][DKDV_ROWS * D], q_view[2][DKDV_ROWS * D];
    bf16 p[DKDV_ROWS * DKDV_KEYS], ds[DKDV_ROWS * DKDV_KEYS];
};

/* One step's tiles of query rows. The view of Q is not loaded where it is the score operand itself. */
template <int D>
__device__ __forceinline__ void load_rows(const struct bwd_args &a, struct dkdv_shared<D> *s, int stage, int64_t batch,
                                          int64_t head, int64_t row)
{
    tile_load<DKDV_ROWS, D, DKDV_THREADS>(shared_address(s->q[stage]), bwd_head(a.q, batch, head), a.q.token_stride,
                                          row, a.tokens, a.head_dim);
    tile_load<DKDV_ROWS, D, DKDV_THREADS>(shared_address(s->dout[stage]), bwd_head(a.dout, batch, head),
                                          a.dout.token_stride, row, a.tokens, a.head_dim);
    if (a.q_view.data != a.q.data) {
        tile_load<DKDV_ROWS, D, DKDV_THREADS>(shared_address(s->q_view[stage]), bwd_head(a.q_view, batch, head),
                                              a.q_view.token_stride, row, a.tokens, a.head_dim);
    }
}

/* A pair of neighbouring keys of one row, as BF16, into a (64, 128) tile. */
__device__ __forceinline__ void put_pair(uint32_t tile, int row, int key, float2 x)
{
    const uint32_t address = tile_chunk<DKDV_KEYS>(tile, row, key & ~7) + (uint32_t)(key & 7) * 2;
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(bf16_pair(x.x, x.y)) : "memory");
}

/* Scores become P of dS, and P of dV goes to shared memory. */
template <bool CODES>
__device__ __forceinline__ void make_p(const struct bwd_args &a, float (*x)[4][4], const struct bwd_tile &t, int row0,
                                       int key0, int64_t rows, uint32_t p_tile)
{
    const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
    const struct bwd_rows reference = bwd_rows_load(a.reference + rows, t.row0, t.tokens, CUDART_INF_F);
    if (CODES) {
        bwd_codes(a, x, t, reference, rows, [&](int m, int n, int h, float2 p) {
            put_pair(p_tile, row0 + 16 * m + 8 * h + g, key0 + 8 * n + 2 * c, p);
        });
        return;
    }
    bwd_exponentials(x, t, a.c, reference);
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float *p = &x[m][n][2 * h];
                const float2 rounded = bwd_round_p(a.p_fp8, p[0], p[1]);
                put_pair(p_tile, row0 + 16 * m + 8 * h + g, key0 + 8 * n + 2 * c, rounded);
                if (!a.ds_exact) {
                    p[0] = rounded.x;
                    p[1] = rounded.y;
                }
            }
        }
    }
}

/* acc (32 keys, D / 2) += X^T Y, X (64 rows, 128 keys), Y (64 rows, D). */
template <int D>
__device__ __forceinline__ void accumulate(float (*acc)[D / 16][4], uint32_t x, uint32_t y, int key0, int d0)
{
#pragma unroll
    for (int k = 0; k < DKDV_ROWS; k += 16) {
        uint32_t a[2][4];
        fragment_a_trans<DKDV_KEYS>(a[0], x, key0, k);
        fragment_a_trans<DKDV_KEYS>(a[1], x, key0 + 16, k);
#pragma unroll
        for (int n = 0; n < D / 32; n++) {
            uint32_t b[4];
            fragment_b_trans<D>(b, y, d0 + 16 * n, k);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                mma_bf16(acc[m][2 * n], a[m], b);
                mma_bf16(acc[m][2 * n + 1], a[m], b + 2);
            }
        }
    }
}

/* A warp's part of dK or dV into a (128, D) tile as BF16. */
template <int D>
__device__ __forceinline__ void stage_out(float (*acc)[D / 16][4], float factor, uint32_t tile, int key0, int d0)
{
    const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint32_t address = tile_chunk<D>(tile, key0 + 16 * m + 8 * h + g, d0 + 8 * n) + (uint32_t)(4 * c);
                const uint32_t pair = bf16_pair(acc[m][n][2 * h] * factor, acc[m][n][2 * h + 1] * factor);
                asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(pair) : "memory");
            }
        }
    }
}

/* FP32 dK for the mean over keys. */
template <int D>
__device__ __forceinline__ void store_sums(float (*acc)[D / 16][4], float *out, const struct bwd_args &a, int key0,
                                           int d0)
{
    const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int key = key0 + 16 * m + 8 * h + g;
#pragma unroll
            for (int n = 0; n < D / 16; n++) {
                const int d = d0 + 8 * n + 2 * c;
                if (key >= a.tokens || d >= a.head_dim) {
                    continue;
                }
                float2 *to = reinterpret_cast<float2 *>(out + (int64_t)key * a.head_dim + d);
                *to = make_float2(acc[m][n][2 * h], acc[m][n][2 * h + 1]);
            }
        }
    }
}

template <int D, bool CODES>
static __global__ void __launch_bounds__(DKDV_THREADS, 1)
    attention_bwd_dkdv_kernel(const __grid_constant__ struct bwd_args a)
{
    extern __shared__ __align__(128) unsigned char memory[];
    struct dkdv_shared<D> *s = reinterpret_cast<struct dkdv_shared<D> *>(memory);
    const int warp = threadIdx.x >> 5;
    const int row_w = 32 * (warp >> 2), key_w = 32 * (warp & 3);  /* place in 64 x 128 */
    const int key_o = 32 * (warp >> 1), d_o = D / 2 * (warp & 1); /* place in 128 x D */
    const int64_t unit = blockIdx.x, batch = unit / a.kv_heads, kv = unit % a.kv_heads;
    const int key0 = (int)blockIdx.y * DKDV_KEYS;
    const int group = a.heads / a.kv_heads;
    const int first = a.causal ? key0 / DKDV_ROWS * DKDV_ROWS : 0; /* the first rows that see these keys */
    const int steps = (a.tokens - first + DKDV_ROWS - 1) / DKDV_ROWS;
    const float lift = a.units[unit].lift;
    const uint32_t k_tile = shared_address(s->k), v_tile = shared_address(s->v);
    const uint32_t p_tile = shared_address(s->p), ds_tile = shared_address(s->ds);

    tile_load<DKDV_KEYS, D, DKDV_THREADS>(k_tile, bwd_head(a.k, batch, kv), a.k.token_stride, key0, a.tokens,
                                          a.head_dim);
    tile_load<DKDV_KEYS, D, DKDV_THREADS>(v_tile, bwd_head(a.v, batch, kv), a.v.token_stride, key0, a.tokens,
                                          a.head_dim);
    load_rows<D>(a, s, 0, batch, kv * group, first);
    copies_commit();

    float dk[2][D / 16][4] = {}, dv[2][D / 16][4] = {};
    for (int step = 0; step < group * steps; step++) {
        const int stage = step & 1;
        const int64_t head = kv * group + step / steps;
        const int row = first + step % steps * DKDV_ROWS;
        copies_wait<0>();
        __syncthreads(); /* the tiles are there, and nobody reads the other stage, P or dS any more */
        if (step + 1 < group * steps) {
            load_rows<D>(a, s, stage ^ 1, batch, kv * group + (step + 1) / steps,
                         first + (step + 1) % steps * DKDV_ROWS);
        }
        copies_commit();
        const uint32_t q_tile = shared_address(s->q[stage]), dout_tile = shared_address(s->dout[stage]);
        const uint32_t view_tile = a.q_view.data != a.q.data ? shared_address(s->q_view[stage]) : q_tile;
        const int64_t rows = (batch * a.heads + head) * a.tokens;
        const struct bwd_tile t = {row + row_w, key0 + key_w, a.tokens, a.causal};
        float x[2][4][4], dp[2][4][4];
        if (bwd_tile_empty(t)) {
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const int lane = threadIdx.x & 31;
                put_pair(p_tile, row_w + 2 * i + (lane >> 4), key_w + 2 * (lane & 15), make_float2(0.0f, 0.0f));
                put_pair(ds_tile, row_w + 2 * i + (lane >> 4), key_w + 2 * (lane & 15), make_float2(0.0f, 0.0f));
            }
        } else {
            bwd_product<D>(x, q_tile, row_w, k_tile, key_w);
            make_p<CODES>(a, x, t, row_w, key_w, rows, p_tile);
            bwd_product<D>(dp, dout_tile, row_w, v_tile, key_w);
            if (a.v_diag.data != nullptr && t.row0 == t.key0) {
                bwd_diagonal<D>(dp, a, dout_tile, row_w, bwd_head(a.v_diag, batch, kv), t.key0);
            }
            const struct bwd_rows r = bwd_rows_load(a.stat + rows, t.row0, t.tokens, 0.0f);
            const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int n = 0; n < 4; n++) {
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const float *p = &x[m][n][2 * h];
                        const float *d = &dp[m][n][2 * h];
                        const float y0 = lift * bwd_ds(a, p[0], d[0], r.x[2 * m + h]);
                        const float y1 = lift * bwd_ds(a, p[1], d[1], r.x[2 * m + h]);
                        put_pair(ds_tile, row_w + 16 * m + 8 * h + g, key_w + 8 * n + 2 * c,
                                 bwd_store_ds(a.ds_e4m3, y0, y1));
                    }
                }
            }
        }
        __syncthreads();
        accumulate<D>(dv, p_tile, dout_tile, key_o, d_o);
        accumulate<D>(dk, ds_tile, view_tile, key_o, d_o);
    }

    __syncthreads();
    const float dk_factor = a.softmax_scale / lift;
    stage_out<D>(dv, a.dv_factor, v_tile, key_o, d_o);
    if (a.dk_sums != nullptr) {
        store_sums<D>(dk, a.dk_sums + unit * a.tokens * a.head_dim, a, key0 + key_o, d_o);
    } else {
        stage_out<D>(dk, dk_factor, k_tile, key_o, d_o);
    }
    __syncthreads();
    int bad = bwd_tile_store<DKDV_KEYS, D, DKDV_THREADS>(v_tile, a, a.dv, batch, kv, key0);
    if (a.dk_sums == nullptr) {
        bad += bwd_tile_store<DKDV_KEYS, D, DKDV_THREADS>(k_tile, a, a.dk, batch, kv, key0);
    }
    if (a.counters != nullptr && bad > 0) {
        atomicAdd(a.counters + NON_FINITE, (unsigned long long)bad);
    }
}

template <int D, bool CODES> static void launch(const struct cuda *on, const struct bwd_args *a, int64_t batch)
{
    const size_t bytes = sizeof(struct dkdv_shared<D>);
    cudaFuncSetAttribute(attention_bwd_dkdv_kernel<D, CODES>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    const dim3 grid((unsigned int)(batch * a->kv_heads), cuda_blocks(a->tokens, DKDV_KEYS));
    attention_bwd_dkdv_kernel<D, CODES><<<grid, DKDV_THREADS, bytes, on->stream>>>(*a);
    cuda_launched(on, "attention_bwd_dkdv");
}

void bwd_launch_dkdv(const struct cuda *on, const struct bwd_args *a, int64_t batch)
{
    if (a->head_dim > 64) {
        a->p_codes ? launch<128, true>(on, a, batch) : launch<128, false>(on, a, batch);
    } else {
        a->p_codes ? launch<64, true>(on, a, batch) : launch<64, false>(on, a, batch);
    }
}
