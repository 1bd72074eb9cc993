/* attention: statistics of a call, from the parts that blocks left in scratch: one block adds them in a fixed order. */
#include "core/cuda.cuh"

extern "C" {
#include "attention/attention_cuda.h"
}

enum { THREADS = 256, FIELDS = sizeof(struct attention_stats) / sizeof(double) };

/* Sum, or with MAXIMUM the largest (NaN wins), over the block; the result is thread 0's. */
template <bool MAXIMUM> __device__ double reduce(double x, double *room)
{
    room[threadIdx.x] = x;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            const double other = room[threadIdx.x + half], own = room[threadIdx.x];
            room[threadIdx.x] = !MAXIMUM ? own + other : other > own || other != other ? other : own;
        }
        __syncthreads();
    }
    const double result = room[0];
    __syncthreads();
    return result;
}

/* Field 0 is logit_max. */
static __global__ void stats_kernel(const double *parts, int64_t count, double *stats)
{
    __shared__ double room[THREADS];
    for (int field = 0; field < FIELDS; field++) {
        double own = 0.0;
        for (int64_t i = threadIdx.x; i < count; i += THREADS) {
            const double x = parts[i * FIELDS + field];
            own = field > 0 ? own + x : x > own || x != x ? x : own;
        }
        const double all = field > 0 ? reduce<false>(own, room) : reduce<true>(own, room);
        if (threadIdx.x == 0) {
            const double before = stats[field];
            stats[field] = field > 0 ? before + all : all > before || all != all ? all : before;
        }
    }
}

void attention_stats_cuda(const struct cuda *on, const struct attention_stats *parts, int64_t count,
                          struct attention_stats *stats)
{
    static_assert(offsetof(struct attention_stats, logit_max) == 0, "stats_kernel takes its maximum");
    stats_kernel<<<1, THREADS, 0, on->stream>>>((const double *)parts, count, (double *)stats);
    cuda_launched(on, "attention statistics");
}

static __global__ void facts_kernel(const head_facts *facts, int64_t count, attention_stats *stats)
{
    __shared__ double room[THREADS];
    double own = 0.0;
    for (int64_t i = threadIdx.x; i < count; i += THREADS) {
        own += (double)facts[i].non_finite;
    }
    const double all = reduce<false>(own, room);
    if (threadIdx.x == 0) {
        stats->non_finite += all;
    }
}

void attention_stats_facts_cuda(const struct cuda *on, const struct head_facts *facts, int64_t count,
                                struct attention_stats *stats)
{
    facts_kernel<<<1, THREADS, 0, on->stream>>>(facts, count, stats);
    cuda_launched(on, "attention non-finite values");
}
