/* Configuration: what is accepted, what each error says, and who wins. */
#include "core/file.h"
#include "core/log.h"
#include "tests/test.h"
#include "tests/train/scratch.h"
#include "train/config.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Keys without which no configuration is complete. */
static const char base[] =
    "[run]\nsteps = 10\n\n[model]\nlayers = 2\nwidth = 64\nheads = 2\nkv_heads = 1\nhead_dim = 32\n"
    "ffn = 128\nvocab = 320\n\n[optim]\nlr = 1e-3\n\n"
    "[data]\ntrain = \"a.tok.zst /b.tok.zst\"\nbatch = 4\nseq_len = 64\n";

static const char *write_file(const char *name, const char *text)
{
    const char *path = scratch_path(name);
    assert_int_equal(file_write_atomic(path, text, strlen(text)), OK);
    return path;
}

static struct config *new_config(void)
{
    struct config *config = malloc(sizeof *config);
    assert_non_null(config);
    config_init(config);
    return config;
}

/* A configuration of the base file, then `text` as a second file if given. */
static enum status read_text(struct config *config, const char *text)
{
    config_init(config);
    TRY(config_add_file(config, write_file("base.toml", base)));
    if (text != NULL) {
        TRY(config_add_file(config, write_file("more.toml", text)));
    }
    return config_finish(config);
}

/* The text is refused, and the message holds every word given. */
static void expect_refused(const char *text, const char *const *words)
{
    struct config *config = new_config();
    enum status status = read_text(config, text);
    if (status != ERR_CONFIG && status != ERR_UNSUPPORTED) {
        fail_msg("accepted or failed otherwise (%s): %s", status_name(status), text);
    }
    for (; *words != NULL; words++) {
        if (strstr(status_last_message(), *words) == NULL) {
            fail_msg("message \"%s\" lacks \"%s\"", status_last_message(), *words);
        }
    }
    free(config);
}
#define REFUSED(text, ...) expect_refused(text, (const char *const[]){__VA_ARGS__, NULL})

static void test_defaults_are_those_of_the_rooms(void **state)
{
    (void)state;
    struct config *config = new_config();
    struct watch_config watch = watch_config_default();
    struct attention_recipe recipe = attention_recipe_bf16();
    assert_int_equal(read_text(config, NULL), OK);
    assert_true(config->watch.window == watch.window && config->watch.confirm == watch.confirm);
    assert_true(config->watch.loss_rise_suspect == watch.loss_rise_suspect);
    assert_true(config->watch.loss_rise_diverged == watch.loss_rise_diverged);
    assert_true(config->watch.norm_factor == watch.norm_factor && config->watch.partner_gap == watch.partner_gap);
    assert_int_equal(config->attention.qk, recipe.qk);
    assert_int_equal(config->attention.pv, recipe.pv);
    assert_int_equal(config->attention.backward, recipe.backward);
    assert_int_equal(config->attention.bwd_stat, recipe.bwd_stat);
    assert_int_equal(config->schedule.steps, 10);
    assert_int_equal(config->model.context, 64);
    assert_string_equal(config->run.out, "runs/run");
    assert_true(config->optim.beta2 == 0.95F && config->optim.master_fp32 && !config->optim.moments_bf16);
    free(config);
}

static void test_errors_name_file_line_key_and_nearest(void **state)
{
    (void)state;
    REFUSED("[model]\nlayer = 2\n", "more.toml:2", "model.layer", "nearest is model.layers");
    REFUSED("[modl]\nlayers = 2\n", "more.toml:1", "[modl]", "[model]");
    REFUSED("[modl]\n", "more.toml:1", "[modl]");
    REFUSED("[attention]\npv = \"mxpf4\"\n", "more.toml:2", "attention.pv", "mxpf4", "nearest is mxfp4");
    REFUSED("[model]\n# a comment\nlayers = 2\nwidth = 64\nlayers = 3\n", "more.toml:5", "model.layers", "twice",
            "line 3");
    REFUSED("[model]\nlayers = 2\n[run]\nseed = 1\n[model]\nwidth = 64\n", "more.toml:5", "opened twice", "line 1");
    REFUSED("layers = 2\n", "more.toml:1", "before any [section]");
    REFUSED("[dist]\nzero = 1\n", "more.toml:2", "dist.zero", "sharding is not built");
    REFUSED("[checkpoint]\nasync = true\n", "checkpoint.async", "between updates");
}

