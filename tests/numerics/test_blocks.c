/* Block quantisers against brute force in FP64, on BF16 inputs of many shapes and sizes, short blocks and strides. */
#include "tests/test.h"

#include "numerics/blocks.h"
#include "numerics/formats.h"
#include "tests/numerics/block_oracle.h"

#include <math.h>

static struct oracle_format formats[ORACLE_COUNT];

/* Inputs by kind: normal, heavy-tailed, few values (many ties), one large element, mostly zero. */
enum { KINDS = 5 };
static void fill(float *x, int n, int kind, float size, uint64_t *random)
{
    for (int i = 0; i < n; i++) {
        double v = oracle_normal(random);
        switch (kind) {
        case 0:
            break;
        case 1:
            v *= v * v;
            break;
        case 2:
            v = round(2 * v) / 4;
            break;
        case 3:
            v *= i == n / 2 ? 30 : 1;
            break;
        default:
            v *= oracle_random(random) % 4 == 0;
            break;
        }
        x[i] = bf16_to_float(bf16_from_float((float)v * size));
    }
}

static bool same(float a, float b)
{
    return float_bits(a) == float_bits(b);
}

static void check_nvfp4(const float *x, int n, float g, enum nvfp4_rule rule)
{
    enum { STRIDE = 3 };
    uint8_t scale, codes[16], scale_strided, codes_strided[16 * STRIDE];
    float y[16], strided[16 * STRIDE];
    nvfp4_encode(x, n, 1, g, rule, &scale, codes);
    nvfp4_round(x, n, 1, g, rule, y);
    memset(strided, 0xff, sizeof strided); /* NaN between the elements must not matter */
    for (int i = 0; i < n; i++) {
        strided[i * STRIDE] = x[i];
    }
    nvfp4_encode(strided, n, STRIDE, g, rule, &scale_strided, codes_strided);
    nvfp4_round(strided, n, STRIDE, g, rule, strided);
    int expected = oracle_nvfp4_scale(formats, x, n, (double)g, rule);
    if (scale != expected) {
        fail_msg("scale %#x (error %g), expected %#x (%g)", scale, oracle_nvfp4_error(formats, x, n, (double)g, scale),
                 expected, oracle_nvfp4_error(formats, x, n, (double)g, expected));
    }
    assert_int_equal(scale_strided, scale);
    for (int i = 0; i < n; i++) {
        int code = oracle_nvfp4_code(formats, (double)x[i], (double)g, scale);
        double value = oracle_decode(&formats[ORACLE_E2M1], code) * formats[ORACLE_UE4M3].value[scale] / (double)g;
        assert_int_equal(codes[i], code);
        assert_int_equal(codes_strided[i * STRIDE], code);
        assert_true(same(y[i], (float)value) && (double)y[i] == value);
        assert_true(same(y[i], bf16_to_float(bf16_from_float(y[i]))));
        assert_true(same(strided[i * STRIDE], y[i]));
        if (i + 1 < n) {
            assert_true(isnan(strided[i * STRIDE + 1]));
        }
    }
}

static void test_nvfp4(void **state)
{
    (void)state;
    uint64_t random = 11;
    for (int trial = 0; trial < 4000; trial++) {
        float x[16];
        int n = trial % 3 ? 16 : 1 + (int)(oracle_random(&random) % 16);
        /* From blocks whose scale vanishes to blocks beyond 448 * 6. */
        float size = ldexpf(1.0f, trial % 29 - 14);
        fill(x, n, trial % KINDS, size, &random);
        check_nvfp4(x, n, 1.0f, NVFP4_AMAX);
        check_nvfp4(x, n, 1.0f, NVFP4_MSE);
        float g = nvfp4_global_scale(amax_of(x, n, 1));
        check_nvfp4(x, n, g, NVFP4_AMAX);
        check_nvfp4(x, n, g, NVFP4_MSE);
    }
}

/* Every BF16 maximum at which the candidates or the scale may change, alone in its block. */
static void test_nvfp4_single(void **state)
{
    (void)state;
    for (uint32_t word = 0x3a00; word < 0x4700; word++) {
        float x[2] = {bf16_to_float((bf16)word), 0.0f};
        check_nvfp4(x, 2, 1.0f, NVFP4_AMAX);
        check_nvfp4(x, 2, 1.0f, NVFP4_MSE);
    }
}

