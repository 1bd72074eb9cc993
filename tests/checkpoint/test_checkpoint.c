/* checkpoint: what is saved comes back bit for bit; damage, kills and full disks cost no older checkpoint. */
#include "checkpoint/checkpoint.h"
#include "core/file.h"
#include "core/log.h"
#include "tests/checkpoint/scratch.h"
#include "tests/test.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SMALL = 1003, LARGE = 70 << 20 }; /* LARGE: more than one extent */
static const struct checkpoint_group alone = {.rank = 0, .size = 1};
static const char *folder, *outer; /* outer: the scratch folder; folder: where checkpoints go, mostly the same */

static struct checkpoint_damaged named; /* by rotation; zero at the start of each test */

/* A model of three tensors and two optimizer tensors. */
struct content {
    unsigned char *data[5];
    struct checkpoint_tensor tensors[5];
    struct checkpoint_content content;
};

static void content_open(struct content *c, int64_t large, const char *verdict, uint64_t seed)
{
    static const char *const names[] = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight",
                                        "exp_avg.model.norm.weight", "exp_avg_sq.model.norm.weight"};
    const struct checkpoint_tensor shapes[] = {
        {.dtype = DTYPE_U8, .rank = 2, .shape = {large, 1}}, {.dtype = DTYPE_BF16, .rank = 1, .shape = {SMALL}},
        {.dtype = DTYPE_BF16, .rank = 2, .shape = {17, 59}}, {.dtype = DTYPE_F32, .rank = 1, .shape = {SMALL}},
        {.dtype = DTYPE_F32, .rank = 1, .shape = {SMALL}},
    };
    for (int i = 0; i < 5; i++) {
        size_t bytes = dtype_bytes(shapes[i].dtype);
        for (int d = 0; d < shapes[i].rank; d++) {
            bytes *= (size_t)shapes[i].shape[d];
        }
        c->data[i] = malloc(bytes + 1);
        assert_non_null(c->data[i]);
        for (size_t k = 0; k < bytes; k++) {
            c->data[i][k] = (unsigned char)((k * 2654435761u + seed * 97 + (uint64_t)i) >> 11);
        }
        c->data[i][bytes] = 0xa5; /* a guard behind the tensor */
        c->tensors[i] = shapes[i];
        c->tensors[i].name = names[i];
        c->tensors[i].data = c->data[i];
    }
    c->content = (struct checkpoint_content){
        .model = c->tensors,
        .n_model = 3,
        .state = c->tensors + 3,
        .n_state = 2,
        .config = json_pack("{s:s}", "model_type", "llama"),
        .train = json_pack("{s:i, s:f, s:s}", "step", 7, "loss", 1.0 / 3, "verdict", verdict),
    };
    assert_non_null(c->content.train);
}

static void content_close(struct content *c)
{
    for (int i = 0; i < 5; i++) {
        free(c->data[i]);
    }
    json_decref(c->content.config);
    json_decref(c->content.train);
}

static void save(int64_t step, const char *verdict)
{
    struct content c;
    content_open(&c, SMALL, verdict, (uint64_t)step);
    assert_int_equal(checkpoint_save(folder, step, &alone, &c.content), OK);
    content_close(&c);
}

static const char *step_file(int64_t step, const char *name)
{
    char inside[256];
    snprintf(inside, sizeof inside, "step_%08lld/%s", (long long)step, name);
    return scratch_path(folder, inside);
}

static bool exists(int64_t step)
{
    return access(step_file(step, "."), F_OK) == 0;
}

/* The step that would be resumed from, -1 for none. */
static int64_t found_step(void)
{
    char path[1024];
    long long step = -1;
    assert_int_equal(checkpoint_find(folder, path, sizeof path), OK);
    if (path[0] != '\0') {
        assert_int_equal(strncmp(path, folder, strlen(folder)), 0);
        assert_int_equal(sscanf(path + strlen(folder), "/step_%lld", &step), 1);
    }
    return step;
}

static int setup(void **state)
{
    (void)state;
    outer = folder = scratch_make();
    named = (struct checkpoint_damaged){0};
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    umount2(scratch_path(outer, "small"), MNT_DETACH); /* left by a failed test of the full disk */
    scratch_remove();
    return 0;
}

