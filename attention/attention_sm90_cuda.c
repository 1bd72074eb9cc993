/* attention: the variant "sm90": what it runs, its memory, and the order of its kernels in the forward.
 *
 * A recipe is run here if its forward is; a backward that is not written for Hopper, and calls that ask for statistics,
 * go to the variant "cuda": the saved state is the same, and so are the meanings. */
#include "attention/attention_bwd_sm90.h"
#include "attention/attention_sm90.h"

#include <cuda_runtime_api.h>

enum { SM90_HEAD_DIM = 128 };

const char *attention_fwd_refuses_sm90(const struct attention_shape *shape, const struct attention_recipe *recipe)
{
    if (shape->head_dim != SM90_HEAD_DIM) {
        return "head_dim must be 128";
    }
    if (!(shape->softmax_scale > 0)) {
        return "softmax_scale must be positive: the row maximum is taken before it";
    }
    if (recipe->pv != PV_BF16 && recipe->pv != PV_FP8 && recipe->pv != PV_MXFP4) {
        return "pv must be bf16, fp8 or mxfp4";
    }
    if (recipe->pv == PV_BF16 && recipe->qk == QK_NVFP4_E4M3) {
        return "qk=nvfp4_e4m3 needs pv=fp8 or mxfp4";
    }
    if (recipe->anchor != ANCHOR_ROW) {
        return "anchor must be row";
    }
    if (recipe->p_map == P_ACCURATE) {
        return "p_map=accurate is not written for Hopper; use exact, threshold, code_space or affine";
    }
    if (recipe->v_diag != V_DIAG_BLOCKED || recipe->sink_keys_fp8 != 0) {
        return "v_diag must be blocked and sink_keys_fp8 0: one view of V for all rows";
    }
    if (shape->batch * shape->heads * ((shape->tokens + 127) / 128) >= 1 << 24) {
        return "batch * heads * tokens must be below 2^31: tiles are counted in 24 bits";
    }
    if (attention_wants_exact(recipe)) {
        return "bwd_stat must be saved or saved_raw: the exact normaliser is not made";
    }
    return attention_variant_cuda.refuses(shape, recipe);
}

/* ---- memory of the forward --------------------------------------------------------------------------------- */

struct fwd_memory {
    uint32_t *counter;
    struct head_facts *q_facts, *k_facts, *v_facts;
    bf16 *q, *k, *v; /* represented operands where the caller keeps none */
    uint8_t *q8, *k8, *v_column;
    float *q_inverse, *k_inverse, *v_inverse;
};

static struct fwd_memory fwd_carve(const struct attention_shape *s, const struct attention_recipe *recipe, bool kept,
                                   struct carve *carve)
{
    const size_t heads = (size_t)(s->batch * s->heads);
    const size_t kv_heads = (size_t)(s->batch * s->kv_heads);
    const size_t head = (size_t)s->tokens * SM90_HEAD_DIM;
    const bool coded = recipe->qk != QK_BF16;
    const bool scores8 = recipe->qk == QK_NVFP4_E4M3;
    const bool values8 = recipe->pv != PV_BF16;
    return (struct fwd_memory){
        .counter = carve_take(carve, sizeof(uint32_t)),
        .q_facts = carve_take(carve, heads * sizeof(struct head_facts)),
        .k_facts = carve_take(carve, kv_heads * sizeof(struct head_facts)),
        .v_facts = carve_take(carve, kv_heads * sizeof(struct head_facts)),
        .q = carve_take(carve, coded && !kept ? heads * head * sizeof(bf16) : 0),
        .k = carve_take(carve, (coded || recipe->k_center) && !kept ? kv_heads * head * sizeof(bf16) : 0),
        .v = carve_take(carve, values8 && !kept ? kv_heads * head * sizeof(bf16) : 0),
        .q8 = carve_take(carve, scores8 ? heads * head : 0),
        .k8 = carve_take(carve, scores8 ? kv_heads * head : 0),
        .v_column =
            carve_take(carve, values8 ? kv_heads * (size_t)attention_padded_sm90(s->tokens) * SM90_HEAD_DIM : 0),
        .q_inverse = carve_take(carve, heads * sizeof(float)),
        .k_inverse = carve_take(carve, kv_heads * sizeof(float)),
        .v_inverse = carve_take(carve, kv_heads * sizeof(float)),
    };
}

size_t attention_fwd_scratch_bytes_sm90(const struct attention_shape *shape, const struct attention_recipe *recipe)
{
    struct carve carve = {0};
    (void)fwd_carve(shape, recipe, false, &carve);
    return carve.used;
}

/* ---- operands ---------------------------------------------------------------------------------------------- */

static struct head_tensor tensor_of(const struct attention_shape *s, struct head_view view, int64_t heads)
{
    return (struct head_tensor){view, s->batch, s->tokens, heads, s->head_dim};
}

/* (B, heads, T, D) contiguous. */
static struct head_view own_view(const struct attention_shape *s, bf16 *data, int64_t heads)
{
    return (struct head_view){data, heads * s->tokens * s->head_dim, s->head_dim, s->tokens * s->head_dim};
}

/* Q or K as scores read it: the view itself, or published to `own`. */
static struct head_view score_view(const struct attention_fwd *a, struct head_view view, int64_t heads, bf16 *own,
                                   struct head_facts *facts)
{
    if (a->recipe->qk == QK_BF16) {
        return view;
    }
    const struct head_tensor x = tensor_of(&a->shape, view, heads);
    struct attention_recipe nvfp4 = *a->recipe;
    nvfp4.qk = QK_NVFP4; /* the step to E4M3 is lowered_rows' */
    attention_measure_cuda(a->cuda, &x, facts);
    attention_scores_cuda(a->cuda, &nvfp4, &x, facts, NULL, own);
    return own_view(&a->shape, own, heads);
}

