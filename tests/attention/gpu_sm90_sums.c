/* The codes that the Hopper kernels make of E4M3 scores, where the product itself is rounded: every one must be what
 * the reference's map makes of scores by the model of the tensor core's sum (wgmma_sum.h), but where a score lies on a
 * boundary within the roundings that follow in FP32, and those are at most 1e-4 (docs/numerics.md, sections 10 and 17).
 * Codes are read off outputs as in gpu_sm90_codes.c. Beside it, for the log: how many exact sums would explain. */
#include "tests/attention/gpu_sm90_check.h"
#include "tests/attention/gpu_sm90_model.h"

#include <limits.h>

enum {
    TOKENS = 300,
    HEADS = 4,
    KV_HEADS = 2,
    GROUP = HEADS / KV_HEADS,
    WINDOW = 128, /* keys, or queries, that one output shows; and keys between two looks at the forward's anchor */
    BLOCKS = (TOKENS + 31) / 32,
    ROWS = HEADS * TOKENS,
    LEFT_OUT = -(1 << 20),
};

/* Operands of the scores as the kernel has them: value = code times inverse. */
struct operands {
    uint8_t q[ROWS * D], k[KV_HEADS * TOKENS * D];
    float q_inverse[HEADS], k_inverse[KV_HEADS];
};

/* Codes of P of all rows, and what a code is relative to: 2^grid, or LEFT_OUT. */
struct codes {
    uint8_t code[ROWS][TOKENS];
    int grid[ROWS][BLOCKS];
};

/* Scores by the model; the same, moved by what FP32 may round; exact sums. */
enum set { MODEL, ABOVE, BELOW, EXACT, SETS };

struct scores {
    float t[SETS][ROWS][TOKENS];
};

struct tally {
    int64_t codes, differ, unexplained, inexact; /* all; not the model's; nor of scores moved; not of exact sums */
    int64_t left_out;
    int complaints;
};

static int tally_judge(const char *what, const struct attention_recipe *recipe, const struct tally *t)
{
    print_message(
        "%-8s %s %s %s %s: of %lld codes %lld are not the model's (%.1e), %lld unexplained; %lld not those of "
        "exact sums (%.1e); %lld left out\n",
        what, pv_format_names[recipe->pv], mx_family_names[recipe->mx_rule], p_map_names[recipe->p_map],
        backward_preset_names[recipe->backward], (long long)t->codes, (long long)t->differ,
        (double)t->differ / (double)t->codes, (long long)t->unexplained, (long long)t->inexact,
        (double)t->inexact / (double)t->codes, (long long)t->left_out);
    const bool empty = t->codes == 0 && !*gpu_small();
    return t->complaints > 0 || empty || t->unexplained > 0 || (double)t->differ > 1e-4 * (double)t->codes;
}

/* ---- scores ------------------------------------------------------------------------------------------------ */

static float exact_sum(const uint8_t *a, const uint8_t *b)
{
    double sum = 0;
    for (int d = 0; d < D; d++) {
        sum += (double)e4m3_to_float(a[d]) * (double)e4m3_to_float(b[d]);
    }
    return (float)sum;
}

/* Base-2 scores. Kernel and reference then round in different places, each some 2^-24 of |t|, and take powers of two
 * within 2^-22. */
static void scores_of(const struct operands *x, float softmax_scale, struct scores *s)
{
    const float c = (float)((double)softmax_scale * M_LOG2E);
#pragma omp parallel for schedule(dynamic)
    for (int row = 0; row < ROWS; row++) {
        const int head = row / TOKENS, kv = head / GROUP;
        const float factor = c * x->q_inverse[head] * x->k_inverse[kv];
        for (int j = 0; j <= row % TOKENS; j++) {
            const uint8_t *q = x->q + row * D, *k = x->k + (kv * TOKENS + j) * D;
            const float t = factor * wgmma_sum(WGMMA_E4M3, q, WGMMA_E4M3, k, D, 0);
            const float slack = fabsf(t) * 0x1p-23f + 0x1p-21f;
            s->t[MODEL][row][j] = t;
            s->t[ABOVE][row][j] = t + slack;
            s->t[BELOW][row][j] = t - slack;
            s->t[EXACT][row][j] = factor * exact_sum(q, k);
        }
    }
}

