/* The vectors of tests/golden/conversions.txt: scalar conversions, NVFP4 and MXFP4 blocks. */
#include "tests/test.h"

#include "numerics/blocks.h"
#include "numerics/formats.h"

#include <stdio.h>
#include <stdlib.h>

enum { LINE_BYTES = 1 << 14, LINES_CVT = 193, LINES_NV = 24, LINES_MX = 14 };

static unsigned next_hex(char **text)
{
    return (unsigned)strtoul(*text, text, 16);
}

static void check_cvt(char *text)
{
    uint32_t bits = next_hex(&text);
    float x = float_from_bits(bits), magnitude = float_from_bits(bits & ~FLOAT_SIGN);
    assert_int_equal(e2m1_from_float(x), next_hex(&text));
    assert_int_equal(e4m3_from_float(x), next_hex(&text));
    assert_int_equal(e5m2_from_float(x), next_hex(&text));
    assert_int_equal(bf16_from_float(x), next_hex(&text));
    assert_int_equal(e8m0_from_float(x, E8M0_FLOOR), next_hex(&text));
    assert_int_equal(e8m0_from_float(x, E8M0_CEIL), next_hex(&text));
    assert_int_equal(e8m0_from_float(x, E8M0_NEAREST), next_hex(&text));
    assert_int_equal(ue4m3_from_float(magnitude), next_hex(&text));
    assert_int_equal(ue5m3_from_float(magnitude), next_hex(&text));
}

static void read_bf16(char **text, int n, float *x)
{
    for (int i = 0; i < n; i++) {
        x[i] = bf16_to_float((bf16)next_hex(text));
    }
    *text = strchr(*text, ':') + 1;
}

static void check_nv(char *text)
{
    float x[16], y[16], g = strtof(text, &text);
    enum nvfp4_rule rule = (enum nvfp4_rule)strtol(text, &text, 10);
    uint8_t scale, codes[16];
    read_bf16(&text, 16, x);
    nvfp4_encode(x, 16, 1, g, rule, &scale, codes);
    nvfp4_round(x, 16, 1, g, rule, y);
    assert_int_equal(scale, next_hex(&text));
    for (int i = 0; i < 16; i++) {
        assert_int_equal(codes[i], next_hex(&text));
        assert_true(y[i] == e2m1_to_float(codes[i]) * ue4m3_to_float(scale) / g);
    }
}

static void check_mx(char *text)
{
    float x[32], y[32];
    enum mx_rule rule = (enum mx_rule)strtol(text, &text, 10);
    uint8_t e8m0, codes[32];
    read_bf16(&text, 32, x);
    mxfp4_encode(x, 32, 1, rule, &e8m0, codes);
    mxfp4_round(x, 32, 1, rule, y);
    double step = strtod(text, &text);
    assert_true((double)e8m0_to_float(e8m0) / (mx_rule_is_amplitude(rule) ? 6.0 : 1.0) == step);
    for (int i = 0; i < 32; i++) {
        assert_int_equal(codes[i], next_hex(&text));
        assert_true(y[i] == (float)((double)e2m1_to_float(codes[i]) * step));
    }
}

static void test_vectors(void **state)
{
    (void)state;
    static char line[LINE_BYTES];
    int cvt = 0, nv = 0, mx = 0;
    FILE *file = fopen("tests/golden/conversions.txt", "r");
    assert_non_null(file);
    while (fgets(line, sizeof line, file)) {
        if (strncmp(line, "cvt ", 4) == 0) {
            check_cvt(line + 4);
            cvt++;
        } else if (strncmp(line, "nv ", 3) == 0) {
            check_nv(line + 3);
            nv++;
        } else if (strncmp(line, "mx ", 3) == 0) {
            check_mx(line + 3);
            mx++;
        }
    }
    fclose(file);
    assert_int_equal(cvt, LINES_CVT);
    assert_int_equal(nv, LINES_NV);
    assert_int_equal(mx, LINES_MX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_vectors)};
    return cmocka_run_group_tests_name("numerics/golden", tests, NULL, NULL);
}