static void test_bad_values(void **state)
{
    (void)state;
    REFUSED("[optim]\nlr = 1e-4x\n", "more.toml:2", "optim.lr = 1e-4x", "a number in");
    REFUSED("[optim]\nlr = inf\n", "optim.lr");
    REFUSED("[optim]\nlr = 0x1\n", "optim.lr");
    REFUSED("[optim]\nlr = .5\n", "optim.lr");
    REFUSED("[optim]\nlr = -1e-3\n", "optim.lr", "0 .. 100");
    REFUSED("[run]\nsteps = -5\n", "run.steps = -5", "a whole number in 0");
    REFUSED("[run]\nsteps = 1.5\n", "run.steps");
    REFUSED("[run]\nsteps = 99999999999999999999\n", "run.steps");
    REFUSED("[run]\nsteps =\n", "run.steps", "(nothing)");
    REFUSED("[run]\nname = train\n", "run.name", "double quotes");
    REFUSED("[run]\nname = \"a\" # no\n", "run.name", "double quotes");
    REFUSED("[run]\nsteps = 5 # no\n", "run.steps");
    REFUSED("[model]\ntied = yes\n", "model.tied", "true or false");
    REFUSED("[optim]\nbetas = [0.9]\n", "optim.betas", "two numbers");
    REFUSED("[optim]\nbetas = [0.9, 1.5]\n", "optim.betas");
    REFUSED("[study]\nseeds = [1, 2, 1]\n", "study.seeds", "different");
    REFUSED("[study]\nseeds = [1, 2,]\n", "study.seeds");
}

static void test_lines_that_readers_would_disagree_on(void **state)
{
    (void)state;
    REFUSED("[run]\r\nsteps = 5\r\n", "more.toml:1", "CR LF");
    REFUSED("[run]\n  steps = 5\n", "more.toml:2", "indented");
    REFUSED("[run]\n; comment\n", "more.toml:2", "expected key = value");
    REFUSED("[run]\nsteps: 5\n", "more.toml:2", "expected key = value");
    REFUSED("[run]\nsteps\n", "more.toml:2", "expected key = value");
    REFUSED("[run]\nname = \"a ;b\"\n", "more.toml:2", "would start a comment");
    REFUSED("[run]\nsteps = 5\t; x\n", "more.toml:2", "would start a comment");
    REFUSED("[run] # x\n", "more.toml:1", "a section line is [name]");
}

/* inih takes 199 bytes: around that, and up to the longest value of a key, a line arrives whole, in its section. */
static void test_long_lines_arrive_whole(void **state)
{
    (void)state;
    static const int bytes[] = {185, 186, 187, 1000, 4000, CONFIG_GLOBS - 1}; /* 13 more in the line */
    struct config *config = new_config();
    char *text = malloc(2 * CONFIG_GLOBS);
    for (size_t i = 0; i < sizeof bytes / sizeof bytes[0]; i++) {
        snprintf(text, 2 * CONFIG_GLOBS, "# %0300d\n%300s\n[data]\nbatch = 2\ntrain  =\t\"/%0*d\" \t\nseq_len = 32\n",
                 1, "", bytes[i] - 1, 7);
        assert_int_equal(read_text(config, text), OK);
        assert_int_equal(strlen(config->data.train), bytes[i]);
        assert_true(config->data.train[0] == '/' && config->data.train[bytes[i] - 1] == '7');
        assert_int_equal(config->data.batch, 2);
        assert_int_equal(config->data.seq_len, 32);
        assert_non_null(strstr(config->origin[config_find("data.train")], "more.toml:5"));
    }
    snprintf(text, 2 * CONFIG_GLOBS, "[data]\ntrain = \"/%0*d\"\n", CONFIG_GLOBS - 1, 7);
    REFUSED(text, "more.toml:2: data.train = /000", "expected a shorter path");
    snprintf(text, 2 * CONFIG_GLOBS, "[data]\ntrain = \"/%0*d\"\n", CONFIG_GLOBS + 128, 7);
    REFUSED(text, "more.toml:2", "line of 4235 bytes, at most 4224");
    snprintf(text, 2 * CONFIG_GLOBS, "[data]\ntrian = \"/%0300d\"\n", 7);
    REFUSED(text, "more.toml:2: unknown key data.trian", "data.train");
    snprintf(text, 2 * CONFIG_GLOBS, "[data]\n%0300d = 1\n", 7);
    REFUSED(text, "more.toml:2");
    snprintf(text, 2 * CONFIG_GLOBS, "[run]\nname = \"%0300d\"\n", 7);
    REFUSED(text, "more.toml:2: run.name", "expected a shorter text");
    free(text);
    free(config);
}

