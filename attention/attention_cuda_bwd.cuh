/* attention: what the kernels of the CUDA backward share (docs/numerics.md, sections 7 and 8). Nobody else includes it.
 *
 * The scheme is the CPU's (attention_cpu_bwd.h): dO' = decoded w dO, dP = dO' V^T, dS = P (dP - r). A prepare step
 * leaves dO' and the statistic r of every row; then one kernel makes P and dS of each tile once, and all gradients from
 * them. No T x T array. Every sum has one order, so that two runs give equal bits.
 *
 * Represented values are exact in BF16, so products of BF16 with FP32 sums emulate every route. A warp holds 32 query
 * rows x 32 keys of scores, lanes as in attention_mma.cuh: a block of P of one row lies in the four lanes of a quad. */
#pragma once

#include "attention/attention_mma.cuh"
#include "attention/probability_cuda.cuh"

#include <cuda_fp8.h>
#include <math_constants.h>

/* Largest magnitude and largest squared row norm of a head, as bits: their maximum has no order. */
struct bwd_extent {
    unsigned long long norm2;
    unsigned int amax; /* NaN bits lie above those of Inf */
};

/* One (batch, kv head). */
struct bwd_unit_state {
    struct bwd_extent dout, q, k, v; /* q, k: what the gradient views are made of; v: of dP */
    float do_lift, lift;             /* multipliers of dO and dS */
};

enum bwd_counter { DO_COUNT, DO_FLUSHED, DS_COUNT, DS_FLUSHED, DS_SATURATED, NON_FINITE, BWD_COUNTERS };
enum bwd_sum { LEAK_ABS, DS_ABS, LEAK_STORED_ABS, DS_STORED_ABS, LEAK_R, R_R, BWD_SUMS };

struct bwd_args {
    int tokens, heads, kv_heads, head_dim;
    bool causal;
    bool p_codes, p_fp8; /* P of dV: rebuilt codes; else exp2 rounded to E4M3, or to BF16 */
    bool ds_exact;       /* dS takes P unrounded */
    bool ds_e4m3;        /* dS is stored in E4M3, else in BF16 */
    float c, softmax_scale, debug_leak;
    float p_factor; /* 1 / unit of the codes, for dS; dV takes dv_factor */
    float v_factor; /* 1 / unit of V in dP */
    float dv_factor;
    struct p_rule rule;
    struct head_view q, k, v, q_view, k_view; /* represented scores operands, V of dP, gradient views */
    struct head_view v_diag;                  /* data NULL, or V of the block at the query's own position */
    int v_block;                              /* length of that block: 16 or 32 */
    struct head_view dout;                    /* dO' */
    struct head_view dq, dk, dv;
    float *dk_sums; /* (B, Hkv, T, D) FP32 instead of dk, or NULL */
    /* (B, H, T) */
    const float *reference; /* n of codes, or LSE2; Inf where P is zero */
    const float *exact;     /* the LSE2 of unrounded P in the scale of the codes; NULL where ds_exact is false */
    const float *anchor;    /* of the forward, for codes; NULL unless sampled */
    const float *lse;
    float *stat; /* r */
    const struct bwd_unit_state *units;
    float *dq_sums;               /* (B, H, tiles of 64 rows, 8 warps, ..): dQ before its factor, as warps hold it */
    uint32_t *turns;              /* (B, H, tiles of 64 rows, 8 warps): blocks of keys that have added to dq_sums */
    uint32_t *ticket;             /* blocks of keys that have begun */
    unsigned long long *counters; /* NULL: no statistics */
    double *row_sums;             /* (B, H, T, 4): of dS, |dS|, and of the stored ones */
    double *sums;                 /* (blocks of the finishing kernel, BWD_SUMS) */
};

/* What the kernel over rows makes: dO', r, the references of P. */
struct bwd_rows_args {
    int tokens, heads, kv_heads, head_dim;
    bool codes, stat_raw;
    enum do_format do_format;
    struct head_view dout, o; /* o: whose product with dO is r; data NULL: r comes later */
    const float *lse, *lse_exact;
    const struct bwd_unit_state *units;
    bf16 *decoded;                   /* (B, H, T, D); NULL: dO' is dO */
    float *reference, *exact, *stat; /* as in bwd_args */
    unsigned long long *counters;
};

/* Tiles of the kernel that makes the gradients. */
enum { GRADIENT_KEYS = 128, GRADIENT_ROWS = 64, GRADIENT_THREADS = 256, GRADIENT_WARPS = 8 };

static inline int64_t bwd_row_tiles(const struct attention_shape *s)
{
    return (s->tokens + GRADIENT_ROWS - 1) / GRADIENT_ROWS;
}

/* For the steps before the products. */
struct bwd_prepare {
    const struct attention_shape *shape;
    const struct attention_recipe *recipe;
    struct bwd_unit_state *units;
};
void bwd_view_query(const struct cuda *on, const struct bwd_prepare *p, const struct head_view *q, bf16 *y);
void bwd_view_key(const struct cuda *on, const struct bwd_prepare *p, const struct head_view *k, bf16 *y);
void bwd_choose_lifts(const struct cuda *on, const struct bwd_prepare *p, const struct head_view *dout,
                      const struct head_view *v, float v_unit);
