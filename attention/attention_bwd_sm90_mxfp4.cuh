/* attention: MXFP4 probabilities in the Hopper backward (docs/numerics.md, section 5 step 3), from scores to
 * represented P, and from P and dP to dS. For attention_bwd_sm90_mxfp4.cu.
 *
 * Rows of accumulators are queries: a thread has queries g and g + 8 of its warp's 16 and, as keys are BLOCKED, 16
 * neighbouring keys, half of a block of 32; lanes 2 i and 2 i + 1 have the block. d[4 j + 2 h + e] is query g + 8 h,
 * key 2 j + e of the 16. So a block's exponent is two numbers a thread, which it knows before it makes codes.
 *
 * As in the forward, codes come from y 2^-14, y = 6 2^(t - E) (OCP: 2^(t - E)) or a line's value: truncated to FP16,
 * whose least normal number is 2^-14, E2M1 codes are the upper bits, rounded. Times 2^(E - n + 14) they are represented
 * P relative to n = floor(LSE2), exact down to 2^-24. The product dV takes the upper byte, which is E5M2. */
#pragma once

#include "attention/attention_bwd_sm90_elements.cuh"
#include "attention/direct_p_sm90.cuh"

/* How codes are made from scores. */
enum p_code { CODE_EXACT, CODE_AFFINE, CODE_SPACE };

/* Of the recipe. */
struct mx_line {
    float bias;          /* E = floor(max + bias): 1 - log2 1.5, to the nearest power of two; OCP: -2 */
    float amplitude;     /* added to t - E: log2 6, OCP 0; exact: and what makes 2^-14 of it */
    float slope, offset; /* of lines */
    uint32_t half_step;  /* a pair of halves of E2M1's step, in FP16's bits, where ptxas does not know it */
};

/* Blocks with E - n below -23, of which the operand in E5M2 holds nothing, are coded as if it were that; above 1 is
 * only an LSE2 that does not belong to the scores. */
#define LEAST_EXPONENT -23.0f
#define LARGEST_EXPONENT 1.0f

/* ---- a block's exponent ------------------------------------------------------------------------------------ */

/* Reduces the scores of query h in a block, as integers, three at a time. */
template <int (*REDUCE)(int, int, int)> static __device__ __forceinline__ int reduced(const float (&s)[32], int h)
{
    int x[16], chain[2];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        x[i] = __float_as_int(s[i / 2 * 4 + 2 * h + i % 2]);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        chain[i] = REDUCE(x[8 * i], x[8 * i + 1], x[8 * i + 2]);
        chain[i] = REDUCE(chain[i], x[8 * i + 3], x[8 * i + 4]);
        chain[i] = REDUCE(chain[i], x[8 * i + 5], x[8 * i + 6]);
    }
    chain[0] = REDUCE(chain[0], x[7], x[15]);
    return REDUCE(chain[0], chain[1], __shfl_xor_sync(0xffffffffu, REDUCE(chain[0], chain[1], chain[1]), 1));
}

/* The largest scores of a thread's two blocks. Floats are ordered like integers unless both are negative, where the
 * order is the other way round. */
static __device__ __forceinline__ void largest_scores(const float (&s)[32], float (&largest)[2])
{
    int most[2] = {reduced<max3>(s, 0), reduced<max3>(s, 1)};
    if (!__all_sync(0xffffffffu, min(most[0], most[1]) >= 0)) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int least = reduced<min3>(s, h);
            most[h] = most[h] < 0 ? least : most[h];
        }
    }
    largest[0] = __int_as_float(most[0]);
    largest[1] = __int_as_float(most[1]);
}

/* What a thread makes codes of its two queries with: what is added to their scores, and a pair of 2^(E - n + 14). */
struct mx_scales {
    float offset[2];
    uint32_t scale;
};

/* n: the queries' first statistic. */
template <enum p_code CODE>
static __device__ __forceinline__ struct mx_scales mx_scales_of(const float (&s)[32], float c, const float (&n)[2],
                                                                const struct mx_line &line)
{
    struct mx_scales y;
    float largest[2];
    uint32_t bits[2];
    largest_scores(s, largest);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float whole = __fadd_rd(fmaf(largest[h], c, line.bias), WHOLE) - n[h];
        const float e = fminf(fmaxf(whole, WHOLE + LEAST_EXPONENT), WHOLE + LARGEST_EXPONENT);
        y.offset[h] = line.amplitude - ((e - WHOLE) + n[h]);
        if (CODE != CODE_EXACT) {
            y.offset[h] = fmaf(line.slope, y.offset[h], line.offset);
        }
        bits[h] = __float_as_uint(e);
    }
    /* FP16's exponent field of 2^(e + 14) is e + 29; WHOLE leaves 32 bits. */
    y.scale = bits[0] * 1024u + (bits[1] * (1u << 26) + ((29u << 10) + (29u << 26)));
    return y;
}

