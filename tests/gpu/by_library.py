# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What a module does, without Ansible: ``by_library.py gpu_clear|process_tree_stop ARGUMENTS.json``."""

from __future__ import annotations

import json
import sys
import typing as t

from ansible_collections.gpuops.serving.plugins.module_utils import _gpu, _selection, _site, _stop
from ansible_collections.gpuops.serving.plugins.module_utils._deadline import Deadline
from ansible_collections.gpuops.serving.plugins.module_utils._errors import ServingError


def gpu_clear(params: t.Dict[str, t.Any]) -> t.Dict[str, t.Any]:
    _site.require(("pynvml",))
    options = _gpu.Options(gpus=params.get("gpus"), interval=params.get("interval", 1.0))
    reading = _gpu.wait_clear(options, Deadline(params.get("timeout", 0.0)))
    return dict(reading.as_dict(), warnings=list(reading.warnings))


def process_tree_stop(params: t.Dict[str, t.Any]) -> t.Dict[str, t.Any]:
    names = ("grace", "kill_grace", "timeout")
    options = _stop.Options(**{name: params[name] for name in names if name in params})
    selection = _selection.select(params)
    if selection.scan is None:
        return _selection.nothing(selection)
    return _stop.Stopper(selection.what, selection.scan, options).run(params["_ansible_check_mode"])


def main() -> None:
    name, path = sys.argv[1:]
    with open(path, encoding="utf-8") as handle:
        params = json.load(handle)["ANSIBLE_MODULE_ARGS"]
    try:
        result = {"gpu_clear": gpu_clear, "process_tree_stop": process_tree_stop}[name](params)
    except ServingError as error:
        result = dict({"verdict": "error"}, **error.result, msg=error.message)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
