/* tests: the program driver. */
#include "tests/run/program.h"

#include "core/file.h"
#include "core/json.h"
#include "core/log.h"
#include "core/rng.h"
#include "data/shard.h"
#include "data/tokenizer.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { COMMAND = 8192, LOOKS_A_SECOND = 200 };

/* Two layers, a batch of 4: an update takes milliseconds. */
static const char base[] =
    "[run]\nsteps = 10\n\n[model]\nlayers = 2\nwidth = 64\nheads = 2\nkv_heads = 1\nhead_dim = 64\n"
    "ffn = 128\nvocab = 320\nrope_theta = 10000.0\n\n[optim]\nlr = 5e-3\n\n"
    "[schedule]\nwarmup = 2\n\n[log]\nstdout = false\n\n[eval]\nevery = 5\nsteps = 1\n\n"
    "[data]\ntrain = \"train.tok.zst\"\nval = \"val.tok.zst\"\nbatch = 4\nseq_len = 64\n\n[device]\nkind = \"cpu\"\n";

/* Words of a small vocabulary in random order: text that a model can learn something about. */
static void write_shard(const char *path, uint64_t seed, int words)
{
    static const char *const vocabulary[] = {"the ",  "cat ", "sat ",  "on ",   "a ",
                                             "mat. ", "and ", "dogs ", "run, ", "so "};
    struct shard_writer *writer;
    assert_int_equal(shard_writer_open(&writer, path, BYTE_VOCAB), OK);
    for (int i = 0; i < words; i++) {
        const char *word = vocabulary[rng_bits(seed, 1, 0, (uint64_t)i) % 10];
        int32_t tokens[16];
        size_t n = strlen(word);
        byte_tokenizer_encode((const unsigned char *)word, n, tokens);
        assert_int_equal(shard_writer_add(writer, tokens + 1, n), OK);
    }
    assert_int_equal(shard_writer_finish(writer), OK);
}

int program_setup(void **state)
{
    struct program *p = calloc(1, sizeof *p);
    char path[128];
    *state = p;
    snprintf(p->folder, sizeof p->folder, "/tmp/gpt8b_run_XXXXXX");
    if (mkdtemp(p->folder) == NULL) {
        return 1;
    }
    log_set_level((enum log_level)(LOG_ERROR + 1));
    snprintf(path, sizeof path, "%s/base.toml", p->folder);
    assert_int_equal(file_write_atomic(path, base, strlen(base)), OK);
    snprintf(path, sizeof path, "%s/train.tok.zst", p->folder);
    write_shard(path, 1, 6000);
    snprintf(path, sizeof path, "%s/val.tok.zst", p->folder);
    write_shard(path, 2, 400);
    return 0;
}

int program_teardown(void **state)
{
    struct program *p = *state;
    program_shell(p, "rm -r {}");
    free(p);
    return 0;
}

/* Replaces {} by the folder. */
static void expand(const struct program *p, const char *text, char *out, size_t bytes)
{
    size_t n = 0;
    for (; *text != '\0' && n + 1 < bytes; text++) {
        if (strncmp(text, "{}", 2) == 0) {
            n += (size_t)snprintf(out + n, bytes - n, "%s", p->folder);
            text++;
        } else {
            out[n++] = *text;
        }
    }
    out[n] = '\0';
}

static const char *trainer(void)
{
    static char path[512];
    const char *build = getenv("BUILD_DIR");
    snprintf(path, sizeof path, "%s/train_gpt8b", build != NULL ? build : "build/release");
    return path;
}

