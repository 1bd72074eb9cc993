/* train: the config.json of a checkpoint: what `transformers` reads. */
#pragma once

#include "core/json.h"
#include "model/model_config.h"

/* LlamaForCausalLM, or with qk_norm Qwen3ForCausalLM, which is Llama with a norm over each head of Q and K. Caller owns
 * the object. */
json_t *hf_config(const struct model_config *config);
