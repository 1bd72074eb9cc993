/* attention: FP8 backward on Hopper (docs/numerics.md, sections 7 and 8): scores from the represented Q and K, in BF16
 * or, for qk = nvfp4_e4m3, in FP8 (QK8); the other four products in FP8. */
#include "attention/attention_bwd_sm90_mxfp4.cuh"

extern "C" {
#include "attention/attention_bwd_sm90.h"
#include "attention/attention_cpu.h"
}

/* ---- shared memory ---------------------------------------------------------------------------------------- */

enum {
    ROWS_K = BWD_KEYS * BWD_FEATURES * 2, /* bytes of K, BF16 */
    ROWS_Q = BWD_TILE * 2,                /* of a tile of Q, BF16 */
    DS_BYTES = BWD_QUERIES * BWD_KEYS,
    AT_K = 0,
    AT_V8 = AT_K + ROWS_K, /* V row, then K col */
    AT_K8 = AT_V8 + BWD8_KEYS / 2,
    AT_Q = AT_K8 + BWD8_KEYS / 2,
    AT_QUERIES = AT_Q + BWD_STAGES * ROWS_Q,        /* dO row, dO col, Q col */
    AT_DS = AT_QUERIES + BWD_STAGES * BWD8_QUERIES, /* 64 queries x 128 keys */
    AT_STAGING = AT_DS + BWD_DS_BUFFERS * DS_BYTES,
    AT_STATS = AT_STAGING + 8 * BWD_STAGING,
    AT_EXPONENTS = AT_STATS + BWD_STAGES * BWD_STATISTICS * 4, /* of MXFP4: two buffers of 128 bytes a warp */
    AT_BARRIERS = AT_EXPONENTS + 2 * 1024,
    SHARED_BYTES = AT_BARRIERS + BARRIERS * 8 + 1024,
};

struct bwd8_maps {
    CUtensorMap q, k;
};

/* ---- the loading warp ------------------------------------------------------------------------------------- */

template <bool QK8>
static __device__ void load(const struct bwd8_plan &p, const struct unit &u, const struct bwd8_maps &m,
                            const struct shared &s, bool ordered)
{
    const int64_t block = ((int64_t)u.batch * p.b.kv_heads + u.kv) * p.b.blocks + u.block;
    mbarrier_expect(barrier_at(s, KEYS), (QK8 ? ROWS_K / 2 : ROWS_K) + BWD8_KEYS);
    if (QK8) {
        bulk_load(s.base + AT_K, p.score_k + block * (BWD8_KEYS / 2), BWD8_KEYS / 2, barrier_at(s, KEYS));
    }
    for (int half = 0; !QK8 && half < 2; half++) {
        tma_load_4d(s.base + AT_K + half * ROWS_K / 2, &m.k, barrier_at(s, KEYS), half * 64, u.block * BWD_KEYS, u.kv,
                    u.batch);
    }
    bulk_load(s.base + AT_V8, p.keys + block * BWD8_KEYS, BWD8_KEYS, barrier_at(s, KEYS));
    struct walk w = walk_start(p.b, u, ordered);
    struct ring r = {0, 1};
    const int n = walk_length(p.b, u);
#pragma unroll 1 /* few registers here */
    for (int i = 0; i < n; i++) {
        mbarrier_wait(barrier_at(s, EMPTY + r.stage), r.parity);
        const uint32_t barrier = barrier_at(s, FULL + r.stage);
        const int64_t at = w.at;
        mbarrier_expect(barrier, (QK8 ? ROWS_Q / 2 : ROWS_Q) + BWD8_QUERIES + BWD_STATISTICS * 4);
        if (QK8) {
            bulk_load(s.base + AT_Q + r.stage * ROWS_Q, p.score_q + at * BWD8_ROW, BWD8_ROW, barrier);
        }
        for (int half = 0; !QK8 && half < 2; half++) {
            tma_load_4d(s.base + AT_Q + r.stage * ROWS_Q + half * ROWS_Q / 2, &m.q, barrier, half * 64,
                        w.tile * BWD_QUERIES, w.head, u.batch);
        }
        bulk_load(s.base + AT_QUERIES + r.stage * BWD8_QUERIES, p.queries + at * BWD8_QUERIES, BWD8_QUERIES, barrier);
        bulk_load(s.base + AT_STATS + r.stage * BWD_STATISTICS * 4, p.b.stats + at * BWD_STATISTICS, BWD_STATISTICS * 4,
                  barrier);
        walk_next(p.b, u, w);
        ring_next(r);
    }
}

