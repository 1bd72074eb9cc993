/* bench: what the low-precision routes cost in accuracy, beside the figures that docs/numerics.md expects.
 *   build/release/bench/numerics
 * Three tables in Markdown: forward routes (section 10), formats for probabilities (the paper's section 2), and the row
 * leak of the backwards (section 7). Deterministic; exit status 1 if a stated tolerance is missed. The reference is
 * exact FP64 attention of the same BF16 inputs. */
#include "core/rng.h"
#include "numerics/blocks.h"
#include "numerics/formats.h"
#include "tests/attention/cases.c"
#include "tests/attention/exact.c"

#include <stdio.h>

static int checks, misses;

/* "ok", or "MISS" and counted. A NaN misses. */
static const char *verdict(bool within)
{
    checks++;
    misses += !within;
    return within ? "ok" : "MISS";
}

/* --- 1. Forward routes --- */

struct route {
    const char *name;
    enum qk_format qk;
    enum qk_scale scale;
    enum pv_format pv;
    enum mx_family rule;
    enum p_map map;
    double cosine, rel_l2; /* as section 10, 3 or 5 expects; rel_l2 0: not stated there */
};

static const struct route routes[] = {
    {"BF16", QK_BF16, QK_SCALE_AMAX, PV_BF16, MX_NEAREST, P_EXACT, 1.0000, .002},
    {"NVFP4 + BF16", QK_NVFP4, QK_SCALE_AMAX, PV_BF16, MX_NEAREST, P_EXACT, .9906, .137},
    {"NVFP4 mse + BF16", QK_NVFP4, QK_SCALE_MSE, PV_BF16, MX_NEAREST, P_EXACT, .9925, .1225},
    {"NVFP4 + FP8", QK_NVFP4, QK_SCALE_AMAX, PV_FP8, MX_NEAREST, P_EXACT, .9899, .142},
    {"NVFP4 in E4M3 + FP8", QK_NVFP4_E4M3, QK_SCALE_AMAX, PV_FP8, MX_NEAREST, P_EXACT, 0, 0},
    {"NVFP4 + NVFP4", QK_NVFP4, QK_SCALE_AMAX, PV_NVFP4, MX_NEAREST, P_EXACT, .9820, .190},
    {"NVFP4 + UE5M3", QK_NVFP4, QK_SCALE_AMAX, PV_FP4_UE5M3, MX_NEAREST, P_EXACT, .9819, .191},
    {"NVFP4 + MXFP4 exact", QK_NVFP4, QK_SCALE_AMAX, PV_MXFP4, MX_NEAREST, P_EXACT, .9703, .242},
    {"NVFP4 + MXFP4 threshold", QK_NVFP4, QK_SCALE_AMAX, PV_MXFP4, MX_NEAREST, P_THRESHOLD, .9703, .242},
    {"NVFP4 + MXFP4 code space", QK_NVFP4, QK_SCALE_AMAX, PV_MXFP4, MX_NEAREST, P_CODE_SPACE, .9700, 0},
    {"NVFP4 + MXFP4 exact, OCP", QK_NVFP4, QK_SCALE_AMAX, PV_MXFP4, MX_OCP, P_EXACT, .9720, 0},
    {"fast: folded + MXFP4 affine", QK_NVFP4, QK_SCALE_FOLDED, PV_MXFP4, MX_NEAREST, P_AFFINE, .9440, .337},
    {"accurate: folded + MXFP4", QK_NVFP4, QK_SCALE_FOLDED, PV_MXFP4, MX_NEAREST, P_ACCURATE, .9515, .328},
};

static double norm_ratio(const bf16 *x, const double *y, int64_t n)
{
    double xx = 0;
    double yy = 0;
    for (int64_t i = 0; i < n; i++) {
        xx += (double)bf16_to_float(x[i]) * (double)bf16_to_float(x[i]);
        yy += y[i] * y[i];
    }
    return sqrt(xx / yy);
}

