/* model: token embedding. */
#pragma once

#include "core/tensor.h"

#include <stdbool.h>

/* out (T, C) bf16 = weight rows of the tokens. Tokens lie in [0, vocab): the loader has checked them. */
void embedding_fwd_cpu(const bf16 *weight, const int32_t *tokens, int64_t count, int64_t vocab, int64_t width,
                       bf16 *out);

/* dweight (V, C) fp32 += the rows of dout (T, C) bf16, one sample.
 * The rows of a token are summed in token order first, the sum is added once: so samples may be added in any number of
 * calls, in order, with equal bits. Rows of other tokens are not touched.
 * last_seen (V) and next (T) are scratch. */
struct embedding_bwd {
    const int32_t *tokens;
    int64_t count, vocab, width;
    const bf16 *dout;
    float *dweight;
    int32_t *last_seen, *next;
};
void embedding_bwd_cpu(const struct embedding_bwd *a);
