/* train: being asked to stop. SIGTERM, SIGUSR1 and SIGINT set a flag that the ranks agree on once an update; a second
 * signal of the kind ends the process as usual. */
#pragma once

#include <stdbool.h>

void signals_install(void);
bool signals_stop_wanted(void);
