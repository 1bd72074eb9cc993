/* attention: MXFP4 backward on Hopper: dK, dV and dS as attention_bwd_sm90_fp8.cu makes them, but S = Q K^T and
 * dP = dO V^T have queries as rows: S^T would spread a block of 32 keys over two warps and 16 lanes, and give a thread
 * 16 exponents. The price is that P^T and dS^T, the left operands of dV and dK, go through shared memory. */
#include "attention/attention_bwd_sm90_mxfp4.cuh"

/* ---- products ----------------------------------------------------------------------------------------------- */

/* sum (64 keys x 128) += x (64 keys x 64 queries) times columns of y: dV of P^T, which is E5M2, and dO; dK of dS^T and
 * Q. */
template <bool E5M2> static __device__ __forceinline__ void accumulate(float (&sum)[64], uint64_t x, uint64_t y)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (E5M2) {
            wgmma_e5m2_e4m3<128>::ss(sum, operand_advance(x, i * 32), operand_advance(y, i * 32), 1);
        } else {
            wgmma_e4m3<128>::ss(sum, operand_advance(x, i * 32), operand_advance(y, i * 32), 1);
        }
    }
    wgmma_commit();
}

/* ---- the computing warpgroups ------------------------------------------------------------------------------- */

/* A statistic of this thread's two queries. */
static __device__ __forceinline__ void read_pair(float (&y)[2], uint32_t from)
{
    y[0] = read_float(from);
    y[1] = read_float(from + 8 * sizeof(float));
}

/* own: 0 .. 7, of the warp.
 * A tile: dP is made under the codes, the scores of the next tile under dS, dV and dK under the exponents of the next
 * tile; all products are complete where the loop begins (attention_bwd_sm90_fp8.cu). One fence and barrier of the
 * warpgroup serve both operands that go through shared memory: two cost more than dV under dS gains. */
