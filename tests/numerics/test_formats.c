/* Scalar conversions against the slow oracle, dense around every boundary and strided over all FP32 numbers. */
#include "tests/test.h"

#include "numerics/formats.h"
#include "tests/numerics/oracle.h"

#include <math.h>

static struct oracle_format formats[ORACLE_COUNT];

static int encode(int f, float x)
{
    switch (f) {
    case ORACLE_E2M1:
        return e2m1_from_float(x);
    case ORACLE_E4M3:
        return e4m3_from_float(x);
    case ORACLE_E5M2:
        return e5m2_from_float(x);
    case ORACLE_UE4M3:
        return ue4m3_from_float(x);
    default:
        return ue5m3_from_float(x);
    }
}

static float decode(int f, int code)
{
    switch (f) {
    case ORACLE_E2M1:
        return e2m1_to_float((uint8_t)code);
    case ORACLE_E4M3:
        return e4m3_to_float((uint8_t)code);
    case ORACLE_E5M2:
        return e5m2_to_float((uint8_t)code);
    case ORACLE_UE4M3:
        return ue4m3_to_float((uint8_t)code);
    default:
        return ue5m3_to_float((uint8_t)code);
    }
}

static float round_trip(int f, float x)
{
    switch (f) {
    case ORACLE_E2M1:
        return e2m1_round(x);
    case ORACLE_E4M3:
        return e4m3_round(x);
    case ORACLE_E5M2:
        return e5m2_round(x);
    default:
        return decode(f, encode(f, x));
    }
}

/* x and -x give `code` with the right sign, and the fused rounding has the bits of the decoded code. */
static void check(int f, float x, int code)
{
    int minus = formats[f].is_signed ? code + (f == ORACLE_E2M1 ? 8 : 0x80) : 0;
    if (encode(f, x) != code || encode(f, -x) != minus) {
        fail_msg("%s of %a: %#x and %#x, expected %#x", formats[f].name, (double)x, encode(f, x), encode(f, -x), code);
    }
    assert_int_equal(float_bits(round_trip(f, x)), float_bits(decode(f, code)));
    assert_int_equal(float_bits(round_trip(f, -x)), float_bits(decode(f, minus)));
}

static void test_decode(void **state)
{
    (void)state;
    for (int f = 0; f < ORACLE_COUNT; f++) {
        for (int code = 0; code <= formats[f].max_code; code++) {
            assert_true((double)decode(f, code) == formats[f].value[code]);
            if (formats[f].is_signed) {
                float minus = decode(f, code + (f == ORACLE_E2M1 ? 8 : 0x80));
                assert_true((double)minus == -formats[f].value[code] && signbit(minus));
            }
        }
    }
    assert_true(isnan(e4m3_to_float(0x7f)) && isnan(e4m3_to_float(0xff)) && isnan(ue4m3_to_float(0x7f)));
    assert_true(e5m2_to_float(0x7c) == INFINITY && e5m2_to_float(0xfc) == -INFINITY);
    for (int code = 0x7d; code <= 0x7f; code++) {
        assert_true(isnan(e5m2_to_float((uint8_t)code)) && isnan(e5m2_to_float((uint8_t)(code + 0x80))));
    }
}

static void test_boundaries(void **state)
{
    (void)state;
    for (int f = 0; f < ORACLE_COUNT; f++) {
        for (int code = 0; code <= formats[f].max_code; code++) {
            float value = (float)formats[f].value[code];
            check(f, value, code);
            check(f, nextafterf(value, INFINITY), code);
            if (code > 0) {
                check(f, nextafterf(value, 0.0f), code);
            }
            if (code < formats[f].max_code) {
                float middle = (float)((formats[f].value[code] + formats[f].value[code + 1]) / 2);
                check(f, middle, code + code % 2);
                check(f, nextafterf(middle, 0.0f), code);
                check(f, nextafterf(middle, INFINITY), code + 1);
            }
        }
    }
}