static struct head_view centred_view(const struct attention_fwd *a, bf16 *own)
{
    const struct head_tensor k = tensor_of(&a->shape, a->k, a->shape.kv_heads);
    attention_centre_cuda(a->cuda, &k, own);
    return own_view(&a->shape, own, a->shape.kv_heads);
}

/* qk = nvfp4_e4m3: a published operand is rounded to E4M3; its codes. */
static const uint8_t *lowered_rows(const struct attention_fwd *a, struct head_view view, int64_t heads,
                                   struct head_facts *facts, uint8_t *rows, float *inverse)
{
    const struct head_tensor x = tensor_of(&a->shape, view, heads);
    attention_measure_cuda(a->cuda, &x, facts);
    attention_lower_rows_sm90(a->cuda, view.data, a->shape.batch * heads, a->shape.tokens, facts, rows, inverse);
    return rows;
}

static void value_column(const struct attention_fwd *a, const struct fwd_memory *m, bf16 *own)
{
    const struct head_tensor v = tensor_of(&a->shape, a->v, a->shape.kv_heads);
    attention_measure_cuda(a->cuda, &v, m->v_facts);
    attention_values_cuda(a->cuda, a->recipe, &v, m->v_facts, NULL, own);
    attention_value_column_sm90(a->cuda, &a->shape, a->recipe, own, m->v_facts, m->v_column, m->v_inverse);
}

void attention_fwd_sm90(const struct attention_fwd *a)
{
    const struct attention_shape *s = &a->shape;
    const struct attention_recipe *recipe = a->recipe;
    ASSERT(attention_fwd_refuses_sm90(s, recipe) == NULL);
    struct carve scratch = {.base = a->scratch};
    struct carve kept = {.base = a->saved};
    const struct fwd_memory m = fwd_carve(s, recipe, a->saved != NULL, &scratch);
    struct attention_saved saved = {.q = m.q, .k = m.k, .v = m.v};
    if (a->saved != NULL) {
        saved = attention_saved_cuda_carve(s, recipe, &kept).operands;
    }
    struct head_view k = recipe->k_center ? centred_view(a, saved.k) : a->k;
    k = score_view(a, k, s->kv_heads, saved.k, m.k_facts);
    const struct head_view q = score_view(a, a->q, s->heads, saved.q, m.q_facts);
    if (recipe->pv == PV_BF16) {
        attention_fwd_bf16_sm90(a, &q, &k, &a->v, m.counter);
        return;
    }
    value_column(a, &m, saved.v);
    struct attention_operands_sm90 x = {
        .q = q,
        .k = k,
        .v_column = m.v_column,
        .q_inverse = m.q_inverse,
        .k_inverse = m.k_inverse,
        .v_inverse = m.v_inverse,
        .counter = m.counter,
    };
    if (recipe->qk == QK_NVFP4_E4M3) {
        x.q8 = lowered_rows(a, q, s->heads, m.q_facts, m.q8, m.q_inverse);
        x.k8 = lowered_rows(a, k, s->kv_heads, m.k_facts, m.k8, m.k_inverse);
    }
    attention_fwd_codes_sm90(a, &x);
}

/* ---- the variant ------------------------------------------------------------------------------------------- */

static size_t saved_bytes_sm90(const struct attention_shape *shape, const struct attention_recipe *recipe)
{
    return attention_variant_cuda.saved_bytes(shape, recipe);
}

static size_t largest(size_t a, size_t b)
{
    return a > b ? a : b;
}

static size_t scratch_bytes_sm90(const struct attention_shape *shape, const struct attention_recipe *recipe)
{
    size_t bytes = attention_fwd_scratch_bytes_sm90(shape, recipe);
    if (attention_bwd_refuses_sm90(shape, recipe) == NULL) {
        bytes = largest(bytes, attention_bwd_scratch_bytes_sm90(shape, recipe));
    }
    return largest(bytes, attention_variant_cuda.scratch_bytes(shape, recipe));
}

/* The kernels hold code for sm_90a only. */
static bool on_hopper(void)
{
    int device;
    int major = 0;
    int minor = 0;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
           cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && major == 9 &&
           minor == 0;
}

static const char *refuses_sm90(const struct attention_shape *shape, const struct attention_recipe *recipe)
{
    if (!on_hopper()) {
        return "the GPU is not of compute capability 9.0";
    }
    return attention_fwd_refuses_sm90(shape, recipe);
}

static void fwd_sm90(const struct attention_fwd *a)
{
    if (a->stats != NULL) {
        attention_variant_cuda.fwd(a);
    } else {
        attention_fwd_sm90(a);
    }
}

static void bwd_sm90(const struct attention_bwd *a)
{
    if (a->stats != NULL || attention_bwd_refuses_sm90(&a->shape, a->recipe) != NULL) {
        attention_variant_cuda.bwd(a);
    } else {
        attention_bwd_sm90(a);
    }
}

const struct attention_variant attention_variant_sm90 = {
    .name = "sm90",
    .device = DEVICE_CUDA,
    .refuses = refuses_sm90,
    .saved_bytes = saved_bytes_sm90,
    .scratch_bytes = scratch_bytes_sm90,
    .bwd_refuses = attention_bwd_refuses_sm90,
    .fwd = fwd_sm90,
    .bwd = bwd_sm90,
};
