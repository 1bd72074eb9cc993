/* The Hopper forward against the CPU reference: every sequence length around tile edges, GQA ratios, inputs, strides.
 */
#include "attention/attention_sm90.h"
#include "core/rng.h"
#include "numerics/formats.h"
#include "tests/attention/cases.h"
#include "tests/gpu.h"

#include <math.h>
#include <stdio.h>

/* A case on the GPU: inputs as slices of one fused (B, T, H + 2 Hkv, D) array or as arrays of their own. */
struct gpu_case {
    bf16 *q, *k, *v, *out;
    float *lse_log2;
    void *scratch, *saved;
    struct attention_fwd call;
};

static struct head_view view_of(bf16 *data, const struct attention_shape *s, int64_t heads)
{
    return (struct head_view){data, s->tokens * heads * s->head_dim, heads * s->head_dim, s->head_dim};
}

static void *poison(const struct cuda *cuda, size_t bytes)
{
    return gpu_array(cuda, NULL, bytes > 0 ? bytes : 1);
}

/* (B, T, heads, D) into a fused array from head `first` on. */
static void weave(bf16 *fused, const bf16 *x, const struct attention_shape *s, int64_t heads, int64_t first)
{
    int64_t all = s->heads + 2 * s->kv_heads;
    int64_t D = s->head_dim;
    for (int64_t i = 0; i < s->batch * s->tokens; i++) {
        memcpy(fused + (i * all + first) * D, x + i * heads * D, (size_t)(heads * D) * sizeof(bf16));
    }
}

static void open_inputs(const struct cuda *cuda, struct gpu_case *g, const struct attention_case *c, bool fused)
{
    const struct attention_shape *s = &c->shape;
    size_t queries = (size_t)case_queries(c) * sizeof(bf16);
    size_t keys = (size_t)case_keys(c) * sizeof(bf16);
    if (!fused) {
        g->q = gpu_array(cuda, c->q, queries);
        g->k = gpu_array(cuda, c->k, keys);
        g->v = gpu_array(cuda, c->v, keys);
        g->call.q = view_of(g->q, s, s->heads);
        g->call.k = view_of(g->k, s, s->kv_heads);
        g->call.v = view_of(g->v, s, s->kv_heads);
        return;
    }
    bf16 *host = malloc(queries + 2 * keys);
    weave(host, c->q, s, s->heads, 0);
    weave(host, c->k, s, s->kv_heads, s->heads);
    weave(host, c->v, s, s->kv_heads, s->heads + s->kv_heads);
    g->q = gpu_array(cuda, host, queries + 2 * keys);
    free(host);
    g->call.q = g->call.k = g->call.v = view_of(g->q, s, s->heads + 2 * s->kv_heads);
    g->call.k.data += s->heads * s->head_dim;
    g->call.v.data += (s->heads + s->kv_heads) * s->head_dim;
}

static void gpu_case_open(const struct cuda *cuda, struct gpu_case *g, const struct attention_case *c, bool fused)
{
    const struct attention_shape *s = &c->shape;
    memset(g, 0, sizeof *g);
    open_inputs(cuda, g, c, fused);
    g->out = poison(cuda, (size_t)case_queries(c) * sizeof(bf16));
    g->lse_log2 = poison(cuda, (size_t)(s->batch * s->heads * s->tokens) * sizeof(float));
    g->scratch = poison(cuda, attention_fwd_scratch_bytes_sm90(s, &c->recipe));
    g->saved = poison(cuda, attention_variant_sm90.saved_bytes(s, &c->recipe));
    g->call.cuda = cuda;
    g->call.shape = *s;
    g->call.recipe = &c->recipe;
    g->call.out = view_of(g->out, s, s->heads);
    g->call.lse_log2 = g->lse_log2;
    g->call.scratch = g->scratch;
    g->call.saved = fused ? NULL : g->saved;
}

static void gpu_case_close(struct gpu_case *g)
{
    cuda_free(g->q);
    cuda_free(g->k);
    cuda_free(g->v);
    cuda_free(g->out);
    cuda_free(g->lse_log2);
    cuda_free(g->scratch);
    cuda_free(g->saved);
}

/* What comparisons saw. */
struct worst {
    double rel, lse;
    int64_t rows, touched;
};

