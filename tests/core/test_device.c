/* Devices: the CPU is always there; what cannot run is refused by name. */
#include "core/device.h"

#include "tests/test.h"

#include <string.h>

static void test_cpu_and_auto(void **state)
{
    (void)state;
    static const char *const kinds[] = {"cpu", "auto"};
    for (int i = 0; i < 2; i++) {
        struct device device;
        assert_int_equal(device_open(&device, kinds[i], 0), OK);
        assert_true(device.kind == DEVICE_CPU ||
                    (i == 1 && device.kind == DEVICE_CUDA)); /* auto, where there is a GPU */
        assert_true(device.threads >= 1);
        assert_true(device.memory_bytes > 1 << 20);
        assert_true(strlen(device.name) > 0 && !strchr(device.name, '\n'));
    }
}

static void test_cuda_is_refused_with_the_reason(void **state)
{
    (void)state;
    struct device device = {.threads = 77};
#if WITH_CUDA
    if (device_open(&device, "cuda", 0) == OK) {
        assert_int_equal(device.kind, DEVICE_CUDA); /* a machine with a GPU */
        assert_true(device.capability >= 90);
        return;
    }
    assert_int_equal(device.threads, 77);
    assert_non_null(strstr(status_last_message(), "device cuda"));
#else
    assert_int_equal(device_open(&device, "cuda", 0), ERR_UNSUPPORTED);
    assert_int_equal(device.threads, 77);
    assert_non_null(strstr(status_last_message(), "built without CUDA"));
#endif
}

static void test_unknown_kinds_are_refused(void **state)
{
    (void)state;
    struct device device;
    assert_int_equal(device_open(&device, "tpu", 0), ERR_CONFIG);
    assert_non_null(strstr(status_last_message(), "\"tpu\""));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cpu_and_auto),
        cmocka_unit_test(test_cuda_is_refused_with_the_reason),
        cmocka_unit_test(test_unknown_kinds_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
