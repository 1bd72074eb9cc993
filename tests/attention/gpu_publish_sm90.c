/* What the Hopper forward multiplies: represented operands bit for bit those of the CPU, and views that hold the same
 * values. Inputs that meet every rule: ties, far exponents, subnormal numbers, zeros, broken heads, odd lengths. */
#include "attention/attention_sm90.h"
#include "core/rng.h"
#include "numerics/formats.h"
#include "tests/gpu_compare.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { D = 128 };

enum fill { FILL_GAUSS, FILL_TIES, FILL_WIDE, FILL_BITS, FILL_SCALES, FILL_BROKEN, FILLS };
static const char *const fill_names[] = {"gauss", "ties", "wide", "bits", "scales", "broken"};

static struct cuda *cuda;

static float normal(uint64_t at)
{
    const struct rng_words words = rng_words(5, 2, at);
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        sum += (float)(words.w[i] >> 8) * 0x1p-24f - 0.5f;
    }
    return sum * 1.7320508f;
}

/* Element i, feature of head `head` (of all heads of all samples). */
static bf16 value_of(enum fill fill, int64_t i, int64_t head)
{
    static const int scales[] = {0, -70, 70, -100, 100, -126, 120, -132, -59, -61, 18, 20, -30};
    const uint32_t r = rng_words(5, 1, (uint64_t)i).w[0];
    const bf16 sign = (bf16)(r & 0x8000u);
    switch (fill) {
    case FILL_TIES: /* few bits: quotients by scales land on ties; zeros of both signs */
        return bf16_from_float((float)((int)(r % 63) - 31) * 0.125f) | (r % 63 == 31 ? sign : 0);
    case FILL_WIDE: /* exponents 2^-20 .. 2^19 side by side */
        return bf16_from_float(ldexpf(normal((uint64_t)i), (int)(r % 40) - 20));
    case FILL_BITS: /* every finite number */
        return (bf16)(sign | (r >> 16) % 0x7f80u);
    case FILL_SCALES:
        return head % 14 == 13 ? sign : bf16_from_float(ldexpf(normal((uint64_t)i), scales[(size_t)head % 14 % 13]));
    case FILL_BROKEN:
        return head % 3 != 0      ? bf16_from_float(normal((uint64_t)i))
               : i % 517 == 11    ? (bf16)0x7f80
               : head % 2 == 0    ? bf16_from_float(normal((uint64_t)i))
               : i % 1031 == 1000 ? (bf16)0xffc1
                                  : sign;
    default:
        return bf16_from_float(normal((uint64_t)i));
    }
}

/* One call, on the CPU and on the GPU: a fused (B, T, H + 2 Hkv, D) array. */
struct publish_case {
    struct attention_shape shape;
    struct attention_recipe recipe;
    bool given; /* amax comes from outside */
    char what[160];
    bf16 *x, *q, *k, *v; /* represented */
    void *d_x;
};

static struct rows head_of(const struct publish_case *c, int64_t batch, int64_t slot)
{
    const struct attention_shape *s = &c->shape;
    const int64_t all = s->heads + 2 * s->kv_heads;
    return (struct rows){c->x + (batch * s->tokens * all + slot) * D, all * D};
}

static void represent(struct publish_case *c)
{
    const struct attention_shape *s = &c->shape;
    const int64_t T = s->tokens;
    float *staging = malloc((size_t)(T * D) * sizeof *staging);
    for (int64_t b = 0; b < s->batch; b++) {
        for (int64_t h = 0; h < s->heads + 2 * s->kv_heads; h++) {
            const int64_t of_k = h - s->heads, of_v = of_k - s->kv_heads;
            const struct rows from = head_of(c, b, h);
            if (of_v >= 0) {
                publish_value(&c->recipe, from, T, D, staging, c->v + (b * s->kv_heads + of_v) * T * D);
            } else if (of_k >= 0) {
                bf16 *k = c->k + (b * s->kv_heads + of_k) * T * D;
                if (c->recipe.k_center) {
                    publish_centred(from, T, D, staging, k);
                }
                publish_scores(&c->recipe, c->recipe.k_center ? (struct rows){k, D} : from, T, D, staging, k);
            } else {
                publish_scores(&c->recipe, from, T, D, staging, c->q + (b * s->heads + h) * T * D);
            }
        }
    }
    free(staging);
}

