/* The whole step on two GPUs: the updates of one GPU but for rounding, and the same on both. */
#include "core/gemm_cuda.h"
#include "core/log.h"
#include "tests/dist/sockets.h"
#include "tests/test.h"
#include "train/plan.h"
#include "train/step.h"
#include "train/trainer_cuda.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

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

struct outcome {
    double losses[UPDATES], norm; /* the norm of the last update */
    int64_t choices;              /* a hash of the algorithms of all products */
    int planned;
};

static enum status hash_choices(const struct trainer *t, struct outcome *o)
{
    char *text;
    TRY(gemm_cuda_export(t->gpu->cuda, &text));
    o->choices = (int64_t)(XXH3_64bits(text, strlen(text)) >> 1);
    o->planned = gemm_cuda_planned(t->gpu->cuda);
    free(text);
    return OK;
}

static enum status run(struct comm *comm, struct outcome *o)
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
        o->losses[u] = r.loss;
        o->norm = r.grad_norm;
    }
    if (status == OK) {
        status = hash_choices(t, o);
    }
    trainer_close(t);
    free(t);
    free(config);
    return status;
}

/* Exit status: 0 all well; 1 a run failed; 2 another loss than on one GPU; 3 the ranks' losses differ; 4 their products
 * do, which have no folder to share. Each run times its products anew, so that the two may choose differently: losses
 * agree closely, not by bits; of the first update, whose weights are the same, but for the order of sums. */
static int role(struct comm *comm)
{
    struct comm alone = {.rank = 0, .size = 1, .local_rank = comm->local_rank, .timeout_s = 60};
    struct outcome one, two;
    log_set_level(LOG_WARN);
    if (run(&alone, &one) != OK || run(comm, &two) != OK) {
        return 1;
    }
    bool right = fabs(one.norm - two.norm) < 1e-2 * one.norm && fabs(one.losses[0] - two.losses[0]) < 2e-5;
    for (int u = 0; u < UPDATES; u++) {
        fprintf(stderr, "rank %d, update %d: one GPU %.7f, two %.7f\n", comm->rank, u + 1, one.losses[u],
                two.losses[u]);
        right = right && fabs(one.losses[u] - two.losses[u]) < 2e-3;
    }
    fprintf(stderr, "rank %d: %d products, hash %llx\n", comm->rank, two.planned, (unsigned long long)two.choices);
    double losses[2] = {two.losses[UPDATES - 1], -two.losses[UPDATES - 1]};
    int64_t choices[2] = {two.choices, -two.choices};
    bool same = comm_max_f64(comm, losses, 2) == OK && losses[0] == -losses[1];
    bool alike = comm_max_i64(comm, choices, 2) == OK && choices[0] == -choices[1] && two.planned > 0;
    return !right ? 2 : !same ? 3 : !alike ? 4 : 0;
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
