/* attention: the forward kernel of the variant "cuda" (docs/numerics.md, section 5).
 *
 * A block of threads owns 128 query rows of one head; tiles of 64 keys go through two stages of shared memory. A warp
 * owns M tiles of 16 rows. Of a tile of keys it takes 32 at a time, the block of MXFP4: scores, anchor, P, O += P V,
 * all in registers. Rare cases are off the fast path: moving an anchor, masks, the V of diagonal blocks (read from
 * global memory). M = 2 halves what is read from shared memory, M = 1 doubles the warps that hide latencies: FP4, whose
 * codes take longest, has M = 1 (measured: docs/results/attention_cuda.md). */
#include "attention/attention_cuda_fwd_rows.cuh"

enum { STAGES = 2 };

__host__ __device__ constexpr int tiles_of(int p)
{
    return p >= PV_MXFP4 && p <= PV_FP4_UE5M3 ? 1 : 2;
}

__host__ __device__ constexpr int threads_of(int m)
{
    return 2 * ROWS / m; /* a warp for 16 m rows */
}

__device__ __forceinline__ const bf16 *operand_head(const operand &x, int64_t batch, int64_t head)
{
    return x.data + batch * x.batch + head * x.head;
}

/* ---- tiles in shared memory ------------------------------------------------------------------------------- */

/* Where this lane reads its part of a fragment at column 0 of a tile (attention_mma.cuh): A, B stored by columns, and B
 * stored by k. Tiles are aligned to their rows, so column 8 n lies at the address ^ 16 n, and 8 rows on at + 16 W. */
template <int W> __device__ __forceinline__ uint32_t lane_a(uint32_t tile, int row0)
{
    const int lane = threadIdx.x & 31;
    return tile_chunk<W>(tile, row0 + (lane & 15), lane >> 4 << 3);
}

template <int W> __device__ __forceinline__ uint32_t lane_b(uint32_t tile)
{
    const int lane = threadIdx.x & 31;
    return tile_chunk<W>(tile, (lane & 7) + (lane >> 4 << 3), lane & 8);
}

template <int W> __device__ __forceinline__ uint32_t lane_b_trans(uint32_t tile)
{
    return lane_a<W>(tile, 0);
}

/* tile_load, with a short way for tiles that are whole. */
template <int R, int W, int M>
__device__ __forceinline__ void load_tile(uint32_t tile, const bf16 *x, int64_t stride, int first, int end, int columns)
{
    constexpr int THREADS = threads_of(M), CHUNKS = W / 8;
    constexpr int TURN = THREADS / CHUNKS; /* rows at a time, a multiple of 8 */
    if (first + R > end || columns < W) {
        tile_load<R, W, THREADS>(tile, x, stride, first, end, columns);
        return;
    }
    const int row = (int)threadIdx.x / CHUNKS, column = (int)threadIdx.x % CHUNKS * 8;
    const bf16 *from = x + (first + row) * stride + column;
    const uint32_t to = tile_chunk<W>(tile, row, column);
#pragma unroll
    for (int i = 0; i < R / TURN; i++) {
        copy16_async(to + (uint32_t)(i * TURN * 2 * W), from, true);
        from += TURN * stride;
    }
}

/* Base-2 scores of the warp's rows against 32 keys: t[tile][r][8 values], r = 0: row g, 1: row g + 8. q: lane_a,
 * keys: lane_b. */
