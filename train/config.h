/* train: the configuration. One table of keys drives parsing, --keys, docs/config.md, the dump of each run and the
 * comparison on resume. Only this file's sources read configuration; other rooms get their own const struct.
 *
 * Files are a TOML subset: [section], key = value, whole-line # comments. Sources compose in order, later wins:
 * defaults, files as given, then --section.key=value. Paths are relative to the file that names them. */
#pragma once

#include "core/json.h"
#include "model/model_config.h"
#include "optim/adamw.h"
#include "optim/schedule.h"
#include "train/watch.h"

#include <stdio.h>

enum { CONFIG_PATH = 1024, CONFIG_GLOBS = 4096, CONFIG_SEEDS_MAX = 16, CONFIG_KEYS_MAX = 128, CONFIG_ORIGIN = 160 };

enum run_mode { MODE_TRAIN, MODE_STUDY, MODE_STEP_TIME };
enum determinism { DETERMINISTIC_AUTO, DETERMINISTIC_OFF, DETERMINISTIC_LAYOUT, DETERMINISTIC_ANY };
enum after_divergence { AFTER_STOP, AFTER_CONTINUE };

struct config_run {
    enum run_mode mode;
    char name[64], out[CONFIG_PATH];
    int64_t steps, tokens; /* exactly one is given; config_finish derives steps from tokens */
    double max_minutes;    /* 0 = no limit */
    int64_t seed;
    enum determinism deterministic;
};

struct config_data {
    char train[CONFIG_GLOBS], val[CONFIG_GLOBS], tokenizer[CONFIG_PATH];
    int64_t batch, micro_batch, seq_len;
    int prefetch;
};

struct config_checkpoint {
    int64_t every, keep_forever_every;
    int keep;
    char resume[CONFIG_PATH], may_change[CONFIG_PATH];
};

struct config_seeds {
    int count;
    int64_t value[CONFIG_SEEDS_MAX];
};

struct config_study {
    char arms[CONFIG_GLOBS], reference[64], from[CONFIG_PATH];
    struct config_seeds seeds;
    enum after_divergence after_divergence;
};

struct config {
    struct config_run run;
    struct model_config model;
    struct attention_recipe attention;
    char attention_variant[32];
    struct linear_recipe linear;
    struct adamw_config optim;
    struct schedule schedule;
    struct config_data data;
    double timeout_s;
    int bucket_mb;
    struct config_checkpoint checkpoint;
    int64_t log_every, attention_every;
    bool log_stdout;
    int64_t eval_every, eval_steps;
    bool divergence_stop;
    struct watch_config watch;
    struct config_study study;
    char device[16];
    enum recompute recompute;
    bool graphs;
    char gemm_choices[CONFIG_PATH];
    bool debug_allow;
    char debug_fault[64];
    /* Where each key of the table got its value: "configs/x.toml:12", "command line" or "" for the default. */
    char origin[CONFIG_KEYS_MAX][CONFIG_ORIGIN];
};

enum key_type { KEY_INT, KEY_REAL, KEY_BOOL, KEY_ENUM, KEY_TEXT, KEY_PATH, KEY_GLOBS, KEY_SEEDS, KEY_PAIR };

/* What a resumed run does when the checkpoint has another value: nothing; apply it and say so; refuse. */
enum on_resume { RESUME_FREE, RESUME_NOTICE, RESUME_FIXED };

struct config_key {
    const char *section, *name;
    enum key_type type;
    size_t offset, bytes;     /* of the field in struct config; KEY_INT, KEY_REAL: 4 or 8 bytes; KEY_ENUM: 1 or 4 */
    const char *const *names; /* KEY_ENUM: values in order */
    const char *fallback;     /* the default, as on the command line; NULL: must be given */
    double min, max;
    enum on_resume on_resume;
    const char *help;
};
extern const struct config_key config_keys[];
extern const int config_key_count;

/* Names that the design knows and this build has not: refused with the reason instead of "unknown key". */
struct config_absent {
    const char *name, *reason;
};
extern const struct config_absent config_absent_keys[];

/* All defaults; required keys are unset. */
void config_init(struct config *config);

/* Adds a file. Errors (ERR_CONFIG, ERR_IO) name file, line, key and the nearest valid name. A file that sets
 * attention.backward drops single switches (bwd_p .. qk_grad) of earlier sources: a preset stands for all of them. */
MUST_CHECK enum status config_add_file(struct config *config, const char *path);

/* As config_add_file, for an arm of a study: only [attention] and [linear]. */
MUST_CHECK enum status config_add_arm(struct config *config, const char *path);

/* Adds "section.key=value" from the command line; all overrides form one source. */
MUST_CHECK enum status config_add_overrides(struct config *config, char *const *assignments, int count);

/* After the last source: required keys, the backward preset, and what follows from other keys. May be called again
 * after another source. Cross-key legality is train/plan's. */
MUST_CHECK enum status config_finish(struct config *config);

/* Key index of "section.name", -1 if unknown. */
int config_find(const char *name);

/* The nearest of `count` names by edit distance. */
const char *config_nearest(const char *word, const char *const *names, int count);

/* One value, to and from text. `source` and `line` (0: none) are for messages; strings must be quoted if `quoted`;
 * `folder` is put before relative paths. */
struct config_place {
    const char *source, *folder;
    int line;
    bool quoted;
};
/* "file:line" or "command line". */
void config_place_print(const struct config_place *place, char *text, size_t bytes);
MUST_CHECK enum status config_value_set(struct config *config, const struct config_key *key, const char *text,
                                        const struct config_place *place);
void config_value_print(const struct config *config, const struct config_key *key, char *text, size_t bytes);

/* --keys: a line a key; markdown: docs/config.md. */
void config_print_keys(FILE *out, bool markdown);

/* The configuration as used, each key with its origin: a config file itself. Paths become absolute; those that grow too
 * long for their key by that are left out, and file and log say so. */
MUST_CHECK enum status config_dump(const struct config *config, const char *path);
json_t *config_to_json(const struct config *config); /* {"section.key": "value text"} */

/* Lines "key: a -> b" of all keys that differ; returns how many. print = NULL counts only. */
int config_diff(const struct config *a, const struct config *b, void (*print)(const char *line));

/* Resume: compares `saved` (config_to_json of the checkpoint) key by key. RESUME_FIXED keys that differ fail with
 * ERR_CONFIG, "checkpoint has X, config has Y", unless `allowed` (key names or section.*, blanks between) names them;
 * RESUME_NOTICE keys are logged. A key that `saved` lacks and that is at its default here is equal: a default means
 * what older programs did. `path` names the checkpoint. */
MUST_CHECK enum status config_compare(const struct config *config, const json_t *saved, const char *allowed,
                                      const char *path);
