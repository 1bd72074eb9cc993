/* The codes that the Hopper kernels make, read off their ordinary outputs: with V, dO or K all zero but for one element
 * in a row, an output is one code times known powers of two. They must equal the reference's but for 1e-4 of them, by
 * one step (docs/numerics.md, section 10): an FP32 score that lies that close to a boundary. */
#include "tests/attention/gpu_sm90_check.h"

#include "attention/attention_cpu.h"
#include "numerics/formats.h"

enum { TOKENS = 300, HEADS = 4, KV_HEADS = 2, WINDOW = 128 };

struct tally {
    int64_t codes, differ, far;  /* all; not the reference's; by more than one step */
    int64_t small, small_differ; /* E4M3 below its normal numbers: a coarser grid than the kernel's (see below) */
};

enum { NORMAL = 8 }; /* the first normal code of E4M3; below it lie values that the finer grid keeps apart */

static void tally_add(struct tally *t, int found, int expected)
{
    t->codes++;
    t->differ += found != expected;
    t->far += abs(found - expected) > 1;
}

/* FP8: a row's anchor grows from block to block, and a code made before is rescaled, exactly: it agrees where it is
 * normal in both grids (docs/numerics.md, section 5). */
static void tally_add_e4m3(struct tally *t, int found, int expected)
{
    if (expected > NORMAL) {
        tally_add(t, found, expected);
        return;
    }
    t->small++;
    t->small_differ += found != expected;
    t->far += abs(found - expected) > 1;
}

static void tally_print(const char *what, const struct attention_recipe *recipe, const struct tally *t)
{
    print_message("%-12s %s %s %s %s %s: %lld of %lld differ (%.1e), %lld by more than a step; small %lld of %lld\n",
                  what, qk_format_names[recipe->qk], pv_format_names[recipe->pv], mx_family_names[recipe->mx_rule],
                  p_map_names[recipe->p_map], backward_preset_names[recipe->backward], (long long)t->differ,
                  (long long)t->codes, (double)t->differ / (double)t->codes, (long long)t->far,
                  (long long)t->small_differ, (long long)t->small);
}

/* The law for scores of BF16 operands. A largest score of an MXFP4 block on a boundary takes the block's exponent, and
 * so other codes of the block, along: those may lie two steps apart. FP8 tensor cores align the products of E4M3 scores
 * to about 14 bits, where the reference sums exactly: a code in a thousand falls on the other side. */
static int tally_judge(const struct attention_recipe *recipe, const struct tally *t)
{
    const bool rough = recipe->qk == QK_NVFP4_E4M3;
    const double all = (double)t->codes;
    return t->codes == 0 || (double)t->differ > (rough ? 3e-3 : 1e-4) * all ||
           (double)t->far > (rough ? 3e-4 : 2e-5) * all;
}

static int e2m1_nearest(double x)
{
    int best = 0;
    for (int i = 1; i < 8; i++) {
        best = fabs((double)e2m1_to_float((uint8_t)i) - x) < fabs((double)e2m1_to_float((uint8_t)best) - x) ? i : best;
    }
    return best;
}

static int e4m3_nearest(double x)
{
    return e4m3_from_float((float)x);
}

/* x (T, heads, D) = 1 where the feature is token - first, else 0; of `only` (-1: all heads). */
static void one_hot(bf16 *x, int64_t heads, int64_t first, int64_t only)
{
    for (int64_t i = 0; i < TOKENS * heads * D; i++) {
        const int64_t token = i / D / heads, head = i / D % heads;
        x[i] = token - first == i % D && (only < 0 || only == head) ? 0x3f80 : 0;
    }
}

static struct attention_cpu_probe probe_open(void)
{
    const size_t cells = (size_t)HEADS * TOKENS * TOKENS;
    return (struct attention_cpu_probe){calloc(cells, 1), calloc(cells / 16, sizeof(int16_t))};
}

static int exponent_at(const struct attention_cpu_probe *probe, int64_t row, int64_t key)
{
    return probe->exponents[row * ((TOKENS + 31) / 32) + key / 32];
}

/* ---- forward: V = one key in each feature, O = P / L ------------------------------------------------------- */

