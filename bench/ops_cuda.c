/* bench: the operators that memory bounds, on the GPU: GB/s of the bytes that an operator must move, beside a copy from
 * device to device in the same run, at the shapes of the 8B model.
 *   build/release/bench/ops_cuda [millions of AdamW elements [rows|head|weights|optimizer]]
 * A figure is the median of SAMPLES samples of at least a millisecond each. Data are random numbers, repeated every 16
 * MB. */
#include "bench/gpu.h"
#include "model/cross_entropy.h"
#include "model/embedding.h"
#include "model/linear.h"
#include "model/linear_format.h"
#include "model/rmsnorm.h"
#include "model/rope.h"
#include "model/swiglu.h"
#include "optim/gradnorm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    C = 4096,
    F = 14336,
    V = 128256,
    HEADS = 40,
    D = 128,
    QKV = 6144,
    CHUNK = 2048,
    SAMPLES = 11,
    PATTERN = 1 << 24
};

static struct cuda *cuda;
static double copy_rate; /* GB/s */

/* Random numbers in (-scale, scale), or (0, scale) when not `sign`; FP32 or BF16. */
static void *numbers(size_t elements, enum dtype type, float scale, bool sign)
{
    const size_t bytes = elements * dtype_bytes(type), pattern = bytes < PATTERN ? bytes : PATTERN;
    char *host = malloc(PATTERN), *memory = device_memory(bytes);
    uint64_t x = 88172645463325252u;
    for (size_t i = 0; i < pattern / dtype_bytes(type); i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        float value = scale * (sign ? (float)(int32_t)(x >> 32) * 0x1p-31f : (float)(uint32_t)(x >> 40) * 0x1p-24f);
        if (type == DTYPE_BF16) {
            ((bf16 *)host)[i] = bf16_from_float(value);
        } else {
            ((float *)host)[i] = value;
        }
    }
    cuda_upload(cuda, memory, host, pattern);
    for (size_t have = pattern; have < bytes; have *= 2) {
        cuda_copy(cuda, memory + have, memory, have * 2 <= bytes ? have : bytes - have);
    }
    must(cuda_sync(cuda, "fill"));
    free(host);
    return memory;
}

/* Milliseconds of one call. */
static double measure(void (*call)(const void *), const void *argument)
{
    struct cuda_event *from, *to;
    double ms[SAMPLES];
    must(cuda_event_open(&from));
    must(cuda_event_open(&to));
    int calls = 1;
    for (int i = 0; i < 3; i++) { /* warm up, and find how many calls make a sample */
        cuda_event_record(cuda, from);
        call(argument);
        cuda_event_record(cuda, to);
        must(cuda_sync(cuda, "warm up"));
        calls = (int)(1.0 / cuda_event_ms(from, to)) + 1;
    }
    for (int i = 0; i < SAMPLES; i++) {
        cuda_event_record(cuda, from);
        for (int k = 0; k < calls; k++) {
            call(argument);
        }
        cuda_event_record(cuda, to);
        must(cuda_sync(cuda, "measure"));
        ms[i] = cuda_event_ms(from, to) / calls;
    }
    cuda_event_close(from);
    cuda_event_close(to);
    return median(ms, SAMPLES);
}

static void print_row(const char *name, const char *shape, double bytes, double ms)
{
    double rate = bytes / ms * 1e-6;
    printf("| %-34s | %-16s | %8.1f | %8.4f | %5.0f | %4.2f |\n", name, shape, bytes * 1e-6, ms, rate,
           copy_rate > 0 ? rate / copy_rate : 1.0);
    fflush(stdout);
}

/* ---- copy ---- */

struct copy {
    void *to, *from;
    size_t bytes;
};

static void call_copy(const void *argument)
{
    const struct copy *a = argument;
    cuda_copy(cuda, a->to, a->from, a->bytes);
}