/* Exact O of the inputs that every route sees. */
static double *exact_output(const struct attention_shape *shape)
{
    struct attention_recipe recipe = attention_recipe_bf16();
    struct attention_case c;
    case_open(&c, shape, &recipe, INPUT_GAUSS, 1);
    double *exact = malloc(sizeof(double) * (size_t)case_queries(&c));
    struct oracle_problem p = {c.shape, &c.recipe, c.q, c.k, c.v, c.dout};
    oracle_exact(&p, exact, NULL, NULL, NULL);
    case_close(&c);
    return exact;
}

static void run_route(struct attention_case *c, const struct attention_shape *shape, const struct route *r)
{
    struct attention_recipe recipe = recipe_of(r->pv, BWD_REPRESENTED);
    recipe.qk = r->qk;
    recipe.qk_scale = r->scale;
    recipe.mx_rule = r->rule;
    recipe.p_map = r->map;
    case_open(c, shape, &recipe, INPUT_GAUSS, 1);
    case_forward(c);
}

static void show_routes(void)
{
    const struct attention_shape shape = {1, 1024, 16, 16, 128, false, 0.08838835f};
    double *exact = exact_output(&shape);
    printf(
        "## Forward routes\n\nS 1024, D 128, 16 heads, not causal, Gaussian, against exact FP64 attention of the same "
        "BF16 inputs. Tolerance: cosine .002, rel-L2 .006.\n\n"
        "| route | cosine | rel-L2 | norm ratio | expected cosine | expected rel-L2 | |\n"
        "|---|---|---|---|---|---|---|\n");
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++) {
        const struct route *r = &routes[i];
        struct attention_case c;
        run_route(&c, &shape, r);
        double cos = cosine(c.out, exact, case_queries(&c));
        double rel = rel_l2(c.out, exact, case_queries(&c));
        printf("| %s | %.4f | %.4f | %.3f | ", r->name, cos, rel, norm_ratio(c.out, exact, case_queries(&c)));
        if (r->cosine == 0) {
            printf("- | - | |\n");
        } else if (r->rel_l2 == 0) {
            printf("%.4f | - | %s |\n", r->cosine, verdict(fabs(cos - r->cosine) <= .002));
        } else {
            bool within = fabs(cos - r->cosine) <= .002 && fabs(rel - r->rel_l2) <= .006;
            printf("%.4f | %.4g | %s |\n", r->cosine, r->rel_l2, verdict(within));
        }
        fflush(stdout);
        case_close(&c);
    }
    free(exact);
    printf("\nThe published NVFP4 P/V figures use the true row maximum with G = 2688, or G = 1; no recipe can say that "
           "(they "
           "depend on the tile size). The training setting above, an integer anchor with G = 2^11, gives the same "
           "cosine.\n");
}

/* rel-L2 of rows [first, last) of all heads. */
static double rows_rel_l2(const struct attention_case *c, const double *exact, int64_t first, int64_t last)
{
    int64_t row = c->shape.heads * c->shape.head_dim;
    return rel_l2(c->out + first * row, exact + first * row, (last - first) * row);
}

/* The law's causal figures come without their inputs: shown beside ours, not judged. */
static void show_causal_routes(void)
{
    static const struct route causal[] = {
        {"NVFP4 + FP8", QK_NVFP4, QK_SCALE_AMAX, PV_FP8, MX_NEAREST, P_EXACT, .9960, .090},
        {"NVFP4 + MXFP4 exact", QK_NVFP4, QK_SCALE_AMAX, PV_MXFP4, MX_NEAREST, P_EXACT, .9834, .182},
        {"NVFP4 + MXFP4 affine", QK_NVFP4, QK_SCALE_AMAX, PV_MXFP4, MX_NEAREST, P_AFFINE, .9683, .252},
    };
    const struct attention_shape shape = {1, 1024, 16, 16, 128, true, 0.08838835f};
    double *exact = exact_output(&shape);
    printf(
        "\nThe same, causal, by rows. The law's figures for causal (last two columns) are not judged: it does not say "
        "on which rows or inputs, and independent Gaussian rows give the values on the left.\n\n"
        "| route | cosine | rel-L2 | rows 0-7 | 8-63 | 64-1023 | law: cosine | law: rel-L2 |\n"
        "|---|---|---|---|---|---|---|---|\n");
    for (size_t i = 0; i < sizeof causal / sizeof *causal; i++) {
        struct attention_case c;
        run_route(&c, &shape, &causal[i]);
        printf("| %s | %.4f | %.4f | %.4f | %.4f | %.4f | %.4f | %.3f |\n", causal[i].name,
               cosine(c.out, exact, case_queries(&c)), rel_l2(c.out, exact, case_queries(&c)),
               rows_rel_l2(&c, exact, 0, 8), rows_rel_l2(&c, exact, 8, 64), rows_rel_l2(&c, exact, 64, 1024),
               causal[i].cosine, causal[i].rel_l2);
        case_close(&c);
    }
    free(exact);
}