/* ---------------------------------------------------------------------------------------------------- round trip ---
 */

static void test_what_is_saved_comes_back(void **state)
{
    (void)state;
    struct content saved, loaded;
    json_t *train = NULL;
    const char *path = scratch_path(folder, "step_00000012");
    scratch_write(scratch_path(folder, "tok.json"), "{\"a\": 1}", 8);
    content_open(&saved, LARGE, "healthy", 3);
    content_open(&loaded, LARGE, "healthy", 4);
    saved.content.tokenizer_json = scratch_path(folder, "tok.json");
    assert_int_equal(checkpoint_save(folder, 12, &alone, &saved.content), OK);
    assert_int_equal(checkpoint_verify(path), OK);
    assert_int_equal(found_step(), 12);
    assert_int_equal(checkpoint_load(path, &loaded.content), OK);
    const size_t bytes[] = {LARGE, 2 * SMALL, 2 * 17 * 59, 4 * SMALL, 4 * SMALL};
    for (int i = 0; i < 5; i++) {
        assert_int_equal(memcmp(saved.data[i], loaded.data[i], bytes[i] + 1), 0);
    }
    assert_int_equal(checkpoint_read_train(path, &train), OK);
    assert_true(json_equal(train, saved.content.train));
    json_decref(train);
    assert_int_equal(scratch_size(step_file(12, "tokenizer.json")), 8);
    assert_int_equal(scratch_size(step_file(12, "hashes")), -1);
    content_close(&saved);
    content_close(&loaded);
}

/* Memory of a device, played by an array that only get and put reach. */
static unsigned char through[1 << 12];

static enum status store_get(const struct checkpoint_tensor *tensor, uint64_t offset, size_t n)
{
    assert_true(n <= sizeof through && offset % dtype_bytes(tensor->dtype) == 0 && n % dtype_bytes(tensor->dtype) == 0);
    memcpy(through, (unsigned char *)tensor->data + offset, n);
    return OK;
}

static enum status store_put(const struct checkpoint_tensor *tensor, uint64_t offset, size_t n)
{
    assert_true(n <= sizeof through && offset % dtype_bytes(tensor->dtype) == 0 && n % dtype_bytes(tensor->dtype) == 0);
    memcpy((unsigned char *)tensor->data + offset, through, n);
    return OK;
}

static enum status store_breaks(const struct checkpoint_tensor *tensor, uint64_t offset, size_t n)
{
    (void)offset;
    (void)n;
    return status_fail(ERR_DEVICE, "no answer for %s", tensor->name);
}

/* Piece by piece, across extents: the same files, and what was saved comes back. */
static void test_tensors_behind_a_store(void **state)
{
    (void)state;
    static const struct checkpoint_store store = {sizeof through, through, store_get, store_put};
    static const struct checkpoint_store broken = {sizeof through, through, store_breaks, store_breaks};
    struct content plain, behind, loaded;
    const size_t bytes[] = {LARGE, 2 * SMALL, 2 * 17 * 59, 4 * SMALL, 4 * SMALL};
    content_open(&plain, LARGE, "healthy", 3);
    content_open(&behind, LARGE, "healthy", 3);
    content_open(&loaded, LARGE, "healthy", 4);
    for (int i = 0; i < 5; i++) {
        behind.tensors[i].store = loaded.tensors[i].store = &store;
    }
    behind.content.gemm_json = scratch_path(folder, "gemm.json");
    scratch_write(behind.content.gemm_json, "{}", 2);
    assert_int_equal(checkpoint_save(folder, 1, &alone, &plain.content), OK);
    assert_int_equal(checkpoint_save(folder, 2, &alone, &behind.content), OK);
    assert_int_equal(checkpoint_verify(scratch_path(folder, "step_00000002")), OK);
    assert_int_equal(scratch_size(step_file(2, "train_state/gemm.json")), 2);
    assert_int_equal(scratch_size(step_file(1, "train_state/gemm.json")), -1);
    char command[512];
    snprintf(command, sizeof command,
             "cd %s && cmp step_00000001/model.safetensors step_00000002/model.safetensors && "
             "cmp step_0000000[12]/train_state/optimizer.safetensors",
             folder);
    assert_int_equal(system(command), 0);
    assert_int_equal(checkpoint_load(scratch_path(folder, "step_00000001"), &loaded.content), OK);
    for (int i = 0; i < 5; i++) {
        assert_int_equal(memcmp(plain.data[i], loaded.data[i], bytes[i] + 1), 0);
        behind.tensors[i].store = &broken;
    }
    assert_int_equal(checkpoint_save(folder, 3, &alone, &behind.content), ERR_DEVICE);
    assert_int_equal(checkpoint_load(scratch_path(folder, "step_00000002"), &behind.content), ERR_DEVICE);
    assert_int_equal(found_step(), 2);
    content_close(&plain);
    content_close(&behind);
    content_close(&loaded);
}

