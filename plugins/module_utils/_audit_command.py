# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the command lines of a unit say: which engine they start, as whom, on which GPUs and ports, behind what gate."""

from __future__ import annotations

import os
import re
import shlex
import typing as t

from ._clients import COMPOSE, MANAGERS, SHELLS, UNTOLD

__all__ = (
    "Port",
    "commands",
    "drain_of",
    "engine_of",
    "gpus_of",
    "is_gate",
    "option",
    "ports_of",
    "stops",
    "switches",
    "waits",
)

Words = t.Sequence[str]


class Port(t.NamedTuple):
    """Where a unit is told to listen; no address means all of them."""

    number: int
    address: str = ""


def _set(text: str) -> t.FrozenSet[str]:
    return frozenset(text.split())


# Programs that are one engine, and programs that are one with a word behind them.
PROGRAMS = {
    "llama-server": "llama_cpp",
    "ovms": "ovms",
    "tritonserver": "triton",
    "text-generation-launcher": "tgi",
}
PAIRS = {("vllm", "serve"): "vllm", ("sglang", "serve"): "sglang", ("ollama", "serve"): "ollama"}
MODULES = (("vllm.", "vllm"), ("sglang.", "sglang"), ("llama_cpp.server", "llama_cpp"))
IMAGES = (
    (r"(?:^|/)vllm(?:-openai)?(?:[:@]|$)", "vllm"),
    (r"(?:^|/)sglang(?:[:@]|$)", "sglang"),
    (r"(?:^|/)llama\.cpp:(?:full|server)", "llama_cpp"),
    (r"(?:^|/)openvino/model_server(?:[:@]|$)", "ovms"),
    (r"(?:^|/)tritonserver(?:[:@]|$)", "triton"),
    (r"(?:^|/)text-generation-inference(?:[:@]|$)", "tgi"),
    (r"(?:^|/)ollama/ollama(?:[:@]|$)", "ollama"),
)
PORT_OPTIONS = {
    "vllm": ("--port",),
    "sglang": ("--port",),
    "llama_cpp": ("--port",),
    "ovms": ("--rest_port",),
    "triton": ("--http-port",),
    "tgi": ("--port", "-p"),
}
PORT_VARIABLES = {"llama_cpp": "LLAMA_ARG_PORT", "tgi": "PORT"}
HOST_OPTIONS = ("--host", "--hostname", "--rest_bind_address", "--http-address")
# The option that gives an engine time to drain; it needs as long, and some more to end.
DRAIN_OPTIONS = {"vllm": "--shutdown-timeout", "triton": "--exit-timeout-secs"}
DRAIN_MARGIN = 30.0
VISIBLE = (
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "ZE_AFFINITY_MASK",
)
NO_DEVICE = ("", "-1", "none", "void", "NoDevFiles")
WILDCARDS = ("", "0.0.0.0", "::", "[::]", "*")

# They run the command behind their options.
WRAPPERS = _set("env exec nice ionice nohup chrt stdbuf systemd-cat taskset numactl time timeout setsid unbuffer")
VALUE_OF_WRAPPER = re.compile(r"[0-9][0-9a-fx.,:smhd-]*\Z")
VALUES = {  # options that take the next word
    "sudo": _set("-u -g -C -h -p -r -t -T -U -D -R --user --group --host --prompt --role --type --chdir"),
    "runuser": _set("-u -g -G -s -w --user --group --supp-group --shell --whitelist-environment"),
    "su": _set("-g -G -s -w --group --supp-group --shell --whitelist-environment"),
    "setpriv": _set("--reuid --regid --ruid --rgid --euid --egid --groups --pdeathsig --securebits"),
}
CONTROL = ("then", "do", "done", "else", "elif", "if", "fi", "while", "until", "!")
DEEPEST = 4

