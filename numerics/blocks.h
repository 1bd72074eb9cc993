/* numerics: block quantisers NVFP4, MXFP4 and MXFP8 (docs/numerics.md, section 3).
 *
 * Elements of a block lie `stride` apart in x and in codes. Codes are one per byte here (E2M1: 0..15); packing into
 * nibbles is storage (e2m1_pack). A block may be short (n below the full 16 or 32): missing elements do not exist.
 * Inputs must be finite: callers check with the amax (amax_of propagates NaN). For BF16 values every rule gives what
 * exact real arithmetic gives; for other FP32 values ties may be judged after one FP32 rounding (6 x, squared errors).
 * g is a power of two. */
#pragma once

#include "core/tensor.h"

/* max |x| over n elements; NaN if any element is NaN, Inf if any is infinite. */
float amax_of(const float *x, int64_t n, int64_t stride);
float amax_of_bf16(const bf16 *x, int64_t n, int64_t stride);

/* The largest 2^k with 2^k amax <= limit, k at most 126 so that 2^-k is a normal number; 1 if amax is 0, Inf or NaN. */
enum { POW2_SCALE_MAX = 126 };
float pow2_scale(float amax, float limit);

enum nvfp4_rule { NVFP4_AMAX, NVFP4_MSE };

/* G, the second-level scale of a head or tensor: pow2_scale(amax, 2688). */
float nvfp4_global_scale(float amax);

/* n <= 16 elements; value of element i = e2m1(codes[i]) ue4m3(*scale) / g. */
void nvfp4_encode(const float *x, int n, int64_t stride, float g, enum nvfp4_rule rule, uint8_t *scale, uint8_t *codes);

/* The encoded values themselves, written back as FP32 (exact in BF16 too): y may be x. */
void nvfp4_round(const float *x, int n, int64_t stride, float g, enum nvfp4_rule rule, float *y);

/* The amax rule with a stochastically rounded payload (the scale is rounded to nearest); bits: n random words. */
void nvfp4_round_sr(const float *x, int n, int64_t stride, float g, const uint32_t *bits, float *y);

/* One scale for a tile of up to 16 x 16 (weights of linear layers, so that W and its transpose hold the same values).
 * Rows lie `stride` apart in x and in y; y may be x. */
void nvfp4_round_tile16(const float *x, int rows, int cols, int64_t stride, float g, float *y);

/* Folded scales (inference): at D = 128, blocks 64 features apart share the scale with the least joint squared error.
 * x and y are 128 contiguous features of one row. */
void nvfp4_round_folded(const float *x, float g, float *y);

/* The exponent of an MXFP4 block from its amax. Amplitude family: alpha = 2^e, value alpha q / 6. OCP: value 2^e q. */
enum mx_rule {
    MX_OCP_FLOOR, /* e = floor(log2 amax) - 2 */
    MX_OCP_CEIL,  /* e = ceil(log2(amax / 6)) */
    MX_AMP_FLOOR,
    MX_AMP_CEIL,
    MX_AMP_NEAREST, /* the paper's */
    MX_AMP_MSE,     /* the better of AMP_CEIL and AMP_FLOOR by squared error */
    MX_OCP_MSE,
};
static inline bool mx_rule_is_amplitude(enum mx_rule rule)
{
    return rule >= MX_AMP_FLOOR && rule <= MX_AMP_MSE;
}

/* n <= 32 elements; *e8m0 = e + 127, clamped; value = 2^e q (OCP) or 2^e q / 6 (amplitude, evaluated as alpha (q/6)).
 * A block of zeros has scale byte 0 and codes 0. */
void mxfp4_encode(const float *x, int n, int64_t stride, enum mx_rule rule, uint8_t *e8m0, uint8_t *codes);
void mxfp4_round(const float *x, int n, int64_t stride, enum mx_rule rule, float *y);

/* MXFP8: E4M3 payload, one E8M0 per 32, e = ceil(log2(amax / 448)). */
void mxfp8_encode(const float *x, int n, int64_t stride, uint8_t *e8m0, uint8_t *codes);
