/* Projections on the GPU against the CPU's: represented operands bit by bit, products within what sums in FP32 (BF16)
 * or in Hopper's FP8 tensor cores may differ by. */
#include "model/linear.h"

#include "core/gemm.h"
#include "core/rng.h"
#include "model/linear_format.h"
#include "numerics/formats.h"

#include "tests/gpu.h"

#include <math.h>
#include <stdio.h>

static struct cuda *cuda;

enum { SEED = 9, STREAM = 77, SAMPLE = 5, UPDATE = 3, KINDS = 8 };
static const struct cuda_step first_step = {.sample = SAMPLE, .update = UPDATE, .loss_scale = 1};

static const char *const kind_names[KINDS] = {"normal", "zeros", "any bits", "small",
                                              "limits", "large", "outlier",  "one NaN"};

/* Inputs of a kind: normal numbers; zeros of both signs; all finite codes; subnormal BF16; magnitudes on the limits of
 * scales, where a comparison decides; near overflow; one outlier; one NaN in the last place. */
static bf16 number(int kind, uint64_t stream, int64_t i, int64_t n)
{
    const uint32_t bits = rng_bits(1, stream, 1, (uint64_t)i);
    const float normal = rng_normal(1, stream, (uint64_t)i);
    static const float limits[] = {448, 450, 57344, 57600, 2688, 2704, 1, 6, 6.5F, 0.4375F};
    switch (kind) {
    case 1:
        return (bf16)((bits & 1) << 15);
    case 2:
        return (bf16)((bits & 0x7f80) == 0x7f80 ? bits & 0xbfff : bits & 0xffff);
    case 3:
        return (bf16)(bits & 0x803f);
    case 4:
        return bf16_from_float(i % 97 == 3 ? limits[stream % 10] : limits[stream % 10] * 0.11F * normal / 6);
    case 5:
        return bf16_from_float(normal * 1e37F);
    case 6:
        return bf16_from_float(i == n / 2 ? 3e4F : normal);
    case 7:
        return (bf16)(i == n - 1 ? 0x7fff : bf16_from_float(normal));
    default:
        return bf16_from_float(normal * 1.5F);
    }
}

static bf16 *numbers(int kind, uint64_t stream, int64_t n)
{
    bf16 *x = malloc((size_t)n * sizeof *x);
    assert_non_null(x);
    for (int64_t i = 0; i < n; i++) {
        x[i] = number(kind, stream, i, n);
    }
    return x;
}

static bool bits_equal(const char *what, const bf16 *got, const bf16 *want, int64_t n)
{
    int64_t wrong = 0, first = -1;
    for (int64_t i = 0; i < n; i++) {
        if (got[i] != want[i]) {
            first = wrong++ == 0 ? i : first;
        }
    }
    if (wrong != 0) {
        print_message("FAIL %s: %ld of %ld differ, the first at %ld: %04x, expected %04x\n", what, (long)wrong, (long)n,
                      (long)first, (unsigned)got[first], (unsigned)want[first]);
    }
    return wrong == 0;
}

/* ---- FP8 operands ---- */

/* Values of codes (rows, cols) that lie `row` and `col` apart. */
static void decode(const uint8_t *codes, bool e5m2, float scale, int64_t rows, int64_t cols, int64_t row, int64_t col,
                   bf16 *y)
{
    for (int64_t i = 0; i < rows * cols; i++) {
        uint8_t code = codes[i / cols * row + i % cols * col];
        y[i] = bf16_from_float((e5m2 ? e5m2_to_float(code) : e4m3_to_float(code)) * scale);
    }
}

static bool zeros_behind(const uint8_t *turned, int64_t rows, int64_t cols)
{
    const int64_t padded = linear_padded(rows);
    for (int64_t i = 0; i < cols * padded; i++) {
        if (i % padded >= rows && turned[i] != 0) {
            print_message("FAIL: code %02x behind the last row\n", turned[i]);
            return false;
        }
    }
    return true;
}

struct fp8 {
    float amax, scale;
    uint8_t *codes, *turned; /* host */
};

