/* SPDX-License-Identifier: GPL-3.0-or-later
 * Copyright: (c) 2026, gpuops.serving contributors
 *
 * A test double of the NVIDIA driver library, libnvidia-ml.so.1, for hosts without a GPU.
 * What it answers is described by files; see docs/test_driver_library.md.
 *
 * It is built once and runs on every lab host, so it uses only symbols of glibc 2.17: no stat, strtol or sscanf,
 * whose names changed in later releases.
 */
#include <dirent.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define MIB (1024ULL * 1024ULL)
#define NOT_AVAILABLE (~0ULL)
#define MAX_DEVICES 64
#define MAX_SLOTS 8
#define MAX_PROCESSES 256
#define TEXT 65536

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, VERSION_MISMATCH = 25 };
enum { COMPUTE = 1, GRAPHICS = 2, MPS = 4 };

typedef unsigned long long u64;
typedef struct { int index, slot; } Device; /* slot: of an instance (MIG), -1 for a whole device */
typedef struct { u64 pid, start, memory; int device, slot, kind, listed; } Process;
typedef struct { u64 total, free, used; } MemoryV1;
typedef struct { unsigned version; u64 total, reserved, free, used; } MemoryV2;
typedef struct { unsigned pid; u64 memory; } ProcessV1;
typedef struct { unsigned pid; u64 memory; unsigned gpu_instance, compute_instance; } ProcessV2;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } PciInfo;

static Device devices[MAX_DEVICES], instances[MAX_DEVICES][MAX_SLOTS];
static int initialised;
static char scenario[TEXT];

#include "nvml_text.h"

static int device_count(void)
{
    u64 count = number_of(NULL, "devices", 1);
    return count > MAX_DEVICES ? MAX_DEVICES : (int)count;
}

static int partitioned(int device) { return number_of(&devices[device], "mig", 0) == 1; }

/* An instance is there when the scenario gives its GPU instance a number. */
static int instance_exists(const Device *instance)
{
    char value[64];
    return partitioned(instance->index) && text_of(instance, "gi", value, sizeof value);
}

static void pause_ms(u64 ms)
{
    struct timespec rest = {(time_t)(ms / 1000), (long)(ms % 1000) * 1000000L};
    while (ms && nanosleep(&rest, &rest))
        ;
}

/* Every entry point passes here: reads the scenario afresh, waits and fails as it says. `function` has no version. */
static int enter(const Device *device, const char *function)
{
    char word[160];
    int error;
    if (!initialised) return UNINITIALIZED;
    load_scenario();
    join(word, sizeof word, "delay_ms.", function, "");
    pause_ms(number_of(device, word, 0));
    load_scenario();
    if (device && (error = (int)number_of(&devices[device->index], "error", OK))) return error;
    if (device && (error = (int)number_of(device, "error", OK))) return error;
    join(word, sizeof word, "error.", function, "");
    return (int)number_of(device, word, OK);
}

/* For what only a whole device knows. */
static int enter_whole(const Device *device, const void *out, const char *function)
{
    int error = device && out ? enter(device, function) : INVALID;
    return error ? error : device->slot >= 0 ? NOT_SUPPORTED : OK;
}

#include "nvml_device.h"
#include "nvml_use.h"
#include "nvml_mig.h"
