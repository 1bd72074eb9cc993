/* tests: an empty folder of one test, removed with all that is in it. */
#pragma once

enum { SCRATCH_PATH_MAX = 512 };

/* Setup and teardown of cmocka; *state is the folder's path. */
int scratch_folder_open(void **state);
int scratch_folder_close(void **state);

/* folder/name, written to `path` and returned. */
const char *scratch_path(void **state, const char *name, char path[SCRATCH_PATH_MAX]);
