/* attention: the forward of the variant "cuda" (docs/numerics.md, section 5).
 *
 * A block of 4 warps owns 128 query rows of one head, a warp 32 of them (two tiles of 16, so that what it reads of K
 * and V serves twice: shared memory is the limit); tiles of 64 keys go through two stages of shared memory. Inside a
 * tile a warp takes 32 keys at a time, the block of MXFP4: scores, anchor, P, O += P V, all in registers. What is rare
 * lies off the straight path: moving an anchor, masks, the V of diagonal blocks (read from global memory). */
#include "attention/attention_mma.cuh"
#include "attention/probability_cuda.cuh"

#include <math.h>

enum {
    WARPS = 4,
    THREADS = 32 * WARPS,
    TILES = 2, /* of 16 rows, a warp */
    WARP_ROWS = 16 * TILES,
    ROWS = WARP_ROWS * WARPS,
    KEYS = 64,
    STEP = ATTENTION_BLOCK,
    STAGES = 2,
};
static_assert(STEP % WARP_ROWS == 0, "the rows of a warp lie in one block");

/* Values of `P` a kernel is made for: the formats, and unrounded P (O' of bwd_stat = exact). */
enum { P_UNROUNDED = PV_FP4_UE5M3 + 1 };

/* Rows of heads: element (b, h, t, d) at b batch + h head + t token + d. */
struct operand {
    const bf16 *data;
    int64_t batch, head, token;
};

struct fwd_call {
    struct operand q, k, v, diag; /* diag.data NULL: none */
    struct head_view out;
    float *lse, *lse_exact, *anchor; /* (B, H, T); the last two NULL: not wanted */
    struct attention_stats *parts;   /* one a block; NULL: not wanted */
    int heads, group, tokens, row_blocks;
    int head_dim, p_block; /* p_block: keys that share a scale */
    bool causal;
    float c, v_unit;
    struct p_rule rule;
};

/* What a thread carries for rows g and g + 8 of a tile of 16. Sums are the lane's part. The last two are kept up by
 * kernels with EXTRA only. */
struct row_state {
    float anchor[2], sum[2], magnitude[2];
    float sum_exact[2], lost[2];
};

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
template <int R, int W>
__device__ __forceinline__ void load_tile(uint32_t tile, const bf16 *x, int64_t stride, int first, int end, int columns)
{
    constexpr int CHUNKS = W / 8, TURN = THREADS / CHUNKS; /* rows at a time, a multiple of 8 */
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
template <int W>
__device__ __forceinline__ void block_scores(uint32_t q, uint32_t keys, float c, float (&t)[TILES][2][8])
{
    float s[TILES][4][4] = {};
#pragma unroll
    for (uint32_t k = 0; k < W; k += 16) {
        uint32_t a[TILES][4], b[8];
        ldmatrix_x4(b, keys ^ 2 * k);
        ldmatrix_x4(b + 4, (keys ^ 2 * k) + 32 * W);
#pragma unroll
        for (int m = 0; m < TILES; m++) {
            ldmatrix_x4(a[m], (q ^ 2 * k) + 32 * W * (uint32_t)m);
#pragma unroll
            for (int n = 0; n < 4; n++) {
                mma_bf16(s[m][n], a[m], b + 2 * n);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 16 * TILES; i++) {
        const int m = i / 16, r = i / 8 % 2, j = i % 8;
        t[m][r][j] = __fmul_rn(c, s[m][j / 2][2 * r + j % 2]);
    }
}

/* ---- rows ------------------------------------------------------------------------------------------------- */

/* Largest magnitude of a row's visible scores; masks the others. row: absolute; key0: of the block. */
__device__ __forceinline__ float mask_row(const fwd_call &f, int row, int key0, float magnitude, float *t)
{
    const int end = f.causal ? min(row + 1, f.tokens) : f.tokens;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const bool visible = key0 + keys_in_quad::key(i) < end;
        magnitude = p_max_nan(magnitude, visible ? fabsf(t[i]) : 0.0f);
        t[i] = visible ? t[i] : ATTENTION_MASKED;
    }
    return magnitude;
}

/* The online step of one row: true if its anchor moved, `factor` then rescales what was added up (exactly). */
__device__ __forceinline__ bool move_anchor(const p_rule &rule, float max, float *anchor, float *factor)
{
    *factor = 1.0f;
    const float next = ceilf(max);
    if (rule.anchor != ANCHOR_ROW || !(next > *anchor)) {
        return false;
    }
    *factor = *anchor == -INFINITY ? 0.0f : p_pow2(*anchor - next);
    *anchor = next;
    return true;
}

template <int W, bool EXTRA>
__device__ __forceinline__ void rescale(float (&o)[W / 8][4], row_state &row, const float *factor)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        row.sum[r] *= factor[r];
        if (EXTRA) {
            row.sum_exact[r] *= factor[r];
            row.lost[r] *= factor[r];
        }
#pragma unroll
        for (int n = 0; n < W / 8; n++) {
            o[n][2 * r] *= factor[r];
            o[n][2 * r + 1] *= factor[r];
        }
    }
}

