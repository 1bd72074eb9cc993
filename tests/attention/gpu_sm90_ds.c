/* dS as the Hopper backward stores it, read off its ordinary outputs, and what its rows sum to (the row leak,
 * docs/numerics.md, section 7). The gradient views of Q and K are made from the tensors that the backward is given, the
 * scores from the saved state: so that K = one key in each feature makes dQ show dS, Q likewise dK, and K = 1
 * everywhere makes every element of dQ the sum of its row. */
#include "tests/attention/gpu_sm90_check.h"

enum { TOKENS = 200, HEADS = 4, KV_HEADS = 2, GROUP = HEADS / KV_HEADS, WINDOW = 128, ONE = 0x3f80 };

enum { RECIPES = 16 };

/* pv, preset, qk. The lifted views of the saved presets are made from the saved state: here from the tensors too. The
 * last four: `represented` with MXFP4 codes straight from scores. */
static struct attention_recipe recipe_number(int i)
{
    if (i >= 12) {
        struct attention_recipe direct = recipe_of(PV_MXFP4, BWD_REPRESENTED);
        direct.qk = i < 14 ? QK_NVFP4 : QK_NVFP4_E4M3;
        direct.p_map = i % 2 == 0 ? P_CODE_SPACE : P_AFFINE;
        return direct;
    }
    static const enum backward_preset presets[] = {BWD_REPRESENTED, BWD_SAVED_OUTPUT, BWD_SAVED_OUTPUT_FIXED};
    struct attention_recipe recipe = recipe_of(i % 2 == 0 ? PV_FP8 : PV_MXFP4, presets[i / 2 % 3]);
    recipe.qk = i / 6 == 0 ? QK_NVFP4 : QK_NVFP4_E4M3;
    recipe.qk_grad = QK_GRAD_ORIGINAL;
    return recipe;
}

/* ---- codes ------------------------------------------------------------------------------------------------- */

/* x (T, heads, D) = 1 where the feature is token - first, else 0; of every `step`-th head from `head` on. */
static void one_hot(bf16 *x, int64_t heads, int64_t first, int64_t head, int64_t step)
{
    for (int64_t i = 0; i < TOKENS * heads * D; i++) {
        const int64_t token = i / D / heads;
        x[i] = token - first == i % D && i / D % heads % step == head ? ONE : 0;
    }
}

/* dO with one feature a row: dP and the row statistic are single products, exact on both sides. */
static void thin(bf16 *dout)
{
    for (int64_t i = 0; i < TOKENS * HEADS * D; i++) {
        dout[i] = (i / D * 37 + i / D / D) % D == i % D ? dout[i] : 0;
    }
}

/* The lowest set bit of |x|, a power of two; infinite for zero. */
static double lowest_bit(double x)
{
    int e;
    if (x == 0) {
        return INFINITY;
    }
    double m = frexp(fabs(x), &e) * 0x1p24;
    return ldexp((double)((int64_t)m & -(int64_t)m), e - 24);
}

/* Index of an E4M3 magnitude given in units of its smallest step, with a sign. */
static int step_of(double x, double unit)
{
    const double magnitude = fabs(x) / unit;
    int e;
    if (magnitude < 16) {
        return (int)copysign(rint(magnitude), x);
    }
    const double m = frexp(magnitude, &e); /* [0.5, 1) */
    return (int)copysign(8 * (e - 4) + rint(m * 16), x);
}

struct ds {
    int64_t codes, differ, far, torn; /* torn: dQ and dK show different codes */
};

static double value_at(const bf16 *x, int64_t heads, int64_t head, int64_t token, int64_t feature)
{
    return (double)bf16_to_float(x[(token * heads + head) * D + feature]);
}

