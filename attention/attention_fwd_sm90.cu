/* attention: the forward on Hopper (docs/numerics.md, section 5), D = 128.
 *
 * One block of 128 query rows of one head is a tile; a persistent grid takes tiles from a counter, longest first.
 * Warpgroup 0 produces: one thread fetches tile numbers and issues all TMA. Warpgroups 1 and 2 own 64 rows each: scores
 * of key block j + 1 and P V of block j are in flight together while the softmax of one warpgroup runs under the
 * products of the other (two named barriers order them). Keys run from the last block to the first: only the first
 * block met needs a mask. */
#include "attention/sm90.cuh"

extern "C" {
#include "attention/attention_sm90.h"
#include "core/status.h"
}

enum {
    HEAD_DIM = 128,
    TILE_Q = 128,
    TILE_K = 128,
    STAGES = 2,
    WARPGROUP = 128,
    THREADS = 3 * WARPGROUP,
    CONSUMER_WARPS = 8,
    PANEL = TILE_K * 128,    /* bytes of 128 rows of 128 bytes */
    BLOCK_BYTES = 2 * PANEL, /* 128 x 128 BF16 */
    L2_SECTION = 32 << 20,   /* bytes of K and V that a run of tiles shares */
};

/* Named barriers. */
enum { BARRIER_TURN = 1, BARRIER_ROWS = 3 }; /* + warpgroup */

struct fwd_maps {
    CUtensorMap q, k, v, out;
};

struct fwd_args {
    float *lse_log2;
    unsigned int *counter;
    float c; /* base-2 score of q.k */
    int tokens, heads, group, blocks, section_heads, all_heads, tiles;
};

struct fwd_shared {
    alignas(1024) unsigned char q[BLOCK_BYTES], out[BLOCK_BYTES], k[STAGES][BLOCK_BYTES], v[STAGES][BLOCK_BYTES];
    uint64_t q_full, q_empty, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES], tile_full[2],
        tile_empty[2];
    int tile[2];
};

/* A tile: `head` counts (batch, query head). */
struct fwd_tile {
    int head, block;
};

/* Tiles run section by section of heads whose keys and values stay in L2, longest blocks first inside. */
__device__ __forceinline__ struct fwd_tile tile_of(const struct fwd_args &a, int index)
{
    int per_section = a.section_heads * a.blocks, section = index / per_section, rest = index % per_section;
    int first = section * a.section_heads, heads = min(a.section_heads, a.all_heads - first);
    return {first + rest % heads, a.blocks - 1 - rest / heads};
}