template <int W, int M>
__device__ __forceinline__ void block_scores(uint32_t q, uint32_t keys, float c, float (&t)[M][2][8])
{
    float s[M][4][4] = {};
#pragma unroll
    for (uint32_t k = 0; k < W; k += 16) {
        uint32_t a[M][4], b[8];
        ldmatrix_x4(b, keys ^ 2 * k);
        ldmatrix_x4(b + 4, (keys ^ 2 * k) + 32 * W);
#pragma unroll
        for (int m = 0; m < M; m++) {
            ldmatrix_x4(a[m], (q ^ 2 * k) + 32 * W * (uint32_t)m);
#pragma unroll
            for (int n = 0; n < 4; n++) {
                mma_bf16(s[m][n], a[m], b + 2 * n);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 16 * M; i++) {
        const int m = i / 16, r = i / 8 % 2, j = i % 8;
        t[m][r][j] = __fmul_rn(c, s[m][j / 2][2 * r + j % 2]);
    }
}

/* ---- O += P V ---------------------------------------------------------------------------------------------- */

/* V of a diagonal block as the B operand, from global memory: 16 keys from `key` on, features n0 .. n0 + 7. */
__device__ __forceinline__ void fragment_diag(uint32_t *b, const fwd_call &f, const bf16 *v, int key, int n0)
{
    const int lane = threadIdx.x & 31, n = n0 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int at = key + 8 * half + 2 * (lane % 4);
        const bool inside = n < f.head_dim;
        const uint32_t low = inside && at < f.tokens ? v[at * f.diag.token + n] : 0u;
        const uint32_t high = inside && at + 1 < f.tokens ? v[(at + 1) * f.diag.token + n] : 0u;
        b[half] = low | high << 16;
    }
}

/* 16 keys of the own block of a warp's rows: tiles whose scale block these keys are take the E4M3 values. */
template <int W, int M>
__device__ __forceinline__ void multiply_own(const fwd_call &f, const bf16 *v, uint32_t values, int key, int row0,
                                             const uint32_t (&a)[M][4], float (&o)[M][W / 8][4])
{
#pragma unroll
    for (int n = 0; n < W / 16; n++) {
        uint32_t diag[4], plain[4];
        fragment_diag(diag, f, v, key, 16 * n);
        fragment_diag(diag + 2, f, v, key, 16 * n + 8);
        ldmatrix_x4_trans(plain, values ^ 32 * (uint32_t)n);
#pragma unroll
        for (int m = 0; m < M; m++) {
            const bool own = key / f.p_block == (row0 + 16 * m) / f.p_block;
            uint32_t b[4];
            for (int i = 0; i < 4; i++) {
                b[i] = own ? diag[i] : plain[i];
            }
            mma_bf16(o[m][2 * n], a[m], b);
            mma_bf16(o[m][2 * n + 1], a[m], b + 2);
        }
    }
}

template <int W, int M>
__device__ __forceinline__ void multiply(uint32_t values, const uint32_t (&a)[M][4], float (&o)[M][W / 8][4])
{
#pragma unroll
    for (int n = 0; n < W / 16; n++) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, values ^ 32 * (uint32_t)n);
#pragma unroll
        for (int m = 0; m < M; m++) {
            mma_bf16(o[m][2 * n], a[m], b);
            mma_bf16(o[m][2 * n + 1], a[m], b + 2);
        }
    }
}

/* Values of 16 keys of both rows as the A operand. REST: what their rounding to BF16 left. */
template <bool REST> __device__ __forceinline__ void fragment_p(uint32_t *a, const float *x, const float *y)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float *z = (i % 2 == 0 ? x : y) + (i & 2);
        a[i] = bf16_pair(z[0], z[1]);
        if (REST) {
            a[i] = bf16_pair(z[0] - __uint_as_float(a[i] << 16), z[1] - __uint_as_float(a[i] & 0xffff0000u));
        }
    }
}

/* ---- one block of 32 keys of one warp --------------------------------------------------------------------- */

struct step {
    int key0, row0;   /* first key, first row */
    uint32_t values;  /* lane_b_trans of these keys */
    const bf16 *diag; /* V in E4M3 of this head; NULL: none */
};

template <int W, int P, int M, bool REST>
__device__ __forceinline__ void accumulate(const fwd_call &f, const step &at, const float (&t)[M][2][8],
                                           float (&o)[M][W / 8][4])
{
#pragma unroll
    for (int u = 0; u < 2; u++) { /* 16 keys each */
        uint32_t a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
            fragment_p<REST>(a[m], &t[m][0][4 * u], &t[m][1][4 * u]);
        }
        if (P >= PV_MXFP4 && at.diag != NULL && at.key0 == at.row0 / STEP * STEP) {
            multiply_own<W, M>(f, at.diag, at.values + 32 * W * u, at.key0 + 16 * u, at.row0, a, o);
        } else {
            multiply<W, M>(at.values + 32 * W * u, a, o);
        }
    }
}

template <int W, int P, int M, bool EXTRA>
__device__ __forceinline__ void block_step(const fwd_call &f, const step &at, row_state (&row)[M], float (&t)[M][2][8],
                                           float (&o)[M][W / 8][4])
{
    constexpr enum pv_format PV = P == P_UNROUNDED ? PV_BF16 : (enum pv_format)P;
    const bool masked = at.key0 + STEP > f.tokens || (f.causal && at.key0 + STEP > at.row0 + 1);
#pragma unroll
    for (int m = 0; m < M; m++) {
        if (masked) {
            const int first = at.row0 + 16 * m + (int)(threadIdx.x & 31) / 4;
            row[m].magnitude[0] = mask_row(f, first, at.key0, row[m].magnitude[0], t[m][0]);
            row[m].magnitude[1] = mask_row(f, first + 8, at.key0, row[m].magnitude[1], t[m][1]);
        } else {
#pragma unroll
            for (int i = 0; i < 16; i++) {
                row[m].magnitude[i / 8] = p_max_nan(row[m].magnitude[i / 8], fabsf(t[m][i / 8][i % 8]));
            }
        }
        const p_max max[2] = {p_block_max<PV, keys_in_quad>(t[m][0]), p_block_max<PV, keys_in_quad>(t[m][1])};
        const bool moves = max[0].all > row[m].anchor[0] || max[1].all > row[m].anchor[1]; /* anchors are integers */
        if (f.rule.anchor == ANCHOR_ROW && __any_sync(0xffffffffu, moves)) {
            const float factor[2] = {move_anchor(max[0].all, &row[m].anchor[0]),
                                     move_anchor(max[1].all, &row[m].anchor[1])};
            rescale<W, EXTRA>(o[m], row[m], factor);
        }
        publish_row<P, EXTRA>(f, row[m], 0, at.key0, max[0], t[m][0]);
        publish_row<P, EXTRA>(f, row[m], 1, at.key0, max[1], t[m][1]);
    }
    accumulate<W, P, M, false>(f, at, t, o);
    if (P == P_UNROUNDED) {
        accumulate<W, P, M, true>(f, at, t, o);
    }
}

