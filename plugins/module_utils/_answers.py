# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the answers of an engine say, by its profile: its health and its models."""

from __future__ import annotations

import typing as t

from ._profile import Profile

__all__ = ("Listed", "listed", "meaning", "names_model")

# States of a model that serves, or that wakes for a request.
TRITON_READY = ("READY",)
OVMS_READY = ("AVAILABLE", "SLEEPING")


def meaning(profile: Profile, status: t.Optional[int]) -> str:
    """What the status of an answer of ``profile.health`` means: "ready", "loading", "dead", or "" for none of them."""
    return dict(profile.health_status).get(status or 0, "")


class Listed(t.NamedTuple):
    """A model that a server lists."""

    name: str
    owner: str = ""
    ready: t.Optional[bool] = None  # None where the list does not say
    detail: str = ""


def listed(profile: Profile, body: str) -> t.List[Listed]:
    """The models in an answer of ``profile.models``; empty for anything that does not read like one."""
    # Loaded where it is asked for: a module compiles what it imports on every run.
    from . import _http

    found = _http.loads(body)
    try:
        if profile.models_shape == "triton_index":
            return [_with_state(row["name"], row.get("state"), TRITON_READY, row.get("reason")) for row in found]
        if profile.models_shape == "ovms_config":
            return [_of_versions(name, value["model_version_status"]) for name, value in found.items()]
        if profile.models_shape == "ollama_tags":
            return [Listed(row["name"]) for row in found["models"] if isinstance(row["name"], str)]
        rows = [row for row in found["data"] if isinstance(row["id"], str)]
        return [Listed(row["id"], row["owned_by"] if isinstance(row.get("owned_by"), str) else "") for row in rows]
    except (KeyError, TypeError, AttributeError):
        return []


def names_model(profile: Profile, wanted: str, name: str) -> bool:
    """Whether a name in the list is the model that is asked for."""
    if profile.models_shape == "ollama_tags" and ":" not in wanted:
        return name in (wanted, wanted + ":latest")
    return name == wanted


def _with_state(name: t.Any, state: t.Any, good: t.Sequence[str], detail: t.Any) -> Listed:
    if not isinstance(name, str):
        raise TypeError(name)
    words = ": ".join(str(word) for word in (state, detail) if word)
    return Listed(name, "", None if state is None else state in good, words)


def _of_versions(name: str, versions: t.Any) -> Listed:
    """One version that serves is enough; of several that do not, the last says why."""
    rows = [_with_state(name, row["state"], OVMS_READY, _trouble(row.get("status") or {})) for row in versions]
    if not rows:
        return Listed(name, "", False, "no version")
    return next((row for row in rows if row.ready), rows[-1])


def _trouble(status: t.Mapping[str, t.Any]) -> t.Any:
    return None if status.get("error_code") == "OK" else status.get("error_message")
