/* The backward of the variant "cuda" against the CPU's, fed with the same forward (LSE2, out, saved of the CPU: in
 * `represented` MXFP4 the last bit of LSE2 alone moves dQ by 8e-3). What is left: FP32 sums in another order, which
 * move a code of dS or P by one step here and there, and the last bit of BF16. */
#include "attention/attention_cuda.h"
#include "tests/attention/cases.h"
#include "tests/gpu.h"

#include <math.h>

enum { SHORT = 130 };

/* Relative L2: what the CPU has against FP64 (test_bwd.c); and with the GPU's forward. */
#define BOUND 2e-3
#define BOUND_BOTH 2e-2

static struct cuda *cuda;
static int checks, failures;
static int sample; /* with --small one case in so many, and no longer than SHORT */

struct result {
    bf16 *dq, *dk, *dv;
    struct attention_stats stats;
};

static void result_open(struct result *r, const struct attention_case *c)
{
    memset(r, 0, sizeof *r);
    r->dq = malloc(sizeof(bf16) * (size_t)case_queries(c));
    r->dk = malloc(sizeof(bf16) * (size_t)case_keys(c));
    r->dv = malloc(sizeof(bf16) * (size_t)case_keys(c));
}

static void result_close(struct result *r)
{
    free(r->dq);
    free(r->dk);
    free(r->dv);
}

/* ---- one call on the GPU ---------------------------------------------------------------------------------- */

/* The anchors that the forward saves for anchor = sampled, from the saved operands. */
static void make_anchors(const struct attention_case *c, const struct attention_saved *saved, float *anchor)
{
    const struct attention_shape *s = &c->shape;
    const float log2e = (float)((double)s->softmax_scale * M_LOG2E);
    for (int64_t at = 0; at < s->batch * s->heads * s->tokens; at++) {
        int64_t head = at / s->tokens % s->heads, row = at % s->tokens, batch = at / s->tokens / s->heads;
        int64_t kv = batch * s->kv_heads + head / (s->heads / s->kv_heads);
        const bf16 *q = saved->q + at * s->head_dim;
        float max = -INFINITY;
        for (int64_t i = 0; i < anchor_samples(s->tokens); i++) {
            int64_t key = anchor_sample(i, s->tokens);
            const bf16 *k = saved->k + (kv * s->tokens + key) * s->head_dim;
            float sum = 0;
            for (int64_t d = 0; d < s->head_dim; d++) {
                sum += bf16_to_float(q[d]) * bf16_to_float(k[d]);
            }
            max = key <= row || !s->causal ? fmaxf(max, log2e * sum) : max;
        }
        anchor[at] = anchor_of(&c->recipe, max);
    }
}

/* The GPU's saved state: the CPU's bytes, then anchors. */
static void *upload_saved(const struct attention_case *c)
{
    struct carve carve = {0};
    (void)attention_saved_cuda_carve(&c->shape, &c->recipe, &carve);
    if (carve.used == 0) {
        return NULL;
    }
    unsigned char *host = calloc(carve.used, 1);
    memcpy(host, c->saved, attention_saved_bytes_cpu(&c->shape, &c->recipe));
    struct carve own = {.base = host};
    struct attention_saved_cuda saved = attention_saved_cuda_carve(&c->shape, &c->recipe, &own);
    if (saved.anchor != NULL) {
        make_anchors(c, &saved.operands, saved.anchor);
    }
    void *device = gpu_array(cuda, host, carve.used);
    free(host);
    return device;
}

/* A tensor on the GPU with `gap` unused elements between heads, as slices of a fused projection have. */
struct tensor {
    bf16 *data;
    size_t count;
    struct head_view view;
};

static struct tensor tensor_open(const struct attention_case *c, const bf16 *host, int64_t heads, int64_t gap)
{
    const struct attention_shape *s = &c->shape;
    int64_t pitch = s->head_dim + gap;
    struct tensor t = {.count = (size_t)(s->batch * s->tokens * heads * pitch)};
    bf16 *spread = malloc(t.count * sizeof(bf16));
    memset(spread, 0xff, t.count * sizeof(bf16));
    for (int64_t i = 0; host != NULL && i < s->batch * s->tokens * heads; i++) {
        memcpy(spread + i * pitch, host + i * s->head_dim, sizeof(bf16) * (size_t)s->head_dim);
    }
    t.data = gpu_array(cuda, spread, t.count * sizeof(bf16));
    t.view = (struct head_view){t.data, s->tokens * heads * pitch, heads * pitch, pitch};
    free(spread);
    return t;
}

