/* core/gemm: the table of choices, and its file. A choice keeps the library's descriptors, so that a product costs
 * little on the host. */
#include "core/gemm_choice.h"

#include "core/json.h"
#include "core/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct gemm_choice *gemm_choice_find(const struct gemm_cuda_state *state, const struct gemm_shape *shape)
{
    for (int i = 0; i < state->count; i++) {
        if (memcmp(&state->choices[i].shape, shape, sizeof *shape) == 0) {
            return &state->choices[i];
        }
    }
    return NULL;
}

static cudaDataType_t lt_type(int64_t type)
{
    return type == DTYPE_F32    ? CUDA_R_32F
           : type == DTYPE_BF16 ? CUDA_R_16BF
           : type == DTYPE_E4M3 ? CUDA_R_8F_E4M3
                                : CUDA_R_8F_E5M2;
}

/* A row-major matrix (rows, cols) is the column-major (cols, rows). */
static cublasStatus_t describe_matrix(const struct cublaslt *lt, cublasLtMatrixLayout_t *layout, int64_t type,
                                      int64_t rows, int64_t cols, int64_t stride)
{
    return lt->MatrixLayoutCreate(layout, lt_type(type), (uint64_t)cols, (uint64_t)rows, stride);
}

static cublasStatus_t describe(const struct cublaslt *lt, struct gemm_choice *c)
{
    const struct gemm_shape *s = &c->shape;
    const cublasOperation_t op_a = s->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                            op_b = s->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const int8_t fast = s->fast ? 1 : 0;
    cublasStatus_t status[] = {
        lt->MatmulDescCreate(&c->product, CUBLAS_COMPUTE_32F, CUDA_R_32F),
        describe_matrix(lt, &c->a, s->b_type, s->trans_b ? s->n : s->k, s->trans_b ? s->k : s->n, s->ldb),
        describe_matrix(lt, &c->b, s->a_type, s->trans_a ? s->k : s->m, s->trans_a ? s->m : s->k, s->lda),
        describe_matrix(lt, &c->c, s->c_type, s->m, s->n, s->ldc),
    };
    for (size_t i = 0; i < sizeof status / sizeof status[0]; i++) {
        if (status[i] != CUBLAS_STATUS_SUCCESS) {
            return status[i];
        }
    }
    cublasStatus_t set = lt->MatmulDescSetAttribute(c->product, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof op_a);
    if (set == CUBLAS_STATUS_SUCCESS) {
        set = lt->MatmulDescSetAttribute(c->product, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b);
    }
    if (set == CUBLAS_STATUS_SUCCESS) {
        set = lt->MatmulDescSetAttribute(c->product, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast);
    }
    return set;
}

void gemm_choice_drop(struct gemm_cuda_state *state)
{
    struct gemm_choice *c = &state->choices[--state->count];
    const cublasLtMatrixLayout_t layouts[] = {c->a, c->b, c->c};
    for (int i = 0; i < 3; i++) {
        if (layouts[i] != NULL) {
            state->lt.MatrixLayoutDestroy(layouts[i]);
        }
    }
    if (c->product != NULL) {
        state->lt.MatmulDescDestroy(c->product);
    }
}

cublasStatus_t gemm_choice_add(struct gemm_cuda_state *state, const struct gemm_shape *shape,
                               struct gemm_choice **choice)
{
    if (state->count == state->capacity) {
        int capacity = state->capacity == 0 ? 32 : 2 * state->capacity;
        struct gemm_choice *grown = realloc(state->choices, (size_t)capacity * sizeof *grown);
        if (grown == NULL) {
            return CUBLAS_STATUS_ALLOC_FAILED;
        }
        state->choices = grown;
        state->capacity = capacity;
    }
    struct gemm_choice *c = &state->choices[state->count++];
    *c = (struct gemm_choice){.shape = *shape};
    cublasStatus_t described = describe(&state->lt, c);
    if (described != CUBLAS_STATUS_SUCCESS) {
        gemm_choice_drop(state);
        return described;
    }
    *choice = c;
    return CUBLAS_STATUS_SUCCESS;
}

