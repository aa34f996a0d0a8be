# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
import os
import typing as t
from pathlib import Path

import pytest
import yaml
from gpulab import access, cgroups, cli, common, hosts, layers, lifecycle, network, roots, state


def lab() -> state.Lab:
    return state.Lab(
        "demo",
        3,
        "/repository",
        [
            state.Host("gpu1", "bookworm", "gpu", "root", False, 1, "10.213.3.11"),
            state.Host("gpu2", "bullseye", "gpu", "ops", False, 2, "10.213.3.12"),
            state.Host("gw", "bookworm", "gateway", "root", False, 3, "10.213.3.13"),
        ],
        ["/srv:/opt"],
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu1=bookworm", hosts.HostSpec("gpu1", "bookworm")),
        ("gw=trixie,role=gateway", hosts.HostSpec("gw", "trixie", role="gateway")),
        ("a=bullseye,user=ops,legacy=1", hosts.HostSpec("a", "bullseye", user="ops", legacy=True)),
        ("a=bullseye,legacy=0", hosts.HostSpec("a", "bullseye")),
    ],
)
def test_host_option(text: str, expected: hosts.HostSpec) -> None:
    assert hosts.parse_host(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu1", "host 'gpu1' is not understood: write NAME=RELEASE[,role=ROLE][,user=USER][,legacy=1]."),
        ("gpu1=", "host 'gpu1=' is not understood: write NAME=RELEASE[,role=ROLE][,user=USER][,legacy=1]."),
        ("gpu1=buster", "host 'gpu1' asks for release 'buster': the lab has bullseye, bookworm, trixie."),
        ("gpu1=trixie,cpu=2", "host 'gpu1' has the unknown option 'cpu': the options are role, user, legacy."),
        ("gpu1=trixie,role=db", "host 'gpu1' has role 'db': allowed are gpu, gateway."),
        ("gpu1=trixie,legacy=yes", "host 'gpu1' has legacy 'yes': allowed are 0, 1."),
        (
            "../x=trixie",
            "'../x' cannot name a host: use 1 to 20 lower-case letters, digits and hyphens, beginning with a letter.",
        ),
    ],
)
def test_wrong_host_option(text: str, message: str) -> None:
    with pytest.raises(common.LabError) as caught:
        hosts.parse_host(text)
    assert str(caught.value) == message


def test_hosts_of_one_name() -> None:
    with pytest.raises(common.LabError, match=r"^host 'a' is given twice\.$"):
        hosts.parse_hosts(["a=trixie", "b=trixie", "a=bookworm"])


def test_no_hosts() -> None:
    with pytest.raises(common.LabError, match=r"^a lab needs at least one host: add --host NAME=RELEASE\.$"):
        hosts.parse_hosts([])


def test_bind_option(tmp_path: Path) -> None:
    assert hosts.parse_bind("%s:/opt/x" % tmp_path) == "%s:/opt/x" % tmp_path


@pytest.mark.parametrize("text", ["", "/tmp", "/tmp:", ":/opt", "tmp:/opt", "/tmp:opt", "/tmp:/o:rw", "/tmp/../e:/x"])
def test_wrong_bind_option(text: str) -> None:
    with pytest.raises(common.LabError) as caught:
        hosts.parse_bind(text)
    expected = "folder '%s' is not understood: write SOURCE:TARGET, two absolute, plain paths." % text
    assert str(caught.value) == expected


def test_bind_of_a_folder_that_is_not_there() -> None:
    with pytest.raises(common.LabError, match=r"^folder '/nonexistent' is not there, so no host can see it\.$"):
        hosts.parse_bind("/nonexistent:/opt")


@pytest.mark.parametrize("name", ["", "A", "a/b", "../a", "a" * 21, "1a", "a b", "a.json"])
def test_wrong_lab_name(name: str) -> None:
    with pytest.raises(common.LabError, match="cannot name a lab"):
        hosts.check_lab_name(name)


def test_wrong_input_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["up", "--name", "x", "--host", "a=woody"]) == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", "lab: host 'a' asks for release 'woody': the lab has bullseye, bookworm, trixie.\n")


def test_not_root_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cli.main(["up", "--name", "x", "--host", "a=trixie"]) == 1
    expected = "lab: the lab must be run as root: it mounts file systems and starts systemd-nspawn.\n"
    assert capsys.readouterr().err == expected


def test_build_fills_the_cache_for_every_release(monkeypatch: pytest.MonkeyPatch) -> None:
    built: t.List[t.List[str]] = []
    monkeypatch.setattr(lifecycle, "require", lambda: None)
    monkeypatch.setattr(layers, "build", lambda roles: built.append(list(roles)))
    monkeypatch.setattr(roots, "build_roots", lambda releases: built.append(list(releases)))
    assert cli.main(["build"]) == 0
    assert sorted(built) == [["bullseye", "bookworm", "trixie"], ["gpu"]]


