/* bench: matrix products of the 8B model on the GPU, their quantisers, and whole projections by format.
 *   build/release/bench/gemm_cuda [products|quantise|projections]
 * Times are medians of calls between CUDA events, after WARM_MS of the same calls: long products run at the clock that
 * the power limit leaves, which a pause would raise for a while. Random numbers: zeros draw less power. Rates of
 * quantisers count the bytes that must move, beside a device copy measured in the same run. */
#include "core/gemm_cuda.h"
#include "bench/gpu.h"
#include "core/rng.h"
#include "model/linear.h"
#include "model/linear_format.h"
#include "numerics/formats.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CALLS = 9, WARM_MS = 50, PATTERN = 1 << 22 };

/* The second one never plans a product: the library's first proposals. */
static struct cuda *gpu, *unplanned;
static struct cuda_event *from, *to;

/* ---- memory: random numbers of each type, repeated ---- */

static void *pattern(enum dtype type)
{
    uint8_t *host = malloc(PATTERN * dtype_bytes(type));
    void *device;
    ASSERT(host);
    for (uint64_t i = 0; i < PATTERN; i++) {
        float x = rng_normal(1, 1, i);
        if (type == DTYPE_BF16) {
            ((bf16 *)host)[i] = bf16_from_float(x);
        } else {
            host[i] = type == DTYPE_E4M3 ? e4m3_from_float(64 * x) : e5m2_from_float(8192 * x);
        }
    }
    must(cuda_alloc(&device, PATTERN * dtype_bytes(type), "a pattern"));
    cuda_upload(gpu, device, host, PATTERN * dtype_bytes(type));
    must(cuda_sync(gpu, "upload"));
    free(host);
    return device;
}

static void *array(const void *filler, enum dtype type, int64_t n)
{
    uint8_t *device;
    must(cuda_alloc((void **)&device, (size_t)n * dtype_bytes(type), "a benchmark"));
    for (int64_t i = 0; filler && i < n; i += PATTERN) {
        int64_t piece = n - i < PATTERN ? n - i : PATTERN;
        cuda_copy(gpu, device + (size_t)i * dtype_bytes(type), filler, (size_t)piece * dtype_bytes(type));
    }
    must(cuda_sync(gpu, "filling"));
    return device;
}

/* ---- time ---- */

static double timed_ms(void (*call)(const struct cuda *, const void *), const struct cuda *on, const void *context)
{
    cuda_event_record(on, from);
    call(on, context);
    cuda_event_record(on, to);
    must(cuda_sync(on, "timing"));
    return cuda_event_ms(from, to);
}

static void warm_up(void (*call)(const struct cuda *, const void *), const void *context)
{
    for (double spent = 0; spent < WARM_MS;) {
        spent += timed_ms(call, gpu, context);
    }
}

/* Median milliseconds of a call. */
static double median_ms(void (*call)(const struct cuda *, const void *), const void *context)
{
    double ms[CALLS];
    warm_up(call, context);
    for (int i = 0; i < CALLS; i++) {
        ms[i] = timed_ms(call, gpu, context);
    }
    return median(ms, CALLS);
}

/* ---- products ---- */

struct projection {
    const char *name;
    int64_t out, in;
};

static const struct projection projections[] = {
    {"qkv", 6144, 4096}, {"o", 4096, 4096}, {"gate_up", 28672, 4096}, {"down", 4096, 14336}, {"head", 128256, 4096},
};
enum { PROJECTIONS = sizeof projections / sizeof projections[0], HEAD = PROJECTIONS - 1 };

static void *bf16_pattern, *e4m3_pattern, *e5m2_pattern;

static void call_product(const struct cuda *on, const void *context)
{
    gemm_cuda(on, context);
}

