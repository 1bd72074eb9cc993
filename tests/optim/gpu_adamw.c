/* AdamW on the GPU: the bits of the CPU function in every mode, over four updates, with segments that start anywhere;
 * the largest weights that it finds on its way; and the split master over every kind of bit pattern.
 *
 * With a split master the FP32 masters have the CPU's bits; the BF16 weights differ from RNE(master) in exact ties
 * only. */
#include "optim/adamw.h"

#include "tests/gpu_compare.h"

#include <stdlib.h>

static struct cuda *cuda;

/* A matrix of many blocks, gaps, a gain, a segment at an odd address, one of one element. */
enum { N = 60 * 4096 + 1029, GAIN = 70, ODD = 5000, FLAT = N + 64 + GAIN + 1 + ODD + 3 + 1 + 60 };
static const struct adamw_segment segments[] = {
    {.name = "model.layers.0.mlp.up_proj.weight", .offset = 0, .elements = N, .decays = true},
    {.name = "model.norm.weight", .offset = N + 64, .elements = GAIN, .decays = false},
    {.name = "model.odd", .offset = N + 64 + GAIN + 1, .elements = ODD, .decays = true},
    {.name = "model.one", .offset = N + 64 + GAIN + 1 + ODD + 3, .elements = 1, .decays = true},
};
enum { SEGMENTS = sizeof segments / sizeof *segments };
enum { PLACES = 2 };
static const int place_of[SEGMENTS] = {0, 1, 0, -1}; /* of its largest weight */

static float noise(uint32_t i)
{
    uint32_t x = i * 2654435761u + 12345u;
    x ^= x >> 15;
    x *= 2246822519u;
    x ^= x >> 13;
    return (float)(int32_t)x * 0x1p-31f;
}

/* Gradients of all sizes, zeros among them, in runs of 16 and mixed; rounded to BF16 so that both types hold the same
 * numbers. Quads of moments that are all sound and quads that are not take different ways. */
static float gradient(uint32_t i, uint32_t update)
{
    static const float sizes[] = {1.0f, 1e-3f, 1e-6f, 1e-18f, 0.0f, 1e-22f, 30.0f, 1e-4f};
    uint32_t kind = i / 4096 % 4 == 3 ? i : i / 16;
    return bf16_to_float(bf16_from_float(noise(i * 3 + update * 77777u) * sizes[kind % 8]));
}

static bool in_a_segment(size_t i)
{
    for (int s = 0; s < SEGMENTS; s++) {
        if (i >= segments[s].offset && i < segments[s].offset + segments[s].elements) {
            return true;
        }
    }
    return false;
}

struct sides {
    struct adamw_state cpu;
    struct adamw_cuda gpu;
    float *grads, *master;
    bf16 *grads_bf16, *weights;
    void *moment, *plan, *d_grads;
    float *d_amax;
    size_t plan_bytes;
};

