/* Shapes, layouts and hard inputs: what must hold in every route, whatever its formats. */
#include "attention/attention_cpu.h"
#include "tests/attention/cases.h"
#include "tests/attention/oracle.h"
#include "tests/test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

static struct attention_shape shape_of(int64_t batch, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim)
{
    return (struct attention_shape){.batch = batch,
                                    .tokens = tokens,
                                    .heads = heads,
                                    .kv_heads = kv_heads,
                                    .head_dim = head_dim,
                                    .causal = true,
                                    .softmax_scale = 1 / sqrtf((float)head_dim)};
}

/* One recipe of each kind, with the errors that its formats allow against exact attention. */
struct route {
    struct attention_recipe recipe;
    double fwd, bwd;
};

enum { ROUTES = 9 };

static int make_routes(struct route *routes)
{
    struct route list[ROUTES] = {
        {attention_recipe_bf16(), .006, .01},
        {recipe_of(PV_FP8, BWD_REPRESENTED), .2, .3},
        {recipe_of(PV_MXFP4, BWD_REPRESENTED), .32, .45},
        {recipe_of(PV_NVFP4, BWD_REPRESENTED), .25, .4},
        {recipe_of(PV_FP4_UE5M3, BWD_REPRESENTED), .25, .4},
        {recipe_of(PV_MXFP4, BWD_RECENTRED), .32, .45},
        {recipe_of(PV_MXFP4, BWD_EXACT_STAT), .32, .45},
        {recipe_of(PV_MXFP4, BWD_SAVED_OUTPUT), .32, .45},
        {recipe_of(PV_FP8, BWD_SAVED_OUTPUT_FIXED), .2, .75}, /* most dS flushes: section 8 */
    };
    list[4].recipe.v_diag = V_DIAG_FP8;
    list[3].recipe.sink_keys_fp8 = 32;
    memcpy(routes, list, sizeof list);
    return ROUTES;
}

static void check_against_exact(const struct attention_shape *shape, const struct route *route)
{
    struct attention_case c;
    case_open(&c, shape, &route->recipe, INPUT_GAUSS, 11);
    case_forward(&c);
    case_backward(&c);
    int64_t queries = case_queries(&c);
    int64_t keys = case_keys(&c);
    double *exact = calloc((size_t)(2 * queries + 2 * keys), sizeof(double));
    double *dq = exact + queries;
    double *dk = dq + queries;
    double *dv = dk + keys;
    struct oracle_problem p = {*shape, &route->recipe, c.q, c.k, c.v, c.dout};
    oracle_exact(&p, exact, dq, dk, dv);
    double error[4] = {rel_l2(c.out, exact, queries), rel_l2(c.dq, dq, queries), rel_l2(c.dk, dk, keys),
                       rel_l2(c.dv, dv, keys)};
    /* With one key P is 1 and dS is zero: what is left of dQ and dK is the rounding of O. */
    bool scores_matter = shape->tokens > 1;
    bool good = error[0] <= route->fwd && error[3] <= route->bwd &&
                (!scores_matter || (error[1] <= route->bwd && error[2] <= route->bwd)) && c.stats.non_finite == 0;
    if (!good) {
        char text[512];
        attention_recipe_print(&route->recipe, text, sizeof text);
        print_message("T %d H %d/%d D %d causal %d: out %.3f dq %.3f dk %.3f dv %.3f\n%s\n", (int)shape->tokens,
                      (int)shape->heads, (int)shape->kv_heads, (int)shape->head_dim, shape->causal, error[0], error[1],
                      error[2], error[3], text);
    }
    assert_true(good);
    free(exact);
    case_close(&c);
}