# What comes before a start and surely looks at no GPU.
HARMLESS = _set(
    "mkdir rm rmdir sleep true false : echo printf chown chmod chgrp cp mv ln touch install test [ cd export ulimit "
    "logger cat mount umount modprobe nvidia-modprobe nvidia-persistenced systemd-tmpfiles sysctl set git wget ip "
    "iptables renice sync date hostname id whoami"
)
HARMLESS_VERBS = _set("pull rm stop kill create network volume image build login load tag rmi")
SETTINGS = re.compile(r"-(?:pm|pl|lgc|rgc|acp|e|c|mig)\Z|--(?:persistence-mode|power-limit|lock-gpu-clocks|compute-)")
WAITS = re.compile(r"(?:^|[\s;|&(])(?:until|while)\s|--retry|wait[-_]|gpuops\s+wait\b")


def commands(words: Words, depth: int = 0) -> t.List[t.List[str]]:
    """Each command of a command line: itself, the one that it wraps or switches to, and those of a shell's script."""
    rest = list(words)
    while rest and re.match(r"[A-Za-z_][A-Za-z0-9_]*=", rest[0]):
        rest = rest[1:]
    if not rest or depth > DEEPEST:
        return []
    found, inner = [rest], _inner(rest)
    for more in inner:
        found += commands(more, depth + 1)
    return found


def _inner(words: t.List[str]) -> t.List[t.List[str]]:
    """The commands that a command runs, as far as its words tell."""
    program, rest = os.path.basename(words[0]), words[1:]
    if program in SHELLS or program in ("su", "runuser"):
        script = _script(program, rest)
        if script is not None:
            return _of_script(script)
        if program in SHELLS:
            return []
    if program in WRAPPERS:
        place = next((at for at, word in enumerate(rest) if not _belongs(word)), len(rest))
        return [rest[place:]] if rest[place:] else []
    if program in ("gosu", "su-exec"):
        return [rest[1:]] if rest[1:] else []
    if program in VALUES and program != "su":
        place = _end_of_options(rest, VALUES[program])
        return [rest[place:]] if rest[place:] else []
    return []


def _belongs(word: str) -> bool:
    return word.startswith("-") or "=" in word or bool(VALUE_OF_WRAPPER.match(word))


def _end_of_options(words: Words, values: t.Container[str]) -> int:
    """Where the options end, and the command behind them begins."""
    place = 0
    while place < len(words) and (words[place].startswith("-") or "=" in words[place].split("/")[0]):
        if words[place] == "--":
            return place + 1
        joined = re.match(r"-[A-Za-z]{2,}\Z", words[place]) and "-" + words[place][-1] in values
        place += 2 if words[place] in values or joined else 1
    return place


def _script(program: str, words: t.List[str]) -> t.Optional[str]:
    """What a shell, or somebody's shell, is given to run."""
    if program == "runuser" and {"-u", "--user"} & set(words[: _end_of_options(words, VALUES["runuser"])]):
        return None  # it runs the command itself
    if "--" in words:
        words = words[: words.index("--")]
    for place, word in enumerate(words):
        if word == "--command" or re.match(r"-[A-Za-z]*c\Z", word):
            return words[place + 1] if place + 1 < len(words) else None
        if word.startswith("--command="):
            return word.partition("=")[2]
        if program in SHELLS and not word.startswith(("-", "+")) and words[place - 1 : place] not in (["-o"], ["+o"]):
            return None  # a file, and what follows is its own
    return None


