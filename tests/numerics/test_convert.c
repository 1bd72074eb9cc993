/* Array conversions do what the scalar ones do, at every length and in place; packing of nibbles. */
#include "tests/test.h"

#include "numerics/convert.h"
#include "tests/numerics/oracle.h"

#include <math.h>

enum { MAX = 70 };

static void test_arrays(void **state)
{
    (void)state;
    uint64_t random = 9;
    for (int n = 0; n <= MAX; n++) {
        float x[MAX], y[MAX], decoded[MAX];
        bf16 half[MAX];
        uint8_t codes[MAX];
        for (int i = 0; i < n; i++) {
            x[i] = (float)oracle_normal(&random) * ldexpf(1.0f, i % 40 - 20);
        }
        bf16_from_float_array(x, half, n);
        bf16_to_float_array(half, y, n);
        for (int i = 0; i < n; i++) {
            assert_int_equal(half[i], bf16_from_float(x[i]));
            assert_true(y[i] == bf16_to_float(half[i]));
        }
        float m = 0x1p6f;
        e4m3_encode_array(x, m, codes, n);
        e4m3_decode_array(codes, m, decoded, n);
        memcpy(y, x, sizeof y);
        e4m3_round_array(y, m, y, n);
        for (int i = 0; i < n; i++) {
            assert_int_equal(codes[i], e4m3_from_float(x[i] * m));
            assert_true(decoded[i] == e4m3_to_float(codes[i]) / m && y[i] == decoded[i]);
        }
        e5m2_encode_array(x, m, codes, n);
        e5m2_decode_array(codes, m, decoded, n);
        e5m2_round_array(x, m, y, n);
        for (int i = 0; i < n; i++) {
            assert_int_equal(codes[i], e5m2_from_float(x[i] * m));
            assert_true(decoded[i] == e5m2_to_float(codes[i]) / m && y[i] == decoded[i]);
        }
    }
}

static void test_pack(void **state)
{
    (void)state;
    for (int n = 0; n <= MAX; n++) {
        uint8_t codes[MAX], back[MAX], bytes[MAX / 2 + 1];
        memset(bytes, 0xaa, sizeof bytes);
        for (int i = 0; i < n; i++) {
            codes[i] = (uint8_t)((i * 7 + n) % 16);
        }
        e2m1_pack_array(codes, bytes, n);
        e2m1_unpack_array(bytes, back, n);
        assert_memory_equal(codes, back, (size_t)n);
        assert_int_equal(bytes[(n + 1) / 2], 0xaa);
    }
    uint8_t codes[] = {1, 15, 8}, bytes[2];
    e2m1_pack_array(codes, bytes, 3);
    assert_int_equal(bytes[0], 0xf1);
    assert_int_equal(bytes[1], 0x08);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_arrays), cmocka_unit_test(test_pack)};
    return cmocka_run_group_tests_name("numerics/convert", tests, NULL, NULL);
}