/* ---- the computing warpgroups ----------------------------------------------------------------------------- */

/* S^T (64 keys x 64 queries). */
template <bool QK8> static __device__ __forceinline__ void product_scores(float (&x)[32], uint64_t k, uint64_t q)
{
#pragma unroll
    for (int i = 0; i < (QK8 ? 4 : 8); i++) {
        if (QK8) {
            wgmma_e4m3<64>::ss(x, operand_advance(k, i * 32), operand_advance(q, i * 32), i > 0);
        } else {
            wgmma_bf16<64>::ss<0, 0>(x, operand_advance(k, (i >> 2) * (ROWS_K / 2) + (i & 3) * 32),
                                     operand_advance(q, (i >> 2) * (ROWS_Q / 2) + (i & 3) * 32), i > 0);
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

/* dq (64 queries x 64 features) = dS (64 x 128 keys) times K. */
static __device__ __forceinline__ void product_dq(float (&dq)[32], uint64_t ds, uint64_t k_half)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        wgmma_e4m3<64>::ss(dq, operand_advance(ds, i * 32), operand_advance(k_half, i * 32), i > 0);
    }
    wgmma_commit();
}

/* Accumulators to A registers, queries in order pi1: y[4 k + h + 2 u] takes groups 4 k + 2 u and the next. */
static __device__ __forceinline__ void pack(const float (&x)[32], uint32_t (&y)[8])
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int j = 4 * (4 * (i >> 2) + 2 * ((i >> 1) & 1)) + 2 * (i & 1);
        y[i] = pack_e4m3(x[j], x[j + 1], x[j + 4], x[j + 5]);
    }
}

/* The values of packed codes, back in their accumulators. */
static __device__ __forceinline__ void unpack(const uint32_t (&y)[8], float (&x)[32])
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int j = 4 * (4 * (i >> 2) + 2 * ((i >> 1) & 1)) + 2 * (i & 1);
        uint32_t low, high;
        unpack_e4m3(y[i], low, high);
        const float2 a = __half22float2(*reinterpret_cast<__half2 *>(&low));
        const float2 b = __half22float2(*reinterpret_cast<__half2 *>(&high));
        x[j] = a.x;
        x[j + 1] = a.y;
        x[j + 4] = b.x;
        x[j + 5] = b.y;
    }
}

/* From the products of codes to dP in units of stored dS over the code of P. */
static __device__ __forceinline__ float dp_factor_of(const struct bwd8_plan &p, int unit)
{
    const struct bwd_lifts l = lifts_of(p, unit);
    return p.ds_factor * l.ds / (l.dout * l.v * p.rules.value_unit);
}

/* From the product of codes of Q and K to base-2 scores. */
static __device__ __forceinline__ float score_factor_of(const struct bwd8_plan &p, int unit)
{
    const struct bwd_lifts l = lifts_of(p, unit);
    return p.b.c / (l.score_q * l.score_k);
}