static int run_shell(struct program *p, const char *command)
{
    char expanded[COMMAND], all[COMMAND + 64];
    expand(p, command, expanded, sizeof expanded);
    snprintf(all, sizeof all, "{ %s ; } 2>&1", expanded);
    FILE *pipe = popen(all, "r");
    assert_non_null(pipe);
    size_t n = fread(p->output, 1, sizeof p->output - 1, pipe);
    p->output[n] = '\0';
    int status = pclose(pipe);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

int program_shell(struct program *p, const char *format, ...)
{
    char command[COMMAND];
    va_list args;
    va_start(args, format);
    vsnprintf(command, sizeof command, format, args);
    va_end(args);
    return run_shell(p, command);
}

int program_call(struct program *p, const char *format, ...)
{
    char arguments[COMMAND / 2], command[COMMAND];
    va_list args;
    va_start(args, format);
    vsnprintf(arguments, sizeof arguments, format, args);
    va_end(args);
    snprintf(command, sizeof command, "OMP_NUM_THREADS=1 %s %s", trainer(), arguments);
    return run_shell(p, command);
}

/* Open MPI leaks by itself, which sanitizer builds would count against us. It also looks for OpenCL devices, and an
 * OpenCL made with LLVM (pocl) then takes mpirun's signals, so that none would reach the ranks. */
static void launcher(int ranks, char *text, size_t bytes)
{
    text[0] = '\0';
    if (ranks > 1) {
        snprintf(text, bytes,
                 "env ASAN_OPTIONS=detect_leaks=0 HWLOC_COMPONENTS=-opencl mpirun -n %d --allow-run-as-root "
                 "--oversubscribe --bind-to none",
                 ranks);
    }
}

int program_train(struct program *p, int ranks, const char *format, ...)
{
    char arguments[COMMAND / 2], command[COMMAND], mpirun[160];
    va_list args;
    va_start(args, format);
    vsnprintf(arguments, sizeof arguments, format, args);
    va_end(args);
    launcher(ranks, mpirun, sizeof mpirun);
    snprintf(command, sizeof command, "OMP_NUM_THREADS=1 %s %s {}/base.toml %s", mpirun, trainer(), arguments);
    return run_shell(p, command);
}

int program_train_unequal(struct program *p, const char *first, const char *second)
{
    char command[COMMAND], mpirun[160];
    launcher(2, mpirun, sizeof mpirun);
    char *count = strstr(mpirun, "-n 2");
    memcpy(count, "-n 1", 4);
    snprintf(command, sizeof command, "OMP_NUM_THREADS=1 %s %s {}/base.toml %s : -n 1 %s {}/base.toml %s", mpirun,
             trainer(), first, trainer(), second);
    return run_shell(p, command);
}

/* cmocka's own messages end after a kilobyte. */
void program_show(const struct program *p)
{
    printf("the output was:\n%s\n", p->output);
    fflush(stdout);
}

void program_exits(const struct program *p, int found, int expected, const char *file, int line)
{
    if (found != expected) {
        program_show(p);
        _assert_int_equal((LargestIntegralType)found, (LargestIntegralType)expected, file, line);
    }
}

void program_expect(const struct program *p, const char *words)
{
    if (strstr(p->output, words) == NULL) {
        program_show(p);
        fail_msg("expected \"%s\" in the output", words);
    }
}

pid_t program_start(const struct program *p, int ranks, const char *arguments)
{
    char command[COMMAND], expanded[COMMAND], mpirun[160];
    launcher(ranks, mpirun, sizeof mpirun);
    snprintf(command, sizeof command, "OMP_NUM_THREADS=1 exec %s %s {}/base.toml %s >{}/background.txt 2>&1", mpirun,
             trainer(), arguments);
    expand(p, command, expanded, sizeof expanded);
    pid_t pid = fork();
    if (pid == 0) {
        execl("/bin/sh", "sh", "-c", expanded, (char *)NULL);
        _exit(127);
    }
    assert_true(pid > 0);
    return pid;
}

static char *read_file(const struct program *p, const char *name, size_t *bytes)
{
    char path[512], *text = NULL;
    snprintf(path, sizeof path, "%s/%s", p->folder, name);
    if (file_read_all(path, 1 << 28, &text, bytes) != OK) {
        fail_msg("%s", status_last_message());
    }
    return text;
}

bool file_exists(const struct program *p, const char *name)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", p->folder, name);
    return access(path, F_OK) == 0;
}

/* Whole lines only: the last may be half written. */
static int count_rows(const struct program *p, const char *run)
{
    char path[512];
    int rows = 0;
    snprintf(path, sizeof path, "%s/%s/metrics.jsonl", p->folder, run);
    FILE *file = fopen(path, "r");
    for (int c = 0; file != NULL && (c = getc(file)) != EOF;) {
        rows += c == '\n';
    }
    if (file != NULL) {
        fclose(file);
    }
    return rows;
}

void wait_for_rows(const struct program *p, const char *run, int rows)
{
    for (int looks = 0; count_rows(p, run) < rows; looks++) {
        if (looks == 300 * LOOKS_A_SECOND) {
            fail_msg("%s: fewer than %d rows after five minutes", run, rows);
        }
        nanosleep(&(struct timespec){.tv_nsec = 1000000000 / LOOKS_A_SECOND}, NULL);
    }
}

