/* attention: the forward with coded probabilities on Hopper: scores from BF16 or E4M3 operands, P V in FP8.
 * attention_fwd_sm90.cuh describes tiles and pipeline.
 *
 * Making codes takes longer than the products, so three consumer warpgroups share the tensor cores. Each does scores,
 * codes and P V of a block in sequence (P V into the registers of the scores), while the others are at other steps.
 *
 * The running sum of FP8 products keeps about 14 bits (docs/numerics.md, section 17). So each block of 128 keys has
 * fresh accumulators, which are added in FP32 by the multiply-add that rescales to the new anchor anyway. Columns 128
 * to 135 of the product sum the codes of P, each of every eighth key: tensor cores align products to the largest one,
 * which drops small codes beside a large one; so that happens in one sum of eight only. */
#include "attention/attention_fwd_codes_sm90.cuh"

extern "C" {
#include "attention/attention_sm90.h"
}

/* Running sums of a tile, relative to 2^(anchor - lift): O, and this thread's share of L. */
struct code_sums {
    float o[64], l[2];
};

/* N of the 136 columns of a block's P V. */
template <enum code_kind KIND, int N>
__device__ __forceinline__ void values(float (&d)[N / 2], const uint32_t (&p)[16], uint64_t v)
{
#pragma unroll
    for (int step = 0; step < 4; step++) {
        if (KIND == CODES_FP8) {
            wgmma_e4m3<N>::rs(d, p + 4 * step, operand_advance(v, step * 32), step > 0);
        } else {
            wgmma_e5m2_e4m3<N>::rs(d, p + 4 * step, operand_advance(v, step * 32), step > 0);
        }
    }
    wgmma_commit();
}

/* Rescales the sums by factor and adds a block's product, whose first column is `first`. */
template <int N>
__device__ __forceinline__ void accumulate(struct code_sums &sums, int first, const float (&block)[N],
                                           const float (&factor)[2])
{
    constexpr int outputs = N / 32 * 32; /* the last four are sums of codes */
#pragma unroll
    for (int h = 0; h < 2; h++) { /* in this order ptxas reads the factor once for two, which is worth 2.5 % */
#pragma unroll
        for (int i = 2 * h; i < outputs; i += 4) {
            sums.o[first + i] = fmaf(sums.o[first + i], factor[h], block[i]);
            sums.o[first + i + 1] = fmaf(sums.o[first + i + 1], factor[h], block[i + 1]);
        }
    }
    if (outputs < N) {
        sums.l[0] = fmaf(sums.l[0], factor[0], block[N - 4] + block[N - 3]);
        sums.l[1] = fmaf(sums.l[1], factor[1], block[N - 2] + block[N - 1]);
    }
}

/* Adds P V of a block and frees its stage; meanwhile() runs while the products are in flight. SPLIT: two products:
 * faster with E4M3 scores, slower with BF16 ones. (Not because the first sums run under the second product: ptxas puts
 * both waits side by side. Held apart they are slower.) */
template <enum code_kind KIND, bool SPLIT, class MEANWHILE>
__device__ __forceinline__ void add_values(struct code_sums &sums, const uint32_t (&p)[16], uint64_t v,
                                           const float (&factor)[2], uint32_t empty, const MEANWHILE &meanwhile)
{
    if constexpr (SPLIT) {
        float low[32], high[36];
        values<KIND, 64>(low, p, v);
        values<KIND, 72>(high, p, operand_advance(v, PANEL / 2));
        meanwhile();
        wgmma_wait<1>();
        wgmma_pin(low);
        accumulate(sums, 0, low, factor);
        wgmma_wait<0>();
        wgmma_pin(high);
        release(empty);
        accumulate(sums, 32, high, factor);
    } else {
        float block[68];
        values<KIND, 136>(block, p, v);
        meanwhile();
        wgmma_wait<0>();
        wgmma_pin(block);
        release(empty);
        accumulate(sums, 0, block, factor);
    }
}

/* A consumer's positions in the rings, and its operands: the lower words of descriptors. */
struct consumer {
    struct ring kv;
    int tiles;           /* taken before the present one */
    int turn, next_turn; /* barriers: of this warpgroup's turns at exponentials, of the next one's */
    uint32_t q, k, v;
};

/* Keeps the lower word of a descriptor in a uniform register: ptxas would recompute it before each product, by ten
 * dependent instructions, but does not recompute a warp reduction. */
__device__ __forceinline__ uint32_t kept(uint32_t lower)
{
    return __reduce_max_sync(0xffffffffu, lower);
}

__device__ __forceinline__ uint64_t k_major(uint32_t lower)
{
    return (operand_k_major(0) & 0xffffffff00000000u) | lower;
}

