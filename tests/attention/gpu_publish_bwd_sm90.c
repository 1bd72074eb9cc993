/* What the Hopper backward publishes, seen through its gradients: group sizes, lengths around tiles, magnitudes that
 * the caller knows (attention_bwd.amax), a V that 4 would lift out of E4M3, and a K with a large mean that is taken
 * off. */
#include "attention/attention_bwd_sm90.h"
#include "attention/attention_cpu.h"
#include "attention/attention_sm90.h"
#include "tests/attention/cases.h"
#include "tests/gpu.h"

#include <math.h>
#include <stdio.h>

enum { D = 128 };

struct gradients {
    bf16 *dq, *dk, *dv;
};

static struct head_view view_of(bf16 *data, const struct attention_shape *s, int64_t heads)
{
    return (struct head_view){data, s->tokens * heads * D, heads * D, D};
}

/* Largest |x| of each head of (B, T, heads, D), to amax[b][first + head]. */
static void amax_of(const bf16 *x, const struct attention_shape *s, int64_t heads, int64_t first, float *amax)
{
    int64_t all = s->heads + 2 * s->kv_heads;
    for (int64_t i = 0; i < s->batch * s->tokens * heads; i++) {
        float *most = &amax[i / heads / s->tokens * all + first + i % heads];
        for (int64_t d = 0; d < D; d++) {
            float y = fabsf(bf16_to_float(x[i * D + d]));
            *most = y < INFINITY ? fmaxf(*most, y) : INFINITY;
        }
    }
}

static float *amax_open(struct cuda *cuda, const struct attention_case *c)
{
    const struct attention_shape *s = &c->shape;
    int64_t n = s->batch * (s->heads + 2 * s->kv_heads);
    float *host = calloc((size_t)n, sizeof *host);
    amax_of(c->q, s, s->heads, 0, host);
    amax_of(c->k, s, s->kv_heads, s->heads, host);
    amax_of(c->v, s, s->kv_heads, s->heads + s->kv_heads, host);
    float *device = gpu_array(cuda, host, (size_t)n * sizeof *host);
    free(host);
    return device;
}

/* The gradients of a case with forward results, from the GPU. */
static struct gradients run(struct cuda *cuda, const struct attention_case *c, bool known)
{
    const struct attention_shape *s = &c->shape;
    size_t queries = (size_t)case_queries(c) * sizeof(bf16);
    size_t keys = (size_t)case_keys(c) * sizeof(bf16);
    size_t lse = (size_t)(s->batch * s->heads * s->tokens) * sizeof(float);
    struct attention_bwd a = {.cuda = cuda, .shape = *s, .recipe = &c->recipe};
    a.q = view_of(gpu_array(cuda, c->q, queries), s, s->heads);
    a.k = view_of(gpu_array(cuda, c->k, keys), s, s->kv_heads);
    a.v = view_of(gpu_array(cuda, c->v, keys), s, s->kv_heads);
    a.out = view_of(gpu_array(cuda, c->out, queries), s, s->heads);
    a.dout = view_of(gpu_array(cuda, c->dout, queries), s, s->heads);
    a.dq = view_of(gpu_array(cuda, NULL, queries), s, s->heads);
    a.dk = view_of(gpu_array(cuda, NULL, keys), s, s->kv_heads);
    a.dv = view_of(gpu_array(cuda, NULL, keys), s, s->kv_heads);
    float *lse_log2 = gpu_array(cuda, c->lse_log2, lse);
    void *saved = gpu_array(cuda, NULL, attention_variant_sm90.saved_bytes(s, &c->recipe));
    float *amax = known ? amax_open(cuda, c) : NULL;
    a.lse_log2 = lse_log2;
    a.saved = saved;
    a.amax = amax;
    a.scratch = gpu_array(cuda, NULL, attention_variant_sm90.scratch_bytes(s, &c->recipe));
    cuda_upload(cuda, saved, c->saved, c->variant->saved_bytes(s, &c->recipe));
    attention_complete_sm90(cuda, s, &c->recipe, saved, a.scratch);
    attention_bwd_sm90(&a);
    struct gradients y = {malloc(queries), malloc(keys), malloc(keys)};
    gpu_fetch(cuda, y.dq, a.dq.data, queries);
    gpu_fetch(cuda, y.dk, a.dk.data, keys);
    gpu_fetch(cuda, y.dv, a.dv.data, keys);
    void *all[] = {a.q.data,  a.k.data,  a.v.data, lse_log2, a.out.data, a.dout.data,
                   a.dq.data, a.dk.data, saved,    amax,     a.dv.data,  a.scratch};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        cuda_free(all[i]);
    }
    return y;
}

