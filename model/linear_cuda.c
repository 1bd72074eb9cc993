/* model: projections on the GPU: represent the operands, then multiply. Which operand has which format is as in
 * model/linear_cpu.c; FP8 differs in that codes and scales are multiplied instead of represented values. cuBLASLt's FP8
 * product contracts the contiguous dimension of both operands: that is why transposed codes exist. */
#include "core/cuda.h"
#include "core/gemm_cuda.h"
#include "model/linear.h"
#include "model/linear_format.h"

enum { ALIGNMENT = 256 };

static size_t aligned(int64_t bytes)
{
    return ((size_t)bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* ---- memory ---- */

/* Scale and amax of an operand. */
struct numbers {
    _Alignas(16) float scale;
    float amax;
};

/* A weight in FP8: numbers, codes (out, in), codes of the transpose (in, out). */
struct weight_codes {
    struct numbers *numbers;
    uint8_t *codes, *turned;
};

static struct weight_codes weight_codes(void *memory, int64_t out, int64_t in)
{
    uint8_t *codes = (uint8_t *)memory + ALIGNMENT;
    return (struct weight_codes){.numbers = memory, .codes = codes, .turned = codes + aligned(out * in)};
}

/* linear->codes is const for whoever multiplies; nothing below writes through this. */
static struct weight_codes weight_codes_of(const struct linear *l)
{
    return weight_codes((void *)l->codes, l->out, l->in);
}

size_t linear_weight_bytes_cuda(enum linear_format format, int64_t out, int64_t in)
{
    return format == LINEAR_FP8     ? ALIGNMENT + 2 * aligned(out * in)
           : format == LINEAR_NVFP4 ? ALIGNMENT + aligned(out * in * (int64_t)sizeof(bf16))
                                    : 0;
}

/* Scratch: numbers, then x and dy. FP8: codes of x or, in backward, of x^T; codes of dy and of dy^T. NVFP4: values. */
struct parts {
    struct numbers *x_numbers, *dy_numbers; /* neighbours */
    void *x, *dy, *dy_turned;
    size_t bytes;
};

static struct parts parts_of(enum linear_format format, int64_t rows, int64_t in, int64_t out, void *scratch)
{
    struct parts p = {0};
    if (format == LINEAR_BF16) {
        return p;
    }
    const int64_t element = format == LINEAR_FP8 ? 1 : (int64_t)sizeof(bf16), padded = linear_padded(rows);
    const size_t x = aligned(padded * in * element), dy = aligned(padded * out * element);
    p.bytes = ALIGNMENT + x + (format == LINEAR_FP8 ? 2 : 1) * dy;
    if (scratch != NULL) {
        uint8_t *base = scratch;
        p.x_numbers = scratch;
        p.dy_numbers = p.x_numbers + 1;
        p.x = base + ALIGNMENT;
        p.dy = base + ALIGNMENT + x;
        p.dy_turned = base + ALIGNMENT + x + dy;
    }
    return p;
}

size_t linear_scratch_bytes_cuda(enum linear_format format, int64_t rows, int64_t in, int64_t out)
{
    return parts_of(format, rows, in, out, NULL).bytes;
}

/* ---- operands ---- */

/* The amax that the caller knows, or one found now. */
static const float *amax_of(const float *known, const bf16 *x, int64_t n, struct numbers *numbers,
                            const struct cuda *on)
{
    if (known == NULL) {
        linear_amax_cuda(x, n, &numbers->amax, on);
        return &numbers->amax;
    }
    return known;
}

void linear_represent_weight_cuda(struct linear *linear, const bf16 *w, void *memory, const struct cuda *on)
{
    const int64_t out = linear->out, in = linear->in;
    if (linear->format == LINEAR_BF16) {
        linear->weight = w;
        return;
    }
    struct numbers *numbers = memory;
    const float *amax = amax_of(linear->amax, w, out * in, numbers, on);
    if (linear->format == LINEAR_FP8) {
        struct weight_codes c = weight_codes(memory, out, in);
        linear_encode_e4m3_cuda(&(struct linear_codes){.x = w,
                                                       .rows = out,
                                                       .cols = in,
                                                       .amax = amax,
                                                       .scale = &numbers->scale,
                                                       .codes = c.codes,
                                                       .turned = c.turned},
                                on);
        linear->codes = memory;
    } else {
        bf16 *values = (bf16 *)((uint8_t *)memory + ALIGNMENT);
        linear_round_tiles_cuda(&(struct linear_values){.x = w, .rows = out, .cols = in, .amax = amax, .y = values},
                                on);
        linear->weight = values;
    }
}

/* ---- products: what they have in common, and the operands of each format ---- */

/* y (rows, out) = x w^T */
static struct gemm_cuda product_y(const struct linear_fwd *a)
{
    const struct linear *l = a->linear;
    return (struct gemm_cuda){.m = a->rows,
                              .n = l->out,
                              .k = l->in,
                              .a = a->x,
                              .b = l->weight,
                              .c = a->y,
                              .lda = l->in,
                              .ldb = l->in,
                              .ldc = l->out,
                              .a_type = DTYPE_BF16,
                              .b_type = DTYPE_BF16,
                              .c_type = DTYPE_BF16,
                              .trans_b = true,
                              .alpha = 1};
}

/* dx (rows, in) = dy w */
static struct gemm_cuda product_dx(const struct linear_bwd *a)
{
    const struct linear *l = a->linear;
    return (struct gemm_cuda){.m = a->rows,
                              .n = l->in,
                              .k = l->out,
                              .a = a->dy,
                              .b = l->weight,
                              .c = a->dx,
                              .lda = l->out,
                              .ldb = l->in,
                              .ldc = l->in,
                              .a_type = DTYPE_BF16,
                              .b_type = DTYPE_BF16,
                              .c_type = DTYPE_BF16,
                              .alpha = 1};
}

/* dw (out, in) = dy^T x */
static struct gemm_cuda product_dw(const struct linear_bwd *a)
{
    const struct linear *l = a->linear;
    return (struct gemm_cuda){.m = l->out,
                              .n = l->in,
                              .k = a->rows,
                              .a = a->dy,
                              .b = a->x,
                              .c = a->dw,
                              .lda = l->out,
                              .ldb = l->in,
                              .ldc = l->in,
                              .a_type = DTYPE_BF16,
                              .b_type = DTYPE_BF16,
                              .c_type = a->grad_type,
                              .trans_a = true,
                              .alpha = 1,
                              .beta = a->accumulate ? 1 : 0};
}

/* The same product of codes, both as (rows, contraction). */
static struct gemm_cuda with_codes(struct gemm_cuda g, int64_t contraction, const void *a, enum dtype a_type,
                                   const struct numbers *a_numbers, const void *b, const struct numbers *b_numbers)
{
    g.k = g.lda = g.ldb = contraction;
    g.a = a;
    g.b = b;
    g.a_type = a_type;
    g.b_type = DTYPE_E4M3;
    g.trans_a = false;
    g.trans_b = true;
    g.a_scale = &a_numbers->scale;
    g.b_scale = &b_numbers->scale;
    return g;
}

/* ---- forward ---- */

static void forward_fp8(const struct linear_fwd *a, const struct parts *p, struct gemm_cuda *g, const struct cuda *on)
{
    const struct linear *l = a->linear;
    const struct weight_codes w = weight_codes_of(l);
    linear_encode_e4m3_cuda(&(struct linear_codes){.x = a->x,
                                                   .rows = a->rows,
                                                   .cols = l->in,
                                                   .amax = amax_of(a->x_amax, a->x, a->rows * l->in, p->x_numbers, on),
                                                   .scale = &p->x_numbers->scale,
                                                   .codes = p->x},
                            on);
    *g = with_codes(*g, l->in, p->x, DTYPE_E4M3, p->x_numbers, w.codes, w.numbers);
}

void linear_fwd_cuda(const struct linear_fwd *a, const struct cuda *on)
{
    const struct linear *l = a->linear;
    const struct parts p = parts_of(l->format, a->rows, l->in, l->out, a->scratch);
    struct gemm_cuda g = product_y(a);
    if (l->format == LINEAR_FP8) {
        forward_fp8(a, &p, &g, on);
    } else if (l->format == LINEAR_NVFP4) {
        linear_round_rows_cuda(
            &(struct linear_values){.x = a->x,
                                    .rows = a->rows,
                                    .cols = l->in,
                                    .amax = amax_of(a->x_amax, a->x, a->rows * l->in, p.x_numbers, on),
                                    .y = p.x},
            on);
        g.a = p.x;
    }
    gemm_cuda(on, &g);
}

/* ---- backward ---- */

static void backward_bf16(const struct linear_bwd *a, const struct cuda *on)
{
    const struct gemm_cuda dx = product_dx(a), dw = product_dw(a);
    if (a->dx) {
        gemm_cuda(on, &dx);
    }
    if (a->dw) {
        gemm_cuda(on, &dw);
    }
}

static void backward_fp8(const struct linear_bwd *a, const struct parts *p, const struct cuda *on)
{
    const struct linear *l = a->linear;
    const struct weight_codes w = weight_codes_of(l);
    linear_encode_e5m2_cuda(
        &(struct linear_codes){.x = a->dy,
                               .rows = a->rows,
                               .cols = l->out,
                               .amax = amax_of(a->dy_amax, a->dy, a->rows * l->out, p->dy_numbers, on),
                               .scale = &p->dy_numbers->scale,
                               .codes = a->dx ? p->dy : NULL,
                               .turned = a->dw ? p->dy_turned : NULL},
        on);
    if (a->dx) {
        const struct gemm_cuda dx =
            with_codes(product_dx(a), l->out, p->dy, DTYPE_E5M2, p->dy_numbers, w.turned, w.numbers);
        gemm_cuda(on, &dx);
    }
    if (!a->dw) {
        return;
    }
    linear_encode_e4m3_cuda(&(struct linear_codes){.x = a->x,
                                                   .rows = a->rows,
                                                   .cols = l->in,
                                                   .amax = amax_of(a->x_amax, a->x, a->rows * l->in, p->x_numbers, on),
                                                   .scale = &p->x_numbers->scale,
                                                   .turned = p->x},
                            on);
    const struct gemm_cuda dw =
        with_codes(product_dw(a), linear_padded(a->rows), p->dy_turned, DTYPE_E5M2, p->dy_numbers, p->x, p->x_numbers);
    gemm_cuda(on, &dw);
}

/* x or dy after the Hadamard transform of 16 tokens, whose amax only we can know. */
static void round_hadamard(const bf16 *x, int64_t rows, int64_t cols, const struct linear_random *random,
                           struct numbers *numbers, bf16 *y, const struct cuda *on)
{
    linear_amax_hadamard_cuda(x, rows, cols, &numbers->amax, on);
    linear_round_hadamard_cuda(
        &(struct linear_values){.x = x, .rows = rows, .cols = cols, .amax = &numbers->amax, .random = random, .y = y},
        on);
}

enum rounding_use { USE_DX, USE_DW };

static void backward_nvfp4(const struct linear_bwd *a, const struct parts *p, const struct cuda *on)
{
    const struct linear *l = a->linear;
    const struct linear_random for_dx = {.seed = a->seed, .stream = l->stream + USE_DX};
    const struct linear_random for_dw = {.seed = a->seed, .stream = l->stream + USE_DW};
    struct gemm_cuda dx = product_dx(a), dw = product_dw(a);
    if (a->dx) {
        linear_round_rows_cuda(
            &(struct linear_values){.x = a->dy,
                                    .rows = a->rows,
                                    .cols = l->out,
                                    .amax = amax_of(a->dy_amax, a->dy, a->rows * l->out, p->dy_numbers, on),
                                    .random = &for_dx,
                                    .y = p->dy},
            on);
        dx.a = p->dy;
        gemm_cuda(on, &dx);
    }
    if (!a->dw) {
        return;
    }
    round_hadamard(a->dy, a->rows, l->out, &for_dw, p->dy_numbers, p->dy, on);
    round_hadamard(a->x, a->rows, l->in, NULL, p->x_numbers, p->x, on);
    dw.a = p->dy;
    dw.b = p->x;
    gemm_cuda(on, &dw);
}

void linear_bwd_cuda(const struct linear_bwd *a, const struct cuda *on)
{
    const struct linear *l = a->linear;
    const struct parts p = parts_of(l->format, a->rows, l->in, l->out, a->scratch);
    if (l->format == LINEAR_BF16) {
        backward_bf16(a, on);
    } else if (l->format == LINEAR_FP8) {
        backward_fp8(a, &p, on);
    } else {
        backward_nvfp4(a, &p, on);
    }
}
