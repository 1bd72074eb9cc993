/* watch: the recorded series of the paper, synthetic runs, and the state in checkpoints. */
#include "core/rng.h"
#include "tests/test.h"
#include "train/watch.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS_MAX = 20000 };

struct series {
    int n;
    struct watch_row rows[ROWS_MAX];
};

static struct series made, other; /* too large for the stack */

static void add_row(struct series *s, int64_t update, double loss, double norm)
{
    assert_true(s->n < ROWS_MAX);
    s->rows[s->n++] = (struct watch_row){update, loss, norm, 0, NAN};
}

static void read_paper(struct series *s, const char *arm)
{
    char path[128];
    char line[256];
    snprintf(path, sizeof path, "tests/series/paper_8b_%s.csv", arm);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    s->n = 0;
    assert_non_null(fgets(line, sizeof line, file));
    while (fgets(line, sizeof line, file) != NULL) {
        long long update;
        double loss, norm;
        assert_int_equal(sscanf(line, "%lld,%lf,%lf", &update, &loss, &norm), 3);
        add_row(s, update, loss, norm);
    }
    fclose(file);
}

/* The rows in between, on straight lines: the same run logged at every update. */
static void densify(const struct series *sparse, int64_t last, struct series *dense)
{
    dense->n = 0;
    for (int i = 1; i < sparse->n && sparse->rows[i].update <= last; i++) {
        const struct watch_row *a = &sparse->rows[i - 1];
        const struct watch_row *b = &sparse->rows[i];
        for (int64_t u = a->update; u < b->update; u++) {
            double t = (double)(u - a->update) / (double)(b->update - a->update);
            add_row(dense, u, a->loss + t * (b->loss - a->loss), a->grad_norm + t * (b->grad_norm - a->grad_norm));
        }
    }
}

struct outcome {
    enum verdict worst, last;
    int64_t diverged_at; /* 0: never */
    int64_t onset;
    int suspect_rows;
};

static struct outcome play(const struct series *s)
{
    struct watch *watch = NULL;
    struct watch_config config = watch_config_default();
    struct outcome o = {0};
    assert_int_equal(watch_open(&watch, &config), OK);
    for (int i = 0; i < s->n; i++) {
        o.last = watch_update(watch, &s->rows[i]);
        assert_int_equal(o.last, watch_verdict(watch));
        assert_int_equal(o.last == VERDICT_HEALTHY, watch_reason(watch)[0] == '\0');
        assert_int_equal(o.last == VERDICT_HEALTHY, watch_onset(watch) == 0);
        assert_false(o.worst == VERDICT_DIVERGED && o.last != VERDICT_DIVERGED);
        o.suspect_rows += o.last == VERDICT_SUSPECT;
        if (o.last == VERDICT_DIVERGED && o.diverged_at == 0) {
            o.diverged_at = s->rows[i].update;
        }
        o.worst = o.last > o.worst ? o.last : o.worst;
    }
    o.onset = watch_onset(watch);
    watch_close(watch);
    return o;
}

static enum verdict verdict_at(const struct series *s, int64_t update)
{
    static struct series cut;
    cut.n = 0;
    for (int i = 0; i < s->n && s->rows[i].update <= update; i++) {
        cut.rows[cut.n++] = s->rows[i];
    }
    return play(&cut).last;
}

/* ------------------------------------------------------------------------------------------- the recorded series ---
 */

static void test_mxfp4_is_diverged_by_350_and_stays(void **state)
{
    (void)state;
    read_paper(&made, "mxfp4_pv");
    struct outcome o = play(&made);
    assert_true(o.diverged_at > 0 && o.diverged_at <= 350);
    assert_int_equal(o.onset, 325);
    assert_int_equal(verdict_at(&made, 300), VERDICT_HEALTHY);
    assert_int_equal(verdict_at(&made, 325), VERDICT_SUSPECT);
    assert_int_equal(verdict_at(&made, 350), VERDICT_DIVERGED);
    assert_int_equal(verdict_at(&made, 950), VERDICT_DIVERGED);
    assert_int_equal(verdict_at(&made, 2550), VERDICT_DIVERGED);
    densify(&made, 2550, &other);
    o = play(&other);
    assert_true(o.diverged_at > 325 && o.diverged_at <= 350);
    assert_true(o.onset > 300 && o.onset <= 325);
    assert_int_equal(o.last, VERDICT_DIVERGED);
}