/* The rate of the library's first proposal and of the chosen one, TF/s. */
static void product_line(const char *what, const char *name, struct gemm_cuda *g)
{
    const enum dtype types[] = {g->a_type, g->b_type};
    void *operands[2];
    float one = 1, *scale;
    for (int i = 0; i < 2; i++) {
        const void *filler = types[i] == DTYPE_BF16   ? bf16_pattern
                             : types[i] == DTYPE_E4M3 ? e4m3_pattern
                                                      : e5m2_pattern;
        operands[i] = array(filler, types[i], (i == 0 ? g->m : g->n) * g->k);
    }
    must(cuda_alloc((void **)&scale, sizeof *scale, "a scale"));
    cuda_upload(gpu, scale, &one, sizeof one);
    g->a = operands[0];
    g->b = operands[1];
    g->c = array(NULL, g->c_type, g->m * g->n);
    cuda_zero(gpu, g->c, (size_t)(g->m * g->n) * dtype_bytes(g->c_type));
    g->lda = g->trans_a ? g->m : g->k;
    g->ldb = g->trans_b ? g->k : g->n;
    g->ldc = g->n;
    g->alpha = 1;
    g->a_scale = g->b_scale = g->a_type == DTYPE_BF16 ? NULL : scale;
    const double work = 2e-9 * (double)g->m * (double)g->n * (double)g->k;
    double firsts[CALLS], chosens[CALLS];
    must(gemm_cuda_plan(gpu, g));
    warm_up(call_product, g);
    for (int i = 0; i < CALLS; i++) {
        firsts[i] = timed_ms(call_product, unplanned, g);
        chosens[i] = timed_ms(call_product, gpu, g);
    }
    double first = median(firsts, CALLS), chosen = median(chosens, CALLS);
    printf("%-8s %-22s %6ld %6ld %6ld %8.3f %7.0f %7.0f\n", name, what, (long)g->m, (long)g->n, (long)g->k, chosen,
           work / chosen, work / first);
    cuda_free(operands[0]);
    cuda_free(operands[1]);
    cuda_free(g->c);
    cuda_free(scale);
}

static void bf16_lines(const struct projection *p, int64_t m)
{
    const enum dtype b = DTYPE_BF16, f = DTYPE_F32;
    product_line(
        "bf16 y", p->name,
        &(struct gemm_cuda){.m = m, .n = p->out, .k = p->in, .trans_b = true, .a_type = b, .b_type = b, .c_type = b});
    product_line("bf16 dx", p->name,
                 &(struct gemm_cuda){.m = m, .n = p->in, .k = p->out, .a_type = b, .b_type = b, .c_type = b});
    product_line(
        "bf16 dw", p->name,
        &(struct gemm_cuda){.m = p->out, .n = p->in, .k = m, .trans_a = true, .a_type = b, .b_type = b, .c_type = b});
    product_line(
        "bf16 dw fp32", p->name,
        &(struct gemm_cuda){.m = p->out, .n = p->in, .k = m, .trans_a = true, .a_type = b, .b_type = b, .c_type = f});
    product_line(
        "bf16 dw fp32 added", p->name,
        &(struct gemm_cuda){
            .m = p->out, .n = p->in, .k = m, .trans_a = true, .a_type = b, .b_type = b, .c_type = f, .beta = 1});
}

static void fp8_lines(const struct projection *p, int64_t m)
{
    const enum dtype x = DTYPE_E4M3, d = DTYPE_E5M2, b = DTYPE_BF16, f = DTYPE_F32;
    product_line(
        "fp8 y", p->name,
        &(struct gemm_cuda){.m = m, .n = p->out, .k = p->in, .trans_b = true, .a_type = x, .b_type = x, .c_type = b});
    product_line(
        "fp8 y fast", p->name,
        &(struct gemm_cuda){
            .m = m, .n = p->out, .k = p->in, .trans_b = true, .a_type = x, .b_type = x, .c_type = b, .fast = true});
    product_line(
        "fp8 dx", p->name,
        &(struct gemm_cuda){.m = m, .n = p->in, .k = p->out, .trans_b = true, .a_type = d, .b_type = x, .c_type = b});
    product_line(
        "fp8 dw", p->name,
        &(struct gemm_cuda){.m = p->out, .n = p->in, .k = m, .trans_b = true, .a_type = d, .b_type = x, .c_type = b});
    product_line(
        "fp8 dw fp32", p->name,
        &(struct gemm_cuda){.m = p->out, .n = p->in, .k = m, .trans_b = true, .a_type = d, .b_type = x, .c_type = f});
}

static void bench_products(void)
{
    printf("%-8s %-22s %6s %6s %6s %8s %7s %7s\n", "", "product", "m", "n", "k", "ms", "TF/s", "first");
    for (int64_t m = 4096; m <= 16384; m *= 4) {
        for (int i = 0; i < PROJECTIONS; i++) {
            if (i == HEAD && m > 4096) {
                continue; /* logits of this many rows are never held at once */
            }
            bf16_lines(&projections[i], m);
            if (i != HEAD) {
                fp8_lines(&projections[i], m);
            }
        }
    }
}

/* ---- quantisers ---- */

struct quantiser {
    struct linear_codes codes;
    struct linear_values values;
    float *amax;
    size_t bytes;
    bool e5m2;
};

