# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The one-token probe: does a token come back, from the right model, and through the intended route?"""

from __future__ import annotations

import threading
import typing as t
import uuid
from dataclasses import asdict, dataclass
from urllib.parse import quote

from . import _answers, _bounded, _foreign, _http
from ._profile import Profile

__all__ = ("DIRECT", "ROUTE", "Question", "Side", "judge", "overall", "probe", "same_model", "worst")

DIRECT, ROUTE = "direct", "route"
TOLD = 300  # characters of what an answer says
WHOLE = 1 << 16  # characters of an answer in which secrets are looked for before it is cut
# Where an answer counts no tokens, a few are asked for: the first one alone may decode to nothing.
UNCOUNTED_TOKENS = 8
MOST_TOKENS = 1 << 53  # a count above that, or one that is no number, is no count
FAILED_ENDS = ("error", "abort")  # ways to end that are no end of a generation
# From harmless to grave; of several attempts the gravest is the verdict.
GRAVITY = (
    "ok",
    "slow",
    "busy",
    "route_broken",
    "empty_response",
    "error_response",
    "wrong_model",
    "misconfigured",
    "auth_error",
    "wedged",
    "dead",
)
# What a route can get wrong by itself while the engine behind it is fine; the rest keeps its own word.
ROUTE_FAULTS = ("wedged", "dead", "error_response", "empty_response", "misconfigured")

Reply = t.Dict[str, t.Any]
Fetch = t.Callable[[_http.Request], _http.Answer]


class Question(t.NamedTuple):
    """What to ask for one token. Without a model, the first that the server lists is asked."""

    profile: Profile
    model: t.Optional[str] = None
    endpoint: str = "auto"
    prompt: t.Optional[str] = None


@dataclass
class Side:
    """The outcome of one probe of one URL."""

    verdict: str
    url: str = ""
    endpoint: t.Optional[str] = None
    status: t.Optional[int] = None
    ttft: t.Optional[float] = None
    total: float = 0.0
    model: t.Optional[str] = None
    tokens: t.Optional[int] = None
    error: str = ""

    def as_dict(self) -> t.Dict[str, t.Any]:
        result = asdict(self)
        for key in ("ttft", "total"):
            if result[key] is not None:
                result[key] = round(result[key], 3)
        return result


