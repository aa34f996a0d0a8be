# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A wait in slices comes to the same verdict in the same second as one that is never left."""

from __future__ import annotations

import itertools
import random
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import (
    _engines,
    _http,
    _wait_request,
    _wait_state,
    _wait_text,
)
from ansible_collections.gpuops.serving.plugins.module_utils._errors import UsageError
from ansible_collections.gpuops.serving.plugins.module_utils._generation import Side
from ansible_collections.gpuops.serving.plugins.module_utils._readiness import Wait
from ansible_collections.gpuops.serving.plugins.module_utils._systemd import UnitState
from ansible_collections.gpuops.serving.plugins.module_utils._tiers import Listener, Options
from service import ACTIVE, FakeClock, Service, changed, loading

WHAT = ["x.service", "http://127.0.0.1:8000"]
BOOT = "b0"
LINE = "0123456789abcdef" * 2


def silent_and_busy(service: Service) -> None:
    loading(service, 200)
    service.cpu = lambda now: now


def frozen(service: Service) -> None:
    loading(service, 9999)
    service.cpu = lambda now: min(now, 47.3)


def repeating(service: Service) -> None:
    loading(service, 9999)
    service.lines = lambda now: ["12:00:%02d Waiting for shard to be ready... rank=0" % (now % 60)]


def growing(service: Service) -> None:
    loading(service, 9999)
    service.lines = lambda now: ["Loading safetensors checkpoint shards: %d%% Completed" % min(70, now / 2)]


def moving_for_ever(service: Service) -> None:
    loading(service, 9999)
    service.cpu = lambda now: now