template <enum p_code CODE, bool QK8>
static __device__ __forceinline__ void compute(const struct bwd8_plan &p, const struct unit &u, const struct shared &s,
                                               int own, const struct mx_line &line)
{
    typedef room<QK8, true> R;
    const int wg = own >> 2, warp = own & 3, n = walk_length(p.b, u);
    const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
    const bool arrives = WARP_ARRIVALS == 32 || lane == 0;
    const uint64_t k_rows = operand_at(s.base, R::AT_K) + wg * (8192 >> 4);
    const uint64_t v_rows = operand_at(s.base, R::AT_V) + wg * (8192 >> 4);
    const uint64_t p_rows = operand_64_at(s.base, R::AT_P, wg, BWD8_DS / 2);
    const uint64_t ds_rows = operand_64_at(s.base, R::AT_DS_T, wg, BWD8_DS / 2);
    const uint32_t ds_at =
        s.base + R::AT_DS + swizzle_128(warp * 16 + swapped_token(g), wg * 64 + c * 16); /* row g + 8: 1024 on */
    const uint32_t stats_at = s.base + R::AT_STATS + (warp * 16 + g) * sizeof(float);
    const uint32_t factor_at = s.base + R::AT_STATS + BWD_STATISTICS * 4;
    const float dp_factor = dp_factor_of(p, u.batch * p.b.kv_heads + u.kv);
    const int masked_below = p.b.causal                                   ? u.first + BWD_KEYS / BWD_QUERIES
                             : u.block * BWD_KEYS + BWD_KEYS > p.b.tokens ? p.b.tiles
                                                                          : 0;
    int tile = u.first;
    float dk[64], dv[64], x[32], y[32], n_of[2], r_of[2], score_factor;
    struct mx_scales scales;
#pragma unroll
    for (int i = 0; i < 64; i++) {
        dk[i] = dv[i] = 0;
    }
    /* Masks scores, which have arrived, and finds their blocks' exponents. */
    const auto find_scales = [&] {
        wgmma_pin(x);
        if (tile < masked_below) {
            const int now = lane_now();
            mask_rows(p.b, u.block * BWD_KEYS + wg * 64 + 16 * (now & 3), tile * BWD_QUERIES + warp * 16 + (now >> 2),
                      x);
        }
        scales = mx_scales_of<CODE>(x, score_factor, n_of, line);
    };
    struct ring r = {0, 0};
    mbarrier_wait(barrier_at(s, KEYS_LOADED), 0);
    mbarrier_wait(barrier_at(s, LOADED), 0);
    read_pair(n_of, stats_at);
    score_factor = QK8 ? read_float(factor_at) : p.b.c;
    wgmma_pin(dk);
    wgmma_pin(dv);
    wgmma_fence();
    product_scores<R>(x, operand_at(s.base, R::AT_Q), k_rows);
    wgmma_wait<0>();
    find_scales();
#pragma unroll 1
    for (int i = 0; i < n; i++) {
        const uint32_t stage = r.stage, step = (uint32_t)(i + flush_phase<R>(wg)), buffer = (uint32_t)i % R::DS_BUFFERS;
        const bool flushing = i > 0 && step % FLUSH_TILES == 0;
        uint32_t packed[8], halves[16], ds[8];
        wgmma_wait<0>();
        if (arrives) {
            mbarrier_arrive(barrier_at(s, OPERANDS_FREE + wg));
        }
        if (__builtin_expect(flushing, 0)) {
            flush(dk, dv, y, s, s.memory + R::AT_SUMS, wg, step / FLUSH_TILES - 1);
        }
        wgmma_fence();
        product_dp<false>(y, operand_at(s.base, R::AT_QUERIES, stage, BWD8_QUERIES), v_rows);
        if (i > 0 && arrives) {
            mbarrier_arrive(barrier_at(s, FREED + (stage == 0 ? STAGES - 1 : stage - 1)));
        }
        ring_next<STAGES>(r);
        const bool loaded = mbarrier_test(barrier_at(s, LOADED + r.stage), r.parity);
        mx_codes<CODE>(x, score_factor, scales, line, halves);
#pragma unroll
        for (int j = 0; j < 8; j++) { /* the upper byte of FP16 is E5M2 */
            packed[j] = bytes_by(halves[2 * j], halves[2 * j + 1], 0x7531);
        }
        mbarrier_wait(barrier_at(s, OPERANDS_FREE + wg), i & 1);
        write_transposed(s.base + R::AT_P + wg * (BWD8_DS / 2), warp, packed);
        read_pair(r_of, stats_at + stage * STATS_BYTES + BWD_QUERIES * 4);
        if (i + 1 < n && !loaded) {
            mbarrier_wait(barrier_at(s, LOADED + r.stage), r.parity);
        }
        wgmma_pin(x);
        wgmma_fence();
        /* After the last tile nobody looks at the scores. */
        product_scores<R>(x, operand_at(s.base, R::AT_Q, r.stage, R::ROWS_Q), k_rows);
        wgmma_wait<1>();
        wgmma_pin(y);
        mx_ds(y, halves, r_of, dp_factor, ds);
        write_transposed(s.base + R::AT_DS_T + wg * (BWD8_DS / 2), warp, ds);
        mbarrier_wait(barrier_at(s, SENT + buffer), ((uint32_t)i / R::DS_BUFFERS & 1) ^ 1);
        write_rows(ds_at + buffer * BWD8_DS, ds);
        fence_async_proxy();
        read_pair(n_of, stats_at + r.stage * STATS_BYTES);
        score_factor = QK8 ? read_float(factor_at + r.stage * STATS_BYTES) : p.b.c;
        named_barrier_sync(BARRIER_HALF + wg, 128);
        wgmma_pin(y);
        wgmma_fence();
        accumulate<true>(dv, p_rows, operand_64_at(s.base, R::AT_QUERIES + BWD8_ROW, stage, BWD8_QUERIES));
        accumulate<false>(dk, ds_rows, operand_64_at(s.base, R::AT_QUERIES + 2 * BWD8_ROW, stage, BWD8_QUERIES));
        if ((threadIdx.x & 31) == 0) {
            mbarrier_arrive(barrier_at(s, WRITTEN + buffer));
        }
        if (flushing && arrives) {
            mbarrier_arrive(barrier_at(s, SUMS_STAGED + wg));
        }
        tile = tile + 1 < p.b.tiles ? tile + 1 : u.first;
        wgmma_wait<2>();
        find_scales();
    }
    wgmma_wait<0>();
    wgmma_pin(x);
    wgmma_pin(dk);
    wgmma_pin(dv);
    const int flushes = flushes_of<R>(n, wg);
    if (flushes > 0) {
        const float *sums = sums_of(p, u, wg);
        mbarrier_wait(barrier_at(s, SUMS_DONE + wg), 0);
        add_sums(dk, sums, flushes);
        add_sums(dv, sums + 2 * QUARTER, flushes - 2);
    }
    named_barrier_sync(BARRIER_BOTH, 256); /* all products that read tiles are complete */
    const int key0 = u.block * BWD_KEYS + wg * 64, at = R::AT_QUERIES + wg * 32768;
    const struct bwd_lifts l = lifts_of(p, u.batch * p.b.kv_heads + u.kv);
    store_keys<BLOCKED>(dk, p.b.scale / (l.ds * l.q), s.base + at, s.memory + at, wg, key0, p.b,
                        p.b.dk.data + u.batch * p.b.dk.batch_stride + u.kv * p.b.dk.head_stride, p.b.dk.token_stride);
    store_keys<BLOCKED>(dv, p.dv_factor / l.dout, s.base + at + 16384, s.memory + at + 16384, wg, key0, p.b,
                        p.b.dv.data + u.batch * p.b.dv.batch_stride + u.kv * p.b.dv.head_stride, p.b.dv.token_stride);
}

