/* core: arenas. Measuring and real arenas run the same arithmetic, so that what was planned is what is taken. */
#include "core/arena.h"

#include "core/log.h"
#if WITH_CUDA
#include "core/cuda.h"
#endif

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef ARENA_GUARD
#define ARENA_GUARD 0
#endif

/* Guarded builds leave a gap behind each block. Under AddressSanitizer everything that is not taken is poisoned: gaps,
 * the tail of a block up to its alignment, and what was given back. */
enum { ARENA_ALIGN = 256, ARENA_GAP = ARENA_GUARD ? 256 : 0 };

#if ARENA_GUARD && defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(start, bytes) ((void)(start), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(start, bytes) ((void)(start), (void)(bytes))
#endif

void arena_measure(struct arena *arena, const char *name)
{
    memset(arena, 0, sizeof *arena);
    snprintf(arena->name, sizeof arena->name, "%s", name);
    arena->capacity = SIZE_MAX / 2;
}

enum status arena_open_on(struct arena *arena, const char *name, size_t capacity, enum device_kind kind)
{
    if (kind == DEVICE_CPU) {
        return arena_open(arena, name, capacity);
    }
#if WITH_CUDA
    void *base;
    size_t whole = (capacity + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN;
    TRY(cuda_alloc(&base, whole ? whole : ARENA_ALIGN, name));
    arena_measure(arena, name);
    arena->base = base;
    arena->kind = kind;
    arena->capacity = whole;
    return OK;
#else
    return status_fail(ERR_UNSUPPORTED, "arena %s: this build has no GPU memory: build with CUDA=1", name);
#endif
}

enum status arena_open(struct arena *arena, const char *name, size_t capacity)
{
    size_t whole = (capacity + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN;
    /* An empty arena still needs a base: NULL means measuring. */
    unsigned char *base = whole < capacity ? NULL : aligned_alloc(ARENA_ALIGN, whole ? whole : ARENA_ALIGN);
    if (!base) {
        return status_fail(ERR_NOMEM, "arena %s: cannot allocate %zu bytes (%.2f GiB); choose a smaller model or batch",
                           name, capacity, (double)capacity / 0x1p30);
    }
    arena_measure(arena, name);
    arena->base = base;
    arena->capacity = whole;
    ASAN_POISON_MEMORY_REGION(base, whole);
    return OK;
}

void arena_close(struct arena *arena)
{
#if WITH_CUDA
    if (arena->kind == DEVICE_CUDA) {
        cuda_free(arena->base);
        arena->base = NULL;
    }
#endif
    if (arena->base) {
        ASAN_UNPOISON_MEMORY_REGION(arena->base, arena->capacity);
        free(arena->base);
    }
    memset(arena, 0, sizeof *arena);
}

/* Only growth of the high-water mark counts: the labels then add up to it, however often scratch is rewound. */
static void label_add(struct arena *arena, const char *label, size_t bytes)
{
    struct arena_label wanted = {.bytes = bytes};
    snprintf(wanted.name, sizeof wanted.name, "%s", label);
    for (int i = 0; i < arena->n_labels; i++) {
        if (strcmp(arena->labels[i].name, wanted.name) == 0) {
            arena->labels[i].bytes += bytes;
            return;
        }
    }
    ASSERT(arena->n_labels < ARENA_LABELS_MAX);
    arena->labels[arena->n_labels++] = wanted;
}

void *arena_take(struct arena *arena, const char *label, size_t bytes)
{
    ASSERT(bytes <= SIZE_MAX / 4);
    size_t whole = (bytes + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN + ARENA_GAP;
    ASSERT(whole <= arena->capacity - arena->used);
    unsigned char *block = arena->base ? arena->base + arena->used : NULL;
    arena->used += whole;
    size_t grown = arena->used > arena->high_water ? arena->used - arena->high_water : 0;
    arena->high_water += grown;
    label_add(arena, label, grown);
    if (block && arena->kind == DEVICE_CPU) {
        ASAN_UNPOISON_MEMORY_REGION(block, bytes);
        if (ARENA_GUARD) {
            memset(block, 0xff, bytes); /* a NaN in FP32, BF16, E4M3 and E5M2; -1 as an integer */
        }
    }
    return block;
}

size_t arena_mark(const struct arena *arena)
{
    return arena->used;
}

void arena_rewind(struct arena *arena, size_t mark)
{
    ASSERT(mark <= arena->used);
    if (arena->base && arena->kind == DEVICE_CPU) {
        ASAN_POISON_MEMORY_REGION(arena->base + mark, arena->used - mark);
    }
    arena->used = mark;
}

void arena_report(const struct arena *arena)
{
    for (int i = 0; i < arena->n_labels; i++) {
        log_info("memory %-12s %-36s %12.2f MiB", arena->name, arena->labels[i].name,
                 (double)arena->labels[i].bytes / 0x1p20);
    }
    log_info("memory %-12s %-36s %12.2f MiB", arena->name, "total", (double)arena->high_water / 0x1p20);
}
