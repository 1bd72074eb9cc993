/* numerics: contiguous copies of blocks, private to the block quantisers. `full` is 16 or 32 and constant, so that the
 * common case compiles to a few vector moves. */
#pragma once

#include <stdint.h>
#include <string.h>

/* A contiguous copy of a block; missing elements are 0, which changes neither amax nor squared error. */
static inline void block_load(const float *x, int n, int64_t stride, int full, float *block)
{
    if (n == full && stride == 1) {
        memcpy(block, x, (size_t)full * sizeof *block);
        return;
    }
    memset(block, 0, (size_t)full * sizeof *block);
    for (int i = 0; i < n; i++) {
        block[i] = x[i * stride];
    }
}

static inline void block_store(const float *block, int n, int64_t stride, int full, float *y)
{
    if (n == full && stride == 1) {
        memcpy(y, block, (size_t)full * sizeof *block);
        return;
    }
    for (int i = 0; i < n; i++) {
        y[i * stride] = block[i];
    }
}
