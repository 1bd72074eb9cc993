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
static cublasStatus_t choice_of(const struct cuda *cuda, const struct gemm_cuda *g, struct gemm_choice **choice)
{
    struct gemm_cuda_state *state = cuda->gemm;
    struct gemm_shape shape = shape_of(g);
    struct gemm_choice *c = gemm_choice_find(state, &shape);
    if (c == NULL) {
        cublasLtMatmulHeuristicResult_t results[GEMM_CANDIDATES];
        int count = 0;
        cublasStatus_t status = gemm_choice_add(state, &shape, &c);
        if (status != CUBLAS_STATUS_SUCCESS) {
            return status;
        }
        status = gemm_choice_propose(state, c, results, &count);
        if (status != CUBLAS_STATUS_SUCCESS) {
            gemm_choice_drop(state);
            return status;
        }
        c->algorithm = results[0].algo;
    }
    *choice = c;
    return CUBLAS_STATUS_SUCCESS;
}

/* The time of a candidate that is refused although it was proposed: it never wins. */
#define NEVER_MS 1e30

/* Milliseconds of one product, over enough of them to be well above what an event resolves. */
static cublasStatus_t time_product(const struct cuda *cuda, const struct gemm_choice *c,
                                   const cublasLtMatmulAlgo_t *algorithm, const struct gemm_cuda *g, int repeats,
                                   double *ms)
{
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    cuda_event_record(cuda, cuda->gemm->from);
    for (int i = 0; i < repeats && status == CUBLAS_STATUS_SUCCESS; i++) {
        status = multiply(cuda, c, algorithm, g);
    }
    cuda_event_record(cuda, cuda->gemm->to);
    if (cudaStreamSynchronize(cuda->stream) != cudaSuccess) {
        return CUBLAS_STATUS_EXECUTION_FAILED; /* the next cuda_sync has the words */
    }
    *ms = status == CUBLAS_STATUS_SUCCESS ? cuda_event_ms(cuda->gemm->from, cuda->gemm->to) / repeats : NEVER_MS;
    return CUBLAS_STATUS_SUCCESS;
}

/* Least time of each candidate. Rounds go over all of them, so that changing clocks affect all alike. */
static cublasStatus_t time_candidates(const struct cuda *cuda, const struct gemm_choice *c,
                                      const cublasLtMatmulHeuristicResult_t *results, int count,
                                      const struct gemm_cuda *g, double *best)
{
    enum { ROUNDS = 3, REPEATS_MAX = 20 };
    const double enough_ms = 0.3;
    for (int round = -1; round < ROUNDS; round++) {
        for (int i = 0; i < count; i++) {
            double ms, wanted = round < 0 ? 1.0 : enough_ms / best[i] + 1.0;
            int repeats = wanted < REPEATS_MAX ? (int)wanted : REPEATS_MAX;
            cublasStatus_t status = time_product(cuda, c, &results[i].algo, g, repeats, &ms);
            if (status != CUBLAS_STATUS_SUCCESS) {
                return status;
            }
            /* The round before the first loads code: it only tells how many repeats are enough. */
            best[i] = round <= 0 || ms < best[i] ? ms : best[i];
        }
    }
    return CUBLAS_STATUS_SUCCESS;
}

/* Times what is proposed for a choice and takes the fastest. */
static cublasStatus_t plan_choice(const struct cuda *cuda, struct gemm_choice *c, const struct gemm_cuda *g)
{
    cublasLtMatmulHeuristicResult_t results[GEMM_CANDIDATES];
    double ms[GEMM_CANDIDATES];
    int count = 0, best = 0;
    cublasStatus_t status = gemm_choice_propose(cuda->gemm, c, results, &count);
    if (status == CUBLAS_STATUS_SUCCESS) {
        status = set_scales(&cuda->gemm->lt, c, g);
    }
    if (status == CUBLAS_STATUS_SUCCESS) {
        status = time_candidates(cuda, c, results, count, g, ms);
    }
    if (status != CUBLAS_STATUS_SUCCESS) {
        return status;
    }
    /* An earlier proposal stays unless a later one is clearly faster: choices then rarely hang on noise. */
    for (int i = 1; i < count; i++) {
        best = ms[i] < 0.98 * ms[best] ? i : best;
    }
    if (!(ms[best] < NEVER_MS)) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    log_debug("matrix product %ld x %ld x %ld: candidate %d of %d, %.4f ms (the first: %.4f ms)", (long)g->m,
              (long)g->n, (long)g->k, best + 1, count, ms[best], ms[0]);
    c->algorithm = results[best].algo;
    c->timed = true;
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t plan(const struct cuda *cuda, const struct gemm_cuda *g)
{
    struct gemm_choice *c = NULL;
    cublasStatus_t status = choice_of(cuda, g, &c);
    return status != CUBLAS_STATUS_SUCCESS || c->timed ? status : plan_choice(cuda, c, g);
}

enum status gemm_cuda_plan(const struct cuda *cuda, const struct gemm_cuda *g)
{
    check_product(g);
    cublasStatus_t planned = plan(cuda, g);
    if (planned == CUBLAS_STATUS_SUCCESS) {
        return OK;
    }
    TRY(cuda_sync(cuda, "planning a matrix product")); /* a GPU that failed before is why, then */
    return status_fail(ERR_UNSUPPORTED, "matrix product %ld x %ld x %ld: cuBLASLt %zu: %s", (long)g->m, (long)g->n,
                       (long)g->k, cuda->gemm->lt.GetVersion(), cuda->gemm->lt.GetStatusName(planned));
}

void gemm_cuda_plan_all(const struct cuda *cuda, bool on)
{
    cuda->gemm->plan_all = on;
}

void gemm_cuda(const struct cuda *cuda, const struct gemm_cuda *g)
{
    struct gemm_cuda_state *state = cuda->gemm;
    struct gemm_choice *c = NULL;
    check_product(g);
    cublasStatus_t status = state->plan_all ? plan(cuda, g) : CUBLAS_STATUS_SUCCESS;
    if (status == CUBLAS_STATUS_SUCCESS) {
        status = choice_of(cuda, g, &c);
    }
    if (status == CUBLAS_STATUS_SUCCESS) {
        status = set_scales(&state->lt, c, g);
    }
    if (status == CUBLAS_STATUS_SUCCESS) {
        status = multiply(cuda, c, &c->algorithm, g);
    }
    if (status != CUBLAS_STATUS_SUCCESS) {
        char what[96];
        snprintf(what, sizeof what, "matrix product %ld x %ld x %ld, %s", (long)g->m, (long)g->n, (long)g->k,
                 state->lt.GetStatusName(status));
        cuda_note(cuda, what, cudaErrorNotSupported);
    }
}
