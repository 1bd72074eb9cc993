/* attention: operands of the Hopper forward: largest magnitudes, then every view in one pass over Q, K and V.
 *
 * A block has 128 tokens of one head. Neighbouring blocks have neighbouring heads, so that rows of a fused projection
 * are read whole. A warp has 16 tokens; a thread loads 8 features of 8 of them before it does anything else.
 *
 * Q and K. NVFP4 blocks are 16 features: two lanes trade halves of two rows, so that each has a block, and trade back
 * to store 16 bytes beside 16 bytes. Blocks of heads whose largest magnitude is ordinary take a short way, which gives
 * the same bits (nvfp4_quick); it was compared with the definition on all mantissas and scales.
 *
 * qk = nvfp4_e4m3 rounds the decoded values once more, by a multiplier from their largest one. With qk_scale = amax
 * that is the decoded largest value itself: 6 s or 4 s, s the scale of a block whose largest is a, never decreases with
 * a. So it is known before. With the other rules a second pass follows (lower_rows). */
#include "attention/attention_cuda_operands.cuh"
#include "attention/sm90.cuh"

extern "C" {
#include "attention/attention_sm90.h"
}

#include <cuda_fp16.h>

enum {
    THREADS = 256,
    TOKENS = 128, /* of a block */
    FEATURES = 128,
    ROWS = TOKENS / (THREADS / 32) / 2, /* of a thread: half a warp has a row */
    WORDS = TOKENS / 4,                 /* of a feature in the column view: four tokens each */
    LOWER_THREADS = 256,
};
#define BF16_NAN 0x7fff7fffu
#define E4M3_NAN 0x7f7f7f7fu

/* Q or K. */
struct score_operand {
    head_view from;
    int64_t heads;
    bf16 *to;
    uint8_t *rows;     /* E4M3, or NULL */
    float *inverse;    /* with rows */
    uint32_t *decoded; /* largest decoded magnitude of each head, as bits, or NULL */
};

struct value_operand_sm90 {
    head_view from;
    bf16 *to;
    uint8_t *column;
    float *inverse;
    float unit;
    bool fp8, nearest;
};

struct publish_plan {
    const float *amax;       /* (B, H + 2 Hkv) */
    score_operand scores[2]; /* Q, K */
    value_operand_sm90 v;
    int64_t tokens, padded;
    int first; /* head that blocks count from: H + Hkv where only V is published */
};

/* What one block works on. */
struct publish_tile {
    int head, batch, token; /* head within its tensor; first token of the warp */
    float amax;
    bool first; /* of its head */
};

__device__ __forceinline__ const bf16 *row_of(const head_view &x, const publish_tile &t, int64_t token)
{
    return x.data + t.batch * x.batch_stride + t.head * x.head_stride + token * x.token_stride;
}

/* ---- powers of two ----------------------------------------------------------------------------------------- */

/* How the multiplier of a head follows from its amax. */
enum multiplier { MULTIPLIER_FP8, MULTIPLIER_NEAREST, MULTIPLIER_OCP, MULTIPLIER_ROWS };

/* The exponent of the power of two that represented values are multiplied with before they become E4M3.
 * fp8: they are E4M3 over m_V = 4, or over the largest 2^k with 2^k amax <= 448 where amax > 112. mxfp4: at most 6
 * alpha, alpha at most the binade above amax (nearest), or 6 2^(binade - 2) (ocp): so that 6 becomes 6 2^6 = 384. rows:
 * E4M3 values whose amax has the binade 8 (256 .. 448) or, after rounding, 7: amax of the decoded is given. */
