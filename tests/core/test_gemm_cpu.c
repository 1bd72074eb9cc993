/* Matrix products against FP64, and bit for bit against the chain of fused multiply-adds that the contract names. */
#include "core/gemm.h"
#include "core/rng.h"

#include "tests/test.h"

#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

enum { PAD = 3 }; /* elements behind each row, which nobody may read (A, B) or write (C) */

/* The operands of one product, with the original C to compare with. */
struct product {
    struct gemm g;
    void *a, *b, *c, *c_before;
    size_t c_bytes;
};

static float number(uint64_t stream, uint64_t at)
{
    return rng_normal(7, stream, at);
}

static void store(void *x, enum dtype type, int64_t at, float value)
{
    if (type == DTYPE_BF16) {
        ((bf16 *)x)[at] = bf16_from_float(value);
    } else {
        ((float *)x)[at] = value;
    }
}

static float load(const void *x, enum dtype type, int64_t at)
{
    return type == DTYPE_BF16 ? bf16_to_float(((const bf16 *)x)[at]) : ((const float *)x)[at];
}

/* rows x columns of normals; NaN in the padding. */
static void *new_matrix(int64_t rows, int64_t columns, enum dtype type, uint64_t stream)
{
    void *x = malloc((size_t)(rows * (columns + PAD) + 1) * sizeof(float));
    assert_non_null(x);
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = 0; j < columns + PAD; j++) {
            int64_t at = i * (columns + PAD) + j;
            store(x, type, at, j < columns ? number(stream, (uint64_t)at) : NAN);
        }
    }
    return x;
}

static struct product product_open(struct gemm g)
{
    struct product p = {.g = g};
    p.g.lda = (g.trans_a ? g.m : g.k) + PAD;
    p.g.ldb = (g.trans_b ? g.k : g.n) + PAD;
    p.g.ldc = g.n + PAD;
    p.a = new_matrix(g.trans_a ? g.k : g.m, g.trans_a ? g.m : g.k, g.a_type, 1);
    p.b = new_matrix(g.trans_b ? g.n : g.k, g.trans_b ? g.k : g.n, g.b_type, 2);
    p.c = new_matrix(g.m, g.n, g.c_type, 3);
    p.c_before = new_matrix(g.m, g.n, g.c_type, 3);
    p.c_bytes = (size_t)(g.m * p.g.ldc) * dtype_bytes(g.c_type);
    p.g.a = p.a;
    p.g.b = p.b;
    p.g.c = p.c;
    return p;
}

static void product_close(struct product *p)
{
    free(p->a);
    free(p->b);
    free(p->c);
    free(p->c_before);
}

static float a_at(const struct gemm *g, int64_t i, int64_t k)
{
    return load(g->a, g->a_type, g->trans_a ? k * g->lda + i : i * g->lda + k);
}

static float b_at(const struct gemm *g, int64_t k, int64_t j)
{
    return load(g->b, g->b_type, g->trans_b ? j * g->ldb + k : k * g->ldb + j);
}

/* The contract, word for word. */
static float expected(const struct product *p, int64_t i, int64_t j)
{
    const struct gemm *g = &p->g;
    float sum = 0;
    for (int64_t k0 = 0; k0 < g->k; k0 += GEMM_K_BLOCK) {
        float part = 0;
        for (int64_t k = k0; k < g->k && k < k0 + GEMM_K_BLOCK; k++) {
            part = fmaf(a_at(g, i, k), b_at(g, k, j), part);
        }
        sum = k0 == 0 ? part : sum + part;
    }
    float x = g->alpha * sum;
    return g->beta == 0 ? x : fmaf(g->beta, load(p->c_before, g->c_type, i * g->ldc + j), x);
}

/* Every byte of C, padding included. */
static void check_bits(struct product *p)
{
    gemm_cpu(&p->g);
    for (int64_t i = 0; i < p->g.m; i++) {
        for (int64_t j = 0; j < p->g.n; j++) {
            store(p->c_before, p->g.c_type, i * p->g.ldc + j, expected(p, i, j));
        }
    }
    assert_memory_equal(p->c, p->c_before, p->c_bytes);
}

