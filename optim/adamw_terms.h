/* optim: what one update has in common for all elements, the same numbers on every device. */
#pragma once

#include "optim/adamw.h"

struct adamw_terms {
    float lr, grad_scale, beta1, beta2, rest1, rest2, correction1, correction2, eps;
};
struct adamw_terms adamw_terms_of(const struct adamw_config *config, float grad_scale, float lr, uint32_t update);

/* Random numbers of a segment: word e belongs to element e at counter (update, e / 4). Rounding to BF16 uses the upper
 * 16 bits of a word: m takes the lower ones, v the upper ones of one word. */
struct adamw_streams {
    uint64_t weights, moments;
};
struct adamw_streams adamw_streams_of(const char *segment_name);
