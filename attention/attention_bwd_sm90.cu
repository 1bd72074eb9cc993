/* attention: BF16 backward on Hopper: wgmma, TMA, one loading and two computing warpgroups. */
#include "attention/attention_bwd_sm90_bf16.cuh"
#include "attention/attention_bwd_sm90_fp8.cuh"

extern "C" {
#include "attention/attention_bwd_sm90.h"
}

/* ---- shared memory ---------------------------------------------------------------------------------------- */

enum {
    ROWS_K = BWD_KEYS * BWD_FEATURES * 2, /* bytes of K or V */
    ROWS_Q = BWD_TILE * 2,                /* bytes of a tile of Q or dO */
    DS_BYTES = BWD_QUERIES * BWD_KEYS * 2,
    AT_K = 0,
    AT_V = AT_K + ROWS_K,
    AT_Q = AT_V + ROWS_K,
    AT_DO = AT_Q + BWD_STAGES * ROWS_Q,
    AT_DS = AT_DO + BWD_STAGES * ROWS_Q, /* 64 queries x 128 keys, a panel of 64 keys for each warpgroup */
    AT_STAGING = AT_DS + BWD_DS_BUFFERS * DS_BYTES,
    AT_STATS = AT_STAGING + 8 * BWD_STAGING,
    AT_BARRIERS = AT_STATS + BWD_STAGES * BWD_STATISTICS * 4,
    SHARED_BYTES = AT_BARRIERS + BARRIERS * 8 + 1024, /* 1024: to align the base */
};

/* ---- the loading warp ------------------------------------------------------------------------------------- */

struct bwd_maps {
    CUtensorMap q, k, v, dout;
};

static __device__ void load(const struct bwd_plan &p, const struct unit &u, const struct bwd_maps &m,
                            const struct shared &s, bool ordered)
{
    mbarrier_expect(barrier_at(s, KEYS), 2 * ROWS_K);
    for (int half = 0; half < 2; half++) {
        tma_load_4d(s.base + AT_K + half * ROWS_K / 2, &m.k, barrier_at(s, KEYS), half * 64, u.block * BWD_KEYS, u.kv,
                    u.batch);
        tma_load_4d(s.base + AT_V + half * ROWS_K / 2, &m.v, barrier_at(s, KEYS), half * 64, u.block * BWD_KEYS, u.kv,
                    u.batch);
    }
    struct walk w = walk_start(p, u, ordered);
    struct ring r = {0, 1};
    const int n = walk_length(p, u);
#pragma unroll 1 /* few registers here */
    for (int i = 0; i < n; i++) {
        mbarrier_wait(barrier_at(s, EMPTY + r.stage), r.parity);
        const uint32_t barrier = barrier_at(s, FULL + r.stage);
        mbarrier_expect(barrier, 2 * ROWS_Q + BWD_STATISTICS * 4);
        for (int half = 0; half < 2; half++) {
            const uint32_t to = r.stage * ROWS_Q + half * ROWS_Q / 2;
            tma_load_4d(s.base + AT_Q + to, &m.q, barrier, half * 64, w.tile * BWD_QUERIES, w.head, u.batch);
            tma_load_4d(s.base + AT_DO + to, &m.dout, barrier, half * 64, w.tile * BWD_QUERIES, w.head, u.batch);
        }
        const int64_t at = w.at;
        bulk_load(s.base + AT_STATS + r.stage * BWD_STATISTICS * 4, p.stats + at * BWD_STATISTICS, BWD_STATISTICS * 4,
                  barrier);
        walk_next(p, u, w);
        ring_next<BWD_STAGES>(r);
    }
}

/* ---- the computing warpgroups ----------------------------------------------------------------------------- */

/* x^T (64 keys x 64 queries) = rows of `a` times rows of `b`, over 128 features. */
static __device__ __forceinline__ void product_transposed(float (&x)[32], uint64_t a, uint64_t b)
{
#pragma unroll
    for (int k = 0; k < 8; k++) {
        wgmma_bf16<64>::ss<0, 0>(x, operand_advance(a, (k >> 2) * (ROWS_K / 2) + (k & 3) * 32),
                                 operand_advance(b, (k >> 2) * (ROWS_Q / 2) + (k & 3) * 32), k > 0);
    }
    wgmma_commit();
}

/* sum (64 keys x 128) += x^T (64 keys x 64 queries, packed) times the rows of b. */
static __device__ __forceinline__ void accumulate(float (&sum)[64], const uint32_t (&x)[16], uint64_t b)
{
#pragma unroll
    for (int k = 0; k < 4; k++) {
        wgmma_bf16<128>::rs<1>(sum, x + 4 * k, operand_advance(b, k * 2048), 1);
    }
    wgmma_commit();
}

