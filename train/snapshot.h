/* train: between a trainer and its checkpoints on disk: out/checkpoints/step_XXXXXXXX. */
#pragma once

#include "train/trainer.h"

/* Saves, then deletes what rotation no longer keeps; a diverged run rotates nothing out. All ranks call it. */
MUST_CHECK enum status snapshot_save(struct trainer *trainer, const char *out);

/* Loads the checkpoint at `path`: weights, optimizer, watch, update, samples. Its configuration must fit
 * (config_compare with `allowed`), and its training data hold the same tokens. */
MUST_CHECK enum status snapshot_load(struct trainer *trainer, const char *path, const char *allowed);

/* By checkpoint.resume: "auto" takes the newest good one of `out`, if any; "never" fails if `out` has one; a path loads
 * that one. *resumed says whether anything was loaded. All ranks call it. */
MUST_CHECK enum status snapshot_resume(struct trainer *trainer, const char *out, bool *resumed);

/* Path of the newest healthy checkpoint of `out`, "" if there is none. Marks those after `onset` suspect first, where
 * onset > 0. Rank 0 only. */
MUST_CHECK enum status snapshot_last_healthy(const char *out, int64_t onset, char *path, size_t bytes);
