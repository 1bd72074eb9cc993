/* The Hopper passes where numbers or shapes are at their limits: FP64 beside the BF16 route, large and vanishing
 * values, rows that see nothing, NaN and Inf, what is refused. */
#include "tests/attention/gpu_sm90_check.h"

#include "tests/attention/oracle.h"

enum { ROUTES = 8, CENTRED = 6, TOKENS = 200 };

/* One recipe for each kernel; then K and dK less their means. */
static struct attention_recipe route(int i)
{
    static const struct route rows[ROUTES] = {{QK_BF16, PV_BF16, BWD_BF16},
                                              {QK_NVFP4, PV_FP8, BWD_REPRESENTED},
                                              {QK_NVFP4, PV_MXFP4, BWD_REPRESENTED},
                                              {QK_NVFP4, PV_MXFP4, BWD_SAVED_OUTPUT},
                                              {QK_NVFP4_E4M3, PV_FP8, BWD_SAVED_OUTPUT},
                                              {QK_NVFP4_E4M3, PV_MXFP4, BWD_REPRESENTED},
                                              {QK_BF16, PV_BF16, BWD_BF16},
                                              {QK_NVFP4_E4M3, PV_FP8, BWD_REPRESENTED}};
    struct attention_recipe recipe = recipe_of_route(rows[i]);
    recipe.k_center = recipe.dk_center = i >= CENTRED;
    return recipe;
}

/* ---- the BF16 route and exact attention in FP64 ------------------------------------------------------------ */

/* Both round P, dS and the outputs to BF16: the same distance from the truth. */
static int as_near(const char *what, const bf16 *gpu, const bf16 *cpu, const double *exact, int64_t n)
{
    const double x = rel_l2(gpu, exact, n), y = rel_l2(cpu, exact, n);
    print_message("  %s: rel-L2 to FP64 %.2e, the reference's %.2e\n", what, x, y);
    return !(x < 1.05 * y + 1e-5) || !(x < 6e-3);
}

static void against_fp64(void **state)
{
    int bad = 0;
    for (int kind = 0; kind < INPUT_KINDS; kind++) {
        const struct attention_shape s = shape_of(1, 333, 4, 2, kind != INPUT_OUTLIER);
        if (gpu_leaves_out(3)) {
            continue;
        }
        const struct attention_recipe recipe = attention_recipe_bf16();
        struct attention_case c;
        struct gpu_case g;
        case_open(&c, &s, &recipe, (enum input_kind)kind, 5);
        case_forward(&c);
        case_backward(&c);
        gpu_case_open(&g, *state, &c, APART, BOTH);
        bad += gpu_case_run(&g);
        const struct oracle_problem p = {s, &recipe, c.q, c.k, c.v, c.dout};
        const int64_t queries = case_queries(&c), keys = case_keys(&c);
        double *exact = malloc(sizeof(double) * (size_t)(2 * (queries + keys)));
        double *dq = exact + queries, *dk = dq + queries, *dv = dk + keys;
        oracle_exact(&p, exact, dq, dk, dv);
        print_message("%s:\n", input_names[kind]);
        bad += as_near("out", g.got[OUT], c.out, exact, queries);
        bad += as_near("dq", g.got[OUT_DQ], c.dq, dq, queries);
        bad += as_near("dk", g.got[OUT_DK], c.dk, dk, keys);
        bad += as_near("dv", g.got[OUT_DV], c.dv, dv, keys);
        free(exact);
        gpu_case_close(&g);
        case_close(&c);
    }
    assert_int_equal(bad, 0);
}

/* ---- large and vanishing values ---------------------------------------------------------------------------- */

/* Key `key` of all heads in direction (+-1) of feature parity; queries lean there by `lean`. */
static void spike(struct attention_case *c, int64_t key, float size, float lean)
{
    for (int64_t i = 0; i < case_keys(c); i++) {
        const float sign = i % 2 == 0 ? 1.0f : -1.0f;
        c->k[i] = i / D / c->shape.kv_heads % c->shape.tokens == key ? bf16_from_float(size * sign) : c->k[i];
    }
    for (int64_t i = 0; i < case_queries(c); i++) {
        c->q[i] = bf16_from_float(bf16_to_float(c->q[i]) + (i % 2 == 0 ? lean : -lean));
    }
}

/* sharp: a row is one key, dS what dP - r leaves of a cancellation (14 bits of dP); and E4M3 scores, which err by 2^-13
 * of the largest product, are off by 0.1. */
