# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a lab consists of: the host options of the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Sequence

from .common import LabError

RELEASES = ("bullseye", "bookworm", "trixie")
ROLES = ("gpu", "gateway")
USERS = ("root", "ops")
_NAME = re.compile(r"[a-z][a-z0-9-]{0,19}")
_FOLDER = re.compile(r"/[A-Za-z0-9._/-]*[A-Za-z0-9._-]")
_MOST_HOSTS = 200


@dataclass(frozen=True)
class HostSpec:
    """One host as asked for."""

    name: str
    release: str
    role: str = "gpu"
    user: str = "root"
    legacy: bool = False


def check_lab_name(name: str) -> str:
    """Return *name* if it can name a lab."""
    if not _NAME.fullmatch(name):
        raise LabError(
            f"'{name}' cannot name a lab: use 1 to 20 lower-case letters, digits and hyphens, beginning with a letter."
        )
    return name


def parse_host(text: str) -> HostSpec:
    """Read NAME=RELEASE[,role=gateway][,user=ops][,legacy=1]."""
    name, equals, rest = text.partition("=")
    if not equals or not rest:
        raise LabError(f"host '{text}' is not understood: write NAME=RELEASE[,role=ROLE][,user=USER][,legacy=1].")
    if not _NAME.fullmatch(name):
        raise LabError(
            f"'{name}' cannot name a host: use 1 to 20 lower-case letters, digits and hyphens, beginning with a letter."
        )
    release, *options = rest.split(",")
    if release not in RELEASES:
        raise LabError(f"host '{name}' asks for release '{release}': the lab has {', '.join(RELEASES)}.")
    values = {"role": "gpu", "user": "root", "legacy": "0"}
    allowed = {"role": ROLES, "user": USERS, "legacy": ("0", "1")}
    for option in options:
        key, _, value = option.partition("=")
        if key not in values:
            raise LabError(f"host '{name}' has the unknown option '{key}': the options are {', '.join(values)}.")
        if value not in allowed[key]:
            raise LabError(f"host '{name}' has {key} '{value}': allowed are {', '.join(allowed[key])}.")
        values[key] = value
    return HostSpec(name, release, values["role"], values["user"], values["legacy"] == "1")


def parse_bind(text: str) -> str:
    """Read SOURCE:TARGET: a folder of this machine that the hosts see at TARGET, and cannot change."""
    source, _, target = text.partition(":")
    if not all(_FOLDER.fullmatch(path) and ".." not in path.split("/") for path in (source, target)):
        raise LabError(f"folder '{text}' is not understood: write SOURCE:TARGET, two absolute, plain paths.")
    if not Path(source).is_dir():
        raise LabError(f"folder '{source}' is not there, so no host can see it.")
    return text


def parse_hosts(texts: Sequence[str]) -> list[HostSpec]:
    """Read all hosts of a lab; names must differ."""
    hosts = [parse_host(text) for text in texts]
    if not hosts:
        raise LabError("a lab needs at least one host: add --host NAME=RELEASE.")
    if len(hosts) > _MOST_HOSTS:
        raise LabError(f"{len(hosts)} hosts are too many: a lab holds {_MOST_HOSTS}.")
    seen: set[str] = set()
    for host in hosts:
        if host.name in seen:
            raise LabError(f"host '{host.name}' is given twice.")
        seen.add(host.name)
    return hosts
