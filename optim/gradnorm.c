/* optim: the global gradient norm.
 *
 * Squares are FP64: the square of any finite FP32 number is finite there, so a block's sum is finite exactly if all its
 * gradients are, and the search for the bad element costs nothing until there is one. */
#include "optim/gradnorm.h"

#include <math.h>

enum {
    NORM_LANES = 8,   /* partial sums of a block: independent chains that the compiler may keep in one register */
    NORM_GROUP = 512, /* blocks summed in parallel before they enter the tree; changes no bit */
    NORM_LEVELS = 64,
};

/* A binary tree over leaves that arrive one by one, as a counter: node[l] holds the sum of 2^l leaves. The result is
 * that of the tree padded with zeros to a power of two. */
struct sum_tree {
    uint64_t leaves;
    double node[NORM_LEVELS];
};

static void sum_tree_push(struct sum_tree *tree, double leaf)
{
    int level = 0;
    for (uint64_t bit = tree->leaves; bit & 1; bit >>= 1) {
        leaf = tree->node[level++] + leaf;
    }
    tree->node[level] = leaf;
    tree->leaves++;
}

static double sum_tree_sum(const struct sum_tree *tree)
{
    double sum = 0.0;
    for (int level = 0; level < NORM_LEVELS; level++) {
        if (tree->leaves >> level & 1) {
            sum = tree->node[level] + sum;
        }
    }
    return sum;
}

static double block_squares(const float *x, size_t n)
{
    double lane[NORM_LANES] = {0};
    size_t i = 0;
    for (; i + NORM_LANES <= n; i += NORM_LANES) {
        for (size_t l = 0; l < NORM_LANES; l++) {
            lane[l] += (double)x[i + l] * (double)x[i + l];
        }
    }
    for (size_t l = 0; i + l < n; l++) {
        lane[l] += (double)x[i + l] * (double)x[i + l];
    }
    return ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
}

static void count_bad(struct gradnorm *result, int segment, const float *x, size_t first, size_t n)
{
    for (size_t i = first; i < first + n; i++) {
        if (!isfinite(x[i])) {
            if (result->non_finite == 0) {
                result->bad_segment = segment;
                result->bad_element = i;
            }
            result->non_finite++;
        }
    }
}

static double segment_squares(struct gradnorm *result, int segment, const float *x, size_t elements)
{
    struct sum_tree tree = {0};
    double sums[NORM_GROUP];
    for (size_t first = 0; first < elements; first += (size_t)NORM_GROUP * GRADNORM_BLOCK) {
        size_t left = elements - first;
        int blocks = left >= (size_t)NORM_GROUP * GRADNORM_BLOCK ? NORM_GROUP
                                                                 : (int)((left + GRADNORM_BLOCK - 1) / GRADNORM_BLOCK);
#pragma omp parallel for schedule(static) if (blocks > 8)
        for (int b = 0; b < blocks; b++) {
            size_t at = (size_t)b * GRADNORM_BLOCK;
            sums[b] = block_squares(x + first + at, left - at < GRADNORM_BLOCK ? left - at : GRADNORM_BLOCK);
        }
        for (int b = 0; b < blocks; b++) {
            if (!isfinite(sums[b])) {
                size_t at = (size_t)b * GRADNORM_BLOCK;
                count_bad(result, segment, x, first + at, left - at < GRADNORM_BLOCK ? left - at : GRADNORM_BLOCK);
            }
            sum_tree_push(&tree, sums[b]);
        }
    }
    return sum_tree_sum(&tree);
}

struct gradnorm gradnorm_of(const float *grads, const struct adamw_segment *segments, int n_segments)
{
    ASSERT(grads != NULL && segments != NULL && n_segments >= 0);
    struct gradnorm result = {.bad_segment = -1};
    struct sum_tree tree = {0};
    for (int s = 0; s < n_segments; s++) {
        sum_tree_push(&tree, segment_squares(&result, s, grads + segments[s].offset, segments[s].elements));
    }
    result.norm = sqrt(sum_tree_sum(&tree));
    return result;
}

float gradnorm_clip_scale(double norm, float clip)
{
    ASSERT(isfinite(norm) && norm >= 0.0);
    if (clip <= 0.0f || norm <= (double)clip) {
        return 1.0f;
    }
    return (float)((double)clip / norm);
}