static void gradients_free(struct gradients *y)
{
    free(y->dq);
    free(y->dk);
    free(y->dv);
}

static double difference(const bf16 *x, const bf16 *y, int64_t n)
{
    double squares = 0;
    double norm = 0;
    for (int64_t i = 0; i < n; i++) {
        double b = (double)bf16_to_float(y[i]);
        double e = (double)bf16_to_float(x[i]) - b;
        squares += e * e;
        norm += b * b;
    }
    return squares == 0 ? 0 : sqrt(squares / norm);
}

/* As backward_bound in gpu_sm90_check.h: FP8 sums of 14 bits move one stored dS in 100 to a neighbouring code. */
#define FP8_BOUND 2e-2
#define E4M3_SCORES_BOUND 4e-2

/* Compares with the reference, and the call that knows magnitudes with the one that finds them. V times `values`,
 * feature 0 of K plus `keys`. Returns complaints. */
static int check(struct cuda *cuda, const struct attention_shape *shape, const struct attention_recipe *recipe,
                 enum input_kind kind, float values, float keys)
{
    struct attention_case c;
    case_open(&c, shape, recipe, kind, 31 + (uint64_t)shape->tokens);
    for (int64_t i = 0; i < case_keys(&c); i++) {
        c.v[i] = bf16_from_float(values * bf16_to_float(c.v[i]));
        c.k[i] = bf16_from_float(bf16_to_float(c.k[i]) + (i % D == 0 ? keys : 0));
    }
    case_forward(&c);
    case_backward(&c);
    struct gradients found = run(cuda, &c, false);
    struct gradients known = run(cuda, &c, true);
    double dq = difference(found.dq, c.dq, case_queries(&c));
    double dk = difference(found.dk, c.dk, case_keys(&c));
    double dv = difference(found.dv, c.dv, case_keys(&c));
    bool same = memcmp(found.dq, known.dq, (size_t)case_queries(&c) * sizeof(bf16)) == 0 &&
                memcmp(found.dk, known.dk, (size_t)case_keys(&c) * sizeof(bf16)) == 0 &&
                memcmp(found.dv, known.dv, (size_t)case_keys(&c) * sizeof(bf16)) == 0;
    bool close = dq <= FP8_BOUND && dk <= FP8_BOUND && dv <= FP8_BOUND;
    if (!same || !close) {
        print_message("%s T %d B %d heads %d/%d values %g: dq %.2e dk %.2e dv %.2e%s\n",
                      backward_preset_names[recipe->backward], (int)shape->tokens, (int)shape->batch, (int)shape->heads,
                      (int)shape->kv_heads, (double)values, dq, dk, dv, same ? "" : "; other bits with amax known");
    }
    gradients_free(&found);
    gradients_free(&known);
    case_close(&c);
    return !same || !close;
}

static void test_groups(void **state)
{
    static const int heads[][2] = {{1, 1}, {2, 2}, {5, 1}, {6, 2}, {3, 1}, {8, 1}, {16, 2}};
    static const int lengths[] = {31, 64, 65, 130, 200, 33, 97};
    static const enum backward_preset presets[] = {BWD_REPRESENTED, BWD_SAVED_OUTPUT, BWD_SAVED_OUTPUT_FIXED};
    int complaints = 0;
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
        struct attention_recipe recipe = recipe_of(PV_FP8, presets[i % 3]);
        struct attention_shape s = {1 + (int64_t)i % 2, lengths[i], heads[i][0], heads[i][1], D, true, 0.0883883f};
        complaints += check(*state, &s, &recipe, INPUT_GAUSS, 1.0f, 0.0f);
    }
    assert_int_equal(complaints, 0);
}

/* |v| beyond 112: m_V below 4, and the norm of V is made again with it; at last beyond what FP32 can square. */
static void test_large_values(void **state)
{
    static const float values[] = {100, 5000, 1e20f, 1e25f};
    int complaints = 0;
    for (int i = 0; i < 8; i++) {
        struct attention_recipe recipe = recipe_of(PV_FP8, i < 4 ? BWD_SAVED_OUTPUT : BWD_REPRESENTED);
        struct attention_shape s = {2, 170, 4, 2, D, true, 0.0883883f};
        complaints += check(*state, &s, &recipe, INPUT_GAUSS, values[i % 4], 0.0f);
    }
    assert_int_equal(complaints, 0);
}