static const struct extreme {
    const char *name;
    float q, k, v, dout;
    int64_t key; /* of a spike, or -1 */
    float size, lean;
    bool sharp;
} extremes[] = {
    {"logits to +-600", 12, 12, 1, 1, -1, 0, 0, true},
    {"a key at +1000", 1, 1, 1, 1, 100, 88, 1, true},
    {"a key at -1000", 1, 1, 1, 1, 3, -88, 1, false},
    {"the last key at +1000", 1, 1, 1, 1, TOKENS - 1, 88, 1, true},
    {"Q zero", 0, 1, 1, 1, -1, 0, 0, false},
    {"K zero", 1, 0, 1, 1, -1, 0, 0, false},
    {"V zero", 1, 1, 0, 1, -1, 0, 0, false},
    {"dO zero", 1, 1, 1, 0, -1, 0, 0, false},
    {"V 1e15, dO 1e10", 1, 1, 1e15f, 1e13f, -1, 0, 0, false},
    {"V 1e-15", 1, 1, 1e-15f, 1, -1, 0, 0, false},
    {"dO 1e-18", 1, 1, 1, 1e-15f, -1, 0, 0, false},
    /* Squares leave FP32, sums of products do not. */
    {"V 1e25", 1, 1, 1e25f, 1, -1, 0, 0, false},
    {"V 1e20, dO 1e12", 1, 1, 1e20f, 1e15f, -1, 0, 0, false},
    {"dO 1e25", 1, 1, 1, 1e28f, -1, 0, 0, false},
    {"dO 1e-25", 1, 1, 1, 1e-22f, -1, 0, 0, false},
    {"V 1e-25", 1, 1, 1e-25f, 1, -1, 0, 0, false},
    {"Q 1e10, K 1e-10", 1e10f, 1e-10f, 1, 1, -1, 0, 0, false},
    /* What takes products of codes to scores leaves FP32 downwards. */
    {"Q 1e-21, K 1e-21", 1e-21f, 1e-21f, 1, 1, -1, 0, 0, false},
};

static void extreme_values(void **state)
{
    struct seen seen = {0};
    int bad = 0;
    for (size_t i = 0; i < sizeof extremes / sizeof *extremes; i++) {
        for (int r = 0; r < ROUTES; r++) {
            const struct extreme *e = &extremes[i];
            const struct attention_recipe recipe = route(r);
            const struct attention_shape s = shape_of(1, TOKENS, 4, 2, (i + (size_t)r) % 2 == 0);
            struct attention_case c;
            if (gpu_leaves_out(7)) {
                continue;
            }
            case_open(&c, &s, &recipe, INPUT_GAUSS, 31);
            case_multiply(c.q, case_queries(&c), e->q);
            case_multiply(c.k, case_keys(&c), e->k);
            case_multiply(c.v, case_keys(&c), e->v);
            case_multiply(c.dout, case_queries(&c), e->dout);
            if (e->key >= 0) {
                spike(&c, e->key, e->size, e->lean);
            }
            case_forward(&c);
            case_backward(&c);
            seen.factor = !e->sharp || recipe.pv == PV_BF16 ? 1 : recipe.qk == QK_NVFP4_E4M3 ? 10 : 4;
            bad += check_forward(*state, &c, e->name, APART, &seen);
            bad += check_backward(*state, &c, e->name, APART, &seen);
            case_close(&c);
        }
    }
    seen_print("extreme values", &seen);
    assert_int_equal(bad, 0);
}

/* A row that saw no key (LSE2 of minus infinity, O zero) sends no gradient, whatever its scores and dO. */
static void lost_rows(void **state)
{
    struct seen seen = {0};
    int bad = 0;
    for (int r = 0; r < ROUTES; r++) {
        const struct attention_recipe recipe = route(r);
        const struct attention_shape s = shape_of(1, TOKENS, 4, 2, r % 2 == 0);
        struct attention_case c;
        if (gpu_leaves_out(5)) {
            continue;
        }
        case_open(&c, &s, &recipe, INPUT_GAUSS, 37);
        case_forward(&c);
        for (int64_t row = 0; row < s.heads * s.tokens; row++) {
            const int64_t head = row / TOKENS, token = row % TOKENS;
            if (token % 7 == 0 || (token >= 64 && token < 128)) { /* a whole tile, too */
                c.lse_log2[row] = -INFINITY;
                memset(c.out + (token * s.heads + head) * D, 0, D * sizeof(bf16));
            }
        }
        case_backward(&c);
        bad += check_backward(*state, &c, "lost rows", APART, &seen);
        case_close(&c);
    }
    seen_print("lost rows", &seen);
    assert_int_equal(bad, 0);
}