static void tensor_fetch(const struct attention_case *c, struct tensor *t, bf16 *host, int64_t gap)
{
    int64_t D = c->shape.head_dim, pitch = D + gap;
    bf16 *spread = malloc(t->count * sizeof(bf16));
    gpu_fetch(cuda, spread, t->data, t->count * sizeof(bf16));
    for (int64_t i = 0; i < (int64_t)t->count; i++) {
        if (i % pitch < D) {
            host[i / pitch * D + i % pitch] = spread[i];
        } else {
            assert_int_equal(spread[i], 0xffff); /* nobody wrote between heads */
        }
    }
    free(spread);
}

struct options {
    int64_t gap;
    int poison; /* byte that fills scratch */
    bool no_stats;
    bool forward; /* out, LSE2 and saved are the GPU's own */
};

static void run_gpu(const struct attention_case *c, const struct options *o, struct result *r)
{
    const struct attention_shape *s = &c->shape;
    int64_t gap = o->gap;
    struct tensor q = tensor_open(c, c->q, s->heads, gap), k = tensor_open(c, c->k, s->kv_heads, gap),
                  v = tensor_open(c, c->v, s->kv_heads, gap), out = tensor_open(c, c->out, s->heads, gap),
                  dout = tensor_open(c, c->dout, s->heads, gap), dq = tensor_open(c, NULL, s->heads, gap),
                  dk = tensor_open(c, NULL, s->kv_heads, gap), dv = tensor_open(c, NULL, s->kv_heads, gap);
    size_t rows = (size_t)(s->batch * s->heads * s->tokens);
    float *lse = gpu_array(cuda, c->lse_log2, rows * sizeof(float));
    void *saved = upload_saved(c);
    size_t scratch_bytes = attention_variant_cuda.scratch_bytes(s, &c->recipe);
    unsigned char *fill = malloc(scratch_bytes);
    memset(fill, o->poison, scratch_bytes);
    void *scratch = gpu_array(cuda, fill, scratch_bytes);
    struct attention_stats zero = {0};
    void *stats = gpu_array(cuda, &zero, sizeof zero);
    if (o->forward) {
        attention_variant_cuda.fwd(&(struct attention_fwd){.cuda = cuda,
                                                           .shape = *s,
                                                           .recipe = &c->recipe,
                                                           .q = q.view,
                                                           .k = k.view,
                                                           .v = v.view,
                                                           .out = out.view,
                                                           .lse_log2 = lse,
                                                           .saved = saved,
                                                           .scratch = scratch});
    }
    attention_variant_cuda.bwd(&(struct attention_bwd){.cuda = cuda,
                                                       .shape = *s,
                                                       .recipe = &c->recipe,
                                                       .q = q.view,
                                                       .k = k.view,
                                                       .v = v.view,
                                                       .out = out.view,
                                                       .dout = dout.view,
                                                       .dq = dq.view,
                                                       .dk = dk.view,
                                                       .dv = dv.view,
                                                       .lse_log2 = lse,
                                                       .saved = saved,
                                                       .scratch = scratch,
                                                       .stats = o->no_stats ? NULL : stats});
    if (cuda_sync(cuda, "backward") != OK) {
        fail_msg("%s", status_last_message());
    }
    tensor_fetch(c, &dq, r->dq, gap);
    tensor_fetch(c, &dk, r->dk, gap);
    tensor_fetch(c, &dv, r->dv, gap);
    gpu_fetch(cuda, &r->stats, stats, sizeof r->stats);
    gpu_fetch(cuda, fill, scratch, scratch_bytes); /* its guard */
    free(fill);
    void *all[] = {q.data, k.data, v.data, out.data, dout.data, dq.data, dk.data, dv.data, lse, saved, scratch, stats};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        cuda_free(all[i]);
    }
}

/* ---- comparison ------------------------------------------------------------------------------------------- */

static double norm(const bf16 *x, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += (double)bf16_to_float(x[i]) * (double)bf16_to_float(x[i]);
    }
    return sqrt(sum);
}

