/* Token shards: what was written is read, and every fault of a file is one line with file, place, expected, found. */
#include "tests/test.h"

#include "data/shard.h"
#include "tests/data/shard_files.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void check_round_trip(uint32_t vocab, uint64_t count)
{
    const char *path = scratch_path("round_trip.tok.zst");
    shard_make(path, vocab, count);
    struct shard *shard;
    assert_int_equal(shard_open(&shard, path), OK);
    assert_int_equal(shard_tokens(shard), count);
    assert_int_equal(shard_vocab(shard), vocab);
    assert_string_equal(shard_path(shard), path);
    assert_int_equal(shard_verify(shard), OK);
    int32_t *tokens = malloc(count * sizeof *tokens);
    assert_int_equal(shard_read(shard, 0, count, tokens), OK);
    for (uint64_t i = 0; i < count; i++) {
        assert_int_equal(tokens[i], shard_token(i, vocab));
    }
    for (uint64_t first = 0; first < count; first += 1 + count / 13) {
        uint64_t n = (first * 7919) % (count - first) + 1;
        assert_int_equal(shard_read(shard, first, n, tokens), OK);
        assert_int_equal(tokens[0], shard_token(first, vocab));
        assert_int_equal(tokens[n - 1], shard_token(first + n - 1, vocab));
        shard_rest(shard);
    }
    assert_int_equal(shard_read(shard, count, 0, tokens), OK);
    free(tokens);
    shard_close(shard);
}

static void test_tokens_survive_the_round_trip(void **state)
{
    (void)state;
    const uint64_t counts[] = {1, 2, 65535, 65536, 65537, 200001};
    for (int i = 0; i < 6; i++) {
        check_round_trip(320, counts[i]);
    }
    check_round_trip(1, 1000);
    check_round_trip(65536, 70000);
    check_round_trip(65537, 70000);
    check_round_trip(INT32_MAX, 70000);
}

static void test_the_layout_is_that_of_the_documentation(void **state)
{
    (void)state;
    const char *path = scratch_path("layout.tok.zst");
    shard_make(path, 320, 65536 * 2 + 5);
    struct file_bytes file = file_load(path), repaired = file_load(path);
    assert_memory_equal(file.data, "gpt8btok", 8);
    const struct {
        int at, bytes;
        uint64_t value;
    } fields[] = {{8, 4, 1},  {12, 4, 2},      {16, 4, 320}, {20, 4, 65536},      {24, 8, 65536 * 2 + 5},
                  {32, 8, 3}, {40, 8, file.n}, {48, 8, 0},   {64, 8, 64 + 3 * 16}};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        assert_int_equal(bytes_get(file.data + fields[i].at, fields[i].bytes), fields[i].value);
    }
    shard_repair(&repaired); /* finds all checksums as they should be */
    assert_memory_equal(file.data, repaired.data, file.n);
    for (int f = 0; f < 3; f++) {
        uint64_t offset = bytes_get(file.data + 64 + 16 * f, 8);
        assert_int_equal(bytes_get(file.data + offset, 4), 0xfd2fb528); /* zstd's magic number */
        assert_int_equal(file.data[offset + 4] & 4, 4);                 /* its content checksum flag */
    }
    file_free(&file);
    file_free(&repaired);
}

static void test_digest_names_the_content(void **state)
{
    (void)state;
    const char *path = scratch_path("digest.tok.zst");
    char digests[3][40];
    for (int i = 0; i < 3; i++) {
        /* The same tokens twice, then other tokens of equal count. */
        shard_make_counting(path, 320, i / 2, 300);
        struct shard *shard;
        assert_int_equal(shard_open(&shard, path), OK);
        snprintf(digests[i], sizeof digests[i], "%s", shard_digest(shard));
        shard_close(shard);
    }
    assert_int_equal(strlen(digests[0]), 32);
    assert_string_equal(digests[0], digests[1]);
    assert_string_not_equal(digests[0], digests[2]);
}

