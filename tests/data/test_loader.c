/* Batches. Test shards count up (token = its position in the whole data), so that a window says where it came from. */
#include "tests/test.h"

#include "data/loader.h"
#include "data/shard.h"
#include "tests/data/shard_files.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

enum { SEQ = 100, SHARDS = 4, VOCAB = 200000 };

/* Unequal lengths; the third is no window; the second has windows over a frame's end, and one exactly at its end. */
static const uint64_t lengths[SHARDS] = {1234, 66001, 100, 805};
static const uint64_t windows_of[SHARDS] = {12, 660, 0, 8};
enum { WINDOWS = 12 + 660 + 8 };

static const char *make_shards(void)
{
    int32_t first = 0;
    for (int s = 0; s < SHARDS; s++) {
        char name[32];
        snprintf(name, sizeof name, "train-%d.tok.zst", s);
        shard_make_counting(scratch_path(name), VOCAB, first, lengths[s]);
        first += (int32_t)lengths[s];
    }
    return scratch_path("train-*.tok.zst");
}

static struct loader_config config_of(const char *pattern)
{
    return (struct loader_config){.pattern = pattern, .seq_len = SEQ, .vocab = VOCAB, .seed = 42, .shuffle = true};
}

/* First token of window w, from the lengths alone. */
static int32_t start_of_window(uint64_t w)
{
    uint64_t base = 0;
    int s = 0;
    while (w >= windows_of[s]) {
        w -= windows_of[s];
        base += lengths[s++];
    }
    return (int32_t)(base + w * SEQ);
}

static void check_window(const int32_t *tokens, int32_t start)
{
    for (int t = 0; t <= SEQ; t++) {
        assert_int_equal(tokens[t], start + t);
    }
}

static void test_windows_stay_inside_shards(void **state)
{
    (void)state;
    struct loader_config config = config_of(make_shards());
    config.shuffle = false;
    struct loader *loader;
    assert_int_equal(loader_open(&loader, &config), OK);
    assert_int_equal(loader_windows(loader), WINDOWS);
    assert_int_equal(loader_tokens(loader), 1234 + 66001 + 100 + 805);
    int32_t tokens[SEQ + 1];
    for (uint64_t g = 0; g < WINDOWS; g++) {
        assert_int_equal(loader_sample(loader, g, tokens), OK);
        check_window(tokens, start_of_window(g));
    }
    assert_int_equal(loader_sample(loader, WINDOWS * 5 + 3, tokens), OK);
    check_window(tokens, start_of_window(3));
    loader_close(loader);
}

static void test_every_epoch_has_every_window_once_in_its_own_order(void **state)
{
    (void)state;
    struct loader_config config = config_of(make_shards());
    struct loader *loader;
    assert_int_equal(loader_open(&loader, &config), OK);
    int32_t tokens[SEQ + 1];
    uint64_t same_place = 0;
    for (uint64_t epoch = 0; epoch < 2; epoch++) {
        int seen[WINDOWS] = {0};
        for (uint64_t i = 0; i < WINDOWS; i++) {
            uint64_t window = sampler_permute(42, epoch, WINDOWS, i);
            assert_int_equal(loader_sample(loader, epoch * WINDOWS + i, tokens), OK);
            check_window(tokens, start_of_window(window));
            seen[window]++;
            same_place += epoch == 1 && window == sampler_permute(42, 0, WINDOWS, i);
        }
        for (int w = 0; w < WINDOWS; w++) {
            assert_int_equal(seen[w], 1);
        }
    }
    assert_true(same_place < 10);
    loader_close(loader);
}