/* Ranks as threads. */
struct ranks {
    int size;
    pthread_barrier_t barrier;
    enum status statuses[4];
    int fail_rank; /* reports ERR_IO at its second agreement; -1: none */
};

struct rank {
    struct ranks *ranks;
    int rank, agreements;
    int64_t step;
    struct checkpoint_content content;
    enum status status;
};

static enum status rank_agree(void *context, enum status mine, enum status *worst)
{
    struct rank *r = context;
    bool fails = r->rank == r->ranks->fail_rank && ++r->agreements == 2;
    r->ranks->statuses[r->rank] = fails ? ERR_IO : mine;
    pthread_barrier_wait(&r->ranks->barrier);
    *worst = OK;
    for (int i = 0; i < r->ranks->size; i++) {
        *worst = r->ranks->statuses[i] > *worst ? r->ranks->statuses[i] : *worst;
    }
    pthread_barrier_wait(&r->ranks->barrier);
    return OK;
}

static void *rank_run(void *context)
{
    struct rank *r = context;
    struct checkpoint_group group = {.rank = r->rank, .size = r->ranks->size, .agree = rank_agree, .context = r};
    r->status = checkpoint_save(folder, r->step, &group, &r->content);
    return NULL;
}

static enum status save_by_ranks(int size, int64_t step, const struct checkpoint_content *content, int fail_rank)
{
    struct ranks ranks = {.size = size, .fail_rank = fail_rank};
    struct rank each[4];
    pthread_t threads[4];
    pthread_barrier_init(&ranks.barrier, NULL, (unsigned)size);
    for (int r = 0; r < size; r++) {
        each[r] = (struct rank){.ranks = &ranks, .rank = r, .step = step, .content = *content};
        assert_int_equal(pthread_create(&threads[r], NULL, rank_run, &each[r]), 0);
    }
    for (int r = 0; r < size; r++) {
        pthread_join(threads[r], NULL);
        assert_int_equal(each[r].status, each[0].status);
    }
    pthread_barrier_destroy(&ranks.barrier);
    return each[0].status;
}

static void assert_equal_files(const char *a, const char *b)
{
    FILE *x = fopen(a, "rb");
    FILE *y = fopen(b, "rb");
    static char p[1 << 16], q[1 << 16];
    assert_true(x != NULL && y != NULL);
    size_t n;
    do {
        n = fread(p, 1, sizeof p, x);
        assert_int_equal(fread(q, 1, sizeof q, y), n);
        assert_int_equal(memcmp(p, q, n), 0);
    } while (n > 0);
    fclose(x);
    fclose(y);
}

static void test_any_number_of_ranks_writes_the_same_bytes(void **state)
{
    (void)state;
    struct content c;
    static const char *const files[] = {"model.safetensors", "train_state/optimizer.safetensors",
                                        "train_state/state.json", "config.json", "manifest.json"};
    content_open(&c, LARGE, "healthy", 5);
    assert_int_equal(checkpoint_save(folder, 1, &alone, &c.content), OK);
    for (int size = 2; size <= 4; size++) { /* four ranks share three extents */
        assert_int_equal(save_by_ranks(size, size, &c.content, -1), OK);
        assert_int_equal(checkpoint_verify(scratch_path(folder, "step_00000002")), OK);
        for (int f = 0; f < 5; f++) {
            assert_equal_files(step_file(1, files[f]), step_file(size, files[f]));
        }
    }
    content_close(&c);
}

