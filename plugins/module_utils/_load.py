# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""How busy an engine is, from its Prometheus metrics, and what counts as idle."""

from __future__ import annotations

import math
import re
import typing as t
from urllib.parse import urlsplit

from . import _http, _limits
from ._deadline import SYSTEM_CLOCK, Clock, Deadline
from ._profile import Profile

__all__ = [
    "IdleWait",
    "Load",
    "Reading",
    "drain",
    "load_of",
    "metrics_url",
    "moved",
    "others",
    "parse",
    "read",
    "wait_idle",
]

Samples = t.Dict[str, t.List[float]]

# Exposition format: NAME{labels} VALUE [timestamp]. A label value may hold braces and escaped quotes.
SAMPLE = re.compile(r'([A-Za-z_:][\w:]*)(\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?\s+(\S+)(?:\s+-?\d+)?\s*\Z')
LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
CONFIRMATIONS = 2
LAST_PAUSE = 0.2  # before the look that confirms one at the very end
LOOK = 10.0  # an engine in a long step may take seconds to answer for its metrics
# The most that one request of ours can add: to the tokens generated, to the steps, to the tokens read in. A token of a
# prompt has at least a byte, and what a chat template adds around it is short.
OWN_TOKENS, OWN_UNCOUNTED = 1, 8
OWN_STEPS, STEP_BYTES = 4, 256
TEMPLATE_TOKENS = 512


class Load(t.NamedTuple):
    """What an engine says of itself; None where it does not say."""

    running: t.Optional[float] = None
    waiting: t.Optional[float] = None
    kv_use: t.Optional[float] = None
    tokens: t.Mapping[str, float] = {}

    @property
    def quiet(self) -> bool:
        """Nothing running and nothing waiting."""
        return self.running == 0 and not self.waiting

    def as_dict(self) -> t.Dict[str, t.Any]:
        return {"running": self.running, "waiting": self.waiting, "kv_use": self.kv_use, "tokens": dict(self.tokens)}


class Reading(t.NamedTuple):
    """One look at the metrics: the load, or why there is none.

    ``absent``: nothing listens. ``unmeasured``: the server answers, and will never say. ``unknown``: not this time.
    """

    load: t.Optional[Load]
    why: str = ""
    error: str = ""


def parse(text: str, labelled: t.Collection[str] = ()) -> Samples:
    """Every value of every metric. Lines that are not samples are left out.

    The values of those in ``labelled`` are also found by each of their labels, as ``name{label="value"}``.
    """
    samples: Samples = {}
    for line in text.splitlines():
        found = SAMPLE.match(line.strip())
        if found is None:
            continue
        try:
            value = float(found.group(3))
        except ValueError:
            continue
        if math.isfinite(value):
            samples.setdefault(found.group(1), []).append(value)
            for label, content in LABEL.findall(found.group(2) or "") if found.group(1) in labelled else ():
                samples.setdefault('%s{%s="%s"}' % (found.group(1), label, content), []).append(value)
    return samples


def labelled(profile: Profile) -> t.Set[str]:
    """The metrics of an engine that are told apart by a label."""
    names = (*profile.running, *profile.waiting, *profile.kv_use, *profile.tokens, *profile.prompt_tokens)
    return {name.partition("{")[0] for name in (*names, *profile.steps) if "{" in name}


def load_of(profile: Profile, samples: Samples) -> Load:
    """Gauges of several ranks add up; of the use of caches the fullest counts."""

    def first(names: t.Tuple[str, ...]) -> t.Optional[t.List[float]]:
        return next((samples[name] for name in names if name in samples), None)

    def gauge(names: t.Tuple[str, ...]) -> t.Optional[t.List[float]]:
        found = first(names)
        if profile.adds_up and found is not None:
            return [value for name in names for value in samples.get(name, ())]
        return [0.0] if found is None and names and profile.marker in samples else found

    running, waiting, kv_use = gauge(profile.running), gauge(profile.waiting), first(profile.kv_use)
    return Load(
        running=None if running is None else sum(running),
        waiting=None if waiting is None else sum(waiting),
        kv_use=None if kv_use is None else max(kv_use),
        tokens={
            name: sum(samples[name])
            for name in (*profile.tokens, *profile.prompt_tokens, *profile.steps)
            if name in samples
        },
    )


