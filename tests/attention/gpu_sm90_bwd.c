/* The Hopper backward against the CPU reference, which gets the same saved output: every sequence length around tile
 * edges, GQA ratios, inputs, strides, both orders of summation. */
#include "attention/attention_bwd_sm90.h"
#include "attention/attention_cpu.h"
#include "tests/attention/cases.h"
#include "tests/gpu.h"

#include <math.h>
#include <stdio.h>

enum { D = 128 };

/* A case on the GPU: Q, K, V (and their gradients) as slices of one fused (B, T, H + 2 Hkv, D) array, or alone. */
struct gpu_case {
    struct cuda *cuda;
    const struct attention_case *c;
    bool fused;
    bf16 *q, *k, *v, *out, *dout, *dq, *dk, *dv;
    float *lse_log2;
    void *saved, *scratch;
    struct attention_bwd call;
};

struct gradients {
    bf16 *dq, *dk, *dv;
};

static struct head_view view_of(bf16 *data, const struct attention_shape *s, int64_t heads)
{
    return (struct head_view){data, s->tokens * heads * D, heads * D, D};
}

/* Copies (B, T, heads, D) into (or out of) a fused array from head `first` on. */
static void weave(bf16 *fused, bf16 *x, const struct attention_shape *s, int64_t heads, int64_t first, bool back)
{
    int64_t all = s->heads + 2 * s->kv_heads;
    for (int64_t i = 0; i < s->batch * s->tokens; i++) {
        bf16 *f = fused + (i * all + first) * D;
        bf16 *y = x + i * heads * D;
        memcpy(back ? y : f, back ? f : y, (size_t)(heads * D) * sizeof(bf16));
    }
}

static void slices(const struct attention_shape *s, bf16 *fused, struct head_view *q, struct head_view *k,
                   struct head_view *v)
{
    *q = *k = *v = view_of(fused, s, s->heads + 2 * s->kv_heads);
    k->data += s->heads * D;
    v->data += (s->heads + s->kv_heads) * D;
}

static void open_inputs(struct gpu_case *g)
{
    const struct attention_case *c = g->c;
    const struct attention_shape *s = &c->shape;
    size_t queries = (size_t)case_queries(c) * sizeof(bf16);
    size_t keys = (size_t)case_keys(c) * sizeof(bf16);
    if (g->fused) {
        bf16 *host = malloc(queries + 2 * keys);
        weave(host, c->q, s, s->heads, 0, false);
        weave(host, c->k, s, s->kv_heads, s->heads, false);
        weave(host, c->v, s, s->kv_heads, s->heads + s->kv_heads, false);
        g->q = gpu_array(g->cuda, host, queries + 2 * keys);
        g->dq = gpu_array(g->cuda, NULL, queries + 2 * keys);
        free(host);
        slices(s, g->q, &g->call.q, &g->call.k, &g->call.v);
        slices(s, g->dq, &g->call.dq, &g->call.dk, &g->call.dv);
        return;
    }
    g->q = gpu_array(g->cuda, c->q, queries);
    g->k = gpu_array(g->cuda, c->k, keys);
    g->v = gpu_array(g->cuda, c->v, keys);
    g->dq = gpu_array(g->cuda, NULL, queries);
    g->dk = gpu_array(g->cuda, NULL, keys);
    g->dv = gpu_array(g->cuda, NULL, keys);
    g->call.q = view_of(g->q, s, s->heads);
    g->call.k = view_of(g->k, s, s->kv_heads);
    g->call.v = view_of(g->v, s, s->kv_heads);
    g->call.dq = view_of(g->dq, s, s->heads);
    g->call.dk = view_of(g->dk, s, s->kv_heads);
    g->call.dv = view_of(g->dv, s, s->kv_heads);
}

static void gpu_case_open(struct gpu_case *g, struct cuda *cuda, const struct attention_case *c, bool fused)
{
    const struct attention_shape *s = &c->shape;
    size_t queries = (size_t)case_queries(c) * sizeof(bf16);
    memset(g, 0, sizeof *g);
    g->cuda = cuda;
    g->c = c;
    g->fused = fused;
    open_inputs(g);
    g->out = gpu_array(cuda, c->out, queries);
    g->dout = gpu_array(cuda, c->dout, queries);
    g->lse_log2 = gpu_array(cuda, c->lse_log2, (size_t)(s->batch * s->heads * s->tokens) * sizeof(float));
    g->saved = gpu_array(cuda, c->saved, c->variant->saved_bytes(s, &c->recipe));
    g->scratch = gpu_array(cuda, NULL, attention_bwd_scratch_bytes_sm90(s, &c->recipe));
    g->call.cuda = cuda;
    g->call.shape = *s;
    g->call.recipe = &c->recipe;
    g->call.out = view_of(g->out, s, s->heads);
    g->call.dout = view_of(g->dout, s, s->heads);
    g->call.lse_log2 = g->lse_log2;
    g->call.saved = g->saved;
    g->call.scratch = g->scratch;
}

