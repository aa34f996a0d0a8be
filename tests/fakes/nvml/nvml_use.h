/* SPDX-License-Identifier: GPL-3.0-or-later
 * Copyright: (c) 2026, gpuops.serving contributors
 *
 * The part of the test double that tells who uses a device and how much memory is in use. Included by nvml.c.
 */

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
        p->slot = lookup(text, "instance", value, sizeof value) ? (int)number(value, NULL) : -1;
        p->kind = lookup(text, "kind", value, sizeof value) ? kind_of(value) : COMPUTE;
        p->memory = lookup(text, "memory", value, sizeof value) ? size_from(value, NULL) : 0;
        p->listed = living(p->pid, p->start);
        if (!p->listed) {
            u64 delay = number_of(NULL, "release_delay_ms", 0);
            if (!delay || dead_for(entry->d_name) >= delay) continue;
        }
        n++;
    }
    closedir(folder);
    return n;
}

/* Processes that only the scenario knows: process.J=PID,MEMORY or na,KIND (J from 0). */
static int scripted(const Device *device, Process *out, int room)
{
    int n = 0;
    for (u64 j = 0; n < room; j++) {
        char digits[24], word[64], value[128];
        const char *p;
        decimal(digits, j);
        join(word, sizeof word, "process.", digits, "");
        if (!text_of(device, word, value, sizeof value)) break;
        Process *q = &out[n++];
        q->pid = number(value, &p);
        q->device = device->index;
        q->slot = device->slot;
        q->listed = 1;
        if (*p == ',') p++;
        q->memory = size_from(p, &p);
        q->kind = kind_of(*p == ',' ? p + 1 : "");
    }
    return n;
}

/* Of a whole device all of them, those of its instances included. */
static int processes(const Device *device, Process *out)
{
    Process all[MAX_PROCESSES];
    int n = registered(all, MAX_PROCESSES), kept = 0;
    for (int i = 0; i < n; i++)
        if (all[i].device == device->index && (device->slot < 0 || all[i].slot == device->slot)) out[kept++] = all[i];
    kept += scripted(device, out + kept, MAX_PROCESSES - kept);
    for (int k = 0; device->slot < 0 && k < MAX_SLOTS; k++)
        if (instance_exists(&instances[device->index][k]))
            kept += scripted(&instances[device->index][k], out + kept, MAX_PROCESSES - kept);
    return kept;
}

static ProcessV2 told(const Process *p)
{
    ProcessV2 out = {(unsigned)p->pid, p->memory, ~0U, ~0U};
    if (p->slot >= 0 && p->slot < MAX_SLOTS && instance_exists(&instances[p->device][p->slot])) {
        out.gpu_instance = (unsigned)number_of(&instances[p->device][p->slot], "gi", 0);
        out.compute_instance = (unsigned)number_of(&instances[p->device][p->slot], "ci", 0);
    }
    return out;
}

static int list(Device *device, const char *function, int kind, unsigned *count, void *out, int version)
{
    Process all[MAX_PROCESSES];
    if (!device || !count) return INVALID;
    char versioned[96];
    join(versioned, sizeof versioned, function, version == 3 ? "_v3" : version == 2 ? "_v2" : "_v1", "");
    int error = enter(device, versioned);
    if (!error) error = enter(device, function);
    if (error) return error;
    int n = processes(device, all);
    unsigned room = *count, found = 0;
    for (int i = 0; i < n; i++) {
        if (!all[i].listed || all[i].kind != kind) continue;
        if (out && found < room) {
            if (version == 1) ((ProcessV1 *)out)[found] = (ProcessV1){(unsigned)all[i].pid, all[i].memory};
            else ((ProcessV2 *)out)[found] = told(&all[i]);
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

static u64 held(const Device *device)
{
    Process all[MAX_PROCESSES];
    u64 sum = 0;
    int n = processes(device, all);
    for (int i = 0; i < n; i++)
        if (all[i].memory != NOT_AVAILABLE) sum += all[i].memory;
    return sum;
}

/* The compute instances of one GPU instance share its memory. */
static u64 held_in_instance(const Device *instance)
{
    u64 sum = 0, gi = number_of(instance, "gi", 0);
    for (int k = 0; k < MAX_SLOTS; k++) {
        const Device *other = &instances[instance->index][k];
        if (instance_exists(other) && number_of(other, "gi", 0) == gi) sum += held(other);
    }
    return sum;
}

static int memory(Device *device, MemoryV2 *out)
{
    char value[16];
    if (!device) return INVALID;
    int error = enter(device, "nvmlDeviceGetMemoryInfo");
    if (error) return error;
    int whole = device->slot < 0;
    out->total = size_of(device, "memory_total", whole ? 46068 : 9728);
    out->reserved = size_of(device, "memory_reserved", whole ? 541 : 0);
    out->used = size_of(device, "memory_base", whole ? 3 : 12);
    if (out->used != NOT_AVAILABLE)
        out->used += size_of(device, "memory_hidden", 0) + (whole ? held(device) : held_in_instance(device));
    u64 reserved = out->reserved == NOT_AVAILABLE ? 0 : out->reserved;
    if (out->total == NOT_AVAILABLE || out->used == NOT_AVAILABLE) {
        out->free = NOT_AVAILABLE;
    } else {
        if (out->used + reserved > out->total) out->used = out->total > reserved ? out->total - reserved : 0;
        out->free = out->total > reserved ? out->total - reserved - out->used : 0;
    }
    if (text_of(device, "memory_free", value, sizeof value) && *value == 'n') out->free = NOT_AVAILABLE;
    return OK;
}

API int nvmlDeviceGetMemoryInfo(Device *device, MemoryV1 *out)
{
    MemoryV2 all;
    int error = out ? memory(device, &all) : INVALID;
    if (error) return error;
    if (all.used != NOT_AVAILABLE && all.reserved != NOT_AVAILABLE) all.used += all.reserved;
    *out = (MemoryV1){all.total, all.free, all.used};
    return OK;
}

API int nvmlDeviceGetMemoryInfo_v2(Device *device, MemoryV2 *out)
{
    MemoryV2 all = {0};
    if (!device || !out) return INVALID;
    if (initialised && out->version != 0x02000028) return VERSION_MISMATCH;
    int error = enter(device, "nvmlDeviceGetMemoryInfo_v2");
    if (!error) error = memory(device, &all);
    all.version = out->version;
    if (!error) *out = all;
    return error;
}
