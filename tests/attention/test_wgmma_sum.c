/* The model of a wgmma's sum against what an H200 made of the same operands: sums of a few terms, each of which another
 * model would get wrong, and drawn ones. Recorded by build/release/bench/sums_sm90. */
#include "tests/attention/wgmma_sum.h"

#include "numerics/formats.h"
#include "tests/test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- a few terms, E4M3: 38 is 1, 3e 1.75, 7e 448, 08 2^-6, 04 2^-7, 02 2^-8, 01 2^-9; 80 the sign ---------- */

static const struct made {
    const char *what;
    float c;
    struct {
        uint8_t k, a, b;
    } terms[4]; /* a and b zero: none */
    uint32_t d;
} made[] = {
    {"1 and 2^-13", 0, {{0, 0x38, 0x38}, {1, 0x08, 0x04}}, 0x3f800400},
    {"1 and 2^-14", 0, {{0, 0x38, 0x38}, {1, 0x08, 0x02}}, 0x3f800000},
    {"1 and 2^-14 twice", 0, {{0, 0x38, 0x38}, {1, 0x08, 0x02}, {2, 0x08, 0x02}}, 0x3f800000},
    {"1 and -2^-14: not down", 0, {{0, 0x38, 0x38}, {1, 0x88, 0x02}}, 0x3f800000},
    {"-1 and -2^-14: not down", 0, {{0, 0xb8, 0x38}, {1, 0x88, 0x02}}, 0xbf800000},
    {"2^-18 alone", 0, {{5, 0x01, 0x01}}, 0x36800000},
    {"49/16 and 2^-13: the result is cut", 0, {{0, 0x3e, 0x3e}, {1, 0x08, 0x04}}, 0x40440000},
    {"49/16, its negative, 2^-13: exponents of operands",
     0,
     {{0, 0x3e, 0x3e}, {1, 0x08, 0x04}, {2, 0xbe, 0x3e}},
     0x39000000},
    {"1, -1 and 2^-14: one group", 0, {{0, 0x38, 0x38}, {15, 0x08, 0x02}, {31, 0xb8, 0x38}}, 0},
    {"1, -1 side by side and 2^-14: one group", 0, {{0, 0x38, 0x38}, {1, 0xb8, 0x38}, {31, 0x08, 0x02}}, 0},
    {"c = 1 + 2^-13 alone", 0x1.0008p+0f, {{0}}, 0x3f800400},
    {"c = 1 + 2^-20 alone: cut", 0x1.00001p+0f, {{0}}, 0x3f800000},
    {"c = 2^-30 and 0 x 448: zeros have no exponent", 0x1p-30f, {{3, 0x00, 0x7e}}, 0x30800000},
    {"c = 1 and 2^-13", 1, {{0, 0x08, 0x04}}, 0x3f800400},
    {"c = 1 and 2^-14: c is a term", 1, {{0, 0x08, 0x02}}, 0x3f800000},
    {"c = 1 + 2^-14 and -1: c is cut", 0x1.0004p+0f, {{0, 0xb8, 0x38}}, 0},
    {"c = -1 - 2^-14 and 1", -0x1.0004p+0f, {{0, 0x38, 0x38}}, 0},
    {"c = 1 + 2^-13 and -1", 0x1.0008p+0f, {{0, 0xb8, 0x38}}, 0x39000000},
    {"c = 2^-20 and 1, -1", 0x1p-20f, {{0, 0xb8, 0x38}, {9, 0x38, 0x38}}, 0},
    {"1.5 twice and 2^-13", 0, {{0, 0x3c, 0x38}, {1, 0x3c, 0x38}, {2, 0x08, 0x04}}, 0x40400000},
    {"-1.5 twice and -2^-13", 0, {{0, 0xbc, 0x38}, {1, 0xbc, 0x38}, {2, 0x88, 0x04}}, 0xc0400000},
    {"1.5 twice and 2^-13 twice", 0, {{0, 0x3c, 0x38}, {1, 0x3c, 0x38}, {2, 0x08, 0x04}, {3, 0x08, 0x04}}, 0x40400400},
    {"1 and -1: +0", 0, {{0, 0x38, 0x38}, {1, 0xb8, 0x38}}, 0},
    {"-0 and -0: +0", -0.0f, {{0, 0x80, 0x38}}, 0},
    {"448 x 448 and 2^-18", 0, {{0, 0x7e, 0x7e}, {1, 0x01, 0x01}}, 0x48440000},
};

static int check(const char *what, const uint8_t *a, const uint8_t *b, float c, uint32_t d)
{
    const float found = wgmma_sum(WGMMA_E4M3, a, WGMMA_E4M3, b, WGMMA_STEP, c);
    if (float_bits(found) == d) {
        return 0;
    }
    print_message("%s: %a, expected %a\n", what, (double)found, (double)float_from_bits(d));
    return 1;
}

