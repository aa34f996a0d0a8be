#!/usr/bin/env python3
# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Client traffic through the gateway: many workers, no retries, every failure kept with its cause.

SIGTERM, or the end of --duration, lets what is in flight finish; then the report is written. While it runs, the file
REPORT.live says twice a second how things stand.
"""

from __future__ import annotations

import argparse
import collections
import http.client
import json
import random
import signal
import statistics
import sys
import threading
import time
import typing as t
import urllib.parse
from pathlib import Path

_SHORT_TOKENS = (8, 24)
_CALIBRATION_TOKENS = 10


class Failure(Exception):
    """One request went wrong; `cause` is one of connect, status, broken, truncated, empty, timeout."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause


class Tally:
    """What happened so far; every method may be called from any thread."""

    def __init__(self, full: int) -> None:
        self.full = full  # from this many in flight on, the least is recorded
        self.requests = 0
        self.in_flight = 0
        self.streams_open = 0
        self.least: int | None = None
        self.stopping = False
        self.failures: list[dict[str, t.Any]] = []
        self.streams: list[float] = []
        self.shorts: list[float] = []
        self.backends: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        self._first = time.monotonic()

    def begin(self, streamed: bool) -> None:
        with self._lock:
            self.requests += 1
            self.in_flight += 1
            self.streams_open += streamed
            if self.least is None and self.in_flight >= self.full:
                self.least = self.in_flight

    def end(self, streamed: bool) -> None:
        with self._lock:
            self.in_flight -= 1
            self.streams_open -= streamed
            if self.least is not None and not self.stopping:
                self.least = min(self.least, self.in_flight)

    def succeeded(self, streamed: bool, seconds: float, backend: str) -> None:
        with self._lock:
            (self.streams if streamed else self.shorts).append(seconds)
            self.backends[backend] += 1

    def failed(self, streamed: bool, seconds: float, failure: Failure, backend: str) -> None:
        with self._lock:
            self.failures.append(
                {
                    "at": round(time.monotonic() - self._first, 2),
                    "wall": round(time.time(), 2),
                    "kind": "stream" if streamed else "short",
                    "cause": failure.cause,
                    "detail": str(failure),
                    "seconds": round(seconds, 2),
                    "backend": backend,
                }
            )

    def stop(self) -> None:
        with self._lock:
            self.stopping = True

    def live(self) -> dict[str, t.Any]:
        with self._lock:
            return {
                "in_flight": self.in_flight,
                "requests": self.requests,
                "failed": len(self.failures),
                "streams_open": self.streams_open,
            }

    def summary(self) -> dict[str, t.Any]:
        with self._lock:
            streams = sorted(self.streams)
            causes = collections.Counter(failure["cause"] for failure in self.failures)
            return {
                "requests": self.requests,
                "failed": len(self.failures),
                "causes": dict(causes),
                "failures": self.failures,
                "streams": len(streams),
                "shortest_stream": round(streams[0], 2) if streams else 0.0,
                "median_stream": round(statistics.median(streams), 2) if streams else 0.0,
                "longest_stream": round(streams[-1], 2) if streams else 0.0,
                "shorts": len(self.shorts),
                "longest_short": round(max(self.shorts), 2) if self.shorts else 0.0,
                "least_in_flight": self.least or 0,
                "in_flight": self.in_flight,
                "backends": dict(self.backends),
                "seconds": round(time.monotonic() - self._first, 1),
            }


