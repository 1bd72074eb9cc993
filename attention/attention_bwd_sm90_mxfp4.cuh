/* attention: MXFP4 probabilities in the Hopper backward (docs/numerics.md, section 5 step 3), from transposed scores: a
 * block of 32 keys is the rows of two warps. For attention_bwd_sm90_fp8.cu. */
#pragma once

#include "attention/attention_bwd_sm90_fp8.cuh"

/* How P is represented: FP8, or MXFP4 of the amplitude family (nearest exponent) or OCP's. */
enum p_code { CODE_FP8, CODE_NEAREST, CODE_OCP };

/* The exponent of a block from its largest base-2 score, plus 0x4b400000: ceil(t - log2 1.5), or floor(t) - 2. */
template <enum p_code CODE> static __device__ __forceinline__ uint32_t exponent_bits(float t)
{
    t = fmaxf(t, -100.0f); /* below, E4M3 has nothing left */
    return CODE == CODE_NEAREST ? __float_as_uint(__fadd_ru(t - 0x1.2b8034p-1f, 0x1.8p23f))
                                : __float_as_uint(__fadd_rd(t - 2.0f, 0x1.8p23f));
}

/* One step of a maximum over lanes that also halves what a lane holds: lanes with the bit set keep the upper half. */
template <int N> static __device__ __forceinline__ void halve(uint32_t (&e)[8], int bit)
{
    const bool upper = (threadIdx.x & bit) != 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const uint32_t mine = upper ? e[i + N] : e[i], other = upper ? e[i] : e[i + N];
        e[i] = __vmaxs2(mine, __shfl_xor_sync(0xffffffffu, other, bit));
    }
}

/* Exponents of blocks of 32 keys (the rows of two warps) for this thread's 16 queries, two a register; `shared`: 128
 * bytes of each warp. x: scores, masked ones -Inf. */
template <enum p_code CODE>
static __device__ __forceinline__ void block_exponents(const float (&x)[32], const float2 *from, float c, char *shared,
                                                       int wg, uint32_t (&e)[8])
{
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float2 f = from[4 * j];
        const uint32_t low = exponent_bits<CODE>(fmaf(fmaxf(x[4 * j], x[4 * j + 2]), c, -f.x));
        const uint32_t high = exponent_bits<CODE>(fmaf(fmaxf(x[4 * j + 1], x[4 * j + 3]), c, -f.y));
        e[j] = __byte_perm(low, high, 0x5410);
    }
    halve<4>(e, 16);
    halve<2>(e, 8);
    halve<1>(e, 4);
    uint32_t *words = reinterpret_cast<uint32_t *>(shared);
    words[warp * 32 + (lane & 3) * 8 + (lane >> 2)] = e[0]; /* lane 4 g + c holds group j = g */
    named_barrier_sync(BARRIER_PAIR + 2 * wg + (warp >> 1), 64);
    const uint4 *pair = reinterpret_cast<const uint4 *>(words + (warp & 2) * 32 + (lane & 3) * 8);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint4 a = pair[i], b = pair[i + 8];
        e[4 * i] = __vmaxs2(a.x, b.x);
        e[4 * i + 1] = __vmaxs2(a.y, b.y);
        e[4 * i + 2] = __vmaxs2(a.z, b.z);
        e[4 * i + 3] = __vmaxs2(a.w, b.w);
    }
}

/* v >= 0 to the nearest E2M1 number times a unit 2^k; ties to the even code, at most six = 6 units. Adding 1.5 x 2^22
 * times the binade of v, but not less than a unit, leaves one bit below the binade, or half units. `least`: the bits of
 * a unit times 1.5 x 2^22. */
enum { E2M1_MAGIC = 22 << 23 | 0x400000 };

static __device__ __forceinline__ float e2m1_nearest(float v, uint32_t least, float six)
{
    v = fminf(v, six);
    const float magic = __uint_as_float(__viaddmax_u32(__float_as_uint(v) & 0x7f800000u, E2M1_MAGIC, least));
    return __fsub_rn(__fadd_rn(v, magic), magic);
}

/* Scores become represented P times 2^shift (and 6 for the amplitude family), exactly. */
template <enum p_code CODE>
static __device__ __forceinline__ void mxfp4_values(float (&x)[32], const float2 *from, float c, char *shared, int wg)
{
    uint32_t e[8];
    block_exponents<CODE>(x, from, c, shared, wg, e);
    exponentials(x, from, c, CODE == CODE_NEAREST ? 0x1.4ae00ep+1f : 0.0f); /* log2 6 */
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const uint32_t low = (e[j] << 23) + 0x3f800000u, high = ((e[j] << 7) & 0xff800000u) + 0x3f800000u;
        const float six_low = 6.0f * __uint_as_float(low), six_high = 6.0f * __uint_as_float(high);
        x[4 * j] = e2m1_nearest(x[4 * j], low + E2M1_MAGIC, six_low);
        x[4 * j + 1] = e2m1_nearest(x[4 * j + 1], high + E2M1_MAGIC, six_high);
        x[4 * j + 2] = e2m1_nearest(x[4 * j + 2], low + E2M1_MAGIC, six_low);
        x[4 * j + 3] = e2m1_nearest(x[4 * j + 3], high + E2M1_MAGIC, six_high);
    }
}
