/* Matrix products on the GPU against FP64: orientations, types, strides, C that is NaN or added to, odd sizes, FP8
 * with scales; bits that repeat within a run, after planning, inside graphs and over runs that read the choices back.
 */
#include "core/file.h"
#include "core/gemm_cuda.h"
#include "core/rng.h"
#include "numerics/formats.h"

#include "tests/core/scratch_folder.h"
#include "tests/gpu.h"

#include <math.h>

static struct cuda *cuda;

enum { POISON_STRIDE = 24 }; /* elements between rows that belong to no row; a multiple of 8 */

struct matrix {
    int64_t rows, cols, stride;
    enum dtype type;
    void *host, *device;
};

static float value_of(const struct matrix *x, int64_t row, int64_t col)
{
    int64_t i = row * x->stride + col;
    switch (x->type) {
    case DTYPE_F32:
        return ((const float *)x->host)[i];
    case DTYPE_BF16:
        return bf16_to_float(((const bf16 *)x->host)[i]);
    case DTYPE_E4M3:
        return e4m3_to_float(((const uint8_t *)x->host)[i]);
    default:
        return e5m2_to_float(((const uint8_t *)x->host)[i]);
    }
}

static void set_value(const struct matrix *x, int64_t row, int64_t col, float value)
{
    int64_t i = row * x->stride + col;
    switch (x->type) {
    case DTYPE_F32:
        ((float *)x->host)[i] = value;
        return;
    case DTYPE_BF16:
        ((bf16 *)x->host)[i] = bf16_from_float(value);
        return;
    case DTYPE_E4M3:
        ((uint8_t *)x->host)[i] = e4m3_from_float(value);
        return;
    default:
        ((uint8_t *)x->host)[i] = e5m2_from_float(value);
    }
}

static size_t matrix_bytes(const struct matrix *x)
{
    return (size_t)(x->rows * x->stride) * dtype_bytes(x->type);
}

/* All bytes 0xff (NaN in every type); numbers of the stream, times scale, unless stream is 0. */
static struct matrix matrix_make(int64_t rows, int64_t cols, int64_t gap, enum dtype type, uint64_t stream, float scale)
{
    struct matrix x = {.rows = rows, .cols = cols, .stride = cols + gap, .type = type};
    x.host = malloc(matrix_bytes(&x));
    assert_non_null(x.host);
    memset(x.host, 0xff, matrix_bytes(&x));
    for (int64_t i = 0; stream != 0 && i < rows * cols; i++) {
        set_value(&x, i / cols, i % cols, scale * rng_normal(1, stream, (uint64_t)i));
    }
    x.device = gpu_array(cuda, x.host, matrix_bytes(&x));
    return x;
}

static void matrix_free(struct matrix *x)
{
    free(x->host);
    cuda_free(x->device);
}

struct product {
    const char *what;
    int64_t m, n, k, gap;
    bool trans_a, trans_b, fast;
    enum dtype a_type, b_type, c_type;
    float alpha, beta;
};

struct problem {
    struct matrix a, b, c;
    float *scales; /* device: of a, of b, 16 bytes apart */
    struct gemm_cuda g;
};

enum { SCALE_B = 4 };
static const float scales[2 * SCALE_B] = {[0] = 0.25F, [SCALE_B] = 8.0F};

static struct problem problem_make(const struct product *p)
{
    struct problem x;
    const bool fp8 = p->a_type != DTYPE_BF16;
    x.a = matrix_make(p->trans_a ? p->k : p->m, p->trans_a ? p->m : p->k, p->gap, p->a_type, 1, fp8 ? 40.0F : 1.0F);
    x.b = matrix_make(p->trans_b ? p->n : p->k, p->trans_b ? p->k : p->n, p->gap, p->b_type, 2, fp8 ? 40.0F : 1.0F);
    x.c = matrix_make(p->m, p->n, p->gap, p->c_type, p->beta != 0.0F ? 3 : 0, 1.0F);
    x.scales = gpu_array(cuda, scales, sizeof scales);
    x.g = (struct gemm_cuda){.m = p->m,
                             .n = p->n,
                             .k = p->k,
                             .a = x.a.device,
                             .b = x.b.device,
                             .c = x.c.device,
                             .lda = x.a.stride,
                             .ldb = x.b.stride,
                             .ldc = x.c.stride,
                             .a_type = p->a_type,
                             .b_type = p->b_type,
                             .c_type = p->c_type,
                             .trans_a = p->trans_a,
                             .trans_b = p->trans_b,
                             .alpha = p->alpha,
                             .beta = p->beta,
                             .a_scale = fp8 ? x.scales : NULL,
                             .b_scale = fp8 ? x.scales + SCALE_B : NULL,
                             .fast = p->fast};
    return x;
}

