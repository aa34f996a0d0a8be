# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the command line of a container manager's client says: which containers it starts, and of which host."""

from __future__ import annotations

import os
import re
import shlex
from typing import Mapping, NamedTuple

__all__ = ["MANAGERS", "Client", "expand", "find", "same_image"]

MANAGERS = ("docker", "podman", "nerdctl", "systemd-nspawn")
COMPOSE = ("docker-compose", "podman-compose")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\Z")
UNTOLD = "\0"  # stands for the value of a variable that nobody here knows; no argument can hold it
HOST_VARIABLES = ("DOCKER_HOST", "DOCKER_CONTEXT", "CONTAINER_HOST", "CONTAINER_CONNECTION")
SHELLS = ("sh", "bash", "dash")
WRAPPERS = ("env", "exec", "nice", "ionice", "nohup", "chrt", "stdbuf", "systemd-cat", "sudo")
CONTROL = re.compile(r"[;&|(){}]+\Z")


def _options(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Options before the subcommand, and of run and start. Those that are in no list may or may not take the next word.
GLOBAL_FLAGS = _options(
    """
    -D --debug --tls --tlsverify -r --remote --syslog --transient-store --noout --debug-full --experimental
    --insecure-registry -v --version -h --help --volumes-from-host
    """
)
GLOBAL_VALUES = _options(
    """
    -H --host -c --context --connection --config -l --log-level --tlscacert --tlscert --tlskey --url --identity
    --root --runroot --storage-driver --storage-opt --cgroup-manager --conmon --events-backend --hooks-dir
    --imagestore --module --namespace -n --network-cmd-path --network-config-dir --out --runtime --runtime-flag
    --ssh --tmpdir --volumepath --default-mounts-file --db-backend --cdi-spec-dir --cni-config-dir --address -a
    --snapshotter --cni-path --cni-netconfpath --data-root --hosts-dir
    """
)
RUN_FLAGS = _options(
    """
    -d --detach -i --interactive -t --tty --init --privileged --read-only --rm -P --publish-all --no-healthcheck
    --oom-kill-disable --sig-proxy --disable-content-trust --help -q --quiet --use-api-socket --replace --rmi
    --no-hosts --no-hostname --env-host --http-proxy --tls-verify --passwd --read-only-tmpfs --rootfs --unsetenv-all
    """
)
RUN_VALUES = _options(
    """
    --add-host --annotation -a --attach --blkio-weight --blkio-weight-device --cap-add --cap-drop --cgroup-parent
    --cgroupns --cidfile --cpu-count --cpu-percent --cpu-period --cpu-quota --cpu-rt-period --cpu-rt-runtime -c
    --cpu-shares --cpus --cpuset-cpus --cpuset-mems --detach-keys --device --device-cgroup-rule --device-read-bps
    --device-read-iops --device-write-bps --device-write-iops --dns --dns-option --dns-opt --dns-search --domainname
    --entrypoint -e --env --env-file --expose --gpus --group-add --health-cmd --health-interval --health-retries
    --health-start-interval --health-start-period --health-timeout -h --hostname --ip --ip6 --ipc --isolation
    --kernel-memory -l --label --label-file --link --link-local-ip --log-driver --log-opt --mac-address -m --memory
    --memory-reservation --memory-swap --memory-swappiness --mount --name --net --network --net-alias
    --network-alias --oom-score-adj --pid --pids-limit --platform -p --publish --pull --restart --runtime
    --security-opt --shm-size --stop-signal --stop-timeout --storage-opt --sysctl --tmpfs --ulimit -u --user
    --userns --uts -v --volume --volume-driver --volumes-from -w --workdir --arch --authfile --cgroup-conf --cgroups
    --chrootdirs --conmon-pidfile --decryption-key --env-merge --gidmap --group-entry --health-log-destination
    --health-max-log-count --health-max-log-size --health-on-failure --health-startup-cmd --health-startup-interval
    --health-startup-retries --health-startup-success --health-startup-timeout --hooks-dir --hosts-file --hostuser
    --image-volume --init-ctr --init-path --os --passwd-entry --personality --pidfile --pod --pod-id-file
    --preserve-fd --preserve-fds --rdt-class --requires --retry --retry-delay --sdnotify --seccomp-policy --secret
    --shm-size-systemd --subgidname --subuidname --systemd --timeout --tz --uidmap --umask --unsetenv --variant
    """
)
START_FLAGS = _options(
    """
    -a --attach -i --interactive --all -l --latest --sig-proxy --help
    """
)
START_VALUES = _options(
    """
    --checkpoint --checkpoint-dir --detach-keys -f --filter
    """
)
STORES = _options(
    "--root --runroot --storage-driver --storage-opt --namespace -n --tmpdir --address -a --data-root --cgroup-manager"
)
NSPAWN_FLAGS = _options(
    """
    -q --quiet -x --ephemeral -b --boot -a --as-pid2 -U --keep-unit -n --network-veth --private-network --volatile
    --read-only --private-users-chown --suppress-sync --notify-ready --no-pager -P --pipe
    """
)
NSPAWN_VALUES = _options(
    """
    -D --directory -i --image -M --machine --template --slice -u --user -E --setenv --property --bind --bind-ro
    --tmpfs --overlay --overlay-ro --capability --drop-capability --ambient-capability --kill-signal --link-journal
    --network-bridge --uuid --network-interface --network-macvlan --network-ipvlan --network-zone
    --network-namespace-path -p --port -Z --selinux-context -L --selinux-apifs-context --rlimit --hostname --console
    --network-veth-extra --settings --personality --system-call-filter --resolv-conf --timezone --oom-score-adjust
    --cpu-affinity --chdir --pivot-root --register --root-hash --oci-bundle --private-users-ownership
    --load-credential --set-credential --inaccessible --no-new-privileges
    """
)


class Client(NamedTuple):
    """One command of a client."""

    manager: str  # docker, podman, nerdctl, nspawn
    verb: str  # run, start, attach, exec, compose
    names: tuple[str, ...] = ()  # names or ids; none where the command does not tell
    cidfile: str = ""  # a file that the id was written to
    image: str = ""  # of run
    folder: str = ""  # of nspawn: the root
    options: tuple[str, ...] = ()  # which daemon or store is meant
    elsewhere: str = ""  # what says that the containers are on another host
    keep_unit: bool = False


class _Words:
    """Options of one command, read as the clients read them."""

    def __init__(self, words: list[str], flags: frozenset[str], values: frozenset[str]) -> None:
        self.found: list[tuple[str, str]] = []
        self.rest: list[str] = []
        self.sure = len(words)  # how many words were read for sure
        place = 0
        while place < len(words):
            word = words[place]
            place += 1
            if word == "--":
                self.rest = words[place:]
                return
            if not word.startswith("-") or word == "-":
                self.rest = words[place - 1 :]
                return
            if word.startswith("--"):
                name, equals, value = word.partition("=")
                if equals:
                    self.found.append((name, value))
                elif name in values:
                    self.found.append((name, words[place] if place < len(words) else UNTOLD))
                    place += 1
                else:
                    self.found.append((name, "true"))
                    if name not in flags:
                        # Whether the next word is its value is not known, so nor is where the options end.
                        self.found.append(("unknown", name))
                continue
            for number, letter in enumerate(word[1:], 1):
                name = "-" + letter
                if name in values:
                    value = word[number + 1 :].lstrip("=")
                    if not word[number + 1 :]:
                        value = words[place] if place < len(words) else UNTOLD
                        place += 1
                    self.found.append((name, value))
                    break
                self.found.append((name, "true"))
                if name not in flags:
                    self.found.append(("unknown", name))
                    break

    def value(self, *names: str) -> str:
        """The last value that was surely given to an option, empty without one."""
        found = ""
        for name, value in self.found:
            if name == "unknown":
                break
            if name in names:
                found = value
        return found

    @property
    def whole(self) -> bool:
        return not any(name == "unknown" for name, _value in self.found)


def expand(words: list[str], variables: Mapping[str, str]) -> list[str]:
    """The words of a command after what systemd does to variables in them."""
    done: list[str] = []
    for word in words:
        whole = re.fullmatch(r"\$([A-Za-z_][A-Za-z0-9_]*)", word)
        if whole is not None:
            value = variables.get(whole.group(1))
            done += [UNTOLD] if value is None else value.split()
            continue
        done.append(
            re.sub(
                r"\$\$|\$\{([A-Za-z_][A-Za-z0-9_]*)\}",
                lambda found: "$" if found.group(1) is None else variables.get(found.group(1), UNTOLD),
                word,
            )
        )
    return done


def find(words: list[str], variables: Mapping[str, str]) -> list[Client]:
    """The clients that a command line is, or that a shell in it starts."""
    return [client for part in _commands(list(words), 0) for client in _client(part, variables)]


def _commands(words: list[str], depth: int) -> list[list[str]]:
    """The command itself behind what only wraps it; of a shell's script each command."""
    while words and re.match(r"[A-Za-z_][A-Za-z0-9_]*=", words[0]):
        words = words[1:]
    if words and os.path.basename(words[0]) in WRAPPERS:
        known = (*MANAGERS, *COMPOSE, *SHELLS)
        words = words[next((at for at, word in enumerate(words) if os.path.basename(word) in known), len(words)) :]
    if not words or os.path.basename(words[0]) not in SHELLS or depth > 1:
        return [words] if words else []
    script = next((words[place + 1 : place + 2] for place, word in enumerate(words) if _runs_script(word)), [])
    try:
        lexer = shlex.shlex(script[0] if script else "", posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        parts = list(lexer)
    except ValueError:
        return []
    commands: list[list[str]] = [[]]
    for part in parts:
        if CONTROL.match(part) or part in ("then", "do", "else", "if", "while", "!"):
            commands.append([])
        else:
            # A shell knows more ways to put something in place of a word than are followed here.
            commands[-1].append(UNTOLD if re.search(r"[$`]", part) else part)
    return [found for command in commands for found in _commands(command, depth + 1)]


def _runs_script(word: str) -> bool:
    return word.startswith("-") and not word.startswith("--") and word.endswith("c")


def _client(words: list[str], variables: Mapping[str, str]) -> list[Client]:
    program = os.path.basename(words[0])
    if program in COMPOSE:
        return [Client(program.split("-")[0], "compose")]
    if program == "systemd-nspawn":
        return [_nspawn(words[1:])]
    if program not in MANAGERS:
        return []
    before = _Words(words[1:], GLOBAL_FLAGS, GLOBAL_VALUES)
    rest = before.rest[1:] if before.rest[:1] == ["container"] else before.rest
    if not rest:
        return []
    elsewhere, options = _host(program, before, variables)
    client = Client(program, rest[0], options=options, elsewhere=elsewhere)
    if rest[0] == "run":
        return [_run(client, rest[1:])]
    if rest[0] == "start":
        return [_start(client, rest[1:])]
    if rest[0] in ("attach", "exec", "compose"):
        return [client]
    return []


def _run(client: Client, words: list[str]) -> Client:
    options = _Words(words, RUN_FLAGS, RUN_VALUES)
    name, cidfile = options.value("--name"), options.value("--cidfile")
    image = options.rest[0] if options.whole and options.rest else ""
    return client._replace(
        names=(name,) if NAME.match(name) else (),
        cidfile=cidfile if cidfile.startswith("/") and UNTOLD not in cidfile else "",
        image="" if UNTOLD in image else image,
    )


def _start(client: Client, words: list[str]) -> Client:
    options, names = _Words(words, START_FLAGS, START_VALUES), []
    rest, whole = options.rest, options.whole
    while rest and whole:  # names and options may be mixed
        names.append(rest[0])
        more = _Words(rest[1:], START_FLAGS, START_VALUES)
        rest, whole = more.rest, more.whole
    if not whole or not all(NAME.match(name) for name in names):
        return client
    return client._replace(names=tuple(names))


def _nspawn(words: list[str]) -> Client:
    options = _Words(words, NSPAWN_FLAGS, NSPAWN_VALUES)
    folder = options.value("-D", "--directory")
    image = options.value("-i", "--image")
    name = options.value("-M", "--machine")
    if not name and options.whole and (folder or image):
        name = os.path.basename((folder or image).rstrip("/"))
        name = name[:-4] if image and name.endswith(".raw") else name
    if not re.match(r"[A-Za-z0-9_.-]{1,64}\Z", name):
        name = ""
    if UNTOLD in folder or not folder.startswith("/"):
        folder = ""
    if name and not folder and not image and options.whole:
        folder = "/var/lib/machines/" + name
    return Client("nspawn", "run", (name,) if name else (), folder=folder, keep_unit=bool(options.value("--keep-unit")))


def _host(program: str, before: _Words, variables: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """What says that the client works on another host, and the options that say which daemon or store it means."""
    host, store = "", []
    if not before.whole:
        return "an option that is not known", ()
    for name, value in before.found:
        if name in ("-H", "--host", "--url"):
            host = value
        elif name in ("-c", "--context", "--connection", "-r", "--remote", "--ssh", "--identity"):
            if (name, value) != ("--context", "default") and value != "false":
                return "%s %s" % (name, value), ()
        elif name in STORES:
            store += [name, value]
    for variable in HOST_VARIABLES:
        value = variables.get(variable, "")
        used = variable.startswith("DOCKER") == (program == "docker")
        if not used or not value or (variable == "DOCKER_CONTEXT" and value == "default"):
            continue
        if variable.endswith("_HOST"):
            host = host or value
        elif not host:
            return "%s=%s" % (variable, value), ()
    if not host:
        return "", tuple(store)
    if program != "docker" or not host.startswith("unix:///") or UNTOLD in host:
        return "its host %s" % host.replace(UNTOLD, "?"), ()
    return "", ("--host", host, *store)


def same_image(one: str, other: str) -> bool:
    """Whether two names mean the same image, as far as names tell: one may leave out the registry or the tag."""
    if not one or not other:
        return False
    first, second = (_parts(name) for name in (one, other))
    shorter = min(len(first), len(second))
    return first[-shorter:] == second[-shorter:]


def _parts(image: str) -> list[str]:
    last = image.rsplit("/", 1)[-1]
    return (image if ":" in last or "@" in last else image + ":latest").split("/")
