/* bench: what the sums of FP8 products lose in the GPU's tensor cores, promoted to FP32 now and then (as projections
 * run) and not (`fast`), and those of BF16.
 *
 *   build/release/bench/gemm_error_cuda
 *
 * A sample of the elements of a 4096 x 4096 product against FP64 sums of the same operands, which are normal numbers
 * plus a mean: with a mean, sums grow with k, and what is cut from each term no longer averages out. */
#include "bench/gpu.h"
#include "core/gemm_cuda.h"
#include "core/rng.h"
#include "numerics/formats.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { SIZE = 4096, SAMPLES = 512, ROWS = 64 }; /* rows repeat: distinct ones of an operand */

static struct cuda *gpu;

struct operand {
    enum dtype type;
    int64_t k;
    void *host, *device; /* (ROWS, k); (SIZE, k) */
};

static struct operand operand_make(enum dtype type, int64_t k, uint64_t stream, float mean)
{
    const size_t bytes = (size_t)(ROWS * k) * dtype_bytes(type);
    struct operand o = {.type = type, .k = k, .host = malloc(bytes)};
    ASSERT(o.host);
    for (int64_t i = 0; i < ROWS * k; i++) {
        float x = rng_normal(1, stream, (uint64_t)i) + mean;
        if (type == DTYPE_BF16) {
            ((bf16 *)o.host)[i] = bf16_from_float(x);
        } else {
            ((uint8_t *)o.host)[i] = type == DTYPE_E4M3 ? e4m3_from_float(64 * x) : e5m2_from_float(8192 * x);
        }
    }
    must(cuda_alloc(&o.device, bytes * (SIZE / ROWS), "an operand"));
    for (int i = 0; i < SIZE / ROWS; i++) {
        cuda_upload(gpu, (uint8_t *)o.device + (size_t)i * bytes, o.host, bytes);
    }
    must(cuda_sync(gpu, "upload"));
    return o;
}

static void operand_free(struct operand *o)
{
    free(o->host);
    cuda_free(o->device);
}

static double element(const struct operand *o, int64_t row, int64_t t)
{
    const int64_t i = row % ROWS * o->k + t;
    return o->type == DTYPE_BF16   ? (double)bf16_to_float(((const bf16 *)o->host)[i])
           : o->type == DTYPE_E4M3 ? (double)e4m3_to_float(((const uint8_t *)o->host)[i])
                                   : (double)e5m2_to_float(((const uint8_t *)o->host)[i]);
}

/* Relative L2 error of the sample, and the mean of got / want - 1 weighted by want: shrinking sums are negative. */
static void compare(const struct operand *a, const struct operand *b, const float *c, double *error, double *growth)
{
    double difference = 0, whole = 0, along = 0;
    for (uint64_t s = 0; s < SAMPLES; s++) {
        int64_t i = rng_bits(2, 1, 1, s) % SIZE, j = rng_bits(2, 2, 1, s) % SIZE;
        double want = 0;
        for (int64_t t = 0; t < a->k; t++) {
            want += element(a, i, t) * element(b, j, t);
        }
        double d = (double)c[i * SIZE + j] - want;
        difference += d * d;
        whole += want * want;
        along += d * want;
    }
    *error = sqrt(difference / whole);
    *growth = along / whole;
}

static void line(enum dtype a_type, enum dtype b_type, int64_t k, float mean, bool fast)
{
    static float c[SIZE * SIZE];
    const float one = 1;
    const bool fp8 = a_type != DTYPE_BF16;
    void *device, *scale;
    double error, growth;
    struct operand a = operand_make(a_type, k, 1, mean), b = operand_make(b_type, k, 2, mean);
    must(cuda_alloc(&device, sizeof c, "a result"));
    must(cuda_alloc(&scale, sizeof one, "a scale"));
    cuda_upload(gpu, scale, &one, sizeof one);
    struct gemm_cuda g = {.m = SIZE,
                          .n = SIZE,
                          .k = k,
                          .a = a.device,
                          .b = b.device,
                          .c = device,
                          .lda = k,
                          .ldb = k,
                          .ldc = SIZE,
                          .a_type = a_type,
                          .b_type = b_type,
                          .c_type = DTYPE_F32,
                          .trans_b = true,
                          .alpha = 1,
                          .a_scale = fp8 ? scale : NULL,
                          .b_scale = fp8 ? scale : NULL,
                          .fast = fast};
    must(gemm_cuda_plan(gpu, &g));
    gemm_cuda(gpu, &g);
    cuda_download(gpu, c, device, sizeof c);
    must(cuda_sync(gpu, "a product"));
    compare(&a, &b, c, &error, &growth);
    printf("%-12s %6ld %5.2f %10.2e %+10.2e\n",
           !fp8                   ? "bf16"
           : a_type == DTYPE_E5M2 ? (fast ? "e5m2 fast" : "e5m2")
                                  : (fast ? "e4m3 fast" : "e4m3"),
           (long)k, (double)mean, error, growth);
    operand_free(&a);
    operand_free(&b);
    cuda_free(device);
    cuda_free(scale);
}

int main(void)
{
    static const float means[] = {0, 0.25F, 1};
    must(cuda_open(&gpu, 0));
    printf("%-12s %6s %5s %10s %10s\n", "A (B: E4M3)", "k", "mean", "rel-L2", "growth");
    for (int64_t k = 4096; k <= 16384; k *= 4) {
        for (int i = 0; i < 3; i++) {
            line(DTYPE_BF16, DTYPE_BF16, k, means[i], false);
            line(DTYPE_E4M3, DTYPE_E4M3, k, means[i], false);
            line(DTYPE_E4M3, DTYPE_E4M3, k, means[i], true);
            line(DTYPE_E5M2, DTYPE_E4M3, k, means[i], false);
            line(DTYPE_E5M2, DTYPE_E4M3, k, means[i], true);
        }
    }
    cuda_close(gpu);
    return 0;
}
