/* checkpoint: what a checkpoint folder must hold: the size of every file and a hash of each of its 64 MiB extents.
 * Extents let ranks hash what they write, and let a message name the damaged place. XXH3-128 finds accidents, not
 * attackers. */
#pragma once

#include "core/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

static const uint64_t manifest_extent_bytes = (uint64_t)64 << 20;
enum { MANIFEST_FILES_MAX = 16, MANIFEST_PATH_BYTES = 64 };

struct digest {
    unsigned char bytes[16]; /* XXH3-128 in canonical (big-endian) order */
};

struct manifest_file {
    char path[MANIFEST_PATH_BYTES]; /* within the folder */
    uint64_t bytes;
    int64_t extents;
    struct digest *digests; /* owns */
};

struct manifest {
    int count;
    struct manifest_file files[MANIFEST_FILES_MAX];
};

int64_t manifest_extents(uint64_t bytes);

/* Adds a file of `bytes` with room for its digests, to be filled in by the caller. */
MUST_CHECK enum status manifest_add(struct manifest *manifest, const char *path, uint64_t bytes,
                                    struct manifest_file **file);
/* Adds a file that lies in `folder`, reading it for its hashes. */
MUST_CHECK enum status manifest_add_written(struct manifest *manifest, const char *folder, const char *path);

/* folder/manifest.json, durable. */
MUST_CHECK enum status manifest_write(const struct manifest *manifest, const char *folder);
MUST_CHECK enum status manifest_read(struct manifest *manifest, const char *folder);

/* Compares the files of `folder` with the manifest: sizes, and hashes if asked for. ERR_DATA names file, extent,
 * expected, found. config.json, state.json and both tensor files must be listed; other unlisted files are
 * ignored. */
MUST_CHECK enum status manifest_check(const struct manifest *manifest, const char *folder, bool hashes);

void manifest_close(struct manifest *manifest);
