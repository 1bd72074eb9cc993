/* comm: one rank, several ranks, and what happens when a rank is missing. */
#include "dist/comm.h"
#include "tests/dist/ranks.h"
#include "tests/test.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Checks of the roles below, which run outside cmocka: the exit status tells. */
#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "rank check failed: %s, line %d\n", #condition, __LINE__);                                 \
            comm_abort(&comm, 9);                                                                                      \
        }                                                                                                              \
    } while (0)

static unsigned char pattern(size_t i, int from)
{
    return (unsigned char)(i * 31 + (i >> 9) + (size_t)from);
}

static int role_collectives(struct comm comm)
{
    int64_t n = comm.size;
    int64_t sums[2] = {comm.rank + 1, (int64_t)1 << (40 + comm.rank)};
    CHECK(comm_sum_i64(&comm, sums, 2) == OK);
    CHECK(sums[0] == n * (n + 1) / 2 && sums[1] == (((int64_t)1 << n) - 1) << 40);
    int64_t most[2] = {comm.rank == 1 ? 7 : -7, -100 - comm.rank};
    CHECK(comm_max_i64(&comm, most, 2) == OK);
    CHECK(most[0] == 7 && most[1] == -100);
    double high[2] = {-1.5 - comm.rank, comm.rank == comm.size - 1 ? NAN : 3};
    CHECK(comm_max_f64(&comm, high, 2) == OK);
    CHECK(high[0] == -1.5 && isnan(high[1]));
    double total[1] = {0.5 + comm.rank};
    CHECK(comm_sum_f64(&comm, total, 1) == OK);
    CHECK(total[0] == 0.5 * (double)n + (double)(n * (n - 1) / 2));
    for (int root = 0; root < comm.size; root++) {
        char text[32] = "";
        snprintf(text, sizeof text, "root %03d", comm.rank);
        CHECK(comm_broadcast(&comm, text, sizeof text, root) == OK);
        char expected[32] = "";
        snprintf(expected, sizeof expected, "root %03d", root);
        CHECK(strcmp(text, expected) == 0);
    }
    CHECK(comm_barrier(&comm) == OK);
    return 0;
}

/* Sizes around the pieces that large messages are cut into. */
static int role_large(struct comm comm)
{
    const size_t sizes[] = {0, 1, ((size_t)64 << 20) - 1, (size_t)64 << 20, ((size_t)128 << 20) + 3};
    unsigned char *bytes = malloc(sizes[4] + 1);
    CHECK(bytes != NULL);
    for (size_t s = 0; s < 5; s++) {
        memset(bytes, 0, sizes[4] + 1);
        if (comm.rank == 0) {
            for (size_t i = 0; i < sizes[s]; i++) {
                bytes[i] = pattern(i, 5);
            }
            CHECK(comm_send(&comm, bytes, sizes[s], 1) == OK);
        } else {
            CHECK(comm_recv(&comm, bytes, sizes[s], 0) == OK);
            for (size_t i = 0; i < sizes[s]; i++) {
                CHECK(bytes[i] == pattern(i, 5));
            }
            CHECK(bytes[sizes[s]] == 0);
        }
    }
    free(bytes);
    return 0;
}

static int role_exits_early(struct comm comm)
{
    if (comm.rank == 1) {
        _exit(1);
    }
    comm_abort(&comm, status_exit_code(comm_barrier(&comm)));
}

/* The rank lives but never comes: only our deadline can end the others. */
static int role_hangs(struct comm comm)
{
    if (comm.rank == comm.size - 1) {
        pause();
    }
    int64_t one = 1;
    comm_abort(&comm, status_exit_code(comm_sum_i64(&comm, &one, 1)));
}

static int role_receiver_hangs(struct comm comm)
{
    if (comm.rank == 1) {
        pause();
    }
    size_t bytes = (size_t)64 << 20; /* too large to be buffered */
    comm_abort(&comm, status_exit_code(comm_broadcast(&comm, calloc(bytes, 1), bytes, 0)));
}

/* The rank that waits is itself stopped, for longer than the time-out; what it waits for comes soon after. */
static int role_is_stopped(struct comm comm)
{
    int64_t pid = getpid();
    comm.timeout_s = 4;
    if (comm.rank == 0) {
        CHECK(comm_send(&comm, &pid, sizeof pid, 1) == OK);
        CHECK(comm_recv(&comm, &pid, sizeof pid, 1) == OK);
        return 0;
    }
    CHECK(comm_recv(&comm, &pid, sizeof pid, 0) == OK);
    nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
    CHECK(kill((pid_t)pid, SIGSTOP) == 0);
    nanosleep(&(struct timespec){.tv_sec = 5}, NULL);
    CHECK(kill((pid_t)pid, SIGCONT) == 0);
    nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
    CHECK(comm_send(&comm, &pid, sizeof pid, 0) == OK);
    return 0;
}

static int role_disagrees(struct comm comm)
{
    char text[8] = "seven..";
    enum status status = comm.rank == 0 ? comm_send(&comm, text, 7, 1) : comm_recv(&comm, text, 8, 0);
    if (status != OK) {
        comm_abort(&comm, status_exit_code(status));
    }
    return 0;
}

static int role_close_alone(struct comm comm)
{
    if (comm.rank == 1) {
        pause();
    }
    comm_close(&comm);
    return 0;
}

static const struct {
    const char *name;
    int (*run)(struct comm comm);
} roles[] = {
    {"collectives", role_collectives},       {"large", role_large},
    {"exits_early", role_exits_early},       {"hangs", role_hangs},
    {"receiver_hangs", role_receiver_hangs}, {"is_stopped", role_is_stopped},
    {"disagrees", role_disagrees},           {"close_alone", role_close_alone},
};

