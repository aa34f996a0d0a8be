# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""How a command of the host agent tells the result of its work: as text for people, or as JSON."""

from __future__ import annotations

import json
import sys
import typing as t

from . import _foreign, _verdicts
from ._errors import ServingError, UsageError

__all__ = ["tell"]

Result = t.Dict[str, t.Any]
Warn = t.Callable[[str], None]


def tell(
    work: t.Callable[[Warn], Result],
    as_json: bool,
    lines: t.Callable[[Result], t.Iterable[str]],
    word: t.Callable[[Result], str] = lambda result: str(result["verdict"]),
    sentence: t.Optional[t.Callable[[Result], str]] = None,
    nothing: t.Optional[Result] = None,
) -> int:
    """Do the work, print what came of it, and say with which status to exit.

    ``lines`` are what people are told above the sentence of the result, and ``word`` is what stands before it, unless
    ``sentence`` makes it with its word. ``nothing`` is the result of work that has found nothing out.
    """
    warnings: t.List[str] = []
    try:
        result = work(warnings.append)
    except UsageError as error:
        if as_json:
            _print_json({**(nothing or {}), **error.result, "msg": error.message, "verdict": "error"}, warnings)
        raise
    except ServingError as error:
        result = {**(nothing or {}), "verdict": "error", **error.result, "msg": error.message}
    if as_json:
        _print_json(result, warnings)
    else:
        for line in lines(result):
            print(_foreign.seen(line))
        said = "%s: %s" % (word(result), result["msg"]) if sentence is None else sentence(result)
        print(_foreign.seen(said))
        for text in warnings:
            print(_foreign.seen("gpuops: warning: %s" % text), file=sys.stderr)
    return _verdicts.lookup(result["verdict"]).exit_code


def _print_json(result: t.Mapping[str, t.Any], warnings: t.Sequence[str]) -> None:
    verdict = _verdicts.lookup(result["verdict"])
    print(json.dumps({"changed": False, "ok": verdict.ok, **result, "warnings": list(warnings)}))