static void probe_forward(const struct attention_case *c, struct attention_cpu_probe *probe)
{
    struct attention_cpu_options options = ATTENTION_CPU_DEFAULT;
    options.probe = probe;
    const struct attention_shape *s = &c->shape;
    const struct head_view q = {c->q, TOKENS * HEADS * D, HEADS * D, D};
    const struct head_view k = {c->k, TOKENS * KV_HEADS * D, KV_HEADS * D, D};
    struct attention_fwd call = {.shape = *s, .recipe = &c->recipe, .q = q, .k = k, .v = k, .out = q};
    call.v.data = c->v;
    call.out.data = c->out;
    call.lse_log2 = c->lse_log2;
    call.scratch = malloc(attention_scratch_bytes_cpu_with(s, &c->recipe, &options));
    attention_fwd_cpu_with(&call, &options);
    free(call.scratch);
}

/* Codes of one row whose keys are first .. first + WINDOW - 1. What is masked must be zero, and counts as far if not.
 */
static void read_forward_row(const struct gpu_case *g, const struct attention_cpu_probe *probe, int64_t head, int64_t i,
                             int64_t first, struct tally *t)
{
    const bool fp8 = g->c->recipe.pv == PV_FP8;
    const int64_t row = head * TOKENS + i;
    const uint8_t *codes = probe->codes + row * TOKENS;
    const double lse = (double)g->got_lse[row], unit = (double)attention_unit(&g->c->recipe);
    double sum = 0, up = 1; /* FP8: the reference's codes tell the anchor a: 2^LSE2 = 2^a sum / 256 */
    for (int64_t j = 0; fp8 && j <= i; j++) {
        sum += (double)e4m3_to_float(codes[j]);
    }
    up = fp8 ? exp2(round(lse - log2(sum / 256)) - 8) : 1;
    for (int64_t j = first; j < first + WINDOW && j < TOKENS; j++) {
        const double o = (double)bf16_to_float(g->got[OUT][(i * HEADS + head) * D + j - first]), p = o * exp2(lse);
        if (j > i) {
            t->far += o != 0;
        } else if (fp8) {
            tally_add_e4m3(t, e4m3_nearest(p / up), codes[j]);
        } else {
            tally_add(t, e2m1_nearest(p * unit / exp2(exponent_at(probe, row, j))), codes[j]);
        }
    }
}

static void read_forward(struct gpu *gpu, const struct attention_recipe *recipe, enum input_kind kind, struct tally *t)
{
    const struct attention_shape s = shape_of(1, TOKENS, HEADS, KV_HEADS, true);
    struct attention_cpu_probe probe = probe_open();
    struct attention_case c;
    case_open(&c, &s, recipe, kind, 99);
    probe_forward(&c, &probe);
    for (int64_t first = 0; first < TOKENS; first += WINDOW) {
        struct gpu_case g;
        one_hot(c.v, KV_HEADS, first, -1);
        gpu_case_open(&g, gpu, &c, APART, FORWARD);
        t->far += gpu_case_run(&g);
        for (int64_t row = 0; row < HEADS * TOKENS; row++) {
            read_forward_row(&g, &probe, row / TOKENS, row % TOKENS, first, t);
        }
        gpu_case_close(&g);
    }
    free(probe.codes);
    free(probe.exponents);
    case_close(&c);
}

enum {
    MAP_RECIPES = 12,
    FORWARD_RECIPES = 3 * 9 + 4,
    PLAIN_RECIPES = 12,
    BACKWARD_RECIPES = PLAIN_RECIPES + MAP_RECIPES
};

/* Direct-P: rule, map and, for affine, the paper's constants; then qk. */
static struct attention_recipe map_recipe(int i)
{
    static const float constants[][2] = {{1.50f, 1.20f}, {1.60f, 0.95f}, {1.65f, 0.80f}};
    struct attention_recipe recipe = recipe_of(PV_MXFP4, BWD_REPRESENTED);
    recipe.qk = i / 6 == 0 ? QK_NVFP4 : QK_NVFP4_E4M3;
    recipe.mx_rule = i % 2 == 0 ? MX_NEAREST : MX_OCP;
    recipe.p_map = i / 2 % 3 == 0 ? P_CODE_SPACE : P_AFFINE;
    recipe.affine_a = constants[i / 2 % 3 == 1 ? 0 : 1 + i % 2][0];
    recipe.affine_b = constants[i / 2 % 3 == 1 ? 0 : 1 + i % 2][1];
    return recipe;
}

