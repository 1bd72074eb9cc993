/* checkpoint: safetensors files. A header is computed first, so that byte ranges can be written in place by anyone. */
#pragma once

#include "core/tensor.h"

enum { SAFETENSORS_NAME_BYTES = 96, SAFETENSORS_RANK_MAX = 4 };

struct safetensors_entry {
    char name[SAFETENSORS_NAME_BYTES];
    enum dtype dtype;
    int rank;
    int64_t shape[SAFETENSORS_RANK_MAX];
    uint64_t offset, bytes; /* of the tensor's data, from the start of the file */
};

struct safetensors {
    int count;
    struct safetensors_entry *entries; /* owns; in file order */
    uint64_t header_bytes, file_bytes; /* header: the 8-byte length, JSON, padding to 8 */
    char *header;                      /* owns; NULL after safetensors_read_header */
};

/* Lays out `count` entries (name, dtype, rank, shape filled in) in order: fills offsets and the header, with metadata
 * "format": "pt". Fails with ERR_DATA for an empty, repeated or non-UTF-8 name, ERR_NOMEM. */
MUST_CHECK enum status safetensors_layout(struct safetensors *file, const struct safetensors_entry *entries, int count);

/* Reads and checks a file's header: lengths, overlaps, holes, dtypes, shapes, duplicate names. ERR_DATA names file and
 * tensor, ERR_IO the system's reason. */
MUST_CHECK enum status safetensors_read_header(struct safetensors *file, const char *path);
const struct safetensors_entry *safetensors_find(const struct safetensors *file, const char *name);
void safetensors_close(struct safetensors *file);

/* "BF16 (64, 32)", for messages. */
void safetensors_describe(const struct safetensors_entry *entry, char *text, size_t bytes);
