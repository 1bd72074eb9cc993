/* tests/attention: the Hopper passes beside the CPU reference's, for gpu_sm90_*.c. Complaints are printed and counted,
 * so that one run shows all that fails. */
#pragma once

#include "tests/attention/gpu_sm90.h"

static inline int gpu_open_state(void **state)
{
    struct gpu *gpu = calloc(1, sizeof *gpu);
    gpu->cuda = gpu_open();
    *state = gpu;
    return 0;
}

static inline int gpu_close_state(void **state)
{
    struct gpu *gpu = *state;
    cuda_free(gpu->device);
    free(gpu->before);
    free(gpu->after);
    cuda_close(gpu->cuda);
    free(gpu);
    return 0;
}

/* What tells the kernels apart. */
struct route {
    enum qk_format qk;
    enum pv_format pv;
    enum backward_preset backward;
};

static inline struct attention_recipe recipe_of_route(struct route route)
{
    struct attention_recipe recipe = recipe_of(route.pv, route.backward);
    recipe.qk = route.qk;
    return recipe;
}

static inline struct attention_shape shape_of(int64_t batch, int64_t tokens, int64_t heads, int64_t kv_heads,
                                              bool causal)
{
    return (struct attention_shape){batch, tokens, heads, kv_heads, D, causal, 0.08838834764f};
}

/* What a test saw, for its log; `factor` multiplies its bounds (0: 1). */
struct seen {
    double out, lse, dq, dk, dv; /* largest relative L2 difference; of LSE2, largest difference */
    int64_t rows, touched, cases;
    double factor;
};

static inline void seen_print(const char *what, const struct seen *s)
{
    if (s->rows > 0) {
        print_message("%s: %lld cases: out %.1e, LSE2 %.1e, %lld of %lld rows touched\n", what, (long long)s->cases,
                      s->out, s->lse, (long long)s->touched, (long long)s->rows);
    }
    if (s->dv > 0) {
        print_message("%s: %lld cases: dq %.1e dk %.1e dv %.1e\n", what, (long long)s->cases, s->dq, s->dk, s->dv);
    }
}

static inline void describe(const struct gpu_case *g, const char *input, char *text, size_t bytes)
{
    const struct attention_shape *s = &g->c->shape;
    static const char *const layouts[] = {"", " fused", " spread"};
    char recipe[512];
    attention_recipe_print(&g->c->recipe, recipe, sizeof recipe);
    snprintf(text, bytes, "T %d B %d heads %d/%d %s %s%s%s %.80s %s%s%s", (int)s->tokens, (int)s->batch, (int)s->heads,
             (int)s->kv_heads, s->causal ? "causal" : "full", input, layouts[g->layout],
             g->unordered ? " unordered" : "", recipe, backward_preset_names[g->c->recipe.backward],
             g->c->recipe.k_center ? " k_center" : "", g->c->recipe.dk_center ? " dk_center" : "");
}

static inline double norm_of(const bf16 *x, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += (double)bf16_to_float(x[i]) * (double)bf16_to_float(x[i]);
    }
    return sqrt(sum);
}

/* Relative L2 of n elements, over at least `least`, and where the largest difference is; a NaN: infinite. */
static inline double difference(const bf16 *x, const bf16 *y, int64_t n, double least, int64_t *at)
{
    double squares = 0, worst = 0;
    *at = 0;
    for (int64_t i = 0; i < n; i++) {
        double e = fabs((double)bf16_to_float(x[i]) - (double)bf16_to_float(y[i]));
        if (!(e <= worst)) {
            worst = e;
            *at = i;
        }
        squares += e * e;
    }
    double rel = squares == 0 ? 0 : sqrt(squares) / fmax(norm_of(y, n), least);
    return rel <= INFINITY ? rel : INFINITY;
}

