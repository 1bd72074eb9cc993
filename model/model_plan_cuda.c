/* model: memory on the GPU, and what happens there outside of forward and backward. */
#include "core/cuda.h"
#include "core/gemm_cuda.h"
#include "model/cross_entropy.h"
#include "model/embedding.h"
#include "model/model_cuda.h"
#include "model/rmsnorm.h"
#include "model/rope.h"

#include <stdlib.h>

/* Of a norm's row, and of a row of logits, on chip. */
enum { WIDTH_MAX = 16384, VOCAB_MAX = 262144 };

static bf16 *take_bf16(struct arena *arena, const char *label, int64_t n)
{
    return arena_take(arena, label, (size_t)n * sizeof(bf16));
}

static float *take_f32(struct arena *arena, const char *label, int64_t n)
{
    return arena_take(arena, label, (size_t)n * sizeof(float));
}

/* ---- kept activations ------------------------------------------------------------------------------------------ */

static bf16 *take_gate_up(const struct model *m, struct arena *arena)
{
    return take_bf16(arena, "activations: gate and up", m->gpu->rows * 2 * m->config.ffn);
}

static bool takes_amax(const struct model *m)
{
    const struct attention_variant *variant = m->options.variant;
    return variant->takes_amax != NULL && variant->takes_amax(&m->options.attention);
}

static void take_kept(struct model *m, struct kept *k, struct arena *arena)
{
    const struct model_config *c = &m->config;
    const char *label = "activations";
    int64_t n = m->gpu->rows, q = model_q_width(c), kv = model_kv_width(c);
    k->qkv = take_bf16(arena, label, n * (q + 2 * kv));
    k->rotated = c->qk_norm ? take_bf16(arena, label, n * (q + kv)) : k->qkv;
    k->attended = take_bf16(arena, label, n * q);
    k->middle = take_bf16(arena, label, n * c->width);
    k->q_inv = c->qk_norm ? take_f32(arena, label, n * c->heads) : NULL;
    k->k_inv = c->qk_norm ? take_f32(arena, label, n * c->kv_heads) : NULL;
    k->lse_log2 = take_f32(arena, label, n * c->heads);
    k->head_amax = takes_amax(m) ? take_f32(arena, label, m->options.batch * (c->heads + 2 * c->kv_heads)) : NULL;
    k->attention = arena_take(arena, "attention state", m->attention_saved_bytes);
}

/* Layers share what is recomputed before it is read. */
static void take_layers(struct model *m, struct arena *arena)
{
    enum recompute recompute = m->options.recompute;
    struct kept *kept = m->gpu->kept;
    for (int l = 0; l < m->config.layers; l++) {
        bool shared = l > 0;
        if (recompute == RECOMPUTE_BLOCK && shared) {
            kept[l] = kept[0];
            continue;
        }
        take_kept(m, &kept[l], arena);
        kept[l].gate_up = recompute != RECOMPUTE_NONE && shared ? kept[0].gate_up : take_gate_up(m, arena);
    }
}

static void take_weights(struct model *m, struct arena *arena)
{
    for (int l = 0; l < m->config.layers; l++) {
        for (int p = 0; p < PROJECTIONS; p++) {
            const struct linear *x = &m->layers[l].linear[p];
            if (x->format != LINEAR_BF16) {
                size_t bytes = linear_weight_bytes_cuda(x->format, x->out, x->in);
                m->layers[l].represented[p] = arena_take(arena, "weights in fp8, nvfp4", bytes);
            }
        }
    }
}

/* ---- scratch --------------------------------------------------------------------------------------------------- */

static size_t tool_bytes(const struct model *m)
{
    const struct model_config *c = &m->config;
    int64_t n = m->gpu->rows;
    size_t most = m->attention_scratch_bytes;
    const size_t others[] = {rmsnorm_bwd_scratch_bytes_cuda(n, 1, c->width),
                             rmsnorm_bwd_scratch_bytes_cuda(n, c->heads, c->head_dim),
                             embedding_bwd_scratch_bytes_cuda(n, c->vocab)};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        most = others[i] > most ? others[i] : most;
    }
    for (int l = 0; l < c->layers; l++) {
        for (int p = 0; p < PROJECTIONS; p++) {
            const struct linear *x = &m->layers[l].linear[p];
            size_t bytes = linear_scratch_bytes_cuda(x->format, n, x->in, x->out);
            most = bytes > most ? bytes : most;
        }
    }
    return most;
}

