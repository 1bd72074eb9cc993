/* attention: operand views for the Hopper kernels, made from represented operands (exact in BF16). */
#include "core/cuda.cuh"

extern "C" {
#include "attention/attention_sm90.h"
#include "numerics/formats.h"
}

#include "attention/sm90.cuh"

#include <cuda_fp16.h>

enum { COLUMN_THREADS = 256, COLUMN_TOKENS = 128, FEATURES = 128, ROWS_THREADS = 256 };

/* How the multiplier of a head follows from its amax. */
enum multiplier { MULTIPLIER_FP8, MULTIPLIER_NEAREST, MULTIPLIER_OCP, MULTIPLIER_ROWS };

/* floor(log2 x) of a positive normal number. */
__device__ __forceinline__ int binade_of(float x)
{
    return (int)(__float_as_uint(x) >> 23) - 127;
}

/* The exponent of the power of two that represented values are multiplied with before they become E4M3.
 * fp8: they are E4M3 over m_V = 4, or over the largest 2^k with 2^k amax <= 448 where amax > 112. mxfp4: at most 6
 * alpha, alpha at most the binade above amax (nearest), or 6 2^(binade - 2) (ocp): so that 6 becomes 6 2^6 = 384. rows:
 * E4M3 values whose amax has the binade 8 (256 .. 448) or, after rounding, 7: amax of the decoded is given. */
__device__ __forceinline__ int multiplier_exponent(enum multiplier kind, uint32_t amax_bits)
{
    const float amax = __uint_as_float(amax_bits);
    if (amax_bits < 0x00800000u || amax_bits >= 0x7f800000u) {
        return 0;
    }
    const int binade = binade_of(amax);
    const int fill = 8 - binade - ((amax_bits & 0x7fffffu) > 0x600000u ? 1 : 0); /* 2^fill amax in (224, 448] */
    int k = kind == MULTIPLIER_FP8       ? (amax > 112.0f ? fill : 2)
            : kind == MULTIPLIER_NEAREST ? 5 - binade
            : kind == MULTIPLIER_OCP     ? 8 - binade
                                         : fill;
    return min(max(k, -126), 126);
}

__device__ __forceinline__ float power_of_two(int k)
{
    return __uint_as_float((uint32_t)(k + 127) << 23);
}

/* Grid (tiles of 128 tokens, batch * kv heads). A thread makes words of 4 tokens for 8 features: tokens 2 c, 2 c + 1,
 * 8 + 2 c, 8 + 2 c + 1 of a group of 16, which are neighbours in the order pi1. */
static __global__ void value_column_kernel(const bf16 *v, const head_facts *facts, enum multiplier kind, int tokens,
                                           int padded, float unit, uint8_t *column, float *inverse)
{
    __shared__ uint32_t words[FEATURES][COLUMN_TOKENS / 4 + 1];
    const int64_t head = blockIdx.y;
    const int first = (int)blockIdx.x * COLUMN_TOKENS;
    const int k = multiplier_exponent(kind, facts[head].amax);
    const float m = power_of_two(k);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        inverse[head] = power_of_two(-k) / unit;
    }
    for (int i = threadIdx.x; i < COLUMN_TOKENS / 4 * FEATURES / 8; i += COLUMN_THREADS) {
        const int d = i % (FEATURES / 8) * 8, word = i / (FEATURES / 8), start = first + word / 4 * 16 + word % 4 * 2;
        float x[4][8];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int token = start + j / 2 * 8 + j % 2;
            const uint4 zero = make_uint4(0, 0, 0, 0);
            const bf16x8 row = token < tokens ? bf16x8_load(v + (head * tokens + token) * FEATURES + d) : bf16x8{zero};
            bf16x8_unpack(row, x[j]);
        }
