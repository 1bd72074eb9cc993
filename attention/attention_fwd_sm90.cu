/* attention: the BF16 forward on Hopper. attention_fwd_sm90.cuh describes tiles and pipeline.
 *
 * The two consumer warpgroups alternate ("ping-pong", two named barriers): one has its scores of key block j + 1 and
 * its P V of block j in flight while the other computes its softmax.
 *
 * P = 2^(c s - c max): one multiply-add and one ex2 an element. The sum takes P before its rounding to BF16. */
#include "attention/attention_fwd_sm90.cuh"

extern "C" {
#include "attention/attention_sm90.h"
}

using layout = fwd_layout<false, false>;

/* What a thread keeps of its two rows. */
struct rows_state {
    float max[2], sum[2]; /* running maximum of raw scores; this thread's share of the running sum */
};

__device__ __forceinline__ void values(float (&o)[64], const uint32_t (&p)[32], uint64_t v)
{
#pragma unroll
    for (int step = 0; step < 8; step++) {
        wgmma_bf16<128>::rs<1>(o, p + 4 * step, operand_advance(v, step * 2048), 1);
    }
    wgmma_commit();
}

/* Online softmax: scores become P, the running maximum moves, factor[h] rescales earlier sums. */
__device__ __forceinline__ void softmax(float (&s)[64], struct rows_state &r, float c, float (&factor)[2])
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float max = s[2 * h];
#pragma unroll
        for (int j = 0; j < 16; j++) {
            max = fmaxf(max, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
        }
        max = fmaxf(r.max[h], quad_max(max));
        factor[h] = exp2_fast((r.max[h] - max) * c);
        r.max[h] = max;
        float shift = max * c, sum = r.sum[h] * factor[h];
#pragma unroll
        for (int j = 0; j < 16; j++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float p = exp2_fast(fmaf(s[4 * j + 2 * h + e], c, -shift));
                s[4 * j + 2 * h + e] = p;
                sum += p;
            }
        }
        r.sum[h] = sum;
    }
}

