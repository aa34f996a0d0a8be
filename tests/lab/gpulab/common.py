# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Places, errors and small helpers that every part of the lab uses."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
from pathlib import Path
from typing import Iterator, Sequence

REPO = Path(__file__).resolve().parents[3]
LAB = REPO / "tests" / "lab"
CACHE = REPO / ".cache" / "lab"
BUILD = REPO / "build" / "lab"
RUN = Path("/run/gpuops-lab")


class LabError(Exception):
    """Something a person can act on; the text is one sentence."""


def command(*argv: str | Path, timeout: float = 60.0, text: str | None = None) -> str:
    """Run a program to its end and return its output, or say in one sentence why it failed."""
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=timeout, check=False)
    except FileNotFoundError as exc:
        raise LabError(f"'{words[0]}' is not installed: run 'make prereqs'.") from exc
    except subprocess.TimeoutExpired as exc:
        raise LabError(f"'{' '.join(words)}' did not end within {timeout:g} s.") from exc
    if done.returncode != 0:
        tail = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise LabError(f"'{' '.join(words)}' ended with status {done.returncode}: {tail}")
    return done.stdout


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on *path*; the file stays, so that nobody locks a deleted one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def digest(parts: Sequence[str | bytes]) -> str:
    """Return a short content hash of *parts*, in order."""
    value = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        value.update(b"%d:" % len(raw) + raw)
    return value.hexdigest()[:16]


def tree_parts(folder: Path) -> list[str | bytes]:
    """Return names, modes and contents of the files under *folder*, for digest()."""
    parts: list[str | bytes] = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            parts += [str(path.relative_to(folder)), oct(path.stat().st_mode & 0o111), path.read_bytes()]
    return parts


def in_use(layer: Path) -> bool:
    """Say whether an overlay of a running lab has *layer* below it."""
    return str(layer) in Path("/proc/self/mounts").read_text(encoding="utf-8")


def write(path: Path, text: str, mode: int = 0o644) -> None:
    """Write *text* whole or not at all, with *mode* from the first byte on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as handle:
        handle.write(text)
    os.chmod(temporary, mode)
    temporary.rename(path)
