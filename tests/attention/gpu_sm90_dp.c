/* dS as the Hopper backward stores it, where dO has all its features: dP is an FP8 product of 128 of them, whose sum
 * the tensor cores round. With that sum by the model (docs/numerics.md, section 17) every code must be the one that dS
 * rounds to, but where it lies on a boundary within the roundings of FP32. Read off dQ as in gpu_sm90_ds.c. Beside it,
 * for the log: how many codes exact sums would explain. */
#include "tests/attention/gpu_sm90_check.h"
#include "tests/attention/gpu_sm90_model.h"

enum { TOKENS = 300, HEADS = 3, WINDOW = 128 };

struct tally {
    int64_t codes, differ, unexplained, inexact; /* all; not the model's; nor near a boundary; not of exact sums */
};

static float exact_dp(const struct bwd8_model *m, int row, int key)
{
    double sum = 0;
    for (int d = 0; d < D; d++) {
        sum += (double)e4m3_to_float(m->v[key * D + d]) * (double)e4m3_to_float(m->dout[row * D + d]);
    }
    return (float)sum;
}

/* x lies between the roundings of what the model's dS may be: dP - r is made in FP32, r summed in another order. */
static bool near_boundary(const struct bwd8_model *m, int row, uint8_t p, float dp, float x)
{
    const float ds = bwd8_ds(m, row, p, dp);
    const float slack = e4m3_to_float(p) * (fabsf(dp) * m->dp_factor + fabsf(m->r[row])) * 0x1p-20f;
    return x >= e4m3_round(ds - slack) && x <= e4m3_round(ds + slack);
}

static void read_window(const struct gpu_case *g, const struct bwd8_model *m, int first, struct tally *t)
{
    for (int i = 0; i < m->rows * WINDOW; i++) {
        const int row = i / WINDOW, key = first + i % WINDOW, head = row / TOKENS, query = row % TOKENS;
        if (key > query) {
            continue;
        }
        const float dq = bf16_to_float(g->got[OUT_DQ][(query * HEADS + head) * D + key - first]);
        const float found = dq / m->scale * m->m_ds;
        const uint8_t p = bwd8_p(m, row, key);
        const float dp = bwd8_dp(m, row, key);
        const bool same = found == e4m3_round(bwd8_ds(m, row, p, dp));
        t->codes++;
        t->differ += !same;
        t->unexplained += !same && !near_boundary(m, row, p, dp, found);
        t->inexact += found != e4m3_round(bwd8_ds(m, row, p, exact_dp(m, row, key)));
    }
}

/* K, of which the backward makes only the view of dQ: one key in each feature. */
static void one_hot(bf16 *k, int first)
{
    for (int i = 0; i < TOKENS * D; i++) {
        k[i] = i / D - first == i % D ? 0x3f80 : 0;
    }
}

static void read_kind(struct gpu *gpu, enum input_kind kind, struct tally *t)
{
    struct attention_shape s = shape_of(1, TOKENS, HEADS, 1, true);
    const struct attention_recipe recipe = recipe_of(PV_FP8, BWD_REPRESENTED);
    struct attention_case c;
    s.softmax_scale = 0.0625f; /* a power of two: dQ is a code times one, exact in BF16 */
    case_open(&c, &s, &recipe, kind, 31);
    case_forward(&c);
    for (int first = 0; first < TOKENS; first += WINDOW) {
        struct gpu_case g;
        one_hot(c.k, first);
        struct bwd8_model m = bwd8_open(&c, c.out, c.lse_log2, c.saved);
        gpu_case_open(&g, gpu, &c, APART, BACKWARD);
        assert_int_equal(gpu_case_run(&g), 0);
        read_window(&g, &m, first, t);
        gpu_case_close(&g);
        bwd8_close(&m);
    }
    case_close(&c);
}

static void ds_codes(void **state)
{
    int bad = 0;
    for (int kind = 0; kind < INPUT_KINDS; kind++) {
        struct tally t = {0};
        if (gpu_leaves_out(3)) {
            continue;
        }
        read_kind(*state, (enum input_kind)kind, &t);
        print_message(
            "dS, %-8s of %lld codes %lld are not the model's (%.1e), %lld unexplained; %lld not those of exact "
            "sums (%.1e)\n",
            input_names[kind], (long long)t.codes, (long long)t.differ, (double)t.differ / (double)t.codes,
            (long long)t.unexplained, (long long)t.inexact, (double)t.inexact / (double)t.codes);
        bad += (double)t.differ > 1e-4 * (double)t.codes || (double)t.unexplained > 2e-5 * (double)t.codes;
    }
    assert_int_equal(bad, 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(ds_codes)};
    gpu_arguments(argc, argv);
    return cmocka_run_group_tests(tests, gpu_open_state, gpu_close_state);
}
