/* attention: FP8 backward on Hopper (docs/numerics.md, sections 7 and 8): scores in BF16 from the represented Q and K,
 * the other four products in FP8. */
#include "attention/attention_bwd_sm90_fp8.cuh"

extern "C" {
#include "attention/attention_cpu.h"
#include "attention/attention_bwd_sm90.h"
}

/* ---- shared memory ---------------------------------------------------------------------------------------- */

enum {
    ROWS_K = BWD_KEYS * BWD_FEATURES * 2, /* bytes of K, BF16 */
    ROWS_Q = BWD_TILE * 2,                /* of a tile of Q, BF16 */
    AT_K = 0,
    AT_V8 = AT_K + ROWS_K, /* V row, then K col */
    AT_K8 = AT_V8 + BWD8_KEYS / 2,
    AT_Q = AT_K8 + BWD8_KEYS / 2,
    AT_QUERIES = AT_Q + BWD_STAGES * ROWS_Q,        /* dO row, dO col, Q col */
    AT_DS = AT_QUERIES + BWD_STAGES * BWD8_QUERIES, /* two buffers of 64 queries x 128 keys */
    AT_STATS = AT_DS + 2 * BWD_QUERIES * BWD_KEYS,
    AT_BARRIERS = AT_STATS + BWD_STAGES * BWD_STATISTICS * 4,
    SHARED_BYTES = AT_BARRIERS + BARRIERS * 8 + 1024,
};

struct bwd8_maps {
    CUtensorMap q, k;
};

/* ---- the loading warp ------------------------------------------------------------------------------------- */

