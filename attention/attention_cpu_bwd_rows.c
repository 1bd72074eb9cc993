/* attention: the rows of the CPU backward (docs/numerics.md, sections 7 and 8): dO', P, the statistic r, dS. */
#include "attention/attention_cpu_bwd.h"
#include "numerics/formats.h"

#include <math.h>
#include <string.h>

int64_t bwd_visible_keys(const struct bwd_unit *u, int64_t row)
{
    return u->a->shape.causal ? row + 1 : u->T;
}

bool bwd_ds_takes_exact(const struct attention_recipe *recipe)
{
    return recipe->backward == BWD_BF16 || recipe->bwd_stat == BWD_STAT_EXACT;
}

static float decode_dout(const struct attention_recipe *recipe, float x, float m)
{
    switch (recipe->do_format) {
    case DO_E4M3:
        return e4m3_round(x * m) / m;
    case DO_E5M2:
        return e5m2_round(x * m) / m;
    case DO_BF16:
        return bf16_to_float(bf16_from_float(x));
    }
    return x;
}

void bwd_open_rows(const struct bwd_unit *u, const struct row_block *b)
{
    const struct attention_recipe *recipe = u->a->recipe;
    struct rows dout = head_rows(&u->a->dout, u->batch, b->head);
    int64_t at = (u->batch * u->a->shape.heads + b->head) * u->T + b->first;
    bool codes = recipe->bwd_p == BWD_P_CODES;
    int64_t count = 0;
    int64_t flushed = 0;
    for (int64_t r = 0; r < b->rows; r++) {
        float lse = u->a->lse_log2[at + r];
        bool lost = lse == -INFINITY; /* every code was zero: so are all gradients */
        float n = lost ? 0.0f : floorf(lse);
        u->lane.fold[r] = codes && !lost ? exp2f(n - lse) : 1.0f;
        u->lane.reference[r] = codes ? n : attention_wants_exact(recipe) ? u->saved.lse_exact[at + r] : lse;
        const bf16 *x = dout.data + (b->first + r) * dout.stride;
        for (int64_t d = 0; d < u->D; d++) {
            float y = decode_dout(recipe, bf16_to_float(x[d]) * u->lane.fold[r], u->do_lift);
            u->lane.dout[r * u->D + d] = bf16_from_float(y);
            count += (x[d] & 0x7fff) != 0;
            flushed += (x[d] & 0x7fff) != 0 && y == 0.0f;
        }
    }
    u->stats->do_count += (double)count;
    u->stats->do_flushed += (double)flushed;
}

/* ---- P ---------------------------------------------------------------------------------------------------- */

/* The anchor that the forward had, from the same scores. */
static float forward_anchor(const struct bwd_unit *u, const float *t, int64_t visible)
{
    float max = -INFINITY;
    float magnitude;
    if (u->a->recipe->anchor == ANCHOR_SAMPLED) {
        for (int64_t s = 0; s < anchor_samples(u->T); s++) {
            int64_t key = anchor_sample(s, u->T);
            max = key < visible && t[key] > max ? t[key] : max;
        }
    } else if (u->a->recipe->anchor == ANCHOR_ROW && u->a->recipe->pv == PV_MXFP4) {
        score_range(t, visible, &max, &magnitude);
    } else {
        return 0; /* no other format looks at it */
    }
    return anchor_of(u->a->recipe, max);
}

static void rebuild_codes(const struct bwd_unit *u, const struct row_block *b, int64_t r, int64_t visible)
{
    const struct attention_cpu_probe *probe = u->options->probe;
    int64_t at = (u->batch * u->a->shape.heads + b->head) * u->T + b->first + r;
    int64_t block = attention_p_block(u->a->recipe->pv);
    float *t = u->lane.p + r * u->W;
    struct p_row p = {
        .t = t,
        .visible = visible,
        .n = b->keys,
        .reference = u->lane.reference[r],
        .anchor = forward_anchor(u, t, visible),
        .rebuilt = true,
        .codes = probe != NULL && probe->codes != NULL ? probe->codes + at * u->T : NULL,
        .exponents =
            probe != NULL && probe->exponents != NULL ? probe->exponents + at * ((u->T + block - 1) / block) : NULL,
    };
    p_row_publish(u->a->recipe, &p);
}

