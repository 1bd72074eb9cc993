/* core: JSON by jansson, with our errors. The only room that includes jansson.h; others reach its API through here. */
#pragma once

#include "core/status.h"

#include <jansson.h>

/* Reads a whole file of at most 256 MiB; `*root` is the caller's, to json_decref. Duplicate keys and broken text fail
 * with ERR_DATA naming file, line and column; ERR_IO otherwise. */
MUST_CHECK enum status json_read_file(const char *path, json_t **root);

/* As json_read_file on memory; `name` stands for the file in messages. */
MUST_CHECK enum status json_read_text(const char *name, const char *text, size_t bytes, json_t **root);

/* Writes `root`, indented, to path.tmp, fsyncs, renames. Fails with ERR_IO. */
MUST_CHECK enum status json_write_file(const char *path, const json_t *root);

/* A JSON number, or null for NaN and infinities (jansson refuses them). Never NULL. */
json_t *json_finite(double x);

/* Typed reads of an object member; a missing member or another type fails with ERR_DATA naming `name` and the key. */
MUST_CHECK enum status json_get_int(const json_t *object, const char *name, const char *key, int64_t *value);
MUST_CHECK enum status json_get_double(const json_t *object, const char *name, const char *key, double *value);
MUST_CHECK enum status json_get_string(const json_t *object, const char *name, const char *key, const char **value);