void bwd_rows(const struct cuda *on, const struct bwd_rows_args *a, int64_t batch);

/* Statistic r of `recentred`, or the planted error, into a->stat. */
void bwd_launch_stat(const struct cuda *on, const struct bwd_args *a, int64_t batch, bool planted);
void bwd_launch_gradients(const struct cuda *on, const struct bwd_args *a, int64_t batch);

/* dq from dq_sums, with the sums of rows; dk from dk_sums; the statistics of a call. */
void bwd_finish_dq(const struct cuda *on, const struct bwd_args *a, int64_t batch);
void bwd_finish_dk(const struct cuda *on, const struct bwd_args *a, int64_t batch);
void bwd_finish_stats(const struct cuda *on, const struct bwd_args *a, int64_t blocks, struct attention_stats *stats);

/* ---- device ------------------------------------------------------------------------------------------------ */

__device__ __forceinline__ const bf16 *bwd_head(const struct head_view &x, int64_t batch, int64_t head)
{
    return x.data + batch * x.batch_stride + head * x.head_stride;
}

__device__ __forceinline__ void bwd_put(uint32_t shared, uint32_t word)
{
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(word) : "memory");
}

__device__ __forceinline__ int bwd_non_finite(bf16x8 x)
{
    const uint32_t w[4] = {x.words.x, x.words.y, x.words.z, x.words.w};
    int count = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        count += (w[i] & 0x7f80u) == 0x7f80u;
        count += (w[i] & 0x7f800000u) == 0x7f800000u;
    }
    return count;
}

/* A pair through E4M3 (saturating, NaN stays), decoded. */
__device__ __forceinline__ float2 e4m3_round_pair(float x, float y)
{
    const __nv_fp8x2_storage_t code = __nv_cvt_float2_to_fp8x2(make_float2(x, y), __NV_SATFINITE, __NV_E4M3);
    const __half2_raw half = __nv_cvt_fp8x2_to_halfraw2(code, __NV_E4M3);
    return __half22float2(*reinterpret_cast<const __half2 *>(&half));
}

__device__ __forceinline__ float2 bf16_round_pair(float x, float y)
{
    return __bfloat1622float2(__floats2bfloat162_rn(x, y));
}

/* 2^-f of a row, f = LSE2 - floor(LSE2), rounded once: rows of few keys have f with which dO' falls on ties of E4M3,
 * where the last bit decides. 1 where every code is zero. */
__device__ __forceinline__ float bwd_fold(float lse)
{
    return lse == -CUDART_INF_F ? 1.0f : (float)exp2((double)(floorf(lse) - lse));
}

/* x (32 rows, 32 columns) = A B^T, A rows row0.. of a tile (rows, D), B rows col0.. of a tile (columns, D): scores from
 * Q and K, dP from dO' and V. */
template <int D>
__device__ __forceinline__ void bwd_product(float (*x)[4][4], uint32_t a_tile, int row0, uint32_t b_tile, int col0)
{
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                x[m][n][e] = 0.0f;
            }
        }
    }
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        uint32_t a[2][4], b[2][4];
        fragment_a<D>(a[0], a_tile, row0, k);
        fragment_a<D>(a[1], a_tile, row0 + 16, k);
        fragment_b<D>(b[0], b_tile, col0, k);
        fragment_b<D>(b[1], b_tile, col0 + 16, k);
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int n = 0; n < 4; n++) {
                mma_bf16(x[m][n], a[m], &b[n >> 1][2 * (n & 1)]);
            }
        }
    }
}

/* dP of a warp's tile on the diagonal, where the block of V at the query's own position is another one: whole 16 x 8
 * pieces are made again, with V read from global memory. Rare, so no shared memory is kept for it. */
template <int D>
__device__ __noinline__ void bwd_diagonal(float (*dp)[4][4], const struct bwd_args &a, uint32_t dout_tile, int row0,
                                          const bf16 *v, int64_t key0)
{
    const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
            if (a.v_block == 16 && m != n >> 1) {
                continue;
            }
            const int64_t key = key0 + 8 * n + g;
            float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            for (int k = 0; k < a.head_dim; k += 16) {
                uint32_t fa[4], fb[2] = {0u, 0u};
                fragment_a<D>(fa, dout_tile, row0 + 16 * m, k);
                if (key < a.tokens) {
                    const bf16 *p = v + key * a.v_diag.token_stride + k + 2 * c;
                    fb[0] = *reinterpret_cast<const uint32_t *>(p);
                    fb[1] = *reinterpret_cast<const uint32_t *>(p + 8);
                }
                mma_bf16(x, fa, fb);
            }
#pragma unroll
            for (int e = 0; e < 4; e++) {
                dp[m][n][e] = x[e];
            }
        }
    }
}

