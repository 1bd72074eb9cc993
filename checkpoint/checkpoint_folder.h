/* checkpoint: the folder that holds `step_XXXXXXXX` directories, and temporary ones beside them. Private to the room.
 */
#pragma once

#include "core/status.h"

#include <limits.h>

struct step_list {
    int count;
    int64_t *steps; /* owns; newest first */
};

/* The steps that have a directory in `folder`, complete or not. A folder that does not exist has none. */
MUST_CHECK enum status step_list_read(struct step_list *list, const char *folder);
void step_list_close(struct step_list *list);

/* folder/name; ERR_IO if that is too long for a path. */
MUST_CHECK enum status path_inside(char path[PATH_MAX], const char *folder, const char *name);

/* folder/step_XXXXXXXX, and folder/.tmp_step_XXXXXXXX, under which one is written and deleted. */
MUST_CHECK enum status step_path(char path[PATH_MAX], const char *folder, int64_t step);
MUST_CHECK enum status step_path_temporary(char path[PATH_MAX], const char *folder, int64_t step);

/* rm -r; a path that does not exist is no error. */
MUST_CHECK enum status remove_tree(const char *path);

/* Removes what killed saves and deletions left: every .tmp_step_*. */
MUST_CHECK enum status remove_leftovers(const char *folder);
