/* attention: the variant "sm90": what it runs, its memory, and the order of its kernels in the forward.
 *
 * A recipe is run here if its forward is; a backward that is not written for Hopper, and calls that ask for statistics,
 * go to the variant "cuda": the saved state begins with the same, and so are the meanings. */
#include "attention/attention_bwd_sm90.h"
#include "attention/attention_sm90.h"

#include <cuda_runtime_api.h>

enum { SM90_HEAD_DIM = 128 };

/* The largest score of a block has x in [2, 3.17), and an exact code of 4 or 6. Lines whose code there is smaller or
 * has to be cut off leave the range of the backward's exponents, or of the sums that round. */
static bool far_from_exact(const struct attention_recipe *r)
{
    return r->p_map == P_AFFINE &&
           !(2.0f * r->affine_a + r->affine_b > 3.5f && 3.2f * r->affine_a + r->affine_b < 7.0f);
}

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
    if (far_from_exact(recipe)) {
        return "p_map=affine wants 2 affine_a + affine_b above 3.5 and 3.2 affine_a + affine_b below 7: a block's "
               "largest code must be 4 or 6";
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

/* ---- saved state ------------------------------------------------------------------------------------------- */

struct attention_saved_sm90 attention_saved_sm90_carve(const struct attention_shape *shape,
                                                       const struct attention_recipe *recipe, struct carve *carve)
{
    struct attention_saved_sm90 saved = {.operands = attention_saved_cuda_carve(shape, recipe, carve).operands};
    if (recipe->qk == QK_NVFP4_E4M3 && attention_bwd_refuses_sm90(shape, recipe) == NULL) {
        const size_t heads = (size_t)(shape->batch * shape->heads);
        const size_t kv_heads = (size_t)(shape->batch * shape->kv_heads);
        saved.q8 = carve_take(carve, heads * (size_t)shape->tokens * SM90_HEAD_DIM);
        saved.k8 = carve_take(carve, kv_heads * (size_t)shape->tokens * SM90_HEAD_DIM);
        saved.q_inverse = carve_take(carve, heads * sizeof(float));
        saved.k_inverse = carve_take(carve, kv_heads * sizeof(float));
    }
    return saved;
}

/* ---- memory of the forward --------------------------------------------------------------------------------- */

struct fwd_memory {
    uint32_t *counter;
    float *amax;     /* (B, H + 2 Hkv) */
    bf16 *q, *k, *v; /* represented operands where the caller keeps none */
    uint8_t *q8, *k8, *v_column;
    float *q_inverse, *k_inverse, *v_inverse;
    struct head_facts *decoded;
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
        .amax = carve_take(carve, (heads + 2 * kv_heads) * sizeof(float)),
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
        .decoded = carve_take(carve, scores8 ? (heads + kv_heads) * sizeof(struct head_facts) : 0),
    };
}

size_t attention_fwd_scratch_bytes_sm90(const struct attention_shape *shape, const struct attention_recipe *recipe)
{
    struct carve carve = {0};
    (void)fwd_carve(shape, recipe, false, &carve);
    return carve.used;
}

/* ---- operands ---------------------------------------------------------------------------------------------- */

static struct head_view centred_view(const struct attention_fwd *a, bf16 *own)
{
    const struct attention_shape *s = &a->shape;
    const struct head_tensor k = {a->k, s->batch, s->tokens, s->kv_heads, s->head_dim};
    attention_centre_cuda(a->cuda, &k, own);
    return own_view(s, own, s->kv_heads);
}

/* Where operands go: what a backward needs to the saved state, the rest, and everything of an inference, to scratch. */
static struct attention_saved_sm90 saved_or_own(const struct attention_fwd *a, const struct fwd_memory *m)
{
    struct attention_saved_sm90 own = {{.q = m->q, .k = m->k, .v = m->v}, m->q8, m->k8, m->q_inverse, m->k_inverse};
    if (a->saved != NULL) {
        struct carve kept = {.base = a->saved};
        const struct attention_saved_sm90 saved = attention_saved_sm90_carve(&a->shape, a->recipe, &kept);
        own.operands = saved.operands;
        own = saved.q8 != NULL ? saved : own;
    }
    return own;
}

/* Whether the E4M3 rows of Q and K stand for their BF16 forms, which are then not written: an inference, or a backward
 * that reads rows. A search for scales (qk_scale) goes by way of BF16. */
static bool rows_suffice(const struct attention_recipe *recipe, bool saves, bool saves_rows)
{
    return recipe->qk == QK_NVFP4_E4M3 && recipe->qk_scale == QK_SCALE_AMAX &&
           (!saves || (saves_rows && recipe->qk_grad != QK_GRAD_LIFT));
}