/* A route with codes touches a row where a code differs, because a score fell on the other side of a boundary: then O
 * and LSE2 move by up to that code's share. Scores of BF16 operands differ in the last bits, those of E4M3 by 2^-13 of
 * the largest product, which flips one code in a thousand. */
#define LSE_TOUCHED 2e-3

/* pv = bf16: both sides round P to BF16, relative to different references, and sum in different orders: P differs by
 * 2^-8 of itself, so o by 2^-8 sum p |v| <= 2^-8 max |v| at worst, and one more BF16 rounding. LSE2: ex2 within 2^-22,
 * sums of FP32. */
static int compare(const struct attention_case *c, const bf16 *out, const float *lse, struct worst *w, const char *what)
{
    const struct attention_shape *s = &c->shape;
    const bool codes = c->recipe.pv != PV_BF16;
    double v_max = 0;
    for (int64_t i = 0; i < case_keys(c); i++) {
        v_max = fmax(v_max, fabs((double)bf16_to_float(c->v[i])));
    }
    const bool rough = c->recipe.qk == QK_NVFP4_E4M3;
    double worst = 0, worst_lse = 0, squares = 0, norm = 0;
    int64_t at = -1, at_lse = -1;
    for (int64_t i = 0; i < case_queries(c); i++) {
        double x = (double)bf16_to_float(out[i]), y = (double)bf16_to_float(c->out[i]);
        double error = fabs(x - y) - 0x1p-7 * fabs(y);
        if (!(error <= worst)) {
            worst = error;
            at = i;
        }
        squares += (x - y) * (x - y);
        norm += y * y;
    }
    for (int64_t i = 0; i < s->batch * s->heads * s->tokens; i++) {
        double error = fabs((double)lse[i] - (double)c->lse_log2[i]);
        w->rows++;
        w->touched += !(error <= LSE_TOUCHED);
        if (!(error <= worst_lse)) {
            worst_lse = error;
            at_lse = i;
        }
    }
    double rel = sqrt(squares / norm);
    w->rel = fmax(w->rel, rel);
    w->lse = fmax(w->lse, worst_lse);
    if (worst <= (codes ? 0.3 : 0x1p-8) * v_max && worst_lse <= (codes ? 0.7 : 2e-5) &&
        rel < (rough   ? 3e-2
               : codes ? 8e-3
                       : 4e-3)) {
        return 0;
    }
    print_message("%s: o error %g at %lld (%g, expected %g), rel-L2 %g; lse error %g at %lld (%g, expected %g)\n", what,
                  worst, (long long)at, at < 0 ? 0 : (double)bf16_to_float(out[at]),
                  at < 0 ? 0 : (double)bf16_to_float(c->out[at]), rel, worst_lse, (long long)at_lse,
                  at_lse < 0 ? 0 : (double)lse[at_lse], at_lse < 0 ? 0 : (double)c->lse_log2[at_lse]);
    return 1;
}

/* Runs twice: the bits must be equal. Returns the number of complaints. */
static int check(const struct cuda *cuda, const struct attention_shape *shape, const struct attention_recipe *recipe,
                 enum input_kind kind, bool fused, struct worst *w)
{
    struct attention_case c;
    struct gpu_case g;
    char what[256];
    case_open(&c, shape, recipe, kind, 7 + (uint64_t)shape->tokens);
    case_forward(&c);
    gpu_case_open(cuda, &g, &c, fused);
    size_t out_bytes = (size_t)case_queries(&c) * sizeof(bf16);
    size_t lse_bytes = (size_t)(shape->batch * shape->heads * shape->tokens) * sizeof(float);
    bf16 *out = malloc(2 * out_bytes);
    float *lse = malloc(2 * lse_bytes);
    for (int run = 0; run < 2; run++) {
        attention_fwd_sm90(&g.call);
        gpu_fetch(cuda, (char *)out + (size_t)run * out_bytes, g.out, out_bytes);
        gpu_fetch(cuda, (char *)lse + (size_t)run * lse_bytes, g.lse_log2, lse_bytes);
    }
    snprintf(what, sizeof what, "T %d heads %d/%d batch %d %s %s%s", (int)shape->tokens, (int)shape->heads,
             (int)shape->kv_heads, (int)shape->batch, shape->causal ? "causal" : "full", input_names[kind],
             fused ? " fused" : "");
    int bad = compare(&c, out, lse, w, what);
    size_t saved_bytes = attention_saved_bytes_cpu(shape, recipe);
    if (g.call.saved != NULL && saved_bytes > 0) { /* operands of the backward: bit for bit the reference's */
        void *saved = malloc(saved_bytes);
        gpu_fetch(cuda, saved, g.saved, saved_bytes);
        if (memcmp(saved, c.saved, saved_bytes) != 0) {
            print_message("%s: the saved state differs\n", what);
            bad++;
        }
        free(saved);
    }
    if (memcmp(out, (char *)out + out_bytes, out_bytes) != 0 || memcmp(lse, (char *)lse + lse_bytes, lse_bytes) != 0) {
        print_message("%s: two runs differ\n", what);
        bad++;
    }
    free(out);
    free(lse);
    gpu_case_close(&g);
    case_close(&c);
    return bad;
}