/* views: 1 codes, 2 transposed, 3 both */
static struct fp8 encode_on_gpu(const bf16 *x, int64_t rows, int64_t cols, bool e5m2, int views)
{
    struct fp8 r;
    const size_t bytes = (size_t)(rows * cols), turned_bytes = (size_t)(linear_padded(rows) * cols);
    bf16 *device = gpu_array(cuda, x, 2 * bytes);
    float *numbers = gpu_array(cuda, NULL, 2 * sizeof(float));
    uint8_t *codes = gpu_array(cuda, NULL, bytes), *turned = gpu_array(cuda, NULL, turned_bytes);
    struct linear_codes call = {.x = device, .rows = rows, .cols = cols, .amax = numbers, .scale = numbers + 1};
    call.codes = views & 1 ? codes : NULL;
    call.turned = views & 2 ? turned : NULL;
    linear_amax_cuda(device, rows * cols, numbers, cuda);
    if (e5m2) {
        linear_encode_e5m2_cuda(&call, cuda);
    } else {
        linear_encode_e4m3_cuda(&call, cuda);
    }
    r.codes = malloc(bytes);
    r.turned = malloc(turned_bytes);
    gpu_fetch(cuda, r.codes, codes, bytes);
    gpu_fetch(cuda, r.turned, turned, turned_bytes);
    gpu_fetch(cuda, &r.amax, numbers, 2 * sizeof(float));
    cuda_free(device);
    cuda_free(numbers);
    cuda_free(codes);
    cuda_free(turned);
    return r;
}

static void fp8_free(struct fp8 *r)
{
    free(r->codes);
    free(r->turned);
}

static bool check_fp8(int64_t rows, int64_t cols, int kind, bool e5m2, int views)
{
    const int64_t n = rows * cols;
    bf16 *x = numbers(kind, (uint64_t)(10 + rows), n), *want = malloc((size_t)n * 2), *got = malloc((size_t)n * 2);
    struct fp8 r = encode_on_gpu(x, rows, cols, e5m2, views), again = encode_on_gpu(x, rows, cols, e5m2, views);
    char what[160];
    bool good = true;
    snprintf(what, sizeof what, "%s %ld x %ld, %s, views %d", e5m2 ? "E5M2" : "E4M3", (long)rows, (long)cols,
             kind_names[kind], views);
    if (e5m2) {
        linear_round_e5m2(x, n, want);
    } else {
        linear_round_e4m3(x, n, want);
    }
    if (kind == KINDS - 1) {
        good = isnan(r.scale) && isnan(r.amax);
    } else {
        if (views & 1) {
            decode(r.codes, e5m2, r.scale, rows, cols, cols, 1, got);
            good = bits_equal(what, got, want, n) && good;
        }
        if (views & 2) {
            decode(r.turned, e5m2, r.scale, rows, cols, 1, linear_padded(rows), got);
            good = bits_equal(what, got, want, n) && zeros_behind(r.turned, rows, cols) && good;
        }
        good = memcmp(r.codes, again.codes, (size_t)n) == 0 &&
               memcmp(r.turned, again.turned, (size_t)(linear_padded(rows) * cols)) == 0 && good;
    }
    if (!good) {
        print_message("FAIL %s: amax %g scale %g\n", what, (double)r.amax, (double)r.scale);
    }
    fp8_free(&r);
    fp8_free(&again);
    free(x);
    free(want);
    free(got);
    return good;
}

static const int64_t sizes[][2] = {{1, 16}, {16, 16}, {17, 48}, {39, 272}, {128, 256}, {200, 528}};
enum { SIZES = sizeof sizes / sizeof sizes[0] };

static void test_fp8_codes_are_those_of_the_cpu(void **state)
{
    (void)state;
    bool good = true;
    for (int i = 0; i < SIZES; i++) {
        for (int kind = 0; kind < KINDS; kind++) {
            for (int e5m2 = 0; e5m2 < 2; e5m2++) {
                good = (gpu_leaves_out(3) || check_fp8(sizes[i][0], sizes[i][1], kind, e5m2, 3)) && good;
            }
        }
        good = check_fp8(sizes[i][0], sizes[i][1], 0, false, 1) && good;
        good = check_fp8(sizes[i][0], sizes[i][1], 0, true, 2) && good;
    }
    assert_true(good);
}