static void check_all_forms(int64_t m, int64_t n, int64_t k)
{
    /* Bits of `form`: transposes, types of A, B and C, and alpha and beta. */
    for (int form = 0; form < 64; form++) {
        struct product p = product_open((struct gemm){
            .m = m,
            .n = n,
            .k = k,
            .trans_a = form & 1,
            .trans_b = form & 2,
            .a_type = form & 4 ? DTYPE_BF16 : DTYPE_F32,
            .b_type = form & 8 ? DTYPE_BF16 : DTYPE_F32,
            .c_type = form & 16 ? DTYPE_BF16 : DTYPE_F32,
            .alpha = form & 32 ? 0.7f : 1.0f,
            .beta = form & 32 ? -1.3f : 0.0f,
        });
        check_bits(&p);
        product_close(&p);
    }
}

static void test_bits_are_those_of_the_plain_chain(void **state)
{
    (void)state;
    static const int64_t shapes[][3] = {
        {1, 1, 1},    {1, 1, 257}, {3, 5, 7},    {8, 32, 256},  {9, 33, 255},
        {17, 1, 300}, {1, 70, 64}, {64, 64, 64}, {37, 41, 513},
    };
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
        check_all_forms(shapes[s][0], shapes[s][1], shapes[s][2]);
    }
}

static void test_products_of_several_tiles(void **state)
{
    (void)state;
    for (int form = 0; form < 4; form++) {
        struct product p = product_open((struct gemm){
            .m = 261, .n = 530, .k = 270, .trans_a = form & 1, .trans_b = form & 2, .alpha = 1, .beta = 1});
        check_bits(&p);
        product_close(&p);
    }
}

static void test_sums_of_tiny_terms_keep_their_sign(void **state)
{
    (void)state;
    /* -2^-160 rounds to -0, which an extra "+ 0" would turn into +0. */
    float a = -0x1p-80f;
    float b = 0x1p-80f;
    float c = 1;
    struct gemm g = {.m = 1, .n = 1, .k = 1, .a = &a, .b = &b, .c = &c, .lda = 1, .ldb = 1, .ldc = 1, .alpha = 1};
    gemm_cpu(&g);
    assert_true(c == 0 && signbit(c));
}

static void test_error_against_fp64_is_within_the_bound_of_the_chain(void **state)
{
    (void)state;
    struct product p = product_open((struct gemm){.m = 50, .n = 60, .k = 1000, .trans_b = true, .alpha = 1});
    gemm_cpu(&p.g);
    for (int64_t i = 0; i < p.g.m; i++) {
        for (int64_t j = 0; j < p.g.n; j++) {
            double sum = 0;
            double magnitude = 0;
            for (int64_t k = 0; k < p.g.k; k++) {
                double term = (double)a_at(&p.g, i, k) * (double)b_at(&p.g, k, j);
                sum += term;
                magnitude += fabs(term);
            }
            /* 256 roundings inside a block, then one for each of the 4 blocks. */
            double bound = 260 * 0x1p-24 * magnitude;
            assert_true(fabs((double)((float *)p.c)[i * p.g.ldc + j] - sum) <= bound);
        }
    }
    product_close(&p);
}

static void test_beta_zero_never_reads_c(void **state)
{
    (void)state;
    for (int type = 0; type < 2; type++) {
        struct product p =
            product_open((struct gemm){.m = 9, .n = 40, .k = 20, .alpha = 1, .c_type = type ? DTYPE_BF16 : DTYPE_F32});
        for (int64_t at = 0; at < p.g.m * p.g.ldc; at++) {
            store(p.c, p.g.c_type, at, NAN);
        }
        gemm_cpu(&p.g);
        for (int64_t i = 0; i < p.g.m; i++) {
            for (int64_t j = 0; j < p.g.n; j++) {
                assert_false(isnan(load(p.c, p.g.c_type, i * p.g.ldc + j)));
            }
        }
        product_close(&p);
    }
}

static void test_empty_products(void **state)
{
    (void)state;
    struct product p = product_open((struct gemm){.m = 5, .n = 6, .k = 0, .alpha = 1, .beta = 2});
    gemm_cpu(&p.g);
    for (int64_t i = 0; i < p.g.m; i++) {
        for (int64_t j = 0; j < p.g.n; j++) {
            int64_t at = i * p.g.ldc + j;
            assert_true(((float *)p.c)[at] == 2 * ((float *)p.c_before)[at]);
        }
    }
    p.g.beta = 0;
    gemm_cpu(&p.g);
    assert_true(((float *)p.c)[0] == 0);
    product_close(&p);
    p = product_open((struct gemm){.m = 0, .n = 6, .k = 3, .alpha = 1});
    gemm_cpu(&p.g);
    product_close(&p);
}