static void read_dq(const struct gpu_case *g, int64_t first, struct ds *t)
{
    const bf16 *want = g->c->dq, *got = g->got[OUT_DQ];
    double unit = INFINITY;
    for (int64_t i = 0; i < TOKENS * HEADS * D; i++) {
        unit = fmin(unit, lowest_bit((double)bf16_to_float(want[i])));
    }
    for (int64_t i = 0; i < TOKENS * HEADS * D; i++) {
        const int64_t key = first + i % D, query = i / D / HEADS;
        const int found = step_of((double)bf16_to_float(got[i]), unit);
        const int expected = step_of((double)bf16_to_float(want[i]), unit);
        if (key > query || key >= TOKENS) {
            t->far += found != 0;
            continue;
        }
        t->codes++;
        t->differ += found != expected;
        t->far += abs(found - expected) > 1;
    }
}

/* g shows keys, h shows queries first .. first + WINDOW - 1, of head `only` of each group. The views of Q and K have
 * the same power of two. */
static void compare_dk(const struct gpu_case *g, const struct gpu_case *h, int64_t first, int64_t only, struct ds *t)
{
    for (int64_t i = 0; i < WINDOW * WINDOW * KV_HEADS; i++) {
        const int64_t kv = i % KV_HEADS, key = i / KV_HEADS % WINDOW, query = i / KV_HEADS / WINDOW;
        if (first + key < TOKENS && first + query < TOKENS) {
            t->torn += value_at(g->got[OUT_DQ], HEADS, kv * GROUP + only, first + query, key) !=
                       value_at(h->got[OUT_DK], KV_HEADS, kv, first + key, query);
        }
    }
}

static void read_window(struct gpu *gpu, struct attention_case *c, int64_t first, struct ds *t)
{
    struct gpu_case g, h;
    const int64_t only = first / WINDOW % GROUP;
    one_hot(c->k, KV_HEADS, first, 0, 1);
    case_backward(c);
    gpu_case_open(&g, gpu, c, APART, BACKWARD);
    t->far += gpu_case_run(&g);
    read_dq(&g, first, t);
    one_hot(c->q, HEADS, first, only, GROUP);
    gpu_case_open(&h, gpu, c, APART, BACKWARD);
    t->far += gpu_case_run(&h);
    compare_dk(&g, &h, first, only, t);
    gpu_case_close(&h);
    gpu_case_close(&g);
}

static struct ds read_ds(struct gpu *gpu, const struct attention_recipe *recipe, bool thin_dout)
{
    struct ds t = {0, 0, 0, 0};
    for (int kind = 0; kind < INPUT_KINDS; kind++) {
        struct attention_shape s = shape_of(1, TOKENS, HEADS, KV_HEADS, true);
        struct attention_case c;
        if (gpu_leaves_out(7)) {
            continue;
        }
        s.softmax_scale = 0.0625f; /* a power of two: dQ is a code times one, exact in BF16 */
        case_open(&c, &s, recipe, (enum input_kind)kind, 23);
        case_forward(&c);
        if (thin_dout) {
            thin(c.dout);
        }
        for (int64_t first = 0; first < TOKENS; first += WINDOW) {
            read_window(gpu, &c, first, &t);
        }
        case_close(&c);
    }
    return t;
}

/* thin: what is left is FP32 rounding of dP - r and codes of P (those of MXFP4 below 2^-16 of a row are cut off,
 * docs/numerics.md, section 16). Else FP8 tensor cores keep about 14 bits of dP, which turns a few stored dS in 1000 to
 * their neighbours; where dP - r cancels, by more. */