static void test_special(void **state)
{
    (void)state;
    for (int f = 0; f < ORACLE_COUNT; f++) {
        float max = (float)formats[f].value[formats[f].max_code];
        float beyond = (float)formats[f].value[formats[f].max_code + 1];
        float large[] = {max * 1.01f, beyond, 2.0f * max, 3e38f, INFINITY};
        for (size_t i = 0; i < sizeof large / sizeof *large; i++) {
            check(f, large[i], formats[f].max_code);
        }
        /* FP32 subnormals vanish, the sign stays. */
        check(f, 0x1p-149f, 0);
        check(f, 0x1.8p-127f, 0);
    }
    float nans[] = {float_from_bits(0x7fc00000u), float_from_bits(0xffc00000u), float_from_bits(0x7f800001u),
                    float_from_bits(0xffffffffu)};
    for (size_t i = 0; i < sizeof nans / sizeof *nans; i++) {
        assert_int_equal(e2m1_from_float(nans[i]), 7);
        assert_true(e2m1_round(nans[i]) == 6.0f);
        assert_int_equal(e4m3_from_float(nans[i]), 0x7f);
        assert_int_equal(e5m2_from_float(nans[i]), 0x7f);
        assert_int_equal(ue4m3_from_float(nans[i]), 0x7f);
        assert_int_equal(ue5m3_from_float(nans[i]), 0xf7);
        assert_int_equal(e8m0_from_float(nans[i], E8M0_NEAREST), 0xff);
        assert_int_equal(float_bits(e4m3_round(nans[i])), float_bits(e4m3_to_float(0x7f)));
        assert_int_equal(float_bits(e5m2_round(nans[i])), float_bits(e5m2_to_float(0x7f)));
        assert_int_equal(bf16_from_float(nans[i]), 0x7fff);
        assert_int_equal(bf16_from_float_sr(nans[i], 0), 0x7fff);
    }
}

static int oracle_e8m0(double magnitude, enum e8m0_rounding rounding)
{
    if (magnitude == 0) {
        return 0;
    }
    if (isinf(magnitude)) {
        return 254;
    }
    int exponent;
    double mantissa = 2 * frexp(magnitude, &exponent);
    int code = exponent - 1 + 127;
    switch (rounding) {
    case E8M0_FLOOR:
        break;
    case E8M0_CEIL:
        code += mantissa > 1;
        break;
    case E8M0_NEAREST:
        code += mantissa > 1.5 || (mantissa == 1.5 && code % 2 != 0);
        break;
    }
    return code < 0 ? 0 : code > 254 ? 254 : code;
}

static int oracle_bf16(float x)
{
    double low = (double)float_from_bits(float_bits(x) & 0xffff0000u);
    uint32_t code = float_bits(x) >> 16;
    /* The step away from zero, also beyond the largest finite value. */
    double step = ldexp(1.0, (code & 0x7f80u ? (int)(code >> 7 & 0xff) : 1) - 127 - 7);
    double excess = fabs((double)x - low);
    return (int)(code + (excess > step / 2 || (excess == step / 2 && code % 2)));
}

/* Every 9973rd FP32 number, of both signs; NaN is tested above. */
static void test_sweep(void **state)
{
    (void)state;
    for (uint64_t bits = 0; bits <= 0xffffffffu; bits += 9973) {
        float x = float_from_bits((uint32_t)bits);
        if (isnan(x)) {
            continue;
        }
        for (int f = 0; f < ORACLE_COUNT; f++) {
            int expected = oracle_encode(&formats[f], (double)x);
            if (encode(f, x) != expected) {
                fail_msg("%s of %a: %#x, expected %#x", formats[f].name, (double)x, encode(f, x), expected);
            }
            assert_int_equal(float_bits(round_trip(f, x)), float_bits(decode(f, expected)));
        }
        for (int r = E8M0_FLOOR; r <= E8M0_NEAREST; r++) {
            assert_int_equal(e8m0_from_float(x, (enum e8m0_rounding)r),
                             oracle_e8m0(fabs((double)x), (enum e8m0_rounding)r));
        }
        assert_int_equal(bf16_from_float(x), oracle_bf16(x));
    }
}

static void test_e8m0(void **state)
{
    (void)state;
    for (int code = 0; code <= 254; code++) {
        assert_true((double)e8m0_to_float((uint8_t)code) == ldexp(1.0, code - 127));
        float points[] = {1.0f,          1.5f, nextafterf(1.0f, 2.0f), nextafterf(1.5f, 1.0f), nextafterf(1.5f, 2.0f),
                          0x1.fffffep+0f};
        for (size_t i = 0; i < sizeof points / sizeof *points; i++) {
            float x = points[i] * e8m0_to_float((uint8_t)code);
            for (int r = E8M0_FLOOR; r <= E8M0_NEAREST; r++) {
                enum e8m0_rounding rounding = (enum e8m0_rounding)r;
                assert_int_equal(e8m0_from_float(x, rounding), oracle_e8m0((double)x, rounding));
                assert_int_equal(e8m0_from_float(-x, rounding), e8m0_from_float(x, rounding));
            }
        }
    }
    assert_true(isnan(e8m0_to_float(0xff)));
    assert_int_equal(e8m0_from_float(0.0f, E8M0_CEIL), 0);
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
        cmocka_unit_test(test_decode), cmocka_unit_test(test_boundaries), cmocka_unit_test(test_special),
        cmocka_unit_test(test_sweep),  cmocka_unit_test(test_e8m0),
    };
    return cmocka_run_group_tests_name("numerics/formats", tests, setup, NULL);
}