/* ---- NaN and Inf ------------------------------------------------------------------------------------------- */

struct spread {
    int64_t missed, elsewhere, broken; /* finite here, not so in `cuda`; other bits in other heads; not finite */
    int unseen;                        /* tensors that are finite as a whole, not so in `cuda` */
};

/* `unit` of a tensor's element: batch and kv head. */
static int64_t unit_of(const struct attention_shape *s, int64_t i, int64_t heads)
{
    return i / D / heads / s->tokens * s->kv_heads + i / D % heads / (heads / s->kv_heads);
}

static void compare_spread(const struct gpu_case *g, const struct gpu_case *clean, const struct gpu_case *cuda,
                           enum tensor t, struct spread *x)
{
    const int64_t heads = heads_of(g, t), n = (int64_t)(tensor_bytes(g, t) / sizeof(bf16));
    const struct spread before = *x;
    for (int64_t i = 0; i < n; i++) {
        const bool finite = isfinite(bf16_to_float(g->got[t][i]));
        x->broken += !finite;
        x->missed += finite && !isfinite(bf16_to_float(cuda->got[t][i]));
        x->elsewhere += unit_of(&g->c->shape, i, heads) != 0 && g->got[t][i] != clean->got[t][i];
    }
    x->unseen += x->missed > before.missed && x->broken == before.broken;
}

static int break_one(struct gpu *gpu, struct attention_case *c, const struct gpu_case *clean, bf16 *at, float value,
                     const char *tensor)
{
    const bf16 before = *at;
    struct gpu_case g, cuda;
    struct spread y = {0};
    *at = bf16_from_float(value);
    gpu_case_open(&g, gpu, c, APART, BOTH);
    int bad = gpu_case_run(&g);
    gpu_case_open_as(&cuda, gpu, c, &attention_variant_cuda, APART, BOTH);
    bad += gpu_case_run(&cuda);
    for (int t = OUT; t < TENSORS; t++) {
        compare_spread(&g, clean, &cuda, (enum tensor)t, &y);
    }
    if (y.missed + y.elsewhere > 0) {
        print_message("%s, %g in %s: %lld finite, not so in variant cuda (%d tensors finite); %lld changed in other "
                      "heads; %lld not finite\n",
                      pv_format_names[c->recipe.pv], (double)value, tensor, (long long)y.missed, y.unseen,
                      (long long)y.elsewhere, (long long)y.broken);
    }
    bad += (isnan(value) && y.missed > 0) + (y.unseen > 0) + (y.elsewhere > 0);
    gpu_case_close(&g);
    gpu_case_close(&cuda);
    *at = before;
    return bad;
}

/* What is not finite in variant `cuda` is not finite here (so that the watch of training sees it), and other batches
 * and heads keep their bits. Inside the head more may break: a tile multiplies masked zeros with NaN. */
static void not_finite(void **state)
{
    static const char *const tensors[] = {"q", "k", "v", "dout"};
    static const float values[] = {NAN, INFINITY, -INFINITY};
    int bad = 0;
    for (int r = 0; r < ROUTES; r++) {
        const struct attention_shape s = shape_of(2, TOKENS, 4, 2, true);
        const struct attention_recipe recipe = route(r);
        struct attention_case c;
        struct gpu_case clean;
        case_open(&c, &s, &recipe, INPUT_GAUSS, 41);
        gpu_case_open(&clean, *state, &c, APART, BOTH);
        bad += gpu_case_run(&clean);
        for (int i = 0; i < 12; i++) { /* token 70, the first head of the first batch */
            bf16 *x[] = {c.q, c.k, c.v, c.dout};
            const int64_t heads = i % 4 == IN_K || i % 4 == IN_V ? s.kv_heads : s.heads;
            if (gpu_leaves_out(7)) {
                continue;
            }
            bad += break_one(*state, &c, &clean, &x[i % 4][70 * heads * D + 5], values[i / 4], tensors[i % 4]);
        }
        gpu_case_close(&clean);
        case_close(&c);
    }
    assert_int_equal(bad, 0);
}

/* ---- what is refused at start ------------------------------------------------------------------------------ */

