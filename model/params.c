/* model: names, shapes and places of all parameters, and their first values. */
#include "model/params.h"

#include "core/rng.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A multiple of 64 elements keeps every tensor on a cache line in BF16 and on 256 bytes in FP32. */
enum { PARAM_ALIGN = 64 };
/* Elements that one thread initialises at a time. */
enum { INIT_BLOCK = 4096 };

static size_t param_elements(const struct param *p)
{
    return (size_t)p->rows * (size_t)p->cols;
}

/* Appends a parameter behind the last one, at once if it `joins` the same matrix. */
static struct param *append(struct param_list *list, struct param p, bool joins)
{
    size_t align = joins ? 1 : PARAM_ALIGN;
    p.offset = (list->elements + align - 1) / align * align;
    p.decays = p.kind != PARAM_NORM;
    list->elements = p.offset + param_elements(&p);
    list->parameters += param_elements(&p);
    struct param *place = &list->params[list->count++];
    *place = p;
    return place;
}

static void append_layer(struct param_list *list, const struct model_config *c, int layer)
{
    int64_t width = c->width, q = (int64_t)c->heads * c->head_dim, kv = (int64_t)c->kv_heads * c->head_dim;
    const struct {
        const char *name;
        int64_t rows, cols;
        enum param_kind kind;
        bool joins;
    } rows[] = {
        {"input_layernorm", 1, width, PARAM_NORM, false},
        {"self_attn.q_proj", q, width, PARAM_ATTN, false},
        {"self_attn.k_proj", kv, width, PARAM_ATTN, true},
        {"self_attn.v_proj", kv, width, PARAM_ATTN, true},
        {"self_attn.q_norm", 1, c->qk_norm ? c->head_dim : 0, PARAM_NORM, false},
        {"self_attn.k_norm", 1, c->qk_norm ? c->head_dim : 0, PARAM_NORM, false},
        {"self_attn.o_proj", width, q, PARAM_ATTN, false},
        {"post_attention_layernorm", 1, width, PARAM_NORM, false},
        {"mlp.gate_proj", c->ffn, width, PARAM_MLP, false},
        {"mlp.up_proj", c->ffn, width, PARAM_MLP, true},
        {"mlp.down_proj", width, c->ffn, PARAM_MLP, false},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (rows[i].cols > 0) {
            struct param p = {.rows = rows[i].rows, .cols = rows[i].cols, .kind = rows[i].kind, .layer = layer};
            snprintf(p.name, sizeof p.name, "model.layers.%d.%s.weight", layer, rows[i].name);
            append(list, p, rows[i].joins);
        }
    }
}

enum status param_list_open(struct param_list *list, const struct model_config *c)
{
    memset(list, 0, sizeof *list);
    size_t most = 3 + 11 * (size_t)c->layers;
    list->params = calloc(most, sizeof *list->params);
    if (!list->params) {
        return status_fail(ERR_NOMEM, "list of %zu parameters: out of memory", most);
    }
    append(list, (struct param){"model.embed_tokens.weight", c->vocab, c->width, .kind = PARAM_EMBED, .layer = -1},
           false);
    for (int layer = 0; layer < c->layers; layer++) {
        append_layer(list, c, layer);
    }
    append(list, (struct param){"model.norm.weight", 1, c->width, .kind = PARAM_NORM, .layer = -1}, false);
    if (!c->tied) {
        append(list, (struct param){"lm_head.weight", c->vocab, c->width, .kind = PARAM_HEAD, .layer = -1}, false);
    }
    list->elements = (list->elements + PARAM_ALIGN - 1) / PARAM_ALIGN * PARAM_ALIGN;
    return OK;
}

void param_list_close(struct param_list *list)
{
    free(list->params);
    memset(list, 0, sizeof *list);
}

const struct param *param_list_find(const struct param_list *list, const char *name)
{
    for (int i = 0; i < list->count; i++) {
        if (strcmp(list->params[i].name, name) == 0) {
            return &list->params[i];
        }
    }
    return NULL;
}

/* o_proj and down_proj add to the residual stream, 2 L times: their smaller start keeps its variance. */
static bool is_residual_output(const struct param *p)
{
    return strstr(p->name, ".o_proj.") || strstr(p->name, ".down_proj.");
}

void param_init(const struct param *p, const struct model_config *config, uint64_t seed, size_t first, size_t n,
                float *values)
{
    char name[sizeof p->name + 8];
    snprintf(name, sizeof name, "init/%s", p->name);
    uint64_t stream = rng_stream(name);
    float std = config->init_std / (is_residual_output(p) ? sqrtf(2.0f * (float)config->layers) : 1.0f);
    int64_t blocks = (int64_t)((n + INIT_BLOCK - 1) / INIT_BLOCK);
#pragma omp parallel for
    for (int64_t b = 0; b < blocks; b++) {
        size_t begin = (size_t)b * INIT_BLOCK;
        int64_t count = (int64_t)(n - begin < INIT_BLOCK ? n - begin : INIT_BLOCK);
        float *out = values + begin;
        if (p->kind != PARAM_NORM) {
            rng_normals(seed, stream, first + begin, count, out);
        }
        for (int64_t k = 0; k < count; k++) {
            out[k] = p->kind == PARAM_NORM ? 1.0f : std * out[k];
        }
    }
}

void param_list_init(const struct param_list *list, const struct model_config *config, uint64_t seed, float *values)
{
    memset(values, 0, list->elements * sizeof *values);
    for (int i = 0; i < list->count; i++) {
        const struct param *p = &list->params[i];
        param_init(p, config, seed, 0, param_elements(p), values + p->offset);
    }
}
