/* bench: what the sums of FP8 products on Hopper lose by their length, by the model of docs/numerics.md section 17.
 *
 *   build/release/bench/sums_error
 *
 * No GPU. One sum is that of dV or dK over n queries (all query heads of a kv head): E4M3 codes of x, log-normal (P),
 * log-normal times normal (dS) or within a binade (a sink), times E4M3 codes of y, normal about a mean. The accumulator
 * is added in FP32 and begins at zero again every so many products. Table: root mean square error over that of the
 * exact sums, and, in brackets, by how much the mean magnitude is too small; both of the sum alone, and beside them
 * what rounding x and y to codes costs. */
#include "core/rng.h"
#include "numerics/formats.h"
#include "tests/attention/wgmma_sum.c"

#include <stdio.h>

enum { LONGEST = 262144, PRODUCTS_IN_ALL = 1 << 24, PERIODS = 7 };

static const int periods[PERIODS] = {LONGEST, 32768, 8192, 4096, 2048, 1024, 128};

/* sink: x within a binade, as P of a key that every query looks at. mean: of y, whose standard deviation is 1. */
struct kind {
    const char *name;
    bool signed_x, sink;
    float mean;
};

static const struct kind kinds[] = {
    {"x and y of any sign", true, false, 0}, /* dK, dV in general */
    {"x of one sign, y about 0", false, false, 0},
    {"x of one sign, y about .1", false, false, 0.1f},
    {"x of one binade, y about .1", false, true, 0.1f},
    {"x of one binade, y about 1", false, true, 1},
};

struct error {
    double squares, shrinkage;
};

struct measured {
    double squares, magnitudes; /* of exact sums */
    struct error rounding, sums[PERIODS];
};

static void error_add(struct error *e, double found, double exact)
{
    e->squares += (found - exact) * (found - exact);
    e->shrinkage += exact < 0 ? found - exact : exact - found;
}

static uint64_t drawn;

static float normal(void)
{
    return rng_normal(1, 1, drawn++);
}

/* n codes each; returns the sum of the unrounded products. */
static double draw(const struct kind *kind, int n, uint8_t *x, uint8_t *y)
{
    double sum = 0;
    for (int i = 0; i < n; i++) {
        const float p = kind->sink ? exp2f(6 + rng_uniform(1, 2, 0, drawn)) : exp2f(2 + 2 * normal());
        const float a = fmaxf(fminf(kind->signed_x ? p * normal() : p, E4M3_MAX), -E4M3_MAX);
        const float b = 64 * (normal() + kind->mean);
        x[i] = e4m3_from_float(a);
        y[i] = e4m3_from_float(b);
        sum += (double)a * (double)b;
    }
    return sum;
}

static double sum_exact(const uint8_t *x, const uint8_t *y, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++) {
        sum += (double)e4m3_to_float(x[i]) * (double)e4m3_to_float(y[i]);
    }
    return sum;
}

static float sum_flushed(const uint8_t *x, const uint8_t *y, int n, int period)
{
    float sum = 0;
    for (int first = 0; first < n; first += period) {
        const int count = n - first < period ? n - first : period;
        sum += wgmma_sum(WGMMA_E4M3, x + first, WGMMA_E4M3, y + first, count, 0);
    }
    return sum;
}

static struct measured measure(const struct kind *kind, int n)
{
    static uint8_t x[LONGEST], y[LONGEST];
    struct measured m = {0};
    for (int turn = 0; turn < PRODUCTS_IN_ALL / n && turn < 2048; turn++) {
        const double unrounded = draw(kind, n, x, y), exact = sum_exact(x, y, n);
        m.squares += exact * exact;
        m.magnitudes += fabs(exact);
        error_add(&m.rounding, exact, unrounded);
        for (int i = 0; i < PERIODS; i++) {
            error_add(&m.sums[i], (double)sum_flushed(x, y, n, periods[i]), exact);
        }
    }
    return m;
}

int main(void)
{
    printf("| sum | products | never | every 32768 | 8192 | 4096 | 2048 | 1024 | 128 | rounding |\n");
    printf("|---|---|---|---|---|---|---|---|---|---|\n");
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        for (int n = 1024; n <= LONGEST; n *= 4) {
            const struct measured m = measure(&kinds[k], n);
            printf("| %s | %d |", kinds[k].name, n);
            for (int i = 0; i < PERIODS; i++) {
                printf(" %.2f (%.2f) |", 100 * sqrt(m.sums[i].squares / m.squares),
                       100 * m.sums[i].shrinkage / m.magnitudes);
            }
            printf(" %.2f |\n", 100 * sqrt(m.rounding.squares / m.squares));
            fflush(stdout);
        }
    }
    return 0;
}
