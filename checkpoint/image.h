/* checkpoint: a safetensors file before it exists: its header, and where its tensors lie in memory. Private to the
 * room. Any rank can write any extent of it in place. */
#pragma once

#include "checkpoint/checkpoint.h"
#include "checkpoint/manifest.h"

struct image {
    struct safetensors layout;
    const struct checkpoint_tensor *tensors; /* borrows */
};

MUST_CHECK enum status image_open(struct image *image, const struct checkpoint_tensor *tensors, int count);
void image_close(struct image *image);

/* Makes the file at `path` in its full size, reserving the space where the file system can. */
MUST_CHECK enum status image_create(const struct image *image, const char *path);

/* Writes extents [first, last) into the file and fsyncs it; digests[0] is that of extent `first`. */
MUST_CHECK enum status image_write(const struct image *image, const char *path, int64_t first, int64_t last,
                                   struct digest *digests);
