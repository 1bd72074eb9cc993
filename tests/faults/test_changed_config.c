/* The configuration at a resume: each key that makes another run is refused by name, unless it is allowed by name; each
 * key that may change is said. The tables must have every key of the program's own list. */
#include "tests/run/program.h"
#include "train/config.h"

#include <stdio.h>
#include <string.h>

/* A key that is fixed, another value of it, and what must go with it to be legal at all. */
struct change {
    const char *key, *value, *with;
};

static const struct change fixed[] = {
    {"run.seed", "2", ""},
    {"model.layers", "3", ""},
    {"model.width", "32", ""},
    {"model.heads", "4", ""},
    {"model.kv_heads", "2", ""},
    {"model.head_dim", "32", ""},
    {"model.ffn", "192", ""},
    {"model.vocab", "321", ""},
    {"model.context", "128", ""},
    {"model.rope_theta", "20000", ""},
    {"model.rope_scaling", "llama3", ""},
    {"model.rope_factor", "4", ""},
    {"model.rope_low", "2", ""},
    {"model.rope_high", "8", ""},
    {"model.rope_original_context", "4096", ""},
    {"model.tied", "true", ""},
    {"model.qk_norm", "true", ""},
    {"model.norm_eps", "1e-6", ""},
    {"model.init_std", "0.01", ""},
    {"attention.qk", "nvfp4_e4m3", ""},
    {"attention.qk_scale", "mse", ""},
    {"attention.pv", "fp8", ""},
    {"attention.mx_rule", "ocp", ""},
    {"attention.p_map", "threshold", ""},
    {"attention.affine_a", "1.25", ""},
    {"attention.affine_b", "1.5", ""},
    {"attention.anchor", "zero", ""},
    {"attention.v_diag", "fp8", ""},
    {"attention.sink_keys_fp8", "32", ""},
    {"attention.k_center", "true", ""},
    {"attention.dk_center", "true", ""},
    {"attention.backward", "saved_output", ""},
    {"attention.bwd_p", "fp8", ""},
    {"attention.bwd_v", "e4m3", ""},
    {"attention.bwd_stat", "saved_raw", ""},
    {"attention.do_format", "e5m2", ""},
    {"attention.do_scale", "fixed", ""},
    {"attention.ds_scale", "fixed", ""},
    {"attention.qk_grad", "lift", ""},
    {"attention.debug_leak", "0.125", "--debug.allow=true"},
    {"linear.attn", "fp8", ""},
    {"linear.mlp", "fp8", ""},
    {"linear.first_layers_bf16", "1", ""},
    {"linear.last_layers_bf16", "1", ""},
    {"optim.master", "none", ""},
    {"optim.moments", "bf16", ""},
    {"optim.stochastic_rounding", "true", "--optim.moments=bf16 --checkpoint.may_change=optim.moments"},
    {"optim.grads", "bf16", ""},
    {"data.batch", "2", ""},
    {"data.seq_len", "32", "--model.context=64"},
};

/* No second value of these can run on a CPU; tests/run/test_command_line.c has their refusals. */
static const char *const single[] = {"linear.head"};

static const char noticed[] =
    "--run.steps=6 --optim.lr=1e-3 --optim.betas=[0.8,0.9] --optim.eps=1e-7 --optim.weight_decay=0.2 --optim.clip=2 "
    "--schedule.warmup=1 --schedule.kind=linear --schedule.final_fraction=0.2 --schedule.decay_fraction=0.3 "
    "--divergence.window=50 --divergence.loss_rise_suspect=0.6 --divergence.loss_rise_diverged=0.8 "
    "--divergence.norm_factor=9 --divergence.confirm=7 --divergence.partner_gap=0.7 --run.deterministic=any "
    "--log.attention_every=2 --attention.variant=cpu";

/* A run of 4 updates in low precision, so that every key of [attention] is in use. */
static const char base[] = "configs/arms/nvfp4_mxfp4.toml";

static int setup(void **state)
{
    if (program_setup(state) != 0) {
        return 1;
    }
    EXITS(0, (struct program *)*state, program_train(*state, 1, "%s --run.out={}/good --run.steps=4", base));
    return 0;
}

static const struct change *find_fixed(const char *name)
{
    for (size_t i = 0; i < sizeof fixed / sizeof fixed[0]; i++) {
        if (strcmp(fixed[i].key, name) == 0) {
            return &fixed[i];
        }
    }
    return NULL;
}

