/* SPDX-License-Identifier: GPL-3.0-or-later
 * Copyright: (c) 2026, gpuops.serving contributors
 *
 * The part of the test double that names devices: start, stop, handles and their descriptions. Included by nvml.c.
 */

/* ---- start and stop ------------------------------------------------------------------------------------------ */

static int start_up(void)
{
    for (int i = 0; i < MAX_DEVICES; i++) {
        devices[i] = (Device){i, -1};
        for (int k = 0; k < MAX_SLOTS; k++)
            instances[i][k] = (Device){i, k};
    }
    load_scenario();
    pause_ms(number_of(NULL, "init_delay_ms", 0));
    load_scenario();
    int error = (int)number_of(NULL, "init_error", OK);
    if (!error) initialised++;
    return error;
}

API int nvmlInit(void) { return start_up(); }
API int nvmlInit_v2(void) { return start_up(); }
API int nvmlInitWithFlags(unsigned flags) { (void)flags; return start_up(); }

API int nvmlShutdown(void)
{
    if (!initialised) return UNINITIALIZED;
    initialised--;
    return OK;
}

API const char *nvmlErrorString(int code)
{
    static const struct { int code; const char *text; } table[] = {
        {0, "Success"}, {1, "Uninitialized"}, {2, "Invalid Argument"}, {3, "Not Supported"},
        {4, "Insufficient Permissions"}, {5, "Already Initialized"}, {6, "Not Found"}, {7, "Insufficient Size"},
        {8, "Insufficient External Power"}, {9, "Driver Not Loaded"}, {10, "Timeout"}, {11, "Interrupt Request Issue"},
        {12, "NVML Shared Library Not Found"}, {13, "Function Not Found"}, {14, "Corrupted infoROM"},
        {15, "GPU is lost"}, {16, "GPU requires reset"}, {17, "The operating system has blocked the request"},
        {18, "Driver/library version mismatch"}, {19, "In use by another client"}, {20, "Insufficient Memory"},
        {21, "No data"}, {22, "The requested vgpu operation is not available on target device, because ECC is enabled"},
        {23, "Insufficient Resources"}, {24, "Frequency not supported"}, {25, "Argument version mismatch"},
        {26, "Deprecated"}, {27, "System not ready"}, {28, "GPU not found"}, {29, "Invalid state"},
        {30, "Reset type not supported"}, {999, "Unknown Error"},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (table[i].code == code) return table[i].text;
    return "Unknown Error";
}

static int answer_text(char *out, unsigned size, const char *text)
{
    if (!out) return INVALID;
    if (strlen(text) >= size) return INSUFFICIENT_SIZE;
    memcpy(out, text, strlen(text) + 1);
    return OK;
}

API int nvmlSystemGetDriverVersion(char *out, unsigned size)
{
    char text[80] = "550.127.05";
    int error = enter(NULL, "nvmlSystemGetDriverVersion");
    if (error) return error;
    lookup(scenario, "driver_version", text, sizeof text);
    return answer_text(out, size, text);
}

API int nvmlSystemGetNVMLVersion(char *out, unsigned size)
{
    int error = enter(NULL, "nvmlSystemGetNVMLVersion");
    return error ? error : answer_text(out, size, "12.550.127.05");
}

/* ---- handles ------------------------------------------------------------------------------------------------- */

static int count(unsigned *out)
{
    int error = enter(NULL, "nvmlDeviceGetCount");
    if (!error) *out = (unsigned)device_count();
    return error;
}

API int nvmlDeviceGetCount(unsigned *out) { return count(out); }
API int nvmlDeviceGetCount_v2(unsigned *out) { return count(out); }

static int by_index(unsigned index, Device **out)
{
    if (!initialised) return UNINITIALIZED;
    load_scenario();
    if (index >= (unsigned)device_count()) return INVALID;
    int error = enter(&devices[index], "nvmlDeviceGetHandleByIndex");
    if (!error) *out = &devices[index];
    return error;
}

API int nvmlDeviceGetHandleByIndex(unsigned index, Device **out) { return by_index(index, out); }
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out) { return by_index(index, out); }

static void uuid_of(const Device *device, char *out, size_t size)
{
    char digits[24], slot[24];
    if (text_of(device, "uuid", out, size)) return;
    decimal(digits, 10 + (u64)device->index);
    decimal(slot, (u64)device->slot);
    if (device->slot < 0) join(out, size, "GPU-00000000-0000-0000-0000-0000000000", digits, "");
    else {
        char head[64];
        join(head, sizeof head, "MIG-00000000-0000-0000-00", digits, "-00000000000");
        join(out, size, head, slot, "");
    }
}

static char hex(unsigned value) { return "0123456789ABCDEF"[value & 15]; }

/* Default address 00000000:BB:00.0, one bus a device from 17 (hexadecimal) on, as on an eight-GPU server. */
static void pci_of(const Device *device, char *out, size_t size)
{
    unsigned number = 0x17 + (unsigned)device->index;
    char bus[3] = {hex(number >> 4), hex(number), 0};
    if (!text_of(device, "pci", out, size)) join(out, size, "00000000:", bus, ":00.0");
}

