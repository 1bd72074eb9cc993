/* attention: the rows of the forward kernel of the variant "cuda": masks, anchors, P, and the outputs at the end. */
#pragma once

#include "attention/attention_cuda_fwd.cuh"
#include "attention/attention_mma.cuh"

#include <math.h>

/* What a thread carries for rows g and g + 8 of a tile of 16. Sums are the lane's part. The last two are kept up by
 * kernels with EXTRA only. */
struct row_state {
    float anchor[2], sum[2], magnitude[2];
    float sum_exact[2], lost[2];
};

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

/* The online step: a larger maximum moves the anchor to the next integer; what was added up must then be multiplied by
 * the result, exactly. */
__device__ __forceinline__ float move_anchor(float max, float *anchor)
{
    const float before = *anchor;
    if (!(max > before)) {
        return 1.0f;
    }
    *anchor = ceilf(max);
    return before == -INFINITY ? 0.0f : p_pow2(before - *anchor);
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
        if (PV == PV_MXFP4) { /* without a row maximum `exact` may be infinite */
            row.lost[r] += t[i] == 0.0f ? exact[i] : 0.0f;
        } else {
            row.lost[r] = __fmaf_rn(p_equal(t[i], 0.0f), exact[i], row.lost[r]);
        }
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
        const float lift = P == PV_FP8 ? 256.0f : 1.0f; /* its P and sums are held times 2^8 */
        f.lse[at + token] = sum == 0.0f ? -INFINITY : anchor + log2f(__fdiv_rn(sum, lift * f.rule.unit));
        if (EXTRA && f.lse_exact != NULL) {
            f.lse_exact[at + token] = anchor + log2f(sum_exact / lift);
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

/* Stores O of 16 rows through the shared memory that held their Q, 16 bytes at a time. `row`: first row within the
 * block; room NULL: non-finite values are not counted. */
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

/* O / divisor, 0 if that is 0; through the reciprocal: a tiny divisor is lifted first, lest it overflows. */
template <int W> __device__ __forceinline__ void divide(float (&o)[W / 8][4], int r, float divisor)
{
    const bool none = divisor == 0.0f;
    const float lift = fabsf(divisor) < 0x1p-60f ? 0x1p80f : 1.0f;
    const float inverse = __fdiv_rn(1.0f, none ? 1.0f : divisor * lift);
#pragma unroll
    for (int n = 0; n < W / 8; n++) {
        o[n][2 * r] = none ? 0.0f : o[n][2 * r] * lift * inverse;
        o[n][2 * r + 1] = none ? 0.0f : o[n][2 * r + 1] * lift * inverse;
    }
}
