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
#define MAX_PROCESSES 256
#define TEXT 65536

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, VERSION_MISMATCH = 25 };
enum { COMPUTE = 1, GRAPHICS = 2, MPS = 4 };

typedef unsigned long long u64;
typedef struct { int index; } Device;
typedef struct { u64 pid, start, memory; int device, kind, listed; } Process;
typedef struct { u64 total, free, used; } MemoryV1;
typedef struct { unsigned version; u64 total, reserved, free, used; } MemoryV2;
typedef struct { unsigned pid; u64 memory; } ProcessV1;
typedef struct { unsigned pid; u64 memory; unsigned gpu_instance, compute_instance; } ProcessV2;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } PciInfo;

static Device devices[MAX_DEVICES];
static int initialised;
static char scenario[TEXT];

/* ---- small text tools ---------------------------------------------------------------------------------------- */

static void join(char *out, size_t size, const char *a, const char *b, const char *c)
{
    const char *parts[3] = {a, b, c};
    size_t used = 0;
    for (int i = 0; i < 3; i++)
        for (const char *p = parts[i]; p && *p && used + 1 < size; p++)
            out[used++] = *p;
    out[used] = 0;
}

static void decimal(char *out, u64 value)
{
    char digits[24];
    int n = 0;
    do digits[n++] = (char)('0' + value % 10); while (value /= 10);
    for (int i = 0; i < n; i++)
        out[i] = digits[n - 1 - i];
    out[n] = 0;
}

static u64 number(const char *text, const char **end)
{
    u64 value = 0;
    while (*text == ' ') text++;
    for (; *text >= '0' && *text <= '9'; text++)
        value = value * 10 + (u64)(*text - '0');
    if (end) *end = text;
    return value;
}

static int slurp(const char *path, char *out, size_t size)
{
    size_t used = 0;
    ssize_t got = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    out[0] = 0;
    if (fd < 0) return 0;
    while (used + 1 < size && (got = read(fd, out + used, size - 1 - used)) > 0)
        used += (size_t)got;
    out[used] = 0;
    close(fd);
    return got >= 0;
}

static void state_path(char *out, size_t size, const char *folder, const char *name)
{
    const char *base = getenv("FAKE_NVML_DIR");
    char head[2048];
    join(head, sizeof head, base && *base ? base : "/run/fake-nvml", folder, "");
    join(out, size, head, name, "");
}

/* Finds "key=value" at the start of a line; the last one wins, as in a systemd drop-in. */
static int lookup(const char *text, const char *key, char *out, size_t size)
{
    size_t length = strlen(key);
    int found = 0;
    for (const char *line = text; *line;) {
        const char *end = line;
        while (*end && *end != '\n') end++;
        if ((size_t)(end - line) > length && !memcmp(line, key, length) && line[length] == '=') {
            size_t n = (size_t)(end - line) - length - 1;
            if (n >= size) n = size - 1;
            memcpy(out, line + length + 1, n);
            while (n && (out[n - 1] == '\r' || out[n - 1] == ' ')) n--;
            out[n] = 0;
            found = 1;
        }
        line = *end ? end + 1 : end;
    }
    return found;
}

static u64 global_number(const char *key, u64 fallback)
{
    char value[64];
    return lookup(scenario, key, value, sizeof value) ? number(value, NULL) : fallback;
}

static void device_key(char *out, size_t size, int device, const char *key)
{
    char index[24], head[64];
    decimal(index, (u64)device);
    join(head, sizeof head, "device.", index, ".");
    join(out, size, head, key, "");
}

static int device_text(int device, const char *key, char *out, size_t size)
{
    char full[256];
    device_key(full, sizeof full, device, key);
    return lookup(scenario, full, out, size);
}

static u64 device_number(int device, const char *key, u64 fallback)
{
    char value[64];
    return device_text(device, key, value, sizeof value) ? number(value, NULL) : fallback;
}

static void load_scenario(void)
{
    char path[2100];
    state_path(path, sizeof path, "/scenario", "");
    slurp(path, scenario, sizeof scenario);
}

static int device_count(void)
{
    u64 count = global_number("devices", 1);
    return count > MAX_DEVICES ? MAX_DEVICES : (int)count;
}

