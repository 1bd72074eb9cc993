/* tests/attention: calls of the Hopper variant, for gpu_sm90_*.c.
 *
 * All memory of a call is one image: inputs, outputs, saved state and scratch with guards between them, everything but
 * the inputs 0xff (NaN codes). After a run the image must be as before but for what a call may write: so nothing is
 * written between heads, behind an array or into an input, and nothing can be read that nobody wrote. */
#pragma once

#include "attention/attention_bwd_sm90.h"
#include "attention/attention_sm90.h"
#include "tests/attention/cases.h"
#include "tests/gpu.h"

#include <math.h>
#include <stdio.h>

enum { D = 128 };

/* APART: arrays of their own. FUSED: Q, K, V (and their gradients) as slices of one (B, T, H + 2 Hkv, D) array.
 * SPREAD: (B, H, T, D) with 16 bytes or more between rows, heads and batches. */
enum layout { APART, FUSED, SPREAD, LAYOUTS };
enum pass { FORWARD = 1, BACKWARD = 2, BOTH = 3 };
enum tensor { IN_Q, IN_K, IN_V, DOUT, OUT, OUT_DQ, OUT_DK, OUT_DV, TENSORS };

/* The GPU, and an image that grows with the largest case. The state of every test. */
struct gpu {
    struct cuda *cuda;
    unsigned char *before, *after, *device;
    size_t capacity;
};

struct gpu_case {
    struct gpu *gpu;
    const struct attention_case *c;
    const struct attention_variant *variant; /* sm90: its own passes where it has them */
    enum layout layout;
    enum pass passes;
    bool inference;                     /* the forward saves nothing */
    struct attention_stats *counted[2]; /* on the device: of a forward or backward that then is variant "cuda"'s */
    bool unordered;
    size_t used, at[TENSORS], lse_at, saved_at, scratch_at, saved_bytes, scratch_bytes;
    /* Results, contiguous; NULL what the passes do not give. */
    bf16 *got[TENSORS];
    float *got_lse;
    void *got_saved;
};

/* ---- where things lie -------------------------------------------------------------------------------------- */

static inline int64_t heads_of(const struct gpu_case *g, enum tensor t)
{
    const struct attention_shape *s = &g->c->shape;
    return t == IN_K || t == IN_V || t == OUT_DK || t == OUT_DV ? s->kv_heads : s->heads;
}

static inline bool fused(const struct gpu_case *g, enum tensor t)
{
    return g->layout == FUSED && t != OUT && t != DOUT;
}

/* A tensor in the image that starts at `image` (on the host or on the device). */
static inline struct head_view view_of(const struct gpu_case *g, enum tensor t, unsigned char *image)
{
    const struct attention_shape *s = &g->c->shape;
    const int64_t heads = fused(g, t) ? s->heads + 2 * s->kv_heads : heads_of(g, t);
    bf16 *data = (bf16 *)(image + g->at[t]);
    if (g->layout == SPREAD) {
        const int64_t row = D + 8, head = s->tokens * row + 16;
        return (struct head_view){data, heads * head + 64, row, head};
    }
    return (struct head_view){data, s->tokens * heads * D, heads * D, D};
}

static inline bool has(const struct gpu_case *g, enum tensor t)
{
    return t <= IN_V || t == OUT || (g->passes & BACKWARD);
}

static inline bool is_output(const struct gpu_case *g, enum tensor t)
{
    return t == OUT ? (g->passes & FORWARD) != 0 : t > OUT && (g->passes & BACKWARD);
}

/* Room for `bytes`, behind a guard. */
static inline size_t place(struct gpu_case *g, size_t bytes)
{
    const size_t at = g->used;
    g->used = (at + bytes + GPU_GUARD + 255) / 256 * 256;
    return at;
}

static inline void place_tensors(struct gpu_case *g)
{
    const struct attention_shape *s = &g->c->shape;
    for (int t = 0; t < TENSORS; t++) {
        if (has(g, t) && fused(g, t) && t != IN_Q && t != OUT_DQ) { /* behind Q, or K */
            g->at[t] = g->at[t - 1] + (size_t)(heads_of(g, t - 1) * D) * sizeof(bf16);
        } else if (has(g, t)) {
            g->at[t] = place(g, (size_t)(s->batch * view_of(g, t, NULL).batch_stride) * sizeof(bf16));
        }
    }
}