static const struct refusal {
    const char *words; /* of the reason */
    struct attention_shape shape;
    enum pv_format pv;
    enum p_map map;
    enum v_diag diag;
    int sinks;
} refusals[] = {
    {"head_dim must", {1, 256, 4, 2, 64, true, 0.125f}, PV_BF16, P_EXACT, V_DIAG_BLOCKED, 0},
    {"head_dim must", {1, 256, 4, 2, 96, true, 0.1f}, PV_FP8, P_EXACT, V_DIAG_BLOCKED, 0},
    {"softmax_scale must", {1, 256, 4, 2, D, true, 0.0f}, PV_BF16, P_EXACT, V_DIAG_BLOCKED, 0},
    {"softmax_scale must", {1, 256, 4, 2, D, true, -0.1f}, PV_FP8, P_EXACT, V_DIAG_BLOCKED, 0},
    {"softmax_scale must", {1, 256, 4, 2, D, true, NAN}, PV_BF16, P_EXACT, V_DIAG_BLOCKED, 0},
    {"2^31", {512, 32768, 128, 8, D, true, 0.1f}, PV_BF16, P_EXACT, V_DIAG_BLOCKED, 0},
    {"pv must be", {1, 256, 4, 2, D, true, 0.1f}, PV_NVFP4, P_EXACT, V_DIAG_BLOCKED, 0},
    {"accurate is not", {1, 256, 4, 2, D, true, 0.1f}, PV_MXFP4, P_ACCURATE, V_DIAG_BLOCKED, 0},
    {"v_diag must", {1, 256, 4, 2, D, true, 0.1f}, PV_MXFP4, P_EXACT, V_DIAG_FP8, 0},
    {"sink_keys_fp8 0", {1, 256, 4, 2, D, true, 0.1f}, PV_MXFP4, P_EXACT, V_DIAG_BLOCKED, 32},
    {"batch * heads must", {65536, 1, 1, 1, D, true, 0.1f}, PV_BF16, P_EXACT, V_DIAG_BLOCKED, 0},
    {"tokens must be at most 8388480", {1, 8388481, 1, 1, D, true, 0.1f}, PV_FP8, P_EXACT, V_DIAG_BLOCKED, 0},
    {"tokens must be at most 8388480", {1, (int64_t)1 << 30, 1, 1, D, true, 0.1f}, PV_BF16, P_EXACT, V_DIAG_BLOCKED, 0},
};

/* By name: an error that says why. By "auto": the variant that runs it, if there is one. */
static void refused(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        const struct refusal *x = &refusals[i];
        const struct attention_variant *variant;
        struct attention_recipe recipe = recipe_of(x->pv, x->pv == PV_BF16 ? BWD_BF16 : BWD_REPRESENTED);
        recipe.p_map = x->map;
        recipe.v_diag = x->diag;
        recipe.sink_keys_fp8 = x->sinks;
        assert_int_equal(attention_choose(&x->shape, &recipe, DEVICE_CUDA, "sm90", &variant), ERR_UNSUPPORTED);
        if (strstr(status_last_message(), x->words) == NULL) {
            fail_msg("expected '%s' in: %s", x->words, status_last_message());
        }
    }
}

/* One view that TMA cannot take, by its data or a stride: nothing runs, and the next wait says why. A struct cuda for
 * each, because errors are kept. */
static void views_refused(void **state)
{
    enum { VIEWS = 8, ELEMENTS = 8192, BYTES = (VIEWS + 1) * ELEMENTS * 2 };
    const struct attention_shape s = shape_of(2, 4, 2, 2, true);
    const struct attention_recipe recipe = route(0);
    unsigned char *host = malloc(BYTES);
    (void)state;
    for (int i = 0; i < VIEWS; i++) {
        struct cuda *cuda = gpu_open();
        bf16 *data = gpu_array(cuda, NULL, BYTES);
        float *lse = (float *)(data + VIEWS * ELEMENTS);
        struct head_view x[VIEWS];
        for (int v = 0; v < VIEWS; v++) {
            x[v] = (struct head_view){data + v * ELEMENTS, 4 * 2 * D, 2 * D, D};
        }
        x[i].data += i % 4 == 0 ? 4 : 0; /* 8 bytes */
        x[i].token_stride += i % 4 == 1 ? 4 : 0;
        x[i].head_stride += i % 4 == 2 ? 4 : 0;
        x[i].batch_stride += i % 4 == 3 ? 4 : 0;
        const struct attention_fwd fwd = {cuda, s, &recipe, x[0], x[1], x[2], x[3], .lse_log2 = lse};
        const struct attention_bwd bwd = {cuda, s,    &recipe, x[0], x[1], x[2],
                                          x[3], x[4], x[5],    x[6], x[7], .lse_log2 = lse};
        if (i < 4) {
            attention_variant_sm90.fwd(&fwd);
        } else {
            attention_variant_sm90.bwd(&bwd);
        }
        assert_int_equal(cuda_sync(cuda, "attention"), ERR_DEVICE);
        assert_non_null(strstr(status_last_message(), "16 bytes"));
        cuda_close(cuda);
        cuda = gpu_open();
        gpu_fetch(cuda, host, data, BYTES);
        for (int at = 0; at < BYTES; at++) {
            assert_int_equal(host[at], 0xff);
        }
        cuda_free(data);
        cuda_close(cuda);
    }
    free(host);
}

