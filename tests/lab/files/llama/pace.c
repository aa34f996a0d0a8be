/* Copyright: (c) 2026, gpuops.serving contributors
 * GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
 * SPDX-License-Identifier: GPL-3.0-or-later
 *
 * Stands in for the time that a large model takes on a GPU: with LAB_DECODE_MS set, each decoding step of the server
 * lasts at least so long, asleep, whatever the batch holds. A step with thirty sequences lasts as long as one with a
 * single sequence, as on a GPU that is not full, and the processor stays free for the rest of the lab.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <time.h>

#include "llama.h"

int32_t __real_llama_process(struct llama_context * context, enum llama_process_type type, struct llama_batch_ext * batch);

int32_t __wrap_llama_process(struct llama_context * context, enum llama_process_type type, struct llama_batch_ext * batch) {
    static long milliseconds = -1;
    if (milliseconds < 0) {
        const char * text = getenv("LAB_DECODE_MS");
        milliseconds = text ? strtol(text, NULL, 10) : 0;
    }
    struct timespec end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    const int32_t result = __real_llama_process(context, type, batch);
    if (milliseconds > 0) {
        end.tv_nsec += (milliseconds % 1000) * 1000000L;
        end.tv_sec += milliseconds / 1000 + end.tv_nsec / 1000000000L;
        end.tv_nsec %= 1000000000L;
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, NULL) != 0) { }
    }
    return result;
}
