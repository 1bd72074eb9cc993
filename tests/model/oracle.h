/* tests/model: the model again, in FP64, one sample, written from the published architecture with plain loops and none
 * of the model's code. */
#pragma once

#include "model/params.h"

/* Summed cross entropy over targets >= 0 of one sample; w: a flat array as param_list places it.
 * logits (tokens, V) out, or NULL. */
double oracle_loss(const struct model_config *config, const struct param_list *params, const double *w,
                   const int32_t *tokens, const int32_t *targets, int count, double *logits);

/* Inverse frequency of pair i as Hugging Face's rope_type "llama3" writes it: by wave lengths. */
double oracle_inverse_frequency(const struct rope_config *rope, int head_dim, int i);