/* ||x - y|| / max(||y||, least): a gradient that is zero but for noise is judged by the size of dV. */
static double error_of(const bf16 *x, const bf16 *y, int64_t n, double least)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = (double)bf16_to_float(x[i]) - (double)bf16_to_float(y[i]);
        sum += d * d;
    }
    double size = fmax(norm(y, n), least);
    return sum == 0 ? 0 : sqrt(sum) / size;
}

static bool near(double x, double y, double relative, double absolute)
{
    return fabs(x - y) <= relative * fabs(y) + absolute;
}

/* NULL, or the first statistic that differs. A row that sees one key has dS = 0 but for the noise of FP32: judged by
 * the size of r. */
static const char *statistics_differ(const struct attention_case *c, const struct attention_stats *x,
                                     const struct attention_stats *y)
{
    double rows = (double)(c->shape.batch * c->shape.heads * c->shape.tokens);
    double noise = 1e-6 * (sqrt(rows * y->r_r) + y->ds_abs);
    double leak_r = (0.02 * y->leak_abs + noise) * sqrt(y->r_r);
    return !near(x->ds_abs, y->ds_abs, 1e-3, noise)                     ? "ds_abs"
           : !near(x->ds_stored_abs, y->ds_stored_abs, 1e-3, noise)     ? "ds_stored_abs"
           : !near(x->r_r, y->r_r, 1e-3, 0)                             ? "r_r"
           : !near(x->leak_abs, y->leak_abs, 2e-2, noise)               ? "leak_abs"
           : !near(x->leak_stored_abs, y->leak_stored_abs, 2e-2, noise) ? "leak_stored_abs"
           : !near(x->leak_r, y->leak_r, 0, leak_r)                     ? "leak_r"
           : !near(x->do_count, y->do_count, 0, 0)                      ? "do_count"
           : !near(x->do_flushed, y->do_flushed, 1e-4, 1)               ? "do_flushed"
           : !near(x->ds_count, y->ds_count, 1e-3, 16)                  ? "ds_count"
           : !near(x->ds_flushed, y->ds_flushed, 1e-2, 16)              ? "ds_flushed"
           : !near(x->ds_saturated, y->ds_saturated, 1e-2, 1)           ? "ds_saturated"
           : !near(x->non_finite, y->non_finite, 0, 0)                  ? "non_finite"
                                                                        : NULL;
}

static void print_stats(const char *name, const struct attention_stats *s)
{
    print_message("   %s leak %.4g / %.4g stored %.4g / %.4g leak_r %.4g r_r %.4g do %g %g ds %g %g %g bad %g\n", name,
                  s->leak_abs, s->ds_abs, s->leak_stored_abs, s->ds_stored_abs, s->leak_r, s->r_r, s->do_count,
                  s->do_flushed, s->ds_count, s->ds_flushed, s->ds_saturated, s->non_finite);
}

static void print_first(const char *name, const bf16 *x, const bf16 *y, const struct attention_case *c, int64_t heads)
{
    int64_t n = c->shape.batch * c->shape.tokens * heads * c->shape.head_dim, D = c->shape.head_dim;
    double largest = 0;
    int64_t at = 0;
    int64_t different = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = fabs((double)bf16_to_float(x[i]) - (double)bf16_to_float(y[i]));
        different += x[i] != y[i];
        if (d > largest || isnan(d)) {
            largest = d;
            at = i;
        }
        if (isnan(d)) {
            break;
        }
    }
    print_message("   %s: %lld of %lld differ; worst at token %lld head %lld d %lld: %g, CPU %g\n", name,
                  (long long)different, (long long)n, (long long)(at / D / heads % c->shape.tokens),
                  (long long)(at / D % heads), (long long)(at % D), (double)bf16_to_float(x[at]),
                  (double)bf16_to_float(y[at]));
}

static double worst;