/* A warp's tile of scores: rows row0 + 16 m + 8 h + g, keys key0 + 8 n + 2 c + e. */
struct bwd_tile {
    int row0, key0;
    int tokens;
    bool causal;
};

__device__ __forceinline__ bool bwd_tile_empty(const struct bwd_tile &t)
{
    return t.row0 >= t.tokens || t.key0 >= t.tokens || (t.causal && t.key0 > t.row0 + 31);
}

__device__ __forceinline__ bool bwd_tile_whole(const struct bwd_tile &t)
{
    return t.key0 + 32 <= t.tokens && !(t.causal && t.key0 + 31 > t.row0);
}

__device__ __forceinline__ bool bwd_visible(const struct bwd_tile &t, int row, int key)
{
    return key < t.tokens && !(t.causal && key > row);
}

/* What the lane's four rows carry; index 2 m + h. */
struct bwd_rows {
    float x[4];
};

/* Lane c of a quad gets the quad's sum of x[c]. */
__device__ __forceinline__ float bwd_keep_row(const float *x)
{
    const int c = threadIdx.x & 3;
    float mine = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float y = x[i] + __shfl_xor_sync(0xffffffffu, x[i], 1);
        y += __shfl_xor_sync(0xffffffffu, y, 2);
        mine = c == i ? y : mine;
    }
    return mine;
}

/* Adds a warp's counts. */
__device__ __forceinline__ void bwd_count(unsigned long long *counters, enum bwd_counter counter, int n)
{
    const int total = __reduce_add_sync(0xffffffffu, n);
    if ((threadIdx.x & 31) == 0) {
        atomicAdd(counters + counter, (unsigned long long)total);
    }
}

/* Rows past the end get `missing`. */
__device__ __forceinline__ struct bwd_rows bwd_rows_load(const float *x, int row0, int tokens, float missing)
{
    const int g = (threadIdx.x & 31) >> 2;
    struct bwd_rows r;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = row0 + 8 * i + g;
        r.x[i] = row < tokens ? __ldg(x + row) : missing;
    }
    return r;
}

/* Scores become unrounded P = 2^(c s - lse), zero where masked. */
__device__ __forceinline__ void bwd_exponentials(float (*s)[4][4], const struct bwd_tile &t, float c,
                                                 const struct bwd_rows &lse)
{
    const int lane = threadIdx.x & 31, g = lane >> 2;
    const bool whole = bwd_tile_whole(t);
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[m][n][e] = p_exp2_fast(__fmaf_rn(c, s[m][n][e], -lse.x[2 * m + (e >> 1)]));
            }
        }
    }
    if (whole) {
        return;
    }
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int row = t.row0 + 16 * m + 8 * (e >> 1) + g;
                const int key = t.key0 + 8 * n + 2 * (lane & 3) + (e & 1);
                s[m][n][e] = bwd_visible(t, row, key) ? s[m][n][e] : 0.0f;
            }
        }
    }
}

/* P through the format of a route without codes. */
__device__ __forceinline__ float2 bwd_round_p(bool fp8, float x, float y)
{
    if (fp8) {
        const float2 z = e4m3_round_pair(256.0f * x, 256.0f * y);
        return make_float2(0x1p-8f * z.x, 0x1p-8f * z.y);
    }
    return bf16_round_pair(x, y);
}

/* P (dP - r), from products: the same bits in every kernel. */
__device__ __forceinline__ float bwd_ds(const struct bwd_args &a, float p, float dp, float r)
{
    return __fmul_rn(__fmul_rn(p, a.p_factor), __fsub_rn(__fmul_rn(dp, a.v_factor), r));
}

__device__ __forceinline__ float2 bwd_store_ds(bool e4m3, float x, float y)
{
    return e4m3 ? e4m3_round_pair(x, y) : bf16_round_pair(x, y);
}

/* A tile (R rows, D) into a head of y, in 16-byte stores; the threads of a block, or of a warp, take part. Returns how
 * many values are NaN or infinite. */
template <int R, int D, int THREADS>
__device__ __forceinline__ int bwd_tile_store(uint32_t tile, const struct bwd_args &a, const struct head_view &y,
                                              int64_t batch, int64_t head, int first)
{
    constexpr int CHUNKS = D / 8;
    bf16 *to = y.data + batch * y.batch_stride + head * y.head_stride;
    int bad = 0;
#pragma unroll
    for (int i = 0; i < R * CHUNKS / THREADS; i++) {
        const int at = i * THREADS + (int)(threadIdx.x % THREADS), row = at / CHUNKS, chunk = at % CHUNKS;
        if (first + row >= a.tokens || chunk * 8 >= a.head_dim) {
            continue;
        }
        bf16x8 x;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.words.x), "=r"(x.words.y), "=r"(x.words.z), "=r"(x.words.w)
                     : "r"(tile_chunk<D>(tile, row, chunk * 8))
                     : "memory");
        bf16x8_store(to + (int64_t)(first + row) * y.token_stride + chunk * 8, x);
        if (a.counters != nullptr) {
            bad += bwd_non_finite(x);
        }
    }
    return bad;
}