/* codes[i] must be x[i] m with m = 1 / (inverse unit), a power of two; exact: and have its value. A head so small that
 * m is at its end may hold values that BF16 has rounded. */
static void check_codes(const struct publish_case *c, const char *name, const bf16 *x, int64_t n, const uint8_t *codes,
                        float inverse, float unit, bool exact)
{
    const float m = exp2f(rintf(-log2f(inverse * unit)));
    const bool last = m == 0x1p126f;
    int64_t bad = 0, first = 0;
    for (int64_t i = 0; i < n; i++) {
        const float y = bf16_to_float(x[i]), value = e4m3_to_float(codes[i]) / m;
        const float error = last ? 0x1p-134f : exact ? 0.0f : 0x1p-10f / m;
        const bool same = isnan(y) ? isnan(value) : isinf(y) ? value == y : fabsf(value - y) <= error;
        if ((!last && isfinite(y) && codes[i] != e4m3_from_float(y * m)) || !same) {
            first = bad++ == 0 ? i : first;
        }
    }
    if (bad > 0) {
        printf("  FAILED %s %s: %lld of %lld codes, first %lld: %#x of %.9g, m %g\n", c->what, name, (long long)bad,
               (long long)n, (long long)first, codes[first], (double)bf16_to_float(x[first]), (double)m);
        compare_failures++;
    }
}

/* Codes and inverses are in host memory from here on. */
static void check_rows(const struct publish_case *c, const char *name, const bf16 *x, int64_t heads,
                       const uint8_t *codes, const float *inverse)
{
    const int64_t n = c->shape.tokens * D;
    for (int64_t u = 0; u < c->shape.batch * heads; u++) {
        check_codes(c, name, x + u * n, n, codes + u * n, inverse[u], 1, true);
    }
}

/* The column view, put back into rows; behind T it must be zero. */
static void check_column(const struct publish_case *c, const uint8_t *column, const float *inverse)
{
    static const int pi1[16] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
    const struct attention_shape *s = &c->shape;
    const int64_t T = s->tokens, padded = attention_padded_sm90(T);
    uint8_t *rows = malloc((size_t)(padded * D));
    for (int64_t u = 0; u < s->batch * s->kv_heads; u++) {
        int64_t behind = 0;
        for (int64_t i = 0; i < D * padded; i++) {
            const int64_t d = i / padded, at = i % padded, word = at / 4 % 32;
            const int64_t p = c->recipe.pv == PV_FP8 ? at : at / 128 * 128 + (word % 4 * 8 + word / 4) * 4 + at % 4;
            const int64_t token = p / 16 * 16 + pi1[p % 16];
            rows[token * D + d] = column[u * D * padded + i];
            behind += token >= T && rows[token * D + d] != 0;
        }
        check_codes(c, "column", c->v + u * T * D, T * D, rows, inverse[u], attention_unit(&c->recipe),
                    c->recipe.pv == PV_FP8);
        if (behind > 0) {
            printf("  FAILED %s: %lld codes behind the last token\n", c->what, (long long)behind);
            compare_failures++;
        }
    }
    free(rows);
}

/* (B, H + 2 Hkv), or NULL. */
static float *amax_of_heads(const struct publish_case *c)
{
    const struct attention_shape *s = &c->shape;
    const int64_t all = s->heads + 2 * s->kv_heads;
    if (!c->given) {
        return NULL;
    }
    float *amax = malloc((size_t)(s->batch * all) * sizeof *amax);
    for (int64_t i = 0; i < s->batch * all; i++) {
        amax[i] = rows_amax(head_of(c, i / all, i % all), s->tokens, D);
    }
    float *d_amax = gpu_array(cuda, amax, (size_t)(s->batch * all) * sizeof *amax);
    free(amax);
    return d_amax;
}

