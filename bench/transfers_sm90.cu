/* bench: how fast bytes move between shared and global memory on Hopper, and between two multiprocessors of a cluster
 * (docs/results/attention_sm90.md).
 *
 *   build/release/bench/transfers_sm90
 *
 * Additions to global memory in TB/s by events; the others in clocks of one multiprocessor, all of them busy. */
#include "attention/sm90_maps.cuh"
#include "bench/clocks_sm90.cuh"

/* ---- additions to an FP32 array in global memory: by threads, 16 bytes each, or in bulk from shared memory ---- */

enum { TILE_BYTES = 16 * 1024 };

static __global__ void __launch_bounds__(THREADS) red_kernel(float *sum, int64_t tiles)
{
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        for (int i = threadIdx.x; i < TILE_BYTES / 16; i += THREADS) {
            float *to = sum + tile * (TILE_BYTES / 4) + i * 4;
            asm volatile("red.global.add.v4.f32 [%0], {%1, %1, %1, %1};" ::"l"(to), "f"(1.0f) : "memory");
        }
    }
}

static __global__ void __launch_bounds__(THREADS) bulk_kernel(float *sum, int64_t tiles)
{
    extern __shared__ __align__(128) float staged[];
    for (int i = threadIdx.x; i < TILE_BYTES / 4; i += THREADS) {
        staged[i] = 1.0f;
    }
    fence_async_proxy();
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            bulk_add_f32(sum + tile * (TILE_BYTES / 4), shared_address(staged), TILE_BYTES);
            tma_store_commit();
        }
        tma_store_wait<0>();
    }
}

template <class KERNEL> static void additions(const bench &b, KERNEL kernel, const char *name, int64_t bytes)
{
    float *sum, ms = 0;
    cudaEvent_t from, to;
    must("array", cudaMalloc(&sum, (size_t)bytes));
    must("zeros", cudaMemset(sum, 0, (size_t)bytes));
    must("event", cudaEventCreate(&from));
    must("event", cudaEventCreate(&to));
    for (int run = 0; run < 2; run++) {
        must("event", cudaEventRecord(from));
        for (int i = 0; i < 10; i++) {
            kernel<<<2 * b.blocks, THREADS, TILE_BYTES>>>(sum, bytes / TILE_BYTES);
        }
        must("event", cudaEventRecord(to));
        must("kernel", cudaEventSynchronize(to));
        must("time", cudaEventElapsedTime(&ms, from, to));
    }
    printf("| %-26s over %3lld MiB | %7.2f | TB/s added |\n", name, (long long)(bytes >> 20),
           10e-9 * (double)bytes / (double)ms);
    cudaEventDestroy(from);
    cudaEventDestroy(to);
    cudaFree(sum);
}

/* ---- clusters of two: addresses of the other block, its barriers ------------------------------------------- */

/* STAGES: twice the largest depth below, so that no thread can be a whole turn of a barrier behind the others. */
enum { COPY = 8 * 1024, STAGES = 8, MEMORY = (STAGES + 1) * COPY };

/* [mapa] Where `address` of this block lies in block `rank` of the cluster. */
static __device__ __forceinline__ uint32_t in_block(uint32_t address, uint32_t rank)
{
    uint32_t y;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(y) : "r"(address), "r"(rank));
    return y;
}

static __device__ __forceinline__ void cluster_sync()
{
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

static __device__ __forceinline__ void arrive_in_cluster(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Barriers full[STAGES], then empty[STAGES]; returns the address of the first. */
static __device__ uint32_t barriers_open(uint64_t *barriers, uint32_t empty_arrivals)
{
    const uint32_t at = shared_address(barriers);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(at + 8 * i, 1);
            mbarrier_init(at + 8 * (STAGES + i), empty_arrivals);
        }
        mbarriers_ready();
    }
    __syncthreads();
    cluster_sync();
    return at;
}

/* ---- each block sends 8 KB a round to the other one, `depth` rounds ahead of what it has received ---------- */

