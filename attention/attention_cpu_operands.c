/* attention: operands as the products see them (docs/numerics.md, sections 3 and 4). All results are exact in BF16. */
#include "attention/attention_cpu.h"
#include "numerics/blocks.h"
#include "numerics/formats.h"

#include <math.h>

/* The published multiplier of V; smaller only where 4 |v| would leave E4M3. */
#define VALUE_LIFT 4.0f

struct rows head_rows(const struct head_view *view, int64_t batch, int64_t head)
{
    return (struct rows){view->data + batch * view->batch_stride + head * view->head_stride, view->token_stride};
}

int64_t rows_count_non_finite(struct rows x, int64_t T, int64_t D)
{
    int64_t count = 0;
    for (int64_t i = 0; i < T; i++) {
        const bf16 *row = x.data + i * x.stride;
        int found = 0;
        for (int64_t d = 0; d < D; d++) {
            found += (row[d] & 0x7f80) == 0x7f80;
        }
        count += found;
    }
    return count;
}

/* Infinity if anything is not finite. */
float rows_amax(struct rows x, int64_t T, int64_t D)
{
    float max = 0;
    for (int64_t i = 0; i < T; i++) {
        float m = amax_of_bf16(x.data + i * x.stride, D, 1);
        max = m <= max ? max : m < INFINITY ? m : INFINITY;
    }
    return max;
}

float rows_norm_max(struct rows x, int64_t T, int64_t D)
{
    double max = 0;
    for (int64_t i = 0; i < T; i++) {
        const bf16 *row = x.data + i * x.stride;
        double lane[16] = {0}; /* FP64: squares of BF16 leave the range of FP32 */
        for (int64_t d = 0; d < D; d += 16) {
            for (int l = 0; l < 16; l++) {
                double y = (double)bf16_to_float(row[d + l]);
                lane[l] += y * y;
            }
        }
        double sum = 0;
        for (int l = 0; l < 16; l++) {
            sum += lane[l];
        }
        max = sum > max ? sum : max;
    }
    return (float)sqrt(max);
}

static void load(struct rows x, int64_t T, int64_t D, float *y)
{
    for (int64_t i = 0; i < T; i++) {
        for (int64_t d = 0; d < D; d++) {
            y[i * D + d] = bf16_to_float(x.data[i * x.stride + d]);
        }
    }
}

static void store(const float *x, int64_t n, float unit, bf16 *y)
{
    for (int64_t i = 0; i < n; i++) {
        y[i] = bf16_from_float(x[i] * unit);
    }
}

static void fill_nan(bf16 *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        y[i] = 0x7fff;
    }
}

void publish_view(struct rows x, int64_t T, int64_t D, float m, bf16 *y)
{
    float inverse = 1.0f / m;
    for (int64_t i = 0; i < T; i++) {
        const bf16 *row = x.data + i * x.stride;
        for (int64_t d = 0; d < D; d++) {
            y[i * D + d] = bf16_from_float(e4m3_round(bf16_to_float(row[d]) * m) * inverse);
        }
    }
}

void publish_scores(const struct attention_recipe *recipe, struct rows x, int64_t T, int64_t D, float *staging, bf16 *y)
{
    load(x, T, D, staging);
    if (recipe->qk == QK_BF16) {
        store(staging, T * D, 1.0f, y);
        return;
    }
    float amax = rows_amax(x, T, D);
    if (!(amax < INFINITY)) {
        fill_nan(y, T * D);
        return;
    }
    float g = nvfp4_global_scale(amax);
    enum nvfp4_rule rule = recipe->qk_scale == QK_SCALE_MSE ? NVFP4_MSE : NVFP4_AMAX;
    for (int64_t i = 0; i < T; i++) {
        float *row = staging + i * D;
        if (recipe->qk_scale == QK_SCALE_FOLDED) {
            nvfp4_round_folded(row, g, row);
            continue;
        }
        for (int64_t d = 0; d < D; d += 16) {
            nvfp4_round(row + d, 16, 1, g, rule, row + d);
        }
    }
    store(staging, T * D, 1.0f, y);
    if (recipe->qk == QK_NVFP4_E4M3) {
        struct rows decoded = {y, D};
        publish_view(decoded, T, D, pow2_scale(rows_amax(decoded, T, D), E4M3_MAX), y);
    }
}

void publish_centred(struct rows x, int64_t T, int64_t D, float *staging, bf16 *y)
{
    float *mean = staging;
    for (int64_t d = 0; d < D; d++) {
        mean[d] = 0;
    }
    for (int64_t i = 0; i < T; i++) {
        for (int64_t d = 0; d < D; d++) {
            mean[d] += bf16_to_float(x.data[i * x.stride + d]);
        }
    }
    for (int64_t d = 0; d < D; d++) {
        mean[d] /= (float)T;
    }
    for (int64_t i = 0; i < T; i++) {
        for (int64_t d = 0; d < D; d++) {
            y[i * D + d] = bf16_from_float(bf16_to_float(x.data[i * x.stride + d]) - mean[d]);
        }
    }
}

void publish_value_e4m3(struct rows x, int64_t T, int64_t D, float unit, bf16 *y)
{
    float amax = rows_amax(x, T, D);
    float m = amax > E4M3_MAX / VALUE_LIFT && amax < INFINITY ? pow2_scale(amax, E4M3_MAX) : VALUE_LIFT;
    publish_view(x, T, D, m, y);
    for (int64_t i = 0; unit != 1.0f && i < T * D; i++) {
        y[i] = bf16_from_float(bf16_to_float(y[i]) * unit);
    }
}

/* ---- V in blocks along keys: `n` keys of one feature, D apart, rounded in place --------------------------- */

static void ue5m3_column(float *x, int n, int64_t D, float g)
{
    float s = ue5m3_to_float(ue5m3_from_float(g * amax_of(x, n, D) / E2M1_MAX)) / g;
    for (int i = 0; i < n; i++) {
        x[i * D] = s > 0 ? e2m1_round(x[i * D] / s) * s : 0.0f;
    }
}

void publish_value(const struct attention_recipe *recipe, struct rows x, int64_t T, int64_t D, float *staging, bf16 *y)
{
    float unit = attention_unit(recipe);
    int64_t sinks = recipe->pv == PV_FP8 ? T : recipe->sink_keys_fp8 < T ? recipe->sink_keys_fp8 : T;
    float amax = rows_amax(x, T, D);
    if (!(amax < INFINITY)) {
        fill_nan(y, T * D);
        return;
    }
    load(x, T, D, staging);
    float g = pow2_scale(amax, recipe->pv == PV_FP4_UE5M3 ? UE5M3_MAX * E2M1_MAX : UE4M3_MAX * E2M1_MAX);
    int64_t block = attention_p_block(recipe->pv);
    for (int64_t j = sinks; j < T; j += block) {
        int n = (int)(T - j < block ? T - j : block);
        for (int64_t d = 0; d < D; d++) {
            float *column = staging + j * D + d;
            if (recipe->pv == PV_MXFP4) {
                mxfp4_round(column, n, D, recipe->mx_rule == MX_NEAREST ? MX_AMP_NEAREST : MX_OCP_FLOOR, column);
            } else if (recipe->pv == PV_NVFP4) {
                nvfp4_round(column, n, D, g, NVFP4_AMAX, column);
            } else {
                ue5m3_column(column, n, D, g);
            }
        }
    }
    publish_value_e4m3(x, sinks, D, unit, y);
    /* Six times the FP32 neighbour of alpha q / 6 rounds to alpha q, which is exact in BF16. */
    store(staging + sinks * D, (T - sinks) * D, unit, y + sinks * D);
}
