/* attention: the variant "cuda": what it runs, and its memory. */
#include "attention/attention_cuda.h"

/* Blocks in the second and third dimension of a grid; the fewest tokens of a block that are counted there (both
 * backwards, publishing of the variant "sm90"). */
enum { GRID_MAX = 65535, GRID_TOKENS = 128 };

struct attention_saved_cuda attention_saved_cuda_carve(const struct attention_shape *shape,
                                                       const struct attention_recipe *recipe, struct carve *carve)
{
    struct attention_saved_cuda saved = {.operands = attention_saved_carve(shape, recipe, carve)};
    if (recipe->anchor == ANCHOR_SAMPLED) {
        saved.anchor = carve_take(carve, (size_t)(shape->batch * shape->heads * shape->tokens) * sizeof(float));
    }
    return saved;
}

static const char *refuses_cuda(const struct attention_shape *shape, const struct attention_recipe *recipe)
{
    if (shape->head_dim > ATTENTION_CUDA_HEAD_DIM_MAX) {
        return "head_dim must be at most 128 on the GPU";
    }
    if (shape->batch * shape->heads > GRID_MAX) {
        return "batch * heads must be at most 65535: a dimension of a grid";
    }
    if (shape->tokens > GRID_MAX * (int64_t)GRID_TOKENS) {
        return "tokens must be at most 8388480: a dimension of a grid, in blocks of 128";
    }
    return attention_refuses_cpu(shape, recipe);
}

static size_t saved_bytes_cuda(const struct attention_shape *shape, const struct attention_recipe *recipe)
{
    struct carve carve = {0};
    (void)attention_saved_cuda_carve(shape, recipe, &carve);
    return carve.used;
}

static size_t scratch_bytes_cuda(const struct attention_shape *shape, const struct attention_recipe *recipe)
{
    size_t fwd = attention_fwd_cuda_scratch(shape, recipe);
    size_t bwd = attention_bwd_cuda_scratch(shape, recipe);
    return fwd > bwd ? fwd : bwd;
}

const struct attention_variant attention_variant_cuda = {
    .name = "cuda",
    .device = DEVICE_CUDA,
    .refuses = refuses_cuda,
    .saved_bytes = saved_bytes_cuda,
    .scratch_bytes = scratch_bytes_cuda,
    .fwd = attention_fwd_cuda,
    .bwd = attention_bwd_cuda,
};
