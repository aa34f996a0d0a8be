# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How the controller reaches the hosts: keys, known hosts, ssh_config and the Ansible inventory."""

from __future__ import annotations

import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .common import BUILD, LabError, command, write
from .state import Host, Lab, running

# A silent cut is noticed in about 8 s; with ssh's own defaults it hangs until the link comes back.
OPTIONS = {
    "ConnectTimeout": "3",
    "ServerAliveInterval": "3",
    "ServerAliveCountMax": "2",
    "StrictHostKeyChecking": "yes",
    "GlobalKnownHostsFile": "/dev/null",
    "IdentitiesOnly": "yes",
    "PreferredAuthentications": "publickey",
    "LogLevel": "ERROR",
}


def folder(lab: Lab) -> Path:
    """Return where the lab's inventory and keys are written."""
    return BUILD / lab.name


def make_keys(lab: Lab) -> dict[str, dict[str, str]]:
    """Create the controller's key and one host key per host; return what each host needs."""
    place = folder(lab)
    user = _key(place / "id_ed25519", f"lab-{lab.name}")
    keys = {}
    known = ""
    for host in lab.hosts:
        private = place / "hostkeys" / host.name
        public = _key(private, host.name)
        known += f"{host.name},{host.address} {' '.join(public.split()[:2])}\n"
        keys[host.name] = {
            "user_public": user,
            "host_public": public,
            "host_private": private.read_text(encoding="utf-8"),
        }
    write(place / "known_hosts", known)
    return keys


def _key(path: Path, comment: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in (path, path.with_name(path.name + ".pub")):
        old.unlink(missing_ok=True)
    command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", path)
    return path.with_name(path.name + ".pub").read_text(encoding="utf-8")


def control_folder(lab: Lab) -> Path:
    """Return the folder of shared ssh connections; its path is short because a socket's path must be."""
    return lab.folder / "ssh"


def write_ssh_config(lab: Lab) -> None:
    """Write a config for `ssh -F`."""
    lines = []
    for host in lab.hosts:
        lines += [f"Host {host.name}", f"  HostName {host.address}", f"  User {host.user}"]
    lines += ["Host *", f'  IdentityFile "{folder(lab) / "id_ed25519"}"']
    lines += [f'  UserKnownHostsFile "{folder(lab) / "known_hosts"}"']
    lines += [f"  {key} {value}" for key, value in OPTIONS.items()]
    write(folder(lab) / "ssh_config", "\n".join(lines) + "\n")


def inventory(lab: Lab) -> dict[str, Any]:
    """Return the inventory of a lab."""
    groups: dict[str, Any] = {"gpu_hosts": {"hosts": {}}, "gateways": {"hosts": {}}}
    for host in lab.hosts:
        values: dict[str, Any] = {"ansible_host": host.address, "ansible_user": host.user, "lab_release": host.release}
        if host.user != "root":
            values["ansible_become"] = True
        groups["gateways" if host.role == "gateway" else "gpu_hosts"]["hosts"][host.name] = values
    options = dict(OPTIONS, UserKnownHostsFile=str(folder(lab) / "known_hosts"))
    arguments = ["-o ControlMaster=auto", "-o ControlPersist=60s"]
    arguments += [f"-o {key}={json.dumps(value) if ' ' in value else value}" for key, value in options.items()]
    shared = {
        "ansible_connection": "ssh",
        "ansible_python_interpreter": "/usr/bin/python3",
        "ansible_ssh_private_key_file": str(folder(lab) / "id_ed25519"),
        "ansible_ssh_args": " ".join(arguments),
        "ansible_control_path_dir": str(control_folder(lab)),
        "ansible_ssh_pipelining": True,
        "lab_name": lab.name,
        "lab_folder": str(folder(lab)),
    }
    return {"all": {"vars": shared, "children": groups}}


def to_yaml(value: dict[str, Any], depth: int = 0) -> str:
    """Write nested dictionaries as YAML; a JSON scalar is a YAML scalar."""
    text = ""
    for key, item in value.items():
        if isinstance(item, dict) and item:
            text += f"{'  ' * depth}{key}:\n{to_yaml(item, depth + 1)}"
        else:
            text += f"{'  ' * depth}{key}: {json.dumps(item)}\n"
    return text


def write_inventory(lab: Lab) -> Path:
    """Write the inventory file and return its path."""
    path = folder(lab) / "inventory.yml"
    write(path, "---\n" + to_yaml(inventory(lab)))
    return path


def wait_for_ssh(lab: Lab, hosts: list[Host], timeout: float = 60.0) -> None:
    """Return when every host runs a command through SSH as its user, as root where that takes sudo."""
    deadline = time.monotonic() + timeout

    def wait(host: Host) -> None:
        # A probe must not outlive us: its host may be gone before it notices.
        argv = ["setpriv", "--pdeathsig", "KILL", "ssh", "-F", str(folder(lab) / "ssh_config")]
        argv += ["-o", "ConnectTimeout=1", host.name]
        argv += ["sudo", "-n", "true"] if host.user != "root" else ["true"]
        while True:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return
            console = folder(lab) / "console" / f"{host.name}.log"
            if not running(host):
                tail = (console.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
                raise LabError(f"host '{host.name}' did not boot: {tail}")
            if time.monotonic() > deadline:
                why = (done.stderr.strip().splitlines() or ["no answer"])[-1]
                raise LabError(
                    f"host '{host.name}' does not answer SSH after {timeout:.0f} s: {why}; its console is '{console}'."
                )
            time.sleep(0.15)

    with ThreadPoolExecutor(max_workers=max(1, min(16, len(hosts)))) as pool:
        list(pool.map(wait, hosts))


def close_connections(lab: Lab) -> None:
    """End the shared ssh connections that Ansible leaves for a minute."""
    for socket in control_folder(lab).glob("*"):
        subprocess.run(
            ["ssh", "-o", f"ControlPath={socket}", "-O", "exit", "lab"], capture_output=True, check=False, timeout=10
        )