static struct cuda *the_cuda;

static int open_gpu(void **state)
{
    (void)state;
    the_cuda = gpu_open();
    return 0;
}

static int close_gpu(void **state)
{
    (void)state;
    cuda_close(the_cuda);
    return 0;
}

static struct attention_shape shape_of(int64_t batch, int64_t tokens, int64_t heads, int64_t kv_heads, bool causal)
{
    return (struct attention_shape){batch, tokens, heads, kv_heads, 128, causal, 0.08838834764f};
}

static void lengths(void **state)
{
    (void)state;
    struct attention_recipe recipe = attention_recipe_bf16();
    struct worst w = {0};
    int bad = 0;
    for (int64_t T = 1; T <= 200 && bad < 12; T += T < 20 || T % 16 < 2 || T % 16 == 15 ? 1 : 7) {
        for (int causal = 0; causal < 2; causal++) {
            struct attention_shape shape = shape_of(1, T, 2, 1, causal == 1);
            bad += check(the_cuda, &shape, &recipe, (enum input_kind)(T % INPUT_KINDS), T % 2 == 1, &w);
        }
    }
    assert_int_equal(bad, 0);
}

static void heads_and_tiles(void **state)
{
    (void)state;
    static const int64_t cases[][4] = {/* batch, tokens, heads, kv_heads */
                                       {1, 128, 1, 1}, {1, 256, 1, 1}, {2, 384, 4, 4}, {3, 257, 4, 2}, {1, 511, 4, 1},
                                       {2, 129, 8, 1}, {2, 300, 6, 2}, {1, 640, 3, 3}, {1, 1000, 4, 2}};
    struct attention_recipe recipe = attention_recipe_bf16();
    struct worst w = {0};
    int bad = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (int causal = 0; causal < 2; causal++) {
            struct attention_shape shape = shape_of(cases[i][0], cases[i][1], cases[i][2], cases[i][3], causal == 1);
            bad += check(the_cuda, &shape, &recipe, (enum input_kind)(i % INPUT_KINDS), i % 2 == 1, &w);
        }
    }
    assert_int_equal(bad, 0);
}

/* ---- coded probabilities ----------------------------------------------------------------------------------- */

/* The routes that the kernels carry. */
static int routes(struct attention_recipe *recipes)
{
    int n = 0;
    for (enum qk_format qk = QK_BF16; qk <= QK_NVFP4_E4M3; qk++) {
        struct attention_recipe r = recipe_of(PV_FP8, BWD_REPRESENTED);
        r.qk = qk;
        r.qk_scale = QK_SCALE_AMAX;
        recipes[n++] = r;
        r.pv = PV_MXFP4;
        for (enum mx_family rule = MX_NEAREST; rule <= MX_OCP; rule++) {
            for (enum p_map map = P_EXACT; map <= P_AFFINE; map++) {
                r.mx_rule = rule;
                r.p_map = map;
                if (map != P_THRESHOLD) { /* the same codes and kernel as exact */
                    recipes[n++] = r;
                }
            }
        }
    }
    recipes[n] = recipe_of(PV_MXFP4, BWD_REPRESENTED);
    recipes[n++].k_center = true;
    return n;
}

