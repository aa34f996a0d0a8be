# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Write the tables of docs/engines.md from the profiles: what stands between two marks of the page is replaced."""

from __future__ import annotations

import pathlib
import re
import sys
import typing as t

REPO = pathlib.Path(__file__).resolve().parents[2]
PAGE = REPO / "docs" / "engines.md"
if __name__ == "__main__":
    sys.path.insert(0, str(REPO / ".cache" / "collections"))

from ansible_collections.gpuops.serving.plugins.module_utils import _causes, _engines  # noqa: E402

PROFILES = list(_engines.PROFILES.values())
MARKED = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end -->\n", re.DOTALL)


def code(text: object) -> str:
    return "`%s`" % str(text).replace("|", "\\|")


def codes(names: t.Iterable[object], between: str = "<br>") -> str:
    return between.join(code(name) for name in names) or "-"


def known(profile: _engines.Profile, subject: str) -> str:
    """How a subject is known, to stand behind it."""
    word = profile.known.get(subject)
    if word is None:
        return ""
    return " *(%s)*" % re.sub(r"\bunverified\b", "**unverified**", word)


def rows(head: t.Sequence[str], body: t.Iterable[t.Sequence[str]]) -> str:
    lines = ["| %s |" % " | ".join(row) for row in (head, *body)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]]) + "\n"


def answers() -> str:
    opens = {None: "", True: "before the load", False: "after the load"}
    body = []
    for profile in PROFILES:
        port = str(profile.port or "-") + known(profile, "port")
        health = "-"
        if profile.health:
            meanings = ", ".join("%d %s" % pair for pair in profile.health_status)
            health = "%s: %s%s" % (code(profile.health), meanings, known(profile, "health"))
        models = "%s %s" % (profile.models_method, code(profile.models)) + known(profile, "models")
        if profile.owned_by:
            models += "<br>`owned_by` %s%s" % (code(profile.owned_by), known(profile, "owned_by"))
        if not profile.models_static:
            models += "<br>may still grow"
        body.append(
            (
                code(profile.name),
                port,
                (opens[profile.opens_early] + known(profile, "opens_early")).strip() or "-",
                health,
                models,
                codes(path for _kind, path in profile.endpoints) + known(profile, "endpoints"),
            )
        )
    return rows(("engine", "port", "opens", "health", "models", "a token"), body)


def metrics() -> str:
    body = []
    for profile in PROFILES:
        if profile.metrics is None:
            body.append((code(profile.name), "-", "-", "-", "-", "-", profile.metrics_remedy))
            continue
        where = code((":%d" % profile.metrics_port if profile.metrics_port else "") + profile.metrics)
        between = " + " if profile.adds_up else "<br>"
        counters = [*profile.tokens, *profile.prompt_tokens, *profile.steps]
        words = {profile.known[name] for name in ("tokens", "prompt_tokens", "steps") if name in profile.known}
        body.append(
            (
                code(profile.name),
                where + known(profile, "metrics"),
                codes(profile.running, between) + known(profile, "running"),
                codes(profile.waiting, between) + known(profile, "waiting"),
                codes(profile.kv_use) + known(profile, "kv_use"),
                codes(counters)
                + "".join(" *(%s)*" % word.replace("unverified", "**unverified**") for word in sorted(words)),
                profile.metrics_remedy,
            )
        )
    return rows(("engine", "where", "running", "waiting", "cache", "counters", "where it is missing"), body)


def alternatives(pattern: str) -> str:
    """One line for each of the words that an expression gives to choose from."""
    found, depth, escaped = [""], 0, False
    for sign in pattern:
        depth += 0 if escaped else (sign in "([") - (sign in ")]")
        if sign == "|" and depth == 0 and not escaped:
            found.append("")
        else:
            found[-1] += sign
        escaped = sign == "\\" and not escaped
    return codes(found)


def phases() -> str:
    body = []
    for profile in PROFILES:
        for number, phase in enumerate(profile.phases):
            share = "-" if phase.share is None else "%g to %g %%" % phase.share
            body.append(
                (
                    code(profile.name) + known(profile, "phases") if number == 0 else "",
                    code(phase.word),
                    alternatives(phase.pattern),
                    share,
                )
            )
    return rows(("engine", "phase", "lines that tell of it", "of the whole load, roughly"), body)


def causes() -> str:
    body = []
    for kind, meaning in _causes.KINDS.items():
        lines = [alternatives(pattern) for pattern, told in _causes.CAUSES if told == kind]
        for profile in PROFILES:
            own = "<br>".join(alternatives(pattern) for pattern, told in profile.fatal if told == kind)
            if own:
                lines.append("%s%s:<br>%s" % (code(profile.name), known(profile, "fatal"), own))
        body.append((code(kind), meaning, "<br>".join(lines) or "told by systemd"))
    return rows(("kind", "meaning", "lines that tell of it"), body)


def stops() -> str:
    body = []
    for profile in PROFILES:
        if not profile.on_sigterm:
            continue
        advice = "%d s%s. %s" % (profile.stop_timeout or 0, known(profile, "stop_timeout"), profile.stop_advice)
        body.append(
            (
                code(profile.name),
                profile.on_sigterm + known(profile, "on_sigterm"),
                advice,
                codes(profile.titles) + known(profile, "titles"),
            )
        )
    return rows(("engine", "what SIGTERM does", "`stop_timeout`", "names that only its processes bear"), body)


TABLES: t.Dict[str, t.Callable[[], str]] = {
    "answers": answers,
    "metrics": metrics,
    "phases": phases,
    "causes": causes,
    "stops": stops,
}


def rendered(page: str) -> str:
    """The page with every table as the data has it now."""
    return MARKED.sub(lambda m: "<!-- table: %s -->\n%s<!-- end -->\n" % (m.group(1), TABLES[m.group(1)]()), page)


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
