/* tools: prepare_data turns text into token shards, and checks and shows them.
 *
 * Text is read in pieces and shards are cut at a fixed number of tokens, so that memory does not grow with the input.
 * Which document is validation depends on its number only: the same files give the same shards.
 * One program is one file, so this one is longer than others: command line, preparing, looking. */
#include "core/file.h"
#include "core/log.h"
#include "data/shard_set.h"
#include "data/tokenizer.h"

#include <argp.h>
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { PIECE = 1 << 16, SHOW_ROW = 16 };

/* ---- command line ------------------------------------------------------------------------------------------------ */

struct options {
    const char *tokenizer, *out;
    bool verify, show, overwrite, has_range;
    double val_fraction; /* 0: none */
    uint64_t val_every;  /* 0: none */
    uint64_t shard_tokens;
    uint64_t paragraph_bytes; /* 0: a document is a file */
    uint64_t from, count;     /* of --show */
    char **files;
    int n_files;
};

enum {
    OPTION_TOKENIZER = 256,
    OPTION_OUT,
    OPTION_VAL_FRACTION,
    OPTION_VAL_EVERY,
    OPTION_SHARD_TOKENS,
    OPTION_SPLIT_PARAGRAPHS,
    OPTION_OVERWRITE,
    OPTION_VERIFY,
    OPTION_SHOW,
    OPTION_FROM,
    OPTION_COUNT,
};

static const struct argp_option option_table[] = {
    {NULL, 0, NULL, 0, "Preparing:", 1},
    {"tokenizer", OPTION_TOKENIZER, "NAME", 0, "bytes: 256 bytes, BOS 256, EOS 257, vocabulary 320", 1},
    {"out", OPTION_OUT, "DIR", 0, "folder for train-*.tok.zst, val-*.tok.zst and tokenizer.json", 1},
    {"val-fraction", OPTION_VAL_FRACTION, "F", 0, "this share of the documents, evenly spread, is validation", 1},
    {"val-every", OPTION_VAL_EVERY, "N", 0, "every N-th document is validation", 1},
    {"split-paragraphs", OPTION_SPLIT_PARAGRAPHS, "BYTES", OPTION_ARG_OPTIONAL,
     "a document ends at the first blank line after BYTES bytes (default 1); otherwise each file is one document", 1},
    {"shard-tokens", OPTION_SHARD_TOKENS, "N", 0, "tokens of a shard at most (default 67108864)", 1},
    {"overwrite", OPTION_OVERWRITE, NULL, 0, "remove the shards that DIR already holds", 1},
    {NULL, 0, NULL, 0, "Looking:", 2},
    {"verify", OPTION_VERIFY, NULL, 0, "read every token of the shards and check it", 2},
    {"show", OPTION_SHOW, NULL, 0, "print tokens and text of a shard", 2},
    {"from", OPTION_FROM, "N", 0, "first token to show (default 0)", 2},
    {"count", OPTION_COUNT, "M", 0, "tokens to show (default 256)", 2},
    {0},
};

static uint64_t parse_count(struct argp_state *state, const char *option, const char *text, uint64_t least)
{
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno != 0 || *end != '\0' || !isdigit((unsigned char)text[0]) || value < least) {
        argp_error(state, "--%s: expected a whole number from %" PRIu64 ", found '%s'", option, least, text);
    }
    return value;
}

static double parse_fraction(struct argp_state *state, const char *text)
{
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end != '\0' || !(value >= 0.0 && value < 1.0)) {
        argp_error(state, "--val-fraction: expected a number from 0 to below 1, found '%s'", text);
    }
    return value;
}

static void check_options(struct argp_state *state, const struct options *o)
{
    if (o->n_files == 0) {
        argp_error(state, "no FILE or SHARD given");
    }
    if (o->verify && o->show) {
        argp_error(state, "--verify and --show: choose one");
    }
    if (o->has_range && !o->show) {
        argp_error(state, "--from and --count belong to --show");
    }
    if ((o->verify || o->show) && (o->out || o->tokenizer)) {
        argp_error(state, "--%s reads shards: --out and --tokenizer do not belong to it", o->show ? "show" : "verify");
    }
    if (o->show && o->n_files != 1) {
        argp_error(state, "--show takes one SHARD, found %d", o->n_files);
    }
    if (!o->verify && !o->show && (!o->out || !o->tokenizer)) {
        argp_error(state, "preparing needs --tokenizer and --out");
    }
    if (o->val_every > 0 && o->val_fraction > 0.0) {
        argp_error(state, "--val-every and --val-fraction: choose one");
    }
}