/* anchor = sampled: from the scores of up to 128 keys, gathered into the first stage. */
template <int W, int M>
__device__ void sampled_anchor(const fwd_call &f, uint32_t q, uint32_t keys, const bf16 *k, int row0,
                               row_state (&row)[M])
{
    const int samples = min((int)ATTENTION_SAMPLES, f.tokens), lane = threadIdx.x & 31;
    const auto sample = [&](int s) { return (int)((int64_t)s * f.tokens / samples); };
    for (int first = 0; first < samples; first += KEYS) {
        __syncthreads();
        for (int at = (int)threadIdx.x; at < KEYS * (W / 8); at += threads_of(M)) {
            const int s = first + at / (W / 8), column = at % (W / 8) * 8;
            const bool valid = s < samples && column < f.head_dim;
            copy16_async(tile_chunk<W>(keys, at / (W / 8), column), k + (valid ? sample(s) * f.k.token + column : 0),
                         valid);
        }
        copies_commit();
        copies_wait<0>();
        __syncthreads();
#pragma unroll 1
        for (int key = 0; key < KEYS; key += STEP) {
            float t[M][2][8];
            block_scores<W, M>(q, lane_b<W>(keys) + 2 * W * (uint32_t)key, f.c, t);
#pragma unroll
            for (int i = 0; i < 16 * M; i++) {
                const int m = i / 16, r = i / 8 % 2, s = first + key + keys_in_quad::key(i % 8);
                const int end = f.causal ? row0 + 16 * m + lane / 4 + 8 * r + 1 : f.tokens;
                if (s < samples && sample(s) < end) {
                    row[m].anchor[r] = p_max_nan(row[m].anchor[r], t[m][r][i % 8]);
                }
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2 * M; i++) {
        float *anchor = &row[i / 2].anchor[i % 2];
        *anchor = p_anchor_of(f.rule, keys_in_quad::max(*anchor));
    }
}

/* ---- the kernel ------------------------------------------------------------------------------------------- */

template <int W> constexpr size_t shared_bytes(void)
{
    return sizeof(bf16) * W * (ROWS + 2 * STAGES * KEYS) + sizeof(row_part) * ROWS;
}

/* EXTRA: with the exact sums of LSE2' and statistics. */
template <int W, int P, bool EXTRA>
static __global__ void __launch_bounds__(threads_of(tiles_of(P)), 2) fwd_kernel(const __grid_constant__ fwd_call f)
{
    constexpr int M = tiles_of(P), WARP_ROWS = 16 * M;
    extern __shared__ __align__(1024) char memory[];
    constexpr uint32_t Q_BYTES = 2 * W * ROWS, TILE_BYTES = 2 * W * KEYS;
    const uint32_t q_tile = shared_address(memory), stages = q_tile + Q_BYTES;
    /* Long rows first; heads that share K and V side by side. */
    const int all_heads = (int)gridDim.x / f.row_blocks, which = (int)blockIdx.x % all_heads;
    const int row_block = f.row_blocks - 1 - (int)blockIdx.x / all_heads;
    const int64_t batch = which / f.heads, head = which % f.heads, kv = head / f.group;
    const bf16 *k = operand_head(f.k, batch, kv), *v = operand_head(f.v, batch, kv);
    const int warp_row = (int)(threadIdx.x / 32) * WARP_ROWS, first_row = row_block * ROWS, row0 = first_row + warp_row;
    const int keys = f.causal ? min(f.tokens, first_row + ROWS) : f.tokens;

    const auto load_keys = [&](int key0, uint32_t stage) {
        load_tile<KEYS, W, M>(stage, k, f.k.token, key0, keys, f.head_dim);
        load_tile<KEYS, W, M>(stage + TILE_BYTES, v, f.v.token, key0, keys, f.head_dim);
        copies_commit();
    };
    row_state row[M] = {};
#pragma unroll
    for (int i = 0; i < 2 * M; i++) {
        row[i / 2].anchor[i % 2] = f.rule.anchor == ANCHOR_ZERO ? 0.0f : -INFINITY;
    }
    float o[M][W / 8][4] = {};
    load_tile<ROWS, W, M>(q_tile, operand_head(f.q, batch, head), f.q.token, first_row, f.tokens, f.head_dim);
    const uint32_t q = lane_a<W>(q_tile, warp_row);
    if (f.rule.anchor == ANCHOR_SAMPLED) {
        sampled_anchor<W, M>(f, q, stages, k, row0, row);
    }
    const bf16 *diag = P >= PV_MXFP4 && f.diag.data != NULL ? operand_head(f.diag, batch, kv) : NULL;
    load_keys(0, stages);
    for (int tile = 0; tile < keys; tile += KEYS) {
        const uint32_t stage = (uint32_t)(tile / KEYS % STAGES) * 2 * TILE_BYTES;
        copies_wait<0>();
        __syncthreads(); /* the tile is here, and nobody reads the other stage any more */
        if (tile + KEYS < keys) {
            load_keys(tile + KEYS, stages + (2 * TILE_BYTES - stage));
        }
#pragma unroll 1
        for (int key = 0; key < KEYS; key += STEP) {
            if (tile + key >= keys || (f.causal && tile + key > row0)) {
                break;
            }
            float t[M][2][8];
            const uint32_t at = stage + 2 * W * (uint32_t)key;
            block_scores<W, M>(q, lane_b<W>(stages) + at, f.c, t);
            block_step<W, P, M, EXTRA>(f, {tile + key, row0, lane_b_trans<W>(stages + TILE_BYTES) + at, diag}, row, t,
                                       o);
        }
    }
    row_part *room = EXTRA && f.parts != NULL ? (row_part *)(memory + Q_BYTES + 2 * STAGES * TILE_BYTES) : NULL;
    bf16 *out = f.out.data + batch * f.out.batch_stride + head * f.out.head_stride;
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int own = warp_row + 16 * m + 8 * r + (int)(threadIdx.x & 31) / 4;
            const int64_t at = (batch * f.heads + head) * f.tokens;
            row_part *part = room != NULL ? &room[own] : NULL;
            divide<W>(o[m], r, close_row<P, EXTRA>(f, row[m], r, first_row + own, at, part));
        }
        store_rows<W>(f, out, memory, warp_row + 16 * m, first_row, o[m], room);
    }
    if (room != NULL) {
        close_part(room, &f.parts[blockIdx.x]);
    }
}