/* Compares one GPU result with the case's CPU result; a failure is printed, counted, and the run goes on. */
static void compare(const struct attention_case *c, const struct result *r, double bound, bool with_stats)
{
    double least = 1e-4 * norm(c->dv, case_keys(c));
    double dq = error_of(r->dq, c->dq, case_queries(c), least), dk = error_of(r->dk, c->dk, case_keys(c), least),
           dv = error_of(r->dv, c->dv, case_keys(c), 0);
    const char *statistic = with_stats ? statistics_differ(c, &r->stats, &c->stats) : NULL;
    double error = fmax(fmax(isnan(dq) ? INFINITY : dq, isnan(dk) ? INFINITY : dk), isnan(dv) ? INFINITY : dv);
    worst = fmax(worst, error);
    checks++;
    if (error <= bound && statistic == NULL) {
        return;
    }
    if (failures++ < 12) {
        char text[512];
        attention_recipe_print(&c->recipe, text, sizeof text);
        print_message("FAILED B%lld T%lld H%lld/%lld D%lld %s %s: dq %.1e dk %.1e dv %.1e %s\n",
                      (long long)c->shape.batch, (long long)c->shape.tokens, (long long)c->shape.heads,
                      (long long)c->shape.kv_heads, (long long)c->shape.head_dim, c->shape.causal ? "causal" : "full",
                      text, dq, dk, dv, statistic != NULL ? statistic : "");
        print_first("dq", r->dq, c->dq, c, c->shape.heads);
        print_first("dk", r->dk, c->dk, c, c->shape.kv_heads);
        print_first("dv", r->dv, c->dv, c, c->shape.kv_heads);
        if (statistic != NULL) {
            print_stats("GPU", &r->stats);
            print_stats("CPU", &c->stats);
        }
    }
}

static void check(const struct attention_shape *shape, const struct attention_recipe *recipe, enum input_kind kind,
                  const struct options *o)
{
    if (attention_recipe_refusal(recipe, (int)shape->head_dim) != NULL || gpu_leaves_out(sample)) {
        return;
    }
    struct attention_shape s = *shape;
    struct attention_case c;
    struct result r;
    s.tokens = *gpu_small() && s.tokens > SHORT ? SHORT : s.tokens;
    case_open(&c, &s, recipe, kind, 2);
    case_forward(&c);
    memset(&c.stats, 0, sizeof c.stats);
    case_backward(&c);
    result_open(&r, &c);
    run_gpu(&c, o, &r);
    compare(&c, &r, o->forward ? BOUND_BOTH : BOUND, !o->no_stats);
    result_close(&r);
    case_close(&c);
}

static const struct options plain = {.poison = 0xff};

static void report(const char *name)
{
    print_message("%s: %d checks, %d failures, worst relative L2 %.2e\n", name, checks, failures, worst);
    int failed = failures;
    checks = failures = 0;
    worst = 0;
    assert_int_equal(failed, 0);
}

/* ---- tests ------------------------------------------------------------------------------------------------ */

static const struct attention_shape gqa = {1, 100, 4, 2, 64, true, 0.125f};
static const struct attention_shape wide = {1, 150, 2, 1, 128, true, 0.0884f};
static const struct attention_shape full = {2, 72, 2, 1, 64, false, 0.125f};
static const struct attention_shape longer = {1, 200, 3, 1, 128, true, 0.0884f};

/* Every instance of every kernel, on two blocks of one group. */
static void test_every_kernel(void **state)
{
    (void)state;
    static const struct {
        enum pv_format pv;
        enum backward_preset preset;
        enum bwd_stat stat;
        float leak;
    } rows[] = {{PV_FP8, BWD_REPRESENTED, BWD_STAT_SAVED, 0.1f},
                {PV_MXFP4, BWD_REPRESENTED, BWD_STAT_RECENTRED, 0},
                {PV_NVFP4, BWD_REPRESENTED, BWD_STAT_SAVED, 0},
                {PV_FP8, BWD_SAVED_OUTPUT, BWD_STAT_RECENTRED, 0},
                {PV_BF16, BWD_BF16, BWD_STAT_SAVED, -0.1f}};
    sample = 1;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        for (int whole = 0; whole < 2; whole++) {
            const struct attention_shape s = {1, 70, 2, 1, whole ? 128 : 64, true, whole ? 0.0884f : 0.125f};
            struct attention_recipe recipe = recipe_of(rows[i].pv, rows[i].preset);
            recipe.bwd_stat = rows[i].stat;
            recipe.debug_leak = rows[i].leak;
            recipe.dk_center = recipe.k_center = i == 1;
            for (int counted = 0; counted < 2; counted++) {
                check(&s, &recipe, INPUT_GAUSS, &(struct options){.poison = 0xff, .no_stats = !counted});
            }
        }
    }
    report("kernels");
}

