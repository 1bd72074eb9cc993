/* dist: the binary counter over this rank's leaves, and the pairwise adds over ranks. */
#include "dist/grad_tree.h"

#include "core/tensor.h"
#include "dist/comm_backend.h"

#include <stdlib.h>

static int floor_log2(int64_t n)
{
    return 63 - __builtin_clzll((unsigned long long)n);
}

/* Extremes over the ranks of what must be equal, so that every rank refuses with the same words. */
static enum status check_ranks(struct comm *comm, size_t elements, int64_t leaves)
{
    int64_t extremes[4] = {leaves, -leaves, (int64_t)elements, -(int64_t)elements};
    TRY(comm_max_i64(comm, extremes, 4));
    if ((comm->size & (comm->size - 1)) != 0) {
        int below = 1 << floor_log2(comm->size);
        return status_fail(ERR_CONFIG,
                           "run.deterministic = any needs a power of two of ranks, found %d: start %d or %d, or set "
                           "run.deterministic = layout",
                           comm->size, below, 2 * below);
    }
    if (leaves < 1 || extremes[0] != -extremes[1]) {
        int64_t total = -extremes[1] * comm->size;
        return status_fail(
            ERR_CONFIG,
            "run.deterministic = any needs the same number of samples on all %d ranks, at least 1; found "
            "%lld to %lld: set data.batch to a multiple of the ranks, for example %lld or %lld",
            comm->size, (long long)-extremes[1], (long long)extremes[0], (long long)(total > 0 ? total : comm->size),
            (long long)(total + comm->size));
    }
    if (extremes[2] != -extremes[3]) {
        return status_fail(ERR_CONFIG, "the ranks hold gradients of %lld to %lld elements: they read different models",
                           (long long)-extremes[3], (long long)extremes[2]);
    }
    return OK;
}

enum status grad_tree_plan(struct grad_tree *tree, struct arena *arena, struct comm *comm, size_t elements,
                           int64_t leaves, bool bf16_nodes)
{
    *tree = (struct grad_tree){0};
    TRY(check_ranks(comm, elements, leaves));
    int doublings = __builtin_ctzll((unsigned long long)leaves);
    int64_t odd = leaves >> doublings;
    int levels = doublings + floor_log2(odd) + 1;
    if (comm->size > 1 && levels < 2) {
        levels = 2; /* one more for what another rank sends */
    }
    float **node = calloc((size_t)levels, sizeof *node);
    int *height = calloc((size_t)levels, sizeof *height);
    if (node == NULL || height == NULL) {
        free(node);
        free(height);
        return status_fail(ERR_NOMEM, "no memory for a gradient tree of %d levels", levels);
    }
    for (int i = 0; i < levels; i++) {
        node[i] = arena_take(arena, "gradient tree", elements * sizeof(float));
    }
    *tree = (struct grad_tree){.comm = comm,
                               .elements = elements,
                               .levels = levels,
                               .bf16 = bf16_nodes,
                               .node = node,
                               .height = height,
                               .leaves = leaves,
                               .odd = odd};
    return OK;
}

void grad_tree_close(struct grad_tree *tree)
{
    free(tree->node);
    free(tree->height);
    *tree = (struct grad_tree){0};
}

static void round_bf16(float *x, size_t n)
{
#pragma omp parallel for
    for (size_t i = 0; i < n; i++) {
        x[i] = bf16_to_float(bf16_from_float(x[i]));
    }
}

static void add(const struct grad_tree *tree, float *into, const float *from)
{
    if (tree->bf16) {
#pragma omp parallel for
        for (size_t i = 0; i < tree->elements; i++) {
            into[i] = bf16_to_float(bf16_from_float(into[i] + from[i]));
        }
    } else {
#pragma omp parallel for
        for (size_t i = 0; i < tree->elements; i++) {
            into[i] += from[i];
        }
    }
}

float *grad_tree_leaf(struct grad_tree *tree)
{
    ASSERT(tree->leaves_done < tree->leaves && tree->depth < tree->levels);
    return tree->node[tree->depth];
}

/* Adds subtrees of equal height, as a binary counter carries. */
static void carry(struct grad_tree *tree)
{
    while (tree->depth >= 2 && tree->height[tree->depth - 1] == tree->height[tree->depth - 2]) {
        add(tree, tree->node[tree->depth - 2], tree->node[tree->depth - 1]);
        tree->depth--;
        tree->height[tree->depth - 1]++;
    }
}

void grad_tree_push(struct grad_tree *tree)
{
    float *leaf = grad_tree_leaf(tree);
    if (tree->bf16) {
        round_bf16(leaf, tree->elements);
    }
    tree->height[tree->depth++] = 0;
    tree->leaves_done++;
    carry(tree);
    if (tree->leaves_done % tree->odd == 0) {
        /* The padded part has no more leaves: its last subtree rises as the only child until it meets the others. */
        int full = floor_log2(tree->odd) + (tree->odd > 1);
        while (tree->height[tree->depth - 1] < full) {
            tree->height[tree->depth - 1]++;
            carry(tree);
        }
    }
}

enum status grad_tree_sum(struct grad_tree *tree, float **sum)
{
    ASSERT(tree->leaves_done == tree->leaves && tree->depth == 1);
    struct comm *comm = tree->comm;
    float *mine = tree->node[0];
    size_t bytes = tree->elements * sizeof *mine;
    const char *call = "sum of gradients";
    int step = 0, steps = floor_log2(comm->size);
    for (int mask = 1; mask < comm->size; mask <<= 1, step++) {
        if ((comm->rank & mask) != 0) {
            /* Whoever should hear from a lost rank speaks before those who cannot tell it anything. */
            TRY(comm_send_as(comm, call, steps + step + 1, mine, bytes, comm->rank - mask));
            break;
        }
        TRY(comm_recv_as(comm, call, step, tree->node[1], bytes, comm->rank + mask));
        add(tree, mine, tree->node[1]);
    }
    TRY(comm_broadcast_as(comm, call, steps, mine, bytes, 0));
    tree->depth = 0;
    tree->leaves_done = 0;
    *sum = mine;
    return OK;
}