static void test_one_failing_rank_fails_all_and_harms_nothing(void **state)
{
    (void)state;
    struct content c;
    content_open(&c, SMALL, "healthy", 6);
    save(1, "healthy");
    for (int fail_rank = 0; fail_rank < 2; fail_rank++) {
        assert_int_equal(save_by_ranks(2, 2, &c.content, fail_rank), ERR_IO);
        assert_false(exists(2));
        assert_int_not_equal(access(scratch_path(folder, ".tmp_step_00000002"), F_OK), 0);
        assert_int_equal(found_step(), 1);
    }
    content_close(&c);
}

static void test_a_step_saved_again_replaces_the_old_one(void **state)
{
    (void)state;
    struct content c, loaded;
    save(3, "suspect");
    assert_int_equal(found_step(), -1);
    content_open(&c, SMALL, "healthy", 99);
    content_open(&loaded, SMALL, "healthy", 1);
    assert_int_equal(checkpoint_save(folder, 3, &alone, &c.content), OK);
    assert_int_equal(found_step(), 3);
    assert_int_equal(checkpoint_load(scratch_path(folder, "step_00000003"), &loaded.content), OK);
    assert_memory_equal(c.data[0], loaded.data[0], SMALL);
    assert_int_not_equal(access(scratch_path(folder, ".tmp_step_00000003"), F_OK), 0);
    content_close(&c);
    content_close(&loaded);
}

/* -------------------------------------------------------------------------------------------------------- damage ---
 */

static void test_damage_is_found_named_and_skipped(void **state)
{
    (void)state;
    static const char *const files[] = {"model.safetensors", "train_state/optimizer.safetensors",
                                        "train_state/state.json", "config.json"};
    for (int f = 0; f < 4; f++) {
        const char *path = scratch_path(folder, "step_00000020");
        char damaged[256];
        snprintf(damaged, sizeof damaged, "%s/%s", path, files[f]);
        save(10, "healthy");
        save(20, "healthy");
        assert_int_equal(found_step(), 20);
        scratch_flip(damaged, 11);
        assert_int_equal(checkpoint_verify(path), ERR_DATA);
        assert_non_null(strstr(status_last_message(), files[f]));
        assert_non_null(strstr(status_last_message(), "extent 0"));
        assert_int_equal(found_step(), 10);
        scratch_flip(damaged, 11);
        assert_int_equal(checkpoint_verify(path), OK);
        assert_int_equal(truncate(damaged, scratch_size(damaged) - 1), 0);
        assert_int_equal(checkpoint_verify(path), ERR_DATA);
        assert_non_null(strstr(status_last_message(), "expected"));
        assert_int_equal(found_step(), 10);
        assert_int_equal(unlink(damaged), 0);
        assert_int_equal(checkpoint_verify(path), ERR_DATA);
        assert_non_null(strstr(status_last_message(), "missing"));
        assert_int_equal(found_step(), 10);
    }
}

static void test_damage_in_a_later_extent_is_placed(void **state)
{
    (void)state;
    struct content c;
    content_open(&c, LARGE, "healthy", 5);
    assert_int_equal(checkpoint_save(folder, 1, &alone, &c.content), OK);
    content_close(&c);
    scratch_flip(step_file(1, "model.safetensors"), LARGE - 5);
    assert_int_equal(checkpoint_verify(scratch_path(folder, "step_00000001")), ERR_DATA);
    assert_non_null(strstr(status_last_message(), "damaged in extent 1 (64 MiB from byte 67108864)"));
}

