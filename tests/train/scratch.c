#include "tests/train/scratch.h"

#include "core/log.h"

#include <stdio.h>
#include <stdlib.h>

static char folder[64];

int scratch_make(void **state)
{
    (void)state;
    snprintf(folder, sizeof folder, "/tmp/gpt8b_train_XXXXXX");
    log_set_level((enum log_level)(LOG_ERROR + 1));
    return mkdtemp(folder) == NULL;
}

int scratch_remove(void **state)
{
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", folder);
    return system(command);
}

const char *scratch_folder(void)
{
    return folder;
}

const char *scratch_path(const char *name)
{
    static char paths[4][128];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}
