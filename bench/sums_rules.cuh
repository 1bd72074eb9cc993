/* bench: models of the sum of a wgmma's k step that differ in what one could guess at. For bench/sums_sm90.cu. */
#pragma once

#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

enum { STEP = 32 };

/* d = c + sum a b of one k step. */
struct sum {
    uint8_t a[STEP], b[STEP];
    float c, d;
};

struct format {
    int mantissa, bias;
};

static const struct format E4M3 = {3, 7}, E5M2 = {2, 15};

enum accumulation { WITH_PRODUCTS, AFTER_TRUNCATED, AFTER_NEAREST };

/* Terms are aligned to the largest exponent of their group, and what lies below `bits` fraction bits of it is dropped:
 * towards zero, or (down) by an arithmetic shift. The exponent of a product: the sum of its operands' exponents, or
 * (normalised) its own. zeros: products that are zero have an exponent, too. The accumulator is one of the terms, or is
 * added after. The result keeps `result` fraction bits. */
struct rule {
    int bits, group, result;
    enum accumulation accumulation;
    bool down, normalised, zeros;
};

struct term {
    int64_t significand; /* value = significand 2^scale */
    int scale, exponent;
    bool counts;
};

static inline struct term decoded(struct format f, uint8_t code)
{
    const int field = (code & 0x7f) >> f.mantissa, low = code & ((1 << f.mantissa) - 1);
    struct term t;
    t.significand = (code & 0x80 ? -1 : 1) * (field > 0 ? low + (1 << f.mantissa) : low);
    t.exponent = (field > 0 ? field : 1) - f.bias;
    t.scale = t.exponent - f.mantissa;
    t.counts = true;
    return t;
}

static inline int top_of(int64_t significand, int scale)
{
    return 63 - __builtin_clzll((uint64_t)llabs(significand)) + scale;
}

static inline struct term product_of(const struct rule &r, struct term a, struct term b)
{
    struct term t = {a.significand * b.significand, a.scale + b.scale, a.exponent + b.exponent, true};
    t.counts = t.significand != 0 || r.zeros;
    t.exponent = r.normalised && t.significand != 0 ? top_of(t.significand, t.scale) : t.exponent;
    return t;
}

static inline struct term accumulator_of(float c)
{
    int exponent;
    const float fraction = frexpf(c, &exponent);
    return {(int64_t)(fraction * 0x1p24f), exponent - 24, exponent - 1, c != 0.0f};
}

static inline int64_t aligned(const struct rule &r, const struct term &t, int unit)
{
    const int down = unit - t.scale;
    if (down <= 0) {
        return down < -40 ? 0 : t.significand << -down;
    }
    if (down > 62) {
        return r.down && t.significand < 0 ? -1 : 0;
    }
    return r.down ? t.significand >> down : t.significand / ((int64_t)1 << down);
}

static inline double truncated(double x, int bits)
{
    int exponent;
    const double fraction = frexp(x, &exponent);
    return ldexp(trunc(ldexp(fraction, bits + 1)), exponent - bits - 1);
}

static inline float sum_by(const struct rule &r, struct format fa, struct format fb, const struct sum &s)
{
    struct term terms[STEP + 1];
    float d = s.c;
    for (int first = 0; first < STEP; first += r.group) {
        int n = 0, top = INT_MIN;
        for (int k = first; k < first + r.group; k++) {
            terms[n++] = product_of(r, decoded(fa, s.a[k]), decoded(fb, s.b[k]));
        }
        if (r.accumulation == WITH_PRODUCTS) {
            terms[n++] = accumulator_of(d);
        }
        for (int i = 0; i < n; i++) {
            top = terms[i].counts && terms[i].exponent > top ? terms[i].exponent : top;
        }
        int64_t total = 0;
        for (int i = 0; i < n && top > INT_MIN; i++) {
            total += aligned(r, terms[i], top - r.bits);
        }
        double x = top > INT_MIN ? ldexp((double)total, top - r.bits) : 0.0;
        if (r.accumulation != WITH_PRODUCTS) {
            x += (double)d;
            x = r.accumulation == AFTER_NEAREST ? (double)(float)x : truncated(x, 23);
        }
        d = (float)truncated(x, r.result);
    }
    return d;
}

static inline void print_rule(const struct rule &r)
{
    static const char *const accumulations[] = {"accumulator a term", "accumulator after, truncated",
                                                "accumulator after, nearest"};
    printf("%d bits %s, groups of %d, exponents %s%s, %s, result %d bits", r.bits, r.down ? "down" : "to zero", r.group,
           r.normalised ? "of products" : "of operands", r.zeros ? ", zeros count" : "", accumulations[r.accumulation],
           r.result);
}

/* Every combination. */
static inline std::vector<struct rule> all_rules(void)
{
    std::vector<struct rule> rules;
    for (int i = 0; i < 4 * 4 * 3 * 3 * 8; i++) {
        const int results[] = {12, 13, 23};
        rules.push_back({12 + i % 4, STEP >> i / 4 % 4, results[i / 16 % 3], (enum accumulation)(i / 48 % 3),
                         i / 144 % 2 > 0, i / 288 % 2 > 0, i / 576 % 2 > 0});
    }
    return rules;
}