static void problem_free(struct problem *x)
{
    matrix_free(&x->a);
    matrix_free(&x->b);
    matrix_free(&x->c);
    cuda_free(x->scales);
}

/* The product on C as it was at first; the result, from the device. */
static void *run(const struct problem *x, void *result)
{
    cuda_upload(cuda, x->c.device, x->c.host, matrix_bytes(&x->c));
    gemm_cuda(cuda, &x->g);
    gpu_fetch(cuda, result, x->c.device, matrix_bytes(&x->c));
    return result;
}

/* The numbers with the contraction contiguous: of x, or of x transposed. */
static double *along_k(const struct matrix *x, bool transposed)
{
    const int64_t rows = transposed ? x->cols : x->rows, cols = transposed ? x->rows : x->cols;
    double *y = malloc((size_t)(rows * cols) * sizeof *y);
    assert_non_null(y);
    for (int64_t i = 0; i < rows * cols; i++) {
        y[i] = (double)(transposed ? value_of(x, i % cols, i / cols) : value_of(x, i / cols, i % cols));
    }
    return y;
}

/* Error in units of what is allowed: FP32 sums of k terms err by at most about k 2^-24 of the sum of magnitudes. FP8:
 * Hopper's tensor cores cut each term at about 2^-13 of the largest of its group, so that many small terms beside a
 * large one lose more than 2^-13 of the sum of magnitudes: 2^-11 is allowed (2^-11.7 was seen). One rounding to BF16 is
 * half a unit of 2^-8, and a product that is added to C in BF16 may be rounded before. */
static double worst_error(const struct problem *x, const void *result)
{
    const struct gemm_cuda *g = &x->g;
    const bool fp8 = g->a_type != DTYPE_BF16;
    struct matrix got = x->c;
    double *a = along_k(&x->a, g->trans_a), *b = along_k(&x->b, !g->trans_b);
    double worst = 0, factor = (double)g->alpha * (fp8 ? (double)scales[0] * (double)scales[SCALE_B] : 1.0);
    memcpy(&got.host, &result, sizeof result);
    for (int64_t i = 0; i < g->m; i++) {
        for (int64_t j = 0; j < g->n; j++) {
            double sum = 0, magnitude = 0;
            for (int64_t t = 0; t < g->k; t++) {
                double term = a[i * g->k + t] * b[j * g->k + t];
                sum += term;
                magnitude += fabs(term);
            }
            double before = g->beta != 0.0F ? (double)g->beta * (double)value_of(&x->c, i, j) : 0.0;
            double want = factor * sum + before;
            double allowed = fabs(factor) * magnitude * (fp8 ? 0x1p-11 : (double)(g->k + 2) * 0x1p-24) +
                             fabs(before) * 0x1p-23 + 1e-30;
            if (g->c_type == DTYPE_BF16) {
                allowed += 0x1p-8 * (fabs(want) + (g->beta != 0.0F ? fabs(factor * sum) : 0.0));
            }
            double error = fabs((double)value_of(&got, i, j) - want) / allowed;
            worst = error <= worst ? worst : error; /* a NaN becomes the worst */
        }
    }
    free(a);
    free(b);
    return worst;
}

