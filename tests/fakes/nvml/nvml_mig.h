/* SPDX-License-Identifier: GPL-3.0-or-later
 * Copyright: (c) 2026, gpuops.serving contributors
 *
 * The part of the test double that walks the instances of a partitioned device (MIG). Included by nvml.c.
 */

/* device.N.mig absent: a device that knows no partitioning; 0 or 1: switched off or on. */
API int nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending)
{
    int error = enter_whole(device, current && pending ? current : NULL, "nvmlDeviceGetMigMode");
    if (error) return error;
    u64 mode = number_of(device, "mig", 2);
    if (mode > 1) return NOT_SUPPORTED;
    *current = *pending = (unsigned)mode;
    return OK;
}

static unsigned slots(const Device *device)
{
    u64 count = number_of(device, "mig_slots", 7);
    return !partitioned(device->index) ? 0 : count > MAX_SLOTS ? MAX_SLOTS : (unsigned)count;
}

API int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *out)
{
    int error = enter_whole(device, out, "nvmlDeviceGetMaxMigDeviceCount");
    if (!error) *out = slots(device);
    return error;
}

API int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned slot, Device **out)
{
    int error = enter_whole(device, out, "nvmlDeviceGetMigDeviceHandleByIndex");
    if (error) return error;
    if (slot >= slots(device)) return INVALID;
    Device *instance = &instances[device->index][slot];
    /* Before the question whether it exists: a slot may answer an error instead. */
    error = enter(instance, "nvmlDeviceGetMigDeviceHandleByIndex");
    if (!error && !instance_exists(instance)) error = NOT_FOUND;
    if (!error) *out = instance;
    return error;
}

API int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device *instance, Device **out)
{
    int error = instance && out ? enter(instance, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle") : INVALID;
    if (!error && instance->slot < 0) error = INVALID;
    if (!error) *out = &devices[instance->index];
    return error;
}

API int nvmlDeviceIsMigDeviceHandle(Device *device, unsigned *out)
{
    int error = device && out ? enter(device, "nvmlDeviceIsMigDeviceHandle") : INVALID;
    if (!error) *out = device->slot >= 0;
    return error;
}

static int instance_number(Device *instance, unsigned *out, const char *function, const char *word)
{
    int error = instance && out ? enter(instance, function) : INVALID;
    if (!error && instance->slot < 0) error = INVALID;
    if (!error && !instance_exists(instance)) error = NOT_FOUND;
    if (!error) *out = (unsigned)number_of(instance, word, 0);
    return error;
}

API int nvmlDeviceGetGpuInstanceId(Device *instance, unsigned *out)
{
    return instance_number(instance, out, "nvmlDeviceGetGpuInstanceId", "gi");
}

API int nvmlDeviceGetComputeInstanceId(Device *instance, unsigned *out)
{
    return instance_number(instance, out, "nvmlDeviceGetComputeInstanceId", "ci");
}