static __device__ __forceinline__ void send_bulk(uint32_t to, uint32_t from, uint32_t barrier)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "r"(from), "r"(COPY), "r"(barrier)
        : "memory");
}

static __device__ __forceinline__ void send_words(uint32_t to, uint32_t barrier)
{
#pragma unroll
    for (int i = 0; i < COPY / 16 / THREADS; i++) {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %2, %2, %2}, [%1];" ::"r"(
                         to + (i * THREADS + threadIdx.x) * 16),
                     "r"(barrier), "r"(threadIdx.x)
                     : "memory");
    }
}

/* Two rounds may write one buffer; only the time is looked at. */
template <bool BULK>
static __global__ void __cluster_dims__(2) __launch_bounds__(THREADS, 1)
    exchange_kernel(float *out, long long *clocks, int depth)
{
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ uint64_t barriers[2 * STAGES];
    const uint32_t full = barriers_open(barriers, 1), base = shared_address(memory), other = (blockIdx.x & 1) ^ 1;
    const uint32_t there = in_block(base + COPY, other), full_there = in_block(full, other);
    long long start = clock64();
    if (!BULK || threadIdx.x == 0) {
        for (int i = 0; i < ROUNDS + depth; i++) {
            if (i >= depth) {
                mbarrier_wait(full + 8 * ((i - depth) % STAGES), ((i - depth) / STAGES) & 1);
            }
            if (i < ROUNDS && threadIdx.x == 0) {
                mbarrier_expect(full + 8 * (i % STAGES), COPY);
            }
            if (i < ROUNDS && BULK) {
                send_bulk(there + i % STAGES * COPY, base, full_there + 8 * (i % STAGES));
            } else if (i < ROUNDS) {
                send_words(there + i % STAGES * COPY, full_there + 8 * (i % STAGES));
            }
        }
    }
    __syncthreads();
    long long stop = clock64();
    cluster_sync();
    out[blockIdx.x * THREADS + threadIdx.x] = (float)memory[COPY + threadIdx.x];
    if (threadIdx.x == 0) {
        clocks[blockIdx.x] = stop - start;
    }
}

/* ---- both blocks want the same 8 KB a round from global memory: each loads all, or each half for both ------- */

enum { REGION = 16 << 20 }; /* read by the whole GPU: stays in the L2 cache */

static __device__ __forceinline__ void load_for_both(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, "
                 "[%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier), "h"((uint16_t)3)
                 : "memory");
}

static __device__ __forceinline__ void load_tensor_for_both(uint32_t to, const CUtensorMap *map, int row,
                                                            uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
                 "[%1, {%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(map), "r"(0), "r"(row), "r"(barrier), "h"((uint16_t)3)
                 : "memory");
}

enum how { OWN, OWN_TENSOR, BOTH, BOTH_TENSOR };

/* half: 4 KB of the region, as 32 rows of 128 bytes. */
template <how HOW>
static __device__ __forceinline__ void load_half(uint32_t to, const unsigned char *region, const CUtensorMap *map,
                                                 int half, uint32_t barrier)
{
    if (HOW == OWN) {
        bulk_load(to, region + (int64_t)half * (COPY / 2), COPY / 2, barrier);
    } else if (HOW == OWN_TENSOR) {
        tma_load_2d(to, map, barrier, 0, half * 32);
    } else if (HOW == BOTH) {
        load_for_both(to, region + (int64_t)half * (COPY / 2), COPY / 2, barrier);
    } else {
        load_tensor_for_both(to, map, half * 32, barrier);
    }
}