__device__ __forceinline__ int multiplier_exponent(enum multiplier kind, float amax)
{
    const uint32_t bits = __float_as_uint(amax);
    if (bits == 0 || bits >= FLOAT_INF) {
        return 0;
    }
    const int binade = (int)(bits >> 23) - 127; /* below the normal numbers any: k is at its end */
    const int fill = 8 - binade - ((bits & 0x7fffffu) > 0x600000u ? 1 : 0); /* 2^fill amax in (224, 448] */
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

/* ---- memory ------------------------------------------------------------------------------------------------- */

/* One access, which the compiler may not split: predicated stores of words that are computed apart come out as four. */
__device__ __forceinline__ void store_words(void *to, const uint4 &x)
{
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

__device__ __forceinline__ uint4 load_words(const bf16 *from, bool exists)
{
    return exists ? bf16x8_load(from).words : make_uint4(0, 0, 0, 0);
}

/* ---- pairs of BF16 ----------------------------------------------------------------------------------------- */

__device__ __forceinline__ uint32_t add_bf16x2(uint32_t x, uint32_t y)
{
    uint32_t z;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

__device__ __forceinline__ uint32_t sub_bf16x2(uint32_t x, uint32_t y)
{
    uint32_t z;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t x, uint32_t y)
{
    uint32_t z;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

__device__ __forceinline__ uint32_t add_f16x2(uint32_t x, uint32_t y)
{
    uint32_t z;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

__device__ __forceinline__ uint32_t sub_f16x2(uint32_t x, uint32_t y)
{
    uint32_t z;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

__device__ __forceinline__ uint32_t mul_f16x2(uint32_t x, uint32_t y)
{
    uint32_t z;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

__device__ __forceinline__ uint32_t pack_f16(float low, float high)
{
    uint32_t y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

/* Two pairs of FP16. */
__device__ __forceinline__ uint32_t pack_e4m3_f16(uint32_t first, uint32_t second)
{
    uint32_t y;
    asm("{\n\t.reg .b16 lo, hi;\n\t"
        "cvt.rn.satfinite.e4m3x2.f16x2 lo, %1;\n\t"
        "cvt.rn.satfinite.e4m3x2.f16x2 hi, %2;\n\t"
        "mov.b32 %0, {lo, hi};\n\t}"
        : "=r"(y)
        : "r"(first), "r"(second));
    return y;
}

__device__ __forceinline__ float low_value(uint32_t pair)
{
    return __uint_as_float(pair << 16);
}

__device__ __forceinline__ float high_value(uint32_t pair)
{
    return __uint_as_float(pair & 0xffff0000u);
}

/* Largest magnitude of n pairs, both halves apart. */
template <int N> __device__ __forceinline__ uint32_t largest_pair(const uint32_t *x)
{
    uint32_t y = x[0] & 0x7fff7fffu;
#pragma unroll
    for (int i = 1; i < N; i++) {
        y = __vmaxu2(y, x[i] & 0x7fff7fffu);
    }
    return y;
}

/* Of a pair of magnitudes: the larger one, as FP32 bits; those of Inf for NaN. */
__device__ __forceinline__ uint32_t larger_bits(uint32_t pair)
{
    return min(max(pair & 0xffffu, pair >> 16), 0x7f80u) << 16;
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

/* 16 values y, of one head, become E4M3(m y) / m; their codes. */
__device__ __forceinline__ uint4 lower16(uint32_t (&y)[8], float m, float back)
{
    uint32_t codes[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        codes[i] = pack_e4m3(low_value(y[2 * i]) * m, high_value(y[2 * i]) * m, low_value(y[2 * i + 1]) * m,
                             high_value(y[2 * i + 1]) * m);
        const uint2 values = decoded_bf16(codes[i], back);
        y[2 * i] = values.x;
        y[2 * i + 1] = values.y;
    }
    return make_uint4(codes[0], codes[1], codes[2], codes[3]);
}

/* ---- NVFP4 ------------------------------------------------------------------------------------------------- */

/* What one head's blocks have in common. */
struct score_head {
    float g, back_g; /* second-level scale, and 1 / g */
    float m, back;   /* to E4M3, and 1 / m */
    bool broken;     /* something is not finite */
    bool quick;      /* nothing leaves the normal numbers of BF16 on the short ways */
};

template <bool E4M3> __device__ __forceinline__ score_head score_head_of(float amax)
{
    score_head h = {};
    h.broken = !(amax < FLOAT_INFINITY);
    h.quick = amax > 0x1p-60f && amax < 0x1p20f;
    h.g = pow2_scale_of(amax, E2M1_MAX * UE4M3_MAX);
    h.back_g = power_of_two(127 - (int)(__float_as_uint(h.g) >> 23));
    if (E4M3) {
        float decoded = h.broken ? 0.0f : amax;
        nvfp4_apply<1>(&decoded, h.g, nvfp4_amax_code(__fmul_rn(decoded, h.g)));
        const int k = multiplier_exponent(MULTIPLIER_ROWS, bf16_value(bf16_code(decoded)));
        h.m = power_of_two(k);
        h.back = power_of_two(-k);
    }
    return h;
}

/* The scale of a block, a = g amax. By FP16, whose 11 bits hold every tie of UE4M3 and keep its neighbours apart: a has
 * 8 bits and a tie times 6 has 7. */
__device__ __forceinline__ float nvfp4_amax_scale(float a)
{
    const __half h = __float2half_rn(a * (1.0f / 6.0f));
    uint16_t code;
    asm("{\n\t.reg .b32 x;\n\tmov.b32 x, {%1, %1};\n\tcvt.rn.satfinite.e4m3x2.f16x2 %0, x;\n\t}"
        : "=h"(code)
        : "h"(__half_as_ushort(h)));
    uint32_t low, high;
    unpack_e4m3(code, low, high);
    return __low2float(*reinterpret_cast<__half2 *>(&low));
}

/* The scale that a search over errors finds. */
template <enum qk_scale RULE>
__device__ __forceinline__ float nvfp4_searched_scale(const uint32_t (&x)[8], const score_head &h)
{
    float block[QK_BLOCK], m[QK_BLOCK];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        block[2 * i] = low_value(x[i]);
        block[2 * i + 1] = high_value(x[i]);
    }
    const float amax = magnitudes<QK_BLOCK>(block, h.g, m);
    if constexpr (RULE == QK_SCALE_MSE) {
        return amax > 0.0f ? ue4m3_to_float(nvfp4_mse_code(m, amax)) : 0.0f;
    } else {
        /* The partner lies 64 features on: four blocks, eight lanes. FP32 sums of 32 are exact. */
        const float pair_amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 8));
        return ue4m3_to_float(nvfp4_folded_code(pair_amax, [&m](float scale) {
            const float sum = squared_gain_sum<QK_BLOCK>(m, scale);
            return (double)(sum + __shfl_xor_sync(0xffffffffu, sum, 8)) * (double)scale;
        }));
    }
}

/* x: a block. */
template <enum qk_scale RULE> __device__ __forceinline__ float nvfp4_scale(const uint32_t (&x)[8], const score_head &h)
{
    if constexpr (RULE == QK_SCALE_AMAX) {
        return nvfp4_amax_scale(__uint_as_float(larger_bits(largest_pair<8>(x))) * h.g);
    } else {
        return nvfp4_searched_scale<RULE>(x, h);
    }
}

/* Magnitudes to E2M1 by the BF16 adder, as minifloat_round does it in FP32. */
__device__ __forceinline__ uint32_t e2m1_pair(uint32_t p)
{
    const uint32_t clamped = __vminu2(p & 0x7fff7fffu, 0x40c040c0u);
    const uint32_t magic = __vmaxu2(clamped & 0x7f807f80u, 0x3f803f80u) + 0x03000300u;
    return sub_bf16x2(add_bf16x2(clamped, magic), magic);
}

/* The same in FP16. */
__device__ __forceinline__ uint32_t e2m1_pair_f16(uint32_t p)
{
    const uint32_t clamped = __vminu2(p & 0x7fff7fffu, 0x46004600u);
    const uint32_t magic = __vmaxu2(clamped & 0x7c007c00u, 0x3c003c00u) + 0x24002400u;
    return sub_f16x2(add_f16x2(clamped, magic), magic);
}

/* A block under its scale s, decoded. The quotient x g / s comes from a rounded reciprocal and is rounded to BF16
 * before E2M1: x has 8 bits and a tie times s at most 7, so that a tie becomes itself and everything else stays on its
 * side. */
__device__ __forceinline__ void nvfp4_decoded(uint32_t (&x)[8], float scale, const score_head &h)
{
    const uint32_t sign = scale > 0.0f ? 0x80008000u : 0; /* a block of scale 0 is +0 */
    const float inverse = scale > 0.0f ? __fdividef(1.0f, scale) : 0.0f, step = scale * h.back_g;
    if (h.quick) {
        const float up = inverse * h.g;
        const uint32_t one = __float_as_uint(step) >> 16, steps = one | one << 16;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t p = pack_bf16(low_value(x[i]) * up, high_value(x[i]) * up);
            x[i] = mul_bf16x2(e2m1_pair(p) | (p & sign), steps);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t p = pack_bf16(low_value(x[i]) * h.g * inverse, high_value(x[i]) * h.g * inverse);
        const uint32_t q = e2m1_pair(p) | (p & sign);
        x[i] = pack_bf16(low_value(q) * step, high_value(q) * step);
    }
}

/* A block of a quick head, as nvfp4_decoded and lower16 have it: in FP16, where E4M3 comes from. m y is q s m / g, with
 * m / g an eighth or a quarter. An E4M3 value in FP16, moved three bits down, is 2^-112 of it in BF16. */
__device__ __forceinline__ uint4 nvfp4_lowered(uint32_t (&x)[8], float scale, const score_head &h)
{
    const uint32_t sign = scale > 0.0f ? 0x80008000u : 0;
    const float up = scale > 0.0f ? __fdividef(h.g, scale) : 0.0f, step = scale * (h.back_g * h.m);
    const float down = h.back * 0x1p112f;
    const uint32_t steps = pack_f16(step, step), downs = pack_bf16(down, down);
    uint32_t codes[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t y[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const uint32_t pair = x[2 * i + j], p = pack_f16(low_value(pair) * up, high_value(pair) * up);
            y[j] = mul_f16x2(e2m1_pair_f16(p) | (p & sign), steps);
        }
        codes[i] = pack_e4m3_f16(y[0], y[1]);
        unpack_e4m3(codes[i], y[0], y[1]);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            x[2 * i + j] = mul_bf16x2((y[j] & 0x7fff7fffu) >> 3 | (y[j] & 0x80008000u), downs);
        }
    }
    return make_uint4(codes[0], codes[1], codes[2], codes[3]);
}

/* What a block becomes; its codes, if those are E4M3. */
template <enum qk_scale RULE, bool E4M3>
__device__ __forceinline__ uint4 publish_block(uint32_t (&x)[8], const score_head &h)
{
    if (h.broken) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] = BF16_NAN;
        }
        return make_uint4(E4M3_NAN, E4M3_NAN, E4M3_NAN, E4M3_NAN);
    }
    const float scale = nvfp4_scale<RULE>(x, h);
    if (E4M3 && h.quick) {
        return nvfp4_lowered(x, scale, h);
    }
    nvfp4_decoded(x, scale, h);
    return E4M3 ? lower16(x, h.m, h.back) : make_uint4(0, 0, 0, 0);
}

/* ---- Q and K ----------------------------------------------------------------------------------------------- */

/* Even lanes have 8 features of two rows, odd lanes the next 8: then even lanes have 16 features of the first row, odd
 * lanes of the second. */
__device__ __forceinline__ void trade(const uint4 &first, const uint4 &second, bool odd, uint32_t (&x)[8])
{
    const uint32_t a[4] = {first.x, first.y, first.z, first.w}, b[4] = {second.x, second.y, second.z, second.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? a[i] : b[i], 1);
        x[i] = odd ? got : a[i];
        x[4 + i] = odd ? b[i] : got;
    }
}

__device__ __forceinline__ void trade_back(const uint32_t (&x)[8], bool odd, uint4 &first, uint4 &second)
{
    uint32_t a[4], b[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? x[i] : x[4 + i], 1);
        a[i] = odd ? got : x[i];
        b[i] = odd ? x[4 + i] : got;
    }
    first = make_uint4(a[0], a[1], a[2], a[3]);
    second = make_uint4(b[0], b[1], b[2], b[3]);
}

