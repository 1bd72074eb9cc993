/* attention: the steps of the kernel in attention_cuda_bwd_gradients.cu, whose head describes the whole. Nobody else
 * includes it. */
#pragma once

#include "attention/attention_cuda_bwd.cuh"
#include "attention/attention_cuda_bwd_codes.cuh"

enum { KEYS = GRADIENT_KEYS, ROWS = GRADIENT_ROWS, THREADS = GRADIENT_THREADS };

template <int D> struct gradients_shared {
    bf16 k[KEYS * D], v[KEYS * D], k_view[KEYS * D];
    bf16 q[2][ROWS * D], dout[2][ROWS * D], q_view[2][ROWS * D];
    bf16 p[ROWS * KEYS], ds[ROWS * KEYS];
    float reference[2][ROWS], stat[2][ROWS];
    uint64_t free; /* barrier: threads that have read P, dS and the rows of a step */
};

/* One step's tiles of query rows, and what rows carry. The view of Q is not loaded where it is the score operand. */
template <int D>
__device__ __forceinline__ void load_rows(const struct bwd_args &a, struct gradients_shared<D> *s, int stage,
                                          int64_t batch, int64_t head, int64_t row)
{
    tile_load<ROWS, D, THREADS>(shared_address(s->q[stage]), bwd_head(a.q, batch, head), a.q.token_stride, row,
                                a.tokens, a.head_dim);
    tile_load<ROWS, D, THREADS>(shared_address(s->dout[stage]), bwd_head(a.dout, batch, head), a.dout.token_stride, row,
                                a.tokens, a.head_dim);
    if (a.q_view.data != a.q.data) {
        tile_load<ROWS, D, THREADS>(shared_address(s->q_view[stage]), bwd_head(a.q_view, batch, head),
                                    a.q_view.token_stride, row, a.tokens, a.head_dim);
    }
    if (threadIdx.x < ROWS) {
        const int i = (int)threadIdx.x;
        const int64_t at = (batch * a.heads + head) * a.tokens + row + i;
        if (row + i < a.tokens) {
            copy4_async(shared_address(&s->reference[stage][i]), a.reference + at);
            copy4_async(shared_address(&s->stat[stage][i]), a.stat + at);
        } else { /* past the end P is zero */
            s->reference[stage][i] = CUDART_INF_F;
            s->stat[stage][i] = 0.0f;
        }
    }
}

__device__ __forceinline__ struct bwd_rows rows_of(const float *shared, int row0)
{
    const int g = (threadIdx.x & 31) >> 2;
    return {shared[row0 + g], shared[row0 + 8 + g], shared[row0 + 16 + g], shared[row0 + 24 + g]};
}

/* A pair of neighbouring keys of one row, as BF16, into a (64, 128) tile. */
__device__ __forceinline__ void put_pair(uint32_t tile, int row, int key, float2 x)
{
    const uint32_t address = tile_chunk<KEYS>(tile, row, key & ~7) + (uint32_t)(key & 7) * 2;
    bwd_put(address, bf16_pair(x.x, x.y));
}

/* A warp's 32 x 32 of it. */
__device__ __forceinline__ void clear_tile(uint32_t tile, int row0, int key0)
{
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        put_pair(tile, row0 + 2 * i + (lane >> 4), key0 + 2 * (lane & 15), make_float2(0.0f, 0.0f));
    }
}

/* Scores become P of dS, and P of dV goes to shared memory. */
template <enum route ROUTE>
__device__ __forceinline__ void make_p(const struct bwd_args &a, float (*x)[4][4], const struct bwd_tile &t,
                                       const struct bwd_rows &reference, int64_t rows, uint32_t p_tile, int row0,
                                       int key0)
{
    const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
    if (ROUTE >= ROUTE_CODES) {
        bwd_codes<ROUTE>(a, x, t, reference, rows, [&](int m, int n, int h, float2 p) {
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
                float2 rounded = make_float2(p[0], p[1]);
                if (ROUTE == ROUTE_ROUNDED) {
                    rounded = bwd_round_p(a.p_fp8, p[0], p[1]);
                    p[0] = a.ds_exact ? p[0] : rounded.x;
                    p[1] = a.ds_exact ? p[1] : rounded.y;
                }
                put_pair(p_tile, row0 + 16 * m + 8 * h + g, key0 + 8 * n + 2 * c, rounded);
            }
        }
    }
}