static void bench_copy(size_t bytes, const char *shape, bool is_measure)
{
    struct copy a = {.from = numbers(bytes / 2, DTYPE_BF16, 1, true), .to = device_memory(bytes), .bytes = bytes};
    double ms = measure(call_copy, &a);
    if (is_measure) {
        copy_rate = 2.0 * (double)bytes / ms * 1e-6;
    }
    print_row("copy", shape, 2.0 * (double)bytes, ms);
    cuda_free(a.to);
    cuda_free(a.from);
}

/* ---- RMSNorm ---- */

static void call_rmsnorm_fwd(const void *a)
{
    rmsnorm_fwd_cuda(a, cuda);
}

static void call_rmsnorm_bwd(const void *a)
{
    rmsnorm_bwd_cuda(a, cuda);
}

static void bench_rmsnorm(int64_t rows, int64_t groups, int64_t width, const char *shape)
{
    const size_t n = (size_t)(rows * groups * width);
    const int64_t stride = groups * width;
    const double b = 2.0 * (double)n;
    bf16 *x = numbers(n, DTYPE_BF16, 1, true), *branch = numbers(n, DTYPE_BF16, 1, true);
    bf16 *gain = numbers((size_t)width, DTYPE_BF16, 1, true), *dy = numbers(n, DTYPE_BF16, 1, true),
         *y = device_memory(2 * n);
    bf16 *sum = device_memory(2 * n);
    float *inv = device_memory((size_t)(rows * groups) * sizeof *inv),
          *dgain = device_memory((size_t)width * sizeof *dgain);
    struct rmsnorm_fwd f = {.rows = rows,
                            .groups = groups,
                            .width = width,
                            .x_stride = stride,
                            .y_stride = stride,
                            .x = x,
                            .gain = gain,
                            .eps = 1e-5f,
                            .y = y,
                            .inv_rms = inv};
    print_row(groups > 1 ? "head norm fwd" : "rmsnorm fwd", shape, 2 * b, measure(call_rmsnorm_fwd, &f));
    if (groups == 1) {
        f.branch = branch;
        f.sum = sum;
        print_row("rmsnorm fwd + residual sum", shape, 4 * b, measure(call_rmsnorm_fwd, &f));
    }
    struct rmsnorm_bwd g = {.rows = rows,
                            .groups = groups,
                            .width = width,
                            .x_stride = stride,
                            .dy_stride = stride,
                            .dx_stride = stride,
                            .x = x,
                            .gain = gain,
                            .dy = dy,
                            .inv_rms = inv,
                            .dx = y,
                            .dgain = dgain,
                            .grad_type = DTYPE_F32,
                            .scratch = device_memory(rmsnorm_bwd_scratch_bytes_cuda(rows, groups, width))};
    print_row(groups > 1 ? "head norm bwd" : "rmsnorm bwd", shape, 3 * b, measure(call_rmsnorm_bwd, &g));
    if (groups == 1) {
        g.residual = g.dx = branch;
        print_row("rmsnorm bwd + residual", shape, 4 * b, measure(call_rmsnorm_bwd, &g));
    }
    void *all[] = {x, branch, gain, dy, y, sum, inv, dgain, g.scratch};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        cuda_free(all[i]);
    }
}

/* ---- RoPE, SwiGLU ---- */

static void call_rope(const void *a)
{
    rope_apply_cuda(a, 4096, cuda);
}

static void bench_rope(int64_t rows, const char *shape)
{
    bf16 *x = numbers((size_t)rows * QKV, DTYPE_BF16, 1, true);
    float *cosine = numbers(4096 * D / 2, DTYPE_F32, 1, true), *sine = numbers(4096 * D / 2, DTYPE_F32, 1, true);
    struct rope_apply a = {
        .x = x, .rows = rows, .row_stride = QKV, .heads = HEADS, .head_dim = D, .cosine = cosine, .sine = sine};
    print_row("rope, 40 heads", shape, 4.0 * (double)rows * HEADS * D, measure(call_rope, &a));
    cuda_free(x);
    cuda_free(cosine);
    cuda_free(sine);
}

struct swiglu {
    bf16 *gate_up, *out, *dgate_up;
    int64_t rows;
};

