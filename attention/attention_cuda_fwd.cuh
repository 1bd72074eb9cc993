/* attention: what the files of the forward of the variant "cuda" share. Nobody else includes it. */
#pragma once

#include "attention/probability_cuda.cuh"

enum { ROWS = 128, KEYS = 64, STEP = ATTENTION_BLOCK }; /* of a block of threads, a tile, a step */

/* Values of `P` a kernel is made for: the formats, and unrounded P (O' of bwd_stat = exact). */
enum { P_UNROUNDED = PV_FP4_UE5M3 + 1 };

/* Rows of heads: element (b, h, t, d) at b batch + h head + t token + d. */
struct operand {
    const bf16 *data;
    int64_t batch, head, token;
};

struct fwd_call {
    struct operand q, k, v, diag; /* diag.data NULL: none */
    struct head_view out;
    float *lse, *lse_exact, *anchor; /* (B, H, T); the last two NULL: not wanted */
    struct attention_stats *parts;   /* one a block; NULL: not wanted */
    int heads, group, tokens, row_blocks;
    int head_dim, p_block; /* p_block: keys that share a scale */
    bool causal;
    float c, v_unit;
    struct p_rule rule;
};

/* The kernel for P, one block a (row block, head, batch). `parts` and `lse_exact` are not for P_UNROUNDED. */
void attention_fwd_cuda_launch(const struct cuda *on, int p, const struct fwd_call *f, int64_t blocks);
