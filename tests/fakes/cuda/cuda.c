/* SPDX-License-Identifier: GPL-3.0-or-later
 * Copyright: (c) 2026, gpuops.serving contributors
 *
 * A test double of the CUDA driver library, libcuda.so.1, over the test driver library (tests/fakes/nvml): it knows the
 * devices of its scenario, registers its process as a holder there, and opens device nodes as the real one is believed
 * to: the common nodes and those of all visible devices with cuInit, that of one device once more with a context.
 *
 * Environment, beside FAKE_NVML_DIR: FAKE_CUDA_CONTEXT, MiB of a context (256); FAKE_CUDA_NODES=0 opens no node;
 * FAKE_CUDA_LISTED=0 registers nobody; FAKE_CUDA_SPREAD=1 takes memory on all visible devices at once; FAKE_CUDA_INIT is
 * the code that cuInit returns.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define MIB (1024ULL * 1024ULL)
#define MAX_DEVICES 64

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_CONTEXT = 201 };

typedef unsigned long long u64;
typedef struct { u64 total, free, used; } MemoryV1;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } PciInfo;

int nvmlInit_v2(void);
int nvmlDeviceGetCount_v2(unsigned *);
int nvmlDeviceGetHandleByIndex_v2(unsigned, void **);
int nvmlDeviceGetMinorNumber(void *, unsigned *);
int nvmlDeviceGetMemoryInfo(void *, MemoryV1 *);
int nvmlDeviceGetPciInfo_v3(void *, PciInfo *);

static void *handles[MAX_DEVICES];
static unsigned indexes[MAX_DEVICES];
static int visible, initialised, current = -1;
static u64 held; /* MiB on the current device */

static u64 setting(const char *name, u64 fallback)
{
    const char *text = getenv(name);
    u64 value = 0;
    if (!text || !*text) return fallback;
    for (; *text >= '0' && *text <= '9'; text++)
        value = value * 10 + (u64)(*text - '0');
    return value;
}

static int open_node(const char *name)
{
    char path[256];
    if (!setting("FAKE_CUDA_NODES", 1)) return -1;
    snprintf(path, sizeof path, "/dev/%s", name);
    return open(path, O_RDWR | O_CLOEXEC);
}

static int open_device(int device)
{
    char name[32];
    unsigned minor = 0;
    if (nvmlDeviceGetMinorNumber(handles[device], &minor)) return -1;
    snprintf(name, sizeof name, "nvidia%u", minor);
    return open_node(name);
}

/* Without the variable all devices are visible, with an empty one none, else those it lists by number. */
static int is_visible(unsigned index)
{
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    if (!text) return 1;
    while (*text >= '0' && *text <= '9') {
        u64 value = 0;
        for (; *text >= '0' && *text <= '9'; text++)
            value = value * 10 + (u64)(*text - '0');
        if (value == index) return 1;
        if (*text == ',') text++;
    }
    return 0;
}

API int cuInit(unsigned flags)
{
    unsigned count = 0;
    int error = (int)setting("FAKE_CUDA_INIT", SUCCESS);
    (void)flags;
    if (error) return error;
    open_node("nvidiactl");
    if (nvmlInit_v2() || nvmlDeviceGetCount_v2(&count)) return NO_DEVICE;
    for (unsigned index = 0; index < count && visible < MAX_DEVICES; index++)
        if (is_visible(index) && !nvmlDeviceGetHandleByIndex_v2(index, &handles[visible]))
            indexes[visible++] = index;
    if (!visible) return NO_DEVICE;
    open_node("nvidia-uvm");
    for (int device = 0; device < visible; device++)
        open_device(device);
    initialised = 1;
    return SUCCESS;
}

API int cuDriverGetVersion(int *out) { *out = 12040; return SUCCESS; }

API int cuDeviceGetCount(int *out)
{
    *out = visible;
    return initialised ? SUCCESS : NOT_INITIALIZED;
}