/* Rows of a warp: thread and turn i have row 2 i + half, so two turns make a trade. */
template <enum qk_scale RULE, bool E4M3>
__device__ __forceinline__ void publish_scores(const score_operand &o, const publish_tile &t, int64_t tokens)
{
    const int lane = threadIdx.x % 32, half = lane / 16, d = lane % 16 * 8;
    const bool odd = lane % 2 == 1;
    const int64_t unit = t.batch * o.heads + t.head;
    uint4 raw[ROWS];
    const bf16 *from = row_of(o.from, t, t.token + half) + d;
    const int rows = (int)(tokens - t.token) - half; /* row 2 i exists if below */
#pragma unroll
    for (int i = 0; i < ROWS; i++, from += 2 * o.from.token_stride) {
        raw[i] = load_words(from, 2 * i < rows);
    }
    const score_head h = score_head_of<E4M3>(t.amax);
    if (E4M3 && t.first && threadIdx.x == 0) {
        o.inverse[unit] = h.back;
    }
    uint32_t largest = 0;
    const int64_t row = unit * tokens + t.token + half;
    bf16 *to = o.to + row * FEATURES + d;
    uint8_t *codes_to = o.rows + (row + (odd ? 2 : 0)) * FEATURES + d / 16 * 16;
#pragma unroll
    for (int i = 0; i < ROWS; i += 2) {
        uint32_t x[8];
        trade(raw[i], raw[i + 1], odd, x);
        const uint4 codes = publish_block<RULE, E4M3>(x, h);
        if (E4M3) {
            if (2 * i + (odd ? 2 : 0) < rows) {
                store_words(codes_to + 2 * i * FEATURES, codes);
            }
        } else if (o.decoded != NULL) {
            largest = __vmaxu2(largest, largest_pair<8>(x));
        }
        uint4 a, b;
        trade_back(x, odd, a, b);
        if (2 * i < rows) {
            store_words(to + 2 * i * FEATURES, a);
        }
        if (2 * i + 2 < rows) {
            store_words(to + (2 * i + 2) * FEATURES, b);
        }
    }
    if (!E4M3 && o.decoded != NULL) {
        largest = __reduce_max_sync(0xffffffffu, larger_bits(largest));
        if (lane == 0) {
            atomicMax(o.decoded + unit, largest);
        }
    }
}