template <bool ORDERED, bool E5M2, enum p_code CODE, bool QK8>
static __device__ __forceinline__ void compute(const struct bwd8_plan &p, const struct unit &u, const struct shared &s,
                                               int wg)
{
    const int t = threadIdx.x & 127, lane = t & 31, warp = t >> 5;
    const int key = u.block * BWD_KEYS + wg * 64 + warp * 16 + (lane >> 2); /* and key + 8 */
    const int n = walk_length(p.b, u);
    const float dp_factor = dp_factor_of(p, u.batch * p.b.kv_heads + u.kv);
    const float score_factor = QK8 ? score_factor_of(p, u.batch * p.b.kv_heads + u.kv) : p.b.c;
    const uint64_t k_rows = operand_k_major(s.base + AT_K + wg * 8192);
    const uint64_t v_rows = operand_k_major(s.base + AT_V8 + wg * 8192);
    const uint64_t k_half = operand_k_major(s.base + AT_K8 + wg * 8192);
    /* stmatrix: lane 8 i + r gives the row of query 8 i + r; 16 keys of a warp are a chunk. */
    const uint32_t ds_at = s.base + AT_DS + lane * 128 + (((wg * 4 + warp) ^ (lane & 7)) << 4);
    float dk[64], dv[64], x[32], y[32];
    uint32_t px[8], dsx[8];
#pragma unroll
    for (int i = 0; i < 64; i++) {
        dk[i] = dv[i] = 0;
    }
    struct walk w = walk_start(p.b, u, ORDERED);
    struct ring r = {0, 0};
    int at = 0; /* the tile before */
    mbarrier_wait(barrier_at(s, KEYS), 0);
    mbarrier_wait(barrier_at(s, FULL), 0);
    wgmma_fence();
    product_scores<QK8>(x, k_rows, operand_k_major(s.base + AT_Q));
    for (int i = 0; i < n; i++) {
        const uint32_t codes = s.base + AT_QUERIES + r.stage * BWD8_QUERIES;
        const float2 *stats =
            reinterpret_cast<const float2 *>(s.memory + AT_STATS + r.stage * BWD_STATISTICS * 4) + (lane & 3);
        wgmma_wait<0>();
        wgmma_pin(x);
        wgmma_fence();
        product_dp<E5M2>(y, v_rows, operand_k_major(codes));
        if (masked(p.b, u, w.tile)) {
            mask_scores(p.b, key, w.tile, x);
        }
        if (CODE == CODE_FP8) {
            exponentials(x, stats, score_factor);
            pack(x, px);
        } else {
            mxfp4_codes<CODE>(x, stats, score_factor, s.memory + AT_EXPONENTS + (i & 1) * 1024 + wg * 512, wg, px);
        }
        wgmma_pin(px);
        wgmma_fence();
        accumulate<CODE != CODE_FP8 ? E5M2_LEFT
                   : E5M2           ? E5M2_RIGHT
                                    : E4M3_BOTH>(dv, px, operand_k_major_64(codes + BWD8_ROW));
        if (CODE == CODE_FP8) {
            unpack(px, x); /* dS takes the represented P */
        }
        wgmma_wait<1>();
        wgmma_pin(y);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 row = stats[BWD_QUERIES / 2 + 4 * j];
            x[4 * j] *= fmaf(y[4 * j], dp_factor, -row.x);
            x[4 * j + 1] *= fmaf(y[4 * j + 1], dp_factor, -row.y);
            x[4 * j + 2] *= fmaf(y[4 * j + 2], dp_factor, -row.x);
            x[4 * j + 3] *= fmaf(y[4 * j + 3], dp_factor, -row.y);
        }
        pack(x, dsx);
        const uint32_t ds = i % BWD_DS_BUFFERS * DS_BYTES;
#pragma unroll
        for (int k = 0; k < 2; k++) {
            /* Keys g and g + 8 of one query side by side; 8 queries a register. */
            const uint32_t *a = dsx + 4 * k;
            stmatrix_x4_transposed(ds_at + ds + k * 4096, __byte_perm(a[0], a[1], 0x5140),
                                   __byte_perm(a[0], a[1], 0x7362), __byte_perm(a[2], a[3], 0x5140),
                                   __byte_perm(a[2], a[3], 0x7362));
        }
        ds_written(s, i);
        wgmma_pin(dsx);
        wgmma_pin(x);
        wgmma_pin(y);
        wgmma_fence();
        accumulate<E4M3_BOTH>(dk, dsx, operand_k_major_64(codes + 2 * BWD8_ROW));
        const int stage = r.stage, before = (i + BWD_DS_BUFFERS - 1) % BWD_DS_BUFFERS;
        ring_next(r);
        if (i > 0) {
            ds_wait(s, i - 1);
        }
        wgmma_fence();
        product_dq(y, operand_k_major(s.base + AT_DS + before * DS_BYTES), k_half); /* not of tile -1 */
        if (i + 1 < n) {
            mbarrier_wait(barrier_at(s, FULL + r.stage), r.parity);
        }
        /* The scores of the next tile, under the additions to dQ; after the last one nobody looks at them. */
        wgmma_fence();
        product_scores<QK8>(x, k_rows, operand_k_major(s.base + AT_Q + r.stage * ROWS_Q));
        wgmma_wait<1>();
        wgmma_pin(y);
        wgmma_pin(px);
        wgmma_pin(dsx);
        __syncwarp();
        if (WARP_ARRIVALS == 32 || lane == 0) {
            mbarrier_arrive(barrier_at(s, EMPTY + stage));
        }
        if (i > 0) {
            add_dq<ORDERED>(p.b, s, at, wg, i - 1, y, AT_STAGING);
        }
        at = w.at;
        walk_next(p.b, u, w);
    }
    ds_wait(s, n - 1);
    wgmma_fence();
    product_dq(y, operand_k_major(s.base + AT_DS + (n - 1) % BWD_DS_BUFFERS * DS_BYTES), k_half);
    wgmma_wait<0>();
    wgmma_pin(y);
    add_dq<ORDERED>(p.b, s, at, wg, n - 1, y, AT_STAGING);
    add_dq_close<ORDERED>();
    wgmma_pin(x);
    wgmma_pin(dk);
    wgmma_pin(dv);
    named_barrier_sync(BARRIER_BOTH, 256); /* all products that read K and V are complete */
    const int key0 = u.block * BWD_KEYS + wg * 64;
    const struct bwd_lifts l = lifts_of(p, u.batch * p.b.kv_heads + u.kv);
    store_keys(dk, p.b.scale / (l.ds * l.q), s.base + AT_K + wg * 16384, s.memory + AT_K + wg * 16384, wg, key0, p.b,
               p.b.dk.data + u.batch * p.b.dk.batch_stride + u.kv * p.b.dk.head_stride, p.b.dk.token_stride);
    store_keys(dv, p.dv_factor / l.dout, s.base + AT_V8 + wg * 16384, s.memory + AT_V8 + wg * 16384, wg, key0, p.b,
               p.b.dv.data + u.batch * p.b.dv.batch_stride + u.kv * p.b.dv.head_stride, p.b.dv.token_stride);
}

