/* Fuzz target: the divergence watch's state in a checkpoint. The first byte sets the window, the rest is JSON. A state
 * that is accepted can be saved, restored and continued: two watches restored from it agree on every later update. */
#include "tests/fuzz/fuzz.h"
#include "train/watch.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 60 };

static struct watch *restored(const struct watch_config *config, const json_t *state, enum status *status)
{
    struct watch *watch = NULL;
    ASSERT(watch_open(&watch, config) == OK);
    *status = watch_restore(watch, state);
    return watch;
}

/* A quiet loss, then a rise with bursts of the norm. */
static struct watch_row row_at(int64_t update, int i)
{
    return (struct watch_row){.update = update + i,
                              .loss = 3 + 0.01 * (i % 7) + (i > 30 ? 0.1 * (i - 30) : 0),
                              .grad_norm = i % 11 == 10 ? 40 : 1,
                              .partner_loss = i % 2 ? 3 : NAN};
}

static void check_continues(const struct watch_config *config, const json_t *state)
{
    enum status status;
    struct watch *a = restored(config, state, &status);
    ASSERT(status == OK);
    json_t *saved = watch_save(a);
    ASSERT(saved != NULL);
    int64_t last = json_integer_value(json_object_get(saved, "last_update"));
    struct watch *b = restored(config, saved, &status);
    ASSERT(status == OK);
    for (int i = 1; i <= ROWS; i++) {
        struct watch_row row = row_at(last, i);
        ASSERT(watch_update(a, &row) == watch_update(b, &row));
        ASSERT(strcmp(watch_reason(a), watch_reason(b)) == 0 && watch_onset(a) == watch_onset(b));
        ASSERT(watch_onset(a) >= 0 && watch_onset(a) <= row.update);
    }
    json_t *end_a = watch_save(a), *end_b = watch_save(b);
    ASSERT(end_a != NULL && json_equal(end_a, end_b));
    json_decref(saved);
    json_decref(end_a);
    json_decref(end_b);
    watch_close(a);
    watch_close(b);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct fuzz_bytes bytes = {data, n};
    struct watch_config config = watch_config_default();
    config.window = 1 + (int64_t)fuzz_take(&bytes, 1);
    json_t *state = NULL;
    if (json_read_text("state", (const char *)bytes.at, bytes.left, &state) != OK) {
        return 0;
    }
    enum status status;
    struct watch *watch = restored(&config, state, &status);
    watch_close(watch);
    if (status == OK) {
        check_continues(&config, state);
    } else {
        fuzz_refused(status, ERR_DATA, "divergence watch state: ");
    }
    json_decref(state);
    return 0;
}

/* States after 1, 30, 45 and 60 updates, with short and long windows. */
void fuzz_seeds(const char *folder)
{
    static const int counts[] = {1, 30, 45, ROWS};
    for (int i = 0; i < 4; i++) {
        struct watch_config config = watch_config_default();
        struct watch *watch = NULL;
        char name[] = {'w', (char)('0' + i), '\0'};
        config.window = i % 2 ? 20 : 100;
        ASSERT(watch_open(&watch, &config) == OK);
        for (int u = 1; u <= counts[i]; u++) {
            struct watch_row row = row_at(0, u);
            (void)watch_update(watch, &row);
        }
        json_t *state = watch_save(watch);
        char *text = json_dumps(state, JSON_COMPACT);
        size_t bytes = strlen(text);
        char *seed = malloc(bytes + 1);
        seed[0] = (char)(config.window - 1);
        memcpy(seed + 1, text, bytes);
        fuzz_seed(folder, name, seed, bytes + 1);
        free(seed);
        free(text);
        json_decref(state);
        watch_close(watch);
    }
    static const char *const words[] = {"\\x22suspect\\x22",
                                        "\\x22diverged\\x22",
                                        "\\x22healthy\\x22",
                                        "-1",
                                        "9223372036854775807",
                                        "-9223372036854775808",
                                        "1e308",
                                        "-1e308"};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        fuzz_word(folder, words[i]);
    }
}
