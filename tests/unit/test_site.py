# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import os
import sys
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _site
from ansible_collections.gpuops.serving.plugins.module_utils._errors import MissingLibrary

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the folder must belong to root")


@pytest.fixture
def site() -> t.Iterator[str]:
    # pytest's own folders lie below one that others can write to.
    base = "/opt/gpuops-test-%d" % os.getpid()
    os.makedirs(base + "/site", mode=0o755)
    before = list(sys.path)
    yield base + "/site"
    sys.path[:] = before
    os.rmdir(base + "/site")
    os.rmdir(base)


def test_a_folder_of_root_alone_is_appended_once_and_last(site: str) -> None:
    assert _site.add_site(site) and _site.add_site(site)
    assert sys.path.count(site) == 1 and sys.path[-1] == site


@pytest.mark.parametrize("where", ["site", "parent"])
@pytest.mark.parametrize(
    ("mode", "owner", "reason"), [(0o775, 0, "can be written by others"), (0o755, 65534, "is not owned by root")]
)
def test_a_folder_that_others_can_change_is_not_used(site: str, where: str, mode: int, owner: int, reason: str) -> None:
    place = site if where == "site" else os.path.dirname(site)
    os.chmod(place, mode)
    os.chown(place, owner, owner)
    assert not _site.add_site(site)
    assert site not in sys.path
    assert reason in str(_site.unsafe_reason(site))


def test_a_link_is_not_used(site: str) -> None:
    link = os.path.dirname(site) + "/link"
    os.symlink(site, link)
    try:
        assert not _site.add_site(link)
    finally:
        os.unlink(link)


def test_a_missing_library_is_one_sentence_with_the_distribution_and_the_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_site.DISTRIBUTIONS, "no_such_module_x", "no-such-distribution")
    with pytest.raises(MissingLibrary) as caught:
        _site.require(["json", "no_such_module_x"])
    assert caught.value.message.startswith(
        'the Python distribution "no-such-distribution" is missing for ' + sys.executable
    )
    assert "apply the role gpuops.serving.host_agent" in caught.value.message
    assert _site.missing(["json"]) == []