static void call_swiglu_fwd(const void *argument)
{
    const struct swiglu *a = argument;
    swiglu_fwd_cuda(a->gate_up, a->rows, F, a->out, NULL, cuda);
}

static void call_swiglu_bwd(const void *argument)
{
    const struct swiglu *a = argument;
    swiglu_bwd_cuda(
        &(struct swiglu_bwd){.rows = a->rows, .ffn = F, .gate_up = a->gate_up, .dout = a->out, .dgate_up = a->dgate_up},
        cuda);
}

static void bench_swiglu(int64_t rows, const char *shape)
{
    const size_t n = (size_t)rows * F;
    struct swiglu a = {numbers(2 * n, DTYPE_BF16, 4, true), numbers(n, DTYPE_BF16, 1, true), device_memory(4 * n),
                       rows};
    print_row("swiglu fwd", shape, 6.0 * (double)n, measure(call_swiglu_fwd, &a));
    print_row("swiglu bwd", shape, 10.0 * (double)n, measure(call_swiglu_bwd, &a));
    cuda_free(a.gate_up);
    cuda_free(a.out);
    cuda_free(a.dgate_up);
}

/* ---- embedding: tokens of a skewed distribution, as text has ---- */

struct embedding {
    struct embedding_bwd bwd;
    bf16 *weight, *out;
};

static void call_embedding_fwd(const void *argument)
{
    const struct embedding *a = argument;
    embedding_fwd_cuda(a->weight, a->bwd.tokens, a->bwd.count, V, C, a->out, cuda);
}

static void call_embedding_bwd(const void *argument)
{
    embedding_bwd_cuda(&((const struct embedding *)argument)->bwd, cuda);
}

static void bench_embedding(int64_t rows, const char *shape, enum dtype type)
{
    int32_t *tokens = malloc((size_t)rows * 4);
    char *seen = calloc(V, 1);
    int64_t distinct = 0;
    uint64_t x = 88172645463325252u;
    for (int64_t t = 0; t < rows; t++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        double u = (double)(x >> 11) * 0x1p-53;
        tokens[t] = (int32_t)((double)V * u * u * u * u); /* the most frequent: about one in 19 */
        distinct += !seen[tokens[t]];
        seen[tokens[t]] = 1;
    }
    int32_t *d_tokens = device_memory((size_t)rows * 4);
    cuda_upload(cuda, d_tokens, tokens, (size_t)rows * 4);
    struct embedding a = {.weight = numbers((size_t)V * C, DTYPE_BF16, 1, true),
                          .out = numbers((size_t)rows * C, DTYPE_BF16, 1, true)};
    a.bwd = (struct embedding_bwd){.tokens = d_tokens,
                                   .count = rows,
                                   .vocab = V,
                                   .width = C,
                                   .dout = a.out,
                                   .dweight = numbers((size_t)V * C, type, 1, true),
                                   .grad_type = type,
                                   .scratch = device_memory(embedding_bwd_scratch_bytes_cuda(rows, V))};
    const double row = 2.0 * (double)dtype_bytes(type) * C; /* of the gradient, read and written */
    if (type == DTYPE_F32) {
        print_row("embedding fwd", shape, 4.0 * (double)rows * C, measure(call_embedding_fwd, &a));
    }
    print_row(type == DTYPE_F32 ? "embedding bwd, fp32" : "embedding bwd, bf16", shape,
              2.0 * (double)rows * C + row * (double)distinct, measure(call_embedding_bwd, &a));
    void *all[] = {d_tokens, a.weight, a.out, a.bwd.dweight, a.bwd.scratch};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        cuda_free(all[i]);
    }
    free(tokens);
    free(seen);
}

/* ---- cross entropy, between its products ---- */

static void call_cross_entropy(const void *a)
{
    cross_entropy_rows_cuda(a, cuda);
}

