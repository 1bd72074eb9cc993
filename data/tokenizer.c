/* data: the byte tokenizer, and its tokenizer.json.
 *
 * For the library `tokenizers` it is a byte-level BPE without merges: its ByteLevel step writes each byte as one
 * printable character, the vocabulary gives that character the byte's id. */
#include "data/tokenizer.h"

#include "core/json.h"

#include <stdbool.h>
#include <stdio.h>

void byte_tokenizer_encode_part(const unsigned char *text, size_t n, int32_t *tokens)
{
    for (size_t i = 0; i < n; i++) {
        tokens[i] = text[i];
    }
}

void byte_tokenizer_encode(const unsigned char *text, size_t n, int32_t *tokens)
{
    tokens[0] = BYTE_BOS;
    byte_tokenizer_encode_part(text, n, tokens + 1);
    tokens[n + 1] = BYTE_EOS;
}

size_t byte_tokenizer_decode(const int32_t *tokens, size_t n, unsigned char *text)
{
    size_t bytes = 0;
    for (size_t i = 0; i < n; i++) {
        if (tokens[i] >= 0 && tokens[i] < 256) {
            text[bytes++] = (unsigned char)tokens[i];
        }
    }
    return bytes;
}

/* GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the others, in order, for U+0100 and up. */
static bool byte_is_printable(int byte)
{
    return (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
}

/* The vocabulary of the 256 bytes; NULL if memory ran out. */
static json_t *byte_vocabulary(void)
{
    json_t *vocabulary = json_object();
    int others = 0;
    for (int byte = 0; byte < 256; byte++) {
        int code = byte_is_printable(byte) ? byte : 0x100 + others++;
        char utf8[3] = {(char)code};
        if (code >= 0x80) {
            utf8[0] = (char)(0xc0 | code >> 6);
            utf8[1] = (char)(0x80 | (code & 0x3f));
        }
        json_object_set_new(vocabulary, utf8, json_integer(byte));
    }
    return vocabulary;
}

static json_t *special_token(int id, const char *content)
{
    return json_pack("{s:i, s:s, s:b, s:b, s:b, s:b, s:b}", "id", id, "content", content, "single_word", 0, "lstrip", 0,
                     "rstrip", 0, "normalized", 0, "special", 1);
}

/* Text gets a BOS in front, as a prompt needs it. The EOS ends a document; prepare_data writes it. */
static json_t *bos_template(void)
{
    const char *bos = "<|begin_of_text|>";
    return json_pack("{s:s, s:[{s:{s:s, s:i}}, {s:{s:s, s:i}}], s:[{s:{s:s, s:i}}, {s:{s:s, s:i}}, {s:{s:s, s:i}}], "
                     "s:{s:{s:s, s:[i], s:[s]}}}",
                     "type", "TemplateProcessing",                                                           //
                     "single", "SpecialToken", "id", bos, "type_id", 0, "Sequence", "id", "A", "type_id", 0, //
                     "pair", "SpecialToken", "id", bos, "type_id", 0, "Sequence", "id", "A", "type_id", 0, "Sequence",
                     "id", "B", "type_id", 1, //
                     "special_tokens", bos, "id", bos, "ids", BYTE_BOS, "tokens", bos);
}

static json_t *byte_level(void)
{
    return json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 0, "use_regex",
                     0);
}

enum status byte_tokenizer_write_json(const char *path)
{
    json_t *root =
        json_pack("{s:s, s:n, s:n, s:[o, o], s:n, s:o, s:o, s:o, s:{s:s, s:n, s:n, s:n, s:n, s:b, s:b, s:o, s:[]}}",
                  "version", "1.0", "truncation", "padding", "added_tokens",
                  special_token(BYTE_BOS, "<|begin_of_text|>"), special_token(BYTE_EOS, "<|end_of_text|>"),
                  "normalizer", "pre_tokenizer", byte_level(), "post_processor", bos_template(), "decoder",
                  byte_level(), "model", "type", "BPE", "dropout", "unk_token", "continuing_subword_prefix",
                  "end_of_word_suffix", "fuse_unk", 0, "byte_fallback", 0, "vocab", byte_vocabulary(), "merges");
    if (!root) {
        return status_fail(ERR_NOMEM, "%s: no memory to build it", path);
    }
    enum status status = json_write_file(path, root);
    json_decref(root);
    return status;
}
