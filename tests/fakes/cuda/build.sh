#!/bin/sh
# SPDX-License-Identifier: GPL-3.0-or-later
# Copyright: (c) 2026, gpuops.serving contributors
#
# Usage: build.sh FOLDER. Builds libcuda.so.1 there, beside the libnvidia-ml.so.1 that tests/fakes/nvml/build.sh has
# built in the same folder and that this one asks for the devices.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=$1
part="$out/.libcuda.$$"
trap 'rm -f "$part"' EXIT
"${CC:-gcc}" -std=c11 -D_DEFAULT_SOURCE -O2 -Wall -Wextra -Werror -fPIC -shared -fvisibility=hidden \
    -Wl,-soname,libcuda.so.1 -o "$part" "$here/cuda.c" -L"$out" -l:libnvidia-ml.so.1
mv -f "$part" "$out/libcuda.so.1"
