/* attention: names, presets and the legality of recipes. */
#include "attention/recipe.h"

#include <stdio.h>

const char *const qk_format_names[] = {"bf16", "nvfp4", "nvfp4_e4m3", NULL};
const char *const qk_scale_names[] = {"amax", "mse", "folded", NULL};
const char *const pv_format_names[] = {"bf16", "fp8", "mxfp4", "nvfp4", "fp4_ue5m3", NULL};
const char *const mx_family_names[] = {"nearest", "ocp", NULL};
const char *const p_map_names[] = {"exact", "threshold", "code_space", "affine", "accurate", NULL};
const char *const p_anchor_names[] = {"row", "zero", "sampled", NULL};
const char *const v_diag_names[] = {"blocked", "fp8", NULL};
const char *const backward_preset_names[] = {"represented",        "recentred", "exact_stat", "saved_output",
                                             "saved_output_fixed", "bf16",      NULL};
const char *const bwd_p_names[] = {"codes", "fp8", "bf16", NULL};
const char *const bwd_v_names[] = {"forward", "e4m3", "bf16", NULL};
const char *const bwd_stat_names[] = {"saved_raw", "saved", "recentred", "exact", NULL};
const char *const do_format_names[] = {"e4m3", "e5m2", "bf16", NULL};
const char *const do_scale_names[] = {"head", "fixed", NULL};
const char *const ds_scale_names[] = {"bound", "fixed", NULL};
const char *const qk_grad_names[] = {"original", "lift", NULL};

/* The table of section 7, one row a preset. */
static const struct attention_recipe presets[] = {
    [BWD_REPRESENTED] = {.bwd_p = BWD_P_CODES,
                         .bwd_v = BWD_V_FORWARD,
                         .bwd_stat = BWD_STAT_SAVED,
                         .do_format = DO_E4M3,
                         .do_scale = DO_SCALE_HEAD,
                         .ds_scale = DS_SCALE_BOUND,
                         .qk_grad = QK_GRAD_ORIGINAL},
    [BWD_RECENTRED] = {.bwd_p = BWD_P_FP8,
                       .bwd_v = BWD_V_E4M3,
                       .bwd_stat = BWD_STAT_RECENTRED,
                       .do_format = DO_E4M3,
                       .do_scale = DO_SCALE_HEAD,
                       .ds_scale = DS_SCALE_BOUND,
                       .qk_grad = QK_GRAD_ORIGINAL},
    [BWD_EXACT_STAT] = {.bwd_p = BWD_P_FP8,
                        .bwd_v = BWD_V_E4M3,
                        .bwd_stat = BWD_STAT_EXACT,
                        .do_format = DO_E4M3,
                        .do_scale = DO_SCALE_HEAD,
                        .ds_scale = DS_SCALE_BOUND,
                        .qk_grad = QK_GRAD_ORIGINAL},
    [BWD_SAVED_OUTPUT] = {.bwd_p = BWD_P_FP8,
                          .bwd_v = BWD_V_E4M3,
                          .bwd_stat = BWD_STAT_SAVED_RAW,
                          .do_format = DO_E5M2,
                          .do_scale = DO_SCALE_HEAD,
                          .ds_scale = DS_SCALE_BOUND,
                          .qk_grad = QK_GRAD_LIFT},
    [BWD_SAVED_OUTPUT_FIXED] = {.bwd_p = BWD_P_FP8,
                                .bwd_v = BWD_V_E4M3,
                                .bwd_stat = BWD_STAT_SAVED_RAW,
                                .do_format = DO_E5M2,
                                .do_scale = DO_SCALE_FIXED,
                                .ds_scale = DS_SCALE_FIXED,
                                .qk_grad = QK_GRAD_LIFT},
    [BWD_BF16] = {.bwd_p = BWD_P_BF16,
                  .bwd_v = BWD_V_BF16,
                  .bwd_stat = BWD_STAT_SAVED,
                  .do_format = DO_BF16,
                  .do_scale = DO_SCALE_HEAD,
                  .ds_scale = DS_SCALE_BOUND,
                  .qk_grad = QK_GRAD_ORIGINAL},
};

void attention_recipe_preset(struct attention_recipe *recipe, enum backward_preset preset)
{
    const struct attention_recipe *p = &presets[preset];
    recipe->backward = preset;
    recipe->bwd_p = p->bwd_p;
    recipe->bwd_v = p->bwd_v;
    recipe->bwd_stat = p->bwd_stat;
    recipe->do_format = p->do_format;
    recipe->do_scale = p->do_scale;
    recipe->ds_scale = p->ds_scale;
    recipe->qk_grad = p->qk_grad;
}

struct attention_recipe attention_recipe_bf16(void)
{
    struct attention_recipe recipe = {
        .qk = QK_BF16,
        .qk_scale = QK_SCALE_AMAX,
        .pv = PV_BF16,
        .mx_rule = MX_NEAREST,
        .p_map = P_EXACT,
        .affine_a = 1.50f,
        .affine_b = 1.20f,
        .anchor = ANCHOR_ROW,
        .v_diag = V_DIAG_BLOCKED,
    };
    attention_recipe_preset(&recipe, BWD_BF16);
    return recipe;
}

/* ---- legality --------------------------------------------------------------------------------------------- */

static bool pv_is_fp4(const struct attention_recipe *r)
{
    return r->pv == PV_MXFP4 || r->pv == PV_NVFP4 || r->pv == PV_FP4_UE5M3;
}

