# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import os
import time
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _lease, _service
from ansible_collections.gpuops.serving.plugins.module_utils._errors import ServingError, UsageError


@pytest.fixture(autouse=True)
def folders(tmp_path: t.Any, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(_lease, "STATE_FOLDER", str(tmp_path / "state"))
    monkeypatch.setattr(_lease, "LOCK_FOLDER", str(tmp_path / "run"))
    return str(tmp_path)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> t.List[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_fresh_lease_of_another_run_is_refused_and_names_its_owner() -> None:
    assert _lease.take("qwen", "one", "ops@deploy01", "stop") is None
    with pytest.raises(_lease.Lost) as caught:
        _lease.take("qwen", "two", "ops@deploy02", "start")
    assert caught.value.message == (
        'the service "qwen" is in use by run "one" of ops@deploy01, in phase "stop", for 0 s now: '
        "wait for that run to end (its lease expires in 60 s unless it is renewed)"
    )
    assert caught.value.result["verdict"] == "refused"
    assert caught.value.result["lease"]["run_id"] == "one"
    found = _lease.read("qwen")
    assert found is not None and found.run_id == "one"


def test_the_same_run_takes_its_lease_again() -> None:
    _lease.take("qwen", "one", "a", "stop")
    assert _lease.take("qwen", "one", "a", "start") is None
    found = _lease.read("qwen")
    assert found is not None and found.phase == "start"


def test_an_expired_lease_is_taken_over_and_the_earlier_owner_named(clock: t.List[float]) -> None:
    _lease.take("qwen", "one", "a", "stop")
    clock[0] += _lease.TERM - 0.1
    with pytest.raises(_lease.Lost):
        _lease.take("qwen", "two", "b", "start")
    clock[0] += 0.1
    earlier = _lease.take("qwen", "two", "b", "start")
    assert earlier is not None and (earlier.run_id, earlier.fresh) == ("one", False)


def test_a_longer_term_lasts_until_the_next_renewal(clock: t.List[float]) -> None:
    _lease.take("qwen", "one", "a", "drain", term=360)
    clock[0] += 300
    with pytest.raises(_lease.Lost):
        _lease.take("qwen", "two", "b", "start")
    _lease.renew("qwen", "one")
    clock[0] += 61
    assert _lease.take("qwen", "two", "b", "start") is not None


def test_a_held_lock_of_the_lease_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_lease, "LEASE_LOCK_TIMEOUT", 0.2)
    with _lease._file_lock("qwen"):
        with pytest.raises(_lease.Lost, match='the lease of the service "qwen" is being changed by process'):
            _lease.take("qwen", "one", "a", "stop")


def test_services_with_similar_names_have_locks_of_their_own() -> None:
    with _lease._file_lock("x"), _lease.locked("x.lease", 0), _lease.locked("x", 0), _lease._file_lock("x.lease"):
        held = [os.path.join(folder, name) for folder, _, names in os.walk(_lease.LOCK_FOLDER) for name in names]
    assert len(held) == 4


def test_force_takes_a_fresh_lease_and_shuts_the_other_run_out() -> None:
    _lease.take("qwen", "one", "a", "wait")
    earlier = _lease.take("qwen", "two", "b", "start", force=True)
    assert earlier is not None and earlier.run_id == "one"
    with pytest.raises(_lease.Lost):
        _lease.renew("qwen", "one")


def test_a_full_disk_does_not_break_off_the_run_that_owns_the_service(
    folders: str, clock: t.List[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    _lease.take("qwen", "one", "a", "stop")
    real = os.replace

    def full(*_paths: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    _lease.renew("qwen", "one")
    assert os.listdir(os.path.join(folders, "state", "qwen")) == ["lease.json"]
    clock[0] += 61
    with pytest.raises(ServingError, match=r'the lease of the service "qwen" cannot be written: .*: No space left'):
        _lease.renew("qwen", "one")
    monkeypatch.setattr(os, "replace", real)


def test_renewing_prolongs(clock: t.List[float]) -> None:
    _lease.take("qwen", "one", "a", "stop")
    clock[0] += 50
    _lease.renew("qwen", "one", "wait")
    clock[0] += 50
    found = _lease.read("qwen")
    assert found is not None and found.fresh and found.phase == "wait"
    assert found.expires_in == pytest.approx(10)


def test_a_run_whose_lease_was_taken_over_is_refused_and_touches_nothing(clock: t.List[float]) -> None:
    _lease.take("qwen", "one", "a", "stop")
    clock[0] += 61
    _lease.take("qwen", "two", "b", "stop")
    with pytest.raises(_lease.Lost):
        with _lease.operation("qwen", "one"):
            pytest.fail("the lease is another run's")
    with pytest.raises(_lease.Lost):
        _lease.release("qwen", "one")
    with pytest.raises(_lease.Lost):
        _lease.renew("qwen", "one")
    found = _lease.read("qwen")
    assert found is not None and found.run_id == "two"


def test_a_run_whose_lease_is_gone_is_refused() -> None:
    with pytest.raises(_lease.Lost, match="is not leased to this run any more"):
        _lease.renew("qwen", "one")


def test_without_a_run_id_a_fresh_lease_refuses_and_none_lets_through() -> None:
    with _lease.operation("qwen", None):
        pass
    _lease.take("qwen", "one", "a", "stop")
    with pytest.raises(_lease.Lost):
        with _lease.operation("qwen", None):
            pytest.fail("the lease is another run's")


def test_release_happens_once() -> None:
    _lease.take("qwen", "one", "a", "stop")
    assert _lease.release("qwen", "one") is True
    assert _lease.release("qwen", "one") is False
    assert _lease.read("qwen") is None


def test_a_lease_of_another_boot_has_expired(folders: str) -> None:
    _lease.take("qwen", "one", "a", "stop")
    path = os.path.join(folders, "state", "qwen", "lease.json")
    with open(path, encoding="utf-8") as handle:
        record = json.load(handle)
    record["boot_id"] = "another"
    with open(path, "w", encoding="utf-8") as handle:
        json.dump(record, handle)
    found = _lease.read("qwen")
    assert found is not None and not found.fresh


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run_id": "one"}', "null"])
def test_a_damaged_lease_counts_as_expired(folders: str, content: str) -> None:
    os.makedirs(os.path.join(folders, "state", "qwen"))
    with open(os.path.join(folders, "state", "qwen", "lease.json"), "w", encoding="utf-8") as handle:
        handle.write(content)
    found = _lease.read("qwen")
    assert found is not None and (found.run_id, found.fresh) == ("unreadable", False)
    assert _lease.take("qwen", "two", "b", "start") is not None


def test_the_lock_of_a_living_process_is_waited_for_and_then_named() -> None:
    with _lease.locked("qwen", 1):
        with pytest.raises(_lease.Lost) as caught:
            with _lease.locked("qwen", 0.2):
                pytest.fail("the lock is held")
    assert caught.value.message == (
        'the service "qwen" is being changed by process %d and was not free within 0.2 s: '
        "wait for it to end, then try again" % os.getpid()
    )
    with _lease.locked("qwen", 0):
        pass


@pytest.mark.parametrize("name", ["../x", "", "Upper", "a/b", "a\n", "-a", "x" * 64])
def test_a_name_that_could_leave_the_folder_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        _lease.take(name, "one", "a", "stop")


def test_a_link_in_place_of_the_lock_is_not_followed(folders: str, tmp_path: t.Any) -> None:
    os.makedirs(os.path.join(folders, "run"))
    os.symlink(str(tmp_path / "elsewhere"), os.path.join(folders, "run", "qwen.lock"))
    with pytest.raises(ServingError, match="cannot be opened"):
        with _lease.locked("qwen", 0):
            pytest.fail("a link was followed")
    assert not (tmp_path / "elsewhere").exists()


def test_a_lock_that_nothing_can_be_written_to_is_one_all_the_same(
    monkeypatch: pytest.MonkeyPatch, folders: str
) -> None:
    """With /run full nothing could be stopped."""

    def full(*_any: object) -> t.NoReturn:
        raise OSError(28, "No space left on device")

    for name in ("ftruncate", "pwrite"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with _lease.operation("qwen", None), pytest.raises(_lease.Lost, match="was not free"):
                with _lease.locked("qwen", 0.0):
                    pass


def test_a_run_that_waits_renews_the_lease_of_the_unit_that_it_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    renewed: t.List[t.Any] = []
    monkeypatch.setattr(_lease, "renew", lambda service, run_id: renewed.append((service, run_id)))
    monkeypatch.setattr(_service, "of_unit", lambda unit: "qwen" if unit == "q.service" else None)
    for params in ({"service": "tgi", "unit": "q.service"}, {"service": None, "unit": "q.service"}):
        _lease.keeper_of({**params, "run_id": "r1"}, False)()
        _lease.keeper_of({**params, "run_id": "r1"}, True)()
        _lease.keeper_of({**params, "run_id": None}, False)()
    told = [word for word in renewed if word[1]]
    assert told == [("tgi", "r1"), ("qwen", "r1")]


@pytest.mark.parametrize("named", [{}, {"unit": "other"}, {"unit": None}])
def test_a_run_whose_lease_cannot_be_found_is_told(monkeypatch: pytest.MonkeyPatch, named: t.Dict[str, t.Any]) -> None:
    monkeypatch.setattr(_service, "of_unit", lambda _unit: None)
    for check_mode in (False, True):
        with pytest.raises(UsageError) as caught:
            _lease.keeper_of({"service": None, "run_id": "r1", **named}, check_mode)
        assert caught.value.message == '"run_id" is the run that holds the lease of a service: give "service" too'
    _lease.keeper_of({"service": None, "run_id": None, **named}, False)()
