/* model: SwiGLU on the CPU. */
#include "model/swiglu.h"

#include "model/exponential.h"

/* 1 / (1 + e^-x): 0 and 1 at the ends, NaN stays NaN. */
static float sigmoid(float x)
{
    return 1.0f / (1.0f + exponential(-x));
}

void swiglu_fwd_cpu(const bf16 *gate_up, int64_t rows, int64_t ffn, bf16 *out)
{
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
        const bf16 *gate = gate_up + r * 2 * ffn, *up = gate + ffn;
        for (int64_t f = 0; f < ffn; f++) {
            float g = bf16_to_float(gate[f]);
            out[r * ffn + f] = bf16_from_float(g * sigmoid(g) * bf16_to_float(up[f]));
        }
    }
}

void swiglu_bwd_cpu(const bf16 *gate_up, const bf16 *dout, int64_t rows, int64_t ffn, bf16 *dgate_up)
{
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
        const bf16 *gate = gate_up + r * 2 * ffn, *up = gate + ffn;
        bf16 *dgate = dgate_up + r * 2 * ffn, *dup = dgate + ffn;
        for (int64_t f = 0; f < ffn; f++) {
            float g = bf16_to_float(gate[f]), u = bf16_to_float(up[f]), d = bf16_to_float(dout[r * ffn + f]);
            float s = sigmoid(g);
            dgate[f] = bf16_from_float(d * u * s * (1.0f + g * (1.0f - s)));
            dup[f] = bf16_from_float(d * g * s);
        }
    }
}
