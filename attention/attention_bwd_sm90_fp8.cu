/* attention: FP8 backward on Hopper (docs/numerics.md, sections 7 and 8): scores from the represented Q and K, in BF16
 * or, for qk = nvfp4_e4m3, in FP8 (QK8); the other products in FP8. This kernel makes dK and dV, and stores dS, from
 * which attention_bwd_sm90_dq.cu makes dQ: a tile of dS is a quarter of the bytes that additions to a dQ in FP32 would
 * be, and all sums have one order. */
#include "attention/attention_bwd_sm90_maps.cuh"

extern "C" {
#include "attention/attention_bwd_sm90.h"
#include "attention/attention_sm90.h"
}

/* ---- shared memory and barriers ---------------------------------------------------------------------------- */

enum {
    STAGES = 3,     /* tiles of queries */
    DS_BUFFERS = 4, /* tiles of dS */
    /* Barriers: a stage is loaded, is free again; a tile of dS is written, is sent; keys are loaded. */
    LOADED = 0,
    FREED = LOADED + STAGES,
    WRITTEN = FREED + STAGES,
    SENT = WRITTEN + DS_BUFFERS,
    KEYS_LOADED = SENT + DS_BUFFERS,
    BARRIERS8,
};

template <bool QK8> struct room {
    enum {
        ROWS_K = BWD_KEYS * BWD_FEATURES * (QK8 ? 1 : 2),
        ROWS_Q = BWD_TILE * (QK8 ? 1 : 2), /* of a tile */
        AT_K = 0,
        AT_V = AT_K + ROWS_K,
        AT_Q = AT_V + BWD8_KEYS / 2,
        AT_QUERIES = AT_Q + STAGES * ROWS_Q, /* dO row, dO col, Q col */
        AT_DS = AT_QUERIES + STAGES * BWD8_QUERIES,
        AT_STATS = AT_DS + DS_BUFFERS * BWD8_DS,
        AT_EXPONENTS = AT_STATS + STAGES * BWD_STATISTICS * 4, /* of MXFP4: two buffers of 128 bytes a warp */
        AT_BARRIERS = AT_EXPONENTS + 2 * 1024,
        BYTES = AT_BARRIERS + BARRIERS8 * 8 + 1024,
    };
};

struct bwd8_maps {
    CUtensorMap q, k;
};

template <bool QK8> static __device__ __forceinline__ struct shared shared8_open(char *raw)
{
    char *memory = raw + ((1024 - (shared_address(raw) & 1023)) & 1023);
    const struct shared s = {shared_address(memory), shared_address(memory) + room<QK8>::AT_BARRIERS, memory};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(barrier_at(s, LOADED + i), 1);
            mbarrier_init(barrier_at(s, FREED + i), 8 * WARP_ARRIVALS); /* of the computing warps */
        }
        for (int i = 0; i < DS_BUFFERS; i++) {
            mbarrier_init(barrier_at(s, WRITTEN + i), 8);
            mbarrier_init(barrier_at(s, SENT + i), 1);
        }
        mbarrier_init(barrier_at(s, KEYS_LOADED), 1);
        mbarriers_ready();
    }
    __syncthreads();
    return s;
}

/* ---- the warps that load and send --------------------------------------------------------------------------- */

/* A tile of rows for scores: of E4M3 one box, of BF16 two. */
template <bool QK8>
static __device__ __forceinline__ void load_rows(uint32_t to, const CUtensorMap *map, uint32_t barrier, int row,
                                                 int head, int batch, int rows)
{
    tma_load_4d(to, map, barrier, 0, row, head, batch);
    if (!QK8) {
        tma_load_4d(to + rows * 128, map, barrier, 64, row, head, batch);
    }
}