/* Copies a tensor between the image and a contiguous array; out of the image, it becomes 0xff there. */
static inline void copy_tensor(const struct gpu_case *g, enum tensor t, unsigned char *image, bf16 *dense, bool out)
{
    const struct attention_shape *s = &g->c->shape;
    const struct head_view view = view_of(g, t, image);
    const int64_t heads = heads_of(g, t);
    for (int64_t i = 0; i < s->batch * s->tokens * heads; i++) {
        const int64_t h = i % heads, token = i / heads % s->tokens, b = i / heads / s->tokens;
        bf16 *row = view.data + b * view.batch_stride + token * view.token_stride + h * view.head_stride;
        memcpy(out ? dense + i * D : row, out ? row : dense + i * D, D * sizeof(bf16));
        if (out) {
            memset(row, 0xff, D * sizeof(bf16));
        }
    }
}

static inline size_t tensor_bytes(const struct gpu_case *g, enum tensor t)
{
    return (size_t)(g->c->shape.batch * g->c->shape.tokens * heads_of(g, t) * D) * sizeof(bf16);
}

static inline size_t lse_bytes(const struct gpu_case *g)
{
    return (size_t)(g->c->shape.batch * g->c->shape.heads * g->c->shape.tokens) * sizeof(float);
}

/* ---- a call ------------------------------------------------------------------------------------------------ */

static inline void image_grow(struct gpu *gpu, size_t bytes)
{
    if (bytes <= gpu->capacity) {
        return;
    }
    cuda_free(gpu->device);
    free(gpu->before);
    free(gpu->after);
    gpu->capacity = bytes + bytes / 2;
    gpu->before = malloc(gpu->capacity);
    gpu->after = malloc(gpu->capacity);
    assert_int_equal(cuda_alloc((void **)&gpu->device, gpu->capacity, "test image"), OK);
}

static inline void fill_image(const struct gpu_case *g)
{
    const struct attention_case *c = g->c;
    unsigned char *image = g->gpu->before;
    memset(image, 0xff, g->used);
    bf16 *inputs[] = {c->q, c->k, c->v, c->dout, c->out};
    for (int t = 0; t <= OUT; t++) {
        if (has(g, t) && !is_output(g, t)) {
            copy_tensor(g, t, image, inputs[t], false);
        }
    }
    if (!(g->passes & FORWARD)) { /* the reference's forward */
        memcpy(image + g->lse_at, c->lse_log2, lse_bytes(g));
        memcpy(image + g->saved_at, c->saved, c->variant->saved_bytes(&c->shape, &c->recipe));
    }
}

/* `c` has the inputs, and for BACKWARD alone the results of a forward too. */
static inline void gpu_case_open_as(struct gpu_case *g, struct gpu *gpu, const struct attention_case *c,
                                    const struct attention_variant *variant, enum layout layout, enum pass passes)
{
    const struct attention_shape *s = &c->shape;
    memset(g, 0, sizeof *g);
    g->gpu = gpu;
    g->c = c;
    g->variant = variant;
    g->layout = layout;
    g->passes = passes;
    place_tensors(g);
    g->lse_at = place(g, lse_bytes(g));
    g->saved_bytes = g->variant->saved_bytes(s, &c->recipe);
    g->saved_at = place(g, g->saved_bytes);
    /* To the byte, but where the state is completed (E4M3 scores) or another variant's backward runs. */
    const bool backward = c->recipe.qk != QK_NVFP4_E4M3 && attention_bwd_refuses_sm90(s, &c->recipe) == NULL;
    g->scratch_bytes = variant != &attention_variant_sm90 ? variant->scratch_bytes(s, &c->recipe)
                       : passes == FORWARD                ? attention_fwd_scratch_bytes_sm90(s, &c->recipe)
                       : passes == BACKWARD && backward   ? attention_bwd_scratch_bytes_sm90(s, &c->recipe)
                                                          : variant->scratch_bytes(s, &c->recipe);
    g->scratch_at = place(g, g->scratch_bytes);
    image_grow(gpu, g->used);
    fill_image(g);
    for (int t = OUT; t < TENSORS; t++) {
        g->got[t] = is_output(g, t) ? malloc(tensor_bytes(g, t)) : NULL;
    }
    g->got_lse = passes & FORWARD ? malloc(lse_bytes(g)) : NULL;
    g->got_saved = passes & FORWARD ? malloc(g->saved_bytes + 1) : NULL;
}

static inline void gpu_case_open(struct gpu_case *g, struct gpu *gpu, const struct attention_case *c,
                                 enum layout layout, enum pass passes)
{
    gpu_case_open_as(g, gpu, c, &attention_variant_sm90, layout, passes);
}