/* ---- V ----------------------------------------------------------------------------------------------------- */

struct value_shared {
    uint32_t words[FEATURES][WORDS + 1];
    uint4 largest[THREADS / 32][FEATURES / 8];
};

/* Row i of a thread within its warp's 16: words of the column view are rows 2 c, 2 c + 1, 8 + 2 c, 9 + 2 c; a thread
 * has c = half and c = half + 2. */
__device__ __forceinline__ int value_row(int i, int half)
{
    return 2 * half + i % 2 + i / 2 % 2 * 8 + i / 4 * 4;
}

/* Spreads the words that lanes write at a time over the banks. */
__device__ __forceinline__ int value_word(int d, int word)
{
    return word ^ (d / 32 * 2);
}

/* Largest magnitudes of 32 tokens, two warps, for the thread's 8 features, as pairs of BF16. Meets a barrier. */
__device__ __forceinline__ uint4 value_largest(const uint4 (&raw)[ROWS], value_shared &s)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t largest[4];
#pragma unroll
    for (int w = 0; w < 4; w++) {
        uint32_t column[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const uint32_t words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
            column[i] = words[w];
        }
        largest[w] = largest_pair<ROWS>(column);
        largest[w] = __vmaxu2(largest[w], __shfl_xor_sync(0xffffffffu, largest[w], 16));
    }
    if (lane < 16) {
        s.largest[warp][lane] = make_uint4(largest[0], largest[1], largest[2], largest[3]);
    }
    __syncthreads();
    const uint4 other = s.largest[warp ^ 1][lane % 16];
    return make_uint4(__vmaxu2(largest[0], other.x), __vmaxu2(largest[1], other.y), __vmaxu2(largest[2], other.z),
                      __vmaxu2(largest[3], other.w));
}

