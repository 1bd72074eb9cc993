/* attention: the recipe, that is the meaning of every low-precision choice (which formats, which backward). A recipe is
 * stored in configs and checkpoints; the variant that runs it (cpu, sm90, ...) is speed and belongs to the machine.
 * This header knows names and legality, not arithmetic. Sections are those of docs/numerics.md. */
#pragma once

#include "core/status.h"

#include <stdbool.h>

enum qk_format { QK_BF16, QK_NVFP4, QK_NVFP4_E4M3 };
enum qk_scale { QK_SCALE_AMAX, QK_SCALE_MSE, QK_SCALE_FOLDED };
enum pv_format { PV_BF16, PV_FP8, PV_MXFP4, PV_NVFP4, PV_FP4_UE5M3 };
enum mx_family { MX_NEAREST, MX_OCP }; /* amplitude with nearest exponent (paper), or OCP floor */
enum p_map { P_EXACT, P_THRESHOLD, P_CODE_SPACE, P_AFFINE, P_ACCURATE };
enum p_anchor { ANCHOR_ROW, ANCHOR_ZERO, ANCHOR_SAMPLED };
enum v_diag { V_DIAG_BLOCKED, V_DIAG_FP8 };
enum backward_preset {
    BWD_REPRESENTED,
    BWD_RECENTRED,
    BWD_EXACT_STAT,
    BWD_SAVED_OUTPUT,
    BWD_SAVED_OUTPUT_FIXED,
    BWD_BF16,
};
enum bwd_p { BWD_P_CODES, BWD_P_FP8, BWD_P_BF16 };
enum bwd_v { BWD_V_FORWARD, BWD_V_E4M3, BWD_V_BF16 };
enum bwd_stat { BWD_STAT_SAVED_RAW, BWD_STAT_SAVED, BWD_STAT_RECENTRED, BWD_STAT_EXACT };
enum do_format { DO_E4M3, DO_E5M2, DO_BF16 };
enum do_scale { DO_SCALE_HEAD, DO_SCALE_FIXED };
enum ds_scale { DS_SCALE_BOUND, DS_SCALE_FIXED };
enum qk_grad { QK_GRAD_ORIGINAL, QK_GRAD_LIFT };

struct attention_recipe {
    enum qk_format qk;
    enum qk_scale qk_scale;
    enum pv_format pv;
    enum mx_family mx_rule;
    enum p_map p_map;
    float affine_a, affine_b;
    enum p_anchor anchor; /* row: ceil of the row maximum. zero: none; scores above 128 give NaN. sampled (the paper's
                             guard, section 6): ceil of the maximum over up to 128 evenly spread visible keys, with
                             M = 110, L = 16; codes of smaller blocks are made against the floor */
    enum v_diag v_diag;
    int sink_keys_fp8; /* the first n keys of P and V in FP8; a multiple of 32, 0 = none */
    bool k_center;     /* K less its mean over all keys (one BF16 rounding) before everything else, in both passes */
    bool dk_center; /* dK less its mean over keys: what k_center owes to its backward, and a free safeguard without */
    enum backward_preset backward; /* bf16: dS and the gradient views of Q and K in BF16, dS from unrounded P; otherwise
                                      dS and the views are E4M3 */
    /* The switches of the backward. attention_recipe_preset fills them; a config may then set each alone. */
    enum bwd_p bwd_p;       /* codes: rebuilt relative to n = floor(LSE2), and dO carries 2^-f (section 7).
                               fp8, bf16: exp2(t - LSE2), with LSE2' in its place for bwd_stat recentred and exact */
    enum bwd_v bwd_v;       /* V in dP, and in the O' of bwd_stat exact */
    enum bwd_stat bwd_stat; /* r: <O, dO> | <O, decoded dO> | sum P dP / sum P | <O', decoded dO>; with exact, dS takes
                               the unrounded P whatever bwd_p is */
    enum do_format do_format;
    enum do_scale do_scale;
    enum ds_scale ds_scale;
    enum qk_grad qk_grad; /* gradient views of Q and K made from the BF16 original, or lifted from the decoded score
                             operand; one power of two a head, but x4 for lift with ds_scale fixed (the paper's) */
    float debug_leak; /* 0, also in every preset: nothing. Else a planted error, for controls: r becomes r - delta, so
                         that each row's sum_j dS_ij changes by debug_leak * sum_j |dS_ij|, spread over keys as P. The
                         row leak lambda is then about |debug_leak| where it was small, of one sign in all rows */
};

/* Names of an enumerator in configs: NULL-terminated, in enum order; so names[value] is a value's name. */
extern const char *const qk_format_names[],
    *const qk_scale_names[], *const pv_format_names[],
                                 *const mx_family_names[],
                                     *const p_map_names[], *const p_anchor_names[],
                                                               *const v_diag_names[],
                                                                   *const backward_preset_names[],
                                                                       *const bwd_p_names[],
                                                                           *const bwd_v_names[],
                                                                               *const bwd_stat_names[],
                                                                                   *const do_format_names[],
                                                                                       *const do_scale_names[],
                                                                                           *const ds_scale_names[],
                                                                                               *const qk_grad_names[];

/* The recipe of plain BF16 attention. */
struct attention_recipe attention_recipe_bf16(void);

/* Sets recipe->backward and every switch that the preset stands for. */
void attention_recipe_preset(struct attention_recipe *recipe, enum backward_preset preset);

/* Legality of the combination on the CPU reference, from one table. ERR_UNSUPPORTED names the keys that do not fit
 * together and a nearest legal value. head_dim matters to folded scales only. */
MUST_CHECK enum status attention_recipe_check(const struct attention_recipe *recipe, int head_dim);

/* The same without a message: NULL if legal, else the keys and the reason. */
const char *attention_recipe_refusal(const struct attention_recipe *recipe, int head_dim);

/* One line for logs: "qk=nvfp4/mse pv=mxfp4/ocp p_map=exact ... backward=represented". */
void attention_recipe_print(const struct attention_recipe *recipe, char *text, int bytes);
