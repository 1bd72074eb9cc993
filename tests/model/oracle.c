#include "tests/model/oracle.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* All activations of one sample. */
struct activations {
    double *x, *normed, *q, *k, *v, *attended, *branch, *gate, *up;
};

static double *doubles(size_t n)
{
    double *x = calloc(n, sizeof *x);
    if (!x) {
        abort();
    }
    return x;
}

static const double *weight(const struct param_list *params, const double *w, int layer, const char *name)
{
    char full[96];
    if (layer < 0) {
        snprintf(full, sizeof full, "%s.weight", name);
    } else {
        snprintf(full, sizeof full, "model.layers.%d.%s.weight", layer, name);
    }
    const struct param *p = param_list_find(params, full);
    return p ? w + p->offset : NULL;
}

/* y (rows, out) = x (rows, in) w^T */
static void multiply(const double *x, const double *w, int rows, int in, int out, double *y)
{
    for (int r = 0; r < rows; r++) {
        for (int o = 0; o < out; o++) {
            double sum = 0;
            for (int i = 0; i < in; i++) {
                sum += x[r * in + i] * w[o * in + i];
            }
            y[r * out + o] = sum;
        }
    }
}

static void rms_norm(const double *x, const double *gain, int rows, int width, double eps, double *y)
{
    for (int r = 0; r < rows; r++) {
        double mean = 0;
        for (int c = 0; c < width; c++) {
            mean += x[r * width + c] * x[r * width + c] / width;
        }
        for (int c = 0; c < width; c++) {
            y[r * width + c] = x[r * width + c] / sqrt(mean + eps) * gain[c];
        }
    }
}

double oracle_inverse_frequency(const struct rope_config *rope, int head_dim, int i)
{
    double inverse = 1.0 / pow((double)rope->theta, 2.0 * i / head_dim);
    if (rope->scaling == ROPE_NONE) {
        return inverse;
    }
    double length = 2 * acos(-1.0) / inverse, original = rope->original_context;
    double low = (double)rope->low_freq_factor, high = (double)rope->high_freq_factor, factor = (double)rope->factor;
    if (length < original / high) {
        return inverse;
    }
    if (length > original / low) {
        return inverse / factor;
    }
    double smooth = (original / length - low) / (high - low);
    return (1 - smooth) / factor * inverse + smooth * inverse;
}

static void turn(const struct model_config *c, double *x, int rows, int heads)
{
    int D = c->head_dim;
    for (int t = 0; t < rows; t++) {
        for (int h = 0; h < heads; h++) {
            double *head = x + (t * heads + h) * D, old[256];
            memcpy(old, head, (size_t)D * sizeof *old);
            for (int d = 0; d < D; d++) {
                double angle = t * oracle_inverse_frequency(&c->rope, D, d % (D / 2));
                double other = d < D / 2 ? -old[d + D / 2] : old[d - D / 2];
                head[d] = old[d] * cos(angle) + other * sin(angle);
            }
        }
    }
}

static void attention(const struct model_config *c, const struct activations *a, int rows)
{
    int H = c->heads, Hkv = c->kv_heads, D = c->head_dim;
    double *p = doubles((size_t)rows);
    for (int h = 0; h < H; h++) {
        int kv = h / (H / Hkv);
        for (int i = 0; i < rows; i++) {
            double sum = 0;
            for (int j = 0; j <= i; j++) {
                double score = 0;
                for (int d = 0; d < D; d++) {
                    score += a->q[(i * H + h) * D + d] * a->k[(j * Hkv + kv) * D + d];
                }
                p[j] = exp(score / sqrt(D));
                sum += p[j];
            }
            for (int d = 0; d < D; d++) {
                double out = 0;
                for (int j = 0; j <= i; j++) {
                    out += p[j] / sum * a->v[(j * Hkv + kv) * D + d];
                }
                a->attended[(i * H + h) * D + d] = out;
            }
        }
    }
    free(p);
}