/* qk, then fp8 or mxfp4 with rule and map; behind them affine with other constants. */
static struct attention_recipe forward_recipe(int i)
{
    if (i >= FORWARD_RECIPES - 4) {
        return map_recipe(i % 2 + (FORWARD_RECIPES - i <= 2 ? 10 : 4));
    }
    struct attention_recipe recipe = recipe_of(i % 9 == 0 ? PV_FP8 : PV_MXFP4, BWD_REPRESENTED);
    recipe.qk = (enum qk_format)(i / 9);
    recipe.mx_rule = i % 9 > 4 ? MX_OCP : MX_NEAREST;
    recipe.p_map = i % 9 == 0 ? P_EXACT : (enum p_map)((i % 9 - 1) % 4);
    return recipe;
}

static void forward_codes(void **state)
{
    int bad = 0;
    for (int i = 0; i < FORWARD_RECIPES; i++) {
        const struct attention_recipe recipe = forward_recipe(i);
        struct tally t = {0};
        if (recipe.p_map == P_THRESHOLD && recipe.qk != QK_NVFP4) { /* the codes and the kernel of exact */
            continue;
        }
        for (int kind = 0; kind < INPUT_KINDS; kind++) {
            if (!gpu_leaves_out(7)) {
                read_forward(*state, &recipe, (enum input_kind)kind, &t);
            }
        }
        tally_print("P", &recipe, &t);
        bad += !*gpu_small() && tally_judge(&recipe, &t);
    }
    assert_int_equal(bad, 0);
}

/* ---- backward: dO = one query in each feature of one head of a group, dV = P dO ---------------------------- */

static void probe_backward(struct attention_case *c, struct attention_cpu_probe *probe)
{
    struct attention_cpu_options options = ATTENTION_CPU_DEFAULT;
    options.probe = probe;
    const struct head_view q = {c->q, TOKENS * HEADS * D, HEADS * D, D};
    const struct head_view k = {c->k, TOKENS * KV_HEADS * D, KV_HEADS * D, D};
    struct attention_bwd call = {.shape = c->shape, .recipe = &c->recipe, .q = q, .k = k, .v = k, .out = q};
    call.dout = call.dq = q;
    call.dk = call.dv = k;
    call.v.data = c->v;
    call.out.data = c->out;
    call.dout.data = c->dout;
    call.dq.data = c->dq;
    call.dk.data = c->dk;
    call.dv.data = c->dv;
    call.lse_log2 = c->lse_log2;
    call.saved = c->saved;
    call.scratch = malloc(attention_scratch_bytes_cpu_with(&c->shape, &c->recipe, &options));
    attention_bwd_cpu_with(&call, &options);
    free(call.scratch);
}

/* dO as the recipe stores a 1 of this row. */
static double stored_one(const struct attention_case *c, int64_t row)
{
    const float lse = c->lse_log2[row], fold = c->recipe.bwd_p == BWD_P_CODES ? exp2f(floorf(lse) - lse) : 1.0f;
    return (double)(c->recipe.do_format == DO_E4M3 ? e4m3_round(fold * 256) / 256 : e5m2_round(fold * 4) / 4);
}

/* Codes behind one element of dV: as found, and as expected. E2M1 codes of MXFP4 are multiplied as q 2^(E - n) in
 * E5M2, which cuts off what lies below its least number, 2^-16 (docs/numerics.md, section 16): blocks that reach
 * below are compared in units of that. */
struct pair_of_codes {
    int found, expected;
    bool probed; /* `expected` is read from the reference's dV, and the reference says what it is: */
    int probe;
};

static struct pair_of_codes backward_codes_of(const struct attention_case *c, const struct attention_cpu_probe *probe,
                                              int64_t row, int64_t key, double x, double y)
{
    const double one = stored_one(c, row), unit = (double)attention_unit(&c->recipe);
    const int code = probe->codes[row * TOKENS + key];
    if (c->recipe.bwd_p != BWD_P_CODES) {
        return (struct pair_of_codes){e4m3_nearest(x / one * 256), e4m3_nearest(y / one * 256), false, 0};
    }
    if (c->recipe.pv == PV_FP8) {
        return (struct pair_of_codes){e4m3_nearest(x / one * 128), e4m3_nearest(y / one * 128), true, code};
    }
    const int up = exponent_at(probe, row, key) - (int)floorf(c->lse_log2[row]);
    if (up < -15) {
        return (struct pair_of_codes){(int)lround(ldexp(x / one * unit, 16)),
                                      (int)ldexp((double)e2m1_to_float((uint8_t)code), up + 16), false, 0};
    }
    return (struct pair_of_codes){e2m1_nearest(ldexp(x / one * unit, -up)), e2m1_nearest(ldexp(y / one * unit, -up)),
                                  true, code};
}