/* A pair of features of the thread's rows, as read, becomes what the forward multiplies; codes: words of four rows, two
 * for each feature. */
struct value_pair {
    uint32_t rows[ROWS];
    uint32_t codes[2][ROWS / 4];
};

__device__ __forceinline__ void value_fp8(value_pair &p, float m, float back)
{
#pragma unroll
    for (int k = 0; k < ROWS / 4; k++) {
        uint32_t *x = p.rows + 4 * k;
        p.codes[0][k] = pack_e4m3(low_value(x[0]) * m, low_value(x[1]) * m, low_value(x[2]) * m, low_value(x[3]) * m);
        p.codes[1][k] =
            pack_e4m3(high_value(x[0]) * m, high_value(x[1]) * m, high_value(x[2]) * m, high_value(x[3]) * m);
        const uint2 low = decoded_bf16(p.codes[0][k], back), high = decoded_bf16(p.codes[1][k], back);
        x[0] = __byte_perm(low.x, high.x, 0x5410);
        x[1] = __byte_perm(low.x, high.x, 0x7632);
        x[2] = __byte_perm(low.y, high.y, 0x5410);
        x[3] = __byte_perm(low.y, high.y, 0x7632);
    }
}

/* largest: of the block of 32, both features. */
__device__ __forceinline__ void value_mxfp4(value_pair &p, uint32_t largest, bool nearest, float unit, float m)
{
    float low[ROWS], high[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        low[i] = low_value(p.rows[i]);
        high[i] = high_value(p.rows[i]);
    }
    mxfp4_column<ROWS>(low, low_value(largest), nearest);
    mxfp4_column<ROWS>(high, high_value(largest), nearest);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        /* Six times the FP32 neighbour of alpha q / 6 rounds to alpha q, which is exact in BF16. */
        p.rows[i] = pack_bf16(__fmul_rn(low[i], unit), __fmul_rn(high[i], unit));
    }
