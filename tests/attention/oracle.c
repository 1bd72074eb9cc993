/* tests/attention: the forward of docs/numerics.md, sections 1 to 6, in slow FP64. See oracle.h.
 * One long file on purpose: it is read beside the law, in the law's order, and nothing in it is meant to be reused. */
#include "tests/attention/oracle.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* --- Formats (section 1), by search over their codes --- */

struct layout {
    int mantissa_bits, bias, max_code;
};
static const struct layout layouts[] = {
    [ORACLE_E2M1] = {1, 1, 7},     [ORACLE_E4M3] = {3, 7, 0x7e},   [ORACLE_E5M2] = {2, 15, 0x7b},
    [ORACLE_UE4M3] = {3, 7, 0x7e}, [ORACLE_UE5M3] = {3, 15, 0xf7},
};

double oracle_value(enum oracle_format format, int code)
{
    const struct layout *l = &layouts[format];
    int exponent = code >> l->mantissa_bits;
    int mantissa = code & ((1 << l->mantissa_bits) - 1);
    if (exponent == 0) {
        return ldexp(mantissa, 1 - l->bias - l->mantissa_bits);
    }
    return ldexp((1 << l->mantissa_bits) + mantissa, exponent - l->bias - l->mantissa_bits);
}

int oracle_code(enum oracle_format format, double magnitude)
{
    int below = 0; /* greatest code whose value does not exceed the magnitude: codes are monotone */
    int above = layouts[format].max_code + 1;
    while (above - below > 1) {
        int middle = (below + above) / 2;
        if (oracle_value(format, middle) <= magnitude) {
            below = middle;
        } else {
            above = middle;
        }
    }
    if (below == layouts[format].max_code) {
        return below;
    }
    double down = magnitude - oracle_value(format, below);
    double up = oracle_value(format, below + 1) - magnitude;
    return up < down || (up == down && below % 2 == 1) ? below + 1 : below;
}

static double round_bf16(double x)
{
    int exponent;
    (void)frexp(x, &exponent);
    int step = exponent - 8 > -133 ? exponent - 8 : -133;
    return ldexp(nearbyint(ldexp(x, -step)), step);
}

double oracle_round(enum oracle_format format, double x)
{
    return format == ORACLE_BF16 ? round_bf16(x) : copysign(oracle_value(format, oracle_code(format, fabs(x))), x);
}

double oracle_pow2_scale(double amax, double limit)
{
    if (amax == 0) {
        return 1;
    }
    double scale = 1;
    while (scale * amax > limit) {
        scale /= 2;
    }
    while (2 * scale * amax <= limit) {
        scale *= 2;
    }
    return scale;
}

float fl32(double x)
{
    return (float)x;
}

/* --- Block quantisers (section 3): n elements `stride` apart, decoded values written to y --- */

static double amax(const double *x, int64_t n, int64_t stride)
{
    double m = 0;
    for (int64_t i = 0; i < n; i++) {
        m = fmax(m, fabs(x[i * stride]));
    }
    return m;
}

/* y = q s8 (times 1/G later), and the squared error of x = y / G. */
static double scaled_block(const double *x, int64_t n, int64_t stride, double g, double s8, double *y)
{
    double error = 0;
    for (int64_t i = 0; i < n; i++) {
        double q = s8 == 0 ? 0 : oracle_round(ORACLE_E2M1, x[i * stride] * g / s8);
        y[i * stride] = q * s8;
        double difference = x[i * stride] - q * s8 / g;
        error += difference * difference;
    }
    return error;
}

static void nvfp4_block(const double *x, int64_t n, int64_t stride, double g, enum oracle_format scales, bool mse,
                        double *y)
{
    double ideal = g * amax(x, n, stride) / 6;
    int best = oracle_code(scales, ideal);
    if (mse && ideal > 0) {
        double least = INFINITY;
        for (int code = 1; code <= layouts[scales].max_code; code++) {
            double s8 = oracle_value(scales, code);
            double error = s8 < ideal / 4 || s8 > ideal * 1.25 ? INFINITY : scaled_block(x, n, stride, g, s8, y);
            if (error < least) {
                least = error;
                best = code;
            }
        }
    }
    (void)scaled_block(x, n, stride, g, oracle_value(scales, best), y);
}