static error_t parse_option(int key, char *text, struct argp_state *state)
{
    struct options *o = state->input;
    switch (key) {
    case OPTION_TOKENIZER:
        o->tokenizer = text;
        return 0;
    case OPTION_OUT:
        o->out = text;
        return 0;
    case OPTION_VAL_FRACTION:
        o->val_fraction = parse_fraction(state, text);
        return 0;
    case OPTION_VAL_EVERY:
        o->val_every = parse_count(state, "val-every", text, 2);
        return 0;
    case OPTION_SHARD_TOKENS:
        o->shard_tokens = parse_count(state, "shard-tokens", text, 2);
        return 0;
    case OPTION_SPLIT_PARAGRAPHS:
        o->paragraph_bytes = text ? parse_count(state, "split-paragraphs", text, 1) : 1;
        return 0;
    case OPTION_OVERWRITE:
        o->overwrite = true;
        return 0;
    case OPTION_VERIFY:
        o->verify = true;
        return 0;
    case OPTION_SHOW:
        o->show = true;
        return 0;
    case OPTION_FROM:
        o->from = parse_count(state, "from", text, 0);
        o->has_range = true;
        return 0;
    case OPTION_COUNT:
        o->count = parse_count(state, "count", text, 1);
        o->has_range = true;
        return 0;
    case ARGP_KEY_ARGS:
        o->files = state->argv + state->next;
        o->n_files = state->argc - state->next;
        return 0;
    case ARGP_KEY_END:
        check_options(state, o);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* ---- preparing --------------------------------------------------------------------------------------------------- */

struct part {
    struct shard_set set;
    uint64_t documents;
};

struct preparation {
    const struct options *options;
    struct part train, val;
    struct part *document; /* where the open document goes; NULL outside documents */
    uint64_t document_bytes;
    bool line_is_blank; /* so far */
    uint64_t documents, bytes, bytes_total;
    double begin_s, shown_s;
};

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* One line on a terminal, nothing in a file. */
static void show_progress(struct preparation *p)
{
    double now = now_s();
    if (!isatty(STDERR_FILENO) || now - p->shown_s < 0.2) {
        return;
    }
    p->shown_s = now;
    double mb = 1e-6 * (double)p->bytes;
    fprintf(stderr, "\r%.1f of %.1f MB, %" PRIu64 " documents, %.0f MB/s \033[K", mb, 1e-6 * (double)p->bytes_total,
            p->documents, mb / (now - p->begin_s + 1e-9));
}

static void end_progress(void)
{
    if (isatty(STDERR_FILENO)) {
        fprintf(stderr, "\r\033[K");
    }
}

static bool is_validation(const struct options *o, uint64_t document)
{
    if (o->val_every > 0) {
        return document % o->val_every == o->val_every - 1;
    }
    return floor((double)(document + 1) * o->val_fraction) > floor((double)document * o->val_fraction);
}

static enum status begin_document(struct preparation *p)
{
    const int32_t bos = BYTE_BOS;
    p->document = is_validation(p->options, p->documents) ? &p->val : &p->train;
    p->document_bytes = 0;
    p->line_is_blank = true;
    return shard_set_add(&p->document->set, &bos, 1);
}

static enum status end_document(struct preparation *p)
{
    const int32_t eos = BYTE_EOS;
    struct part *part = p->document;
    p->document = NULL;
    p->documents++;
    part->documents++;
    return shard_set_add(&part->set, &eos, 1);
}

/* How many of the n bytes belong to the open document; *ended if it ends after them. */
static size_t scan_document(struct preparation *p, const unsigned char *text, size_t n, bool *ended)
{
    uint64_t before = p->document_bytes;
    p->document_bytes += n;
    *ended = false;
    if (p->options->paragraph_bytes == 0) {
        return n;
    }
    for (size_t i = 0; i < n; i++) {
        if (text[i] == '\n' && p->line_is_blank && before + i + 1 > p->options->paragraph_bytes) {
            *ended = true;
            return i + 1;
        }
        p->line_is_blank = text[i] == '\n' || (p->line_is_blank && isspace(text[i]));
    }
    return n;
}

static enum status add_text(struct preparation *p, const unsigned char *text, size_t n)
{
    static int32_t tokens[PIECE];
    while (n > 0) {
        if (!p->document) {
            /* Blank lines between paragraphs belong to no document. */
            while (p->options->paragraph_bytes > 0 && n > 0 && isspace(*text)) {
                text++;
                n--;
            }
            if (n == 0) {
                return OK;
            }
            TRY(begin_document(p));
        }
        bool ended;
        size_t part = scan_document(p, text, n, &ended);
        byte_tokenizer_encode_part(text, part, tokens);
        TRY(shard_set_add(&p->document->set, tokens, part));
        text += part;
        n -= part;
        if (ended) {
            TRY(end_document(p));
        }
    }
    return OK;
}

static enum status add_file(struct preparation *p, const char *path)
{
    static unsigned char piece[PIECE];
    FILE *in = fopen(path, "rbe");
    if (!in) {
        return status_fail_errno(ERR_IO, path, "cannot open");
    }
    enum status status = OK;
    size_t n = 0;
    uint64_t before = p->bytes;
    do {
        n = fread(piece, 1, sizeof piece, in);
        status = n == 0 && ferror(in) ? status_fail_errno(ERR_IO, path, "cannot read") : add_text(p, piece, n);
        p->bytes += n;
        show_progress(p);
    } while (n > 0 && status == OK);
    fclose(in);
    TRY(status);
    if (p->bytes == before) {
        log_warn("%s: empty, makes no document", path);
    }
    return p->document ? end_document(p) : OK;
}

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

/* Every file is looked at before the first one is read, so that a long run does not end on a slip of the pen. */
static enum status check_files(struct preparation *p)
{
    static const char *const foreign[][2] = {
        {".jsonl", "JSON lines"},    {".json", "JSON"},           {".bin", "llm.c token files"},
        {".parquet", "Parquet"},     {".gz", "compressed files"}, {".zst", "compressed files and shards"},
        {".xz", "compressed files"},
    };
    for (int i = 0; i < p->options->n_files; i++) {
        const char *path = p->options->files[i];
        for (size_t f = 0; f < sizeof foreign / sizeof foreign[0]; f++) {
            if (ends_with(path, foreign[f][0])) {
                return status_fail(ERR_UNSUPPORTED, "%s: %s are not read by this build: give plain text files", path,
                                   foreign[f][1]);
            }
        }
        struct stat info;
        if (stat(path, &info) != 0) {
            return status_fail(ERR_USAGE, "%s: %s", path, strerror(errno));
        }
        if (S_ISDIR(info.st_mode)) {
            return status_fail(ERR_USAGE, "%s: is a folder: name its files", path);
        }
        p->bytes_total += (uint64_t)info.st_size;
    }
    return OK;
}

static enum status check_split(const struct preparation *p)
{
    bool wants_val = p->options->val_every > 0 || p->options->val_fraction > 0.0;
    const char *missing = p->train.documents == 0              ? "training"
                          : wants_val && p->val.documents == 0 ? "validation"
                                                               : NULL;
    if (missing) {
        return status_fail(ERR_DATA,
                           "%" PRIu64 " documents in %d files leave none for %s: give more files, split them with "
                           "--split-paragraphs, or change --val-every or --val-fraction",
                           p->documents, p->options->n_files, missing);
    }
    return OK;
}

static enum status write_all(struct preparation *p)
{
    for (int i = 0; i < p->options->n_files; i++) {
        TRY(add_file(p, p->options->files[i]));
    }
    TRY(check_split(p));
    TRY(shard_set_finish(&p->train.set));
    TRY(shard_set_finish(&p->val.set));
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/tokenizer.json", p->options->out);
    return byte_tokenizer_write_json(path);
}

static void print_summary(const struct preparation *p)
{
    uint64_t packed = shard_set_bytes(&p->train.set) + shard_set_bytes(&p->val.set);
    printf("documents %12" PRIu64 "   train %" PRIu64 ", val %" PRIu64 "\n", p->documents, p->train.documents,
           p->val.documents);
    printf("tokens    %12" PRIu64 "   train %" PRIu64 ", val %" PRIu64 "\n", p->train.set.tokens + p->val.set.tokens,
           p->train.set.tokens, p->val.set.tokens);
    printf("text      %12" PRIu64 " bytes\n", p->bytes);
    printf("shards    %12" PRIu64 " bytes in %s: train %d, val %d; %.2f bytes of text a byte\n", packed,
           p->options->out, p->train.set.shards, p->val.set.shards, (double)p->bytes / (double)packed);
}

static enum status prepare(const struct options *o)
{
    if (strcmp(o->tokenizer, "bytes") != 0) {
        return status_fail(ERR_UNSUPPORTED, "--tokenizer %s: this build has the byte tokenizer only: --tokenizer bytes",
                           o->tokenizer);
    }
    struct shard_set set = {.folder = o->out, .kind = "train", .vocab = BYTE_VOCAB, .shard_tokens = o->shard_tokens};
    struct preparation p = {.options = o, .train.set = set, .val.set = set, .begin_s = now_s()};
    p.val.set.kind = "val";
    TRY(check_files(&p));
    TRY(file_make_folders(o->out));
    TRY(shard_set_clear(&p.train.set, o->overwrite));
    TRY(shard_set_clear(&p.val.set, o->overwrite));
    enum status status = write_all(&p);
    end_progress();
    if (status != OK) {
        shard_set_remove(&p.train.set);
        shard_set_remove(&p.val.set);
        return status;
    }
    print_summary(&p);
    return OK;
}

/* ---- looking ----------------------------------------------------------------------------------------------------- */

static enum status open_existing(struct shard **shard, const char *path)
{
    if (access(path, F_OK) != 0) {
        return status_fail(ERR_USAGE, "%s: %s", path, strerror(errno));
    }
    return shard_open(shard, path);
}

static enum status verify_shard(const char *path)
{
    struct shard *shard;
    TRY(open_existing(&shard, path));
    enum status status = shard_verify(shard);
    if (status == OK) {
        printf("%s: ok, %" PRIu64 " tokens, vocabulary %" PRIu32 ", digest %s\n", path, shard_tokens(shard),
               shard_vocab(shard), shard_digest(shard));
    }
    shard_close(shard);
    return status;
}

/* All shards are looked at, also after a bad one. The machine's failures outrank those of the data. */
static enum status verify_all(const struct options *o)
{
    enum status worst = OK;
    for (int i = 0; i < o->n_files; i++) {
        enum status status = verify_shard(o->files[i]);
        worst = status_exit_code(status) > status_exit_code(worst) ? status : worst;
    }
    return worst;
}

static void print_row(uint64_t position, const int32_t *tokens, size_t n, bool bytes)
{
    printf("%10" PRIu64 " ", position);
    for (size_t i = 0; i < SHOW_ROW; i++) {
        if (i < n) {
            printf(bytes ? " %3" PRId32 : " %6" PRId32, tokens[i]);
        } else if (bytes) {
            printf("    ");
        }
    }
    printf(bytes ? "  " : "");
    for (size_t i = 0; bytes && i < n; i++) {
        const char *name = tokens[i] == BYTE_BOS   ? "<bos>"
                           : tokens[i] == BYTE_EOS ? "<eos>"
                           : tokens[i] == '\n'     ? "\\n"
                                                   : NULL;
        if (name) {
            printf("%s", name);
        } else {
            putchar(tokens[i] < 128 && isprint(tokens[i]) ? tokens[i] : '.');
        }
    }
    putchar('\n');
}

static enum status show_tokens(struct shard *shard, const struct options *o)
{
    uint64_t tokens = shard_tokens(shard);
    printf("%s: %" PRIu64 " tokens, vocabulary %" PRIu32 ", digest %s\n", shard_path(shard), tokens, shard_vocab(shard),
           shard_digest(shard));
    if (o->from >= tokens) {
        return status_fail(ERR_USAGE, "--from %" PRIu64 ": the shard has %" PRIu64 " tokens", o->from, tokens);
    }
    uint64_t left = tokens - o->from, count = o->count < left ? o->count : left;
    for (uint64_t done = 0; done < count; done += SHOW_ROW) {
        int32_t row[SHOW_ROW];
        size_t n = count - done < SHOW_ROW ? (size_t)(count - done) : SHOW_ROW;
        TRY(shard_read(shard, o->from + done, n, row));
        print_row(o->from + done, row, n, shard_vocab(shard) == BYTE_VOCAB);
    }
    return OK;
}

static enum status show(const struct options *o)
{
    struct shard *shard;
    TRY(open_existing(&shard, o->files[0]));
    enum status status = show_tokens(shard, o);
    shard_close(shard);
    return status;
}

int main(int argc, char **argv)
{
    const struct argp argp = {
        .options = option_table,
        .parser = parse_option,
        .args_doc = "FILE...\n--verify SHARD...\n--show SHARD",
        .doc = "Turns text files into token shards for train_gpt8b; checks and shows shards."
               "\vExit status: 0 done, 1 wrong use or input, 2 the machine failed.\n"
               "Example: prepare_data --tokenizer bytes --split-paragraphs=2000 --val-every 20 --out data *.txt",
    };
    struct options options = {.shard_tokens = UINT64_C(1) << 26, .count = 256};
    argp_err_exit_status = 1;
    argp_parse(&argp, argc, argv, 0, NULL, &options);
    enum status status = options.verify ? verify_all(&options) : options.show ? show(&options) : prepare(&options);
    if (fflush(stdout) != 0 && status == OK) {
        status = status_fail_errno(ERR_IO, "standard output", "cannot write");
    }
    return status_exit_code(status);
}