static void test_vanishing_scale(void **state)
{
    (void)state;
    float x[16], y[16];
    uint8_t scale, codes[16];
    for (int i = 0; i < 16; i++) {
        x[i] = i % 2 ? 0x1p-30f : -0x1p-31f;
    }
    for (int rule = NVFP4_AMAX; rule <= NVFP4_MSE; rule++) {
        nvfp4_encode(x, 16, 1, 1.0f, (enum nvfp4_rule)rule, &scale, codes);
        nvfp4_round(x, 16, 1, 1.0f, (enum nvfp4_rule)rule, y);
        assert_int_equal(scale, 0);
        for (int i = 0; i < 16; i++) {
            assert_int_equal(codes[i], 0);
            assert_true(same(y[i], 0.0f));
        }
    }
    uint32_t bits[16] = {0};
    nvfp4_round_sr(x, 16, 1, 1.0f, bits, y);
    nvfp4_round_tile16(x, 4, 4, 4, 1.0f, x);
    for (int i = 0; i < 16; i++) {
        assert_true(same(y[i], 0.0f) && same(x[i], 0.0f));
    }
}

static void test_nvfp4_folded(void **state)
{
    (void)state;
    static const double multipliers[] = {.25, .3125, .375, .4375, .5, .625, .75, .875, 1, 1.125, 1.25};
    uint64_t random = 5;
    for (int trial = 0; trial < 300; trial++) {
        float x[128], y[128];
        fill(x, 128, trial % KINDS, ldexpf(1.0f, trial % 21 - 12), &random);
        double g = trial % 2 ? 1.0 : 256.0;
        nvfp4_round_folded(x, (float)g, y);
        for (int b = 0; b < 64; b += 16) {
            float pair[32];
            memcpy(pair, x + b, 16 * sizeof *x);
            memcpy(pair + 16, x + 64 + b, 16 * sizeof *x);
            double amax = (double)amax_of(pair, 32, 1) * g, best_error = INFINITY;
            int best = 0;
            for (int m = 0; m < 11; m++) {
                int scale = oracle_nearest(&formats[ORACLE_UE4M3], multipliers[m] * amax / 6);
                double error = oracle_nvfp4_error(formats, pair, 32, g, scale);
                if (error < best_error) {
                    best_error = error;
                    best = scale;
                }
            }
            for (int i = 0; i < 32; i++) {
                int code = oracle_nvfp4_code(formats, (double)pair[i], g, best);
                double value = oracle_decode(&formats[ORACLE_E2M1], code) * formats[ORACLE_UE4M3].value[best] / g;
                assert_true((double)y[(i < 16 ? b : 64 + b - 16) + i] == value);
            }
        }
    }
}

static void test_nvfp4_tile(void **state)
{
    (void)state;
    enum { STRIDE = 21 };
    uint64_t random = 3;
    for (int trial = 0; trial < 100; trial++) {
        int rows = trial % 4 ? 16 : 1 + trial % 16, cols = trial % 5 ? 16 : 1 + trial % 13;
        float x[16 * STRIDE], y[16 * STRIDE], all[256];
        fill(x, 16 * STRIDE, trial % KINDS, 0.02f, &random);
        for (int i = 0; i < rows * cols; i++) {
            all[i] = x[i / cols * STRIDE + i % cols];
        }
        float g = nvfp4_global_scale(1.0f);
        nvfp4_round_tile16(x, rows, cols, STRIDE, g, y);
        int scale = oracle_nvfp4_scale(formats, all, rows * cols, (double)g, NVFP4_AMAX);
        for (int i = 0; i < rows * cols; i++) {
            int code = oracle_nvfp4_code(formats, (double)all[i], (double)g, scale);
            double value = oracle_decode(&formats[ORACLE_E2M1], code) * formats[ORACLE_UE4M3].value[scale] / (double)g;
            assert_true((double)y[i / cols * STRIDE + i % cols] == value);
        }
    }
}

