/* data: the prefetch thread. One lock guards all counters; `produce` runs outside it, alone with its slot. */
#include "data/prefetch.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

struct prefetch {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* any field below */
    prefetch_produce_fn produce;
    void *context;
    int depth;
    bool running;            /* may begin another item */
    bool busy;               /* inside produce */
    bool quit;               /* the thread is to end */
    uint64_t produced, used; /* items; produced - used <= depth */
    enum status failed;      /* item number `produced` failed: none after it */
};

static void *thread_main(void *argument)
{
    struct prefetch *p = argument;
    pthread_mutex_lock(&p->lock);
    while (!p->quit) {
        if (!p->running || p->failed != OK || p->produced - p->used == (uint64_t)p->depth) {
            pthread_cond_wait(&p->changed, &p->lock);
            continue;
        }
        uint64_t k = p->produced;
        p->busy = true;
        pthread_mutex_unlock(&p->lock);
        enum status status = p->produce(p->context, (int)(k % (uint64_t)p->depth), k);
        pthread_mutex_lock(&p->lock);
        p->busy = false;
        p->failed = status;
        p->produced += status == OK ? 1 : 0;
        pthread_cond_broadcast(&p->changed);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

/* The new thread inherits the signal mask: signals of the process are for the thread that runs the steps. */
static int start_without_signals(struct prefetch *p)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&p->thread, NULL, thread_main, p);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

enum status prefetch_open(struct prefetch **prefetch, int depth, prefetch_produce_fn produce, void *context)
{
    ASSERT(depth >= 1);
    struct prefetch *p = calloc(1, sizeof *p);
    if (!p) {
        return status_fail(ERR_NOMEM, "no memory for the prefetch thread");
    }
    p->produce = produce;
    p->context = context;
    p->depth = depth;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->changed, NULL);
    int error = start_without_signals(p);
    if (error != 0) {
        pthread_cond_destroy(&p->changed);
        pthread_mutex_destroy(&p->lock);
        free(p);
        return status_fail(ERR_IO, "cannot start the prefetch thread: %s; set prefetch to 0", strerror(error));
    }
    *prefetch = p;
    return OK;
}

void prefetch_close(struct prefetch *p)
{
    if (!p) {
        return;
    }
    pthread_mutex_lock(&p->lock);
    p->quit = true;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
    pthread_join(p->thread, NULL);
    pthread_cond_destroy(&p->changed);
    pthread_mutex_destroy(&p->lock);
    free(p);
}

void prefetch_pause(struct prefetch *p)
{
    pthread_mutex_lock(&p->lock);
    p->running = false;
    while (p->busy) {
        pthread_cond_wait(&p->changed, &p->lock);
    }
    pthread_mutex_unlock(&p->lock);
}

void prefetch_start(struct prefetch *p)
{
    pthread_mutex_lock(&p->lock);
    ASSERT(!p->running && !p->busy);
    p->produced = p->used = 0;
    p->failed = OK;
    p->running = true;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

enum status prefetch_take(struct prefetch *p, int *slot)
{
    pthread_mutex_lock(&p->lock);
    ASSERT(p->running);
    while (p->produced == p->used && p->failed == OK) {
        pthread_cond_wait(&p->changed, &p->lock);
    }
    enum status status = p->produced == p->used ? p->failed : OK;
    *slot = (int)(p->used % (uint64_t)p->depth);
    pthread_mutex_unlock(&p->lock);
    return status;
}

void prefetch_release(struct prefetch *p)
{
    pthread_mutex_lock(&p->lock);
    ASSERT(p->used < p->produced);
    p->used++;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
}
