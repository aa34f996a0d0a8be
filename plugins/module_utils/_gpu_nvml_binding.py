# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Which Python module asks the NVIDIA driver library: that of the distribution nvidia-ml-py, and no namesake.

Other distributions provide a module "pynvml" as well: pynvml before 12, and nvidia-ml-py3, which has not changed since
2017. They hide the right one when both are installed, and lack what is needed or go their own ways.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
import typing as t

from . import _site
from ._errors import MissingLibrary

__all__ = ["MISSING", "WRONG", "load"]

MODULE, DISTRIBUTION = "pynvml", "nvidia-ml-py"
OTHERS = ("pynvml", "nvidia-ml-py3")
OLDEST = "11.495"
# Each came with a release of nvidia-ml-py up to OLDEST, and nvidia-ml-py3 has none of them.
NEEDED = ("nvmlInitWithFlags", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMPSComputeRunningProcesses")
MISSING, WRONG = "binding_missing", "binding_wrong"


def load() -> t.Tuple[t.Any, str, str]:
    """The binding, or None with a reason word and a sentence."""
    spec = importlib.util.find_spec(MODULE)
    if spec is None:
        try:
            _site.require([MODULE])
        except MissingLibrary as error:
            return None, MISSING, error.message
    binding, trouble = _examine(spec)
    if binding is None and os.path.isdir(_site.SITE):
        unsafe = _site.unsafe_reason(_site.SITE)
        if unsafe is not None:
            return None, WRONG, "%s (%s is ignored: %s)" % (trouble, _site.SITE, unsafe)
        importlib.invalidate_caches()
        binding, _ = _examine(importlib.machinery.PathFinder.find_spec(MODULE, [_site.SITE]))
    return (binding, "", "") if binding is not None else (None, WRONG, trouble)


def _examine(spec: t.Any) -> t.Tuple[t.Any, str]:
    """The module when it is the right one, else None and what is wrong with it."""
    if spec is None or spec.origin is None:
        return None, 'the module "%s" has no file: remove what Python finds under that name' % MODULE
    try:
        module = _execute(spec)
    except Exception as error:  # whatever a stranger's module does when it is executed
        module, lacks = None, "it cannot be imported: %s: %s" % (type(error).__name__, error)
    else:
        absent = [name for name in NEEDED if not hasattr(module, name)]
        lacks = "it lacks %s" % absent[0] if absent else ""
    alone = os.path.basename(spec.origin) == MODULE + ".py"
    if alone and not lacks:
        return module, ""
    found = _owners(os.path.dirname(spec.origin) if alone else os.path.dirname(os.path.dirname(spec.origin)))
    others = ['"%s" %s' % (name, found[name]) for name in OTHERS if name in found]
    if not lacks and not others:
        return module, ""
    if others:
        return None, 'the module "%s" in %s is of the Python distribution %s and not of "%s": uninstall %s%s' % (
            MODULE,
            os.path.dirname(spec.origin),
            " or ".join(others),
            DISTRIBUTION,
            " and ".join('"%s"' % name for name in OTHERS if name in found),
            # It may have overwritten the file of the right one.
            ', then install "%s" again' % DISTRIBUTION if DISTRIBUTION in found else ' and install "%s"' % DISTRIBUTION,
        )
    owner = 'the Python distribution "%s" %s' % (DISTRIBUTION, found[DISTRIBUTION]) if found else spec.origin
    return None, 'the module "%s" of %s cannot be used, because %s: install "%s" %s or newer for %s' % (
        MODULE,
        owner,
        lacks,
        DISTRIBUTION,
        OLDEST,
        sys.executable,
    )


def _execute(spec: t.Any) -> t.Any:
    loaded = sys.modules.get(spec.name)
    if loaded is not None and getattr(loaded, "__file__", None) == spec.origin:
        return loaded
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


def _owners(folder: str) -> t.Dict[str, str]:
    """The distributions in that folder that provide such a module, with their versions."""
    import importlib.metadata

    found = {}
    for name in (DISTRIBUTION, *OTHERS):
        for distribution in importlib.metadata.distributions(name=name, path=[folder]):
            files = [str(path) for path in distribution.files or ()]
            # Since version 12, "pynvml" only depends on the right one.
            if not files or any(path in (MODULE + ".py", MODULE + "/__init__.py") for path in files):
                found[name] = distribution.version
    return found