static void layer_forward(const struct model_config *c, const struct param_list *params, const double *w, int layer,
                          int rows, const struct activations *a)
{
    int C = c->width, H = c->heads, Hkv = c->kv_heads, D = c->head_dim, F = c->ffn;
    double eps = (double)c->norm_eps;
    rms_norm(a->x, weight(params, w, layer, "input_layernorm"), rows, C, eps, a->normed);
    multiply(a->normed, weight(params, w, layer, "self_attn.q_proj"), rows, C, H * D, a->q);
    multiply(a->normed, weight(params, w, layer, "self_attn.k_proj"), rows, C, Hkv * D, a->k);
    multiply(a->normed, weight(params, w, layer, "self_attn.v_proj"), rows, C, Hkv * D, a->v);
    if (c->qk_norm) {
        rms_norm(a->q, weight(params, w, layer, "self_attn.q_norm"), rows * H, D, eps, a->q);
        rms_norm(a->k, weight(params, w, layer, "self_attn.k_norm"), rows * Hkv, D, eps, a->k);
    }
    turn(c, a->q, rows, H);
    turn(c, a->k, rows, Hkv);
    attention(c, a, rows);
    multiply(a->attended, weight(params, w, layer, "self_attn.o_proj"), rows, H * D, C, a->branch);
    for (int i = 0; i < rows * C; i++) {
        a->x[i] += a->branch[i];
    }
    rms_norm(a->x, weight(params, w, layer, "post_attention_layernorm"), rows, C, eps, a->normed);
    multiply(a->normed, weight(params, w, layer, "mlp.gate_proj"), rows, C, F, a->gate);
    multiply(a->normed, weight(params, w, layer, "mlp.up_proj"), rows, C, F, a->up);
    for (int i = 0; i < rows * F; i++) {
        a->gate[i] = a->gate[i] / (1 + exp(-a->gate[i])) * a->up[i];
    }
    multiply(a->gate, weight(params, w, layer, "mlp.down_proj"), rows, F, C, a->branch);
    for (int i = 0; i < rows * C; i++) {
        a->x[i] += a->branch[i];
    }
}

static double cross_entropy(const double *logits, const int32_t *targets, int rows, int V)
{
    double loss = 0;
    for (int t = 0; t < rows; t++) {
        double sum = 0;
        for (int v = 0; v < V; v++) {
            sum += exp(logits[t * V + v]);
        }
        loss += targets[t] < 0 ? 0 : log(sum) - logits[t * V + targets[t]];
    }
    return loss;
}

double oracle_loss(const struct model_config *c, const struct param_list *params, const double *w,
                   const int32_t *tokens, const int32_t *targets, int rows, double *logits)
{
    size_t n = (size_t)rows, C = (size_t)c->width, V = (size_t)c->vocab;
    size_t q = n * (size_t)(c->heads * c->head_dim), kv = n * (size_t)(c->kv_heads * c->head_dim);
    double *all = doubles(3 * n * C + 2 * q + 2 * kv + 2 * n * (size_t)c->ffn + n * V), *next = all;
    struct activations a;
    a.x = next;
    a.normed = next += n * C;
    a.branch = next += n * C;
    a.q = next += n * C;
    a.attended = next += q;
    a.k = next += q;
    a.v = next += kv;
    a.gate = next += kv;
    a.up = next += n * (size_t)c->ffn;
    double *scores = logits ? logits : (next += n * (size_t)c->ffn);
    const double *embedding = weight(params, w, -1, "model.embed_tokens");
    for (size_t t = 0; t < n; t++) {
        memcpy(a.x + t * C, embedding + (size_t)tokens[t] * C, C * sizeof *a.x);
    }
    for (int layer = 0; layer < c->layers; layer++) {
        layer_forward(c, params, w, layer, rows, &a);
    }
    rms_norm(a.x, weight(params, w, -1, "model.norm"), rows, c->width, (double)c->norm_eps, a.normed);
    multiply(a.normed, c->tied ? embedding : weight(params, w, -1, "lm_head"), rows, c->width, c->vocab, scores);
    double loss = cross_entropy(scores, targets, rows, c->vocab);
    free(all);
    return loss;
}