static void ds_codes(void **state)
{
    int bad = 0;
    for (int i = 0; i < 2 * RECIPES; i++) {
        const struct attention_recipe recipe = recipe_number(i % RECIPES);
        const bool thin_dout = i < RECIPES, rough = recipe.qk == QK_NVFP4_E4M3;
        const double few = rough ? 3e-3 : recipe.bwd_p == BWD_P_CODES && recipe.pv == PV_MXFP4 ? 5e-4 : 1e-4;
        const struct ds t = read_ds(*state, &recipe, thin_dout);
        const double all = (double)t.codes;
        print_message("dS, %s dO, %s %s %s %s: %lld of %lld differ (%.1e), %lld by more than a step; %lld torn\n",
                      thin_dout ? "thin" : "full", qk_format_names[recipe.qk], pv_format_names[recipe.pv],
                      p_map_names[recipe.p_map], backward_preset_names[recipe.backward], (long long)t.differ,
                      (long long)t.codes, (double)t.differ / all, (long long)t.far, (long long)t.torn);
        bad += !*gpu_small() && (double)t.differ > (thin_dout ? few : 1e-2) * all; /* the law is one for all inputs */
        bad += (!*gpu_small() && (double)t.far > (thin_dout && !rough ? 2e-5 : 1e-3) * all) || t.torn > 0;
    }
    assert_int_equal(bad, 0);
}

/* ---- the row leak ------------------------------------------------------------------------------------------ */

struct leak {
    double lambda, sum, slope; /* sum |rho| and sum rho over sum |dS|; sum rho r / sum r^2 */
};

static struct leak leak_of(const struct attention_case *c, const bf16 *dq)
{
    struct leak l = {0, 0, 0};
    double r_r = 0;
    for (int64_t i = 0; i < case_queries(c) / D; i++) {
        const double rho = (double)bf16_to_float(dq[i * D]) / (double)c->shape.softmax_scale;
        double r = 0;
        for (int64_t d = 0; d < D; d++) {
            r += (double)bf16_to_float(c->out[i * D + d]) * (double)bf16_to_float(c->dout[i * D + d]);
        }
        l.lambda += fabs(rho) / c->stats.ds_stored_abs;
        l.sum += rho / c->stats.ds_stored_abs;
        l.slope += rho * r;
        r_r += r * r;
    }
    l.slope /= r_r;
    return l;
}

/* After storing, which is what training sees: size, bias and slope of the leak as the reference's. */
static void row_leak(void **state)
{
    int bad = 0;
    for (int i = 0; i < RECIPES * INPUT_KINDS; i++) {
        const struct attention_shape s = shape_of(1, 450, 4, 2, true);
        const struct attention_recipe recipe = recipe_number(i / INPUT_KINDS);
        struct attention_case c;
        struct gpu_case g;
        if (gpu_leaves_out(7)) {
            continue;
        }
        case_open(&c, &s, &recipe, (enum input_kind)(i % INPUT_KINDS), 11);
        case_forward(&c);
        for (int64_t j = 0; j < case_keys(&c); j++) {
            c.k[j] = ONE;
        }
        memset(&c.stats, 0, sizeof c.stats);
        case_backward(&c);
        gpu_case_open(&g, *state, &c, APART, BACKWARD);
        bad += gpu_case_run(&g);
        const struct leak x = leak_of(&c, g.got[OUT_DQ]), y = leak_of(&c, c.dq);
        print_message("leak, %s %s %s %s %s: lambda %.3e (reference %.3e), sum %+.1e (%+.1e), slope %+.1e (%+.1e)\n",
                      qk_format_names[recipe.qk], pv_format_names[recipe.pv], p_map_names[recipe.p_map],
                      backward_preset_names[recipe.backward], input_names[i % INPUT_KINDS], x.lambda, y.lambda, x.sum,
                      y.sum, x.slope, y.slope);
        bad += !(fabs(x.lambda / y.lambda - 1) < 0.1) + !(fabs(x.sum - y.sum) < 0.1 * y.lambda) +
               !(fabs(x.slope - y.slope) < 0.1 * fabs(y.slope) + 2e-3);
        gpu_case_close(&g);
        case_close(&c);
    }
    assert_int_equal(bad, 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(ds_codes), cmocka_unit_test(row_leak)};
    gpu_arguments(argc, argv);
    return cmocka_run_group_tests(tests, gpu_open_state, gpu_close_state);
}