static void sides_open(struct sides *s, const struct adamw_config *config, enum dtype grad_type)
{
    const size_t moments = FLAT * adamw_moment_bytes(config);
    *s = (struct sides){.cpu = {.master = config->master_fp32 ? malloc(FLAT * sizeof(float)) : NULL,
                                .weights = malloc(FLAT * sizeof(bf16)),
                                .m = malloc(moments),
                                .v = malloc(moments)},
                        .grads = malloc(FLAT * sizeof(float)),
                        .master = malloc(FLAT * sizeof(float)),
                        .grads_bf16 = malloc(FLAT * sizeof(bf16)),
                        .weights = malloc(FLAT * sizeof(bf16)),
                        .moment = malloc(FLAT * sizeof(float)),
                        .plan_bytes = adamw_plan_bytes_cuda(segments, SEGMENTS)};
    memset(s->cpu.m, 0xff, moments); /* gaps: not to be touched */
    memset(s->cpu.v, 0xff, moments);
    for (uint32_t i = 0; i < FLAT; i++) {
        const bool zero = i / 16 % 8 == 4 && i % 3 == 0; /* -0 that meets gradients of both zeros */
        float w = zero ? -0.0f : 0.02f * noise(i);
        s->cpu.weights[i] = bf16_from_float(w);
        if (s->cpu.master) {
            s->cpu.master[i] = w;
        }
        if (in_a_segment(i)) {
            memset((char *)s->cpu.m + i * adamw_moment_bytes(config), 0, adamw_moment_bytes(config));
            ((unsigned char *)s->cpu.m)[(i + 1) * adamw_moment_bytes(config) - 1] = zero ? 0x80 : 0;
            memset((char *)s->cpu.v + i * adamw_moment_bytes(config), 0, adamw_moment_bytes(config));
        }
    }
    s->gpu.weights = gpu_array(cuda, s->cpu.weights, FLAT * sizeof(bf16));
    s->gpu.m = gpu_array(cuda, s->cpu.m, moments);
    s->gpu.v = gpu_array(cuda, s->cpu.v, moments);
    if (config->master_fp32) {
        void *master = gpu_array(cuda, s->cpu.master, FLAT * sizeof(float));
        s->gpu.remainder = gpu_array(cuda, NULL, FLAT * sizeof(int16_t));
        adamw_master_split_cuda(master, s->gpu.weights, s->gpu.remainder, FLAT, cuda);
        assert_int_equal(cuda_sync(cuda, "split"), OK);
        cuda_free(master);
    }
    s->plan = gpu_array(cuda, NULL, s->plan_bytes);
    s->d_grads = gpu_array(cuda, NULL, FLAT * dtype_bytes(grad_type));
    s->d_amax = gpu_array(cuda, NULL, PLACES * sizeof *s->d_amax);
    struct adamw_segment placed[SEGMENTS];
    memcpy(placed, segments, sizeof placed);
    for (int i = 0; i < SEGMENTS; i++) {
        placed[i].amax = place_of[i] < 0 ? NULL : s->d_amax + place_of[i];
    }
    adamw_plan_cuda(&s->gpu, config, placed, SEGMENTS, s->plan, cuda);
    compare_guard(cuda, s->plan, s->plan_bytes);
}

static void sides_close(struct sides *s)
{
    void *host[] = {s->cpu.master, s->cpu.weights, s->cpu.m,   s->cpu.v, s->grads,
                    s->master,     s->grads_bf16,  s->weights, s->moment};
    void *device[] = {s->gpu.weights, s->gpu.m, s->gpu.v, s->gpu.remainder, s->plan, s->d_grads, s->d_amax};
    for (size_t i = 0; i < sizeof host / sizeof *host; i++) {
        free(host[i]);
    }
    for (size_t i = 0; i < sizeof device / sizeof *device; i++) {
        cuda_free(device[i]);
    }
}

/* The largest magnitudes of the weights as they are, as FP32 bits. */
static void compare_largest(const struct sides *s, const char *what)
{
    uint32_t want[PLACES] = {0}, got[PLACES];
    for (int i = 0; i < SEGMENTS; i++) {
        for (size_t e = 0; e < segments[i].elements && place_of[i] >= 0; e++) {
            const uint32_t magnitude = (uint32_t)(s->weights[segments[i].offset + e] & 0x7fff) << 16;
            uint32_t *most = &want[place_of[i]];
            *most = magnitude > *most ? magnitude : *most;
        }
    }
    gpu_fetch(cuda, got, s->d_amax, sizeof got);
    compare_bits(what, got, want, sizeof got, sizeof *got);
}

