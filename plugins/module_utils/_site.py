# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Where the third-party libraries are found on a managed host.

First in the interpreter that runs the module, else in the folder that the role ``host_agent`` fills.
That folder is used only while root alone can write to it, because what it holds runs as root.
Every room that imports a third-party library imports this one first.
"""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
import typing as t

from ._errors import MissingLibrary

SITE = "/opt/gpuops/site"

DISTRIBUTIONS = {"psutil": "psutil", "pynvml": "nvidia-ml-py", "requests": "requests"}


def unsafe_reason(path: str) -> t.Optional[str]:
    """Why code under ``path`` must not be run as root, or None when it may be."""
    probe = path
    while True:
        try:
            found = os.lstat(probe)
        except OSError as error:
            return "%s cannot be read: %s" % (probe, error.strerror)
        if not stat.S_ISDIR(found.st_mode):
            return "%s is not a directory" % probe
        if found.st_uid != 0:
            return "%s is not owned by root" % probe
        if found.st_mode & 0o022:
            return "%s can be written by others than root" % probe
        if probe == "/":
            return None
        probe = os.path.dirname(probe)


def add_site(path: str = SITE) -> bool:
    """Append the folder of the host agent to the import path; say whether it is there and safe."""
    if path in sys.path:
        return True
    if not os.path.isdir(path) or unsafe_reason(path) is not None:
        return False
    sys.path.append(path)
    return True


def missing(modules: t.Iterable[str]) -> t.List[str]:
    """The distributions whose modules cannot be imported here."""
    return [DISTRIBUTIONS.get(name, name) for name in modules if importlib.util.find_spec(name) is None]


def require(modules: t.Iterable[str]) -> None:
    """Raise one sentence when a library is missing."""
    absent = missing(modules)
    if not absent:
        return
    why = ""
    if os.path.isdir(SITE):
        reason = unsafe_reason(SITE)
        if reason is not None:
            why = " (%s is ignored: %s)" % (SITE, reason)
    raise MissingLibrary(
        "the Python distribution %s is missing for %s%s: apply the role gpuops.serving.host_agent to this host, "
        "or install it for that interpreter" % (" and ".join('"%s"' % name for name in absent), sys.executable, why)
    )


add_site()
