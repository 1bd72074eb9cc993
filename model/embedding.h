/* model: token embedding. */
#pragma once

#include "core/tensor.h"

#include <stdbool.h>

struct cuda;

/* out (T, C) bf16 = weight rows of the tokens. Tokens lie in [0, vocab): the loader has checked them.
 * CUDA: C a multiple of 8, arrays aligned to 16 bytes; here and in backward. */
void embedding_fwd_cpu(const bf16 *weight, const int32_t *tokens, int64_t count, int64_t vocab, int64_t width,
                       bf16 *out);
void embedding_fwd_cuda(const bf16 *weight, const int32_t *tokens, int64_t count, int64_t vocab, int64_t width,
                        bf16 *out, const struct cuda *on);

/* dweight (V, C) fp32 += the rows of dout (T, C) bf16, one sample.
 * The rows of a token are summed in token order first, the sum is added once: so samples may be added in any number of
 * calls, in order, with equal bits. Rows of other tokens are not touched.
 * last_seen (V) and next (T) are scratch. CUDA: any number of samples a call; the bits of one sample of that length. */
struct embedding_bwd {
    const int32_t *tokens;
    int64_t count, vocab, width;
    const bf16 *dout;
    void *dweight;
    enum dtype grad_type; /* of dweight: FP32, on CUDA also BF16 */
    int32_t *last_seen, *next;
    void *scratch; /* CUDA: embedding_bwd_scratch_bytes_cuda(count, vocab), instead of last_seen and next */
};
void embedding_bwd_cpu(const struct embedding_bwd *a);
void embedding_bwd_cuda(const struct embedding_bwd *a, const struct cuda *on);
size_t embedding_bwd_scratch_bytes_cuda(int64_t count, int64_t vocab);