static void test_any_length_and_any_group_size(void **state)
{
    (void)state;
    static const int64_t tokens[] = {1, 31, 100, 127, 129, 200};
    static const int64_t heads[][2] = {{32, 8}, {6, 2}, {4, 4}, {4, 1}, {12, 3}};
    struct route routes[ROUTES];
    int n = make_routes(routes);
    for (int t = 0; t < 6; t++) {
        for (int h = 0; h < 5; h++) {
            /* Every route meets every length and every group, though not every pair of them. */
            int64_t length = heads[h][0] > 12 && tokens[t] > 31 ? 48 + t : tokens[t];
            struct attention_shape shape = shape_of(1, length, heads[h][0], heads[h][1], t % 2 ? 64 : 32);
            for (int r = (t + h) % 3; r < n; r += 3) {
                check_against_exact(&shape, &routes[r]);
            }
        }
    }
}

static void test_head_dimensions_and_no_mask(void **state)
{
    (void)state;
    static const int64_t dims[] = {16, 48, 64, 128, 256};
    struct route routes[ROUTES];
    int n = make_routes(routes);
    for (int d = 0; d < 5; d++) {
        struct attention_shape shape = shape_of(1, 70, 2, 1, dims[d]);
        for (int r = 0; r < n; r++) {
            shape.causal = r % 2 == d % 2;
            check_against_exact(&shape, &routes[r]);
        }
    }
}

/* ---- layouts ---------------------------------------------------------------------------------------------- */

/* Runs both passes of c with tensors in another layout: element (b, t, h, d) of a tensor with `heads` heads lies at
 * base + b batch + t token + h head + d. Results are copied back to c's contiguous arrays. */
struct layout {
    int64_t batch, token, head;
};

static struct head_view spread(const struct attention_case *c, const bf16 *x, int64_t heads, bf16 *base,
                               struct layout l)
{
    const struct attention_shape *s = &c->shape;
    for (int64_t i = 0; i < s->batch * s->tokens * heads; i++) {
        int64_t h = i % heads;
        int64_t t = i / heads % s->tokens;
        int64_t b = i / heads / s->tokens;
        bf16 *row = base + b * l.batch + t * l.token + h * l.head;
        memcpy(row, x + i * s->head_dim, (size_t)s->head_dim * sizeof(bf16));
    }
    return (struct head_view){base, l.batch, l.token, l.head};
}

static void gather(const struct attention_case *c, struct head_view v, int64_t heads, bf16 *x)
{
    const struct attention_shape *s = &c->shape;
    for (int64_t i = 0; i < s->batch * s->tokens * heads; i++) {
        const bf16 *row = v.data + i / heads / s->tokens * v.batch_stride + i / heads % s->tokens * v.token_stride +
                          i % heads * v.head_stride;
        memcpy(x + i * s->head_dim, row, (size_t)s->head_dim * sizeof(bf16));
    }
}

