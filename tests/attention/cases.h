/* tests/attention: inputs with names, and measures of difference. Used by the tests and by bench/numerics.
 *
 * All values are standard normal before what the name adds, then rounded to BF16. */
#pragma once

#include "attention/attention.h"

enum input_kind {
    INPUT_GAUSS,
    INPUT_PEAKY3,  /* q times 3: logits of standard deviation 3 */
    INPUT_SINK,    /* every query looks at key 0 (logit +8), whose V is small */
    INPUT_OUTLIER, /* four features of q and k are 3.5 times larger, and a few values of V 8 times */
    INPUT_MIX,     /* peaky, sink (+4) and outliers together */
    INPUT_KINDS,
};
extern const char *const input_names[]; /* in enum order */

/* One call's tensors, contiguous (B, T, H, D), and its recipe. owns: every pointer but variant. */
struct attention_case {
    struct attention_shape shape;
    struct attention_recipe recipe;
    const struct attention_variant *variant;
    bf16 *q, *k, *v, *dout, *out, *dq, *dk, *dv;
    float *lse_log2;
    void *saved, *scratch;
    struct attention_stats stats;
};

/* Allocates, draws inputs, chooses the variant "cpu". The recipe must be legal for the shape. */
void case_open(struct attention_case *c, const struct attention_shape *shape, const struct attention_recipe *recipe,
               enum input_kind kind, uint64_t seed);
void case_forward(struct attention_case *c);
void case_backward(struct attention_case *c);
void case_close(struct attention_case *c);

/* NVFP4 Q and K, the given pv, `represented`, everything else plain: where tests of one switch start. */
struct attention_recipe recipe_of(enum pv_format pv, enum backward_preset backward);

int64_t case_queries(const struct attention_case *c); /* elements of q, out, dout, dq */
int64_t case_keys(const struct attention_case *c);    /* elements of k, v, dk, dv */

/* x *= by, rounded to BF16; n elements. */
void case_multiply(bf16 *x, int64_t n, float by);

/* ||x - y|| / ||y||; 0 if both are zero. Cosine. */
double rel_l2(const bf16 *x, const double *y, int64_t n);
double cosine(const bf16 *x, const double *y, int64_t n);
