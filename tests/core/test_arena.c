/* Arenas: what was measured is what is taken, blocks do not touch, and a plan that is exceeded stops the program. */
#include "core/arena.h"

#include "core/log.h"

#include "tests/test.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* The plan of a room as rooms write it. */
static void plan(struct arena *arena, unsigned char *blocks[4])
{
    blocks[0] = arena_take(arena, "weights", 1000);
    blocks[1] = arena_take(arena, "moments", 1);
    blocks[2] = arena_take(arena, "weights", 0);
    blocks[3] = arena_take(arena, "moments", 640);
}

static void test_measured_bytes_are_enough_and_blocks_are_apart(void **state)
{
    (void)state;
    static const size_t sizes[] = {1000, 1, 0, 640};
    unsigned char *blocks[4];
    struct arena arena;
    arena_measure(&arena, "plan");
    plan(&arena, blocks);
    for (int i = 0; i < 4; i++) {
        assert_null(blocks[i]);
    }
    size_t bytes = arena.used;
    assert_int_equal(arena_open(&arena, "plan", bytes), OK);
    plan(&arena, blocks);
    assert_int_equal(arena.used, bytes);
    for (int i = 0; i < 4; i++) {
        assert_int_equal((uintptr_t)blocks[i] % 64, 0);
        assert_true(i == 0 || blocks[i] >= blocks[i - 1] + sizes[i - 1]);
        memset(blocks[i], i, sizes[i]);
    }
    for (int i = 0; i < 4; i++) {
        for (size_t at = 0; at < sizes[i]; at++) {
            assert_int_equal(blocks[i][at], i);
        }
    }
    arena_close(&arena);
    arena_close(&arena);
}

static void test_labels_add_up_to_the_high_water_mark(void **state)
{
    (void)state;
    unsigned char *blocks[4];
    struct arena arena;
    arena_measure(&arena, "labels");
    plan(&arena, blocks);
    size_t mark = arena_mark(&arena);
    for (int step = 0; step < 3; step++) {
        arena_take(&arena, "scratch", 4096);
        arena_rewind(&arena, mark);
    }
    assert_int_equal(arena.used, mark);
    assert_int_equal(arena.n_labels, 3);
    assert_string_equal(arena.labels[1].name, "moments");
    assert_in_range(arena.labels[2].bytes, 4096, 4096 + 256);
    assert_int_equal(arena.labels[0].bytes + arena.labels[1].bytes + arena.labels[2].bytes, arena.high_water);
    log_set_level(LOG_WARN);
    arena_report(&arena);
    log_set_level(LOG_INFO);
}

static void test_rewound_scratch_is_taken_again(void **state)
{
    (void)state;
    struct arena arena;
    assert_int_equal(arena_open(&arena, "scratch", 1024), OK);
    void *kept = arena_take(&arena, "kept", 64);
    size_t mark = arena_mark(&arena);
    void *first = arena_take(&arena, "step", 100);
    arena_rewind(&arena, mark);
    assert_ptr_equal(arena_take(&arena, "step", 200), first);
    assert_ptr_not_equal(first, kept);
    arena_close(&arena);
}

static void test_guarded_builds_hand_out_nans(void **state)
{
    (void)state;
#if ARENA_GUARD
    struct arena arena;
    assert_int_equal(arena_open(&arena, "guarded", 1024), OK);
    float *x = arena_take(&arena, "x", 64);
    assert_true(isnan(x[0]) && isnan(x[15]));
    unsigned char *y = arena_take(&arena, "y", 1);
    assert_true(y >= (unsigned char *)(x + 16) + 64);
    arena_close(&arena);
#else
    skip();
#endif
}

static void test_too_much_memory_fails_with_the_name(void **state)
{
    (void)state;
    struct arena arena;
    assert_int_equal(arena_open(&arena, "weights", SIZE_MAX - 10), ERR_NOMEM);
#ifndef __SANITIZE_ADDRESS__ /* which aborts at such a size, before malloc could refuse */
    assert_int_equal(arena_open(&arena, "weights", SIZE_MAX / 4), ERR_NOMEM);
#endif
    assert_non_null(strstr(status_last_message(), "weights"));
}

/* The status with which a child ends that takes more than was planned, or reads behind a block. */
static int child_status(void (*deed)(struct arena *))
{
    pid_t child = fork();
    if (child == 0) {
        struct arena arena;
        if (!freopen("/dev/null", "w", stderr) || arena_open(&arena, "small", 1024) != OK) {
            _exit(0);
        }
        deed(&arena);
        _exit(0);
    }
    int status = 0;
    assert_true(child > 0 && waitpid(child, &status, 0) == child);
    return status;
}

static void take_too_much(struct arena *arena)
{
    arena_take(arena, "too much", 1025);
}

static void test_more_than_planned_stops_the_program(void **state)
{
    (void)state;
    int status = child_status(take_too_much);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

static void read_behind(struct arena *arena)
{
    volatile char *x = arena_take(arena, "x", 10);
    (void)x[10];
}

static void read_rewound(struct arena *arena)
{
    volatile char *x = arena_take(arena, "x", 10);
    arena_rewind(arena, 0);
    (void)x[0];
}

static void test_sanitizer_sees_reads_outside_blocks(void **state)
{
    (void)state;
#ifdef __SANITIZE_ADDRESS__
    assert_int_not_equal(child_status(read_behind), 0);
    assert_int_not_equal(child_status(read_rewound), 0);
#else
    assert_int_equal(child_status(read_behind), 0);
    assert_int_equal(child_status(read_rewound), 0);
#endif
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_measured_bytes_are_enough_and_blocks_are_apart),
        cmocka_unit_test(test_labels_add_up_to_the_high_water_mark),
        cmocka_unit_test(test_rewound_scratch_is_taken_again),
        cmocka_unit_test(test_guarded_builds_hand_out_nans),
        cmocka_unit_test(test_too_much_memory_fails_with_the_name),
        cmocka_unit_test(test_more_than_planned_stops_the_program),
        cmocka_unit_test(test_sanitizer_sees_reads_outside_blocks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