template <bool QK8>
static __device__ __forceinline__ void load(const struct bwd8_plan &p, const struct unit &u, const struct bwd8_maps &m,
                                            const struct shared &s)
{
    typedef room<QK8> R;
    const int64_t block = ((int64_t)u.batch * p.b.kv_heads + u.kv) * p.b.blocks + u.block;
    mbarrier_expect(barrier_at(s, KEYS_LOADED), R::ROWS_K + BWD8_KEYS / 2);
    load_rows<QK8>(s.base + R::AT_K, &m.k, barrier_at(s, KEYS_LOADED), u.block * BWD_KEYS, u.kv, u.batch, BWD_KEYS);
    bulk_load(s.base + R::AT_V, p.keys + block * BWD8_KEYS, BWD8_KEYS / 2, barrier_at(s, KEYS_LOADED));
    struct walk w = walk_start(p.b, u, true);
    struct ring r = {0, 1};
    const int n = walk_length(p.b, u);
#pragma unroll 1 /* few registers here */
    for (int i = 0; i < n; i++) {
        mbarrier_wait(barrier_at(s, FREED + r.stage), r.parity);
        const uint32_t barrier = barrier_at(s, LOADED + r.stage);
        mbarrier_expect(barrier, R::ROWS_Q + BWD8_QUERIES + BWD_STATISTICS * 4);
        load_rows<QK8>(s.base + R::AT_Q + r.stage * R::ROWS_Q, &m.q, barrier, w.tile * BWD_QUERIES, w.head, u.batch,
                       BWD_QUERIES);
        bulk_load(s.base + R::AT_QUERIES + r.stage * BWD8_QUERIES, p.queries + (int64_t)w.at * BWD8_QUERIES,
                  BWD8_QUERIES, barrier);
        bulk_load(s.base + R::AT_STATS + r.stage * BWD_STATISTICS * 4, p.b.stats + (int64_t)w.at * BWD_STATISTICS,
                  BWD_STATISTICS * 4, barrier);
        walk_next(p.b, u, w);
        ring_next<STAGES>(r);
    }
}

/* first: unit whose dS comes first in memory. */
template <bool QK8>
static __device__ __forceinline__ void send_ds(const struct bwd8_plan &p, const struct unit &u, const struct shared &s,
                                               int first)
{
    const int group = p.b.heads / p.b.kv_heads;
    const int head0 = (u.batch * p.b.kv_heads + u.kv - first) * group - u.kv * group; /* of the launch, for head 0 */
    struct walk w = walk_start(p.b, u, true);
    struct ring r = {0, 0};
#pragma unroll 1 /* few registers here */
    for (int left = walk_length(p.b, u); left > 0; left--) {
        uint8_t *to = pair_at(p, head0 + w.head, w.tile >> 1) + (int64_t)u.block * BWD8_PAIR + (w.tile & 1) * BWD8_DS;
        mbarrier_wait(barrier_at(s, WRITTEN + r.stage), r.parity);
        bulk_store(to, s.base + room<QK8>::AT_DS + r.stage * BWD8_DS, BWD8_DS);
        tma_store_commit();
        walk_next(p.b, u, w);
        tma_store_wait_read<0>();
        mbarrier_arrive(barrier_at(s, SENT + r.stage));
        ring_next<DS_BUFFERS>(r);
    }
}

/* ---- products ----------------------------------------------------------------------------------------------- */

/* S^T (64 keys x 64 queries). */
template <bool QK8> static __device__ __forceinline__ void product_scores(float (&x)[32], uint64_t k, uint64_t q)
{
#pragma unroll
    for (int i = 0; i < (QK8 ? 4 : 8); i++) {
        if (QK8) {
            wgmma_e4m3<64>::ss(x, operand_advance(k, i * 32), operand_advance(q, i * 32), i > 0);
        } else {
            wgmma_bf16<64>::ss<0, 0>(x, operand_advance(k, (i >> 2) * (room<QK8>::ROWS_K / 2) + (i & 3) * 32),
                                     operand_advance(q, (i >> 2) * (room<QK8>::ROWS_Q / 2) + (i & 3) * 32), i > 0);
        }
    }
    wgmma_commit();
}