/* Elements between rows must stay as they were: all bytes 0xff. */
static bool gaps_untouched(const struct problem *x, const void *result)
{
    const size_t bytes = dtype_bytes(x->c.type);
    const uint8_t *p = result;
    for (int64_t i = 0; i < x->c.rows; i++) {
        for (size_t b = (size_t)(i * x->c.stride + x->c.cols) * bytes; b < (size_t)((i + 1) * x->c.stride) * bytes;
             b++) {
            if (p[b] != 0xff) {
                return false;
            }
        }
    }
    return true;
}

/* The largest error so far, for the record. */
static double worst_seen;

/* Returns whether all is well; says what is not. A shape without an algorithm must not hide the others. */
static bool check(const struct product *p)
{
    if (gpu_leaves_out(5)) {
        return true;
    }
    struct problem x = problem_make(p);
    const size_t bytes = matrix_bytes(&x.c);
    void *first = malloc(bytes), *again = malloc(bytes);
    assert_true(first && again);
    const bool planned = gemm_cuda_plan(cuda, &x.g) == OK;
    double error = NAN;
    bool same = false, gaps = false;
    if (planned) {
        run(&x, first);
        run(&x, again);
        error = worst_error(&x, first);
        same = memcmp(first, again, bytes) == 0;
        gaps = gaps_untouched(&x, first);
    }
    bool good = planned && error <= 1 && same && gaps;
    if (!good) {
        print_message(
            "FAIL %s %ld %ld %ld gap %ld A%c B%c types %d %d %d alpha %g beta %g fast %d: error %.3g of allowed, "
            "repeats %d, gaps untouched %d%s%s\n",
            p->what, (long)p->m, (long)p->n, (long)p->k, (long)p->gap, p->trans_a ? 't' : 'n', p->trans_b ? 't' : 'n',
            (int)p->a_type, (int)p->b_type, (int)p->c_type, (double)p->alpha, (double)p->beta, (int)p->fast, error,
            (int)same, (int)gaps, planned ? "" : ", refused: ", planned ? "" : status_last_message());
    }
    worst_seen = error <= worst_seen ? worst_seen : error;
    free(first);
    free(again);
    problem_free(&x);
    return good;
}

static void test_bf16_in_every_orientation(void **state)
{
    (void)state;
    static const struct product sizes[] = {
        {.what = "whole tiles", .m = 128, .n = 256, .k = 192}, {.what = "odd", .m = 65, .n = 33, .k = 131},
        {.what = "one row", .m = 1, .n = 40, .k = 64},         {.what = "one column", .m = 48, .n = 1, .k = 7},
        {.what = "k is 1", .m = 16, .n = 24, .k = 1},          {.what = "long k", .m = 32, .n = 48, .k = 6144},
    };
    bool good = true;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (int variant = 0; variant < 16; variant++) {
            struct product p = sizes[i];
            p.trans_a = variant & 1;
            p.trans_b = variant & 2;
            p.a_type = p.b_type = DTYPE_BF16;
            p.c_type = variant & 4 ? DTYPE_F32 : DTYPE_BF16;
            p.beta = variant & 8 ? 1.0F : 0.0F;
            p.alpha = variant & 8 ? 0.5F : 1.0F;
            p.gap = i == 1 ? 0 : POISON_STRIDE;
            good = check(&p) && good;
        }
    }
    print_message("largest error: %.3f of allowed\n", worst_seen);
    worst_seen = 0;
    assert_true(good);
}

static void test_fp8_with_scales(void **state)
{
    (void)state;
    static const struct product sizes[] = {
        {.what = "whole tiles", .m = 128, .n = 256, .k = 512}, {.what = "odd rows", .m = 37, .n = 48, .k = 80},
        {.what = "one row", .m = 1, .n = 16, .k = 32},         {.what = "least", .m = 16, .n = 16, .k = 16},
        {.what = "long k", .m = 32, .n = 48, .k = 6144},
    };
    static const enum dtype types[][2] = {{DTYPE_E4M3, DTYPE_E4M3}, {DTYPE_E5M2, DTYPE_E4M3}, {DTYPE_E4M3, DTYPE_E5M2}};
    bool good = true;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (int variant = 0; variant < 12; variant++) {
            struct product p = sizes[i];
            p.trans_b = true;
            p.fast = variant == 0;
            p.a_type = types[variant / 4][0];
            p.b_type = types[variant / 4][1];
            p.c_type = variant & 1 ? DTYPE_F32 : DTYPE_BF16;
            p.beta = variant & 2 ? 1.0F : 0.0F;
            p.alpha = 1;
            p.gap = i == 0 ? 16 : 0;
            good = check(&p) && good;
        }
    }
    print_message("largest error: %.3f of allowed\n", worst_seen);
    worst_seen = 0;
    assert_true(good);
}

