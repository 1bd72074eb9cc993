/* Quantisers with a power-of-two scale per 32 elements: MXFP4 in its amplitude and OCP families, MXFP8. */
#include "numerics/block_copy.h"
#include "numerics/blocks.h"
#include "numerics/formats.h"

enum { BLOCK = 32, LANES = 8 };

/* For amax = 2^k m, m in [1, 2): the E8M0 code of 2^(k + offset), one more if the mantissa bits of m exceed `limit`. */
static inline uint8_t mx_code(float amax, int offset, uint32_t limit)
{
    uint32_t magnitude = float_bits(amax);
    int code = (int)(magnitude >> 23) + offset + ((magnitude & 0x7fffffu) > limit ? 1 : 0);
    code = code < 0 ? 0 : code > 0xfe ? 0xfe : code;
    return (uint8_t)(magnitude > FLOAT_INF ? 0xff : code);
}

/* |x| in units of the grid on which E2M1 rounds: x / 2^e, or 6 x / 2^e in the amplitude family. The power of two comes
 * first: 6 x could overflow. 2^-e is code 254 - c; NaN stays NaN. */
static inline float mx_inverse(uint8_t e8m0)
{
    return e8m0_to_float((uint8_t)(254u - e8m0));
}

static inline float mx_unit(bool amplitude)
{
    return amplitude ? E2M1_MAX : 1.0f;
}

/* sum t^2 - sum (t - q)^2 in grid units: 1/4 <= t < 12 where q > 0, so the sum is exact in FP32 for BF16 inputs. */
static float mx_gain(const float *x, float inverse, float unit)
{
    float sum[LANES] = {0};
    for (int i = 0; i < BLOCK; i += LANES) {
        for (int j = 0; j < LANES; j++) {
            float t = float_from_bits(float_bits(x[i + j] * inverse * unit) & ~FLOAT_SIGN);
            float q = e2m1_round(t);
            sum[j] += q * (2.0f * t - q);
        }
    }
    return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

/* The better of two neighbouring codes; the lower one on a tie. One exponent up, units are twice as large. */
static uint8_t mx_better(const float *x, uint8_t low, uint8_t high, float unit)
{
    if (low == high) {
        return low;
    }
    float low_gain = mx_gain(x, mx_inverse(low), unit), high_gain = 4.0f * mx_gain(x, mx_inverse(high), unit);
    return high_gain > low_gain ? high : low;
}

static inline uint8_t mx_scale_code(const float *block, enum mx_rule rule)
{
    float amax = amax_of(block, BLOCK, 1);
    /* 6 2^(k-2) reaches up to m = 1.5: the OCP ceiling is k - 2, one more beyond 1.5 (mantissa bits 0x400000). */
    uint8_t ocp_floor = mx_code(amax, -2, 0x7fffffu), ocp_ceil = mx_code(amax, -2, 0x400000u);
    uint8_t floor = e8m0_from_float(amax, E8M0_FLOOR), ceil = e8m0_from_float(amax, E8M0_CEIL);
    switch (rule) {
    case MX_OCP_FLOOR:
        return ocp_floor;
    case MX_OCP_CEIL:
        return ocp_ceil;
    case MX_AMP_FLOOR:
        return floor;
    case MX_AMP_CEIL:
        return ceil;
    case MX_AMP_NEAREST:
        return e8m0_from_float(amax, E8M0_NEAREST);
    case MX_AMP_MSE:
        return mx_better(block, floor, ceil, mx_unit(true));
    case MX_OCP_MSE:
        return mx_better(block, ocp_floor, ocp_ceil, mx_unit(false));
    }
    assert_failed("known mx_rule", __FILE__, __LINE__);
}

void mxfp4_encode(const float *x, int n, int64_t stride, enum mx_rule rule, uint8_t *e8m0, uint8_t *codes)
{
    float block[BLOCK];
    block_load(x, n, stride, BLOCK, block);
    *e8m0 = mx_scale_code(block, rule);
    float inverse = mx_inverse(*e8m0), unit = mx_unit(mx_rule_is_amplitude(rule));
    bool zero = amax_of(block, BLOCK, 1) == 0.0f;
    for (int i = 0; i < n; i++) {
        codes[i * stride] = zero ? 0 : e2m1_from_float(block[i] * inverse * unit);
    }
}

void mxfp4_round(const float *x, int n, int64_t stride, enum mx_rule rule, float *y)
{
    float block[BLOCK];
    block_load(x, n, stride, BLOCK, block);
    uint8_t code = mx_scale_code(block, rule);
    bool amplitude = mx_rule_is_amplitude(rule);
    float inverse = mx_inverse(code), unit = mx_unit(amplitude), scale = e8m0_to_float(code);
    if (amax_of(block, BLOCK, 1) == 0.0f) {
        memset(block, 0, sizeof block);
    }
    /* alpha (q / 6), as alpha / 6 may be subnormal. q times the rounded 1/6 equals the rounded q / 6 for every q. */
    float fraction = amplitude ? 1.0f / 6.0f : 1.0f;
    for (int i = 0; i < BLOCK; i++) {
        block[i] = scale * (e2m1_round(block[i] * inverse * unit) * fraction);
    }
    block_store(block, n, stride, BLOCK, y);
}

void mxfp8_encode(const float *x, int n, int64_t stride, uint8_t *e8m0, uint8_t *codes)
{
    float block[BLOCK];
    block_load(x, n, stride, BLOCK, block);
    /* 448 = 1.75 2^8 */
    *e8m0 = mx_code(amax_of(block, BLOCK, 1), -8, 0x600000u);
    float inverse = mx_inverse(*e8m0);
    bool zero = amax_of(block, BLOCK, 1) == 0.0f;
    for (int i = 0; i < n; i++) {
        codes[i * stride] = zero ? 0 : e4m3_from_float(block[i] * inverse);
    }
}
