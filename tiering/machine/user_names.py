"""Names and numbers of users, as stacks write them."""

from __future__ import annotations

import pwd
from typing import Annotated

from pydantic import BeforeValidator, Field

from tiering.errors import ConfigError

MOST_USERS = 7
"""Largest number of users of a service beside its own."""

UNMAPPED = 65534
"""Number by which the kernel names a user that this process's user namespace does not have."""

_NUMBERS = 0xFFFFFFFF
"""Numbers of users are below this one, which is none."""


def _as_text(value: object) -> object:
    return str(value) if type(value) is int else value


UserName = Annotated[
    str, BeforeValidator(_as_text, json_schema_input_type=str | int), Field(pattern=r"^[^\s:/]{1,256}$")
]
"""Name or number of a user."""


def number_of(user: str) -> int:
    """Return the number of a user.

    Args:
        user: name or number.

    Raises:
        ConfigError: this machine has no such user, or it cannot be told from others.
    """
    try:
        number = int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid
    except KeyError:
        raise ConfigError(f"there is no user {user!r} on this machine; its number will do, too") from None
    if number == UNMAPPED or number >= _NUMBERS:
        raise ConfigError(f"the user {user} may be any that the kernel cannot name here; choose another one")
    return number