static void call_copy(const struct cuda *on, const void *context)
{
    const struct quantiser *q = context;
    cuda_copy(on, q->values.y, q->values.x, q->bytes);
}

static void call_amax(const struct cuda *on, const void *context)
{
    const struct quantiser *q = context;
    linear_amax_cuda(q->codes.x, q->codes.rows * q->codes.cols, q->amax, on);
}

static void call_encode(const struct cuda *on, const void *context)
{
    const struct quantiser *q = context;
    if (q->e5m2) {
        linear_encode_e5m2_cuda(&q->codes, on);
    } else {
        linear_encode_e4m3_cuda(&q->codes, on);
    }
}

static void call_amax_encode(const struct cuda *on, const void *context)
{
    call_amax(on, context);
    call_encode(on, context);
}

static void call_rows(const struct cuda *on, const void *context)
{
    const struct quantiser *q = context;
    linear_round_rows_cuda(&q->values, on);
}

static void call_tiles(const struct cuda *on, const void *context)
{
    const struct quantiser *q = context;
    linear_round_tiles_cuda(&q->values, on);
}

static void call_amax_hadamard(const struct cuda *on, const void *context)
{
    const struct quantiser *q = context;
    linear_amax_hadamard_cuda(q->values.x, q->values.rows, q->values.cols, q->amax, on);
}

static void call_hadamard(const struct cuda *on, const void *context)
{
    const struct quantiser *q = context;
    linear_round_hadamard_cuda(&q->values, on);
}

static double copy_rate;

static void quantiser_line(const char *what, void (*call)(const struct cuda *, const void *), const struct quantiser *q,
                           int bytes_each)
{
    double ms = median_ms(call, q);
    double rate = 1e-6 * (double)bytes_each * (double)(q->codes.rows * q->codes.cols) / ms;
    if (call == call_copy) {
        copy_rate = rate;
    }
    printf("%-34s %6ld %6ld %8.4f %7.0f %6.2f\n", what, (long)q->codes.rows, (long)q->codes.cols, ms, rate,
           rate / copy_rate);
}

static void quantise_matrix(int64_t rows, int64_t cols)
{
    const struct linear_random random = {.seed = 1, .stream = 2};
    struct quantiser q = {.bytes = (size_t)(rows * cols) * sizeof(bf16)};
    float *numbers = array(NULL, DTYPE_F32, 64);
    bf16 *x = array(bf16_pattern, DTYPE_BF16, rows * cols), *y = array(NULL, DTYPE_BF16, rows * cols);
    uint8_t *codes = array(NULL, DTYPE_U8, rows * cols), *turned = array(NULL, DTYPE_U8, rows * cols);
    q.amax = numbers;
    q.values = (struct linear_values){.x = x, .rows = rows, .cols = cols, .amax = numbers, .y = y};
    q.codes = (struct linear_codes){.x = x, .rows = rows, .cols = cols, .amax = numbers, .scale = numbers + 4};
    quantiser_line("device copy", call_copy, &q, 4);
    quantiser_line("amax", call_amax, &q, 2);
    q.codes.codes = codes;
    quantiser_line("E4M3 as it lies", call_encode, &q, 3);
    q.codes.turned = turned;
    quantiser_line("E4M3 both", call_encode, &q, 4);
    q.e5m2 = true;
    quantiser_line("E5M2 both", call_encode, &q, 4);
    quantiser_line("amax, E5M2 both", call_amax_encode, &q, 6);
    q.codes.codes = NULL;
    q.e5m2 = false;
    quantiser_line("E4M3 transposed", call_encode, &q, 3);
    quantiser_line("amax, E4M3 transposed", call_amax_encode, &q, 5);
    quantiser_line("NVFP4 rows", call_rows, &q, 4);
    quantiser_line("NVFP4 tiles", call_tiles, &q, 4);
    quantiser_line("amax of Hadamard", call_amax_hadamard, &q, 2);
    quantiser_line("NVFP4 Hadamard", call_hadamard, &q, 4);
    q.values.random = &random;
    quantiser_line("NVFP4 rows, stochastic", call_rows, &q, 4);
    quantiser_line("NVFP4 Hadamard, stochastic", call_hadamard, &q, 4);
    cuda_free(numbers);
    cuda_free(x);
    cuda_free(y);
    cuda_free(codes);
    cuda_free(turned);
}

