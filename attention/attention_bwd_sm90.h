/* attention: the Hopper backward, D = 128, for the variant's own files and tests. Others use attention/attention.h.
 *
 * Routes: plain BF16; qk other than bf16 with pv = fp8 or mxfp4 and `represented`, `saved_output` or
 * `saved_output_fixed` (or their switches one by one). Each also with k_center and dk_center. The saved state is that
 * of attention_sm90.h, in device memory. */
#pragma once

#include "attention/attention.h"

/* NULL, or why the hand-written backward does not run (shape, recipe), given that the forward does
 * (attention_fwd_refuses_sm90, which checks the limits of size). */
const char *attention_bwd_refuses_sm90(const struct attention_shape *shape, const struct attention_recipe *recipe);
/* FP8 routes keep dS, a byte an element, T^2 / 2 bytes a query head (causal), for as many kv heads as 1.25 GiB hold, or
 * for one (2.0 GiB at T 32768 with four query heads a kv head, 32 at 131072). */
size_t attention_bwd_scratch_bytes_sm90(const struct attention_shape *shape, const struct attention_recipe *recipe);
/* As attention_variant.bwd. Views: data and all strides multiples of 16 bytes. stats is ignored; amax is used only
 * where the gradient views of Q and K are made from the tensors themselves (FP8 routes, qk_grad = original, without
 * k_center). */
void attention_bwd_sm90(const struct attention_bwd *a);