#pragma unroll
        for (int e = 0; e < 8; e++) {
            words[d + e][word] = pack_e4m3(x[0][e] * m, x[1][e] * m, x[2][e] * m, x[3][e] * m);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < FEATURES * COLUMN_TOKENS / 16; i += COLUMN_THREADS) {
        const int d = i / 8, word = i % 8 * 4;
        *reinterpret_cast<uint4 *>(column + (head * FEATURES + d) * padded + first + word * 4) =
            make_uint4(words[d][word], words[d][word + 1], words[d][word + 2], words[d][word + 3]);
    }
}

void attention_value_column_sm90(const struct cuda *on, const struct attention_shape *shape,
                                 const struct attention_recipe *recipe, const bf16 *v, const struct head_facts *facts,
                                 uint8_t *column, float *inverse)
{
    const int64_t heads = shape->batch * shape->kv_heads, padded = attention_padded_sm90(shape->tokens);
    const enum multiplier kind = recipe->pv == PV_FP8            ? MULTIPLIER_FP8
                                 : recipe->mx_rule == MX_NEAREST ? MULTIPLIER_NEAREST
                                                                 : MULTIPLIER_OCP;
    if (heads > 0) {
        const dim3 grid((unsigned int)(padded / COLUMN_TOKENS), (unsigned int)heads);
        value_column_kernel<<<grid, COLUMN_THREADS, 0, on->stream>>>(v, facts, kind, (int)shape->tokens, (int)padded,
                                                                     attention_unit(recipe), column, inverse);
        cuda_launched(on, "attention value column");
    }
}

/* Four E4M3 codes decoded, times `inverse` (a power of two), as BF16: exact. */
__device__ __forceinline__ uint2 decoded_bf16(uint32_t codes, float inverse)
{
    uint32_t low, high;
    unpack_e4m3(codes, low, high);
    const float2 a = __half22float2(*reinterpret_cast<__half2 *>(&low));
    const float2 b = __half22float2(*reinterpret_cast<__half2 *>(&high));
    return make_uint2(pack_bf16(a.x * inverse, a.y * inverse), pack_bf16(b.x * inverse, b.y * inverse));
}

/* Grid (slices, heads): 16 values a thread and turn. */
static __global__ void lower_rows_kernel(bf16 *x, int64_t per_head, const head_facts *facts, uint8_t *rows,
                                         float *inverse)
{
    const int64_t head = blockIdx.y;
    const int k = multiplier_exponent(MULTIPLIER_ROWS, facts[head].amax);
    const float m = power_of_two(k), back = power_of_two(-k);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        inverse[head] = back;
    }
    for (int64_t i = ((int64_t)blockIdx.x * ROWS_THREADS + threadIdx.x) * 16; i < per_head;
         i += (int64_t)gridDim.x * ROWS_THREADS * 16) {
        bf16 *at = x + head * per_head + i;
        float y[16];
        bf16x8_unpack(bf16x8_load(at), y);
        bf16x8_unpack(bf16x8_load(at + 8), y + 8);
        uint32_t codes[4];
        uint2 values[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            codes[j] = pack_e4m3(y[4 * j] * m, y[4 * j + 1] * m, y[4 * j + 2] * m, y[4 * j + 3] * m);
            values[j] = decoded_bf16(codes[j], back);
        }
        *reinterpret_cast<uint4 *>(rows + head * per_head + i) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
        bf16x8_store(at, {make_uint4(values[0].x, values[0].y, values[1].x, values[1].y)});
        bf16x8_store(at + 8, {make_uint4(values[2].x, values[2].y, values[3].x, values[3].y)});
    }
}

void attention_lower_rows_sm90(const struct cuda *on, bf16 *x, int64_t heads, int64_t tokens,
                               const struct head_facts *facts, uint8_t *rows, float *inverse)
{
    const int64_t per_head = tokens * FEATURES;
    const unsigned int slices = cuda_blocks(per_head, 16 * ROWS_THREADS);
    if (heads > 0) {
        const dim3 grid(slices < 64 ? slices : 64, (unsigned int)heads);
        lower_rows_kernel<<<grid, ROWS_THREADS, 0, on->stream>>>(x, per_head, facts, rows, inverse);
        cuda_launched(on, "attention lower rows");
    }
}