static void sums_of_few_terms(void **state)
{
    (void)state;
    int bad = 0;
    for (size_t i = 0; i < sizeof made / sizeof made[0]; i++) {
        uint8_t a[WGMMA_STEP] = {0}, b[WGMMA_STEP] = {0};
        for (int t = 0; t < 4; t++) {
            a[made[i].terms[t].k] |= made[i].terms[t].a;
            b[made[i].terms[t].k] |= made[i].terms[t].b;
        }
        bad += check(made[i].what, a, b, made[i].c, made[i].d);
    }
    assert_int_equal(bad, 0);
}

/* ---- drawn sums: codes in hexadecimal ---------------------------------------------------------------------- */

static const struct drawn {
    const char *a, *b;
    float c;
    uint32_t d;
} drawn[] = {
    {"80020005048b05840f050e8401058f0c050a0a098b8b0e8a868108860783000d",
     "828c850385858d06008a020f040b00878209860d0b8501878b84048a8e88880f", -0x1.ep-11f, 0x38e00000},
    {"4447bd3aa8c7c140443e2db8444228bf40b04041c23c3f403fc4be45bdc32d47",
     "c1c143beb635bac2c04138c3beb73fb9c241ba43bc3b40adbbc44244c6afc5c5", -0x1.5068p+5f, 0xc2750400},
    {"6a5062616f4966787b2d76383a5a0f187a0907206709382f63254b400327502f",
     "7b4a050724407215060910184a0b072f0b3c3e1f1f07321215366730177a1d10", 0x1.7a98p+16f, 0x48035c00},
    {"c642c243314045bcc63fbab3b9be40443629c69a2bbe29b439c3bd47bf453db2",
     "c47bc47b3fb43fb47ae67ae6850a850a417541756d836d83b26ab26a35b635b6", -0x1.3efp+12f, 0xc590f000},
    {"38fbea7b028723a60b0da89f7040ce4b5e084c4f28a9fcd41aee486acfaefa1d",
     "805f805fcaf5caf5a7f3a7f399739973d57ad57aa342a34240114011ddaeddae", 0x1.3598p+14f, 0x46f7b800},
    {"51760520735b100d16540f714a576a247c47282c032913591002226775225408",
     "e092f30b4ddc201dd53ed4dd8bfe3484307913b173829f5200817666a62117f1", -0x1.97c8p+13f, 0xc68f1000},
    {"bd30bc3246c23e3e36b843abc7b1c088bc45b2c2b2b71bc1ad3b3e31b840c1c5",
     "09221f1c082b0533595c071c646c79565a031e03111912723f420a03416b4d50", 0x1.84e8p+10f, 0x43f1a000},
    {"0000000000000000000012000000007ed600000000000000005c6b0000000000",
     "680451dea866641739fa18bfa2fb9417ad93698c6572998ccc21f9b1a7de02b6", -0x1.ef08p+6f, 0xc6c6b400},
    {"bcb4c3c5b4b84147c3bcc6313b37bc4634473bc5c63c3a3f3131b5bb41323cba",
     "4c93fb62f29f2d68ad4dddb63bd20900a0cff2ce1d280d5a31e7f6f2a759aacf", -0x1.c4ap+11f, 0xc506c400},
    {"1ac5ded57d7dd2e89327206500b15b8387ec3396e62603d204c0614c76a0c08d",
     "c1c143beb635bac2c04138c3beb73fb9c241ba43bc3b40adbbc44244c6afc5c5", 0x1.edcp+9f, 0x43425000},
};

static void codes_of(const char *text, uint8_t *codes)
{
    for (int k = 0; k < WGMMA_STEP; k++) {
        const char two[3] = {text[2 * k], text[2 * k + 1], 0};
        codes[k] = (uint8_t)strtoul(two, NULL, 16);
    }
}

static void drawn_sums(void **state)
{
    (void)state;
    int bad = 0;
    for (size_t i = 0; i < sizeof drawn / sizeof drawn[0]; i++) {
        uint8_t a[WGMMA_STEP], b[WGMMA_STEP];
        codes_of(drawn[i].a, a);
        codes_of(drawn[i].b, b);
        bad += check(drawn[i].a, a, b, drawn[i].c, drawn[i].d);
    }
    assert_int_equal(bad, 0);
}

/* Where nothing is cut off, a sum is exact: small integers times 2^-4, in both formats, over several steps. */
static void exact_sums(void **state)
{
    (void)state;
    uint8_t a[128], b[128];
    for (int mixed = 0; mixed < 2; mixed++) {
        for (int turn = 0; turn < 64; turn++) {
            double expected = 0;
            for (int k = 0; k < 128; k++) {
                const float x = (float)((k * 7 + turn) % 9 - 4), y = (float)((k * 5 + turn * 3) % 7 - 3) * 0.0625f;
                a[k] = mixed ? e5m2_from_float(x) : e4m3_from_float(x);
                b[k] = e4m3_from_float(y);
                expected += (double)(x * y);
            }
            const float d = wgmma_sum(mixed ? WGMMA_E5M2 : WGMMA_E4M3, a, WGMMA_E4M3, b, 128, 0.0f);
            assert_true((double)d == expected);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_of_few_terms),
        cmocka_unit_test(drawn_sums),
        cmocka_unit_test(exact_sums),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