/* A position in a ring of barriers. */
struct ring {
    int stage, parity;
    __device__ __forceinline__ void next(int stages)
    {
        if (++stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

__device__ __forceinline__ uint32_t at(const uint64_t &barrier)
{
    return shared_address(&barrier);
}

template <bool CAUSAL> __device__ __forceinline__ int key_blocks(const struct fwd_args &a, int block)
{
    return CAUSAL ? block + 1 : a.blocks;
}

/* ---- producer ---------------------------------------------------------------------------------------------- */

__device__ __forceinline__ void load_block(uint32_t to, const CUtensorMap *map, uint32_t barrier, int token, int head,
                                           int batch)
{
    mbarrier_expect(barrier, BLOCK_BYTES);
    tma_load_4d(to, map, barrier, 0, token, head, batch);
    tma_load_4d(to + PANEL, map, barrier, 64, token, head, batch);
}

template <bool CAUSAL>
__device__ __forceinline__ void produce(const struct fwd_maps &maps, const struct fwd_args &a, struct fwd_shared &s)
{
    struct ring kv = {0, 1}, tiles = {0, 1};
    int index = blockIdx.x, q_parity = 1;
    for (;;) {
        mbarrier_wait(at(s.tile_empty[tiles.stage]), tiles.parity);
        s.tile[tiles.stage] = index;
        mbarrier_arrive(at(s.tile_full[tiles.stage]));
        tiles.next(2);
        if (index >= a.tiles) {
            return;
        }
        int next = (int)(atomicAdd(a.counter, 1u) + gridDim.x);
        struct fwd_tile t = tile_of(a, index);
        int batch = t.head / a.heads, head = t.head % a.heads, kv_head = head / a.group;
        mbarrier_wait(at(s.q_empty), q_parity);
        q_parity ^= 1;
        load_block(shared_address(s.q), &maps.q, at(s.q_full), t.block * TILE_Q, head, batch);
        for (int j = key_blocks<CAUSAL>(a, t.block) - 1; j >= 0; j--) {
            mbarrier_wait(at(s.k_empty[kv.stage]), kv.parity);
            load_block(shared_address(s.k[kv.stage]), &maps.k, at(s.k_full[kv.stage]), j * TILE_K, kv_head, batch);
            mbarrier_wait(at(s.v_empty[kv.stage]), kv.parity);
            load_block(shared_address(s.v[kv.stage]), &maps.v, at(s.v_full[kv.stage]), j * TILE_K, kv_head, batch);
            kv.next(STAGES);
        }
        index = next;
    }
}

/* ---- consumers --------------------------------------------------------------------------------------------- */

/* What a thread keeps of its two rows (h = 0, 1: row g + 8 h of its warp's 16). */
struct rows_state {
    float max[2], sum[2]; /* raw maximum, own share of the sum */
};

__device__ __forceinline__ void scores(float (&s)[64], uint64_t q, uint64_t k)
{
#pragma unroll
    for (int step = 0; step < 8; step++) {
        uint32_t offset = (step / 4) * PANEL + (step % 4) * 32;
        wgmma_bf16<128>::ss<0, 0>(s, operand_advance(q, offset), operand_advance(k, offset), step > 0);
    }
    wgmma_commit();
}

__device__ __forceinline__ void values(float (&o)[64], const uint32_t (&p)[32], uint64_t v)
{
#pragma unroll
    for (int step = 0; step < 8; step++) {
        wgmma_bf16<128>::rs<1>(o, p + 4 * step, operand_advance(v, step * 2048), 1);
    }
    wgmma_commit();
}

/* Keys after the row (causal) and behind the end leave the maximum and the sum. row, key: those of s[0]. */
template <bool CAUSAL> __device__ __forceinline__ void mask(float (&s)[64], int row, int key, int tokens)
{
#pragma unroll
    for (int i = 0; i < 64; i++) {
        int j = key + i / 4 * 8 + i % 2, r = row + i / 2 % 2 * 8;
        if (j >= tokens || (CAUSAL && j > r)) {
            s[i] = -INFINITY;
        }
    }
}

__device__ __forceinline__ float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

/* Scores become 2^(c s - c max); moves the maximum; factor[h] rescales what was summed before. */
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

__device__ __forceinline__ void release(uint32_t barrier)
{
    if (elect_one()) {
        mbarrier_arrive(barrier);
    }
}

/* O / L to shared memory, swizzled, and out by TMA; LSE2 by the threads that own a row. */
__device__ __forceinline__ void close_tile(const struct fwd_maps &maps, const struct fwd_args &a, struct fwd_shared &s,
                                           float (&o)[64], const struct rows_state &r, struct fwd_tile t, int warpgroup)
{
    const int thread = threadIdx.x % WARPGROUP, warp = thread / 32, lane = thread % 32;
    float inverse[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = r.sum[h];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        inverse[h] = 1.0f / sum;
        int row = t.block * TILE_Q + 64 * warpgroup + 16 * warp + lane / 4 + 8 * h;
        if (lane % 4 == 0 && row < a.tokens) {
            a.lse_log2[(int64_t)t.head * a.tokens + row] = r.max[h] * a.c + log2f(sum);
        }
    }
    uint32_t out = shared_address(s.out) + warpgroup * PANEL; /* two panels of 64 rows */
    if (thread == 0) {
        tma_store_wait_read<0>();
    }
    named_barrier_sync(BARRIER_ROWS + warpgroup, WARPGROUP);
    int row = 16 * warp + lane % 16, half = lane / 16;
#pragma unroll
    for (int j = 0; j < 16; j += 2) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *d = o + 4 * (j + i / 2) + 2 * (i % 2);
            x[i] = pack_bf16(d[0] * inverse[i % 2], d[1] * inverse[i % 2]);
        }
        stmatrix_x4(out + (j / 8) * (PANEL / 2) + swizzle_128(row, (j % 8 + half) * 16), x[0], x[1], x[2], x[3]);
    }
    fence_async_proxy();
    named_barrier_sync(BARRIER_ROWS + warpgroup, WARPGROUP);
    if (thread == 0) {
        int batch = t.head / a.heads, head = t.head % a.heads, first = t.block * TILE_Q + 64 * warpgroup;
        tma_store_4d(&maps.out, out, 0, first, head, batch);
        tma_store_4d(&maps.out, out + PANEL / 2, 64, first, head, batch);
        tma_store_commit();
    }
}

template <bool CAUSAL>
__device__ __forceinline__ void consume(const struct fwd_maps &maps, const struct fwd_args &a, struct fwd_shared &s,
                                        int warpgroup)
{
    const int thread = threadIdx.x % WARPGROUP, warp = thread / 32, lane = thread % 32;
    struct ring k = {0, 0}, v = {0, 0}, tiles = {0, 0};
    int q_parity = 0;
    const uint64_t q = operand_k_major(shared_address(s.q) + warpgroup * (PANEL / 2));
    const uint64_t k0 = operand_k_major(shared_address(s.k[0])), v0 = operand_mn_major(shared_address(s.v[0]), PANEL);
    if (warpgroup == 1) {
        named_barrier_arrive(BARRIER_TURN + 0, 2 * WARPGROUP); /* the first turn is warpgroup 0's */
    }
    for (;;) {
        mbarrier_wait(at(s.tile_full[tiles.stage]), tiles.parity);
        int index = s.tile[tiles.stage];
        __syncwarp();
        release(at(s.tile_empty[tiles.stage]));
        tiles.next(2);
        if (index >= a.tiles) {
            break;
        }
        struct fwd_tile t = tile_of(a, index);
        int n = key_blocks<CAUSAL>(a, t.block);
        float score[64], o[64] = {}, factor[2];
        uint32_t p[32];
        struct rows_state r = {{-INFINITY, -INFINITY}, {0, 0}};

        mbarrier_wait(at(s.q_full), q_parity);
        q_parity ^= 1;
        mbarrier_wait(at(s.k_full[k.stage]), k.parity);
        wgmma_fence();
        scores(score, q, operand_advance(k0, k.stage * BLOCK_BYTES));
        wgmma_wait<0>();
        wgmma_pin(score);
        release(at(s.k_empty[k.stage]));
        k.next(STAGES);
        if (CAUSAL || a.tokens % TILE_K != 0) {
            mask<CAUSAL>(score, t.block * TILE_Q + 64 * warpgroup + 16 * warp + lane / 4,
                         (n - 1) * TILE_K + lane % 4 * 2, a.tokens);
        }
        softmax(score, r, a.c, factor);
        pack(score, p);
        if (n > 1) {
            mbarrier_wait(at(s.k_full[k.stage]), k.parity);
        }
        for (int j = 1; j < n; j++) {
            named_barrier_sync(BARRIER_TURN + warpgroup, 2 * WARPGROUP);
            wgmma_pin(p);
            wgmma_pin(o);
            wgmma_fence();
            scores(score, q, operand_advance(k0, k.stage * BLOCK_BYTES));
            mbarrier_wait(at(s.v_full[v.stage]), v.parity);
            values(o, p, operand_advance(v0, v.stage * BLOCK_BYTES));
            named_barrier_arrive(BARRIER_TURN + (warpgroup ^ 1), 2 * WARPGROUP);
            wgmma_wait<1>();
            wgmma_pin(score);
            release(at(s.k_empty[k.stage]));
            k.next(STAGES);
            softmax(score, r, a.c, factor);
            if (j + 1 < n) {
                mbarrier_wait(at(s.k_full[k.stage]), k.parity);
            }
            wgmma_wait<0>();
            wgmma_pin(o);
            wgmma_pin(p);
            release(at(s.v_empty[v.stage]));
            v.next(STAGES);
            pack(score, p);
            rescale(o, factor);
        }
        release(at(s.q_empty));
        mbarrier_wait(at(s.v_full[v.stage]), v.parity);
        wgmma_pin(p);
        wgmma_pin(o);
        wgmma_fence();
        values(o, p, operand_advance(v0, v.stage * BLOCK_BYTES));
        wgmma_wait<0>();
        wgmma_pin(o);
        release(at(s.v_empty[v.stage]));
        v.next(STAGES);
        close_tile(maps, a, s, o, r, t, warpgroup);
    }
    if (thread == 0) {
        tma_store_wait<0>();
    }
}

/* ---- the kernel -------------------------------------------------------------------------------------------- */

__device__ __forceinline__ void open_barriers(struct fwd_shared &s)
{
    mbarrier_init(at(s.q_full), 1);
    mbarrier_init(at(s.q_empty), CONSUMER_WARPS);
    for (int i = 0; i < STAGES; i++) {
        mbarrier_init(at(s.k_full[i]), 1);
        mbarrier_init(at(s.v_full[i]), 1);
        mbarrier_init(at(s.k_empty[i]), CONSUMER_WARPS);
        mbarrier_init(at(s.v_empty[i]), CONSUMER_WARPS);
    }
    for (int i = 0; i < 2; i++) {
        mbarrier_init(at(s.tile_full[i]), 1);
        mbarrier_init(at(s.tile_empty[i]), CONSUMER_WARPS);
    }
    mbarriers_ready();
}

template <bool CAUSAL>
static __global__ void __launch_bounds__(THREADS, 1)
    attention_fwd_sm90_kernel(const __grid_constant__ struct fwd_maps maps, const __grid_constant__ struct fwd_args a)
{
    extern __shared__ unsigned char shared_bytes[];
    struct fwd_shared &s =
        *reinterpret_cast<struct fwd_shared *>(shared_bytes + (1024 - shared_address(shared_bytes) % 1024) % 1024);
    if (threadIdx.x == 0) {
        open_barriers(s);
    }
    __syncthreads();
    const int warpgroup = __shfl_sync(0xffffffffu, (int)threadIdx.x / WARPGROUP, 0);
    if (warpgroup == 0) {
        registers_lower<40>();
        if (threadIdx.x == 0) {
            produce<CAUSAL>(maps, a, s);
        }
    } else {
        registers_raise<232>();
        consume<CAUSAL>(maps, a, s, warpgroup - 1);
    }
}

/* ---- host -------------------------------------------------------------------------------------------------- */

const char *attention_fwd_refuses_sm90(const struct attention_shape *shape, const struct attention_recipe *recipe)
{
    if (shape->head_dim != HEAD_DIM) {
        return "head_dim must be 128 (the Hopper kernels are written for it)";
    }
    if (shape->kv_heads < 1 || shape->heads % shape->kv_heads != 0) {
        return "heads must be a multiple of kv_heads";
    }
    if (!(shape->softmax_scale > 0)) {
        return "softmax_scale must be positive: the row maximum is taken before it is applied";
    }
    if (recipe->qk != QK_BF16 || recipe->pv != PV_BF16) {
        return "qk and pv must be bf16";
    }
    return NULL;
}

size_t attention_fwd_scratch_bytes_sm90(const struct attention_shape *, const struct attention_recipe *)
{
    return 64; /* the counter of tiles */
}

void attention_fwd_sm90(const struct attention_fwd *a)
{
    const struct attention_shape *shape = &a->shape;
    const struct cuda *on = a->cuda;
    if (shape->batch == 0) {
        return;
    }
    struct fwd_maps maps = {
        head_map(on, &a->q, shape->tokens, shape->heads, shape->batch, TILE_Q),
        head_map(on, &a->k, shape->tokens, shape->kv_heads, shape->batch, TILE_K),
        head_map(on, &a->v, shape->tokens, shape->kv_heads, shape->batch, TILE_K),
        head_map(on, &a->out, shape->tokens, shape->heads, shape->batch, TILE_Q / 2),
    };
    struct fwd_args args = {};
    args.lse_log2 = a->lse_log2;
    args.counter = static_cast<unsigned int *>(a->scratch);
    args.c = (float)((double)shape->softmax_scale * 1.44269504088896340736);
    args.tokens = (int)shape->tokens;
    args.heads = (int)shape->heads;
    args.group = (int)(shape->heads / shape->kv_heads);
    args.blocks = (args.tokens + TILE_Q - 1) / TILE_Q;
    args.all_heads = (int)(shape->batch * shape->heads);
    int64_t kv_bytes = shape->tokens * HEAD_DIM * (int64_t)sizeof(bf16) * 2, kv_heads = L2_SECTION / kv_bytes;
    args.section_heads = (int)(kv_heads > 1 ? kv_heads : 1) * args.group;
    args.tiles = args.blocks * args.all_heads;
    cuda_zero(on, args.counter, sizeof *args.counter);
    const size_t bytes = sizeof(struct fwd_shared) + 1024;
    const int grid = args.tiles < on->multiprocessors ? args.tiles : on->multiprocessors;
    auto kernel = shape->causal ? attention_fwd_sm90_kernel<true> : attention_fwd_sm90_kernel<false>;
    cuda_note(on, "attention_fwd_sm90: shared memory",
              (int)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    kernel<<<grid, THREADS, bytes, on->stream>>>(maps, args);
    cuda_launched(on, "attention_fwd_sm90_kernel");
}
