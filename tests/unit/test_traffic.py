# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import http.server
import json
import threading
import time
import typing as t
from pathlib import Path

import pytest
import traffic


class Engine(http.server.BaseHTTPRequestHandler):
    """Answers as its server's `way` says."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        way = t.cast(t.Any, self.server).way
        if way == "status":
            self.send_error(503)
            return
        if way == "broken":
            self.close_connection = True
            return
        self.send_response(200)
        self.send_header("x-backend", "gpu1")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        time.sleep(0.02)
        if not body["stream"]:
            tokens = 0 if way == "empty" else body["max_tokens"]
            text = json.dumps({"choices": [{"text": "x"}], "usage": {"completion_tokens": tokens}})
            self.wfile.write(text[: len(text) // 2 if way == "truncated" else None].encode())
            return
        finish = None if way == "unfinished" else "length"
        self.wfile.write(b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n')
        self.wfile.write(f"data: {json.dumps({'choices': [{'text': '', 'finish_reason': finish}]})}\n\n".encode())
        if way != "truncated":
            self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: t.Any) -> None:
        pass


@pytest.fixture
def engine() -> t.Iterator[t.Any]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def url(server: t.Any) -> str:
    return f"http://127.0.0.1:{server.server_port}"


@pytest.mark.parametrize(
    ("way", "stream", "cause"),
    [
        ("status", False, "status"),
        ("status", True, "status"),
        ("broken", False, "broken"),
        ("broken", True, "broken"),
        ("empty", False, "empty"),
        ("truncated", False, "truncated"),
        ("truncated", True, "truncated"),
        ("unfinished", True, "truncated"),
    ],
)
def test_each_failure_has_its_cause(engine: t.Any, way: str, stream: bool, cause: str) -> None:
    engine.way = way
    with pytest.raises(traffic.Failure) as caught:
        traffic.Client(url(engine), "tiny", 5).complete(4, stream, [])
    assert caught.value.cause == cause


@pytest.mark.parametrize("stream", [False, True])
def test_a_whole_answer_is_no_failure(engine: t.Any, stream: bool) -> None:
    engine.way = "ok"
    seen: list[str] = []
    traffic.Client(url(engine), "tiny", 5).complete(4, stream, seen)
    assert seen == ["gpu1"]


def test_nobody_listening() -> None:
    with pytest.raises(traffic.Failure) as caught:
        traffic.Client("http://127.0.0.1:1", "tiny", 5).complete(4, False, [])
    assert caught.value.cause == "connect"


def test_report_counts_what_was_sent(engine: t.Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic.signal, "signal", lambda *_: None)
    engine.way = "ok"
    report = tmp_path / "report.json"
    argv = ["--url", url(engine), "--report", str(report), "--workers", "4", "--duration", "1"]
    assert traffic.main(argv) == 0
    summary = json.loads(report.read_text(encoding="utf-8"))
    assert summary["failed"] == 0
    assert summary["requests"] == summary["streams"] + summary["shorts"] > 4
    assert summary["backends"] == {"gpu1": summary["requests"]}
    assert summary["in_flight"] == 0
    assert json.loads((tmp_path / "report.json.live").read_text(encoding="utf-8"))["in_flight"] == 0


def test_failures_fail_the_run(engine: t.Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic.signal, "signal", lambda *_: None)
    monkeypatch.setattr(traffic, "calibrate", lambda _: 0.01)
    engine.way = "status"
    report = tmp_path / "report.json"
    assert traffic.main(["--url", url(engine), "--report", str(report), "--workers", "2", "--duration", "0.5"]) == 1
    summary = json.loads(report.read_text(encoding="utf-8"))
    assert summary["failed"] == summary["requests"] > 0
    assert summary["causes"] == {"status": summary["failed"]}
    assert summary["failures"][0]["detail"].startswith("503: ")
