/* tests/model: the CPU's attention for a model on the GPU, so that what remains between the two models is the model. It
 * waits and copies: not for capture. */
#pragma once

#include "attention/attention.h"

extern const struct attention_variant attention_variant_host;
