/* attention: from scores to represented probabilities, one row at a time (docs/numerics.md, section 5 step 3).
 *
 * A row is cut into blocks of 32 keys at absolute positions; masked entries hold a huge negative score, so that all
 * loops have a fixed length and vectorise. */
#include "attention/attention_cpu.h"
#include "numerics/formats.h"

#include <math.h>

#define LOG2_6 0x1.4ae00ep+1f     /* fl32(log2 6) */
#define NEAREST_UP 0x1.2b8034p-1f /* log2 1.5 = .5849625: above it the nearest power of two is the next one */

/* The paper's guard for kernels without a row maximum (section 6): reference = sampled maximum + M, working bytes not
 * below L + 1. */
#define SAMPLED_M 110.0f
#define SAMPLED_L 16.0f

/* ---- powers of two ---------------------------------------------------------------------------------------- */

/* 2^e for an integer e; below -126 zero, above 127 Inf; NaN gives zero. */
static inline float pow2_of(float e)
{
    e = e >= -127.0f ? e : -127.0f;
    e = e <= 128.0f ? e : 128.0f;
    return float_from_bits((uint32_t)((int32_t)e + 127) << 23);
}

/* 2^f for |f| <= 1/2, within 1.2 units of 2^-24; exactly 1 at 0. Chebyshev interpolation of (2^f - 1) / f. A polynomial
 * of our own rather than exp2f: it vectorises, and gives the same bits with every libm. */
static inline float exp2_fraction(float f)
{
    float p = 0x1.44138ap-13f;
    p = __builtin_fmaf(p, f, 0x1.5f0890p-10f);
    p = __builtin_fmaf(p, f, 0x1.3b2a54p-7f);
    p = __builtin_fmaf(p, f, 0x1.c6af6cp-5f);
    p = __builtin_fmaf(p, f, 0x1.ebfbe0p-3f);
    p = __builtin_fmaf(p, f, 0x1.62e430p-1f);
    return __builtin_fmaf(p, f, 1.0f);
}

static inline float exp2_shifted(float t, float shift)
{
    float k = rintf(t);
    return exp2_fraction(t - k) * pow2_of(k + shift);
}

void exp2_row(const float *t, int64_t n, float shift, float *y)
{
    for (int64_t j = 0; j < n; j++) {
        y[j] = exp2_shifted(t[j], shift);
    }
}

/* ---- sums and maxima of one block, in one fixed order ----------------------------------------------------- */