/* The caller's magnitudes are those of the K that comes in: with them a view of the centred one would lie 2^8 too low,
 * and a tenth of it in the subnormals of E4M3. */
static void test_centred_keys(void **state)
{
    int complaints = 0;
    for (int i = 0; i < 4; i++) {
        struct attention_recipe recipe =
            recipe_of(i < 2 ? PV_FP8 : PV_MXFP4, i < 2 ? BWD_REPRESENTED : BWD_SAVED_OUTPUT);
        struct attention_shape s = {2, 170, 4, 2, D, i % 2 == 0, 0.0883883f};
        recipe.qk_grad = QK_GRAD_ORIGINAL;
        recipe.k_center = true;
        recipe.dk_center = i % 2 == 1;
        complaints += check(*state, &s, &recipe, INPUT_GAUSS, 1.0f, 3000.0f);
    }
    assert_int_equal(complaints, 0);
}

/* Relative L2 difference of one head of (B, T, heads, D). */
static double head_difference(const struct attention_shape *s, const bf16 *x, const bf16 *y, int64_t head)
{
    const int64_t n = s->batch * s->tokens;
    bf16 *a = malloc((size_t)(2 * n * D) * sizeof(bf16));
    for (int64_t i = 0; i < n; i++) {
        memcpy(a + i * D, x + (i * s->heads + head) * D, D * sizeof(bf16));
        memcpy(a + (n + i) * D, y + (i * s->heads + head) * D, D * sizeof(bf16));
    }
    double d = difference(a, a + n * D, n * D);
    free(a);
    return d;
}

/* Query heads of one group whose Q lies up to 17 binades apart, and a K that makes logits of the smaller ones: E4M3
 * scores rebuild the forward's P only if each head's Q is coded by a power of two of its own, as there. With one for
 * the group 2^-15 and 2^-17 of its end are 7 and 2 codes. Heads with large logits are sharp, see gpu_sm90_edges. */
static void test_heads_apart(void **state)
{
    static const int binades[] = {0, -17, -9, -15};
    int complaints = 0;
    for (int i = 0; i < 3; i++) {
        struct attention_recipe recipe =
            recipe_of(i == 2 ? PV_MXFP4 : PV_FP8, i == 1 ? BWD_SAVED_OUTPUT : BWD_REPRESENTED);
        const struct attention_shape s = {1 + i % 2, 190, 8, 2, D, i != 2, 0.0883883f};
        struct attention_case c;
        recipe.qk = QK_NVFP4_E4M3;
        case_open(&c, &s, &recipe, INPUT_GAUSS, 61);
        for (int64_t j = 0; j < case_queries(&c); j++) {
            c.q[j] = bf16_from_float(ldexpf(bf16_to_float(c.q[j]), binades[j / D % 4]));
        }
        for (int64_t j = 0; j < case_keys(&c); j++) {
            c.k[j] = bf16_from_float(ldexpf(bf16_to_float(c.k[j]), 15));
        }
        case_forward(&c);
        case_backward(&c);
        struct gradients y = run(*state, &c, false);
        for (int64_t head = 0; head < s.heads; head++) {
            const double dq = head_difference(&s, y.dq, c.dq, head);
            const bool sharp = binades[head % 4] > -15;
            if (!sharp && !(dq <= E4M3_SCORES_BOUND)) {
                print_message("%s, 2^%d of the group's Q: dq %.2e\n", pv_format_names[recipe.pv], binades[head % 4],
                              dq);
                complaints++;
            }
        }
        gradients_free(&y);
        case_close(&c);
    }
    assert_int_equal(complaints, 0);
}

static int open_gpu(void **state)
{
    *state = gpu_open();
    return 0;
}

static int close_gpu(void **state)
{
    cuda_close(*state);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_groups), cmocka_unit_test(test_large_values),
                                       cmocka_unit_test(test_centred_keys), cmocka_unit_test(test_heads_apart)};
    gpu_arguments(argc, argv);
    return cmocka_run_group_tests(tests, open_gpu, close_gpu);
}
