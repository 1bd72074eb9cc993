#include "tests/numerics/oracle.h"

#include <math.h>

void oracle_init(struct oracle_format formats[ORACLE_COUNT])
{
    formats[ORACLE_E2M1] = (struct oracle_format){"e2m1", 1, 1, 7, true, {0}};
    formats[ORACLE_E4M3] = (struct oracle_format){"e4m3", 3, 7, 0x7e, true, {0}};
    formats[ORACLE_E5M2] = (struct oracle_format){"e5m2", 2, 15, 0x7b, true, {0}};
    formats[ORACLE_UE4M3] = (struct oracle_format){"ue4m3", 3, 7, 0x7e, false, {0}};
    formats[ORACLE_UE5M3] = (struct oracle_format){"ue5m3", 3, 15, 0xf7, false, {0}};
    for (int f = 0; f < ORACLE_COUNT; f++) {
        struct oracle_format *format = &formats[f];
        int steps = 1 << format->mantissa_bits;
        for (int code = 0; code <= format->max_code + 1; code++) {
            int e = code / steps, m = code % steps;
            format->value[code] = e == 0 ? m * pow(2, 1 - format->bias - format->mantissa_bits)
                                         : (1.0 + (double)m / steps) * pow(2, e - format->bias);
        }
    }
}

int oracle_nearest(const struct oracle_format *format, double magnitude)
{
    if (magnitude >= format->value[format->max_code]) {
        return format->max_code;
    }
    int best = 0;
    for (int code = 1; code <= format->max_code; code++) {
        double d = fabs(format->value[code] - magnitude), d_best = fabs(format->value[best] - magnitude);
        if (d < d_best || (d == d_best && code % 2 == 0)) {
            best = code;
        }
    }
    return best;
}

static int with_sign(const struct oracle_format *format, int code, double x)
{
    return code + (signbit(x) ? (format->mantissa_bits == 1 ? 8 : 0x80) : 0);
}

int oracle_encode(const struct oracle_format *format, double x)
{
    if (!format->is_signed) {
        return x > 0 ? oracle_nearest(format, x) : 0;
    }
    return with_sign(format, oracle_nearest(format, fabs(x)), x);
}

double oracle_decode(const struct oracle_format *format, int code)
{
    int sign = !format->is_signed ? 0 : format->mantissa_bits == 1 ? code & 8 : code & 0x80;
    return sign ? -format->value[code - sign] : format->value[code];
}

int oracle_encode_sr(const struct oracle_format *format, double x, uint32_t bits)
{
    double magnitude = fabs(x);
    if (magnitude >= format->value[format->max_code]) {
        return with_sign(format, format->max_code, x);
    }
    int lower = 0;
    while (format->value[lower + 1] <= magnitude) {
        lower++;
    }
    double fraction = (magnitude - format->value[lower]) / (format->value[lower + 1] - format->value[lower]);
    return with_sign(format, lower + (((double)bits + 0.5) / 4294967296.0 < fraction), x);
}

uint32_t oracle_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 32);
}

double oracle_normal(uint64_t *state)
{
    double sum = -6.0;
    for (int i = 0; i < 12; i++) {
        sum += (double)oracle_random(state) / 4294967296.0;
    }
    return sum;
}