def looping(service: Service) -> None:
    loading(service, 9999)

    def state(now: float) -> UnitState:
        lives = int(now // 40)
        return changed(n_restarts=lives, invocation_id="i%d" % lives, main_pid=10 + lives)

    service.state = state
    service.cpu = lambda now: now
    service.lines = lambda now: ["torch.OutOfMemoryError: CUDA out of memory."] if 38 < now % 40 < 39.5 else []


def wedged(service: Service) -> None:
    service.token = lambda now: Side("wedged", error="no answer within 60 s")


def failing(service: Service) -> None:
    loading(service, 20)
    service.cpu = lambda now: now
    service.token = lambda now: Side("error_response", status=500, error="status 500: boom")


def compiling(service: Service) -> None:
    service.cpu = lambda now: now
    service.token = lambda now: Side("wedged", error="no answer") if now < 150 else Side("ok", ttft=1)


def foreign(service: Service) -> None:
    service.port = lambda now: Listener("foreign" if now > 30 else "none", "somebody")
    service.health = lambda now: _http.Answer("u", status=200) if now > 30 else _http.Answer("u", "refused")
    service.cpu = lambda now: now


def dying(service: Service) -> None:
    loading(service, 9999)
    service.cpu = lambda now: now
    service.state = lambda now: ACTIVE if now < 33.3 else changed(active_state="failed", result="oom-kill", main_pid=0)


CASES = (
    *(silent_and_busy, frozen, repeating, growing, moving_for_ever, looping, wedged, failing, compiling, foreign),
    dying,
)
LIMITS = {"timeout": 300.0, "stall_timeout": 60.0, "generation_timeout": 60.0}


def begin(service: Service, token: str, elapsed: float, boot: str = BOOT, what: t.Sequence[str] = WHAT) -> t.Any:
    def make(start: float) -> Wait:
        return Wait(service, _engines.PROFILES["vllm"], Options(**LIMITS), service.clock, start)  # type: ignore[arg-type]

    ask = _wait_request.asked(_wait_request.request(elapsed, True, token))
    return _wait_state.Slice(make, what, ask, boot, service.clock)


def sliced(service: Service, every: int) -> t.Tuple[t.Dict[str, t.Any], int]:
    """The answer of a wait that is left at each so many times that it asks whether to, and how often that was."""
    token = ""
    for count in itertools.count():
        part = begin(service, token, service.clock.now)
        asks = itertools.count(1)
        ending = part.wait.run(leave=lambda asks=asks: next(asks) >= every)
        if ending is not None:
            return part.wait.as_dict(ending), count
        token = part.token()
    raise AssertionError


@pytest.mark.parametrize("every", [2, 5, 61])
@pytest.mark.parametrize("case", CASES)
def test_slices_change_nothing(case: t.Callable[[Service], None], every: int) -> None:
    whole = Service()
    case(whole)
    wait = Wait(whole, _engines.PROFILES["vllm"], Options(**LIMITS), whole.clock)  # type: ignore[arg-type]
    ending = wait.run()
    assert ending is not None
    service = Service()
    case(service)
    found, left = sliced(service, every)
    assert found == wait.as_dict(ending)
    assert service.clock.now == whole.clock.now
    assert service.asked == whole.asked
    # An attempt at a token is not left in the middle.
    assert left >= (0 if case in (wedged, compiling) else 1 if every > 5 else 5)


def test_a_host_that_was_booted_anew_is_looked_at_afresh_and_the_deadline_stays() -> None:
    service = Service()
    moving_for_ever(service)
    part = begin(service, "", 0.0)
    assert part.wait.run(leave=lambda: service.clock.now >= 100) is None
    token = part.token()
    fresh = Service()
    moving_for_ever(fresh)
    fresh.clock.now = 5000.0
    found = begin(fresh, token, 120.0, boot="b1").wait
    assert found.deadline.elapsed == 120.0
    assert (found.reached, found.restarts, found.progress.movement()) == ("", 0, {})
    ending = found.run()
    assert (ending.verdict, fresh.clock.now) == ("progressing", pytest.approx(5180.0, abs=0.1))


@pytest.mark.parametrize("other", [["y.service", WHAT[1]], [WHAT[0], "http://127.0.0.1:9"]])
def test_the_token_of_another_wait_is_of_no_use(other: t.List[str]) -> None:
    service = Service()
    part = begin(service, "", 0.0)
    part.wait.run(leave=lambda: False)
    assert begin(service, part.token(), 7.0).wait.reached == "generation"
    found = begin(service, part.token(), 7.0, what=other).wait
    assert (found.reached, found.deadline.elapsed) == ("", 7.0)


def test_a_token_that_another_version_wrote_is_of_no_use() -> None:
    service = Service()
    content = {"format": _wait_state.FORMAT, "boot": BOOT, "what": WHAT, "wait": {"start": 0.0, "looks": 3}}
    found = begin(service, _wait_request.pack(content), 7.0).wait
    assert (found.reached, found.deadline.elapsed) == ("", 7.0)


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "gpuops-wait:1:1", "gpuops-wait:-1:1:", "gpuops-wait:nan:1:", "other:1:1:", "gpuops-wait:1:2:"),
        *("gpuops-wait:1:0+%s:" % LINE, "gpuops-wait:1:whole+%s:" % LINE, "gpuops-wait:1:1+../%s:" % LINE[3:]),
        *("gpuops-wait:1:1+:", "gpuops-wait:1:1+%s:" % LINE.upper(), "gpuops-wait:1:1+%s\n:" % LINE),
        *("gpuops-wait:1:1:?", "gpuops-wait:1:1:AAAA", "gpuops-wait:1:1:" + _wait_request.pack([])),  # type: ignore[arg-type]
    ],
)
def test_what_the_controller_did_not_ask_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        _wait_request.asked(text)
    assert caught.value.message == '"resume" is how the controller asks for a slice of a wait: leave it out'


@pytest.mark.parametrize("heard", [False, True])
def test_the_name_of_a_line_comes_as_it_was_sent(heard: bool) -> None:
    found = _wait_request.asked(_wait_request.request(1.5, True, line=LINE, heard=heard))
    assert found == _wait_request.Asked(1.5, True, {}, False, LINE, heard)
    assert _wait_request.asked(_wait_request.request(1.5, True, whole=True, line=LINE)).line == ""


