#include "tests/model/represent.h"

#include "core/rng.h"
#include "numerics/hadamard.h"

#include <math.h>
#include <string.h>

/* The nearest multiple of 2^(max(floor(log2 |x|), least) - mantissa_bits), ties to even, at most max. */
static double nearest(double x, int mantissa_bits, int least, double max)
{
    if (x == 0) {
        return 0;
    }
    int exponent = (int)floor(log2(fabs(x)));
    double step = ldexp(1, (exponent > least ? exponent : least) - mantissa_bits);
    double y = nearbyint(x / step) * step;
    return fabs(y) > max ? copysign(max, x) : y;
}

static double power_of_two_scale(double amax, double limit)
{
    double m = 1;
    if (amax == 0) {
        return m;
    }
    while (m * amax > limit) {
        m /= 2;
    }
    while (2 * m * amax <= limit) {
        m *= 2;
    }
    return m;
}

static double amax_of_all(const double *x, int64_t n)
{
    double amax = 0;
    for (int64_t i = 0; i < n; i++) {
        amax = fmax(amax, fabs(x[i]));
    }
    return amax;
}

void represent_fp8(const double *x, int64_t n, int mantissa_bits, double *y)
{
    double max = mantissa_bits == 3 ? 448 : 57344, m = power_of_two_scale(amax_of_all(x, n), max);
    for (int64_t i = 0; i < n; i++) {
        y[i] = nearest(m * x[i], mantissa_bits, mantissa_bits == 3 ? -6 : -14, max) / m;
    }
}

static const double e2m1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

static double stochastic_e2m1(double x, uint32_t bits)
{
    double magnitude = fmin(fabs(x), 6);
    int low = 0;
    while (low < 6 && e2m1[low + 1] <= magnitude) {
        low++;
    }
    double fraction = (magnitude - e2m1[low]) / (e2m1[low + 1] - e2m1[low]);
    double u = ((double)bits + 0.5) / 4294967296.0;
    return copysign(e2m1[low + (u < fraction)], x);
}

void represent_nvfp4(const double *x, int64_t rows, int64_t cols, int64_t height, int64_t width,
                     const struct randomness *random, double *y)
{
    double g = power_of_two_scale(amax_of_all(x, rows * cols), 2688);
    for (int64_t at = 0; at < rows * cols; at++) {
        int64_t r0 = at / cols / height * height, c0 = at % cols / width * width;
        double amax = 0;
        for (int64_t r = r0; r < r0 + height && r < rows; r++) {
            for (int64_t c = c0; c < c0 + width && c < cols; c++) {
                amax = fmax(amax, fabs(x[r * cols + c]));
            }
        }
        double scale = nearest(g * amax / 6, 3, -6, 448) / g;
        if (scale == 0) {
            y[at] = 0;
        } else if (random) {
            uint32_t bits = rng_bits(random->seed, random->stream, random->update, (uint64_t)at);
            y[at] = scale * stochastic_e2m1(x[at] / scale, bits);
        } else {
            y[at] = scale * nearest(x[at] / scale, 1, 0, 6);
        }
    }
}

void represent_hadamard(const double *x, int64_t rows, int64_t cols, double *y)
{
    memcpy(y, x, (size_t)(rows * cols) * sizeof *y);
    for (int64_t r = 0; r < rows / 16 * 16; r++) {
        for (int64_t c = 0; c < cols; c++) {
            double sum = 0;
            for (int k = 0; k < 16; k++) {
                int sign = __builtin_popcount((unsigned)(r % 16) & (unsigned)k) + (int)(HADAMARD_SIGNS >> k & 1u);
                sum += (sign % 2 ? -0.25 : 0.25) * x[(r / 16 * 16 + k) * cols + c];
            }
            y[r * cols + c] = sum;
        }
    }
}
