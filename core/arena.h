/* core: memory that is planned before it is allocated.
 *
 * A room describes what it needs by calling arena_take in a fixed order. The same calls run twice: first on a measuring
 * arena (no base: every pointer is NULL, only bytes are counted, by name), then on the real one. Nothing is allocated
 * after the run's first step. Blocks are 256-byte aligned; debug and sanitizer builds put guarded gaps between them and
 * fill fresh memory with NaN patterns. */
#pragma once

#include "core/device.h"
#include "core/status.h"

#include <stddef.h>

enum { ARENA_LABELS_MAX = 256 };

struct arena_label {
    char name[48];
    size_t bytes;
};

struct arena {
    char name[32];
    unsigned char *base;   /* owns; NULL while measuring */
    enum device_kind kind; /* where base lies */
    size_t used;
    size_t capacity;
    size_t high_water; /* most ever used, for scratch arenas that are rewound */
    int n_labels;
    struct arena_label labels[ARENA_LABELS_MAX]; /* in order of first use; they add up to high_water */
};

/* A measuring arena. After the calls, `high_water` is the capacity to open the real one with. */
void arena_measure(struct arena *arena, const char *name);

/* A real arena of `capacity` bytes. Fails with ERR_NOMEM, naming the arena and its bytes. */
MUST_CHECK enum status arena_open(struct arena *arena, const char *name, size_t capacity);
/* The same in the memory of a GPU (CUDA builds): blocks are 256-byte aligned whatever the kind, so that both have one
 * plan. */
MUST_CHECK enum status arena_open_on(struct arena *arena, const char *name, size_t capacity, enum device_kind kind);
void arena_close(struct arena *arena);

/* The next `bytes` of the arena, counted under `label`. NULL while measuring. More than was planned is our own mistake:
 * it ASSERTs. */
void *arena_take(struct arena *arena, const char *label, size_t bytes);

/* Scratch use: remember `used`, take, give back by rewinding. What lies behind the mark must not be touched any more.
 */
size_t arena_mark(const struct arena *arena);
void arena_rewind(struct arena *arena, size_t mark);

/* Logs a table of bytes by label at info level. */
void arena_report(const struct arena *arena);