/* ---- shapes of nothing and of one -------------------------------------------------------------------------- */

/* No batch, or no token: nothing runs, and no error is left for the next wait. */
static void no_elements(void **state)
{
    struct gpu *gpu = *state;
    for (int i = 0; i < 2 * ROUTES; i++) {
        const struct attention_recipe recipe = route(i / 2);
        const struct attention_shape s = shape_of(i % 2, i % 2 == 0 ? TOKENS : 0, 4, 2, true);
        const struct head_view none = {NULL, s.tokens * 4 * D, 4 * D, D};
        const struct attention_fwd fwd = {gpu->cuda, s, &recipe, none, none, none, none, .scratch = NULL};
        const struct attention_bwd bwd = {gpu->cuda, s,    &recipe, none, none, none,
                                          none,      none, none,    none, none, .scratch = NULL};
        attention_variant_sm90.fwd(&fwd);
        attention_variant_sm90.bwd(&bwd);
        if (cuda_sync(gpu->cuda, "attention") != OK) {
            fail_msg("%s", status_last_message());
        }
    }
}

/* Both passes of a case of one token, whose stride is `stride`; out, dQ, dK, dV one after the other. */
static void run_one_token(struct cuda *cuda, const struct attention_case *c, int64_t stride, bf16 *results)
{
    const struct attention_shape *s = &c->shape;
    const int64_t queries = case_queries(c), keys = case_keys(c);
    const bf16 *inputs[8] = {c->q, c->k, c->v, c->dout};
    const int64_t n[8] = {queries, keys, keys, queries, queries, queries, keys, keys};
    struct head_view x[8];
    void *lse = gpu_array(cuda, NULL, (size_t)(s->batch * s->heads) * sizeof(float));
    void *saved = gpu_array(cuda, NULL, attention_variant_sm90.saved_bytes(s, &c->recipe));
    void *scratch = gpu_array(cuda, NULL, attention_variant_sm90.scratch_bytes(s, &c->recipe));
    for (int i = 0; i < 8; i++) {
        x[i] = (struct head_view){gpu_array(cuda, inputs[i], (size_t)n[i] * sizeof(bf16)), n[i] / s->batch, stride, D};
    }
    const struct attention_fwd fwd = {.cuda = cuda,
                                      .shape = *s,
                                      .recipe = &c->recipe,
                                      .q = x[0],
                                      .k = x[1],
                                      .v = x[2],
                                      .out = x[4],
                                      .lse_log2 = lse,
                                      .saved = saved,
                                      .scratch = scratch};
    const struct attention_bwd bwd = {.cuda = cuda,
                                      .shape = *s,
                                      .recipe = &c->recipe,
                                      .q = x[0],
                                      .k = x[1],
                                      .v = x[2],
                                      .out = x[4],
                                      .dout = x[3],
                                      .dq = x[5],
                                      .dk = x[6],
                                      .dv = x[7],
                                      .lse_log2 = lse,
                                      .saved = saved,
                                      .scratch = scratch};
    attention_variant_sm90.fwd(&fwd);
    attention_variant_sm90.bwd(&bwd);
    for (int i = 4; i < 8; i++) {
        gpu_fetch(cuda, results, x[i].data, (size_t)n[i] * sizeof(bf16));
        results += n[i];
    }
    for (int i = 0; i < 8; i++) {
        cuda_free(x[i].data);
    }
    cuda_free(lse);
    cuda_free(saved);
    cuda_free(scratch);
}