static void compare_own(const struct publish_case *c, const char *name, const bf16 *got, const bf16 *want,
                        int64_t heads)
{
    char what[200];
    snprintf(what, sizeof what, "%s %s", c->what, name);
    compare_bits(what, got, want, (size_t)(c->shape.batch * heads * c->shape.tokens * D) * sizeof(bf16), sizeof(bf16));
}

/* Device memory, and what it held last. */
struct copied {
    void *device;
    char *host;
    size_t bytes;
};

static struct copied copied_open(size_t bytes)
{
    return (struct copied){gpu_array(cuda, NULL, bytes), malloc(bytes + 1), bytes};
}

static void copied_close(struct copied *x)
{
    cuda_free(x->device);
    free(x->host);
}

/* Where a pointer into one of the two points in its copy. */
static const void *in_copy(const struct copied two[2], const void *pointer)
{
    for (int i = 0; i < 2; i++) {
        const ptrdiff_t at = (const char *)pointer - (const char *)two[i].device;
        if (pointer != NULL && at >= 0 && (size_t)at < two[i].bytes) {
            return two[i].host + at;
        }
    }
    return NULL;
}

/* The E4M3 rows of Q and K, all within `two`: scratch, saved. */
static void check_scores(const struct publish_case *c, const char *when, const struct copied two[2], const void *q8,
                         const void *k8, const void *q_inverse, const void *k_inverse)
{
    char what[2][32];
    snprintf(what[0], sizeof what[0], "q8%s", when);
    snprintf(what[1], sizeof what[1], "k8%s", when);
    check_rows(c, what[0], c->q, c->shape.heads, in_copy(two, q8), in_copy(two, q_inverse));
    check_rows(c, what[1], c->k, c->shape.kv_heads, in_copy(two, k8), in_copy(two, k_inverse));
}

/* The rows made once more, from the represented Q and K alone. */
static void check_completed(const struct publish_case *c, const struct copied two[2])
{
    struct carve carve = {.base = two[1].device};
    const struct attention_saved_sm90 x = attention_saved_sm90_carve(&c->shape, &c->recipe, &carve);
    const size_t at = x.q8 == NULL ? two[1].bytes : (size_t)((char *)x.q8 - (char *)two[1].device);
    memset(two[1].host + at, 0xff, two[1].bytes - at);
    cuda_upload(cuda, two[1].device, two[1].host, two[1].bytes);
    attention_complete_sm90(cuda, &c->shape, &c->recipe, two[1].device, two[0].device);
    gpu_fetch(cuda, two[1].host, two[1].device, two[1].bytes);
    if (x.q8 != NULL) {
        check_scores(c, " completed", two, x.q8, x.k8, x.q_inverse, x.k_inverse);
    }
}

static void compare_all(const struct publish_case *c, const struct attention_operands_sm90 *x,
                        const struct copied two[2])
{
    const struct attention_shape *s = &c->shape;
    struct carve carve = {.base = (unsigned char *)two[1].host};
    struct attention_saved own = attention_saved_cuda_carve(s, &c->recipe, &carve).operands;
    if (c->recipe.qk != QK_BF16) {
        compare_own(c, "q", own.q, c->q, s->heads);
        compare_own(c, "k", own.k, c->k, s->kv_heads);
    }
    compare_own(c, "v", own.v, c->v, s->kv_heads);
    check_column(c, in_copy(two, x->v_column), in_copy(two, x->v_inverse));
    if (c->recipe.qk == QK_NVFP4_E4M3) {
        check_scores(c, "", two, x->q8, x->k8, x->q_inverse, x->k_inverse);
    }
}

