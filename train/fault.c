/* train: planted faults. */
#include "train/fault.h"

#include "core/log.h"
#include "train/trainer.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char *const fault_names[] = {"none", "nan_grad", "inf_grad", "nan_weight", "exit", "hang", "kill", NULL};

enum status fault_parse(struct fault *fault, const char *text, int ranks)
{
    char kind[32];
    long long update;
    int rank, end = 0;
    *fault = (struct fault){.kind = FAULT_NONE};
    if (text[0] == '\0') {
        return OK;
    }
    if (sscanf(text, "%31[a-z_]@%18lld:%9d%n", kind, &update, &rank, &end) != 3 || text[end] != '\0' || update < 1) {
        return status_fail(ERR_CONFIG,
                           "debug.fault = \"%s\": expected KIND@UPDATE:RANK with an update from 1, as in nan_grad@3:1",
                           text);
    }
    int found = FAULT_NAN_GRAD;
    while (fault_names[found] != NULL && strcmp(fault_names[found], kind) != 0) {
        found++;
    }
    if (fault_names[found] == NULL) {
        return status_fail(ERR_CONFIG,
                           "debug.fault = \"%s\": %s is none of nan_grad, inf_grad, nan_weight, exit, hang, kill", text,
                           kind);
    }
    if (rank < 0 || rank >= ranks) {
        return status_fail(ERR_CONFIG, "debug.fault = \"%s\": no rank %d among %d", text, rank, ranks);
    }
    *fault = (struct fault){.kind = (enum fault_kind)found, .update = update, .rank = rank};
    return OK;
}

static bool strikes(const struct trainer *t, int64_t update)
{
    return t->fault.kind != FAULT_NONE && t->fault.update == update && t->fault.rank == t->comm->rank;
}

/* Where numbers are broken: in the middle of the middle tensor, a matrix. */
static size_t target(const struct trainer *t)
{
    const struct adamw_segment *segment = &t->segments[t->params.count / 2];
    return segment->offset + segment->elements / 2;
}

static void tell(const struct trainer *t)
{
    log_warn("debug.fault: %s planted in update %lld, rank %d", fault_names[t->fault.kind], (long long)t->fault.update,
             t->fault.rank);
}

void fault_before_update(struct trainer *t, int64_t update)
{
    if (!strikes(t, update)) {
        return;
    }
    switch (t->fault.kind) {
    case FAULT_NONE:
    case FAULT_NAN_GRAD:
    case FAULT_INF_GRAD:
        return;
    case FAULT_NAN_WEIGHT:
        tell(t);
        t->engine->spoil_weight(t, target(t));
        return;
    case FAULT_EXIT:
        tell(t);
        _exit(1);
    case FAULT_HANG:
        tell(t);
        for (;;) {
            pause(); /* signals that only ask to stop change nothing */
        }
    case FAULT_KILL:
        tell(t);
        raise(SIGKILL);
    }
}

bool fault_in_gradient(const struct trainer *t, int64_t update, size_t *element, float *value)
{
    bool here = strikes(t, update) && (t->fault.kind == FAULT_NAN_GRAD || t->fault.kind == FAULT_INF_GRAD);
    if (here) {
        tell(t);
        *element = target(t);
        *value = t->fault.kind == FAULT_NAN_GRAD ? NAN : INFINITY;
    }
    return here;
}
