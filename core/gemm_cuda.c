/* core/gemm: matrix products through cuBLASLt: the library, the choice of algorithms, the call. */
#include "core/gemm_cuda.h"

#include "core/gemm_choice.h"
#include "core/library.h"
#include "core/log.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Newest first; behind the loader's own places those of CUDA's installer. */
static const char *const library_names[] = {
    "libcublasLt.so.13",
    "libcublasLt.so.12",
    "/usr/local/cuda/lib64/libcublasLt.so.13",
    "/usr/local/cuda/lib64/libcublasLt.so.12",
};

static enum status load_library(struct gemm_cuda_state *state)
{
    char why[256] = "";
    for (size_t i = 0; state->library == NULL && i < sizeof library_names / sizeof library_names[0]; i++) {
        state->library = dlopen(library_names[i], RTLD_NOW | RTLD_LOCAL);
        if (state->library == NULL && i == 0) { /* the later names are there less often */
            snprintf(why, sizeof why, "%s", dlerror());
        }
    }
    if (state->library == NULL) {
        return status_fail(ERR_UNSUPPORTED,
                           "device cuda: cuBLASLt not found: looked for libcublasLt.so.13 and .so.12 where the loader "
                           "looks and in /usr/local/cuda/lib64; install it or add its folder to LD_LIBRARY_PATH (%s)",
                           why);
    }
    bool complete = true;
#define LOAD_FUNCTION(name)                                                                                            \
    complete = library_find(state->library, "cublasLt" #name, (void *)&state->lt.name) && complete;
    CUBLASLT_FUNCTIONS(LOAD_FUNCTION)
#undef LOAD_FUNCTION
    return complete
               ? OK
               : status_fail(ERR_UNSUPPORTED, "device cuda: cuBLASLt lacks functions that versions 12 and 13 have");
}

static enum status open_parts(struct gemm_cuda_state *state, int ordinal)
{
    struct cudaDeviceProp properties;
    TRY(load_library(state));
    if (cudaGetDeviceProperties(&properties, ordinal) != cudaSuccess) {
        return status_fail(ERR_DEVICE, "GPU %d: its properties cannot be read", ordinal);
    }
    snprintf(state->device, sizeof state->device, "%s", properties.name);
    cublasStatus_t created = state->lt.Create(&state->handle);
    if (created != CUBLAS_STATUS_SUCCESS) {
        return status_fail(ERR_DEVICE, "GPU: cuBLASLt %zu does not start: %s", state->lt.GetVersion(),
                           state->lt.GetStatusName(created));
    }
    TRY(cuda_event_open(&state->from));
    TRY(cuda_event_open(&state->to));
    return cuda_alloc(&state->workspace, GEMM_WORKSPACE_BYTES, "the workspace of matrix products");
}

enum status gemm_cuda_open(struct cuda *cuda)
{
    cuda->gemm = calloc(1, sizeof *cuda->gemm);
    if (cuda->gemm == NULL) {
        return status_fail(ERR_NOMEM, "GPU: no host memory for the state of matrix products");
    }
    enum status status = open_parts(cuda->gemm, cuda->ordinal);
    if (status != OK) {
        gemm_cuda_close(cuda);
    }
    return status;
}

void gemm_cuda_close(struct cuda *cuda)
{
    struct gemm_cuda_state *state = cuda->gemm;
    while (state->count > 0) {
        gemm_choice_drop(state);
    }
    free(state->choices);
    cuda_free(state->workspace);
    cuda_event_close(state->from);
    cuda_event_close(state->to);
    if (state->handle != NULL) {
        state->lt.Destroy(state->handle);
    }
    if (state->library != NULL) {
        dlclose(state->library);
    }
    free(state);
    cuda->gemm = NULL;
}

/* ---- shapes ---- */

static bool is_fp8(enum dtype type)
{
    return type == DTYPE_E4M3 || type == DTYPE_E5M2;
}

static void check_product(const struct gemm_cuda *g)
{
    ASSERT(g->m > 0 && g->n > 0 && g->k > 0 && g->a && g->b && g->c);
    ASSERT(g->c_type == DTYPE_BF16 || g->c_type == DTYPE_F32);
    ASSERT(g->lda >= (g->trans_a ? g->m : g->k) && g->ldb >= (g->trans_b ? g->k : g->n) && g->ldc >= g->n);
    if (is_fp8(g->a_type)) {
        ASSERT(is_fp8(g->b_type) && (g->a_type == DTYPE_E4M3 || g->b_type == DTYPE_E4M3));
        ASSERT(!g->trans_a && g->trans_b && g->a_scale && g->b_scale);
        ASSERT((g->n | g->k | g->lda | g->ldb | g->ldc) % 16 == 0);
        ASSERT(((uintptr_t)g->a | (uintptr_t)g->b | (uintptr_t)g->c) % 16 == 0);
        ASSERT(((uintptr_t)g->a_scale | (uintptr_t)g->b_scale) % 16 == 0);
    } else {
        ASSERT(g->a_type == DTYPE_BF16 && g->b_type == DTYPE_BF16 && !g->a_scale && !g->b_scale && !g->fast);
    }
}

static struct gemm_shape shape_of(const struct gemm_cuda *g)
{
    uintptr_t bits = (uintptr_t)g->a | (uintptr_t)g->b | (uintptr_t)g->c | 16;
    return (struct gemm_shape){
        .m = g->m,
        .n = g->n,
        .k = g->k,
        .lda = g->lda,
        .ldb = g->ldb,
        .ldc = g->ldc,
        .a_type = g->a_type,
        .b_type = g->b_type,
        .c_type = g->c_type,
        .trans_a = g->trans_a,
        .trans_b = g->trans_b,
        .adds = g->beta != 0.0F,
        .fast = g->fast,
        .alignment = (int64_t)(bits & -bits),
    };
}

/* ---- the call ---- */

/* Scales are the only pointers that live in a description: every call sets them. */
static cublasStatus_t set_scales(const struct cublaslt *lt, const struct gemm_choice *c, const struct gemm_cuda *g)
{
    if (g->a_scale == NULL) {
        return CUBLAS_STATUS_SUCCESS;
    }
    cublasStatus_t status = lt->MatmulDescSetAttribute(c->product, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &g->b_scale,
                                                       sizeof(const float *));
    return status != CUBLAS_STATUS_SUCCESS
               ? status
               : lt->MatmulDescSetAttribute(c->product, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &g->a_scale,
                                            sizeof(const float *));
}

static cublasStatus_t multiply(const struct cuda *cuda, const struct gemm_choice *c,
                               const cublasLtMatmulAlgo_t *algorithm, const struct gemm_cuda *g)
{
    const struct gemm_cuda_state *state = cuda->gemm;
    return state->lt.Matmul(state->handle, c->product, &g->alpha, g->b, c->a, g->a, c->b, &g->beta, g->c, c->c, g->c,
                            c->c, algorithm, state->workspace, GEMM_WORKSPACE_BYTES, cuda->stream);
}

/* ---- the choice ---- */

/* The choice of a shape; a new one takes the first proposal. */
static enum status choice_of(const struct cuda *cuda, const struct gemm_cuda *g, struct gemm_choice **choice)
{
    struct gemm_cuda_state *state = cuda->gemm;
    struct gemm_shape shape = shape_of(g);
    cublasLtMatmulHeuristicResult_t results[GEMM_CANDIDATES];
    struct gemm_choice *c = gemm_choice_find(state, &shape);
    if (c == NULL) {
        TRY(gemm_choice_add(state, &shape, &c));
        if (gemm_choice_propose(state, c, results) == 0) {
            gemm_choice_drop(state);
            return status_fail(ERR_UNSUPPORTED, "matrix product of %ld x %ld x %ld: cuBLASLt %zu has no algorithm",
                               (long)g->m, (long)g->n, (long)g->k, state->lt.GetVersion());
        }
        c->algorithm = results[0].algo;
    }
    *choice = c;
    return OK;
}

/* The time of a candidate that is refused although it was proposed: it never wins. */
#define NEVER_MS 1e30

/* Milliseconds of one product, over enough of them to be well above what an event resolves. */
static enum status time_product(const struct cuda *cuda, const struct gemm_choice *c,
                                const cublasLtMatmulAlgo_t *algorithm, const struct gemm_cuda *g, int repeats,
                                double *ms)
{
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    cuda_event_record(cuda, cuda->gemm->from);
    for (int i = 0; i < repeats && status == CUBLAS_STATUS_SUCCESS; i++) {
        status = multiply(cuda, c, algorithm, g);
    }
    cuda_event_record(cuda, cuda->gemm->to);
    TRY(cuda_sync(cuda, "timing a matrix product"));
    *ms = status == CUBLAS_STATUS_SUCCESS ? cuda_event_ms(cuda->gemm->from, cuda->gemm->to) / repeats : NEVER_MS;
    return OK;
}

/* Least time of each candidate. Rounds go over all of them, so that a clock that changes meets all alike. */
static enum status time_candidates(const struct cuda *cuda, const struct gemm_choice *c,
                                   const cublasLtMatmulHeuristicResult_t *results, int count, const struct gemm_cuda *g,
                                   double *best)
{
    enum { ROUNDS = 3, REPEATS_MAX = 20 };
    const double enough_ms = 0.3;
    for (int round = -1; round < ROUNDS; round++) {
        for (int i = 0; i < count; i++) {
            double ms, wanted = round < 0 ? 1.0 : enough_ms / best[i] + 1.0;
            int repeats = wanted < REPEATS_MAX ? (int)wanted : REPEATS_MAX;
            TRY(time_product(cuda, c, &results[i].algo, g, repeats, &ms));
            /* The round before the first loads code: it only tells how many repeats are enough. */
            best[i] = round <= 0 || ms < best[i] ? ms : best[i];
        }
    }
    return OK;
}

enum status gemm_cuda_plan(const struct cuda *cuda, const struct gemm_cuda *g)
{
    struct gemm_choice *c = NULL;
    cublasLtMatmulHeuristicResult_t results[GEMM_CANDIDATES];
    double ms[GEMM_CANDIDATES];
    check_product(g);
    TRY(choice_of(cuda, g, &c));
    if (c->timed) {
        return OK;
    }
    int count = gemm_choice_propose(cuda->gemm, c, results), best = 0;
    cublasStatus_t scales = set_scales(&cuda->gemm->lt, c, g);
    ASSERT(count > 0 && scales == CUBLAS_STATUS_SUCCESS);
    TRY(time_candidates(cuda, c, results, count, g, ms));
    /* An earlier proposal stays unless a later one is clearly faster: choices then rarely hang on noise. */
    for (int i = 1; i < count; i++) {
        best = ms[i] < 0.98 * ms[best] ? i : best;
    }
    if (!(ms[best] < NEVER_MS)) {
        return status_fail(ERR_UNSUPPORTED, "matrix product of %ld x %ld x %ld: cuBLASLt %zu refuses all %d algorithms",
                           (long)g->m, (long)g->n, (long)g->k, cuda->gemm->lt.GetVersion(), count);
    }
    log_debug("matrix product %ld x %ld x %ld: candidate %d of %d, %.4f ms (the first: %.4f ms)", (long)g->m,
              (long)g->n, (long)g->k, best + 1, count, ms[best], ms[0]);
    c->algorithm = results[best].algo;
    c->timed = true;
    return OK;
}

void gemm_cuda_plan_all(const struct cuda *cuda, bool on)
{
    cuda->gemm->plan_all = on;
}

void gemm_cuda(const struct cuda *cuda, const struct gemm_cuda *g)
{
    struct gemm_cuda_state *state = cuda->gemm;
    struct gemm_choice *c = NULL;
    char what[96];
    check_product(g);
    enum status status = state->plan_all ? gemm_cuda_plan(cuda, g) : OK;
    if (status != OK || choice_of(cuda, g, &c) != OK) {
        cuda_note(cuda, "a matrix product without an algorithm", cudaErrorNotSupported);
        return;
    }
    cublasStatus_t done = set_scales(&state->lt, c, g);
    if (done == CUBLAS_STATUS_SUCCESS) {
        done = multiply(cuda, c, &c->algorithm, g);
    }
    if (done != CUBLAS_STATUS_SUCCESS) {
        snprintf(what, sizeof what, "matrix product %ld x %ld x %ld, %s", (long)g->m, (long)g->n, (long)g->k,
                 state->lt.GetStatusName(done));
        cuda_note(cuda, what, cudaErrorNotSupported);
    }
}