/* Three tenants of one memory; each starts from its beginning. Returns bytes used. */
static size_t carve_feed_forward(struct model_cuda *g, const struct model *m, struct arena *arena)
{
    g->tool = arena_take(arena, "", tool_bytes(m));
    g->dgate_up = take_bf16(arena, "", g->rows * 2 * m->config.ffn);
    g->dactivated = take_bf16(arena, "", g->rows * m->config.ffn);
    g->activated = take_bf16(arena, "", g->rows * m->config.ffn);
    return arena->used;
}

static size_t carve_attention(struct model_cuda *g, const struct model *m, struct arena *arena)
{
    const struct model_config *c = &m->config;
    int64_t q = model_q_width(c), kv = model_kv_width(c);
    g->tool = arena_take(arena, "", tool_bytes(m));
    g->dattended = take_bf16(arena, "", g->rows * q);
    g->dqkv = take_bf16(arena, "", g->rows * (q + 2 * kv));
    return arena->used;
}

static size_t carve_head(struct model_cuda *g, const struct model *m, struct arena *arena)
{
    g->logits = take_f32(arena, "", g->head_rows * m->config.vocab);
    g->dlogits = take_bf16(arena, "", g->head_rows * m->config.vocab);
    return arena->used;
}

static size_t (*const tenants[])(struct model_cuda *g, const struct model *m,
                                 struct arena *arena) = {carve_feed_forward, carve_attention, carve_head};
enum { TENANTS = sizeof tenants / sizeof *tenants };

static void take_shared(struct model *m, struct arena *arena)
{
    size_t bytes = 0;
    struct arena part;
    for (int i = 0; i < TENANTS; i++) {
        arena_measure(&part, "scratch");
        size_t used = tenants[i](m->gpu, m, &part);
        bytes = used > bytes ? used : bytes;
    }
    unsigned char *base = arena_take(arena, "scratch of a layer or the head", bytes);
    for (int i = 0; i < TENANTS && base; i++) {
        arena_measure(&part, "scratch");
        part.base = base;
        part.kind = DEVICE_CUDA;
        part.capacity = bytes;
        tenants[i](m->gpu, m, &part);
    }
}

static enum status fill_rope(const struct model *m)
{
    const struct model_config *c = &m->config;
    size_t count = (size_t)(m->options.tokens * (c->head_dim / 2)), bytes = count * sizeof(float);
    float *cosine = malloc(bytes), *sine = malloc(bytes);
    enum status status = OK;
    if (cosine && sine) {
        rope_table(&c->rope, c->head_dim, m->options.tokens, cosine, sine);
        cuda_upload(m->options.cuda, m->cosine, cosine, bytes);
        cuda_upload(m->options.cuda, m->sine, sine, bytes);
        status = cuda_sync(m->options.cuda, "model: rope table");
    } else {
        status = status_fail(ERR_NOMEM, "model: out of memory for the rope table");
    }
    free(cosine);
    free(sine);
    return status;
}

