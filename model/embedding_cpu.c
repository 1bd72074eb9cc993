/* model: token embedding on the CPU. */
#include "model/embedding.h"

#include <string.h>

void embedding_fwd_cpu(const bf16 *weight, const int32_t *tokens, int64_t count, int64_t vocab, int64_t width,
                       bf16 *out)
{
    for (int64_t t = 0; t < count; t++) {
        ASSERT(tokens[t] >= 0 && tokens[t] < vocab);
        memcpy(out + t * width, weight + tokens[t] * width, (size_t)width * sizeof *out);
    }
}

enum { COLUMNS = 64 };

/* Sums the chain of one token, a piece of columns at a time so that the sums stay in registers. */
static void add_token(const struct embedding_bwd *a, int64_t first)
{
    float *row = (float *)a->dweight + a->tokens[first] * a->width;
    for (int64_t c0 = 0; c0 < a->width; c0 += COLUMNS) {
        int64_t n = a->width - c0 < COLUMNS ? a->width - c0 : COLUMNS;
        float sum[COLUMNS] = {0};
        for (int64_t t = first; t >= 0; t = a->next[t]) {
            const bf16 *from = a->dout + t * a->width + c0;
            for (int64_t c = 0; c < n; c++) {
                sum[c] += bf16_to_float(from[c]);
            }
        }
        for (int64_t c = 0; c < n; c++) {
            row[c0 + c] += sum[c];
        }
    }
}

void embedding_bwd_cpu(const struct embedding_bwd *a)
{
    /* Chains of equal tokens in ascending order: next[t] is the next place of the same token, last_seen its first. */
    for (int64_t t = 0; t < a->count; t++) {
        a->last_seen[a->tokens[t]] = -1;
    }
    for (int64_t t = a->count - 1; t >= 0; t--) {
        a->next[t] = a->last_seen[a->tokens[t]];
        a->last_seen[a->tokens[t]] = (int32_t)t;
    }
#pragma omp parallel for schedule(dynamic, 16)
    for (int64_t t = 0; t < a->count; t++) {
        if (a->last_seen[a->tokens[t]] == t) {
            add_token(a, t);
        }
    }
}
