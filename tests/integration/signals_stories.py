# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What happens to a reader of the journal, told in a sandbox. Each story answers what was seen."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
import typing as t

from ansible_collections.gpuops.serving.plugins.module_utils import _journal_reader, _systemd
from signals_sandbox import LIVES, UNIT, Sandbox


def state(life: int = 0, **fields: t.Any) -> _systemd.UnitState:
    """What systemd would say of the unit."""
    given = {"load_state": "loaded", "active_state": "active", "sub_state": "running", "main_pid": 1, **fields}
    return _systemd.UnitState(UNIT, invocation_id=LIVES[life], **given)


def gather(reader: _journal_reader.Reader, wanted: int, seconds: float = 10) -> t.List[str]:
    """Look until there are so many lines."""
    found: t.List[str] = []
    end = time.monotonic() + seconds
    while len(found) < wanted and time.monotonic() < end:
        found += [one.message for one in reader.read(state())]
        time.sleep(0.02)
    return found


def lives_and_slices() -> t.Any:
    sandbox = Sandbox()
    writer = sandbox.writer()
    sandbox.systemd_says("Started the engine.")
    writer.write(b"one\ntwo\n")
    time.sleep(0.5)
    reader = _journal_reader.Reader(UNIT)
    found = [gather(reader, 3)]
    writer.write(b"three\n")
    found.append(gather(reader, 1))
    writer.native(b"Loading \xff: 10%\rLoading: 20%\rLoading: 30%\x1b[0m")
    found.append(gather(reader, 3))
    saved = json.loads(json.dumps(reader.save()))
    reader.close()
    writer.write(b"between two slices\n")
    time.sleep(0.3)
    reader = _journal_reader.Reader(UNIT)
    reader.restore(saved)
    found.append([one.message for one in reader.read(state())])
    writer.write(b"last words\n")
    writer.end()
    time.sleep(0.3)
    sandbox.life(1)
    second = sandbox.writer()
    second.write(b"a new life\n")
    time.sleep(0.5)
    found.append([one.message for one in reader.read(state(1))])
    found.append([one.message for one in reader.read(state(1, active_state="failed"))])
    result = {"found": found, "warnings": reader.warnings}
    reader.close()
    second.end()
    sandbox.end()
    return result


def rotated_and_vacuumed() -> t.Any:
    sandbox = Sandbox()
    writer = sandbox.writer()
    writer.write(b"".join(b"old %d\n" % number for number in range(50)))
    time.sleep(0.5)
    reader = _journal_reader.Reader(UNIT)
    found = [len(gather(reader, 50))]
    sandbox.rotate()
    writer.write(b"after the rotation\n")
    found.append(gather(reader, 1))
    sandbox.rotate("--vacuum-files=1")
    writer.write(b"after the vacuum\n")
    found.append(gather(reader, 1))
    saved = reader.save()
    reader.close()
    # The place where it was is gone for the next slice.
    sandbox.rotate("--vacuum-files=1")
    writer.write(b"a\nb\n")
    time.sleep(0.5)
    reader = _journal_reader.Reader(UNIT)
    reader.restore(dict(saved, cursor="s=00000000000000000000000000000000;i=1;b=0;m=1;t=1;x=1"))
    found.append(gather(reader, 2, seconds=3))
    reader.close()
    result = {"found": found, "warnings": reader.warnings}
    writer.end()
    sandbox.end()
    return result


def floods() -> t.Any:
    sandbox = Sandbox()
    writer = sandbox.writer()
    writer.write(b"z" * (3 << 20) + b"\n")
    writer.write(b"".join(b"flood %d %s\n" % (number, b"y" * 200) for number in range(20000)))
    writer.write(b"the end\n")
    time.sleep(3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reader = _journal_reader.Reader(UNIT)
    began, found, longest, looks = time.monotonic(), [], 0.0, 0
    while "the end" not in found and time.monotonic() - began < 30:
        at = time.monotonic()
        found += [one.message for one in reader.read(state())]
        longest, looks = max(longest, time.monotonic() - at), looks + 1
        time.sleep(0.02)
    result = {
        "last": found[-1],
        "widest": max(map(len, found)),
        "longest": longest,
        "grown": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024.0,
    }
    reader.close()
    writer.end()
    sandbox.end()
    return result


def left_out() -> t.Any:
    sandbox = Sandbox(RateLimitIntervalSec="1s", RateLimitBurst="20")
    writer = sandbox.writer()
    for number in range(3000):
        writer.write(b"line %d\n" % number)
    time.sleep(1.6)
    writer.write(b"after the pause\n")
    time.sleep(0.5)
    reader = _journal_reader.Reader(UNIT)
    found = gather(reader, 3000, seconds=2)
    result = {"lines": len(found), "last": found[-1], "warnings": list(reader.warnings.values())}
    reader.close()
    writer.end()
    sandbox.end()
    return result


def not_there_or_denied() -> t.Any:
    sandbox = Sandbox(Storage="none")
    writer = sandbox.writer()
    writer.write(b"nobody keeps this\n")
    time.sleep(0.3)
    reader = _journal_reader.Reader(UNIT)
    found = [[one.message for one in reader.read(state())], list(reader.warnings.values())]
    reader.close()
    sandbox.end()
    sandbox.journald.wait()
    with open("/run/systemd/journald.conf.d/test.conf", "w") as stream:
        stream.write("[Journal]\nStorage=volatile\n")
    os.unlink("/run/systemd/journal/stdout")
    os.makedirs(sandbox.folder, exist_ok=True)
    sandbox.start()
    second = sandbox.writer()
    second.write(b"kept\n")
    time.sleep(0.5)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            os.chdir("/")
            other = _journal_reader.Reader(UNIT)
            told = [[one.message for one in other.read(state())], list(other.warnings.values())]
            os.write(writing, json.dumps(told).encode())
        finally:
            os._exit(0)
    os.close(writing)
    found += json.loads(os.read(reading, 65536))
    os.waitpid(pid, 0)
    result = found
    writer.end()
    second.end()
    sandbox.end()
    return result


def killed_caller() -> t.Any:
    sandbox = Sandbox()
    writer = sandbox.writer()
    writer.write(b"one\n")
    time.sleep(0.5)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            reader = _journal_reader.Reader(UNIT)
            gather(reader, 1)
            assert reader._follower is not None
            os.write(writing, b"%d" % reader._follower._child.pid)
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(writing)
    follower = int(os.read(reading, 100))
    time.sleep(0.5)
    alive = os.path.exists("/proc/%d" % follower)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    end = time.monotonic() + 5
    while time.monotonic() < end:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)  # it is the first process's to wait for
        if not os.path.exists("/proc/%d" % follower):
            break
        time.sleep(0.05)
    result = [alive, os.path.exists("/proc/%d" % follower)]
    sandbox.end()
    return result


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