static void compare_state(struct sides *s, const struct adamw_config *config, const char *what)
{
    const size_t moment = adamw_moment_bytes(config);
    gpu_fetch(cuda, s->weights, s->gpu.weights, FLAT * sizeof(bf16));
    compare_largest(s, what);
    gpu_fetch(cuda, s->moment, s->gpu.m, FLAT * moment);
    compare_bits(what, s->moment, s->cpu.m, FLAT * moment, moment);
    gpu_fetch(cuda, s->moment, s->gpu.v, FLAT * moment);
    compare_bits(what, s->moment, s->cpu.v, FLAT * moment, moment);
    if (config->master_fp32) {
        void *joined = gpu_array(cuda, NULL, FLAT * sizeof(float));
        adamw_master_join_cuda(s->gpu.weights, s->gpu.remainder, joined, FLAT, cuda);
        gpu_fetch(cuda, s->master, joined, FLAT * sizeof(float));
        cuda_free(joined);
        compare_bits(what, s->master, s->cpu.master, FLAT * sizeof(float), sizeof(float));
        for (size_t i = 0; i < FLAT; i++) { /* ties: take over what was checked to be as near */
            uint32_t bits;
            memcpy(&bits, &s->cpu.master[i], sizeof bits);
            if ((bits & 0x1ffff) == 0x8000 && s->weights[i] == (bf16)(s->cpu.weights[i] + 1)) {
                s->weights[i]--;
            }
        }
    }
    compare_bits(what, s->weights, s->cpu.weights, FLAT * sizeof(bf16), sizeof(bf16));
}

static void check_mode(bool master, bool moments_bf16, bool stochastic, enum dtype grad_type)
{
    const struct adamw_config config = {.beta1 = 0.9f,
                                        .beta2 = 0.95f,
                                        .eps = 1e-8f,
                                        .weight_decay = 0.1f,
                                        .master_fp32 = master,
                                        .moments_bf16 = moments_bf16,
                                        .stochastic_rounding = stochastic,
                                        .seed = UINT64_C(0x123456789abcdef)};
    /* Quotients by the corrections take one step, one, two and none (optim/adamw_cuda.cu). */
    static const uint32_t updates[] = {1, 2, 24, 1003};
    struct sides s;
    char what[96];
    sides_open(&s, &config, grad_type);
    for (uint32_t k = 0; k < sizeof updates / sizeof *updates; k++) {
        const uint32_t update = updates[k];
        const float scale = 1.0f / (float)(k * 3 + 3), lr = 1e-3f * (float)(k + 1);
        for (uint32_t i = 0; i < FLAT; i++) {
            s.grads[i] = gradient(i, update);
            s.grads_bf16[i] = bf16_from_float(s.grads[i]);
        }
        cuda_upload(cuda, s.d_grads, grad_type == DTYPE_BF16 ? (void *)s.grads_bf16 : s.grads,
                    FLAT * dtype_bytes(grad_type));
        adamw_step(&config, &s.cpu, segments, SEGMENTS, s.grads, scale, lr, update);
        cuda_zero(cuda, s.d_amax, PLACES * sizeof *s.d_amax);
        adamw_step_cuda(&config, &s.gpu, s.d_grads, grad_type, scale, lr, update, cuda);
        snprintf(what, sizeof what, "adamw %s, moments %s%s, grads %s, update %u",
                 master ? "split master" : "no master", moments_bf16 ? "bf16" : "fp32",
                 stochastic ? ", stochastic" : "", grad_type == DTYPE_BF16 ? "bf16" : "fp32", update);
        compare_state(&s, &config, what);
    }
    sides_close(&s);
}

static void test_every_mode_has_the_bits_of_the_cpu(void **state)
{
    (void)state;
    for (int mode = 0; mode < 16; mode++) {
        check_mode(mode & 1, mode & 2, mode & 4, mode & 8 ? DTYPE_BF16 : DTYPE_F32);
    }
    compare_end();
}

/* Weights that are Inf or NaN are above all; with eps = 0 what a thread makes of nothing, behind a segment's end, is
 * NaN and must not count. */