/* What the kernels multiply. q8 and k8 are NULL unless scores are E4M3; what else the recipe has no use for points
 * anywhere and is not looked at. */
static struct attention_operands_sm90 publish(const struct attention_fwd *a)
{
    const struct attention_shape *s = &a->shape;
    const struct attention_recipe *recipe = a->recipe;
    struct carve scratch = {.base = a->scratch};
    const struct fwd_memory m = fwd_carve(s, recipe, a->saved != NULL, &scratch);
    const struct attention_saved_sm90 own = saved_or_own(a, &m);
    const struct attention_saved x = own.operands;
    const struct head_view k = recipe->k_center ? centred_view(a, x.k) : a->k;
    const bool coded = recipe->qk != QK_BF16;
    const bool scores8 = recipe->qk == QK_NVFP4_E4M3;
    const bool rows = rows_suffice(recipe, a->saved != NULL, own.q8 != m.q8);
    struct attention_publish_sm90 p = {
        .shape = *s,
        .recipe = recipe,
        .q = a->q,
        .k = k,
        .v = a->v,
        .amax = a->amax,
        .own_q = rows ? NULL : x.q,
        .own_k = rows ? NULL : x.k,
        .own_v = x.v,
        .q8 = own.q8,
        .k8 = own.k8,
        .v_column = m.v_column,
        .q_inverse = own.q_inverse,
        .k_inverse = own.k_inverse,
        .v_inverse = m.v_inverse,
        .decoded = m.decoded,
    };
    if (coded || recipe->pv != PV_BF16) {
        if (a->amax == NULL || recipe->k_center) { /* the caller's is that of another K */
            attention_measure_heads_sm90(a->cuda, &p, m.amax);
            p.amax = m.amax;
        }
        attention_publish_heads_sm90(a->cuda, &p);
    }
    return (struct attention_operands_sm90){
        .q = coded ? own_view(s, x.q, s->heads) : a->q,
        .k = coded ? own_view(s, x.k, s->kv_heads) : k,
        .q8 = scores8 ? own.q8 : NULL,
        .k8 = scores8 ? own.k8 : NULL,
        .v_column = m.v_column,
        .q_inverse = own.q_inverse,
        .k_inverse = own.k_inverse,
        .v_inverse = m.v_inverse,
        .counter = m.counter,
    };
}

struct attention_operands_sm90 attention_fwd_publish_sm90(const struct attention_fwd *a)
{
    ASSERT(attention_fwd_refuses_sm90(&a->shape, a->recipe) == NULL && a->recipe->pv != PV_BF16);
    return publish(a);
}

void attention_fwd_sm90(const struct attention_fwd *a)
{
    ASSERT(attention_fwd_refuses_sm90(&a->shape, a->recipe) == NULL);
    const struct attention_operands_sm90 x = publish(a);
    if (a->recipe->pv == PV_BF16) {
        attention_fwd_bf16_sm90(a, &x.q, &x.k, &a->v, x.counter);
    } else {
        attention_fwd_codes_sm90(a, &x);
    }
}

/* Q and K of a saved state: their BF16 forms and their rows. */
static struct attention_publish_sm90 rows_of(const struct attention_shape *shape, const struct attention_recipe *recipe,
                                             const struct attention_saved_sm90 *x)
{
    return (struct attention_publish_sm90){
        .shape = *shape,
        .recipe = recipe,
        .own_q = x->operands.q,
        .own_k = x->operands.k,
        .q8 = x->q8,
        .k8 = x->k8,
        .q_inverse = x->q_inverse,
        .k_inverse = x->k_inverse,
    };
}

void attention_complete_sm90(const struct cuda *on, const struct attention_shape *shape,
                             const struct attention_recipe *recipe, void *saved, void *scratch)
{
    struct carve kept = {.base = saved};
    struct carve carve = {.base = scratch};
    const struct attention_saved_sm90 x = attention_saved_sm90_carve(shape, recipe, &kept);
    if (x.q8 == NULL) {
        return;
    }
    struct attention_publish_sm90 p = rows_of(shape, recipe, &x);
    p.decoded = fwd_carve(shape, recipe, true, &carve).decoded;
    attention_code_heads_sm90(on, &p);
}

void attention_restore_sm90(const struct cuda *on, const struct attention_shape *shape,
                            const struct attention_recipe *recipe, void *saved)
{
    struct carve kept = {.base = saved};
    const struct attention_saved_sm90 x = attention_saved_sm90_carve(shape, recipe, &kept);
    if (!rows_suffice(recipe, true, x.q8 != NULL)) {
        return;
    }
    const struct attention_publish_sm90 p = rows_of(shape, recipe, &x);
    attention_decode_heads_sm90(on, &p);
}

