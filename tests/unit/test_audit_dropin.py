# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The drop-in of an audit: always the same text, never in place of somebody else's."""

from __future__ import annotations

import os
import pathlib

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _audit_dropin
from ansible_collections.gpuops.serving.plugins.module_utils._audit_dropin import NAME, Line
from ansible_collections.gpuops.serving.plugins.module_utils._errors import ServingError

KILL = Line("Service", "KillMode", "mixed", "kill_mode")
STOP = Line("Service", "TimeoutStopSec", "120", "timeout_stop")
LIMIT = Line("Unit", "StartLimitIntervalSec", "1365", "start_limit_never")
CONTAINER = Line("Service", "ExecStopPost", "-/usr/bin/docker stop -t 10 a%b", "container_client")
ALL = [KILL, STOP, LIMIT, CONTAINER]


def test_the_text_is_sorted_says_why_and_can_be_read_again() -> None:
    text = _audit_dropin.render(ALL)
    assert text == _audit_dropin.render(ALL[::-1])
    assert [row for row in text.splitlines() if row and not row.startswith("#")] == [
        "[Unit]",
        "StartLimitIntervalSec=1365",
        "[Service]",
        "ExecStopPost=-/usr/bin/docker stop -t 10 a%%b",
        "KillMode=mixed",
        "TimeoutStopSec=120",
    ]
    assert "# kill_mode: a stop ends the main process at most" in text
    assert sorted(_audit_dropin.parse(text)) == sorted(ALL)
    assert _audit_dropin.render(_audit_dropin.parse(text)) == text


def test_what_was_cured_stays_and_a_new_value_takes_the_place_of_the_old() -> None:
    later = STOP._replace(value="300")
    assert sorted(_audit_dropin.merge([KILL, STOP], [later, LIMIT])) == sorted([KILL, later, LIMIT])


def test_lines_that_no_rule_writes_are_not_kept() -> None:
    text = _audit_dropin.HEADER + "\n[Service]\n# kill_mode: x\nKillMode=mixed\nUser=me\n# kill_mode: x\nExecStart=/x\n"
    assert _audit_dropin.parse(text) == [KILL]


def test_what_lies_there(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "a.service.d"
    path = folder / NAME

    def foreign() -> str:
        return _audit_dropin.look("a.service", str(tmp_path)).foreign

    assert (foreign(), _audit_dropin.look("a.service", str(tmp_path)).text) == ("", "")
    _audit_dropin.write(str(path), _audit_dropin.render([KILL]))
    assert (foreign(), path.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == ("", 0o644, 0o755)
    assert os.listdir(folder) == [NAME]
    path.write_text("# by the operator\n[Service]\nKillMode=mixed\n", encoding="utf-8")
    assert foreign() == "somebody else wrote %s" % path
    path.write_bytes(b"\xff\xfe")
    assert foreign() == "somebody else wrote %s" % path
    path.unlink()
    path.symlink_to("/dev/null")
    assert foreign() == "%s is not a plain file" % path
    path.unlink()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert foreign() == "%s is no folder" % folder


def test_the_folder_goes_with_its_last_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.service.d" / NAME
    _audit_dropin.write(str(path), "x")
    (path.parent / "other.conf").write_text("", encoding="utf-8")
    _audit_dropin.remove(str(path))
    assert path.parent.exists() and not path.exists()
    (path.parent / "other.conf").unlink()
    _audit_dropin.write(str(path), "x")
    _audit_dropin.remove(str(path))
    assert not path.parent.exists()


def test_what_cannot_be_written_is_one_sentence(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "nowhere" / "a.service.d" / NAME
    with pytest.raises(ServingError) as caught:
        _audit_dropin.write(str(path), "x")
    assert caught.value.message == 'the drop-in "%s" cannot be written: No such file or directory' % path


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("override.conf", "[Service]\nKillMode=process\n", ["KillMode"]),
        ("override.conf", "[Service]\n  KillMode = process\n", ["KillMode"]),
        ("override.conf", "[Service]\n#KillMode=process\n", []),
        ("10-mine.conf", "[Service]\nKillMode=process\n", []),
        ("60-mine.conf", "[Service]\nTimeoutSec=5\n", ["TimeoutStopSec"]),
        ("60-mine.conf", "[Unit]\nStartLimitInterval=5\n", ["StartLimitIntervalSec"]),
        ("60-mine.conf", "[Service]\nExecStopPost=/bin/x\n", []),
        ("60-mine.conf", "[Service]\nExecStopPost=\nExecStopPost=/bin/x\n", ["ExecStopPost"]),
    ],
)
def test_a_later_drop_in_that_sets_it_again_is_named(
    tmp_path: pathlib.Path, name: str, text: str, found: list[str]
) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    directives = ["KillMode", "TimeoutStopSec", "StartLimitIntervalSec", "ExecStopPost"]
    assert _audit_dropin.overriding([str(path)], directives) == {directive: str(path) for directive in found}