/* --- 2. Formats for probabilities --- */

enum p_format { P_NVFP4, P_MXFP4, P_FP8 };

struct range_row {
    const char *name;
    enum p_format format;
    int block;
    float g;           /* NVFP4: second-level scale; FP8: multiplier */
    enum mx_rule rule; /* MXFP4 */
    bool anchored;     /* P relative to an integer anchor, as our kernels hold it; else normalised to sum 1 */
};

static const struct range_row range_rows[] = {
    {"NVFP4 G=1, blocks of 32", P_NVFP4, 32, 1, 0, false},
    {"NVFP4 G=448, blocks of 32", P_NVFP4, 32, 448, 0, false},
    {"MXFP4, scale of least error", P_MXFP4, 32, 0, MX_OCP_MSE, false},
    {"ours: NVFP4 G=2^11", P_NVFP4, 16, 2048, 0, true},
    {"ours: MXFP4 nearest", P_MXFP4, 32, 0, MX_AMP_NEAREST, true},
    {"ours: MXFP4 OCP", P_MXFP4, 32, 0, MX_OCP_FLOOR, true},
    {"ours: FP8", P_FP8, 1, 256, 0, true},
};

/* The paper's figures: zero scales, zero payload, lost mass, P rel-L2, PV cosine. */
struct published {
    int s, row;
    double value[5];
};
static const struct published published[] = {
    {1024, 0, {.7063, .8318, .6838, 1.715, .7008}}, {1024, 1, {0, .1554, .0293, .1144, .9939}},
    {1024, 2, {0, .1887, .0402, .1464, .9898}},     {4096, 0, {.9961, .9994, .9943, 13.8, .2173}},
    {4096, 1, {0, .1565, .0298, .1141, .9937}},     {4096, 2, {0, .1898, .0405, .1472, .9893}},
    {8192, 2, {0, .1942, .0416, .1473, .9897}},
};

enum { RANGE_ROWS = 128, RANGE_D = 32 };

/* One block; returns whether its scale is zero. NVFP4 in blocks of up to 32, which nvfp4_round does not offer. */
static bool round_block(const struct range_row *r, const float *x, float *y)
{
    if (r->format == P_MXFP4) {
        mxfp4_round(x, r->block, 1, r->rule, y);
        return amax_of(x, r->block, 1) == 0;
    }
    if (r->format == P_FP8) {
        y[0] = e4m3_round(r->g * x[0]) / r->g;
        return false;
    }
    float scale = ue4m3_to_float(ue4m3_from_float(r->g * amax_of(x, r->block, 1) / 6));
    for (int i = 0; i < r->block; i++) {
        y[i] = scale > 0 ? e2m1_round(r->g * x[i] / scale) * scale / r->g : 0;
    }
    return scale == 0;
}

struct range_sums {
    double scales, zero_scales, codes, zero_codes, lost, rows, error, size, xy, xx, yy;
};

