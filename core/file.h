/* core: whole-file writes that a crash cannot tear, and small path helpers. */
#pragma once

#include "core/status.h"

#include <stddef.h>

/* Writes bytes to path.tmp, fsyncs file and folder, renames. Fails with ERR_IO naming path and errno. */
MUST_CHECK enum status file_write_atomic(const char *path, const void *bytes, size_t n);

/* The end of such a write by other means: `temporary`, complete and synced, takes the name `path` in the same folder,
 * which is synced. If it cannot, it is removed, and the file that was there stays. */
MUST_CHECK enum status file_replace(const char *temporary, const char *path);

/* Reads a whole file into malloc'ed memory, NUL-terminated; caller frees. Larger than `limit` fails with ERR_DATA. */
MUST_CHECK enum status file_read_all(const char *path, size_t limit, char **bytes, size_t *n);

/* mkdir -p. */
MUST_CHECK enum status file_make_folders(const char *path);

/* fsync of a folder, after names in it changed. */
MUST_CHECK enum status file_sync_folder(const char *path);
