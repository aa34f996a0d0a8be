#!/usr/bin/env python3
# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A simulated inference engine in one file: the process tree, the log and the bugs of real ones, without a GPU.

A front answers HTTP; schedulers load, hold whatever ``--wrapper`` makes them hold, and may outlive the front.
It runs with the standard library of Python 3.9, on lab hosts as well.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shlex
import signal
import socketserver
import ssl
import subprocess
import sys
import threading
import time
import typing as t
from http.server import BaseHTTPRequestHandler

BUGS = (
    "",
    "hang_post",  # GETs answer, POST never does
    "headers_only",  # status and headers at once, the body never
    "trickle",  # headers one byte at a time
    "error_500",
    "error_400",
    "error_503",
    "empty",  # status 200 without a token
    "empty_text",  # a token that decodes to nothing
    "wrong_model",
    "html",
    "endless",
    "redirect",
    "hang_up",
    "hang_later",  # like hang_post, but after the prompt has been read in and one token was made
    "busy",  # like hang_post, but the token counters move
    "no_stream",  # streaming requests are refused with status 400
)

TITLES = {
    "sglang": ("sglang::launch", "sglang::scheduler_TP%d"),
    "vllm": ("VLLM::APIServer_0", "VLLM::EngineCore_DP%d"),
    "llama_cpp": ("llama-server", "llama-worker-%d"),
    "ovms": ("ovms", "worker-%d"),
    "triton": ("tritonserver", "triton_python_backend_stub_%d"),
    "tgi": ("text-generation-router", "text-generation-server-%d"),
    "ollama": ("ollama", "ollama-runner-%d"),
    "openai": ("engine", "worker-%d"),
}
OPEN_EARLY = ("llama_cpp", "ovms", "ollama")  # their port is open before the load is over
HEALTH = {"ovms": "/v2/health/ready", "triton": "/v2/health/ready", "ollama": "/api/version"}
MODELS = {"ovms": ("GET", "/v1/config"), "triton": ("POST", "/v2/repository/index"), "ollama": ("GET", "/api/tags")}
OWNERS = {"sglang": "sglang", "vllm": "vllm", "llama_cpp": "llamacpp"}
METRICS = {
    "sglang": ("num_running_reqs", "num_queue_reqs", "generation_tokens_total", "prompt_tokens_total"),
    "vllm": ("num_requests_running", "num_requests_waiting", "generation_tokens_total", "prompt_tokens_total"),
    "llama_cpp": ("requests_processing", "requests_deferred", "n_decode_total", "prompt_tokens_total"),
}
LOAD_LINES = {
    "sglang": ("Init torch distributed begin.", "Load weight begin. avail mem=44.9 GB", "Load weight end."),
    "vllm": ("Starting to load model", "Loading weights took %d seconds", "Available KV cache memory: 30 GiB"),
    "llama_cpp": ("load_model: loading model 'm.gguf'", "warming up the model with an empty run"),
    "ovms": ('Loading model: {"state": "LOADING", "error_code": "OK"}',),
    "triton": ("loading: tiny:1",),
    "tgi": ("Starting shard rank=0",),
    "ollama": ("starting llama server",),
    "openai": ("loading",),
}


STEP = 0.2  # seconds of one step of a load


def say(text: str) -> None:
    print(text, flush=True)


def note(options: argparse.Namespace, what: str) -> None:
    """Write down the moment of something that a bench compares with what a wait says."""
    if options.moments:
        with open(options.moments, "a", encoding="ascii") as stream:
            stream.write("%s %.6f\n" % (what, time.time()))


def set_title(title: str) -> None:
    """Rename this process as setproctitle does: over its arguments and its environment, which are then gone."""
    with open("/proc/self/comm", "w", encoding="utf-8") as handle:
        handle.write(title[:15])
    with open("/proc/self/stat", "rb") as handle:
        fields = handle.read().rpartition(b")")[2].split()
    begin, end = int(fields[45]), int(fields[48])  # arg_start, env_end
    if begin and end > begin:
        size = end - begin
        ctypes.memmove(begin, title.encode()[: size - 1].ljust(size, b"\0"), size)


