/* tests/model: inputs and comparisons that many tests share. */
#pragma once

#include "core/tensor.h"

/* Normal numbers of a stream, times scale, rounded to BF16. */
void fill_bf16(bf16 *x, int64_t n, uint64_t stream, float scale);

/* |got - want| / |want| */
double rel_l2_bf16(const bf16 *got, const double *want, int64_t n);
double rel_l2_f32(const float *got, const double *want, int64_t n);

/* Each BF16 value is `want` rounded once: half a unit in the last place is at most 2^-8 of the value. `noise` is what
 * FP32 arithmetic before the rounding may add. */
void check_rounded_once(const bf16 *got, const double *want, int64_t n, double noise);
void check_near_f32(const float *got, const double *want, int64_t n, double relative, double noise);

void bf16_to_double(const bf16 *x, double *y, int64_t n);

/* d f / d x[i] by a central difference with step h; x[i] is put back. */
double central_difference(double (*f)(const void *), const void *context, double *x, double h);

/* OpenMP threads from here on; builds without OpenMP (ThreadSanitizer) stay on one. Models as small as those of these
 * tests run fastest on one. */
void use_threads(int n);
