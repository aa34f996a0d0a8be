#!/usr/bin/env python3
# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Boot and remove throw-away labs of real systemd hosts; see `lab.py --help`."""

from __future__ import annotations

import sys

from gpulab.cli import main

if __name__ == "__main__":
    sys.exit(main())