/* ---- sums over rows ---------------------------------------------------------------------------------------- */

/* Of one lane: the entries of dS, and of row c of its quad's four (index 2 m + h) the sums over 32 keys: dS, |dS|, and
 * of the stored ones. */
struct ds_sums {
    float row[4];
    int count, flushed, saturated;
};

/* y: dS times the lift; z: as stored. */
__device__ __forceinline__ void count_ds(struct ds_sums *s, float y, float z, bool e4m3)
{
    s->count += y != 0.0f;
    s->flushed += y != 0.0f && z == 0.0f;
    s->saturated += e4m3 && fabsf(y) > 464.0f;
}

__device__ __forceinline__ void add_ds(float (*part)[4], int row, float x, float z)
{
    part[0][row] += x;
    part[1][row] += fabsf(x);
    part[2][row] += z;
    part[3][row] += fabsf(z);
}

/* P and dP of a tile become stored dS, in shared memory. */
template <enum route ROUTE, bool SUMS>
__device__ __forceinline__ void make_ds(const struct bwd_args &a, float (*x)[4][4], float (*dp)[4][4],
                                        const struct bwd_rows &r, float lift, uint32_t ds_tile, int row0, int key0,
                                        struct ds_sums *sums)
{
    const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
    float part[4][4] = {};
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = 2 * m + h;
                const float *p = &x[m][n][2 * h];
                const float *d = &dp[m][n][2 * h];
                float2 ds =
                    make_float2(__fmul_rn(p[0], __fsub_rn(d[0], r.x[row])), __fmul_rn(p[1], __fsub_rn(d[1], r.x[row])));
                float2 lifted = ds, stored = ds;
                if (ROUTE != ROUTE_BF16) {
                    ds = make_float2(bwd_ds(a, p[0], d[0], r.x[row]), bwd_ds(a, p[1], d[1], r.x[row]));
                    lifted = make_float2(lift * ds.x, lift * ds.y);
                }
                if (ROUTE != ROUTE_BF16 || SUMS) { /* put_pair rounds to BF16 by itself */
                    stored = bwd_store_ds(ROUTE != ROUTE_BF16 && a.ds_e4m3, lifted.x, lifted.y);
                }
                put_pair(ds_tile, row0 + 16 * m + 8 * h + g, key0 + 8 * n + 2 * c, stored);
                if (SUMS) {
                    add_ds(part, row, ds.x, stored.x);
                    add_ds(part, row, ds.y, stored.y);
                    count_ds(sums, lifted.x, stored.x, a.ds_e4m3);
                    count_ds(sums, lifted.y, stored.y, a.ds_e4m3);
                }
            }
        }
    }
    if (SUMS) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sums->row[i] = bwd_keep_row(part[i]);
        }
    }
}

/* The block's part of the sums of 64 rows, through shared memory (4 KiB), in the order of the warps along the keys.
 * Thread 4 r + i gets sum i of row r: rows of its own warp, whose turn guards what follows. */
__device__ __forceinline__ double gather_rows(const struct ds_sums *sums, float4 *shared, int row_w)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    shared[(warp & 3) * ROWS + row_w + 8 * (lane & 3) + (lane >> 2)] =
        make_float4(sums->row[0], sums->row[1], sums->row[2], sums->row[3]);
    __syncthreads();
    const float *x = reinterpret_cast<const float *>(shared) + threadIdx.x;
    const double sum = (double)x[0] + (double)x[4 * ROWS];
    return sum + (double)x[8 * ROWS] + (double)x[12 * ROWS];
}

