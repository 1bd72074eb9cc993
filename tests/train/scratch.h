/* tests/train: a folder below /tmp for the tests of a program, with the log kept quiet. */
#pragma once

/* Setup and teardown of a group of cmocka; the second removes the folder with all that is in it. */
int scratch_make(void **state);
int scratch_remove(void **state);

const char *scratch_folder(void);

/* folder/name, in one of a few static buffers. */
const char *scratch_path(const char *name);
