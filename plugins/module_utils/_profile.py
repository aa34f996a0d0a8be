# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What can be said of an engine. The engines themselves are in ``_profiles``."""

from __future__ import annotations

import typing as t

__all__ = ("KNOWN", "SUBJECTS", "Patterns", "Phase", "Profile")

# A regular expression, whatever the case of its letters, and the word for the lines that it is found in.
Patterns = t.Tuple[t.Tuple[str, str], ...]

# How a subject can be known. ``unverified`` is believed by somebody: nothing may fail only because it is wrong.
KNOWN = ("live", "source", "docs", "issue", "unverified", "given")


class Phase(t.NamedTuple):
    """A part of a load, as the log tells it."""

    pattern: str
    word: str
    # Where it lies in the whole load, in per cent: a rough guess, good for a bar and for nothing else.
    share: t.Optional[t.Tuple[float, float]] = None


class Profile(t.NamedTuple):
    """What the library knows of one engine. ``known`` says of each subject how it is known."""

    name: str
    title: str
    port: t.Optional[int] = None
    # Whether the port opens before the model is loaded; None where that is not known.
    opens_early: t.Optional[bool] = None
    health: t.Optional[str] = None
    # What a status of ``health`` means: "ready", "loading" or "dead". One that is not listed means nothing yet.
    health_status: t.Tuple[t.Tuple[int, str], ...] = ((200, "ready"), (503, "loading"))
    models: str = "/v1/models"
    models_method: str = "GET"
    # How the list of models reads: "openai", "triton_index", "ollama_tags" or "ovms_config".
    models_shape: str = "openai"
    # What data[].owned_by of the model list says when it is this engine; empty when it proves nothing.
    owned_by: str = ""
    # Whether the list of models is complete from the first answer on, so that a wrong one will not become right.
    models_static: bool = True
    # Whether the first request loads the model, and the load is given up together with that request.
    loads_on_request: bool = False
    endpoints: t.Tuple[t.Tuple[str, str], ...] = (("completions", "/v1/completions"), ("chat", "/v1/chat/completions"))
    metrics: t.Optional[str] = None
    # The port of the metrics where that is not the engine's own.
    metrics_port: t.Optional[int] = None
    # What makes the metrics appear where they are missing.
    metrics_remedy: str = ""
    # Names of one thing, newest first, unless ``adds_up``: then they are parts of it. A name may ask for one label.
    running: t.Tuple[str, ...] = ()
    waiting: t.Tuple[str, ...] = ()
    adds_up: bool = False
    # A metric that is there from the start on, beside which a gauge that is not yet there means zero.
    marker: str = ""
    kv_use: t.Tuple[str, ...] = ()
    # Counters of what was generated, of what was read in, and of steps that did either.
    tokens: t.Tuple[str, ...] = ()
    prompt_tokens: t.Tuple[str, ...] = ()
    steps: t.Tuple[str, ...] = ()
    # In the order in which a load goes through them.
    phases: t.Tuple[Phase, ...] = ()
    # Lines that only this engine writes when a start fails, each with the kind of the cause.
    fatal: Patterns = ()
    # Names that only processes of this engine bear; the kernel keeps 15 bytes of one, so no pattern asks for more.
    titles: t.Tuple[str, ...] = ()
    # What the engine does when it is told to end, and what to give it for that.
    on_sigterm: str = ""
    stop_timeout: t.Optional[int] = None
    stop_advice: str = ""
    known: t.Mapping[str, str] = {}


# What ``known`` speaks about, where the profile says anything of it.
SUBJECTS = (
    *("port", "opens_early", "health", "models", "owned_by", "endpoints", "metrics", "running", "waiting", "kv_use"),
    *("tokens", "prompt_tokens", "steps", "phases", "fatal", "titles", "on_sigterm", "stop_timeout"),
)