static void test_amax_of_weights_that_are_no_numbers(void **state)
{
    static const bf16 planted[] = {0x3dcc, 0xff80, 0x7f80, 0xffc1};
    (void)state;
    for (int mode = 0; mode < 16; mode++) {
        const struct adamw_config config = {.beta1 = 0.9f,
                                            .beta2 = 0.95f,
                                            .master_fp32 = mode & 1,
                                            .moments_bf16 = mode & 2,
                                            .stochastic_rounding = true};
        struct sides s;
        char what[64];
        sides_open(&s, &config, DTYPE_F32);
        for (uint32_t i = 0; i < FLAT; i++) {
            s.grads[i] = 1.0f;
        }
        cuda_upload(cuda, s.d_grads, s.grads, FLAT * sizeof *s.grads);
        cuda_upload(cuda, s.gpu.weights + N - 1, &planted[mode / 4], sizeof *planted);
        cuda_zero(cuda, s.d_amax, PLACES * sizeof *s.d_amax);
        adamw_step_cuda(&config, &s.gpu, s.d_grads, DTYPE_F32, 1.0f, 1e-3f, 1, cuda);
        gpu_fetch(cuda, s.weights, s.gpu.weights, FLAT * sizeof(bf16));
        snprintf(what, sizeof what, "amax, mode %d, %#x planted", mode & 3, planted[mode / 4]);
        compare_largest(&s, what);
        sides_close(&s);
    }
    compare_end();
}

/* All upper halves with the lower halves around 0, the tie and the ends. */
static void test_split_and_join_keep_every_bit(void **state)
{
    static const uint16_t lows[] = {0, 1, 2, 0x1234, 0x7ffe, 0x7fff, 0x8000, 0x8001, 0x8002, 0xabcd, 0xfffe, 0xffff};
    enum { LOWS = sizeof lows / sizeof *lows, COUNT = 65536 * LOWS };
    uint32_t *bits = malloc(COUNT * sizeof *bits), *back = malloc(COUNT * sizeof *back);
    bf16 *w = malloc(COUNT * sizeof *w);
    int16_t *rest = malloc(COUNT * sizeof *rest);
    (void)state;
    for (uint32_t i = 0; i < COUNT; i++) {
        bits[i] = (i / LOWS) << 16 | lows[i % LOWS];
    }
    void *d_master = gpu_array(cuda, bits, COUNT * 4), *d_w = gpu_array(cuda, NULL, COUNT * 2);
    void *d_rest = gpu_array(cuda, NULL, COUNT * 2), *d_back = gpu_array(cuda, NULL, COUNT * 4);
    adamw_master_split_cuda(d_master, d_w, d_rest, COUNT, cuda);
    adamw_master_join_cuda(d_w, d_rest, d_back, COUNT, cuda);
    gpu_fetch(cuda, w, d_w, COUNT * 2);
    gpu_fetch(cuda, rest, d_rest, COUNT * 2);
    gpu_fetch(cuda, back, d_back, COUNT * 4);
    int bad = 0;
    for (uint32_t i = 0; i < COUNT; i++) {
        float value;
        memcpy(&value, &bits[i], 4);
        const bf16 nearest = bf16_from_float(value);
        const bool tie = (bits[i] & 0x1ffff) == 0x8000, nan = isnan(value); /* a tie with an even lower neighbour */
        const uint32_t want = nan ? 0x7fff0000u : bits[i];
        if ((back[i] != want || w[i] != (bf16)(nearest + (tie && !nan))) && bad++ < 5) {
            printf("  FAILED split of %#x: %#x and %d, joined %#x\n", bits[i], w[i], rest[i], back[i]);
        }
    }
    compare_failures += bad > 0;
    void *host[] = {bits, back, w, rest}, *device[] = {d_master, d_w, d_rest, d_back};
    for (int i = 0; i < 4; i++) {
        free(host[i]);
        cuda_free(device[i]);
    }
    compare_end();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_mode_has_the_bits_of_the_cpu),
        cmocka_unit_test(test_amax_of_weights_that_are_no_numbers),
        cmocka_unit_test(test_split_and_join_keep_every_bit),
    };
    gpu_arguments(argc, argv);
    cuda = gpu_open();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    cuda_close(cuda);
    return failed;
}
