# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's bridge: one per lab, its own subnet, no way out; cables that can be pulled."""

from __future__ import annotations

import contextlib
import ipaddress
import json

from .common import LabError, command

_FIRST_OCTETS = "10.213"
_MOST_LABS = 200


def subnet(index: int) -> ipaddress.IPv4Network:
    """Return the subnet of the lab with this number."""
    return ipaddress.IPv4Network(f"{_FIRST_OCTETS}.{index}.0/24")


def bridge_name(index: int) -> str:
    """Return the bridge of the lab with this number."""
    return f"gpulab{index}"


def address(index: int, number: int) -> str:
    """Return the address of host *number* (from 1); the bridge itself has .1."""
    return str(subnet(index)[number + 10])


def mac(index: int, number: int) -> str:
    """Return the hardware address of host *number*, locally administered."""
    return f"02:67:70:75:{index:02x}:{number:02x}"


def free_index(taken: set[int]) -> int:
    """Return a lab number whose bridge and subnet nobody on this machine uses."""
    links = {link["ifname"] for link in json.loads(command("ip", "-j", "link") or "[]")}
    used = []
    for route in json.loads(command("ip", "-j", "-4", "route", "show", "table", "all") or "[]"):
        try:
            used.append(ipaddress.ip_network(route.get("dst", ""), strict=False))
        except ValueError:
            continue
    for index in range(_MOST_LABS):
        wanted = subnet(index)
        if index in taken or bridge_name(index) in links:
            continue
        if any(net.prefixlen > 0 and net.overlaps(wanted) for net in used):
            continue
        return index
    raise LabError(f"no subnet below {_FIRST_OCTETS}.0.0/16 is free for another lab.")


def create(index: int) -> str:
    """Create the bridge, with the controller's own address on it."""
    name = bridge_name(index)
    command("ip", "link", "add", name, "type", "bridge", "forward_delay", "0", "stp_state", "0")
    command("ip", "address", "add", f"{subnet(index)[1]}/24", "dev", name)
    command("ip", "link", "set", name, "up")
    return name


def remember(index: int, number: int) -> None:
    """Fix a host's hardware address here, so that a pulled cable loses packets silently instead of failing in ARP."""
    command(
        "ip",
        *("neighbour", "replace", address(index, number), "lladdr", mac(index, number)),
        *("dev", bridge_name(index), "nud", "permanent"),
    )


def exists(name: str) -> bool:
    """Say whether a link of this name is there."""
    try:
        command("ip", "link", "show", "dev", name)
    except LabError:
        return False
    return True


def remove(index: int) -> None:
    """Remove the bridge, if it is there; the hosts' cables went with their hosts."""
    name = bridge_name(index)
    if exists(name):
        command("ip", "link", "delete", name, "type", "bridge")


def cable(leader: int) -> str:
    """Return the controller's end of the cable of the host whose init is *leader*."""
    inside = json.loads(
        command("nsenter", "--target", str(leader), "--net", "ip", "-j", "link", "show", "dev", "host0")
    )
    peer = inside[0].get("link_index")
    for link in json.loads(command("ip", "-j", "link")):
        if link["ifindex"] == peer:
            return str(link["ifname"])
    raise LabError(f"the cable of process {leader} has no end on this machine.")


def drop_cable(machine: str) -> None:
    """Remove the cable of a machine that is down.

    It usually goes with the machine. But sockets that still wait for an answer keep the network of a machine whose
    cable was pulled alive for minutes, and the next machine of that name could not boot.
    """
    name = f"vb-{machine}"
    if exists(name):
        # It may go by itself in between.
        with contextlib.suppress(LabError):
            command("ip", "link", "delete", "dev", name)


def cut(leader: int) -> None:
    """Pull the cable: both ends keep their carrier, packets are lost without a word."""
    command("ip", "link", "set", "dev", cable(leader), "nomaster")


def heal(leader: int, index: int) -> None:
    """Plug the cable in again."""
    command("ip", "link", "set", "dev", cable(leader), "master", bridge_name(index), "up")


def is_cut(leader: int) -> bool:
    """Say whether the cable is pulled."""
    link = json.loads(command("ip", "-j", "link", "show", "dev", cable(leader)))[0]
    return "master" not in link