/* 2^fl32(t - lse), t a row of scores; y may be t. */
static void exact_row(const float *t, int64_t n, float lse, float *y)
{
    for (int64_t j = 0; j < n; j++) {
        y[j] = t[j] - lse;
    }
    exp2_row(y, n, 0.0f, y);
}

/* P of one row, for dS and for dV, from its scores. */
static void probability_row(const struct bwd_unit *u, const struct row_block *b, int64_t r)
{
    const struct attention_recipe *recipe = u->a->recipe;
    int64_t visible = bwd_visible_keys(u, b->first + r);
    visible = visible < b->keys ? visible : b->keys;
    int64_t width = attention_whole_blocks(b->keys);
    float *p = u->lane.p + r * u->W;
    float lse = u->lane.reference[r];
    int64_t at = (u->batch * u->a->shape.heads + b->head) * u->T + b->first + r;
    if (u->a->lse_log2[at] == -INFINITY) {
        memset(p, 0, (size_t)width * sizeof *p);
        if (bwd_ds_takes_exact(recipe)) {
            memset(u->lane.p_ds + r * u->W, 0, (size_t)width * sizeof *p);
        }
        return;
    }
    for (int64_t j = visible; j < width; j++) {
        p[j] = ATTENTION_MASKED;
    }
    if (bwd_ds_takes_exact(recipe)) {
        /* In the folded scheme P carries 2^f. */
        float *exact = u->lane.p_ds + r * u->W;
        exact_row(p, width, attention_wants_exact(recipe) ? u->saved.lse_exact[at] : u->a->lse_log2[at], exact);
        for (int64_t j = 0; u->lane.fold[r] != 1.0f && j < width; j++) {
            exact[j] /= u->lane.fold[r];
        }
    }
    if (recipe->bwd_p == BWD_P_CODES) {
        rebuild_codes(u, b, r, visible);
        return;
    }
    exact_row(p, width, lse, p);
    for (int64_t j = 0; j < width; j++) {
        p[j] = recipe->bwd_p == BWD_P_FP8 ? e4m3_round(256.0f * p[j]) * 0x1p-8f : bf16_to_float(bf16_from_float(p[j]));
    }
}

void bwd_probabilities(const struct bwd_unit *u, const struct row_block *b)
{
    for (int64_t r = 0; r < b->rows; r++) {
        probability_row(u, b, r);
    }
}

/* ---- the statistic r -------------------------------------------------------------------------------------- */

static double dot_bf16(const bf16 *x, const bf16 *y, int64_t n)
{
    double sum = 0;
    for (int64_t d = 0; d < n; d++) {
        sum += (double)bf16_to_float(x[d]) * (double)bf16_to_float(y[d]);
    }
    return sum;
}

static float mean_dprobability(const float *p, const float *dp, int64_t n)
{
    double sum = 0;
    double weight = 0;
    for (int64_t j = 0; j < n; j++) {
        sum += (double)p[j] * (double)dp[j];
        weight += (double)p[j];
    }
    return weight > 0 ? (float)(sum / weight) : 0.0f;
}

static float row_statistic(const struct bwd_unit *u, const struct row_block *b, int64_t r, const float *p,
                           const float *dp)
{
    struct rows out = head_rows(&u->a->out, u->batch, b->head);
    struct rows dout = head_rows(&u->a->dout, u->batch, b->head);
    int64_t row = b->first + r;
    int64_t at = (u->batch * u->a->shape.heads + b->head) * u->T + row;
    const bf16 *decoded = u->lane.dout + r * u->D;
    switch (u->a->recipe->bwd_stat) {
    case BWD_STAT_SAVED_RAW:
        return (float)dot_bf16(out.data + row * out.stride, dout.data + row * dout.stride, u->D) * u->lane.fold[r];
    case BWD_STAT_SAVED:
        return (float)dot_bf16(out.data + row * out.stride, decoded, u->D);
    case BWD_STAT_RECENTRED:
        return mean_dprobability(p, dp, b->keys);
    case BWD_STAT_EXACT:
        return (float)dot_bf16(u->saved.out_exact + at * u->D, decoded, u->D);
    }
    return 0;
}

/* ---- dS --------------------------------------------------------------------------------------------------- */