static void test_nvfp4_stochastic(void **state)
{
    (void)state;
    uint64_t random = 17;
    for (int trial = 0; trial < 1000; trial++) {
        float x[16], y[16];
        uint32_t bits[16];
        int n = trial % 3 ? 16 : 1 + trial % 16;
        fill(x, n, trial % KINDS, 1.0f, &random);
        for (int i = 0; i < n; i++) {
            bits[i] = oracle_random(&random);
        }
        nvfp4_round_sr(x, n, 1, 64.0f, bits, y);
        int scale = oracle_nvfp4_scale(formats, x, n, 64.0, NVFP4_AMAX);
        double s = formats[ORACLE_UE4M3].value[scale];
        for (int i = 0; i < n; i++) {
            /* The quotient is an FP32 number before it is rounded. */
            double t = scale ? (double)(float)((double)x[i] * 64.0 / s) : 0.0;
            double q = oracle_decode(&formats[ORACLE_E2M1], oracle_encode_sr(&formats[ORACLE_E2M1], t, bits[i]));
            assert_true((double)y[i] == q * s / 64.0);
        }
    }
}

static void check_mxfp4(const float *x, int n, enum mx_rule rule)
{
    enum { STRIDE = 5 };
    uint8_t e8m0, codes[32], e8m0_strided, codes_strided[32 * STRIDE];
    float y[32], strided[32 * STRIDE];
    mxfp4_encode(x, n, 1, rule, &e8m0, codes);
    mxfp4_round(x, n, 1, rule, y);
    memset(strided, 0xff, sizeof strided);
    for (int i = 0; i < n; i++) {
        strided[i * STRIDE] = x[i];
    }
    mxfp4_encode(strided, n, STRIDE, rule, &e8m0_strided, codes_strided);
    mxfp4_round(strided, n, STRIDE, rule, strided);
    bool zero = amax_of(x, n, 1) == 0.0f;
    assert_int_equal(e8m0, oracle_mx_scale(formats, x, n, rule));
    assert_int_equal(e8m0_strided, e8m0);
    for (int i = 0; i < n; i++) {
        int code = zero ? 0 : oracle_mx_code(formats, (double)x[i], rule, e8m0);
        /* alpha (q / 6): two roundings that are one unless the result is subnormal. */
        double q = oracle_decode(&formats[ORACLE_E2M1], code);
        double value = ldexp((double)(float)(mx_rule_is_amplitude(rule) ? q / 6 : q), e8m0 - 127);
        assert_int_equal(codes[i], code);
        assert_int_equal(codes_strided[i * STRIDE], code);
        assert_true(same(y[i], (float)value));
        assert_true(same(strided[i * STRIDE], y[i]));
    }
}

static void test_mxfp4(void **state)
{
    (void)state;
    uint64_t random = 23;
    for (int trial = 0; trial < 3000; trial++) {
        float x[32];
        int n = trial % 3 ? 32 : 1 + (int)(oracle_random(&random) % 32);
        fill(x, n, trial % KINDS, ldexpf(1.0f, trial % 31 * 8 - 124), &random);
        for (int rule = MX_OCP_FLOOR; rule <= MX_OCP_MSE; rule++) {
            check_mxfp4(x, n, (enum mx_rule)rule);
        }
    }
}

/* Around the smallest scales: amax 2^-126 and everything near it, subnormal inputs too. */
static void test_mxfp4_small(void **state)
{
    (void)state;
    for (int e = -133; e <= -120; e++) {
        for (int m = 8; m < 16; m++) {
            float x[3] = {ldexpf((float)m / 8, e), -ldexpf(1.0f, e - 1), 0.0f};
            for (int rule = MX_OCP_FLOOR; rule <= MX_OCP_MSE; rule++) {
                check_mxfp4(x, 3, (enum mx_rule)rule);
            }
        }
    }
    float x = 0x1p-126f, y;
    uint8_t e8m0, code;
    mxfp4_encode(&x, 1, 1, MX_AMP_NEAREST, &e8m0, &code);
    mxfp4_round(&x, 1, 1, MX_AMP_NEAREST, &y);
    assert_int_equal(e8m0, 1);
    assert_int_equal(code, 7);
    assert_true(y == 0x1p-126f); /* (alpha / 6) q would have lost bits */
    float zeros[32] = {0.0f, -0.0f};
    check_mxfp4(zeros, 32, MX_AMP_NEAREST);
    check_mxfp4(zeros, 32, MX_OCP_MSE);
}

