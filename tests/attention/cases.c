/* tests/attention: inputs with names. See cases.h. */
#include "tests/attention/cases.h"

#include "core/rng.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const char *const input_names[] = {"gauss", "peaky3", "sink", "outlier", "mix", NULL};

/* Feature e of the common direction that all queries share with a sink key: +-1, so that no feature stands out. */
static float sink_direction(int64_t e)
{
    return (e * 5 / 3) % 2 == 0 ? 1.0f : -1.0f;
}

static float query_value(enum input_kind kind, int64_t e, int64_t d, float x)
{
    bool outlier = e % (d / 4) == 3;
    switch (kind) {
    case INPUT_PEAKY3:
        return 3 * x;
    case INPUT_SINK:
        return x + 0.5f * sink_direction(e);
    case INPUT_OUTLIER:
        return outlier ? 3.5f * x : x;
    case INPUT_MIX:
        return (outlier ? 5 * x : 2.5f * x) + 0.5f * sink_direction(e);
    default:
        return x;
    }
}

static float key_value(enum input_kind kind, int64_t token, int64_t e, int64_t d, float x)
{
    bool outlier = e % (d / 4) == 3;
    if (token == 0 && (kind == INPUT_SINK || kind == INPUT_MIX)) { /* 0.5 sqrt(D) times this is the sink's logit */
        float logit = kind == INPUT_SINK ? 8 : 4;
        return 2 * logit / sqrtf((float)d) * sink_direction(e);
    }
    if (outlier && kind == INPUT_OUTLIER) {
        return 3.5f * x;
    }
    return outlier && kind == INPUT_MIX ? 3 * x : x;
}

static float value_value(enum input_kind kind, int64_t token, int64_t e, float x)
{
    if (token == 0 && (kind == INPUT_SINK || kind == INPUT_MIX)) {
        return 0.05f * x;
    }
    if ((kind == INPUT_OUTLIER || kind == INPUT_MIX) && (token * 7 + e) % 331 == 0) {
        return 8 * x;
    }
    return x;
}

enum tensor_name { TENSOR_Q, TENSOR_K, TENSOR_V, TENSOR_DOUT };

static bf16 *draw(const struct attention_shape *s, enum tensor_name tensor, enum input_kind kind, uint64_t seed)
{
    static const char *const streams[] = {"test/q", "test/k", "test/v", "test/dout"};
    uint64_t stream = rng_stream(streams[tensor]);
    int64_t heads = tensor == TENSOR_K || tensor == TENSOR_V ? s->kv_heads : s->heads;
    int64_t n = s->batch * s->tokens * heads * s->head_dim;
    bf16 *x = malloc(sizeof(bf16) * (size_t)n);
    for (int64_t i = 0; i < n; i++) {
        float value = rng_normal(seed, stream, (uint64_t)i);
        int64_t e = i % s->head_dim;
        int64_t token = i / (s->head_dim * heads) % s->tokens;
        switch (tensor) {
        case TENSOR_Q:
            value = query_value(kind, e, s->head_dim, value);
            break;
        case TENSOR_K:
            value = key_value(kind, token, e, s->head_dim, value);
            break;
        case TENSOR_V:
            value = value_value(kind, token, e, value);
            break;
        case TENSOR_DOUT: /* about what a mean loss over some thousand tokens sends back */
            value = ldexpf(value, -10);
            break;
        }
        x[i] = bf16_from_float(value);
    }
    return x;
}

static void *poisoned(size_t bytes)
{
    size_t rounded = (bytes / 64 + 1) * 64;
    void *x = aligned_alloc(64, rounded);
    memset(x, 0xff, rounded); /* NaN in BF16 and FP32 */
    return x;
}