/* A NaN scale is how an operand with a NaN or Inf says so: everything must become NaN. */
static void test_nan_scale_makes_all_nan(void **state)
{
    (void)state;
    struct product p = {.m = 32,
                        .n = 48,
                        .k = 64,
                        .trans_b = true,
                        .a_type = DTYPE_E4M3,
                        .b_type = DTYPE_E4M3,
                        .c_type = DTYPE_F32,
                        .alpha = 1};
    struct problem x = problem_make(&p);
    const float nan_scale = NAN;
    float *got = malloc(matrix_bytes(&x.c));
    for (int operand = 0; operand < 2; operand++) {
        cuda_upload(cuda, x.scales, scales, sizeof scales);
        cuda_upload(cuda, x.scales + operand * SCALE_B, &nan_scale, sizeof nan_scale);
        memset(x.c.host, 0, matrix_bytes(&x.c));
        run(&x, got);
        for (int64_t i = 0; i < p.m * p.n; i++) {
            assert_true(isnan(got[i]));
        }
    }
    free(got);
    problem_free(&x);
}

static const struct product kept[] = {
    {.what = "kept",
     .m = 256,
     .n = 512,
     .k = 4096,
     .trans_b = true,
     .a_type = DTYPE_BF16,
     .b_type = DTYPE_BF16,
     .c_type = DTYPE_BF16,
     .alpha = 1},
    {.what = "kept",
     .m = 512,
     .n = 384,
     .k = 2048,
     .trans_a = true,
     .a_type = DTYPE_BF16,
     .b_type = DTYPE_BF16,
     .c_type = DTYPE_F32,
     .alpha = 1,
     .beta = 1},
    {.what = "kept",
     .m = 384,
     .n = 512,
     .k = 4096,
     .trans_b = true,
     .a_type = DTYPE_E5M2,
     .b_type = DTYPE_E4M3,
     .c_type = DTYPE_BF16,
     .alpha = 1},
};
enum { KEPT = sizeof kept / sizeof kept[0] };

/* The results of kept products, in one piece. */
static unsigned char *run_kept(bool plan_all, size_t *total)
{
    unsigned char *all = NULL;
    *total = 0;
    gemm_cuda_plan_all(cuda, plan_all);
    for (int i = 0; i < KEPT; i++) {
        struct problem x = problem_make(&kept[i]);
        all = realloc(all, *total + matrix_bytes(&x.c));
        assert_non_null(all);
        run(&x, all + *total);
        *total += matrix_bytes(&x.c);
        problem_free(&x);
    }
    gemm_cuda_plan_all(cuda, false);
    return all;
}

static void reopen(void)
{
    cuda_close(cuda);
    cuda = gpu_open();
}