static void gpu_case_close(struct gpu_case *g)
{
    void *all[] = {g->q, g->k, g->v, g->out, g->dout, g->dq, g->dk, g->dv, g->lse_log2, g->saved, g->scratch};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        cuda_free(all[i]);
    }
}

static struct gradients fetch(struct gpu_case *g)
{
    const struct attention_case *c = g->c;
    const struct attention_shape *s = &c->shape;
    size_t queries = (size_t)case_queries(c) * sizeof(bf16);
    size_t keys = (size_t)case_keys(c) * sizeof(bf16);
    struct gradients y = {malloc(queries), malloc(keys), malloc(keys)};
    if (g->fused) {
        bf16 *host = malloc(queries + 2 * keys);
        gpu_fetch(g->cuda, host, g->dq, queries + 2 * keys);
        weave(host, y.dq, s, s->heads, 0, true);
        weave(host, y.dk, s, s->kv_heads, s->heads, true);
        weave(host, y.dv, s, s->kv_heads, s->heads + s->kv_heads, true);
        free(host);
        return y;
    }
    gpu_fetch(g->cuda, y.dq, g->dq, queries);
    gpu_fetch(g->cuda, y.dk, g->dk, keys);
    gpu_fetch(g->cuda, y.dv, g->dv, keys);
    return y;
}

static void gradients_free(struct gradients *y)
{
    free(y->dq);
    free(y->dk);
    free(y->dv);
}

/* Relative L2 difference of n elements, and where the largest one is; NaN anywhere: infinite. `floor`: a norm below
 * which the reference is what rounding left of a cancellation. */
struct difference {
    double rel;
    int64_t at;
};

static double norm_of(const bf16 *x, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += (double)bf16_to_float(x[i]) * (double)bf16_to_float(x[i]);
    }
    return sqrt(sum);
}

static struct difference compare(const bf16 *x, const bf16 *y, int64_t n, double floor)
{
    struct difference d = {0, 0};
    double squares = 0;
    double worst = 0;
    for (int64_t i = 0; i < n; i++) {
        double e = fabs((double)bf16_to_float(x[i]) - (double)bf16_to_float(y[i]));
        if (!(e <= worst)) {
            worst = e;
            d.at = i;
        }
        squares += e * e;
    }
    d.rel = squares == 0 ? 0 : sqrt(squares) / fmax(norm_of(y, n), floor);
    if (!(d.rel <= INFINITY)) {
        d.rel = INFINITY;
    }
    return d;
}

/* The largest difference of a test, for its log. */
static double most;

static int complain(const char *what, const char *tensor, const bf16 *x, const bf16 *y, int64_t n, double bound,
                    double floor)
{
    struct difference d = compare(x, y, n, floor);
    most = fmax(most, d.rel);
    if (d.rel <= bound) {
        return 0;
    }
    print_message("%s: %s rel-L2 %.2e, worst at %lld (%g, expected %g)\n", what, tensor, d.rel, (long long)d.at,
                  (double)bf16_to_float(x[d.at]), (double)bf16_to_float(y[d.at]));
    return 1;
}

static void describe(const struct gpu_case *g, enum input_kind kind, char *text, size_t bytes)
{
    const struct attention_shape *s = &g->c->shape;
    snprintf(text, bytes, "%s/%s T %d B %d heads %d/%d %s %s%s%s", pv_format_names[g->c->recipe.pv],
             backward_preset_names[g->c->recipe.backward], (int)s->tokens, (int)s->batch, (int)s->heads,
             (int)s->kv_heads, s->causal ? "causal" : "full", input_names[kind], g->fused ? " fused" : "",
             g->call.unordered ? " unordered" : "");
}

