#!/bin/sh
# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
#
# Installs what the lab and the tests need from the distribution, and only what is missing.
set -eu
PATH="$PATH:/usr/sbin:/sbin"
python=${PYTHON:-python3}
missing=""

# A command, and the package that brings it.
while read -r program package; do
    command -v "$program" > /dev/null || missing="$missing $package"
done << EOF
systemd-nspawn systemd-container
mmdebstrap mmdebstrap
ip iproute2
ssh openssh-client
nsenter util-linux
gcc gcc
g++ g++
objdump binutils
cmake cmake
ninja ninja-build
haproxy haproxy
fuser psmisc
EOF
[ -e /usr/share/keyrings/debian-archive-keyring.gpg ] || missing="$missing debian-archive-keyring"
[ -e /usr/include/stdio.h ] || missing="$missing libc6-dev"
"$python" -c 'import ensurepip, venv' 2> /dev/null || missing="$missing python3-venv"

[ -n "$missing" ] || exit 0
if ! command -v apt-get > /dev/null; then
    echo "prereqs: this machine has no apt-get: install what brings these Debian packages by hand:$missing." >&2
    exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "prereqs: these packages are missing and installing them takes root:$missing." >&2
    exit 1
fi
echo "prereqs: installing$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get -q update
# shellcheck disable=SC2086  # a list of words is meant
# RUNLEVEL=1 keeps package scripts from starting services: the tests start their own haproxy.
RUNLEVEL=1 apt-get -q -y --no-install-recommends install $missing
