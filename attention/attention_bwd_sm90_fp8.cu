/* attention: FP8 backward on Hopper (docs/numerics.md, sections 7 and 8): scores from the represented Q and K, in BF16
 * or, for qk = nvfp4_e4m3, in FP8 (QK8); the other products in FP8. This kernel makes dK and dV, and stores dS, from
 * which attention_bwd_sm90_dq.cu makes dQ: a tile of dS is a quarter of the bytes that additions to a dQ in FP32 would
 * be, and all sums have one order. */
#include "attention/attention_bwd_sm90_elements.cuh"

extern "C" {
#include "attention/attention_bwd_sm90.h"
#include "attention/attention_sm90.h"
}

/* ---- products ----------------------------------------------------------------------------------------------- */

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

/* ---- the computing warpgroups ------------------------------------------------------------------------------- */

/* own: 0 .. 7, of the warp.
 * A tile: dP is made under the exponentials, dV and the scores of the next tile under dS; all products are complete
 * where the loop begins (ptxas puts them one after the other if accumulators are read while another group, begun before
 * the back edge, is in flight). */
template <bool E5M2, bool QK8>
static __device__ __forceinline__ void compute(const struct bwd8_plan &p, const struct unit &u, const struct shared &s,
                                               int own)
{
    typedef room<QK8, false> R;
    const int wg = own >> 2, n = walk_length(p.b, u);
    const uint64_t k_rows = operand_at(s.base, R::AT_K) + wg * (8192 >> 4);
    const uint64_t v_rows = operand_at(s.base, R::AT_V) + wg * (8192 >> 4);
    const uint32_t stats_at = s.base + R::AT_STATS + (threadIdx.x & 3) * sizeof(float2);
    const float dp_factor = dp_factor_of(p, u.batch * p.b.kv_heads + u.kv);
    const int masked_below = p.b.causal                                   ? u.first + BWD_KEYS / BWD_QUERIES
                             : u.block * BWD_KEYS + BWD_KEYS > p.b.tokens ? p.b.tiles
                                                                          : 0;
    const uint32_t factor_at = s.base + R::AT_STATS + BWD_STATISTICS * 4;
    int tile = u.first;
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
    float score_factor = QK8 ? read_float(factor_at) : p.b.c;
    wgmma_pin(dk);
    wgmma_pin(dv);
    wgmma_fence();
    product_scores<R>(x, k_rows, operand_at(s.base, R::AT_Q));
#pragma unroll 1
    for (int i = 0; i < n; i++) {
        const uint32_t stage = r.stage;
        const bool flushing = i > 0 && (uint32_t)i % FLUSH_TILES == 0;
        wgmma_wait<0>();
        wgmma_pin(x);
        wgmma_pin(dsx);
        if (__builtin_expect(flushing, 0)) {
            flush(dk, dv, y, s, s.memory + R::AT_SUMS + wg * (QUARTER * 4), wg, (uint32_t)i / FLUSH_TILES - 1);
        }
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
        read_statistics(rows, stats_at + stage * STATS_BYTES + BWD_QUERIES * 4);
        fp8_codes(x, px);
        if (i + 1 < n && !loaded) {
            mbarrier_wait(barrier_at(s, LOADED + r.stage), r.parity);
        }
        wgmma_pin(px);
        wgmma_pin(x);
        wgmma_fence();
        accumulate<E5M2>(dv, px, operand_64_at(s.base, R::AT_QUERIES + BWD8_ROW, stage, BWD8_QUERIES));
        /* After the last tile nobody looks at the scores. */
        product_scores<R>(x, k_rows, operand_at(s.base, R::AT_Q, r.stage, R::ROWS_Q));
        wgmma_wait<2>();
        wgmma_pin(y);
        /* px is read while dV's product may still read it too: PTX leaves any access open, the hardware only reads. */
        ds_codes(y, px, rows, dp_factor, dsx);
        const uint32_t buffer = (uint32_t)i % R::DS_BUFFERS;
        mbarrier_wait(barrier_at(s, SENT + buffer), ((uint32_t)i / R::DS_BUFFERS & 1) ^ 1);
        write_ds(s.base + R::AT_DS + buffer * BWD8_DS, own, dsx);
        wgmma_pin(dsx);
        wgmma_pin(y);
        wgmma_fence();
        accumulate<false>(dk, dsx, operand_64_at(s.base, R::AT_QUERIES + 2 * BWD8_ROW, stage, BWD8_QUERIES));
        fence_async_proxy();
        __syncwarp();
        if ((threadIdx.x & 31) == 0) {
            mbarrier_arrive(barrier_at(s, WRITTEN + buffer));
        }
        if (flushing && (WARP_ARRIVALS == 32 || (threadIdx.x & 31) == 0)) {
            mbarrier_arrive(barrier_at(s, SUMS_STAGED + wg));
        }
        read_statistics(rows, stats_at + r.stage * STATS_BYTES);
        score_factor = QK8 ? read_float(factor_at + r.stage * STATS_BYTES) : p.b.c;
        tile = tile + 1 < p.b.tiles ? tile + 1 : u.first;
    }
    wgmma_wait<0>();
    wgmma_pin(x);
    wgmma_pin(dk);
    wgmma_pin(dv);
    if (n > FLUSH_TILES) {
        const float *sums = sums_of(p, u, wg);
        mbarrier_wait(barrier_at(s, SUMS_DONE + wg), 0);
        add_sums(dk, sums, flushes_of<R>(n, wg));
        add_sums(dv, sums + 2 * QUARTER, flushes_of<R>(n, wg) - 2);
    }
    named_barrier_sync(BARRIER_BOTH, 256); /* all products that read tiles are complete */
    const int key0 = u.block * BWD_KEYS + wg * 64, at = R::AT_QUERIES + wg * 32768;
    const struct bwd_lifts l = lifts_of(p, u.batch * p.b.kv_heads + u.kv);
    store_keys(dk, p.b.scale / (l.ds * l.q), s.base + at, s.memory + at, wg, key0, p.b,
               p.b.dk.data + u.batch * p.b.dk.batch_stride + u.kv * p.b.dk.head_stride, p.b.dk.token_stride);
    store_keys(dv, p.dv_factor / l.dout, s.base + at + 16384, s.memory + at + 16384, wg, key0, p.b,
               p.b.dv.data + u.batch * p.b.dv.batch_stride + u.kv * p.b.dv.head_stride, p.b.dv.token_stride);
}

