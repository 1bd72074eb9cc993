/* core: counter-based random numbers (Philox 4x32-10, Random123). No state: a number is a pure function of
 * (seed, stream, counter), so that it depends on neither ranks, threads nor order of evaluation. */
#pragma once

#include <stdint.h>

/* Elements of a stream are numbered below this: block of four and update share 64 bits. More ASSERTs. */
#define RNG_ELEMENTS_MAX (UINT64_C(1) << 34)

/* A stream is a purpose: the FNV-1a hash of a name such as "init/model.embed_tokens.weight". */
uint64_t rng_stream(const char *name);

/* 4 random words for counter (hi, lo) of the stream. */
struct rng_words {
    uint32_t w[4];
};
struct rng_words rng_words(uint64_t seed, uint64_t stream, uint64_t counter);

/* Element `element` of the stream at `update`: 32 random bits. Four consecutive elements share one Philox block. */
uint32_t rng_bits(uint64_t seed, uint64_t stream, uint32_t update, uint64_t element);

/* Uniform in [0, 1), 24 bits; never 1. */
float rng_uniform(uint64_t seed, uint64_t stream, uint32_t update, uint64_t element);

/* Standard normal (Box-Muller in FP32 functions whose bits do not depend on the machine: logf, sqrtf, cosf, sinf). */
float rng_normal(uint64_t seed, uint64_t stream, uint64_t element);

/* rng_normal of elements first .. first + n - 1, several times faster: a Philox block serves four. */
void rng_normals(uint64_t seed, uint64_t stream, uint64_t first, int64_t n, float *values);