static inline float block_sum(const float *x)
{
    float lane[8];
    for (int l = 0; l < 8; l++) {
        lane[l] = (x[l] + x[l + 8]) + (x[l + 16] + x[l + 24]);
    }
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

/* Floats in their order as integers (and back), so that a maximum has no order of evaluation and vectorises. NaN with a
 * clear sign lies above +Inf. */
static inline int32_t float_order(float x)
{
    int32_t bits = (int32_t)float_bits(x);
    return bits ^ (int32_t)((uint32_t)(bits >> 31) >> 1);
}

static inline float float_of_order(int32_t order)
{
    return float_from_bits((uint32_t)(order ^ (int32_t)((uint32_t)(order >> 31) >> 1)));
}

static inline float max_of(const float *x, int n)
{
    int32_t max = INT32_MIN;
    for (int j = 0; j < n; j++) {
        int32_t order = float_order(x[j]);
        max = order > max ? order : max;
    }
    return float_of_order(max);
}

void score_range(const float *t, int64_t n, float *max, float *magnitude)
{
    int32_t most = float_order(-INFINITY);
    uint32_t largest = 0;
    for (int64_t j = 0; j < n; j++) {
        int32_t order = float_order(t[j]);
        uint32_t bits = float_bits(t[j]) & ~FLOAT_SIGN;
        most = order > most ? order : most;
        largest = bits > largest ? bits : largest;
    }
    *magnitude = float_from_bits(largest);
    *max = largest > FLOAT_INF ? NAN : float_of_order(most);
}

float anchor_of(const struct attention_recipe *recipe, float max)
{
    switch (recipe->anchor) {
    case ANCHOR_ROW:
        return ceilf(max);
    case ANCHOR_ZERO:
        return 0;
    case ANCHOR_SAMPLED:
        return ceilf(max) + SAMPLED_M - (recipe->mx_rule == MX_OCP ? 2.0f : 0.0f); /* OCP: exponents lie two lower */
    }
    return max;
}

int64_t anchor_samples(int64_t T)
{
    return T < ATTENTION_SAMPLES ? T : ATTENTION_SAMPLES;
}

int64_t anchor_sample(int64_t s, int64_t T)
{
    return s * T / anchor_samples(T);
}

/* ---- producers: E2M1(2^x) as values ----------------------------------------------------------------------- */

/* The FP32 numbers x from which on 2^x rounds to the next value: exact for every x (a test walks them), hence both the
 * producers `exact` and `threshold`. */
static const float code_from[7] = {-0x1.fffffep+0f, -0x1.a8ff96p-2f, 0x1.49a786p-2f, 0x1.9d5dap-1f,
                                   0x1.5269e2p+0f,  0x1.ceaedp+0f,   0x1.2934f2p+1f};

static inline float exact_value(float x)
{
    float q = x >= code_from[0] ? 0.5f : 0.0f;
    q += x >= code_from[1] ? 0.5f : 0.0f;
    q += x >= code_from[2] ? 0.5f : 0.0f;
    q += x >= code_from[3] ? 0.5f : 0.0f;
    q += x >= code_from[4] ? 1.0f : 0.0f;
    q += x >= code_from[5] ? 1.0f : 0.0f;
    q += x >= code_from[6] ? 2.0f : 0.0f;
    return q;
}

static inline float affine_value(float x, float a, float b)
{
    float u = __builtin_fmaf(a, x, b);
    return e2m1_round(u > 0.0f ? u : 0.0f);
}

static inline float code_space_value(float x)
{
    float code = floorf(__builtin_fmaf(2.0f, x, 2.37f));
    code = code > 0.0f ? code : 0.0f;
    code = code < 7.0f ? code : 7.0f;
    code = x >= -2.0f && code < 1.0f ? 1.0f : code;
    code = x >= -0.415037f && code < 2.0f ? 2.0f : code;
    /* Codes to values: 0 .5 1 1.5 2 3 4 6. */
    return 0.5f * code + (code > 4.0f ? 0.5f * (code - 4.0f) : 0.0f) + (code > 6.0f ? 1.0f : 0.0f);
}

/* Which keys of block s = index mod 4 the producer `accurate` rounds exactly: pairs {s, s + 8, 4, 12} of 16. */
static inline bool accurate_key(int key, int64_t block)
{
    int pair = key / 2;
    int s = (int)(block % 4);
    return pair == s || pair == s + 8 || pair == 4 || pair == 12;
}

static void produce(const struct attention_recipe *recipe, const float *x, int64_t block, float *q)
{
    switch (recipe->p_map) {
    case P_EXACT:
    case P_THRESHOLD:
        for (int j = 0; j < 32; j++) {
            q[j] = exact_value(x[j]);
        }
        return;
    case P_CODE_SPACE:
        for (int j = 0; j < 32; j++) {
            q[j] = code_space_value(x[j]);
        }
        return;
    case P_AFFINE:
        for (int j = 0; j < 32; j++) {
            q[j] = affine_value(x[j], recipe->affine_a, recipe->affine_b);
        }
        return;
    case P_ACCURATE:
        for (int j = 0; j < 32; j++) {
            q[j] = accurate_key(j, block) ? exact_value(x[j]) : affine_value(x[j], 1.65f, 0.80f);
        }
        return;
    }
}

/* ---- blocks of 32 keys: t in, represented P out ----------------------------------------------------------- */

struct block_out {
    uint8_t *codes;     /* NULL: not wanted */
    int16_t *exponents; /* NULL: not wanted */
    int visible;
};

static void put_codes(const struct block_out *out, const float *q, bool e2m1)
{
    for (int j = 0; out->codes != NULL && j < 32 && j < out->visible; j++) {
        out->codes[j] = e2m1 ? e2m1_from_float(q[j]) : e4m3_from_float(q[j]);
    }
}

static void put_exponent(const struct block_out *out, int index, float exponent)
{
    if (out->exponents != NULL) {
        exponent = exponent > -32767.0f ? exponent : -32767.0f;
        out->exponents[index] = (int16_t)(exponent < 32767.0f ? exponent : 32767.0f);
    }
}

static void fp8_block(const struct p_row *row, float *t, float unit, const struct block_out *out)
{
    float lift = row->rebuilt ? 7.0f : 8.0f;
    float down = row->rebuilt ? 0x1p-7f : 0x1p-8f;
    float q[32];
    for (int j = 0; j < 32; j++) {
        q[j] = e4m3_round(exp2_shifted(t[j], lift - row->reference));
        t[j] = q[j] * (down * unit);
    }
    put_codes(out, q, false);
}

static void mxfp4_block(const struct attention_recipe *recipe, const struct p_row *row, float *t, int64_t block,
                        const struct block_out *out)
{
    bool amplitude = recipe->mx_rule == MX_NEAREST;
    float max = max_of(t, 32);
    float k = floorf(max);
    float e = amplitude ? k + (max - k > NEAREST_UP ? 1.0f : 0.0f) : k - 2.0f;
    float byte = e - row->anchor + 127.0f;
    if (recipe->anchor == ANCHOR_SAMPLED && byte < SAMPLED_L + 1.0f) {
        byte = SAMPLED_L + 1.0f; /* the block is coded against the floor: small probabilities vanish */
        e = byte - 127.0f + row->anchor;
    }
    /* E8M0 has neither zero nor more than 2^127: below, the block is zero; above, NaN, so that the overflow is seen. */
    float scale = byte < 1.0f ? 0.0f : byte > 254.0f ? NAN : pow2_of(e - row->reference);
    float x[32];
    float q[32];
    for (int j = 0; j < 32; j++) {
        float y = t[j] - e;
        x[j] = amplitude ? y + LOG2_6 : y;
    }
    produce(recipe, x, block, q);
    for (int j = 0; j < 32; j++) {
        q[j] = byte < 1.0f ? 0.0f : q[j];
        t[j] = q[j] * scale;
    }
    put_codes(out, q, true);
    put_exponent(out, 0, e);
}

/* E2M1(p / s) for p >= 0. Boundaries times a scale are exact in FP32, so that p is compared, not divided. */
static inline float quotient_value(float p, float s)
{
    float q = p > 0.25f * s ? 0.5f : 0.0f;
    q += p >= 0.75f * s ? 0.5f : 0.0f;
    q += p > 1.25f * s ? 0.5f : 0.0f;
    q += p >= 1.75f * s ? 0.5f : 0.0f;
    q += p > 2.5f * s ? 1.0f : 0.0f;
    q += p >= 3.5f * s ? 1.0f : 0.0f;
    q += p > 5.0f * s ? 2.0f : 0.0f;
    return q;
}

/* NVFP4 or UE5M3: two blocks of 16 keys. */
static void nvfp4_blocks(bool wide, const struct p_row *row, float *t, const struct block_out *out)
{
    float g = (wide ? 0x1p18f : 0x1p11f) * (row->rebuilt ? 0.5f : 1.0f);
    float scale[32];
    float divisor[32]; /* a block whose scale is zero has codes zero */
    for (int half = 0; half < 2; half++) {
        float peak = g * exp2_shifted(max_of(t + 16 * half, 16), -row->reference) / E2M1_MAX;
        uint8_t byte = wide ? ue5m3_from_float(peak) : ue4m3_from_float(peak);
        float s = (wide ? ue5m3_to_float(byte) : ue4m3_to_float(byte)) / g;
        for (int j = 16 * half; j < 16 * half + 16; j++) {
            scale[j] = s;
            divisor[j] = s > 0.0f ? s : INFINITY;
        }
        if (out->visible > 16 * half) {
            put_exponent(out, half, byte);
        }
    }
    float p[32];
    float q[32];
    exp2_row(t, 32, -row->reference, p);
    for (int j = 0; j < 32; j++) {
        q[j] = quotient_value(p[j], divisor[j]);
    }
    for (int j = 0; j < 32; j++) {
        t[j] = q[j] * scale[j];
    }
    put_codes(out, q, true);
}

/* The sum is of the values before their rounding, as flash attention makes it. */
static float bf16_block(const struct p_row *row, float *t)
{
    float p[32];
    for (int j = 0; j < 32; j++) {
        p[j] = exp2_shifted(t[j], -row->reference);
        t[j] = bf16_to_float(bf16_from_float(p[j]));
    }
    return block_sum(p);
}

static float publish_block(const struct attention_recipe *recipe, const struct p_row *row, int64_t j0,
                           const struct block_out *out)
{
    float *t = row->t + j0;
    float unit = attention_unit(recipe);
    int64_t key = row->first_key + j0;
    enum pv_format pv = key < recipe->sink_keys_fp8 ? PV_FP8 : recipe->pv;
    switch (pv) {
    case PV_BF16:
        return bf16_block(row, t);
    case PV_FP8:
        fp8_block(row, t, unit, out);
        break;
    case PV_MXFP4:
        mxfp4_block(recipe, row, t, key / 32, out);
        break;
    case PV_NVFP4:
    case PV_FP4_UE5M3:
        nvfp4_blocks(pv == PV_FP4_UE5M3, row, t, out);
        break;
    }
    return block_sum(t);
}

/* Sum of the exact probabilities of a block whose represented value is zero. */
static inline float lost_mass(const float *p, const float *exact)
{
    float lost[32];
    for (int j = 0; j < 32; j++) {
        lost[j] = p[j] == 0.0f ? exact[j] : 0.0f;
    }
    return block_sum(lost);
}

void p_row_publish(const struct attention_recipe *recipe, struct p_row *row)
{
    int64_t width = (row->n + 31) / 32 * 32;
    int64_t block = attention_p_block(recipe->pv);
    for (int64_t j0 = 0; j0 < width; j0 += 32) {
        if (j0 >= row->visible) { /* wholly masked: there is no maximum to scale with */
            for (int64_t j = j0; j < width; j++) {
                row->t[j] = 0;
                if (row->exact != NULL) {
                    row->exact[j] = 0;
                }
            }
            break;
        }
        struct block_out out = {row->codes != NULL ? row->codes + j0 : NULL,
                                row->exponents != NULL ? row->exponents + j0 / block : NULL, (int)(row->visible - j0)};
        if (row->exact != NULL) {
            exp2_row(row->t + j0, 32, -row->reference, row->exact + j0);
        }
        row->sum += publish_block(recipe, row, j0, &out);
        if (row->exact != NULL) {
            row->sum_exact += block_sum(row->exact + j0);
            row->lost += lost_mass(row->t + j0, row->exact + j0);
        }
    }
}