def _of_script(script: str) -> t.List[t.List[str]]:
    try:
        lexer = shlex.shlex(script, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        parts = list(lexer)
    except ValueError:
        return []
    found: t.List[t.List[str]] = [[]]
    for part in parts:
        if re.match(r"[;&|(){}<>]+\Z", part) or part in CONTROL:
            found.append([])
        else:
            found[-1].append(UNTOLD if re.search(r"[$`]", part) else part)
    return [command for command in found if command]


def engine_of(words: Words, image: str = "") -> str:
    """The engine that a command line starts, empty where it does not tell."""
    for command in commands(words):
        program = os.path.basename(command[0])
        if program in PROGRAMS:
            return PROGRAMS[program]
        for first, second in zip(command, command[1:]):
            engine = PAIRS.get((os.path.basename(first), second), "")
            if not engine and first == "-m":
                engine = next((name for start, name in MODULES if second.startswith(start)), "")
            if engine:
                return engine
    for pattern, engine in IMAGES if image else ():
        if re.search(pattern, image):
            return engine
    if image and image in words:
        behind = list(words)[list(words).index(image) + 1 :]
        return engine_of(behind) if behind else ""
    return ""


def option(words: Words, *names: str) -> str:
    """The last value of an option, empty without one."""
    found = ""
    for command in commands(words):
        for place, word in enumerate(command):
            name, equals, value = word.partition("=")
            if name not in names:
                continue
            if equals:
                found = value
            elif place + 1 < len(command):
                found = command[place + 1]
    return found


def drain_of(engine: str, words: Words) -> float:
    """Seconds that the command line itself gives the engine to drain in, and to end; 0 where it says nothing of it."""
    value = option(words, DRAIN_OPTIONS[engine]) if engine in DRAIN_OPTIONS else ""
    return float(value) + DRAIN_MARGIN if re.match(r"[0-9]{1,6}(?:\.[0-9]+)?\Z", value) and float(value) > 0 else 0.0


def ports_of(
    engine: str, words: Words, default: t.Optional[int], variables: t.Mapping[str, str], container: t.Optional[str]
) -> t.Tuple[Port, ...]:
    """Where a command line lets the engine listen on this host. ``container`` is the image of a container client."""
    if container is not None:
        before = _before_image(words, container)
        if "host" not in (_value(before, "--network"), _value(before, "--net")):
            return tuple(filter(None, map(_published, _all_values(before, "-p", "--publish"))))
    if engine == "ollama":
        address, _colon, number = variables.get("OLLAMA_HOST", "").rpartition(":")
        return (port(number or str(default or ""), address.rpartition("/")[2]),) if number.isdigit() or default else ()
    told = option(words, *PORT_OPTIONS.get(engine, ())) or variables.get(PORT_VARIABLES.get(engine, ""), "")
    # What is read from a file, or put in by a shell, may say otherwise.
    untold = any(UNTOLD in word for word in words) or any(word.startswith("--config") for word in words)
    number = told or ("" if untold or default is None else str(default))
    return (port(number, option(words, *HOST_OPTIONS)),) if re.match(r"[0-9]{1,5}\Z", number) else ()


def port(number: str, address: str) -> Port:
    """Where somebody is told to listen; an address that nobody knows here is any."""
    return Port(int(number), "" if address in WILDCARDS or UNTOLD in address else address)


def _before_image(words: Words, image: str) -> t.List[str]:
    """The options of a container's client: what comes behind its image is the container's own."""
    found = list(words)
    return found[: found.index(image)] if image and image in found else []


def _all_values(words: Words, *names: str) -> t.List[str]:
    found = []
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names and (equals or place + 1 < len(words)):
            found.append(value if equals else words[place + 1])
    return found


def _value(words: Words, *names: str) -> str:
    return (_all_values(words, *names) or [""])[-1]


def _published(text: str) -> t.Optional[Port]:
    """``8000:80``, ``127.0.0.1:8000:80/tcp``; a port that the manager chooses, a range and UDP are left out."""
    match = re.match(r"(?:(\[[0-9a-f:]+\]|[0-9.]+):)?([0-9]{1,5}):[0-9]{1,5}(?:/tcp)?\Z", text)
    return port(match.group(2), match.group(1) or "") if match else None


def gpus_of(engine: str, words: Words, variables: t.Mapping[str, str], container: t.Optional[str]) -> t.Tuple[str, ...]:
    """The devices that the unit names for itself; nothing where it names none."""
    if container is not None:
        before = _before_image(words, container)
        device = re.match(r"\"?device=([^\"]+)\"?\Z", _value(before, "--gpus"))
        if device:
            return _listed(device.group(1))
        names = [value[15:] for value in _all_values(before, "--device") if value.startswith("nvidia.com/gpu=")]
        if names:
            return tuple(name for name in names if name != "all")
        variables = dict(pair.split("=", 1) for pair in _all_values(before, "-e", "--env") if "=" in pair)
    for name in VISIBLE:
        value = variables.get(name)
        if value is not None:
            devices = _listed(value)
            return () if UNTOLD in value or "all" in devices else devices
    first = option(words, "--base-gpu-id") if engine == "sglang" else ""
    count = option(words, "--tp-size", "--tensor-parallel-size", "--tp") or "1"
    if first.isdigit() and count.isdigit() and 0 < int(count) <= 64:
        return tuple(str(int(first) + at) for at in range(int(count)))
    return ()


def _listed(text: str) -> t.Tuple[str, ...]:
    return tuple(dict.fromkeys(word for word in (part.strip() for part in text.split(",")) if word not in NO_DEVICE))


def switches(words: Words) -> t.List[t.Tuple[str, bool]]:
    """What sets the groups of the process anew, each with whether it opens a login session as well."""
    found = []
    for command in commands(words):
        program, rest = os.path.basename(command[0]), command[1:]
        own = rest[: _end_of_options(rest, VALUES.get(program, ()))]
        flags = {part for word in own for part in _parts(word)}
        if program == "su":
            found.append(("su", True))
        elif program == "runuser":
            login = bool({"-", "-l", "--login"} & flags)
            found.append(("runuser -l" if login else "runuser", login))
        elif program == "sudo":
            if {"-i", "--login"} & flags:
                found.append(("sudo -i", True))
            elif not {"-P", "--preserve-groups"} & flags:
                found.append(("sudo", False))
        elif program == "setpriv":
            flag = next((one for one in ("--init-groups", "--clear-groups", "--groups") if one in flags), "")
            if flag:
                found.append(("setpriv " + flag, False))
        elif program in ("gosu", "su-exec"):
            found.append((program, False))
        elif program == "chroot" and {"--userspec", "--groups"} & flags:
            found.append(("chroot --userspec", False))
        elif program == "start-stop-daemon" and {"-c", "--chuid"} & _all_parts(rest):
            found.append(("start-stop-daemon --chuid", False))
        elif program == "capsh" and "--user" in flags:
            found.append(("capsh --user", False))
    return list(dict.fromkeys(found))


def _all_parts(words: t.List[str]) -> t.Set[str]:
    """The options up to where the command's own begin."""
    return {part for word in (words[: words.index("--")] if "--" in words else words) for part in _parts(word)}


def _parts(word: str) -> t.List[str]:
    """An option without its value; letters that stand together are taken apart."""
    if re.match(r"-[A-Za-z]{2,}\Z", word):
        return ["-" + letter for letter in word[1:]]
    return [word.partition("=")[0]]


def is_gate(words: Words) -> bool:
    """Whether a command before the start may look at the GPU; only what surely does not is none."""
    for command in commands(words):
        program = os.path.basename(command[0])
        if program in SHELLS and _script(program, command[1:]) is not None:
            continue  # its commands are looked at one by one
        if program in HARMLESS or program in WRAPPERS or program in VALUES:
            continue
        if program in (*MANAGERS, *COMPOSE):
            rest = [word for word in command[1:] if not word.startswith("-")]
            if not rest or rest[0] in HARMLESS_VERBS or (rest[0] == "compose" and set(rest) & {"pull", "down", "rm"}):
                continue
        if program == "nvidia-smi" and any(SETTINGS.match(word) for word in command[1:]):
            continue
        return True
    return False


def waits(words: Words) -> bool:
    """Whether a command behind the start may wait for the model; one that only tells somebody of the start does not."""
    return WAITS.search(" ".join(words)) is not None


def stops(words: Words) -> bool:
    """Whether a command stops or removes a container."""
    for command in commands(words):
        if os.path.basename(command[0]) in (*MANAGERS, *COMPOSE):
            return bool({"stop", "rm", "kill", "down"} & set(command[1:]))
    return False