static void test_every_preset_on_every_value_format(void **state)
{
    (void)state;
    sample = 11;
    for (int pv = PV_BF16; pv <= PV_FP4_UE5M3; pv++) {
        for (int preset = BWD_REPRESENTED; preset <= BWD_BF16; preset++) {
            struct attention_recipe recipe = recipe_of(pv, preset);
            check(&gqa, &recipe, INPUT_GAUSS, &plain);
            check(&wide, &recipe, INPUT_PEAKY3, &plain);
            check(&full, &recipe, INPUT_OUTLIER, &plain);
            check(&longer, &recipe, INPUT_SINK, &plain);
        }
    }
    report("presets");
}

struct switch_row {
    size_t offset; /* in struct attention_recipe; every switch is an enum */
    int last;
};

static void test_every_switch_alone(void **state)
{
    (void)state;
    static const struct switch_row switches[] = {
        {offsetof(struct attention_recipe, bwd_p), BWD_P_BF16},
        {offsetof(struct attention_recipe, bwd_v), BWD_V_BF16},
        {offsetof(struct attention_recipe, bwd_stat), BWD_STAT_EXACT},
        {offsetof(struct attention_recipe, do_format), DO_BF16},
        {offsetof(struct attention_recipe, do_scale), DO_SCALE_FIXED},
        {offsetof(struct attention_recipe, ds_scale), DS_SCALE_FIXED},
        {offsetof(struct attention_recipe, qk_grad), QK_GRAD_LIFT},
    };
    sample = 23;
    for (int pv = PV_BF16; pv <= PV_FP4_UE5M3; pv++) {
        for (int preset = BWD_REPRESENTED; preset <= BWD_BF16; preset += BWD_BF16 - BWD_REPRESENTED) {
            for (size_t i = 0; i < sizeof switches / sizeof *switches; i++) {
                for (int value = 0; value <= switches[i].last; value++) {
                    struct attention_recipe recipe = recipe_of(pv, preset);
                    memcpy((char *)&recipe + switches[i].offset, &value, sizeof value);
                    check(&gqa, &recipe, INPUT_GAUSS, &plain);
                    check(&wide, &recipe, INPUT_GAUSS, &plain);
                }
            }
        }
    }
    report("switches");
}

static void test_forward_options(void **state)
{
    (void)state;
    sample = 23;
    for (int pv = PV_FP8; pv <= PV_FP4_UE5M3; pv++) {
        for (int option = 0; option < 12; option++) {
            struct attention_recipe recipe = recipe_of(pv, BWD_REPRESENTED);
            if (option == 11) {
                attention_recipe_preset(&recipe, BWD_BF16);
                recipe.bwd_v = BWD_V_FORWARD;
            }
            recipe.v_diag = option == 1 || option == 4 || option == 11 ? V_DIAG_FP8 : V_DIAG_BLOCKED;
            recipe.sink_keys_fp8 = option == 2 || option == 4 ? 32 : 0;
            recipe.k_center = option == 3 || option == 8;
            recipe.dk_center = option == 5 || option == 8;
            recipe.mx_rule = option >= 6 && pv == PV_MXFP4 ? MX_OCP : MX_NEAREST;
            recipe.qk = option == 7 ? QK_NVFP4_E4M3 : option == 8 ? QK_BF16 : QK_NVFP4;
            recipe.anchor = pv != PV_MXFP4 ? ANCHOR_ROW : option == 9 ? ANCHOR_ZERO : option == 10 ? ANCHOR_SAMPLED : 0;
            check(&gqa, &recipe, INPUT_GAUSS, &plain);
            check(&full, &recipe, INPUT_SINK, &plain);
            check(&longer, &recipe, INPUT_PEAKY3, &plain);
        }
    }
    for (int map = P_EXACT; map <= P_ACCURATE; map++) {
        struct attention_recipe recipe = recipe_of(PV_MXFP4, BWD_REPRESENTED);
        recipe.p_map = map;
        check(&longer, &recipe, INPUT_GAUSS, &plain);
    }
    report("forward options");
}