static void test_every_key_is_in_a_table(void **state)
{
    (void)state;
    for (int i = 0; i < config_key_count; i++) {
        char name[128];
        snprintf(name, sizeof name, "%s.%s", config_keys[i].section, config_keys[i].name);
        bool listed = find_fixed(name) != NULL;
        for (size_t k = 0; k < sizeof single / sizeof single[0]; k++) {
            listed = listed || strcmp(single[k], name) == 0;
        }
        if (listed != (config_keys[i].on_resume == RESUME_FIXED)) {
            fail_msg("%s: is it fixed at a resume, or not? Table and test disagree", name);
        }
        bool said = strstr(noticed, name) != NULL || strcmp(name, "run.tokens") == 0;
        if (said != (config_keys[i].on_resume == RESUME_NOTICE)) {
            fail_msg("%s: is it noticed at a resume, or not? Table and test disagree", name);
        }
    }
}

static void test_fixed_keys_are_refused_one_by_one(void **state)
{
    struct program *p = *state;
    EXITS(0, p, program_shell(p, "cp {}/good/config.toml {}/used.toml"));
    for (size_t i = 0; i < sizeof fixed / sizeof fixed[0]; i++) {
        char words[128];
        EXITS(1, p,
              program_train(p, 1, "%s --run.out={}/good --run.steps=4 --%s=%s %s", base, fixed[i].key, fixed[i].value,
                            fixed[i].with));
        snprintf(words, sizeof words, "%s: checkpoint has ", fixed[i].key);
        program_expect(p, words);
        program_expect(p, "set checkpoint.may_change to the keys that are meant to differ");
    }
    /* Nothing of the run was touched. */
    assert_int_equal(metrics_rows(p, "good"), 4);
    assert_same_file(p, "used.toml", "good/config.toml");
    EXITS(0, p, program_train(p, 1, "%s --run.out={}/good --run.steps=4", base));
    program_expect(p, "all 4 updates are made");
}

/* By name, by section, and not by another name. */
static void test_what_is_allowed_by_name(void **state)
{
    struct program *p = *state;
    EXITS(0, p, program_shell(p, "cp -r {}/good {}/named && cp -r {}/good {}/shape"));
    EXITS(0, p,
          program_train(p, 1,
                        "%s --run.out={}/named --run.steps=5 --attention.mx_rule=ocp --linear.mlp=fp8 "
                        "'--checkpoint.may_change=attention.mx_rule linear.*'",
                        base));
    program_expect(p, "attention.mx_rule: checkpoint has \"nearest\", config has \"ocp\": applied");
    program_expect(p, "linear.mlp: checkpoint has \"bf16\", config has \"fp8\": applied");
    assert_int_equal(metrics_rows(p, "named"), 5);
    EXITS(1, p,
          program_train(p, 1,
                        "%s --run.out={}/good --run.steps=5 --attention.mx_rule=ocp --checkpoint.may_change=linear.*",
                        base));
    program_expect(p, "attention.mx_rule: checkpoint has ");
    /* What is allowed must still fit: a wish does not change the shape of what was saved. */
    EXITS(1, p,
          program_train(p, 1, "%s --run.out={}/shape --run.steps=5 --model.ffn=192 --checkpoint.may_change=model.*",
                        base));
    program_expect(p, "checkpoint has BF16 (128, 64), config has BF16 (192, 64)");
}

static void test_other_changes_are_said(void **state)
{
    struct program *p = *state;
    EXITS(0, p, program_shell(p, "cp -r {}/good {}/noticed"));
    EXITS(0, p, program_train(p, 1, "%s --run.out={}/noticed %s", base, noticed));
    for (int i = 0; i < config_key_count; i++) {
        char words[128];
        if (config_keys[i].on_resume == RESUME_NOTICE && strcmp(config_keys[i].name, "tokens") != 0) {
            snprintf(words, sizeof words, "resume: %s.%s: checkpoint has ", config_keys[i].section,
                     config_keys[i].name);
            program_expect(p, words);
        }
    }
    assert_int_equal(metrics_rows(p, "noticed"), 6);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_key_is_in_a_table),
        cmocka_unit_test(test_fixed_keys_are_refused_one_by_one),
        cmocka_unit_test(test_what_is_allowed_by_name),
        cmocka_unit_test(test_other_changes_are_said),
    };
    return cmocka_run_group_tests(tests, setup, program_teardown);
}
