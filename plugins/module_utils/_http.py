# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""One HTTP request with a hard total deadline.

The timeouts of HTTP libraries bound a single read: a server that trickles one byte a second outlives them. So the
exchange runs in a child that is killed at the deadline, which also closes the connection.
"""

from __future__ import annotations

import errno
import functools
import http.client
import json
import os
import re
import socket
import ssl
import stat
import time
import typing as t
from dataclasses import dataclass, field
from urllib.parse import urljoin, urlsplit

from . import _bounded, _foreign, _site
from ._errors import UsageError

__all__ = (
    *("Access", "Answer", "Request"),
    *("check", "exchange", "fetch", "join", "load", "loads", "secrets_of", "unfinished"),
)

MAX_BYTES = 1 << 20
MAX_EVENTS = 256
MAX_REDIRECTS = 3
TLS_PATIENCE = 1.0
CHUNK = 65536
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
HEADER_VALUE = re.compile(r"(?:[\x21-\x7e\xa0-\xff][\t\x20-\x7e\xa0-\xff]*)?\Z")
MOST_CERTIFICATES = 16 << 20  # bytes of a file that holds them
SYSTEM_CA_FILES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")

_AUTHORITY = 'name a file with the certificate of its authority in "ca_path"'
# By the number that OpenSSL gives the problem, with the remedy where there is exactly one.
CERTIFICATE_PROBLEMS = {
    9: "look at the clocks of both hosts",
    10: "renew the certificate of the server",
    18: 'name a file with this certificate in "ca_path"',
    19: _AUTHORITY,
    20: _AUTHORITY,
    21: _AUTHORITY,
    62: "use a name in the URL that the certificate has",
    64: "use an address or name in the URL that the certificate has",
}
NOT_TLS = ("WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")

Note = t.Callable[[t.Dict[str, t.Any]], None]

# Loaded with the first request: that takes longer than most looks at a host, and many of these make none.
requests: t.Any = None
TransportError: t.Type[Exception] = OSError


class Access(t.NamedTuple):
    """How to authenticate to a server, and how it proves itself."""

    api_key: t.Optional[str] = None
    headers: t.Mapping[str, t.Any] = {}
    validate_certs: bool = True
    ca_path: t.Optional[str] = None


class Request(t.NamedTuple):
    """What to ask. With ``stream``, the answer is read as server-sent events."""

    method: str
    url: str
    body: t.Optional[t.Dict[str, t.Any]] = None
    stream: bool = False


@dataclass
class Answer:
    """What came back.

    ``outcome`` is ``answered`` (a whole answer, of whatever status), ``timeout``, ``refused`` (nothing listens),
    ``unreachable`` (no route), ``hung_up`` (closed without a word), ``unresolved``, ``tls``, ``not_http``, ``broken``
    (ended in the middle), ``too_large`` or ``redirected``. Only ``refused`` proves that no server is there.
    """

    url: str
    outcome: str = "answered"
    status: t.Optional[int] = None
    content_type: str = ""
    body: str = ""
    events: t.List[t.Tuple[float, str]] = field(default_factory=list)
    first_byte: t.Optional[float] = None
    elapsed: float = 0.0
    error: str = ""

    @property
    def html(self) -> bool:
        return "html" in self.content_type or self.body.lstrip()[:15].lower().startswith(("<!doctype html", "<html"))


def load() -> None:
    """Have the library that makes requests, before a child is forked that would load it for itself alone."""
    global requests, TransportError
    if requests is None:
        _site.require(("requests",))
        import requests as library
        from urllib3.exceptions import HTTPError

        requests, TransportError = library, HTTPError


def join(base: str, path: str) -> str:
    """The URL of an endpoint. A base that ends in /v1 or /v3, as clients of OpenAI are given it, is understood too."""
    _check_url(base)
    base = base.rstrip("/")
    return (base[: -len("/v1")] if base.endswith(("/v1", "/v3")) else base) + path


def _check_url(url: str) -> None:
    """Refuse what is no URL of a server. What may be a secret is not repeated."""
    shape = "it must be http://HOST:PORT or https://HOST:PORT"
    if "@" in url or "%40" in url:
        raise UsageError(
            'a URL is not usable: it holds a user name or password, which belong in "api_key" or "headers"'
        )
    if "?" in url or "#" in url:
        raise UsageError("a URL is not usable: it holds a query or fragment, but %s" % shape)
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        usable = parts.scheme in ("http", "https") and host != "" and parts.port != 0
        if ":" not in host:
            host.encode("idna")
    except ValueError:
        usable = False
    if not usable or any(letter <= " " or letter == "\x7f" for letter in url):
        raise UsageError('the URL "%s" is not usable: %s' % (url, shape))


def check(access: Access) -> Access:
    """Refuse what no header can carry. It is not repeated, since it may be a key."""
    wrong = "is not usable: it holds a line break or another character that no HTTP header can carry"
    if access.api_key and not HEADER_VALUE.match("x" + access.api_key):
        raise UsageError("the API key " + wrong)
    for name, value in (access.headers or {}).items():
        if not HEADER_NAME.match(str(name)):
            raise UsageError("the name of a header " + wrong)
        if not HEADER_VALUE.match(str(value)):
            raise UsageError('the value of the header "%s" %s' % (name, wrong))
    if access.ca_path is not None:
        _check_certificates(access.ca_path)
    return access


@functools.lru_cache(maxsize=8)
def _check_certificates(path: str) -> None:
    """Refuse what holds no certificates. Only a folder and a regular file are opened: anything else could hang."""
    try:
        facts, context = os.stat(path), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if stat.S_ISDIR(facts.st_mode):
            context.load_verify_locations(capath=path)
        elif not stat.S_ISREG(facts.st_mode):
            raise UsageError('"ca_path" cannot be used: "%s" is neither a regular file nor a folder' % path)
        elif facts.st_size > MOST_CERTIFICATES:
            raise UsageError('"ca_path" cannot be used: "%s" is larger than %d MiB' % (path, MOST_CERTIFICATES >> 20))
        else:
            context.load_verify_locations(cafile=path)
    except ssl.SSLError:
        raise UsageError('"ca_path" cannot be used: "%s" holds no certificate in PEM form' % path) from None
    except OSError as error:
        raise UsageError('"ca_path" cannot be used: "%s" cannot be read: %s' % (path, error.strerror)) from None
    except ValueError:
        raise UsageError('"ca_path" cannot be used: its name holds a null byte') from None


def secrets_of(access: Access) -> t.List[str]:
    """What of it must not be told."""
    return _foreign.secrets_of(access.api_key, access.headers)


def loads(text: str) -> t.Any:
    """What a server sent as JSON; None when it is none. A few brackets are enough to exhaust a parser."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def fetch(request: Request, access: Access, timeout: float, tick: t.Optional[t.Callable[[], None]] = None) -> Answer:
    """Make one request. Whatever the server does, this returns within ``timeout`` seconds."""

    def work(report: Note) -> t.Dict[str, t.Any]:
        return vars(exchange(request, access, timeout, report))

    check(access)
    load()
    outcome = _bounded.run(work, timeout, tick=tick, dies_with_caller=True)
    if outcome.status == "ok":
        return Answer(**outcome.value)
    answer = unfinished(request.url, outcome.partial, timeout)
    if outcome.status == "error":
        answer.outcome, answer.error = "broken", outcome.error
    return answer