/* first: the launch's first unit; its units come together in unit_of's order. */
template <enum p_code CODE, bool QK8>
static __global__ void __launch_bounds__(BWD_THREADS, 1)
    bwd_mxfp4_kernel(const struct bwd8_plan p, int first, const __grid_constant__ struct bwd8_maps maps,
                     const struct mx_line line)
{
    typedef room<QK8, true> R;
    static_assert((int)R::BYTES <= 227 * 1024, "shared memory of a block");
    extern __shared__ char raw[];
    const struct shared s = shared8_open<R>(raw);
    const struct unit u = unit_of(p.b, first * p.b.blocks + blockIdx.x, false);
    if (threadIdx.x < 128) {
        registers_lower<24>();
        if (threadIdx.x == 0) {
            load<R>(p, u, maps, s);
        } else if (threadIdx.x == 32) {
            send_ds<R>(p, u, s, first);
        } else if (threadIdx.x == 64) {
            move_sums<R>(p, u, s, 0);
        }
    } else {
        registers_raise<240>();
        /* The warp's number as a maximum over the warp: as in bwd_fp8_kernel. */
        compute<CODE, QK8>(p, u, s, (int)__reduce_max_sync(0xffffffffu, threadIdx.x / 32) - 4, line);
    }
}

/* ---- host -------------------------------------------------------------------------------------------------- */

template <bool QK8>
static void launch(const struct attention_bwd *a, const struct bwd8_plan &p, const struct bwd8_maps &maps)
{
    enum { BYTES = room<QK8, true>::BYTES };
    const struct mx_line line = mx_line_of(a->recipe);
    if (a->recipe->p_map == P_AFFINE) {
        bwd8_launch(a, p, BYTES, bwd_mxfp4_kernel<CODE_AFFINE, QK8>, maps, line);
    } else if (a->recipe->p_map == P_CODE_SPACE) {
        bwd8_launch(a, p, BYTES, bwd_mxfp4_kernel<CODE_SPACE, QK8>, maps, line);
    } else {
        bwd8_launch(a, p, BYTES, bwd_mxfp4_kernel<CODE_EXACT, QK8>, maps, line);
    }
}

void bwd8_mxfp4(const struct attention_bwd *a, const struct bwd8_plan &p, const CUtensorMap &q, const void *k)
{
    const struct attention_shape *shape = &a->shape;
    const int64_t T = shape->tokens, B = shape->batch, Hkv = shape->kv_heads;
    const bool e4m3 = p.rules.score_e4m3;
    struct bwd8_maps maps;
    maps.q = q;
    const uint64_t token = BWD_FEATURES * (e4m3 ? 1 : sizeof(bf16));
    maps.k = blocked_map<16>(a->cuda, k, e4m3, token, (uint64_t)T * token, (uint64_t)T, (uint64_t)(B * Hkv));
    if (e4m3) {
        maps.k_two = codes_map(a->cuda, k, T, Hkv, B, 2);
        launch<true>(a, p, maps);
    } else {
        const struct head_view view = own_view(shape, (bf16 *)(uintptr_t)k, Hkv);
        maps.k_two = head_map(a->cuda, &view, T, Hkv, B, 2);
        launch<false>(a, p, maps);
    }
}