static enum status take_cuda(struct model *m, struct arena *arena)
{
    const struct model_config *c = &m->config;
    const struct model_options *o = &m->options;
    struct model_cuda *g = m->gpu = calloc(1, sizeof *g);
    if (!g || !(g->kept = calloc((size_t)c->layers, sizeof *g->kept))) {
        return status_fail(ERR_NOMEM, "model: out of memory for its tables");
    }
    g->rows = o->batch * o->tokens;
    g->head_rows = g->rows < MODEL_HEAD_ROWS ? (g->rows + 15) / 16 * 16 : MODEL_HEAD_ROWS;
    int64_t n = g->rows, C = c->width;
    take_weights(m, arena);
    m->cosine = take_f32(arena, "rope table", o->tokens * (c->head_dim / 2));
    m->sine = take_f32(arena, "rope table", o->tokens * (c->head_dim / 2));
    g->residual = take_bf16(arena, "residual stream", (c->layers + 1) * n * C);
    take_layers(m, arena);
    g->hidden = take_bf16(arena, "scratch", n * C);
    g->normed = take_bf16(arena, "scratch", n * C);
    g->branch = take_bf16(arena, "scratch", n * C);
    g->d = take_bf16(arena, "scratch", n * C);
    g->inv_rms = take_f32(arena, "scratch", n);
    g->amax = take_f32(arena, "scratch", (int64_t)(2 * c->layers) * PROJECTIONS);
    g->weight_amax = take_f32(arena, "scratch", (int64_t)c->layers * PROJECTIONS);
    g->losses = take_f32(arena, "losses", n);
    g->lse = take_f32(arena, "losses", n);
    g->made_up = arena_take(arena, "losses", (size_t)(2 * n) * sizeof *g->made_up);
    g->loss_rows = arena_take(arena, "losses", (size_t)o->batch * sizeof *g->loss_rows);
    m->stats = arena_take(arena, "losses", (size_t)(c->layers + 1) * sizeof *m->stats); /* the last: not read */
    take_shared(m, arena);
    if (!arena->base) {
        return OK;
    }
    ASSERT(o->cuda && arena->kind == DEVICE_CUDA);
    model_stats_reset(m);
    return fill_rope(m);
}

static void release_cuda(struct model *m)
{
    if (m->gpu) {
        free(m->gpu->kept);
        free(m->gpu);
    }
}

/* ---- outside of forward and backward --------------------------------------------------------------------------- */

/* Kernels move 16 bytes at a time; operands of small formats come in blocks of 16. */
static int64_t nearest_multiple(int64_t value, int64_t unit)
{
    int64_t multiple = (value + unit / 2) / unit * unit;
    return multiple > 0 ? multiple : unit;
}

static enum status check_cuda(const struct model_config *c, const struct model_options *o)
{
    bool small = o->linear.attn != LINEAR_BF16 || o->linear.mlp != LINEAR_BF16;
    const char *access = "16-byte accesses", *why = small ? "linear fp8, nvfp4" : access;
    const struct {
        const char *key;
        int64_t value, unit;
        const char *why;
    } sizes[] = {{"model.width", c->width, small ? 16 : 8, why},
                 {"model.ffn", c->ffn, small ? 16 : 8, why},
                 {"model.vocab", c->vocab, 8, access},
                 {"model.head_dim", c->head_dim, 16, access}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        if (sizes[i].value % sizes[i].unit != 0) {
            return status_fail(ERR_UNSUPPORTED,
                               "%s = %lld: on device cuda it must be a multiple of %lld (%s): nearest %lld; or use cpu",
                               sizes[i].key, (long long)sizes[i].value, (long long)sizes[i].unit, sizes[i].why,
                               (long long)nearest_multiple(sizes[i].value, sizes[i].unit));
        }
    }
    if (c->width > WIDTH_MAX || c->vocab > VOCAB_MAX) {
        return status_fail(ERR_UNSUPPORTED,
                           "model.width = %d, model.vocab = %d: on device cuda at most %d and %d; use cpu", c->width,
                           c->vocab, WIDTH_MAX, VOCAB_MAX);
    }
    ASSERT(o->grad_type == DTYPE_F32 || o->grad_type == DTYPE_BF16);
    return OK;
}

static void represent_cuda(struct model *m, struct layer *layer, enum projection p, const bf16 *weight)
{
    layer->linear[p].amax = NULL;
    linear_represent_weight_cuda(&layer->linear[p], weight, layer->represented[p], m->options.cuda);
}

static float *weight_amax(const struct model *m, int layer, int p)
{
    return m->gpu->weight_amax + layer * PROJECTIONS + p;
}

/* Parameters of a fused matrix lie within it and share its place. */
float *model_weight_amax(const struct model *m, size_t offset)
{
    for (int l = 0; l < m->config.layers; l++) {
        for (int p = 0; p < PROJECTIONS; p++) {
            const struct linear *x = &m->layers[l].linear[p];
            const size_t first = m->layers[l].matrix[p], n = (size_t)(x->in * x->out);
            if (x->format != LINEAR_BF16 && offset >= first && offset < first + n) {
                return weight_amax(m, l, p);
            }
        }
    }
    return NULL;
}

