#include "tests/attention/wgmma_sum.h"

#include "core/status.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>

enum { FRACTION = 13, TERMS = WGMMA_STEP + 1 };

/* significand 2^scale, and the exponent it is aligned by. */
struct term {
    int64_t significand;
    int scale, exponent;
};

static struct term decode(enum wgmma_format format, uint8_t code)
{
    const int mantissa = format == WGMMA_E4M3 ? 3 : 2, bias = format == WGMMA_E4M3 ? 7 : 15;
    const int field = (code & 0x7f) >> mantissa, low = code & ((1 << mantissa) - 1);
    const int significand = field > 0 ? low + (1 << mantissa) : low, exponent = (field > 0 ? field : 1) - bias;
    return (struct term){code & 0x80 ? -significand : significand, exponent - mantissa, exponent};
}

static struct term multiply(struct term a, struct term b)
{
    return (struct term){a.significand * b.significand, a.scale + b.scale, a.exponent + b.exponent};
}

static struct term accumulated(float c)
{
    int exponent;
    const double fraction = frexp((double)c, &exponent);
    return (struct term){(int64_t)(fraction * 0x1p24), exponent - 24, exponent - 1};
}

/* Multiples of 2^unit in a term, towards zero. */
static int64_t aligned(struct term t, int unit)
{
    const int down = unit - t.scale;
    return down <= 0 ? t.significand * ((int64_t)1 << -down) : down < 32 ? t.significand / ((int64_t)1 << down) : 0;
}

static float cut(int64_t sum, int unit)
{
    int64_t drop = 1;
    while (llabs(sum) / drop >> (FRACTION + 1) > 0) {
        drop *= 2;
    }
    return (float)ldexp((double)(sum / drop * drop), unit);
}

static float add_step(enum wgmma_format a_format, const uint8_t *a, enum wgmma_format b_format, const uint8_t *b,
                      float c)
{
    struct term terms[TERMS];
    int n = 0, top = INT_MIN;
    int64_t sum = 0;
    for (int k = 0; k < WGMMA_STEP; k++) {
        terms[n++] = multiply(decode(a_format, a[k]), decode(b_format, b[k]));
    }
    terms[n++] = accumulated(c);
    for (int i = 0; i < n; i++) {
        top = terms[i].significand != 0 && terms[i].exponent > top ? terms[i].exponent : top;
    }
    if (top == INT_MIN) {
        return 0;
    }
    for (int i = 0; i < n; i++) {
        sum += terms[i].significand != 0 ? aligned(terms[i], top - FRACTION) : 0;
    }
    return cut(sum, top - FRACTION);
}

float wgmma_sum(enum wgmma_format a_format, const uint8_t *a, enum wgmma_format b_format, const uint8_t *b, int terms,
                float c)
{
    ASSERT(terms % WGMMA_STEP == 0);
    for (int k = 0; k < terms; k += WGMMA_STEP) {
        c = add_step(a_format, a + k, b_format, b + k, c);
    }
    return c;
}