static void test_mxfp8(void **state)
{
    (void)state;
    uint64_t random = 29;
    for (int trial = 0; trial < 2000; trial++) {
        float x[32];
        uint8_t e8m0, codes[32];
        int n = trial % 3 ? 32 : 1 + trial % 32;
        fill(x, n, trial % KINDS, ldexpf(1.0f, trial % 31 * 8 - 124), &random);
        mxfp8_encode(x, n, 1, &e8m0, codes);
        double amax = (double)amax_of(x, n, 1);
        int e = -127;
        while (ldexp(448.0, e) < amax) {
            e++;
        }
        assert_int_equal(e8m0, amax == 0 ? 0 : e + 127);
        for (int i = 0; i < n; i++) {
            assert_int_equal(codes[i], amax == 0 ? 0 : oracle_encode(&formats[ORACLE_E4M3], ldexp((double)x[i], -e)));
        }
    }
}

static void test_amax_and_pow2(void **state)
{
    (void)state;
    float x[40];
    bf16 half[40];
    for (int i = 0; i < 40; i++) {
        x[i] = (i % 2 ? -1.0f : 1.0f) * (float)i;
        half[i] = bf16_from_float(x[i]);
    }
    assert_true(amax_of(x, 40, 1) == 39.0f && amax_of(x, 13, 3) == 36.0f && amax_of(x, 0, 1) == 0.0f);
    assert_true(amax_of_bf16(half, 40, 1) == 39.0f && amax_of_bf16(half, 13, 3) == 36.0f);
    x[7] = -INFINITY;
    half[7] = 0xff80;
    assert_true(amax_of(x, 40, 1) == INFINITY && amax_of_bf16(half, 40, 1) == INFINITY);
    x[20] = -NAN;
    half[20] = 0xffc0;
    assert_true(isnan(amax_of(x, 40, 1)) && isnan(amax_of_bf16(half, 40, 1)));
    assert_true(amax_of(x, 20, 1) == INFINITY && amax_of(x, 7, 1) == 6.0f);
    float limits[] = {448.0f, 2688.0f, 1.0f, 57344.0f};
    uint64_t random = 1;
    for (int i = 0; i < 4000; i++) {
        float limit = limits[i % 4], amax = fabsf((float)oracle_normal(&random)) * ldexpf(1.0f, i % 200 - 100);
        float k = pow2_scale(amax, limit);
        int exponent;
        assert_true(frexpf(k, &exponent) == 0.5f);
        assert_true((double)k * (double)amax <= (double)limit && 2.0 * (double)k * (double)amax > (double)limit);
    }
    assert_true(pow2_scale(448.0f, 448.0f) == 1.0f && pow2_scale(0.0f, 448.0f) == 1.0f);
    assert_true(pow2_scale(NAN, 448.0f) == 1.0f && pow2_scale(INFINITY, 448.0f) == 1.0f);
    assert_true(pow2_scale(0x1p-149f, 448.0f) == 0x1p126f && nvfp4_global_scale(1.0f) == 2048.0f);
}

static int setup(void **state)
{
    (void)state;
    oracle_init(formats);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nvfp4),           cmocka_unit_test(test_nvfp4_single),
        cmocka_unit_test(test_vanishing_scale), cmocka_unit_test(test_nvfp4_folded),
        cmocka_unit_test(test_nvfp4_tile),      cmocka_unit_test(test_nvfp4_stochastic),
        cmocka_unit_test(test_mxfp4),           cmocka_unit_test(test_mxfp4_small),
        cmocka_unit_test(test_mxfp8),           cmocka_unit_test(test_amax_and_pow2),
    };
    return cmocka_run_group_tests_name("numerics/blocks", tests, setup, NULL);
}