def probe(
    sides: t.Mapping[str, str],
    question: Question,
    access: _http.Access,
    timeout: float,
    tick: t.Optional[t.Callable[[], None]] = None,
) -> t.Dict[str, Side]:
    """Probe one or more URLs at the same time, all within ``timeout`` seconds.

    Whatever has not answered by then is cut off and its connection closed, so that probes never pile up.
    """

    def work(report: t.Callable[[Reply], None]) -> None:
        lock = threading.Lock()

        def one(name: str, url: str) -> None:
            def note(part: Reply) -> None:
                with lock:
                    report({"side": name, "note": part})

            try:
                side = _ask(url, question, lambda request: _http.exchange(request, access, timeout, note))
            except Exception as error:
                side = Side("error_response", url, error="%s: %s" % (type(error).__name__, error))
            with lock:
                report({"side": name, "result": asdict(side)})

        threads = [threading.Thread(target=one, args=item, daemon=True) for item in sides.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    for url in sides.values():
        _http.check(access)
        _http.join(url, "/")  # a URL that cannot be used is the caller's mistake, not the server's
    _http.load()
    outcome = _bounded.run(work, timeout, tick=tick, dies_with_caller=True)
    veil = _foreign.Veil(_http.secrets_of(access), TOLD)
    found: t.Dict[str, Side] = {}
    for name, url in sides.items():
        rows = [row for row in outcome.partial if row["side"] == name]
        results = [row["result"] for row in rows if "result" in row]
        if results:
            found[name] = Side(**results[0])
        elif outcome.status in ("ok", "error"):
            # The probe itself broke. That is no word about the server, least of all that it took too long.
            why = outcome.error or "it ended without an answer"
            found[name] = Side("error_response", url, total=outcome.elapsed, error="the probe itself failed: %s" % why)
        else:
            answer = _http.unfinished(url, (row["note"] for row in rows), timeout)
            found[name] = Side("wedged", url, status=answer.status, total=timeout, error=answer.error)
            if answer.events:
                found[name].error = "%d stream events, but no end of the answer within %g s" % (
                    len(answer.events),
                    timeout,
                )
        _fit(found[name], veil)
    return found


def _fit(side: Side, veil: _foreign.Veil) -> None:
    """Leave of what a server wrote what can be told."""
    side.error, side.url = veil(side.error), veil(side.url)
    side.model = None if side.model is None else veil(side.model)


def _ask(url: str, question: Question, fetch: Fetch) -> Side:
    """Ask for a token; fall back where the server lacks an endpoint or does not know streaming."""
    model = question.model
    if model is None:
        profile = question.profile
        answer = fetch(_http.Request(profile.models_method, _http.join(url, profile.models)))
        bad = failure(answer)
        if bad is not None:
            return Side(bad[0], answer.url, status=answer.status, total=answer.elapsed, error=bad[1])
        listed = _answers.listed(profile, answer.body)
        model = next((entry.name for entry in listed if entry.ready is not False), None)
    side = Side("misconfigured", url, error="no endpoint to ask")
    for kind, path in question.profile.endpoints:
        if question.endpoint not in ("auto", kind):
            continue
        if model is None and "{model}" in path:
            return Side("misconfigured", url, error="no model is ready, and the endpoint needs its name")
        target = _http.join(url, path.replace("{model}", quote(model or "", safe="")))
        for stream in (True, False) if kind != "generate" else (False,):
            answer = fetch(_http.Request("POST", target, _body(kind, model, question.prompt, stream), stream))
            side = judge(answer, kind, model)
            if answer.status not in (400, 415, 422):
                break
        if not _lacks_endpoint(answer):
            break
    return side


def _body(kind: str, model: t.Optional[str], prompt: t.Optional[str], stream: bool) -> Reply:
    # A prompt that was never sent before: no cache on the way can answer it.
    text = prompt or "Probe %s: continue." % uuid.uuid4().hex
    if kind == "generate":
        # What a model does not know of these is handed to it as a parameter, and left alone.
        return {"text_input": text, "max_tokens": UNCOUNTED_TOKENS, "exclude_input_in_output": True}
    body: Reply = {"max_tokens": 1, "temperature": 0}
    if model is not None:
        body["model"] = model
    if kind == "chat":
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text
    if stream:
        body.update(stream=True, stream_options={"include_usage": True})
    return body


def _lacks_endpoint(answer: _http.Answer) -> bool:
    if answer.outcome != "answered" or answer.status not in (404, 405, 501):
        return False
    return not _speaks_of_model(answer)


def _speaks_of_model(answer: _http.Answer) -> bool:
    """Whether a refusal is about the model rather than the path. OVMS serves language models as graphs."""
    text = answer.body.lower()
    return "model" in text or "graph definition" in text


def failure(answer: _http.Answer) -> t.Optional[t.Tuple[str, str]]:
    """The verdict and its reason for an answer that is no success, whatever was asked."""
    by_outcome = {
        "timeout": "wedged",
        "refused": "dead",
        "hung_up": "error_response",
        "broken": "error_response",
        "too_large": "error_response",
        "not_http": "error_response",
        "unreachable": "misconfigured",
        "unresolved": "misconfigured",
        "tls": "misconfigured",
        "redirected": "misconfigured",
    }
    if answer.outcome != "answered":
        return by_outcome[answer.outcome], answer.error
    status = answer.status or 0
    if status in (401, 403):
        return "auth_error", "status %d: the API key is %s" % (status, "refused" if status == 401 else "not allowed to")
    if status == 429:
        return "busy", "status 429: %s" % _excerpt(answer)
    unknown = status == 400 and "unknown model" in answer.body.lower()
    if (unknown or (status == 404 and _speaks_of_model(answer))) and not answer.html:
        return "wrong_model", "status %d: %s" % (status, _excerpt(answer))
    if status != 200:
        return "error_response", "status %d: %s" % (status, _excerpt(answer))
    if answer.html:
        return "misconfigured", "the answer is an HTML page, so this is not an inference server"
    return None


def judge(answer: _http.Answer, kind: str, model: t.Optional[str]) -> Side:
    """What the answer to a one-token request proves. A usage that counts no token outweighs what looks like one."""
    side = Side("ok", answer.url, kind, answer.status, None, answer.elapsed)
    bad = failure(answer)
    if bad is not None:
        side.verdict, side.error = bad
        return side
    replies = _replies(answer)
    for at, reply in replies:
        wrong = _error_in(reply)
        if wrong:
            side.verdict, side.error, side.ttft = "error_response", "status 200 with an error: %s" % wrong, None
            return side
        name = reply.get("model_name" if kind == "generate" else "model")
        side.model = name if name and isinstance(name, str) else side.model
        usage = reply.get("usage")
        count = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if isinstance(count, (int, float)) and not isinstance(count, bool) and abs(count) <= MOST_TOKENS:
            side.tokens = max(0, int(count))
        if side.ttft is None and (_content(reply, kind) or (side.tokens or 0) >= 1):
            side.ttft = at
    if side.tokens == 0:
        side.ttft = None
    if not replies:
        side.verdict, side.error = "error_response", "the answer is not JSON: %s" % _excerpt(answer)
    elif model is not None and side.model is not None and not same_model(model, side.model):
        side.verdict = "wrong_model"
        side.error = 'the model "%s" answered instead of "%s"' % (side.model, model)
    elif side.ttft is None:
        side.verdict, side.error = "empty_response", "status 200, but no token"
    elif side.tokens is None:
        side.tokens = 1
    return side


def _choices(reply: Reply) -> t.List[Reply]:
    choices = reply.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def _error_in(reply: Reply) -> str:
    """The error that a reply with status 200 carries, empty without one: what stands beside it is no token."""
    error = reply.get("error")
    if error or isinstance(error, dict):
        return str(error)[:WHOLE]
    if reply.get("object") == "error":
        return str(reply.get("message"))[:WHOLE]
    for choice in _choices(reply):
        end = choice.get("finish_reason")
        word = end.get("type") if isinstance(end, dict) else end
        if word in FAILED_ENDS:
            return 'the generation ended with "%s"' % word
    return ""


def _replies(answer: _http.Answer) -> t.List[t.Tuple[float, Reply]]:
    """The JSON objects of an answer, streamed or not, each with the time it came at."""
    texts = answer.events or [(answer.elapsed, answer.body)]
    found = []
    for at, text in texts:
        reply = _http.loads(text)
        if isinstance(reply, dict):
            found.append((at, reply))
    return found


def _content(reply: Reply, kind: str) -> bool:
    """Whether a reply carries a token. The first one of a healthy engine may decode to an empty text."""
    if kind == "generate":
        return bool(reply.get("text_output"))
    for choice in _choices(reply):
        part = choice.get("delta") or choice.get("message")
        part = part if isinstance(part, dict) else {}
        words = (choice.get("text"), part.get("content"), part.get("reasoning_content"), part.get("reasoning"))
        # "length" says that the one token that was asked for has been made.
        if any(words) or choice.get("finish_reason") == "length":
            return True
    return False


def same_model(wanted: str, got: str) -> bool:
    """Gateways add or drop what stands before the last slash, and Ollama's clients the tag that goes without saying."""

    def plain(name: str) -> str:
        name = name.rpartition("/")[2]
        return name[: -len(":latest")] if name.endswith(":latest") else name

    return plain(wanted) == plain(got)


def _excerpt(answer: _http.Answer) -> str:
    text = " ".join(answer.body[:WHOLE].split())
    return text or "an empty answer"


def slow(side: Side, max_ttft: t.Optional[float], max_total: t.Optional[float], usual: float) -> Side:
    """Turn an ok side into ``slow`` when it took longer than a limit, or than ``usual`` where none is set."""
    if side.verdict != "ok":
        return side
    if max_ttft is not None and side.ttft is not None and side.ttft > max_ttft:
        side.verdict, side.error = "slow", "the first token took %.2f s, more than %g s" % (side.ttft, max_ttft)
    elif max_total is not None and side.total > max_total:
        side.verdict, side.error = "slow", "the answer took %.2f s, more than %g s" % (side.total, max_total)
    elif max_ttft is None and max_total is None and side.total > usual:
        side.verdict, side.error = "slow", "the answer took %.2f s" % side.total
    return side


def worst(words: t.Iterable[str]) -> str:
    return max(words, key=GRAVITY.index)


def overall(direct: t.Optional[Side], route: t.Optional[Side]) -> t.Tuple[str, str]:
    """The verdict over both sides and the sentence that explains it."""
    if direct is not None and direct.verdict not in ("ok", "slow"):
        return direct.verdict, "%s: %s" % (direct.url, direct.error)
    if route is not None and route.verdict not in ("ok", "slow"):
        if direct is not None and route.verdict in ROUTE_FAULTS:
            return "route_broken", "the engine generates, but the route does not: %s: %s" % (route.url, route.error)
        return route.verdict, "%s: %s" % (route.url, route.error)
    sides = [side for side in (direct, route) if side is not None]
    verdict = worst(side.verdict for side in sides)
    if verdict == "slow":
        return verdict, "; ".join("%s: %s" % (side.url, side.error) for side in sides if side.verdict == "slow")
    return "ok", "a token came back %s" % " and ".join(
        "%s after %.2f s" % ("directly" if side is direct else "through the route", side.ttft or 0.0) for side in sides
    )
