/* model: losses of a batch by sample, from the head's losses by row. */
#include "core/cuda.cuh"

extern "C" {
#include "model/model_cuda.h"
}

enum { THREADS = 256 };

/* One block a sample. A thread adds every THREADS-th row in order, then a tree adds threads: the order depends on the
 * length only. */
static __global__ void model_loss_rows_kernel(const float *losses, const int32_t *targets, int64_t length,
                                              model_loss_row *out)
{
    __shared__ double sums[THREADS];
    __shared__ int64_t counts[THREADS];
    const int64_t first = blockIdx.x * length;
    double sum = 0;
    int64_t count = 0;
    for (int64_t t = threadIdx.x; t < length; t += THREADS) {
        if (targets[first + t] >= 0) {
            sum += (double)losses[first + t];
            count++;
        }
    }
    sums[threadIdx.x] = sum;
    counts[threadIdx.x] = count;
    for (unsigned int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            sums[threadIdx.x] += sums[threadIdx.x + half];
            counts[threadIdx.x] += counts[threadIdx.x + half];
        }
    }
    if (threadIdx.x == 0) {
        out[blockIdx.x] = {sums[0], counts[0]};
    }
}

extern "C" void model_loss_rows_cuda(const float *losses, const int32_t *targets, int64_t batch, int64_t length,
                                     struct model_loss_row *out, const struct cuda *on)
{
    model_loss_rows_kernel<<<(unsigned int)batch, THREADS, 0, on->stream>>>(losses, targets, length, out);
    cuda_launched(on, "model_loss_rows");
}