def test_a_token_is_small_and_holds_no_key() -> None:
    service = Service()
    loading(service, 9999)

    def lines(now: float) -> t.List[str]:
        letters = random.Random(now)
        return [" ".join("".join(letters.choices("ghijklmnop", k=8)) for _ in range(12)) for _ in range(20)]

    service.lines = lines
    part = begin(service, "", 0.0)
    assert part.wait.run(leave=lambda: service.clock.now >= 250) is None
    assert len(part.token()) < 60000
    assert "key" not in str(part.wait.save())


class Shown:
    """A wait that stands where a test says."""

    def __init__(self, clock: FakeClock) -> None:
        self.now: t.Dict[str, t.Any] = {
            "phase": "",
            "percent": None,
            "missing": "listener",
            "restarts": 0,
            "near": False,
        }
        self.deadline = type("Deadline", (), {"elapsed": 0.0})()
        self.clock = clock
        self.end = float("inf")

    def ends_within(self, seconds: float) -> bool:
        return self.end - self.clock.now < seconds

    def live(self) -> t.Dict[str, t.Any]:
        self.deadline.elapsed = self.clock.now
        return dict(self.now, moved=0.0, stall_timeout=300.0)


def part_of(clock: FakeClock, shown: Shown, lively: bool = True, heard: bool = False) -> t.Any:
    ask = _wait_request.Asked(0.0, lively, {}, line=LINE, heard=heard)
    found = _wait_state.Slice(lambda start: t.cast(Wait, shown), WHAT, ask, BOOT, clock)
    found._shown = _wait_text.key(shown.live())
    found._cost = 0.5
    return found


def ends(part: t.Any, clock: FakeClock, until: float) -> t.Optional[float]:
    while clock.now < until:
        if part():
            return round(clock.now, 1)
        clock.now += 0.1
    return None


def test_a_slice_without_a_change_ends_in_time() -> None:
    clock = FakeClock()
    assert ends(part_of(clock, Shown(clock)), clock, 100) == pytest.approx(_wait_state.LONGEST, abs=0.15)


@pytest.mark.parametrize("change", [{"phase": "compiling"}, {"missing": "health"}, {"restarts": 1}, {"percent": 3.0}])
def test_a_change_ends_it_when_it_has_stood_for_a_second(change: t.Dict[str, t.Any]) -> None:
    clock = FakeClock()
    shown = Shown(clock)
    part = part_of(clock, shown)
    assert ends(part, clock, 4) is None
    shown.now.update(change)
    assert ends(part, clock, 100) == pytest.approx(5.0, abs=0.15)


@pytest.mark.parametrize("change", [{}, {"phase": "compiling"}])
def test_no_slice_ends_shortly_before_the_wait_does_but_all_end_in_time(change: t.Dict[str, t.Any]) -> None:
    clock = FakeClock()
    shown = Shown(clock)
    part = part_of(clock, shown)
    shown.now.update(change)
    shown.end = 3.5
    assert ends(part, clock, 1000) == pytest.approx(_wait_state.LONGEST + _wait_state.LATE, abs=0.15)


@pytest.mark.parametrize(("stall", "change_at"), [(4.0, 2.5), (6.0, 4.0), (10.0, 8.0)])
def test_the_slice_in_which_a_window_ends_is_the_one_that_tells(stall: float, change_at: float) -> None:
    """What changes shortly before, such as a unit that counts as stable, ends no slice."""
    service = Service()
    loading(service, 9999)
    service.state = lambda now: changed(raw={"ExecMainStartTimestampMonotonic": str(int((change_at - 3) * 1e6))})

    def make(start: float) -> Wait:
        limits = Options(timeout=300.0, stall_timeout=stall)
        return Wait(service, _engines.PROFILES["vllm"], limits, service.clock, start)  # type: ignore[arg-type]

    part = _wait_state.Slice(make, WHAT, _wait_request.asked(_wait_request.request(0.0, True, "")), BOOT, service.clock)
    ending = part.wait.run(leave=part)
    while ending is None:
        assert stall - (service.clock.now - part.wait.progress.window.last) > min(2.9, stall / 2 - 0.1)
        asked = _wait_request.asked(_wait_request.request(service.clock.now, True, part.token()))
        part = _wait_state.Slice(make, WHAT, asked, BOOT, service.clock)
        ending = part.wait.run(leave=part)
    assert ending.verdict == "stalled"


