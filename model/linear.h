/* model: a projection y = x w^T, its gradients, and the formats of its operands (docs/numerics.md section 14).
 *
 * Operands are replaced by the values that their format represents, kept in BF16 (exact for FP8 and NVFP4 with
 * power-of-two tensor scales), and the product runs in FP32: emulation in meaning, an ordinary GEMM in speed.
 *
 *          weight              x in y = x w^T   dy in dx = dy w        x, dy in dw = dy^T x
 *   bf16   itself              itself           itself                 itself
 *   fp8    E4M3                E4M3             E5M2                   the same as in y and dx
 *   nvfp4  16 x 16 tiles       rows of 16       rows of 16 (outputs),  16 tokens after a signed Hadamard transform of
 *                              (inputs)         stochastic             them; x to nearest, dy stochastic
 *
 * Scales are current: FP8's power of two and NVFP4's G come from the amax of the operand of this call. A fused matrix
 * (q|k|v, gate|up) is one operand. A call is one sample, so no scale spans samples. A short last group of tokens
 * is quantised as it is, without the transform.
 * An operand with a NaN or Inf becomes NaN as a whole: FP4 has no code for it and must not hide it. */
#pragma once

#include "core/tensor.h"
#include "model/model_config.h"

struct cuda;

struct linear {
    enum linear_format format;
    int64_t in, out;
    const bf16 *weight; /* (out, in): represented values, from linear_represent_weight unless BF16 */
    const void *codes;  /* CUDA, FP8: what linear_represent_weight_cuda made instead, its `memory` */
    const float *amax;  /* CUDA: max |w| of the next linear_represent_weight_cuda, see there; NULL: not known */
    uint64_t stream;    /* of stochastic rounding */
};

/* The values of w (out, in) in a format other than BF16; once per update. */
void linear_represent_weight_cpu(enum linear_format format, const bf16 *w, int64_t out, int64_t in, bf16 *represented);

/* Bytes of scratch for up to `rows` tokens of any of these calls. */
size_t linear_scratch_bytes(enum linear_format format, int64_t rows, int64_t in, int64_t out);

struct linear_fwd {
    const struct linear *linear;
    int64_t rows;
    const bf16 *x; /* (rows, in) */
    bf16 *y;       /* (rows, out) */
    void *scratch;
    const float *x_amax; /* CUDA: max |x| in device memory if it is known, see below; else NULL */
};
void linear_fwd_cpu(const struct linear_fwd *a);

/* Random bits of dy's element e: rng_bits(seed, s, update, e), where s is w[1] << 32 | w[0] of
 * rng_words(seed, linear->stream + use, sample), use 0 for dx and 1 for dw. */
struct linear_bwd {
    const struct linear *linear;
    int64_t rows;
    const bf16 *x, *dy;   /* (rows, in), (rows, out) */
    bf16 *dx;             /* (rows, in); CUDA: NULL: not made */
    void *dw;             /* (out, in): overwritten, or added to with `accumulate`; CUDA: NULL: not made, x not read */
    enum dtype grad_type; /* of dw: FP32, on CUDA also BF16 */
    bool accumulate;
    uint64_t seed, sample;
    uint32_t update;
    void *scratch;
    const float *x_amax, *dy_amax; /* CUDA, as in linear_fwd */
};
void linear_bwd_cpu(const struct linear_bwd *a);

/* CUDA: the same calls on device memory. rows may be several samples: then a scale spans them. FP8 runs as FP8 (E4M3
 * and E5M2 tensor cores); NVFP4 represents its exact values in BF16 and multiplies those (emulated: the log says so).
 *
 * linear_weight_bytes_cuda: memory of a weight in its format: codes of w and of w^T with their scale (FP8), represented
 * values (NVFP4), none (BF16). linear_represent_weight_cuda fills it, once per update, and sets linear->codes (FP8) or
 * linear->weight (NVFP4; BF16: w itself). If linear->amax (device memory) holds what linear_amax_cuda would find, w is
 * read once less.
 *
 * Pointers are multiples of 16 bytes; FP8 and NVFP4 need `in` and `out` to be multiples of 16; any number of rows.
 * Products take their algorithm from core/gemm_cuda.h: run each call once under gemm_cuda_plan_all to have it timed.
 * Random numbers are keyed by on->step->sample and ->update, read at run time; `sample` and `update` are ignored.
 * Without x_amax or dy_amax, a format that needs it reads the operand once more (linear_amax_cuda). A caller may keep
 * x's from forward to backward, or have the kernel that writes the operand find it. */
size_t linear_weight_bytes_cuda(enum linear_format format, int64_t out, int64_t in);
void linear_represent_weight_cuda(struct linear *linear, const bf16 *w, void *memory, const struct cuda *on);
size_t linear_scratch_bytes_cuda(enum linear_format format, int64_t rows, int64_t in, int64_t out);
void linear_fwd_cuda(const struct linear_fwd *a, const struct cuda *on);
void linear_bwd_cuda(const struct linear_bwd *a, const struct cuda *on);