static void test_bf16_and_fp8_are_healthy_throughout(void **state)
{
    (void)state;
    const char *const arms[] = {"bf16", "fp8_pv"};
    for (int a = 0; a < 2; a++) {
        read_paper(&made, arms[a]);
        assert_int_equal(play(&made).worst, VERDICT_HEALTHY);
        densify(&made, 16425, &other);
        assert_int_equal(play(&other).worst, VERDICT_HEALTHY);
    }
}

/* The row at 3,875 that the sampled series skips, between normal neighbours, as tests/series/README.md tells. */
static void test_the_fp8_spike_is_at_most_suspect(void **state)
{
    (void)state;
    read_paper(&other, "fp8_pv");
    for (int neighbours = 0; neighbours < 2; neighbours++) {
        made.n = 0;
        for (int i = 0; i < other.n; i++) {
            if (other.rows[i].update == 5000) {
                if (neighbours == 1) {
                    add_row(&made, 3850, 2.75, 0.11);
                }
                add_row(&made, 3875, 3.223231792449951, 11.3125);
                if (neighbours == 1) {
                    add_row(&made, 3900, 2.75, 0.11);
                }
            }
            made.rows[made.n++] = other.rows[i];
        }
        assert_int_equal(verdict_at(&made, 3875), VERDICT_SUSPECT);
        struct outcome o = play(&made);
        assert_int_equal(o.worst, VERDICT_SUSPECT);
        assert_int_equal(o.suspect_rows, 1);
        assert_int_equal(o.last, VERDICT_HEALTHY);
    }
}

static void join(struct series *s, const struct series *reference)
{
    for (int i = 0; i < s->n; i++) {
        for (int k = 0; k < reference->n; k++) {
            if (reference->rows[k].update == s->rows[i].update) {
                s->rows[i].partner_loss = reference->rows[k].loss;
            }
        }
    }
}

static void test_the_paper_s_arms_beside_their_reference(void **state)
{
    (void)state;
    read_paper(&other, "bf16");
    read_paper(&made, "fp8_pv");
    join(&made, &other);
    assert_int_equal(play(&made).worst, VERDICT_HEALTHY);
    read_paper(&made, "mxfp4_pv");
    join(&made, &other);
    assert_int_equal(play(&made).diverged_at, 350);
}

/* ------------------------------------------------------------------------------------------------ synthetic runs ---
 */

static double normal(int seed, int64_t update, int what)
{
    return rng_normal((uint64_t)seed, rng_stream("watch"), (uint64_t)(2 * update + what));
}

/* A byte model that learns: loss from 5.6 towards 2.0 with time constant tau, batch noise, norms 0.5 to 5. */
static void add_small_run(struct series *s, int seed, int64_t updates, double tau, double noise, int64_t every)
{
    s->n = 0;
    for (int64_t u = 1; u <= updates; u++) {
        if (u == 1 || u % every == 0) {
            double loss = 2.0 + 3.6 * exp(-(double)(u - 1) / tau) + noise * normal(seed, u, 0);
            double norm = fmin(fmax(1.6 * exp(0.5 * normal(seed, u, 1)), 0.5), 5);
            add_row(s, u, loss, norm);
        }
    }
}

static void test_noisy_small_runs_never_diverge(void **state)
{
    (void)state;
    const double noises[] = {0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5};
    for (int n = 0; n < 7; n++) {
        int suspect_rows = 0;
        int rows = 0;
        for (int seed = 0; seed < 60; seed++) {
            add_small_run(&made, seed, 200 + 300 * (seed % 3), 10 + 10 * (seed % 7), noises[n], seed % 4 == 3 ? 25 : 1);
            struct outcome o = play(&made);
            assert_int_not_equal(o.worst, VERDICT_DIVERGED);
            suspect_rows += o.suspect_rows;
            rows += made.n;
        }
        print_message("noise %.2f: %d of %d rows suspect\n", noises[n], suspect_rows, rows);
        assert_true(suspect_rows * (noises[n] <= 0.3 ? 100 : 10) <= rows);
    }
}

static void test_plateau_and_constant_loss_are_healthy(void **state)
{
    (void)state;
    made.n = 0;
    for (int64_t u = 1; u <= 3000; u++) {
        add_row(&made, u, 2.5 + 0.1 * normal(1, u, 0), 0.3 * exp(0.4 * normal(1, u, 1)));
    }
    assert_int_equal(play(&made).worst, VERDICT_HEALTHY);
    made.n = 0;
    for (int64_t u = 1; u <= 1000; u++) {
        add_row(&made, u, 5.545, 0);
    }
    assert_int_equal(play(&made).worst, VERDICT_HEALTHY);
}