static void test_with_its_own_forward(void **state)
{
    (void)state;
    static const struct options own = {.poison = 0xff, .no_stats = true, .forward = true};
    sample = 11;
    for (int pv = PV_BF16; pv <= PV_FP4_UE5M3; pv++) {
        for (int preset = BWD_REPRESENTED; preset <= BWD_BF16; preset++) {
            struct attention_recipe recipe = recipe_of(pv, preset);
            check(&longer, &recipe, INPUT_GAUSS, &own);
            recipe.k_center = true;
            recipe.anchor = pv == PV_MXFP4 ? ANCHOR_SAMPLED : ANCHOR_ROW;
            check(&gqa, &recipe, INPUT_OUTLIER, &own);
        }
    }
    report("own forward");
}

static void test_a_planted_leak(void **state)
{
    (void)state;
    sample = 5;
    for (int preset = BWD_REPRESENTED; preset <= BWD_BF16; preset++) {
        struct attention_recipe recipe = recipe_of(PV_MXFP4, preset);
        recipe.debug_leak = preset % 2 == 0 ? 0.1f : -0.1f;
        check(&gqa, &recipe, INPUT_GAUSS, &plain);
        check(&longer, &recipe, INPUT_GAUSS, &plain);
    }
    report("planted leak");
}

/* Lengths around all block sizes, all group sizes, head_dim below and at the widths of tiles; strided views. */
static void test_shapes(void **state)
{
    (void)state;
    static const int64_t tokens[] = {1, 2, 15, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 161, 192, 200, 257};
    static const struct {
        int64_t heads, kv_heads, head_dim;
    } kinds[] = {{1, 1, 64}, {4, 1, 128}, {6, 3, 128}, {8, 1, 64}, {2, 2, 16}, {2, 1, 80}, {3, 1, 112}};
    static const struct {
        enum pv_format pv;
        enum backward_preset preset;
    } shape_routes[] = {{PV_BF16, BWD_BF16}, {PV_MXFP4, BWD_REPRESENTED}, {PV_FP8, BWD_RECENTRED}};
    sample = 23;
    for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++) {
        for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
            for (int route = 0; route < 3; route++) {
                struct attention_recipe recipe = recipe_of(shape_routes[route].pv, shape_routes[route].preset);
                struct attention_shape shape = {
                    1 + (int64_t)(t + i) % 2,         tokens[t], kinds[i].heads, kinds[i].kv_heads, kinds[i].head_dim,
                    (t + i + (size_t)route) % 3 != 0, 0.1f};
                struct options o = {.gap = 8 * (int64_t)(t % 3), .poison = 0x7f};
                if (t % 4 == 0 || (t + i) % 3 == (size_t)route) { /* all routes on every fourth length */
                    check(&shape, &recipe, INPUT_GAUSS, &o);
                }
            }
        }
    }
    report("shapes");
}

static void test_many_blocks_large(void **state)
{
    (void)state;
    static const struct attention_shape shapes[] = {{1, 1000, 2, 1, 128, true, 0.0884f},
                                                    {1, 777, 4, 1, 64, false, 0.125f}};
    for (int i = 0; i < 2; i++) {
        for (int preset = BWD_REPRESENTED; preset <= BWD_BF16; preset++) {
            struct attention_recipe recipe = recipe_of(preset == BWD_BF16 ? PV_BF16 : PV_MXFP4, preset);
            check(&shapes[i], &recipe, INPUT_MIX, &plain);
        }
    }
    report("many blocks");
}

static bool same(const struct result *a, const struct result *b, const struct attention_case *c)
{
    return memcmp(a->dq, b->dq, sizeof(bf16) * (size_t)case_queries(c)) == 0 &&
           memcmp(a->dk, b->dk, sizeof(bf16) * (size_t)case_keys(c)) == 0 &&
           memcmp(a->dv, b->dv, sizeof(bf16) * (size_t)case_keys(c)) == 0;
}

