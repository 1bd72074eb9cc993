/* model: RMSNorm, and the residual sums around it. Also the norm of each head of Q and K: `groups` heads in a row. */
#pragma once

#include "core/tensor.h"

#include <stdbool.h>

struct cuda;

/* y = x / sqrt(mean(x^2) + eps) * gain over each group of `width` neighbours; FP32, one rounding to BF16.
 *   x, y      (rows, groups, width) bf16; row strides in elements; y may be x
 *   inv_rms   (rows, groups) fp32 out; what backward needs
 *   gain      (width) bf16
 * CUDA: arrays aligned to 16 bytes, width and strides multiples of 8, width at most 16384; here and in backward. */
struct rmsnorm_fwd {
    int64_t rows, groups, width, x_stride, y_stride;
    const bf16 *x, *gain;
    float eps;
    bf16 *y;
    float *inv_rms;
    /* CUDA, one group: NULL, or (rows, width) packed: x + branch is rounded to BF16, kept in `sum`, and normalised; the
     * bits of residual_add and then this without a branch. */
    const bf16 *branch;
    bf16 *sum;   /* (rows, width), stride x_stride; may be x */
    float *amax; /* CUDA: NULL, or in device memory, zeroed before: takes the largest magnitude in y, as
                    linear_amax_cuda finds it (model/linear_format.h) */
};
void rmsnorm_fwd_cpu(const struct rmsnorm_fwd *a);
void rmsnorm_fwd_cuda(const struct rmsnorm_fwd *a, const struct cuda *on);

/*   dx     = the gradient for dy, or with `residual` (same stride as dx; may be dx) residual + that, rounded once.
 *            dx may be dy, not x.
 *   dgain  (width) fp32: the sum over rows, groups in order; overwritten, or added to with `accumulate`. CUDA: the
 *          rows are cut in at most 264 parts (heads: 396), each summed in order (heads: in interleaved teams), then
 *          the parts: the bits depend on the shape only. */
struct rmsnorm_bwd {
    int64_t rows, groups, width, x_stride, dy_stride, dx_stride;
    const bf16 *x, *gain, *dy, *residual;
    const float *inv_rms;
    bf16 *dx;
    void *dgain;
    enum dtype grad_type; /* of dgain: FP32, on CUDA also BF16 */
    bool accumulate;
    float *scratch; /* CUDA: rmsnorm_bwd_scratch_bytes_cuda */
    float *amax;    /* CUDA: as above, of dx */
};
void rmsnorm_bwd_cpu(const struct rmsnorm_bwd *a);
void rmsnorm_bwd_cuda(const struct rmsnorm_bwd *a, const struct cuda *on);
size_t rmsnorm_bwd_scratch_bytes_cuda(int64_t rows, int64_t groups, int64_t width);

/* sum = a + b, rounded to BF16: how a branch joins the residual stream. sum may be a or b. */
void residual_add_cpu(const bf16 *a, const bf16 *b, bf16 *sum, int64_t n);
void residual_add_cuda(const bf16 *a, const bf16 *b, bf16 *sum, int64_t n, const struct cuda *on);