/* During the warm-up the loss stands, then falls; norms climb to a peak ten times where they end. */
static void test_learning_rate_warm_up_is_healthy(void **state)
{
    (void)state;
    made.n = 0;
    for (int64_t u = 1; u <= 600; u++) {
        double t = (double)u;
        double loss = 5.55 + 0.1 * sin(t / 9) - 3.2 / (1 + exp((100 - t) / 20)) + 0.05 * normal(2, u, 0);
        double norm = (0.5 + 5 * exp(-(t - 60) * (t - 60) / 1200)) * exp(0.2 * normal(2, u, 1));
        add_row(&made, u, loss, norm);
    }
    struct outcome o = play(&made);
    assert_int_equal(o.worst, VERDICT_HEALTHY);
}

/* Spikes of up to 5 nats and a hundredfold norm, gone after at most 40 updates: reported, never final. */
static void test_spikes_that_recover_are_at_most_suspect(void **state)
{
    (void)state;
    for (int seed = 0; seed < 40; seed++) {
        double height = 0.5 + 0.12 * seed;
        double decay = 1 + seed % 16;
        add_small_run(&made, seed, 600, 60, 0.05, 1);
        for (int i = 0; i < made.n; i++) {
            double after = (double)(made.rows[i].update - 300);
            if (after >= 0) {
                made.rows[i].loss += height * exp(-after / decay);
                made.rows[i].grad_norm *= 1 + 100 * exp(-after / decay);
            }
        }
        struct outcome o = play(&made);
        assert_int_equal(o.worst, VERDICT_SUSPECT);
        assert_int_equal(o.last, VERDICT_HEALTHY);
        assert_true(o.suspect_rows >= 25); /* calm must last before the run counts as healthy again */
        /* Logged every 25 updates the same run shows one high row, or none. */
        other.n = 0;
        for (int i = 24; i < made.n; i += 25) {
            other.rows[other.n++] = made.rows[i];
        }
        assert_int_not_equal(play(&other).worst, VERDICT_DIVERGED);
    }
}

/* Breaks out at 120 of 200 updates and stays: small runs must be caught too, at every spacing of rows. */
static void test_small_runs_that_blow_up_are_caught(void **state)
{
    (void)state;
    for (int seed = 0; seed < 40; seed++) {
        int every = seed % 2 == 0 ? 1 : 10;
        add_small_run(&made, seed, 200, 30, 0.1, every);
        for (int i = 0; i < made.n; i++) {
            if (made.rows[i].update > 120) {
                made.rows[i].loss += 2.0;
                made.rows[i].grad_norm *= 30;
            }
        }
        struct outcome o = play(&made);
        assert_true(o.diverged_at > 120 && o.diverged_at <= 160);
        assert_true(o.onset > 120 - 25 && o.onset <= 130);
    }
}

static void test_a_slow_rise_of_one_nat_is_diverged(void **state)
{
    (void)state;
    const int every[] = {1, 25};
    for (int e = 0; e < 2; e++) {
        made.n = 0;
        for (int64_t u = 1; u <= 3000; u++) {
            if (u % every[e] == 0) {
                double t = (double)u;
                double loss = u < 1000 ? 2 + 3.6 * exp(-t / 100) : 2 + fmin((t - 1000) / 1500, 1);
                add_row(&made, u, loss + 0.05 * normal(3, u, 0), 0.5 * exp(0.3 * normal(3, u, 1)));
            }
        }
        struct outcome o = play(&made);
        assert_true(o.diverged_at > 2000 && o.diverged_at <= 2500);
        assert_true(o.onset > 1500);
    }
}

static struct outcome play_with_row(double loss, double norm, int64_t non_finite)
{
    add_small_run(&made, 5, 60, 30, 0.05, 1);
    made.rows[49].loss = loss;
    made.rows[49].grad_norm = norm;
    made.rows[49].non_finite = non_finite;
    return play(&made);
}

static void test_numbers_that_are_not_finite_end_at_once(void **state)
{
    (void)state;
    const double bad[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(play_with_row(bad[i], 1, 0).diverged_at, 50);
        assert_int_equal(play_with_row(2.5, bad[i], 0).diverged_at, 50);
        assert_int_equal(play_with_row(2.5, bad[i], 0).onset, 50);
    }
    assert_int_equal(play_with_row(2.5, 1, 3).diverged_at, 50);
    made.n = 0;
    add_row(&made, 1, NAN, 1);
    assert_int_equal(play(&made).diverged_at, 1);
}