/* dq (64 queries x 64 features) = dS (64 x 128 keys) times K. */
static __device__ __forceinline__ void product_dq(float (&dq)[32], uint64_t ds, uint64_t k_half)
{
#pragma unroll
    for (int k = 0; k < 8; k++) {
        wgmma_bf16<64>::ss<0, 1>(dq, operand_advance(ds, (k >> 2) * 8192 + (k & 3) * 32),
                                 operand_advance(k_half, k * 2048), k > 0);
    }
    wgmma_commit();
}

/* Whether some score of a unit's keys and this tile is masked. */
static __device__ __forceinline__ bool masked(const struct bwd_plan &p, const struct unit &u, int tile)
{
    return p.causal ? tile < u.first + BWD_KEYS / BWD_QUERIES : u.block * BWD_KEYS + BWD_KEYS > p.tokens;
}

/* 2^(c s - from) of scores; from: the tile's first statistic, of this thread's queries. */
static __device__ __forceinline__ void exponentials(float (&x)[32], const float2 *from, float c)
{
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float2 f = from[4 * j];
        x[4 * j] = exp2_fast(fmaf(x[4 * j], c, -f.x));
        x[4 * j + 1] = exp2_fast(fmaf(x[4 * j + 1], c, -f.y));
        x[4 * j + 2] = exp2_fast(fmaf(x[4 * j + 2], c, -f.x));
        x[4 * j + 3] = exp2_fast(fmaf(x[4 * j + 3], c, -f.y));
    }
}

