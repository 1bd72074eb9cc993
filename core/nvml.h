/* core: clock and power of a GPU while it works, by NVML (loaded at run time). Builds with CUDA only. */
#pragma once

struct nvml;

/* NaN where the library, the driver or the GPU does not tell. */
struct nvml_sample {
    double sm_mhz, watts;
};

/* GPU `ordinal` of the CUDA runtime. NULL where NVML is missing: it serves reports, and no run needs it. */
struct nvml *nvml_open(int ordinal);
void nvml_close(struct nvml *nvml);

/* The present values, without waiting for the GPU. nvml NULL: NaN. */
struct nvml_sample nvml_read(const struct nvml *nvml);
