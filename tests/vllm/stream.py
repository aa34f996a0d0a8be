# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A client that asks for a long stream and writes down, as it comes, what became of it; runs on the host."""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


def main(url: str, key: str, tokens: int, report: Path) -> None:
    body = {"model": "tiny", "prompt": "Say something.", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)
    found: dict[str, object] = {"finish": None, "error": None, "status": None}
    events = 0
    began = time.monotonic()

    def write(over: bool) -> None:
        found.update(over=over, events=events, seconds=round(time.monotonic() - began, 2))
        fresh = report.with_suffix(".new")
        fresh.write_text(json.dumps(found), encoding="utf-8")
        fresh.rename(report)

    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            found["status"] = answer.status
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                events += 1
                choices = json.loads(line[6:]).get("choices") or [{}]
                found["finish"] = choices[0].get("finish_reason") or found["finish"]
                write(False)
    except urllib.error.HTTPError as error:
        found["status"] = error.code
    except OSError as error:
        found["error"] = repr(error)
    write(True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
