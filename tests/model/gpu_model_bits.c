/* What must not change a bit of the model on the GPU: a second run, recomputation, graphs, who found the largest
 * weights.
 */
#include "tests/model/model_cases_cuda.h"

#include <stdlib.h>
#include <string.h>

static void test_runs_and_recomputation_give_equal_bits(void **state)
{
    (void)state;
    for (int i = 0; i < FORMATS; i++) {
        enum linear_format format = formats[i];
        void *first = NULL;
        struct model_loss want = {0};
        struct attention_stats stats[2], want_stats[2];
        for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_GATE_UP; recompute++) {
            struct gpu_fixture f;
            char name[64];
            snprintf(name, sizeof name, "%s, recompute %s", linear_format_names[format], recompute_names[recompute]);
            open_format(&f, format, (enum recompute)recompute, SAMPLES);
            struct data d = data_make();
            struct model_batch host = batch_of(&d, 0, SAMPLES, TOKENS), batch = gpu_fixture_batch(&f, &host, scale);
            for (int run = 0; run < 2; run++) {
                gpu_fixture_run(&f, &batch, false);
                struct model_loss loss = gpu_fixture_loss(&f);
                void *grads = gpu_fixture_grads(&f);
                if (!first) {
                    first = grads;
                    want = loss;
                    continue;
                }
                expect_same(&f, name, run ? "second run" : "first run", first, grads);
                expect(loss.loss_sum == want.loss_sum && isfinite(loss.loss_sum), name, "loss");
                free(grads);
            }
            cuda_download(cuda, stats, model_stats(f.model), sizeof stats);
            assert_int_equal(cuda_sync(cuda, name), OK);
            if (recompute == RECOMPUTE_NONE) {
                memcpy(want_stats, stats, sizeof stats);
                expect(stats[0].r_r > 0 && stats[1].r_r > 0, name, "no statistics");
            }
            expect(memcmp(stats, want_stats, sizeof stats) == 0, name, "statistics of two runs");
            gpu_fixture_close(&f);
        }
        free(first);
    }
    finish();
}

/* The same with the GPU's own attention: what is recomputed meets the same kernels, with and without statistics. */
static void test_bits_of_the_gpus_attention(void **state)
{
    (void)state;
    for (int i = 0; i < ROUTES * 2; i++) {
        bool counted = i % 2;
        void *first = NULL;
        for (int run = 0; run < 3; run++) {
            struct gpu_fixture f;
            struct model_config c = wide_heads();
            struct model_options o = gpu_options(SAMPLES);
            char name[64];
            o.variant = NULL;
            o.attention = route(i / 2);
            o.recompute = run == 2 ? RECOMPUTE_BLOCK : RECOMPUTE_NONE;
            snprintf(name, sizeof name, "attention %s%s, run %d", routes[i / 2].name, counted ? ", counted" : "", run);
            assert_true(gpu_fixture_open(&f, cuda, &c, &o));
            model_count_stats(f.model, counted);
            struct data d = data_make();
            struct model_batch host = batch_of(&d, 0, SAMPLES, TOKENS), batch = gpu_fixture_batch(&f, &host, scale);
            gpu_fixture_run(&f, &batch, false);
            void *grads = gpu_fixture_grads(&f);
            if (first) {
                expect_same(&f, name, "against the first", first, grads);
                free(grads);
            } else {
                first = grads;
            }
            gpu_fixture_close(&f);
        }
        free(first);
    }
    finish();
}

