#include "optim/adamw_terms.h"

#include "core/rng.h"

#include <stdio.h>

/* 1 - beta^n by repeated squaring: pow() may differ by a bit between machines, multiplication does not. */
static float bias_correction(float beta, uint32_t n)
{
    double power = 1.0;
    for (double square = (double)beta; n > 0; n >>= 1, square *= square) {
        if (n & 1) {
            power *= square;
        }
    }
    return (float)(1.0 - power);
}

struct adamw_terms adamw_terms_of(const struct adamw_config *config, float grad_scale, float lr, uint32_t update)
{
    ASSERT(update >= 1);
    return (struct adamw_terms){
        .lr = lr,
        .grad_scale = grad_scale,
        .beta1 = config->beta1,
        .beta2 = config->beta2,
        .rest1 = 1.0f - config->beta1,
        .rest2 = 1.0f - config->beta2,
        .correction1 = bias_correction(config->beta1, update),
        .correction2 = bias_correction(config->beta2, update),
        .eps = config->eps,
    };
}

struct adamw_streams adamw_streams_of(const char *segment_name)
{
    char key[160];
    int n = snprintf(key, sizeof key, "optim/weights/%s", segment_name);
    ASSERT(n > 0 && (size_t)n < sizeof key);
    struct adamw_streams streams = {.weights = rng_stream(key)};
    snprintf(key, sizeof key, "optim/moments/%s", segment_name);
    streams.moments = rng_stream(key);
    return streams;
}