static void bench_cross_entropy(void)
{
    const double n = (double)CHUNK * V;
    int32_t *targets = device_memory(CHUNK * 4);
    cuda_zero(cuda, targets, CHUNK * 4);
    cuda_set_step(cuda, &(struct cuda_step){.loss_scale = 1.0f / 65536});
    struct cross_entropy_rows a = {.rows = CHUNK,
                                   .vocab = V,
                                   .logits = numbers((size_t)CHUNK * V, DTYPE_F32, 8, true),
                                   .targets = targets,
                                   .losses = device_memory(CHUNK * 4),
                                   .lse = device_memory(CHUNK * 4)};
    bf16 *dlogits = device_memory((size_t)CHUNK * V * 2);
    print_row("cross entropy, loss only", "2048 x 128256", 4 * n, measure(call_cross_entropy, &a));
    a.dlogits = dlogits;
    print_row("cross entropy, with gradient", "2048 x 128256", 6 * n, measure(call_cross_entropy, &a));
    void *all[] = {targets, (void *)a.logits, a.losses, a.lse, dlogits};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        cuda_free(all[i]);
    }
}

/* ---- a weight in a small format: codes as they lie and transposed (FP8), values (NVFP4) ---- */

struct represent {
    struct linear linear;
    bf16 *w;
    void *memory;
};

static void call_represent(const void *argument)
{
    struct represent a = *(const struct represent *)argument;
    linear_represent_weight_cuda(&a.linear, a.w, a.memory, cuda);
}

/* Without and with its largest magnitude known, as AdamW leaves it; bytes are those of the latter. */
static void bench_represent(enum linear_format format)
{
    const int64_t n = 2 * (int64_t)F * C;
    float *amax = device_memory(sizeof *amax);
    struct represent a = {.linear = {.format = format, .in = C, .out = 2 * F},
                          .w = numbers((size_t)n, DTYPE_BF16, 0.02f, true),
                          .memory = device_memory(linear_weight_bytes_cuda(format, 2 * F, C))};
    linear_amax_cuda(a.w, n, amax, cuda);
    for (int known = 0; known < 2; known++) {
        char name[64];
        snprintf(name, sizeof name, "weight in %s, amax %s", linear_format_names[format], known ? "known" : "found");
        a.linear.amax = known ? amax : NULL;
        print_row(name, "28672 x 4096", 4.0 * (double)n, measure(call_represent, &a));
    }
    cuda_free(a.w);
    cuda_free(a.memory);
    cuda_free(amax);
}

/* ---- optimizer ---- */

struct optimizer {
    struct adamw_config config;
    struct adamw_cuda state;
    void *grads;
    enum dtype grad_type;
    uint32_t update;
};

static void call_adamw(const void *argument)
{
    struct optimizer *a = (void *)(uintptr_t)argument; /* each call is another update */
    adamw_step_cuda(&a->config, &a->state, a->grads, a->grad_type, 1.0f, 1e-7f, ++a->update, cuda);
}

static void call_gradnorm(const void *a)
{
    gradnorm_cuda(a, cuda);
}

