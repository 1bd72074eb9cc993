/* model: which shapes and formats go together. */
#include "model/model_config.h"

#include <math.h>
#include <stddef.h>

const char *const rope_scaling_names[] = {"none", "llama3", NULL};
const char *const linear_format_names[] = {"bf16", "fp8", "nvfp4", NULL};
const char *const recompute_names[] = {"none", "block", "gate_up", NULL};

struct layer_formats model_layer_formats(const struct model_config *config, const struct linear_recipe *linear,
                                         int layer)
{
    bool plain = layer < linear->first_layers_bf16 || layer >= config->layers - linear->last_layers_bf16;
    return plain ? (struct layer_formats){LINEAR_BF16, LINEAR_BF16} : (struct layer_formats){linear->attn, linear->mlp};
}

static enum status check_sizes(const struct model_config *c)
{
    const struct {
        const char *key;
        int value;
    } sizes[] = {{"layers", c->layers},     {"width", c->width}, {"heads", c->heads}, {"kv_heads", c->kv_heads},
                 {"head_dim", c->head_dim}, {"ffn", c->ffn},     {"vocab", c->vocab}, {"context", c->context}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        if (sizes[i].value < 1) {
            return status_fail(ERR_CONFIG, "model.%s = %d: must be at least 1", sizes[i].key, sizes[i].value);
        }
    }
    if (c->heads % c->kv_heads != 0) {
        int nearest = c->kv_heads < c->heads ? c->kv_heads : c->heads;
        while (c->heads % nearest != 0) {
            nearest--;
        }
        return status_fail(ERR_CONFIG,
                           "model.heads = %d is not a multiple of model.kv_heads = %d; the nearest kv_heads is %d",
                           c->heads, c->kv_heads, nearest);
    }
    if (c->head_dim % 2 != 0) {
        return status_fail(ERR_CONFIG, "model.head_dim = %d is odd, RoPE turns pairs; the nearest is %d", c->head_dim,
                           c->head_dim + 1);
    }
    return OK;
}

/* Negated comparisons: NaN must not pass. */
static enum status check_numbers(const struct model_config *c)
{
    const struct rope_config *r = &c->rope;
    if (!(r->theta > 1) || !isfinite(r->theta)) {
        return status_fail(ERR_CONFIG, "model.rope_theta = %g: must be finite and above 1 (Llama 3.1 has 500000)",
                           (double)r->theta);
    }
    if (r->scaling != ROPE_NONE && r->scaling != ROPE_LLAMA3) {
        return status_fail(ERR_CONFIG, "model.rope_scaling: value %d is unknown; known: none, llama3", (int)r->scaling);
    }
    if (r->scaling == ROPE_LLAMA3 && (!(r->factor >= 1) || !(r->low_freq_factor > 0) ||
                                      !(r->high_freq_factor > r->low_freq_factor) || r->original_context < 1)) {
        return status_fail(ERR_CONFIG,
                           "model.rope_scaling = llama3 with factor %g, low %g, high %g, original context %d: needs "
                           "factor >= 1, 0 < low < high, context >= 1 (Llama 3.1 has 8, 1, 4, 8192)",
                           (double)r->factor, (double)r->low_freq_factor, (double)r->high_freq_factor,
                           r->original_context);
    }
    if (!(c->norm_eps > 0) || !isfinite(c->norm_eps)) {
        return status_fail(ERR_CONFIG, "model.norm_eps = %g: must be finite and above 0", (double)c->norm_eps);
    }
    if (!(c->init_std >= 0) || !isfinite(c->init_std)) {
        return status_fail(ERR_CONFIG, "model.init_std = %g: must be finite and not negative", (double)c->init_std);
    }
    return OK;
}

static enum status check_nvfp4(const char *key, int value, const char *section)
{
    if (value % 16 != 0) {
        int below = value / 16 * 16, above = below + 16;
        return status_fail(ERR_CONFIG,
                           "%s = %d does not divide into NVFP4 blocks of 16 (linear.%s = nvfp4); nearest %d", key,
                           value, section, below > 0 && value - below < above - value ? below : above);
    }
    return OK;
}

enum status model_config_check(const struct model_config *c, const struct linear_recipe *linear)
{
    TRY(check_sizes(c));
    TRY(check_numbers(c));
    if (linear->head != LINEAR_BF16) {
        return status_fail(ERR_CONFIG, "linear.head = %s: the head stays in bf16", linear_format_names[linear->head]);
    }
    if (linear->first_layers_bf16 < 0 || linear->last_layers_bf16 < 0 ||
        linear->first_layers_bf16 > c->layers - linear->last_layers_bf16) {
        return status_fail(ERR_CONFIG,
                           "linear.first_layers_bf16 = %d and last_layers_bf16 = %d: must be 0 or more and together at "
                           "most model.layers = %d",
                           linear->first_layers_bf16, linear->last_layers_bf16, c->layers);
    }
    if (linear->attn == LINEAR_NVFP4) {
        TRY(check_nvfp4("model.width", c->width, "attn"));
        TRY(check_nvfp4("model.heads x head_dim", c->heads * c->head_dim, "attn"));
        TRY(check_nvfp4("model.kv_heads x head_dim", c->kv_heads * c->head_dim, "attn"));
    }
    if (linear->mlp == LINEAR_NVFP4) {
        TRY(check_nvfp4("model.width", c->width, "mlp"));
        TRY(check_nvfp4("model.ffn", c->ffn, "mlp"));
    }
    return OK;
}
