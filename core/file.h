/* core: whole-file writes that a crash cannot tear, and small path helpers. */
#pragma once

#include "core/status.h"

#include <stddef.h>

/* Writes bytes to path.tmp, fsyncs file and folder, renames. Fails with ERR_IO naming path and errno. */
MUST_CHECK enum status file_write_atomic(const char *path, const void *bytes, size_t n);

/* The last step of such a write where the caller wrote `temporary` itself, complete and synced: renames it to `path` in
 * the same folder and syncs the folder. On failure `temporary` is removed, and the file that was at `path` stays. */
MUST_CHECK enum status file_replace(const char *temporary, const char *path);

/* Reads a whole file into malloc'ed memory, NUL-terminated; caller frees. Larger than `limit` fails with ERR_DATA. */
MUST_CHECK enum status file_read_all(const char *path, size_t limit, char **bytes, size_t *n);

/* mkdir -p. */
MUST_CHECK enum status file_make_folders(const char *path);

/* fsync of a folder, after names in it changed. */
MUST_CHECK enum status file_sync_folder(const char *path);
