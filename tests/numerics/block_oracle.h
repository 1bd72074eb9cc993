/* Brute-force block quantisers in FP64. Blocks are contiguous; codes carry their sign. */
#pragma once

#include "numerics/blocks.h"
#include "tests/numerics/oracle.h"

/* Scale code of a block of n under the NVFP4 rule, searching all codes 1 .. 0x7e in order. */
int oracle_nvfp4_scale(const struct oracle_format *formats, const float *x, int n, double g, enum nvfp4_rule rule);
/* E2M1 code of x under a scale code; 0 under scale 0. */
int oracle_nvfp4_code(const struct oracle_format *formats, double x, double g, int scale);
double oracle_nvfp4_error(const struct oracle_format *formats, const float *x, int n, double g, int scale);

/* E8M0 code of a block, and E2M1 code of x under it. */
int oracle_mx_scale(const struct oracle_format *formats, const float *x, int n, enum mx_rule rule);
int oracle_mx_code(const struct oracle_format *formats, double x, enum mx_rule rule, int e8m0);
