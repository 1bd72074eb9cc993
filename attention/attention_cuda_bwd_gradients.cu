/* attention: the gradients of the CUDA backward. A block of threads owns 128 keys of one kv head and meets all query
 * rows that see them, 64 at a time, the query heads of the kv head one after the other: dK and dV stay in registers.
 *
 * dQ of 64 rows is a sum over blocks of keys. It grows in global memory, FP32, in ascending order of keys: every warp
 * has a part of its own and a turn counter for it, waits until the block of keys before has added, adds, and lets the
 * next go on. Blocks take their keys from a ticket, lowest first, so that whoever waits, waits for one that already
 * runs.
 *
 * Eight warps. For scores and dP they lie 2 x 4 over 64 rows x 128 keys, 32 x 32 each; P and dS go through shared
 * memory, where the warps meet them again as 4 x 2 over 128 keys x D (dK, dV) and as 2 x 4 over 64 rows x D (dQ). Q,
 * dO' and the view of Q are loaded one step ahead. */
#include "attention/attention_cuda_bwd.cuh"
#include "attention/attention_cuda_bwd_codes.cuh"

enum { KEYS = GRADIENT_KEYS, ROWS = GRADIENT_ROWS, THREADS = GRADIENT_THREADS };

/* How P and dS are made: as flash attention does; rounded as the arguments say; P of dV from codes. */
enum route { ROUTE_BF16, ROUTE_ROUNDED, ROUTE_CODES };

template <int D> struct gradients_shared {
    bf16 k[KEYS * D], v[KEYS * D], k_view[KEYS * D];
    bf16 q[2][ROWS * D], dout[2][ROWS * D], q_view[2][ROWS * D];
    bf16 p[ROWS * KEYS], ds[ROWS * KEYS];
    float reference[2][ROWS], stat[2][ROWS];
    uint64_t free; /* barrier: warps that have read P, dS and the rows of a step */
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
    if (ROUTE == ROUTE_CODES) {
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

/* ---- dQ ---------------------------------------------------------------------------------------------------- */

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
#pragma unroll
    for (int j = 0; j < KEYS; j += 16) {
        uint32_t a[2][4];
        fragment_a<KEYS>(a[0], ds, row0, j);
        fragment_a<KEYS>(a[1], ds, row0 + 16, j);
#pragma unroll
        for (int n = 0; n < D / 64; n++) {
            uint32_t b[4];
            fragment_b_trans<D>(b, k, d0 + 16 * n, j);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                mma_bf16(dq[m][2 * n], a[m], b);
                mma_bf16(dq[m][2 * n + 1], a[m], b + 2);
            }
        }
    }
}

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

