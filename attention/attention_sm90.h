/* attention: the Hopper variant, D = 128; the inside, for its own files and tests. Others use attention/attention.h. */
#pragma once

#include "attention/attention.h"

/* NULL, or why the hand-written forward does not run (shape, recipe). */
const char *attention_fwd_refuses_sm90(const struct attention_shape *shape, const struct attention_recipe *recipe);
size_t attention_fwd_scratch_bytes_sm90(const struct attention_shape *shape, const struct attention_recipe *recipe);
/* As attention_variant.fwd. Views: data and all strides multiples of 16 bytes. */
void attention_fwd_sm90(const struct attention_fwd *a);

/* The backward (attention_bwd_sm90*.cu), likewise. It wants of the saved state what attention_cpu.h says. */
const char *attention_bwd_refuses_sm90(const struct attention_shape *shape, const struct attention_recipe *recipe);
size_t attention_bwd_scratch_bytes_sm90(const struct attention_shape *shape, const struct attention_recipe *recipe);
void attention_bwd_sm90(const struct attention_bwd *a);
