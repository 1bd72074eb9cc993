#include "tests/core/scratch_folder.h"

#include "tests/test.h"

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int scratch_folder_open(void **state)
{
    char *folder = malloc(sizeof "/tmp/gpt8b_test_XXXXXX");
    if (!folder) {
        return 1;
    }
    snprintf(folder, sizeof "/tmp/gpt8b_test_XXXXXX", "/tmp/gpt8b_test_XXXXXX");
    *state = folder;
    return mkdtemp(folder) ? 0 : 1;
}

static int remove_entry(const char *path, const struct stat *info, int type, struct FTW *place)
{
    (void)info, (void)type, (void)place;
    return remove(path);
}

int scratch_folder_close(void **state)
{
    int failed = nftw(*state, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
    free(*state);
    return failed;
}

const char *scratch_path(void **state, const char *name, char path[SCRATCH_PATH_MAX])
{
    snprintf(path, SCRATCH_PATH_MAX, "%s/%s", (const char *)*state, name);
    return path;
}
