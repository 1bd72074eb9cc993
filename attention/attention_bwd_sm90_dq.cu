/* attention: dQ of the FP8 backward on Hopper from the dS that attention_bwd_sm90_fp8.cu stored: dQ = dS K over the
 * blocks of keys that a query sees. A block's product has the 14 bits of FP8 tensor cores; products are added in FP32,
 * in the order of blocks, and rounded once.
 *
 * A block of threads has 128 queries of two query heads of a kv head, one for each warpgroup, so that K is read once
 * for both. (Where the GQA group is odd, both make the last head and store the same.) The longest come first. */
#include "attention/attention_bwd_sm90_fp8.cuh"

enum {
    DQ_STAGES = 4,
    AT_COLUMNS = 2 * BWD8_PAIR, /* K col, behind dS of two heads */
    DQ_STAGE = AT_COLUMNS + BWD8_KEYS / 2,
    DQ_LOADED = 0, /* barriers */
    DQ_FREED = DQ_STAGES,
    DQ_BYTES = DQ_STAGES * DQ_STAGE + 2 * DQ_STAGES * 8 + 1024,
};

static_assert((int)BWD8_PAIR == 16384 && (int)BWD8_KEYS / 2 == 16384, "a warpgroup stages 64 rows of dQ in 16 KB");

/* What a block of threads makes. */
struct dq_unit {
    int batch, kv, head0, head1, pair, blocks; /* heads within the batch; pair of query tiles; blocks of keys */
};

static __device__ __forceinline__ struct dq_unit dq_unit_of(const struct bwd_plan &p, int first)
{
    const int group = p.heads / p.kv_heads, twos = (group + 1) / 2, each = twos * p.blocks;
    const int unit = first + blockIdx.x / each, rest = blockIdx.x % each;
    struct dq_unit u;
    u.batch = unit / p.kv_heads;
    u.kv = unit % p.kv_heads;
    u.head0 = u.kv * group + 2 * (rest % twos);
    u.head1 = min(u.head0 + 1, (u.kv + 1) * group - 1);
    u.pair = p.blocks - 1 - rest / twos;
    u.blocks = p.causal ? u.pair + 1 : p.blocks;
    return u;
}

static __device__ __forceinline__ void load_ds(const struct bwd8_plan &p, const struct dq_unit &u,
                                               const struct shared &s, int first)
{
    const int unit = u.batch * p.b.kv_heads + u.kv, group = p.b.heads / p.b.kv_heads;
    const int first_head = (unit - first) * group - u.kv * group; /* of the launch, for head 0 */
    const uint8_t *k = p.keys + (int64_t)unit * p.b.blocks * BWD8_KEYS + BWD8_KEYS / 2;
    const uint8_t *ds0 = pair_at(p, first_head + u.head0, u.pair), *ds1 = pair_at(p, first_head + u.head1, u.pair);
    struct ring r = {0, 1};
#pragma unroll 1 /* few registers here */
    for (int i = 0; i < u.blocks; i++) {
        const uint32_t barrier = barrier_at(s, DQ_LOADED + r.stage), to = s.base + r.stage * DQ_STAGE;
        mbarrier_wait(barrier_at(s, DQ_FREED + r.stage), r.parity);
        mbarrier_expect(barrier, DQ_STAGE);
        bulk_load(to, ds0 + (int64_t)i * BWD8_PAIR, BWD8_PAIR, barrier);
        bulk_load(to + BWD8_PAIR, ds1 + (int64_t)i * BWD8_PAIR, BWD8_PAIR, barrier);
        bulk_load(to + AT_COLUMNS, k + (int64_t)i * BWD8_KEYS, BWD8_KEYS / 2, barrier);
        ring_next<DQ_STAGES>(r);
    }
}

