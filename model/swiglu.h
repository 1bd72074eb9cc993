/* model: the gate of the feed-forward layer. */
#pragma once

#include "core/tensor.h"

struct cuda;

/* out (rows, F) bf16 = silu(gate) up, gate and up the halves of gate_up (rows, 2 F) bf16; FP32, one rounding.
 * CUDA: F a multiple of 8, arrays aligned to 16 bytes. */
void swiglu_fwd_cpu(const bf16 *gate_up, int64_t rows, int64_t ffn, bf16 *out);
void swiglu_fwd_cuda(const bf16 *gate_up, int64_t rows, int64_t ffn, bf16 *out, const struct cuda *on);

/* dgate_up (rows, 2 F) bf16 for dout (rows, F) bf16; may not be gate_up. */
void swiglu_bwd_cpu(const bf16 *gate_up, const bf16 *dout, int64_t rows, int64_t ffn, bf16 *dgate_up);
void swiglu_bwd_cuda(const bf16 *gate_up, const bf16 *dout, int64_t rows, int64_t ffn, bf16 *dgate_up,
                     const struct cuda *on);
