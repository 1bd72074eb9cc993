/* data: the order of samples. Sample g of a run is a pure function of (seed, g): epoch g / n, and within the epoch a
 * keyed permutation of the n windows, computed without a table (docs/file_formats.md). */
#pragma once

#include <stdint.h>

/* Where sample i of `epoch` lies: a bijection of [0, n) for every n from 1 to 2^62; i < n. */
uint64_t sampler_permute(uint64_t seed, uint64_t epoch, uint64_t n, uint64_t i);
