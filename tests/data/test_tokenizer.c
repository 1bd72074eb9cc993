/* The byte tokenizer, and that its tokenizer.json says the same to a reader that knows GPT-2's byte alphabet. */
#include "tests/test.h"

#include "core/json.h"
#include "data/tokenizer.h"
#include "tests/data/shard_files.h"

#include <string.h>

static void test_bytes_become_their_own_ids_between_bos_and_eos(void **state)
{
    (void)state;
    unsigned char text[256], back[256];
    int32_t tokens[258];
    for (int i = 0; i < 256; i++) {
        text[i] = (unsigned char)(255 - i);
    }
    byte_tokenizer_encode(text, 256, tokens);
    assert_int_equal(tokens[0], 256);
    assert_int_equal(tokens[257], 257);
    for (int i = 0; i < 256; i++) {
        assert_int_equal(tokens[i + 1], 255 - i);
    }
    assert_int_equal(byte_tokenizer_decode(tokens, 258, back), 256);
    assert_memory_equal(text, back, 256);
    byte_tokenizer_encode(text, 0, tokens);
    assert_int_equal(tokens[0], 256);
    assert_int_equal(tokens[1], 257);
    const int32_t odd[] = {-1, 'a', 258, 319, 256, 'b'};
    assert_int_equal(byte_tokenizer_decode(odd, 6, back), 2);
    assert_memory_equal(back, "ab", 2);
}

/* The byte that a character of GPT-2's alphabet stands for, from the published rule: printable bytes are themselves,
 * the n-th other byte is U+0100 + n. */
static int byte_of_character(unsigned code)
{
    unsigned others = 0;
    for (unsigned byte = 0; byte < 256; byte++) {
        bool itself = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || (byte >= 174 && byte <= 255);
        unsigned character = itself ? byte : 256 + others;
        others += itself ? 0 : 1;
        if (character == code) {
            return (int)byte;
        }
    }
    return -1;
}

static unsigned decode_utf8(const char *text)
{
    const unsigned char *u = (const unsigned char *)text;
    if (u[0] < 0x80) {
        assert_int_equal(u[1], 0);
        return u[0];
    }
    assert_int_equal(u[0] & 0xe0, 0xc0);
    assert_int_equal(u[2], 0);
    return (u[0] & 0x1fu) << 6 | (u[1] & 0x3fu);
}

static void test_tokenizer_json_gives_every_byte_its_id(void **state)
{
    (void)state;
    const char *path = scratch_path("tokenizer.json");
    json_t *root;
    assert_int_equal(byte_tokenizer_write_json(path), OK);
    assert_int_equal(json_read_file(path, &root), OK);
    json_t *model = json_object_get(root, "model"), *vocab = json_object_get(model, "vocab"), *id;
    assert_string_equal(json_string_value(json_object_get(model, "type")), "BPE");
    assert_int_equal(json_array_size(json_object_get(model, "merges")), 0);
    assert_int_equal(json_object_size(vocab), 256);
    int seen[256] = {0};
    const char *key;
    json_object_foreach(vocab, key, id)
    {
        int byte = byte_of_character(decode_utf8(key));
        assert_int_equal(byte, json_integer_value(id));
        seen[byte]++;
    }
    for (int byte = 0; byte < 256; byte++) {
        assert_int_equal(seen[byte], 1);
    }
    json_t *added = json_object_get(root, "added_tokens");
    assert_int_equal(json_array_size(added), 2);
    assert_int_equal(json_integer_value(json_object_get(json_array_get(added, 0), "id")), BYTE_BOS);
    assert_int_equal(json_integer_value(json_object_get(json_array_get(added, 1), "id")), BYTE_EOS);
    json_t *pre = json_object_get(root, "pre_tokenizer");
    assert_true(json_is_false(json_object_get(pre, "add_prefix_space")));
    assert_true(json_is_false(json_object_get(pre, "use_regex")));
    json_decref(root);
    assert_int_equal(byte_tokenizer_write_json("/nonexistent/tokenizer.json"), ERR_IO);
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
        cmocka_unit_test(test_bytes_become_their_own_ids_between_bos_and_eos),
        cmocka_unit_test(test_tokenizer_json_gives_every_byte_its_id),
    };
    return cmocka_run_group_tests(tests, NULL, remove_scratch);
}