/* first: the launch's first unit; its units come together in unit_of's order. */
template <bool E5M2, bool QK8>
static __global__ void __launch_bounds__(BWD_THREADS, 1)
    bwd_fp8_kernel(const struct bwd8_plan p, int first, const __grid_constant__ struct bwd8_maps maps)
{
    typedef room<QK8, false> R;
    extern __shared__ char raw[];
    const struct shared s = shared8_open<R>(raw);
    const struct unit u = unit_of(p.b, first * p.b.blocks + blockIdx.x, false);
    if (threadIdx.x < 128) {
        registers_lower<24>();
        if (threadIdx.x == 0) {
            load<R>(p, u, maps, s);
        } else if (threadIdx.x == 32) {
            send_ds<R>(p, u, s, first);
        } else if (threadIdx.x == 64 || threadIdx.x == 96) {
            move_sums<R>(p, u, s, threadIdx.x / 32 - 2);
        }
    } else {
        registers_raise<240>();
        /* The warp's number as a maximum over the warp, which the compiler keeps in a uniform register:
         * descriptors are then made there, and not moved over one by one. */
        compute<E5M2, QK8>(p, u, s, (int)__reduce_max_sync(0xffffffffu, threadIdx.x / 32) - 4);
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
    r.query_rows = r.codes && recipe->pv == PV_MXFP4;
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
    return NULL;
}

/* Bytes of dS of one unit, and of those in memory at the same time: of all, or 1.25 GiB; and of one turn of those that
 * run together at least (256 blocks of keys at most, or one unit), since the GPU empties after each. Longer sequences
 * never take less, so that what is planned for the longest call holds every other, unless the longest is refused. */
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
    p.shift = p.rules.query_rows ? 0.0f : p.rules.codes ? 7.0f : 8.0f;
    p.ds_factor = exp2f(-p.shift) / unit;
    p.dv_factor = exp2f(-p.shift) / unit;
    p.together = units_together(base);
    p.ds = (uint8_t *)carve_take(&carve, (size_t)ds_bytes(base));
    p.sums = (float *)carve_take(&carve, (size_t)base.units * base.blocks * SUMS * sizeof *p.sums);
    *bytes = carve.used;
    return p;
}