/* The loss looks fine while the norm runs away: 4, 5044, 1.8e8, then NaN. One such leap alone is a spike. */
static void test_a_norm_that_runs_away_is_diverged_while_the_loss_is_fine(void **state)
{
    (void)state;
    add_small_run(&made, 6, 60, 30, 0.05, 1);
    made.rows[40].grad_norm = 4;
    made.rows[41].grad_norm = 5044;
    made.rows[42].grad_norm = 1.8e8;
    struct outcome o = play(&made);
    assert_int_equal(o.diverged_at, 43);
    assert_int_equal(o.onset, 42);
    made.rows[42].grad_norm = 4;
    o = play(&made);
    assert_int_equal(o.worst, VERDICT_SUSPECT);
}

/* A burst that stays while the loss goes on falling becomes normal after a window. */
static void test_a_lasting_change_of_the_norm_becomes_normal(void **state)
{
    (void)state;
    add_small_run(&made, 7, 600, 60, 0.05, 1);
    for (int i = 200; i < made.n; i++) {
        made.rows[i].grad_norm *= 20;
    }
    struct outcome o = play(&made);
    assert_int_equal(o.worst, VERDICT_SUSPECT);
    assert_int_equal(o.last, VERDICT_HEALTHY);
    assert_int_equal(verdict_at(&made, 295), VERDICT_SUSPECT); /* not before: rows in trouble are no measure */
}

static void test_the_partner_rule(void **state)
{
    (void)state;
    for (int late = 0; late < 2; late++) {
        add_small_run(&made, 8, 400, 60, 0.05, 1);
        int length = late == 0 ? 20 : 60; /* shorter and longer than `confirm` */
        for (int i = 0; i < made.n; i++) {
            made.rows[i].partner_loss = made.rows[i].loss - (i >= 200 && i < 200 + length ? 1.0 : 0.1);
        }
        struct outcome o = play(&made);
        assert_int_equal(o.diverged_at, late == 0 ? 0 : 226);
        assert_int_equal(o.onset, late == 0 ? 0 : 201);
        for (int i = 0; i < made.n; i++) {
            made.rows[i].partner_loss = NAN;
        }
        assert_int_equal(play(&made).worst, VERDICT_HEALTHY);
    }
}

/* ------------------------------------------------------------------------------------------------------ the state ---
 */

static json_t *through_text(json_t *state)
{
    char *text = json_dumps(state, 0);
    assert_non_null(text);
    json_t *read = NULL;
    assert_int_equal(json_read_text("state", text, strlen(text), &read), OK);
    free(text);
    json_decref(state);
    return read;
}

/* Cut after each row: the restored watch must say the same as the straight one to the last letter. */
static void check_cuts(const struct series *s, int step)
{
    struct watch_config config = watch_config_default();
    for (int cut = 0; cut <= s->n; cut += step) {
        struct watch *straight = NULL;
        struct watch *resumed = NULL;
        assert_int_equal(watch_open(&straight, &config), OK);
        assert_int_equal(watch_open(&resumed, &config), OK);
        for (int i = 0; i < cut; i++) {
            watch_update(straight, &s->rows[i]);
        }
        json_t *state = through_text(watch_save(straight));
        assert_int_equal(watch_restore(resumed, state), OK);
        for (int i = cut; i < s->n; i++) {
            assert_int_equal(watch_update(straight, &s->rows[i]), watch_update(resumed, &s->rows[i]));
            assert_string_equal(watch_reason(straight), watch_reason(resumed));
            assert_int_equal(watch_onset(straight), watch_onset(resumed));
        }
        json_t *a = watch_save(straight);
        json_t *b = watch_save(resumed);
        assert_true(json_equal(a, b));
        json_decref(a);
        json_decref(b);
        json_decref(state);
        watch_close(straight);
        watch_close(resumed);
    }
}

static void test_a_resumed_watch_gives_the_same_verdicts(void **state)
{
    (void)state;
    read_paper(&made, "mxfp4_pv");
    check_cuts(&made, 1);
    read_paper(&made, "fp8_pv");
    check_cuts(&made, 1);
    add_small_run(&made, 9, 300, 30, 0.1, 1);
    for (int i = 150; i < 170; i++) {
        made.rows[i].loss += 2; /* an episode, so that cuts fall into it */
        made.rows[i].grad_norm *= 20;
        made.rows[i].partner_loss = made.rows[i].loss - 1.2;
    }
    check_cuts(&made, 7);
    check_cuts(&made, 300);
    made.rows[200].loss = NAN;
    check_cuts(&made, 7);
}

