/* model: the gate of the feed-forward layer. */
#pragma once

#include "core/tensor.h"

struct cuda;

/* out (rows, F) bf16 = silu(gate) up, gate and up the halves of gate_up (rows, 2 F) bf16; FP32, one rounding.
 * CUDA, here and in backward: F a multiple of 8, arrays aligned to 16 bytes.
 *   amax   NULL, or in device memory, zeroed before: takes the largest magnitude of what is written (of dgate_up in
 *          backward), as linear_amax_cuda finds it (model/linear_format.h) */
void swiglu_fwd_cpu(const bf16 *gate_up, int64_t rows, int64_t ffn, bf16 *out);
void swiglu_fwd_cuda(const bf16 *gate_up, int64_t rows, int64_t ffn, bf16 *out, float *amax, const struct cuda *on);

/* dgate_up (rows, 2 F) bf16 for dout (rows, F) bf16; may not be gate_up. */
void swiglu_bwd_cpu(const bf16 *gate_up, const bf16 *dout, int64_t rows, int64_t ffn, bf16 *dgate_up);

/*   out    NULL, or (rows, F): forward's output once more, equal bits, in the same pass over gate_up */
struct swiglu_bwd {
    int64_t rows, ffn;
    const bf16 *gate_up, *dout;
    bf16 *dgate_up, *out;
    float *amax;
};
void swiglu_bwd_cuda(const struct swiglu_bwd *a, const struct cuda *on);
