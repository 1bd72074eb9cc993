/* numerics: conversions of whole arrays (numerics/formats.h has the scalar ones). Single-threaded and vectorised:
 * callers split work over threads. x and y of equal type may be the same array, else they do not overlap.
 *
 * `m` is the power-of-two multiplier of scaled FP8: code = X(m x), value = code / m, both exact but for X's rounding.
 */
#pragma once

#include "numerics/formats.h"

void bf16_to_float_array(const bf16 *x, float *y, int64_t n);
void bf16_from_float_array(const float *x, bf16 *y, int64_t n);

void e4m3_encode_array(const float *x, float m, uint8_t *codes, int64_t n);
void e5m2_encode_array(const float *x, float m, uint8_t *codes, int64_t n);
void e4m3_decode_array(const uint8_t *codes, float m, float *y, int64_t n);
void e5m2_decode_array(const uint8_t *codes, float m, float *y, int64_t n);

/* Encode and decode in one pass. */
void e4m3_round_array(const float *x, float m, float *y, int64_t n);
void e5m2_round_array(const float *x, float m, float *y, int64_t n);

/* Two codes a byte, element 2i in the low nibble of byte i; bytes: (n + 1) / 2, an odd end has a zero high nibble. */
void e2m1_pack_array(const uint8_t *codes, uint8_t *bytes, int64_t n);
void e2m1_unpack_array(const uint8_t *bytes, uint8_t *codes, int64_t n);