#pragma unroll
    for (int k = 0; k < ROWS / 4; k++) {
        const uint32_t *x = p.rows + 4 * k;
        p.codes[0][k] = pack_e4m3(low_value(x[0]) * m, low_value(x[1]) * m, low_value(x[2]) * m, low_value(x[3]) * m);
        p.codes[1][k] =
            pack_e4m3(high_value(x[0]) * m, high_value(x[1]) * m, high_value(x[2]) * m, high_value(x[3]) * m);
    }
}

/* All 128 tokens of the block, those behind T as zeros. */
__device__ __forceinline__ void store_column(const value_operand_sm90 &o, int64_t unit, int64_t padded,
                                             const value_shared &s)
{
    uint8_t *to = o.column + unit * FEATURES * padded + (int64_t)blockIdx.y * TOKENS;
#pragma unroll
    for (int i = threadIdx.x; i < FEATURES * TOKENS / 16; i += THREADS) {
        const int d = i / 8, quad = i % 8 * 4;
        const uint32_t *x = s.words[d];
        store_words(to + d * padded + quad * 4, make_uint4(x[value_word(d, quad)], x[value_word(d, quad + 1)],
                                                           x[value_word(d, quad + 2)], x[value_word(d, quad + 3)]));
    }
}

__device__ __forceinline__ void publish_values(const value_operand_sm90 &o, const publish_tile &t, int64_t tokens,
                                               int64_t padded, int64_t heads, value_shared &s)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = lane / 16, d = lane % 16 * 8;
    const int64_t unit = t.batch * heads + t.head;
    const bool broken = !(t.amax < FLOAT_INFINITY);
    uint4 raw[ROWS];
    const bf16 *from = row_of(o.from, t, t.token) + d;
    const int rows = (int)(tokens - t.token);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int row = value_row(i, half);
        raw[i] = load_words(from + row * o.from.token_stride, row < rows);
        if (broken && row < rows) {
            raw[i] = make_uint4(BF16_NAN, BF16_NAN, BF16_NAN, BF16_NAN);
        }
    }
    const int k = multiplier_exponent(o.fp8 ? MULTIPLIER_FP8 : o.nearest ? MULTIPLIER_NEAREST : MULTIPLIER_OCP, t.amax);
    const float m = power_of_two(k), back = power_of_two(-k);
    if (t.first && threadIdx.x == 0) {
        o.inverse[unit] = back / o.unit;
    }
    const uint4 blocks = o.fp8 ? make_uint4(0, 0, 0, 0) : value_largest(raw, s);
    const uint32_t largest[4] = {blocks.x, blocks.y, blocks.z, blocks.w};
#pragma unroll
    for (int w = 0; w < 4; w++) {
        value_pair p;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            p.rows[i] = w == 0 ? raw[i].x : w == 1 ? raw[i].y : w == 2 ? raw[i].z : raw[i].w;
        }
        if (o.fp8 || broken) {
            value_fp8(p, m, back);
        } else {
            value_mxfp4(p, largest[w], o.nearest, o.unit, m);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            (w == 0 ? raw[i].x : w == 1 ? raw[i].y : w == 2 ? raw[i].z : raw[i].w) = p.rows[i];
        }