void case_open(struct attention_case *c, const struct attention_shape *shape, const struct attention_recipe *recipe,
               enum input_kind kind, uint64_t seed)
{
    memset(c, 0, sizeof *c);
    c->shape = *shape;
    c->recipe = *recipe;
    ASSERT(attention_choose(&c->shape, &c->recipe, DEVICE_CPU, "cpu", &c->variant) == OK);
    c->q = draw(shape, TENSOR_Q, kind, seed);
    c->k = draw(shape, TENSOR_K, kind, seed);
    c->v = draw(shape, TENSOR_V, kind, seed);
    c->dout = draw(shape, TENSOR_DOUT, kind, seed);
    size_t queries = sizeof(bf16) * (size_t)case_queries(c);
    size_t keys = sizeof(bf16) * (size_t)case_keys(c);
    c->out = poisoned(queries);
    c->dq = poisoned(queries);
    c->dk = poisoned(keys);
    c->dv = poisoned(keys);
    c->lse_log2 = poisoned(sizeof(float) * (size_t)(shape->batch * shape->heads * shape->tokens));
    c->saved = poisoned(c->variant->saved_bytes(&c->shape, &c->recipe));
    c->scratch = poisoned(c->variant->scratch_bytes(&c->shape, &c->recipe));
}

static struct head_view view(const struct attention_case *c, bf16 *data, int64_t heads)
{
    return (struct head_view){
        .data = data,
        .batch_stride = c->shape.tokens * heads * c->shape.head_dim,
        .token_stride = heads * c->shape.head_dim,
        .head_stride = c->shape.head_dim,
    };
}

void case_forward(struct attention_case *c)
{
    struct attention_fwd call = {
        .shape = c->shape,
        .recipe = &c->recipe,
        .q = view(c, c->q, c->shape.heads),
        .k = view(c, c->k, c->shape.kv_heads),
        .v = view(c, c->v, c->shape.kv_heads),
        .out = view(c, c->out, c->shape.heads),
        .lse_log2 = c->lse_log2,
        .saved = c->saved,
        .scratch = c->scratch,
        .stats = &c->stats,
    };
    c->variant->fwd(&call);
}

void case_backward(struct attention_case *c)
{
    struct attention_bwd call = {
        .shape = c->shape,
        .recipe = &c->recipe,
        .q = view(c, c->q, c->shape.heads),
        .k = view(c, c->k, c->shape.kv_heads),
        .v = view(c, c->v, c->shape.kv_heads),
        .out = view(c, c->out, c->shape.heads),
        .dout = view(c, c->dout, c->shape.heads),
        .dq = view(c, c->dq, c->shape.heads),
        .dk = view(c, c->dk, c->shape.kv_heads),
        .dv = view(c, c->dv, c->shape.kv_heads),
        .lse_log2 = c->lse_log2,
        .saved = c->saved,
        .scratch = c->scratch,
        .stats = &c->stats,
    };
    c->variant->bwd(&call);
}

void case_close(struct attention_case *c)
{
    free(c->q);
    free(c->k);
    free(c->v);
    free(c->dout);
    free(c->out);
    free(c->dq);
    free(c->dk);
    free(c->dv);
    free(c->lse_log2);
    free(c->saved);
    free(c->scratch);
    memset(c, 0, sizeof *c);
}

struct attention_recipe recipe_of(enum pv_format pv, enum backward_preset backward)
{
    struct attention_recipe recipe = attention_recipe_bf16();
    recipe.qk = pv == PV_BF16 ? QK_BF16 : QK_NVFP4;
    recipe.pv = pv;
    attention_recipe_preset(&recipe, backward);
    return recipe;
}

int64_t case_queries(const struct attention_case *c)
{
    return c->shape.batch * c->shape.tokens * c->shape.heads * c->shape.head_dim;
}

int64_t case_keys(const struct attention_case *c)
{
    return c->shape.batch * c->shape.tokens * c->shape.kv_heads * c->shape.head_dim;
}

void case_multiply(bf16 *x, int64_t n, float by)
{
    for (int64_t i = 0; i < n; i++) {
        x[i] = bf16_from_float(bf16_to_float(x[i]) * by);
    }
}

double rel_l2(const bf16 *x, const double *y, int64_t n)
{
    double error = 0;
    double size = 0;
    for (int64_t i = 0; i < n; i++) {
        double difference = (double)bf16_to_float(x[i]) - y[i];
        error += difference * difference;
        size += y[i] * y[i];
    }
    return error == 0 ? 0 : sqrt(error / size);
}

double cosine(const bf16 *x, const double *y, int64_t n)
{
    double xy = 0;
    double xx = 0;
    double yy = 0;
    for (int64_t i = 0; i < n; i++) {
        double value = (double)bf16_to_float(x[i]);
        xy += value * y[i];
        xx += value * value;
        yy += y[i] * y[i];
    }
    return xy / sqrt(xx * yy);
}
