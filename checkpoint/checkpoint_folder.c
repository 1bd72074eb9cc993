/* checkpoint: names of checkpoints, and which of them are found, marked and rotated out. */
#include "checkpoint/checkpoint_folder.h"

#include "checkpoint/checkpoint.h"
#include "checkpoint/manifest.h"
#include "core/file.h"
#include "core/log.h"

#include <dirent.h>
#include <errno.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char step_prefix[] = "step_";
static const char temporary_prefix[] = ".tmp_step_";
enum { STEP_DIGITS = 8, OPEN_FOLDERS = 16 };

enum status path_inside(char path[PATH_MAX], const char *folder, const char *name)
{
    int n = snprintf(path, PATH_MAX, "%s/%s", folder, name);
    return n > 0 && n < PATH_MAX ? OK : status_fail(ERR_IO, "%.80s...: the path is too long", folder);
}

static enum status make_path(char path[PATH_MAX], const char *folder, const char *prefix, int64_t step)
{
    char name[64];
    snprintf(name, sizeof name, "%s%0*lld", prefix, STEP_DIGITS, (long long)step);
    return path_inside(path, folder, name);
}

enum status step_path(char path[PATH_MAX], const char *folder, int64_t step)
{
    return make_path(path, folder, step_prefix, step);
}

enum status step_path_temporary(char path[PATH_MAX], const char *folder, int64_t step)
{
    return make_path(path, folder, temporary_prefix, step);
}

/* The step of a directory name, -1 if it is not one of ours. */
static int64_t step_of(const char *name)
{
    if (strncmp(name, step_prefix, strlen(step_prefix)) != 0) {
        return -1;
    }
    const char *digits = name + strlen(step_prefix);
    size_t n = strspn(digits, "0123456789");
    bool ours = digits[n] == '\0' && n <= 18 && (n == STEP_DIGITS || (n > STEP_DIGITS && digits[0] != '0'));
    return ours ? strtoll(digits, NULL, 10) : -1;
}

static int newest_first(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a;
    int64_t y = *(const int64_t *)b;
    return (x < y) - (x > y);
}

void step_list_close(struct step_list *list)
{
    free(list->steps);
    *list = (struct step_list){0};
}

enum status step_list_read(struct step_list *list, const char *folder)
{
    *list = (struct step_list){0};
    DIR *stream = opendir(folder);
    if (stream == NULL) {
        return errno == ENOENT ? OK : status_fail_errno(ERR_IO, folder, "cannot open the folder");
    }
    int capacity = 0;
    for (struct dirent *entry = readdir(stream); entry != NULL; entry = readdir(stream)) {
        int64_t step = step_of(entry->d_name);
        if (step < 0) {
            continue;
        }
        if (list->count == capacity) {
            capacity = 2 * capacity + 16;
            int64_t *larger = realloc(list->steps, (size_t)capacity * sizeof *larger);
            if (larger == NULL) {
                closedir(stream);
                step_list_close(list);
                return status_fail(ERR_NOMEM, "%s: no memory to list %d checkpoints", folder, capacity);
            }
            list->steps = larger;
        }
        list->steps[list->count++] = step;
    }
    closedir(stream);
    if (list->count > 0) {
        qsort(list->steps, (size_t)list->count, sizeof *list->steps, newest_first);
    }
    return OK;
}

static int remove_one(const char *path, const struct stat *info, int type, struct FTW *where)
{
    (void)info;
    (void)type;
    (void)where;
    return remove(path);
}

enum status remove_tree(const char *path)
{
    if (nftw(path, remove_one, OPEN_FOLDERS, FTW_DEPTH | FTW_PHYS) != 0 && errno != ENOENT) {
        return status_fail_errno(ERR_IO, path, "cannot remove");
    }
    return OK;
}

enum status remove_leftovers(const char *folder)
{
    DIR *stream = opendir(folder);
    if (stream == NULL) {
        return status_fail_errno(ERR_IO, folder, "cannot open the folder");
    }
    enum status status = OK;
    for (struct dirent *entry = readdir(stream); entry != NULL && status == OK; entry = readdir(stream)) {
        char path[PATH_MAX];
        if (strncmp(entry->d_name, temporary_prefix, strlen(temporary_prefix)) == 0) {
            status = path_inside(path, folder, entry->d_name);
            if (status == OK) {
                log_info("%s: removing what an interrupted save left", path);
                status = remove_tree(path);
            }
        }
    }
    closedir(stream);
    return status;
}

/* Why a complete checkpoint is not to be resumed from; NULL if it is healthy. Fails if it cannot be read. */
static enum status find_doubt(const char *path, const char **doubt)
{
    char mark[PATH_MAX];
    json_t *train = NULL;
    TRY(path_inside(mark, path, "suspect"));
    *doubt = NULL;
    if (access(mark, F_OK) == 0) {
        *doubt = "marked suspect: saved after the onset of a divergence";
        return OK;
    }
    TRY(checkpoint_read_train(path, &train));
    const char *verdict = json_string_value(json_object_get(train, "verdict"));
    if (verdict == NULL) {
        *doubt = "state.json has no verdict, so that nothing says whether the run was healthy: if it was, name this "
                 "checkpoint in checkpoint.resume";
    } else if (strcmp(verdict, "healthy") != 0) {
        *doubt = "saved while the run was not healthy";
    }
    json_decref(train);
    return OK;
}