def unfinished(url: str, notes: t.Iterable[t.Dict[str, t.Any]], timeout: float) -> Answer:
    """What is known of an exchange that the deadline cut off."""
    answer = Answer(url=url, outcome="timeout", elapsed=timeout)
    for note in notes:
        if "event" in note:
            answer.events.append((note["at"], note["event"]))
        else:
            answer.status, answer.content_type, answer.first_byte = note["status"], note["content_type"], note["at"]
    if answer.status is None:
        answer.error = "no answer within %g s" % timeout
    else:
        answer.error = "status %d after %.1f s, but no end of the answer within %g s" % (
            answer.status,
            answer.first_byte or 0.0,
            timeout,
        )
    return answer


def exchange(request: Request, access: Access, timeout: float, note: Note) -> Answer:
    """The exchange itself, unbounded: call it in a child only. ``note`` gets what is worth keeping if it is cut off."""
    load()
    began = time.monotonic()
    answer = Answer(url=request.url)
    try:
        with requests.Session() as session:
            # Neither proxies nor credentials from the environment: the key goes to the named host and nowhere else.
            session.trust_env = False
            response = _open(session, request, access, timeout, answer)
            if response is not None:
                with response:
                    answer.first_byte = time.monotonic() - began
                    answer.status = response.status_code
                    answer.content_type = response.headers.get("content-type", "").lower()
                    note({"status": answer.status, "content_type": answer.content_type, "at": answer.first_byte})
                    _read(response, request.stream, answer, began, note)
    except (requests.RequestException, TransportError, OSError, ValueError) as error:
        answer.outcome, answer.error = _explain(error, answer)
        if answer.outcome in ("hung_up", "not_http") and _speaks_tls(request.url):
            answer.outcome, answer.error = "tls", "it speaks HTTPS: use https:// in the URL"
    answer.elapsed = time.monotonic() - began
    return answer


def _speaks_tls(url: str) -> bool:
    """Whether who was asked in plain HTTP, and gave no answer, takes up TLS. Nothing is sent but its greeting."""
    parts = urlsplit(url)
    if parts.scheme != "http":
        return False
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 80), TLS_PATIENCE) as link:
            with context.wrap_socket(link, server_hostname=parts.hostname):
                return True
    except ssl.SSLError as error:
        # An alert is TLS too: it wants another version, or a certificate of ours.
        return "ALERT" in str(error.reason or "")
    except (OSError, ValueError):
        return False


