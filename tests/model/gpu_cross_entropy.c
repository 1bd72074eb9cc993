/* Head and cross entropy on the GPU against the CPU functions: several chunks, ignored rows, a NaN row, vocabularies
 * whose rows take more registers, more rows than clusters, both gradient types.
 *
 * Tolerances: FP32 logits differ in the order of sums, parts in 10^6; a dlogit then differs by at most one BF16 code
 * and rarely, so gradients agree to a relative L2 of 1e-3 (FP32 dweight) and to their own rounding in BF16, 2^-8 a
 * chunk. */
#include "model/cross_entropy.h"

#include "tests/gpu_compare.h"
#include "tests/model/check.h"

#include <stdlib.h>

static struct cuda *cuda;

struct head_case {
    int64_t rows, width, vocab, chunk;
    enum dtype type;
    bool accumulate, nan_row;
};

static double distance(const float *got, const float *want, int64_t n)
{
    double error = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        error += ((double)got[i] - (double)want[i]) * ((double)got[i] - (double)want[i]);
        norm += (double)want[i] * (double)want[i];
    }
    return norm > 0 ? sqrt(error / norm) : sqrt(error);
}

static void check_distance(const char *what, const float *got, const float *want, int64_t n, double limit)
{
    double d = distance(got, want, n);
    if (!(d <= limit)) {
        printf("  FAILED %s: relative L2 %.3g, limit %.3g\n", what, d, limit);
        compare_failures++;
    }
}

static void widen(float *out, const void *in, int64_t n, enum dtype type)
{
    for (int64_t i = 0; i < n; i++) {
        out[i] = type == DTYPE_BF16 ? bf16_to_float(((const bf16 *)in)[i]) : ((const float *)in)[i];
    }
}