/* acc (32 keys, D / 2) += X^T Y, X (64 rows, 128 keys), Y (64 rows, D). */
template <int D>
__device__ __forceinline__ void accumulate(float (*acc)[D / 16][4], uint32_t x, uint32_t y, int key0, int d0)
{
#pragma unroll
    for (int k = 0; k < ROWS; k += 16) {
        uint32_t a[2][4];
        fragment_a_trans<KEYS>(a[0], x, key0, k);
        fragment_a_trans<KEYS>(a[1], x, key0 + 16, k);
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

/* ---- the kernel -------------------------------------------------------------------------------------------- */

/* Where a block of threads is in its walk: query heads of the kv head, 64 rows at a time. */
struct walk {
    int head, row; /* head of the group */
};

__device__ __forceinline__ struct walk walk_next(struct walk w, int first, int tokens)
{
    w.row += ROWS;
    if (w.row >= tokens) {
        w.row = first;
        w.head++;
    }
    return w;
}

/* Where the parts of a warp lie. */
struct places {
    int row, key;       /* scores: 32 x 32 of 64 x 128 */
    int key_out, d_out; /* dK, dV: 32 x D / 2 of 128 x D */
    int d_query;        /* dQ: rows `row`, D / 4 of D */
};

template <int D> __device__ __forceinline__ struct places places_of(int warp)
{
    return {32 * (warp >> 2), 32 * (warp & 3), 32 * (warp >> 1), D / 2 * (warp & 1), D / 4 * (warp & 3)};
}

/* A step synchronises twice: all warps have read the rows, P and dS of the step before (its first writes come after the
 * scores: barrier `free`); all have written P and dS (their own copies of the next rows are there by then, too). */
template <int D, enum route ROUTE, bool SUMS>
static __global__ void __launch_bounds__(THREADS, 1)
    attention_bwd_gradients_kernel(const __grid_constant__ struct bwd_args a)
{
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ uint32_t ticket;
    struct gradients_shared<D> *s = reinterpret_cast<struct gradients_shared<D> *>(memory);
    const int warp = threadIdx.x >> 5;
    const struct places w = places_of<D>(warp);
    if (threadIdx.x == 0) {
        ticket = atomicAdd(a.ticket, 1u);
        barrier_init(shared_address(&s->free), THREADS / 32);
    }
    __syncthreads();
    const int64_t unit = ticket % gridDim.x, batch = unit / a.kv_heads, kv = unit % a.kv_heads;
    const uint32_t turn = ticket / gridDim.x;
    const int key0 = (int)turn * KEYS;
    const int group = a.heads / a.kv_heads, tiles = (a.tokens + ROWS - 1) / ROWS;
    const int first = a.causal ? key0 : 0; /* the first row that sees these keys */
    const float lift = a.units[unit].lift;
    const bool own_q = a.q_view.data != a.q.data, own_k = a.k_view.data != a.k.data;
    const uint32_t k_tile = shared_address(s->k), v_tile = shared_address(s->v);
    const uint32_t p_tile = shared_address(s->p), ds_tile = shared_address(s->ds);
    const uint32_t k_view_tile = own_k ? shared_address(s->k_view) : k_tile, free = shared_address(&s->free);

    tile_load<KEYS, D, THREADS>(k_tile, bwd_head(a.k, batch, kv), a.k.token_stride, key0, a.tokens, a.head_dim);
    tile_load<KEYS, D, THREADS>(v_tile, bwd_head(a.v, batch, kv), a.v.token_stride, key0, a.tokens, a.head_dim);
    if (own_k) {
        tile_load<KEYS, D, THREADS>(k_view_tile, bwd_head(a.k_view, batch, kv), a.k_view.token_stride, key0, a.tokens,
                                    a.head_dim);
    }
    load_rows<D>(a, s, 0, batch, kv * group, first);
    copies_commit();
    copies_wait<0>();
    __syncthreads();

    float dk[2][D / 16][4] = {}, dv[2][D / 16][4] = {};
    struct ds_sums sums = {};
    struct walk now = {0, first};
    for (int step = 0; now.head < group; step++) {
        const int stage = step & 1;
        const struct walk next = walk_next(now, first, a.tokens);
        const int64_t head = batch * a.heads + kv * group + now.head, rows = head * a.tokens;
        const uint32_t q_tile = shared_address(s->q[stage]), dout_tile = shared_address(s->dout[stage]);
        const struct bwd_tile t = {now.row + w.row, key0 + w.key, a.tokens, a.causal};
        const bool empty = bwd_tile_empty(t);
        float x[2][4][4], dp[2][4][4];
        if (!empty) {
            bwd_product<D>(x, q_tile, w.row, k_tile, w.key);
        }
        if (step > 0) {
            barrier_wait(free, (step - 1) & 1);
        }
        if (next.head < group) {
            load_rows<D>(a, s, stage ^ 1, batch, kv * group + next.head, next.row);
        }
        copies_commit();
        if (empty) {
            clear_tile(p_tile, w.row, w.key);
            clear_tile(ds_tile, w.row, w.key);
            sums.row[0] = sums.row[1] = sums.row[2] = sums.row[3] = 0.0f;
        } else {
            make_p<ROUTE>(a, x, t, rows_of(s->reference[stage], w.row), rows, p_tile, w.row, w.key);
            bwd_product<D>(dp, dout_tile, w.row, v_tile, w.key);
            if (ROUTE != ROUTE_BF16 && a.v_diag.data != nullptr && t.row0 == t.key0) {
                bwd_diagonal<D>(dp, a, dout_tile, w.row, bwd_head(a.v_diag, batch, kv), t.key0);
            }
            make_ds<ROUTE, SUMS>(a, x, dp, rows_of(s->stat[stage], w.row), lift, ds_tile, w.row, w.key, &sums);
        }
        copies_wait<0>();
        __syncthreads();
        const int64_t part = (head * tiles + now.row / ROWS) * (THREADS / 32) + warp;
        {
            const uint32_t early = turn_now(a.turns + part, turn);
            float dq[2][D / 32][4];
            multiply_dq<D>(dq, ds_tile, k_view_tile, w.row, w.d_query);
            double row_sum = 0;
            if (SUMS) { /* the scores' Q, or what its view does not use, is free */
                row_sum = gather_rows(&sums, (float4 *)(own_q ? s->q[stage] : s->q_view[stage]), w.row);
            }
            turn_wait(a.turns + part, turn, early);
            add_dq<D>(dq, reinterpret_cast<float4 *>(a.dq_sums) + part * (D / 16 * 32), turn == 0);
            const int row = now.row + (int)(threadIdx.x >> 2);
            if (SUMS && row < a.tokens) {
                double *to = a.row_sums + (rows + row) * 4 + (threadIdx.x & 3);
                *to = turn == 0 ? row_sum : __ldcg(to) + row_sum;
            }
        }
        accumulate<D>(dv, p_tile, dout_tile, w.key_out, w.d_out);
        accumulate<D>(dk, ds_tile, own_q ? shared_address(s->q_view[stage]) : q_tile, w.key_out, w.d_out);
        barrier_arrive(free);
        turn_pass(a.turns + part, turn);
        now = next;
    }

    __syncthreads();
    const float dk_factor = a.softmax_scale / lift;
    stage_out<D>(dv, a.dv_factor, v_tile, w.key_out, w.d_out);
    if (a.dk_sums != nullptr) {
        store_sums<D>(dk, a.dk_sums + unit * a.tokens * a.head_dim, a, key0 + w.key_out, w.d_out);
    } else {
        stage_out<D>(dk, dk_factor, k_tile, w.key_out, w.d_out);
    }
    __syncthreads();
    int bad = bwd_tile_store<KEYS, D, THREADS>(v_tile, a, a.dv, batch, kv, key0);
    if (a.dk_sums == nullptr) {
        bad += bwd_tile_store<KEYS, D, THREADS>(k_tile, a, a.dk, batch, kv, key0);
    }
    if (SUMS) {
        bwd_count(a.counters, DS_COUNT, sums.count);
        bwd_count(a.counters, DS_FLUSHED, sums.flushed);
        bwd_count(a.counters, DS_SATURATED, sums.saturated);
        bwd_count(a.counters, NON_FINITE, bad);
    }
}

template <int D, enum route ROUTE, bool SUMS>
static void launch(const struct cuda *on, const struct bwd_args *a, int64_t batch)
{
    const size_t bytes = sizeof(struct gradients_shared<D>);
    cudaFuncSetAttribute(attention_bwd_gradients_kernel<D, ROUTE, SUMS>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         (int)bytes);
    const dim3 grid((unsigned int)(batch * a->kv_heads), cuda_blocks(a->tokens, KEYS));
    attention_bwd_gradients_kernel<D, ROUTE, SUMS><<<grid, THREADS, bytes, on->stream>>>(*a);
    cuda_launched(on, "attention_bwd_gradients");
}

template <int D, enum route ROUTE> static void choose(const struct cuda *on, const struct bwd_args *a, int64_t batch)
{
    a->counters != nullptr ? launch<D, ROUTE, true>(on, a, batch) : launch<D, ROUTE, false>(on, a, batch);
}

template <int D> static void choose_route(const struct cuda *on, const struct bwd_args *a, int64_t batch)
{
    if (a->p_codes) {
        choose<D, ROUTE_CODES>(on, a, batch);
    } else if (a->p_fp8 || a->ds_e4m3 || a->v_factor != 1.0f) {
        choose<D, ROUTE_ROUNDED>(on, a, batch);
    } else {
        choose<D, ROUTE_BF16>(on, a, batch);
    }
}

void bwd_launch_gradients(const struct cuda *on, const struct bwd_args *a, int64_t batch)
{
    a->head_dim > 64 ? choose_route<128>(on, a, batch) : choose_route<64>(on, a, batch);
}