int program_stop(const struct program *p, pid_t pid, const char *run, int number)
{
    int status;
    wait_for_rows(p, run, 3);
    assert_int_equal(kill(pid, number), 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

void assert_same_file(const struct program *p, const char *a, const char *b)
{
    size_t na = 0, nb = 0;
    char *ta = read_file(p, a, &na), *tb = read_file(p, b, &nb);
    assert_int_equal(na, nb);
    if (memcmp(ta, tb, na) != 0) {
        fail_msg("%s and %s differ", a, b);
    }
    free(ta);
    free(tb);
}

/* The rows of a file as an array of objects, without what no two runs share. */
static json_t *read_rows(const struct program *p, const char *run, const char *name, int first)
{
    static const char *const own[] = {"step_ms",  "data_ms", "forward_ms",   "backward_ms", "comm_ms",
                                      "optim_ms", "tflops",  "tokens_per_s", "mfu",         "mem_gib"};
    char path[256];
    size_t bytes = 0;
    snprintf(path, sizeof path, "%s/%s", run, name);
    char *text = read_file(p, path, &bytes), *rest = text;
    json_t *rows = json_array();
    for (char *line; (line = strtok_r(rest, "\n", &rest)) != NULL;) {
        json_t *row = NULL;
        assert_int_equal(json_read_text(path, line, strlen(line), &row), OK);
        for (size_t i = 0; i < sizeof own / sizeof own[0]; i++) {
            json_object_del(row, own[i]);
        }
        if (json_integer_value(json_object_get(row, "step")) >= first) {
            json_array_append(rows, row);
        }
        json_decref(row);
    }
    free(text);
    return rows;
}

void assert_same_metrics(const struct program *p, const char *a, const char *b, const char *name, int first)
{
    json_t *ra = read_rows(p, a, name, first), *rb = read_rows(p, b, name, first);
    assert_int_equal(json_array_size(ra), json_array_size(rb));
    assert_true(json_array_size(ra) > 0);
    for (size_t i = 0; i < json_array_size(ra); i++) {
        json_t *x = json_array_get(ra, i), *y = json_array_get(rb, i);
        if (!json_equal(x, y)) {
            char *tx = json_dumps(x, 0), *ty = json_dumps(y, 0);
            fail_msg("%s, row %zu:\n%s: %s\n%s: %s", name, i, a, tx, b, ty);
        }
    }
    json_decref(ra);
    json_decref(rb);
}

void cut_run(struct program *p, const char *whole, const char *cut, int update, int rows, int layer_rows)
{
    EXITS(0, p,
          program_shell(p,
                        "mkdir -p {}/%s/checkpoints && cp -r {}/%s/checkpoints/step_%08d {}/%s/checkpoints/ && "
                        "head -n %d {}/%s/metrics.jsonl > {}/%s/metrics.jsonl && "
                        "head -n %d {}/%s/layers.jsonl > {}/%s/layers.jsonl",
                        cut, whole, update, cut, rows, whole, cut, layer_rows, whole, cut));
}

void assert_same_end(const struct program *p, const char *a, const char *b, int updates)
{
    static const char *const files[] = {"model.safetensors", "train_state/optimizer.safetensors"};
    assert_same_metrics(p, a, b, "metrics.jsonl", 1);
    assert_same_metrics(p, a, b, "layers.jsonl", 1);
    for (int i = 0; i < 2; i++) {
        char left[160], right[160];
        snprintf(left, sizeof left, "%s/checkpoints/step_%08d/%s", a, updates, files[i]);
        snprintf(right, sizeof right, "%s/checkpoints/step_%08d/%s", b, updates, files[i]);
        assert_same_file(p, left, right);
    }
}

int metrics_rows(const struct program *p, const char *run)
{
    json_t *rows = read_rows(p, run, "metrics.jsonl", 0);
    int n = (int)json_array_size(rows);
    json_decref(rows);
    return n;
}

double metrics_value(const struct program *p, const char *run, int step, const char *column)
{
    json_t *rows = read_rows(p, run, "metrics.jsonl", step);
    const json_t *value = json_object_get(json_array_get(rows, 0), column);
    assert_true(json_is_number(value));
    double x = json_number_value(value);
    json_decref(rows);
    return x;
}

void assert_verdict(const struct program *p, const char *run, const char *verdict, bool finished)
{
    char path[512];
    json_t *root = NULL;
    snprintf(path, sizeof path, "%s/%s/verdict.json", p->folder, run);
    assert_int_equal(json_read_file(path, &root), OK);
    assert_string_equal(json_string_value(json_object_get(root, "verdict")), verdict);
    assert_int_equal(json_is_true(json_object_get(root, "finished")), finished);
    json_decref(root);
}