static void test_missing_keys_and_files(void **state)
{
    (void)state;
    struct config *config = new_config();
    assert_int_equal(config_add_file(config, "/tmp/gpt8b_no_such_file.toml"), ERR_CONFIG);
    assert_non_null(strstr(status_last_message(), "gpt8b_no_such_file"));
    assert_int_equal(config_finish(config), ERR_CONFIG);
    assert_non_null(strstr(status_last_message(), "model.layers is not set"));
    REFUSED("[run]\ntokens = 1000\n", "run.steps = 10", "run.tokens = 1000", "one of the two");
    free(config);
}

static void test_later_sources_win(void **state)
{
    (void)state;
    struct config *config = new_config();
    char *overrides[] = {"optim.lr=3e-4", "run.name=mine", "model.tied=1", "study.seeds=[3,4]"};
    assert_int_equal(read_text(config, "[optim]\nlr = 2e-3\nclip = 0.5\n[run]\nseed = 1_000\n"), OK);
    assert_true(config->optim.lr_peak == 2e-3F && config->optim.clip == 0.5F);
    assert_int_equal(config->run.seed, 1000);
    assert_non_null(strstr(config->origin[config_find("optim.lr")], "more.toml:2"));
    assert_int_equal(config_add_overrides(config, overrides, 4), OK);
    assert_int_equal(config_finish(config), OK);
    assert_true(config->optim.lr_peak == 3e-4F && config->optim.clip == 0.5F && config->model.tied);
    assert_string_equal(config->run.name, "mine");
    assert_int_equal(config->study.seeds.count, 2);
    assert_string_equal(config->origin[config_find("optim.lr")], "command line");
    assert_string_equal(config->origin[config_find("optim.eps")], "");
    char *twice[] = {"optim.lr=1", "optim.lr=2"}, *broken[] = {"optim.lr"}, *unknown[] = {"optim.rl=1"};
    assert_int_equal(config_add_overrides(config, twice, 2), ERR_CONFIG);
    assert_int_equal(config_add_overrides(config, broken, 1), ERR_USAGE);
    assert_int_equal(config_add_overrides(config, unknown, 1), ERR_CONFIG);
    assert_non_null(strstr(status_last_message(), "optim.lr"));
    free(config);
}

static void test_paths_are_relative_to_their_file(void **state)
{
    (void)state;
    struct config *config = new_config();
    char *overrides[] = {"data.val=v.tok.zst", "checkpoint.resume=never"}, expected[256];
    assert_int_equal(read_text(config, "[run]\nout = \"here\"\n[checkpoint]\nresume = \"auto\"\n"), OK);
    assert_int_equal(config_add_overrides(config, overrides, 2), OK);
    snprintf(expected, sizeof expected, "%s/a.tok.zst /b.tok.zst", scratch_folder());
    assert_string_equal(config->data.train, expected);
    snprintf(expected, sizeof expected, "%s/here", scratch_folder());
    assert_string_equal(config->run.out, expected);
    assert_string_equal(config->data.val, "v.tok.zst");
    assert_string_equal(config->checkpoint.resume, "never");
    free(config);
}

static void test_preset_and_single_switches(void **state)
{
    (void)state;
    struct config *config = new_config();
    struct attention_recipe preset = attention_recipe_bf16();
    /* Default of a quantised route. */
    assert_int_equal(read_text(config, "[attention]\nqk = \"nvfp4\"\npv = \"mxfp4\"\n"), OK);
    assert_int_equal(config->attention.backward, BWD_REPRESENTED);
    /* A switch wins over the preset of its own source, in either order of lines. */
    attention_recipe_preset(&preset, BWD_SAVED_OUTPUT);
    assert_int_equal(read_text(config, "[attention]\ndo_format = \"e4m3\"\nbackward = \"saved_output\"\n"), OK);
    assert_int_equal(config->attention.do_format, DO_E4M3);
    assert_int_equal(config->attention.bwd_stat, preset.bwd_stat);
    /* A switch of a later source stays beside the preset of an earlier one, and is dropped by a later preset. */
    char *single[] = {"attention.bwd_v=bf16"}, *later[] = {"attention.backward=recentred"};
    assert_int_equal(config_add_overrides(config, single, 1), OK);
    assert_int_equal(config_finish(config), OK);
    assert_int_equal(config->attention.bwd_v, BWD_V_BF16);
    assert_int_equal(config->attention.do_format, DO_E4M3);
    assert_int_equal(config_add_overrides(config, later, 1), OK);
    assert_int_equal(config_finish(config), OK);
    attention_recipe_preset(&preset, BWD_RECENTRED);
    assert_int_equal(config->attention.bwd_v, preset.bwd_v);
    assert_int_equal(config->attention.do_format, preset.do_format);
    free(config);
}

