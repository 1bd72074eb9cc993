/* core: functions of a library that is loaded at run time. */
#pragma once

#include <dlfcn.h>
#include <stdbool.h>
#include <string.h>

/* *function (a pointer to a function) becomes the library's `name`; NULL and false if it has none. ISO C has no
 * conversion from an object to a function pointer; POSIX promises that the bytes are the same. */
static inline bool library_find(void *library, const char *name, void *function)
{
    void *symbol = dlsym(library, name);
    memcpy(function, &symbol, sizeof symbol);
    return symbol != NULL;
}
