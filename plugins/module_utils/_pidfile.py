# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What a pid file says, and how much its word is worth."""

from __future__ import annotations

import errno
import os
import stat
from typing import NamedTuple

from ._errors import ServingError, UsageError

__all__ = ["MOST_PID", "PidFile", "pid_in_file"]

MOST_PID = 2**22  # the kernel's own limit


class PidFile(NamedTuple):
    """What a pid file says, when it was written, and who could have written it."""

    pid: int
    written: float
    owner: int
    open_to_others: bool


def pid_in_file(path: str) -> PidFile | None:
    """What is in a pid file; None without a file. A link is not followed: whoever made it chose what it leads to."""
    try:
        # Without O_NONBLOCK a FIFO would never open.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode):
                raise UsageError('the pid file "%s" is not a regular file' % path)
            text = os.read(fd, 64).split()
        finally:
            os.close(fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        said = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise ServingError('the pid file "%s" cannot be read: %s' % (path, said)) from error
    if not text or not text[0].isdigit() or not 1 <= int(text[0]) <= MOST_PID:
        raise ServingError('the pid file "%s" holds no process id' % path)
    others = facts.st_mode & stat.S_IWOTH or (facts.st_mode & stat.S_IWGRP and facts.st_uid == 0 != facts.st_gid)
    return PidFile(int(text[0]), facts.st_mtime, facts.st_uid, bool(others))
