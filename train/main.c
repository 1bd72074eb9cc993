/* train: the program. Command line, configuration, then one of the modes; every failure ends all ranks with the exit
 * status of its kind. */
#include "core/clock.h"
#include "core/log.h"
#include "train/plan.h"
#include "train/run.h"
#include "train/run_folder.h"
#include "train/signals.h"
#include "train/step_time.h"
#include "train/study.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

enum { ARGUMENTS_MAX = 256 };

static const char version[] = "train_gpt8b 0.3.0";

#if WITH_CUDA
static const char devices[] = "cpu and cuda";
#else
static const char devices[] = "cpu";
#endif

static const char usage[] =
    "Usage: train_gpt8b CONFIG.toml... [--section.key=value...] [--dry-run]\n"
    "       mpirun -n 2 train_gpt8b CONFIG.toml...\n"
    "\n"
    "Trains a Llama-3.1-style transformer whose attention runs in 4- and 8-bit floats. Files compose: later ones win,\n"
    "the command line wins over all. The same command again resumes where the last one stopped.\n"
    "\n"
    "  --section.key=value   sets any key\n"
    "  --dry-run             prints the plan (parameters, memory by class, work, operators, data) and stops\n"
    "  --keys                lists every key with values, default and meaning; --keys=markdown as docs/config.md\n"
    "  --help, --version\n"
    "\n"
    "Exit status: 0 done; 1 wrong use or input; 2 the machine failed; 3 diverged and stopped; 4 stopped by SIGTERM,\n"
    "SIGUSR1, SIGINT or run.max_minutes after a checkpoint.\n";

struct arguments {
    char *files[ARGUMENTS_MAX], *overrides[ARGUMENTS_MAX];
    int n_files, n_overrides;
    bool dry_run;
};

/* Options that print and end. */
static bool answered(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            fputs(usage, stdout);
        } else if (strcmp(argv[i], "--version") == 0) {
            printf("%s, MPI %s, devices %s\n", version, comm_has_mpi() ? "yes" : "no", devices);
        } else if (strcmp(argv[i], "--keys") == 0 || strcmp(argv[i], "--keys=markdown") == 0) {
            config_print_keys(stdout, argv[i][6] != '\0');
        } else {
            continue;
        }
        return true;
    }
    return false;
}

/* An argument with a dot after -- is a key; anything else with a dash must be an option that we know. */
static enum status parse_arguments(struct arguments *a, int argc, char **argv)
{
    if (argc > ARGUMENTS_MAX) {
        return status_fail(ERR_USAGE, "%d arguments, at most %d", argc, ARGUMENTS_MAX);
    }
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--dry-run") == 0) {
            a->dry_run = true;
        } else if (strncmp(argv[i], "--", 2) == 0 && strchr(argv[i], '.') != NULL) {
            a->overrides[a->n_overrides++] = argv[i] + 2;
        } else if (argv[i][0] == '-') {
            return status_fail(ERR_USAGE, "%s: no such option; --help lists them, keys are set as --section.key=value",
                               argv[i]);
        } else {
            a->files[a->n_files++] = argv[i];
        }
    }
    if (a->n_files == 0) {
        return status_fail(ERR_USAGE, "no configuration file: try train_gpt8b configs/tiny_cpu.toml, or --help");
    }
    return OK;
}

static enum status read_config(struct config *config, int argc, char **argv, struct arguments *arguments)
{
    TRY(parse_arguments(arguments, argc, argv));
    config_init(config);
    for (int i = 0; i < arguments->n_files; i++) {
        TRY(config_add_file(config, arguments->files[i]));
    }
    TRY(config_add_overrides(config, arguments->overrides, arguments->n_overrides));
    return config_finish(config);
}

/* Ranks that were started with different settings would train different models and never notice. Paths and other free
 * keys may differ. */
static enum status check_same_config(const struct config *config, struct comm *comm)
{
    char value[CONFIG_GLOBS + 16];
    uint64_t hash = 0;
    for (int i = 0; i < config_key_count; i++) {
        if (config_keys[i].on_resume != RESUME_FREE) {
            config_value_print(config, &config_keys[i], value, sizeof value);
            hash = XXH3_64bits_withSeed(value, strlen(value), hash);
        }
    }
    int64_t half = (int64_t)(hash >> 1), extremes[2] = {half, -half};
    TRY(comm_max_i64(comm, extremes, 2));
    if (extremes[0] != -extremes[1]) {
        return status_fail(ERR_CONFIG,
                           "the %d ranks were started with different configurations: give all the same files "
                           "and keys",
                           comm->size);
    }
    return OK;
}

static enum status run_mode(const struct config *config, struct comm *comm, const struct device *device)
{
    double deadline_s = config->run.max_minutes > 0 ? clock_s() + 60 * config->run.max_minutes : 0;
    struct run_options plain = {.deadline_s = deadline_s};
    switch (config->run.mode) {
    case MODE_TRAIN:
        return run_train(config, comm, device, &plain);
    case MODE_STUDY:
        return study_run(config, comm, device, deadline_s);
    case MODE_STEP_TIME:
        return step_time_run(config, comm, device);
    }
    ASSERT(!"a mode of the table");
    return ERR_CONFIG;
}

/* auto is one decision of all ranks: GPUs if there is one for each. */
static enum status open_device(struct device *device, const struct config *config, struct comm *comm)
{
    const char *kind = config->device;
    int64_t lacks = !device_cuda_usable(comm->local_rank);
    if (strcmp(kind, "auto") == 0) {
        TRY(comm_max_i64(comm, &lacks, 1));
        kind = lacks ? "cpu" : "cuda";
    }
    return ranks_agree(comm, device_open(device, kind, comm->local_rank));
}

/* Everything is checked before anything is allocated or written; --dry-run ends where the run would begin. */
static enum status run(struct comm *comm, struct config *config, int argc, char **argv)
{
    struct arguments arguments = {0};
    struct device device;
    TRY(ranks_agree(comm, read_config(config, argc, argv, &arguments)));
    comm->timeout_s = config->timeout_s;
    TRY(open_device(&device, config, comm));
    TRY(ranks_agree(comm, plan_check(config, comm->size, &device)));
    TRY(ranks_agree(comm, check_same_config(config, comm)));
    if (arguments.dry_run) {
        TRY(plan_print(config, comm, &device, stdout));
        return config->run.mode == MODE_STUDY ? ranks_agree(comm, study_print(config, comm, &device)) : OK;
    }
    signals_install();
    return run_mode(config, comm, &device);
}

int main(int argc, char **argv)
{
    static const double start_timeout_s = 600; /* until the configuration says another */
    struct comm comm = {0};
    if (answered(argc, argv)) {
        return 0;
    }
    enum status status = comm_open(&comm, &argc, &argv, start_timeout_s);
    if (status != OK) {
        return status_exit_code(status);
    }
    ranks_quiet(&comm, true);
    struct config *config = calloc(1, sizeof *config);
    status =
        config == NULL ? status_fail(ERR_NOMEM, "no memory for the configuration") : run(&comm, config, argc, argv);
    free(config);
    ranks_leave(&comm, status);
    comm_close(&comm);
    return status_exit_code(status);
}
