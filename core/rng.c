/* core: random numbers by Random123's Philox 4x32-10.
 * Key: the seed. Counter: (block of four elements, update) in the low words, the stream in the high ones. */
#include "core/rng.h"

#include "core/status.h"

#include <Random123/philox.h>
#include <math.h>

uint64_t rng_stream(const char *name)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (; *name; name++) {
        hash = (hash ^ (unsigned char)*name) * 0x100000001b3u;
    }
    return hash;
}

struct rng_words rng_words(uint64_t seed, uint64_t stream, uint64_t counter)
{
    philox4x32_ctr_t place = {
        {(uint32_t)counter, (uint32_t)(counter >> 32), (uint32_t)stream, (uint32_t)(stream >> 32)}};
    philox4x32_key_t key = {{(uint32_t)seed, (uint32_t)(seed >> 32)}};
    philox4x32_ctr_t out = philox4x32(place, key);
    return (struct rng_words){{out.v[0], out.v[1], out.v[2], out.v[3]}};
}

static struct rng_words block_of(uint64_t seed, uint64_t stream, uint32_t update, uint64_t element)
{
    ASSERT(element < RNG_ELEMENTS_MAX);
    return rng_words(seed, stream, (uint64_t)update << 32 | element >> 2);
}

uint32_t rng_bits(uint64_t seed, uint64_t stream, uint32_t update, uint64_t element)
{
    return block_of(seed, stream, update, element).w[element & 3];
}

float rng_uniform(uint64_t seed, uint64_t stream, uint32_t update, uint64_t element)
{
    return (float)(rng_bits(seed, stream, update, element) >> 8) * 0x1p-24f;
}

/* Two words make two normals. The radius takes all 32 bits of its word, for tails up to 6.6 sigma; never log(0). */
static float radius_of(uint32_t word)
{
    return sqrtf(-2.0f * logf(((float)word + 1.0f) * 0x1p-32f));
}

static float angle_of(uint32_t word)
{
    return 6.28318530717958647692f * ((float)(word >> 8) * 0x1p-24f);
}

float rng_normal(uint64_t seed, uint64_t stream, uint64_t element)
{
    struct rng_words words = block_of(seed, stream, 0, element);
    float angle = angle_of(words.w[(element & 2) + 1]);
    return radius_of(words.w[element & 2]) * (element & 1 ? sinf(angle) : cosf(angle));
}

void rng_normals(uint64_t seed, uint64_t stream, uint64_t first, int64_t n, float *values)
{
    int64_t i = 0;
    for (; i < n && ((first + (uint64_t)i) & 3) != 0; i++) {
        values[i] = rng_normal(seed, stream, first + (uint64_t)i);
    }
    for (; i + 4 <= n; i += 4) {
        struct rng_words words = block_of(seed, stream, 0, first + (uint64_t)i);
        for (int k = 0; k < 4; k += 2) {
            float radius = radius_of(words.w[k]), angle = angle_of(words.w[k + 1]);
            values[i + k] = radius * cosf(angle);
            values[i + k + 1] = radius * sinf(angle);
        }
    }
    for (; i < n; i++) {
        values[i] = rng_normal(seed, stream, first + (uint64_t)i);
    }
}
