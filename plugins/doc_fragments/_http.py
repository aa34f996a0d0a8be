# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Options shared by modules that talk to an engine or a gateway over HTTP."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options:
  api_key:
    description:
      - "Key that is sent as C(Authorization: Bearer ...), only to the host of the URL itself."
      - Default is the key file of the service's definition, if it names one.
    type: str
  headers:
    description: Further request headers. Their values are not logged, since one may be a key.
    type: dict
  validate_certs:
    description: Verify TLS certificates.
    type: bool
    default: true
  ca_path:
    description: File of CA certificates to verify with, instead of the system's.
    type: path
"""