static inline void gpu_case_close(struct gpu_case *g)
{
    for (int t = 0; t < TENSORS; t++) {
        free(g->got[t]);
    }
    free(g->got_lse);
    free(g->got_saved);
}

static inline struct attention_fwd forward_of(const struct gpu_case *g)
{
    unsigned char *image = g->gpu->device;
    return (struct attention_fwd){.cuda = g->gpu->cuda,
                                  .shape = g->c->shape,
                                  .recipe = &g->c->recipe,
                                  .q = view_of(g, IN_Q, image),
                                  .k = view_of(g, IN_K, image),
                                  .v = view_of(g, IN_V, image),
                                  .out = view_of(g, OUT, image),
                                  .lse_log2 = (float *)(image + g->lse_at),
                                  .saved = g->inference ? NULL : image + g->saved_at,
                                  .scratch = image + g->scratch_at,
                                  .stats = g->counted[0]};
}

static inline void call_backward(const struct gpu_case *g)
{
    unsigned char *image = g->gpu->device;
    const struct attention_bwd call = {.cuda = g->gpu->cuda,
                                       .shape = g->c->shape,
                                       .recipe = &g->c->recipe,
                                       .q = view_of(g, IN_Q, image),
                                       .k = view_of(g, IN_K, image),
                                       .v = view_of(g, IN_V, image),
                                       .out = view_of(g, OUT, image),
                                       .dout = view_of(g, DOUT, image),
                                       .dq = view_of(g, OUT_DQ, image),
                                       .dk = view_of(g, OUT_DK, image),
                                       .dv = view_of(g, OUT_DV, image),
                                       .lse_log2 = (const float *)(image + g->lse_at),
                                       .saved = image + g->saved_at,
                                       .scratch = image + g->scratch_at,
                                       .stats = g->counted[1],
                                       .unordered = g->unordered};
    g->variant->bwd(&call);
}

/* Takes a region that the call may write out of the image. */
static inline void take(const struct gpu_case *g, size_t at, size_t bytes, void *to)
{
    if (to != NULL) {
        memcpy(to, g->gpu->after + at, bytes);
    }
    memcpy(g->gpu->after + at, g->gpu->before + at, bytes);
}

/* Runs the passes from a fresh image. Returns the number of complaints: bytes written outside of the outputs. */
static inline int gpu_case_run(struct gpu_case *g)
{
    struct gpu *gpu = g->gpu;
    unsigned char *saved = gpu->device + g->saved_at;
    const bool own = g->variant == &attention_variant_sm90;
    cuda_upload(gpu->cuda, gpu->device, gpu->before, g->used);
    if (g->passes & FORWARD) {
        const struct attention_fwd call = forward_of(g);
        g->variant->fwd(&call);
    } else if (own) {
        attention_complete_sm90(gpu->cuda, &g->c->shape, &g->c->recipe, saved, gpu->device + g->scratch_at);
    }
    if (g->passes & BACKWARD) {
        call_backward(g);
    }
    if (own && (g->passes & FORWARD) && !g->inference) { /* all of it is compared */
        attention_restore_sm90(gpu->cuda, &g->c->shape, &g->c->recipe, saved);
    }
    cuda_download(gpu->cuda, gpu->after, gpu->device, g->used);
    if (cuda_sync(gpu->cuda, "attention") != OK) {
        fail_msg("%s", status_last_message());
    }
    for (int t = OUT; t < TENSORS; t++) {
        if (g->got[t] != NULL) {
            copy_tensor(g, t, gpu->after, g->got[t], true);
        }
    }
    if (g->passes & FORWARD) {
        take(g, g->lse_at, lse_bytes(g), g->got_lse);
    }
    /* Behind the CPU's state: what attention_complete_sm90 wrote. */
    const size_t kept = g->passes & FORWARD ? 0 : g->c->variant->saved_bytes(&g->c->shape, &g->c->recipe);
    take(g, g->saved_at + kept, g->inference ? 0 : g->saved_bytes - kept, g->got_saved);
    take(g, g->scratch_at, g->scratch_bytes, NULL);
    if (memcmp(gpu->before, gpu->after, g->used) == 0) {
        return 0;
    }
    size_t at = 0;
    while (gpu->before[at] == gpu->after[at]) {
        at++;
    }
    print_message("byte %zu of the image was written: q at %zu, out %zu, dq %zu, lse %zu, saved %zu, scratch %zu\n", at,
                  g->at[IN_Q], g->at[OUT], g->at[OUT_DQ], g->lse_at, g->saved_at, g->scratch_at);
    return 1;
}