static void test_a_damaged_state_is_refused(void **state)
{
    (void)state;
    struct watch_config config = watch_config_default();
    struct watch *watch = NULL;
    assert_int_equal(watch_open(&watch, &config), OK);
    add_small_run(&made, 10, 50, 30, 0.1, 1);
    for (int i = 0; i < made.n; i++) {
        watch_update(watch, &made.rows[i]);
    }
    const char *const keys[] = {"verdict", "last_update", "last_norm", "rise_since", "rows", "best"};
    json_t *good = watch_save(watch);
    for (int k = 0; k < 6; k++) {
        json_t *bad = json_deep_copy(good);
        json_object_set_new(bad, keys[k], k == 4 ? json_pack("[[i, f]]", 1, 2.0) : json_string("neither"));
        assert_int_equal(watch_restore(watch, bad), ERR_DATA);
        json_decref(bad);
    }
    /* Numbers that no run gives, and that later updates could not compute with. */
    const struct {
        const char *key;
        json_t *value; /* owns */
    } beyond[] = {{"last_update", json_integer(-1)},
                  {"last_update", json_integer(INT64_MAX)},
                  {"trouble_since", json_integer(51)},
                  {"burst_last", json_integer(INT64_MIN)},
                  {"last_norm", json_real(-1)},
                  {"rise_peak", json_real(1e308)},
                  {"best", json_real(-1e308)},
                  {"rows", json_pack("[[i, f, f]]", -1, 2.0, 1.0)},
                  {"rows", json_pack("[[i, f, f]]", 1, 1e308, 1.0)},
                  {"rows", json_pack("[[i, f, f]]", 1, 2.0, -1.0)},
                  {"reason", json_sprintf("%0256d", 0)}};
    for (size_t k = 0; k < sizeof beyond / sizeof beyond[0]; k++) {
        json_t *bad = json_deep_copy(good);
        json_object_set_new(bad, beyond[k].key, beyond[k].value);
        assert_int_equal(watch_restore(watch, bad), ERR_DATA);
        json_decref(bad);
    }
    json_t *after = watch_save(watch);
    assert_true(json_equal(good, after)); /* a refused state changes nothing */
    json_decref(after);
    json_decref(good);
    watch_close(watch);
}

static void test_thresholds_that_cannot_be_are_refused(void **state)
{
    (void)state;
    struct watch *watch = NULL;
    for (int i = 0; i < 7; i++) {
        struct watch_config c = watch_config_default();
        c.window = i == 0 ? 0 : i == 1 ? WATCH_WINDOW_MAX + 1 : c.window;
        c.confirm = i == 2 ? 0 : c.confirm;
        c.loss_rise_suspect = i == 3 ? 2 : c.loss_rise_suspect;
        c.loss_rise_diverged = i == 4 ? NAN : c.loss_rise_diverged;
        c.norm_factor = i == 5 ? 1 : c.norm_factor;
        c.partner_gap = i == 6 ? 0 : c.partner_gap;
        assert_int_equal(watch_open(&watch, &c), ERR_CONFIG);
        assert_non_null(strstr(status_last_message(), "divergence."));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mxfp4_is_diverged_by_350_and_stays),
        cmocka_unit_test(test_bf16_and_fp8_are_healthy_throughout),
        cmocka_unit_test(test_the_fp8_spike_is_at_most_suspect),
        cmocka_unit_test(test_the_paper_s_arms_beside_their_reference),
        cmocka_unit_test(test_noisy_small_runs_never_diverge),
        cmocka_unit_test(test_plateau_and_constant_loss_are_healthy),
        cmocka_unit_test(test_learning_rate_warm_up_is_healthy),
        cmocka_unit_test(test_spikes_that_recover_are_at_most_suspect),
        cmocka_unit_test(test_small_runs_that_blow_up_are_caught),
        cmocka_unit_test(test_a_slow_rise_of_one_nat_is_diverged),
        cmocka_unit_test(test_numbers_that_are_not_finite_end_at_once),
        cmocka_unit_test(test_a_norm_that_runs_away_is_diverged_while_the_loss_is_fine),
        cmocka_unit_test(test_a_lasting_change_of_the_norm_becomes_normal),
        cmocka_unit_test(test_the_partner_rule),
        cmocka_unit_test(test_a_resumed_watch_gives_the_same_verdicts),
        cmocka_unit_test(test_a_damaged_state_is_refused),
        cmocka_unit_test(test_thresholds_that_cannot_be_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