#pragma unroll
        for (int c = 0; c < ROWS / 4; c++) {
            const int word = warp * 4 + half + 2 * c;
            s.words[d + 2 * w][value_word(d, word)] = p.codes[0][c];
            s.words[d + 2 * w + 1][value_word(d, word)] = p.codes[1][c];
        }
    }
    bf16 *to = o.to + (unit * tokens + t.token) * FEATURES + d;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int row = value_row(i, half);
        if (row < rows) {
            store_words(to + row * FEATURES, raw[i]);
        }
    }
    __syncthreads();
    store_column(o, unit, padded, s);
}

/* ---- kernels ----------------------------------------------------------------------------------------------- */

/* Grid (heads of Q, K and V from plan.first on, blocks of 128 tokens, batch). kind: 0 Q, 1 K, 2 V. */
__device__ __forceinline__ publish_tile tile_of(const publish_plan &p, int &slot, int &kind)
{
    const int heads = (int)p.scores[0].heads, kv_heads = (int)p.scores[1].heads;
    publish_tile t = {};
    slot = (int)blockIdx.x + p.first;
    kind = slot < heads ? 0 : slot < heads + kv_heads ? 1 : 2;
    t.head = kind == 0 ? slot : kind == 1 ? slot - heads : slot - heads - kv_heads;
    t.batch = (int)blockIdx.z;
    t.token = (int)blockIdx.y * TOKENS + (int)threadIdx.x / 32 * (2 * ROWS);
    t.first = blockIdx.y == 0;
    slot += t.batch * (heads + 2 * kv_heads);
    return t;
}

template <enum qk_scale RULE, bool E4M3>
static __global__ void __launch_bounds__(THREADS, RULE == QK_SCALE_AMAX ? 3 : 2) publish_kernel(const publish_plan p)
{
    __shared__ value_shared shared;
    int slot, kind;
    publish_tile t = tile_of(p, slot, kind);
    t.amax = p.amax[slot];
    if (kind < 2) {
        publish_scores<RULE, E4M3>(p.scores[kind], t, p.tokens);
    } else {
        publish_values(p.v, t, p.tokens, p.padded, p.scores[1].heads, shared);
    }
}

static __global__ void __launch_bounds__(THREADS) measure_kernel(const publish_plan p, uint32_t *amax)
{
    const int lane = threadIdx.x % 32;
    int slot, kind;
    const publish_tile t = tile_of(p, slot, kind);
    const head_view &view = kind == 2 ? p.v.from : p.scores[kind].from;
    const bf16 *from = row_of(view, t, t.token + lane / 16) + lane % 16 * 8;
    const int rows = (int)(p.tokens - t.token) - lane / 16;
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < ROWS; i++, from += 2 * view.token_stride) {
        const uint4 x = load_words(from, 2 * i < rows);
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
        largest = __vmaxu2(largest, largest_pair<4>(words));
    }
    largest = __reduce_max_sync(0xffffffffu, larger_bits(largest));
    if (lane == 0) {
        atomicMax(amax + slot, largest);
    }
}

/* Grid (slices, heads): 16 values a thread and turn. */
static __global__ void lower_rows_kernel(bf16 *x, int64_t per_head, const uint32_t *decoded, uint8_t *rows,
                                         float *inverse)
{
    const int64_t head = blockIdx.y;
    const int k = multiplier_exponent(MULTIPLIER_ROWS, __uint_as_float(decoded[head]));
    const float m = power_of_two(k), back = power_of_two(-k);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        inverse[head] = back;
    }
    for (int64_t i = ((int64_t)blockIdx.x * LOWER_THREADS + threadIdx.x) * 16; i < per_head;
         i += (int64_t)gridDim.x * LOWER_THREADS * 16) {
        bf16 *at = x + head * per_head + i;
        const uint4 a = bf16x8_load(at).words, b = bf16x8_load(at + 8).words;
        uint32_t y[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        store_words(rows + head * per_head + i, lower16(y, m, back));
        store_words(at, make_uint4(y[0], y[1], y[2], y[3]));
        store_words(at + 8, make_uint4(y[4], y[5], y[6], y[7]));
    }
}

/* ---- host -------------------------------------------------------------------------------------------------- */