/* dq (64 queries x 128) = dS (64 x 128 keys) times K. */
static __device__ __forceinline__ void product_dq(float (&dq)[64], uint64_t ds, uint64_t k)
{
    wgmma_pin(dq);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        wgmma_e4m3<128>::ss(dq, operand_advance(ds, i * 32), operand_advance(k, i * 32), i > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(dq);
}

static __device__ __forceinline__ void sum_dq(const struct bwd8_plan &p, const struct dq_unit &u,
                                              const struct shared &s, int wg, const struct head_view &dq)
{
    float sum[2][64], x[64];
#pragma unroll
    for (int i = 0; i < 64; i++) {
        sum[0][i] = sum[1][i] = 0;
    }
    struct ring r = {0, 0};
#pragma unroll 1
    for (int i = 0; i < u.blocks; i++) {
        mbarrier_wait(barrier_at(s, DQ_LOADED + r.stage), r.parity);
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            product_dq(x, operand_at(s.base, tile * BWD8_DS, r.stage, DQ_STAGE) + wg * (BWD8_PAIR >> 4),
                       operand_at(s.base, AT_COLUMNS, r.stage, DQ_STAGE));
            if (tile == 1 && (WARP_ARRIVALS == 32 || (threadIdx.x & 31) == 0)) {
                mbarrier_arrive(barrier_at(s, DQ_FREED + r.stage));
            }
#pragma unroll
            for (int j = 0; j < 64; j++) {
                sum[tile][j] += x[j];
            }
        }
        ring_next<DQ_STAGES>(r);
    }
    named_barrier_sync(BARRIER_HALF + wg, 128); /* no warp multiplies the warpgroup's dS any more */
    const struct bwd_lifts l = lifts_of(p, u.batch * p.b.kv_heads + u.kv);
    bf16 *y = dq.data + u.batch * dq.batch_stride + (wg == 0 ? u.head0 : u.head1) * dq.head_stride;
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
        const int at = tile * DQ_STAGE + wg * BWD8_PAIR; /* held dS of this warpgroup alone */
        store_keys(sum[tile], p.b.scale / (l.ds * l.k), s.base + at, s.memory + at, wg,
                   (2 * u.pair + tile) * BWD_QUERIES, p.b, y, dq.token_stride);
    }
}

static __global__ void __launch_bounds__(BWD_THREADS, 1)
    bwd_fp8_dq_kernel(const struct bwd8_plan p, const struct head_view dq, int first)
{
    extern __shared__ char raw[];
    char *memory = raw + ((1024 - (shared_address(raw) & 1023)) & 1023);
    const struct shared s = {shared_address(memory), shared_address(memory) + DQ_STAGES * DQ_STAGE, memory};
    if (threadIdx.x == 0) {
        for (int i = 0; i < DQ_STAGES; i++) {
            mbarrier_init(barrier_at(s, DQ_LOADED + i), 1);
            mbarrier_init(barrier_at(s, DQ_FREED + i), 8 * WARP_ARRIVALS); /* of the computing warps */
        }
        mbarriers_ready();
    }
    __syncthreads();
    const struct dq_unit u = dq_unit_of(p.b, first);
    if (threadIdx.x < 128) {
        registers_lower<24>();
        if (threadIdx.x == 0) {
            load_ds(p, u, s, first);
        }
    } else {
        registers_raise<240>();
        sum_dq(p, u, s, (int)__reduce_max_sync(0xffffffffu, threadIdx.x / 128) - 1, dq);
    }
}

void bwd8_dq(const struct cuda *on, const struct bwd8_plan &p, const struct head_view &dq, int first, int units)
{
    const int twos = (p.b.heads / p.b.kv_heads + 1) / 2;
    cudaFuncSetAttribute(bwd_fp8_dq_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, DQ_BYTES);
    bwd_fp8_dq_kernel<<<units * twos * p.b.blocks, BWD_THREADS, DQ_BYTES, on->stream>>>(p, dq, first);
    cuda_launched(on, "attention backward, dQ, FP8, sm90");
}