static void test_a_nan_stays_in_its_row_and_column(void **state)
{
    (void)state;
    struct product p = product_open((struct gemm){.m = 10, .n = 35, .k = 12, .alpha = 1});
    store(p.a, DTYPE_F32, 9 * p.g.lda + 4, NAN);
    store(p.b, DTYPE_F32, 3 * p.g.ldb + 34, INFINITY);
    gemm_cpu(&p.g);
    for (int64_t i = 0; i < p.g.m; i++) {
        for (int64_t j = 0; j < p.g.n; j++) {
            assert_int_equal(isfinite(((float *)p.c)[i * p.g.ldc + j]) != 0, i != 9 && j != 34);
        }
    }
    product_close(&p);
}

static void test_threads_do_not_change_bits(void **state)
{
    (void)state;
    struct product one = product_open((struct gemm){.m = 300, .n = 280, .k = 300, .trans_b = true, .alpha = 1});
    struct product many = product_open(one.g);
    omp_set_num_threads(1);
    gemm_cpu(&one.g);
    for (int threads = 2; threads <= 5; threads++) {
        memset(many.c, 0xff, many.c_bytes);
        omp_set_num_threads(threads);
        gemm_cpu(&many.g);
        for (int64_t i = 0; i < one.g.m; i++) {
            size_t row = (size_t)(i * one.g.ldc) * sizeof(float);
            assert_memory_equal((char *)one.c + row, (char *)many.c + row, (size_t)one.g.n * sizeof(float));
        }
    }
    product_close(&one);
    product_close(&many);
}

static void test_calls_from_a_parallel_region(void **state)
{
    (void)state;
    struct product whole = product_open((struct gemm){.m = 128, .n = 96, .k = 128, .alpha = 1});
    struct product parts = product_open(whole.g);
    gemm_cpu(&whole.g);
    omp_set_num_threads(2);
#pragma omp parallel for schedule(dynamic)
    for (int i = 0; i < 8; i++) {
        struct gemm g = parts.g;
        g.m = 16;
        g.a = (const float *)g.a + 16 * i * g.lda;
        g.c = (float *)g.c + 16 * i * g.ldc;
        gemm_cpu(&g);
    }
    assert_memory_equal(whole.c, parts.c, whole.c_bytes);
    product_close(&whole);
    product_close(&parts);
}

static void test_pieces_of_c_have_the_bits_of_the_whole(void **state)
{
    (void)state;
    struct product whole = product_open((struct gemm){.m = 70, .n = 90, .k = 600, .trans_a = true, .alpha = 1});
    struct product parts = product_open(whole.g);
    gemm_cpu(&whole.g);
    static const int64_t cuts_m[] = {0, 1, 30, 70};
    static const int64_t cuts_n[] = {0, 33, 34, 90};
    for (int i = 0; i < 3; i++) {
        for (int j = 0; j < 3; j++) {
            struct gemm g = parts.g;
            g.m = cuts_m[i + 1] - cuts_m[i];
            g.n = cuts_n[j + 1] - cuts_n[j];
            g.a = (const float *)g.a + cuts_m[i]; /* A is transposed: its rows are columns here */
            g.b = (const float *)g.b + cuts_n[j];
            g.c = (float *)g.c + cuts_m[i] * g.ldc + cuts_n[j];
            gemm_cpu(&g);
        }
    }
    assert_memory_equal(whole.c, parts.c, whole.c_bytes);
    product_close(&whole);
    product_close(&parts);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bits_are_those_of_the_plain_chain),
        cmocka_unit_test(test_products_of_several_tiles),
        cmocka_unit_test(test_sums_of_tiny_terms_keep_their_sign),
        cmocka_unit_test(test_error_against_fp64_is_within_the_bound_of_the_chain),
        cmocka_unit_test(test_beta_zero_never_reads_c),
        cmocka_unit_test(test_empty_products),
        cmocka_unit_test(test_a_nan_stays_in_its_row_and_column),
        cmocka_unit_test(test_threads_do_not_change_bits),
        cmocka_unit_test(test_calls_from_a_parallel_region),
        cmocka_unit_test(test_pieces_of_c_have_the_bits_of_the_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