/* Sums of one row in 32 interleaved parts. Loops of 32 are what compilers vectorise; shorter ones they unroll first. */
enum { LANES = 32 };

struct ds_sums {
    double sum[LANES], abs[LANES], stored[LANES], stored_abs[LANES];
    int32_t count[LANES], flushed[LANES], saturated[LANES];
};

static inline float ds_store(float y, bool e4m3)
{
    return e4m3 ? e4m3_round(y) : bf16_to_float(bf16_from_float(y));
}

/* n entries, a multiple of 32: ds becomes the stored lift P (dP - r); what is lost on the way is counted. */
static inline void ds_row(const float *p, float *ds, int64_t n, float r, float factor, float lift, bool e4m3,
                          struct ds_sums *s)
{
    for (int64_t j = 0; j < n; j += LANES) {
        for (int l = 0; l < LANES; l++) {
            float x = p[j + l] * factor * (ds[j + l] - r);
            float y = lift * x;
            float z = ds_store(y, e4m3);
            ds[j + l] = z;
            s->sum[l] += (double)x;
            s->abs[l] += (double)fabsf(x);
            s->stored[l] += (double)z;
            s->stored_abs[l] += (double)fabsf(z);
            s->count[l] += y != 0.0f;
            s->flushed[l] += y != 0.0f && z == 0.0f;
            s->saturated[l] += e4m3 && fabsf(y) > 464.0f;
        }
    }
}

static double lanes_sum(const double *x)
{
    double sum = 0;
    for (int l = 0; l < LANES; l++) {
        sum += x[l];
    }
    return sum;
}

/* debug_leak: how far r must be off for the row's sum of P (dP - r) to move by that share of sum |P (dP - r)|. */
static float planted_error(const float *p, const float *dp, int64_t n, float r, float leak)
{
    double weight[LANES] = {0};
    double abs[LANES] = {0};
    for (int64_t j = 0; j < n; j += LANES) {
        for (int l = 0; l < LANES; l++) {
            weight[l] += (double)p[j + l];
            abs[l] += (double)fabsf(p[j + l] * (dp[j + l] - r));
        }
    }
    double whole = lanes_sum(weight);
    return whole > 0 ? (float)((double)leak * lanes_sum(abs) / whole) : 0.0f;
}

static void count_ds(const struct bwd_unit *u, const struct ds_sums *s, float r)
{
    struct attention_stats *stats = u->stats;
    double rho = lanes_sum(s->sum);
    stats->leak_abs += fabs(rho);
    stats->ds_abs += lanes_sum(s->abs);
    stats->leak_stored_abs += fabs(lanes_sum(s->stored)) / (double)u->lift;
    stats->ds_stored_abs += lanes_sum(s->stored_abs) / (double)u->lift;
    stats->leak_r += rho * (double)r;
    stats->r_r += (double)r * (double)r;
    for (int l = 0; l < LANES; l++) {
        stats->ds_count += s->count[l];
        stats->ds_flushed += s->flushed[l];
        stats->ds_saturated += s->saturated[l];
    }
}

void bwd_ds(const struct bwd_unit *u, const struct row_block *b)
{
    const struct attention_recipe *recipe = u->a->recipe;
    bool exact = bwd_ds_takes_exact(recipe);
    /* Codes come times the unit of their family. */
    float factor = exact || recipe->bwd_p != BWD_P_CODES ? 1.0f : 1.0f / attention_unit(recipe);
    for (int64_t r = 0; r < b->rows; r++) {
        const float *p = (exact ? u->lane.p_ds : u->lane.p) + r * u->W;
        float *ds = u->lane.ds + r * u->W;
        int64_t width = attention_whole_blocks(b->keys);
        for (int64_t j = b->keys; j < width; j++) {
            ds[j] = 0;
        }
        float stat = row_statistic(u, b, r, p, ds);
        if (recipe->debug_leak != 0) {
            stat -= planted_error(p, ds, width, stat, recipe->debug_leak);
        }
        struct ds_sums sums = {0};
        if (recipe->backward == BWD_BF16) {
            ds_row(p, ds, width, stat, factor, u->lift, false, &sums);
        } else {
            ds_row(p, ds, width, stat, factor, u->lift, true, &sums);
        }
        count_ds(u, &sums, stat / u->lane.fold[r]);
    }
}