template <bool E5M2>
static void launch(const struct attention_bwd *a, const struct bwd8_plan &p, const struct bwd8_maps &maps)
{
    if (p.rules.score_e4m3) {
        bwd8_launch(a, p, room<true, false>::BYTES, bwd_fp8_kernel<E5M2, true>, maps);
    } else {
        bwd8_launch(a, p, room<false, false>::BYTES, bwd_fp8_kernel<E5M2, false>, maps);
    }
}

size_t bwd8_centred_bytes(const struct attention_shape *shape, const struct attention_recipe *recipe)
{
    const bool centres = recipe->k_center && recipe->qk_grad == QK_GRAD_ORIGINAL;
    return centres ? (size_t)(shape->batch * shape->kv_heads * shape->tokens) * BWD_FEATURES * sizeof(bf16) : 0;
}

void bwd8_run(const struct attention_bwd *a, struct bwd8_plan p, void *centred)
{
    const struct attention_shape *shape = &a->shape;
    const int64_t T = shape->tokens;
    struct carve carve = {};
    carve.base = (unsigned char *)(uintptr_t)a->saved;
    const struct attention_saved_sm90 saved = attention_saved_sm90_carve(shape, a->recipe, &carve);
    const struct head_view q = own_view(shape, saved.operands.q, shape->heads);
    const struct head_view k = own_view(shape, saved.operands.k, shape->kv_heads);
    const struct head_view v = own_view(shape, saved.operands.v, shape->kv_heads);
    const bool lift = a->recipe->qk_grad == QK_GRAD_LIFT;
    const bool centres = bwd8_centred_bytes(shape, a->recipe) > 0;
    struct bwd8_inputs in;
    in.q = lift ? q : a->q;
    in.k = lift ? k : a->k;
    in.v = p.rules.value_e4m3 ? a->v : v;
    in.out = a->out;
    in.dout = a->dout;
    in.lse = a->lse_log2;
    in.amax = lift || centres ? NULL : a->amax; /* of what the views are made from */
    if (centres) {
        const struct head_tensor original = {a->k, shape->batch, T, shape->kv_heads, BWD_FEATURES};
        attention_centre_cuda(a->cuda, &original, (bf16 *)centred);
        in.k = own_view(shape, (bf16 *)centred, shape->kv_heads);
    }
    bwd8_publish(a->cuda, p, in);
    const bool e4m3 = p.rules.score_e4m3;
    struct bwd8_maps m = {};
    if (e4m3) {
        p.q_inverse = saved.q_inverse;
        p.k_inverse = saved.k_inverse;
        m.q = codes_map(a->cuda, saved.q8, T, shape->heads, shape->batch, BWD_QUERIES);
    } else {
        m.q = head_map(a->cuda, &q, T, shape->heads, shape->batch, BWD_QUERIES);
    }
    if (p.rules.query_rows) {
        bwd8_mxfp4(a, p, m.q, e4m3 ? (const void *)saved.k8 : saved.operands.k);
        return;
    }
    m.k = e4m3 ? codes_map(a->cuda, saved.k8, T, shape->kv_heads, shape->batch, BWD_KEYS)
               : head_map(a->cuda, &k, T, shape->kv_heads, shape->batch, BWD_KEYS);
    if (p.rules.dout_e5m2) {
        launch<true>(a, p, m);
    } else {
        launch<false>(a, p, m);
    }
}