/* ---- NVFP4 operands ---- */

enum use { ROWS_NEAREST, ROWS_RANDOM, TILES, HADAMARD_NEAREST, HADAMARD_RANDOM, USES };

static const char *const use_names[USES] = {"rows", "rows, stochastic", "tiles", "Hadamard", "Hadamard, stochastic"};

static void round_on_cpu(enum use use, const struct cuda_step *step, const bf16 *x, int64_t rows, int64_t cols, bf16 *y)
{
    const struct rng_words words = rng_words(SEED, STREAM, step->sample);
    const struct linear_rounding rounding = {.stochastic = use == ROWS_RANDOM || use == HADAMARD_RANDOM,
                                             .seed = SEED,
                                             .stream = (uint64_t)words.w[1] << 32 | words.w[0],
                                             .update = step->update};
    float *transformed = malloc((size_t)(rows * cols) * sizeof(float));
    if (use == TILES) {
        linear_round_tiles(x, rows, cols, y);
    } else if (use == ROWS_NEAREST || use == ROWS_RANDOM) {
        linear_round_rows(x, rows, cols, &rounding, y);
    } else {
        linear_round_hadamard(x, rows, cols, &rounding, transformed, y);
    }
    free(transformed);
}

static void round_on_gpu(enum use use, const bf16 *x, int64_t rows, int64_t cols, bf16 *y)
{
    const size_t bytes = (size_t)(rows * cols) * sizeof *x;
    const struct linear_random random = {.seed = SEED, .stream = STREAM};
    bf16 *device = gpu_array(cuda, x, bytes), *out = gpu_array(cuda, NULL, bytes);
    float *amax = gpu_array(cuda, NULL, sizeof(float));
    struct linear_values call = {.x = device, .rows = rows, .cols = cols, .amax = amax, .y = out};
    call.random = use == ROWS_RANDOM || use == HADAMARD_RANDOM ? &random : NULL;
    if (use == HADAMARD_NEAREST || use == HADAMARD_RANDOM) {
        linear_amax_hadamard_cuda(device, rows, cols, amax, cuda);
        linear_round_hadamard_cuda(&call, cuda);
    } else {
        linear_amax_cuda(device, rows * cols, amax, cuda);
        if (use == TILES) {
            linear_round_tiles_cuda(&call, cuda);
        } else {
            linear_round_rows_cuda(&call, cuda);
        }
    }
    gpu_fetch(cuda, y, out, bytes);
    cuda_free(device);
    cuda_free(out);
    cuda_free(amax);
}

static void test_nvfp4_values_are_those_of_the_cpu(void **state)
{
    (void)state;
    bool good = true;
    for (int i = 0; i < SIZES * KINDS * USES; i++) {
        if (gpu_leaves_out(7)) {
            continue;
        }
        const enum use use = (enum use)(i % USES);
        const int kind = i / USES % KINDS;
        const int64_t rows = use == TILES ? linear_padded(sizes[i / USES / KINDS][0]) : sizes[i / USES / KINDS][0];
        const int64_t cols = sizes[i / USES / KINDS][1], n = rows * cols;
        bf16 *x = numbers(kind, (uint64_t)(10 + rows), n), *want = malloc((size_t)n * 2), *got = malloc((size_t)n * 2);
        char what[160];
        snprintf(what, sizeof what, "NVFP4 %s, %ld x %ld, %s", use_names[use], (long)rows, (long)cols,
                 kind_names[kind]);
        round_on_cpu(use, &first_step, x, rows, cols, want);
        round_on_gpu(use, x, rows, cols, got);
        good = bits_equal(what, got, want, n) && good;
        free(x);
        free(want);
        free(got);
    }
    assert_true(good);
}