class Client:
    """Sends requests to one address; a new connection each, so that no failure can be a stale connection's."""

    def __init__(self, url: str, model: str, timeout: float) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise SystemExit(f"traffic: '{url}' is not understood: write http://HOST:PORT.")
        self.host, self.port = parts.hostname, parts.port or 80
        self.model = model
        self.timeout = timeout

    def complete(self, tokens: int, stream: bool, seen: list[str]) -> None:
        """Ask for so many tokens and check that they came; the name of the backend is put into *seen*."""
        body = {
            "model": self.model,
            "prompt": f"{random.getrandbits(64):016x} say something",
            "max_tokens": tokens,
            "stream": stream,
            "ignore_eos": True,
        }
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)
        try:
            try:
                connection.connect()
            except OSError as exc:
                raise Failure("connect", f"{type(exc).__name__}: {exc}") from exc
            try:
                connection.request(
                    "POST",
                    "/v1/completions",
                    json.dumps(body),
                    {"Content-Type": "application/json", "Connection": "close"},
                )
                answer = connection.getresponse()
                seen.append(answer.getheader("x-backend") or "unknown")
                if answer.status != 200:
                    raise Failure("status", f"{answer.status}: {answer.read(300).decode('utf-8', 'replace').strip()}")
                if stream:
                    self._read_stream(answer)
                else:
                    self._read_whole(answer, tokens)
            except TimeoutError as exc:
                raise Failure("timeout", f"nothing for {self.timeout:g} s") from exc
            except (OSError, http.client.HTTPException) as exc:
                raise Failure("broken", f"{type(exc).__name__}: {exc}") from exc
        finally:
            connection.close()

    @staticmethod
    def _read_stream(answer: http.client.HTTPResponse) -> None:
        finish, done, events = None, False, 0
        for raw in answer:
            line = raw.decode("utf-8", "replace").strip()
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                done = True
                continue
            try:
                event = json.loads(data)
            except ValueError:
                raise Failure("truncated", f"the stream broke off within an event after {events} events") from None
            if "error" in event:
                raise Failure("status", f"in the stream: {json.dumps(event['error'])[:300]}")
            events += 1
            finish = event["choices"][0].get("finish_reason") or finish
        if finish is None or not done:
            raise Failure("truncated", f"the stream ended after {events} events without its end mark")

    @staticmethod
    def _read_whole(answer: http.client.HTTPResponse, tokens: int) -> None:
        data = answer.read()
        try:
            got = json.loads(data)["usage"]["completion_tokens"]
        except (ValueError, KeyError, TypeError):
            raise Failure("truncated", f"no completion in {len(data)} bytes") from None
        if got < tokens:
            raise Failure("empty", f"{got} of {tokens} tokens")


def calibrate(client: Client) -> float:
    """Return the seconds per token of one stream; the engine decides it, so the client measures it."""
    started = time.monotonic()
    client.complete(_CALIBRATION_TOKENS, True, [])
    return max((time.monotonic() - started) / _CALIBRATION_TOKENS, 1e-4)


def work(client: Client, tally: Tally, stop: threading.Event, options: argparse.Namespace, per_token: float) -> None:
    """One worker: request after request until told to stop."""
    while not stop.is_set():
        streamed = random.random() < options.streams
        seconds = random.uniform(options.stream_seconds, options.stream_seconds * 1.15)
        tokens = max(1, int(seconds / per_token)) if streamed else random.randint(*_SHORT_TOKENS)
        seen: list[str] = []
        tally.begin(streamed)
        started = time.monotonic()
        try:
            client.complete(tokens, streamed, seen)
        except Failure as failure:
            tally.failed(streamed, time.monotonic() - started, failure, (seen or ["none"])[0])
            pause = 0.2  # this request is lost and counted; the pause only keeps a dead gateway from being flooded
        else:
            tally.succeeded(streamed, time.monotonic() - started, seen[0])
            pause = 0.0
        finally:
            tally.end(streamed)
        if pause:
            stop.wait(pause)


def write(path: Path, value: dict[str, t.Any]) -> None:
    """Write whole or not at all, so that a reader never meets half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    aside.rename(path)


def arguments(argv: t.Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="address of the gateway")
    parser.add_argument("--report", required=True, type=Path, help="where the report is written")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--workers", type=int, default=24, help="requests in flight (24)")
    parser.add_argument("--streams", type=float, default=0.6, help="share of requests that are long streams (0.6)")
    parser.add_argument("--stream-seconds", type=float, default=10.2, help="how long a stream lasts at least (10.2)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds of silence that are a failure (60)")
    parser.add_argument("--duration", type=float, default=600.0, help="seconds after which it stops by itself (600)")
    return parser.parse_args(argv)


def main(argv: t.Sequence[str] | None = None) -> int:
    """Run until told to stop; exit 1 when a request failed."""
    options = arguments(argv)
    client = Client(options.url, options.model, options.timeout)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        per_token = calibrate(client)
    except Failure as failure:
        print(f"traffic: '{options.url}' does not serve: {failure.cause}: {failure}", file=sys.stderr)
        return 2
    print(f"traffic: {options.workers} workers, {per_token * 1000:.1f} ms a token", flush=True)
    tally = Tally(full=options.workers)
    workers = [
        threading.Thread(target=work, args=(client, tally, stop, options, per_token)) for _ in range(options.workers)
    ]
    for worker in workers:
        worker.start()
    live = options.report.with_name(options.report.name + ".live")
    end = time.monotonic() + options.duration
    while not stop.is_set() and time.monotonic() < end:
        write(live, tally.live())
        stop.wait(0.5)
    tally.stop()
    stop.set()
    for worker in workers:
        worker.join()
    write(live, tally.live())
    summary = tally.summary()
    write(options.report, summary)
    print(f"traffic: {summary['requests']} requests, {summary['failed']} failed", flush=True)
    return 1 if summary["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
