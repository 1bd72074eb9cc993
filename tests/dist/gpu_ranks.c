/* The whole step on two GPUs: the updates of one GPU but for rounding, and the same on both. */
#include "core/log.h"
#include "tests/dist/sockets.h"
#include "tests/test.h"
#include "train/plan.h"
#include "train/step.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { UPDATES = 5 };

/* Random tokens: the update's samples do not depend on the number of ranks. */
static enum status read_config(struct config *config, const struct device *device, int ranks)
{
    char *keys[] = {"run.mode=step_time", "run.steps=5",        "model.layers=2",   "model.width=128",  "model.heads=2",
                    "model.kv_heads=1",   "model.head_dim=64",  "model.ffn=256",    "model.vocab=320",  "optim.lr=3e-3",
                    "data.batch=4",       "data.micro_batch=1", "data.seq_len=128", "schedule.warmup=2"};
    config_init(config);
    TRY(config_add_overrides(config, keys, sizeof keys / sizeof keys[0]));
    TRY(config_finish(config));
    return plan_check(config, ranks, device);
}

/* Losses of the updates; the norm of the last. */
static enum status run(struct comm *comm, double *losses, double *norm)
{
    struct config *config = calloc(1, sizeof *config);
    struct trainer *t = calloc(1, sizeof *t);
    struct device device;
    ASSERT(config != NULL && t != NULL);
    TRY(device_open(&device, "cuda", comm->local_rank));
    TRY(read_config(config, &device, comm->size));
    enum status status = trainer_open(t, config, comm, &device);
    for (int u = 0; u < UPDATES && status == OK; u++) {
        struct step_result r;
        status = step_run(t, NAN, &r);
        losses[u] = r.loss;
        *norm = r.grad_norm;
    }
    trainer_close(t);
    free(t);
    free(config);
    return status;
}

/* Exit status: 0 all well; 1 a run failed; 2 another loss than on one GPU; 3 the ranks' losses differ. Each run times
 * its products anew, so that the two may choose differently: losses agree closely, not by bits. */
static int role(struct comm *comm)
{
    struct comm alone = {.rank = 0, .size = 1, .local_rank = comm->local_rank, .timeout_s = 60};
    double one[UPDATES], two[UPDATES], norm_one, norm_two;
    log_set_level(LOG_WARN);
    if (run(&alone, one, &norm_one) != OK || run(comm, two, &norm_two) != OK) {
        return 1;
    }
    bool right = fabs(norm_one - norm_two) < 1e-2 * norm_one;
    for (int u = 0; u < UPDATES; u++) {
        fprintf(stderr, "rank %d, update %d: one GPU %.7f, two %.7f\n", comm->rank, u + 1, one[u], two[u]);
        right = right && fabs(one[u] - two[u]) < 2e-3;
    }
    double extremes[2] = {two[UPDATES - 1], -two[UPDATES - 1]};
    bool same = comm_max_f64(comm, extremes, 2) == OK && extremes[0] == -extremes[1];
    return !right ? 2 : !same ? 3 : 0;
}

static void test_two_gpus_train_as_one(void **state)
{
    (void)state;
    if (!sockets_two_gpus()) {
        skip();
    }
    assert_int_equal(sockets_run(role), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_two_gpus_train_as_one),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
