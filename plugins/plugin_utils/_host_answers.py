# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the reports of all checks of an inventory share: hosts without an answer, and texts that others chose."""

from __future__ import annotations

import typing as t

__all__ = ("MOST_NAMES", "NOISE", "failed", "failure", "plain", "silent", "some", "visible")

UNREACHABLE = "the host does not answer"
NOT_ASKED = "the host was not asked: it had failed before in this run"
MOST_NAMES = 20  # hosts that a summary names
# What Ansible adds to every result, or what tells of the call and not of what was found.
NOISE = ("ansible_facts", "changed", "deprecations", "exception", "failed", "failed_when_result", "invocation")

Entry = t.Dict[str, t.Any]


def silent(result: t.Optional[Entry], **more: t.Any) -> t.Optional[Entry]:
    """What is said of a host that did not answer, None of one that did; ``more`` are further keys."""
    if result is not None and not result.get("unreachable"):
        return None
    return {
        "verdict": "unknown",
        "ok": False,
        "answered": False,
        "reason": "not_asked" if result is None else "unreachable",
        "msg": NOT_ASKED if result is None else UNREACHABLE,
        "cause": "" if result is None else str(result.get("msg", "")).strip(),
        **more,
        "warnings": [],
    }


def failed(result: Entry, **more: t.Any) -> Entry:
    """What is said of a host whose module gave no verdict."""
    return {
        "verdict": "error",
        "ok": False,
        "answered": True,
        "reason": "failed",
        "msg": failure(result),
        "cause": "",
        **more,
        "warnings": [],
    }


def some(names: t.List[str]) -> t.List[str]:
    """The first names, and how many more there are."""
    return names if len(names) <= MOST_NAMES else [*names[:MOST_NAMES], "and %d more" % (len(names) - MOST_NAMES)]


def failure(result: Entry) -> str:
    """Why a module gave no verdict: its message, and the last line it wrote where it did not come so far."""
    lines = [str(result.get(key) or "").strip().splitlines() for key in ("msg", "module_stderr", "module_stdout")]
    said, *output = lines
    parts = [said[0] if said else "the module gave no verdict"]
    parts += [text[-1] for text in output if text][:1]
    return ": ".join(part.strip().rstrip(".") for part in parts)


def visible(text: str) -> str:
    """In one line, and without what would steer a terminal: hosts and processes choose these words."""
    return "".join(sign if sign.isprintable() else "\\x%02x" % ord(sign) for sign in " ".join(str(text).split()))


def plain(value: t.Any) -> t.Any:
    """Without the wrappers in which Ansible hands values to a filter."""
    if isinstance(value, t.Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, str) else value