enum status checkpoint_find(const char *folder, char *path, size_t bytes)
{
    struct step_list list;
    char found[PATH_MAX] = "";
    TRY(step_list_read(&list, folder));
    enum status status = OK;
    for (int i = 0; i < list.count && status == OK && found[0] == '\0'; i++) {
        char candidate[PATH_MAX];
        const char *doubt = NULL;
        status = step_path(candidate, folder, list.steps[i]);
        if (status != OK) {
            break;
        }
        /* The cheap question first: hashing reads every byte. */
        bool sound = find_doubt(candidate, &doubt) == OK && (doubt != NULL || checkpoint_verify(candidate) == OK);
        if (!sound) {
            log_warn("%s: skipped: %s", candidate, status_last_message());
        } else if (doubt != NULL) {
            log_warn("%s: skipped: %s", candidate, doubt);
        } else {
            snprintf(found, sizeof found, "%s", candidate);
        }
    }
    step_list_close(&list);
    TRY(status);
    if (strlen(found) >= bytes) {
        return status_fail(ERR_IO, "%s: the path is too long", found);
    }
    snprintf(path, bytes, "%s", found);
    return OK;
}

enum status checkpoint_mark_suspect(const char *folder, int64_t after_step)
{
    struct step_list list;
    TRY(step_list_read(&list, folder));
    enum status status = OK;
    for (int i = 0; i < list.count && status == OK && list.steps[i] > after_step; i++) {
        char path[PATH_MAX];
        char mark[PATH_MAX];
        char text[64];
        status = step_path(path, folder, list.steps[i]);
        if (status == OK) {
            status = path_inside(mark, path, "suspect");
        }
        if (status == OK) {
            int n = snprintf(text, sizeof text, "trouble began after step %lld\n", (long long)after_step);
            status = file_write_atomic(mark, text, (size_t)n);
        }
    }
    step_list_close(&list);
    return status;
}

/* All files there and of the right size, and a state that can be read; hashing everything at each save would cost too
 * much. The failure is the line that names the damage. */
static bool is_complete(const char *path, bool *healthy)
{
    struct manifest manifest;
    const char *doubt = NULL;
    if (manifest_read(&manifest, path) != OK) {
        return false;
    }
    enum status status = manifest_check(&manifest, path, false);
    manifest_close(&manifest);
    if (status == OK) {
        status = find_doubt(path, &doubt);
    }
    *healthy = status == OK && doubt == NULL;
    return status == OK;
}

/* The place of a step among those that were named, count if it is not there. */
static int damaged_find(const struct checkpoint_damaged *damaged, int64_t step)
{
    int i = 0;
    while (i < damaged->count && damaged->steps[i] != step) {
        i++;
    }
    return i;
}

static void damaged_add(struct checkpoint_damaged *damaged, int64_t step)
{
    if (damaged->count < (int)(sizeof damaged->steps / sizeof damaged->steps[0])) {
        damaged->steps[damaged->count++] = step;
    }
}

static void damaged_forget(struct checkpoint_damaged *damaged, int64_t step)
{
    int i = damaged_find(damaged, step);
    if (i < damaged->count) {
        damaged->steps[i] = damaged->steps[--damaged->count];
    }
}

/* Sets stays[i] by the rule in the header. */
static enum status choose(const struct step_list *list, const char *folder, const struct checkpoint_rotation *r,
                          struct checkpoint_damaged *damaged, bool *stays)
{
    int complete = 0;
    int successor = -1;
    bool old_one = false;
    for (int i = 0; i < list->count; i++) {
        char path[PATH_MAX];
        bool healthy = false;
        TRY(step_path(path, folder, list->steps[i]));
        stays[i] = complete < r->keep || (r->keep_forever_every > 0 && list->steps[i] % r->keep_forever_every == 0);
        if (damaged_find(damaged, list->steps[i]) < damaged->count) {
            continue;
        }
        if (!is_complete(path, &healthy)) {
            damaged_add(damaged, list->steps[i]);
            continue;
        }
        complete++;
        if (old_one || !healthy) {
            continue;
        }
        if (list->steps[i] <= r->step - r->window) {
            stays[i] = true;
            old_one = true;
        } else {
            successor = i;
        }
    }
    if (successor >= 0) {
        stays[successor] = true;
    }
    return OK;
}

/* Under the temporary name it is no checkpoint any more, so that a kill leaves no half of one. */
static enum status delete_step(const char *folder, int64_t step)
{
    char path[PATH_MAX];
    char temporary[PATH_MAX];
    TRY(step_path(path, folder, step));
    TRY(step_path_temporary(temporary, folder, step));
    TRY(remove_tree(temporary));
    if (rename(path, temporary) != 0) {
        return status_fail_errno(ERR_IO, path, "cannot rename to delete it");
    }
    log_debug("%s: rotated out", path);
    return remove_tree(temporary);
}

enum status checkpoint_rotate(const char *folder, const struct checkpoint_rotation *rotation,
                              struct checkpoint_damaged *damaged)
{
    ASSERT(rotation->keep >= 1 && rotation->window >= 0 && rotation->keep_forever_every >= 0);
    struct step_list list;
    TRY(step_list_read(&list, folder));
    damaged_forget(damaged, rotation->step);
    bool *stays = calloc((size_t)list.count + 1, sizeof *stays);
    enum status status = stays != NULL ? choose(&list, folder, rotation, damaged, stays)
                                       : status_fail(ERR_NOMEM, "%s: no memory to rotate", folder);
    for (int i = 0; i < list.count && status == OK; i++) {
        if (!stays[i]) {
            status = delete_step(folder, list.steps[i]);
            damaged_forget(damaged, list.steps[i]);
        }
    }
    free(stays);
    step_list_close(&list);
    return status;
}