class State:
    """What the front knows: its load, and whether its schedulers live."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.ready = threading.Event()
        self.asked = 0
        self.lock = threading.Lock()
        self.running = 0
        self.tokens = 0
        self.prompt = 0
        self.draining = False
        self.bug = str(options.bug)

    def add(self, running: int = 0, tokens: int = 0, prompt: int = 0) -> None:
        with self.lock:
            self.running += running
            self.tokens += tokens
            self.prompt += prompt

    def bug_of_next(self) -> str:
        """The bug that the next request for tokens meets: the first so many, or all."""
        with self.lock:
            self.asked += 1
            return self.bug if not self.options.bug_times or self.asked <= self.options.bug_times else ""


def endpoints(state: State) -> t.Sequence[str]:
    """Where tokens are to be had."""
    if state.options.engine == "triton":
        return ("/v2/models/%s/generate" % state.options.model,)
    version = "/v3" if state.options.engine == "ovms" else "/v1"
    return (version + "/completions", version + "/chat/completions")


def listing(state: State) -> t.Any:
    """The list of models, in the shape of the engine."""
    engine, name = state.options.engine, state.options.model
    if engine == "ovms":
        word = "AVAILABLE" if state.ready.is_set() else "LOADING"
        version = {"version": "1", "state": word, "status": {"error_code": "OK", "error_message": "OK"}}
        return {name: {"model_version_status": [version]}}
    if engine == "triton":
        return [{"name": name, "version": "1", "state": "READY"}]
    if engine == "ollama":
        return {"models": [{"name": name + ":latest", "model": name + ":latest"}]}
    return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": OWNERS.get(engine, "somebody")}]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: State

    def log_message(self, format: str, *args: t.Any) -> None:
        """An access log would count as movement."""

    def do_GET(self) -> None:
        state, path = self.state, self.path.split("?")[0]
        engine = state.options.engine
        if state.bug == "html":
            self._send(200, "<!DOCTYPE html><title>a chat</title>", "text/html")
        elif path == HEALTH.get(engine, "/health"):
            up = (state.ready.is_set() or engine == "ollama") and not state.draining
            body = {"status": "ok"} if up else {"error": {"code": 503, "message": "Loading model"}}
            self._send(200 if up else 503, json.dumps(body))
        elif not self._allowed():
            self._send(401, json.dumps({"error": {"message": "Invalid API Key"}}))
        elif ("GET", path) == MODELS.get(engine, ("GET", "/v1/models")):
            self._send(200, json.dumps(listing(state)))
        elif path == "/metrics" and engine in METRICS and not state.options.no_metrics:
            if state.bug == "busy":
                state.add(tokens=7)
            values = (state.running, 0, state.tokens, state.prompt)
            prefix = engine.replace("_", "")
            rows = zip(METRICS[engine], values)
            text = "".join('%s:%s{model_name="m"} %d\n' % (prefix, *row) for row in rows)
            self._send(200, "# HELP x y\n" + text, "text/plain; version=0.0.4")
        else:
            self._send(404, json.dumps({"detail": "Not Found"}))

    def do_POST(self) -> None:
        state, bug, asked = self.state, "", self.path in endpoints(self.state)
        if asked:
            bug = state.bug_of_next()
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
        if not self._allowed():
            self._send(401, json.dumps({"error": {"message": "Invalid API Key"}}))
        elif ("POST", self.path) == MODELS.get(state.options.engine):
            self._send(200, json.dumps(listing(state)))
        elif not asked:
            self._send(404, json.dumps({"detail": "Not Found"}))
        elif bug in ("hang_post", "hang_later", "busy") or not state.ready.wait(self._patience()):
            if bug == "hang_later":
                state.add(prompt=40, tokens=1)
            time.sleep(3600)
        elif bug.startswith("error_") or (bug == "no_stream" and body.get("stream")):
            status = 400 if bug == "no_stream" else int(bug[6:])
            self._send(status, json.dumps({"error": {"message": "something broke inside"}}))
        elif bug:
            self._misbehave(bug, body)
        else:
            self._generate(body, bug)

    def _patience(self) -> float:
        """One that loads when it is first asked keeps that request until it is loaded."""
        return 3600.0 if self.state.options.engine == "ollama" else 0.0

    def _allowed(self) -> bool:
        key = self.state.options.api_key
        return not key or self.headers.get("authorization") == "Bearer " + key

    def _misbehave(self, bug: str, body: t.Dict[str, t.Any]) -> None:
        if bug in ("headers_only", "endless"):
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
            while bug == "endless":
                self.wfile.write(b" " * 65536)
            time.sleep(3600)
        elif bug == "trickle":
            for _ in range(3600):
                self.wfile.write(b"H")
                time.sleep(1)
        elif bug == "redirect":
            self.send_response(307)
            self.send_header("Location", self.state.options.redirect_to)
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif bug == "hang_up":
            self.close_connection = True
        elif bug == "html":
            self._send(200, "<!DOCTYPE html><title>a chat</title>", "text/html")
        else:
            self._generate(body, bug)

    def _generate(self, body: t.Dict[str, t.Any], bug: str) -> None:
        state = self.state
        state.add(running=1)
        try:
            self._tokens(body, bug, int(body.get("max_tokens") or 16))
        finally:
            state.add(running=-1)

    def _tokens(self, body: t.Dict[str, t.Any], bug: str, count: int) -> None:
        state = self.state
        model = "another" if bug == "wrong_model" else state.options.model
        chat = "chat" in self.path
        word = "" if bug in ("empty", "empty_text") else "w "
        count = 0 if bug == "empty" else count
        usage = {"prompt_tokens": 5, "completion_tokens": count, "total_tokens": 5 + count}
        end = "stop" if bug == "empty" else "length"
        if not body.get("stream") or self.path.startswith("/v2/"):
            time.sleep(state.options.token_delay * count)
            state.add(tokens=count)
            if self.path.startswith("/v2/"):
                self._send(200, json.dumps({"model_name": model, "model_version": "1", "text_output": word * count}))
                return
            part = {"message": {"content": word * count}} if chat else {"text": word * count}
            choice = dict(part, index=0, finish_reason=end)
            self._send(200, json.dumps({"model": model, "choices": [choice], "usage": usage}))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(count):
            time.sleep(state.options.token_delay)
            state.add(tokens=1)
            part = {"delta": {"content": word}} if chat else {"text": word}
            last = end if number == count - 1 and bug != "empty_text" else None
            self._event({"model": model, "choices": [dict(part, index=0, finish_reason=last)]})
        if (body.get("stream_options") or {}).get("include_usage"):
            self._event({"model": model, "choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, reply: t.Dict[str, t.Any]) -> None:
        self._chunk(b"data: %s\n\n" % json.dumps(reply).encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _send(self, status: int, body: str, kind: str = "application/json") -> None:
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: t.Any, client_address: t.Any) -> None:
        """A client that went away is not worth a traceback."""


def load(options: argparse.Namespace) -> None:
    """Spend the time that loading takes, saying what such an engine says."""
    began = time.monotonic()
    end = began + options.load
    held: t.List[bytearray] = []
    step, steps = 0, max(1, int(options.load / STEP))
    with open("/dev/zero", "rb", buffering=0) as weights:
        while time.monotonic() < end:
            if options.freeze_after is not None and time.monotonic() - began >= options.freeze_after:
                note(options, "frozen")
                time.sleep(max(0.0, end - time.monotonic()))
                break
            step += 1
            say_step(options, step, steps)
            for _ in range(int(options.read * STEP)):
                weights.read(1 << 20)
            if options.grow:
                held.append(bytearray(b"x") * int(options.grow * STEP * (1 << 20)))
            until = min(end, began + step * STEP)
            while options.burn and time.monotonic() < until:
                pass
            time.sleep(max(0.0, until - time.monotonic()))
    if options.log == "bar":
        say("")


def say_step(options: argparse.Namespace, step: int, steps: int) -> None:
    """One step of a load, as the log of such an engine shows it."""
    lines = LOAD_LINES[options.engine]
    percent = min(100, 100 * step // steps)
    bar = "Loading safetensors checkpoint shards: %3d%% Completed | %d/%d" % (percent, step, steps)
    if options.log == "normal" and step <= len(lines):
        say(lines[step - 1] % step if "%d" in lines[step - 1] else lines[step - 1])
    elif options.log == "repeat":
        say("%s Waiting for shard to be ready... rank=0" % time.strftime("%H:%M:%S"))
    elif options.log in ("tqdm", "bar"):
        # The journal gets a bar when somebody else ends its line; a file has it at once.
        sys.stdout.write("\r" + bar + ("\n" if options.log == "tqdm" and step % 3 == 0 else ""))
        sys.stdout.flush()
    elif options.log == "noise":
        # Bytes that are no text, a line beyond any limit, and the one line that counts between them.
        sys.stdout.buffer.write(b"\xff\xfe\xc3\x28\x1b[31m" + bar.encode() + b"\x1b[0m\n")
        sys.stdout.buffer.write((b"\xe2\x28" + b"x" * (1 << 17) + b"\n") if step % 10 == 0 else b"")
        sys.stdout.buffer.flush()


def die_later(options: argparse.Namespace) -> None:
    def die() -> None:
        for words in options.last_words:
            say(words)
        os._exit(options.exit_code)

    if options.crash_after is not None and not survives(options):
        threading.Timer(options.crash_after, die).start()


def survives(options: argparse.Namespace) -> bool:
    """Whether this life is one of those after the crashes; without a note of the lives, each crashes."""
    if not options.lives:
        return False
    with open(options.lives, "a+", encoding="ascii") as stream:
        stream.write(".")
        return stream.tell() > options.crashes


def scheduler(options: argparse.Namespace) -> int:
    """A scheduler: load, say so to the front, then stay until told to end, or for ever."""
    if options.worker_on_term == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    set_title(TITLES[options.engine][1] % options.number)
    load(options)
    os.write(options.ready_fd, b"r")
    while True:
        time.sleep(3600)


def start_scheduler(options: argparse.Namespace, number: int, ready_fd: int) -> t.Optional[subprocess.Popen[bytes]]:
    """Start one as the topology wants it; a daemonised one is nobody's child from its first moment on."""
    command = [*shlex.split(options.wrapper or ""), sys.executable, os.path.abspath(__file__), *sys.argv[1:]]
    command += ["--role", "scheduler", "--number", str(number), "--ready-fd", str(ready_fd)]
    if options.topology != "daemon":
        return subprocess.Popen(command, pass_fds=[ready_fd], start_new_session=options.topology == "session")
    if os.fork() == 0:
        os.setsid()
        subprocess.Popen(command, pass_fds=[ready_fd])
        os._exit(0)
    os.wait()
    return None