/* One row of exact probabilities p: rounds, renormalises from the represented P, multiplies the same V. */
static void range_one(const struct range_row *r, const double *p, const float *v, int s, struct range_sums *sums)
{
    float *x = malloc(sizeof(float) * (size_t)s);
    float *y = malloc(sizeof(float) * (size_t)s);
    double greatest = 0;
    for (int j = 0; j < s; j++) {
        greatest = fmax(greatest, p[j]);
    }
    double unit = r->anchored ? exp2(-ceil(log2(greatest))) : 1;
    double total = 0;
    for (int j = 0; j < s; j++) {
        x[j] = (float)(p[j] * unit);
    }
    for (int j = 0; j < s; j += r->block) {
        sums->scales++;
        sums->zero_scales += round_block(r, x + j, y + j);
    }
    for (int j = 0; j < s; j++) {
        total += (double)y[j];
        sums->zero_codes += y[j] == 0;
        sums->lost += y[j] == 0 ? p[j] : 0;
    }
    double scale = total > 0 ? 1 / total : 0;
    for (int j = 0; j < s; j++) {
        double difference = (double)y[j] * scale - p[j];
        sums->error += difference * difference;
        sums->size += p[j] * p[j];
    }
    for (int e = 0; e < RANGE_D; e++) {
        double a = 0;
        double b = 0;
        for (int j = 0; j < s; j++) {
            a += (double)y[j] * scale * (double)v[e * s + j];
            b += p[j] * (double)v[e * s + j];
        }
        sums->xy += a * b;
        sums->xx += a * a;
        sums->yy += b * b;
    }
    sums->codes += s;
    sums->rows++;
    free(x);
    free(y);
}

/* Measured beside published, where there is such a row. Tolerances: shares of blocks and payload .01, lost mass .01, P
 * rel-L2 5 % (a row that is almost all zeros: 20 %), cosine .004 (likewise .03): the inputs are not the paper's. */
static void show_range_row(int s, int row, const struct range_sums *sums)
{
    double cos = sums->xx > 0 ? sums->xy / sqrt(sums->xx * sums->yy) : 0;
    double value[5] = {sums->zero_scales / sums->scales, sums->zero_codes / sums->codes, sums->lost / sums->rows,
                       sqrt(sums->error / sums->size), cos};
    const char *mark = "";
    const struct published *paper = NULL;
    for (size_t i = 0; i < sizeof published / sizeof *published; i++) {
        if (published[i].s == s && published[i].row == row) {
            paper = &published[i];
        }
    }
    printf("| %d | %s ", s, range_rows[row].name);
    for (int i = 0; i < 5; i++) {
        printf("| %.4f", value[i]);
        if (paper != NULL) {
            printf(" (%.4g)", paper->value[i]);
        }
        printf(" ");
    }
    if (paper != NULL) {
        bool flushed = paper->value[0] > 0.5;
        bool within = fabs(value[0] - paper->value[0]) <= .01 && fabs(value[1] - paper->value[1]) <= .01 &&
                      fabs(value[2] - paper->value[2]) <= .01 &&
                      fabs(value[3] / paper->value[3] - 1) <= (flushed ? .2 : .05) &&
                      fabs(value[4] - paper->value[4]) <= (flushed ? .03 : .004);
        mark = verdict(within);
    }
    printf("| %s |\n", mark);
    fflush(stdout);
}

static void show_range(int s)
{
    float *v = malloc(sizeof(float) * (size_t)(s * RANGE_D));
    double *p = malloc(sizeof(double) * (size_t)s);
    struct range_sums sums[sizeof range_rows / sizeof *range_rows];
    memset(sums, 0, sizeof sums);
    for (int i = 0; i < s * RANGE_D; i++) {
        v[i] = rng_normal(2, rng_stream("bench/v"), (uint64_t)i);
    }
    for (int i = 0; i < RANGE_ROWS; i++) {
        double total = 0;
        for (int j = 0; j < s; j++) {
            p[j] = exp((double)rng_normal(2, rng_stream("bench/z"), (uint64_t)(i * s + j)));
            total += p[j];
        }
        for (int j = 0; j < s; j++) {
            p[j] /= total;
        }
        for (size_t r = 0; r < sizeof range_rows / sizeof *range_rows; r++) {
            range_one(&range_rows[r], p, v, s, &sums[r]);
        }
    }
    for (size_t r = 0; r < sizeof range_rows / sizeof *range_rows; r++) {
        show_range_row(s, (int)r, &sums[r]);
    }
    free(v);
    free(p);
}