def test_missing_program_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert cli.main(["up", "--name", "x", "--host", "a=trixie"]) == 1
    expected = "lab: the lab needs 'systemd-nspawn': install the package 'systemd-container' (make prereqs does).\n"
    assert capsys.readouterr().err == expected


def test_inventory_is_yaml_with_the_groups() -> None:
    text = access.to_yaml(access.inventory(lab()))
    tree = t.cast(t.Any, yaml.safe_load(text))["all"]
    assert sorted(tree["children"]) == ["gateways", "gpu_hosts"]
    assert tree["children"]["gpu_hosts"]["hosts"]["gpu2"] == {
        "ansible_host": "10.213.3.12",
        "ansible_user": "ops",
        "ansible_become": True,
        "lab_release": "bullseye",
    }
    assert list(tree["children"]["gateways"]["hosts"]) == ["gw"]
    for option in ("ConnectTimeout=3", "ServerAliveInterval=3", "ServerAliveCountMax=2", "StrictHostKeyChecking=yes"):
        assert f"-o {option}" in tree["vars"]["ansible_ssh_args"]


def test_gateway_retries_nothing() -> None:
    text = layers.haproxy_config(lab())
    assert "retries 0" in text
    assert "no option redispatch" in text
    assert "server gpu1 10.213.3.11:8080 check" in text
    assert "server gw" not in text


def test_addresses_differ_between_hosts_and_labs() -> None:
    seen = {network.address(index, number) for index in range(3) for number in range(1, 201)}
    assert len(seen) == 600
    assert len({network.mac(index, number) for index in range(3) for number in range(1, 201)}) == 600


def test_index_avoids_routes_and_bridges(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*argv: str) -> str:
        if "route" in argv:
            return json.dumps([{"dst": "default"}, {"dst": "10.213.0.0/23"}, {"dst": "10.213.2.7"}])
        return json.dumps([{"ifname": "gpulab3"}])

    monkeypatch.setattr(network, "command", answer)
    assert network.free_index({4}) == 5


def test_root_is_named_by_its_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    before = roots.root_id("bookworm")
    assert before == roots.root_id("bookworm") != roots.root_id("trixie")
    monkeypatch.setattr(roots, "PACKAGES", (*roots.PACKAGES, "nginx"))
    assert roots.root_id("bookworm") != before


def test_mirror_is_the_machines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAB_MIRROR", raising=False)
    listing = (
        "Node Source|Node Source|https://one/\nDebian|Debian-Security|http://two/\nDebian|Debian|http://three/d/\n"
    )
    monkeypatch.setattr(roots, "command", lambda *_: listing)
    assert roots.mirror() == "http://three/d"


def test_mirror_on_ubuntu_is_the_standard_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAB_MIRROR", raising=False)
    monkeypatch.setattr(roots, "command", lambda *_: "Ubuntu|Ubuntu|http://one/\n")
    assert roots.mirror() == ""


def test_a_reused_pid_is_not_the_host() -> None:
    host = state.Host("a", "trixie", "gpu", "root", False, 1, "10.213.0.11", os.getpid(), state.started_at(os.getpid()))
    assert state.running(host)
    host.start += 1
    assert not state.running(host)


def test_record_survives_a_round_trip(tmp_path: t.Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "RUN", tmp_path)
    assert state.load("demo") is None
    lab().save()
    assert state.load("demo") == lab()
    assert state.find(None, "gpu2").name == "demo"
    with pytest.raises(common.LabError, match=r"^no lab has a host 'other'\.$"):
        state.find(None, "other")


def test_a_record_of_another_checkout_is_read_as_far_as_it_is_known(
    tmp_path: t.Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "RUN", tmp_path)
    lab().save()
    record = json.loads(state.record("demo").read_text())
    record["later"] = ["more"]
    for host in record["hosts"]:
        host["later"] = {"more": 1}
    state.record("demo").write_text(json.dumps(record))
    assert state.all_labs() == [lab()]
    assert state.find("demo", "gpu2").host("gpu2") == lab().host("gpu2")
    del record["hosts"][0]["address"]
    state.record("demo").write_text(json.dumps(record))
    with pytest.raises(common.LabError, match=r"cannot be read: it lacks something \(.*address.*\)\.$"):
        state.load("demo")


def test_a_group_that_the_host_removes_meanwhile_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that ends takes its group with it, in the middle of the walk through all of them."""
    for name, pid in (("", 7), ("user.slice", 8), ("user.slice/session-c3.scope", 9), ("system.slice", 10)):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "cgroup.procs").write_text("%d\n" % pid)
    monkeypatch.setattr(cgroups, "groups", lambda _lab, _host: [tmp_path])
    assert cgroups.members("demo", "gpu1") == {7, 8, 9, 10}
    real = os.scandir

    def scandir(path: str) -> t.Any:
        if str(path).endswith("session-c3.scope"):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert cgroups.members("demo", "gpu1") == {7, 8, 10}
