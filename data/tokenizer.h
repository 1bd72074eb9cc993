/* data: text to tokens. The byte tokeniser, the only one: ids 0..255 are bytes, then BOS 256 and EOS 257; vocabulary
 * 258 is rounded up to 320 so that formats with blocks of 64 fit. */
#pragma once

#include "core/status.h"

#include <stddef.h>
#include <stdint.h>

enum { BYTE_BOS = 256, BYTE_EOS = 257, BYTE_VOCAB = 320 };

/* BOS, the bytes, EOS: n + 2 tokens. */
void byte_tokenizer_encode(const unsigned char *text, size_t n, int32_t *tokens);

/* A part of a document, without BOS and EOS: n tokens. */
void byte_tokenizer_encode_part(const unsigned char *text, size_t n, int32_t *tokens);

/* The bytes of the tokens that are bytes; returns how many were written (at most n). */
size_t byte_tokenizer_decode(const int32_t *tokens, size_t n, unsigned char *text);

/* A tokenizer.json for the Hugging Face libraries `tokenizers` and `transformers`: UTF-8 text becomes BOS and the same
 * ids, without EOS (which would end a prompt), and ids become the same text. Only there do the literal strings
 * <|begin_of_text|> and <|end_of_text|> stand for BOS and EOS. Fails with ERR_IO. */
MUST_CHECK enum status byte_tokenizer_write_json(const char *path);