/* The reference's map of n visible scores from key `first` on. */
static void map_row(const struct attention_recipe *recipe, const float *t, int first, int n, float reference,
                    float anchor, bool rebuilt, uint8_t *codes, int *grid)
{
    float row[BLOCKS * 32];
    int16_t exponents[BLOCKS];
    for (int j = 0; j < (n + 31) / 32 * 32; j++) {
        row[j] = j < n ? t[first + j] : ATTENTION_MASKED;
    }
    p_row_publish(recipe, &(struct p_row){.t = row,
                                          .first_key = first,
                                          .visible = n,
                                          .n = n,
                                          .reference = reference,
                                          .anchor = anchor,
                                          .rebuilt = rebuilt,
                                          .codes = codes + first,
                                          .exponents = recipe->pv == PV_MXFP4 ? exponents : NULL});
    for (int b = 0; b < (n + 31) / 32; b++) {
        grid[first / 32 + b] = recipe->pv == PV_MXFP4 ? exponents[b] : (int)reference - (rebuilt ? 7 : 8);
    }
}

static float largest(const float *t, int n)
{
    float max, magnitude;
    score_range(t, n, &max, &magnitude);
    return max;
}

/* ---- codes that were read ---------------------------------------------------------------------------------- */

/* A probability off an output. Its code: in units of 2^(grid - reference). */
struct reading {
    double value;
    int reference;
    bool eights, cut; /* E4M3, else E2M1; cut: values below 2^-15 are whole multiples of 2^-16, rounded towards zero */
};

static bool agrees(const struct codes *e, int row, int key, const struct reading *r)
{
    const int up = e->grid[row][key / 32] - r->reference, code = e->code[row][key];
    const float x = (float)ldexp(r->value, -up);
    if (r->cut && up < -15) {
        return lround(ldexp(r->value, 16)) == (long)ldexp((double)e2m1_to_float((uint8_t)code), up + 16);
    }
    return code == (r->eights ? e4m3_from_float(x) : e2m1_from_float(x));
}

static void tally_add(struct tally *t, const struct codes *expected, int row, int key, struct reading r)
{
    if (expected[MODEL].grid[row][key / 32] == LEFT_OUT) {
        t->left_out++;
        return;
    }
    const bool same = agrees(&expected[MODEL], row, key, &r);
    t->codes++;
    t->differ += !same;
    t->unexplained += !same && !agrees(&expected[ABOVE], row, key, &r) && !agrees(&expected[BELOW], row, key, &r);
    t->inexact += !agrees(&expected[EXACT], row, key, &r);
}

/* ---- forward: V = one key in each feature, O = P / L ------------------------------------------------------- */

/* From a row's last block of keys to its first. FP8 codes are relative to the anchor so far. MXFP4: blocks 26 binades
 * below the largest so far are coded otherwise (docs/numerics.md, section 16), and are not looked at. */
static void forward_row(const struct attention_recipe *recipe, const float *t, int visible, uint8_t *codes, int *grid)
{
    float anchor = -INFINITY;
    int most = INT_MIN / 2;
    for (int first = (visible - 1) / WINDOW * WINDOW; first >= 0; first -= WINDOW) {
        const int n = visible - first < WINDOW ? visible - first : WINDOW;
        anchor = fmaxf(anchor, ceilf(largest(t + first, n)));
        map_row(recipe, t, first, n, anchor, anchor, false, codes, grid);
        for (int pass = 0; recipe->pv == PV_MXFP4 && pass < 2; pass++) {
            for (int b = first / 32; b < (first + n + 31) / 32; b++) {
                most = grid[b] > most ? grid[b] : most;
                grid[b] = pass == 1 && grid[b] < most - 26 ? LEFT_OUT : grid[b];
            }
        }
    }
}

/* x (T, heads, D) = 1 where the feature is token - first, in heads with head % of == turn; else 0. */
static void one_hot(bf16 *x, int heads, int first, int of, int turn)
{
    for (int i = 0; i < TOKENS * heads * D; i++) {
        x[i] = i / D / heads - first == i % D && i / D % heads % of == turn ? 0x3f80 : 0;
    }
}

/* What the forward of `c` publishes, from the image of a call that has run. */
static void published(const struct gpu_case *g, struct operands *x)
{
    const struct cuda *on = g->gpu->cuda;
    const struct attention_operands_sm90 from = published_again(g);
    cuda_download(on, x->q, from.q8, sizeof x->q);
    cuda_download(on, x->k, from.k8, sizeof x->k);
    cuda_download(on, x->q_inverse, from.q_inverse, sizeof x->q_inverse);
    cuda_download(on, x->k_inverse, from.k_inverse, sizeof x->k_inverse);
    assert_int_equal(cuda_sync(on, "operands"), OK);
}