static void publish_on_gpu(const struct publish_case *c)
{
    const struct attention_shape *s = &c->shape;
    const int64_t all = s->heads + 2 * s->kv_heads;
    const struct head_view view = {c->d_x, s->tokens * all * D, all * D, D};
    struct copied two[] = {copied_open(attention_fwd_scratch_bytes_sm90(s, &c->recipe)),
                           copied_open(attention_variant_sm90.saved_bytes(s, &c->recipe))};
    float *d_amax = amax_of_heads(c);
    struct attention_fwd a = {.cuda = cuda,
                              .shape = *s,
                              .recipe = &c->recipe,
                              .q = view,
                              .k = view,
                              .v = view,
                              .saved = two[1].device,
                              .scratch = two[0].device,
                              .amax = d_amax};
    a.k.data += s->heads * D;
    a.v.data += (s->heads + s->kv_heads) * D;
    const struct attention_operands_sm90 x = attention_fwd_publish_sm90(&a);
    attention_restore_sm90(cuda, s, &c->recipe, two[1].device);
    for (int i = 0; i < 2; i++) {
        gpu_fetch(cuda, two[i].host, two[i].device, two[i].bytes);
    }
    compare_all(c, &x, two);
    check_completed(c, two);
    copied_close(&two[0]);
    copied_close(&two[1]);
    cuda_free(d_amax);
}

static void check(const struct attention_recipe *recipe, int64_t batch, int64_t tokens, enum fill fill, bool given)
{
    struct publish_case c = {
        .shape = {batch, tokens, 6, 3, D, true, 0.08838834764f}, .recipe = *recipe, .given = given};
    const int64_t all = c.shape.heads + 2 * c.shape.kv_heads, n = batch * tokens * all * D;
    char text[256];
    attention_recipe_print(recipe, text, sizeof text);

    snprintf(c.what, sizeof c.what, "%.40s, %d x %d, %s%s", text, (int)batch, (int)tokens, fill_names[fill],
             given ? ", amax given" : "");
    c.x = malloc((size_t)n * sizeof *c.x);
    for (int64_t i = 0; i < n; i++) {
        const int64_t slot = i / D % all, sample = i / (D * all * tokens);
        c.x[i] = value_of(fill, i, sample * all + slot);
    }
    c.q = malloc((size_t)(batch * c.shape.heads * tokens * D) * sizeof *c.q);
    c.k = malloc((size_t)(batch * c.shape.kv_heads * tokens * D) * sizeof *c.k);
    c.v = malloc((size_t)(batch * c.shape.kv_heads * tokens * D) * sizeof *c.v);
    represent(&c);
    c.d_x = gpu_array(cuda, c.x, (size_t)n * sizeof *c.x);
    publish_on_gpu(&c);
    cuda_free(c.d_x);
    free(c.x);
    free(c.q);
    free(c.k);
    free(c.v);
}

static void test_operands(void **state)
{
    (void)state;
    static const int64_t lengths[][2] = {{2, 130}, {1, 1}, {3, 37}, {1, 300}, {2, 16}};
    int turn = 0;
    for (enum qk_format qk = QK_BF16; qk <= QK_NVFP4_E4M3; qk++) {
        for (enum qk_scale scale = QK_SCALE_AMAX; scale <= QK_SCALE_FOLDED; scale++) {
            for (int values = 0; values < 3; values++) {
                for (enum fill fill = 0; fill < FILLS; fill++, turn++) {
                    struct attention_recipe recipe = attention_recipe_bf16();
                    attention_recipe_preset(&recipe, BWD_REPRESENTED);
                    recipe.qk = qk;
                    recipe.qk_scale = scale;
                    recipe.pv = values == 0 ? PV_FP8 : PV_MXFP4;
                    recipe.mx_rule = values == 1 ? MX_NEAREST : MX_OCP;
                    recipe.k_center = qk != QK_BF16 && values == 1 && fill <= FILL_TIES;
                    if ((qk != QK_BF16 || scale == QK_SCALE_AMAX) && !gpu_leaves_out(7)) {
                        const int64_t *length = lengths[turn % 5];
                        check(&recipe, length[0], length[1], fill, turn % 2 == 1);
                    }
                }
            }
        }
    }
    compare_end();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_operands)};
    gpu_arguments(argc, argv);
    cuda = gpu_open();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    cuda_close(cuda);
    return failed;
}
