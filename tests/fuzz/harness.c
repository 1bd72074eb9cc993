/* tests/fuzz: what the fuzz targets share. */
#include "core/log.h"
#include "tests/fuzz/fuzz.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerInitialize(int *argc, char ***argv);

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    static const char option[] = "--seeds=";
    if (*argc == 2 && strncmp((*argv)[1], option, sizeof option - 1) == 0) {
        fuzz_seeds((*argv)[1] + sizeof option - 1);
        exit(0);
    }
    log_set_level((enum log_level)(LOG_ERROR + 1));
    return 0;
}

void fuzz_store(const char *path, const void *bytes, size_t n)
{
    FILE *out = fopen(path, "wb");
    ASSERT(out != NULL);
    size_t written = fwrite(bytes, 1, n, out);
    ASSERT(written == n && fclose(out) == 0);
}

void fuzz_seed(const char *folder, const char *name, const void *bytes, size_t n)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    fuzz_store(path, bytes, n);
}

void fuzz_word(const char *folder, const char *word)
{
    char path[4096];
    snprintf(path, sizeof path, "%s.dict", folder);
    FILE *out = fopen(path, "a");
    ASSERT(out != NULL);
    fprintf(out, "\"%s\"\n", word);
    ASSERT(fclose(out) == 0);
}

void fuzz_refused(enum status found, enum status status, const char *path)
{
    const char *message = status_last_message();
    ASSERT(found == status);
    ASSERT(strncmp(message, path, strlen(path)) == 0);
    ASSERT(strchr(message, '\n') == NULL);
}

uint64_t fuzz_take(struct fuzz_bytes *bytes, int n)
{
    uint64_t value = 0;
    for (int i = 0; i < n && bytes->left > 0; i++, bytes->at++, bytes->left--) {
        value |= (uint64_t)*bytes->at << (8 * i);
    }
    return value;
}
