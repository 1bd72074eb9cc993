#include "numerics/convert.h"

void bf16_to_float_array(const bf16 *x, float *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        y[i] = bf16_to_float(x[i]);
    }
}

void bf16_from_float_array(const float *x, bf16 *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        y[i] = bf16_from_float(x[i]);
    }
}

void e4m3_encode_array(const float *x, float m, uint8_t *codes, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        codes[i] = e4m3_from_float(m * x[i]);
    }
}

void e5m2_encode_array(const float *x, float m, uint8_t *codes, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        codes[i] = e5m2_from_float(m * x[i]);
    }
}

/* Multiplying by 1 / m is exact: m is a power of two. */
void e4m3_decode_array(const uint8_t *codes, float m, float *y, int64_t n)
{
    float inverse = 1.0f / m;
    for (int64_t i = 0; i < n; i++) {
        y[i] = e4m3_to_float(codes[i]) * inverse;
    }
}

void e5m2_decode_array(const uint8_t *codes, float m, float *y, int64_t n)
{
    float inverse = 1.0f / m;
    for (int64_t i = 0; i < n; i++) {
        y[i] = e5m2_to_float(codes[i]) * inverse;
    }
}

void e4m3_round_array(const float *x, float m, float *y, int64_t n)
{
    float inverse = 1.0f / m;
    for (int64_t i = 0; i < n; i++) {
        y[i] = e4m3_round(m * x[i]) * inverse;
    }
}

void e5m2_round_array(const float *x, float m, float *y, int64_t n)
{
    float inverse = 1.0f / m;
    for (int64_t i = 0; i < n; i++) {
        y[i] = e5m2_round(m * x[i]) * inverse;
    }
}

void e2m1_pack_array(const uint8_t *codes, uint8_t *bytes, int64_t n)
{
    for (int64_t i = 0; i < n / 2; i++) {
        bytes[i] = e2m1_pack(codes[2 * i], codes[2 * i + 1]);
    }
    if (n % 2) {
        bytes[n / 2] = e2m1_pack(codes[n - 1], 0);
    }
}

void e2m1_unpack_array(const uint8_t *bytes, uint8_t *codes, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        codes[i] = i % 2 ? e2m1_unpack_odd(bytes[i / 2]) : e2m1_unpack_even(bytes[i / 2]);
    }
}