static inline int judge(const char *what, const char *tensor, const bf16 *x, const bf16 *y, int64_t n, double bound,
                        double least, double *most)
{
    int64_t at;
    double rel = difference(x, y, n, least, &at);
    *most = fmax(*most, rel);
    if (rel <= bound) {
        return 0;
    }
    print_message("%s: %s rel-L2 %.2e, worst at %lld (%g, expected %g)\n", what, tensor, rel, (long long)at,
                  (double)bf16_to_float(x[at]), (double)bf16_to_float(y[at]));
    return 1;
}

/* ---- forward ----------------------------------------------------------------------------------------------- */

/* A route with codes touches a row where a code differs, because a score fell on the other side of a boundary: then O
 * and LSE2 move by up to that code's share. Scores of BF16 operands differ in the last bits, those of E4M3 by 2^-13 of
 * the largest product, which flips one code in a thousand. */
#define LSE_TOUCHED 2e-3

static inline double lse_difference(const struct gpu_case *g, struct seen *seen)
{
    double worst = 0;
    for (size_t i = 0; i < lse_bytes(g) / sizeof(float); i++) {
        const double y = (double)g->c->lse_log2[i];
        double error = fabs((double)g->got_lse[i] - y) / fmax(1, fabs(y) / 16); /* FP32 scores: 2^-24 of themselves */
        seen->rows++;
        seen->touched += !(error <= LSE_TOUCHED);
        worst = error <= worst ? worst : error;
    }
    seen->lse = fmax(seen->lse, worst);
    return worst;
}

/* pv = bf16: both sides round P to BF16, relative to different references, and sum in different orders: P differs by
 * 2^-8 of itself, so o by 2^-8 sum p |v| <= 2^-8 max |v| at worst, and one more BF16 rounding. LSE2: ex2 within 2^-22,
 * sums of FP32. */
static inline int compare_forward(const struct gpu_case *g, const char *what, struct seen *seen)
{
    const struct attention_case *c = g->c;
    const bool codes = c->recipe.pv != PV_BF16, rough = c->recipe.qk == QK_NVFP4_E4M3;
    const double lse = lse_difference(g, seen);
    double v_max = 0, worst = 0;
    for (int64_t i = 0; i < case_keys(c); i++) {
        v_max = fmax(v_max, fabs((double)bf16_to_float(c->v[i])));
    }
    for (int64_t i = 0; i < case_queries(c); i++) {
        double y = (double)bf16_to_float(c->out[i]);
        double error = fabs((double)bf16_to_float(g->got[OUT][i]) - y) - 0x1p-7 * fabs(y);
        worst = error <= worst ? worst : error;
    }
    int bad = judge(what, "out", g->got[OUT], c->out, case_queries(c),
                    rough   ? 3e-2
                    : codes ? 8e-3
                            : 4e-3,
                    0, &seen->out);
    if (!(worst <= (codes ? 0.3 : 0x1p-8) * v_max) || !(lse <= (codes ? 0.7 : 2e-5))) {
        print_message("%s: largest error of out %g (values up to %g), of LSE2 %g\n", what, worst, v_max, lse);
        bad++;
    }
    return bad;
}

/* Two runs: equal bits; and beside the reference. The saved operands of the backward: bit for bit the reference's. */
static inline int check_forward(struct gpu *gpu, const struct attention_case *c, const char *input, enum layout layout,
                                struct seen *seen)
{
    struct gpu_case g;
    char what[256];
    gpu_case_open(&g, gpu, c, layout, FORWARD);
    g.inference = layout == FUSED;
    describe(&g, input, what, sizeof what);
    int bad = gpu_case_run(&g);
    bf16 *out = g.got[OUT];
    float *lse = g.got_lse;
    g.got[OUT] = malloc(tensor_bytes(&g, OUT));
    g.got_lse = malloc(lse_bytes(&g));
    bad += gpu_case_run(&g);
    if (memcmp(out, g.got[OUT], tensor_bytes(&g, OUT)) != 0 || memcmp(lse, g.got_lse, lse_bytes(&g)) != 0) {
        print_message("%s: two runs of the forward differ\n", what);
        bad++;
    }
    free(out);
    free(lse);
    bad += compare_forward(&g, what, seen);
    size_t saved = g.inference ? 0 : attention_saved_bytes_cpu(&c->shape, &c->recipe);
    if (memcmp(g.got_saved, c->saved, saved) != 0) {
        print_message("%s: the saved state differs\n", what);
        bad++;
    }
    seen->cases++;
    gpu_case_close(&g);
    return bad;
}