template <enum code_kind KIND, bool SCORES8> struct codes_kernel {
    using layout = fwd_layout<SCORES8, true, KIND != CODES_FP8>;
    using shared = typename layout::shared;

    static __device__ __forceinline__ void take_turn(const struct consumer &w)
    {
        named_barrier_sync(w.turn, 2 * WARPGROUP);
    }

    static __device__ __forceinline__ void give_turn(const struct consumer &w)
    {
        named_barrier_arrive(w.next_turn, 2 * WARPGROUP);
    }

    static __device__ __forceinline__ void close_tile(const struct fwd_args &a, shared &s, const struct code_sums &sums,
                                                      const struct code_rows &r, const struct mx_rule &rule, int count,
                                                      int warpgroup)
    {
        const struct fwd_tile t = read_tile(s, count); /* again: registers are short in between */
        const float lift = KIND == CODES_FP8 ? FP8_LIFT : MX_LIFT + rule.amplitude;
        float inverse[2], lse[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float l = quad_sum(sums.l[h]);
            inverse[h] = t.value / l;
            lse[h] = (r.anchor[h] - WHOLE) + (log2f(l) - lift);
        }
        store_lse(a, t, warpgroup, lse);
        stage_rows<layout>(s, sums.o, inverse, count, warpgroup);
    }

    /* Skips a block that none of this warpgroup's rows sees. It waits for the block first: a stage freed earlier would
     * count for the block that it held before. */
    static __device__ __forceinline__ void pass_block(shared &s, struct consumer &w)
    {
        take_turn(w);
        give_turn(w);
        mbarrier_wait(at(s.k_full[w.kv.stage]), w.kv.parity);
        mbarrier_wait(at(s.v_full[w.kv.stage]), w.kv.parity);
        release(at(s.k_empty[w.kv.stage]));
        release(at(s.v_empty[w.kv.stage]));
        w.kv.next(layout::STAGES);
    }

    /* Codes of a block; its V has arrived when this returns. The waits for V stand where their branches keep
     * exponentials in place, where that paid: ptxas moves them across a barrier, but not across a branch. */
    static __device__ __forceinline__ void make_codes(const float (&score)[64], struct code_rows &r, float c,
                                                      const struct mx_rule &rule, shared &s, const struct consumer &w,
                                                      uint32_t (&p)[16])
    {
        const auto give = [&] { give_turn(w); };
        if constexpr (KIND == CODES_FP8) {
            const auto take = [&] {
                take_turn(w);
                mbarrier_wait(at(s.v_full[w.kv.stage]), w.kv.parity);
            };
            codes_fp8(score, r, c, take, give, p);
        } else {
            const auto take = [&] {
                mbarrier_wait(at(s.v_full[w.kv.stage]), w.kv.parity);
                take_turn(w);
            };
            codes_mx<KIND, SCORES8>(score, r, c, rule, take, give, p);
        }
        mbarrier_wait(at(s.v_full[w.kv.stage]), w.kv.parity);
        wgmma_pin(p);
    }

    static __device__ __forceinline__ void consume_tile(const struct fwd_args &a, shared &s, const struct mx_rule &rule,
                                                        struct consumer &w, struct fwd_tile t, int warpgroup)
    {
        const int first = t.row + 64 * warpgroup, n = key_blocks<layout>(a, t);
        /* The last block that this warpgroup's rows see, and the only one with masked keys. */
        const int own = first < 0 || first >= a.tokens ? -1 : a.causal ? first / TILE : n - 1;
        const uint32_t q = kept(w.q + (w.tiles & 1) * (layout::Q_BYTES >> 4));
        struct code_sums sums = {};
        struct code_rows r = {{-INFINITY, -INFINITY}, {}};
        for (int j = n - 1; j > own; j--) {
            pass_block(s, w);
        }
        if (own >= 0) {
            mbarrier_wait(at(s.k_full[w.kv.stage]), w.kv.parity);
        }
        uint32_t k = w.k + w.kv.stage * (layout::K_BYTES >> 4);
        for (int j = own; j >= 0; j--) { /* K has arrived */
            float score[64];
            uint32_t p[16];
            wgmma_fence();
            scores<SCORES8, layout::Q_PANEL>(score, k_major(q), k_major(k));
            const uint64_t v = k_major(w.v + w.kv.stage * (layout::V_SLOT >> 4));
            wgmma_wait<0>();
            wgmma_pin(score);
            release(at(s.k_empty[w.kv.stage]));
            if (j == own && (a.causal || a.tokens % TILE != 0)) {
                mask<layout::BLOCKED>(score, a, t.row + own_row(warpgroup), j * TILE);
            }
            make_codes(score, r, t.c, rule, s, w, p);
            wgmma_fence();
            add_values<KIND, SCORES8>(sums, p, v, r.factor, at(s.v_empty[w.kv.stage]), [&] {
                w.kv.next(layout::STAGES);
                k = w.k + w.kv.stage * (layout::K_BYTES >> 4);
                if (j > 0) {
                    mbarrier_wait(at(s.k_full[w.kv.stage]), w.kv.parity);
                }
            });
        }
        if (own >= 0) {
            close_tile(a, s, sums, r, rule, w.tiles, warpgroup);
        } else {
            rows_staged(s, w.tiles, warpgroup);
        }
    }

    static __device__ __forceinline__ void consume(const struct fwd_args &a, shared &s, const struct mx_rule &rule,
                                                   int warpgroup)
    {
        struct consumer w = {};
        w.q = kept((uint32_t)operand_k_major(shared_address(s.q[0]) + warpgroup * (PANEL / 2)));
        w.k = kept((uint32_t)operand_k_major(shared_address(s.k[0])));
        w.v = kept((uint32_t)operand_k_major(shared_address(s.v[0])));
        w.turn = BARRIER_TURN + warpgroup;
        w.next_turn = BARRIER_TURN + (warpgroup == layout::CONSUMERS - 1 ? 0 : warpgroup + 1);
        if (warpgroup == layout::CONSUMERS - 1) {
            give_turn(w); /* the first is warpgroup 0's */
        }
        for (;; w.tiles++) {
            const struct fwd_tile t = take_tile(s, w.tiles);
            if (t.head < 0) {
                break;
            }
            consume_tile(a, s, rule, w, t, warpgroup);
        }
    }
};

