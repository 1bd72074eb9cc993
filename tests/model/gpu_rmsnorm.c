/* RMSNorm on the GPU against the CPU function: heads and wide rows, strides with gaps, NaN and Inf, both gradient
 * types.
 *
 * Tolerances. The sums have another order, so an FP32 result differs by parts in 10^6 and its BF16 code by at most one,
 * 2^-7 of the value. In dx two terms may cancel: their FP32 error is a noise on the scale of the terms. A sum of n
 * terms for dgain rounds n partial sums of about sqrt(n), by sqrt(n) 2^-24 each: together about n 2^-24, here as on the
 * CPU. */
#include "model/rmsnorm.h"

#include "tests/gpu_compare.h"
#include "tests/model/check.h"

#include <stdlib.h>

struct shape {
    int64_t rows, groups, width, gap;
};
static const struct shape shapes[] = {
    {1, 1, 8, 0},     {3, 1, 64, 8},       {7, 5, 64, 16},    {5, 3, 128, 8},   {2, 3, 96, 0},
    {33, 1, 256, 0},  {5, 1, 264, 8},      {17, 1, 2048, 0},  {3, 1, 4096, 16}, {2, 1, 8200, 0},
    {2, 1, 16384, 0}, {1000, 40, 128, 64}, {999, 1, 4096, 0},
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

static struct cuda *cuda;

/* One norm: inputs on both sides, and room for what it makes. `cells`: elements of a strided array. */
struct fixture {
    struct shape s;
    int64_t stride, items;
    size_t cells;
    bf16 *x, *branch, *gain, *dy, *residual, *y, *got; /* host */
    float *inv, *got_inv, *dgain, *got_dgain;
    bf16 *d_x, *d_branch, *d_gain, *d_dy, *d_residual; /* device */
    float *d_inv;
};

/* Random numbers that repeat after a prime number of elements: millions of fresh ones would take most of the time. */
static void fill_repeating(bf16 *x, size_t n, uint64_t stream, float scale)
{
    enum { PERIOD = 65537 };
    size_t fresh = n < PERIOD ? n : PERIOD;
    fill_bf16(x, (int64_t)fresh, stream, scale);
    for (size_t i = fresh; i < n; i++) {
        x[i] = x[i - PERIOD];
    }
}

static void fixture_open(struct fixture *f, const struct shape *s)
{
    *f = (struct fixture){.s = *s, .stride = s->groups * s->width + s->gap, .items = s->rows * s->groups};
    f->cells = (size_t)(s->rows * f->stride);
    bf16 **arrays[] = {&f->x, &f->branch, &f->gain, &f->dy, &f->residual, &f->y, &f->got};
    for (uint64_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        *arrays[i] = malloc(f->cells * sizeof(bf16));
        assert_non_null(*arrays[i]);
        fill_repeating(*arrays[i], f->cells, i + 1, i == 0 ? 2.0f : 1.0f);
    }
    f->inv = malloc((size_t)f->items * sizeof(float));
    f->got_inv = malloc((size_t)f->items * sizeof(float));
    f->dgain = malloc((size_t)s->width * sizeof(float));
    f->got_dgain = malloc((size_t)s->width * sizeof(float));
    f->d_x = gpu_array(cuda, f->x, f->cells * sizeof(bf16));
    f->d_branch = gpu_array(cuda, f->branch, f->cells * sizeof(bf16));
    f->d_gain = gpu_array(cuda, f->gain, (size_t)s->width * sizeof(bf16));
    f->d_dy = gpu_array(cuda, f->dy, f->cells * sizeof(bf16));
    f->d_residual = gpu_array(cuda, f->residual, f->cells * sizeof(bf16));
}

static void fixture_close(struct fixture *f)
{
    void *host[] = {f->x,   f->branch, f->gain,    f->dy,    f->residual, f->y,
                    f->got, f->inv,    f->got_inv, f->dgain, f->got_dgain};
    void *device[] = {f->d_x, f->d_branch, f->d_gain, f->d_dy, f->d_residual, f->d_inv};
    for (size_t i = 0; i < sizeof host / sizeof *host; i++) {
        free(host[i]);
    }
    for (size_t i = 0; i < sizeof device / sizeof *device; i++) {
        cuda_free(device[i]);
    }
}

static struct rmsnorm_fwd forward_of(const struct fixture *f, const bf16 *x, const bf16 *gain, bf16 *y, float *inv)
{
    return (struct rmsnorm_fwd){.rows = f->s.rows,
                                .groups = f->s.groups,
                                .width = f->s.width,
                                .x_stride = f->stride,
                                .y_stride = f->stride,
                                .x = x,
                                .gain = gain,
                                .eps = 1e-5f,
                                .y = y,
                                .inv_rms = inv};
}

static void check_forward(const struct shape *s, bool nasty)
{
    struct fixture f;
    char what[96];
    fixture_open(&f, s);
    if (nasty) { /* a NaN, an Inf, a row of zeros */
        f.x[0] = 0x7fc0;
        if (s->rows > 1) {
            f.x[f.stride + s->width - 1] = 0xff80;
        }
        memset(f.x + (s->rows - 1) * f.stride, 0, (size_t)s->width * sizeof(bf16));
        cuda_upload(cuda, f.d_x, f.x, f.cells * sizeof(bf16));
    }
    void *d_y = gpu_array(cuda, NULL, f.cells * sizeof(bf16)), *d_inv = gpu_array(cuda, NULL, (size_t)f.items * 4);
    struct rmsnorm_fwd want = forward_of(&f, f.x, f.gain, f.y, f.inv), a = forward_of(&f, f.d_x, f.d_gain, d_y, d_inv);
    static const float zero;
    float *d_amax = gpu_array(cuda, &zero, sizeof zero);
    memset(f.y, 0xff, f.cells * sizeof(bf16)); /* the gaps, too, stay what they are */
    rmsnorm_fwd_cpu(&want);
    a.amax = d_amax;
    rmsnorm_fwd_cuda(&a, cuda);
    gpu_fetch(cuda, f.got, d_y, f.cells * sizeof(bf16));
    gpu_fetch(cuda, f.got_inv, d_inv, (size_t)f.items * sizeof(float));
    snprintf(what, sizeof what, "fwd %lld x %lld x %lld", (long long)s->rows, (long long)s->groups,
             (long long)s->width);
    compare_values(what, f.got, f.y, (int64_t)f.cells, DTYPE_BF16, 0x1p-7, 0);
    compare_values(what, f.got_inv, f.inv, f.items, DTYPE_F32, 1e-6, 0);
    compare_amax(cuda, what, f.got, s->rows, s->groups * s->width, f.stride, d_amax);
    cuda_free(d_amax);
    a.amax = NULL;

    if (s->groups == 1 && s->gap == 0) { /* with a branch: the sum in place of x; the bits of the two steps */
        bf16 *sum = malloc(f.cells * sizeof(bf16)), *two_steps = malloc(f.cells * sizeof(bf16));
        void *d_sum = gpu_array(cuda, NULL, f.cells * sizeof(bf16));
        residual_add_cpu(f.x, f.branch, sum, (int64_t)f.cells);
        residual_add_cuda(f.d_x, f.d_branch, d_sum, (int64_t)f.cells, cuda);
        gpu_fetch(cuda, f.got, d_sum, f.cells * sizeof(bf16));
        compare_values("residual_add", f.got, sum, (int64_t)f.cells, DTYPE_BF16, 0, 0);
        a.x = d_sum;
        rmsnorm_fwd_cuda(&a, cuda);
        gpu_fetch(cuda, two_steps, d_y, f.cells * sizeof(bf16));
        a.x = f.d_x;
        a.branch = f.d_branch;
        a.sum = f.d_x;
        rmsnorm_fwd_cuda(&a, cuda);
        gpu_fetch(cuda, f.got, d_y, f.cells * sizeof(bf16));
        compare_bits("fused sum, y", f.got, two_steps, f.cells * sizeof(bf16), sizeof(bf16));
        gpu_fetch(cuda, f.got, f.d_x, f.cells * sizeof(bf16));
        compare_values("fused sum", f.got, sum, (int64_t)f.cells, DTYPE_BF16, 0, 0);
        free(sum);
        free(two_steps);
        cuda_free(d_sum);
    } else { /* in place */
        a.y = f.d_x;
        rmsnorm_fwd_cuda(&a, cuda);
        gpu_fetch(cuda, f.y, d_y, f.cells * sizeof(bf16));
        gpu_fetch(cuda, f.got, f.d_x, f.cells * sizeof(bf16));
        for (int64_t r = 0; r < s->rows; r++) {
            compare_bits("fwd in place", f.got + r * f.stride, f.y + r * f.stride,
                         (size_t)(s->groups * s->width) * sizeof(bf16), sizeof(bf16));
        }
    }
    cuda_free(d_y);
    cuda_free(d_inv);
    fixture_close(&f);
}

static void test_forward_agrees_with_the_cpu(void **state)
{
    (void)state;
    for (int i = 0; i < N_SHAPES; i++) {
        for (int nasty = 0; nasty < 2; nasty++) {
            if (!gpu_leaves_out(1)) {
                check_forward(&shapes[i], nasty);
            }
        }
    }
    compare_end();
}

/* dgain starts as 1, 2, 3 ... */
static void start_dgain(const struct fixture *f, void *dgain, enum dtype type)
{
    for (int64_t c = 0; c < f->s.width; c++) {
        if (type == DTYPE_BF16) {
            ((bf16 *)dgain)[c] = bf16_from_float((float)(c % 16));
        } else {
            ((float *)dgain)[c] = (float)(c % 16);
        }
    }
}

/* residual: 0 none, 1 an array of its own, 2 dx is the residual, 3 dx is dy. */
static void check_backward(const struct shape *s, int residual, enum dtype type, bool accumulate)
{
    struct fixture f;
    char what[96];
    if (gpu_leaves_out(1)) {
        return;
    }
    snprintf(what, sizeof what, "bwd %lld x %lld x %lld residual %d %s%s", (long long)s->rows, (long long)s->groups,
             (long long)s->width, residual, type == DTYPE_BF16 ? "bf16" : "fp32", accumulate ? " accumulate" : "");
    fixture_open(&f, s);
    const size_t bytes = f.cells * sizeof(bf16), gain_bytes = (size_t)s->width * dtype_bytes(type);
    const size_t scratch_bytes = rmsnorm_bwd_scratch_bytes_cuda(s->rows, s->groups, s->width);
    struct rmsnorm_fwd forward = forward_of(&f, f.x, f.gain, f.y, f.inv);
    rmsnorm_fwd_cpu(&forward);
    memset(f.y, 0xff, bytes);
    if (residual >= 2) {
        memcpy(f.y, residual == 2 ? f.residual : f.dy, bytes);
    }
    f.d_inv = gpu_array(cuda, f.inv, (size_t)f.items * sizeof(float));
    void *d_dx = gpu_array(cuda, f.y, bytes), *d_scratch = gpu_array(cuda, NULL, scratch_bytes), *d_dgain;
    start_dgain(&f, f.got_dgain, type);
    d_dgain = gpu_array(cuda, f.got_dgain, gain_bytes);
    start_dgain(&f, f.dgain, DTYPE_F32);
    struct rmsnorm_bwd a = {.rows = s->rows,
                            .groups = s->groups,
                            .width = s->width,
                            .x_stride = f.stride,
                            .dy_stride = f.stride,
                            .dx_stride = f.stride,
                            .x = f.x,
                            .gain = f.gain,
                            .dy = residual == 3 ? f.y : f.dy,
                            .residual = residual == 1   ? f.residual
                                        : residual == 2 ? f.y
                                                        : NULL,
                            .inv_rms = f.inv,
                            .dx = f.y,
                            .dgain = f.dgain,
                            .grad_type = DTYPE_F32,
                            .accumulate = accumulate};
    struct rmsnorm_bwd g = a;
    g.x = f.d_x;
    g.gain = f.d_gain;
    g.dy = residual == 3 ? d_dx : (void *)f.d_dy;
    g.residual = residual == 1 ? f.d_residual : residual == 2 ? d_dx : NULL;
    g.inv_rms = f.d_inv;
    g.dx = d_dx;
    g.dgain = d_dgain;
    g.grad_type = type;
    g.scratch = d_scratch;
    static const float zero;
    g.amax = gpu_array(cuda, &zero, sizeof zero);
    rmsnorm_bwd_cpu(&a);
    rmsnorm_bwd_cuda(&g, cuda);
    gpu_fetch(cuda, f.got, d_dx, bytes);
    gpu_fetch(cuda, f.got_dgain, d_dgain, gain_bytes);
    compare_guard(cuda, d_scratch, scratch_bytes);
    compare_values(what, f.got, f.y, (int64_t)f.cells, DTYPE_BF16, 0x1p-7, 1e-5);
    compare_amax(cuda, what, f.got, s->rows, s->groups * s->width, f.stride, g.amax);
    cuda_free(g.amax);
    g.amax = NULL;
    if (type == DTYPE_BF16) {
        for (int64_t c = 0; c < s->width; c++) { /* as one rounding of the FP32 sum */
            ((bf16 *)f.dgain)[c] = bf16_from_float(f.dgain[c]);
        }
    }
    compare_values(what, f.got_dgain, f.dgain, s->width, type, type == DTYPE_BF16 ? 0x1p-7 : 1e-6,
                   2e-7 * (double)f.items);
    if (residual < 2 && !accumulate) { /* again, the same bits */
        float *again = malloc(gain_bytes);
        rmsnorm_bwd_cuda(&g, cuda);
        gpu_fetch(cuda, f.y, d_dx, bytes);
        gpu_fetch(cuda, again, d_dgain, gain_bytes);
        compare_bits("bwd twice, dx", f.y, f.got, bytes, sizeof(bf16));
        compare_bits("bwd twice, dgain", again, f.got_dgain, gain_bytes, dtype_bytes(type));
        free(again);
    }
    cuda_free(d_dx);
    cuda_free(d_scratch);
    cuda_free(d_dgain);
    fixture_close(&f);
}

static void test_backward_agrees_with_the_cpu(void **state)
{
    (void)state;
    for (int i = 0; i < N_SHAPES; i++) {
        for (int residual = 0; residual < 4; residual++) {
            check_backward(&shapes[i], residual, residual % 2 ? DTYPE_BF16 : DTYPE_F32, residual >= 2);
        }
        check_backward(&shapes[i], 1, DTYPE_F32, true);
        check_backward(&shapes[i], 0, DTYPE_BF16, false);
    }
    compare_end();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forward_agrees_with_the_cpu),
        cmocka_unit_test(test_backward_agrees_with_the_cpu),
    };
    gpu_arguments(argc, argv);
    cuda = gpu_open();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    cuda_close(cuda);
    return failed;
}
