#include "tests/model/attention_host.h"

#if WITH_CUDA
#include "attention/attention_cpu.h"
#include "core/cuda.h"

#include "tests/test.h"

#include <stdlib.h>
#include <string.h>

static void *scratch_of(size_t bytes)
{
    void *scratch = aligned_alloc(64, (bytes + 64) / 64 * 64);
    assert_non_null(scratch);
    return scratch;
}

/* Aligned as the CPU's saved state must be. */
static void *fetch(const struct cuda *cuda, const void *device, size_t bytes)
{
    void *host = scratch_of(bytes);
    cuda_download(cuda, host, device, bytes);
    assert_int_equal(cuda_sync(cuda, "attention of the host"), OK);
    return host;
}

static void give(const struct cuda *cuda, void *device, void *host, size_t bytes)
{
    cuda_upload(cuda, device, host, bytes);
    free(host);
}

/* A tensor of heads on the host, from (B, T, heads, D) strided memory on the GPU. Heads lie side by side. */
struct mirror {
    struct head_view device, host;
    int64_t heads;
};

static struct mirror mirror_of(const struct cuda *cuda, const struct attention_shape *s, struct head_view v,
                               int64_t heads)
{
    size_t elements = (size_t)((s->batch - 1) * v.batch_stride + (s->tokens - 1) * v.token_stride +
                               (heads - 1) * v.head_stride + s->head_dim);
    struct mirror m = {v, v, heads};
    assert_int_equal(v.head_stride, s->head_dim);
    m.host.data = fetch(cuda, v.data, elements * sizeof(bf16));
    return m;
}

/* Row by row: other tensors live between the rows. */
static void mirror_write(const struct cuda *cuda, const struct attention_shape *s, const struct mirror *m)
{
    for (int64_t b = 0; b < s->batch; b++) {
        for (int64_t t = 0; t < s->tokens; t++) {
            int64_t at = b * m->device.batch_stride + t * m->device.token_stride;
            cuda_upload(cuda, m->device.data + at, m->host.data + at, (size_t)(m->heads * s->head_dim) * sizeof(bf16));
        }
    }
}

static void fwd(const struct attention_fwd *a)
{
    const struct attention_shape *s = &a->shape;
    struct attention_fwd h = *a;
    size_t lse = (size_t)(s->batch * s->heads * s->tokens) * sizeof(float);
    size_t saved = attention_variant_cpu.saved_bytes(s, a->recipe);
    struct mirror q = mirror_of(a->cuda, s, a->q, s->heads), k = mirror_of(a->cuda, s, a->k, s->kv_heads),
                  v = mirror_of(a->cuda, s, a->v, s->kv_heads), out = mirror_of(a->cuda, s, a->out, s->heads);
    h.q = q.host, h.k = k.host, h.v = v.host, h.out = out.host;
    h.cuda = NULL;
    h.lse_log2 = fetch(a->cuda, a->lse_log2, lse);
    h.saved = a->saved ? fetch(a->cuda, a->saved, saved) : NULL;
    h.scratch = scratch_of(attention_variant_cpu.scratch_bytes(s, a->recipe));
    h.stats = a->stats ? fetch(a->cuda, a->stats, sizeof *a->stats) : NULL;
    attention_variant_cpu.fwd(&h);
    mirror_write(a->cuda, s, &out);
    give(a->cuda, a->lse_log2, h.lse_log2, lse);
    if (a->saved) {
        give(a->cuda, a->saved, h.saved, saved);
    }
    if (a->stats) {
        give(a->cuda, a->stats, h.stats, sizeof *a->stats);
    }
    bf16 *views[] = {q.host.data, k.host.data, v.host.data, out.host.data};
    for (size_t i = 0; i < sizeof views / sizeof *views; i++) {
        free(views[i]);
    }
    free(h.scratch);
}

static void bwd(const struct attention_bwd *a)
{
    const struct attention_shape *s = &a->shape;
    struct attention_bwd h = *a;
    const struct head_view *from[] = {&a->q, &a->k, &a->v, &a->out, &a->dout, &a->dq, &a->dk, &a->dv};
    struct head_view *to[] = {&h.q, &h.k, &h.v, &h.out, &h.dout, &h.dq, &h.dk, &h.dv};
    enum { VIEWS = sizeof from / sizeof *from };
    struct mirror mirrors[VIEWS];
    for (int i = 0; i < VIEWS; i++) {
        bool kv = from[i] == &a->k || from[i] == &a->v || from[i] == &a->dk || from[i] == &a->dv;
        mirrors[i] = mirror_of(a->cuda, s, *from[i], kv ? s->kv_heads : s->heads);
        *to[i] = mirrors[i].host;
    }
    float *lse = fetch(a->cuda, a->lse_log2, (size_t)(s->batch * s->heads * s->tokens) * sizeof(float));
    void *saved = fetch(a->cuda, a->saved, attention_variant_cpu.saved_bytes(s, a->recipe));
    h.cuda = NULL;
    h.lse_log2 = lse;
    h.saved = saved;
    h.scratch = scratch_of(attention_variant_cpu.scratch_bytes(s, a->recipe));
    h.stats = a->stats ? fetch(a->cuda, a->stats, sizeof *a->stats) : NULL;
    attention_variant_cpu.bwd(&h);
    for (int i = 0; i < VIEWS; i++) {
        if (i >= 5) { /* dq, dk, dv */
            mirror_write(a->cuda, s, &mirrors[i]);
        }
        free(mirrors[i].host.data);
    }
    if (a->stats) {
        give(a->cuda, a->stats, h.stats, sizeof *a->stats);
    }
    free(lse);
    free(saved);
    free(h.scratch);
}

static const char *refuses(const struct attention_shape *shape, const struct attention_recipe *recipe)
{
    return attention_variant_cpu.refuses(shape, recipe);
}

static size_t saved_bytes(const struct attention_shape *shape, const struct attention_recipe *recipe)
{
    return attention_variant_cpu.saved_bytes(shape, recipe);
}

static size_t scratch_bytes(const struct attention_shape *shape, const struct attention_recipe *recipe)
{
    return attention_variant_cpu.scratch_bytes(shape, recipe);
}

const struct attention_variant attention_variant_host = {.name = "host",
                                                         .device = DEVICE_CUDA,
                                                         .refuses = refuses,
                                                         .saved_bytes = saved_bytes,
                                                         .scratch_bytes = scratch_bytes,
                                                         .fwd = fwd,
                                                         .bwd = bwd};
#endif
