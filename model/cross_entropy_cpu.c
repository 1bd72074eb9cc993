/* model: head and cross entropy on the CPU. */
#include "model/cross_entropy.h"

#include "core/gemm.h"
#include "model/exponential.h"

#include <math.h>

enum { LANES = 16 };

static int64_t columns_at(const struct cross_entropy *s, int64_t v0)
{
    return s->vocab - v0 < s->columns ? s->vocab - v0 : s->columns;
}

/* Logits of vocabulary entries v0 .. v0 + n - 1, rows packed n apart. */
static void logits_make(const struct cross_entropy *s, int64_t v0, int64_t n)
{
    gemm_cpu(&(struct gemm){.m = s->rows,
                            .n = n,
                            .k = s->width,
                            .a = s->hidden,
                            .b = s->weight + v0 * s->width,
                            .c = s->logits,
                            .lda = s->width,
                            .ldb = s->width,
                            .ldc = n,
                            .a_type = DTYPE_BF16,
                            .b_type = DTYPE_BF16,
                            .c_type = DTYPE_F32,
                            .trans_b = true,
                            .alpha = 1});
}

/* Running log-sum-exp of a row: `max` and the sum of exp(x - max). A NaN never becomes the maximum but makes the sum
 * NaN; +Inf does too. */
struct running {
    float max, sum;
};

static struct running running_add(struct running r, const float *x, int64_t n)
{
    float max = r.max;
    for (int64_t c = 0; c < n; c++) {
        max = x[c] > max ? x[c] : max;
    }
    float lane[LANES] = {0};
    int64_t c = 0;
    for (; c + LANES <= n; c += LANES) {
        for (int l = 0; l < LANES; l++) {
            lane[l] += exponential(x[c + l] - max);
        }
    }
    for (int l = 0; c + l < n; l++) {
        lane[l] += exponential(x[c + l] - max);
    }
    for (int half = LANES / 2; half > 0; half /= 2) {
        for (int l = 0; l < half; l++) {
            lane[l] += lane[l + half];
        }
    }
    float kept = r.sum > 0 ? r.sum * exponential(r.max - max) : r.sum;
    return (struct running){max, kept + lane[0]};
}

double cross_entropy_fwd_cpu(const struct cross_entropy_fwd *a, int64_t *valid)
{
    const struct cross_entropy *s = &a->shape;
    float *max = s->lse, *sum = a->sum; /* lse holds the running maximum until the vocabulary has passed */
    for (int64_t r = 0; r < s->rows; r++) {
        ASSERT(s->targets[r] >= -1 && s->targets[r] < s->vocab);
        max[r] = -INFINITY;
        sum[r] = 0;
    }
    for (int64_t v0 = 0; v0 < s->vocab; v0 += s->columns) {
        int64_t n = columns_at(s, v0);
        logits_make(s, v0, n);
#pragma omp parallel for
        for (int64_t r = 0; r < s->rows; r++) {
            if (s->targets[r] >= 0) {
                struct running now = running_add((struct running){max[r], sum[r]}, s->logits + r * n, n);
                max[r] = now.max;
                sum[r] = now.sum;
                int64_t at = s->targets[r] - v0;
                if (at >= 0 && at < n) {
                    a->target_logit[r] = s->logits[r * n + at];
                }
            }
        }
    }
    double loss = 0;
    *valid = 0;
    for (int64_t r = 0; r < s->rows; r++) {
        s->lse[r] = max[r] + logf(sum[r]);
        if (s->targets[r] >= 0) {
            loss += (double)(s->lse[r] - a->target_logit[r]);
            *valid += 1;
        }
    }
    return loss;
}

/* scale (softmax - one-hot), rounded to BF16. */
static void dlogits_make(const struct cross_entropy_bwd *a, int64_t v0, int64_t n)
{
    const struct cross_entropy *s = &a->shape;
#pragma omp parallel for
    for (int64_t r = 0; r < s->rows; r++) {
        const float *x = s->logits + r * n;
        bf16 *d = a->dlogits + r * n;
        if (s->targets[r] < 0) {
            for (int64_t c = 0; c < n; c++) {
                d[c] = 0;
            }
            continue;
        }
        float lse = s->lse[r], scale = a->loss_scale;
        for (int64_t c = 0; c < n; c++) {
            d[c] = bf16_from_float(scale * exponential(x[c] - lse));
        }
        int64_t at = s->targets[r] - v0;
        if (at >= 0 && at < n) {
            d[at] = bf16_from_float(scale * (exponential(x[at] - lse) - 1.0f));
        }
    }
}

void cross_entropy_bwd_cpu(const struct cross_entropy_bwd *a)
{
    const struct cross_entropy *s = &a->shape;
    for (int64_t v0 = 0; v0 < s->vocab; v0 += s->columns) {
        int64_t n = columns_at(s, v0);
        logits_make(s, v0, n);
        dlogits_make(a, v0, n);
        gemm_cpu(&(struct gemm){.m = n,
                                .n = s->width,
                                .k = s->rows,
                                .a = a->dlogits,
                                .b = s->hidden,
                                .c = (float *)a->dweight + v0 * s->width,
                                .lda = n,
                                .ldb = s->width,
                                .ldc = s->width,
                                .a_type = DTYPE_BF16,
                                .b_type = DTYPE_BF16,
                                .c_type = DTYPE_F32,
                                .trans_a = true,
                                .alpha = 1,
                                .beta = a->accumulate ? 1 : 0});
        gemm_cpu(&(struct gemm){.m = s->rows,
                                .n = s->width,
                                .k = n,
                                .a = a->dlogits,
                                .b = s->weight + v0 * s->width,
                                .c = a->dhidden_sum,
                                .lda = n,
                                .ldb = s->width,
                                .ldc = s->width,
                                .a_type = DTYPE_BF16,
                                .b_type = DTYPE_BF16,
                                .c_type = DTYPE_F32,
                                .alpha = 1,
                                .beta = v0 > 0 ? 1 : 0});
    }
#pragma omp parallel for simd
    for (int64_t i = 0; i < s->rows * s->width; i++) {
        a->dhidden[i] = bf16_from_float(a->dhidden_sum[i]);
    }
}

void cross_entropy_logits_cpu(const bf16 *hidden, const bf16 *weight, int64_t rows, int64_t width, int64_t vocab,
                              float *logits)
{
    logits_make(&(struct cross_entropy){.rows = rows,
                                        .width = width,
                                        .vocab = vocab,
                                        .columns = vocab,
                                        .hidden = hidden,
                                        .weight = weight,
                                        .logits = logits},
                0, vocab);
}