static void coded(void **state)
{
    (void)state;
    static const int64_t cases[][4] = {/* batch, tokens, heads, kv_heads */
                                       {1, 1, 1, 1},   {1, 31, 2, 1},  {1, 128, 1, 1}, {1, 130, 2, 1}, {2, 200, 4, 2},
                                       {1, 256, 2, 2}, {1, 385, 4, 1}, {1, 513, 3, 3}, {1, 900, 2, 1}};
    struct attention_recipe recipes[32];
    int n = routes(recipes);
    int bad = 0;
    for (int i = 0; i < n; i++) {
        char text[512];
        struct worst w = {0};
        int before = bad;
        for (size_t at = 0; at < sizeof cases / sizeof *cases && bad < before + 3; at++) {
            struct attention_shape shape =
                shape_of(cases[at][0], cases[at][1], cases[at][2], cases[at][3], (at + (size_t)i) % 3 != 0);
            bad += check(the_cuda, &shape, &recipes[i], (enum input_kind)((at + (size_t)i) % INPUT_KINDS), at % 2 == 1,
                         &w);
        }
        attention_recipe_print(&recipes[i], text, sizeof text);
        text[70] = 0;
        bad += recipes[i].qk != QK_NVFP4_E4M3 && w.touched > w.rows / 50;
        print_message("%s: rel-L2 %.2e lse %.1e, %d of %d rows touched%s\n", text, w.rel, w.lse, (int)w.touched,
                      (int)w.rows, bad > before ? " BAD" : "");
    }
    assert_int_equal(bad, 0);
}