static void check_head(const struct head_case *k)
{
    const int64_t R = k->rows, C = k->width, V = k->vocab;
    const float scale = 1.0f / 37.0f;
    const size_t hidden_bytes = (size_t)(R * C) * 2, weight_bytes = (size_t)(V * C) * 2, row_bytes = (size_t)R * 4;
    const size_t grad_bytes = (size_t)(V * C) * dtype_bytes(k->type);
    char what[128];
    snprintf(what, sizeof what, "head %lld x %lld x %lld, chunks of %lld, %s%s%s", (long long)R, (long long)C,
             (long long)V, (long long)k->chunk, k->type == DTYPE_BF16 ? "bf16" : "fp32",
             k->accumulate ? ", accumulate" : "", k->nan_row ? ", NaN row" : "");
    bf16 *hidden = malloc(hidden_bytes), *weight = malloc(weight_bytes), *dhidden = malloc(hidden_bytes);
    bf16 *got_dhidden = malloc(hidden_bytes);
    int32_t *targets = malloc(row_bytes);
    float *losses = malloc(row_bytes), *got_losses = malloc(row_bytes), *lse = malloc(row_bytes);
    float *sum = malloc(row_bytes), *target_logit = malloc(row_bytes), *dhidden_sum = malloc(2 * hidden_bytes);
    float *dweight = malloc(2 * weight_bytes), *got_dweight = malloc(2 * weight_bytes), *got = malloc(2 * hidden_bytes);
    float *logits = malloc((size_t)(R * V) * 4), *wide = malloc(2 * weight_bytes);
    bf16 *dlogits = malloc((size_t)(R * V) * 2);
    fill_bf16(hidden, R * C, 1, 1.0f);
    fill_bf16(weight, V * C, 2, 0.3f);
    for (int64_t r = 0; r < R; r++) {
        targets[r] = r % 5 == 3 ? -1 : (int32_t)(r == 0 ? V - 1 : r * 7919 % V);
    }
    if (k->nan_row) {
        hidden[(R - 1) * C] = 0x7fc0;
        targets[R - 1] = 1;
    }

    void *d_hidden = gpu_array(cuda, hidden, hidden_bytes), *d_weight = gpu_array(cuda, weight, weight_bytes);
    void *d_targets = gpu_array(cuda, targets, row_bytes), *d_losses = gpu_array(cuda, NULL, row_bytes);
    void *d_lse = gpu_array(cuda, NULL, row_bytes), *d_dhidden = gpu_array(cuda, NULL, hidden_bytes);
    void *d_logits = gpu_array(cuda, NULL, (size_t)(k->chunk * V) * 4),
         *d_dlogits = gpu_array(cuda, NULL, (size_t)(k->chunk * V) * 2);
    /* The weights serve as the gradient that is added to. */
    widen(dweight, weight, V * C, DTYPE_BF16);
    const void *start = k->type == DTYPE_BF16 ? (const void *)weight : dweight;
    void *d_dweight = gpu_array(cuda, start, grad_bytes);
    struct cross_entropy_cuda a = {.rows = R,
                                   .width = C,
                                   .vocab = V,
                                   .chunk = k->chunk,
                                   .hidden = d_hidden,
                                   .weight = d_weight,
                                   .targets = d_targets,
                                   .losses = d_losses,
                                   .lse = d_lse,
                                   .logits = d_logits};
    cuda_set_step(cuda, &(struct cuda_step){.loss_scale = scale});
    cross_entropy_cuda(&a, cuda); /* forward only; also lets the products choose their algorithms */
    gpu_fetch(cuda, got_losses, d_losses, row_bytes);

    struct cross_entropy shape = {.rows = R,
                                  .width = C,
                                  .vocab = V,
                                  .columns = V,
                                  .hidden = hidden,
                                  .weight = weight,
                                  .targets = targets,
                                  .lse = lse,
                                  .logits = logits};
    int64_t valid;
    double total = cross_entropy_fwd_cpu(
        &(struct cross_entropy_fwd){.shape = shape, .sum = sum, .target_logit = target_logit}, &valid);
    double got_total = 0;
    for (int64_t r = 0; r < R; r++) {
        losses[r] = targets[r] < 0 ? 0.0f : lse[r] - target_logit[r];
        got_total += (double)got_losses[r];
    }
    compare_values(what, got_losses, losses, R, DTYPE_F32, 1e-5, 1e-5);
    if (!k->nan_row && !(fabs(got_total - total) <= 1e-5 * fabs(total))) {
        printf("  FAILED %s: sum of losses %.9g, expected %.9g\n", what, got_total, total);
        compare_failures++;
    }
    gpu_fetch(cuda, sum, d_lse, row_bytes);
    compare_values("lse", sum, lse, R, DTYPE_F32, 1e-5, 1e-5);

    a.dhidden = d_dhidden;
    a.dweight = d_dweight;
    a.grad_type = k->type;
    a.accumulate = k->accumulate;
    a.dlogits = d_dlogits;
    for (int run = 0; run < 3; run++) { /* the first may still time its products, and then leaves dweight undefined */
        cuda_upload(cuda, d_dweight, start, grad_bytes);
        cross_entropy_cuda(&a, cuda);
        gpu_fetch(cuda, run < 2 ? got_dweight : wide, d_dweight, grad_bytes);
        gpu_fetch(cuda, run < 2 ? got_dhidden : dhidden, d_dhidden, hidden_bytes);
    }
    compare_bits("head twice, dweight", wide, got_dweight, grad_bytes, dtype_bytes(k->type));
    compare_bits("head twice, dhidden", dhidden, got_dhidden, hidden_bytes, sizeof(bf16));
    cross_entropy_bwd_cpu(&(struct cross_entropy_bwd){.shape = shape,
                                                      .loss_scale = scale,
                                                      .dhidden = dhidden,
                                                      .dweight = dweight,
                                                      .grad_type = DTYPE_F32,
                                                      .accumulate = k->accumulate,
                                                      .dlogits = dlogits,
                                                      .dhidden_sum = dhidden_sum});
    int64_t sound = k->nan_row ? R - 1 : R; /* rows whose gradients are numbers */
    widen(got, got_dhidden, R * C, DTYPE_BF16);
    widen(dhidden_sum, dhidden, R * C, DTYPE_BF16);
    check_distance("dhidden", got, dhidden_sum, sound * C, 4e-3);
    for (int64_t r = 0; r < R; r++) {
        for (int64_t c = 0; c < C && targets[r] < 0; c++) {
            if ((got_dhidden[r * C + c] & 0x7fff) != 0) {
                printf("  FAILED %s: ignored row %lld has a gradient\n", what, (long long)r);
                compare_failures++;
                break;
            }
        }
    }
    if (k->nan_row) {
        compare_values("NaN row", got + sound * C, dhidden_sum + sound * C, C, DTYPE_F32, 0, 0);
    } else {
        widen(wide, got_dweight, V * C, k->type);
        int64_t chunks = (R + k->chunk - 1) / k->chunk;
        check_distance("dweight", wide, dweight, V * C, k->type == DTYPE_BF16 ? 4e-3 * (double)chunks : 1e-3);
    }
    void *host[] = {hidden,       weight,      dhidden, got_dhidden, targets, losses, got_losses, lse,    sum,
                    target_logit, dhidden_sum, dweight, got_dweight, got,     logits, wide,       dlogits};
    void *device[] = {d_hidden, d_weight, d_targets, d_losses, d_lse, d_dhidden, d_logits, d_dlogits, d_dweight};
    for (size_t i = 0; i < sizeof host / sizeof *host; i++) {
        free(host[i]);
    }
    for (size_t i = 0; i < sizeof device / sizeof *device; i++) {
        cuda_free(device[i]);
    }
}

static void test_head_agrees_with_the_cpu(void **state)
{
    static const struct head_case cases[] = {
        {1, 64, 320, 16, DTYPE_F32, false, false},
        {5, 64, 8, 16, DTYPE_F32, false, false},
        {37, 64, 320, 16, DTYPE_F32, false, false},
        {37, 64, 320, 16, DTYPE_F32, true, false},
        {37, 64, 320, 16, DTYPE_BF16, false, false},
        {37, 64, 320, 64, DTYPE_BF16, true, false},
        {21, 64, 1000, 32, DTYPE_F32, false, true},
        {16, 128, 16392, 16, DTYPE_F32, false, false},
        {6, 8, 131080, 4, DTYPE_F32, false, false},
        {3, 8, 131080, 4, DTYPE_F32, false, false}, /* of the sample of --small; one chunk */
        {3, 8, 262144, 4, DTYPE_F32, false, false}, /* registers for longer rows */
        {301, 64, 320, 160, DTYPE_F32, false, false},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (!gpu_leaves_out(3)) {
            check_head(&cases[i]);
        }
    }
    compare_end();
}

