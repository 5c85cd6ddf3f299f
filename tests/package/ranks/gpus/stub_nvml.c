/* A library that answers as NVML does for two GPUs, each half used by one process.

   Only the functions that ddp_equivalence asks nvidia-ml-py for are here. The structures are those
   of NVIDIA's header nvml.h. */

#include <stdio.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7 };

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct {
    char legacy_bus_id[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} Pci;
typedef struct { unsigned pid; unsigned long long memory; unsigned instances[2]; } Process;

int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu) {
    *gpu = (void *)(long)(index + 1);
    return SUCCESS;
}

int nvmlDeviceGetUUID(void *gpu, char *text, unsigned size) {
    snprintf(text, size, "GPU-%ld", (long)gpu - 1);
    return SUCCESS;
}

int nvmlDeviceGetName(void *gpu, char *text, unsigned size) {
    snprintf(text, size, "Stub of a GPU");
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(void *gpu, Pci *pci) {
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:1%ld:00.0", (long)gpu - 1);
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *gpu, Memory *memory) {
    memory->total = 80, memory->free = 40, memory->used = 40;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *gpu, unsigned *count, Process *processes) {
    if (processes == NULL || *count < 1) {
        *count = 1;
        return INSUFFICIENT_SIZE;
    }
    *count = 1;
    processes[0].pid = 42, processes[0].memory = 40;
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(void *gpu, int *major, int *minor) {
    *major = 9, *minor = 0;
    return SUCCESS;
}

int nvmlDeviceGetComputeMode(void *gpu, unsigned *mode) { *mode = 3; return SUCCESS; }

int nvmlDeviceGetMigMode(void *gpu, unsigned *now, unsigned *pending) { return NOT_SUPPORTED; }

int nvmlDeviceGetP2PStatus(void *first, void *second, unsigned what, unsigned *status) {
    *status = what == 0 ? 0 : 5; /* memory can be read, but not over NVLink */
    return SUCCESS;
}

int nvmlDeviceGetTopologyCommonAncestor(void *first, void *second, unsigned *level) {
    *level = 50;
    return SUCCESS;
}

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    snprintf(text, size, "580.65.06");
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return SUCCESS; }

const char *nvmlErrorString(int error) { return "an error of the stub"; }
