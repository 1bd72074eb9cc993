/* tests/fuzz: what the fuzz targets share. A target is a program that libFuzzer drives; called with --seeds=FOLDER it
 * writes its seeds there instead, made from valid files. Targets work in the current folder, which fuzz.sh makes and
 * removes. A finding is an ASSERT, a sanitizer's report, a leak, a hang or an allocation out of proportion. */
#pragma once

#include "core/status.h"

#include <stddef.h>
#include <stdint.h>

/* Each target has these two. */
void fuzz_seeds(const char *folder);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

/* Writes one seed. */
void fuzz_seed(const char *folder, const char *name, const void *bytes, size_t n);

/* Adds a word to FOLDER.dict, libFuzzer's dictionary: what mutations insert. Letters that need no escape. */
void fuzz_word(const char *folder, const char *word);

/* Writes a file (no fsync: millions of them are written). */
void fuzz_store(const char *path, const void *bytes, size_t n);

/* Bad bytes were refused as they must be: with `status`, and one line that starts with the name of the file. */
void fuzz_refused(enum status found, enum status status, const char *path);

/* The input as a sequence of small numbers; zeros at its end. */
struct fuzz_bytes {
    const uint8_t *at;
    size_t left;
};
uint64_t fuzz_take(struct fuzz_bytes *bytes, int n);