/* ---- logits of -Inf ---- */

/* Rows of which threads, warps or whole slices see nothing but -Inf, while the others' logits lie at `level`: kind 0,
 * each third four; 1, the first half; 2, all but the target; 3, all but the last four. */
static float masked_logit(int64_t i, int64_t vocab, int64_t target, int kind, float level)
{
    bool masked = kind == 0 ? i / 4 % 3 == 1 : kind == 1 ? i < vocab / 2 : kind == 2 ? i != target : i < vocab - 4;
    return masked && i != target ? -INFINITY : level + (float)(i * 7919 % 101) / 50.0f;
}

static void check_masked(int64_t vocab)
{
    static const float levels[] = {0, -200, -1e4f, 300};
    enum { KINDS = 4, ROWS = 4 * KINDS };
    const float scale = 1.0f / 37.0f;
    const size_t n = (size_t)(ROWS * vocab);
    float *logits = malloc(n * 4), *want = malloc(n * 4), losses[ROWS], got_losses[ROWS];
    bf16 *got = malloc(n * 2);
    int32_t targets[ROWS];
    char what[64];
    for (int64_t r = 0; r < ROWS; r++) {
        double sum = 0;
        float *x = logits + r * vocab;
        targets[r] = (int32_t)(vocab - 2);
        for (int64_t i = 0; i < vocab; i++) {
            x[i] = masked_logit(i, vocab, targets[r], (int)(r % KINDS), levels[r / KINDS]);
            sum += exp((double)x[i] - (double)levels[r / KINDS]);
        }
        losses[r] = (float)(log(sum) + (double)levels[r / KINDS] - (double)x[targets[r]]);
        for (int64_t i = 0; i < vocab; i++) {
            double p = exp((double)x[i] - (double)levels[r / KINDS]) / sum;
            want[r * vocab + i] = (float)((double)scale * (p - (i == targets[r] ? 1 : 0)));
        }
    }
    void *d_logits = gpu_array(cuda, logits, n * 4), *d_targets = gpu_array(cuda, targets, sizeof targets);
    void *d_losses = gpu_array(cuda, NULL, sizeof losses), *d_lse = gpu_array(cuda, NULL, sizeof losses);
    void *d_dlogits = gpu_array(cuda, NULL, n * 2);
    cuda_set_step(cuda, &(struct cuda_step){.loss_scale = scale});
    cross_entropy_rows_cuda(&(struct cross_entropy_rows){.rows = ROWS,
                                                         .vocab = vocab,
                                                         .logits = d_logits,
                                                         .targets = d_targets,
                                                         .losses = d_losses,
                                                         .lse = d_lse,
                                                         .dlogits = d_dlogits},
                            cuda);
    gpu_fetch(cuda, got_losses, d_losses, sizeof losses);
    gpu_fetch(cuda, got, d_dlogits, n * 2);
    /* FP32 of an lse of 1e4 has steps of 2^-10, which come back as that much of each gradient. */
    for (int64_t r = 0; r < ROWS; r++) {
        const double step = ldexp(fabs((double)levels[r / KINDS]), -23);
        snprintf(what, sizeof what, "-Inf, vocabulary %lld, kind %d at %g", (long long)vocab, (int)(r % KINDS),
                 (double)levels[r / KINDS]);
        compare_values(what, got_losses + r, losses + r, 1, DTYPE_F32, 1e-5, 2 * step + 1e-6);
        widen(logits, got + r * vocab, vocab, DTYPE_BF16);
        compare_values(what, logits, want + r * vocab, vocab, DTYPE_F32, 0x1p-8 + 2 * step,
                       (double)scale * (2 * step + 1e-6));
    }
    void *host[] = {logits, want, got};
    void *device[] = {d_logits, d_targets, d_losses, d_lse, d_dlogits};
    for (size_t i = 0; i < sizeof host / sizeof *host; i++) {
        free(host[i]);
    }
    for (size_t i = 0; i < sizeof device / sizeof *device; i++) {
        cuda_free(device[i]);
    }
}

static void test_minus_infinity_has_no_part(void **state)
{
    static const int64_t vocabularies[] = {8, 320, 16392, 131080};
    (void)state;
    for (size_t i = 0; i < sizeof vocabularies / sizeof *vocabularies; i++) {
        if (!gpu_leaves_out(2)) {
            check_masked(vocabularies[i]);
        }
    }
    compare_end();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_head_agrees_with_the_cpu),
                                       cmocka_unit_test(test_minus_infinity_has_no_part)};
    gpu_arguments(argc, argv);
    cuda = gpu_open();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    cuda_close(cuda);
    return failed;
}