/* Runs in both orders; ordered twice, with equal bits. Returns the number of complaints. */
static int check(struct cuda *cuda, const struct attention_shape *shape, const struct attention_recipe *recipe,
                 enum input_kind kind, bool fused, double bound)
{
    struct attention_case c;
    struct gpu_case g;
    struct gradients y[3];
    char what[256];
    int complaints = 0;
    case_open(&c, shape, recipe, kind, 7 + (uint64_t)shape->tokens);
    case_forward(&c);
    case_backward(&c);
    double floor = 0x1p-6 * norm_of(c.dv, case_keys(&c));
    for (int run = 0; run < 3; run++) {
        gpu_case_open(&g, cuda, &c, fused);
        g.call.unordered = run == 0;
        describe(&g, kind, what, sizeof what);
        attention_bwd_sm90(&g.call);
        y[run] = fetch(&g);
        complaints += complain(what, "dv", y[run].dv, c.dv, case_keys(&c), bound, 0);
        complaints += complain(what, "dk", y[run].dk, c.dk, case_keys(&c), bound, floor);
        complaints += complain(what, "dq", y[run].dq, c.dq, case_queries(&c), bound, floor);
        gpu_case_close(&g);
    }
    size_t queries = (size_t)case_queries(&c) * sizeof(bf16);
    size_t keys = (size_t)case_keys(&c) * sizeof(bf16);
    if (memcmp(y[1].dq, y[2].dq, queries) != 0 || memcmp(y[1].dk, y[2].dk, keys) != 0 ||
        memcmp(y[1].dv, y[2].dv, keys) != 0) {
        print_message("%s: two ordered runs differ\n", what);
        complaints++;
    }
    for (int run = 0; run < 3; run++) {
        gradients_free(&y[run]);
    }
    case_close(&c);
    return complaints;
}

/* Both sides round P and dS to BF16 before the products. They differ where ex2 (2^-22) or the order of a sum moves a
 * value over a rounding boundary: a small share of 2^-9, and the final rounding likewise. */
#define BF16_BOUND 2e-3

static void test_bf16_lengths(void **state)
{
    static const int lengths[] = {1, 2, 17, 63, 64, 65, 127, 128, 129, 200, 300};
    struct attention_recipe recipe = attention_recipe_bf16();
    int complaints = 0;
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        for (int causal = 0; causal < 2; causal++) {
            struct attention_shape s = {1, lengths[i], 2, 1, D, causal == 1, 0.0883883f};
            complaints += check(*state, &s, &recipe, INPUT_GAUSS, i % 2 == 1, BF16_BOUND);
        }
    }
    print_message("largest rel-L2 difference %.1e\n", most);
    most = 0;
    assert_int_equal(complaints, 0);
}

static void test_bf16_heads(void **state)
{
    static const int heads[][2] = {{1, 1}, {4, 1}, {4, 2}, {6, 2}, {3, 3}, {8, 1}};
    struct attention_recipe recipe = attention_recipe_bf16();
    int complaints = 0;
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
        struct attention_shape s = {2, 150, heads[i][0], heads[i][1], D, i % 2 == 0, 0.0883883f};
        complaints += check(*state, &s, &recipe, INPUT_GAUSS, i % 2 == 0, BF16_BOUND);
    }
    print_message("largest rel-L2 difference %.1e\n", most);
    most = 0;
    assert_int_equal(complaints, 0);
}

static void test_bf16_inputs(void **state)
{
    struct attention_recipe recipe = attention_recipe_bf16();
    int complaints = 0;
    for (int kind = 0; kind < INPUT_KINDS; kind++) {
        for (int causal = 0; causal < 2; causal++) {
            struct attention_shape s = {1, 420, 4, 2, D, causal == 1, 0.0883883f};
            complaints += check(*state, &s, &recipe, (enum input_kind)kind, false, BF16_BOUND);
        }
    }
    print_message("largest rel-L2 difference %.1e\n", most);
    most = 0;
    assert_int_equal(complaints, 0);
}

/* FP8 tensor cores keep about 14 bits of a running sum, truncating: dP moves by some 2^-10 of itself, which turns about
 * one stored dS in 100 to the neighbouring code, 2^-4 away. A few tokens: exp2f of the two sides differs in the last
 * bit, and dO over a normaliser of 4 bits often lies on a tie. Scores of FP8 products move too, and with them codes of
 * P. */
#define FP8_BOUND 2e-2
#define FP8_SCORES_BOUND 4e-2

static double fp8_bound(const struct attention_recipe *recipe)
{
    return recipe->qk == QK_NVFP4_E4M3 ? FP8_SCORES_BOUND : FP8_BOUND;
}

static void test_fp8_lengths(void **state)
{
    static const int lengths[] = {1, 17, 64, 65, 128, 129, 200, 300};
    struct attention_recipe recipe = recipe_of(PV_FP8, BWD_REPRESENTED);
    int complaints = 0;
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        for (int causal = 0; causal < 2; causal++) {
            struct attention_shape s = {1, lengths[i], 2, 1, D, causal == 1, 0.0883883f};
            complaints += check(*state, &s, &recipe, INPUT_GAUSS, i % 2 == 1, FP8_BOUND);
        }
    }
    print_message("largest rel-L2 difference %.1e\n", most);
    most = 0;
    assert_int_equal(complaints, 0);
}