/* Blocks 64 features apart share the scale of least joint error (section 3, folded). */
static void folded_row(const double *x, double g, double *y)
{
    static const double multipliers[] = {.25, .3125, .375, .4375, .5, .625, .75, .875, 1, 1.125, 1.25};
    for (int64_t block = 0; block < 64; block += 16) {
        double pair_max = fmax(amax(x + block, 16, 1), amax(x + block + 64, 16, 1));
        double least = INFINITY;
        double best = 0;
        for (size_t m = 0; m < sizeof multipliers / sizeof *multipliers; m++) {
            double s8 = oracle_round(ORACLE_UE4M3, g * multipliers[m] * pair_max / 6);
            double error = scaled_block(x + block, 16, 1, g, s8, y + block) +
                           scaled_block(x + block + 64, 16, 1, g, s8, y + block + 64);
            if (error < least) {
                least = error;
                best = s8;
            }
        }
        (void)scaled_block(x + block, 16, 1, g, best, y + block);
        (void)scaled_block(x + block + 64, 16, 1, g, best, y + block + 64);
    }
}

/* Exponent of an MXFP4 block of values: nearest amplitude, at exactly 1.5 to the even E8M0 code; or the OCP floor. */
static int mx_exponent(double m, enum mx_family family)
{
    int exponent;
    double fraction = 2 * frexp(m, &exponent);
    exponent -= 1;
    if (family == MX_OCP) {
        exponent -= 2;
    } else if (fraction > 1.5 || (fraction == 1.5 && (exponent + 127) % 2 != 0)) {
        exponent += 1;
    }
    return exponent < -127 ? -127 : exponent > 127 ? 127 : exponent;
}

static void mxfp4_block(const double *x, int64_t n, int64_t stride, enum mx_family family, double *y)
{
    double m = amax(x, n, stride);
    int exponent = m > 0 ? mx_exponent(m, family) : 0;
    double six = family == MX_NEAREST ? 6 : 1;
    for (int64_t i = 0; i < n; i++) {
        double q = oracle_round(ORACLE_E2M1, ldexp(x[i * stride] * six, -exponent));
        y[i * stride] = ldexp(q / six, exponent);
    }
}

/* --- Operands (section 4) --- */

static double *load(const bf16 *x, int64_t tokens, int64_t heads, int64_t d, int64_t head)
{
    double *y = malloc(sizeof(double) * (size_t)(tokens * d));
    for (int64_t i = 0; i < tokens; i++) {
        for (int64_t e = 0; e < d; e++) {
            y[i * d + e] = (double)bf16_to_float(x[(i * heads + head) * d + e]);
        }
    }
    return y;
}

/* k_center: K less its mean over all keys, rounded to BF16 once. */
static void centre_keys(double *k, int64_t tokens, int64_t d)
{
    for (int64_t e = 0; e < d; e++) {
        double sum = 0;
        for (int64_t j = 0; j < tokens; j++) {
            sum += k[j * d + e];
        }
        float mean = fl32(sum / (double)tokens);
        for (int64_t j = 0; j < tokens; j++) {
            k[j * d + e] = round_bf16((double)fl32(k[j * d + e] - (double)mean));
        }
    }
}

