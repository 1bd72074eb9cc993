/* attention: P of the CUDA backward where it is rebuilt from codes, relative to n = floor(LSE2) (docs/numerics.md,
 * section 7). Kept apart from attention_cuda_bwd.cuh: it makes kernels large. */
#pragma once

#include "attention/attention_cuda_bwd.cuh"

template <enum pv_format PV>
__device__ __forceinline__ void bwd_rebuild_row(const struct p_rule &rule, float reference, float anchor, int key0,
                                                float *t)
{
    const p_max max = p_block_max<PV, keys_in_quad>(t);
    (void)p_block_publish<PV, keys_in_quad>(rule, reference, anchor, key0, max, t);
}

/* How P of dV is made: BF16 as flash attention does; rounded as the arguments say; from the codes of any format, or of
 * one (`other`: all but FP8 and MXFP4). Kernels of their own, since code for all formats does not stay in the
 * instruction cache: FP8 9.1 ms instead of 10.5 on an H200, MXFP4 10.0 instead of 11.7 (B 4, T 4096, causal). */
enum route { ROUTE_BF16, ROUTE_ROUNDED, ROUTE_CODES, ROUTE_CODES_FP8, ROUTE_CODES_MXFP4, ROUTE_CODES_OTHER };

/* The format is the same for all threads of the kernel. */
template <enum route ROUTE>
__device__ __forceinline__ void bwd_rebuild(const struct p_rule &rule, float reference, float anchor, int key0,
                                            float *t)
{
    if (ROUTE == ROUTE_CODES_FP8 || (ROUTE == ROUTE_CODES && rule.pv == PV_FP8)) {
        bwd_rebuild_row<PV_FP8>(rule, reference, anchor, key0, t);
    } else if (ROUTE == ROUTE_CODES_MXFP4 || (ROUTE == ROUTE_CODES && rule.pv == PV_MXFP4)) {
        bwd_rebuild_row<PV_MXFP4>(rule, reference, anchor, key0, t);
    } else if (rule.pv == PV_BF16) {
        bwd_rebuild_row<PV_BF16>(rule, reference, anchor, key0, t);
    } else if (rule.pv == PV_NVFP4) {
        bwd_rebuild_row<PV_NVFP4>(rule, reference, anchor, key0, t);
    } else {
        bwd_rebuild_row<PV_FP4_UE5M3>(rule, reference, anchor, key0, t);
    }
}

/* Scores of a warp's tile become P of dS. put(m, n, h, pair) takes P of dV, times the unit of the codes. `rows`: place
 * of the head's row 0 in (B, H, T). */
template <enum route ROUTE, class PUT>
__device__ __forceinline__ void bwd_codes(const struct bwd_args &a, float (*s)[4][4], const struct bwd_tile &t,
                                          const struct bwd_rows &reference, int64_t rows, PUT put)
{
    const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
    const bool whole = bwd_tile_whole(t);
    struct bwd_rows anchor = reference, exact = reference;
    if (a.anchor != nullptr) {
        anchor = bwd_rows_load(a.anchor + rows, t.row0, t.tokens, CUDART_INF_F);
    }
    if (a.ds_exact) {
        exact = bwd_rows_load(a.exact + rows, t.row0, t.tokens, CUDART_INF_F);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int m = i >> 1, h = i & 1;
        /* anchor = row looks at the anchor only where P is below 2^-126, which the reference tells as well. */
        const float anchor_of_row = a.rule.anchor == ANCHOR_ZERO ? 0.0f : anchor.x[i];
        float p[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int n = j >> 1, e = j & 1;
            const bool visible = whole || bwd_visible(t, t.row0 + 8 * i + g, t.key0 + 8 * n + 2 * c + e);
            p[j] = visible ? __fmul_rn(a.c, s[m][n][2 * h + e]) : ATTENTION_MASKED;
            if (a.ds_exact) {
                s[m][n][2 * h + e] = p_exp2_fast(p[j] - exact.x[i]);
            }
        }
        bwd_rebuild<ROUTE>(a.rule, reference.x[i], anchor_of_row, t.key0, p);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            put(m, n, h, make_float2(p[2 * n], p[2 * n + 1]));
            if (!a.ds_exact) {
                s[m][n][2 * h] = p[2 * n];
                s[m][n][2 * h + 1] = p[2 * n + 1];
            }
        }
    }
}
