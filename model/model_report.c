/* model: what it costs, and which formats it uses. */
#include "core/log.h"
#include "model/model.h"

#include <stdio.h>

double model_flops_per_token(const struct model_config *c, const struct param_list *params, int64_t tokens)
{
    /* The embedding is a look-up; a tied one is multiplied once all the same, as the head. */
    double embedding = c->tied ? 0 : (double)c->vocab * c->width;
    double attention = 12.0 * c->layers * c->heads * c->head_dim * (double)tokens;
    return 6.0 * ((double)params->parameters - embedding) + attention;
}

static bool equal(struct layer_formats a, struct layer_formats b)
{
    return a.attn == b.attn && a.mlp == b.mlp;
}

void model_report_formats(const struct model_config *config, const struct model_options *options)
{
    const struct linear_recipe *linear = &options->linear;
    log_info("formats    %-10s %-12s %-12s %-12s %-12s", "layers", "q k v", "o", "gate up", "down");
    for (int first = 0, next; first < config->layers; first = next) {
        struct layer_formats f = model_layer_formats(config, linear, first);
        for (next = first + 1; next < config->layers && equal(f, model_layer_formats(config, linear, next)); next++) {
        }
        char layers[32];
        snprintf(layers, sizeof layers, next - first > 1 ? "%d..%d" : "%d", first, next - 1);
        const char *attn = linear_format_names[f.attn], *mlp = linear_format_names[f.mlp];
        log_info("formats    %-10s %-12s %-12s %-12s %-12s", layers, attn, attn, mlp, mlp);
    }
    log_info("formats    embedding, norms and head: bf16");
}