def moved(before: t.Optional[Load], after: t.Optional[Load]) -> t.Optional[bool]:
    """Whether a token counter moved between two looks; None when there is none to compare."""
    if before is None or after is None:
        return None
    names = set(before.tokens) & set(after.tokens)
    if not names:
        return None
    return any(before.tokens[name] != after.tokens[name] for name in names)


def others(
    profile: Profile, before: t.Optional[Load], after: t.Optional[Load], requests: int, prompt_bytes: int
) -> t.Optional[bool]:
    """Whether the counters moved by more than ``requests`` of our own can have moved them; None without counters.

    An engine that wedges after it has read our prompt in has counted that prompt, and maybe its first token.
    """
    if before is None or after is None:
        return None
    uncounted = any(kind == "generate" for kind, _path in profile.endpoints)
    own = dict.fromkeys(profile.tokens, OWN_UNCOUNTED if uncounted else OWN_TOKENS)
    own.update(dict.fromkeys(profile.steps, OWN_STEPS + prompt_bytes // STEP_BYTES))
    own.update(dict.fromkeys(profile.prompt_tokens, TEMPLATE_TOKENS + prompt_bytes))
    names = set(own) & set(before.tokens) & set(after.tokens)
    if not names:
        return None
    return any(after.tokens[name] - before.tokens[name] > own[name] * requests for name in names)


def reading_of(profile: Profile, answer: _http.Answer) -> Reading:
    """What an answer to the request for the metrics says."""
    if answer.outcome == "refused":
        return Reading(None, "absent", "nothing answers at %s: %s" % (answer.url, answer.error))
    if answer.outcome != "answered":
        return Reading(None, "unknown", "%s: %s" % (answer.url, answer.error))
    remedy = ": " + profile.metrics_remedy if profile.metrics_remedy else ""
    if answer.status != 200:
        error = "%s answers with status %s" % (answer.url, answer.status)
        if answer.status in (401, 403):
            return Reading(None, "unmeasured", error + ": the API key is refused")
        if answer.status in (404, 405, 501):
            return Reading(None, "unmeasured", error + remedy)
        return Reading(None, "unknown", error)
    load = load_of(profile, parse(answer.body, labelled(profile)))
    for names, value in ((profile.running, load.running), (profile.waiting, load.waiting)):
        if names and value is None:
            error = "%s has no metric %s" % (answer.url, " or ".join(names))
            return Reading(None, "unmeasured", error + remedy)
    return Reading(load)


def metrics_url(profile: Profile, url: str) -> t.Optional[str]:
    """Where the metrics are, by the URL of the engine; None where there are none."""
    if profile.metrics is None:
        return None
    joined = _http.join(url, profile.metrics)
    if profile.metrics_port is None:
        return joined
    parts = urlsplit(joined)
    host = "[%s]" % parts.hostname if ":" in (parts.hostname or "") else parts.hostname
    # What stands before the path belongs to what serves the requests.
    return "%s://%s:%d%s" % (parts.scheme, host, profile.metrics_port, profile.metrics)


def read(profile: Profile, url: str, access: _http.Access, timeout: float) -> Reading:
    """One look at the metrics of an engine."""
    where = metrics_url(profile, url)
    error = 'the engine profile "%s" knows no metrics' % profile.name
    if where is not None:
        answer = _http.fetch(_http.Request("GET", where), access, timeout)
        if answer.outcome != "refused" or profile.metrics_port is None:
            return reading_of(profile, answer)
        error = "nothing answers at %s, although the engine runs" % where
    # Whether anything listens at all can still be told.
    answer = _http.fetch(_http.Request(profile.models_method, _http.join(url, profile.models)), access, timeout)
    if answer.outcome == "refused":
        return reading_of(profile, answer)
    return Reading(None, "unmeasured", error + (": " + profile.metrics_remedy if profile.metrics_remedy else ""))


class IdleWait(t.NamedTuple):
    """How a wait for an idle engine ended: ``idle``, ``busy``, ``absent`` or ``unknown``."""

    verdict: str
    msg: str
    load: t.Optional[Load]
    readings: int
    still_for: t.Optional[float] = None  # seconds without a token for anybody, where counters tell

    def as_dict(self) -> t.Dict[str, t.Any]:
        return {
            "verdict": self.verdict,
            "msg": self.msg,
            "load": None if self.load is None else self.load.as_dict(),
            "still_for": None if self.still_for is None else round(self.still_for, 1),
            "readings": self.readings,
        }


def drain(
    profile: Profile,
    url: str,
    access: _http.Access,
    timeout: float,
    interval: float,
    tick: t.Callable[[], None] = lambda: None,
    clock: Clock = SYSTEM_CLOCK,
) -> IdleWait:
    """Wait until an engine is idle, within ``timeout`` seconds and one look."""
    _limits.at_least(0, timeout=timeout)
    _limits.at_least(0.01, interval=interval)
    _http.join(url, "/")

    def look(left: float) -> Reading:
        return read(profile, url, access, min(LOOK, left))

    return wait_idle(look, Deadline(timeout, clock), interval, tick)


def wait_idle(
    look: t.Callable[[float], Reading],
    deadline: Deadline,
    interval: float,
    tick: t.Callable[[], None] = lambda: None,
) -> IdleWait:
    """Idle is two looks in a row with nothing running, nothing waiting, and token counters that stood still between.

    A gauge alone is weak: engines are known that report zero while they are wedged with requests inside. Nobody who
    listens and nothing to read are believed at the second look in a row too, and end the wait.
    """
    word, same, readings = "", 0, 0
    before: t.Optional[Load] = None
    still_since: t.Optional[float] = None
    last_chance = False
    while True:
        tick()
        last = look(max(deadline.remaining, 1.0))
        readings += 1
        load = last.load
        seen = last.why if load is None else "idle" if load.quiet else ""
        again = seen == word and not (seen == "idle" and moved(before, load))
        word, same = seen, same + 1 if again else 1
        settled = word in ("idle", "absent", "unmeasured")
        if moved(before, load) is not False:
            still_since = deadline.clock.monotonic() if load is not None and load.tokens else None
        if settled and same >= CONFIRMATIONS:
            return _settled(word, last, readings)
        if last_chance or (deadline.expired and not settled):
            break
        # A first look of that kind at the very end is confirmed by one more, a moment later.
        last_chance = deadline.expired
        before = load
        deadline.clock.sleep(min(interval, max(deadline.remaining, LAST_PAUSE) if settled else deadline.remaining))
    if last.load is None:
        return IdleWait("unknown", "it is not known whether the engine is idle: %s" % last.error, None, readings)
    still_for = None if still_since is None else deadline.clock.monotonic() - still_since
    return IdleWait("busy", _busy(last.load, deadline.seconds), last.load, readings, still_for)


def _settled(word: str, last: Reading, readings: int) -> IdleWait:
    if word == "idle":
        return IdleWait("idle", "the engine is idle: nothing runs and nothing waits", last.load, readings)
    if word == "absent":
        return IdleWait("absent", "there is nothing to drain: %s" % last.error, None, readings)
    return IdleWait("unknown", "whether the engine is idle cannot be known: %s" % last.error, None, readings)


def _busy(load: Load, seconds: float) -> str:
    waiting = "" if load.waiting is None else ", %g waiting" % load.waiting
    return "the engine is still busy after %g s: %g running%s" % (seconds, load.running or 0, waiting)