static double quantise_qk(double *x, int64_t tokens, int64_t d, const struct attention_recipe *r)
{
    if (r->qk == QK_BF16) {
        return 1;
    }
    double g = oracle_pow2_scale(amax(x, tokens * d, 1), 2688);
    double *y = malloc(sizeof(double) * (size_t)(tokens * d));
    for (int64_t i = 0; i < tokens; i++) {
        if (r->qk_scale == QK_SCALE_FOLDED) {
            folded_row(x + i * d, g, y + i * d);
            continue;
        }
        for (int64_t block = 0; block < d; block += 16) {
            nvfp4_block(x + i * d + block, 16, 1, g, ORACLE_UE4M3, r->qk_scale == QK_SCALE_MSE, y + i * d + block);
        }
    }
    memcpy(x, y, sizeof(double) * (size_t)(tokens * d));
    free(y);
    if (r->qk == QK_NVFP4_E4M3) { /* one power of two per head brings the decoded values into E4M3 */
        double m = oracle_pow2_scale(amax(x, tokens * d, 1), 448);
        for (int64_t i = 0; i < tokens * d; i++) {
            x[i] = oracle_round(ORACLE_E4M3, m * x[i]) / m;
        }
    }
    return g;
}

static int64_t block_length(enum pv_format pv)
{
    return pv == PV_MXFP4 ? 32 : pv == PV_NVFP4 || pv == PV_FP4_UE5M3 ? 16 : 1;
}

/* Blocks run along keys, one feature at a time; the last may be short. */
static void quantise_v(double *v, int64_t tokens, int64_t d, const struct attention_recipe *r)
{
    int64_t length = block_length(r->pv);
    bool wide = r->pv == PV_FP4_UE5M3;
    double g = oracle_pow2_scale(amax(v, tokens * d, 1), wide ? 61440.0 * 6 : 2688);
    double *y = malloc(sizeof(double) * (size_t)(tokens * d));
    for (int64_t start = 0; start < tokens; start += length) {
        int64_t n = tokens - start < length ? tokens - start : length;
        for (int64_t e = 0; e < d; e++) {
            const double *x = v + start * d + e;
            if (r->pv == PV_MXFP4) {
                mxfp4_block(x, n, d, r->mx_rule, y + start * d + e);
            } else {
                nvfp4_block(x, n, d, g, wide ? ORACLE_UE5M3 : ORACLE_UE4M3, false, y + start * d + e);
            }
        }
    }
    for (int64_t i = 0; i < tokens * d; i++) {
        v[i] = r->pv == PV_MXFP4 ? y[i] : y[i] / g;
    }
    free(y);
}

void oracle_head_open(struct oracle_head *o, const struct oracle_problem *p, int64_t head)
{
    const struct attention_shape *s = &p->shape;
    int64_t kv = head / (s->heads / s->kv_heads);
    int64_t size = s->tokens * s->head_dim;
    o->q = load(p->q, s->tokens, s->heads, s->head_dim, head);
    o->k = load(p->k, s->tokens, s->kv_heads, s->head_dim, kv);
    o->v = load(p->v, s->tokens, s->kv_heads, s->head_dim, kv);
    o->v_blocked = load(p->v, s->tokens, s->kv_heads, s->head_dim, kv);
    o->v_e4m3 = load(p->v, s->tokens, s->kv_heads, s->head_dim, kv);
    if (p->recipe->k_center) {
        centre_keys(o->k, s->tokens, s->head_dim);
    }
    o->k_input = malloc(sizeof(double) * (size_t)size);
    memcpy(o->k_input, o->k, sizeof(double) * (size_t)size);
    o->g_q = quantise_qk(o->q, s->tokens, s->head_dim, p->recipe);
    o->g_k = quantise_qk(o->k, s->tokens, s->head_dim, p->recipe);
    o->c = fl32((double)s->softmax_scale * M_LOG2E / (o->g_q * o->g_k));
    o->m_v = fmin(4, oracle_pow2_scale(amax(o->v, size, 1), 448)); /* 4 until a value exceeds 112 */
    for (int64_t i = 0; i < size; i++) {
        o->v_e4m3[i] = oracle_round(ORACLE_E4M3, o->m_v * o->v_e4m3[i]) / o->m_v;
    }
    if (p->recipe->pv == PV_FP8) {
        memcpy(o->v_blocked, o->v_e4m3, sizeof(double) * (size_t)size);
    } else if (p->recipe->pv != PV_BF16) {
        quantise_v(o->v_blocked, s->tokens, s->head_dim, p->recipe);
    }
}

