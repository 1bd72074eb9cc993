/* model: projections on the CPU: represent the operands, then multiply. */
#include "model/linear.h"

#include "core/gemm.h"
#include "core/rng.h"
#include "model/linear_format.h"

void linear_represent_weight_cpu(enum linear_format format, const bf16 *w, int64_t out, int64_t in, bf16 *represented)
{
    ASSERT(format != LINEAR_BF16);
    if (format == LINEAR_FP8) {
        linear_round_e4m3(w, out * in, represented);
    } else {
        linear_round_tiles(w, out, in, represented);
    }
}

/* Scratch: represented x, represented dy, and for the Hadamard transform FP32 of the wider one. */
struct parts {
    bf16 *x, *dy;
    float *transformed;
    size_t bytes;
};

static size_t aligned(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

static struct parts parts_of(enum linear_format format, int64_t rows, int64_t in, int64_t out, void *scratch)
{
    struct parts p = {0};
    if (format == LINEAR_BF16) {
        return p;
    }
    size_t x = aligned((size_t)(rows * in) * sizeof(bf16)), dy = aligned((size_t)(rows * out) * sizeof(bf16));
    size_t wide = format == LINEAR_NVFP4 ? aligned((size_t)(rows * (in > out ? in : out)) * sizeof(float)) : 0;
    p.bytes = x + dy + wide;
    if (scratch) {
        p.x = scratch;
        p.dy = (bf16 *)((unsigned char *)scratch + x);
        p.transformed = (float *)((unsigned char *)scratch + x + dy);
    }
    return p;
}

size_t linear_scratch_bytes(enum linear_format format, int64_t rows, int64_t in, int64_t out)
{
    return parts_of(format, rows, in, out, NULL).bytes;
}

static const struct linear_rounding to_nearest = {.stochastic = false};

void linear_fwd_cpu(const struct linear_fwd *a)
{
    const struct linear *l = a->linear;
    const bf16 *x = a->x;
    struct parts p = parts_of(l->format, a->rows, l->in, l->out, a->scratch);
    if (l->format == LINEAR_FP8) {
        linear_round_e4m3(a->x, a->rows * l->in, p.x);
        x = p.x;
    } else if (l->format == LINEAR_NVFP4) {
        linear_round_rows(a->x, a->rows, l->in, &to_nearest, p.x);
        x = p.x;
    }
    gemm_cpu(&(struct gemm){.m = a->rows,
                            .n = l->out,
                            .k = l->in,
                            .a = x,
                            .b = l->weight,
                            .c = a->y,
                            .lda = l->in,
                            .ldb = l->in,
                            .ldc = l->out,
                            .a_type = DTYPE_BF16,
                            .b_type = DTYPE_BF16,
                            .c_type = DTYPE_BF16,
                            .trans_b = true,
                            .alpha = 1});
}

static void multiply_dx(const struct linear_bwd *a, const bf16 *dy)
{
    const struct linear *l = a->linear;
    gemm_cpu(&(struct gemm){.m = a->rows,
                            .n = l->in,
                            .k = l->out,
                            .a = dy,
                            .b = l->weight,
                            .c = a->dx,
                            .lda = l->out,
                            .ldb = l->in,
                            .ldc = l->in,
                            .a_type = DTYPE_BF16,
                            .b_type = DTYPE_BF16,
                            .c_type = DTYPE_BF16,
                            .alpha = 1});
}

static void multiply_dw(const struct linear_bwd *a, const bf16 *dy, const bf16 *x)
{
    const struct linear *l = a->linear;
    gemm_cpu(&(struct gemm){.m = l->out,
                            .n = l->in,
                            .k = a->rows,
                            .a = dy,
                            .b = x,
                            .c = a->dw,
                            .lda = l->out,
                            .ldb = l->in,
                            .ldc = l->in,
                            .a_type = DTYPE_BF16,
                            .b_type = DTYPE_BF16,
                            .c_type = DTYPE_F32,
                            .trans_a = true,
                            .alpha = 1,
                            .beta = a->accumulate ? 1 : 0});
}

enum rounding_use { USE_DX, USE_DW };

/* A stream of its own for each use and sample, drawn from the projection's stream. */
static struct linear_rounding stochastic(const struct linear_bwd *a, enum rounding_use use)
{
    struct rng_words words = rng_words(a->seed, a->linear->stream + (uint64_t)use, a->sample);
    uint64_t stream = (uint64_t)words.w[1] << 32 | words.w[0];
    return (struct linear_rounding){.stochastic = true, .seed = a->seed, .stream = stream, .update = a->update};
}

static void backward_fp8(const struct linear_bwd *a, const struct parts *p)
{
    linear_round_e5m2(a->dy, a->rows * a->linear->out, p->dy);
    multiply_dx(a, p->dy);
    linear_round_e4m3(a->x, a->rows * a->linear->in, p->x);
    multiply_dw(a, p->dy, p->x);
}

static void backward_nvfp4(const struct linear_bwd *a, const struct parts *p)
{
    const struct linear *l = a->linear;
    struct linear_rounding dx_rounding = stochastic(a, USE_DX), dw_rounding = stochastic(a, USE_DW);
    linear_round_rows(a->dy, a->rows, l->out, &dx_rounding, p->dy);
    multiply_dx(a, p->dy);
    linear_round_hadamard(a->dy, a->rows, l->out, &dw_rounding, p->transformed, p->dy);
    linear_round_hadamard(a->x, a->rows, l->in, &to_nearest, p->transformed, p->x);
    multiply_dw(a, p->dy, p->x);
}

void linear_bwd_cpu(const struct linear_bwd *a)
{
    const struct linear *l = a->linear;
    struct parts p = parts_of(l->format, a->rows, l->in, l->out, a->scratch);
    if (l->format == LINEAR_BF16) {
        multiply_dx(a, a->dy);
        multiply_dw(a, a->dy, a->x);
    } else if (l->format == LINEAR_FP8) {
        backward_fp8(a, &p);
    } else {
        backward_nvfp4(a, &p);
    }
}