/* Batches of `samples` from `first`: tokens, targets and digest are what loader_sample says. */
static void check_batches(struct loader *loader, uint64_t first, uint64_t stride, int64_t samples, int batches)
{
    size_t n = (size_t)samples;
    int32_t *tokens = malloc(n * SEQ * sizeof *tokens), *targets = malloc(n * SEQ * sizeof *targets);
    int32_t *expected = malloc(n * (SEQ + 1) * sizeof *expected);
    loader_seek(loader, first, stride, samples);
    for (int b = 0; b < batches; b++) {
        uint64_t digest;
        assert_int_equal(loader_next(loader, tokens, targets, &digest), OK);
        for (size_t i = 0; i < n; i++) {
            int32_t *sample = expected + i * (SEQ + 1);
            assert_int_equal(loader_sample(loader, first + (uint64_t)b * stride + i, sample), OK);
            assert_memory_equal(tokens + i * SEQ, sample, SEQ * sizeof *tokens);
            assert_memory_equal(targets + i * SEQ, sample + 1, SEQ * sizeof *targets);
        }
        assert_true(digest == XXH3_64bits(expected, n * (SEQ + 1) * sizeof *expected));
    }
    free(tokens);
    free(targets);
    free(expected);
}

static void test_batches_are_the_same_with_and_without_prefetch(void **state)
{
    (void)state;
    struct loader_config config = config_of(make_shards());
    for (int prefetch = 0; prefetch <= 2; prefetch++) {
        config.prefetch = prefetch;
        struct loader *loader;
        assert_int_equal(loader_open(&loader, &config), OK);
        check_batches(loader, 0, 8, 8, 20);
        /* The middle of epoch 2, as a resume does; then over the end of that epoch, as one of several ranks. */
        check_batches(loader, WINDOWS + WINDOWS / 2, 8, 8, 10);
        check_batches(loader, 2 * WINDOWS - 20, 16, 4, 10);
        /* Seeks that come while the thread is ahead, also to other sizes. */
        for (uint64_t i = 0; i < 20; i++) {
            check_batches(loader, i * 37, 3, 1 + (int64_t)i % 5, (int)(i % 3));
        }
        loader_close(loader);
    }
}

static void test_a_loader_may_close_while_it_reads_ahead(void **state)
{
    (void)state;
    struct loader_config config = config_of(make_shards());
    config.prefetch = 3;
    for (int i = 0; i < 10; i++) {
        struct loader *loader;
        assert_int_equal(loader_open(&loader, &config), OK);
        if (i % 2) {
            loader_seek(loader, (uint64_t)i, 8, 8);
        }
        loader_close(loader);
    }
}

/* More shards than are kept awake at once. */
static void test_many_shards(void **state)
{
    (void)state;
    for (int s = 0; s < 30; s++) {
        char name[32];
        snprintf(name, sizeof name, "many-%02d.tok.zst", s);
        shard_make_counting(scratch_path(name), VOCAB, s * 1000, 301);
    }
    struct loader_config config = config_of(scratch_path("many-*.tok.zst"));
    config.prefetch = 1;
    struct loader *loader;
    assert_int_equal(loader_open(&loader, &config), OK);
    assert_int_equal(loader_windows(loader), 90);
    check_batches(loader, 0, 7, 7, 40);
    int32_t tokens[SEQ + 1];
    for (uint64_t i = 0; i < 90; i++) {
        uint64_t w = sampler_permute(42, 0, 90, i);
        assert_int_equal(loader_sample(loader, i, tokens), OK);
        check_window(tokens, (int32_t)(w / 3 * 1000 + w % 3 * SEQ));
    }
    loader_close(loader);
}

static void test_globs_are_sorted_and_the_digest_follows_the_content(void **state)
{
    (void)state;
    char both[700], a[300], b[300], digest[33];
    snprintf(a, sizeof a, "%s", scratch_path("glob-a.tok.zst"));
    snprintf(b, sizeof b, "%s", scratch_path("glob-b.tok.zst"));
    shard_make_counting(a, VOCAB, 0, 500);
    shard_make_counting(b, VOCAB, 500, 500);
    snprintf(both, sizeof both, "%s  %s", b, a);
    struct loader_config config = config_of(both);
    config.shuffle = false;
    struct loader *loader;
    assert_int_equal(loader_open(&loader, &config), OK);
    int32_t tokens[SEQ + 1];
    assert_int_equal(loader_sample(loader, 0, tokens), OK);
    assert_int_equal(tokens[0], 0);
    snprintf(digest, sizeof digest, "%s", loader_digest(loader));
    assert_int_equal(strlen(digest), 32);
    loader_close(loader);

    config.pattern = scratch_path("glob-?.tok.zst");
    assert_int_equal(loader_open(&loader, &config), OK);
    assert_string_equal(loader_digest(loader), digest);
    loader_close(loader);
    shard_make_counting(b, VOCAB, 501, 500);
    assert_int_equal(loader_open(&loader, &config), OK);
    assert_string_not_equal(loader_digest(loader), digest);
    loader_close(loader);
}