static void show_ranges(void)
{
    printf("\n## Formats for probabilities\n\nExact softmax of Gaussian scores, %d rows, renormalised from the "
           "represented "
           "P, the same FP32 V. In brackets the paper's figure. Its NVFP4 rows are reproduced by blocks of 32 on "
           "probabilities that sum to 1, its MXFP4 rows by the power of two of least squared error.\n\n"
           "| S | format | zero scales | zero payload | lost mass | P rel-L2 | PV cosine | |\n"
           "|---|---|---|---|---|---|---|---|\n",
           RANGE_ROWS);
    static const int lengths[] = {1024, 4096, 8192};
    for (int i = 0; i < 3; i++) {
        show_range(lengths[i]);
    }
}

/* --- 3. Row leak --- */

/* How a row departs from its preset. PLAIN: dO in E4M3 and gradient views of the originals, as section 7 measured
 * saved_output; DECODED: r from that decoded dO too. */
enum departure { AS_PRESET, PLAIN, DECODED };

struct leak_row {
    const char *name;
    enum pv_format pv;
    enum backward_preset preset;
    enum departure departure;
    double lambda[INPUT_KINDS]; /* section 7; 0: not stated */
    double dq_gauss, dq_sink;   /* rel-L2 of dQ there; 0: not stated */
};

static const struct leak_row leak_rows[] = {
    {"bf16", PV_BF16, BWD_BF16, AS_PRESET, {2.1e-4, 1.1e-3, 3.8e-4, 8.3e-4, 1.4e-3}, 0, 0},
    {"represented fp8", PV_FP8, BWD_REPRESENTED, AS_PRESET, {1.6e-4, 8e-4, 2.5e-4, 6e-4, 1e-3}, .152, .156},
    {"represented mxfp4", PV_MXFP4, BWD_REPRESENTED, AS_PRESET, {1.6e-4, 8e-4, 2.5e-4, 6e-4, 1e-3}, .234, .438},
    {"represented nvfp4", PV_NVFP4, BWD_REPRESENTED, AS_PRESET, {1.6e-4, 8e-4, 2.5e-4, 6e-4, 1e-3}, 0, 0},
    {"represented fp4_ue5m3", PV_FP4_UE5M3, BWD_REPRESENTED, AS_PRESET, {1.6e-4, 8e-4, 2.5e-4, 6e-4, 1e-3}, 0, 0},
    {"recentred fp8", PV_FP8, BWD_RECENTRED, AS_PRESET, {0}, 0, 0},
    {"recentred mxfp4", PV_MXFP4, BWD_RECENTRED, AS_PRESET, {0}, 0, 0},
    {"exact_stat fp8", PV_FP8, BWD_EXACT_STAT, AS_PRESET, {1.6e-4, 7.5e-4, 2.5e-4, 5.5e-4, 9.6e-4}, .141, .160},
    {"exact_stat mxfp4", PV_MXFP4, BWD_EXACT_STAT, AS_PRESET, {1.6e-4, 7.5e-4, 2.5e-4, 5.5e-4, 9.6e-4}, .141, .160},
    {"saved_output fp8, plain", PV_FP8, BWD_SAVED_OUTPUT, PLAIN, {4.4e-3, 1.6e-2, 5.5e-3, 1.3e-2, 2.2e-2}, .145, .170},
    {"saved_output mxfp4, plain",
     PV_MXFP4,
     BWD_SAVED_OUTPUT,
     PLAIN,
     {1.8e-2, 8.4e-2, 9.9e-2, 6.5e-2, 1e-1},
     .157,
     1.13},
    {"saved_output nvfp4, plain", PV_NVFP4, BWD_SAVED_OUTPUT, PLAIN, {1.3e-2, 5.8e-2, 9.7e-2, 4.1e-2, 7.4e-2}, 0, 0},
    {"saved_output fp8, decoded dO", PV_FP8, BWD_SAVED_OUTPUT, DECODED, {0}, 0, 0},
    {"saved_output fp8", PV_FP8, BWD_SAVED_OUTPUT, AS_PRESET, {6.4e-3, 3.1e-2, 0, 0, 4e-2}, 0, 0},
    {"saved_output mxfp4", PV_MXFP4, BWD_SAVED_OUTPUT, AS_PRESET, {0}, 0, 0},
    {"saved_output nvfp4", PV_NVFP4, BWD_SAVED_OUTPUT, AS_PRESET, {0}, 0, 0},
    {"saved_output_fixed fp8", PV_FP8, BWD_SAVED_OUTPUT_FIXED, AS_PRESET, {0}, 0, 0},
    {"saved_output_fixed mxfp4", PV_MXFP4, BWD_SAVED_OUTPUT_FIXED, AS_PRESET, {0}, 0, 0},
};