/* ---- products ---------------------------------------------------------------------------------------------- */

/* acc (32, 16 N) += A B, A from row row0 on, B (DEPTH, D) from column d0 on. A is X (64 query rows, 128 keys) or, where
 * TRANSPOSED, X^T. */
template <int D, int N, int DEPTH, bool TRANSPOSED>
__device__ __forceinline__ void multiply(float (*acc)[2 * N][4], uint32_t x, uint32_t b, int row0, int d0)
{
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
        uint32_t fa[2][4];
#pragma unroll
        for (int m = 0; m < 2; m++) {
            if (TRANSPOSED) {
                fragment_a_trans<KEYS>(fa[m], x, row0 + 16 * m, k);
            } else {
                fragment_a<KEYS>(fa[m], x, row0 + 16 * m, k);
            }
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            uint32_t fb[4];
            fragment_b_trans<D>(fb, b, d0 + 16 * n, k);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                mma_bf16(acc[m][2 * n], fa[m], fb);
                mma_bf16(acc[m][2 * n + 1], fa[m], fb + 2);
            }
        }
    }
}

/* dq (32 rows, D / 4) = dS K, dS (64 rows, 128 keys), K (128 keys, D). */
template <int D>
__device__ __forceinline__ void multiply_dq(float (*dq)[D / 32][4], uint32_t ds, uint32_t k, int row0, int d0)
{
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < D / 32; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                dq[m][n][e] = 0.0f;
            }
        }
    }
    multiply<D, D / 64, KEYS, false>(dq, ds, k, row0, d0);
}

/* acc (32 keys, D / 2) += X^T Y, X (64 rows, 128 keys), Y (64 rows, D): dK, dV. */
template <int D>
__device__ __forceinline__ void accumulate(float (*acc)[D / 16][4], uint32_t x, uint32_t y, int key0, int d0)
{
    multiply<D, D / 32, ROWS, true>(acc, x, y, key0, d0);
}

/* ---- dQ ---------------------------------------------------------------------------------------------------- */

__device__ __forceinline__ void add4(float4 *to, const float *x)
{
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]),
                 "f"(x[3])
                 : "memory");
}

/* A warp's part of dQ of a tile: float4 number (m D / 32 + n) 32 + lane of the warp's D * 2 floats per lane. */
template <int D> __device__ __forceinline__ void add_dq(float (*dq)[D / 32][4], float4 *to, bool first)
{
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < D / 32; n++) {
            float4 *at = to + (m * (D / 32) + n) * 32 + lane;
            if (first) {
                *at = make_float4(dq[m][n][0], dq[m][n][1], dq[m][n][2], dq[m][n][3]);
            } else {
                add4(at, dq[m][n]);
            }
        }
    }
}

/* How many blocks of keys have added to this warp's part; only lane 0 looks. */
__device__ __forceinline__ uint32_t turn_now(const uint32_t *turns, uint32_t otherwise)
{
    uint32_t now = otherwise;
    if ((threadIdx.x & 31) == 0) {
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(turns) : "memory");
    }
    return now;
}

/* Waits until it is `turn`, beginning with what an early look saw. What follows are sums in the L2 cache, where the
 * ones before ours have arrived before the counter moved. */
__device__ __forceinline__ void turn_wait(const uint32_t *turns, uint32_t turn, uint32_t now)
{
    while (now != turn) {
        now = turn_now(turns, turn);
    }
    __syncwarp();
}

__device__ __forceinline__ void turn_pass(uint32_t *turns, uint32_t turn)
{
    __threadfence(); /* this lane's sums are there for all */
    __syncwarp();
    if ((threadIdx.x & 31) == 0) {
        asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(turns), "r"(turn + 1) : "memory");
    }
}

/* ---- dK, dV ------------------------------------------------------------------------------------------------ */

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
                bwd_put(address, pair);
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