/* Q, K and V as slices of one fused projection (B, T, H + 2 Hkv, D) with a margin; gradients likewise. */
static void run_fused(struct attention_case *c)
{
    const struct attention_shape *s = &c->shape;
    int64_t D = s->head_dim;
    int64_t width = (s->heads + 2 * s->kv_heads) * D + 32;
    size_t bytes = (size_t)(s->batch * s->tokens * width) * sizeof(bf16);
    bf16 *fused = malloc(bytes);
    bf16 *grads = malloc(bytes);
    bf16 *outs = malloc(bytes);
    memset(fused, 0xff, bytes); /* NaN between the slices */
    memset(grads, 0xff, bytes);
    memset(outs, 0xff, bytes);
    struct layout l = {s->tokens * width, width, D};
    struct head_view q = spread(c, c->q, s->heads, fused, l);
    struct head_view k = spread(c, c->k, s->kv_heads, fused + s->heads * D, l);
    struct head_view v = spread(c, c->v, s->kv_heads, fused + (s->heads + s->kv_heads) * D, l);
    struct head_view dout = spread(c, c->dout, s->heads, outs, l);
    bf16 *apart = malloc(bytes);
    struct head_view out = spread(c, c->out, s->heads, apart, l);
    struct head_view dq = {grads, l.batch, l.token, l.head};
    struct head_view dk = {grads + s->heads * D, l.batch, l.token, l.head};
    struct head_view dv = {grads + (s->heads + s->kv_heads) * D, l.batch, l.token, l.head};
    c->variant->fwd(&(struct attention_fwd){.shape = *s,
                                            .recipe = &c->recipe,
                                            .q = q,
                                            .k = k,
                                            .v = v,
                                            .out = out,
                                            .lse_log2 = c->lse_log2,
                                            .saved = c->saved,
                                            .scratch = c->scratch});
    c->variant->bwd(&(struct attention_bwd){.shape = *s,
                                            .recipe = &c->recipe,
                                            .q = q,
                                            .k = k,
                                            .v = v,
                                            .out = out,
                                            .dout = dout,
                                            .dq = dq,
                                            .dk = dk,
                                            .dv = dv,
                                            .lse_log2 = c->lse_log2,
                                            .saved = c->saved,
                                            .scratch = c->scratch});
    gather(c, out, s->heads, c->out);
    gather(c, dq, s->heads, c->dq);
    gather(c, dk, s->kv_heads, c->dk);
    gather(c, dv, s->kv_heads, c->dv);
    for (int64_t row = 0; row < s->batch * s->tokens; row++) { /* the margin behind the last head is not ours */
        for (int64_t e = width - 32; e < width; e++) {
            assert_int_equal(grads[row * width + e], 0xffff);
        }
    }
    free(fused);
    free(grads);
    free(outs);
    free(apart);
}

/* The results of one run. */
struct result {
    bf16 *out, *dq, *dk, *dv;
    float *lse;
    struct attention_stats stats;
};

static void *copy(const void *x, size_t bytes)
{
    void *y = malloc(bytes);
    memcpy(y, x, bytes);
    return y;
}

static struct result result_of(const struct attention_case *c)
{
    size_t queries = (size_t)case_queries(c) * sizeof(bf16);
    size_t keys = (size_t)case_keys(c) * sizeof(bf16);
    size_t rows = (size_t)(c->shape.batch * c->shape.heads * c->shape.tokens) * sizeof(float);
    return (struct result){copy(c->out, queries), copy(c->dq, queries),    copy(c->dk, keys),
                           copy(c->dv, keys),     copy(c->lse_log2, rows), c->stats};
}

static void result_close(struct result *r)
{
    free(r->out);
    free(r->dq);
    free(r->dk);
    free(r->dv);
    free(r->lse);
}

/* Compares the part of `whole` that starts at a batch with all of c. */
static void assert_same_bits(const struct result *whole, const struct attention_case *c, int64_t batch)
{
    size_t queries = (size_t)case_queries(c);
    size_t keys = (size_t)case_keys(c);
    size_t rows = (size_t)(c->shape.batch * c->shape.heads * c->shape.tokens);
    assert_memory_equal(whole->out + (size_t)batch * queries, c->out, queries * sizeof(bf16));
    assert_memory_equal(whole->dq + (size_t)batch * queries, c->dq, queries * sizeof(bf16));
    assert_memory_equal(whole->dk + (size_t)batch * keys, c->dk, keys * sizeof(bf16));
    assert_memory_equal(whole->dv + (size_t)batch * keys, c->dv, keys * sizeof(bf16));
    assert_memory_equal(whole->lse + (size_t)batch * rows, c->lse_log2, rows * sizeof(float));
}

static void test_slices_of_a_fused_projection_give_the_same_bits(void **state)
{
    (void)state;
    struct route routes[ROUTES];
    int n = make_routes(routes);
    struct attention_shape shape = shape_of(2, 70, 4, 2, 32);
    for (int r = 0; r < n; r++) {
        struct attention_case c;
        case_open(&c, &shape, &routes[r].recipe, INPUT_GAUSS, 5);
        case_forward(&c);
        case_backward(&c);
        struct result contiguous = result_of(&c);
        run_fused(&c);
        assert_same_bits(&contiguous, &c, 0);
        result_close(&contiguous);
        case_close(&c);
    }
}

