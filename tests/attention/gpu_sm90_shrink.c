/* Long sums of the FP8 backward on Hopper: dV and dK of a key that every query looks at, dQ of a query that sees all
 * keys, against the model of the tensor core's sum (docs/numerics.md, section 17). FP8 products are cut towards zero,
 * so that a sum whose terms share a sign shrinks with its length: the log says by how much. Inputs that make it so: dO
 * and V have means, the sink key differs from the others. */
#include "tests/attention/gpu_sm90_check.h"
#include "tests/attention/gpu_sm90_model.h"

#include "core/rng.h"

enum {
    HEADS = 4,
    MEANS = 5,
    STEP = 8 * 64, /* queries after which the kernel adds the next quarter of dK, dV to its sums: FLUSH_TILES tiles */
    FLUSH = 4 * STEP,
    KEYS = 128, /* of dQ: a block of keys is added after the other */
};

/* Of dO over its standard deviation, in features d with d % MEANS of that number. */
static const float means[MEANS] = {0, 0.03f, 0.1f, 0.3f, 1};

static void draw_means(struct attention_case *c)
{
    const uint64_t stream = rng_stream("test/shrink");
    for (int64_t i = 0; i < case_queries(c); i++) {
        c->dout[i] = bf16_from_float(0.01f * (rng_normal(3, stream, (uint64_t)i) + means[i % D % MEANS]));
    }
    for (int64_t i = D; i < case_keys(c); i++) { /* but key 0 */
        c->v[i] = bf16_from_float(bf16_to_float(c->v[i]) + 0.5f);
    }
}

/* One row of a gradient: unit times sum of x y[d], for each feature d, in FP32 over pieces of `period` products; the
 * first piece, of both halves of the features, may be shorter. */
struct sums {
    const char *name;
    int n, first[2], period;
    uint8_t *x, *y[D];
    float unit;
};

static struct sums sums_open(const char *name, int n, int first, int second, int period, float unit)
{
    struct sums s = {name, n, {first, second}, period, malloc((size_t)n), {0}, unit};
    for (int d = 0; d < D; d++) {
        s.y[d] = malloc((size_t)n);
    }
    return s;
}

static void sums_close(struct sums *s)
{
    free(s->x);
    for (int d = 0; d < D; d++) {
        free(s->y[d]);
    }
}

static float sum_by_model(const struct sums *s, int d)
{
    float sum = 0;
    for (int first = 0, count = s->first[d / (D / 2)]; first < s->n; first += count, count = s->period) {
        count = s->n - first < count ? s->n - first : count;
        sum += wgmma_sum(WGMMA_E4M3, s->x + first, WGMMA_E4M3, s->y[d] + first, count, 0);
    }
    return s->unit * sum;
}

static double sum_exactly(const struct sums *s, int d)
{
    double sum = 0;
    for (int i = 0; i < s->n; i++) {
        sum += (double)e4m3_to_float(s->x[i]) * (double)e4m3_to_float(s->y[d][i]);
    }
    return sum * (double)s->unit;
}

/* How much smaller magnitudes are, over features with d % of == which. */
static void print_shrinkage(const struct sums *s, const bf16 *got, int of, int which, const char *note)
{
    double exact = 0, model = 0, found = 0;
    int same = 0, features = 0;
    for (int d = which; d < D; d += of) {
        const double y = sum_exactly(s, d), sign = y < 0 ? -1 : 1;
        const float sum = sum_by_model(s, d);
        exact += fabs(y);
        model += sign * (double)sum;
        found += sign * (double)bf16_to_float(got[d]);
        same += got[d] == bf16_from_float(sum);
        features++;
    }
    print_message("%s%s, %6d products: too small by %6.2f %%, by the model %6.2f %%; %d of %d have the model's bits\n",
                  s->name, note, s->n, 100 * (1 - found / exact), 100 * (1 - model / exact), same, features);
}

/* Against the model: 2^-8 for one rounding to BF16 (2^-9) and a few codes on boundaries, which move a sum that is small
 * beside others by a share of those. */
