/* data: the keyed permutation, a Feistel network with cycle walking (Black and Rogaway, "Ciphers with arbitrary finite
 * domains", 2002).
 *
 * The network permutes [0, 2^2h), the smallest such range that holds [0, n). Walking on from a value outside [0, n)
 * until one falls inside keeps it a bijection of [0, n), and takes fewer than 4 steps on average, since 2^2h < 4 n. */
#include "data/sampler.h"

#include "core/rng.h"
#include "core/status.h"

enum { SAMPLER_ROUNDS = 8 }; /* 4 are provably enough for large halves; small ones, of a few bits, need more to mix */

static uint64_t feistel(uint64_t key, uint64_t stream, int half_bits, uint64_t x)
{
    const uint64_t mask = (UINT64_C(1) << half_bits) - 1;
    uint64_t left = x >> half_bits, right = x & mask;
    for (uint64_t round = 0; round < SAMPLER_ROUNDS; round++) {
        uint64_t mixed = left ^ (rng_words(key, stream, round << 32 | right).w[0] & mask);
        left = right;
        right = mixed;
    }
    return left << half_bits | right;
}

uint64_t sampler_permute(uint64_t seed, uint64_t epoch, uint64_t n, uint64_t i)
{
    ASSERT(n >= 1 && n <= UINT64_C(1) << 62 && i < n);
    int half_bits = 0;
    while (half_bits < 31 && UINT64_C(1) << 2 * half_bits < n) {
        half_bits++;
    }
    struct rng_words words = rng_words(seed, rng_stream("data/epoch"), epoch);
    uint64_t key = (uint64_t)words.w[1] << 32 | words.w[0];
    uint64_t stream = rng_stream("data/permutation");
    do {
        i = feistel(key, stream, half_bits, i);
    } while (i >= n);
    return i;
}