/* Writes the eight rows of ones behind the 128 features of every V slot. Their pattern repeats every 8 bytes, so that
 * the swizzle, which moves 16 bytes at a time, does not matter. */
template <class LAYOUT> __device__ __forceinline__ void write_ones(typename LAYOUT::shared &s)
{
    for (int i = (int)threadIdx.x; i < LAYOUT::STAGES * 256; i += LAYOUT::THREADS) {
        const int word = i % 256, row = word / 32;
        const uint32_t ones = word % 2 == row / 4 ? 0x38u << row % 4 * 8 : 0;
        *reinterpret_cast<uint32_t *>(s.v[i / 256] + PANEL + word * 4) = ones;
    }
    fence_async_proxy();
}

template <enum code_kind KIND, bool SCORES8>
static __global__ void __launch_bounds__(codes_kernel<KIND, SCORES8>::layout::THREADS, 1)
    fwd_codes_kernel(const __grid_constant__ struct fwd_maps maps, const __grid_constant__ struct fwd_args a,
                     const __grid_constant__ struct mx_rule rule)
{
    using kernel = codes_kernel<KIND, SCORES8>;
    extern __shared__ unsigned char shared_bytes[];
    typename kernel::shared &s = *reinterpret_cast<typename kernel::shared *>(
        shared_bytes + (1024 - shared_address(shared_bytes) % 1024) % 1024);
    if (threadIdx.x == 0) {
        open_barriers<typename kernel::layout>(s);
    }
    write_ones<typename kernel::layout>(s);
    __syncthreads();
    const int warpgroup = __shfl_sync(0xffffffffu, (int)threadIdx.x / WARPGROUP, 0);
    if (warpgroup == 0) {
        registers_lower<kernel::layout::PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) {
            produce<typename kernel::layout>(maps, a, s);
        } else if (threadIdx.x % 32 == 0) {
            send_rows<typename kernel::layout>(maps, a, s, (int)threadIdx.x / 32 - 1);
        }
    } else {
        registers_raise<kernel::layout::CONSUMER_REGISTERS>();
        kernel::consume(a, s, rule, warpgroup - 1);
    }
}

/* ---- host -------------------------------------------------------------------------------------------------- */

static struct mx_rule mx_rule_of(const struct attention_recipe *recipe)
{
    struct mx_rule rule;
    rule.bias = exponent_bias_of(recipe);
    rule.amplitude = amplitude_of(recipe);
    rule.line = direct_line_of(recipe);
    rule.ones = 0x3c003c00u;
    return rule;
}

template <enum code_kind KIND, bool SCORES8>
static void launch(const struct cuda *on, const struct fwd_maps &maps, const struct fwd_args &args,
                   const struct mx_rule &rule)
{
    fwd_launch<typename codes_kernel<KIND, SCORES8>::layout>(on, fwd_codes_kernel<KIND, SCORES8>, maps, args, rule);
}