static void test_the_writer_refuses_tokens_outside_the_vocabulary(void **state)
{
    (void)state;
    const char *path = scratch_path("refused.tok.zst");
    const int32_t bad[] = {-1, 320};
    for (int i = 0; i < 2; i++) {
        struct shard_writer *writer;
        const int32_t tokens[] = {5, bad[i]};
        assert_int_equal(shard_writer_open(&writer, path, 320), OK);
        assert_int_equal(shard_writer_add(writer, tokens, 2), ERR_DATA);
        assert_non_null(strstr(status_last_message(), "token 1 to write: expected an id in 0 to 319"));
        shard_writer_abandon(writer);
    }
    struct shard_writer *writer;
    assert_int_equal(shard_writer_open(&writer, path, 320), OK);
    assert_int_equal(shard_writer_finish(writer), ERR_DATA);
    struct shard *shard;
    assert_int_equal(shard_open(&shard, path), ERR_IO);
    assert_non_null(strstr(status_last_message(), "refused.tok.zst"));
}

/* ---- damage ------------------------------------------------------------------------------------------------------ */

/* What is done to a shard of 70,000 tokens, vocabulary 320: bytes are set, the file is cut or lengthened, and the
 * checksums are made right again where the fault is to be met behind them. */
struct damage {
    int at, bytes;
    uint64_t value;
    long length_change;
    bool repair;
    const char *message[3]; /* parts of the one line that must come */
};

static const struct damage damages[] = {
    {.length_change = -1, .message = {"bytes (byte 40)", "found a file of", "cut"}},
    {.length_change = 3, .message = {"found a file of", "appended"}},
    {.at = 0, .bytes = 4, .value = 20240520, .message = {"magic at byte 0", "gpt8btok", "not a token shard"}},
    {.at = 8, .bytes = 4, .value = 2, .message = {"version at byte 8", "expected 1", "found 2"}},
    {.at = 12, .bytes = 4, .value = 4, .repair = true, .message = {"width at byte 12", "expected 2", "found 4"}},
    {.at = 16, .bytes = 4, .value = 128256, .repair = true, .message = {"expected 4 bytes", "128256", "found 2"}},
    {.at = 16, .bytes = 4, .value = 0, .repair = true, .message = {"vocabulary at byte 16", "expected 1", "found 0"}},
    {.at = 16, .bytes = 4, .value = 0x80000000, .repair = true, .message = {"vocabulary at byte 16", "2147483648"}},
    {.at = 20, .bytes = 4, .value = 4096, .repair = true, .message = {"at byte 20", "expected 65536", "found 4096"}},
    {.at = 24, .bytes = 8, .value = 70001, .repair = true, .message = {"expected 4465", "70001", "4464 tokens"}},
    {.at = 24, .bytes = 8, .value = 69999, .repair = true, .message = {"expected 4463", "69999", "4464 tokens"}},
    {.at = 24,
     .bytes = 8,
     .value = 140000,
     .repair = true,
     .message = {"frame count at byte 32", "expected 3", "found 2"}},
    {.at = 24,
     .bytes = 8,
     .value = 60000,
     .repair = true,
     .message = {"frame count at byte 32", "expected 1", "found 2"}},
    {.at = 24, .bytes = 8, .value = 0, .repair = true, .message = {"token count at byte 24", "found 0"}},
    {.at = 24,
     .bytes = 8,
     .value = UINT64_MAX,
     .repair = true,
     .message = {"expected 281474976710656 for 18446744073709551615"}},
    {.at = 32,
     .bytes = 8,
     .value = UINT64_MAX,
     .repair = true,
     .message = {"frame count at byte 32", "18446744073709551615"}},
    {.at = 40,
     .bytes = 8,
     .value = UINT64_MAX,
     .repair = true,
     .message = {"expected 18446744073709551615 bytes", "cut"}},
    {.at = 48,
     .bytes = 1,
     .value = 1,
     .message = {"checksum of header and frame table at byte 56", "expected", "found"}},
    {.at = 72, .bytes = 8, .value = 1, .message = {"checksum of header and frame table", "damaged"}},
    {.at = 64, .bytes = 8, .value = 97, .repair = true, .message = {"frame 0 at byte 64", "97"}},
    {.at = 80, .bytes = 8, .value = 96, .repair = true, .message = {"frame 0 at byte 64", "bytes 96 to 96"}},
    {.at = 80,
     .bytes = 8,
     .value = UINT64_MAX,
     .repair = true,
     .message = {"frame 0 at byte 64", "18446744073709551615"}},
    {.at = 2000, .bytes = 2, .value = 0xbeef, .message = {"frame 0 at byte 96", "checksum expected", "damaged"}},
    {.at = 2000, .bytes = 2, .value = 0xbeef, .repair = true, .message = {"frame 0 at byte 96", "zstd: ", "damaged"}},
    {.at = 96, .bytes = 4, .value = 0, .repair = true, .message = {"frame 0 at byte 96", "expected a zstd frame"}},
    {.at = 16,
     .bytes = 4,
     .value = 319,
     .repair = true,
     .message = {"token at position", "vocabulary of 319", "found 319"}},
};