/* dP^T (64 keys x 64 queries). */
template <bool E5M2> static __device__ __forceinline__ void product_dp(float (&x)[32], uint64_t v, uint64_t dout)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (E5M2) {
            wgmma_e4m3_e5m2<64>::ss(x, operand_advance(v, i * 32), operand_advance(dout, i * 32), i > 0);
        } else {
            wgmma_e4m3<64>::ss(x, operand_advance(v, i * 32), operand_advance(dout, i * 32), i > 0);
        }
    }
    wgmma_commit();
}

/* sum (64 keys x 128) += x^T (64 keys x 64 queries, packed) times columns of b; which of the two is E5M2, if any. */
enum product_kind { E4M3_BOTH, E5M2_LEFT, E5M2_RIGHT };

template <enum product_kind KIND>
static __device__ __forceinline__ void accumulate(float (&sum)[64], const uint32_t (&x)[8], uint64_t b)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (KIND == E5M2_LEFT) {
            wgmma_e5m2_e4m3<128>::rs(sum, x + 4 * i, operand_advance(b, i * 32), 1);
        } else if (KIND == E5M2_RIGHT) {
            wgmma_e4m3_e5m2<128>::rs(sum, x + 4 * i, operand_advance(b, i * 32), 1);
        } else {
            wgmma_e4m3<128>::rs(sum, x + 4 * i, operand_advance(b, i * 32), 1);
        }
    }
    wgmma_commit();
}

/* ---- elements ----------------------------------------------------------------------------------------------- */

/* This thread's queries' statistics of a tile: group j of the accumulators. */
static __device__ __forceinline__ void read_statistics(float2 (&y)[8], uint32_t from)
{
#pragma unroll
    for (int j = 0; j < 8; j++) {
        /* volatile: read where it stands, long before it is used */
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(y[j].x), "=f"(y[j].y) : "r"(from + 32 * j) : "memory");
    }
}

/* c s - from. */
static __device__ __forceinline__ void distances(float (&x)[32], const float2 (&from)[8], float c)
{
#pragma unroll
    for (int j = 0; j < 32; j++) {
        x[j] = fmaf(x[j], c, -(j & 1 ? from[j >> 2].y : from[j >> 2].x));
    }
}

/* First of the accumulators that make register i of an operand, queries in order pi1: y[4 k + h + 2 u] takes groups
 * 4 k + 2 u and the next. */
static __device__ __forceinline__ constexpr int packed_at(int i)
{
    return 4 * (4 * (i >> 2) + 2 * ((i >> 1) & 1)) + 2 * (i & 1);
}

/* 2^x as A registers. */
static __device__ __forceinline__ void fp8_codes(const float (&x)[32], uint32_t (&y)[8])
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int j = packed_at(i);
        y[i] = pack_e4m3(exp2_fast(x[j]), exp2_fast(x[j + 1]), exp2_fast(x[j + 4]), exp2_fast(x[j + 5]));
    }
}

/* Stored dS as A registers: represented P, as it was packed, times dP factor - r. */
template <enum p_code CODE>
static __device__ __forceinline__ void ds_codes(const float (&dp)[32], const uint32_t (&p)[8], const float2 (&r)[8],
                                                float factor, uint32_t (&ds)[8])
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int j = packed_at(i), g = j >> 2;
        uint32_t low, high;
        if (CODE == CODE_FP8) {
            unpack_e4m3(p[i], low, high);
        } else { /* E5M2 is the upper byte of FP16 */
            low = bytes_by(p[i], 0, 0x1404);
            high = bytes_by(p[i], 0, 0x3424);
        }
        const float2 a = __half22float2(*reinterpret_cast<__half2 *>(&low));
        const float2 b = __half22float2(*reinterpret_cast<__half2 *>(&high));
        ds[i] = pack_e4m3(a.x * fmaf(dp[j], factor, -r[g].x), a.y * fmaf(dp[j + 1], factor, -r[g].y),
                          b.x * fmaf(dp[j + 4], factor, -r[g + 1].x), b.y * fmaf(dp[j + 5], factor, -r[g + 1].y));
    }
}

