#include "tests/numerics/block_oracle.h"

#include <math.h>

static double amax_double(const float *x, int n)
{
    double amax = 0;
    for (int i = 0; i < n; i++) {
        amax = fmax(amax, fabs((double)x[i]));
    }
    return amax;
}

int oracle_nvfp4_code(const struct oracle_format *formats, double x, double g, int scale)
{
    return scale == 0 ? 0 : oracle_encode(&formats[ORACLE_E2M1], x * g / formats[ORACLE_UE4M3].value[scale]);
}

double oracle_nvfp4_error(const struct oracle_format *formats, const float *x, int n, double g, int scale)
{
    double sum = 0, s = formats[ORACLE_UE4M3].value[scale];
    for (int i = 0; i < n; i++) {
        int code = oracle_nvfp4_code(formats, (double)x[i], g, scale);
        double d = (double)x[i] * g - oracle_decode(&formats[ORACLE_E2M1], code) * s;
        sum += d * d;
    }
    return sum;
}

int oracle_nvfp4_scale(const struct oracle_format *formats, const float *x, int n, double g, enum nvfp4_rule rule)
{
    double amax = amax_double(x, n) * g;
    int best = oracle_nearest(&formats[ORACLE_UE4M3], amax / 6);
    if (rule == NVFP4_AMAX) {
        return best;
    }
    double best_error = INFINITY;
    for (int code = 1; code <= 0x7e; code++) {
        double s = formats[ORACLE_UE4M3].value[code];
        if (24 * s < amax || 24 * s > 5 * amax) {
            continue;
        }
        double error = oracle_nvfp4_error(formats, x, n, g, code);
        if (error < best_error) {
            best_error = error;
            best = code;
        }
    }
    return best;
}

int oracle_mx_code(const struct oracle_format *formats, double x, enum mx_rule rule, int e8m0)
{
    return oracle_encode(&formats[ORACLE_E2M1], ldexp(x, 127 - e8m0) * (mx_rule_is_amplitude(rule) ? 6 : 1));
}

static double mx_error(const struct oracle_format *formats, const float *x, int n, enum mx_rule rule, int e8m0)
{
    /* In units of the lower candidate's grid, so that sums are exact: 6 x and q 2^k. */
    double sum = 0, unit = mx_rule_is_amplitude(rule) ? 6 : 1;
    for (int i = 0; i < n; i++) {
        double q = oracle_decode(&formats[ORACLE_E2M1], oracle_mx_code(formats, (double)x[i], rule, e8m0));
        double d = unit * (double)x[i] - ldexp(q, e8m0 - 127);
        sum += d * d;
    }
    return sum;
}

static int clamp_e8m0(double e)
{
    return (int)fmin(fmax(e + 127, 0), 254);
}

int oracle_mx_scale(const struct oracle_format *formats, const float *x, int n, enum mx_rule rule)
{
    double amax = amax_double(x, n);
    if (amax == 0) {
        return 0;
    }
    /* The logarithms of docs/numerics.md as comparisons with powers of two. */
    double floor_log = -200, ceil_log = -200, ceil6 = -200;
    for (int e = -200; e < 200; e++) {
        floor_log = ldexp(1.0, e) <= amax ? e : floor_log;
        ceil_log = ldexp(1.0, e) < amax ? e + 1 : ceil_log;
        ceil6 = ldexp(6.0, e) < amax ? e + 1 : ceil6;
    }
    double mantissa = amax / pow(2, floor_log);
    bool odd = clamp_e8m0(floor_log) % 2 != 0;
    int floor_code = clamp_e8m0(floor_log), ceil_code = clamp_e8m0(ceil_log);
    int ocp_floor = clamp_e8m0(floor_log - 2), ocp_ceil = clamp_e8m0(ceil6);
    switch (rule) {
    case MX_OCP_FLOOR:
        return ocp_floor;
    case MX_OCP_CEIL:
        return ocp_ceil;
    case MX_AMP_FLOOR:
        return floor_code;
    case MX_AMP_CEIL:
        return ceil_code;
    case MX_AMP_NEAREST:
        return clamp_e8m0(floor_log + (mantissa > 1.5 || (mantissa == 1.5 && odd)));
    case MX_AMP_MSE:
        return mx_error(formats, x, n, rule, ceil_code) < mx_error(formats, x, n, rule, floor_code) ? ceil_code
                                                                                                    : floor_code;
    case MX_OCP_MSE:
        return mx_error(formats, x, n, rule, ocp_ceil) < mx_error(formats, x, n, rule, ocp_floor) ? ocp_ceil
                                                                                                  : ocp_floor;
    }
    return -1;
}
