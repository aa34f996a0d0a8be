/* SPDX-License-Identifier: GPL-3.0-or-later
 * Copyright: (c) 2026, gpuops.serving contributors
 *
 * The part of the test double that handles text: numbers, small files, the scenario and its keys. Included by nvml.c.
 */

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

static void load_scenario(void)
{
    char path[2100];
    state_path(path, sizeof path, "/scenario", "");
    slurp(path, scenario, sizeof scenario);
}

/* ---- keys: a word alone, device.N.WORD, or device.N.mig.K.WORD ------------------------------------------------- */

static void key_of(const Device *device, const char *word, char *out, size_t size)
{
    char digits[24], head[64], part[64] = "";
    if (!device) {
        join(out, size, word, "", "");
        return;
    }
    if (device->slot >= 0) {
        decimal(digits, (u64)device->slot);
        join(part, sizeof part, "mig.", digits, ".");
    }
    decimal(digits, (u64)device->index);
    join(head, sizeof head, "device.", digits, ".");
    join(out, size, head, part, word);
}

static int text_of(const Device *device, const char *word, char *out, size_t size)
{
    char key[256];
    key_of(device, word, key, sizeof key);
    return lookup(scenario, key, out, size);
}

static u64 number_of(const Device *device, const char *word, u64 fallback)
{
    char value[64];
    return text_of(device, word, value, sizeof value) ? number(value, NULL) : fallback;
}

/* A size in MiB, or "na" for one that the driver does not know. */
static u64 size_from(const char *text, const char **end)
{
    if (*text != 'n') return number(text, end) * MIB;
    while (*text && *text != ',') text++;
    if (end) *end = text;
    return NOT_AVAILABLE;
}

static u64 size_of(const Device *device, const char *word, u64 fallback)
{
    char value[64];
    return text_of(device, word, value, sizeof value) ? size_from(value, NULL) : fallback * MIB;
}