/* A captured graph draws the numbers of the step in which it is launched. */
static void test_graphs_follow_the_step(void **state)
{
    (void)state;
    enum { ROWS = 32, COLS = 64 };
    const struct cuda_step later = {.sample = SAMPLE + 8, .update = UPDATE + 1};
    const struct linear_random random = {.seed = SEED, .stream = STREAM};
    bf16 *x = numbers(0, 1, ROWS * COLS), want[ROWS * COLS], got[ROWS * COLS];
    bf16 *device = gpu_array(cuda, x, sizeof want), *out = gpu_array(cuda, NULL, sizeof want);
    float *amax = gpu_array(cuda, NULL, sizeof(float));
    struct cuda_graph *graph;
    assert_int_equal(cuda_graph_begin(cuda), OK);
    linear_amax_cuda(device, ROWS * COLS, amax, cuda);
    linear_round_rows_cuda(
        &(struct linear_values){.x = device, .rows = ROWS, .cols = COLS, .amax = amax, .random = &random, .y = out},
        cuda);
    assert_int_equal(cuda_graph_end(cuda, &graph), OK);
    const struct cuda_step *const steps[] = {&later, &first_step};
    for (int i = 0; i < 2; i++) {
        cuda_set_step(cuda, steps[i]);
        cuda_graph_launch(cuda, graph);
        gpu_fetch(cuda, got, out, sizeof got);
        round_on_cpu(ROWS_RANDOM, steps[i], x, ROWS, COLS, want);
        assert_memory_equal(got, want, sizeof want);
    }
    cuda_graph_close(graph);
    cuda_free(device);
    cuda_free(out);
    cuda_free(amax);
    free(x);
}

/* ---- the operator ---- */

struct shape {
    int64_t rows, in, out;
};

/* Everything that the operator makes: on the CPU, or fetched from the GPU. */
struct results {
    bf16 *y, *dx;
    void *dw;
};

struct problem {
    struct shape s;
    struct linear linear;
    bf16 *w, *x, *dy, *represented;
    float *dw_before;
};

static struct problem problem_make(enum linear_format format, struct shape s, int x_kind)
{
    struct problem p = {.s = s};
    p.w = numbers(0, 2, s.out * s.in);
    p.x = numbers(x_kind, 3, s.rows * s.in);
    p.dy = numbers(0, 4, s.rows * s.out);
    for (int64_t i = 0; i < s.rows * s.out; i++) {
        p.dy[i] = bf16_from_float(bf16_to_float(p.dy[i]) * 1e-4F);
    }
    p.represented = malloc((size_t)(s.out * s.in) * sizeof(bf16));
    p.dw_before = malloc((size_t)(s.out * s.in) * sizeof(float));
    for (int64_t i = 0; i < s.out * s.in; i++) {
        p.dw_before[i] = bf16_to_float(bf16_from_float(1e-3F * rng_normal(1, 5, (uint64_t)i)));
    }
    p.linear = (struct linear){.format = format, .in = s.in, .out = s.out, .weight = p.w, .stream = STREAM};
    if (format != LINEAR_BF16) {
        linear_represent_weight_cpu(format, p.w, s.out, s.in, p.represented);
        p.linear.weight = p.represented;
    }
    return p;
}

static void problem_free(struct problem *p)
{
    free(p->w);
    free(p->x);
    free(p->dy);
    free(p->represented);
    free(p->dw_before);
}

static struct results results_make(const struct shape *s)
{
    return (struct results){.y = malloc((size_t)(s->rows * s->out) * sizeof(bf16)),
                            .dx = malloc((size_t)(s->rows * s->in) * sizeof(bf16)),
                            .dw = malloc((size_t)(s->out * s->in) * sizeof(float))};
}

static void results_free(struct results *r)
{
    free(r->y);
    free(r->dx);
    free(r->dw);
}

static struct linear_bwd backward_call(const struct problem *p, bool accumulate)
{
    return (struct linear_bwd){.linear = &p->linear,
                               .rows = p->s.rows,
                               .grad_type = DTYPE_F32,
                               .accumulate = accumulate,
                               .seed = SEED,
                               .sample = SAMPLE,
                               .update = UPDATE};
}

