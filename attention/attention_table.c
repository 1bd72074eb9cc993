/* attention: the table of variants, and the choice among them. */
#include "attention/attention.h"
#include "attention/attention_cpu.h"
#if WITH_CUDA
#include "attention/attention_cuda.h"
#include "attention/attention_sm90.h"
#endif

#include <math.h>
#include <stdio.h>
#include <string.h>

const struct attention_variant *const attention_variants[] = {
    &attention_variant_cpu,
#if WITH_CUDA
    &attention_variant_sm90,
    &attention_variant_cuda,
#endif
    NULL,
};

enum status attention_choose(const struct attention_shape *shape, const struct attention_recipe *recipe,
                             enum device_kind device, const char *name, const struct attention_variant **variant)
{
    bool any = strcmp(name, "auto") == 0;
    const char *why = NULL;
    for (int i = 0; attention_variants[i] != NULL; i++) {
        const struct attention_variant *v = attention_variants[i];
        if (v->device != device || (!any && strcmp(name, v->name) != 0)) {
            continue;
        }
        why = v->refuses(shape, recipe);
        if (why == NULL) {
            *variant = v;
            return OK;
        }
    }
    if (why == NULL) {
        return status_fail(ERR_UNSUPPORTED, "attention: this build has no variant '%s' for device %s; use auto", name,
                           device == DEVICE_CUDA ? "cuda" : "cpu");
    }
    char text[512];
    attention_recipe_print(recipe, text, sizeof text);
    return status_fail(ERR_UNSUPPORTED, "attention: variant '%s' refuses heads=%lld kv_heads=%lld head_dim=%lld %s: %s",
                       name, (long long)shape->heads, (long long)shape->kv_heads, (long long)shape->head_dim, text,
                       why);
}

void attention_route_print(const struct attention_shape *shape, const struct attention_recipe *recipe,
                           const struct attention_variant *variant, char *text, size_t bytes)
{
    const char *why = variant->bwd_refuses != NULL ? variant->bwd_refuses(shape, recipe) : NULL;
    if (why != NULL) {
        snprintf(text, bytes, "%s (backward by cuda: %s)", variant->name, why);
        return;
    }
    snprintf(text, bytes, "%s", variant->name);
    for (int i = 0; attention_variants[i] != variant; i++) {
        const struct attention_variant *preferred = attention_variants[i];
        why = preferred->device == variant->device ? preferred->refuses(shape, recipe) : NULL;
        if (why != NULL) {
            snprintf(text, bytes, "%s (%s: %s)", variant->name, preferred->name, why);
        }
    }
}

void attention_stats_add(struct attention_stats *sum, const struct attention_stats *one)
{
    /* Not fmax: it would hide a NaN. */
    if (one->logit_max > sum->logit_max || isnan(one->logit_max)) {
        sum->logit_max = one->logit_max;
    }
    sum->leak_abs += one->leak_abs;
    sum->ds_abs += one->ds_abs;
    sum->leak_stored_abs += one->leak_stored_abs;
    sum->ds_stored_abs += one->ds_stored_abs;
    sum->leak_r += one->leak_r;
    sum->r_r += one->r_r;
    sum->do_count += one->do_count;
    sum->do_flushed += one->do_flushed;
    sum->ds_count += one->ds_count;
    sum->ds_flushed += one->ds_flushed;
    sum->ds_saturated += one->ds_saturated;
    sum->p_rows += one->p_rows;
    sum->p_lost_mass += one->p_lost_mass;
    sum->non_finite += one->non_finite;
}