/* 0: as many as the machine has. Builds without OpenMP have one thread anyway. */
static void use_threads(int n)
{
#ifdef _OPENMP
    omp_set_num_threads(n > 0 ? n : omp_get_num_procs());
#else
    (void)n;
#endif
}

static void test_sequences_of_a_batch_and_threads_do_not_matter(void **state)
{
    (void)state;
    struct route routes[ROUTES];
    int n = make_routes(routes);
    struct attention_shape shape = shape_of(3, 70, 4, 2, 32);
    for (int r = 0; r < n; r++) {
        struct attention_case c;
        case_open(&c, &shape, &routes[r].recipe, INPUT_MIX, 6);
        use_threads(1);
        case_forward(&c);
        case_backward(&c);
        struct result serial = result_of(&c);
        c.stats = (struct attention_stats){0};
        use_threads(3);
        case_forward(&c);
        case_backward(&c);
        assert_same_bits(&serial, &c, 0);
        assert_memory_equal(&serial.stats, &c.stats, sizeof c.stats);
        c.shape.batch = 1;
        bf16 *q = c.q;
        bf16 *k = c.k;
        bf16 *v = c.v;
        bf16 *dout = c.dout;
        for (int64_t b = 0; b < 3; b++) {
            c.q = q + b * case_queries(&c);
            c.k = k + b * case_keys(&c);
            c.v = v + b * case_keys(&c);
            c.dout = dout + b * case_queries(&c);
            case_forward(&c);
            case_backward(&c);
            assert_same_bits(&serial, &c, b);
        }
        c.q = q;
        c.k = k;
        c.v = v;
        c.dout = dout;
        result_close(&serial);
        case_close(&c);
    }
    use_threads(0);
}

/* Inference: without saved state the forward gives the same outputs. */
static void test_forward_without_saved_state(void **state)
{
    (void)state;
    struct route routes[ROUTES];
    int n = make_routes(routes);
    struct attention_shape shape = shape_of(1, 70, 4, 2, 32);
    for (int r = 0; r < n; r++) {
        struct attention_case c;
        case_open(&c, &shape, &routes[r].recipe, INPUT_GAUSS, 8);
        case_forward(&c);
        case_backward(&c);
        struct result kept = result_of(&c);
        void *saved = c.saved;
        c.saved = NULL;
        case_forward(&c);
        assert_same_bits(&kept, &c, 0);
        c.saved = saved;
        result_close(&kept);
        case_close(&c);
    }
}

/* The online anchor moves sums and outputs by powers of two, those of the exact P too, which only backward shows. */
static void test_key_tiles_change_no_bit_of_the_gradients(void **state)
{
    (void)state;
    static const enum backward_preset presets[] = {BWD_REPRESENTED, BWD_RECENTRED, BWD_EXACT_STAT};
    struct attention_shape shape = shape_of(1, 150, 2, 1, 32);
    for (int p = 0; p < 3; p++) {
        struct attention_recipe recipe = recipe_of(PV_MXFP4, presets[p]);
        struct attention_case c;
        case_open(&c, &shape, &recipe, INPUT_PEAKY3, 15);
        case_forward(&c);
        case_backward(&c);
        struct result whole = result_of(&c);
        for (int tile = 32; tile <= 128; tile *= 2) {
            struct attention_cpu_options options = ATTENTION_CPU_DEFAULT;
            options.key_tile = tile;
            struct head_view wide = {.token_stride = 2 * 32, .head_stride = 32};
            struct head_view narrow = {.token_stride = 32, .head_stride = 32};
            struct attention_fwd call = {.shape = shape,
                                         .recipe = &recipe,
                                         .q = wide,
                                         .k = narrow,
                                         .v = narrow,
                                         .out = wide,
                                         .lse_log2 = c.lse_log2,
                                         .saved = c.saved,
                                         .scratch = c.scratch};
            call.q.data = c.q;
            call.k.data = c.k;
            call.v.data = c.v;
            call.out.data = c.out;
            attention_fwd_cpu_with(&call, &options);
            case_backward(&c);
            assert_same_bits(&whole, &c, 0);
        }
        result_close(&whole);
        case_close(&c);
    }
}