static const struct attention_shape leak_shape = {1, 1024, 2, 2, 128, true, 0.08838835f};

struct exact_gradients {
    double *out, *dq, *dk, *dv;
};

static bool near(double value, double expected, double factor)
{
    return expected == 0 || (value < expected * factor && value > expected / factor);
}

/* lambda within a factor of 1.3 of section 7 (its inputs were drawn otherwise), dQ within 15 %; a recentred row leaks
 * nothing but FP32. Rows without a figure are not judged. */
static const char *leak_verdict(const struct leak_row *row, enum input_kind kind, double lambda, double dq)
{
    double dq_expected = kind == INPUT_GAUSS ? row->dq_gauss : kind == INPUT_SINK ? row->dq_sink : 0;
    if (row->preset == BWD_RECENTRED) {
        return verdict(lambda < 1e-6);
    }
    if (row->lambda[kind] == 0) {
        return "";
    }
    return verdict(near(lambda, row->lambda[kind], 1.3) && near(dq, dq_expected, 1.15));
}

static void make_plain(struct attention_recipe *recipe)
{
    recipe->do_format = DO_E4M3;
    recipe->qk_grad = QK_GRAD_ORIGINAL;
}

static void run_backward(struct attention_case *c, enum input_kind kind, const struct leak_row *row)
{
    struct attention_recipe recipe = recipe_of(row->pv, row->preset);
    if (row->departure != AS_PRESET) {
        make_plain(&recipe);
    }
    if (row->departure == DECODED) {
        recipe.bwd_stat = BWD_STAT_SAVED;
    }
    case_open(c, &leak_shape, &recipe, kind, 3);
    case_forward(c);
    case_backward(c);
}

static void show_leak(enum input_kind kind, const struct leak_row *row, const struct exact_gradients *exact)
{
    struct attention_case c;
    run_backward(&c, kind, row);
    const struct attention_stats *s = &c.stats;
    double lambda = s->leak_abs / s->ds_abs;
    double dq = rel_l2(c.dq, exact->dq, case_queries(&c));
    printf("| %s | %s | %.1e ", input_names[kind], row->name, lambda);
    if (row->lambda[kind] > 0) {
        printf("(%.1e) ", row->lambda[kind]);
    }
    printf("| %.1e | %+.1e | %.4f | %.0f | %.4f | %.3f | %.3f | %.3f | %.4f | %s |\n",
           s->leak_stored_abs / s->ds_stored_abs, s->leak_r / s->r_r, s->ds_flushed / s->ds_count, s->ds_saturated,
           s->p_lost_mass / s->p_rows, dq, rel_l2(c.dk, exact->dk, case_keys(&c)),
           rel_l2(c.dv, exact->dv, case_keys(&c)), cosine(c.out, exact->out, case_queries(&c)),
           leak_verdict(row, kind, lambda, dq));
    fflush(stdout);
    case_close(&c);
}