API int cuDeviceGet(int *out, int ordinal)
{
    if (!initialised) return NOT_INITIALIZED;
    *out = ordinal;
    return ordinal >= 0 && ordinal < visible ? SUCCESS : INVALID_DEVICE;
}

API int cuDeviceGetPCIBusId(char *out, int size, int device)
{
    PciInfo info;
    if (device < 0 || device >= visible || nvmlDeviceGetPciInfo_v3(handles[device], &info)) return INVALID_DEVICE;
    snprintf(out, (size_t)size, "%04x:%02x:%02x.0", info.domain, info.bus, info.device);
    return SUCCESS;
}

static u64 start_ticks(void)
{
    char text[4096], *at;
    FILE *file = fopen("/proc/self/stat", "r");
    size_t got = file ? fread(text, 1, sizeof text - 1, file) : 0;
    u64 ticks = 0;
    if (file) fclose(file);
    text[got] = 0;
    at = strrchr(text, ')');
    for (int field = 2; at && *at && field < 22; at++)
        field += *at == ' ';
    for (; at && *at >= '0' && *at <= '9'; at++)
        ticks = ticks * 10 + (u64)(*at - '0');
    return ticks;
}

/* The file that docs/test_driver_library.md describes, written aside and renamed. */
static void register_holder(unsigned index)
{
    const char *folder = getenv("FAKE_NVML_DIR");
    char part[2100], path[2100];
    u64 start = start_ticks();
    if (!setting("FAKE_CUDA_LISTED", 1)) return;
    if (!folder || !*folder) folder = "/run/fake-nvml";
    snprintf(part, sizeof part, "%s/holders/.%d-%llu-%u-compute", folder, getpid(), start, index);
    snprintf(path, sizeof path, "%s/holders/%d-%llu-%u-compute", folder, getpid(), start, index);
    FILE *file = fopen(part, "w");
    if (!file) return;
    fprintf(file, "pid=%d\nstart=%llu\ndevice=%u\nmemory=%llu\nkind=compute\n", getpid(), start, index, held);
    fclose(file);
    rename(part, path);
}

static int take(u64 size)
{
    MemoryV1 memory;
    if (nvmlDeviceGetMemoryInfo(handles[current], &memory) || memory.free / MIB < size) return OUT_OF_MEMORY;
    held += size;
    for (int device = 0; device < visible; device++)
        if (device == current || setting("FAKE_CUDA_SPREAD", 0)) register_holder(indexes[device]);
    return SUCCESS;
}

API int cuCtxCreate_v2(void **out, unsigned flags, int device)
{
    (void)flags;
    if (!initialised) return NOT_INITIALIZED;
    if (device < 0 || device >= visible) return INVALID_DEVICE;
    current = device;
    int node = open_device(device);
    if (node >= 0) mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, node, 0);
    *out = &handles[device];
    return take(setting("FAKE_CUDA_CONTEXT", 256));
}

API int cuMemAlloc_v2(u64 *out, size_t size)
{
    if (current < 0) return INVALID_CONTEXT;
    *out = 0x7f0000000000ULL;
    return size ? take((size + MIB - 1) / MIB) : INVALID_VALUE;
}

API int cuMemsetD8_v2(u64 address, unsigned char value, size_t size)
{
    (void)address, (void)value, (void)size;
    return current < 0 ? INVALID_CONTEXT : SUCCESS;
}

API int cuCtxSynchronize(void) { return current < 0 ? INVALID_CONTEXT : SUCCESS; }

API int cuGetErrorName(int code, const char **out)
{
    static const struct { int code; const char *name; } table[] = {
        {SUCCESS, "CUDA_SUCCESS"}, {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"}, {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
        {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"}, {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
        {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"}, {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
        {802, "CUDA_ERROR_SYSTEM_NOT_READY"},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (table[i].code == code) { *out = table[i].name; return SUCCESS; }
    *out = NULL;
    return INVALID_VALUE;
}