static int run_role(const char *name, int *argc, char ***argv)
{
    struct comm comm = {0};
    enum status status = comm_open(&comm, argc, argv, strcmp(name, "large") == 0 ? 30 : 2);
    if (status != OK) {
        return 100 + status_exit_code(status);
    }
    for (size_t i = 0; i < sizeof roles / sizeof roles[0]; i++) {
        if (strcmp(roles[i].name, name) == 0) {
            int code = roles[i].run(comm);
            comm_close(&comm);
            return code;
        }
    }
    return 99;
}

static void test_one_rank_copies(void **state)
{
    (void)state;
    struct comm comm;
    assert_int_equal(comm_open(&comm, NULL, NULL, 5), OK);
    assert_int_equal(comm.rank, 0);
    assert_int_equal(comm.size, 1);
    int64_t i = -3;
    double x = NAN;
    assert_int_equal(comm_sum_i64(&comm, &i, 1), OK);
    assert_int_equal(comm_max_i64(&comm, &i, 1), OK);
    assert_int_equal(i, -3);
    assert_int_equal(comm_max_f64(&comm, &x, 1), OK);
    assert_true(isnan(x));
    x = 0.1;
    assert_int_equal(comm_sum_f64(&comm, &x, 1), OK);
    assert_true(x == 0.1);
    assert_int_equal(comm_broadcast(&comm, &x, sizeof x, 0), OK);
    assert_int_equal(comm_barrier(&comm), OK);
    comm_close(&comm);
    comm_close(&comm);
}

static void test_a_timeout_must_be_positive(void **state)
{
    (void)state;
    struct comm comm;
    const double bad[] = {0, -1, NAN, INFINITY};
    for (int i = 0; i < 4; i++) {
        assert_int_equal(comm_open(&comm, NULL, NULL, bad[i]), ERR_CONFIG);
        assert_non_null(strstr(status_last_message(), "dist.timeout_s"));
    }
}

/* What a launcher leaves in the environment, without the launcher. */
static void test_a_build_without_mpi_refuses_to_train_n_times(void **state)
{
    (void)state;
    if (comm_has_mpi()) {
        skip();
    }
    const char *const variables[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"};
    for (int i = 0; i < 3; i++) {
        struct comm comm;
        setenv(variables[i], "4", 1);
        assert_int_equal(comm_open(&comm, NULL, NULL, 5), ERR_COMM);
        assert_non_null(strstr(status_last_message(), "4 processes"));
        assert_non_null(strstr(status_last_message(), "MPI=1"));
        unsetenv(variables[i]);
    }
}

static void test_a_batch_script_is_one_rank(void **state)
{
    (void)state;
    struct comm comm;
    setenv("SLURM_NTASKS", "8", 1);
    assert_int_equal(comm_open(&comm, NULL, NULL, 5), OK);
    unsetenv("SLURM_NTASKS");
    assert_int_equal(comm.size, 1);
    comm_close(&comm);
}

static void test_collectives_of_2_3_4_ranks(void **state)
{
    (void)state;
    assert_int_equal(ranks_run(2, "collectives"), 0);
    assert_int_equal(ranks_run(3, "collectives"), 0);
    assert_int_equal(ranks_run(4, "collectives"), 0);
}

static void test_large_messages_arrive_whole(void **state)
{
    (void)state;
    assert_int_equal(ranks_run(2, "large"), 0);
}

static void test_a_rank_that_exits_ends_the_others(void **state)
{
    (void)state;
    time_t start = time(NULL);
    int code = ranks_run(3, "exits_early");
    assert_true(code > 0);
    assert_true(time(NULL) - start < 20);
}

static void test_a_rank_that_hangs_is_named(void **state)
{
    (void)state;
    assert_int_equal(ranks_run(4, "hangs"), 2);
    assert_non_null(strstr(ranks_output, "comm_sum_i64: rank 0 heard nothing from rank 3"));
    assert_null(strstr(ranks_output, "from rank 0"));
    assert_int_equal(ranks_run(2, "receiver_hangs"), 2);
    assert_non_null(strstr(ranks_output, "comm_broadcast: rank 0 heard nothing from rank 1"));
    assert_int_equal(ranks_run(2, "close_alone"), 2);
    assert_non_null(strstr(ranks_output, "comm_barrier: rank 0 heard nothing from rank 1"));
}

static void test_a_stopped_rank_blames_nobody(void **state)
{
    (void)state;
    assert_int_equal(ranks_run(2, "is_stopped"), 0);
}

static void test_ranks_that_disagree_on_a_size_end(void **state)
{
    (void)state;
    assert_int_equal(ranks_run(2, "disagrees"), 2);
    assert_non_null(strstr(ranks_output, "expected 8 bytes from rank 0, found 7"));
}

int main(int argc, char **argv)
{
    if (argc > 1) {
        return run_role(argv[1], &argc, &argv);
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_rank_copies),
        cmocka_unit_test(test_a_timeout_must_be_positive),
        cmocka_unit_test(test_a_build_without_mpi_refuses_to_train_n_times),
        cmocka_unit_test(test_a_batch_script_is_one_rank),
        cmocka_unit_test(test_collectives_of_2_3_4_ranks),
        cmocka_unit_test(test_large_messages_arrive_whole),
        cmocka_unit_test(test_a_rank_that_exits_ends_the_others),
        cmocka_unit_test(test_a_rank_that_hangs_is_named),
        cmocka_unit_test(test_a_stopped_rank_blames_nobody),
        cmocka_unit_test(test_ranks_that_disagree_on_a_size_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