/* dS^T to its buffer: stmatrix lane 8 i + r gives the row of query 8 i + r; 16 keys of a warp are a chunk. */
static __device__ __forceinline__ void write_ds(uint32_t buffer, int own, const uint32_t (&ds)[8])
{
    const int lane = threadIdx.x & 31;
    const uint32_t to = buffer + lane * 128 + ((own ^ (lane & 7)) << 4);
#pragma unroll
    for (int k = 0; k < 2; k++) {
        /* Keys g and g + 8 of one query side by side; 8 queries a register. */
        const uint32_t *a = ds + 4 * k;
        stmatrix_x4_transposed(to + k * 4096, __byte_perm(a[0], a[1], 0x5140), __byte_perm(a[0], a[1], 0x7362),
                               __byte_perm(a[2], a[3], 0x5140), __byte_perm(a[2], a[3], 0x7362));
    }
}

/* From the products of codes to dP in units of stored dS over the code of P. */
static __device__ __forceinline__ float dp_factor_of(const struct bwd8_plan &p, int unit)
{
    const struct bwd_lifts l = lifts_of(p, unit);
    return p.ds_factor * l.ds / (l.dout * l.v * p.rules.value_unit);
}

/* From the product of Q and K, or of their codes, to base-2 scores. */
template <bool QK8>
static __device__ __forceinline__ float score_factor_of(const struct bwd8_plan &p, const struct unit &u, int head)
{
    return QK8 ? p.b.c * p.q_inverse[u.batch * p.b.heads + head] * p.k_inverse[u.batch * p.b.kv_heads + u.kv] : p.b.c;
}