/* Scores of one row become P. */
template <int P, bool EXTRA>
__device__ __forceinline__ void publish_row(const fwd_call &f, row_state &row, int r, int key0, const p_max &max,
                                            float *t)
{
    constexpr enum pv_format PV = P == P_UNROUNDED ? PV_BF16 : (enum pv_format)P;
    constexpr bool EXACT = EXTRA && PV != PV_BF16;
    const float anchor = row.anchor[r];
    if (P == P_UNROUNDED) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            t[i] = p_exp2_fast(__fsub_rn(t[i], anchor));
            row.sum[r] += t[i];
        }
        return;
    }
    float exact[8];
    row.sum[r] += p_block_publish<PV, keys_in_quad, EXACT, P == PV_FP8>(f.rule, anchor, anchor, key0, max, t, exact);
#pragma unroll
    for (int i = 0; EXACT && i < 8; i++) {
        row.sum_exact[r] += exact[i];
        row.lost[r] += t[i] == 0.0f ? exact[i] : 0.0f;
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
template <int W>
__device__ __forceinline__ void multiply_own(const fwd_call &f, const bf16 *v, uint32_t values, int key, int row0,
                                             const uint32_t (&a)[TILES][4], float (&o)[TILES][W / 8][4])
{
#pragma unroll
    for (int n = 0; n < W / 16; n++) {
        uint32_t diag[4], plain[4];
        fragment_diag(diag, f, v, key, 16 * n);
        fragment_diag(diag + 2, f, v, key, 16 * n + 8);
        ldmatrix_x4_trans(plain, values ^ 32 * (uint32_t)n);
#pragma unroll
        for (int m = 0; m < TILES; m++) {
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

template <int W>
__device__ __forceinline__ void multiply(uint32_t values, const uint32_t (&a)[TILES][4], float (&o)[TILES][W / 8][4])
{
#pragma unroll
    for (int n = 0; n < W / 16; n++) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, values ^ 32 * (uint32_t)n);
#pragma unroll
        for (int m = 0; m < TILES; m++) {
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

template <int W, int P, bool REST>
__device__ __forceinline__ void accumulate(const fwd_call &f, const step &at, const float (&t)[TILES][2][8],
                                           float (&o)[TILES][W / 8][4])
{
#pragma unroll
    for (int u = 0; u < 2; u++) { /* 16 keys each */
        uint32_t a[TILES][4];
#pragma unroll
        for (int m = 0; m < TILES; m++) {
            fragment_p<REST>(a[m], &t[m][0][4 * u], &t[m][1][4 * u]);
        }
        if (P >= PV_MXFP4 && at.diag != NULL && at.key0 == at.row0 / STEP * STEP) {
            multiply_own<W>(f, at.diag, at.values + 32 * W * u, at.key0 + 16 * u, at.row0, a, o);
        } else {
            multiply<W>(at.values + 32 * W * u, a, o);
        }
    }
}

template <int W, int P, bool EXTRA>
__device__ __forceinline__ void block_step(const fwd_call &f, const step &at, row_state (&row)[TILES],
                                           float (&t)[TILES][2][8], float (&o)[TILES][W / 8][4])
{
    constexpr enum pv_format PV = P == P_UNROUNDED ? PV_BF16 : (enum pv_format)P;
    const bool masked = at.key0 + STEP > f.tokens || (f.causal && at.key0 + STEP > at.row0 + 1);
#pragma unroll
    for (int m = 0; m < TILES; m++) {
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
        float factor[2];
        const bool moved0 = move_anchor(f.rule, max[0].all, &row[m].anchor[0], &factor[0]);
        const bool moved1 = move_anchor(f.rule, max[1].all, &row[m].anchor[1], &factor[1]);
        if (__any_sync(0xffffffffu, moved0 || moved1)) {
            rescale<W, EXTRA>(o[m], row[m], factor);
        }
        publish_row<P, EXTRA>(f, row[m], 0, at.key0, max[0], t[m][0]);
        publish_row<P, EXTRA>(f, row[m], 1, at.key0, max[1], t[m][1]);
    }
    accumulate<W, P, false>(f, at, t, o);
    if (P == P_UNROUNDED) {
        accumulate<W, P, true>(f, at, t, o);
    }
}

/* anchor = sampled: from the scores of up to 128 keys, gathered into the first stage. */
template <int W>
__device__ void sampled_anchor(const fwd_call &f, uint32_t q, uint32_t keys, const bf16 *k, int row0,
                               row_state (&row)[TILES])
{
    const int samples = min((int)ATTENTION_SAMPLES, f.tokens), lane = threadIdx.x & 31;
    const auto sample = [&](int s) { return (int)((int64_t)s * f.tokens / samples); };
    for (int first = 0; first < samples; first += KEYS) {
        __syncthreads();
        for (int at = (int)threadIdx.x; at < KEYS * (W / 8); at += THREADS) {
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
            float t[TILES][2][8];
            block_scores<W>(q, lane_b<W>(keys) + 2 * W * (uint32_t)key, f.c, t);
#pragma unroll
            for (int i = 0; i < 16 * TILES; i++) {
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
    for (int i = 0; i < 2 * TILES; i++) {
        float *anchor = &row[i / 2].anchor[i % 2];
        *anchor = p_anchor_of(f.rule, keys_in_quad::max(*anchor));
    }
}

/* ---- the end of a row ------------------------------------------------------------------------------------- */

/* What each row saw, in shared memory: added by one thread in row order. */
struct row_part {
    float magnitude, lost;
    uint32_t rows, non_finite;
};

__device__ __forceinline__ void close_part(const row_part *room, attention_stats *part)
{
    __syncthreads();
    if (threadIdx.x != 0) {
        return;
    }
    struct attention_stats sum = {};
    float magnitude = 0.0f;
    for (int i = 0; i < ROWS; i++) {
        magnitude = p_max_nan(magnitude, room[i].magnitude);
        sum.p_lost_mass += (double)room[i].lost;
        sum.p_rows += (double)room[i].rows;
        sum.non_finite += (double)room[i].non_finite;
    }
    sum.logit_max = (double)magnitude * 0.693147180559945309417;
    *part = sum;
}

/* Normaliser, LSE2 and statistics of row r of a tile; returns what O is divided by. 0: no visible mass. */
template <int P, bool EXTRA>
__device__ __forceinline__ float close_row(const fwd_call &f, row_state &row, int r, int token, int64_t at,
                                           row_part *part)
{
    float sum = keys_in_quad::sum(row.sum[r]), sum_exact = sum, lost = 0.0f;
    if (EXTRA && P != PV_BF16) {
        sum_exact = keys_in_quad::sum(row.sum_exact[r]);
        lost = keys_in_quad::sum(row.lost[r]);
    }
    float magnitude = row.magnitude[r], anchor = row.anchor[r];
    magnitude = p_max_nan(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, 1));
    magnitude = p_max_nan(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, 2));
    /* Nothing sound can come of a NaN among the scores, nor of Inf: let it be seen. FP4 codes of -inf are sound zeros
     * (Inf shows in the anchor, or overflows the block exponent), its exact probability is not. */
    const bool fp4 = P >= PV_MXFP4 && P <= PV_FP4_UE5M3, endless = !(magnitude < INFINITY);
    const bool broken = (fp4 ? magnitude != magnitude : endless) || !(fabsf(anchor) < INFINITY);
    sum = broken ? NAN : sum;
    anchor = broken ? NAN : anchor;
    sum_exact = broken || endless ? NAN : sum_exact;
    if (token < f.tokens && (threadIdx.x & 3) == 0 && P != P_UNROUNDED) {
        f.lse[at + token] =
            sum == 0.0f ? -INFINITY : anchor + log2f(__fdiv_rn(sum, P == PV_FP8 ? 256.0f : f.rule.unit));
        if (EXTRA && f.lse_exact != NULL) {
            f.lse_exact[at + token] = anchor + log2f(sum_exact);
        }
        if (f.anchor != NULL) {
            f.anchor[at + token] = anchor;
        }
    }
    if (EXTRA && part != NULL && (threadIdx.x & 3) == 0) {
        const bool counts = token < f.tokens;
        part->magnitude = counts ? magnitude : 0.0f;
        part->rows = counts ? 1 : 0;
        part->lost = !counts || P == PV_BF16 ? 0.0f : __fdiv_rn(lost, sum_exact);
    }
    return sum == 0.0f ? 0.0f : __fmul_rn(sum, f.v_unit);
}

/* O of 16 rows leaves through the shared memory that held their Q, 16 bytes at a time. `row`: first row within the
 * block; room NULL: nobody asks for non-finite values. */
template <int W>
__device__ __forceinline__ void store_rows(const fwd_call &f, bf16 *out, char *tile, int row, int first_row,
                                           const float (&o)[W / 8][4], row_part *room)
{
    const int lane = threadIdx.x & 31;
    const uint32_t base = shared_address(tile);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < W / 8; n++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint32_t at = tile_chunk<W>(base, row + lane / 4 + 8 * r, 8 * n) - base;
            *(uint32_t *)(tile + at + 4 * (lane % 4)) = bf16_pair(o[n][2 * r], o[n][2 * r + 1]);
        }
    }
    __syncwarp();
    const int own = row + lane / 2; /* two lanes a row */
    uint32_t bad = 0;
    for (int column = lane % 2 * 8; column < f.head_dim && first_row + own < f.tokens; column += 16) {
        const bf16x8 x = bf16x8_load((const bf16 *)(tile + tile_chunk<W>(base, own, column) - base));
        bf16x8_store(out + (int64_t)(first_row + own) * f.out.token_stride + column, x);
        const uint32_t w[4] = {x.words.x, x.words.y, x.words.z, x.words.w};
        for (int j = 0; room != NULL && j < 4; j++) {
            bad += ((w[j] & 0x7f80u) == 0x7f80u) + ((w[j] & 0x7f800000u) == 0x7f800000u);
        }
    }
    bad += __shfl_xor_sync(0xffffffffu, bad, 1);
    if (room != NULL && lane % 2 == 0) {
        room[own].non_finite = bad;
    }
}

/* O / divisor, through the reciprocal; a tiny divisor is lifted first, lest the reciprocal overflows. */
template <int W> __device__ __forceinline__ void divide(float (&o)[W / 8][4], int r, float divisor)
{
    const float lift = fabsf(divisor) < 0x1p-60f ? 0x1p80f : 1.0f;
    const float inverse = divisor == 0.0f ? 0.0f : __fdiv_rn(1.0f, divisor * lift);
#pragma unroll
    for (int n = 0; n < W / 8; n++) {
        o[n][2 * r] = o[n][2 * r] * lift * inverse;
        o[n][2 * r + 1] = o[n][2 * r + 1] * lift * inverse;
    }
}

/* ---- the kernel ------------------------------------------------------------------------------------------- */

template <int W> constexpr size_t shared_bytes(void)
{
    return sizeof(bf16) * W * (ROWS + 2 * STAGES * KEYS) + sizeof(row_part) * ROWS;
}

/* EXTRA: with the exact sums of LSE2' and statistics. */
template <int W, int P, bool EXTRA>
static __global__ void __launch_bounds__(THREADS, 2) fwd_kernel(const __grid_constant__ fwd_call f)
{
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
        load_tile<KEYS, W>(stage, k, f.k.token, key0, keys, f.head_dim);
        load_tile<KEYS, W>(stage + TILE_BYTES, v, f.v.token, key0, keys, f.head_dim);
        copies_commit();
    };
    row_state row[TILES];
#pragma unroll
    for (int m = 0; m < TILES; m++) {
        const float start = f.rule.anchor == ANCHOR_ZERO ? 0.0f : -INFINITY;
        row[m] = {{start, start}, {0, 0}, {0, 0}, {0, 0}, {0, 0}};
    }
    float o[TILES][W / 8][4] = {};
    load_tile<ROWS, W>(q_tile, operand_head(f.q, batch, head), f.q.token, first_row, f.tokens, f.head_dim);
    const uint32_t q = lane_a<W>(q_tile, warp_row);
    if (f.rule.anchor == ANCHOR_SAMPLED) {
        sampled_anchor<W>(f, q, stages, k, row0, row);
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
            float t[TILES][2][8];
            const uint32_t at = stage + 2 * W * (uint32_t)key;
            block_scores<W>(q, lane_b<W>(stages) + at, f.c, t);
            block_step<W, P, EXTRA>(f, {tile + key, row0, lane_b_trans<W>(stages + TILE_BYTES) + at, diag}, row, t, o);
        }
    }
    row_part *room = EXTRA && f.parts != NULL ? (row_part *)(memory + Q_BYTES + 2 * STAGES * TILE_BYTES) : NULL;
    bf16 *out = f.out.data + batch * f.out.batch_stride + head * f.out.head_stride;
#pragma unroll
    for (int m = 0; m < TILES; m++) {
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

/* Scratch. q, k, v: operands where the caller keeps none. */
struct fwd_scratch {
    bf16 *q, *k, *v, *diag, *v_exact;
    struct head_facts *q_facts, *k_facts, *centred_facts, *v_facts, *sink_facts, *decoded;
    struct attention_stats *parts;
};

static int64_t row_blocks_of(const struct attention_shape *shape)
{
    return (shape->tokens + ROWS - 1) / ROWS;
}

static struct fwd_scratch scratch_carve(const struct attention_shape *shape, const struct attention_recipe *recipe,
                                        struct carve *carve)
{
    const size_t heads = (size_t)(shape->batch * shape->heads), kv_heads = (size_t)(shape->batch * shape->kv_heads);
    const size_t head = (size_t)(shape->tokens * shape->head_dim) * sizeof(bf16), fact = sizeof(struct head_facts);
    struct fwd_scratch s;
    s.q = (bf16 *)carve_take(carve, recipe->qk != QK_BF16 ? heads * head : 0);
    s.k = (bf16 *)carve_take(carve, recipe->qk != QK_BF16 || recipe->k_center ? kv_heads * head : 0);
    s.v = (bf16 *)carve_take(carve, recipe->pv != PV_BF16 ? kv_heads * head : 0);
    s.diag = (bf16 *)carve_take(carve, recipe->v_diag == V_DIAG_FP8 ? kv_heads * head : 0);
    s.v_exact = (bf16 *)carve_take(carve, recipe->bwd_stat == BWD_STAT_EXACT ? kv_heads * head : 0);
    s.q_facts = (struct head_facts *)carve_take(carve, heads * fact);
    s.k_facts = (struct head_facts *)carve_take(carve, kv_heads * fact);
    s.centred_facts = (struct head_facts *)carve_take(carve, kv_heads * fact);
    s.v_facts = (struct head_facts *)carve_take(carve, kv_heads * fact);
    s.sink_facts = (struct head_facts *)carve_take(carve, kv_heads * fact);
    s.decoded = (struct head_facts *)carve_take(carve, heads * fact);
    s.parts = (struct attention_stats *)carve_take(carve, heads * (size_t)row_blocks_of(shape) * sizeof *s.parts);
    return s;
}

size_t attention_fwd_cuda_scratch(const struct attention_shape *shape, const struct attention_recipe *recipe)
{
    struct carve carve = {NULL, 0};
    (void)scratch_carve(shape, recipe, &carve);
    return carve.used;
}

static struct head_tensor tensor_of(const struct attention_shape *shape, struct head_view view, int64_t heads)
{
    ASSERT((uintptr_t)view.data % 16 == 0 && view.batch_stride % 8 == 0 && view.token_stride % 8 == 0 &&
           view.head_stride % 8 == 0);
    return {view, shape->batch, shape->tokens, heads, shape->head_dim};
}

static struct operand view_operand(const struct head_view *view)
{
    return {view->data, view->batch_stride, view->head_stride, view->token_stride};
}

/* (B, heads, T, D) contiguous. */
static struct head_view own_view(const struct attention_shape *shape, bf16 *data, int64_t heads)
{
    const int64_t size = shape->tokens * shape->head_dim;
    return {data, heads * size, shape->head_dim, size};
}

/* The operands of the scores; K may lose its mean first. */
static void publish_scores_of(const struct attention_fwd *a, const struct fwd_scratch *s,
                              const struct attention_saved *saved, struct fwd_call *f)
{
    const struct attention_shape *shape = &a->shape;
    const struct attention_recipe *recipe = a->recipe;
    struct head_tensor q = tensor_of(shape, a->q, shape->heads), k = tensor_of(shape, a->k, shape->kv_heads);
    const struct head_facts *k_facts = s->k_facts;
    const bool measured = recipe->qk != QK_BF16;
    if (measured || a->stats != NULL) {
        attention_measure_cuda(a->cuda, &q, s->q_facts);
        attention_measure_cuda(a->cuda, &k, s->k_facts);
    }
    bf16 *own_q = saved->q != NULL ? saved->q : s->q, *own_k = saved->k != NULL ? saved->k : s->k;
    if (recipe->k_center) {
        attention_centre_cuda(a->cuda, &k, own_k);
        k.view = own_view(shape, own_k, shape->kv_heads);
        k_facts = s->centred_facts;
        if (measured) {
            attention_measure_cuda(a->cuda, &k, s->centred_facts);
        }
    }
    if (measured) {
        attention_scores_cuda(a->cuda, recipe, &q, s->q_facts, s->decoded, own_q);
        attention_scores_cuda(a->cuda, recipe, &k, k_facts, s->decoded, own_k);
        q.view = own_view(shape, own_q, shape->heads);
        k.view = own_view(shape, own_k, shape->kv_heads);
    }
    f->q = view_operand(&q.view);
    f->k = view_operand(&k.view);
}

/* V of the forward and of its diagonal blocks. */
static void publish_values_of(const struct attention_fwd *a, const struct fwd_scratch *s,
                              const struct attention_saved *saved, struct fwd_call *f)
{
    const struct attention_shape *shape = &a->shape;
    const struct attention_recipe *recipe = a->recipe;
    struct head_tensor v = tensor_of(shape, a->v, shape->kv_heads);
    if (recipe->pv != PV_BF16 || recipe->bwd_stat == BWD_STAT_EXACT || a->stats != NULL) {
        attention_measure_cuda(a->cuda, &v, s->v_facts);
    }
    f->v = view_operand(&v.view);
    f->diag = {NULL, 0, 0, 0};
    if (recipe->pv != PV_BF16) {
        if (recipe->sink_keys_fp8 > 0) {
            struct head_tensor sinks = v;
            sinks.tokens = recipe->sink_keys_fp8 < v.tokens ? recipe->sink_keys_fp8 : v.tokens;
            attention_measure_cuda(a->cuda, &sinks, s->sink_facts);
        }
        bf16 *own = saved->v != NULL ? saved->v : s->v;
        attention_values_cuda(a->cuda, recipe, &v, s->v_facts, s->sink_facts, own);
        const struct head_view view = own_view(shape, own, shape->kv_heads);
        f->v = view_operand(&view);
    }
    if (recipe->v_diag == V_DIAG_FP8) {
        attention_value_e4m3_cuda(a->cuda, &v, s->v_facts, attention_unit(recipe), s->diag);
        const struct head_view view = own_view(shape, s->diag, shape->kv_heads);
        f->diag = view_operand(&view);
    }
}

template <int W, int P, bool EXTRA>
static void launch_kernel(const struct cuda *on, const struct fwd_call *f, int64_t blocks)
{
    const int bytes = (int)shared_bytes<W>();
    cudaFuncSetAttribute(fwd_kernel<W, P, EXTRA>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    fwd_kernel<W, P, EXTRA><<<(unsigned int)blocks, THREADS, (size_t)bytes, on->stream>>>(*f);
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

static void run(const struct attention_fwd *a, int p, const struct fwd_call *f)
{
    const int64_t blocks = a->shape.batch * a->shape.heads * f->row_blocks;
    if (blocks > 0 && a->shape.head_dim <= 64) {
        launch_for<64>(a->cuda, p, f, blocks);
    } else if (blocks > 0) {
        launch_for<128>(a->cuda, p, f, blocks);
    }
}

/* O' = unrounded P times the V of the backward, for bwd_stat = exact. */
static void run_exact(const struct attention_fwd *a, const struct fwd_scratch *s, bf16 *out, struct fwd_call f)
{
    const struct attention_shape *shape = &a->shape;
    const struct head_tensor v = tensor_of(shape, a->v, shape->kv_heads);
    if (a->recipe->bwd_v == BWD_V_E4M3) {
        attention_value_e4m3_cuda(a->cuda, &v, s->v_facts, 1.0f, s->v_exact);
        const struct head_view view = own_view(shape, s->v_exact, shape->kv_heads);
        f.v = view_operand(&view);
    } else if (a->recipe->bwd_v == BWD_V_BF16) {
        f.v = view_operand(&v.view);
    }
    if (a->recipe->bwd_v != BWD_V_FORWARD) {
        f.diag.data = NULL;
        f.v_unit = 1.0f;
    }
    f.out = own_view(shape, out, shape->heads);
    f.parts = NULL;
    run(a, P_UNROUNDED, &f);
}

void attention_fwd_cuda(const struct attention_fwd *a)
{
    const struct attention_shape *shape = &a->shape;
    ASSERT(attention_variant_cuda.refuses(shape, a->recipe) == NULL);
    struct carve at = {(unsigned char *)a->scratch, 0}, kept = {(unsigned char *)a->saved, 0};
    const struct fwd_scratch s = scratch_carve(shape, a->recipe, &at);
    struct attention_saved_cuda saved = {};
    if (a->saved != NULL) {
        saved = attention_saved_cuda_carve(shape, a->recipe, &kept);
    }
    struct fwd_call f = {};
    publish_scores_of(a, &s, &saved.operands, &f);
    publish_values_of(a, &s, &saved.operands, &f);
    f.out = tensor_of(shape, a->out, shape->heads).view;
    f.lse = a->lse_log2;
    f.lse_exact = saved.operands.lse_exact;
    f.anchor = saved.anchor;
    f.parts = a->stats != NULL ? s.parts : NULL;
    f.heads = (int)shape->heads;
    f.group = (int)(shape->heads / shape->kv_heads);
    f.tokens = (int)shape->tokens;
    f.row_blocks = (int)row_blocks_of(shape);
    f.head_dim = (int)shape->head_dim;
    f.p_block = attention_p_block(a->recipe->pv);
    f.causal = shape->causal;
    f.c = (float)((double)shape->softmax_scale * M_LOG2E);
    f.rule = p_rule_of(a->recipe, false);
    f.v_unit = f.rule.unit;
    run(a, a->recipe->pv, &f);
    if (saved.operands.out_exact != NULL) {
        run_exact(a, &s, saved.operands.out_exact, f);
    }
    if (a->stats != NULL) {
        attention_stats_cuda(a->cuda, s.parts, shape->batch * shape->heads * f.row_blocks, a->stats);
        attention_stats_facts_cuda(a->cuda, s.q_facts, shape->batch * shape->heads, a->stats);
        attention_stats_facts_cuda(a->cuda, s.k_facts, shape->batch * shape->kv_heads, a->stats);
        attention_stats_facts_cuda(a->cuda, s.v_facts, shape->batch * shape->kv_heads, a->stats);
    }
}