static void read_forward(const struct gpu_case *g, const struct codes *expected, int first, struct tally *t)
{
    const bool eights = g->c->recipe.pv == PV_FP8;
    for (int row = 0; row < ROWS; row++) {
        const int head = row / TOKENS, i = row % TOKENS;
        const double p_of_o = exp2((double)g->got_lse[row]) * (double)attention_unit(&g->c->recipe);
        for (int j = first; j < first + WINDOW && j <= i; j++) {
            const double o = (double)bf16_to_float(g->got[OUT][(i * HEADS + head) * D + j - first]);
            tally_add(t, expected, row, j, (struct reading){p_of_o * o, 0, eights, false});
        }
    }
}

/* What one input kind needs; large. */
struct work {
    struct operands operands;
    struct scores scores;
    struct codes expected[SETS];
};

static void forward_kind(struct gpu *gpu, const struct attention_recipe *recipe, enum input_kind kind, struct work *w,
                         struct tally *t)
{
    const struct attention_shape s = shape_of(1, TOKENS, HEADS, KV_HEADS, true);
    struct attention_case c;
    case_open(&c, &s, recipe, kind, 99);
    for (int first = 0; first < TOKENS; first += WINDOW) {
        struct gpu_case g;
        one_hot(c.v, KV_HEADS, first, 1, 0);
        gpu_case_open(&g, gpu, &c, APART, FORWARD);
        t->complaints += gpu_case_run(&g);
        if (first == 0) {
            published(&g, &w->operands);
            scores_of(&w->operands, s.softmax_scale, &w->scores);
            for (int i = 0; i < SETS * ROWS; i++) {
                struct codes *to = &w->expected[i / ROWS];
                const int row = i % ROWS;
                forward_row(recipe, w->scores.t[i / ROWS][row], row % TOKENS + 1, to->code[row], to->grid[row]);
            }
        }
        read_forward(&g, w->expected, first, t);
        gpu_case_close(&g);
    }
    case_close(&c);
}

/* FP8, then MXFP4 by rule and map. */
static struct attention_recipe forward_recipe(int i)
{
    struct attention_recipe recipe = recipe_of(i == 0 ? PV_FP8 : PV_MXFP4, BWD_REPRESENTED);
    static const enum p_map maps[] = {P_EXACT, P_CODE_SPACE, P_AFFINE};
    recipe.qk = QK_NVFP4_E4M3;
    recipe.mx_rule = i > 3 ? MX_OCP : MX_NEAREST;
    recipe.p_map = i == 0 ? P_EXACT : maps[(i - 1) % 3];
    return recipe;
}

/* All inputs of all recipes of a pass. */
static void judge_pass(struct gpu *gpu, const char *pass, int recipes, struct attention_recipe (*recipe_of_row)(int),
                       void (*count)(struct gpu *, const struct attention_recipe *, enum input_kind, struct work *,
                                     struct tally *))
{
    struct work *w = malloc(sizeof *w);
    int bad = 0;
    for (int i = 0; i < recipes; i++) {
        const struct attention_recipe recipe = recipe_of_row(i);
        struct tally t = {0};
        for (int kind = 0; kind < INPUT_KINDS; kind++) {
            if (!gpu_leaves_out(7)) {
                count(gpu, &recipe, (enum input_kind)kind, w, &t);
            }
        }
        bad += tally_judge(pass, &recipe, &t);
    }
    free(w);
    assert_int_equal(bad, 0);
}

static void forward_codes(void **state)
{
    judge_pass(*state, "forward", 7, forward_recipe, forward_kind);
}

/* ---- backward: dO = one query in each feature of one head of a group, dV = P dO ---------------------------- */

static float lower(bf16 *x, int n, uint8_t *codes)
{
    const float m = pow2_scale(rows_amax((struct rows){x, D}, n / D, D), E4M3_MAX);
    for (int i = 0; i < n; i++) {
        codes[i] = e4m3_from_float(bf16_to_float(x[i]) * m);
    }
    return 1 / m;
}

/* From the saved operands; of each head the power of two that the forward took. */
static void saved_operands(const struct attention_case *c, struct operands *x)
{
    const struct attention_saved saved =
        attention_saved_carve(&c->shape, &c->recipe, &(struct carve){.base = c->saved});
    for (int head = 0; head < HEADS; head++) {
        x->q_inverse[head] = lower(saved.q + head * TOKENS * D, TOKENS * D, x->q + head * TOKENS * D);
    }
    for (int kv = 0; kv < KV_HEADS; kv++) {
        x->k_inverse[kv] = lower(saved.k + kv * TOKENS * D, TOKENS * D, x->k + kv * TOKENS * D);
    }
}

