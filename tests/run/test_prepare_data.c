/* The program prepare_data: what it writes, what it refuses, and its exit status. */
#include "tests/test.h"

#include "data/shard.h"
#include "data/tokenizer.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static char folder[] = "/tmp/gpt8b-prepare-XXXXXX";
static char output[1 << 16]; /* of the last run, both streams */

/* Runs a shell line in which "prepare_data" is the built program and the working directory is the scratch folder. */
static int run(const char *format, ...) __attribute__((format(printf, 1, 2)));
static int run(const char *format, ...)
{
    const char *build = getenv("BUILD_DIR");
    char program[1000], arguments[2000], line[4000];
    assert_non_null(realpath(build ? build : "build/release", program));
    va_list args;
    va_start(args, format);
    vsnprintf(arguments, sizeof arguments, format, args);
    va_end(args);
    snprintf(line, sizeof line, "exec 2>&1; cd %s && PATH=%s:$PATH && %s", folder, program, arguments);
    FILE *pipe = popen(line, "r");
    assert_non_null(pipe);
    size_t n = fread(output, 1, sizeof output - 1, pipe);
    output[n] = '\0';
    int status = pclose(pipe);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static const char *in_folder(const char *name)
{
    static char path[200];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void write_text(const char *name, const char *text)
{
    FILE *out = fopen(in_folder(name), "wb");
    assert_non_null(out);
    fputs(text, out);
    fclose(out);
}

static bool exists(const char *name)
{
    return access(in_folder(name), F_OK) == 0;
}

/* The tokens of a shard as text: BOS is <, EOS is >. */
static const char *shard_text(const char *name)
{
    static char text[4000];
    static int32_t tokens[4000];
    struct shard *shard;
    assert_int_equal(shard_open(&shard, in_folder(name)), OK);
    assert_int_equal(shard_vocab(shard), BYTE_VOCAB);
    size_t n = (size_t)shard_tokens(shard);
    assert_true(n < sizeof text);
    assert_int_equal(shard_read(shard, 0, n, tokens), OK);
    shard_close(shard);
    for (size_t i = 0; i < n; i++) {
        text[i] = (char)(tokens[i] == BYTE_BOS ? '<' : tokens[i] == BYTE_EOS ? '>' : tokens[i]);
    }
    text[n] = '\0';
    return text;
}

static void test_each_file_is_a_document(void **state)
{
    (void)state;
    write_text("a.txt", "first file\n\nof two paragraphs\n");
    write_text("b.txt", "second file");
    write_text("empty.txt", "");
    assert_int_equal(run("prepare_data --tokenizer bytes --out files a.txt empty.txt b.txt"), 0);
    assert_string_equal(shard_text("files/train-00000.tok.zst"), "<first file\n\nof two paragraphs\n><second file>");
    assert_false(exists("files/val-00000.tok.zst"));
    assert_false(exists("files/train-00001.tok.zst"));
    assert_true(exists("files/tokenizer.json"));
    assert_non_null(strstr(output, "empty.txt: empty"));
    assert_non_null(strstr(output, "documents            2   train 2, val 0"));
    assert_non_null(strstr(output, "tokens              45   train 45, val 0"));
    assert_non_null(strstr(output, "text                41 bytes"));
}

static void test_paragraphs_can_be_documents(void **state)
{
    (void)state;
    write_text("p.txt", "\n  one\nmore\n\n\n \ntwo\n \t\n   three: indented\n\nfour");
    assert_int_equal(run("prepare_data --tokenizer=bytes --split-paragraphs --out paragraphs p.txt"), 0);
    assert_string_equal(shard_text("paragraphs/train-00000.tok.zst"),
                        "<one\nmore\n\n><two\n \t\n><three: indented\n\n><four>");
    assert_int_equal(run("prepare_data --tokenizer=bytes --split-paragraphs=12 --out long p.txt p.txt"), 0);
    assert_string_equal(shard_text("long/train-00000.tok.zst"),
                        "<one\nmore\n\n\n \n><two\n \t\n   three: indented\n\n><four>"
                        "<one\nmore\n\n\n \n><two\n \t\n   three: indented\n\n><four>");
}

static void test_validation_takes_its_share(void **state)
{
    (void)state;
    char text[2000] = "";
    for (int i = 0; i < 20; i++) {
        snprintf(text + strlen(text), sizeof text - strlen(text), "d%02d\n\n", i);
    }
    write_text("d.txt", text);
    assert_int_equal(run("prepare_data --tokenizer bytes --split-paragraphs --val-every 7 --out every d.txt"), 0);
    assert_string_equal(shard_text("every/val-00000.tok.zst"), "<d06\n\n><d13\n\n>");
    assert_null(strstr(shard_text("every/train-00000.tok.zst"), "d13"));
    assert_non_null(strstr(output, "train 18, val 2"));
    assert_int_equal(run("prepare_data --tokenizer bytes --split-paragraphs --val-fraction 0.15 --out share d.txt"), 0);
    assert_non_null(strstr(output, "train 17, val 3"));
}

static void test_shards_are_cut_at_a_number_of_tokens(void **state)
{
    (void)state;
    write_text("a.txt", "0123456789");
    assert_int_equal(run("prepare_data --tokenizer bytes --shard-tokens 5 --out cut a.txt"), 0);
    assert_string_equal(shard_text("cut/train-00000.tok.zst"), "<0123");
    assert_string_equal(shard_text("cut/train-00001.tok.zst"), "45678");
    assert_string_equal(shard_text("cut/train-00002.tok.zst"), "9>");
    assert_int_equal(run("prepare_data --tokenizer bytes --shard-tokens 6 --out exact a.txt"), 0);
    assert_true(exists("exact/train-00001.tok.zst"));
    assert_false(exists("exact/train-00002.tok.zst"));
}

static void test_old_shards_are_not_mixed_with_new_ones(void **state)
{
    (void)state;
    write_text("a.txt", "0123456789");
    assert_int_equal(run("prepare_data --tokenizer bytes --shard-tokens 5 --out twice a.txt"), 0);
    assert_int_equal(run("prepare_data --tokenizer bytes --out twice a.txt"), 1);
    assert_non_null(strstr(output, "twice/train-00000.tok.zst: is already there"));
    assert_true(exists("twice/train-00002.tok.zst"));
    assert_int_equal(run("prepare_data --tokenizer bytes --out twice --overwrite a.txt"), 0);
    assert_false(exists("twice/train-00001.tok.zst"));
    assert_string_equal(shard_text("twice/train-00000.tok.zst"), "<0123456789>");
}

static void test_a_failure_leaves_no_part_of_the_data(void **state)
{
    (void)state;
    write_text("a.txt", "0123456789");
    assert_int_equal(run("prepare_data --tokenizer bytes --shard-tokens 5 --val-every 2 --out part a.txt"), 1);
    assert_non_null(strstr(output, "1 documents in 1 files leave none for validation"));
    assert_false(exists("part/train-00000.tok.zst"));
    assert_false(exists("part/train-00001.tok.zst"));
}

static void test_verify_names_the_damage_and_goes_on(void **state)
{
    (void)state;
    write_text("a.txt", "some text that is long enough to be damaged in its middle");
    assert_int_equal(run("prepare_data --tokenizer bytes --out v a.txt && cp v/train-00000.tok.zst bad.tok.zst"), 0);
    FILE *bad = fopen(in_folder("bad.tok.zst"), "r+b");
    assert_non_null(bad);
    fseek(bad, 110, SEEK_SET);
    fputc('!', bad);
    fclose(bad);
    assert_int_equal(run("prepare_data --verify v/train-00000.tok.zst"), 0);
    assert_non_null(strstr(output, "v/train-00000.tok.zst: ok, 59 tokens, vocabulary 320"));
    assert_int_equal(run("prepare_data --verify bad.tok.zst absent.tok.zst v/train-00000.tok.zst"), 1);
    assert_non_null(strstr(output, "error: bad.tok.zst: frame 0 at byte 80: checksum expected"));
    assert_non_null(strstr(output, "error: absent.tok.zst: No such file"));
    assert_non_null(strstr(output, "v/train-00000.tok.zst: ok"));
}

static void test_show_prints_tokens_and_text(void **state)
{
    (void)state;
    write_text("a.txt", "Hello\nthere, this is a text");
    assert_int_equal(run("prepare_data --tokenizer bytes --out show a.txt"), 0);
    assert_int_equal(run("prepare_data --show show/train-00000.tok.zst"), 0);
    assert_non_null(strstr(output, "29 tokens, vocabulary 320"));
    assert_non_null(strstr(output, " 0  256  72 101 108 108 111  10 116"));
    assert_non_null(strstr(output, "<bos>Hello\\nthere, th"));
    assert_non_null(strstr(output, "xt<eos>"));
    assert_int_equal(run("prepare_data --show show/train-00000.tok.zst --from 27 --count 1"), 0);
    assert_non_null(strstr(output, "27  116 "));
    assert_null(strstr(output, "<eos>"));
    assert_int_equal(run("prepare_data --show show/train-00000.tok.zst --from 29"), 1);
    assert_non_null(strstr(output, "--from 29: the shard has 29 tokens"));
}

static void test_wrong_use_says_what_and_exits_1(void **state)
{
    (void)state;
    write_text("a.txt", "text");
    write_text("a.jsonl", "{\"text\": \"x\"}");
    const char *cases[][2] = {
        {"", "no FILE"},
        {"--tokenizer bytes --out o", "no FILE"},
        {"a.txt", "needs --tokenizer and --out"},
        {"--tokenizer tokenizer.json --out o a.txt",
         "--tokenizer tokenizer.json: this build has the byte tokenizer only"},
        {"--tokenizer bytes --out o a.jsonl", "a.jsonl: JSON lines are not read by this build"},
        {"--tokenizer bytes --out o absent.txt", "absent.txt: No such file"},
        {"--tokenizer bytes --out o .", ".: is a folder"},
        {"--tokenizer bytes --out o --val-every 1 a.txt", "--val-every: expected a whole number from 2, found '1'"},
        {"--tokenizer bytes --out o --val-every -3 a.txt", "found '-3'"},
        {"--tokenizer bytes --out o --val-fraction 1 a.txt", "--val-fraction: expected a number from 0 to below 1"},
        {"--tokenizer bytes --out o --val-fraction nan a.txt", "found 'nan'"},
        {"--tokenizer bytes --out o --val-fraction .1 --val-every 3 a.txt", "choose one"},
        {"--tokenizer bytes --out o --shard-tokens 1e9 a.txt", "found '1e9'"},
        {"--tokenizer bytes --out o --from 3 a.txt", "belong to --show"},
        {"--verify --show x", "choose one"},
        {"--verify a.txt --out o", "do not belong"},
        {"--show a b", "takes one SHARD, found 2"},
        {"--verify a.txt", "a.txt: magic at byte 0"},
        {"--colour a.txt", "unrecognized option"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int status = run("prepare_data %s", cases[i][0]);
        if (status != 1 || !strstr(output, cases[i][1])) {
            print_error("prepare_data %s: exit %d: %s\n", cases[i][0], status, output);
        }
        assert_int_equal(status, 1);
        assert_non_null(strstr(output, cases[i][1]));
    }
    assert_false(exists("o"));
}

static void test_failures_of_the_machine_exit_2(void **state)
{
    (void)state;
    write_text("a.txt", "text");
    assert_int_equal(run("prepare_data --tokenizer bytes --out a.txt/o a.txt"), 2);
    assert_non_null(strstr(output, "a.txt"));
    assert_int_equal(run("prepare_data --tokenizer bytes --out full a.txt >/dev/full"), 2);
}

static int make_folder(void **state)
{
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state)
{
    (void)state;
    return run("rm -rf %s", folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_file_is_a_document),
        cmocka_unit_test(test_paragraphs_can_be_documents),
        cmocka_unit_test(test_validation_takes_its_share),
        cmocka_unit_test(test_shards_are_cut_at_a_number_of_tokens),
        cmocka_unit_test(test_old_shards_are_not_mixed_with_new_ones),
        cmocka_unit_test(test_a_failure_leaves_no_part_of_the_data),
        cmocka_unit_test(test_verify_names_the_damage_and_goes_on),
        cmocka_unit_test(test_show_prints_tokens_and_text),
        cmocka_unit_test(test_wrong_use_says_what_and_exits_1),
        cmocka_unit_test(test_failures_of_the_machine_exit_2),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