void oracle_head_close(struct oracle_head *o)
{
    free(o->q);
    free(o->k);
    free(o->k_input);
    free(o->v);
    free(o->v_blocked);
    free(o->v_e4m3);
}

int64_t oracle_scores(const struct oracle_problem *p, const struct oracle_head *o, int64_t i, float *t)
{
    int64_t d = p->shape.head_dim;
    int64_t n = p->shape.causal ? i + 1 : p->shape.tokens;
    for (int64_t j = 0; j < n; j++) {
        double sum = 0;
        for (int64_t e = 0; e < d; e++) {
            sum += o->q[i * d + e] * o->k[j * d + e];
        }
        t[j] = fl32((double)o->c * (double)fl32(sum));
    }
    return n;
}

const double *oracle_value_row(const struct oracle_problem *p, const struct oracle_head *o, int64_t i, int64_t j)
{
    int64_t length = block_length(p->recipe->pv);
    bool diagonal = p->recipe->v_diag == V_DIAG_FP8 && length > 1 && i / length == j / length;
    bool sink = p->recipe->pv != PV_BF16 && j < p->recipe->sink_keys_fp8;
    return (diagonal || sink ? o->v_e4m3 : o->v_blocked) + j * p->shape.head_dim;
}

const double *oracle_backward_value_row(const struct oracle_problem *p, const struct oracle_head *o, int64_t i,
                                        int64_t j)
{
    switch (p->recipe->bwd_v) {
    case BWD_V_FORWARD:
        return oracle_value_row(p, o, i, j);
    case BWD_V_E4M3:
        return o->v_e4m3 + j * p->shape.head_dim;
    case BWD_V_BF16:
        break;
    }
    return o->v + j * p->shape.head_dim;
}

/* --- Probabilities (section 5, step 3) --- */

enum { SAMPLED_MARGIN = 110 }; /* the paper's guard (110, 16): block exponents stay at or above anchor - 110 */

/* The code of 2^x by the recipe's producer; `key` is the key's place in its block, `block` the block's index. */
static int mx_code(const struct attention_recipe *r, float x, int64_t key, int64_t block)
{
    static const float thresholds[] = {-0x1.fffffep+0f, -0x1.a8ff96p-2f, 0x1.49a786p-2f, 0x1.9d5dap-1f,
                                       0x1.5269e2p+0f,  0x1.ceaedp+0f,   0x1.2934f2p+1f};
    int64_t pair = key / 2;
    int64_t s = block % 4;
    double a = (double)r->affine_a;
    double b = (double)r->affine_b;
    int code = 0;
    switch (r->p_map) {
    case P_EXACT:
        return oracle_code(ORACLE_E2M1, exp2((double)x));
    case P_THRESHOLD:
        for (int i = 0; i < 7; i++) {
            code += x >= thresholds[i];
        }
        return code;
    case P_CODE_SPACE:
        code = (int)fmin(7, fmax(0, floor((double)fl32(2 * (double)x + (double)2.37f))));
        code = x >= -2.0f && code < 1 ? 1 : code;
        return x >= -0.415037f && code < 2 ? 2 : code;
    case P_ACCURATE:
        if (pair == s || pair == s + 8 || pair == 4 || pair == 12) {
            return oracle_code(ORACLE_E2M1, exp2((double)x));
        }
        a = (double)1.65f;
        b = (double)0.80f;
        break;
    case P_AFFINE:
        break;
    }
    return oracle_code(ORACLE_E2M1, fmax(0, (double)fl32(a * (double)x + b)));
}

