/* tests/checkpoint: a folder that a test may fill, and bytes of files. */
#pragma once

#include <stddef.h>

/* A fresh folder below /tmp; removed by scratch_remove. */
const char *scratch_make(void);
void scratch_remove(void);

/* folder/name in one of a few static buffers. */
const char *scratch_path(const char *folder, const char *name);

void scratch_write(const char *path, const void *bytes, size_t n);
long scratch_size(const char *path); /* -1: no such file */
void scratch_flip(const char *path, long at);