void model_weight_amax_reset(struct model *m)
{
    cuda_zero(m->options.cuda, m->gpu->weight_amax, (size_t)(m->config.layers * PROJECTIONS) * sizeof(float));
}

void model_weights_updated(struct model *m)
{
    m->kept = false;
    for (int l = 0; l < m->config.layers; l++) {
        for (int p = 0; p < PROJECTIONS; p++) {
            struct layer *layer = &m->layers[l];
            layer->linear[p].amax = weight_amax(m, l, p);
            linear_represent_weight_cuda(&layer->linear[p], m->weights + layer->matrix[p], layer->represented[p],
                                         m->options.cuda);
        }
    }
}

static void stats_reset_cuda(struct model *m)
{
    cuda_zero(m->options.cuda, m->stats, (size_t)m->config.layers * sizeof *m->stats);
}

void model_count_stats(struct model *m, bool on)
{
    m->gpu->uncounted = !on;
}

static void logits_cuda(struct model *m, int64_t first_row, int64_t rows, float *logits)
{
    const struct model_config *c = &m->config;
    gemm_cuda(m->options.cuda, &(struct gemm_cuda){.m = rows,
                                                   .n = c->vocab,
                                                   .k = c->width,
                                                   .a = m->gpu->hidden + first_row * c->width,
                                                   .b = m->weights + m->head,
                                                   .c = logits,
                                                   .lda = c->width,
                                                   .ldb = c->width,
                                                   .ldc = c->vocab,
                                                   .a_type = DTYPE_BF16,
                                                   .b_type = DTYPE_BF16,
                                                   .c_type = DTYPE_F32,
                                                   .trans_b = true,
                                                   .alpha = 1});
}

const struct model_loss_row *model_losses(const struct model *m)
{
    return m->gpu->loss_rows;
}

/* Tokens and targets that a language might have: a timing on zeros, or with one token only, would be another's. */
static enum status make_up_tokens(struct model *m)
{
    int64_t n = m->gpu->rows;
    int32_t *host = malloc((size_t)(2 * n) * sizeof *host);
    if (!host) {
        return status_fail(ERR_NOMEM, "model: out of memory for tokens of the warm-up");
    }
    for (int64_t i = 0; i < 2 * n; i++) {
        host[i] = (int32_t)(i * 2654435761 % m->config.vocab);
    }
    cuda_upload(m->options.cuda, m->gpu->made_up, host, (size_t)(2 * n) * sizeof *host);
    enum status status = cuda_sync(m->options.cuda, "model: tokens of the warm-up");
    free(host);
    return status;
}

enum status model_warm_up(struct model *m, void *grads)
{
    const struct cuda *on = m->options.cuda;
    int64_t n = m->gpu->rows;
    struct model_batch batch = {.tokens = m->gpu->made_up,
                                .targets = m->gpu->made_up + n,
                                .batch = m->options.batch,
                                .length = m->options.tokens};
    TRY(make_up_tokens(m));
    cuda_set_step(on, &(struct cuda_step){.loss_scale = 1 / (float)n}); /* not 0: gradients must not be zeros either */
    gemm_cuda_plan_all(on, true);
    for (int i = 0; i < 2; i++) {
        bool accumulate = i > 0;
        model_forward_cuda(m, &batch, grads, accumulate);
        model_backward(m, &(struct model_backward){.batch = &batch, .grads = grads, .accumulate = accumulate});
    }
    gemm_cuda_plan_all(on, false);
    model_stats_reset(m);
    return cuda_sync(on, "model: warm-up");
}

const struct model_backend model_backend_cuda = {.check = check_cuda,
                                                 .take = take_cuda,
                                                 .release = release_cuda,
                                                 .represent = represent_cuda,
                                                 .backward = model_backward_cuda,
                                                 .logits = logits_cuda,
                                                 .stats_reset = stats_reset_cuda};
