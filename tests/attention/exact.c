/* tests/attention: exact attention and its gradients in FP64: no format, no rounding. See oracle.h. */
#include "tests/attention/oracle.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static double *load_exact(const bf16 *x, int64_t tokens, int64_t heads, int64_t d, int64_t head)
{
    double *y = malloc(sizeof(double) * (size_t)(tokens * d));
    for (int64_t i = 0; i < tokens * d; i++) {
        y[i] = (double)bf16_to_float(x[(i / d * heads + head) * d + i % d]);
    }
    return y;
}

/* Four chains, so that long rows do not wait for one adder. n is a multiple of 4. */
static double inner(const double *x, const double *y, int64_t n)
{
    double sum[4] = {0, 0, 0, 0};
    for (int64_t i = 0; i < n; i += 4) {
        for (int lane = 0; lane < 4; lane++) {
            sum[lane] += x[i + lane] * y[i + lane];
        }
    }
    return sum[0] + sum[1] + sum[2] + sum[3];
}

struct exact_head {
    const struct attention_shape *s;
    double *q, *k, *v, *dout;
    double *out, *dq, *dk, *dv; /* strided views of the results, or NULL */
    int64_t out_stride, kv_stride;
};

static void exact_row(const struct exact_head *x, int64_t i, double *prob, double *o)
{
    const struct attention_shape *s = x->s;
    int64_t d = s->head_dim;
    int64_t n = s->causal ? i + 1 : s->tokens;
    double m = -INFINITY;
    double total = 0;
    for (int64_t j = 0; j < n; j++) {
        prob[j] = (double)s->softmax_scale * inner(x->q + i * d, x->k + j * d, d);
        m = fmax(m, prob[j]);
    }
    for (int64_t j = 0; j < n; j++) {
        prob[j] = exp(prob[j] - m);
        total += prob[j];
    }
    memset(o, 0, sizeof(double) * (size_t)d);
    for (int64_t j = 0; j < n; j++) {
        prob[j] /= total;
        for (int64_t e = 0; e < d; e++) {
            o[e] += prob[j] * x->v[j * d + e];
        }
    }
    memcpy(x->out + i * x->out_stride, o, sizeof(double) * (size_t)d);
    if (x->dq == NULL) {
        return;
    }
    const double *dout = x->dout + i * d;
    double r = inner(o, dout, d);
    for (int64_t j = 0; j < n; j++) {
        double ds = (double)s->softmax_scale * prob[j] * (inner(dout, x->v + j * d, d) - r);
        for (int64_t e = 0; e < d; e++) {
            x->dq[i * x->out_stride + e] += ds * x->k[j * d + e];
            x->dk[j * x->kv_stride + e] += ds * x->q[i * d + e];
            x->dv[j * x->kv_stride + e] += prob[j] * dout[e];
        }
    }
}

void oracle_exact(const struct oracle_problem *p, double *out, double *dq, double *dk, double *dv)
{
    const struct attention_shape *s = &p->shape;
    int64_t d = s->head_dim;
    size_t kv_size = (size_t)(s->tokens * s->kv_heads * d);
    double *prob = malloc(sizeof(double) * (size_t)s->tokens);
    double *o = malloc(sizeof(double) * (size_t)d);
    if (dq != NULL) {
        memset(dq, 0, sizeof(double) * (size_t)(s->tokens * s->heads * d));
        memset(dk, 0, sizeof(double) * kv_size);
        memset(dv, 0, sizeof(double) * kv_size);
    }
    for (int64_t head = 0; head < s->heads; head++) {
        int64_t kv = head / (s->heads / s->kv_heads);
        struct exact_head x = {
            .s = s,
            .q = load_exact(p->q, s->tokens, s->heads, d, head),
            .k = load_exact(p->k, s->tokens, s->kv_heads, d, kv),
            .v = load_exact(p->v, s->tokens, s->kv_heads, d, kv),
            .dout = dq != NULL ? load_exact(p->dout, s->tokens, s->heads, d, head) : NULL,
            .out = out + head * d,
            .dq = dq != NULL ? dq + head * d : NULL,
            .dk = dq != NULL ? dk + kv * d : NULL,
            .dv = dq != NULL ? dv + kv * d : NULL,
            .out_stride = s->heads * d,
            .kv_stride = s->kv_heads * d,
        };
        for (int64_t i = 0; i < s->tokens; i++) {
            exact_row(&x, i, prob, o);
        }
        free(x.q);
        free(x.k);
        free(x.v);
        free(x.dout);
    }
    free(prob);
    free(o);
}
