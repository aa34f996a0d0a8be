#!/bin/sh
# SPDX-License-Identifier: GPL-3.0-or-later
# Copyright: (c) 2026, gpuops.serving contributors
#
# Usage: build.sh [OUTPUT_FOLDER]. Builds libnvidia-ml.so.1 there (default: build/fake-nvml of the repository)
# and refuses a result that would not load on glibc 2.31, the oldest lab host.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-"$here/../../../build/fake-nvml"}
mkdir -p "$out"
part="$out/.libnvidia-ml.$$"
trap 'rm -f "$part"' EXIT
"${CC:-gcc}" -std=c11 -D_DEFAULT_SOURCE -O2 -Wall -Wextra -Werror -fPIC -shared -fvisibility=hidden -U_FORTIFY_SOURCE \
    -fno-stack-protector -Wl,-soname,libnvidia-ml.so.1 -o "$part" "$here/nvml.c"
newest=$(objdump -T "$part" | sed -n 's/.*(\{0,1\}GLIBC_\([0-9.]*\).*/\1/p' | sort -V | tail -n 1)
highest=$(printf '%s\n2.17\n' "$newest" | sort -V | tail -n 1)
if [ "$highest" != 2.17 ]; then
    echo "The test driver library needs glibc \"$newest\": only 2.17 and older symbols load on every lab host." >&2
    exit 1
fi
mv -f "$part" "$out/libnvidia-ml.so.1"