static void bench_quantisers(void)
{
    printf("%-34s %6s %6s %8s %7s %6s\n", "quantiser", "rows", "cols", "ms", "GB/s", "/copy");
    quantise_matrix(4096, 4096);
    quantise_matrix(16384, 4096);
    quantise_matrix(16384, 28672);
}

/* ---- projections ---- */

struct calls {
    struct linear_fwd fwd;
    struct linear_bwd bwd;
    const bf16 *w;
    void *weight;
    struct linear linear;
};

static void call_fwd(const struct cuda *on, const void *context)
{
    linear_fwd_cuda(&((const struct calls *)context)->fwd, on);
}

static void call_bwd(const struct cuda *on, const void *context)
{
    linear_bwd_cuda(&((const struct calls *)context)->bwd, on);
}

static void call_represent(const struct cuda *on, const void *context)
{
    const struct calls *c = context;
    struct linear linear = c->linear;
    linear_represent_weight_cuda(&linear, c->w, c->weight, on);
}

static void projection_line(const struct projection *p, enum linear_format format, int64_t rows)
{
    struct calls c = {.linear = {.format = format, .in = p->in, .out = p->out, .stream = 3}};
    bf16 *w = array(bf16_pattern, DTYPE_BF16, p->out * p->in), *x = array(bf16_pattern, DTYPE_BF16, rows * p->in);
    bf16 *dy = array(bf16_pattern, DTYPE_BF16, rows * p->out), *y = array(NULL, DTYPE_BF16, rows * p->out);
    bf16 *dx = array(NULL, DTYPE_BF16, rows * p->in), *dw = array(NULL, DTYPE_BF16, p->out * p->in);
    void *scratch = array(NULL, DTYPE_U8, (int64_t)linear_scratch_bytes_cuda(format, rows, p->in, p->out) + 1);
    c.weight = array(NULL, DTYPE_U8, (int64_t)linear_weight_bytes_cuda(format, p->out, p->in) + 1);
    c.w = w;
    linear_represent_weight_cuda(&c.linear, w, c.weight, gpu);
    c.fwd = (struct linear_fwd){.linear = &c.linear, .rows = rows, .x = x, .y = y, .scratch = scratch};
    c.bwd = (struct linear_bwd){.linear = &c.linear,
                                .rows = rows,
                                .x = x,
                                .dy = dy,
                                .dx = dx,
                                .dw = dw,
                                .grad_type = DTYPE_BF16,
                                .seed = 1,
                                .scratch = scratch};
    gemm_cuda_plan_all(gpu, true);
    call_fwd(gpu, &c);
    call_bwd(gpu, &c);
    gemm_cuda_plan_all(gpu, false);
    double fwd = median_ms(call_fwd, &c), bwd = median_ms(call_bwd, &c);
    double represent = format == LINEAR_BF16 ? 0 : median_ms(call_represent, &c);
    double work = 2e-9 * (double)rows * (double)p->in * (double)p->out;
    printf("%-8s %-6s %6ld %8.3f %8.3f %7.0f %7.0f %10.3f\n", p->name, linear_format_names[format], (long)rows, fwd,
           bwd, work / fwd, 2 * work / bwd, represent);
    void *const arrays[] = {w, x, dy, y, dx, dw, scratch, c.weight};
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) {
        cuda_free(arrays[i]);
    }
}

static void bench_projections(void)
{
    printf("%-8s %-6s %6s %8s %8s %7s %7s %10s\n", "", "format", "rows", "fwd ms", "bwd ms", "TF/s", "TF/s",
           "weights ms");
    for (int64_t rows = 4096; rows <= 16384; rows *= 4) {
        for (int i = 0; i < HEAD; i++) {
            for (int format = LINEAR_BF16; format <= LINEAR_NVFP4; format++) {
                projection_line(&projections[i], (enum linear_format)format, rows);
            }
        }
    }
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";
    must(cuda_open(&gpu, 0));
    must(cuda_open(&unplanned, 0));
    must(cuda_event_open(&from));
    must(cuda_event_open(&to));
    bf16_pattern = pattern(DTYPE_BF16);
    e4m3_pattern = pattern(DTYPE_E4M3);
    e5m2_pattern = pattern(DTYPE_E5M2);
    if (*what == '\0' || strcmp(what, "quantise") == 0) {
        bench_quantisers();
    }
    if (*what == '\0' || strcmp(what, "products") == 0) {
        bench_products();
    }
    if (*what == '\0' || strcmp(what, "projections") == 0) {
        bench_projections();
    }
    cuda_close(unplanned);
    cuda_close(gpu);
    return 0;
}
