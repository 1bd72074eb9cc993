/* model: RMSNorm on the CPU.
 * Sums along a row run in 16 lanes (element c in lane c mod 16), then a tree: the order is fixed and compilers
 * vectorise it without reordering anything. */
#include "model/rmsnorm.h"

#include <math.h>

enum { LANES = 16, COLUMNS = 64 };

static float lanes_sum(float *lane)
{
    for (int half = LANES / 2; half > 0; half /= 2) {
        for (int l = 0; l < half; l++) {
            lane[l] += lane[l + half];
        }
    }
    return lane[0];
}

static float sum_of_squares(const bf16 *x, int64_t n)
{
    float lane[LANES] = {0};
    int64_t c = 0;
    for (; c + LANES <= n; c += LANES) {
        for (int l = 0; l < LANES; l++) {
            float v = bf16_to_float(x[c + l]);
            lane[l] += v * v;
        }
    }
    for (int l = 0; c + l < n; l++) {
        float v = bf16_to_float(x[c + l]);
        lane[l] += v * v;
    }
    return lanes_sum(lane);
}

void rmsnorm_fwd_cpu(const struct rmsnorm_fwd *a)
{
#pragma omp parallel for collapse(2)
    for (int64_t r = 0; r < a->rows; r++) {
        for (int64_t g = 0; g < a->groups; g++) {
            const bf16 *x = a->x + r * a->x_stride + g * a->width;
            bf16 *y = a->y + r * a->y_stride + g * a->width;
            float inv = 1.0f / sqrtf(sum_of_squares(x, a->width) / (float)a->width + a->eps);
            a->inv_rms[r * a->groups + g] = inv;
            for (int64_t c = 0; c < a->width; c++) {
                y[c] = bf16_from_float(bf16_to_float(x[c]) * inv * bf16_to_float(a->gain[c]));
            }
        }
    }
}

/* Threads own columns: each gain's sum runs over the rows in order. */
static void gain_gradient(const struct rmsnorm_bwd *a)
{
#pragma omp parallel for
    for (int64_t c0 = 0; c0 < a->width; c0 += COLUMNS) {
        int64_t n = a->width - c0 < COLUMNS ? a->width - c0 : COLUMNS;
        float sum[COLUMNS] = {0};
        for (int64_t r = 0; r < a->rows; r++) {
            for (int64_t g = 0; g < a->groups; g++) {
                const bf16 *x = a->x + r * a->x_stride + g * a->width + c0;
                const bf16 *dy = a->dy + r * a->dy_stride + g * a->width + c0;
                float inv = a->inv_rms[r * a->groups + g];
                for (int64_t c = 0; c < n; c++) {
                    sum[c] += bf16_to_float(dy[c]) * (bf16_to_float(x[c]) * inv);
                }
            }
        }
        for (int64_t c = 0; c < n; c++) {
            float *dgain = (float *)a->dgain + c0;
            dgain[c] = a->accumulate ? dgain[c] + sum[c] : sum[c];
        }
    }
}

/* sum of gain dy x */
static float weighted_dot(const bf16 *gain, const bf16 *dy, const bf16 *x, int64_t n)
{
    float lane[LANES] = {0};
    int64_t c = 0;
    for (; c + LANES <= n; c += LANES) {
        for (int l = 0; l < LANES; l++) {
            lane[l] += bf16_to_float(gain[c + l]) * bf16_to_float(dy[c + l]) * bf16_to_float(x[c + l]);
        }
    }
    for (int l = 0; c + l < n; l++) {
        lane[l] += bf16_to_float(gain[c + l]) * bf16_to_float(dy[c + l]) * bf16_to_float(x[c + l]);
    }
    return lanes_sum(lane);
}

void rmsnorm_bwd_cpu(const struct rmsnorm_bwd *a)
{
    gain_gradient(a); /* first: dx may overwrite dy */
#pragma omp parallel for collapse(2)
    for (int64_t r = 0; r < a->rows; r++) {
        for (int64_t g = 0; g < a->groups; g++) {
            const bf16 *x = a->x + r * a->x_stride + g * a->width;
            const bf16 *dy = a->dy + r * a->dy_stride + g * a->width;
            const bf16 *residual = a->residual ? a->residual + r * a->dx_stride + g * a->width : NULL;
            bf16 *dx = a->dx + r * a->dx_stride + g * a->width;
            float inv = a->inv_rms[r * a->groups + g];
            /* dx = inv (gain dy - x inv^2 mean(gain dy x)) */
            float slope = weighted_dot(a->gain, dy, x, a->width) / (float)a->width * inv * inv;
            for (int64_t c = 0; c < a->width; c++) {
                float d = inv * (bf16_to_float(a->gain[c]) * bf16_to_float(dy[c]) - bf16_to_float(x[c]) * slope);
                dx[c] = bf16_from_float(residual ? bf16_to_float(residual[c]) + d : d);
            }
        }
    }
}

void residual_add_cpu(const bf16 *a, const bf16 *b, bf16 *sum, int64_t n)
{
#pragma omp parallel for simd
    for (int64_t i = 0; i < n; i++) {
        sum[i] = bf16_from_float(bf16_to_float(a[i]) + bf16_to_float(b[i]));
    }
}