template <bool SCORES8>
static void launch_kind(const struct attention_fwd *a, const struct fwd_maps &maps, const struct fwd_args &args)
{
    const struct mx_rule rule = mx_rule_of(a->recipe);
    if (a->recipe->pv == PV_FP8) {
        launch<CODES_FP8, SCORES8>(a->cuda, maps, args, rule);
    } else if (a->recipe->p_map == P_CODE_SPACE) {
        launch<CODES_MX_CODE_SPACE, SCORES8>(a->cuda, maps, args, rule);
    } else if (a->recipe->p_map == P_AFFINE) {
        launch<CODES_MX_AFFINE, SCORES8>(a->cuda, maps, args, rule);
    } else {
        launch<CODES_MX_EXACT, SCORES8>(a->cuda, maps, args, rule);
    }
}

/* Column view of V: (B Hkv, 128, padded tokens) bytes. */
static CUtensorMap column_map(const struct cuda *on, const void *data, int64_t padded, int64_t heads)
{
    struct tensor_map_shape s = {};
    s.data = data;
    s.type = CU_TENSOR_MAP_DATA_TYPE_UINT8;
    s.rank = 3;
    s.extent[0] = (uint64_t)padded;
    s.extent[1] = TILE;
    s.extent[2] = (uint64_t)heads;
    s.stride[0] = (uint64_t)padded;
    s.stride[1] = (uint64_t)padded * TILE;
    s.box[0] = s.box[1] = TILE;
    s.box[2] = 1;
    s.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
    return tensor_map(on, &s);
}

/* K with BLOCKED keys. A batch stride that is no multiple of the token stride does not fit into the map of rank 5. */
static void blocked_keys(const struct attention_fwd *a, const struct attention_operands_sm90 *x, struct fwd_maps *maps,
                         struct fwd_args *args)
{
    const struct attention_shape *shape = &a->shape;
    const int64_t T = shape->tokens, B = shape->batch, Hkv = shape->kv_heads;
    const struct head_view *k = &x->k;
    if (x->k8 != NULL) {
        args->k_batch = (int)(Hkv * T);
        maps->k =
            blocked_map<32>(a->cuda, x->k8, true, TILE, (uint64_t)(T * TILE), (uint64_t)(B * Hkv * T), (uint64_t)Hkv);
        maps->k_two = codes_map(a->cuda, x->k8, T, Hkv, B, 2);
        return;
    }
    maps->k_two = head_map(a->cuda, k, T, Hkv, B, 2);
    if (B > 1 && k->batch_stride % k->token_stride != 0) {
        args->k_batch = -1;
        maps->k = maps->k_two; /* not used */
        return;
    }
    const int64_t between = B == 1 ? 0 : k->batch_stride / k->token_stride;
    args->k_batch = (int)between;
    maps->k =
        blocked_map<32>(a->cuda, k->data, false, (uint64_t)k->token_stride * sizeof(bf16),
                        (uint64_t)k->head_stride * sizeof(bf16), (uint64_t)((B - 1) * between + T), (uint64_t)Hkv);
}

void attention_fwd_codes_sm90(const struct attention_fwd *a, const struct attention_operands_sm90 *x)
{
    const struct attention_shape *shape = &a->shape;
    const bool scores8 = x->q8 != NULL;
    const int64_t T = shape->tokens, B = shape->batch, H = shape->heads, Hkv = shape->kv_heads;
    const int rows = fwd_layout<false, true>::ROWS;
    struct fwd_args args = fwd_args_of<fwd_layout<false, true>>(a, scores8 ? 2 * TILE : 3 * TILE);
    struct fwd_maps maps = {};
    maps.q = scores8 ? codes_map(a->cuda, x->q8, T, H, B, rows) : head_map(a->cuda, &x->q, T, H, B, rows);
    if (a->recipe->pv == PV_FP8) {
        maps.k = scores8 ? codes_map(a->cuda, x->k8, T, Hkv, B, TILE) : head_map(a->cuda, &x->k, T, Hkv, B, TILE);
    } else {
        blocked_keys(a, x, &maps, &args);
    }
    maps.v = column_map(a->cuda, x->v_column, attention_padded_sm90(T), B * Hkv);
    maps.out = head_map(a->cuda, &a->out, T, H, B, 64);
    args.counter = x->counter;
    args.v_inverse = x->v_inverse;
    args.q_inverse = x->q_inverse;
    args.k_inverse = x->k_inverse;
    if (scores8) {
        launch_kind<true>(a, maps, args);
    } else {
        launch_kind<false>(a, maps, args);
    }
}