/* ---- codes ------------------------------------------------------------------------------------------------- */

/* Two codes of one key, as FP16: E2M1 codes times 2^9, which is E2M1 values times 2^-14. */
template <enum p_code CODE>
static __device__ __forceinline__ uint32_t codes_of_pair(float y0, float y1, const struct mx_line &line)
{
    if (CODE == CODE_EXACT) {
        const uint32_t y = pack_f16_down(exp2_fast(y0), exp2_fast(y1));
        return __viaddmin_u16x2(y, line.half_step, 0x0fff0fffu) & 0xfe00fe00u;
    }
    if (CODE == CODE_AFFINE) {
        /* Rounded by half a step (exact ties go up); below 7, so that no code is passed over. */
        return (pack_f16_positive(y0, y1) + line.half_step) & 0xfe00fe00u;
    }
    const uint32_t whole = pack_f16_down(code_space_whole(y0), code_space_whole(y1));
    return __viaddmin_s16x2(whole, ((0 - HALF_1536) & 0xffff) * 0x10001u, 7 * 0x10001u) << 9;
}

static __device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b)
{
    uint32_t y;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

/* Represented P (times 6 for the amplitude family) in FP16: p[2 j + e] is key 2 j + e of both queries. */
template <enum p_code CODE>
static __device__ __forceinline__ void mx_codes(const float (&s)[32], float c, const struct mx_scales &k,
                                                const struct mx_line &line, uint32_t (&p)[16])
{
    const float slope = CODE == CODE_EXACT ? c : line.slope * c;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int j = i / 2 * 4 + i % 2;
        p[i] = multiply_halves(
            codes_of_pair<CODE>(fmaf(s[j], slope, k.offset[0]), fmaf(s[j + 2], slope, k.offset[1]), line), k.scale);
    }
}

/* Stored dS: byte 2 e + h of word j is query g + 8 h, key 2 j + e. */
static __device__ __forceinline__ void mx_ds(const float (&dp)[32], const uint32_t (&p)[16], const float (&r)[2],
                                             float factor, uint32_t (&ds)[8])
{
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float *y = dp + 4 * j;
        const float2 a = __half22float2(*reinterpret_cast<const __half2 *>(p + 2 * j));
        const float2 b = __half22float2(*reinterpret_cast<const __half2 *>(p + 2 * j + 1));
        ds[j] = pack_e4m3(a.x * fmaf(y[0], factor, -r[0]), a.y * fmaf(y[2], factor, -r[1]),
                          b.x * fmaf(y[1], factor, -r[0]), b.y * fmaf(y[3], factor, -r[1]));
    }
}

/* ---- to shared memory -------------------------------------------------------------------------------------- */

/* The warp's chunk of 64 keys x 64 queries in SWIZZLE_64B, queries in order pi2; words as mx_ds makes them. stmatrix
 * lane l gives the address of row l, and of row l + 32. */
static __device__ __forceinline__ void write_transposed(uint32_t to, int warp, const uint32_t (&x)[8])
{
    const int lane = threadIdx.x & 31;
    to += lane * 64 + ((warp ^ (lane >> 1 & 3)) << 4);
    stmatrix_x4_transposed(to, x[0], x[1], x[2], x[3]);
    stmatrix_x4_transposed(to + 32 * 64, x[4], x[5], x[6], x[7]);
}

/* The same words as 16 keys of row g, at `to`, and of row g + 8, in natural order. */
static __device__ __forceinline__ void write_rows(uint32_t to, const uint32_t (&x)[8])
{
    store_shared(to, bytes_by(x[0], x[1], 0x6420), bytes_by(x[2], x[3], 0x6420), bytes_by(x[4], x[5], 0x6420),
                 bytes_by(x[6], x[7], 0x6420));
    store_shared(to + 8 * 128, bytes_by(x[0], x[1], 0x7531), bytes_by(x[2], x[3], 0x7531), bytes_by(x[4], x[5], 0x7531),
                 bytes_by(x[6], x[7], 0x7531));
}

/* ---- masks ------------------------------------------------------------------------------------------------- */

/* Masked scores become -Inf; key, query: this thread's first. */
static __device__ __forceinline__ void mask_rows(const struct bwd_plan &p, int key, int query, float (&x)[32])
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int last = (p.causal ? query + 8 * h : p.tokens - 1) - key;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float &s = x[i / 2 * 4 + 2 * h + i % 2];
            s = i <= last ? s : -INFINITY;
        }
    }
}

/* ---- host -------------------------------------------------------------------------------------------------- */

static struct mx_line mx_line_of(const struct attention_recipe *recipe)
{
    const struct direct_line line = direct_line_of(recipe);
    const bool direct = recipe->p_map == P_AFFINE || recipe->p_map == P_CODE_SPACE;
    return {exponent_bias_of(recipe), amplitude_of(recipe) - (direct ? 0.0f : 14.0f), line.slope, line.offset,
            0x01000100u};
}