static void check_damage(const struct damage *damage, const char *good, const char *bad)
{
    struct file_bytes file = file_load(good);
    memset(file.data + file.n, 0, 64);
    file.n = (size_t)((long)file.n + damage->length_change);
    bytes_put(file.data + damage->at, damage->bytes, damage->value);
    if (damage->repair) {
        shard_repair(&file);
    }
    file_store(bad, file);
    file_free(&file);
    struct shard *shard = NULL;
    enum status status = shard_open(&shard, bad);
    if (status == OK) {
        status = shard_verify(shard);
        shard_close(shard);
    } else {
        assert_null(shard);
    }
    assert_int_equal(status, ERR_DATA);
    assert_non_null(strstr(status_last_message(), bad));
    assert_null(strchr(status_last_message(), '\n'));
    for (int i = 0; i < 3 && damage->message[i]; i++) {
        if (!strstr(status_last_message(), damage->message[i])) {
            print_error("expected '%s' in: %s\n", damage->message[i], status_last_message());
        }
        assert_non_null(strstr(status_last_message(), damage->message[i]));
    }
}

static void test_every_fault_is_one_line_with_file_place_expected_found(void **state)
{
    (void)state;
    const char *good = scratch_path("good.tok.zst"), *bad = scratch_path("bad.tok.zst");
    shard_make(good, 320, 70000);
    for (size_t i = 0; i < sizeof damages / sizeof damages[0]; i++) {
        check_damage(&damages[i], good, bad);
    }
}

static void test_short_and_empty_files_are_refused(void **state)
{
    (void)state;
    const char *path = scratch_path("short.tok.zst");
    const struct {
        size_t n;
        const char *message;
    } cases[] = {{0, "found an empty file"}, {5, "magic at byte 0"}, {63, "header of 64 bytes, found 63"}, {64, "cut"}};
    for (int i = 0; i < 4; i++) {
        shard_make(path, 320, 1000);
        struct file_bytes file = file_load(path);
        file.n = cases[i].n;
        file_store(path, file);
        file_free(&file);
        struct shard *shard;
        assert_int_equal(shard_open(&shard, path), ERR_DATA);
        assert_non_null(strstr(status_last_message(), cases[i].message));
        assert_non_null(strstr(status_last_message(), path));
    }
    struct shard *shard;
    assert_int_equal(shard_open(&shard, "/tmp"), ERR_DATA);
    assert_int_equal(shard_open(&shard, scratch_path("absent.tok.zst")), ERR_IO);
    assert_non_null(strstr(status_last_message(), "No such file"));
}

/* A count that fits the token count but not the file must not lead to an allocation of its size. */
static void test_oversized_counts_allocate_nothing(void **state)
{
    (void)state;
    const char *path = scratch_path("oversized.tok.zst");
    shard_make(path, 320, 1000);
    struct file_bytes file = file_load(path);
    bytes_put(file.data + 24, 8, UINT64_C(1) << 63);
    bytes_put(file.data + 32, 8, UINT64_C(1) << 47);
    file_store(path, file);
    file_free(&file);
    struct shard *shard;
    assert_int_equal(shard_open(&shard, path), ERR_DATA);
    assert_non_null(strstr(status_last_message(), "found 140737488355328 frames"));
    assert_non_null(strstr(status_last_message(), "expected at most"));
}

/* A count that is wrong by one shows when the shard is opened, before any step has been run. */
static void test_a_wrong_count_shows_at_open(void **state)
{
    (void)state;
    const char *path = scratch_path("count.tok.zst");
    const uint64_t counts[] = {69999, 70001};
    for (int i = 0; i < 2; i++) {
        shard_make(path, 320, 70000);
        struct file_bytes file = file_load(path);
        bytes_put(file.data + 24, 8, counts[i]);
        shard_repair(&file);
        file_store(path, file);
        file_free(&file);
        struct shard *shard;
        assert_int_equal(shard_open(&shard, path), ERR_DATA);
        assert_non_null(strstr(status_last_message(), "frame 1"));
    }
}