static int judge_sums(const struct sums *s, const bf16 *got)
{
    double squares = 0, worst = 0;
    for (int d = 0; d < D; d++) {
        squares += pow(sum_exactly(s, d), 2) / D;
    }
    for (int d = 0; d < D; d++) {
        const double model = (double)sum_by_model(s, d), error = fabs((double)bf16_to_float(got[d]) - model);
        const double bound = 0x1p-8 * fabs(model) + 0x1p-10 * sqrt(squares);
        worst = !(error / bound <= worst) ? error / bound : worst;
    }
    if (!(worst <= 1)) {
        print_message("%s: %.2f of what is allowed\n", s->name, worst);
    }
    return !(worst <= 1);
}

/* dV and dK of key 0, over all queries of all heads in the kernel's order. */
static int judge_sink(const struct gpu_case *g, const struct bwd8_model *m)
{
    struct sums dv = sums_open("dV", m->rows, 3 * STEP, 4 * STEP, FLUSH, 0x1p-7f / m->m_dout);
    struct sums dk = sums_open("dK", m->rows, STEP, 2 * STEP, FLUSH, m->scale / (m->m_ds * m->m_q));
    for (int row = 0; row < m->rows; row++) {
        dv.x[row] = bwd8_p(m, row, 0);
        dk.x[row] = e4m3_from_float(bwd8_ds(m, row, dv.x[row], bwd8_dp(m, row, 0)));
        for (int d = 0; d < D; d++) {
            dv.y[d][row] = m->dout[row * D + d];
            dk.y[d][row] = m->q[row * D + d];
        }
    }
    for (int i = 0; i < MEANS; i++) {
        char note[32];
        snprintf(note, sizeof note, ", dO about %4.2f", (double)means[i]);
        print_shrinkage(&dv, g->got[OUT_DV], MEANS, i, note);
    }
    print_shrinkage(&dk, g->got[OUT_DK], 1, 0, "               ");
    const int bad = judge_sums(&dv, g->got[OUT_DV]) + judge_sums(&dk, g->got[OUT_DK]);
    sums_close(&dv);
    sums_close(&dk);
    return bad;
}

/* dQ of the last query of head 0, block of keys after block. */
static int judge_query(const struct gpu_case *g, const struct bwd8_model *m)
{
    struct sums dq = sums_open("dQ", m->tokens, KEYS, KEYS, KEYS, m->scale / (m->m_ds * m->m_k));
    const int row = m->tokens - 1;
    const bf16 *got = g->got[OUT_DQ] + (int64_t)row * HEADS * D;
    for (int key = 0; key < m->tokens; key++) {
        dq.x[key] = e4m3_from_float(bwd8_ds(m, row, bwd8_p(m, row, key), bwd8_dp(m, row, key)));
        for (int d = 0; d < D; d++) {
            dq.y[d][key] = m->k[key * D + d];
        }
    }
    print_shrinkage(&dq, got, 1, 0, "               ");
    const int bad = judge_sums(&dq, got);
    sums_close(&dq);
    return bad;
}

static int judge_length(struct gpu *gpu, int64_t tokens)
{
    const struct attention_shape shape = shape_of(1, tokens, HEADS, 1, true);
    const struct attention_recipe recipe = recipe_of(PV_FP8, BWD_REPRESENTED);
    struct attention_case c;
    struct gpu_case g;
    case_open(&c, &shape, &recipe, INPUT_SINK, 5);
    draw_means(&c);
    gpu_case_open(&g, gpu, &c, APART, BOTH);
    int bad = gpu_case_run(&g);
    struct bwd8_model m = bwd8_open(&c, g.got[OUT], g.got_lse, g.got_saved);
    bad += judge_sink(&g, &m) + judge_query(&g, &m);
    bwd8_close(&m);
    gpu_case_close(&g);
    case_close(&c);
    return bad;
}

static void short_sums(void **state)
{
    assert_int_equal(judge_length(*state, 640), 0);
}

static void sums_large(void **state)
{
    assert_int_equal(judge_length(*state, 4096) + judge_length(*state, 16384), 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(short_sums), cmocka_unit_test(sums_large)};
    gpu_arguments(argc, argv);
    return cmocka_run_group_tests(tests, gpu_open_state, gpu_close_state);
}
