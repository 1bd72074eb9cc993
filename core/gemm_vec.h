/* core: the vector instructions of the innermost loop of gemm_cpu.c, and of nothing else.
 *
 * Why not plain loops: compilers turn those into fused multiply-adds of whole vectors only for some shapes, and a miss
 * costs a factor of 30. A lane computes what fmaf computes, so the bits are those of the plain loop. */
#pragma once

#define VEC_INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#include <immintrin.h>
typedef __m512 vec;
enum { VEC_LANES = 16, VEC_REGISTERS = 32 };
VEC_INLINE vec vec_load(const float *x)
{
    return _mm512_loadu_ps(x);
}
VEC_INLINE void vec_store(float *x, vec v)
{
    _mm512_storeu_ps(x, v);
}
VEC_INLINE vec vec_zero(void)
{
    return _mm512_setzero_ps();
}
VEC_INLINE vec vec_add(vec a, vec b)
{
    return _mm512_add_ps(a, b);
}
/* a * b + sum in every lane, rounded once. */
VEC_INLINE vec vec_fma(float a, vec b, vec sum)
{
    return _mm512_fmadd_ps(_mm512_set1_ps(a), b, sum);
}

#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
typedef __m256 vec;
enum { VEC_LANES = 8, VEC_REGISTERS = 16 };
VEC_INLINE vec vec_load(const float *x)
{
    return _mm256_loadu_ps(x);
}
VEC_INLINE void vec_store(float *x, vec v)
{
    _mm256_storeu_ps(x, v);
}
VEC_INLINE vec vec_zero(void)
{
    return _mm256_setzero_ps();
}
VEC_INLINE vec vec_add(vec a, vec b)
{
    return _mm256_add_ps(a, b);
}
VEC_INLINE vec vec_fma(float a, vec b, vec sum)
{
    return _mm256_fmadd_ps(_mm256_set1_ps(a), b, sum);
}

#elif defined(__aarch64__) && defined(__ARM_NEON)
#include <arm_neon.h>
typedef float32x4_t vec;
enum { VEC_LANES = 4, VEC_REGISTERS = 32 };
VEC_INLINE vec vec_load(const float *x)
{
    return vld1q_f32(x);
}
VEC_INLINE void vec_store(float *x, vec v)
{
    vst1q_f32(x, v);
}
VEC_INLINE vec vec_zero(void)
{
    return vdupq_n_f32(0);
}
VEC_INLINE vec vec_add(vec a, vec b)
{
    return vaddq_f32(a, b);
}
VEC_INLINE vec vec_fma(float a, vec b, vec sum)
{
    return vfmaq_n_f32(sum, b, a);
}

#else
/* Without fused instructions the C library computes fmaf in integers: slow, and right. */
#include <math.h>
typedef float vec;
enum { VEC_LANES = 1, VEC_REGISTERS = 16 };
VEC_INLINE vec vec_load(const float *x)
{
    return *x;
}
VEC_INLINE void vec_store(float *x, vec v)
{
    *x = v;
}
VEC_INLINE vec vec_zero(void)
{
    return 0;
}
VEC_INLINE vec vec_add(vec a, vec b)
{
    return a + b;
}
VEC_INLINE vec vec_fma(float a, vec b, vec sum)
{
    return fmaf(a, b, sum);
}
#endif