static void run_on_cpu(const struct problem *p, bool accumulate, struct results *r)
{
    const struct shape *s = &p->s;
    struct linear_bwd b = backward_call(p, accumulate);
    void *scratch = malloc(linear_scratch_bytes(p->linear.format, s->rows, s->in, s->out) + 1);
    linear_fwd_cpu(
        &(struct linear_fwd){.linear = &p->linear, .rows = s->rows, .x = p->x, .y = r->y, .scratch = scratch});
    memcpy(r->dw, p->dw_before, (size_t)(s->out * s->in) * sizeof(float));
    b.x = p->x;
    b.dy = p->dy;
    b.dx = r->dx;
    b.dw = r->dw;
    b.scratch = scratch;
    linear_bwd_cpu(&b);
    free(scratch);
}

/* dw as it was before, in the type of gradients. */
static void *dw_before(const struct problem *p, enum dtype type, size_t *bytes)
{
    const int64_t n = p->s.out * p->s.in;
    bf16 *codes = malloc((size_t)n * sizeof(float));
    *bytes = (size_t)n * dtype_bytes(type);
    memcpy(codes, p->dw_before, (size_t)n * sizeof(float));
    for (int64_t i = 0; type == DTYPE_BF16 && i < n; i++) {
        codes[i] = bf16_from_float(p->dw_before[i]);
    }
    return codes;
}

/* known: the amax of w, x and dy is given, as a kernel before could have found it. apart: dw and dx come from a call
 * each.
 */
static void run_on_gpu(const struct problem *p, enum dtype grad_type, bool accumulate, bool known, bool apart,
                       struct results *r)
{
    const struct shape *s = &p->s;
    const size_t x_bytes = (size_t)(s->rows * s->in) * 2, y_bytes = (size_t)(s->rows * s->out) * 2;
    const enum linear_format format = p->linear.format;
    size_t dw_bytes;
    void *before = dw_before(p, grad_type, &dw_bytes);
    bf16 *w = gpu_array(cuda, p->w, (size_t)(s->out * s->in) * 2), *x = gpu_array(cuda, p->x, x_bytes);
    bf16 *dy = gpu_array(cuda, p->dy, y_bytes), *y = gpu_array(cuda, NULL, y_bytes),
         *dx = gpu_array(cuda, NULL, x_bytes);
    /* Without `accumulate` dw starts as NaN. */
    void *dw = gpu_array(cuda, accumulate ? before : NULL, dw_bytes);
    const size_t weight_bytes = linear_weight_bytes_cuda(format, s->out, s->in);
    const size_t scratch_bytes = linear_scratch_bytes_cuda(format, s->rows, s->in, s->out);
    void *weight = gpu_array(cuda, NULL, weight_bytes), *scratch = gpu_array(cuda, NULL, scratch_bytes);
    float *amax = gpu_array(cuda, NULL, 3 * sizeof(float));
    struct linear linear = p->linear;
    struct linear_bwd b = backward_call(p, accumulate);
    known = known && format != LINEAR_BF16;
    if (known) {
        linear_amax_cuda(x, s->rows * s->in, amax, cuda);
        linear_amax_cuda(dy, s->rows * s->out, amax + 1, cuda);
        linear_amax_cuda(w, s->out * s->in, amax + 2, cuda);
        linear.amax = amax + 2;
    }
    linear_represent_weight_cuda(&linear, w, weight, cuda);
    b.linear = &linear;
    b.x = x;
    b.dy = dy;
    b.dx = dx;
    b.dw = dw;
    b.grad_type = grad_type;
    b.scratch = scratch;
    b.x_amax = known ? amax : NULL;
    b.dy_amax = known ? amax + 1 : NULL;
    linear_fwd_cuda(
        &(struct linear_fwd){
            .linear = &linear, .rows = s->rows, .x = x, .y = y, .scratch = scratch, .x_amax = b.x_amax},
        cuda);
    if (apart) {
        b.dx = NULL;
        linear_bwd_cuda(&b, cuda);
        b.dx = dx;
        b.dw = NULL;
    }
    linear_bwd_cuda(&b, cuda);
    gpu_fetch(cuda, r->y, y, y_bytes);
    gpu_fetch(cuda, r->dx, dx, x_bytes);
    gpu_fetch(cuda, r->dw, dw, dw_bytes);
    unsigned char *guard = malloc(weight_bytes > scratch_bytes ? weight_bytes : scratch_bytes);
    gpu_fetch(cuda, guard, weight, weight_bytes);
    gpu_fetch(cuda, guard, scratch, scratch_bytes);
    free(guard);
    void *const arrays[] = {w, x, dy, y, dx, dw, weight, scratch, amax};
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) {
        cuda_free(arrays[i]);
    }
    free(before);
}