/* ---- launches --------------------------------------------------------------------------------------------- */

template <int W, int P, bool EXTRA>
static void launch_kernel(const struct cuda *on, const struct fwd_call *f, int64_t blocks)
{
    const int bytes = (int)shared_bytes<W>();
    cudaFuncSetAttribute(fwd_kernel<W, P, EXTRA>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    fwd_kernel<W, P, EXTRA><<<(unsigned int)blocks, threads_of(tiles_of(P)), (size_t)bytes, on->stream>>>(*f);
    cuda_launched(on, "attention forward");
}

template <int W, int P> static void launch(const struct cuda *on, const struct fwd_call *f, int64_t blocks)
{
    if (P != P_UNROUNDED && (f->lse_exact != NULL || f->parts != NULL)) {
        launch_kernel<W, P, P != P_UNROUNDED>(on, f, blocks);
    } else {
        launch_kernel<W, P, false>(on, f, blocks);
    }
}

template <int W> static void launch_for(const struct cuda *on, int p, const struct fwd_call *f, int64_t blocks)
{
    switch (p) {
    case PV_BF16:
        return launch<W, PV_BF16>(on, f, blocks);
    case PV_FP8:
        return launch<W, PV_FP8>(on, f, blocks);
    case PV_MXFP4:
        return launch<W, PV_MXFP4>(on, f, blocks);
    case PV_NVFP4:
        return launch<W, PV_NVFP4>(on, f, blocks);
    case PV_FP4_UE5M3:
        return launch<W, PV_FP4_UE5M3>(on, f, blocks);
    default:
        return launch<W, P_UNROUNDED>(on, f, blocks);
    }
}

void attention_fwd_cuda_launch(const struct cuda *on, int p, const struct fwd_call *f, int64_t blocks)
{
    if (f->head_dim <= 64) {
        launch_for<64>(on, p, f, blocks);
    } else {
        launch_for<128>(on, p, f, blocks);
    }
}
