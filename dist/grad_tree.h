/* dist: sums of gradients whose bits do not depend on how samples are spread over ranks (`deterministic = any`).
 *
 * A leaf is the gradient of one sample. The tree over n leaves is: for even n the sum of the trees over its two
 * contiguous halves; for odd n a binary tree padded with nothing to a power of two. So any power of two of ranks that
 * divides the batch cuts it at its nodes: a rank reduces its own subtree with a binary counter (at most log2(leaves) +
 * 1 buffers), then ranks add pairwise by point-to-point messages and the root's sum is broadcast. */
#pragma once

#include "core/arena.h"
#include "dist/comm.h"

struct grad_tree {
    struct comm *comm;
    size_t elements;
    int levels;     /* buffers of the binary counter */
    bool bf16;      /* leaves, and nodes after every add, are rounded to BF16 (optim.grads = bf16) */
    float **node;   /* owns the array; borrows buffers from the arena. A stack: node[depth] is the next leaf's */
    int *height;    /* owns; of the subtree that node[i] sums; falls along the stack */
    int depth;      /* nodes in use */
    int64_t leaves; /* of this rank in one update */
    int64_t odd;    /* odd part of leaves: the length of a padded subtree */
    int64_t leaves_done;
};

/* Plans the buffers for `leaves` samples of this rank. All ranks call it (they compare). Ranks must be a power of two,
 * leaves and elements equal on all ranks: else ERR_CONFIG with the numbers and the nearest valid ones. Call twice, see
 * core/arena.h; each time the tree must be closed. */
MUST_CHECK enum status grad_tree_plan(struct grad_tree *tree, struct arena *arena, struct comm *comm, size_t elements,
                                      int64_t leaves, bool bf16_nodes);
void grad_tree_close(struct grad_tree *tree);

/* The buffer that the next leaf is to be written to (undefined content), and its completion. */
float *grad_tree_leaf(struct grad_tree *tree);
void grad_tree_push(struct grad_tree *tree);

/* After the last leaf: the sum over all ranks' leaves, in every rank, valid until the next grad_tree_push. All ranks
 * call it. The tree is then ready for the next update. */
MUST_CHECK enum status grad_tree_sum(struct grad_tree *tree, float **sum);
