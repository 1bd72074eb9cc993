/* core: element types, and the letters used inside maths everywhere in this project.
 *
 *   B batch (sequences)   T tokens of a sequence   C width (hidden size)   H query heads   Hkv key/value heads
 *   D head dimension      F feed-forward width     V vocabulary            L layers        N = B T
 *
 * A BF16 tensor is an array of `bf16`: the upper half of an FP32 word. It is an integer type on purpose, so that no
 * arithmetic happens by accident: decode, compute in FP32, encode (numerics/formats.h). */
#pragma once

#include "core/status.h"

#include <stddef.h>
#include <stdint.h>

typedef uint16_t bf16;

enum dtype { DTYPE_F32, DTYPE_BF16, DTYPE_I32, DTYPE_U8, DTYPE_E4M3, DTYPE_E5M2 };

static inline size_t dtype_bytes(enum dtype dtype)
{
    return dtype == DTYPE_BF16 ? 2 : dtype == DTYPE_F32 || dtype == DTYPE_I32 ? 4 : 1;
}

static inline float bf16_to_float(bf16 x)
{
    union {
        uint32_t bits;
        float value;
    } u = {.bits = (uint32_t)x << 16};
    return u.value;
}

/* Round to nearest, ties to even; overflow gives Inf, any NaN gives 0x7fff with its sign dropped (docs/numerics.md). */
static inline bf16 bf16_from_float(float x)
{
    union {
        float value;
        uint32_t bits;
    } u = {.value = x};
    if ((u.bits & 0x7fffffffu) > 0x7f800000u) {
        return 0x7fff;
    }
    return (bf16)((u.bits + 0x7fffu + ((u.bits >> 16) & 1u)) >> 16);
}
