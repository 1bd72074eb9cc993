/* SwiGLU on the GPU against the CPU function. The two exponentials differ by parts in 10^6, so a BF16 result by at most
 * one code, 2^-7 of the value; 1 + g (1 - s) may cancel, which leaves a noise; results below 1e-36 may be flushed. */
#include "model/swiglu.h"

#include "tests/gpu_compare.h"
#include "tests/model/check.h"

#include <stdlib.h>

static struct cuda *cuda;

static void check_swiglu(int64_t rows, int64_t ffn, bool nasty)
{
    static const float odd[] = {INFINITY, -INFINITY, NAN,     0.0f,    -0.0f, 1e-40f, 100.0f,
                                -88.5f,   -87.0f,    -100.0f, -1.278f, 3e38f, -3e38f};
    const int64_t n = rows * ffn;
    const size_t bytes = (size_t)n * sizeof(bf16);
    bf16 *gate_up = malloc(2 * bytes), *dout = malloc(bytes), *out = malloc(bytes), *got = malloc(2 * bytes);
    bf16 *dgate_up = malloc(2 * bytes);
    fill_bf16(gate_up, 2 * n, 1, 3.0f);
    fill_bf16(dout, n, 2, 1.0f);
    for (size_t i = 0; nasty && i < sizeof odd / sizeof *odd && (int64_t)i < ffn; i++) {
        gate_up[i] = bf16_from_float(odd[i]);
    }
    void *d_gate_up = gpu_array(cuda, gate_up, 2 * bytes), *d_dout = gpu_array(cuda, dout, bytes);
    void *d_out = gpu_array(cuda, NULL, bytes), *d_dgate_up = gpu_array(cuda, NULL, 2 * bytes);
    char what[64];
    snprintf(what, sizeof what, "swiglu %lld x %lld%s", (long long)rows, (long long)ffn, nasty ? ", nasty" : "");
    static const float zero[2];
    void *d_again = gpu_array(cuda, NULL, bytes), *d_plain = gpu_array(cuda, NULL, 2 * bytes);
    float *d_amax = gpu_array(cuda, zero, sizeof zero);
    bf16 *again = malloc(2 * bytes);
    swiglu_fwd_cpu(gate_up, rows, ffn, out);
    swiglu_fwd_cuda(d_gate_up, rows, ffn, d_out, &d_amax[0], cuda);
    gpu_fetch(cuda, got, d_out, bytes);
    compare_values(what, got, out, n, DTYPE_BF16, 0x1p-7, 1e-36);
    compare_amax(cuda, what, got, rows, ffn, ffn, &d_amax[0]);
    struct swiglu_bwd bwd = {.rows = rows, .ffn = ffn, .gate_up = d_gate_up, .dout = d_dout, .dgate_up = d_plain};
    swiglu_bwd_cuda(&bwd, cuda);
    bwd.dgate_up = d_dgate_up;
    bwd.out = d_again;
    bwd.amax = &d_amax[1];
    swiglu_bwd_cuda(&bwd, cuda);
    gpu_fetch(cuda, again, d_again, bytes);
    compare_bits("forward's output once more", again, got, bytes, sizeof(bf16));
    swiglu_bwd_cpu(gate_up, dout, rows, ffn, dgate_up);
    gpu_fetch(cuda, got, d_dgate_up, 2 * bytes);
    compare_values(what, got, dgate_up, 2 * n, DTYPE_BF16, 0x1p-7, 1e-5);
    compare_amax(cuda, what, got, rows, 2 * ffn, 2 * ffn, &d_amax[1]);
    gpu_fetch(cuda, again, d_plain, 2 * bytes);
    compare_bits("backward alone", again, got, 2 * bytes, sizeof(bf16));
    void *host[] = {gate_up, dout, out, got, dgate_up, again};
    void *device[] = {d_gate_up, d_dout, d_out, d_dgate_up, d_again, d_plain, d_amax};
    for (size_t i = 0; i < sizeof host / sizeof *host; i++) {
        free(host[i]);
    }
    for (size_t i = 0; i < sizeof device / sizeof *device; i++) {
        cuda_free(device[i]);
    }
}

static void test_swiglu_agrees_with_the_cpu(void **state)
{
    (void)state;
    for (int nasty = 0; nasty < 2; nasty++) {
        check_swiglu(1, 8, nasty);
        check_swiglu(3, 704, nasty);
        check_swiglu(5, 2056, nasty);
        check_swiglu(33, 14336, nasty);
    }
    compare_end();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_swiglu_agrees_with_the_cpu)};
    gpu_arguments(argc, argv);
    cuda = gpu_open();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    cuda_close(cuda);
    return failed;
}