/* Sums of |terms| of a product of represented operands, by the CPU's own product. */
static float *magnitudes(const struct gemm *product)
{
    struct gemm g = *product;
    const int64_t a_n = g.m * g.k, b_n = g.n * g.k;
    bf16 *a = malloc((size_t)a_n * 2), *b = malloc((size_t)b_n * 2);
    float *c = malloc((size_t)(g.m * g.n) * sizeof(float));
    for (int64_t i = 0; i < a_n; i++) {
        a[i] = ((const bf16 *)g.a)[i] & 0x7fff;
    }
    for (int64_t i = 0; i < b_n; i++) {
        b[i] = ((const bf16 *)g.b)[i] & 0x7fff;
    }
    g.a = a;
    g.b = b;
    g.c = c;
    g.a_type = g.b_type = DTYPE_BF16;
    g.c_type = DTYPE_F32;
    g.alpha = 1;
    g.lda = g.trans_a ? g.m : g.k;
    g.ldb = g.trans_b ? g.k : g.n;
    g.ldc = g.n;
    gemm_cpu(&g);
    free(a);
    free(b);
    return c;
}

/* Of what is allowed, the largest part that is used. Sums of both sides err by k 2^-24 of the magnitudes, those of FP8
 * on the GPU by 2^-11 (why: tests/core/gpu_gemm.c); BF16 results by half a unit each; dw in BF16 may be rounded before
 * it is added. */
static double worst(const struct gemm *product, const void *got, enum dtype got_type, const void *want,
                    enum dtype want_type, const float *before, bool fp8)
{
    float *magnitude = magnitudes(product);
    double result = 0;
    for (int64_t i = 0; i < product->m * product->n; i++) {
        double g =
            got_type == DTYPE_F32 ? (double)((const float *)got)[i] : (double)bf16_to_float(((const bf16 *)got)[i]);
        double w =
            want_type == DTYPE_F32 ? (double)((const float *)want)[i] : (double)bf16_to_float(((const bf16 *)want)[i]);
        double sums = (double)magnitude[i] * ((double)(2 * product->k + 4) * 0x1p-24 + (fp8 ? 0x1p-11 : 0.0));
        double added = before != NULL ? fabs(w - (double)before[i]) : 0.0;
        double rounded = (got_type == DTYPE_BF16 ? 0x1p-8 * (fabs(w) + added) : 0x1p-23 * fabs(w)) +
                         (want_type == DTYPE_BF16 ? 0x1p-8 * fabs(w) : 0.0);
        double error = isnan(g) && isnan(w) ? 0.0 : fabs(g - w) / (sums + rounded + 1e-36);
        result = error <= result ? result : error;
    }
    free(magnitude);
    return result;
}

struct errors {
    double y, dx, dw;
};

static struct errors compare(const struct problem *p, const struct results *got, enum dtype grad_type, bool accumulate,
                             const struct results *want)
{
    const float *before = accumulate ? p->dw_before : NULL;
    const struct shape *s = &p->s;
    const bool fp8 = p->linear.format == LINEAR_FP8;
    const bf16 *w = p->linear.weight;
    return (struct errors){
        .y = worst(&(struct gemm){.m = s->rows, .n = s->out, .k = s->in, .a = p->x, .b = w, .trans_b = true}, got->y,
                   DTYPE_BF16, want->y, DTYPE_BF16, NULL, fp8),
        .dx = worst(&(struct gemm){.m = s->rows, .n = s->in, .k = s->out, .a = p->dy, .b = w}, got->dx, DTYPE_BF16,
                    want->dx, DTYPE_BF16, NULL, fp8),
        .dw = worst(&(struct gemm){.m = s->out, .n = s->in, .k = s->rows, .a = p->dy, .b = p->x, .trans_a = true},
                    got->dw, grad_type, want->dw, DTYPE_F32, before, fp8),
    };
}