/* Constraints on proposals. Split-k sums: in FP32 in the workspace, never in the rounded output. */
static cublasStatus_t set_limits(const struct cublaslt *lt, const struct gemm_shape *shape,
                                 cublasLtMatmulPreference_t preference)
{
    const uint64_t workspace = GEMM_WORKSPACE_BYTES;
    const struct {
        cublasLtMatmulPreferenceAttributes_t attribute;
        uint32_t number;
    } limits[] = {
        {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, (uint32_t)shape->alignment},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, (uint32_t)shape->alignment},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (uint32_t)shape->alignment},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (uint32_t)shape->alignment},
    };
    cublasStatus_t status = lt->MatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                             &workspace, sizeof workspace);
    for (size_t i = 0; status == CUBLAS_STATUS_SUCCESS && i < sizeof limits / sizeof limits[0]; i++) {
        status = lt->MatmulPreferenceSetAttribute(preference, limits[i].attribute, &limits[i].number,
                                                  sizeof limits[i].number);
    }
    return status;
}

cublasStatus_t gemm_choice_propose(const struct gemm_cuda_state *state, const struct gemm_choice *c,
                                   cublasLtMatmulHeuristicResult_t results[GEMM_CANDIDATES], int *count)
{
    const struct cublaslt *lt = &state->lt;
    cublasLtMatmulPreference_t preference;
    int proposed = 0, usable = 0;
    memset(results, 0, GEMM_CANDIDATES * sizeof *results);
    cublasStatus_t status = lt->MatmulPreferenceCreate(&preference);
    if (status != CUBLAS_STATUS_SUCCESS) {
        return status;
    }
    status = set_limits(lt, &c->shape, preference);
    if (status == CUBLAS_STATUS_SUCCESS) {
        status = lt->MatmulAlgoGetHeuristic(state->handle, c->product, c->a, c->b, c->c, c->c, preference,
                                            GEMM_CANDIDATES, results, &proposed);
    }
    lt->MatmulPreferenceDestroy(preference);
    for (int i = 0; status == CUBLAS_STATUS_SUCCESS && i < proposed; i++) {
        if (results[i].state == CUBLAS_STATUS_SUCCESS) {
            results[usable++] = results[i];
        }
    }
    *count = usable;
    return status == CUBLAS_STATUS_SUCCESS && usable == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : status;
}

/* ---- the file ---- */

static const char *const number_names[] = {
#define NUMBER_NAME(name) #name,
    GEMM_SHAPE_NUMBERS(NUMBER_NAME)
#undef NUMBER_NAME
};
enum { NUMBERS = sizeof number_names / sizeof number_names[0] };

/* An algorithm is a few words that the library's documentation allows to store: 16 hexadecimal digits each. */
enum { WORDS = sizeof(cublasLtMatmulAlgo_t) / sizeof(uint64_t), DIGITS = 16, TEXT_BYTES = WORDS * DIGITS + 1 };

static void algorithm_to_text(const cublasLtMatmulAlgo_t *algorithm, char text[TEXT_BYTES])
{
    for (int i = 0; i < WORDS; i++) {
        snprintf(text + i * DIGITS, DIGITS + 1, "%016llx", (unsigned long long)algorithm->data[i]);
    }
}

static bool algorithm_from_text(const char *text, cublasLtMatmulAlgo_t *algorithm)
{
    if (strlen(text) != TEXT_BYTES - 1 || strspn(text, "0123456789abcdef") != TEXT_BYTES - 1) {
        return false;
    }
    for (int i = 0; i < WORDS; i++) {
        char word[DIGITS + 1] = {0};
        memcpy(word, text + i * DIGITS, DIGITS);
        algorithm->data[i] = strtoull(word, NULL, 16);
    }
    return true;
}

static json_t *choice_to_json(const struct gemm_choice *c)
{
    char text[TEXT_BYTES];
    int64_t numbers[NUMBERS];
    json_t *entry = json_object();
    memcpy(numbers, &c->shape, sizeof numbers);
    for (int i = 0; i < NUMBERS; i++) {
        json_object_set_new(entry, number_names[i], json_integer(numbers[i]));
    }
    algorithm_to_text(&c->algorithm, text);
    json_object_set_new(entry, "algorithm", json_string(text));
    return entry;
}

static json_t *choices_to_json(const struct gemm_cuda_state *state)
{
    json_t *root = json_object(), *list = json_array();
    json_object_set_new(root, "device", json_string(state->device));
    json_object_set_new(root, "cublaslt", json_integer((json_int_t)state->lt.GetVersion()));
    for (int i = 0; i < state->count; i++) {
        if (state->choices[i].timed) {
            json_array_append_new(list, choice_to_json(&state->choices[i]));
        }
    }
    json_object_set_new(root, "choices", list);
    return root;
}