/* No byte of a shard can change unseen. */
static void test_every_changed_byte_is_noticed(void **state)
{
    (void)state;
    const char *path = scratch_path("flipped.tok.zst");
    shard_make(path, 320, 200);
    struct file_bytes file = file_load(path);
    for (size_t i = 0; i < file.n; i += i < 96 ? 1 : 5) {
        file.data[i] ^= (unsigned char)(1u << (i % 8));
        file_store(path, file);
        file.data[i] ^= (unsigned char)(1u << (i % 8));
        struct shard *shard;
        enum status status = shard_open(&shard, path);
        if (status == OK) {
            status = shard_verify(shard);
            shard_close(shard);
        }
        assert_int_equal(status, ERR_DATA);
    }
    file_free(&file);
}

/* Whoever forges checksums too may get nonsense tokens, but neither a crash nor a token outside the vocabulary. */
static void test_forged_shards_do_no_harm(void **state)
{
    (void)state;
    const char *path = scratch_path("forged.tok.zst");
    shard_make(path, 320, 200);
    struct file_bytes file = file_load(path);
    for (size_t i = 8; i < file.n; i += i < 80 ? 1 : 3) {
        struct file_bytes forged = file_load(path);
        forged.data[i] = (unsigned char)(forged.data[i] + 1 + i % 255);
        shard_repair(&forged);
        const char *bad = scratch_path("forged_bad.tok.zst");
        file_store(bad, forged);
        file_free(&forged);
        struct shard *shard;
        if (shard_open(&shard, bad) == OK) {
            int32_t tokens[200];
            if (shard_tokens(shard) == 200 && shard_read(shard, 0, 200, tokens) == OK) {
                for (int t = 0; t < 200; t++) {
                    assert_in_range(tokens[t], 0, shard_vocab(shard) - 1);
                }
            }
            shard_close(shard);
        }
    }
    file_free(&file);
}

/* A file that is replaced or damaged while it is open shows at the next read. */
static void test_damage_after_opening_is_met_when_reading(void **state)
{
    (void)state;
    const char *path = scratch_path("later.tok.zst");
    shard_make(path, 320, 70000);
    struct shard *shard;
    assert_int_equal(shard_open(&shard, path), OK);
    struct file_bytes file = file_load(path);
    file.data[file.n - 100] ^= 1;
    file_store(path, file);
    int32_t token;
    assert_int_equal(shard_read(shard, 0, 1, &token), OK);
    assert_int_equal(shard_read(shard, 69999, 1, &token), ERR_DATA);
    assert_non_null(strstr(status_last_message(), "frame 1 at byte"));
    shard_rest(shard);
    file.n -= 200;
    file_store(path, file);
    assert_int_equal(shard_read(shard, 69999, 1, &token), ERR_DATA);
    assert_non_null(strstr(status_last_message(), "cut"));
    file_free(&file);
    shard_close(shard);
}

static void test_the_shards_of_the_repository_are_sound(void **state)
{
    (void)state;
    const char *paths[] = {"tests/data/tiny.tok.zst", "tests/data/tiny_val.tok.zst"};
    size_t bytes = 0;
    for (int i = 0; i < 2; i++) {
        struct shard *shard;
        assert_int_equal(shard_open(&shard, paths[i]), OK);
        assert_int_equal(shard_verify(shard), OK);
        assert_int_equal(shard_vocab(shard), 320);
        shard_close(shard);
        struct file_bytes file = file_load(paths[i]);
        bytes += file.n;
        file_free(&file);
    }
    assert_true(bytes <= 200000);
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
        cmocka_unit_test(test_tokens_survive_the_round_trip),
        cmocka_unit_test(test_the_layout_is_that_of_the_documentation),
        cmocka_unit_test(test_digest_names_the_content),
        cmocka_unit_test(test_the_writer_refuses_tokens_outside_the_vocabulary),
        cmocka_unit_test(test_every_fault_is_one_line_with_file_place_expected_found),
        cmocka_unit_test(test_short_and_empty_files_are_refused),
        cmocka_unit_test(test_oversized_counts_allocate_nothing),
        cmocka_unit_test(test_a_wrong_count_shows_at_open),
        cmocka_unit_test(test_every_changed_byte_is_noticed),
        cmocka_unit_test(test_forged_shards_do_no_harm),
        cmocka_unit_test(test_damage_after_opening_is_met_when_reading),
        cmocka_unit_test(test_the_shards_of_the_repository_are_sound),
    };
    return cmocka_run_group_tests(tests, NULL, remove_scratch);
}