static bool same_results(const struct shape *s, const struct results *a, const struct results *b, enum dtype grad_type)
{
    return memcmp(a->y, b->y, (size_t)(s->rows * s->out) * 2) == 0 &&
           memcmp(a->dx, b->dx, (size_t)(s->rows * s->in) * 2) == 0 &&
           memcmp(a->dw, b->dw, (size_t)(s->out * s->in) * dtype_bytes(grad_type)) == 0;
}

/* x_kind KINDS - 1: a NaN in x must reach all that is made from x; y and dw are compared NaN by NaN. */
static bool check(enum linear_format format, struct shape s, int x_kind, enum dtype grad_type, bool accumulate)
{
    if (gpu_leaves_out(3)) {
        return true;
    }
    struct problem p = problem_make(format, s, x_kind);
    struct results want = results_make(&s), got = results_make(&s), again = results_make(&s);
    run_on_cpu(&p, accumulate, &want);
    run_on_gpu(&p, grad_type, accumulate, false, false, &got);
    run_on_gpu(&p, grad_type, accumulate, true, true, &again);
    const struct errors e = compare(&p, &got, grad_type, accumulate, &want);
    const bool same = same_results(&s, &got, &again, grad_type);
    const bool good = e.y <= 1 && e.dx <= 1 && e.dw <= 1 && same;
    print_message("%s %s %ld x %ld -> %ld, x %s, dw %s%s: of allowed y %.3f dx %.3f dw %.3f%s\n",
                  good ? "ok  " : "FAIL", linear_format_names[format], (long)s.rows, (long)s.in, (long)s.out,
                  kind_names[x_kind], grad_type == DTYPE_F32 ? "FP32" : "BF16", accumulate ? " added" : "", e.y, e.dx,
                  e.dw, same ? "" : ", BITS DIFFER");
    results_free(&want);
    results_free(&got);
    results_free(&again);
    problem_free(&p);
    return good;
}

static void test_projections_match_the_cpu(void **state)
{
    (void)state;
    static const struct shape shapes[] = {{1, 16, 32}, {39, 48, 80}, {130, 272, 400}, {256, 512, 768}};
    bool good = check(LINEAR_BF16, (struct shape){5, 21, 35}, 0, DTYPE_F32, true);
    for (int format = LINEAR_BF16; format <= LINEAR_NVFP4; format++) {
        for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
            good = check((enum linear_format)format, shapes[i], 0, DTYPE_F32, i % 2) && good;
            good = check((enum linear_format)format, shapes[i], 0, DTYPE_BF16, i % 2 == 0) && good;
        }
        good = check((enum linear_format)format, shapes[1], 6, DTYPE_F32, false) && good;
        good = check((enum linear_format)format, shapes[1], KINDS - 1, DTYPE_F32, false) && good;
    }
    assert_true(good);
}

static int open_gpu(void **state)
{
    (void)state;
    cuda = gpu_open();
    cuda_set_step(cuda, &first_step);
    return cuda_sync(cuda, "the step's numbers") == OK ? 0 : -1;
}

static int close_gpu(void **state)
{
    (void)state;
    cuda_close(cuda);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fp8_codes_are_those_of_the_cpu),
        cmocka_unit_test(test_nvfp4_values_are_those_of_the_cpu),
        cmocka_unit_test(test_graphs_follow_the_step),
        cmocka_unit_test(test_projections_match_the_cpu),
    };
    gpu_arguments(argc, argv);
    return cmocka_run_group_tests(tests, open_gpu, close_gpu);
}