static bool scale_without_blocks(const struct attention_recipe *r)
{
    return r->qk == QK_BF16 && r->qk_scale != QK_SCALE_AMAX;
}
static bool map_without_mx(const struct attention_recipe *r)
{
    return r->pv != PV_MXFP4 && r->p_map != P_EXACT;
}
static bool affine_without_rise(const struct attention_recipe *r)
{
    return r->p_map == P_AFFINE && !(r->affine_a > 0);
}
static bool anchor_without_mx(const struct attention_recipe *r)
{
    return r->pv != PV_MXFP4 && r->anchor != ANCHOR_ROW;
}
static bool diag_without_blocks(const struct attention_recipe *r)
{
    return r->v_diag == V_DIAG_FP8 && !pv_is_fp4(r);
}
static bool sinks_without_blocks(const struct attention_recipe *r)
{
    return r->sink_keys_fp8 != 0 && !pv_is_fp4(r);
}
static bool sinks_without_anchor(const struct attention_recipe *r)
{
    return r->sink_keys_fp8 != 0 && r->anchor != ANCHOR_ROW;
}
static bool sinks_not_in_blocks(const struct attention_recipe *r)
{
    return r->sink_keys_fp8 < 0 || r->sink_keys_fp8 % 32 != 0;
}
static bool bf16_dout_with_scale(const struct attention_recipe *r)
{
    return r->do_format == DO_BF16 && r->do_scale == DO_SCALE_FIXED;
}
static bool bf16_ds_with_scale(const struct attention_recipe *r)
{
    return r->backward == BWD_BF16 && r->ds_scale == DS_SCALE_FIXED;
}

/* What the CPU reference refuses. A key that would have no effect is refused too: an arm of a study must not carry a
 * name that it does not deserve. mx_rule and affine_a, affine_b have no neutral value and are ignored where unused. */
static const struct {
    bool (*refused)(const struct attention_recipe *recipe);
    const char *why;
} refusals[] = {
    {scale_without_blocks, "qk=bf16 with qk_scale=mse or folded: bf16 has no block scales; use qk_scale=amax"},
    {map_without_mx, "p_map other than exact without pv=mxfp4: producers work on blocks with a power-of-two scale; use "
                     "p_map=exact or pv=mxfp4"},
    {affine_without_rise,
     "p_map=affine with affine_a <= 0: codes would not rise with the score, and masked keys, whose "
     "scores are the lowest, would get some; use affine_a > 0"},
    {anchor_without_mx, "anchor=zero or sampled without pv=mxfp4: only its block exponents have the range; use "
                        "anchor=row or pv=mxfp4"},
    {diag_without_blocks, "v_diag=fp8 with pv=bf16 or fp8: V has no blocks along keys; use v_diag=blocked"},
    {sinks_without_blocks, "sink_keys_fp8 with pv=bf16 or fp8: it lifts keys out of FP4 blocks; use sink_keys_fp8=0"},
    {sinks_without_anchor,
     "sink_keys_fp8 with anchor=zero or sampled: FP8 probabilities need the row maximum; use anchor=row"},
    {sinks_not_in_blocks, "sink_keys_fp8 must be a multiple of 32 and not negative: blocks of P do not split"},
    {bf16_dout_with_scale, "do_format=bf16 with do_scale=fixed: BF16 needs no multiplier; use do_scale=head"},
    {bf16_ds_with_scale, "backward=bf16 with ds_scale=fixed: dS stays BF16 there; use ds_scale=bound"},
};

const char *attention_recipe_refusal(const struct attention_recipe *recipe, int head_dim)
{
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
        if (refusals[i].refused(recipe)) {
            return refusals[i].why;
        }
    }
    if (recipe->qk_scale == QK_SCALE_FOLDED && head_dim != 128) {
        return "qk_scale=folded with a head_dim other than 128: blocks 64 features apart share a scale; use "
               "qk_scale=amax or mse";
    }
    return NULL;
}

enum status attention_recipe_check(const struct attention_recipe *recipe, int head_dim)
{
    const char *why = attention_recipe_refusal(recipe, head_dim);
    return why == NULL ? OK : status_fail(ERR_UNSUPPORTED, "attention: %s", why);
}

void attention_recipe_print(const struct attention_recipe *r, char *text, int bytes)
{
    char leak[32] = "";
    if (r->debug_leak != 0) {
        snprintf(leak, sizeof leak, " debug_leak=%g", (double)r->debug_leak);
    }
    snprintf(text, (size_t)bytes,
             "qk=%s/%s pv=%s/%s p_map=%s anchor=%s v_diag=%s sink_keys_fp8=%d k_center=%d dk_center=%d backward=%s "
             "(p=%s v=%s stat=%s do=%s/%s ds=%s qk_grad=%s)%s",
             qk_format_names[r->qk], qk_scale_names[r->qk_scale], pv_format_names[r->pv], mx_family_names[r->mx_rule],
             p_map_names[r->p_map], p_anchor_names[r->anchor], v_diag_names[r->v_diag], r->sink_keys_fp8, r->k_center,
             r->dk_center, backward_preset_names[r->backward], bwd_p_names[r->bwd_p], bwd_v_names[r->bwd_v],
             bwd_stat_names[r->bwd_stat], do_format_names[r->do_format], do_scale_names[r->do_scale],
             ds_scale_names[r->ds_scale], qk_grad_names[r->qk_grad], leak);
}
