/* data: the bytes of a token shard, version 1 (docs/file_formats.md). Private to shard.c and shard_writer.c.
 *
 *   byte  0  magic "gpt8btok"         24  u64 tokens
 *         8  u32 version              32  u64 frames
 *        12  u32 bytes a token        40  u64 bytes of the file
 *        16  u32 vocabulary           48  u64 0, reserved
 *        20  u32 tokens a frame       56  u64 XXH3-64 of bytes 0..55 and the frame table
 *        64  frame table: for each frame u64 offset in the file, u64 XXH3-64 of its compressed bytes
 *            frames, one after the other, to the end of the file
 *
 * All numbers are little-endian, whatever the machine. */
#pragma once

#include "data/shard.h"

enum {
    SHARD_VERSION = 1,
    SHARD_HEADER_BYTES = 64,
    SHARD_ENTRY_BYTES = 16,
    SHARD_AT_VERSION = 8,
    SHARD_AT_TOKEN_BYTES = 12,
    SHARD_AT_VOCAB = 16,
    SHARD_AT_FRAME_TOKENS = 20,
    SHARD_AT_TOKENS = 24,
    SHARD_AT_FRAMES = 32,
    SHARD_AT_FILE_BYTES = 40,
    SHARD_AT_CHECKSUM = 56,
};

#define SHARD_MAGIC "gpt8btok" /* 8 bytes without the NUL */

static inline uint64_t shard_get(const unsigned char *bytes, int n)
{
    uint64_t x = 0;
    for (int i = 0; i < n; i++) {
        x |= (uint64_t)bytes[i] << (8 * i);
    }
    return x;
}

static inline void shard_put(unsigned char *bytes, int n, uint64_t x)
{
    for (int i = 0; i < n; i++) {
        bytes[i] = (unsigned char)(x >> (8 * i));
    }
}

/* The one width that goes with a vocabulary. */
static inline uint32_t shard_token_bytes(uint32_t vocab)
{
    return vocab <= 65536 ? 2 : 4;
}

static inline uint64_t shard_frame_count(uint64_t tokens)
{
    return tokens / SHARD_FRAME_TOKENS + (tokens % SHARD_FRAME_TOKENS != 0);
}