/* AdamW finds the largest weights on its way, as it does for FP8 and NVFP4. */
static void bench_optimizer(size_t n, const char *shape)
{
    float *amax = device_memory(2 * sizeof *amax);
    const struct adamw_segment segments[] = {
        {.name = "a", .elements = n / 2, .decays = true, .amax = amax},
        {.name = "b", .offset = n / 2, .elements = n - n / 2, .decays = true, .amax = amax + 1}};
    cuda_zero(cuda, amax, 2 * sizeof *amax);
    void *memory = device_memory(adamw_plan_bytes_cuda(segments, 2));
    struct optimizer a = {.config = {.beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f, .seed = 1}};
    a.state.weights = numbers(n, DTYPE_BF16, 0.02f, true);
    int16_t *remainder = numbers(n, DTYPE_BF16, 1, true);
    for (int moments_bf16 = 0; moments_bf16 < 2; moments_bf16++) {
        const enum dtype moment = moments_bf16 ? DTYPE_BF16 : DTYPE_F32;
        a.config.moments_bf16 = moments_bf16;
        a.state.m = numbers(n, moment, 1e-3f, true);
        a.state.v = numbers(n, moment, 1e-6f, false);
        for (int grads_bf16 = 0; grads_bf16 < 2; grads_bf16++) {
            a.grad_type = grads_bf16 ? DTYPE_BF16 : DTYPE_F32;
            a.grads = numbers(n, a.grad_type, 1e-3f, true);
            for (int mode = 0; mode < 4; mode++) { /* split master or none; nearest or stochastic */
                char name[64];
                a.config.master_fp32 = mode & 1;
                a.config.stochastic_rounding = mode & 2;
                if (a.config.stochastic_rounding && a.config.master_fp32 && !moments_bf16) {
                    continue; /* nothing to round */
                }
                a.state.remainder = a.config.master_fp32 ? remainder : NULL;
                adamw_plan_cuda(&a.state, &a.config, segments, 2, memory, cuda);
                snprintf(name, sizeof name, "adamw %s m,v %s g %s%s", mode & 1 ? "split" : "none ",
                         moments_bf16 ? "bf16" : "fp32", grads_bf16 ? "bf16" : "fp32", mode & 2 ? " random" : "");
                double bytes = 4 + (mode & 1 ? 4 : 0) + (moments_bf16 ? 8 : 16) + (grads_bf16 ? 2 : 4);
                print_row(name, shape, bytes * (double)n, measure(call_adamw, &a));
            }
            if (moments_bf16) {
                struct gradnorm_cuda g = {.plan = a.state.plan,
                                          .blocks = a.state.blocks,
                                          .n_segments = 2,
                                          .grads = a.grads,
                                          .grad_type = a.grad_type,
                                          .scratch = device_memory(gradnorm_scratch_bytes_cuda(a.state.blocks, 2)),
                                          .result = device_memory(sizeof(struct gradnorm))};
                print_row(grads_bf16 ? "gradnorm bf16" : "gradnorm fp32", shape, (grads_bf16 ? 2.0 : 4.0) * (double)n,
                          measure(call_gradnorm, &g));
                cuda_free(g.scratch);
                cuda_free(g.result);
            }
            cuda_free(a.grads);
        }
        cuda_free(a.state.m);
        cuda_free(a.state.v);
    }
    cuda_free(a.state.weights);
    cuda_free(remainder);
    cuda_free(memory);
    cuda_free(amax);
}

int main(int argc, char **argv)
{
    const size_t millions = argc > 1 ? (size_t)atoi(argv[1]) : 1000;
    const char *only = argc > 2 ? argv[2] : "rows head weights optimizer";
    char shape[32];
    must(cuda_open(&cuda, 0));
    printf("| operator | shape | MB | ms | GB/s | of copy |\n|---|---|---:|---:|---:|---:|\n");
    bench_copy((size_t)1 << 30, "1 GiB", true);
    bench_copy((size_t)128 << 20, "128 MiB", false);
    bench_copy((size_t)32 << 20, "32 MiB", false);
    for (int64_t rows = 4096; rows <= 16384 && strstr(only, "rows"); rows *= 4) {
        snprintf(shape, sizeof shape, "%lld x %d", (long long)rows, C);
        bench_rmsnorm(rows, 1, C, shape);
        bench_embedding(rows, shape, DTYPE_F32);
        bench_embedding(rows, shape, DTYPE_BF16);
        bench_rmsnorm(rows, 32, D, rows == 4096 ? "4096 x 32 x 128" : "16384 x 32 x 128");
        snprintf(shape, sizeof shape, "%lld", (long long)rows);
        bench_rope(rows, shape);
        snprintf(shape, sizeof shape, "%lld x %d", (long long)rows, F);
        bench_swiglu(rows, shape);
    }
    if (strstr(only, "head")) {
        bench_cross_entropy();
    }
    if (strstr(only, "weights")) {
        bench_represent(LINEAR_FP8);
        bench_represent(LINEAR_NVFP4);
    }
    if (strstr(only, "optimizer")) {
        snprintf(shape, sizeof shape, "%zu M", millions);
        bench_optimizer(millions * 1000000, shape);
    }
    cuda_close(cuda);
    return 0;
}