static void test_fp8_inputs(void **state)
{
    static const enum backward_preset presets[] = {BWD_REPRESENTED, BWD_SAVED_OUTPUT, BWD_SAVED_OUTPUT_FIXED};
    int complaints = 0;
    for (int kind = 0; kind < INPUT_KINDS; kind++) {
        for (int i = 0; i < 3; i++) {
            struct attention_recipe recipe = recipe_of(PV_FP8, presets[i]);
            recipe.qk = kind % 2 == 0 ? QK_NVFP4_E4M3 : QK_NVFP4;
            struct attention_shape s = {i == 0 ? 2 : 1, 330, 4, 2, D, kind != INPUT_PEAKY3, 0.0883883f};
            complaints += check(*state, &s, &recipe, (enum input_kind)kind, i == 1, fp8_bound(&recipe));
        }
    }
    print_message("largest rel-L2 difference %.1e\n", most);
    most = 0;
    assert_int_equal(complaints, 0);
}

/* Codes of P as the reference's: a flipped one (a score within 2^-22 of a boundary) moves P by half of itself. */
static void test_mxfp4(void **state)
{
    static const int lengths[] = {1, 33, 64, 129, 200};
    int complaints = 0;
    for (int kind = 0; kind < INPUT_KINDS; kind++) {
        for (int i = 0; i < 3; i++) {
            struct attention_recipe recipe = recipe_of(PV_MXFP4, i == 2 ? BWD_SAVED_OUTPUT : BWD_REPRESENTED);
            recipe.qk = kind % 2 == 0 ? QK_NVFP4 : QK_NVFP4_E4M3;
            struct attention_shape s = {1, i == 0 ? 330 : 290, 4, 2, D, kind != INPUT_PEAKY3, 0.0883883f};
            recipe.mx_rule = i == 1 ? MX_OCP : MX_NEAREST;
            complaints += check(*state, &s, &recipe, (enum input_kind)kind, false, fp8_bound(&recipe));
        }
    }
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        struct attention_recipe recipe = recipe_of(PV_MXFP4, BWD_REPRESENTED);
        struct attention_shape s = {1, lengths[i], 3, 1, D, i % 2 == 0, 0.0883883f};
        complaints += check(*state, &s, &recipe, INPUT_GAUSS, true, FP8_BOUND);
    }
    print_message("largest rel-L2 difference %.1e\n", most);
    most = 0;
    assert_int_equal(complaints, 0);
}

/* Where every row of the K that dQ multiplies is 1, a row of dQ is softmax_scale times what its row of stored dS sums
 * to: the row leak (docs/numerics.md, section 7), here mostly the noise of E4M3. The reference's, in size and in bias.
 */
static void leak_of(const bf16 *dq, int64_t rows, double *size, double *bias)
{
    *size = *bias = 0;
    for (int64_t i = 0; i < rows; i++) {
        *size += fabs((double)bf16_to_float(dq[i * D]));
        *bias += (double)bf16_to_float(dq[i * D]);
    }
}

static void test_row_leak(void **state)
{
    for (int i = 0; i < 4; i++) {
        struct attention_shape s = {1, 700, 8, 2, D, true, 0.0883883f};
        struct attention_recipe recipe = recipe_of(i / 2 == 0 ? PV_FP8 : PV_MXFP4, BWD_REPRESENTED);
        struct attention_case c;
        struct gpu_case g;
        double size, bias, wanted, wanted_bias;
        case_open(&c, &s, &recipe, i % 2 == 0 ? INPUT_GAUSS : INPUT_SINK, 11);
        case_forward(&c);
        for (int64_t j = 0; j < case_keys(&c); j++) {
            c.k[j] = 0x3f80;
        }
        case_backward(&c);
        gpu_case_open(&g, *state, &c, false);
        attention_bwd_sm90(&g.call);
        struct gradients y = fetch(&g);
        leak_of(y.dq, s.heads * s.tokens, &size, &bias);
        leak_of(c.dq, s.heads * s.tokens, &wanted, &wanted_bias);
        print_message("%s %s: sum of |leak| %.3e (reference %.3e), sum %.2e (%.2e)\n", pv_format_names[recipe.pv],
                      i % 2 == 0 ? "gauss" : "sink", size, wanted, bias, wanted_bias);
        assert_true(fabs(size / wanted - 1) < 0.1);
        assert_true(fabs(bias - wanted_bias) < 0.1 * wanted);
        gradients_free(&y);
        gpu_case_close(&g);
        case_close(&c);
    }
}

