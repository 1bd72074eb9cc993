/* bench: our matrix product beside OpenBLAS, in GFLOP/s, for one thread and all.
 *   build/release/bench/gemm [seconds per figure]
 * OpenBLAS is opened at run time and only here: its bits depend on the number of threads, ours must not. */
#include "core/gemm.h"

#include <dlfcn.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { BLAS_ROW_MAJOR = 101, BLAS_PLAIN = 111, BLAS_TRANSPOSED = 112 };

typedef void sgemm_fn(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda,
                      const float *b, int ldb, float beta, float *c, int ldc);

struct blas {
    sgemm_fn *sgemm;
    void (*set_threads)(int threads);
};

struct shape {
    const char *what;
    int64_t m, n, k;
    bool trans_a, trans_b;
    enum dtype a_type, b_type;
};

static const struct shape shapes[] = {
    {"square", 1024, 1024, 1024, false, false, DTYPE_F32, DTYPE_F32},
    {"square, B transposed", 1024, 1024, 1024, false, true, DTYPE_F32, DTYPE_F32},
    {"square, A transposed", 1024, 1024, 1024, true, false, DTYPE_F32, DTYPE_F32},
    {"square, BF16, B transposed", 1024, 1024, 1024, false, true, DTYPE_BF16, DTYPE_BF16},
    {"attention tile Q K^T", 64, 64, 64, false, true, DTYPE_F32, DTYPE_F32},
    {"attention tile P V", 64, 64, 64, false, false, DTYPE_F32, DTYPE_F32},
    {"attention row block", 64, 256, 64, false, true, DTYPE_F32, DTYPE_F32},
    {"small MLP forward", 512, 704, 256, false, true, DTYPE_F32, DTYPE_BF16},
    {"small MLP weight gradient", 704, 256, 512, true, false, DTYPE_F32, DTYPE_F32},
    {"1B projection forward", 512, 2048, 2048, false, true, DTYPE_F32, DTYPE_BF16},
    {"1B MLP down", 512, 2048, 8192, false, true, DTYPE_F32, DTYPE_BF16},
    {"one row", 1, 4096, 4096, false, true, DTYPE_F32, DTYPE_BF16},
};

/* OpenBLAS in the usual places, or a NULL function. */
static struct blas blas_open(void)
{
    struct blas blas = {0};
    void *library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    if (library) {
        /* POSIX defines this conversion; ISO C does not, hence the copy through a union. */
        union {
            void *object;
            sgemm_fn *sgemm;
            void (*set_threads)(int);
        } u = {.object = dlsym(library, "cblas_sgemm")};
        blas.sgemm = u.sgemm;
        u.object = dlsym(library, "openblas_set_num_threads");
        blas.set_threads = u.set_threads;
    }
    return blas;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *new_matrix(int64_t elements, enum dtype type)
{
    float *x = malloc((size_t)elements * sizeof(float));
    ASSERT(x);
    for (int64_t i = 0; i < elements; i++) {
        float value = (float)(i * 7919 % 1021) / 1021.0f - 0.5f;
        if (type == DTYPE_BF16) {
            ((bf16 *)x)[i] = bf16_from_float(value);
        } else {
            x[i] = value;
        }
    }
    return x;
}

static void call_once(const struct blas *blas, const struct gemm *g)
{
    if (blas) {
        blas->sgemm(BLAS_ROW_MAJOR, g->trans_a ? BLAS_TRANSPOSED : BLAS_PLAIN,
                    g->trans_b ? BLAS_TRANSPOSED : BLAS_PLAIN, (int)g->m, (int)g->n, (int)g->k, g->alpha, g->a,
                    (int)g->lda, g->b, (int)g->ldb, g->beta, g->c, (int)g->ldc);
    } else {
        gemm_cpu(g);
    }
}

/* The best rate of batches of at least a millisecond: other processes can only make a batch slower. */
static double gflops(const struct blas *blas, const struct gemm *g, double seconds)
{
    double flops = 2.0 * (double)g->m * (double)g->n * (double)g->k;
    int batch = 1 + (int)(1e8 / flops);
    double best = 0;
    call_once(blas, g);
    for (double end = now() + seconds; now() < end;) {
        double start = now();
        for (int i = 0; i < batch; i++) {
            call_once(blas, g);
        }
        double rate = flops * batch / (now() - start) * 1e-9;
        best = rate > best ? rate : best;
    }
    return best;
}

/* One line of the table. */
static void measure(const struct blas *blas, const struct shape *s, int threads, double seconds)
{
    struct gemm g = {.m = s->m, .n = s->n, .k = s->k, .trans_a = s->trans_a, .trans_b = s->trans_b, .alpha = 1};
    g.lda = s->trans_a ? s->m : s->k;
    g.ldb = s->trans_b ? s->k : s->n;
    g.ldc = s->n;
    g.a_type = s->a_type;
    g.b_type = s->b_type;
    g.a = new_matrix(s->m * s->k, s->a_type);
    g.b = new_matrix(s->k * s->n, s->b_type);
    g.c = new_matrix(s->m * s->n, DTYPE_F32);
    omp_set_num_threads(threads);
    double ours = gflops(NULL, &g, seconds);
    printf("%-28s %5ld %5ld %5ld %7d %9.1f", s->what, (long)s->m, (long)s->n, (long)s->k, threads, ours);
    free((void *)g.a);
    free((void *)g.b);
    if (blas->sgemm) {
        /* OpenBLAS has no BF16 times FP32: it is given FP32 in any case. */
        g.a = new_matrix(s->m * s->k, DTYPE_F32);
        g.b = new_matrix(s->k * s->n, DTYPE_F32);
        if (blas->set_threads) {
            blas->set_threads(threads);
        }
        double theirs = gflops(blas, &g, seconds);
        printf(" %9.1f %6.2f", theirs, ours / theirs);
        free((void *)g.a);
        free((void *)g.b);
    }
    printf("\n");
    free(g.c);
}

int main(int argc, char **argv)
{
    double seconds = argc > 1 ? atof(argv[1]) : 0.5;
    struct blas blas = blas_open();
    printf("GFLOP/s, best of %.1f s; ours / OpenBLAS%s\n", seconds, blas.sgemm ? "" : " (libopenblas.so.0 not found)");
    printf("%-28s %5s %5s %5s %7s %9s %9s %6s\n", "product", "M", "N", "K", "threads", "ours", "OpenBLAS", "ratio");
    int most = omp_get_max_threads();
    for (int threads = 1; threads <= most; threads = threads < most ? most : most + 1) {
        for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
            measure(&blas, &shapes[i], threads, seconds);
        }
    }
    return 0;
}
