/* train: the handler may only touch a flag, which therefore is the one variable of this room outside any struct. */
#include "train/signals.h"

#include <signal.h>
#include <string.h>

static volatile sig_atomic_t stop_wanted;

static void on_signal(int number)
{
    (void)number;
    stop_wanted = 1;
}

void signals_install(void)
{
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART | (int)SA_RESETHAND;
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    /* Schedulers may send USR1 more than once; its default would kill. */
    action.sa_flags = SA_RESTART;
    sigaction(SIGUSR1, &action, NULL);
}

bool signals_stop_wanted(void)
{
    return stop_wanted != 0;
}