template <bool ORDERED, bool E5M2, enum p_code CODE, bool QK8>
static __global__ void __launch_bounds__(BWD_THREADS, 1)
    bwd_fp8_kernel(const struct bwd8_plan p, const __grid_constant__ struct bwd8_maps maps)
{
    extern __shared__ char raw[];
    const struct shared s = shared_open(raw, AT_BARRIERS);
    const struct unit u = unit_of(p.b, blockIdx.x, ORDERED);
    if (threadIdx.x < 128) {
        registers_lower<24>();
        if (threadIdx.x == 0) {
            load<QK8>(p, u, maps, s, ORDERED);
        } else if (ORDERED && (threadIdx.x == 32 || threadIdx.x == 64)) {
            add_in_order(p.b, u, s, threadIdx.x / 32 - 1, AT_STAGING);
        }
    } else {
        registers_raise<240>();
        /* The warpgroup's number as a maximum over the warp, which the compiler keeps in a uniform register:
         * descriptors are then made there, and not moved over one by one. */
        compute<ORDERED, E5M2, CODE, QK8>(p, u, s, (int)__reduce_max_sync(0xffffffffu, threadIdx.x / 128) - 1);
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

extern "C" const char *attention_bwd_fp8_refuses_sm90(const struct attention_recipe *recipe)
{
    if (recipe->pv != PV_FP8 && recipe->pv != PV_MXFP4) {
        return "the Hopper FP8 backward carries pv = fp8 and mxfp4";
    }
    if (recipe->v_diag != V_DIAG_BLOCKED || recipe->sink_keys_fp8 != 0 || recipe->anchor != ANCHOR_ROW) {
        return "the Hopper FP8 backward wants v_diag = blocked, sink_keys_fp8 = 0 and anchor = row";
    }
    /* Where P is exp2(t - LSE2), the map of the forward's codes is in LSE2 and nowhere else. */
    if (recipe->bwd_p == BWD_P_CODES && recipe->p_map != P_EXACT && recipe->p_map != P_THRESHOLD) {
        return "the Hopper FP8 backward rebuilds codes with p_map = exact or threshold only";
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
    p.shift = recipe->bwd_p != BWD_P_CODES ? 8.0f : recipe->pv == PV_MXFP4 ? (float)MXFP4_SHIFT : 7.0f;
    p.ds_factor = exp2f(-p.shift) / unit;
    p.dv_factor = exp2f(-p.shift) / unit;
    if (p.rules.score_e4m3) {
        p.score_q = (uint8_t *)carve_take(&carve, tiles * BWD8_ROW);
        p.score_k = (uint8_t *)carve_take(&carve, (size_t)base.units * base.blocks * (BWD8_KEYS / 2));
    }
    *bytes = carve.used;
    return p;
}

template <bool ORDERED, bool E5M2, enum p_code CODE, bool QK8>
static void launch(const struct attention_bwd *a, const struct bwd8_plan &p, const struct bwd8_maps &m)
{
    cudaFuncSetAttribute(bwd_fp8_kernel<ORDERED, E5M2, CODE, QK8>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         SHARED_BYTES);
    bwd_fp8_kernel<ORDERED, E5M2, CODE, QK8>
        <<<p.b.units * p.b.blocks, BWD_THREADS, SHARED_BYTES, a->cuda->stream>>>(p, m);
    cuda_launched(a->cuda, "attention backward, FP8, sm90");
}

template <bool E5M2, enum p_code CODE, bool QK8>
static void launch_ordered(const struct attention_bwd *a, const struct bwd8_plan &p, const struct bwd8_maps &m)
{
    if (a->unordered) {
        launch<false, E5M2, CODE, QK8>(a, p, m);
    } else {
        launch<true, E5M2, CODE, QK8>(a, p, m);
    }
}

template <bool QK8>
static void launch_score(const struct attention_bwd *a, const struct bwd8_plan &p, const struct bwd8_maps &m)
{
    if (a->recipe->pv == PV_MXFP4 && p.rules.codes) {
        if (a->recipe->mx_rule == MX_NEAREST) {
            launch_ordered<false, CODE_NEAREST, QK8>(a, p, m);
        } else {
            launch_ordered<false, CODE_OCP, QK8>(a, p, m);
        }
    } else if (p.rules.dout_e5m2) {
        launch_ordered<true, CODE_FP8, QK8>(a, p, m);
    } else {
        launch_ordered<false, CODE_FP8, QK8>(a, p, m);
    }
}

void bwd8_run(const struct attention_bwd *a, const struct bwd8_plan &p)
{
    const struct attention_shape *shape = &a->shape;
    const int64_t T = shape->tokens;
    struct carve carve = {};
    carve.base = (unsigned char *)(uintptr_t)a->saved;
    const struct attention_saved saved = attention_saved_carve(shape, a->recipe, &carve);
    const struct head_view q = {saved.q, shape->heads * T * BWD_FEATURES, BWD_FEATURES, T * BWD_FEATURES};
    const struct head_view k = {saved.k, shape->kv_heads * T * BWD_FEATURES, BWD_FEATURES, T * BWD_FEATURES};
    const struct head_view v = {saved.v, k.batch_stride, k.token_stride, k.head_stride};
    const bool lift = a->recipe->qk_grad == QK_GRAD_LIFT;
    struct bwd8_inputs in;
    in.q = lift ? q : a->q;
    in.k = lift ? k : a->k;
    in.v = p.rules.value_e4m3 ? a->v : v;
    in.score_q = q;
    in.score_k = k;
    in.out = a->out;
    in.dout = a->dout;
    in.lse = a->lse_log2;
    in.zero_dq = a->unordered;
    in.amax = lift ? NULL : a->amax; /* of what the views are made from */
    struct bwd8_maps m;
    m.q = head_map(a->cuda, &q, T, shape->heads, shape->batch, BWD_QUERIES);
    m.k = head_map(a->cuda, &k, T, shape->kv_heads, shape->batch, BWD_KEYS);
    bwd8_publish(a->cuda, p, in);
    if (p.rules.score_e4m3) {
        launch_score<true>(a, p, m);
    } else {
        launch_score<false>(a, p, m);
    }
}