/* [mbarrier.test_wait] Whether the phase of this parity is complete. */
static __device__ __forceinline__ bool mbarrier_test(uint32_t barrier, uint32_t parity)
{
    uint32_t complete;
    asm volatile("{\n\t.reg .pred done;\n\t"
                 "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, done;\n\t}"
                 : "=r"(complete)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return complete != 0;
}

/* Read anew, so that what follows from it is not kept in registers. */
static __device__ __forceinline__ int lane_now()
{
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

/* ---- the computing warpgroups ------------------------------------------------------------------------------- */

/* own: 0 .. 7, of the warp.
 * A tile: dP is made under the exponentials, dV and the scores of the next tile under dS; all products are complete
 * where the loop begins (ptxas puts them one after the other if accumulators are read while another group, begun before
 * the back edge, is in flight). */
template <bool E5M2, enum p_code CODE, bool QK8>
static __device__ __forceinline__ void compute(const struct bwd8_plan &p, const struct unit &u, const struct shared &s,
                                               int own)
{
    typedef room<QK8> R;
    const int wg = own >> 2, n = walk_length(p.b, u);
    const uint64_t k_rows = operand_at(s.base, R::AT_K + 0) + wg * (8192 >> 4);
    const uint64_t v_rows = operand_at(s.base, R::AT_V + 0) + wg * (8192 >> 4);
    const uint32_t stats_at = s.base + R::AT_STATS + (threadIdx.x & 3) * sizeof(float2);
    const float dp_factor = dp_factor_of(p, u.batch * p.b.kv_heads + u.kv);
    const int masked_below = p.b.causal                                   ? u.first + BWD_KEYS / BWD_QUERIES
                             : u.block * BWD_KEYS + BWD_KEYS > p.b.tokens ? p.b.tiles
                                                                          : 0;
    int head = u.kv * (p.b.heads / p.b.kv_heads), tile = u.first;
    float score_factor = score_factor_of<QK8>(p, u, head);
    float dk[64], dv[64], x[32], y[32];
    uint32_t px[8], dsx[8];
    float2 rows[8]; /* statistics: LSE2, then r */
#pragma unroll
    for (int i = 0; i < 64; i++) {
        dk[i] = dv[i] = 0;
    }
    struct ring r = {0, 0};
    mbarrier_wait(barrier_at(s, KEYS_LOADED), 0);
    mbarrier_wait(barrier_at(s, LOADED), 0);
    read_statistics(rows, stats_at);
    wgmma_pin(dk);
    wgmma_pin(dv);
    wgmma_fence();
    product_scores<QK8>(x, k_rows, operand_at(s.base, R::AT_Q));
#pragma unroll 1
    for (int i = 0; i < n; i++) {
        const uint32_t stage = r.stage;
        wgmma_wait<0>();
        wgmma_pin(x);
        wgmma_pin(dsx);
        wgmma_fence();
        product_dp<E5M2>(y, v_rows, operand_at(s.base, R::AT_QUERIES, stage, BWD8_QUERIES));
        if (i > 0 && (WARP_ARRIVALS == 32 || (threadIdx.x & 31) == 0)) {
            mbarrier_arrive(barrier_at(s, FREED + (stage == 0 ? STAGES - 1 : stage - 1)));
        }
        if (tile < masked_below) {
            mask_scores(p.b, u.block * BWD_KEYS + own * 16 + (lane_now() >> 2), tile, x);
        }
        ring_next<STAGES>(r);
        const bool loaded = mbarrier_test(barrier_at(s, LOADED + r.stage), r.parity);
        distances(x, rows, score_factor);
        read_statistics(rows, stats_at + stage * (BWD_STATISTICS * 4) + BWD_QUERIES * 4);
        if (CODE == CODE_FP8) {
            fp8_codes(x, px);
        } else if constexpr (CODE == CODE_AFFINE || CODE == CODE_SPACE) {
            map_codes<CODE>(x, p.map, s.memory + R::AT_EXPONENTS + (i & 1) * 1024 + wg * 512, wg, px);
        } else {
            mxfp4_codes<CODE>(x, s.memory + R::AT_EXPONENTS + (i & 1) * 1024 + wg * 512, wg, px);
        }
        if (i + 1 < n && !loaded) {
            mbarrier_wait(barrier_at(s, LOADED + r.stage), r.parity);
        }
        wgmma_pin(px);
        wgmma_pin(x);
        wgmma_fence();
        accumulate<CODE != CODE_FP8 ? E5M2_LEFT
                   : E5M2           ? E5M2_RIGHT
                          : E4M3_BOTH>(dv, px, operand_64_at(s.base, R::AT_QUERIES + BWD8_ROW, stage, BWD8_QUERIES));
        /* After the last tile nobody looks at the scores. */
        product_scores<QK8>(x, k_rows, operand_at(s.base, R::AT_Q, r.stage, R::ROWS_Q));
        wgmma_wait<2>();
        wgmma_pin(y);
        /* px is read while dV's product may still read it too: PTX leaves any access open, the hardware only reads. */
        ds_codes<CODE>(y, px, rows, dp_factor, dsx);
        const uint32_t buffer = (uint32_t)i % DS_BUFFERS;
        mbarrier_wait(barrier_at(s, SENT + buffer), ((uint32_t)i / DS_BUFFERS & 1) ^ 1);
        write_ds(s.base + R::AT_DS + buffer * BWD8_DS, own, dsx);
        wgmma_pin(dsx);
        wgmma_pin(y);
        wgmma_fence();
        accumulate<E4M3_BOTH>(dk, dsx, operand_64_at(s.base, R::AT_QUERIES + 2 * BWD8_ROW, stage, BWD8_QUERIES));
        fence_async_proxy();
        __syncwarp();
        if ((threadIdx.x & 31) == 0) {
            mbarrier_arrive(barrier_at(s, WRITTEN + buffer));
        }
        read_statistics(rows, stats_at + r.stage * (BWD_STATISTICS * 4));
        if (++tile == p.b.tiles && i + 1 < n) {
            tile = u.first;
            score_factor = score_factor_of<QK8>(p, u, ++head);
        }
    }
    wgmma_wait<0>();
    wgmma_pin(x);
    wgmma_pin(dk);
    wgmma_pin(dv);
    named_barrier_sync(BARRIER_BOTH, 256); /* all products that read tiles are complete */
    const int key0 = u.block * BWD_KEYS + wg * 64, at = R::AT_QUERIES + wg * 32768;
    const struct bwd_lifts l = lifts_of(p, u.batch * p.b.kv_heads + u.kv);
    store_keys(dk, p.b.scale / (l.ds * l.q), s.base + at, s.memory + at, wg, key0, p.b,
               p.b.dk.data + u.batch * p.b.dk.batch_stride + u.kv * p.b.dk.head_stride, p.b.dk.token_stride);
    store_keys(dv, p.dv_factor / l.dout, s.base + at + 16384, s.memory + at + 16384, wg, key0, p.b,
               p.b.dv.data + u.batch * p.b.dv.batch_stride + u.kv * p.b.dv.head_stride, p.b.dv.token_stride);
}

/* first: the launch's first unit; its units come together in unit_of's order. */
template <bool E5M2, enum p_code CODE, bool QK8>
static __global__ void __launch_bounds__(BWD_THREADS, 1)
    bwd_fp8_kernel(const struct bwd8_plan p, const __grid_constant__ struct bwd8_maps maps, int first)
{
    extern __shared__ char raw[];
    const struct shared s = shared8_open<QK8>(raw);
    const struct unit u = unit_of(p.b, first * p.b.blocks + blockIdx.x, false);
    if (threadIdx.x < 128) {
        registers_lower<24>();
        if (threadIdx.x == 0) {
            load<QK8>(p, u, maps, s);
        } else if (threadIdx.x == 32) {
            send_ds<QK8>(p, u, s, first);
        }
    } else {
        registers_raise<240>();
        /* The warp's number as a maximum over the warp, which the compiler keeps in a uniform register:
         * descriptors are then made there, and not moved over one by one. */
        compute<E5M2, CODE, QK8>(p, u, s, (int)__reduce_max_sync(0xffffffffu, threadIdx.x / 32) - 4);
    }
}

/* ---- host -------------------------------------------------------------------------------------------------- */

static struct bwd_rules rules_of(const struct attention_recipe *recipe)
{
    struct bwd_rules r = {};
    r.codes = recipe->bwd_p == BWD_P_CODES;
    r.raw_statistic = recipe->bwd_stat == BWD_STAT_SAVED_RAW;
    r.dout_e5m2 = recipe->do_format == DO_E5M2;
    r.dout_fixed = recipe->do_scale == DO_SCALE_FIXED;
    r.ds_fixed = recipe->ds_scale == DS_SCALE_FIXED;
    r.view_fixed = recipe->qk_grad == QK_GRAD_LIFT && recipe->ds_scale == DS_SCALE_FIXED;
    r.value_e4m3 = recipe->bwd_v == BWD_V_E4M3;
    r.score_e4m3 = recipe->qk == QK_NVFP4_E4M3;
    r.value_unit = r.value_e4m3 ? 1.0f : attention_unit(recipe);
    return r;
}

extern "C" const char *attention_bwd_fp8_refuses_sm90(const struct attention_shape *shape,
                                                      const struct attention_recipe *recipe)
{
    const int64_t blocks = (shape->tokens + BWD_KEYS - 1) / BWD_KEYS;
    const int64_t pairs = shape->causal ? blocks * (blocks + 1) / 2 : blocks * blocks;
    if (pairs * (shape->heads / shape->kv_heads) * BWD8_PAIR > 40ll << 30) {
        return "the Hopper FP8 backward keeps dS of a kv head in scratch, 40 GiB at most (131072 tokens of four query "
               "heads)";
    }
    if (recipe->pv != PV_FP8 && recipe->pv != PV_MXFP4) {
        return "the Hopper FP8 backward carries pv = fp8 and mxfp4";
    }
    if (recipe->v_diag != V_DIAG_BLOCKED || recipe->sink_keys_fp8 != 0) {
        return "the Hopper FP8 backward wants v_diag = blocked and sink_keys_fp8 = 0";
    }
    /* Where P is exp2(t - LSE2), map and anchor of the forward's codes are in LSE2 and nowhere else. */
    if (recipe->bwd_p == BWD_P_CODES && recipe->p_map == P_ACCURATE) {
        return "the Hopper FP8 backward rebuilds codes with p_map = exact, threshold, code_space or affine only";
    }
    if (recipe->bwd_p == BWD_P_CODES && recipe->anchor != ANCHOR_ROW) {
        return "the Hopper FP8 backward rebuilds codes with anchor = row only: zero's vanish below 2^-126, sampled's "
               "depend on a maximum that is not saved";
    }
    if (recipe->pv == PV_MXFP4 && recipe->bwd_p == BWD_P_CODES && recipe->do_format != DO_E4M3) {
        return "the Hopper FP8 backward rebuilds MXFP4 codes with do_format = e4m3 only";
    }
    if (recipe->qk == QK_BF16 || recipe->backward == BWD_BF16 || recipe->bwd_p == BWD_P_BF16 ||
        recipe->bwd_v == BWD_V_BF16 || recipe->do_format == DO_BF16) {
        return "the Hopper FP8 backward wants qk other than bf16 and every operand of the backward in FP8";
    }
    if (recipe->bwd_stat == BWD_STAT_RECENTRED || recipe->bwd_stat == BWD_STAT_EXACT) {
        return "the Hopper FP8 backward has the statistic of the saved output only";
    }
    if (recipe->k_center || recipe->dk_center || recipe->debug_leak != 0) {
        return "the Hopper FP8 backward has neither k_center, dk_center nor debug_leak";
    }
    return NULL;
}

/* Bytes of dS of one unit, and of those in memory at the same time: of all, or 1.25 GiB; and of one turn of those that
 * run together at least (256 blocks of keys at most, or one unit), since the GPU empties after each. Longer sequences
 * never take less, so that what is planned for the longest call holds every other. */
static int64_t ds_of_unit(const struct bwd_plan &p)
{
    return pairs_of_head(p) * (p.heads / p.kv_heads) * BWD8_PAIR;
}

static int64_t ds_bytes(const struct bwd_plan &p)
{
    const int64_t least = 5ll << 28, all = p.units * ds_of_unit(p);
    const int64_t few = p.causal ? 128ll * (p.blocks + 1) * (p.heads / p.kv_heads) * BWD8_PAIR : 0;
    const int64_t turn = few > ds_of_unit(p) ? few : ds_of_unit(p), most = turn > least ? turn : least;
    return all < most ? all : most;
}

/* Units whose dS is in memory at the same time: all, or whole turns. */
static int units_together(const struct bwd_plan &p)
{
    const int64_t fit = ds_bytes(p) / ds_of_unit(p);
    return (int)(fit < p.units ? fit / p.heads_together * p.heads_together : p.units);
}

struct bwd8_plan bwd8_plan_of(const struct bwd_plan &base, const struct attention_recipe *recipe, void *scratch,
                              size_t *bytes)
{
    struct carve carve = {};
    struct bwd8_plan p = {};
    const size_t tiles = (size_t)base.units / base.kv_heads * base.heads * base.tiles;
    carve.base = (unsigned char *)scratch;
    p.b = base;
    p.facts = (struct bwd_facts *)carve_take(&carve, (size_t)base.units * sizeof *p.facts);
    p.queries = (uint8_t *)carve_take(&carve, tiles * BWD8_QUERIES);
    p.keys = (uint8_t *)carve_take(&carve, (size_t)base.units * base.blocks * BWD8_KEYS);
    /* Codes reach 2 in P: 448 is the end. */
    const float unit = recipe->bwd_p == BWD_P_CODES ? attention_unit(recipe) : 1.0f;
    p.rules = rules_of(recipe);
    p.map = map_of(recipe);
    p.shift = recipe->bwd_p != BWD_P_CODES ? 8.0f : recipe->pv == PV_MXFP4 ? (float)MXFP4_SHIFT : 7.0f;
    p.ds_factor = exp2f(-p.shift) / unit;
    p.dv_factor = exp2f(-p.shift) / unit;
    p.together = units_together(base);
    p.ds = (uint8_t *)carve_take(&carve, (size_t)ds_bytes(base));
    *bytes = carve.used;
    return p;
}

template <bool E5M2, enum p_code CODE, bool QK8>
static void launch(const struct attention_bwd *a, const struct bwd8_plan &p, const struct bwd8_maps &m)
{
    cudaFuncSetAttribute(bwd_fp8_kernel<E5M2, CODE, QK8>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         room<QK8>::BYTES);
    for (int first = 0; first < p.b.units; first += p.together) {
        const int units = p.b.units - first < p.together ? p.b.units - first : p.together;
        bwd_fp8_kernel<E5M2, CODE, QK8>
            <<<units * p.b.blocks, BWD_THREADS, room<QK8>::BYTES, a->cuda->stream>>>(p, m, first);
        cuda_launched(a->cuda, "attention backward, FP8, sm90");
        bwd8_dq(a->cuda, p, a->dq, first, units);
    }
}

template <bool QK8>
static void launch_score(const struct attention_bwd *a, const struct bwd8_plan &p, const struct bwd8_maps &m)
{
    if (a->recipe->pv == PV_MXFP4 && p.rules.codes) {
        if (a->recipe->p_map == P_AFFINE) {
            launch<false, CODE_AFFINE, QK8>(a, p, m);
        } else if (a->recipe->p_map == P_CODE_SPACE) {
            launch<false, CODE_SPACE, QK8>(a, p, m);
        } else if (a->recipe->mx_rule == MX_NEAREST) {
            launch<false, CODE_NEAREST, QK8>(a, p, m);
        } else {
            launch<false, CODE_OCP, QK8>(a, p, m);
        }
    } else if (p.rules.dout_e5m2) {
        launch<true, CODE_FP8, QK8>(a, p, m);
    } else {
        launch<false, CODE_FP8, QK8>(a, p, m);
    }
}

void bwd8_run(const struct attention_bwd *a, struct bwd8_plan p)
{
    const struct attention_shape *shape = &a->shape;
    const int64_t T = shape->tokens;
    struct carve carve = {};
    carve.base = (unsigned char *)(uintptr_t)a->saved;
    const struct attention_saved_sm90 saved = attention_saved_sm90_carve(shape, a->recipe, &carve);
    const struct head_view q = {saved.operands.q, shape->heads * T * BWD_FEATURES, BWD_FEATURES, T * BWD_FEATURES};
    const struct head_view k = {saved.operands.k, shape->kv_heads * T * BWD_FEATURES, BWD_FEATURES, T * BWD_FEATURES};
    const struct head_view v = {saved.operands.v, k.batch_stride, k.token_stride, k.head_stride};
    const bool lift = a->recipe->qk_grad == QK_GRAD_LIFT;
    struct bwd8_inputs in;
    in.q = lift ? q : a->q;
    in.k = lift ? k : a->k;
    in.v = p.rules.value_e4m3 ? a->v : v;
    in.out = a->out;
    in.dout = a->dout;
    in.lse = a->lse_log2;
    in.amax = lift ? NULL : a->amax; /* of what the views are made from */
    bwd8_publish(a->cuda, p, in);
    struct bwd8_maps m;
    if (p.rules.score_e4m3) {
        p.q_inverse = saved.q_inverse;
        p.k_inverse = saved.k_inverse;
        m.q = codes_map(a->cuda, saved.q8, T, shape->heads, shape->batch, BWD_QUERIES);
        m.k = codes_map(a->cuda, saved.k8, T, shape->kv_heads, shape->batch, BWD_KEYS);
        launch_score<true>(a, p, m);
    } else {
        m.q = head_map(a->cuda, &q, T, shape->heads, shape->batch, BWD_QUERIES);
        m.k = head_map(a->cuda, &k, T, shape->kv_heads, shape->batch, BWD_KEYS);
        launch_score<false>(a, p, m);
    }
}