def watch(options: argparse.Namespace, state: State, reader: int) -> None:
    """Wait until every scheduler is loaded, and notice when the last one is gone."""
    loaded = 0
    while True:
        got = os.read(reader, 1)
        if not got:
            break
        loaded += 1
        if loaded == options.workers:
            say("The server is fired up and ready to roll!")
            state.ready.set()
    say("Received sigquit from a child proces. It usually means the child failed.")
    os._exit(1)


def tell_first_token(options: argparse.Namespace, state: State) -> None:
    """From now on a token is possible: the port is open, and the load is over."""
    state.ready.wait()
    note(options, "token")


def front(options: argparse.Namespace) -> int:
    state = State(options)
    children: t.List[subprocess.Popen[bytes]] = []

    def on_term(_number: int, _frame: t.Any) -> None:
        state.draining = True
        threading.Thread(target=leave, daemon=True).start()

    def leave() -> None:
        while options.on_term == "drain" and state.running:
            say("Gracefully exiting... remaining number of requests %d" % (state.running))
            time.sleep(0.2)
        for child in children:
            child.terminate()
        os._exit(0)

    note(options, "born")
    signal.signal(signal.SIGTERM, signal.SIG_IGN if options.on_term == "ignore" else on_term)
    say("server_args=ServerArgs(model_path='%s', port=%d)" % (options.model, options.port))
    die_later(options)
    if options.workers:
        reader, writer = os.pipe()
        for number in range(options.workers):
            child = start_scheduler(options, number, writer)
            if child is not None:
                children.append(child)
        os.close(writer)
        threading.Thread(target=watch, args=(options, state, reader), daemon=True).start()
    set_title(TITLES[options.engine][0])
    if not options.workers:
        if options.engine in OPEN_EARLY:
            threading.Thread(target=lambda: (load(options), state.ready.set()), daemon=True).start()
        else:
            load(options)
            state.ready.set()
    elif options.engine not in OPEN_EARLY:
        state.ready.wait()
    Handler.state = state
    try:
        server = Server((options.host, options.port), Handler)
    except OSError as error:
        say("[Errno %d] error while attempting to bind on address: address already in use" % (error.errno or 0))
        return 1
    if options.tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options.tls)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=tell_first_token, args=(options, state), daemon=True).start()
    say("Application startup complete.")
    server.serve_forever()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--engine", choices=sorted(TITLES), default="sglang")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--api-key")
    parser.add_argument("--tls", help="a file with a key and its certificate: speak HTTPS")
    parser.add_argument("--no-metrics", action="store_true")
    parser.add_argument("--load", type=float, default=0.5, help="seconds that loading takes")
    parser.add_argument(
        "--log", choices=["normal", "silent", "repeat", "tqdm", "bar", "noise"], default="normal", help="while loading"
    )
    parser.add_argument("--burn", action="store_true", help="keep a core busy while loading")
    parser.add_argument("--read", type=float, default=0, help="MiB a second that are read while loading")
    parser.add_argument("--grow", type=float, default=0, help="MiB a second that are filled while loading")
    parser.add_argument("--freeze-after", type=float, help="seconds into the load after which nothing moves any more")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--topology", choices=["child", "session", "daemon"], default="child")
    parser.add_argument("--wrapper", help="command that the schedulers are started through, such as gpu-hold ... --")
    parser.add_argument("--on-term", choices=["exit", "drain", "ignore"], default="exit")
    parser.add_argument("--worker-on-term", choices=["exit", "ignore"], default="exit")
    parser.add_argument("--crash-after", type=float)
    parser.add_argument("--lives", help="a file that counts the lives, so that only the first --crashes of them crash")
    parser.add_argument("--crashes", type=int, default=1)
    parser.add_argument("--exit-code", type=int, default=1)
    parser.add_argument("--last-words", action="append", default=[])
    parser.add_argument(
        "--moments", help="a file for the moments of birth, of freezing and of the first possible token"
    )
    parser.add_argument("--token-delay", type=float, default=0.01)
    parser.add_argument("--bug", choices=BUGS, default="")
    parser.add_argument("--bug-times", type=int, default=0, help="so many requests for tokens meet the bug; 0 is all")
    parser.add_argument("--redirect-to", default="http://localhost:1/v1/completions")
    parser.add_argument("--role", choices=["front", "scheduler"], default="front")
    parser.add_argument("--number", type=int, default=0)
    parser.add_argument("--ready-fd", type=int, default=-1)
    options = parser.parse_args()
    return scheduler(options) if options.role == "scheduler" else front(options)


if __name__ == "__main__":
    sys.exit(main())