API int nvmlDeviceGetHandleByUUID(const char *uuid, Device **out)
{
    char text[96];
    int error = enter(NULL, "nvmlDeviceGetHandleByUUID");
    for (int i = 0; !error && i < device_count(); i++) {
        uuid_of(&devices[i], text, sizeof text);
        if (!strcmp(text, uuid)) return by_index((unsigned)i, out);
        for (int k = 0; k < MAX_SLOTS; k++) {
            uuid_of(&instances[i][k], text, sizeof text);
            if (strcmp(text, uuid) || !instance_exists(&instances[i][k])) continue;
            *out = &instances[i][k];
            return OK;
        }
    }
    return error ? error : NOT_FOUND;
}

static int by_pci(const char *address, Device **out)
{
    char text[64];
    int error = enter(NULL, "nvmlDeviceGetHandleByPciBusId");
    for (int i = 0; !error && i < device_count(); i++) {
        pci_of(&devices[i], text, sizeof text);
        size_t a = strlen(text), b = strlen(address), n = a < b ? a : b;
        int same = n > 6;
        for (size_t k = 1; same && k <= n; k++)
            same = (text[a - k] | 32) == (address[b - k] | 32);
        if (same) return by_index((unsigned)i, out);
    }
    return error ? error : NOT_FOUND;
}

API int nvmlDeviceGetHandleByPciBusId(const char *address, Device **out) { return by_pci(address, out); }
API int nvmlDeviceGetHandleByPciBusId_v2(const char *address, Device **out) { return by_pci(address, out); }

/* ---- descriptions -------------------------------------------------------------------------------------------- */

API int nvmlDeviceGetName(Device *device, char *out, unsigned size)
{
    char text[96] = "NVIDIA L40S", whole[96];
    int error = device ? enter(device, "nvmlDeviceGetName") : INVALID;
    if (error) return error;
    text_of(&devices[device->index], "name", text, sizeof text);
    if (device->slot >= 0) {
        join(whole, sizeof whole, text, " MIG 1g.10gb", "");
        join(text, sizeof text, whole, "", "");
        text_of(device, "name", text, sizeof text);
    }
    return answer_text(out, size, text);
}

API int nvmlDeviceGetUUID(Device *device, char *out, unsigned size)
{
    char text[96];
    int error = device ? enter(device, "nvmlDeviceGetUUID") : INVALID;
    if (error) return error;
    uuid_of(device, text, sizeof text);
    return answer_text(out, size, text);
}

API int nvmlDeviceGetIndex(Device *device, unsigned *out)
{
    int error = enter_whole(device, out, "nvmlDeviceGetIndex");
    if (!error) *out = (unsigned)device->index;
    return error;
}

API int nvmlDeviceGetMinorNumber(Device *device, unsigned *out)
{
    int error = enter_whole(device, out, "nvmlDeviceGetMinorNumber");
    if (!error) *out = (unsigned)number_of(device, "minor", (u64)device->index);
    return error;
}

static unsigned from_hex(const char *text, size_t digits)
{
    unsigned value = 0;
    for (; digits--; text++)
        value = value * 16 + (unsigned)(*text <= '9' ? *text - '0' : (*text | 32) - 'a' + 10);
    return value;
}

static int pci_info(Device *device, PciInfo *out, int modern)
{
    char text[64];
    int error = enter_whole(device, out, "nvmlDeviceGetPciInfo");
    if (error) return error;
    pci_of(device, text, sizeof text);
    memset(out, 0, modern ? sizeof *out : offsetof(PciInfo, bus_id) + 16); /* earlier versions end in 16 reserved bytes */
    out->id = 0x26B910DE;
    size_t n = strlen(text);
    if (n >= 12) { /* DOMAIN:BB:DD.F with a domain of four or eight digits */
        out->domain = from_hex(text, n - 8);
        out->bus = from_hex(text + n - 7, 2);
        out->device = from_hex(text + n - 4, 2);
    }
    join(out->legacy, sizeof out->legacy, n > 15 ? text + (n - 12) : text, "", "");
    if (modern) join(out->bus_id, sizeof out->bus_id, text, "", "");
    return OK;
}

API int nvmlDeviceGetPciInfo(Device *device, PciInfo *out) { return pci_info(device, out, 0); }
API int nvmlDeviceGetPciInfo_v2(Device *device, PciInfo *out) { return pci_info(device, out, 0); }
API int nvmlDeviceGetPciInfo_v3(Device *device, PciInfo *out) { return pci_info(device, out, 1); }

API int nvmlDeviceGetUtilizationRates(Device *device, unsigned *out)
{
    int error = enter_whole(device, out, "nvmlDeviceGetUtilizationRates");
    if (error) return error;
    if (partitioned(device->index)) return NOT_SUPPORTED;
    out[0] = (unsigned)number_of(device, "utilization", 0);
    out[1] = 0;
    return OK;
}
