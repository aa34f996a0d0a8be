# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The command line of the lab."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import Sequence

from . import access, lifecycle, machines, network, state
from .common import REPO, LabError
from .hosts import RELEASES, check_lab_name, parse_bind, parse_hosts

_EXAMPLE = """example:
  lab.py up --name demo --host gpu1=bookworm --host gpu2=bullseye,user=ops --host gw=bookworm,role=gateway
  ansible -i build/lab/demo/inventory.yml all -m ping
  lab.py run gpu1 -- systemctl status
  lab.py cut gpu1; lab.py heal gpu1
  lab.py down --name demo
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lab.py",
        description=(__doc__ or "") + " Hosts are removed without a trace by 'down'.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    up = verbs.add_parser("up", help="boot a lab and wait until every host answers SSH")
    up.add_argument("--name", required=True, help="name of the lab")
    up.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME=RELEASE[,OPTION...]",
        help="a host: release bullseye, bookworm or trixie; options role=gateway, user=ops, legacy=1",
    )
    up.add_argument(
        "--bind",
        action="append",
        default=[],
        metavar="SOURCE:TARGET",
        help="a folder of this machine that every host sees at TARGET and cannot change",
    )
    verbs.add_parser("build", help="build what hosts are made of, unless it is in the cache")
    down = verbs.add_parser("down", help="remove a lab; no lab of that name is not an error")
    which = down.add_mutually_exclusive_group(required=True)
    which.add_argument("--name", help="name of the lab")
    which.add_argument("--all", action="store_true", help="every lab that was started from this checkout")
    verbs.add_parser("status", help="list the labs of this machine")
    verbs.add_parser("run", help="run HOST -- COMMAND: as root, whether its network works or not")
    for verb, text in (
        ("cut", "pull the network cable of a host: packets are lost silently"),
        ("heal", "plug the cable in again"),
        ("reboot", "reboot a host, or boot a killed one, and wait for SSH"),
        ("kill", "pull the plug of a host"),
    ):
        verbs.add_parser(verb, help=text)
    for verb in ("run", "cut", "heal", "reboot", "kill"):
        verbs.choices[verb].add_argument("--name", help="name of the lab, when several are up")
        verbs.choices[verb].add_argument("host", metavar="HOST")
    return parser


def _status() -> int:
    labs = state.all_labs()
    if not labs:
        print("no lab is up")
    for lab in labs:
        print(f"{lab.name}  {network.subnet(lab.index)}  {lab.repository}")
        for host in lab.hosts:
            word = "up" if state.running(host) else "down"
            if word == "up":
                word = _cable_word(host)
            print(f"  {host.name:<20} {host.address:<15} {host.release:<9} {host.role:<8} {host.user:<5} {word}")
    return 0


def _cable_word(host: state.Host) -> str:
    try:
        return "cut" if network.is_cut(machines.leader(host)) else "up"
    except LabError:
        return "booting"


def _down(name: str | None) -> int:
    if name is not None:
        if not lifecycle.down(check_lab_name(name)):
            print(f"lab '{name}' is not up: nothing to do")
        return 0
    failures = []
    for lab in state.all_labs():
        if lab.repository == str(REPO):
            try:
                lifecycle.down(lab.name)
            except LabError as exc:
                failures.append(str(exc))
    if failures:
        raise LabError(" ".join(failures))
    return 0


def _on_host(args: argparse.Namespace, words: list[str]) -> int:
    lifecycle.require()
    lab = state.find(args.name, args.host)
    host = lab.host(args.host)
    if args.verb == "run":
        if not words:
            raise LabError("no command was given: write run HOST -- COMMAND.")
        argv = machines.inside(host, words, terminal=sys.stdin.isatty() and sys.stdout.isatty())
        os.execvp(argv[0], argv)
    if args.verb == "cut":
        network.cut(machines.leader(host))
    elif args.verb == "heal":
        network.heal(machines.leader(host), lab.index)
    elif args.verb == "reboot":
        lifecycle.reboot(lab, host)
    else:
        lifecycle.kill(lab, host)
    return 0


def _terminate(number: int, _frame: object) -> None:
    """Unwind as for an interrupt from the keyboard, so that a half-started lab is removed."""
    raise SystemExit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    split = given.index("--") if "--" in given else len(given)
    args = _parser().parse_args(given[:split])
    signal.signal(signal.SIGTERM, _terminate)
    try:
        if args.verb == "up":
            binds = [parse_bind(one) for one in args.bind]
            lab = lifecycle.up(check_lab_name(args.name), parse_hosts(args.host), binds)
            print(f"lab: inventory '{access.folder(lab) / 'inventory.yml'}'")
            return 0
        if args.verb == "build":
            lifecycle.build(["gpu"], RELEASES)
            return 0
        if args.verb == "down":
            return _down(args.name)
        if args.verb == "status":
            return _status()
        return _on_host(args, given[split + 1 :])
    except LabError as exc:
        print(f"lab: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lab: interrupted", file=sys.stderr)
        return 130
