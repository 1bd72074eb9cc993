/* model: RMSNorm, and the residual sums around it. Also the norm of each head of Q and K: `groups` heads in a row. */
#pragma once

#include "core/tensor.h"

#include <stdbool.h>

/* y = x / sqrt(mean(x^2) + eps) * gain over each group of `width` neighbours; FP32, one rounding to BF16.
 *   x, y      (rows, groups, width) bf16; row strides in elements; y may be x
 *   inv_rms   (rows, groups) fp32 out; what backward needs
 *   gain      (width) bf16 */
struct rmsnorm_fwd {
    int64_t rows, groups, width, x_stride, y_stride;
    const bf16 *x, *gain;
    float eps;
    bf16 *y;
    float *inv_rms;
};
void rmsnorm_fwd_cpu(const struct rmsnorm_fwd *a);

/*   dx     = the gradient for dy, or with `residual` (same stride as dx; may be dx) residual + that, rounded once.
 *            dx may be dy, not x.
 *   dgain  (width) fp32: the sum over rows, groups in order; overwritten, or added to with `accumulate` */
struct rmsnorm_bwd {
    int64_t rows, groups, width, x_stride, dy_stride, dx_stride;
    const bf16 *x, *gain, *dy, *residual;
    const float *inv_rms;
    bf16 *dx;
    float *dgain;
    bool accumulate;
};
void rmsnorm_bwd_cpu(const struct rmsnorm_bwd *a);

/* sum = a + b, rounded to BF16: how a branch joins the residual stream. sum may be a or b. */
void residual_add_cpu(const bf16 *a, const bf16 *b, bf16 *sum, int64_t n);
