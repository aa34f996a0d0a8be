# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: agent_archive
short_description: The archive of the host agent for one kind of managed host
version_added: 1.0.0
author:
  - gpuops.serving contributors
description:
  - Runs on the controller. Says what content a host of a certain Python and machine should have, and where the archive
    with that content lies. Used by the role P(gpuops.serving.host_agent#role).
  - With O(build=true) the archive is built when the cache does not have it, which fetches wheels with pip. Hosts that
    ask for the same archive at the same time wait for one build.
options:
  _terms:
    description: Ignored.
    type: list
    elements: str
  python:
    description: Python version of the host, such as V(3.9).
    type: str
    required: true
  machine:
    description: Machine of the host, such as V(x86_64) or V(aarch64).
    type: str
    required: true
  requirements:
    description: Versions of the distributions, by name and then by Python version or V(default).
    type: dict
    required: true
  cache:
    description: Folder on the controller for wheels and archives.
    type: path
    required: true
  wheelhouse:
    description: Folder on the controller with all wheels. No index is asked then.
    type: str
    default: ""
  build:
    description: Whether to build the archive when the cache does not have it.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Show the archive that a host of Debian 11 would get
  ansible.builtin.debug:
    msg: >-
      {{ lookup('gpuops.serving.agent_archive', python='3.9', machine='x86_64',
                requirements=host_agent_requirements, cache='/var/cache/gpuops') }}
"""

RETURN = r"""
_raw:
  description: The archive.
  type: list
  elements: dict
  contains:
    stamp:
      description: Hash of everything in the archive; the host keeps it in C(/opt/gpuops/.stamp).
      type: str
      sample: 9f1c0c9d5f6f4a3d2b9a7e0f6b1c8d7e5a4f3b2c1d0e9f8a7b6c5d4e3f2a1b0c
    path:
      description: Path of the archive on the controller. It exists after O(build=true). Empty after an error.
      type: str
      sample: /var/cache/gpuops/agent-py3.9-x86_64-9f1c0c9d5f6f4a3d.pyz
    error:
      description: Why there is no such archive, in one sentence; else empty.
      type: str
      sample: ""
"""

import os
import typing as t

from ansible.plugins.lookup import LookupBase
from ansible_collections.gpuops.serving.plugins.plugin_utils import _agent_archive


class LookupModule(LookupBase):
    def run(
        self, terms: t.List[t.Any], variables: t.Optional[t.Mapping[str, t.Any]] = None, **kwargs: t.Any
    ) -> t.List[t.Dict[str, str]]:
        self.set_options(var_options=variables, direct=kwargs)
        requirements = self.get_option("requirements")
        cache = os.path.expanduser(self.get_option("cache"))
        try:
            wanted = _agent_archive.target(self.get_option("python"), self.get_option("machine"))
            path = _agent_archive.archive_path(wanted, requirements, cache)
            if self.get_option("build"):
                wheelhouse = os.path.expanduser(self.get_option("wheelhouse") or "")
                path = _agent_archive.build(wanted, requirements, cache, wheelhouse)
            return [{"stamp": _agent_archive.stamp(wanted, requirements), "path": path, "error": ""}]
        except (_agent_archive.ArchiveError, OSError) as error:
            # Answered, not raised: the engine would wrap the sentence into many lines of its own.
            return [{"stamp": "", "path": "", "error": str(error)}]