enum status gemm_cuda_save(const struct cuda *cuda, const char *path)
{
    json_t *root = choices_to_json(cuda->gemm);
    enum status status = json_write_file(path, root);
    json_decref(root);
    return status;
}

enum status gemm_cuda_export(const struct cuda *cuda, char **text)
{
    json_t *root = choices_to_json(cuda->gemm);
    *text = json_dumps(root, JSON_COMPACT);
    json_decref(root);
    return *text != NULL ? OK : status_fail(ERR_NOMEM, "GPU: no host memory for the choices of matrix products");
}

/* The library does not check words that it did not make: an algorithm from outside is only believed if it is among
 * those that are proposed here. */
static bool is_proposed(const struct gemm_cuda_state *state, const struct gemm_choice *c,
                        const cublasLtMatmulAlgo_t *algorithm)
{
    cublasLtMatmulHeuristicResult_t results[GEMM_CANDIDATES];
    int count = 0;
    bool proposed = gemm_choice_propose(state, c, results, &count) == CUBLAS_STATUS_SUCCESS;
    for (int i = 0; proposed && i < count; i++) {
        if (memcmp(&results[i].algo, algorithm, sizeof *algorithm) == 0) {
            return true;
        }
    }
    return false;
}

/* Who gives choices, and what to do about bad ones. */
struct origin {
    const char *name, *remedy;
};

static enum status take_choice(struct gemm_cuda_state *state, const struct origin *from, const json_t *entry)
{
    struct gemm_shape shape;
    int64_t numbers[NUMBERS];
    const char *text = NULL;
    cublasLtMatmulAlgo_t algorithm;
    for (int i = 0; i < NUMBERS; i++) {
        TRY(json_get_int(entry, from->name, number_names[i], &numbers[i]));
    }
    TRY(json_get_string(entry, from->name, "algorithm", &text));
    memcpy(&shape, numbers, sizeof shape);
    struct gemm_choice *c = gemm_choice_find(state, &shape);
    bool added = c == NULL && gemm_choice_add(state, &shape, &c) == CUBLAS_STATUS_SUCCESS;
    if (c == NULL || !algorithm_from_text(text, &algorithm) || !is_proposed(state, c, &algorithm)) {
        if (added) {
            gemm_choice_drop(state);
        }
        return status_fail(ERR_DATA, "%s: the algorithm of the product %ld x %ld x %ld is not one of cuBLASLt's: %s",
                           from->name, (long)shape.m, (long)shape.n, (long)shape.k, from->remedy);
    }
    c->algorithm = algorithm;
    c->timed = true;
    return OK;
}

static enum status take_choices(struct gemm_cuda_state *state, const struct origin *from, const json_t *root)
{
    const char *device = NULL;
    int64_t version = 0;
    TRY(json_get_string(root, from->name, "device", &device));
    TRY(json_get_int(root, from->name, "cublaslt", &version));
    if (strcmp(device, state->device) != 0 || version != (int64_t)state->lt.GetVersion()) {
        log_info("%s: matrix products were chosen for %s with cuBLASLt %ld, here is %s with %ld: not used", from->name,
                 device, (long)version, state->device, (long)state->lt.GetVersion());
        return OK;
    }
    const json_t *list = json_object_get(root, "choices");
    if (!json_is_array(list)) {
        return status_fail(ERR_DATA, "%s: \"choices\" is not a list: %s", from->name, from->remedy);
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        TRY(take_choice(state, from, json_array_get(list, i)));
    }
    return OK;
}

enum status gemm_cuda_load(const struct cuda *cuda, const char *path)
{
    const struct origin file = {path, "remove the file, and products are chosen again"};
    json_t *root = NULL;
    TRY(json_read_file(path, &root));
    enum status status = take_choices(cuda->gemm, &file, root);
    json_decref(root);
    return status;
}

enum status gemm_cuda_import(const struct cuda *cuda, const char *from, const char *text)
{
    const struct origin rank = {from, "all ranks must have the same GPU, driver, libraries and build of this program"};
    json_t *root = NULL;
    TRY(json_read_text(from, text, strlen(text), &root));
    enum status status = take_choices(cuda->gemm, &rank, root);
    json_decref(root);
    return status;
}

int gemm_cuda_planned(const struct cuda *cuda)
{
    int planned = 0;
    for (int i = 0; i < cuda->gemm->count; i++) {
        planned += cuda->gemm->choices[i].timed;
    }
    return planned;
}