static __device__ __forceinline__ void pack(const float (&x)[32], uint32_t (&y)[16])
{
#pragma unroll
    for (int i = 0; i < 16; i++) {
        y[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
    }
}

template <bool ORDERED>
static __device__ __forceinline__ void compute(const struct bwd_plan &p, const struct unit &u, const struct shared &s,
                                               int wg)
{
    const int t = threadIdx.x & 127, lane = t & 31, warp = t >> 5;
    const int key = u.block * BWD_KEYS + wg * 64 + warp * 16 + (lane >> 2); /* and key + 8 */
    const int n = walk_length(p, u);
    const uint64_t k_rows = operand_k_major(s.base + AT_K + wg * 8192);
    const uint64_t v_rows = operand_k_major(s.base + AT_V + wg * 8192);
    const uint64_t k_half = operand_mn_major(s.base + AT_K + wg * (ROWS_K / 2), 0);
    /* stmatrix: lanes 0-7, 16-23 give rows of queries of keys 0-7, the others of keys 8-15. */
    const uint32_t ds_at = s.base + AT_DS + wg * 8192 + (8 * (lane >> 4) + (lane & 7)) * 128 +
                           (((2 * warp + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
    float dk[64], dv[64], x[32], y[32];
    uint32_t px[16];
#pragma unroll
    for (int i = 0; i < 64; i++) {
        dk[i] = dv[i] = 0;
    }
    struct walk w = walk_start(p, u, ORDERED);
    struct ring r = {0, 0};
    int at = 0; /* the tile before */
    mbarrier_wait(barrier_at(s, KEYS), 0);
    mbarrier_wait(barrier_at(s, FULL), 0);
    wgmma_fence();
    product_transposed(x, k_rows, operand_k_major(s.base + AT_Q));
    for (int i = 0; i < n; i++) {
        const uint32_t q = s.base + AT_Q + r.stage * ROWS_Q, dout = s.base + AT_DO + r.stage * ROWS_Q;
        const float2 *stats =
            reinterpret_cast<const float2 *>(s.memory + AT_STATS + r.stage * BWD_STATISTICS * 4) + (lane & 3);
        wgmma_wait<0>();
        wgmma_pin(x);
        wgmma_fence();
        product_transposed(y, v_rows, operand_k_major(dout));
        if (masked(p, u, w.tile)) {
            mask_scores(p, key, w.tile, x);
        }
        exponentials(x, stats, p.c);
        pack(x, px);
        wgmma_pin(px);
        wgmma_fence();
        accumulate(dv, px, operand_mn_major(dout, ROWS_Q / 2));
        wgmma_wait<0>();
        wgmma_pin(y);
        wgmma_pin(px);
        uint32_t dsx[16];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 row = stats[BWD_QUERIES / 2 + 4 * j];
            dsx[2 * j] = pack_bf16(x[4 * j] * (y[4 * j] - row.x), x[4 * j + 1] * (y[4 * j + 1] - row.y));
            dsx[2 * j + 1] = pack_bf16(x[4 * j + 2] * (y[4 * j + 2] - row.x), x[4 * j + 3] * (y[4 * j + 3] - row.y));
        }
        const uint32_t ds = ds_at + i % BWD_DS_BUFFERS * DS_BYTES;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            stmatrix_x4_transposed(ds + k * 2048, dsx[4 * k], dsx[4 * k + 1], dsx[4 * k + 2], dsx[4 * k + 3]);
        }
        ds_written(s, i);
        wgmma_pin(dsx);
        wgmma_pin(x);
        wgmma_pin(y);
        wgmma_fence();
        accumulate(dk, dsx, operand_mn_major(q, ROWS_Q / 2));
        const int stage = r.stage, before = (i + BWD_DS_BUFFERS - 1) % BWD_DS_BUFFERS;
        ring_next<BWD_STAGES>(r);
        if (i > 0) {
            ds_wait(s, i - 1);
        }
        product_dq(y, operand_k_major(s.base + AT_DS + before * DS_BYTES), k_half); /* not of tile -1 */
        if (i + 1 < n) {
            mbarrier_wait(barrier_at(s, FULL + r.stage), r.parity);
        }
        /* The scores of the next tile, under the additions to dQ; after the last one nobody looks at them. */
        product_transposed(x, k_rows, operand_k_major(s.base + AT_Q + r.stage * ROWS_Q));
        wgmma_wait<1>();
        wgmma_pin(y);
        wgmma_pin(dsx);
        __syncwarp();
        if (WARP_ARRIVALS == 32 || lane == 0) {
            mbarrier_arrive(barrier_at(s, EMPTY + stage));
        }
        if (i > 0) {
            add_dq<ORDERED>(p, s, at, wg, i - 1, y, AT_STAGING);
        }
        at = w.at;
        walk_next(p, u, w);
    }
    ds_wait(s, n - 1);
    wgmma_fence();
    product_dq(y, operand_k_major(s.base + AT_DS + (n - 1) % BWD_DS_BUFFERS * DS_BYTES), k_half);
    wgmma_wait<0>();
    wgmma_pin(y);
    add_dq<ORDERED>(p, s, at, wg, n - 1, y, AT_STAGING);
    add_dq_close<ORDERED>();
    wgmma_pin(x);
    wgmma_pin(dk);
    wgmma_pin(dv);
    named_barrier_sync(BARRIER_BOTH, 256); /* all products that read K and V are complete */
    const int key0 = u.block * BWD_KEYS + wg * 64;
    store_keys(dk, p.scale, s.base + AT_K + wg * 16384, s.memory + AT_K + wg * 16384, wg, key0, p,
               p.dk.data + u.batch * p.dk.batch_stride + u.kv * p.dk.head_stride, p.dk.token_stride);
    store_keys(dv, 1.0f, s.base + AT_V + wg * 16384, s.memory + AT_V + wg * 16384, wg, key0, p,
               p.dv.data + u.batch * p.dv.batch_stride + u.kv * p.dv.head_stride, p.dv.token_stride);
}

template <bool ORDERED>
static __global__ void __launch_bounds__(BWD_THREADS, 1)
    bwd_bf16_kernel(const struct bwd_plan p, const __grid_constant__ struct bwd_maps maps)
{
    extern __shared__ char raw[];
    const int number = ORDERED ? number_taken(p) : blockIdx.x;
    const struct shared s = shared_open(raw, AT_BARRIERS);
    const struct unit u = unit_of(p, number, ORDERED);
    if (threadIdx.x < 128) {
        registers_lower<24>();
        if (threadIdx.x == 0) {
            load(p, u, maps, s, ORDERED);
        } else if (ORDERED && (threadIdx.x == 32 || threadIdx.x == 64)) {
            add_in_order(p, u, s, threadIdx.x / 32 - 1, AT_STAGING);
        }
    } else {
        registers_raise<240>();
        compute<ORDERED>(p, u, s, threadIdx.x / 128 - 1);
    }
}

/* ---- host -------------------------------------------------------------------------------------------------- */

/* Blocks of keys in flight share tiles of Q, dO and dQ in the L2 cache. Causal sums in any order: about two waves of
 * units together, longest first, end evenly. Otherwise one head after the other: in order a later block starts later,
 * and walks over other tiles; without a mask all walks are equally long. */
static int heads_together(const struct attention_shape *shape, int blocks, bool unordered)
{
    return shape->causal && unordered && blocks < 256 ? 256 / blocks : 1;
}

/* fp8: no sums of dQ. */
static struct bwd_plan plan_of(const struct attention_shape *shape, bool unordered, bool fp8, void *scratch,
                               size_t *bytes)
{
    struct bwd_plan p = {};
    struct carve carve = {};
    carve.base = (unsigned char *)scratch;
    p.tokens = (int)shape->tokens;
    p.heads = (int)shape->heads;
    p.kv_heads = (int)shape->kv_heads;
    p.units = (int)(shape->batch * shape->kv_heads);
    p.tiles = (int)((shape->tokens + BWD_QUERIES - 1) / BWD_QUERIES);
    p.blocks = (int)((shape->tokens + BWD_KEYS - 1) / BWD_KEYS);
    p.heads_together = heads_together(shape, p.blocks, unordered || fp8);
    p.causal = shape->causal;
    p.c = (float)((double)shape->softmax_scale * 1.4426950408889634);
    p.scale = shape->softmax_scale;
    const size_t tiles = (size_t)(shape->batch * shape->heads) * p.tiles;
    p.stats = (float *)carve_take(&carve, tiles * BWD_STATISTICS * sizeof *p.stats);
    if (!fp8) {
        p.dq = (float *)carve_take(&carve, tiles * BWD_TILE * sizeof *p.dq);
        p.turns = (uint32_t *)carve_take(&carve, tiles * 2 * sizeof *p.turns);
        p.begun = (uint32_t *)carve_take(&carve, sizeof *p.begun);
    }
    *bytes = carve.used;
    return p;
}

/* K of scores and of dQ: with k_center the centred one, which the forward saved. */
static struct head_view keys_of(const struct attention_bwd *a)
{
    struct carve carve = {};
    carve.base = (unsigned char *)(uintptr_t)a->saved;
    bf16 *saved = attention_saved_carve(&a->shape, a->recipe, &carve).k;
    return a->recipe->k_center ? own_view(&a->shape, saved, a->shape.kv_heads) : a->k;
}

template <bool ORDERED> static void launch(const struct attention_bwd *a, const struct bwd_plan &p)
{
    const struct attention_shape *shape = &a->shape;
    const struct head_view k = keys_of(a);
    struct bwd_maps m;
    m.q = head_map(a->cuda, &a->q, shape->tokens, shape->heads, shape->batch, BWD_QUERIES);
    m.dout = head_map(a->cuda, &a->dout, shape->tokens, shape->heads, shape->batch, BWD_QUERIES);
    m.k = head_map(a->cuda, &k, shape->tokens, shape->kv_heads, shape->batch, BWD_KEYS);
    m.v = head_map(a->cuda, &a->v, shape->tokens, shape->kv_heads, shape->batch, BWD_KEYS);
    cudaFuncSetAttribute(bwd_bf16_kernel<ORDERED>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
    bwd_bf16_kernel<ORDERED><<<p.units * p.blocks, BWD_THREADS, SHARED_BYTES, a->cuda->stream>>>(p, m);
    cuda_launched(a->cuda, "attention backward, sm90");
}

extern "C" const char *attention_bwd_refuses_sm90(const struct attention_shape *shape,
                                                  const struct attention_recipe *recipe)
{
    if (shape->head_dim != BWD_FEATURES) {
        return "the Hopper backward wants head_dim 128";
    }
    if (shape->kv_heads < 1 || shape->heads % shape->kv_heads != 0 || shape->tokens < 1) {
        return "heads must be a multiple of kv_heads, tokens at least 1";
    }
    if (recipe->debug_leak != 0) {
        return "the Hopper backward has no debug_leak";
    }
    if (recipe->backward != BWD_BF16) {
        return attention_bwd_fp8_refuses_sm90(shape, recipe);
    }
    if (recipe->qk != QK_BF16 || recipe->pv != PV_BF16 || recipe->bwd_p != BWD_P_BF16 || recipe->bwd_v != BWD_V_BF16 ||
        recipe->bwd_stat != BWD_STAT_SAVED || recipe->do_format != DO_BF16) {
        return "the Hopper BF16 backward runs the plain BF16 recipe, k_center and dk_center";
    }
    return NULL;
}

extern "C" size_t attention_bwd_scratch_bytes_sm90(const struct attention_shape *shape,
                                                   const struct attention_recipe *recipe)
{
    size_t bytes, more = 0;
    const bool fp8 = recipe->backward != BWD_BF16;
    struct bwd_plan p = plan_of(shape, false, fp8, NULL, &bytes);
    if (fp8) {
        (void)bwd8_plan_of(p, recipe, NULL, &more);
        more += bwd8_centred_bytes(shape, recipe);
    }
    return bytes + more;
}

extern "C" void attention_bwd_sm90(const struct attention_bwd *a)
{
    size_t bytes, more;
    const bool fp8 = a->recipe->backward != BWD_BF16;
    struct bwd_plan p = plan_of(&a->shape, a->unordered, fp8, a->scratch, &bytes);
    p.dk = a->dk;
    p.dv = a->dv;
    if (fp8) {
        char *own = (char *)a->scratch + bytes;
        const struct bwd8_plan p8 = bwd8_plan_of(p, a->recipe, own, &more);
        bwd8_run(a, p8, own + more);
    } else {
        bwd_prepare(a, p);
        if (a->unordered) {
            launch<false>(a, p);
        } else {
            launch<true>(a, p);
        }
        bwd_finish(a, p);
    }
    if (a->recipe->dk_center) {
        bwd_centre(a, p.stats); /* nobody reads statistics any more */
    }
}