/* ---- hard inputs ------------------------------------------------------------------------------------------ */

static void test_zero_dout_gives_exact_zeros(void **state)
{
    (void)state;
    struct route routes[ROUTES];
    int n = make_routes(routes);
    struct attention_shape shape = shape_of(1, 70, 4, 2, 32);
    for (int r = 0; r < n; r++) {
        struct attention_case c;
        case_open(&c, &shape, &routes[r].recipe, INPUT_MIX, 9);
        memset(c.dout, 0, (size_t)case_queries(&c) * sizeof(bf16));
        case_forward(&c);
        case_backward(&c);
        for (int64_t i = 0; i < case_queries(&c); i++) {
            assert_int_equal(c.dq[i] & 0x7fff, 0);
        }
        for (int64_t i = 0; i < case_keys(&c); i++) {
            assert_int_equal(c.dk[i] & 0x7fff, 0);
            assert_int_equal(c.dv[i] & 0x7fff, 0);
        }
        assert_true(c.stats.leak_abs == 0 && c.stats.ds_abs == 0 && c.stats.ds_count == 0 && c.stats.do_count == 0);
        case_close(&c);
    }
}

/* Multipliers follow the size of dO: a power of two in dO passes through to every bit of the gradients. */
static void test_gradients_are_homogeneous_in_dout(void **state)
{
    (void)state;
    static const float factors[] = {0x1p-80f, 0x1p-30f, 0x1p40f, 0x1p80f};
    struct route routes[ROUTES];
    int n = make_routes(routes);
    struct attention_shape shape = shape_of(1, 70, 4, 2, 32);
    for (int r = 0; r < n; r++) {
        struct attention_case c;
        if (routes[r].recipe.do_scale == DO_SCALE_FIXED) {
            continue; /* that is what fixed means */
        }
        case_open(&c, &shape, &routes[r].recipe, INPUT_GAUSS, 14);
        case_forward(&c);
        case_backward(&c);
        struct result plain = result_of(&c);
        bf16 *dout = copy(c.dout, (size_t)case_queries(&c) * sizeof(bf16));
        for (int f = 0; f < 4; f++) {
            for (int64_t i = 0; i < case_queries(&c); i++) {
                c.dout[i] = bf16_from_float(factors[f] * bf16_to_float(dout[i]));
            }
            case_backward(&c);
            for (int64_t i = 0; i < case_queries(&c); i++) {
                c.dq[i] = bf16_from_float(bf16_to_float(c.dq[i]) / factors[f]);
            }
            for (int64_t i = 0; i < case_keys(&c); i++) {
                c.dk[i] = bf16_from_float(bf16_to_float(c.dk[i]) / factors[f]);
                c.dv[i] = bf16_from_float(bf16_to_float(c.dv[i]) / factors[f]);
            }
            assert_same_bits(&plain, &c, 0);
        }
        free(dout);
        result_close(&plain);
        case_close(&c);
    }
}

/* A bad value in any input is counted, and what it spoils is not passed off as sound. */
static void test_nan_and_infinity_are_counted(void **state)
{
    (void)state;
    static const bf16 bad[] = {0x7fc0, 0xffc0, 0x7f80, 0xff80};
    struct route routes[ROUTES];
    int n = make_routes(routes);
    struct attention_shape shape = shape_of(1, 40, 4, 2, 32);
    for (int r = 0; r < n; r++) {
        for (int b = 0; b < 4; b++) {
            for (int tensor = 0; tensor < 4; tensor++) {
                struct attention_case c;
                case_open(&c, &shape, &routes[r].recipe, INPUT_GAUSS, 10);
                bf16 *x[] = {c.q, c.k, c.v, c.dout};
                x[tensor][77] = bad[b];
                case_forward(&c);
                assert_true(tensor == 3 ? c.stats.non_finite == 0 : c.stats.non_finite >= 1);
                bool into_score = tensor < 2 && b < 2;
                assert_true(!into_score || c.stats.non_finite > 1); /* a NaN score must reach the output */
                double before = c.stats.non_finite;
                case_backward(&c);
                assert_true(tensor != 3 || c.stats.non_finite > before);
                case_close(&c);
            }
        }
    }
}

