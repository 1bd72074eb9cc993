/* dist: sums of gradients whose bits do not depend on how samples are spread over ranks (`deterministic = any`).
 *
 * A leaf is the gradient of one sample. Leaves are added in one binary tree over contiguous halves of the update's
 * samples, padded with zeros to a power of two. A rank owns a contiguous, aligned part of the leaves; it reduces its
 * own subtree with a binary counter (log2(leaves) + 1 buffers), then ranks add pairwise by point-to-point messages and
 * the root's sum is broadcast. */
#pragma once

#include "core/arena.h"
#include "dist/comm.h"

struct grad_tree {
    struct comm *comm;
    size_t elements;
    int levels;   /* buffers of the binary counter */
    bool bf16;    /* nodes are rounded to BF16 after every add (optim.grads = bf16) */
    float **node; /* owns the array; borrows buffers from the arena */
    bool *full;
    int64_t leaves_done;
};

/* Plans the buffers for `leaves` samples of this rank. Ranks must be a power of two and `leaves` equal on all ranks:
 * else ERR_CONFIG with the numbers and the nearest valid ones. */
MUST_CHECK enum status grad_tree_plan(struct grad_tree *tree, struct arena *arena, struct comm *comm, size_t elements,
                                      int64_t leaves, bool bf16);
void grad_tree_close(struct grad_tree *tree);

/* The buffer that the next leaf is to be written to (undefined content), and its completion. */
float *grad_tree_leaf(struct grad_tree *tree);
void grad_tree_push(struct grad_tree *tree);

/* After the last leaf: the sum over all ranks' leaves, in every rank, valid until the next grad_tree_leaf. */
MUST_CHECK enum status grad_tree_sum(struct grad_tree *tree, float **sum);