static void check_refused(const struct loader_config *config, const char *part1, const char *part2)
{
    struct loader *loader = NULL;
    assert_int_equal(loader_open(&loader, config), ERR_DATA);
    assert_null(loader);
    assert_non_null(strstr(status_last_message(), part1));
    assert_non_null(strstr(status_last_message(), part2));
}

static void test_what_cannot_be_read_is_refused_at_open(void **state)
{
    (void)state;
    struct loader_config config = config_of(make_shards());
    config.seq_len = 66001;
    check_refused(&config, "has 66001 tokens", "seq_len to at most 66000");
    config.seq_len = SEQ;
    config.vocab = 320;
    check_refused(&config, "vocabulary of 200000", "the model's 320");
    config.vocab = VOCAB;
    config.pattern = scratch_path("nothing-*.tok.zst");
    check_refused(&config, "no token shard matches", "nothing-*");
    config.pattern = " ";
    check_refused(&config, "pattern", "empty");
    char twice[700];
    snprintf(twice, sizeof twice, "%s %s", scratch_path("train-0.tok.zst"), scratch_path("train-*.tok.zst"));
    config.pattern = twice;
    check_refused(&config, "train-0.tok.zst", "two globs");
}

static void test_a_damaged_shard_shows_at_open_and_if_trusted_at_its_batch(void **state)
{
    (void)state;
    struct loader_config config = config_of(make_shards());
    const char *damaged = scratch_path("train-1.tok.zst");
    struct file_bytes file = file_load(damaged);
    file.data[file.n / 2] ^= 64;
    file_store(damaged, file);
    file_free(&file);
    check_refused(&config, "train-1.tok.zst", "frame 0");
    config.trusted = true;
    config.shuffle = false;
    int32_t tokens[4 * SEQ], targets[4 * SEQ];
    for (int prefetch = 0; prefetch <= 2; prefetch++) {
        config.prefetch = prefetch;
        struct loader *loader;
        assert_int_equal(loader_open(&loader, &config), OK);
        loader_seek(loader, 0, 4, 4);
        for (int b = 0; b < 3; b++) {
            assert_int_equal(loader_next(loader, tokens, targets, NULL), OK);
        }
        assert_int_equal(loader_next(loader, tokens, targets, NULL), ERR_DATA);
        assert_int_equal(loader_next(loader, tokens, targets, NULL), ERR_DATA);
        loader_seek(loader, 4, 4, 4);
        assert_int_equal(loader_next(loader, tokens, targets, NULL), OK);
        assert_int_equal(tokens[0], start_of_window(4));
        loader_close(loader);
    }
}

static int remove_scratch(void **state)
{
    (void)state;
    scratch_remove();
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_windows_stay_inside_shards),
        cmocka_unit_test(test_every_epoch_has_every_window_once_in_its_own_order),
        cmocka_unit_test(test_batches_are_the_same_with_and_without_prefetch),
        cmocka_unit_test(test_a_loader_may_close_while_it_reads_ahead),
        cmocka_unit_test(test_many_shards),
        cmocka_unit_test(test_globs_are_sorted_and_the_digest_follows_the_content),
        cmocka_unit_test(test_what_cannot_be_read_is_refused_at_open),
        cmocka_unit_test(test_a_damaged_shard_shows_at_open_and_if_trusted_at_its_batch),
    };
    return cmocka_run_group_tests(tests, NULL, remove_scratch);
}