/* Section 6: the reference of a row of `n` visible keys. `sampled` looks at 128 keys spread over the sequence. */
static int anchor_of(const struct oracle_problem *p, const float *t, int64_t n)
{
    int64_t tokens = p->shape.tokens;
    int64_t samples = tokens < 128 ? tokens : 128;
    float m = -INFINITY;
    switch (p->recipe->anchor) {
    case ANCHOR_ZERO:
        return 0;
    case ANCHOR_SAMPLED:
        for (int64_t s = 0; s < samples && s * tokens / samples < n; s++) {
            m = fmaxf(m, t[s * tokens / samples]);
        }
        return (int)ceilf(m) + SAMPLED_MARGIN - (p->recipe->mx_rule == MX_OCP ? 2 : 0); /* OCP exponents lie 2 lower */
    case ANCHOR_ROW:
        break;
    }
    for (int64_t j = 0; j < n; j++) {
        m = fmaxf(m, t[j]);
    }
    return (int)ceilf(m);
}

static void mxfp4_probabilities(const struct attention_recipe *r, const float *t, int64_t start, int64_t n, int anchor,
                                int reference, double *value, uint8_t *codes)
{
    float m = -INFINITY;
    for (int64_t j = 0; j < n; j++) {
        m = fmaxf(m, t[j]);
    }
    bool nearest = r->mx_rule == MX_NEAREST;
    int exponent = (int)floorf(m) + (nearest ? m - floorf(m) > 0.5849625f : -2);
    bool empty = exponent - anchor + 127 < 1; /* its byte does not exist */
    if (r->anchor == ANCHOR_SAMPLED && exponent < anchor - SAMPLED_MARGIN) {
        exponent = anchor - SAMPLED_MARGIN;
        empty = false;
    }
    for (int64_t j = 0; j < n; j++) {
        float x = fl32((double)t[j] - exponent);
        x = nearest ? fl32((double)x + (double)fl32(log2(6))) : x;
        int code = empty ? 0 : mx_code(r, x, j, start / 32);
        codes[j] = (uint8_t)code;
        value[j] = ldexp(oracle_value(ORACLE_E2M1, code) / (nearest ? 6 : 1), exponent - reference);
    }
}

static void nvfp4_probabilities(enum oracle_format scales, double g, const float *t, int64_t n, int reference,
                                double *value, uint8_t *codes)
{
    double m = 0;
    for (int64_t j = 0; j < n; j++) {
        m = fmax(m, exp2((double)t[j] - reference));
    }
    double s = oracle_round(scales, g * m / 6) / g;
    for (int64_t j = 0; j < n; j++) {
        int code = s > 0 ? oracle_code(ORACLE_E2M1, exp2((double)t[j] - reference) / s) : 0;
        codes[j] = (uint8_t)code;
        value[j] = oracle_value(ORACLE_E2M1, code) * s;
    }
}

static void fp8_probabilities(const float *t, int64_t n, int reference, int lift, double *value, uint8_t *codes)
{
    for (int64_t j = 0; j < n; j++) {
        int code = oracle_code(ORACLE_E4M3, exp2((double)t[j] - reference + lift));
        codes[j] = (uint8_t)code;
        value[j] = ldexp(oracle_value(ORACLE_E4M3, code), -lift);
    }
}

void oracle_probabilities(const struct oracle_problem *p, const float *t, int64_t n, int reference, bool rebuilt,
                          double *value, uint8_t *codes)
{
    const struct attention_recipe *r = p->recipe;
    int one = rebuilt ? 1 : 0; /* P reaches 2 when rebuilt: one binade less of lift */
    int anchor = anchor_of(p, t, n);
    int64_t sink = r->sink_keys_fp8 < n ? r->sink_keys_fp8 : n;
    if (r->pv == PV_BF16) {
        for (int64_t j = 0; j < n; j++) {
            value[j] = oracle_round(ORACLE_BF16, exp2((double)t[j] - reference));
            codes[j] = 0;
        }
        return;
    }
    if (r->pv == PV_FP8) {
        sink = n;
    }
    fp8_probabilities(t, sink, reference, 8 - one, value, codes);
    int64_t length = block_length(r->pv);
    for (int64_t start = sink; start < n; start += length) {
        int64_t m = n - start < length ? n - start : length;
        if (r->pv == PV_MXFP4) {
            mxfp4_probabilities(r, t + start, start, m, anchor, reference, value + start, codes + start);
        } else if (r->pv == PV_NVFP4) {
            nvfp4_probabilities(ORACLE_UE4M3, ldexp(1, 11 - one), t + start, m, reference, value + start,
                                codes + start);
        } else {
            nvfp4_probabilities(ORACLE_UE5M3, ldexp(1, 18 - one), t + start, m, reference, value + start,
                                codes + start);
        }
    }
}