static float e2m1_value(int code)
{
    static const float values[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    return values[code];
}

/* Index of the nearest of `n` ascending values, codes of a format. */
static int nearest(double x, int n, float (*value)(int))
{
    int best = 0;
    for (int i = 1; i < n; i++) {
        best = fabs((double)value(i) - x) < fabs((double)value(best) - x) ? i : best;
    }
    return best;
}

static float e4m3_value(int code)
{
    return e4m3_to_float((uint8_t)code);
}

/* With V the identity, O is P / L and shows the codes. They must equal the reference's but for 1e-4, by one step.
 * Returns how many differ, or a large number for a difference of more. */
static int64_t differing_codes(const struct attention_case *c, const uint8_t *codes, const int16_t *exponents,
                               const bf16 *out, const float *lse, int64_t *total)
{
    const struct attention_shape *s = &c->shape;
    const bool fp8 = c->recipe.pv == PV_FP8;
    const bool rough = c->recipe.qk == QK_NVFP4_E4M3; /* a block's exponent may flip, and move all its codes */
    int64_t blocks = (s->tokens + 31) / 32, wrong = 0;
    for (int64_t row = 0; row < s->heads * s->tokens; row++) {
        int64_t h = row / s->tokens, i = row % s->tokens;
        double sum = 0; /* of the reference's codes, which tells the anchor: 2^LSE2 = 2^a sum / 256 */
        for (int64_t j = 0; j <= i; j++) {
            sum += fp8 ? (double)e4m3_value(codes[row * s->tokens + j]) : 0;
        }
        double up = fp8 ? exp2(round((double)lse[row] - log2(sum / 256)) - 8) : 1;
        for (int64_t j = 0; j <= i; j++) {
            int expected = codes[row * s->tokens + j];
            double p = (double)bf16_to_float(out[(i * s->heads + h) * 128 + j]) * exp2((double)lse[row]);
            double e = fp8 ? 1 : exp2((double)exponents[row * blocks + j / 32]) / (double)attention_unit(&c->recipe);
            int found = fp8 ? nearest(p / up, 0x7f, e4m3_value) : nearest(p / e, 8, e2m1_value);
            wrong += found == expected ? 0 : abs(found - expected) == 1 || rough ? 1 : 1000000;
            if (abs(found - expected) > 1 && wrong > 1000000 && wrong < 2000000) {
                print_message("row %d key %d: code %d, expected %d (p %g, e %g)\n", (int)row, (int)j, found, expected,
                              p, e);
            }
            ++*total;
        }
    }
    return wrong;
}

static int check_codes(const struct attention_recipe *recipe, enum input_kind kind, int64_t *wrong, int64_t *total)
{
    struct attention_shape shape = shape_of(1, 128, 16, 4, true);
    struct attention_case c;
    struct gpu_case g;
    case_open(&c, &shape, recipe, kind, 99);
    for (int64_t i = 0; i < case_keys(&c); i++) {
        c.v[i] = i / (shape.kv_heads * 128) == i % 128 ? 0x3f80 : 0;
    }
    int64_t cells = shape.heads * shape.tokens * shape.tokens;
    struct attention_cpu_probe probe = {calloc((size_t)cells, 1), calloc((size_t)cells / 32, sizeof(int16_t))};
    struct attention_cpu_options options = ATTENTION_CPU_DEFAULT;
    options.probe = &probe;
    struct attention_fwd call = {.shape = shape,
                                 .recipe = recipe,
                                 .q = view_of(c.q, &shape, shape.heads),
                                 .k = view_of(c.k, &shape, shape.kv_heads),
                                 .v = view_of(c.v, &shape, shape.kv_heads),
                                 .out = view_of(c.out, &shape, shape.heads),
                                 .lse_log2 = c.lse_log2,
                                 .scratch = c.scratch};
    void *scratch = malloc(attention_scratch_bytes_cpu_with(&shape, recipe, &options));
    call.scratch = scratch;
    attention_fwd_cpu_with(&call, &options);
    gpu_case_open(the_cuda, &g, &c, false);
    size_t out_bytes = (size_t)case_queries(&c) * sizeof(bf16);
    size_t lse_bytes = (size_t)(shape.heads * shape.tokens) * sizeof(float);
    bf16 *out = malloc(out_bytes);
    float *lse = malloc(lse_bytes);
    attention_fwd_sm90(&g.call);
    gpu_fetch(the_cuda, out, g.out, out_bytes);
    gpu_fetch(the_cuda, lse, g.lse_log2, lse_bytes);
    *wrong += differing_codes(&c, probe.codes, probe.exponents, out, lse, total);
    free(scratch);
    free(probe.codes);
    free(probe.exponents);
    free(out);
    free(lse);
    gpu_case_close(&g);
    case_close(&c);
    return 0;
}

static void codes_equal(void **state)
{
    (void)state;
    struct attention_recipe recipes[32];
    int n = routes(recipes);
    int bad = 0;
    for (int i = 0; i < n; i++) {
        char text[512];
        int64_t wrong = 0, total = 0;
        for (enum input_kind kind = INPUT_GAUSS; kind < INPUT_KINDS; kind++) {
            check_codes(&recipes[i], kind, &wrong, &total);
        }
        attention_recipe_print(&recipes[i], text, sizeof text);
        text[70] = 0;
        print_message("%s: %lld of %lld codes differ\n", text, (long long)wrong, (long long)total);
        bad += (double)wrong > (recipes[i].qk == QK_NVFP4_E4M3 ? 3e-3 : 1e-4) * (double)total;
    }
    assert_int_equal(bad, 0);
}

/* ---- long sequences, against the variant "cuda" ------------------------------------------------------------ */

/* `values` BF16 values of about a normal distribution. */
static bf16 *draw(const struct cuda *cuda, int64_t values, uint64_t seed)
{
    uint64_t stream = rng_stream("test/long");
    bf16 *host = malloc((size_t)values * sizeof(bf16));
    for (int64_t i = 0; i < values; i++) {
        host[i] = bf16_from_float(rng_normal(seed, stream, (uint64_t)i));
    }
    bf16 *device = gpu_array(cuda, host, (size_t)values * sizeof(bf16));
    free(host);
    return device;
}

/* Both variants on the same tensors; relative L2 of their outputs, and the largest difference of LSE2. */
static void long_case(const struct attention_shape *s, const struct attention_recipe *recipe, double *rel, double *lse)
{
    const struct attention_variant *variants[2] = {&attention_variant_sm90, &attention_variant_cuda};
    int64_t queries = s->batch * s->tokens * s->heads * s->head_dim;
    int64_t keys = s->batch * s->tokens * s->kv_heads * s->head_dim;
    int64_t rows = s->batch * s->heads * s->tokens;
    struct attention_fwd call = {.cuda = the_cuda, .shape = *s, .recipe = recipe};
    bf16 *out[2];
    float *found[2];
    call.q = view_of(draw(the_cuda, queries, 1), s, s->heads);
    call.k = view_of(draw(the_cuda, keys, 2), s, s->kv_heads);
    call.v = view_of(draw(the_cuda, keys, 3), s, s->kv_heads);
    for (int i = 0; i < 2; i++) {
        assert_null(variants[i]->refuses(s, recipe));
        call.out = view_of(poison(the_cuda, (size_t)queries * sizeof(bf16)), s, s->heads);
        call.lse_log2 = poison(the_cuda, (size_t)rows * sizeof(float));
        call.saved = poison(the_cuda, variants[i]->saved_bytes(s, recipe));
        call.scratch = poison(the_cuda, variants[i]->scratch_bytes(s, recipe));
        variants[i]->fwd(&call);
        out[i] = malloc((size_t)queries * sizeof(bf16));
        found[i] = malloc((size_t)rows * sizeof(float));
        gpu_fetch(the_cuda, out[i], call.out.data, (size_t)queries * sizeof(bf16));
        gpu_fetch(the_cuda, found[i], call.lse_log2, (size_t)rows * sizeof(float));
        cuda_free(call.out.data);
        cuda_free(call.lse_log2);
        cuda_free(call.saved);
        cuda_free(call.scratch);
    }
    double squares = 0;
    double norm = 0;
    for (int64_t i = 0; i < queries; i++) {
        double y = (double)bf16_to_float(out[1][i]);
        double error = (double)bf16_to_float(out[0][i]) - y;
        squares += error * error;
        norm += y * y;
    }
    *rel = sqrt(squares / norm);
    *lse = 0;
    for (int64_t i = 0; i < rows; i++) {
        double error = fabs((double)found[0][i] - (double)found[1][i]);
        *lse = error <= *lse ? *lse : error;
    }
    for (int i = 0; i < 2; i++) {
        free(out[i]);
        free(found[i]);
    }
    cuda_free(call.q.data);
    cuda_free(call.k.data);
    cuda_free(call.v.data);
}

static void sequences_large(void **state)
{
    (void)state;
    struct attention_recipe recipes[3] = {attention_recipe_bf16(), recipe_of(PV_FP8, BWD_REPRESENTED),
                                          recipe_of(PV_MXFP4, BWD_REPRESENTED)};
    int bad = 0;
    for (int i = 0; i < 6; i++) {
        struct attention_shape shape = shape_of(i % 2 + 1, i % 2 == 0 ? 4000 : 2624, 4, 2, i < 4);
        double rel;
        double lse;
        long_case(&shape, &recipes[i % 3], &rel, &lse);
        print_message("T %d %s pv=%s: rel-L2 %.2e lse %.1e\n", (int)shape.tokens, shape.causal ? "causal" : "full",
                      pv_format_names[recipes[i % 3].pv], rel, lse);
        bad += !(rel < 5e-3) || !(lse < (i % 3 == 0 ? 1e-4 : 0.3));
    }
    assert_int_equal(bad, 0);
}

/* ---- both passes of the variant, against "cuda" ------------------------------------------------------------ */

struct gradients {
    bf16 *dq, *dk, *dv;
};

/* Forward and backward of one variant on the tensors of `fwd`. */
static struct gradients both_passes(const struct attention_variant *variant, struct attention_fwd fwd, bf16 *dout)
{
    const struct attention_shape *s = &fwd.shape;
    size_t queries = (size_t)(s->batch * s->tokens * s->heads * s->head_dim) * sizeof(bf16);
    size_t keys = (size_t)(s->batch * s->tokens * s->kv_heads * s->head_dim) * sizeof(bf16);
    fwd.out = view_of(poison(the_cuda, queries), s, s->heads);
    fwd.lse_log2 = poison(the_cuda, (size_t)(s->batch * s->heads * s->tokens) * sizeof(float));
    fwd.saved = poison(the_cuda, variant->saved_bytes(s, fwd.recipe));
    fwd.scratch = poison(the_cuda, variant->scratch_bytes(s, fwd.recipe));
    variant->fwd(&fwd);
    struct attention_bwd bwd = {.cuda = the_cuda,
                                .shape = *s,
                                .recipe = fwd.recipe,
                                .q = fwd.q,
                                .k = fwd.k,
                                .v = fwd.v,
                                .out = fwd.out,
                                .dout = view_of(dout, s, s->heads),
                                .dq = view_of(poison(the_cuda, queries), s, s->heads),
                                .dk = view_of(poison(the_cuda, keys), s, s->kv_heads),
                                .dv = view_of(poison(the_cuda, keys), s, s->kv_heads),
                                .lse_log2 = fwd.lse_log2,
                                .saved = fwd.saved,
                                .scratch = fwd.scratch};
    variant->bwd(&bwd);
    struct gradients g = {malloc(queries), malloc(keys), malloc(keys)};
    gpu_fetch(the_cuda, g.dq, bwd.dq.data, queries);
    gpu_fetch(the_cuda, g.dk, bwd.dk.data, keys);
    gpu_fetch(the_cuda, g.dv, bwd.dv.data, keys);
    cuda_free(fwd.out.data);
    cuda_free(fwd.lse_log2);
    cuda_free(fwd.saved);
    cuda_free(fwd.scratch);
    cuda_free(bwd.dq.data);
    cuda_free(bwd.dk.data);
    cuda_free(bwd.dv.data);
    return g;
}

static double relative(const bf16 *x, const bf16 *y, int64_t n)
{
    double squares = 0;
    double norm = 0;
    for (int64_t i = 0; i < n; i++) {
        double error = (double)bf16_to_float(x[i]) - (double)bf16_to_float(y[i]);
        squares += error * error;
        norm += (double)bf16_to_float(y[i]) * (double)bf16_to_float(y[i]);
    }
    return sqrt(squares / norm);
}

/* The two differ by sums of FP8 products (14 bits) and by the codes of dS and dO' that these flip: a few per thousand
 * of the gradients; with E4M3 scores by flipped codes of P too. */
static void whole_variant(void **state)
{
    (void)state;
    struct attention_shape shape = shape_of(1, 777, 4, 2, true);
    struct attention_recipe recipes[5] = {attention_recipe_bf16(), recipe_of(PV_FP8, BWD_REPRESENTED),
                                          recipe_of(PV_MXFP4, BWD_REPRESENTED), recipe_of(PV_FP8, BWD_SAVED_OUTPUT),
                                          recipe_of(PV_FP8, BWD_REPRESENTED)};
    int64_t queries = shape.tokens * shape.heads * 128;
    int64_t keys = shape.tokens * shape.kv_heads * 128;
    struct attention_fwd call = {.cuda = the_cuda, .shape = shape};
    int bad = 0;
    recipes[4].qk = QK_NVFP4_E4M3;
    call.q = view_of(draw(the_cuda, queries, 1), &shape, shape.heads);
    call.k = view_of(draw(the_cuda, keys, 2), &shape, shape.kv_heads);
    call.v = view_of(draw(the_cuda, keys, 3), &shape, shape.kv_heads);
    bf16 *dout = draw(the_cuda, queries, 4);
    for (int i = 0; i < 5; i++) {
        const struct attention_variant *variant;
        call.recipe = &recipes[i];
        assert_int_equal(attention_choose(&shape, &recipes[i], DEVICE_CUDA, "auto", &variant), OK);
        assert_string_equal(variant->name, "sm90");
        struct gradients x = both_passes(variant, call, dout);
        struct gradients y = both_passes(&attention_variant_cuda, call, dout);
        double dq = relative(x.dq, y.dq, queries);
        double dk = relative(x.dk, y.dk, keys);
        double dv = relative(x.dv, y.dv, keys);
        double bound = i == 4 ? 5e-2 : i == 0 ? 1e-2 : 2e-2;
        print_message("both passes, recipe %d: dq %.1e dk %.1e dv %.1e\n", i, dq, dk, dv);
        bad += !(dq < bound) + !(dk < bound) + !(dv < bound);
        bf16 *all[] = {x.dq, x.dk, x.dv, y.dq, y.dk, y.dv};
        for (size_t k = 0; k < sizeof all / sizeof *all; k++) {
            free(all[k]);
        }
    }
    cuda_free(call.q.data);
    cuda_free(call.k.data);
    cuda_free(call.v.data);
    cuda_free(dout);
    assert_int_equal(bad, 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(lengths),         cmocka_unit_test(heads_and_tiles),
                                       cmocka_unit_test(coded),           cmocka_unit_test(codes_equal),
                                       cmocka_unit_test(sequences_large), cmocka_unit_test(whole_variant)};
    gpu_arguments(argc, argv);
    return cmocka_run_group_tests(tests, open_gpu, close_gpu);
}
