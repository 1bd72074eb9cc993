#include "tests/model/check.h"

#include "core/rng.h"

#include "tests/test.h"

#include <math.h>
#ifdef _OPENMP
#include <omp.h>
#endif

void fill_bf16(bf16 *x, int64_t n, uint64_t stream, float scale)
{
    for (int64_t i = 0; i < n; i++) {
        x[i] = bf16_from_float(scale * rng_normal(11, stream, (uint64_t)i));
    }
}

double rel_l2_bf16(const bf16 *got, const double *want, int64_t n)
{
    double error = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        double e = (double)bf16_to_float(got[i]) - want[i];
        error += e * e;
        norm += want[i] * want[i];
    }
    return sqrt(error / norm);
}

double rel_l2_f32(const float *got, const double *want, int64_t n)
{
    double error = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        double e = (double)got[i] - want[i];
        error += e * e;
        norm += want[i] * want[i];
    }
    return sqrt(error / norm);
}

void check_rounded_once(const bf16 *got, const double *want, int64_t n, double noise)
{
    for (int64_t i = 0; i < n; i++) {
        double x = (double)bf16_to_float(got[i]);
        /* Negated, so that NaN fails. */
        if (!(fabs(x - want[i]) <= 0x1p-8 * fabs(want[i]) + noise)) {
            fail_msg("element %lld: %.9g, expected %.9g", (long long)i, x, want[i]);
        }
    }
}

void check_near_f32(const float *got, const double *want, int64_t n, double relative, double noise)
{
    for (int64_t i = 0; i < n; i++) {
        if (!(fabs((double)got[i] - want[i]) <= relative * fabs(want[i]) + noise)) {
            fail_msg("element %lld: %.9g, expected %.9g", (long long)i, (double)got[i], want[i]);
        }
    }
}

void bf16_to_double(const bf16 *x, double *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        y[i] = (double)bf16_to_float(x[i]);
    }
}

double central_difference(double (*f)(const void *), const void *context, double *x, double h)
{
    double old = *x;
    *x = old + h;
    double above = f(context);
    *x = old - h;
    double below = f(context);
    *x = old;
    return (above - below) / (2 * h);
}

void use_threads(int n)
{
#ifdef _OPENMP
    omp_set_num_threads(n);
#else
    (void)n;
#endif
}