static void pause_ms(u64 ms)
{
    struct timespec rest = {(time_t)(ms / 1000), (long)(ms % 1000) * 1000000L};
    while (ms && nanosleep(&rest, &rest))
        ;
}

/* Every entry point passes here: reads the scenario afresh, waits and fails as it says. `function` carries no version. */
static int enter(int device, const char *function)
{
    char key[256];
    if (!initialised) return UNINITIALIZED;
    load_scenario();
    join(key, sizeof key, "delay_ms.", function, "");
    pause_ms(device < 0 ? global_number(key, 0) : device_number(device, key, 0));
    load_scenario();
    join(key, sizeof key, "error.", function, "");
    return (int)(device < 0 ? global_number(key, OK) : device_number(device, key, OK));
}

/* ---- processes ----------------------------------------------------------------------------------------------- */

/* A process is alive when its start time is unchanged and it is not a zombie without living threads. */
static int living(u64 pid, u64 start)
{
    char digits[24], path[64], stat[4096], *p, state;
    decimal(digits, pid);
    join(path, sizeof path, "/proc/", digits, "/stat");
    if (!slurp(path, stat, sizeof stat) || !(p = strrchr(stat, ')'))) return 0;
    state = p[2];
    u64 threads = 0, ticks = 0;
    int field = 2;
    for (; *p && field <= 22; p++)
        if (*p == ' ') {
            field++;
            if (field == 20) threads = number(p + 1, NULL);
            if (field == 22) ticks = number(p + 1, NULL);
        }
    if (state == 'X' || (state == 'Z' && threads <= 1)) return 0;
    return !start || ticks == start;
}

/* Milliseconds since this library, in whatever process, first saw the holder dead. */
static u64 dead_for(const char *name)
{
    char path[2100], text[64];
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    u64 ms = (u64)now.tv_sec * 1000 + (u64)now.tv_nsec / 1000000;
    state_path(path, sizeof path, "/dead/", name);
    if (slurp(path, text, sizeof text) && *text) return ms - number(text, NULL);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd >= 0) {
        decimal(text, ms);
        if (write(fd, text, strlen(text)) < 0) text[0] = 0;
        close(fd);
    }
    return 0;
}

static int kind_of(const char *text)
{
    return !strcmp(text, "graphics") ? GRAPHICS : !strcmp(text, "mps") ? MPS : COMPUTE;
}

/* Registered holders: one file each under holders/. */
static int registered(Process *out, int room)
{
    char path[2100], text[1024], value[64];
    int n = 0;
    struct dirent *entry;
    state_path(path, sizeof path, "/holders", "");
    DIR *folder = opendir(path);
    if (!folder) return 0;
    while (n < room && (entry = readdir(folder))) {
        Process *p = &out[n];
        if (entry->d_name[0] == '.') continue;
        state_path(path, sizeof path, "/holders/", entry->d_name);
        if (!slurp(path, text, sizeof text)) continue;
        p->pid = lookup(text, "pid", value, sizeof value) ? number(value, NULL) : number(entry->d_name, NULL);
        p->start = lookup(text, "start", value, sizeof value) ? number(value, NULL) : 0;
        p->device = lookup(text, "device", value, sizeof value) ? (int)number(value, NULL) : 0;
        p->kind = lookup(text, "kind", value, sizeof value) ? kind_of(value) : COMPUTE;
        p->memory = lookup(text, "memory", value, sizeof value) ? number(value, NULL) * MIB : 0;
        p->listed = living(p->pid, p->start);
        if (!p->listed) {
            u64 delay = global_number("release_delay_ms", 0);
            if (!delay || dead_for(entry->d_name) >= delay) continue;
        }
        n++;
    }
    closedir(folder);
    return n;
}