static void backward_row(const struct attention_recipe *recipe, const float *t, int n, float lse, uint8_t *codes,
                         int *grid)
{
    if (recipe->bwd_p == BWD_P_CODES) {
        map_row(recipe, t, 0, n, floorf(lse), ceilf(largest(t, n)), true, codes, grid);
        return;
    }
    for (int j = 0; j < n; j++) {
        codes[j] = e4m3_from_float(exp2f(t[j] - lse) * 256);
        grid[j / 32] = -8;
    }
}

/* dO as the recipe stores a 1 of this row. */
static double stored_one(const struct attention_recipe *recipe, float lse)
{
    const float fold = recipe->bwd_p == BWD_P_CODES ? exp2f(floorf(lse) - lse) : 1.0f;
    return (double)(recipe->do_format == DO_E4M3 ? e4m3_round(fold * 256) / 256 : e5m2_round(fold * 4) / 4);
}

/* `head` of each group, queries from `first` on. MXFP4 codes are multiplied as q 2^(E - n) in E5M2, which cuts off what
 * lies below its least number, 2^-16. */
static void read_backward(const struct gpu_case *g, const struct codes *expected, int first, int head, struct tally *t)
{
    const struct attention_case *c = g->c;
    const bool codes = c->recipe.bwd_p == BWD_P_CODES, eights = c->recipe.pv == PV_FP8 || !codes;
    for (int i = 0; i < KV_HEADS * WINDOW * TOKENS; i++) {
        const int kv = i / WINDOW / TOKENS, key = i / WINDOW % TOKENS, query = first + i % WINDOW;
        const int row = (kv * GROUP + head) * TOKENS + query;
        if (query >= TOKENS || key > query) {
            continue;
        }
        const float lse = c->lse_log2[row];
        const double dv = (double)bf16_to_float(g->got[OUT_DV][(key * KV_HEADS + kv) * D + query - first]);
        const double p = dv / stored_one(&c->recipe, lse) * (codes ? (double)attention_unit(&c->recipe) : 1);
        tally_add(t, expected, row, key, (struct reading){p, codes ? (int)floorf(lse) : 0, eights, !eights});
    }
}

static void backward_kind(struct gpu *gpu, const struct attention_recipe *recipe, enum input_kind kind, struct work *w,
                          struct tally *t)
{
    const struct attention_shape s = shape_of(1, TOKENS, HEADS, KV_HEADS, true);
    struct attention_case c;
    case_open(&c, &s, recipe, kind, 17);
    case_forward(&c);
    saved_operands(&c, &w->operands);
    scores_of(&w->operands, s.softmax_scale, &w->scores);
    for (int i = 0; i < SETS * ROWS; i++) {
        struct codes *to = &w->expected[i / ROWS];
        const int row = i % ROWS;
        backward_row(recipe, w->scores.t[i / ROWS][row], row % TOKENS + 1, c.lse_log2[row], to->code[row],
                     to->grid[row]);
    }
    for (int first = 0, turn = 0; first < TOKENS; first += WINDOW, turn++) {
        struct gpu_case g;
        one_hot(c.dout, HEADS, first, GROUP, turn % GROUP);
        gpu_case_open(&g, gpu, &c, APART, BACKWARD);
        t->complaints += gpu_case_run(&g);
        read_backward(&g, w->expected, first, turn % GROUP, t);
        gpu_case_close(&g);
    }
    case_close(&c);
}

/* FP8, MXFP4 of both families; exp2(t - LSE2) in FP8; MXFP4 by family and map. */
static struct attention_recipe backward_recipe(int i)
{
    struct attention_recipe recipe =
        recipe_of(i % 3 == 0 && i < 5 ? PV_FP8 : PV_MXFP4, i < 3 || i > 4 ? BWD_REPRESENTED : BWD_SAVED_OUTPUT);
    recipe.qk = QK_NVFP4_E4M3;
    recipe.mx_rule = i == 2 || i == 6 || i == 8 ? MX_OCP : MX_NEAREST;
    recipe.p_map = i < 5 ? P_EXACT : i < 7 ? P_CODE_SPACE : P_AFFINE;
    return recipe;
}

static void backward_codes(void **state)
{
    judge_pass(*state, "backward", 9, backward_recipe, backward_kind);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(forward_codes), cmocka_unit_test(backward_codes)};
    gpu_arguments(argc, argv);
    return cmocka_run_group_tests(tests, gpu_open_state, gpu_close_state);
}