template <how HOW>
static __global__ void __cluster_dims__(2) __launch_bounds__(THREADS, 1)
    load_kernel(float *out, long long *clocks, const unsigned char *region, const __grid_constant__ CUtensorMap map)
{
    const bool MULTICAST = HOW >= BOTH;
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ uint64_t barriers[2 * STAGES];
    const uint32_t full = barriers_open(barriers, MULTICAST ? 2 : 1), base = shared_address(memory);
    const uint32_t rank = blockIdx.x & 1, empty = full + 8 * STAGES, empty_there = in_block(empty, rank ^ 1);
    long long start = clock64();
    for (int i = 0; threadIdx.x == 0 && i < ROUNDS + STAGES; i++) {
        const int stage = i % STAGES;
        if (i >= STAGES) { /* takes what came, gives the stage back */
            mbarrier_wait(full + 8 * stage, (i / STAGES - 1) & 1);
            mbarrier_arrive(empty + 8 * stage);
            if (MULTICAST) {
                arrive_in_cluster(empty_there + 8 * stage);
            }
        }
        if (i < ROUNDS) {
            const int from = (blockIdx.x / 2 * 7919 + i) % (REGION / COPY) * 2;
            mbarrier_wait(empty + 8 * stage, (i / STAGES & 1) ^ 1);
            mbarrier_expect(full + 8 * stage, COPY);
            for (int half = 0; half < 2; half++) {
                if (!MULTICAST || half == (int)rank) {
                    load_half<HOW>(base + stage * COPY + half * COPY / 2, region, &map, from + half, full + 8 * stage);
                }
            }
        }
    }
    __syncthreads();
    long long stop = clock64();
    cluster_sync();
    out[blockIdx.x * THREADS + threadIdx.x] = (float)memory[threadIdx.x];
    if (threadIdx.x == 0) {
        clocks[blockIdx.x] = stop - start;
    }
}

static CUtensorMap region_map(const unsigned char *region)
{
    struct cuda nobody = {}; /* errors are kept by none: a wrong map fails the kernel */
    struct tensor_map_shape s = {};
    s.data = region;
    s.type = CU_TENSOR_MAP_DATA_TYPE_UINT8;
    s.rank = 2;
    s.extent[0] = s.box[0] = s.stride[0] = 128;
    s.extent[1] = REGION / 128;
    s.box[1] = 32;
    return tensor_map(&nobody, &s);
}

static void row(const char *name, double clocks)
{
    printf("| %-38s | %7.1f | %5.1f bytes a clock |\n", name, clocks, COPY / clocks);
}

int main()
{
    const struct bench b = bench_open();
    unsigned char *region;
    must("region", cudaMalloc(&region, REGION));
    must("region", cudaMemset(region, 1, REGION));
    printf("| transfer | | |\n|---|---|---|\n");
    additions(b, red_kernel, "red.global.add.v4.f32", 16 << 20);
    additions(b, red_kernel, "red.global.add.v4.f32", 256 << 20);
    additions(b, bulk_kernel, "cp.reduce.async.bulk", 16 << 20);
    additions(b, bulk_kernel, "cp.reduce.async.bulk", 256 << 20);
    printf("\n| 8 KB, each block of a cluster of two | clocks | |\n|---|---|---|\n");
    row("bulk copy to the other, one at a time", clocks_of(b, exchange_kernel<true>, MEMORY, 1));
    row("bulk copy to the other, two ahead", clocks_of(b, exchange_kernel<true>, MEMORY, 2));
    row("bulk copy to the other, four ahead", clocks_of(b, exchange_kernel<true>, MEMORY, 4));
    row("st.async.v4 to the other, one at a time", clocks_of(b, exchange_kernel<false>, MEMORY, 1));
    row("st.async.v4 to the other, two ahead", clocks_of(b, exchange_kernel<false>, MEMORY, 2));
    row("st.async.v4 to the other, four ahead", clocks_of(b, exchange_kernel<false>, MEMORY, 4));
    const CUtensorMap map = region_map(region);
    row("from L2, each block its own, bulk", clocks_of(b, load_kernel<OWN>, MEMORY, region, map));
    row("from L2, each block its own, tensor", clocks_of(b, load_kernel<OWN_TENSOR>, MEMORY, region, map));
    row("from L2, half each for both, bulk", clocks_of(b, load_kernel<BOTH>, MEMORY, region, map));
    row("from L2, half each for both, tensor", clocks_of(b, load_kernel<BOTH_TENSOR>, MEMORY, region, map));
    return 0;
}