def _open(session: t.Any, request: Request, access: Access, timeout: float, answer: Answer) -> t.Optional[t.Any]:
    """The response, after redirects within the same origin; one that leads elsewhere is not followed."""
    headers = {"Accept-Encoding": "identity", "User-Agent": "gpuops.serving"}
    headers.update({str(name): str(value) for name, value in (access.headers or {}).items()})
    if access.api_key:
        headers["Authorization"] = "Bearer " + access.api_key
    url = request.url
    for _ in range(MAX_REDIRECTS + 1):
        response = session.request(
            request.method,
            url,
            json=request.body,
            headers=headers,
            stream=True,
            allow_redirects=False,
            verify=_verify(access),
            timeout=timeout,
        )
        if not response.is_redirect:
            return response
        target = urljoin(url, response.headers["location"])
        answer.status = response.status_code
        response.close()
        if _origin(target) != _origin(url) or (request.method != "GET" and response.status_code not in (307, 308)):
            answer.outcome = "redirected"
            answer.error = 'redirected to "%s", which is not followed' % _foreign.place(target)
            return None
        url = target
    answer.outcome, answer.error = "redirected", "more than %d redirects" % MAX_REDIRECTS
    return None


def _verify(access: Access) -> t.Union[bool, str]:
    if not access.validate_certs:
        return False
    if access.ca_path:
        return access.ca_path
    # The system's certificates, where an internal authority is installed, rather than those that travel with requests.
    return next((path for path in SYSTEM_CA_FILES if os.path.exists(path)), True)


def _origin(url: str) -> t.Tuple[str, str, t.Optional[int]]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _chunks(response: t.Any) -> t.Iterator[bytes]:
    """The body as it arrives. Older urllib3 can hand out less than a full block only of a chunked body."""
    read1 = getattr(response.raw, "read1", None)
    if read1 is None:
        yield from response.iter_content(512)
        return
    while True:
        chunk = read1(CHUNK)
        if not chunk:
            return
        yield chunk


def _read(response: t.Any, stream: bool, answer: Answer, began: float, note: Note) -> None:
    events = stream and "text/event-stream" in answer.content_type
    size, parts, pending = 0, [], b""
    for chunk in _chunks(response):
        size += len(chunk)
        if size > MAX_BYTES:
            answer.outcome = "too_large"
            answer.error = "the answer is larger than %d KiB" % (MAX_BYTES // 1024)
            break
        if not events:
            parts.append(chunk)
            continue
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and len(answer.events) < MAX_EVENTS:
                at, text = time.monotonic() - began, line[5:].strip().decode("utf-8", "replace")
                answer.events.append((at, text))
                note({"event": text, "at": at})
    answer.body = b"".join(parts)[:MAX_BYTES].decode("utf-8", "replace")


def _causes(error: BaseException) -> t.Iterator[BaseException]:
    """An error and everything that it wraps."""
    pending, seen = [error], set()
    while pending:
        one = pending.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        inner = [one.__cause__, one.__context__, getattr(one, "reason", None), *one.args]
        pending.extend(item for item in inner if isinstance(item, BaseException))


def _tls_problem(error: ssl.SSLError) -> str:
    """What is wrong with the certificate, and what is to be done about it."""
    known = CERTIFICATE_PROBLEMS.get(getattr(error, "verify_code", 0))
    if known is not None:
        return "%s: %s" % (getattr(error, "verify_message", "").rstrip("."), known)
    reason = str(getattr(error, "reason", "") or "")
    if reason in NOT_TLS:
        return "the server does not speak it: use http:// in the URL"
    return str(getattr(error, "verify_message", "") or reason or error)


def _explain(error: BaseException, answer: Answer) -> t.Tuple[str, str]:
    """The outcome and one sentence for a failed exchange."""
    load()
    causes = list(_causes(error))
    numbers = [cause.errno for cause in causes if isinstance(cause, OSError) and cause.errno is not None]
    for cause in causes:
        if isinstance(cause, ssl.SSLError):
            return "tls", "TLS failed: %s" % _tls_problem(cause)
        if isinstance(cause, socket.gaierror):
            return "unresolved", "the host name cannot be resolved: %s" % cause.strerror
        if isinstance(cause, requests.exceptions.Timeout):
            return "timeout", "no connection or no answer in time"
    if errno.ECONNREFUSED in numbers:
        return "refused", "connection refused"
    if errno.EHOSTUNREACH in numbers or errno.ENETUNREACH in numbers:
        return "unreachable", "no route to the host"
    if answer.status is None and any(isinstance(cause, ConnectionError) for cause in causes):
        # A forwarder whose engine is gone does so, and so does an engine that is overloaded.
        return "hung_up", "the connection was closed without an answer"
    if answer.status is None and any(isinstance(cause, http.client.HTTPException) for cause in causes):
        return "not_http", "what answers does not speak HTTP: look at the port in the URL"
    if answer.status is None:
        return "broken", "the answer is not HTTP: %s" % type(causes[-1]).__name__
    return "broken", "the answer ended in the middle, after status %d" % answer.status
