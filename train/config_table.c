/* train: the table of keys. A new key is a field in struct config and a row here; nothing else. */
#include "train/config.h"

#define FIELD(member) offsetof(struct config, member), sizeof(((struct config *)0)->member)
#define INT(section, name, member, fallback, min, max, resume, help)                                                   \
    {                                                                                                                  \
        section, name, KEY_INT, FIELD(member), NULL, fallback, min, max, resume, help                                  \
    }
#define REAL(section, name, member, fallback, min, max, resume, help)                                                  \
    {                                                                                                                  \
        section, name, KEY_REAL, FIELD(member), NULL, fallback, min, max, resume, help                                 \
    }
#define BOOL(section, name, member, fallback, resume, help)                                                            \
    {                                                                                                                  \
        section, name, KEY_BOOL, FIELD(member), NULL, fallback, 0, 1, resume, help                                     \
    }
#define ENUM(section, name, member, names, fallback, resume, help)                                                     \
    {                                                                                                                  \
        section, name, KEY_ENUM, FIELD(member), names, fallback, 0, 0, resume, help                                    \
    }
#define TEXT(section, name, type, member, fallback, resume, help)                                                      \
    {                                                                                                                  \
        section, name, type, FIELD(member), NULL, fallback, 0, 0, resume, help                                         \
    }

/* Largest values are sanity limits: a number beyond them is a slip of the finger. */
#define COUNT_MAX 1e15
#define REAL_MAX 1e30

static const char *const run_mode_names[] = {"train", "study", "step_time", NULL};
static const char *const determinism_names[] = {"auto", "off", "layout", "any", NULL};
static const char *const after_divergence_names[] = {"stop", "continue", NULL};
static const char *const master_names[] = {"none", "fp32", NULL};
static const char *const narrow_names[] = {"fp32", "bf16", NULL};

/* betas = [beta1, beta2] are two floats beside each other. */
_Static_assert(offsetof(struct adamw_config, beta2) == offsetof(struct adamw_config, beta1) + sizeof(float), "pair");
/* The enumerators are stored through an int. */
_Static_assert(sizeof(enum qk_format) == 4 && sizeof(enum recompute) == 4, "enum size");

