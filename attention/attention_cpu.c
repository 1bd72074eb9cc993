/* attention: the CPU variant's memory, and what both passes share. */
#include "attention/attention_cpu.h"

#include <math.h>

void *carve_take(struct carve *carve, size_t bytes)
{
    void *piece = carve->base != NULL ? carve->base + carve->used : NULL;
    carve->used += (bytes + 63) / 64 * 64;
    return piece;
}

float attention_unit(const struct attention_recipe *recipe)
{
    return recipe->pv == PV_MXFP4 && recipe->mx_rule == MX_NEAREST ? 6.0f : 1.0f;
}

int attention_p_block(enum pv_format pv)
{
    return pv == PV_MXFP4 ? 32 : pv == PV_NVFP4 || pv == PV_FP4_UE5M3 ? 16 : 1;
}

bool attention_wants_exact(const struct attention_recipe *recipe)
{
    return recipe->bwd_stat == BWD_STAT_RECENTRED || recipe->bwd_stat == BWD_STAT_EXACT;
}

struct attention_saved attention_saved_carve(const struct attention_shape *shape, const struct attention_recipe *recipe,
                                             struct carve *carve)
{
    size_t rows = (size_t)(shape->batch * shape->heads * shape->tokens);
    size_t kv_rows = (size_t)(shape->batch * shape->kv_heads * shape->tokens);
    size_t row_bytes = (size_t)shape->head_dim * sizeof(bf16);
    struct attention_saved saved = {0};
    if (recipe->qk != QK_BF16) {
        saved.q = carve_take(carve, rows * row_bytes);
    }
    if (recipe->qk != QK_BF16 || recipe->k_center) {
        saved.k = carve_take(carve, kv_rows * row_bytes);
    }
    if (recipe->pv != PV_BF16) {
        saved.v = carve_take(carve, kv_rows * row_bytes);
    }
    if (attention_wants_exact(recipe)) {
        saved.lse_exact = carve_take(carve, rows * sizeof(float));
    }
    if (recipe->bwd_stat == BWD_STAT_EXACT) {
        saved.out_exact = carve_take(carve, rows * row_bytes);
    }
    return saved;
}

size_t attention_saved_bytes_cpu(const struct attention_shape *shape, const struct attention_recipe *recipe)
{
    struct carve carve = {0};
    (void)attention_saved_carve(shape, recipe, &carve);
    return carve.used;
}

const char *attention_refuses_cpu(const struct attention_shape *shape, const struct attention_recipe *recipe)
{
    if (shape->head_dim < 16 || shape->head_dim > 256 || shape->head_dim % 16 != 0) {
        return "head_dim must be a multiple of 16, at most 256";
    }
    if (shape->kv_heads < 1 || shape->heads % shape->kv_heads != 0) {
        return "heads must be a multiple of kv_heads";
    }
    if (shape->tokens < 1 || shape->batch < 0) {
        return "tokens must be at least 1";
    }
    return attention_recipe_refusal(recipe, (int)shape->head_dim);
}

/* ---- scratch: a few lanes, each working through its share of the units ------------------------------------ */

int64_t attention_units(const struct attention_shape *shape)
{
    return shape->batch * shape->kv_heads;
}

int64_t attention_lanes(const struct attention_shape *shape)
{
    int64_t units = attention_units(shape);
    return units < ATTENTION_LANES_MAX ? units : ATTENTION_LANES_MAX;
}

size_t attention_scratch_bytes_cpu_with(const struct attention_shape *shape, const struct attention_recipe *recipe,
                                        const struct attention_cpu_options *options)
{
    struct carve stats = {0};
    (void)carve_take(&stats, (size_t)attention_units(shape) * sizeof(struct attention_stats));
    size_t fwd = attention_fwd_lane_bytes(shape, recipe, options);
    size_t bwd = attention_bwd_lane_bytes(shape, recipe, options);
    return stats.used + (size_t)attention_lanes(shape) * (fwd > bwd ? fwd : bwd);
}

static size_t scratch_bytes_cpu(const struct attention_shape *shape, const struct attention_recipe *recipe)
{
    return attention_scratch_bytes_cpu_with(shape, recipe, &ATTENTION_CPU_DEFAULT);
}

static void fwd_cpu(const struct attention_fwd *a)
{
    attention_fwd_cpu_with(a, &ATTENTION_CPU_DEFAULT);
}

static void bwd_cpu(const struct attention_bwd *a)
{
    attention_bwd_cpu_with(a, &ATTENTION_CPU_DEFAULT);
}

const struct attention_variant attention_variant_cpu = {
    .name = "cpu",
    .device = DEVICE_CPU,
    .refuses = attention_refuses_cpu,
    .saved_bytes = attention_saved_bytes_cpu,
    .scratch_bytes = scratch_bytes_cpu,
    .fwd = fwd_cpu,
    .bwd = bwd_cpu,
};