/* Warm-up, then two micro-batches, by plain calls and by graphs captured with other numbers in the step. */
static void check_replay(enum linear_format format, bool counted)
{
    struct gpu_fixture f;
    struct model_config c = counted ? gpu_config() : wide_heads();
    struct model_options o = gpu_options(1);
    char name[64];
    o.variant = NULL;
    o.attention = route(ROUTE_FP8);
    o.linear.attn = o.linear.mlp = format;
    snprintf(name, sizeof name, "graph, %s%s", linear_format_names[format], counted ? ", counted" : "");
    if (!gpu_fixture_open(&f, cuda, &c, &o)) {
        printf("%s: refused: %s\n", name, status_last_message());
        return;
    }
    model_count_stats(f.model, counted);
    assert_int_equal(model_warm_up(f.model, f.grads), OK);
    struct attention_stats stats[2], again[2], zero = {0};
    size_t stats_bytes = (size_t)c.layers * sizeof *stats;
    cuda_download(cuda, stats, model_stats(f.model), stats_bytes);
    assert_int_equal(cuda_sync(cuda, name), OK);
    assert_memory_equal(stats, &zero, sizeof zero);

    struct data d = data_make();
    struct model_batch batch = {0};
    for (int k = 0; k < 2; k++) {
        struct model_batch host = batch_of(&d, k, 1, TOKENS);
        batch = gpu_fixture_batch(&f, &host, scale);
        gpu_fixture_run(&f, &batch, k > 0);
    }
    struct model_loss want = gpu_fixture_loss(&f);
    void *eager = gpu_fixture_grads(&f);
    cuda_download(cuda, stats, model_stats(f.model), stats_bytes);
    assert_int_equal(cuda_sync(cuda, name), OK);

    struct cuda_graph *graphs[2];
    cuda_set_step(cuda, &(struct cuda_step){.sample = 77, .update = 78, .loss_scale = 79});
    assert_int_equal(cuda_sync(cuda, name), OK);
    for (int k = 0; k < 2; k++) {
        assert_int_equal(cuda_graph_begin(cuda), OK);
        if (k == 0) {
            model_stats_reset(f.model);
        }
        gpu_fixture_run(&f, &batch, k > 0);
        assert_int_equal(cuda_graph_end(cuda, &graphs[k]), OK);
    }
    cuda_zero(cuda, f.grads, f.grad_bytes);
    for (int round = 0; round < 2; round++) { /* replays may be repeated */
        for (int k = 0; k < 2; k++) {
            struct model_batch host = batch_of(&d, k, 1, TOKENS);
            gpu_fixture_batch(&f, &host, scale);
            cuda_graph_launch(cuda, graphs[k]);
        }
        struct model_loss got = gpu_fixture_loss(&f);
        void *replayed = gpu_fixture_grads(&f);
        cuda_download(cuda, again, model_stats(f.model), stats_bytes);
        assert_int_equal(cuda_sync(cuda, name), OK);
        expect(got.loss_sum == want.loss_sum, name, "loss");
        expect(memcmp(stats, again, stats_bytes) == 0, name, "statistics");
        expect_same(&f, name, "replay", eager, replayed);
        free(replayed);
    }
    cuda_graph_close(graphs[0]);
    cuda_graph_close(graphs[1]);
    free(eager);
    gpu_fixture_close(&f);
}

static void test_replayed_graphs_give_the_bits_of_calls(void **state)
{
    (void)state;
    for (int i = 0; i < FORMATS; i++) {
        check_replay(formats[i], true);
        check_replay(formats[i], false);
    }
    finish();
}

/* Other weights, in place; as an optimizer would, their largest magnitudes go where the model wants them. */
static void change_weights(struct gpu_fixture *f, const bf16 *weights)
{
    cuda_upload(cuda, f->weights, weights, f->params.elements * sizeof *weights);
    model_weight_amax_reset(f->model);
    assert_int_equal(cuda_sync(cuda, "weights"), OK);
    for (int i = 0; i < f->params.count; i++) {
        const struct param *p = &f->params.params[i];
        float *place = model_weight_amax(f->model, p->offset), most;
        const bool wanted = p->kind == PARAM_ATTN || p->kind == PARAM_MLP;
        expect((place != NULL) == (wanted && p->cols > 1 && p->rows > 1), p->name, "wanted");
        if (place == NULL) {
            continue;
        }
        cuda_download(cuda, &most, place, sizeof most); /* parts of a matrix share it */
        assert_int_equal(cuda_sync(cuda, "place"), OK);
        for (int64_t e = 0; e < p->rows * p->cols; e++) {
            most = fmaxf(most, fabsf(bf16_to_float(weights[p->offset + (size_t)e])));
        }
        cuda_upload(cuda, place, &most, sizeof most);
    }
}

static void test_weights_updated_gives_the_bits_of_set_weights(void **state)
{
    (void)state;
    for (int i = 1; i < FORMATS; i++) { /* BF16 has no largest magnitude */
        struct gpu_fixture f;
        struct data d = data_make();
        open_format(&f, formats[i], RECOMPUTE_NONE, 1);
        const size_t n = f.params.elements;
        bf16 *weights = malloc(n * sizeof *weights);
        gpu_fetch(cuda, weights, f.weights, n * sizeof *weights);
        for (size_t e = 0; e < n; e++) {
            weights[e] = bf16_from_float(bf16_to_float(weights[e]) * (e % 7 == 0 ? -2.6f : 0.7f));
        }
        struct model_batch host = batch_of(&d, 0, 1, TOKENS), batch = gpu_fixture_batch(&f, &host, scale);
        gpu_fixture_run(&f, &batch, false);
        void *old = gpu_fixture_grads(&f);
        change_weights(&f, weights);
        model_weights_updated(f.model);
        gpu_fixture_run(&f, &batch, false);
        void *updated = gpu_fixture_grads(&f);
        model_set_weights(f.model, f.weights);
        gpu_fixture_run(&f, &batch, false);
        void *set = gpu_fixture_grads(&f);
        expect(memcmp(old, set, f.grad_bytes) != 0, linear_format_names[formats[i]], "nothing changed");
        expect_same(&f, linear_format_names[formats[i]], "updated", set, updated);
        free(old);
        free(updated);
        free(set);
        free(weights);
        gpu_fixture_close(&f);
    }
    finish();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        GPU_TEST(test_runs_and_recomputation_give_equal_bits),
        GPU_TEST(test_bits_of_the_gpus_attention),
        GPU_TEST(test_replayed_graphs_give_the_bits_of_calls),
        GPU_TEST(test_weights_updated_gives_the_bits_of_set_weights),
    };
    cases_start(argc, argv);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