static void test_extreme_logits_stay_finite(void **state)
{
    (void)state;
    struct route routes[ROUTES];
    int n = make_routes(routes);
    struct attention_shape shape = shape_of(1, 70, 4, 2, 32);
    for (int r = 0; r < n; r++) {
        struct attention_case c;
        case_open(&c, &shape, &routes[r].recipe, INPUT_GAUSS, 12);
        float factor = sqrtf(1e4f / 3.0f);
        for (int64_t i = 0; i < case_queries(&c); i++) {
            c.q[i] = bf16_from_float(factor * bf16_to_float(c.q[i]));
        }
        for (int64_t i = 0; i < case_keys(&c); i++) {
            c.k[i] = bf16_from_float(factor * bf16_to_float(c.k[i]));
        }
        case_forward(&c);
        case_backward(&c);
        assert_true(c.stats.logit_max > 5e3 && c.stats.logit_max < 1e5);
        assert_true(c.stats.non_finite == 0);
        for (int64_t i = 0; i < shape.heads * shape.tokens; i++) {
            assert_true(isfinite(c.lse_log2[i]));
        }
        case_close(&c);
    }
}

/* Equal keys share the mass evenly: the output is the mean of the represented V that a row sees. */
static void test_equal_logits_give_the_mean(void **state)
{
    (void)state;
    struct route routes[ROUTES];
    int n = make_routes(routes);
    struct attention_shape shape = shape_of(1, 70, 2, 1, 32);
    for (int r = 0; r < n; r++) {
        struct attention_case c;
        case_open(&c, &shape, &routes[r].recipe, INPUT_GAUSS, 13);
        for (int64_t i = 0; i < case_keys(&c); i++) {
            c.k[i] = c.k[i % shape.head_dim];
            c.v[i] = bf16_from_float(i / shape.head_dim % 2 ? 1.0f : 0.5f);
        }
        case_forward(&c);
        for (int64_t i = 0; i < shape.tokens; i++) {
            double odd = (double)((i + 1) / 2);
            double mean = (odd + 0.5 * ((double)(i + 1) - odd)) / (double)(i + 1);
            double found = (double)bf16_to_float(c.out[i * shape.heads * shape.head_dim]);
            /* Scales of NVFP4 and UE5M3 have three mantissa bits: V of 1 is off by up to 1/16 / 2. The others hold it.
             */
            bool scaled = routes[r].recipe.pv == PV_NVFP4 || routes[r].recipe.pv == PV_FP4_UE5M3;
            assert_true(fabs(found - mean) <= (scaled ? 0.035 : 0.004));
        }
        case_close(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_any_length_and_any_group_size),
        cmocka_unit_test(test_head_dimensions_and_no_mask),
        cmocka_unit_test(test_slices_of_a_fused_projection_give_the_same_bits),
        cmocka_unit_test(test_sequences_of_a_batch_and_threads_do_not_matter),
        cmocka_unit_test(test_forward_without_saved_state),
        cmocka_unit_test(test_key_tiles_change_no_bit_of_the_gradients),
        cmocka_unit_test(test_zero_dout_gives_exact_zeros),
        cmocka_unit_test(test_gradients_are_homogeneous_in_dout),
        cmocka_unit_test(test_nan_and_infinity_are_counted),
        cmocka_unit_test(test_extreme_logits_stay_finite),
        cmocka_unit_test(test_equal_logits_give_the_mean),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