const struct config_key config_keys[] = {
    ENUM("run", "mode", run.mode, run_mode_names, "train", RESUME_FREE,
         "one training run, a study of matched arms, or a measurement of the step time"),
    TEXT("run", "name", KEY_TEXT, run.name, "run", RESUME_FREE, "name of the run, for logs and reports"),
    TEXT("run", "out", KEY_PATH, run.out, "", RESUME_FREE, "run folder; empty: runs/NAME in the working directory"),
    INT("run", "steps", run.steps, "0", 0, COUNT_MAX, RESUME_NOTICE, "updates to make; give this or run.tokens"),
    INT("run", "tokens", run.tokens, "0", 0, COUNT_MAX, RESUME_NOTICE,
        "tokens to train on, rounded up to whole updates; give this or run.steps"),
    REAL("run", "max_minutes", run.max_minutes, "0", 0, 1e6, RESUME_FREE,
         "stop with a checkpoint and exit status 4 after this time; 0: no limit"),
    INT("run", "seed", run.seed, "1", 0, COUNT_MAX, RESUME_FIXED,
        "of initial weights, sample order and stochastic rounding"),
    ENUM("run", "deterministic", run.deterministic, determinism_names, "auto", RESUME_NOTICE,
         "any (CPU only): equal bits over 1, 2, 4, ... ranks; layout (CUDA): equal bits for equal ranks, micro-batch "
         "and GEMM algorithms; off (CUDA): sums in any order where faster; auto: any on the CPU, layout on CUDA"),

    INT("model", "layers", model.layers, NULL, 1, 1000, RESUME_FIXED, "transformer layers"),
    INT("model", "width", model.width, NULL, 1, 1e6, RESUME_FIXED, "hidden size"),
    INT("model", "heads", model.heads, NULL, 1, 1e4, RESUME_FIXED, "query heads"),
    INT("model", "kv_heads", model.kv_heads, NULL, 1, 1e4, RESUME_FIXED, "key and value heads; divides heads"),
    INT("model", "head_dim", model.head_dim, NULL, 2, 1024, RESUME_FIXED, "features of a head, even"),
    INT("model", "ffn", model.ffn, NULL, 1, 1e6, RESUME_FIXED, "width of the SwiGLU feed-forward"),
    INT("model", "vocab", model.vocab, NULL, 2, 1e7, RESUME_FIXED, "tokens of the vocabulary"),
    INT("model", "context", model.context, "0", 0, 1e8, RESUME_FIXED,
        "longest sequence that the model is declared for; 0: data.seq_len"),
    REAL("model", "rope_theta", model.rope.theta, "500000", 1, REAL_MAX, RESUME_FIXED, "base of the rotary embedding"),
    ENUM("model", "rope_scaling", model.rope.scaling, rope_scaling_names, "none", RESUME_FIXED,
         "llama3: frequencies scaled as in Llama 3.1"),
    REAL("model", "rope_factor", model.rope.factor, "8", 1, 1e6, RESUME_FIXED, "llama3 scaling: factor"),
    REAL("model", "rope_low", model.rope.low_freq_factor, "1", 1e-6, 1e6, RESUME_FIXED,
         "llama3 scaling: low frequency factor"),
    REAL("model", "rope_high", model.rope.high_freq_factor, "4", 1e-6, 1e6, RESUME_FIXED,
         "llama3 scaling: high frequency factor"),
    INT("model", "rope_original_context", model.rope.original_context, "8192", 1, 1e8, RESUME_FIXED,
        "llama3 scaling: context before scaling"),
    BOOL("model", "tied", model.tied, "false", RESUME_FIXED, "the head is the embedding"),
    BOOL("model", "qk_norm", model.qk_norm, "false", RESUME_FIXED, "RMSNorm over each head of Q and K"),
    REAL("model", "norm_eps", model.norm_eps, "1e-5", 0, 1, RESUME_FIXED, "epsilon of RMSNorm"),
    REAL("model", "init_std", model.init_std, "0.02", 0, 10, RESUME_FIXED, "standard deviation of initial weights"),

    ENUM("attention", "qk", attention.qk, qk_format_names, "bf16", RESUME_FIXED, "format of Q and K in the scores"),
    ENUM("attention", "qk_scale", attention.qk_scale, qk_scale_names, "amax", RESUME_FIXED,
         "block scale of NVFP4 Q and K; folded is for inference"),
    ENUM("attention", "pv", attention.pv, pv_format_names, "bf16", RESUME_FIXED, "format of P and V"),
    ENUM("attention", "mx_rule", attention.mx_rule, mx_family_names, "nearest", RESUME_FIXED,
         "exponents of MXFP4 blocks: nearest amplitude (the paper's) or OCP"),
    ENUM("attention", "p_map", attention.p_map, p_map_names, "exact", RESUME_FIXED,
         "how scores become codes of P: exact; threshold (the same codes); code_space or affine (Direct-P); accurate "
         "(the paper's mixture of affine and exact)"),
    REAL("attention", "affine_a", attention.affine_a, "1.5", -100, 100, RESUME_FIXED, "slope of the affine p_map"),
    REAL("attention", "affine_b", attention.affine_b, "1.2", -100, 100, RESUME_FIXED, "offset of the affine p_map"),
    ENUM("attention", "anchor", attention.anchor, p_anchor_names, "row", RESUME_FIXED,
         "what P of a row is relative to: its maximum, rounded up; zero; or a sampled maximum (the paper's guard)"),
    ENUM("attention", "v_diag", attention.v_diag, v_diag_names, "blocked", RESUME_FIXED,
         "format of V in the diagonal block; fp8 keeps blocked V causal"),
    INT("attention", "sink_keys_fp8", attention.sink_keys_fp8, "0", 0, 1e6, RESUME_FIXED,
        "first keys whose P and V stay in FP8; a multiple of 32"),
    BOOL("attention", "k_center", attention.k_center, "false", RESUME_FIXED, "subtract the mean of K over keys"),
    BOOL("attention", "dk_center", attention.dk_center, "false", RESUME_FIXED, "subtract the mean of dK over keys"),
    ENUM("attention", "backward", attention.backward, backward_preset_names, "", RESUME_FIXED,
         "preset of the seven keys below, which can each be set alone; empty: bf16 where qk and pv are bf16, else "
         "represented"),
    ENUM("attention", "bwd_p", attention.bwd_p, bwd_p_names, "", RESUME_FIXED, "P in backward; empty: by the preset"),
    ENUM("attention", "bwd_v", attention.bwd_v, bwd_v_names, "", RESUME_FIXED, "V in dP; empty: by the preset"),
    ENUM("attention", "bwd_stat", attention.bwd_stat, bwd_stat_names, "", RESUME_FIXED,
         "row statistic r in dS = P (dP - r); empty: by the preset"),
    ENUM("attention", "do_format", attention.do_format, do_format_names, "", RESUME_FIXED,
         "format of dO; empty: by the preset"),
    ENUM("attention", "do_scale", attention.do_scale, do_scale_names, "", RESUME_FIXED,
         "scale of dO; empty: by the preset"),
    ENUM("attention", "ds_scale", attention.ds_scale, ds_scale_names, "", RESUME_FIXED,
         "scale of dS; empty: by the preset"),
    ENUM("attention", "qk_grad", attention.qk_grad, qk_grad_names, "", RESUME_FIXED,
         "Q and K in dQ and dK; empty: by the preset"),
    REAL("attention", "debug_leak", attention.debug_leak, "0", -1, 1, RESUME_FIXED,
         "a planted error, for controls: r is shifted so that each row's sum of dS changes by this fraction of its sum "
         "of |dS|. In this section so that arms may set it. Needs debug.allow"),
    TEXT("attention", "variant", KEY_TEXT, attention_variant, "auto", RESUME_NOTICE,
         "implementation: auto, cpu, cuda or sm90; one that cannot run is an error"),

    ENUM("linear", "attn", linear.attn, linear_format_names, "bf16", RESUME_FIXED,
         "format of the Q, K, V, O projections"),
    ENUM("linear", "mlp", linear.mlp, linear_format_names, "bf16", RESUME_FIXED, "format of gate, up and down"),
    ENUM("linear", "head", linear.head, linear_format_names, "bf16", RESUME_FIXED, "format of the head"),
    INT("linear", "first_layers_bf16", linear.first_layers_bf16, "0", 0, 1000, RESUME_FIXED,
        "first layers whose projections stay in BF16"),
    INT("linear", "last_layers_bf16", linear.last_layers_bf16, "0", 0, 1000, RESUME_FIXED,
        "last layers whose projections stay in BF16"),

    REAL("optim", "lr", optim.lr_peak, NULL, 0, 100, RESUME_NOTICE, "peak learning rate"),
    {"optim", "betas", KEY_PAIR, FIELD(optim.beta1), NULL, "[0.9, 0.95]", 0, 0.999999, RESUME_NOTICE,
     "decay of the first and second moment"},
    REAL("optim", "eps", optim.eps, "1e-8", 1e-30, 1, RESUME_NOTICE, "epsilon of AdamW"),
    REAL("optim", "weight_decay", optim.weight_decay, "0.1", 0, 10, RESUME_NOTICE,
         "decoupled decay of matrices and embeddings, never of norm gains"),
    REAL("optim", "clip", optim.clip, "1", 0, REAL_MAX, RESUME_NOTICE, "largest gradient norm; 0: no clipping"),
    ENUM("optim", "master", optim.master_fp32, master_names, "fp32", RESUME_FIXED,
         "master weights; none: the BF16 weights are the parameters"),
    ENUM("optim", "moments", optim.moments_bf16, narrow_names, "fp32", RESUME_FIXED, "format of the moments"),
    BOOL("optim", "stochastic_rounding", optim.stochastic_rounding, "false", RESUME_FIXED,
         "of BF16 weights without master, and of BF16 moments"),
    ENUM("optim", "grads", optim.grads_bf16, narrow_names, "fp32", RESUME_FIXED,
         "format that gradients are summed and reduced in"),

    INT("schedule", "warmup", schedule.warmup, "0", 0, COUNT_MAX, RESUME_NOTICE, "updates of linear warm-up"),
    ENUM("schedule", "kind", schedule.kind, schedule_kind_names, "cosine", RESUME_NOTICE, "shape after the warm-up"),
    REAL("schedule", "final_fraction", schedule.final_fraction, "0.1", 0, 1, RESUME_NOTICE,
         "learning rate of the last update, as a fraction of the peak"),
    REAL("schedule", "decay_fraction", schedule.decay_fraction, "0.2", 0, 1, RESUME_NOTICE,
         "wsd: the last part of the run, which decays"),

    TEXT("data", "train", KEY_GLOBS, data.train, "", RESUME_FREE,
         "globs of training shards, blanks between; on resume their contents are compared, not their names. "
         "Required, except by run.mode = step_time, which takes random tokens without it"),
    TEXT("data", "val", KEY_GLOBS, data.val, "", RESUME_FREE, "globs of validation shards; empty: no evaluation"),
    TEXT("data", "tokenizer", KEY_PATH, data.tokenizer, "", RESUME_FREE,
         "tokenizer.json to put into checkpoints; empty: written for the byte tokeniser's vocabulary, else none"),
    INT("data", "batch", data.batch, NULL, 1, 1e5, RESUME_FIXED, "sequences of an update, over all ranks"),
    INT("data", "micro_batch", data.micro_batch, "1", 1, 1e9, RESUME_FREE,
        "sequences of a rank that run at once; divides data.batch over the ranks. On CUDA scales of linear recipes "
        "span them; run.deterministic = any sums gradients by sample, so the CPU takes 1 only"),
    INT("data", "seq_len", data.seq_len, NULL, 1, 1e8, RESUME_FIXED, "tokens of a sequence"),
    INT("data", "prefetch", data.prefetch, "2", 0, 64, RESUME_FREE, "batches read ahead"),

    REAL("dist", "timeout_s", timeout_s, "600", 1, 1e6, RESUME_FREE,
         "a rank that waits longer for another ends the run"),
    INT("dist", "bucket_mb", bucket_mb, "256", 1, 65536, RESUME_FREE,
        "CUDA: MiB of gradients that one call of NCCL sums; the CPU sums all at once"),

    INT("checkpoint", "every", checkpoint.every, "0", 0, COUNT_MAX, RESUME_FREE,
        "updates between checkpoints; 0: at the end only"),
    INT("checkpoint", "keep", checkpoint.keep, "3", 1, 1e6, RESUME_FREE, "newest checkpoints to keep"),
    INT("checkpoint", "keep_forever_every", checkpoint.keep_forever_every, "0", 0, COUNT_MAX, RESUME_FREE,
        "checkpoints at multiples of this are never deleted; 0: none"),
    TEXT("checkpoint", "resume", KEY_PATH, checkpoint.resume, "auto", RESUME_FREE,
         "auto: the newest good one of run.out; never: a new run, refused if run.out holds checkpoints; else its path"),
    TEXT("checkpoint", "may_change", KEY_TEXT, checkpoint.may_change, "", RESUME_FREE,
         "keys that may differ from the resumed checkpoint, as section.key or section.*, blanks between"),

    INT("log", "every", log_every, "1", 1, COUNT_MAX, RESUME_FREE, "updates between rows of metrics.jsonl"),
    INT("log", "attention_every", attention_every, "1", 0, COUNT_MAX, RESUME_NOTICE,
        "CUDA: updates between statistics of attention, 0: none. Updates without them may run faster kernels (sm90), "
        "with other roundings; the CPU makes them always"),
    BOOL("log", "stdout", log_stdout, "true", RESUME_FREE, "a console line for each row"),

    INT("eval", "every", eval_every, "0", 0, COUNT_MAX, RESUME_FREE, "updates between evaluations; 0: at the end only"),
    INT("eval", "steps", eval_steps, "4", 1, 1e4, RESUME_FREE, "batches of an evaluation"),

    BOOL("divergence", "stop", divergence_stop, "true", RESUME_FREE,
         "end the run, exit status 3, once it has diverged"),
    INT("divergence", "window", watch.window, "100", 1, WATCH_WINDOW_MAX, RESUME_NOTICE,
        "updates that the baselines are medians of"),
    REAL("divergence", "loss_rise_suspect", watch.loss_rise_suspect, "0.5", 0, 1e6, RESUME_NOTICE,
         "nats above the best level: suspect"),
    REAL("divergence", "loss_rise_diverged", watch.loss_rise_diverged, "0.75", 0, 1e6, RESUME_NOTICE,
         "nats above the best level, lasting: diverged"),
    REAL("divergence", "norm_factor", watch.norm_factor, "8", 1, 1e12, RESUME_NOTICE,
         "gradient norm over its baseline: a burst"),
    INT("divergence", "confirm", watch.confirm, "25", 1, 1e6, RESUME_NOTICE, "updates that a rise must last"),
    REAL("divergence", "partner_gap", watch.partner_gap, "0.75", 0, 1e6, RESUME_NOTICE,
         "study: nats above the reference arm, lasting: diverged"),

    TEXT("study", "arms", KEY_GLOBS, study.arms, "", RESUME_FREE,
         "globs of arm files, which may set [attention] and [linear] only"),
    TEXT("study", "reference", KEY_TEXT, study.reference, "bf16", RESUME_FREE,
         "the arm that runs first and that others are compared with: its file name without .toml"),
    TEXT("study", "seeds", KEY_SEEDS, study.seeds, "[]", RESUME_FREE, "runs of each arm; empty: run.seed alone"),
    TEXT("study", "from", KEY_PATH, study.from, "init", RESUME_FREE,
         "init, or the checkpoint that every arm starts at"),
    ENUM("study", "after_divergence", study.after_divergence, after_divergence_names, "stop", RESUME_FREE,
         "what an arm does once it has diverged"),

    TEXT("device", "kind", KEY_TEXT, device, "auto", RESUME_FREE, "auto, cpu or cuda"),
    ENUM(
        "device", "recompute", recompute, recompute_names, "none", RESUME_FREE,
        "block: keep layer inputs only and run the forward again in backward; gate_up (CUDA): run only the gate and up "
        "product again; changes no bit"),
    BOOL("device", "graphs", graphs, "true", RESUME_FREE,
         "CUDA: forward and backward are recorded once and replayed; changes no bit"),
    TEXT("device", "gemm_choices", KEY_PATH, gemm_choices, "", RESUME_FREE,
         "CUDA: file of the GEMM algorithms: rank 0 reads it if it exists, adds what it lacks, and all ranks use its "
         "choices. Runs that share it have equal bits; one of another GPU or cuBLASLt is replaced. Empty: in a study "
         "one for all arms, on resume the checkpoint's own, else timed anew"),

    BOOL("debug", "allow", debug_allow, "false", RESUME_FREE,
         "permits errors that are planted on purpose: debug.fault and attention.debug_leak"),
    TEXT("debug", "fault", KEY_TEXT, debug_fault, "", RESUME_FREE,
         "KIND@UPDATE:RANK with KIND nan_grad, inf_grad (one gradient element), nan_weight, or exit, hang, kill (the "
         "rank's process); again after a resume. Empty: none"),
};
const int config_key_count = sizeof config_keys / sizeof config_keys[0];
_Static_assert(sizeof config_keys / sizeof config_keys[0] <= CONFIG_KEYS_MAX, "raise CONFIG_KEYS_MAX");

const struct config_absent config_absent_keys[] = {
    {"dist.zero", "sharding is not built: every rank holds weights, gradients and moments whole"},
    {"checkpoint.async", "checkpoints are written between updates, never beside them"},
    {NULL, NULL},
};
