/* attention: MXFP4 probabilities in the Hopper backward (docs/numerics.md, section 5 step 3), from transposed scores: a
 * block of 32 keys is the rows of two warps. For attention_bwd_sm90_fp8.cu.
 *
 * v = 2^(t - n) of all scores comes first, which needs no maximum, so that exponentials run while warps wait for each
 * other. A block's exponent E is then a matter of upper bits: BF16 codes of positive numbers are ordered like integers,
 * two queries fit a register, and floor(log2 v + 1 - log2 1.5) is the exponent of v rounded at a mantissa of 1.5. Codes
 * are made from y 2^-14, y = 6 v 2^-E (OCP: v 2^-E), as in the forward: truncated to FP16, whose least normal number is
 * 2^-14, E2M1 codes are the upper bits, rounded. */
#pragma once

#include "attention/attention_bwd_sm90_fp8.cuh"

/* How P is represented: FP8, or MXFP4 of the amplitude family (nearest exponent) or OCP's; or of either by a line
 * (attention_bwd_sm90_maps.cuh). */
enum p_code { CODE_FP8, CODE_NEAREST, CODE_OCP, CODE_AFFINE, CODE_SPACE };

/* A code stands for q 2^E, and P is rebuilt without a lift: E <= 1, and what the operand in E5M2 can hold of it (down
 * to 2^-16) and FP16 (2^-24) is more than E4M3 would. Blocks below E = -23 are coded as if E were that. */
enum { MXFP4_SHIFT = 0 };

/* Two exponents, each as (29 + E) << 7, from the upper halves of the blocks' largest v. */
template <enum p_code CODE> static __device__ __forceinline__ uint32_t block_exponents_of(uint32_t largest)
{
    const uint32_t offset = CODE == CODE_NEAREST ? 0x0040u - (98u << 7) : 0u - (100u << 7);
    const uint32_t moved = __viaddmax_s16x2(largest, (offset & 0xffffu) * 0x10001u, (6u << 7) * 0x10001u);
    return __vmins2(moved & 0xff80ff80u,
                    (30u << 7) * 0x10001u); /* more only where LSE2 does not belong to the scores */
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

/* The largest of the warp's 16 keys, of words e of all lanes: of group j = g in lane 4 g + c. */
static __device__ __forceinline__ uint32_t warp_largest(uint32_t (&e)[8])
{
    halve<4>(e, 16);
    halve<2>(e, 8);
    halve<1>(e, 4);
    return e[0];
}

/* The larger ones of the warp's words (as warp_largest gives them, positive) and those of the warp that has the other
 * half of the blocks, for this thread's 16 queries, two a register; `shared`: 128 bytes of each warp. */
static __device__ __forceinline__ void pair_largest(uint32_t word, char *shared, int wg, uint32_t (&e)[8])
{
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    uint32_t *words = reinterpret_cast<uint32_t *>(shared);
    words[warp * 32 + (lane & 3) * 8 + (lane >> 2)] = word;
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

/* Exponents of blocks of 32 keys (the rows of two warps). v: not negative. */
template <enum p_code CODE>
static __device__ __forceinline__ void block_exponents(const float (&v)[32], char *shared, int wg, uint32_t (&e)[8])
{
#pragma unroll
    for (int j = 0; j < 8; j++) {
        e[j] = bytes_by(__float_as_uint(fmaxf(v[4 * j], v[4 * j + 2])),
                        __float_as_uint(fmaxf(v[4 * j + 1], v[4 * j + 3])), 0x7632);
    }
    pair_largest(block_exponents_of<CODE>(warp_largest(e)), shared, wg, e);
}

static __device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b)
{
    uint32_t y;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

/* Pairs of y 2^-14, y in [0, 10), to E2M1(y) 2^-14 times the powers of two of `scale`, exactly; all FP16. */
static __device__ __forceinline__ uint32_t e2m1_halves(float y0, float y1, uint32_t scale)
{
    return multiply_halves(__viaddmin_u16x2(pack_f16_down(y0, y1), 0x01000100u, 0x0fff0fffu) & 0xfe00fe00u, scale);
}

/* Represented P times 2^MXFP4_SHIFT (and 6 for the amplitude family) as A registers in E5M2, from base-2 scores less
 * the row's statistic (masked ones -Inf), which are used up. */
template <enum p_code CODE>
static __device__ __forceinline__ void mxfp4_codes(float (&x)[32], char *shared, int wg, uint32_t (&codes)[8])
{
    uint32_t e[8], halves[16];
#pragma unroll
    for (int j = 0; j < 32; j++) {
        x[j] = exp2_fast(x[j]);
    }
    block_exponents<CODE>(x, shared, wg, e);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        /* 6 2^(-E - 14) = 1.5 2^(-E - 12), or 2^(-E - 14); and 2^(E + 14) in FP16. */
        const uint32_t one = CODE == CODE_NEAREST ? (144u << 23) + 0x400000u : 142u << 23;
        const float low = __uint_as_float(one - (e[j] << 16)), high = __uint_as_float(one - (e[j] & 0xffff0000u));
#pragma unroll
        for (int h = 0; h < 2; h++) {
            halves[2 * j + h] = e2m1_halves(x[4 * j + 2 * h] * low, x[4 * j + 2 * h + 1] * high, e[j] << 3);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) { /* the upper byte of FP16 is E5M2 */
        const int j = 4 * (i >> 2) + 2 * ((i >> 1) & 1), h = i & 1;
        codes[i] = bytes_by(halves[2 * j + h], halves[2 * j + 2 + h], 0x7531);
    }
}
