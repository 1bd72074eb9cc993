/* Stochastic rounding: the exact probability over all words, every decision against FP64, and what saturates. */
#include "tests/test.h"

#include "numerics/formats.h"
#include "tests/numerics/oracle.h"

#include <math.h>

static struct oracle_format formats[ORACLE_COUNT];

static int encode_sr(int f, float x, uint32_t bits)
{
    return f == ORACLE_E2M1   ? e2m1_from_float_sr(x, bits)
           : f == ORACLE_E4M3 ? e4m3_from_float_sr(x, bits)
                              : e5m2_from_float_sr(x, bits);
}

/* With 2^6 equally spaced words a number k / 64 of the way up goes up exactly k times. */
static void test_probability(void **state)
{
    (void)state;
    enum { BITS = 6, WORDS = 1 << BITS };
    for (int f = ORACLE_E2M1; f <= ORACLE_E5M2; f++) {
        for (int code = 0; code < formats[f].max_code; code++) {
            double low = formats[f].value[code], high = formats[f].value[code + 1];
            for (int k = 0; k < WORDS; k++) {
                float x = (float)(low + (high - low) * k / WORDS);
                int up = 0, up_minus = 0;
                for (uint32_t j = 0; j < WORDS; j++) {
                    up += encode_sr(f, x, j << (32 - BITS)) - code;
                    up_minus += encode_sr(f, -x, j << (32 - BITS)) - code - (f == ORACLE_E2M1 ? 8 : 0x80);
                }
                assert_int_equal(up, k);
                assert_int_equal(up_minus, k);
            }
        }
    }
    for (uint32_t low = 0; low < 0x10000u; low += 257) {
        float x = float_from_bits(0x3f800000u + low);
        uint32_t up = 0;
        for (uint32_t j = 0; j < 0x10000u; j++) {
            up += bf16_from_float_sr(x, j << 16) - 0x3f80u;
        }
        assert_int_equal(up, low);
    }
}

static void test_against_oracle(void **state)
{
    (void)state;
    uint64_t random = 1;
    for (uint64_t bits = 0; bits < 0xffffffffu; bits += 19937) {
        float x = float_from_bits((uint32_t)bits);
        uint32_t word = oracle_random(&random);
        if (isnan(x)) {
            continue;
        }
        for (int f = ORACLE_E2M1; f <= ORACLE_E5M2; f++) {
            assert_int_equal(encode_sr(f, x, word), oracle_encode_sr(&formats[f], (double)x, word));
            /* The smallest words decide about tiny fractions. */
            assert_int_equal(encode_sr(f, x, 0), oracle_encode_sr(&formats[f], (double)x, 0));
        }
        assert_int_equal(float_bits(e4m3_round_sr(x, word)), float_bits(e4m3_to_float(e4m3_from_float_sr(x, word))));
        assert_int_equal(float_bits(e5m2_round_sr(x, word)), float_bits(e5m2_to_float(e5m2_from_float_sr(x, word))));
        assert_int_equal(float_bits(e2m1_round_sr(x, word)), float_bits(e2m1_to_float(e2m1_from_float_sr(x, word))));
    }
}

/* The threshold word itself: 2^32 f words go up, no more and no fewer. */
static void test_threshold(void **state)
{
    (void)state;
    float x = 1.0f + 0x1.234p-4f; /* E4M3 step 1/8 above 1: f = 0x1.234p-1 */
    uint32_t up = 0x91a00000u;
    assert_int_equal(e4m3_from_float_sr(x, up - 1), 0x39);
    assert_int_equal(e4m3_from_float_sr(x, up), 0x38);
    /* f = 2^-32: one word of all; f = 2^-33: u = 2^-33 is not below it. */
    assert_int_equal(e4m3_from_float_sr(0x1p-41f, 0), 1);
    assert_int_equal(e4m3_from_float_sr(0x1p-41f, 1), 0);
    assert_int_equal(e4m3_from_float_sr(0x1p-42f, 0), 0);
}

static void test_saturation(void **state)
{
    (void)state;
    uint32_t words[] = {0, 0x80000000u, 0xffffffffu};
    for (size_t i = 0; i < 3; i++) {
        for (int f = ORACLE_E2M1; f <= ORACLE_E5M2; f++) {
            float max = (float)formats[f].value[formats[f].max_code];
            assert_int_equal(encode_sr(f, max, words[i]), formats[f].max_code);
            assert_int_equal(encode_sr(f, max * 1.01f, words[i]), formats[f].max_code);
            assert_int_equal(encode_sr(f, INFINITY, words[i]), formats[f].max_code);
        }
        assert_int_equal(e2m1_from_float_sr(-NAN, words[i]), 7);
        assert_int_equal(e4m3_from_float_sr(-NAN, words[i]), 0x7f);
        assert_int_equal(e5m2_from_float_sr(-NAN, words[i]), 0x7f);
        assert_int_equal(e2m1_from_float_sr(-0.0f, words[i]), 8);
        assert_int_equal(bf16_from_float_sr(INFINITY, words[i]), 0x7f80);
        assert_int_equal(bf16_from_float_sr(-2.0f, words[i]), 0xc000);
    }
    assert_int_equal(bf16_from_float_sr(0x1.fffffep+127f, 0), 0x7f80);
}

/* The mean of many roundings; 5 standard deviations. */
static void test_unbiased(void **state)
{
    (void)state;
    enum { N = 200000 };
    uint64_t random = 7;
    float points[] = {0.1f, -0.7f, 2.2f, 3.999f, -5.3f};
    for (size_t i = 0; i < sizeof points / sizeof *points; i++) {
        double e2m1 = 0, e4m3 = 0, rounded = 0;
        for (int k = 0; k < N; k++) {
            uint32_t word = oracle_random(&random);
            e2m1 += (double)e2m1_round_sr(points[i], word);
            e4m3 += (double)e4m3_round_sr(points[i], word);
            rounded += (double)bf16_to_float(bf16_from_float_sr(points[i], word));
        }
        assert_true(fabs(e2m1 / N - (double)points[i]) < 5 * 1.0 / sqrt(N));
        assert_true(fabs(e4m3 / N - (double)points[i]) < 5 * 0.25 / sqrt(N));
        assert_true(fabs(rounded / N - (double)points[i]) < 5 * 0.016 / sqrt(N));
    }
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
        cmocka_unit_test(test_probability), cmocka_unit_test(test_against_oracle), cmocka_unit_test(test_threshold),
        cmocka_unit_test(test_saturation),  cmocka_unit_test(test_unbiased),
    };
    return cmocka_run_group_tests_name("numerics/stochastic", tests, setup, NULL);
}