static publish_plan plan_of(const struct attention_publish_sm90 *a)
{
    const struct attention_shape *s = &a->shape;
    const struct attention_recipe *recipe = a->recipe;
    publish_plan p = {};
    p.amax = a->amax;
    p.scores[0] = {a->q, s->heads, a->own_q, a->q8, a->q_inverse, NULL};
    p.scores[1] = {a->k, s->kv_heads, a->own_k, a->k8, a->k_inverse, NULL};
    p.v = {a->v,
           a->own_v,
           a->v_column,
           a->v_inverse,
           attention_unit(recipe),
           recipe->pv == PV_FP8,
           recipe->mx_rule == MX_NEAREST};
    p.tokens = s->tokens;
    p.padded = attention_padded_sm90(s->tokens);
    p.first = recipe->qk == QK_BF16 ? (int)(s->heads + s->kv_heads) : 0;
    return p;
}

static dim3 grid_of(const struct attention_publish_sm90 *a)
{
    const struct attention_shape *s = &a->shape;
    const int64_t scores = a->recipe->qk == QK_BF16 ? 0 : s->heads + s->kv_heads;
    const int64_t values = a->recipe->pv == PV_BF16 ? 0 : s->kv_heads;
    return dim3((unsigned int)(scores + values), cuda_blocks(s->tokens, TOKENS), (unsigned int)s->batch);
}

static bool empty(const dim3 &grid)
{
    return grid.x == 0 || grid.y == 0 || grid.z == 0;
}

void attention_measure_heads_sm90(const struct cuda *on, const struct attention_publish_sm90 *a, float *amax)
{
    const dim3 grid = grid_of(a);
    if (empty(grid)) {
        return;
    }
    cuda_zero(on, amax, (size_t)(a->shape.batch * (a->shape.heads + 2 * a->shape.kv_heads)) * sizeof *amax);
    measure_kernel<<<grid, THREADS, 0, on->stream>>>(plan_of(a), reinterpret_cast<uint32_t *>(amax));
    cuda_launched(on, "attention measure heads");
}

/* The step to E4M3 where the largest decoded value had to be found: decoded, as bits, (B, heads). */
static void lower_rows(const struct cuda *on, const struct attention_publish_sm90 *a, const score_operand &o)
{
    const int64_t heads = a->shape.batch * o.heads, per_head = a->shape.tokens * FEATURES;
    const unsigned int slices = cuda_blocks(per_head, 16 * LOWER_THREADS);
    const dim3 grid(slices < 64 ? slices : 64, (unsigned int)heads);
    lower_rows_kernel<<<grid, LOWER_THREADS, 0, on->stream>>>(o.to, per_head, o.decoded, o.rows, o.inverse);
    cuda_launched(on, "attention lower rows");
}

void attention_publish_heads_sm90(const struct cuda *on, const struct attention_publish_sm90 *a)
{
    const dim3 grid = grid_of(a);
    const enum qk_scale rule = a->recipe->qk_scale;
    const bool e4m3 = a->recipe->qk == QK_NVFP4_E4M3;
    publish_plan p = plan_of(a);
    if (empty(grid)) {
        return;
    }
    if (e4m3 && rule != QK_SCALE_AMAX) {
        const int64_t q_heads = a->shape.batch * a->shape.heads, kv_heads = a->shape.batch * a->shape.kv_heads;
        p.scores[0].decoded = a->decoded;
        p.scores[1].decoded = a->decoded + q_heads;
        cuda_zero(on, a->decoded, (size_t)(q_heads + kv_heads) * sizeof *a->decoded);
    }
    if (rule == QK_SCALE_FOLDED) {
        publish_kernel<QK_SCALE_FOLDED, false><<<grid, THREADS, 0, on->stream>>>(p);
    } else if (rule == QK_SCALE_MSE) {
        publish_kernel<QK_SCALE_MSE, false><<<grid, THREADS, 0, on->stream>>>(p);
    } else if (e4m3) {
        publish_kernel<QK_SCALE_AMAX, true><<<grid, THREADS, 0, on->stream>>>(p);
    } else {
        publish_kernel<QK_SCALE_AMAX, false><<<grid, THREADS, 0, on->stream>>>(p);
    }
    cuda_launched(on, "attention publish");
    if (p.scores[0].decoded != NULL) {
        lower_rows(on, a, p.scores[0]);
        lower_rows(on, a, p.scores[1]);
    }
}