/* --- Forward (section 5) --- */

double oracle_exact_lse2(const float *t, int64_t n)
{
    double m = -INFINITY;
    double sum = 0;
    for (int64_t j = 0; j < n; j++) {
        m = fmax(m, (double)t[j]);
    }
    for (int64_t j = 0; j < n; j++) {
        sum += exp2((double)t[j] - m);
    }
    return m + log2(sum);
}

static void forward_row(const struct oracle_problem *p, const struct oracle_head *o, int64_t head, int64_t i,
                        struct oracle_fwd *f)
{
    const struct attention_shape *s = &p->shape;
    float *t = malloc(sizeof(float) * (size_t)s->tokens);
    int64_t n = oracle_scores(p, o, i, t);
    int anchor = anchor_of(p, t, n);
    double *value = f->value + (head * s->tokens + i) * s->tokens;
    oracle_probabilities(p, t, n, anchor, false, value, f->codes + (head * s->tokens + i) * s->tokens);
    double total = 0;
    for (int64_t j = 0; j < n; j++) { /* the represented values; BF16 before its rounding, as flash attention does */
        total += p->recipe->pv == PV_BF16 ? exp2((double)t[j] - anchor) : value[j];
    }
    double exact = oracle_exact_lse2(t, n);
    f->lse2[head * s->tokens + i] = total > 0 ? anchor + log2(total) : -INFINITY;
    f->lse2_exact[head * s->tokens + i] = exact;
    for (int64_t j = 0; j < n; j++) {
        f->lost_mass += value[j] == 0 ? exp2((double)t[j] - exact) : 0;
        f->logit_max = fmax(f->logit_max, fabs((double)t[j]) * M_LN2);
    }
    for (int64_t e = 0; e < s->head_dim; e++) {
        double sum = 0;
        double sum_exact = 0;
        for (int64_t j = 0; j < n; j++) {
            sum += value[j] * oracle_value_row(p, o, i, j)[e];
            sum_exact += exp2((double)t[j] - exact) * oracle_backward_value_row(p, o, i, j)[e];
        }
        f->out[(i * s->heads + head) * s->head_dim + e] = total > 0 ? sum / total : 0;
        f->out_exact[(i * s->heads + head) * s->head_dim + e] = sum_exact;
    }
    free(t);
}

void oracle_forward(const struct oracle_problem *p, struct oracle_fwd *f)
{
    const struct attention_shape *s = &p->shape;
    size_t rows = (size_t)(s->heads * s->tokens);
    *f = (struct oracle_fwd){
        .out = calloc(rows * (size_t)s->head_dim, sizeof(double)),
        .out_exact = calloc(rows * (size_t)s->head_dim, sizeof(double)),
        .lse2 = calloc(rows, sizeof(double)),
        .lse2_exact = calloc(rows, sizeof(double)),
        .codes = calloc(rows * (size_t)s->tokens, 1),
        .value = calloc(rows * (size_t)s->tokens, sizeof(double)),
    };
    for (int64_t head = 0; head < s->heads; head++) {
        struct oracle_head o;
        oracle_head_open(&o, p, head);
        for (int64_t i = 0; i < s->tokens; i++) {
            forward_row(p, &o, head, i, f);
        }
        oracle_head_close(&o);
    }
}

void oracle_forward_free(struct oracle_fwd *f)
{
    free(f->out);
    free(f->out_exact);
    free(f->lse2);
    free(f->lse2_exact);
    free(f->codes);
    free(f->value);
}