static void show_leaks(void)
{
    printf(
        "\n## Row leak\n\nCausal, T 1024, D 128, 2 heads. lambda before dS is stored (in brackets section 7's) and "
        "after; "
        "slope b; share of dS flushed, number saturated; probability mass with code 0; rel-L2 of the gradients and "
        "cosine of O against exact attention. \"plain\": dO in E4M3 and gradient views of the originals, which is "
        "what section 7's table shows; its figures \"from the raw dO\" are the preset's E5M2 dO. Tolerance: lambda a "
        "factor of 1.3, dQ 15 %%.\n\n"
        "| input | backward | lambda | stored | b | flushed | saturated | lost mass | dQ | dK | dV | O cosine | |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|\n");
    for (int kind = 0; kind < INPUT_KINDS; kind++) {
        struct attention_recipe recipe = attention_recipe_bf16();
        struct attention_case c;
        case_open(&c, &leak_shape, &recipe, kind, 3);
        size_t size = sizeof(double) * (size_t)case_queries(&c);
        struct exact_gradients exact = {malloc(size), malloc(size), malloc(size), malloc(size)};
        struct oracle_problem p = {c.shape, &c.recipe, c.q, c.k, c.v, c.dout};
        oracle_exact(&p, exact.out, exact.dq, exact.dk, exact.dv);
        for (size_t i = 0; i < sizeof leak_rows / sizeof *leak_rows; i++) {
            show_leak(kind, &leak_rows[i], &exact);
        }
        free(exact.out);
        free(exact.dq);
        free(exact.dk);
        free(exact.dv);
        case_close(&c);
    }
}

/* The biased part of the leak shows when dO points along the exact O. */
static void show_slopes(void)
{
    static const struct {
        const char *name;
        enum pv_format pv;
        enum mx_family rule;
        enum backward_preset preset;
        double low, high; /* of b: section 7 within a factor of 2 (FP8: 6); both 0: shown, not judged */
    } rows[] = {
        {"represented fp8", PV_FP8, MX_NEAREST, BWD_REPRESENTED, -5e-4, 5e-4},
        {"represented mxfp4 nearest", PV_MXFP4, MX_NEAREST, BWD_REPRESENTED, -5e-4, 5e-4},
        {"represented mxfp4 ocp", PV_MXFP4, MX_OCP, BWD_REPRESENTED, -5e-4, 5e-4},
        {"represented nvfp4", PV_NVFP4, MX_NEAREST, BWD_REPRESENTED, -5e-4, 5e-4},
        {"saved_output fp8, plain", PV_FP8, MX_NEAREST, BWD_SAVED_OUTPUT, -5e-3, 5e-3},
        {"saved_output mxfp4 nearest, plain", PV_MXFP4, MX_NEAREST, BWD_SAVED_OUTPUT, .1, .42},
        {"saved_output mxfp4 ocp, plain", PV_MXFP4, MX_OCP, BWD_SAVED_OUTPUT, .17, .7},
        {"saved_output nvfp4, plain", PV_NVFP4, MX_NEAREST, BWD_SAVED_OUTPUT, 0, 0},
    };
    printf(
        "\nSlope b with dO along the exact O, sink inputs. Section 7: represented below 5e-4; saved_output MXFP4 .21 "
        "(nearest) to .35 (OCP), NVFP4 .03 (not reproduced on this sink, not judged), FP8 8e-4.\n\n| backward | b | "
        "lambda | |\n|---|---|---|---|\n");
    double *exact = NULL;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct attention_recipe recipe = recipe_of(rows[i].pv, rows[i].preset);
        recipe.mx_rule = rows[i].rule;
        struct attention_case c;
        if (rows[i].preset == BWD_SAVED_OUTPUT) {
            make_plain(&recipe);
        }
        case_open(&c, &leak_shape, &recipe, INPUT_SINK, 3);
        if (exact == NULL) {
            struct oracle_problem p = {c.shape, &c.recipe, c.q, c.k, c.v, c.dout};
            exact = malloc(sizeof(double) * (size_t)case_queries(&c));
            oracle_exact(&p, exact, NULL, NULL, NULL);
        }
        for (int64_t j = 0; j < case_queries(&c); j++) {
            c.dout[j] = bf16_from_float(ldexpf((float)exact[j], -10));
        }
        case_forward(&c);
        case_backward(&c);
        double b = c.stats.leak_r / c.stats.r_r;
        printf("| %s | %+.1e | %.1e | %s |\n", rows[i].name, b, c.stats.leak_abs / c.stats.ds_abs,
               rows[i].high > 0 ? verdict(b >= rows[i].low && b <= rows[i].high) : "");
        case_close(&c);
    }
    free(exact);
}

int main(void)
{
    show_routes();
    show_causal_routes();
    show_ranges();
    show_leaks();
    show_slopes();
    printf("\n%d checks, %d missed\n", checks, misses);
    return misses > 0;
}
