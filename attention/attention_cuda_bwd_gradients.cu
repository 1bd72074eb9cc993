/* attention: the gradients of the CUDA backward. A block of threads owns 128 keys of one kv head and walks over all
 * query rows that see them, 64 at a time, one query head of the GQA group after the other; dK and dV stay in registers.
 *
 * dQ of 64 rows is a sum over blocks of keys, in global memory, FP32, in ascending order of keys. Every warp has its
 * own part and a turn counter for it: it waits until the preceding block of keys has added, adds, and hands the turn
 * on. Blocks take their keys from a ticket, lowest first, so that a block only waits for blocks that already run.
 *
 * Eight warps: 2 x 4 over 64 rows x 128 keys for scores and dP (32 x 32 each). P and dS go through shared memory, from
 * which the warps work as 4 x 2 over 128 keys x D (dK, dV) and as 2 x 4 over 64 rows x D (dQ). Q, dO' and the view of Q
 * are loaded one step ahead. */
#include "attention/attention_cuda_bwd_steps.cuh"

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
        barrier_init(shared_address(&s->free), THREADS);
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
    if (a->p_codes && a->rule.pv == PV_FP8) {
        choose<D, ROUTE_CODES_FP8>(on, a, batch);
    } else if (a->p_codes && a->rule.pv == PV_MXFP4) {
        choose<D, ROUTE_CODES_MXFP4>(on, a, batch);
    } else if (a->p_codes) {
        choose<D, ROUTE_CODES_OTHER>(on, a, batch);
    } else if (a->p_fp8 || a->ds_e4m3 || a->v_factor != 1.0f || a->v_diag.data != nullptr) {
        choose<D, ROUTE_ROUNDED>(on, a, batch);
    } else {
        choose<D, ROUTE_BF16>(on, a, batch);
    }
}

void bwd_launch_gradients(const struct cuda *on, const struct bwd_args *a, int64_t batch)
{
    a->head_dim > 64 ? choose_route<128>(on, a, batch) : choose_route<64>(on, a, batch);
}