/* The stride of one token may be anything (contiguous tensors of some libraries say 0): the same bits come out. */
static void one_token(void **state)
{
    static const int64_t strides[] = {4 * D, 0, 8, 3};
    struct gpu *gpu = *state;
    int bad = 0;
    for (int r = 0; r < ROUTES + 1; r++) {
        const struct route bf16_scores = {QK_BF16, PV_MXFP4, BWD_REPRESENTED};
        const struct attention_recipe recipe = r < ROUTES ? route(r) : recipe_of_route(bf16_scores);
        const struct attention_shape s = shape_of(2, 1, 4, 2, r % 2 == 0);
        struct attention_case c;
        case_open(&c, &s, &recipe, INPUT_GAUSS, 43);
        const size_t n = (size_t)(2 * case_queries(&c) + 2 * case_keys(&c));
        bf16 *want = malloc(n * sizeof(bf16)), *got = malloc(n * sizeof(bf16));
        run_one_token(gpu->cuda, &c, strides[0], want);
        for (int i = 1; i < 4; i++) {
            run_one_token(gpu->cuda, &c, strides[i], got);
            if (memcmp(got, want, n * sizeof(bf16)) != 0) {
                print_message("route %d: one token with stride %d: other bits\n", r, (int)strides[i]);
                bad++;
            }
        }
        free(want);
        free(got);
        case_close(&c);
    }
    assert_int_equal(bad, 0);
}

/* Passes with statistics are those of variant "cuda": its forward leaves all that a Hopper backward reads, and its
 * backward finds what a Hopper forward left out. */
static void counted_passes(void **state)
{
    struct gpu *gpu = *state;
    struct seen seen = {0};
    int bad = 0;
    for (int i = 0; i < 2 * ROUTES; i++) {
        const struct attention_recipe recipe = route(i / 2);
        const struct attention_shape s = shape_of(2, TOKENS, 4, 2, i / 2 % 2 == 0);
        seen.factor = recipe.pv == PV_BF16 ? 5 : 1; /* O is the GPU's: P was rounded relative to another anchor */
        struct attention_case c;
        struct gpu_case g;
        char what[256];
        case_open(&c, &s, &recipe, INPUT_GAUSS, 47);
        case_forward(&c);
        case_backward(&c);
        gpu_case_open(&g, gpu, &c, APART, BOTH);
        g.counted[i % 2] = gpu_array(gpu->cuda, NULL, sizeof(struct attention_stats));
        describe(&g, i % 2 == 0 ? "counted forward" : "counted backward", what, sizeof what);
        bad += gpu_case_run(&g) + compare_backward(&g, what, &seen);
        cuda_free(g.counted[i % 2]);
        gpu_case_close(&g);
        case_close(&c);
    }
    seen_print("one pass counted", &seen);
    assert_int_equal(bad, 0);
}

/* The variant is the first choice for every route that it is made for, backward included. */
static void chosen(void **state)
{
    (void)state;
    for (int r = 0; r < ROUTES; r++) {
        const struct attention_shape s = shape_of(1, TOKENS, 4, 2, true);
        const struct attention_recipe recipe = route(r);
        const struct attention_variant *variant;
        assert_int_equal(attention_choose(&s, &recipe, DEVICE_CUDA, "auto", &variant), OK);
        assert_string_equal(variant->name, "sm90");
        assert_null(attention_bwd_refuses_sm90(&s, &recipe));
    }
}

/* A planted error is the backward of variant "cuda", and the route says so. */
static void leak_refused(void **state)
{
    (void)state;
    for (int r = 0; r < ROUTES; r++) {
        const struct attention_shape s = shape_of(1, TOKENS, 4, 2, true);
        struct attention_recipe recipe = route(r);
        const struct attention_variant *variant;
        char text[512];
        recipe.debug_leak = 0.05f;
        assert_int_equal(attention_choose(&s, &recipe, DEVICE_CUDA, "auto", &variant), OK);
        attention_route_print(&s, &recipe, variant, text, sizeof text);
        assert_string_equal(text, "sm90 (backward by cuda: the Hopper backward has no debug_leak)");
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(against_fp64), cmocka_unit_test(extreme_values), cmocka_unit_test(lost_rows),
        cmocka_unit_test(not_finite),   cmocka_unit_test(refused),        cmocka_unit_test(views_refused),
        cmocka_unit_test(no_elements),  cmocka_unit_test(one_token),      cmocka_unit_test(chosen),
        cmocka_unit_test(leak_refused), cmocka_unit_test(counted_passes)};
    gpu_arguments(argc, argv);
    return cmocka_run_group_tests(tests, gpu_open_state, gpu_close_state);
}