static void test_arms_may_set_attention_and_linear_only(void **state)
{
    (void)state;
    struct config *config = new_config();
    assert_int_equal(read_text(config, NULL), OK);
    assert_int_equal(
        config_add_arm(config, write_file("arm.toml", "[attention]\nqk = \"nvfp4\"\n[linear]\nmlp = \"fp8\"\n")), OK);
    assert_int_equal(config->linear.mlp, LINEAR_FP8);
    assert_int_equal(config_add_arm(config, write_file("arm.toml", "[optim]\nlr = 1.0\n")), ERR_CONFIG);
    assert_non_null(strstr(status_last_message(), "arm.toml:2: optim.lr"));
    free(config);
}

static void test_dump_reads_back_as_the_same_configuration(void **state)
{
    (void)state;
    struct config *config = new_config(), *back = new_config();
    char path[128];
    assert_int_equal(read_text(config, "[attention]\nqk = \"nvfp4\"\npv = \"fp8\"\nbackward = \"saved_output\"\n"
                                       "do_format = \"e4m3\"\n[optim]\nbetas = [0.8, 0.99]\neps = 1.5e-9\n"
                                       "[study]\nseeds = [5, 6]\n"),
                     OK);
    snprintf(path, sizeof path, "%s/dump.toml", scratch_folder());
    assert_int_equal(config_dump(config, path), OK);
    assert_int_equal(config_add_file(back, path), OK);
    assert_int_equal(config_finish(back), OK);
    /* run.out became absolute. */
    snprintf(back->run.out, sizeof back->run.out, "%s", config->run.out);
    assert_int_equal(config_diff(config, back, NULL), 0);
    free(config);
    free(back);
}

/* Globs are the longest values; made absolute, they may grow out of their key. */
static void test_a_dump_of_long_globs_reads_back_or_says_what_it_leaves_out(void **state)
{
    (void)state;
    struct config *config = new_config(), *back = new_config();
    char path[128], globs[CONFIG_GLOBS + 16], *override = globs, *text = NULL;
    size_t bytes = 0;
    snprintf(path, sizeof path, "%s/dump.toml", scratch_folder());
    assert_int_equal(read_text(config, NULL), OK);
    snprintf(globs, sizeof globs, "data.train=/%0*d", CONFIG_GLOBS - 2, 7);
    assert_int_equal(config_add_overrides(config, &override, 1), OK);
    snprintf(globs, sizeof globs, "study.arms=/%0500d /%0500d", 7, 8);
    assert_int_equal(config_add_overrides(config, &override, 1), OK);
    assert_int_equal(config_finish(config), OK);
    assert_int_equal(config_dump(config, path), OK);
    assert_int_equal(config_add_file(back, path), OK);
    assert_int_equal(config_finish(back), OK);
    assert_string_equal(back->data.train, config->data.train);
    assert_string_equal(back->study.arms, config->study.arms);
    snprintf(globs, sizeof globs, "data.train=%0*d", CONFIG_GLOBS - 2, 7); /* relative */
    assert_int_equal(config_add_overrides(config, &override, 1), OK);
    assert_int_equal(config_dump(config, path), OK);
    assert_int_equal(file_read_all(path, 1 << 20, &text, &bytes), OK);
    assert_non_null(
        strstr(text, "# train is left out: with absolute paths it has more than 4095 bytes: give it again"));
    config_init(back);
    assert_int_equal(config_add_file(back, path), OK);
    assert_int_equal(config_finish(back), ERR_CONFIG);
    assert_non_null(strstr(status_last_message(), "data.train is not set"));
    free(text);
    free(config);
    free(back);
}

