/* checkpoint: safetensors files. A header is computed first, so that byte ranges can be written in place by anyone. */
#pragma once

#include "core/tensor.h"

struct safetensors_entry {
    char name[96];
    enum dtype dtype;
    int rank;
    int64_t shape[4];
    uint64_t offset, bytes; /* of the tensor's data, from the start of the file */
};

struct safetensors {
    int count;
    struct safetensors_entry *entries; /* owns; in file order */
    uint64_t header_bytes, file_bytes;
    char *header; /* owns; header_bytes: the 8-byte length, JSON, padding to 8 */
};

/* Lays out `count` entries (name, dtype, rank, shape filled in) in order: fills offsets and the header.
 * `metadata` is "format":"pt" by default. */
MUST_CHECK enum status safetensors_layout(struct safetensors *file, const struct safetensors_entry *entries, int count);

/* Reads and checks a file's header: lengths, overlaps, holes, dtypes, duplicate names. ERR_DATA names file and tensor.
 */
MUST_CHECK enum status safetensors_read_header(struct safetensors *file, const char *path);
const struct safetensors_entry *safetensors_find(const struct safetensors *file, const char *name);
void safetensors_close(struct safetensors *file);
