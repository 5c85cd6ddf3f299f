/* A library libnvidia-ml.so.1 that says what the environment tells it: STUB_GPUS devices, or the
   error STUB_NVML_ERROR. It has the functions that torch calls to count GPUs. */
#include <stdio.h>
#include <stdlib.h>

static int number(const char *name) {
    const char *text = getenv(name);
    return text ? atoi(text) : 0;
}

int nvmlInit(void) { return number("STUB_NVML_ERROR"); }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = number("STUB_GPUS");
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = (void *)(size_t)(index + 1);
    return (int)index < number("STUB_GPUS") ? 0 : 2;
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length) {
    snprintf(uuid, length, "GPU-%08zx-9e4e-0000-0000-000000000000", (size_t)handle - 1);
    return 0;
}
