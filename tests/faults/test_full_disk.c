/* A machine that has too little. A disk that fills up: exit status 2 with the text of errno, what was saved before
 * stays whole, and with room again the run ends as if the disk had always been large. Needs root, for a small file
 * system in a mount namespace of its own. */
#include "tests/faults/background.h"

#include <stdio.h>
#include <string.h>

static const char options[] = "--run.steps=6 --checkpoint.every=1 --checkpoint.keep=10 --eval.every=0";

static int setup(void **state)
{
    if (program_setup(state) != 0) {
        return 1;
    }
    EXITS(0, (struct program *)*state, program_train(*state, 1, "--run.out={}/good %s", options));
    return 0;
}

static void needs_mount(struct program *p)
{
    if (program_shell(p, "mkdir -p {}/small && unshare -m mount -t tmpfs -o size=1m tmpfs {}/small") != 0) {
        skip();
    }
}

/* Trains on a disk of `kib`, then makes it large and trains again; both outputs are kept, and the run is copied out. A
 * checkpoint has 2 MB. */
static void check_disk(struct program *p, int ranks, int kib, bool two_fit)
{
    char mpirun[160] = "";
    if (ranks > 1) {
        snprintf(mpirun, sizeof mpirun,
                 "env ASAN_OPTIONS=detect_leaks=0 mpirun -n %d --allow-run-as-root --oversubscribe --bind-to none",
                 ranks);
    }
    EXITS(
        0, p,
        program_shell(p,
                      "export OMP_NUM_THREADS=1; t='%s '${BUILD_DIR:-build/release}'/train_gpt8b {}/base.toml "
                      "--run.out={}/small/run %s'; rm -rf {}/out; unshare -m sh -c \"mount -t tmpfs -o size=%dk tmpfs "
                      "{}/small && { $t > {}/full.txt 2>&1; echo \\$? > {}/full.status; ls {}/small/run/checkpoints "
                      "> {}/full.list; mount -o remount,size=64m {}/small && $t > {}/large.txt 2>&1 && "
                      "cp -r {}/small/run {}/out; }\"",
                      mpirun, options, kib));
    EXITS(0, p, program_shell(p, "grep -qx 2 {}/full.status"));
    EXITS(0, p, program_shell(p, "cat {}/full.txt"));
    program_expect(p, "No space left on device");
    expect_times(p, "error: ", 1);
    EXITS(0, p, program_shell(p, "cat {}/large.txt"));
    assert_null(strstr(p->output, "skipped"));
    if (two_fit) {
        program_expect(p, "update 3 of 6 is next");
        EXITS(0, p, program_shell(p, "grep -c step_ {}/full.list | grep -qx 2"));
    }
    assert_same_metrics(p, "good", "out", "metrics.jsonl", 1);
    assert_same_metrics(p, "good", "out", "layers.jsonl", 1);
    for (int step = 1; step <= 6; step++) {
        char good[96], out[96];
        snprintf(good, sizeof good, "good/checkpoints/step_%08d/model.safetensors", step);
        snprintf(out, sizeof out, "out/checkpoints/step_%08d/model.safetensors", step);
        assert_same_file(p, good, out);
    }
}

static void test_a_checkpoint_that_does_not_fit(void **state)
{
    struct program *p = *state;
    needs_mount(p);
    check_disk(p, 1, 5000, true);
}

static void test_two_ranks(void **state)
{
    struct program *p = *state;
    needs_mount(p);
    needs_mpi();
    check_disk(p, 2, 5000, true);
}

/* Every file of a run is the one that finds the disk full at some size: 4 KiB are a page, the unit of a tmpfs. */
static void test_many_sizes(void **state)
{
    struct program *p = *state;
    soak_only();
    needs_mount(p);
    int sizes = 0;
    for (int kib = 8; kib < 3 * 2048; kib += kib < 64 ? 4 : 184) {
        check_disk(p, 1, kib, false);
        sizes++;
    }
    print_message("full disk: %d sizes, each run went on exactly\n", sizes);
}

/* A folder that cannot be written: before anything is computed. */
static void test_a_read_only_disk(void **state)
{
    struct program *p = *state;
    needs_mount(p);
    EXITS(2, p,
          program_shell(p, "t=${BUILD_DIR:-build/release}'/train_gpt8b {}/base.toml --run.out={}/small/run'; "
                           "unshare -m sh -c \"mount -t tmpfs -o ro tmpfs {}/small && $t\""));
    program_expect(p, "Read-only file system");
    expect_times(p, "error: ", 1);
}

/* Counted before anything is taken or written. */
static void test_more_memory_than_there_is(void **state)
{
    struct program *p = *state;
    EXITS(2, p,
          program_train(p, 1,
                        "--run.out={}/large --model.layers=900 --model.width=8192 --model.ffn=32768 "
                        "--model.vocab=100000"));
    program_expect(p, "error: this run needs ");
    program_expect(p, " GiB a rank, ");
    program_expect(p, "try device.recompute");
    expect_times(p, "error: ", 1);
    assert_false(file_exists(p, "large/checkpoints"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_checkpoint_that_does_not_fit),
        cmocka_unit_test(test_two_ranks),
        cmocka_unit_test(test_many_sizes),
        cmocka_unit_test(test_a_read_only_disk),
        cmocka_unit_test(test_more_memory_than_there_is),
    };
    return cmocka_run_group_tests(tests, setup, program_teardown);
}