static void test_a_directory_without_the_right_manifest_is_skipped(void **state)
{
    (void)state;
    save(10, "healthy");
    save(20, "healthy");
    assert_int_equal(unlink(step_file(20, "manifest.json")), 0);
    assert_int_equal(found_step(), 10);
    assert_non_null(strstr(status_last_message(), "not complete"));
    static const char *const texts[] = {
        "{",
        "{}",
        "{\"version\": 2, \"extent_bytes\": 67108864, \"files\": []}",
        "{\"version\": 1, \"extent_bytes\": 67108864, \"files\": []}",
        "{\"version\": 1, \"extent_bytes\": 4, \"files\": []}",
        "{\"version\": 1, \"extent_bytes\": 67108864, \"files\": [{\"path\": \"../x\", \"bytes\": 0, \"xxh3_128\": "
        "[]}]}",
        "{\"version\": 1, \"extent_bytes\": 67108864, \"files\": [{\"path\": \"config.json\", \"bytes\": 5, "
        "\"xxh3_128\": []}]}",
        "{\"version\": 1, \"extent_bytes\": 67108864, \"files\": [{\"path\": \"config.json\", \"bytes\": -1, "
        "\"xxh3_128\": []}]}",
        "{\"version\": 1, \"extent_bytes\": 67108864, \"files\": [{\"path\": \"config.json\", \"bytes\": 5, "
        "\"xxh3_128\": [\"zz\"]}]}",
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        scratch_write(step_file(20, "manifest.json"), texts[i], strlen(texts[i]));
        assert_int_equal(checkpoint_verify(scratch_path(folder, "step_00000020")), ERR_DATA);
        assert_int_equal(found_step(), 10);
    }
}

/* Rewrites the manifest of step 20: file `i` gets another path and size, or goes if path is NULL. */
static void change_manifest(const char *original, size_t i, const char *path, json_int_t bytes)
{
    json_t *root = json_loads(original, 0, NULL), *files = json_object_get(root, "files");
    if (path != NULL) {
        json_object_set_new(json_array_get(files, i), "path", json_string(path));
        json_object_set_new(json_array_get(files, i), "bytes", json_integer(bytes));
    } else {
        json_array_remove(files, i);
    }
    assert_int_equal(json_write_file(step_file(20, "manifest.json"), root), OK);
    json_decref(root);
}

static void test_a_manifest_that_lists_no_file_is_refused(void **state)
{
    (void)state;
    static const struct {
        const char *name, *message;
    } listed[] = {{"train_state", "expected a file, found a folder"}, {"config.json/x", "missing"}};
    struct stat info;
    struct content c;
    char *manifest = NULL;
    size_t bytes = 0;
    content_open(&c, SMALL, "healthy", 20);
    c.content.gemm_json = scratch_path(folder, "gemm.json");
    scratch_write(c.content.gemm_json, "{}", 2);
    assert_int_equal(checkpoint_save(folder, 20, &alone, &c.content), OK);
    content_close(&c);
    assert_int_equal(stat(step_file(20, "train_state"), &info), 0);
    assert_int_equal(file_read_all(step_file(20, "manifest.json"), 1 << 20, &manifest, &bytes), OK);
    for (int i = 0; i < 2; i++) {
        change_manifest(manifest, 4, listed[i].name, (json_int_t)info.st_size);
        assert_int_equal(checkpoint_verify(scratch_path(folder, "step_00000020")), ERR_DATA);
        assert_non_null(strstr(status_last_message(), listed[i].message));
    }
    free(manifest);
}

static void test_a_manifest_must_list_what_a_resume_reads(void **state)
{
    (void)state;
    static const char *const files[] = {"model.safetensors", "train_state/optimizer.safetensors", "config.json",
                                        "train_state/state.json"}; /* in the manifest's order */
    char *manifest = NULL, words[128];
    size_t bytes = 0;
    save(10, "healthy");
    save(20, "healthy");
    assert_int_equal(file_read_all(step_file(20, "manifest.json"), 1 << 20, &manifest, &bytes), OK);
    for (size_t i = 0; i < 4; i++) {
        change_manifest(manifest, i, NULL, 0);
        assert_int_equal(checkpoint_verify(scratch_path(folder, "step_00000020")), ERR_DATA);
        snprintf(words, sizeof words, "manifest.json: does not list %s,", files[i]);
        assert_non_null(strstr(status_last_message(), words));
        assert_int_equal(found_step(), 10);
    }
    free(manifest);
}