/* Two runs with different dirt in scratch, and one that observes nothing: equal bits. */
static void test_equal_bits(void **state)
{
    (void)state;
    static const struct options runs[] = {{.poison = 0xff}, {.poison = 0x3c}, {.poison = 0, .no_stats = true}};
    for (int pv = PV_BF16; pv <= PV_FP4_UE5M3; pv++) {
        for (int preset = BWD_REPRESENTED; preset <= BWD_BF16; preset++) {
            struct attention_recipe recipe = recipe_of(pv, preset);
            struct attention_case c;
            struct attention_shape s = longer;
            struct result r[3];
            if (gpu_leaves_out(11)) {
                continue;
            }
            s.tokens = *gpu_small() ? SHORT : s.tokens;
            case_open(&c, &s, &recipe, INPUT_GAUSS, 3);
            case_forward(&c);
            for (int i = 0; i < 3; i++) {
                result_open(&r[i], &c);
                run_gpu(&c, &runs[i], &r[i]);
            }
            failures += !same(&r[0], &r[1], &c) || !same(&r[0], &r[2], &c);
            failures += memcmp(&r[0].stats, &r[1].stats, sizeof r[0].stats) != 0;
            checks++;
            for (int i = 0; i < 3; i++) {
                result_close(&r[i]);
            }
            case_close(&c);
        }
    }
    report("equal bits");
}

static void test_zero_dout_gives_exact_zeros(void **state)
{
    (void)state;
    for (int preset = BWD_REPRESENTED; preset <= BWD_BF16; preset++) {
        struct attention_recipe recipe = recipe_of(PV_MXFP4, preset);
        struct attention_case c;
        struct result r;
        if (gpu_leaves_out(3)) {
            continue;
        }
        case_open(&c, &gqa, &recipe, INPUT_GAUSS, 5);
        memset(c.dout, 0, sizeof(bf16) * (size_t)case_queries(&c));
        case_forward(&c);
        result_open(&r, &c);
        run_gpu(&c, &plain, &r);
        for (int64_t i = 0; i < case_queries(&c); i++) {
            failures += (r.dq[i] & 0x7fff) != 0;
        }
        for (int64_t i = 0; i < case_keys(&c); i++) {
            failures += (r.dk[i] & 0x7fff) != 0 || (r.dv[i] & 0x7fff) != 0;
        }
        checks++;
        result_close(&r);
        case_close(&c);
    }
    report("zero dO");
}

static int64_t count_bad(const bf16 *x, int64_t n)
{
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        count += (x[i] & 0x7f80) == 0x7f80;
    }
    return count;
}

/* One NaN in dO: the row of dQ and every key that it sees are NaN, and the count says so. */
static void test_a_nan_is_seen(void **state)
{
    (void)state;
    for (int preset = BWD_REPRESENTED; preset <= BWD_BF16; preset++) {
        struct attention_recipe recipe = recipe_of(PV_MXFP4, preset);
        struct attention_case c;
        struct result r;
        if (gpu_leaves_out(3)) {
            continue;
        }
        int64_t D = gqa.head_dim, token = 70;
        case_open(&c, &gqa, &recipe, INPUT_GAUSS, 5);
        case_forward(&c);
        c.dout[token * gqa.heads * D + 5] = 0x7fc0; /* head 0 */
        result_open(&r, &c);
        run_gpu(&c, &plain, &r);
        int64_t dq = count_bad(r.dq, case_queries(&c)), dk = count_bad(r.dk, case_keys(&c)),
                dv = count_bad(r.dv, case_keys(&c));
        failures += dq != D || count_bad(r.dq + token * gqa.heads * D, D) != D;
        failures += dk < (token + 1) * D || dv < token + 1;
        failures += r.stats.non_finite != (double)(1 + dq + dk + dv);
        checks++;
        if (failures > 0) {
            print_message("preset %d: dq %lld dk %lld dv %lld counted %g\n", preset, (long long)dq, (long long)dk,
                          (long long)dv, r.stats.non_finite);
        }
        result_close(&r);
        case_close(&c);
    }
    report("NaN");
}

static int open_gpu(void **state)
{
    (void)state;
    cuda = gpu_open();
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_kernel),
        cmocka_unit_test(test_every_preset_on_every_value_format),
        cmocka_unit_test(test_every_switch_alone),
        cmocka_unit_test(test_forward_options),
        cmocka_unit_test(test_with_its_own_forward),
        cmocka_unit_test(test_a_planted_leak),
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_many_blocks_large),
        cmocka_unit_test(test_equal_bits),
        cmocka_unit_test(test_zero_dout_gives_exact_zeros),
        cmocka_unit_test(test_a_nan_is_seen),
    };
    gpu_arguments(argc, argv);
    return cmocka_run_group_tests(tests, open_gpu, NULL);
}
