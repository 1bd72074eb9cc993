/* train: Hugging Face names for our shape. */
#include "train/hf_config.h"

#include "data/tokenizer.h"

#include <stdio.h>
#include <stdlib.h>

enum { LLAMA3_VOCAB = 128256, LLAMA3_BOS = 128000, LLAMA3_EOS = 128001 };

/* 1e-5F as 1e-05 and not as 9.9999997e-06. */
static json_t *real(float x)
{
    char text[32];
    for (int digits = 1; digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, (double)x);
        if ((float)strtod(text, NULL) == x) {
            break;
        }
    }
    return json_real(strtod(text, NULL));
}

static json_t *rope_scaling(const struct rope_config *rope)
{
    if (rope->scaling == ROPE_NONE) {
        return json_null();
    }
    return json_pack("{s:s, s:o, s:o, s:o, s:i}", "rope_type", "llama3", "factor", real(rope->factor),
                     "low_freq_factor", real(rope->low_freq_factor), "high_freq_factor", real(rope->high_freq_factor),
                     "original_max_position_embeddings", rope->original_context);
}

json_t *hf_config(const struct model_config *c)
{
    const char *class = c->qk_norm ? "Qwen3ForCausalLM" : "LlamaForCausalLM";
    json_t *root = json_pack(
        "{s:[s], s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:o, s:o, s:o, s:o, s:b, s:s, s:s, s:b, s:b}",
        "architectures", class, "model_type", c->qk_norm ? "qwen3" : "llama", "vocab_size", c->vocab, "hidden_size",
        c->width, "intermediate_size", c->ffn, "num_hidden_layers", c->layers, "num_attention_heads", c->heads,
        "num_key_value_heads", c->kv_heads, "head_dim", c->head_dim, "max_position_embeddings", c->context,
        "rope_theta", real(c->rope.theta), "rope_scaling", rope_scaling(&c->rope), "rms_norm_eps", real(c->norm_eps),
        "initializer_range", real(c->init_std), "tie_word_embeddings", c->tied, "hidden_act", "silu", "torch_dtype",
        "bfloat16", "attention_bias", 0, "mlp_bias", 0);
    ASSERT(root != NULL);
    if (c->vocab == BYTE_VOCAB || c->vocab == LLAMA3_VOCAB) {
        bool bytes = c->vocab == BYTE_VOCAB;
        json_object_set_new(root, "bos_token_id", json_integer(bytes ? BYTE_BOS : LLAMA3_BOS));
        json_object_set_new(root, "eos_token_id", json_integer(bytes ? BYTE_EOS : LLAMA3_EOS));
    }
    return root;
}