static void test_other_names_are_no_checkpoints(void **state)
{
    (void)state;
    save(10, "healthy");
    static const char *const names[] = {"step_0000011", "step_00000012x", "step_000000013", "step_", "other"};
    for (int i = 0; i < 5; i++) {
        assert_int_equal(mkdir(scratch_path(folder, names[i]), 0777), 0);
    }
    assert_int_equal(found_step(), 10);
    char path[8];
    assert_int_equal(checkpoint_find(folder, path, sizeof path), ERR_IO);
    char none[64] = "x";
    assert_int_equal(checkpoint_find(scratch_path(folder, "nowhere"), none, sizeof none), OK);
    assert_string_equal(none, "");
}

/* --------------------------------------------------------------------------------------------------- kill, space ---
 */

static enum status kill_at_second_agreement(void *context, enum status mine, enum status *worst)
{
    int *agreements = context;
    if (++*agreements == 2) {
        raise(SIGKILL);
    }
    *worst = mine;
    return OK;
}

static void test_a_killed_save_is_ignored_and_cleaned_by_the_next(void **state)
{
    (void)state;
    save(10, "healthy");
    pid_t child = fork();
    if (child == 0) {
        int agreements = 0;
        struct content c;
        content_open(&c, SMALL, "healthy", 1);
        struct checkpoint_group group = {.size = 2, .agree = kill_at_second_agreement, .context = &agreements};
        _exit(checkpoint_save(folder, 20, &group, &c.content) == OK ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    assert_true(WIFSIGNALED(status));
    assert_int_equal(access(scratch_path(folder, ".tmp_step_00000020"), F_OK), 0);
    assert_int_equal(found_step(), 10);
    save(30, "healthy");
    assert_int_not_equal(access(scratch_path(folder, ".tmp_step_00000020"), F_OK), 0);
    assert_int_equal(found_step(), 30);
}

static void test_a_full_disk_leaves_the_old_ones(void **state)
{
    (void)state;
    const char *small = scratch_path(folder, "small");
    assert_int_equal(mkdir(small, 0777), 0);
    if (mount("tmpfs", small, "tmpfs", 0, "size=1m") != 0) {
        skip(); /* needs root */
    }
    folder = small;
    save(10, "healthy");
    for (int i = 0; i < 2; i++) {
        /* The first does not fit at all; of the second the tensors fit, but not the state behind them. */
        struct content c;
        content_open(&c, i == 0 ? 2 << 20 : 700 << 10, "healthy", 2);
        if (i == 1) {
            static char padding[400 << 10];
            memset(padding, 'x', sizeof padding - 1);
            json_object_set_new(c.content.train, "padding", json_string(padding));
        }
        assert_int_equal(checkpoint_save(folder, 20, &alone, &c.content), ERR_IO);
        assert_non_null(strstr(status_last_message(), "No space left on device"));
        assert_false(exists(20));
        assert_int_equal(found_step(), 10);
        content_close(&c);
    }
    save(20, "healthy");
    assert_int_equal(found_step(), 20);
    assert_int_equal(umount(small), 0);
}

/* ------------------------------------------------------------------------------------------------- other content ---
 */

static void test_content_that_does_not_fit_is_refused_before_anything_is_read(void **state)
{
    (void)state;
    struct content c;
    const char *path = scratch_path(folder, "step_00000001");
    save(1, "healthy");
    content_open(&c, SMALL, "healthy", 50);
    unsigned char first = c.data[0][0];
    struct checkpoint_tensor good = c.tensors[2];
    c.tensors[2].shape[1] = 58;
    assert_int_equal(checkpoint_load(path, &c.content), ERR_CONFIG);
    assert_non_null(strstr(status_last_message(), "lm_head.weight: checkpoint has BF16 (17, 59), config has BF16 (17, "
                                                  "58)"));
    c.tensors[2] = good;
    c.tensors[2].dtype = DTYPE_F32;
    assert_int_equal(checkpoint_load(path, &c.content), ERR_CONFIG);
    assert_non_null(strstr(status_last_message(), "checkpoint has BF16 (17, 59), config has F32 (17, 59)"));
    c.tensors[2] = good;
    c.tensors[2].rank = 1;
    assert_int_equal(checkpoint_load(path, &c.content), ERR_CONFIG);
    c.tensors[2] = good;
    c.tensors[2].name = "lm_head.bias";
    assert_int_equal(checkpoint_load(path, &c.content), ERR_CONFIG);
    assert_non_null(strstr(status_last_message(), "lm_head.bias: checkpoint has none, config has BF16 (17, 59)"));
    c.tensors[2] = good;
    c.content.n_model = 2;
    assert_int_equal(checkpoint_load(path, &c.content), ERR_CONFIG);
    assert_non_null(strstr(status_last_message(), "lm_head.weight: checkpoint has BF16 (17, 59), config has none"));
    c.content.n_model = 3;
    c.tensors[4].shape[0]--; /* the optimizer's */
    assert_int_equal(checkpoint_load(path, &c.content), ERR_CONFIG);
    assert_int_equal(c.data[0][0], first);
    c.content.n_state = 0; /* weights alone */
    assert_int_equal(checkpoint_load(path, &c.content), OK);
    content_close(&c);
}

/* ------------------------------------------------------------------------------------------------------ rotation ---
 */

static void rotate(int keep, int64_t forever, int64_t window, int64_t step)
{
    struct checkpoint_rotation r = {.keep = keep, .keep_forever_every = forever, .window = window, .step = step};
    assert_int_equal(checkpoint_rotate(folder, &r, &named), OK);
}

static void test_suspects_are_marked_and_skipped(void **state)
{
    (void)state;
    save(10, "healthy");
    save(20, "healthy");
    save(30, "suspect");
    save(40, "healthy");
    assert_int_equal(found_step(), 40);
    assert_int_equal(checkpoint_mark_suspect(folder, 20), OK);
    assert_int_equal(found_step(), 20);
    assert_int_equal(checkpoint_verify(scratch_path(folder, "step_00000040")), OK);
    assert_int_equal(checkpoint_mark_suspect(folder, 9), OK);
    assert_int_equal(found_step(), -1);
}

/* Skipped, and in rotation it does not stand for a healthy one; whoever names it may load it. */
static void test_without_a_verdict_nothing_is_known(void **state)
{
    (void)state;
    struct content c;
    save(10, "healthy");
    for (int i = 0; i < 2; i++) {
        content_open(&c, SMALL, "healthy", 20);
        assert_int_equal(json_object_del(c.content.train, "verdict"), 0);
        if (i == 1) {
            json_object_set_new(c.content.train, "verdict", json_true()); /* no word at all */
        }
        assert_int_equal(checkpoint_save(folder, 20 + 10 * i, &alone, &c.content), OK);
        content_close(&c);
        assert_int_equal(found_step(), 10);
    }
    rotate(1, 0, 0, 30);
    assert_true(exists(10) && !exists(20) && exists(30));
    assert_int_equal(checkpoint_verify(scratch_path(folder, "step_00000030")), OK);
    content_open(&c, SMALL, "healthy", 1);
    assert_int_equal(checkpoint_load(scratch_path(folder, "step_00000030"), &c.content), OK);
    content_close(&c);
}

static void test_rotation_keeps_the_newest_and_the_multiples(void **state)
{
    (void)state;
    for (int64_t step = 10; step <= 80; step += 10) {
        save(step, "healthy");
    }
    rotate(2, 40, 0, 80);
    for (int64_t step = 10; step <= 80; step += 10) {
        assert_int_equal(exists(step), step == 40 || step == 70 || step == 80);
    }
}

/* Whenever a flag may come, something from before its onset is there: saved and rotated every 10 updates, window 35. */
static void test_rotation_keeps_a_healthy_one_older_than_the_window(void **state)
{
    (void)state;
    for (int64_t step = 10; step <= 200; step += 10) {
        save(step, "healthy");
        rotate(1, 0, 35, step);
        int count = 0;
        bool old = false;
        for (int64_t s = 10; s <= step; s += 10) {
            count += exists(s);
            old = old || (exists(s) && s <= step - 35);
        }
        assert_true(exists(step));
        assert_true(count <= 3);
        assert_true(old || step <= 40);
    }
    /* Suspect ones push no healthy one out, however many there are. */
    for (int64_t step = 210; step <= 300; step += 10) {
        save(step, "suspect");
        rotate(2, 0, 35, step);
        assert_true(found_step() > 0);
    }
}

static void test_a_damaged_one_does_not_count_as_kept(void **state)
{
    (void)state;
    for (int64_t step = 10; step <= 50; step += 10) {
        save(step, "healthy");
    }
    assert_int_equal(unlink(step_file(50, "config.json")), 0);
    assert_int_equal(unlink(step_file(40, "manifest.json")), 0);
    rotate(2, 0, 0, 50);
    assert_int_equal(found_step(), 30);
    assert_true(exists(20));
    assert_false(exists(10));
}

/* How often the log has said `words` since it was opened as folder/log. */
static int said(const char *words)
{
    char *text = NULL;
    size_t bytes = 0;
    int count = 0;
    assert_int_equal(file_read_all(scratch_path(folder, "log"), 1 << 20, &text, &bytes), OK);
    for (const char *at = text; (at = strstr(at, words)) != NULL; at++) {
        count++;
    }
    free(text);
    return count;
}

static void test_rotation_names_a_damaged_one_once(void **state)
{
    (void)state;
    for (int64_t step = 10; step <= 40; step += 10) {
        save(step, "healthy");
    }
    assert_int_equal(log_open_file(scratch_path(folder, "log")), OK);
    assert_int_equal(unlink(step_file(20, "config.json")), 0);
    scratch_write(step_file(30, "train_state/state.json"), "{", 1);
    for (int64_t step = 50; step <= 70; step += 10) {
        save(step, "healthy");
        rotate(8, 0, 0, step);
        assert_int_equal(said("step_00000020/config.json: missing"), 1);
        assert_int_equal(said("step_00000030/train_state/state.json: expected"), 1);
    }
    /* A step that is saved again is whole, and counts at once: 70, 60 and this one stay. */
    assert_int_equal(unlink(step_file(50, "config.json")), 0);
    rotate(8, 0, 0, 70);
    assert_int_equal(said("step_00000050/config.json: missing"), 1);
    save(50, "healthy");
    rotate(3, 0, 0, 50);
    assert_true(exists(50) && !exists(40) && !exists(30) && !exists(20));
    /* Gone and damaged anew: news again. */
    save(20, "healthy");
    assert_int_equal(unlink(step_file(20, "config.json")), 0);
    rotate(8, 0, 0, 70);
    assert_int_equal(said("step_00000020/config.json: missing"), 2);
    log_close_file();
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_what_is_saved_comes_back),
        TEST(test_tensors_behind_a_store),
        TEST(test_any_number_of_ranks_writes_the_same_bytes),
        TEST(test_one_failing_rank_fails_all_and_harms_nothing),
        TEST(test_a_step_saved_again_replaces_the_old_one),
        TEST(test_damage_is_found_named_and_skipped),
        TEST(test_damage_in_a_later_extent_is_placed),
        TEST(test_a_directory_without_the_right_manifest_is_skipped),
        TEST(test_a_manifest_that_lists_no_file_is_refused),
        TEST(test_a_manifest_must_list_what_a_resume_reads),
        TEST(test_other_names_are_no_checkpoints),
        TEST(test_a_killed_save_is_ignored_and_cleaned_by_the_next),
        TEST(test_a_full_disk_leaves_the_old_ones),
        TEST(test_content_that_does_not_fit_is_refused_before_anything_is_read),
        TEST(test_suspects_are_marked_and_skipped),
        TEST(test_without_a_verdict_nothing_is_known),
        TEST(test_rotation_keeps_the_newest_and_the_multiples),
        TEST(test_rotation_keeps_a_healthy_one_older_than_the_window),
        TEST(test_a_damaged_one_does_not_count_as_kept),
        TEST(test_rotation_names_a_damaged_one_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