def test_near_the_end_a_slice_is_in_no_hurry() -> None:
    clock = FakeClock()
    shown = Shown(clock)
    part = part_of(clock, shown)
    shown.now.update(near=True, phase="capturing_graphs")
    assert ends(part, clock, 100) == pytest.approx(4.0, abs=0.15)


def test_a_change_that_is_taken_back_is_none() -> None:
    clock = FakeClock()
    shown = Shown(clock)
    part = part_of(clock, shown)
    shown.now["missing"] = "health"
    assert ends(part, clock, 0.8) is None
    shown.now["missing"] = "listener"
    assert ends(part, clock, 20) is None


def test_nothing_that_changes_ends_a_slice_that_nobody_looks_at() -> None:
    clock = FakeClock()
    shown = Shown(clock)
    part = part_of(clock, shown, lively=False)
    shown.now["missing"] = "health"
    assert ends(part, clock, 100) == pytest.approx(_wait_state.LONGEST, abs=0.15)


def test_later_percentages_alone_may_cost_no_more_than_a_share_of_the_time() -> None:
    clock = FakeClock()
    shown = Shown(clock)
    ended = []
    while clock.now < 300:
        began = clock.now
        part = part_of(clock, shown)
        while not part():
            clock.now += 0.1
            shown.now["percent"] = clock.now / 3
        ended.append(clock.now - began)
    # One percent and a second each, until they have been lively for long enough.
    assert all(1.0 <= seconds <= 4.2 for seconds in ended[:4])
    assert ended[6:] == [pytest.approx(0.5 / _wait_state.SHARE, abs=1.2)] * len(ended[6:])


def test_later_another_phase_ends_a_slice_that_has_lasted_a_while() -> None:
    clock = FakeClock()
    shown = Shown(clock)
    clock.now = 100.0
    part = part_of(clock, shown)
    shown.now["phase"] = "compiling"
    assert ends(part, clock, 200) == pytest.approx(110.0, abs=0.15)


@pytest.mark.parametrize(
    ("began", "change", "seconds"),
    [
        (0.0, {"percent": 3.0}, 1.0),
        (100.0, {"percent": 3.0}, _wait_state.LONGEST),
        (100.0, {"phase": "compiling"}, _wait_state.SHORTEST),
        (100.0, {"restarts": 1}, _wait_state.SHORTEST),
    ],
)
def test_later_a_percentage_ends_no_slice_that_is_read_while_it_lasts(
    began: float, change: t.Dict[str, t.Any], seconds: float
) -> None:
    clock = FakeClock()
    shown = Shown(clock)
    clock.now = began
    part = part_of(clock, shown, heard=True)
    shown.now.update(change)
    assert ends(part, clock, began + 100) == pytest.approx(began + seconds, abs=0.15)


def test_a_slice_tells_what_changed_at_once_and_what_has_not_now_and_then() -> None:
    clock = FakeClock()
    shown = Shown(clock)
    part = part_of(clock, shown)
    told: t.List[t.Tuple[float, t.Any]] = []

    def go_on(until: float) -> None:
        while clock.now < until:
            part.tell(lambda live: told.append((clock.now, live["percent"])))
            clock.now += 0.125

    go_on(3.0)
    assert told == []  # before the first look there is nothing to tell
    part()
    go_on(14.0)
    shown.now["percent"] = 1.0
    go_on(14.25)
    shown.now["percent"] = 2.0
    go_on(21.0)
    assert told == [(3.0, None), (8.0, None), (13.0, None), (14.0, 1.0), (15.0, 2.0), (20.0, 2.0)]


def test_a_slice_that_goes_on_has_something_to_tell_from_the_beginning() -> None:
    service = Service()
    loading(service, 200)
    part = begin(service, "", 0.0)
    told: t.List[t.Any] = []
    part.tell(told.append)
    assert told == []
    assert part.wait.run(leave=lambda: service.clock.now >= 20) is None
    again = begin(service, part.token(), 20.0)
    again.tell(told.append)
    assert [live["missing"] for live in told] == ["listener"]