/* ---- the variant ------------------------------------------------------------------------------------------- */

static size_t saved_bytes_sm90(const struct attention_shape *shape, const struct attention_recipe *recipe)
{
    struct carve carve = {0};
    (void)attention_saved_sm90_carve(shape, recipe, &carve);
    return carve.used;
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
    const bool found = cudaGetDevice(&device) == cudaSuccess &&
                       cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
                       cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess;
    if (!found) {
        (void)cudaGetLastError(); /* no GPU is no error here, and no launch must find it */
    }
    return found && major == 9 && minor == 0;
}

static const char *refuses_sm90(const struct attention_shape *shape, const struct attention_recipe *recipe)
{
    if (!on_hopper()) {
        return "the GPU is not of compute capability 9.0";
    }
    return attention_fwd_refuses_sm90(shape, recipe);
}

static bool takes_amax_sm90(const struct attention_recipe *recipe)
{
    return (recipe->qk != QK_BF16 || recipe->pv != PV_BF16) && !recipe->k_center;
}

/* A view that TMA and 16-byte accesses can take; strides of dimensions with one entry are not looked at. */
static bool fits(const struct attention_shape *s, int64_t heads, const struct head_view *x)
{
    const int64_t strides =
        (s->batch > 1 ? x->batch_stride : 0) | (s->tokens > 1 ? x->token_stride : 0) | (heads > 1 ? x->head_stride : 0);
    return ((uintptr_t)x->data | (uintptr_t)strides * sizeof(bf16)) % 16 == 0;
}

/* A call with other views would be an illegal access: nothing is launched, and the next cuda_sync says why. */
static bool all_fit(const struct cuda *on, bool fit)
{
    if (!fit) {
        cuda_note(on, "attention, sm90: data and strides of all views must be multiples of 16 bytes",
                  (int)cudaErrorInvalidValue);
    }
    return fit;
}

/* A call without an element: nothing to launch, and no view that a tensor map could describe. */
static bool nothing(const struct attention_shape *s)
{
    return s->batch == 0 || s->tokens == 0;
}

/* The stride of a single token may be anything, 0 too. Kernels count in strides and get a whole one. */
static void fit_token(const struct attention_shape *s, struct head_view *x)
{
    x->token_stride = s->tokens == 1 ? SM90_HEAD_DIM : x->token_stride;
}

static void fwd_sm90(const struct attention_fwd *call)
{
    struct attention_fwd own = *call;
    const struct attention_fwd *a = &own;
    const struct attention_shape *s = &a->shape;
    struct head_view *views[] = {&own.q, &own.k, &own.v, &own.out};
    for (size_t i = 0; i < sizeof views / sizeof *views; i++) {
        fit_token(s, views[i]);
    }
    if (nothing(s) || !all_fit(a->cuda, fits(s, s->heads, &a->q) && fits(s, s->kv_heads, &a->k) &&
                                            fits(s, s->kv_heads, &a->v) && fits(s, s->heads, &a->out))) {
        return;
    }
    if (a->stats != NULL) {
        attention_variant_cuda.fwd(a);
        if (a->saved != NULL) { /* the backward may be asked for without statistics */
            attention_complete_sm90(a->cuda, s, a->recipe, a->saved, a->scratch);
        }
    } else {
        attention_fwd_sm90(a);
    }
}

static void bwd_sm90(const struct attention_bwd *call)
{
    struct attention_bwd own = *call;
    const struct attention_bwd *a = &own;
    const struct attention_shape *s = &a->shape;
    struct head_view *views[] = {&own.q, &own.k, &own.v, &own.out, &own.dout, &own.dq, &own.dk, &own.dv};
    for (size_t i = 0; i < sizeof views / sizeof *views; i++) {
        fit_token(s, views[i]);
    }
    if (nothing(s) ||
        !all_fit(a->cuda, fits(s, s->heads, &a->q) && fits(s, s->kv_heads, &a->k) && fits(s, s->kv_heads, &a->v) &&
                              fits(s, s->heads, &a->out) && fits(s, s->heads, &a->dout) && fits(s, s->heads, &a->dq) &&
                              fits(s, s->kv_heads, &a->dk) && fits(s, s->kv_heads, &a->dv))) {
        return;
    }
    if (a->stats != NULL || attention_bwd_refuses_sm90(&a->shape, a->recipe) != NULL) {
        attention_restore_sm90(a->cuda, s, a->recipe, (void *)(uintptr_t)a->saved); /* what the forward left out */
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
    .takes_amax = takes_amax_sm90,
    .bwd_refuses = attention_bwd_refuses_sm90,
    .fwd = fwd_sm90,
    .bwd = bwd_sm90,
};
