/* model: RoPE on the CPU. */
#include "model/rope.h"

#include <math.h>

/* Llama 3.1: long waves are stretched by `factor`, short ones are kept, those between are mixed. */
static double llama3_scale(const struct rope_config *rope, double inverse)
{
    const double pi = 3.14159265358979323846;
    double turns = rope->original_context * inverse / (2 * pi); /* within the original context */
    if (turns > (double)rope->high_freq_factor) {
        return inverse;
    }
    if (turns < (double)rope->low_freq_factor) {
        return inverse / (double)rope->factor;
    }
    double low = (double)rope->low_freq_factor, high = (double)rope->high_freq_factor;
    double kept = (turns - low) / (high - low);
    return (1 - kept) * inverse / (double)rope->factor + kept * inverse;
}

void rope_inverse_frequencies(const struct rope_config *rope, int head_dim, float *inverse)
{
    for (int i = 0; i < head_dim / 2; i++) {
        double plain = pow((double)rope->theta, -2.0 * i / head_dim);
        inverse[i] = (float)(rope->scaling == ROPE_LLAMA3 ? llama3_scale(rope, plain) : plain);
    }
}

void rope_table(const struct rope_config *rope, int head_dim, int64_t positions, float *cosine, float *sine)
{
    int half = head_dim / 2;
    /* Row 0 of the sines lends its place to the frequencies (its angles are zero) until the end. */
    float *inverse = sine;
    rope_inverse_frequencies(rope, head_dim, inverse);
    for (int64_t position = positions - 1; position >= 0; position--) {
        for (int i = 0; i < half; i++) {
            float angle = (float)position * inverse[i];
            cosine[position * half + i] = cosf(angle);
            sine[position * half + i] = sinf(angle);
        }
    }
}

void rope_apply_cpu(const struct rope_apply *a)
{
    int64_t half = a->head_dim / 2;
#pragma omp parallel for
    for (int64_t r = 0; r < a->rows; r++) {
        const float *cosine = a->cosine + r * half, *sine = a->sine + r * half;
        float sign = a->inverse ? -1.0f : 1.0f;
        for (int64_t h = 0; h < a->heads; h++) {
            bf16 *low = a->x + r * a->row_stride + h * a->head_dim, *high = low + half;
            for (int64_t i = 0; i < half; i++) {
                float x = bf16_to_float(low[i]), y = bf16_to_float(high[i]), s = sign * sine[i];
                low[i] = bf16_from_float(x * cosine[i] - y * s);
                high[i] = bf16_from_float(y * cosine[i] + x * s);
            }
        }
    }
}