__device__ __forceinline__ void pack(const float (&s)[64], uint32_t (&p)[32])
{
#pragma unroll
    for (int i = 0; i < 32; i++) {
        p[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
    }
}

__device__ __forceinline__ void rescale(float (&o)[64], const float (&factor)[2])
{
#pragma unroll
    for (int i = 0; i < 64; i++) {
        o[i] *= factor[i / 2 % 2];
    }
}

__device__ __forceinline__ void close_tile(const struct fwd_args &a, layout::shared &s, const float (&o)[64],
                                           const struct rows_state &r, struct fwd_tile t, int count, int warpgroup)
{
    float inverse[2], lse[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = quad_sum(r.sum[h]);
        inverse[h] = 1.0f / sum;
        lse[h] = r.max[h] * a.c + log2f(sum);
    }
    store_lse(a, t, warpgroup, lse);
    stage_rows<layout>(s, o, inverse, count, warpgroup);
}

/* A consumer's positions in the rings, and its operands. */
struct consumer {
    struct ring k, v;
    int tiles; /* taken before the present one */
    uint64_t q, k0, v0;
};

__device__ __forceinline__ void consume_tile(const struct fwd_args &a, layout::shared &s, struct consumer &w,
                                             struct fwd_tile t, int warpgroup)
{
    const int n = key_blocks<layout>(a, t);
    float score[64], o[64] = {}, factor[2];
    uint32_t p[32];
    struct rows_state r = {{-INFINITY, -INFINITY}, {0, 0}};
    const uint64_t q = operand_advance(w.q, (w.tiles & 1) * layout::Q_BYTES);
    mbarrier_wait(at(s.k_full[w.k.stage]), w.k.parity);
    wgmma_fence();
    scores<false, layout::Q_PANEL>(score, q, operand_advance(w.k0, w.k.stage * layout::K_BYTES));
    wgmma_wait<0>();
    wgmma_pin(score);
    release(at(s.k_empty[w.k.stage]));
    w.k.next(layout::STAGES);
    if (a.causal || a.tokens % TILE != 0) {
        mask(score, a, t.row + own_row(warpgroup), (n - 1) * TILE);
    }
    softmax(score, r, a.c, factor);
    pack(score, p);
    if (n > 1) {
        mbarrier_wait(at(s.k_full[w.k.stage]), w.k.parity);
    }
    for (int j = 1; j < n; j++) {
        named_barrier_sync(BARRIER_TURN + warpgroup, 2 * WARPGROUP);
        wgmma_pin(p);
        wgmma_pin(o);
        wgmma_fence();
        scores<false, layout::Q_PANEL>(score, q, operand_advance(w.k0, w.k.stage * layout::K_BYTES));
        mbarrier_wait(at(s.v_full[w.v.stage]), w.v.parity);
        wgmma_fence();
        values(o, p, operand_advance(w.v0, w.v.stage * layout::V_SLOT));
        named_barrier_arrive(BARRIER_TURN + (warpgroup ^ 1), 2 * WARPGROUP);
        wgmma_wait<1>();
        wgmma_pin(score);
        release(at(s.k_empty[w.k.stage]));
        w.k.next(layout::STAGES);
        softmax(score, r, a.c, factor);
        /* This wait stands here, not at the head of the loop, because its branch keeps ptxas from moving the wait for
         * P V up, before the softmax that is meant to run under it. */
        if (j + 1 < n) {
            mbarrier_wait(at(s.k_full[w.k.stage]), w.k.parity);
        }
        wgmma_wait<0>();
        wgmma_pin(o);
        wgmma_pin(p);
        release(at(s.v_empty[w.v.stage]));
        w.v.next(layout::STAGES);
        pack(score, p);
        rescale(o, factor);
    }
    mbarrier_wait(at(s.v_full[w.v.stage]), w.v.parity);
    wgmma_pin(p);
    wgmma_pin(o);
    wgmma_fence();
    values(o, p, operand_advance(w.v0, w.v.stage * layout::V_SLOT));
    wgmma_wait<0>();
    wgmma_pin(o);
    release(at(s.v_empty[w.v.stage]));
    w.v.next(layout::STAGES);
    close_tile(a, s, o, r, t, w.tiles, warpgroup);
}

__device__ __forceinline__ void consume(const struct fwd_args &a, layout::shared &s, int warpgroup)
{
    struct consumer w = {{0, 0}, {0, 0}, 0, 0, 0, 0};
    w.q = operand_k_major(shared_address(s.q[0]) + warpgroup * (PANEL / 2));
    w.k0 = operand_k_major(shared_address(s.k[0]));
    w.v0 = operand_mn_major(shared_address(s.v[0]), PANEL);
    if (warpgroup == 1) {
        named_barrier_arrive(BARRIER_TURN + 0, 2 * WARPGROUP); /* the first turn is warpgroup 0's */
    }
    for (;; w.tiles++) {
        const struct fwd_tile t = take_tile(s, w.tiles);
        if (t.head < 0) {
            break;
        }
        consume_tile(a, s, w, t, warpgroup);
    }
}

static __global__ void __launch_bounds__(layout::THREADS, 1)
    fwd_bf16_kernel(const __grid_constant__ struct fwd_maps maps, const __grid_constant__ struct fwd_args a)
{
    extern __shared__ unsigned char shared_bytes[];
    layout::shared &s =
        *reinterpret_cast<layout::shared *>(shared_bytes + (1024 - shared_address(shared_bytes) % 1024) % 1024);
    if (threadIdx.x == 0) {
        open_barriers<layout>(s);
    }
    __syncthreads();
    const int warpgroup = __shfl_sync(0xffffffffu, (int)threadIdx.x / WARPGROUP, 0);
    if (warpgroup == 0) {
        registers_lower<layout::PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) {
            produce<layout>(maps, a, s);
        } else if (threadIdx.x % 32 == 0 && threadIdx.x / 32 <= layout::CONSUMERS) {
            send_rows<layout>(maps, a, s, (int)threadIdx.x / 32 - 1);
        }
    } else {
        registers_raise<layout::CONSUMER_REGISTERS>();
        consume(a, s, warpgroup - 1);
    }
}

void attention_fwd_bf16_sm90(const struct attention_fwd *a, const struct head_view *q, const struct head_view *k,
                             const struct head_view *v, uint32_t *counter)
{
    const struct attention_shape *shape = &a->shape;
    const int64_t T = shape->tokens, B = shape->batch;
    struct fwd_maps maps = {
        head_map(a->cuda, q, T, shape->heads, B, layout::ROWS),
        head_map(a->cuda, k, T, shape->kv_heads, B, TILE),
        head_map(a->cuda, v, T, shape->kv_heads, B, TILE),
        head_map(a->cuda, &a->out, T, shape->heads, B, 64),
    };
    struct fwd_args args = fwd_args_of<layout>(a, 2 * (int64_t)sizeof(bf16) * TILE);
    args.counter = counter;
    fwd_launch<layout>(a->cuda, fwd_bf16_kernel, maps, args);
}
