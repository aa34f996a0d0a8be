# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Names and numbers of users and groups. A directory server may take seconds for an answer: each is asked for once."""

from __future__ import annotations

import functools
import grp
import pwd

__all__ = ["account", "account_of", "group_name", "group_number", "user_name"]


@functools.lru_cache(maxsize=4096)
def account(uid: int) -> pwd.struct_passwd | None:
    """The account with a number, None where it is unknown."""
    try:
        return pwd.getpwuid(uid)
    except KeyError:
        return None


@functools.lru_cache(maxsize=4096)
def account_of(name: str) -> pwd.struct_passwd | None:
    """The account with a name, None where it is unknown."""
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None


@functools.lru_cache(maxsize=4096)
def group_name(gid: int) -> str:
    """The name of a group, empty where it is unknown."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return ""


@functools.lru_cache(maxsize=4096)
def group_number(name: str) -> int | None:
    """The number of a group, None where it is unknown."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def user_name(uid: int) -> str:
    """The account's name, or the number where the account is unknown."""
    known = account(uid)
    return known.pw_name if known is not None else str(uid)