/* Processes that only the scenario knows: device.N.process.K=PID,MEMORY or na,KIND (K from 0). */
static int scripted(int device, Process *out, int room)
{
    int n = 0;
    for (u64 k = 0; n < room; k++) {
        char digits[24], key[64], value[128];
        const char *p;
        decimal(digits, k);
        join(key, sizeof key, "process.", digits, "");
        if (!device_text(device, key, value, sizeof value)) break;
        Process *q = &out[n++];
        q->pid = number(value, &p);
        q->device = device;
        q->listed = 1;
        q->memory = 0;
        if (*p == ',') p++;
        if (*p == 'n') { q->memory = NOT_AVAILABLE; while (*p && *p != ',') p++; }
        else q->memory = number(p, &p) * MIB;
        q->kind = kind_of(*p == ',' ? p + 1 : "");
    }
    return n;
}

static int processes(int device, Process *out)
{
    Process all[MAX_PROCESSES];
    int n = registered(all, MAX_PROCESSES), kept = 0;
    for (int i = 0; i < n; i++)
        if (all[i].device == device) out[kept++] = all[i];
    return kept + scripted(device, out + kept, MAX_PROCESSES - kept);
}

static int list(Device *device, const char *function, int kind, unsigned *count, void *out, int version)
{
    Process all[MAX_PROCESSES];
    if (!device || !count) return INVALID;
    char versioned[96];
    join(versioned, sizeof versioned, function, version == 3 ? "_v3" : version == 2 ? "_v2" : "_v1", "");
    int error = enter(device->index, versioned);
    if (!error) error = enter(device->index, function);
    if (error) return error;
    int n = processes(device->index, all);
    unsigned room = *count, found = 0;
    for (int i = 0; i < n; i++) {
        if (!all[i].listed || all[i].kind != kind) continue;
        if (out && found < room) {
            if (version == 1) ((ProcessV1 *)out)[found] = (ProcessV1){(unsigned)all[i].pid, all[i].memory};
            else ((ProcessV2 *)out)[found] = (ProcessV2){(unsigned)all[i].pid, all[i].memory, ~0U, ~0U};
        }
        found++;
    }
    *count = found;
    return found && (!out || found > room) ? INSUFFICIENT_SIZE : OK;
}

#define LIST(NAME, KIND) \
    API int NAME(Device *d, unsigned *n, void *out) { return list(d, #NAME, KIND, n, out, 1); } \
    API int NAME##_v2(Device *d, unsigned *n, void *out) { return list(d, #NAME, KIND, n, out, 2); } \
    API int NAME##_v3(Device *d, unsigned *n, void *out) { return list(d, #NAME, KIND, n, out, 3); }

LIST(nvmlDeviceGetComputeRunningProcesses, COMPUTE)
LIST(nvmlDeviceGetGraphicsRunningProcesses, GRAPHICS)
LIST(nvmlDeviceGetMPSComputeRunningProcesses, MPS)

/* ---- memory -------------------------------------------------------------------------------------------------- */

static int memory(Device *device, MemoryV2 *out)
{
    Process all[MAX_PROCESSES];
    if (!device) return INVALID;
    int error = enter(device->index, "nvmlDeviceGetMemoryInfo");
    if (error) return error;
    int n = processes(device->index, all);
    out->total = device_number(device->index, "memory_total", 46068) * MIB;
    out->reserved = device_number(device->index, "memory_reserved", 541) * MIB;
    out->used = (device_number(device->index, "memory_base", 3) + device_number(device->index, "memory_hidden", 0)) * MIB;
    for (int i = 0; i < n; i++)
        if (all[i].memory != NOT_AVAILABLE) out->used += all[i].memory;
    if (out->used + out->reserved > out->total) out->used = out->total - out->reserved;
    out->free = out->total - out->reserved - out->used;
    return OK;
}

API int nvmlDeviceGetMemoryInfo(Device *device, MemoryV1 *out)
{
    MemoryV2 all;
    int error = out ? memory(device, &all) : INVALID;
    if (!error) *out = (MemoryV1){all.total, all.free, all.used + all.reserved};
    return error;
}

API int nvmlDeviceGetMemoryInfo_v2(Device *device, MemoryV2 *out)
{
    MemoryV2 all = {0};
    if (!device || !out) return INVALID;
    if (initialised && out->version != 0x02000028) return VERSION_MISMATCH;
    int error = enter(device->index, "nvmlDeviceGetMemoryInfo_v2");
    if (!error) error = memory(device, &all);
    all.version = out->version;
    if (!error) *out = all;
    return error;
}

#include "nvml_device.h"