static __device__ void load(const struct bwd8_plan &p, const struct unit &u, const struct bwd8_maps &m,
                            const struct shared &s, bool ordered)
{
    const int64_t block = ((int64_t)u.batch * p.b.kv_heads + u.kv) * p.b.blocks + u.block;
    mbarrier_expect(barrier_at(s, KEYS), ROWS_K + BWD8_KEYS);
    for (int half = 0; half < 2; half++) {
        tma_load_4d(s.base + AT_K + half * ROWS_K / 2, &m.k, barrier_at(s, KEYS), half * 64, u.block * BWD_KEYS, u.kv,
                    u.batch);
    }
    bulk_load(s.base + AT_V8, p.keys + block * BWD8_KEYS, BWD8_KEYS, barrier_at(s, KEYS));
    struct walk w = walk_start(p.b, u, ordered);
    struct ring r = {0, 1};
    const int n = walk_length(p.b, u);
    for (int i = 0; i < n; i++) {
        mbarrier_wait(barrier_at(s, EMPTY + r.stage), r.parity);
        const uint32_t barrier = barrier_at(s, FULL + r.stage);
        const int64_t at = ((int64_t)u.batch * p.b.heads + w.head) * p.b.tiles + w.tile;
        mbarrier_expect(barrier, ROWS_Q + BWD8_QUERIES + BWD_STATISTICS * 4);
        for (int half = 0; half < 2; half++) {
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
static __device__ __forceinline__ void product_scores(float (&x)[32], uint64_t k, uint64_t q)
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        wgmma_bf16<64>::ss<0, 0>(x, operand_advance(k, (i >> 2) * (ROWS_K / 2) + (i & 3) * 32),
                                 operand_advance(q, (i >> 2) * (ROWS_Q / 2) + (i & 3) * 32), i > 0);
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

/* sum (64 keys x 128) += x^T (64 keys x 64 queries, packed) times columns of b. */
template <bool E5M2>
static __device__ __forceinline__ void accumulate(float (&sum)[64], const uint32_t (&x)[8], uint64_t b)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (E5M2) {
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

template <bool ORDERED, bool E5M2>
static __device__ __forceinline__ void compute(const struct bwd8_plan &p, const struct unit &u, const struct shared &s,
                                               int wg)
{
    const int t = threadIdx.x & 127, lane = t & 31, warp = t >> 5;
    const int key = u.block * BWD_KEYS + wg * 64 + warp * 16 + (lane >> 2); /* and key + 8 */
    const int n = walk_length(p.b, u);
    const float dp_factor = dp_factor_of(p, u.batch * p.b.kv_heads + u.kv);
    const uint64_t k_rows = operand_k_major(s.base + AT_K + wg * 8192);
    const uint64_t v_rows = operand_k_major(s.base + AT_V8 + wg * 8192);
    const uint64_t k_half = operand_k_major(s.base + AT_K8 + wg * 8192);
    const bool edge = !p.b.causal && u.block * BWD_KEYS + BWD_KEYS > p.b.tokens;
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
    mbarrier_wait(barrier_at(s, KEYS), 0);
    mbarrier_wait(barrier_at(s, FULL), 0);
    wgmma_fence();
    product_scores(x, k_rows, operand_k_major(s.base + AT_Q));
    for (int i = 0; i < n; i++) {
        const uint32_t codes = s.base + AT_QUERIES + r.stage * BWD8_QUERIES;
        const float2 *stats =
            reinterpret_cast<const float2 *>(s.memory + AT_STATS + r.stage * BWD_STATISTICS * 4) + (lane & 3);
        wgmma_wait<0>();
        wgmma_pin(x);
        wgmma_fence();
        product_dp<E5M2>(y, v_rows, operand_k_major(codes));
        if (edge || (p.b.causal && w.tile < u.first + BWD_KEYS / BWD_QUERIES)) {
            const int query = w.tile * BWD_QUERIES + 2 * (lane & 3);
#pragma unroll
            for (int j = 0; j < 32; j++) {
                const int last = p.b.causal ? query + 8 * (j >> 2) + (j & 1) : p.b.tokens - 1;
                x[j] = key + 8 * ((j >> 1) & 1) <= last ? x[j] : -INFINITY;
            }
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 from = stats[4 * j];
            x[4 * j] = exp2_fast(fmaf(x[4 * j], p.b.c, -from.x));
            x[4 * j + 1] = exp2_fast(fmaf(x[4 * j + 1], p.b.c, -from.y));
            x[4 * j + 2] = exp2_fast(fmaf(x[4 * j + 2], p.b.c, -from.x));
            x[4 * j + 3] = exp2_fast(fmaf(x[4 * j + 3], p.b.c, -from.y));
        }
        pack(x, px);
        wgmma_pin(px);
        wgmma_fence();
        accumulate<E5M2>(dv, px, operand_k_major_64(codes + BWD8_ROW));
        unpack(px, x); /* dS takes the represented P */
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
        const uint32_t ds = (i & 1) * (BWD_QUERIES * BWD_KEYS);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            /* Keys g and g + 8 of one query side by side; 8 queries a register. */
            const uint32_t *a = dsx + 4 * k;
            stmatrix_x4_transposed(ds_at + ds + k * 4096, __byte_perm(a[0], a[1], 0x5140),
                                   __byte_perm(a[0], a[1], 0x7362), __byte_perm(a[2], a[3], 0x5140),
                                   __byte_perm(a[2], a[3], 0x7362));
        }
        fence_async_proxy();
        wgmma_pin(dsx);
        wgmma_pin(x);
        wgmma_pin(y);
        wgmma_fence();
        accumulate<false>(dk, dsx, operand_k_major_64(codes + 2 * BWD8_ROW));
        named_barrier_sync(BARRIER_DS, 256);
        product_dq(y, operand_k_major(s.base + AT_DS + ds), k_half);
        const int64_t at = ((int64_t)u.batch * p.b.heads + w.head) * p.b.tiles + w.tile;
        const int stage = r.stage;
        walk_next(p.b, u, w);
        ring_next(r);
        if (i + 1 < n) {
            mbarrier_wait(barrier_at(s, FULL + r.stage), r.parity);
        }
        /* The scores of the next tile, under the additions to dQ; after the last one nobody looks at them. */
        product_scores(x, k_rows, operand_k_major(s.base + AT_Q + r.stage * ROWS_Q));
        wgmma_wait<1>();
        wgmma_pin(y);
        wgmma_pin(px);
        wgmma_pin(dsx);
        __syncwarp();
        if (lane == 0) {
            mbarrier_arrive(barrier_at(s, EMPTY + stage));
        }
        add_dq<ORDERED>(p.b, s, at, wg, i, y);
    }
    wgmma_wait<0>();
    wgmma_pin(x);
    wgmma_pin(dk);
    wgmma_pin(dv);
    named_barrier_sync(BARRIER_DS, 256); /* all products that read K and V are complete */
    const int key0 = u.block * BWD_KEYS + wg * 64;
    const struct bwd_lifts l = lifts_of(p, u.batch * p.b.kv_heads + u.kv);
    store_keys(dk, p.b.scale / (l.ds * l.q), s.base + AT_K + wg * 16384, s.memory + AT_K + wg * 16384, wg, key0, p.b,
               p.b.dk.data + u.batch * p.b.dk.batch_stride + u.kv * p.b.dk.head_stride, p.b.dk.token_stride);
    store_keys(dv, p.dv_factor / l.dout, s.base + AT_V8 + wg * 16384, s.memory + AT_V8 + wg * 16384, wg, key0, p.b,
               p.b.dv.data + u.batch * p.b.dv.batch_stride + u.kv * p.b.dv.head_stride, p.b.dv.token_stride);
}

template <bool ORDERED, bool E5M2>
static __global__ void __launch_bounds__(BWD_THREADS, 1)
    bwd_fp8_kernel(const struct bwd8_plan p, const __grid_constant__ struct bwd8_maps maps)
{
    extern __shared__ char raw[];
    const struct shared s = shared_open(raw, AT_BARRIERS);
    const struct unit u = unit_of(p.b, blockIdx.x, ORDERED);
    if (threadIdx.x < 128) {
        registers_lower<32>();
        if (threadIdx.x == 0) {
            load(p, u, maps, s, ORDERED);
        } else if (ORDERED && (threadIdx.x == 32 || threadIdx.x == 64)) {
            order_sums(p.b, u, s, threadIdx.x / 32 - 1);
        }
    } else {
        registers_raise<240>();
        compute<ORDERED, E5M2>(p, u, s, threadIdx.x / 128 - 1);
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
    r.value_unit = r.value_e4m3 ? 1.0f : attention_unit(recipe);
    return r;
}

extern "C" const char *attention_bwd_fp8_refuses_sm90(const struct attention_recipe *recipe)
{
    if (recipe->pv != PV_FP8) {
        return "the Hopper FP8 backward carries pv = fp8";
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

struct bwd8_plan bwd8_plan_of(const struct bwd_plan &base, const struct attention_bwd *a, void *scratch, size_t *bytes)
{
    struct carve carve = {};
    struct bwd8_plan p = {};
    const size_t tiles = (size_t)base.units / base.kv_heads * base.heads * base.tiles;
    carve.base = (unsigned char *)scratch;
    p.b = base;
    p.facts = (struct bwd_facts *)carve_take(&carve, (size_t)base.units * sizeof *p.facts);
    p.queries = (uint8_t *)carve_take(&carve, tiles * BWD8_QUERIES);
    p.keys = (uint8_t *)carve_take(&carve, (size_t)base.units * base.blocks * BWD8_KEYS);
    *bytes = carve.used;
    if (a != NULL) {
        const float shift = a->recipe->bwd_p == BWD_P_CODES ? 7.0f : 8.0f;
        p.rules = rules_of(a->recipe);
        p.shift = shift;
        p.ds_factor = exp2f(-shift);
        p.dv_factor = exp2f(-shift);
    }
    return p;
}

template <bool ORDERED, bool E5M2>
static void launch(const struct attention_bwd *a, const struct bwd8_plan &p, const struct bwd8_maps &m)
{
    cudaFuncSetAttribute(bwd_fp8_kernel<ORDERED, E5M2>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
    bwd_fp8_kernel<ORDERED, E5M2><<<p.b.units * p.b.blocks, BWD_THREADS, SHARED_BYTES, a->cuda->stream>>>(p, m);
    cuda_launched(a->cuda, "attention backward, FP8, sm90");
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
    in.out = a->out;
    in.dout = a->dout;
    in.lse = a->lse_log2;
    struct bwd8_maps m;
    m.q = head_map(a->cuda, &q, T, shape->heads, shape->batch, BWD_QUERIES);
    m.k = head_map(a->cuda, &k, T, shape->kv_heads, shape->batch, BWD_KEYS);
    bwd8_publish(a->cuda, p, in);
    if (p.rules.dout_e5m2) {
        a->unordered ? launch<false, true>(a, p, m) : launch<true, true>(a, p, m);
    } else {
        a->unordered ? launch<false, false>(a, p, m) : launch<true, false>(a, p, m);
    }
}
