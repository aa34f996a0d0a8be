# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Write the tables of docs/unit-audit.md from the rules: what stands between two marks of the page is replaced."""

from __future__ import annotations

import pathlib
import re
import sys
import typing as t

REPO = pathlib.Path(__file__).resolve().parents[2]
PAGE = REPO / "docs" / "unit-audit.md"
if __name__ == "__main__":
    sys.path.insert(0, str(REPO / ".cache" / "collections"))

from ansible_collections.gpuops.serving.plugins.module_utils import _audit_rules, _profiles  # noqa: E402

MARKED = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end -->\n", re.DOTALL)


def rows(head: t.Sequence[str], body: t.Iterable[t.Sequence[str]]) -> str:
    lines = ["| %s |" % " | ".join(row) for row in (head, *body)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]]) + "\n"


def rules() -> str:
    body = []
    for rule in _audit_rules.RULES.values():
        directive = "`%s=`" % rule.directive if rule.directive else "the whole unit"
        cure = rule.cure + (". *Drop-in*" if rule.sets else "")
        body.append(("`%s`" % rule.id, rule.severity, "%s: %s" % (directive, rule.when), rule.why, cure, rule.known))
    return rows(("rule", "severity", "found where", "what comes of it", "cure", "how it is known"), body)


def times() -> str:
    body = []
    for profile in _profiles.PROFILES.values():
        load = "not judged: it loads when it is asked" if profile.loads_on_request else "300 s"
        drain = "%d s" % profile.stop_timeout if profile.stop_timeout else "not judged"
        body.append(("`%s`" % profile.name, load, drain))
    return rows(("engine", "a load", "to end"), body)


TABLES: t.Dict[str, t.Callable[[], str]] = {"rules": rules, "times": times}


def rendered(page: str) -> str:
    """The page with every table as the data has it now."""
    return MARKED.sub(lambda m: "<!-- table: %s -->\n%s<!-- end -->\n" % (m.group(1), TABLES[m.group(1)]()), page)


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