static void test_choices_survive_a_run(void **state)
{
    char path[SCRATCH_PATH_MAX], copy[SCRATCH_PATH_MAX], *text, *again;
    size_t bytes, bytes_again, total;
    scratch_path(state, "gemm.json", path);
    scratch_path(state, "gemm2.json", copy);
    reopen();
    free(run_kept(true, &total));
    unsigned char *want = run_kept(false, &total);
    assert_int_equal(gemm_cuda_save(cuda, path), OK);
    reopen();
    assert_int_equal(gemm_cuda_load(cuda, path), OK);
    /* Known shapes are not timed again, so that planning now destroys no C. */
    unsigned char *got = run_kept(true, &total);
    assert_memory_equal(got, want, total);
    assert_int_equal(gemm_cuda_save(cuda, copy), OK);
    assert_int_equal(file_read_all(path, 1 << 20, &text, &bytes), OK);
    assert_int_equal(file_read_all(copy, 1 << 20, &again, &bytes_again), OK);
    assert_string_equal(text, again);

    char *version = strstr(text, "\"cublaslt\": ");
    assert_non_null(version);
    version[strlen("\"cublaslt\": ")]++;
    assert_int_equal(file_write_atomic(copy, text, bytes), OK);
    reopen();
    assert_int_equal(gemm_cuda_load(cuda, copy), OK);
    assert_int_equal(gemm_cuda_save(cuda, copy), OK);
    char *empty;
    assert_int_equal(file_read_all(copy, 1 << 20, &empty, &bytes_again), OK);
    assert_non_null(strstr(empty, "\"choices\": []"));

    char *algorithm = strstr(again, "\"algorithm\": \"");
    memset(algorithm + strlen("\"algorithm\": \""), 'f', 16);
    assert_int_equal(file_write_atomic(copy, again, bytes), OK);
    assert_int_equal(gemm_cuda_load(cuda, copy), ERR_DATA);
    assert_non_null(strstr(status_last_message(), "remove the file"));
    /* The same words from a rank: there is no file to remove. */
    assert_int_equal(gemm_cuda_import(cuda, "rank 0", again), ERR_DATA);
    assert_non_null(strstr(status_last_message(), "rank 0: the algorithm of the product"));
    assert_non_null(strstr(status_last_message(), "all ranks must have the same GPU"));
    assert_null(strstr(status_last_message(), "remove the file"));

    char *told;
    reopen();
    assert_int_equal(gemm_cuda_load(cuda, path), OK);
    assert_int_equal(gemm_cuda_export(cuda, &told), OK);
    reopen();
    assert_int_equal(gemm_cuda_import(cuda, "another rank", told), OK);
    assert_int_equal(gemm_cuda_planned(cuda), KEPT);
    free(got);
    got = run_kept(true, &total);
    assert_memory_equal(got, want, total);
    told[strlen(told) / 2] = '\0';
    assert_int_equal(gemm_cuda_import(cuda, "another rank", told), ERR_DATA);
    free(told);
    free(text);
    free(again);
    free(empty);
    free(want);
    free(got);
}

/* An unplanned shape inside a capture, replayed; C is added to at each replay. */
static void test_products_can_be_captured(void **state)
{
    (void)state;
    struct product p = {.m = 64,
                        .n = 80,
                        .k = 96,
                        .trans_b = true,
                        .a_type = DTYPE_BF16,
                        .b_type = DTYPE_BF16,
                        .c_type = DTYPE_F32,
                        .alpha = 1,
                        .beta = 1};
    struct problem x = problem_make(&p);
    struct cuda_graph *graph;
    float *got = malloc(matrix_bytes(&x.c)), *want = malloc(matrix_bytes(&x.c));
    assert_int_equal(cuda_graph_begin(cuda), OK);
    gemm_cuda(cuda, &x.g);
    assert_int_equal(cuda_graph_end(cuda, &graph), OK);
    cuda_graph_launch(cuda, graph);
    gpu_fetch(cuda, got, x.c.device, matrix_bytes(&x.c));
    run(&x, want);
    assert_memory_equal(got, want, matrix_bytes(&x.c));
    cuda_graph_close(graph);
    free(got);
    free(want);
    problem_free(&x);
}

static int open_gpu(void **state)
{
    (void)state;
    cuda = gpu_open();
    return 0;
}

static int close_gpu(void **state)
{
    (void)state;
    cuda_close(cuda);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bf16_in_every_orientation),
        cmocka_unit_test(test_fp8_with_scales),
        cmocka_unit_test(test_nan_scale_makes_all_nan),
        cmocka_unit_test_setup_teardown(test_choices_survive_a_run, scratch_folder_open, scratch_folder_close),
        cmocka_unit_test(test_products_can_be_captured),
    };
    gpu_arguments(argc, argv);
    return cmocka_run_group_tests(tests, open_gpu, close_gpu);
}
