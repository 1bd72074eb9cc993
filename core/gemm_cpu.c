/* core: matrix products on the CPU. */
#include "core/gemm.h"

static float element(const void *x, enum dtype type, int64_t at)
{
    return type == DTYPE_BF16 ? bf16_to_float(((const bf16 *)x)[at]) : ((const float *)x)[at];
}

static float dot(const struct gemm *g, int64_t i, int64_t j)
{
    float sum = 0;
    for (int64_t k0 = 0; k0 < g->k; k0 += GEMM_K_BLOCK) {
        float part = 0;
        for (int64_t k = k0; k < g->k && k < k0 + GEMM_K_BLOCK; k++) {
            float a = element(g->a, g->a_type, g->trans_a ? k * g->lda + i : i * g->lda + k);
            float b = element(g->b, g->b_type, g->trans_b ? j * g->ldb + k : k * g->ldb + j);
            part = __builtin_fmaf(a, b, part);
        }
        sum = k0 == 0 ? part : sum + part;
    }
    return sum;
}

void gemm_cpu(const struct gemm *g)
{
#pragma omp parallel for
    for (int64_t i = 0; i < g->m; i++) {
        for (int64_t j = 0; j < g->n; j++) {
            int64_t at = i * g->ldc + j;
            float x = g->alpha * dot(g, i, j);
            if (g->beta != 0) {
                x = __builtin_fmaf(g->beta, element(g->c, g->c_type, at), x);
            }
            if (g->c_type == DTYPE_BF16) {
                ((bf16 *)g->c)[at] = bf16_from_float(x);
            } else {
                ((float *)g->c)[at] = x;
            }
        }
    }
}