/* More blocks of keys than the GPU runs at a time, so that ordered sums wait: two ordered runs with equal bits, and
 * close to the unordered one. Any output and LSE2 will do. */
static void test_many_blocks_large(void **state)
{
    static const enum backward_preset presets[] = {BWD_BF16, BWD_REPRESENTED};
    for (int i = 0; i < 4; i++) {
        struct attention_shape s = {3, 1090, 16, 8, D, i % 2 == 0, 0.0883883f};
        struct attention_recipe recipe = recipe_of(i / 2 == 0 ? PV_BF16 : PV_FP8, presets[i / 2]);
        struct attention_case c;
        struct gradients y[3];
        case_open(&c, &s, &recipe, INPUT_GAUSS, 3);
        memcpy(c.out, c.q, sizeof(bf16) * (size_t)case_queries(&c));
        for (int64_t r = 0; r < s.batch * s.heads * s.tokens; r++) {
            c.lse_log2[r] = 11;
        }
        if (recipe.pv == PV_FP8) { /* represented operands: any values */
            bf16 *saved = c.saved;
            for (int64_t r = 0; r < case_queries(&c) + 2 * case_keys(&c); r++) {
                saved[r] = c.q[r % case_queries(&c)];
            }
        }
        for (int run = 0; run < 3; run++) {
            struct gpu_case g;
            gpu_case_open(&g, *state, &c, false);
            g.call.unordered = run == 0;
            attention_bwd_sm90(&g.call);
            y[run] = fetch(&g);
            gpu_case_close(&g);
        }
        assert_memory_equal(y[1].dq, y[2].dq, sizeof(bf16) * (size_t)case_queries(&c));
        assert_memory_equal(y[1].dk, y[2].dk, sizeof(bf16) * (size_t)case_keys(&c));
        assert_memory_equal(y[1].dv, y[2].dv, sizeof(bf16) * (size_t)case_keys(&c));
        /* Flips of the last rounding. Without a mask dK and dV too: unordered walks start
         * elsewhere, and FP8 products keep 14 bits. */
        assert_true(compare(y[0].dq, y[1].dq, case_queries(&c), 0).rel < 1e-3);
        assert_true(compare(y[0].dk, y[1].dk, case_keys(&c), 0).rel < (i < 2 ? 1e-3 : 1e-2));
        assert_true(compare(y[0].dv, y[1].dv, case_keys(&c), 0).rel < (i < 2 ? 1e-3 : 1e-2));
        for (int run = 0; run < 3; run++) {
            gradients_free(&y[run]);
        }
        case_close(&c);
    }
}

/* The variant takes the routes that it is made for. */
static void test_variant(void **state)
{
    static const struct {
        enum qk_format qk;
        enum pv_format pv;
        enum backward_preset backward;
    } routes[] = {
        {QK_BF16, PV_BF16, BWD_BF16},
        {QK_NVFP4, PV_FP8, BWD_REPRESENTED},
        {QK_NVFP4, PV_FP8, BWD_SAVED_OUTPUT},
        {QK_NVFP4, PV_MXFP4, BWD_REPRESENTED},
        {QK_NVFP4_E4M3, PV_MXFP4, BWD_SAVED_OUTPUT_FIXED},
        {QK_NVFP4_E4M3, PV_FP8, BWD_REPRESENTED},
    };
    const struct attention_shape s = {1, 200, 4, 2, D, true, 0.0883883f};
    (void)state;
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++) {
        const struct attention_variant *variant;
        struct attention_recipe recipe = recipe_of(routes[i].pv, routes[i].backward);
        recipe.qk = routes[i].qk;
        assert_int_equal(attention_choose(&s, &recipe, DEVICE_CUDA, "auto", &variant), OK);
        assert_string_equal(variant->name, "sm90");
        assert_null(attention_bwd_refuses_sm90(&s, &recipe));
    }
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
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bf16_lengths),      cmocka_unit_test(test_bf16_heads),
        cmocka_unit_test(test_bf16_inputs),       cmocka_unit_test(test_fp8_lengths),
        cmocka_unit_test(test_fp8_inputs),        cmocka_unit_test(test_mxfp4),
        cmocka_unit_test(test_row_leak),          cmocka_unit_test(test_variant),
        cmocka_unit_test(test_many_blocks_large),
    };
    gpu_arguments(argc, argv);
    return cmocka_run_group_tests(tests, open_gpu, close_gpu);
}
