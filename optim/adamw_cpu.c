/* optim: AdamW on the CPU: the meaning of the update on every device.
 *
 * Elements are worked on in short blocks: widen to FP32, compute, narrow. The computing loop is the same in all modes
 * and has no branches, so it vectorises; what differs between the modes are the two ends. */
#include "optim/adamw.h"

#include "core/rng.h"
#include "numerics/formats.h"
#include "optim/adamw_terms.h"

#include <math.h>
#include <string.h>

enum { ADAMW_BLOCK = 512 }; /* a multiple of 4: a block of elements has whole blocks of random numbers */

struct adamw_block {
    float w[ADAMW_BLOCK], m[ADAMW_BLOCK], v[ADAMW_BLOCK];
};

size_t adamw_moment_bytes(const struct adamw_config *config)
{
    return config->moments_bf16 ? sizeof(bf16) : sizeof(float);
}

static void widen(float *out, const void *in, size_t first, size_t n, bool is_bf16)
{
    if (is_bf16) {
        const bf16 *x = (const bf16 *)in + first;
        for (size_t i = 0; i < n; i++) {
            out[i] = bf16_to_float(x[i]);
        }
    } else {
        memcpy(out, (const float *)in + first, n * sizeof(float));
    }
}

/* Word i belongs to element first + i: four elements to a Philox block, as in rng_bits, but computed once. */
static void fill_random(uint32_t *random, const struct adamw_config *config, uint64_t stream, uint32_t update,
                        size_t first, size_t n)
{
    ASSERT(first % 4 == 0 && first + n <= RNG_ELEMENTS_MAX);
    for (size_t i = 0; i < n; i += 4) {
        struct rng_words words = rng_words(config->seed, stream, (uint64_t)update << 32 | (first + i) / 4);
        memcpy(random + i, words.w, sizeof words.w);
    }
}

static void narrow_nearest(bf16 *out, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        out[i] = bf16_from_float(x[i]);
    }
}

static void compute(const struct adamw_terms *t, float decay, struct adamw_block *block, const float *grads, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float g = grads[i] * t->grad_scale;
        float m = t->beta1 * block->m[i] + t->rest1 * g;
        float v = t->beta2 * block->v[i] + t->rest2 * (g * g);
        float step = m / t->correction1 / (sqrtf(v / t->correction2) + t->eps);
        block->w[i] -= t->lr * (step + decay * block->w[i]);
        block->m[i] = m;
        block->v[i] = v;
    }
}

static void store_weights(const struct adamw_config *config, const struct adamw_state *state, size_t at, size_t n,
                          const float *w, const struct adamw_streams *streams, uint32_t update, size_t element)
{
    if (config->master_fp32) {
        memcpy(state->master + at, w, n * sizeof(float));
    }
    if (config->master_fp32 || !config->stochastic_rounding) {
        narrow_nearest(state->weights + at, w, n);
        return;
    }
    uint32_t random[ADAMW_BLOCK];
    fill_random(random, config, streams->weights, update, element, n);
    for (size_t i = 0; i < n; i++) {
        state->weights[at + i] = bf16_from_float_sr(w[i], random[i]);
    }
}

static void store_moments(const struct adamw_config *config, const struct adamw_state *state, size_t at, size_t n,
                          const struct adamw_block *block, const struct adamw_streams *streams, uint32_t update,
                          size_t element)
{
    if (!config->moments_bf16) {
        memcpy((float *)state->m + at, block->m, n * sizeof(float));
        memcpy((float *)state->v + at, block->v, n * sizeof(float));
        return;
    }
    bf16 *m = (bf16 *)state->m + at, *v = (bf16 *)state->v + at;
    if (!config->stochastic_rounding) {
        narrow_nearest(m, block->m, n);
        narrow_nearest(v, block->v, n);
        return;
    }
    uint32_t random[ADAMW_BLOCK];
    fill_random(random, config, streams->moments, update, element, n);
    for (size_t i = 0; i < n; i++) {
        m[i] = bf16_from_float_sr(block->m[i], random[i] << 16);
        v[i] = bf16_from_float_sr(block->v[i], random[i]);
    }
}

void adamw_step(const struct adamw_config *config, const struct adamw_state *state,
                const struct adamw_segment *segments, int n_segments, const float *grads, float grad_scale, float lr,
                uint32_t update)
{
    ASSERT(state->weights != NULL && state->m != NULL && state->v != NULL);
    ASSERT((state->master != NULL) == config->master_fp32);
    const struct adamw_terms terms = adamw_terms_of(config, grad_scale, lr, update);
    const void *weights = config->master_fp32 ? (const void *)state->master : (const void *)state->weights;
#pragma omp parallel
    for (int s = 0; s < n_segments; s++) {
        const struct adamw_segment *segment = &segments[s];
        const struct adamw_streams streams = adamw_streams_of(segment->name);
        const float decay = segment->decays ? config->weight_decay : 0.0f;
        const int64_t blocks = (int64_t)((segment->elements + ADAMW_BLOCK - 1) / ADAMW_BLOCK);
#pragma omp for schedule(static) nowait
        for (int64_t b = 0; b < blocks; b++) {
            size_t element = (size_t)b * ADAMW_BLOCK, at = segment->offset + element;
            size_t left = segment->elements - element, n = left < ADAMW_BLOCK ? left : ADAMW_BLOCK;
            struct adamw_block block;
            widen(block.w, weights, at, n, !config->master_fp32);
            widen(block.m, state->m, at, n, config->moments_bf16);
            widen(block.v, state->v, at, n, config->moments_bf16);
            compute(&terms, decay, &block, grads + at, n);
            store_weights(config, state, at, n, block.w, &streams, update, element);
            store_moments(config, state, at, n, &block, &streams, update, element);
        }
    }
}