static void read_backward(struct gpu *gpu, const struct attention_recipe *recipe, enum input_kind kind, struct tally *t,
                          struct tally *reading)
{
    const struct attention_shape s = shape_of(1, TOKENS, HEADS, KV_HEADS, true);
    struct attention_cpu_probe probe = probe_open();
    struct attention_case c;
    case_open(&c, &s, recipe, kind, 17);
    case_forward(&c);
    for (int64_t first = 0, turn = 0; first < TOKENS; first += WINDOW, turn++) {
        struct gpu_case g;
        one_hot(c.dout, HEADS, first, -1);
        for (int64_t i = 0; i < case_queries(&c); i++) { /* of a group one head only */
            c.dout[i] = i / D % (HEADS / KV_HEADS) == turn % (HEADS / KV_HEADS) ? c.dout[i] : 0;
        }
        probe_backward(&c, &probe);
        gpu_case_open(&g, gpu, &c, APART, BACKWARD);
        t->far += gpu_case_run(&g);
        for (int64_t i = 0; i < case_keys(&c); i++) {
            const int64_t kv = i / D % KV_HEADS, key = i / D / KV_HEADS, query = first + i % D;
            const int64_t row = (kv * (HEADS / KV_HEADS) + turn % (HEADS / KV_HEADS)) * TOKENS + query;
            const double x = (double)bf16_to_float(g.got[OUT_DV][i]), y = (double)bf16_to_float(c.dv[i]);
            if (query >= TOKENS || key > query) {
                t->far += x != 0;
                continue;
            }
            const struct pair_of_codes p = backward_codes_of(&c, &probe, row, key, x, y);
            tally_add(t, p.found, p.expected);
            if (p.probed) {
                tally_add(reading, p.expected, p.probe);
            }
        }
        gpu_case_close(&g);
    }
    free(probe.codes);
    free(probe.exponents);
    case_close(&c);
}

/* pv and rule, then the preset: rebuilt codes, and exp2(t - LSE2) in FP8; behind them map_recipe. */
static struct attention_recipe backward_recipe(int i)
{
    if (i >= PLAIN_RECIPES) {
        return map_recipe(i - PLAIN_RECIPES);
    }
    struct attention_recipe recipe =
        recipe_of(i % 3 == 0 ? PV_FP8 : PV_MXFP4, i / 3 % 2 == 0 ? BWD_REPRESENTED : BWD_SAVED_OUTPUT);
    recipe.mx_rule = i % 3 == 2 ? MX_OCP : MX_NEAREST;
    recipe.qk = i / 6 == 0 ? QK_NVFP4 : QK_NVFP4_E4M3;
    return recipe;
}

static void backward_codes(void **state)
{
    int bad = 0;
    for (int i = 0; i < BACKWARD_RECIPES; i++) {
        const struct attention_recipe recipe = backward_recipe(i);
        struct tally t = {0}, reading = {0};
        for (int kind = 0; kind < INPUT_KINDS; kind++) {
            if (!gpu_leaves_out(7)) {
                read_backward(*state, &recipe, (enum input_kind)kind, &t, &reading);
            }
        }
        tally_print("P, rebuilt", &recipe, &t);
        bad += !*gpu_small() && tally_judge(&recipe, &t);
        if (reading.differ > 0) { /* this test's own arithmetic */
            print_message("the reading of dV is wrong: %lld of %lld\n", (long long)reading.differ,
                          (long long)reading.codes);
            bad++;
        }
    }
    assert_int_equal(bad, 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(forward_codes), cmocka_unit_test(backward_codes)};
    gpu_arguments(argc, argv);
    return cmocka_run_group_tests(tests, gpu_open_state, gpu_close_state);
}
