/* Slow, independent conversions: tables of all values in FP64 and a search through them. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct oracle_format {
    const char *name;
    int mantissa_bits, bias, max_code; /* max_code without sign: the largest finite value */
    bool is_signed;
    double value[256]; /* of codes 0 .. max_code + 1, without sign */
};

enum oracle_id { ORACLE_E2M1, ORACLE_E4M3, ORACLE_E5M2, ORACLE_UE4M3, ORACLE_UE5M3, ORACLE_COUNT };

/* Fills the table of each format from (1 + m / 2^M) 2^(e - bias) and m 2^(1 - bias - M). */
void oracle_init(struct oracle_format formats[ORACLE_COUNT]);

/* Nearest code of a finite or infinite x without its sign, ties to the even code, saturating. */
int oracle_nearest(const struct oracle_format *format, double magnitude);

/* Code of x with its sign (bit 3 of E2M1, bit 7 of the FP8 formats); not for NaN. */
int oracle_encode(const struct oracle_format *format, double x);
double oracle_decode(const struct oracle_format *format, int code);

/* Stochastic rounding of x with u = (bits + 1/2) / 2^32. */
int oracle_encode_sr(const struct oracle_format *format, double x, uint32_t bits);

/* Pseudo-random tests: a 64-bit LCG; normal numbers by the sum of twelve. */
uint32_t oracle_random(uint64_t *state);
double oracle_normal(uint64_t *state);