static void test_texts_that_a_dump_or_json_would_lose_are_refused(void **state)
{
    (void)state;
    struct config *config = new_config();
    char *lost[] = {"run.name=a\nb", "run.name=a\x1b[2J", "run.name=a ;b", "run.name=\xe9t\xe9", "data.val=\xc3("};
    for (size_t i = 0; i < sizeof lost / sizeof lost[0]; i++) {
        assert_int_equal(config_add_overrides(config, &lost[i], 1), ERR_CONFIG);
        assert_non_null(strstr(status_last_message(), "a text in UTF-8"));
        assert_null(strchr(status_last_message(), '\n'));
    }
    char *kept[] = {"run.name=\xc3\xa9t\xc3\xa9; a"};
    assert_int_equal(config_add_overrides(config, kept, 1), OK);
    assert_string_equal(config->run.name, "\xc3\xa9t\xc3\xa9; a");
    free(config);
}

static void test_resume_compares_key_by_key(void **state)
{
    (void)state;
    struct config *config = new_config();
    assert_int_equal(read_text(config, NULL), OK);
    json_t *saved = config_to_json(config);
    assert_int_equal(config_compare(config, saved, "", "ckpt"), OK);
    char *notice[] = {"optim.lr=5e-4", "log.every=7"}, *fixed[] = {"attention.pv=fp8", "attention.qk=nvfp4"};
    assert_int_equal(config_add_overrides(config, notice, 2), OK);
    assert_int_equal(config_compare(config, saved, "", "ckpt"), OK);
    assert_int_equal(config_add_overrides(config, fixed, 2), OK);
    assert_int_equal(config_compare(config, saved, "", "ckpt"), ERR_CONFIG);
    assert_non_null(strstr(status_last_message(), "attention.qk: checkpoint has \"bf16\", config has \"nvfp4\""));
    assert_int_equal(config_compare(config, saved, "attention.qk", "ckpt"), ERR_CONFIG);
    assert_int_equal(config_compare(config, saved, "attention.qk attention.pv", "ckpt"), OK);
    assert_int_equal(config_compare(config, saved, "linear.* attention.*", "ckpt"), OK);
    json_decref(saved);
    free(config);
    /* A checkpoint of an older program: a key that it lacks is no difference until somebody sets it. */
    config = new_config();
    assert_int_equal(read_text(config, NULL), OK);
    saved = config_to_json(config);
    assert_int_equal(json_object_del(saved, "attention.debug_leak"), 0);
    assert_int_equal(config_compare(config, saved, "", "ckpt"), OK);
    char *leak[] = {"attention.debug_leak=0.5"};
    assert_int_equal(config_add_overrides(config, leak, 1), OK);
    assert_int_equal(config_compare(config, saved, "", "ckpt"), ERR_CONFIG);
    assert_non_null(strstr(status_last_message(), "attention.debug_leak: checkpoint has none, config has 0.5"));
    json_decref(saved);
    free(config);
}

static void test_documentation_of_keys_is_current(void **state)
{
    (void)state;
    char *now = NULL, *committed = NULL;
    size_t bytes = 0, committed_bytes = 0;
    FILE *out = open_memstream(&now, &bytes);
    assert_non_null(out);
    config_print_keys(out, true);
    fclose(out);
    assert_int_equal(file_read_all("docs/config.md", 1 << 20, &committed, &committed_bytes), OK);
    assert_string_equal(now, committed); /* if not: train_gpt8b --keys=markdown > docs/config.md */
    free(now);
    free(committed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults_are_those_of_the_rooms),
        cmocka_unit_test(test_errors_name_file_line_key_and_nearest),
        cmocka_unit_test(test_bad_values),
        cmocka_unit_test(test_lines_that_readers_would_disagree_on),
        cmocka_unit_test(test_long_lines_arrive_whole),
        cmocka_unit_test(test_missing_keys_and_files),
        cmocka_unit_test(test_later_sources_win),
        cmocka_unit_test(test_paths_are_relative_to_their_file),
        cmocka_unit_test(test_preset_and_single_switches),
        cmocka_unit_test(test_arms_may_set_attention_and_linear_only),
        cmocka_unit_test(test_dump_reads_back_as_the_same_configuration),
        cmocka_unit_test(test_a_dump_of_long_globs_reads_back_or_says_what_it_leaves_out),
        cmocka_unit_test(test_texts_that_a_dump_or_json_would_lose_are_refused),
        cmocka_unit_test(test_resume_compares_key_by_key),
        cmocka_unit_test(test_documentation_of_keys_is_current),
    };
    return cmocka_run_group_tests(tests, scratch_make, scratch_remove);
}
