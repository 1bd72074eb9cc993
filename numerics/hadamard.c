#include "numerics/hadamard.h"

#include <string.h>

enum { WIDTH = 16 };

/* One group of 16 rows by n <= WIDTH columns; fixed-size loops so that a column is a vector lane. */
static void hadamard16(const float *x, int n, int64_t stride, float *y)
{
    float v[HADAMARD_TOKENS][WIDTH] = {0};
    /* The factor 1/4 that makes the transform orthogonal is a power of two: first or last, the bits are the same. */
    for (int t = 0; t < HADAMARD_TOKENS; t++) {
        float sign = HADAMARD_SIGNS >> t & 1u ? -0.25f : 0.25f;
        for (int i = 0; i < n; i++) {
            v[t][i] = sign * x[t * stride + i];
        }
    }
    /* Butterflies in a fixed order: lane t with lane t + half, all columns at once. */
    for (int half = 1; half < HADAMARD_TOKENS; half *= 2) {
        for (int t = 0; t < HADAMARD_TOKENS; t++) {
            if (t & half) {
                continue;
            }
            for (int i = 0; i < WIDTH; i++) {
                float a = v[t][i], b = v[t + half][i];
                v[t][i] = a + b;
                v[t + half][i] = a - b;
            }
        }
    }
    for (int t = 0; t < HADAMARD_TOKENS; t++) {
        memcpy(y + t * stride, v[t], (size_t)n * sizeof **v);
    }
}

void hadamard16_rows(const float *x, int64_t rows, int64_t width, int64_t stride, float *y)
{
    int64_t whole = rows - rows % HADAMARD_TOKENS;
    for (int64_t r = 0; r < whole; r += HADAMARD_TOKENS) {
        for (int64_t c = 0; c < width; c += WIDTH) {
            int n = width - c < WIDTH ? (int)(width - c) : WIDTH;
            hadamard16(x + r * stride + c, n, stride, y + r * stride + c);
        }
    }
    /* Any orthogonal transform serves the product; for a short group it is the identity. */
    for (int64_t r = whole; r < rows; r++) {
        memmove(y + r * stride, x + r * stride, (size_t)width * sizeof *y);
    }
}
