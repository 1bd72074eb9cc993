/* data: a thread that produces the items of a ring ahead of their use. Knows neither files nor tokens, and holds no
 * state that a resume would need: item k is whatever `produce` makes of k. Private to loader.c. */
#pragma once

#include "core/status.h"

struct prefetch;

/* Fills ring slot `slot` with item k. Runs in the thread, never twice at once. */
typedef enum status (*prefetch_produce_fn)(void *context, int slot, uint64_t k);

/* A thread at rest, with `depth` slots. Fails with ERR_NOMEM or ERR_IO. */
MUST_CHECK enum status prefetch_open(struct prefetch **prefetch, int depth, prefetch_produce_fn produce, void *context);
void prefetch_close(struct prefetch *prefetch); /* NULL is fine */

/* Drops all items and waits until the thread is at rest: afterwards the caller may change what `produce` reads. */
void prefetch_pause(struct prefetch *prefetch);

/* Starts the thread from item 0. Only after prefetch_pause or prefetch_open. */
void prefetch_start(struct prefetch *prefetch);

/* Waits for the next item and gives its slot, which stays the caller's until prefetch_release. A failure of `produce`
 * is returned in its place in the order, and again by every later call. */
MUST_CHECK enum status prefetch_take(struct prefetch *prefetch, int *slot);
void prefetch_release(struct prefetch *prefetch);
