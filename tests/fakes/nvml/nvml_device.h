/* SPDX-License-Identifier: GPL-3.0-or-later
 * Copyright: (c) 2026, gpuops.serving contributors
 *
 * The part of the test double that names devices: start, stop, handles and their descriptions. Included by nvml.c.
 */

/* ---- start and stop ------------------------------------------------------------------------------------------ */

static int start_up(void)
{
    load_scenario();
    pause_ms(global_number("init_delay_ms", 0));
    load_scenario();
    int error = (int)global_number("init_error", OK);
    if (!error) initialised++;
    for (int i = 0; i < MAX_DEVICES; i++)
        devices[i].index = i;
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
        {0, "Success"}, {1, "Uninitialized"}, {2, "Invalid Argument"}, {3, "Not Supported"}, {4, "Insufficient Permissions"},
        {6, "Not Found"}, {7, "Insufficient Size"}, {9, "Driver Not Loaded"}, {10, "Timeout"}, {13, "Function Not Found"},
        {15, "GPU is lost"}, {16, "GPU requires reset"}, {17, "The operating system has blocked the request"},
        {18, "Driver/library version mismatch"}, {19, "In use by another client"}, {25, "Argument version mismatch"},
        {28, "GPU not found"}, {999, "Unknown Error"},
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
    int error = enter(-1, "nvmlSystemGetDriverVersion");
    if (error) return error;
    lookup(scenario, "driver_version", text, sizeof text);
    return answer_text(out, size, text);
}

API int nvmlSystemGetNVMLVersion(char *out, unsigned size)
{
    int error = enter(-1, "nvmlSystemGetNVMLVersion");
    return error ? error : answer_text(out, size, "12.550.127.05");
}

/* ---- handles ------------------------------------------------------------------------------------------------- */

static int count(unsigned *out)
{
    int error = enter(-1, "nvmlDeviceGetCount");
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
    int error = enter((int)index, "nvmlDeviceGetHandleByIndex");
    if (!error) *out = &devices[index];
    return error;
}

API int nvmlDeviceGetHandleByIndex(unsigned index, Device **out) { return by_index(index, out); }
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out) { return by_index(index, out); }

static void uuid_of(int device, char *out, size_t size)
{
    char digits[24];
    decimal(digits, 10 + (u64)device);
    if (!device_text(device, "uuid", out, size)) join(out, size, "GPU-00000000-0000-0000-0000-0000000000", digits, "");
}

static char hex(unsigned value) { return "0123456789ABCDEF"[value & 15]; }

/* Default address 00000000:BB:00.0, one bus a device from 17 (hexadecimal) on, as on an eight-GPU server. */
static void pci_of(int device, char *out, size_t size)
{
    char bus[3] = {hex((unsigned)(0x17 + device) >> 4), hex((unsigned)(0x17 + device)), 0};
    if (!device_text(device, "pci", out, size)) join(out, size, "00000000:", bus, ":00.0");
}

API int nvmlDeviceGetHandleByUUID(const char *uuid, Device **out)
{
    char text[96];
    int error = enter(-1, "nvmlDeviceGetHandleByUUID");
    for (int i = 0; !error && i < device_count(); i++) {
        uuid_of(i, text, sizeof text);
        if (!strcmp(text, uuid)) return by_index((unsigned)i, out);
    }
    return error ? error : NOT_FOUND;
}

static int by_pci(const char *address, Device **out)
{
    char text[64];
    int error = enter(-1, "nvmlDeviceGetHandleByPciBusId");
    for (int i = 0; !error && i < device_count(); i++) {
        pci_of(i, text, sizeof text);
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
    char text[96] = "NVIDIA L40S";
    int error = device ? enter(device->index, "nvmlDeviceGetName") : INVALID;
    if (error) return error;
    device_text(device->index, "name", text, sizeof text);
    return answer_text(out, size, text);
}

API int nvmlDeviceGetUUID(Device *device, char *out, unsigned size)
{
    char text[96];
    int error = device ? enter(device->index, "nvmlDeviceGetUUID") : INVALID;
    if (error) return error;
    uuid_of(device->index, text, sizeof text);
    return answer_text(out, size, text);
}

API int nvmlDeviceGetIndex(Device *device, unsigned *out)
{
    int error = device ? enter(device->index, "nvmlDeviceGetIndex") : INVALID;
    if (!error) *out = (unsigned)device->index;
    return error;
}

API int nvmlDeviceGetMinorNumber(Device *device, unsigned *out)
{
    int error = device ? enter(device->index, "nvmlDeviceGetMinorNumber") : INVALID;
    if (!error) *out = (unsigned)device_number(device->index, "minor", (u64)device->index);
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
    int error = device && out ? enter(device->index, "nvmlDeviceGetPciInfo") : INVALID;
    if (error) return error;
    pci_of(device->index, text, sizeof text);
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
    int error = device && out ? enter(device->index, "nvmlDeviceGetUtilizationRates") : INVALID;
    if (error) return error;
    out[0] = (unsigned)device_number(device->index, "utilization", 0);
    out[1] = 0;
    return OK;
}

/* device.N.mig absent: a device that knows no partitioning; 0 or 1: switched off or on. */
API int nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending)
{
    int error = device && current && pending ? enter(device->index, "nvmlDeviceGetMigMode") : INVALID;
    if (error) return error;
    u64 mode = device_number(device->index, "mig", 2);
    if (mode > 1) return NOT_SUPPORTED;
    *current = *pending = (unsigned)mode;
    return OK;
}
