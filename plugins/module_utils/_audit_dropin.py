# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The drop-in that cures findings: its text, which is always the same for the same settings, and its file."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
import typing as t

from . import _files
from ._audit_rules import RULES
from ._errors import ServingError

__all__ = ("NAME", "Existing", "Line", "look", "merge", "overriding", "parse", "path_of", "remove", "render", "write")

FOLDER = "/etc/systemd/system"
NAME = "50-gpuops-audit.conf"
HEADER = "# Written by the module gpuops.serving.unit_audit; changes are lost."
SECTIONS = ("Unit", "Service")
READING = 2.0  # seconds for the drop-ins of one unit
# Other names under which systemd takes a directive.
ALSO = {
    "StartLimitIntervalSec": ("StartLimitInterval",),
    "TimeoutStartSec": ("TimeoutSec",),
    "TimeoutStopSec": ("TimeoutSec",),
}
LISTS = ("ExecStopPost",)


class Line(t.NamedTuple):
    """One setting, and the rule that asks for it."""

    section: str
    directive: str
    value: str
    rule: str


class Existing(t.NamedTuple):
    """What lies where a drop-in would be written."""

    path: str
    text: str = ""
    # Why it is not ours to change, empty where it is, or where there is nothing.
    foreign: str = ""


def path_of(unit: str, folder: str = FOLDER) -> str:
    return os.path.join(folder, unit + ".d", NAME)


def render(lines: t.Sequence[Line]) -> str:
    """The text of a drop-in, with the reason above each line."""
    parts = [HEADER]
    for section in SECTIONS:
        own = sorted((line for line in lines if line.section == section), key=lambda line: line.directive)
        if own:
            parts.append("\n[%s]" % section)
        for line in own:
            parts.append("# %s: %s" % (line.rule, RULES[line.rule].why))
            # A percent sign would begin a specifier.
            parts.append("%s=%s" % (line.directive, line.value.replace("%", "%%")))
    return "\n".join(parts) + "\n"


def parse(text: str) -> t.List[Line]:
    """The settings of a drop-in that was rendered here; what somebody else added to it is not kept."""
    found: t.List[Line] = []
    section, rule = "", ""
    for row in text.splitlines():
        head = re.match(r"\[(\w+)\]\s*\Z", row)
        told = re.match(r"# (\w+): ", row)
        setting = re.match(r"(\w+)=(.*)\Z", row)
        if head:
            section = head.group(1)
        elif told:
            rule = told.group(1)
        elif setting and section in SECTIONS and rule in RULES and setting.group(1) in RULES[rule].sets:
            found.append(Line(section, setting.group(1), setting.group(2).replace("%%", "%"), rule))
    return found


def merge(old: t.Sequence[Line], new: t.Sequence[Line]) -> t.List[Line]:
    """What a drop-in is to hold: what it has cured already, and what it cures now."""
    kept = {(line.section, line.directive): line for line in (*old, *new)}
    return list(kept.values())


def look(unit: str, folder: str = FOLDER) -> Existing:
    """The drop-in of a unit as it is. One that somebody else wrote is not touched, whatever it says."""
    path = path_of(unit, folder)
    above = os.path.dirname(path)
    if os.path.islink(above) or (os.path.lexists(above) and not os.path.isdir(above)):
        return Existing(path, "", "%s is no folder" % above)
    try:
        facts = os.lstat(path)
    except FileNotFoundError:
        return Existing(path)
    except OSError as error:
        raise ServingError('the drop-in "%s" cannot be read: %s' % (path, error.strerror)) from error
    if not stat.S_ISREG(facts.st_mode):
        return Existing(path, "", "%s is not a plain file" % path)
    try:
        with open(path, encoding="utf-8") as stream:
            text = stream.read()
    except ValueError:
        text = ""
    except OSError as error:
        raise ServingError('the drop-in "%s" cannot be read: %s' % (path, error.strerror)) from error
    return Existing(path, text, "" if text.startswith(HEADER + "\n") else "somebody else wrote %s" % path)


def overriding(drop_ins: t.Sequence[str], directives: t.Sequence[str]) -> t.Dict[str, str]:
    """The drop-in behind ours that sets each of these directives again, of those that one sets."""
    behind = [path for path in drop_ins if os.path.basename(path) > NAME]
    texts = _files.texts(behind, READING) if behind else {}
    found = {}
    for directive in directives:
        names = "|".join((directive, *ALSO.get(directive, ())))
        # A list is only lost when it is emptied.
        pattern = re.compile(r"^[ \t]*(?:%s)[ \t]*=%s" % (names, r"[ \t]*$" if directive in LISTS else ""), re.M)
        for path in behind:
            if pattern.search(texts.get(path, "")):
                found[directive] = path
    return found


def write(path: str, text: str) -> None:
    """Put the file in place at once, so that systemd never reads half of it."""
    folder = os.path.dirname(path)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
            os.chmod(folder, 0o755)
        fd, temporary = tempfile.mkstemp(prefix=".gpuops-", dir=folder)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fchmod(stream.fileno(), 0o644)
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise ServingError('the drop-in "%s" cannot be written: %s' % (path, error.strerror)) from error


def remove(path: str) -> None:
    """Remove the file, and its folder where nothing else is in it."""
    try:
        os.unlink(path)
    except OSError as error:
        raise ServingError('the drop-in "%s" cannot be removed: %s' % (path, error.strerror)) from error
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(path))