/* ---- backward ---------------------------------------------------------------------------------------------- */

/* BF16: both sides round P and dS to BF16 before the products. They differ where ex2 (2^-22) or the order of a sum
 * moves a value over a rounding boundary: a small share of 2^-9, and the final rounding likewise.
 * FP8: tensor cores keep about 14 bits of a running sum, truncating: dP moves by some 2^-10 of itself, which turns
 * one to three stored dS in 1000 to the neighbouring code, 2^-4 away. A few tokens: exp2f of the two sides differs in
 * the last bit, and dO over a normaliser of 4 bits often lies on a tie. Scores of FP8 products move too, and with them
 * codes of P; rebuilt MXFP4 codes have fewer steps, and larger ones. */
static inline double backward_bound(const struct attention_recipe *recipe)
{
    const bool steps = recipe->pv == PV_MXFP4 && recipe->bwd_p == BWD_P_CODES;
    return recipe->backward == BWD_BF16 ? 2e-3 : recipe->qk == QK_NVFP4_E4M3 ? 4e-2 : steps ? 3e-2 : 2e-2;
}

static inline int compare_backward(const struct gpu_case *g, const char *what, struct seen *seen)
{
    const struct attention_case *c = g->c;
    const double bound = backward_bound(&c->recipe) * fmax(1, seen->factor);
    const double twice = c->recipe.dk_center ? 0x1p-8 : 0; /* dK is rounded twice, the reference's once */
    /* Below this a gradient is what rounding left of a cancellation. */
    const double least = 0x1p-6 * norm_of(c->dv, case_keys(c));
    return judge(what, "dv", g->got[OUT_DV], c->dv, case_keys(c), bound, 0, &seen->dv) +
           judge(what, "dk", g->got[OUT_DK], c->dk, case_keys(c), bound + twice, least, &seen->dk) +
           judge(what, "dq", g->got[OUT_DQ], c->dq, case_queries(c), bound, least, &seen->dq);
}

/* The passes of `c` in both orders of summation; ordered twice, with equal bits. The reference gives the forward. */
static inline int check_backward(struct gpu *gpu, const struct attention_case *c, const char *input, enum layout layout,
                                 struct seen *seen)
{
    struct gpu_case g[3];
    char what[256];
    int bad = 0;
    for (int run = 0; run < 3; run++) {
        gpu_case_open(&g[run], gpu, c, layout, BACKWARD);
        g[run].unordered = run == 2;
        describe(&g[run], input, what, sizeof what);
        bad += gpu_case_run(&g[run]);
        bad += run == 1 ? 0 : compare_backward(&g[run], what, seen);
    }
    for (int t = OUT_DQ; t <= OUT_DV; t++) {
        if (memcmp(g[0].got[t], g[1].got[t], tensor_bytes(&g[0], t)) != 0) {
            print_message("%s: two ordered runs differ\n", what);
            bad++;
        }
    }
    for (int run = 0; run < 3; run++) {
        gpu_case_close(&g[run]);
    }
    seen->cases++;
    return bad;
}

/* Both halves of `passes` on one drawn case. */
static inline int check(struct gpu *gpu, const struct attention_shape *shape, const struct attention_recipe *recipe,
                        enum input_kind kind, enum layout layout, enum pass passes, struct seen *seen)
{
    struct attention_case c;
    int bad = 0;
    case_open(&c, shape, recipe, kind, 7 + (uint64_t)shape->tokens);
    case_forward(&c);
    if (passes & FORWARD) {
        bad += check_forward(gpu, &c, input_names[kind], layout, seen);
    }
    if (passes & BACKWARD) {
        case_backward(&c);
        bad += check_backward(gpu, &c, input_names[kind], layout, seen);
    }
    case_close(&c);
    return bad;
}
