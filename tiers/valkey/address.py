"""Addresses and credentials of Valkey and Redis servers."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Self
from urllib.parse import parse_qsl, unquote, urlsplit

from tiering.api.masking import learn, shown
from tiering.errors import ConfigError

PASSWORD_VARIABLE = "VALKEY_PASSWORD"
"""Environment variable with the password, unless the address names another one."""

DEFAULT_PORT = 6379

_SCHEMES = {"valkey": False, "redis": False, "valkeys": True, "rediss": True}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FORM = (
    "write it like valkey://host[:port][/database][?auth_env=VARIABLE], or valkeys:// for TLS; "
    "a user stands before the host, with an @ between them"
)


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Address of a server. Its text contains no password."""

    host: str
    """Name or IP address of the server."""
    port: int = DEFAULT_PORT
    """TCP port; default 6379."""
    database: int = 0
    """Number of the database; default 0."""
    user: str | None = None
    """User of the server's access list; None (default): the server's default user."""
    tls: bool = False
    """True to encrypt and to verify the server's certificate and host; default False."""
    password_variable: str = PASSWORD_VARIABLE
    """Environment variable with the password; default VALKEY_PASSWORD. Without it, no password is sent."""

    @classmethod
    def parse(cls, url: str) -> Self:
        """Return the address that ``url`` names.

        Raises:
            ConfigError: ``url`` is not the address of a server, or it contains a password.
        """
        try:
            parts = urlsplit(url)
            port = DEFAULT_PORT if parts.port is None else parts.port
            query = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True)) if parts.query else {}
        except ValueError as error:
            raise ConfigError(f"{shown(url)} is not the address of a server; {_FORM}") from error
        if parts.scheme not in _SCHEMES:
            raise ConfigError(f"{shown(url)} has none of the schemes {', '.join(_SCHEMES)}; {_FORM}")
        if parts.password is not None:
            raise ConfigError(
                f"an address must not contain a password; put the password into the environment variable "
                f"{PASSWORD_VARIABLE}, or name another variable with ?auth_env=NAME"
            )
        database = parts.path.removeprefix("/") or "0"
        if not parts.hostname or not re.fullmatch(r"\d{1,4}", database) or parts.fragment or set(query) - {"auth_env"}:
            raise ConfigError(f"{shown(url)} is not the address of a server; {_FORM}")
        variable = query.get("auth_env", PASSWORD_VARIABLE)
        if not _VARIABLE.fullmatch(variable):
            raise ConfigError(f"auth_env must name an environment variable; {shown(variable)} is no such name")
        user = unquote(parts.username) if parts.username else None
        return cls(parts.hostname, port, int(database), user, _SCHEMES[parts.scheme], variable)

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        database = f"/{self.database}" if self.database else ""
        return f"{'valkeys' if self.tls else 'valkey'}://{user}{host}:{self.port}{database}"

    def password(self) -> str | None:
        """Return the password from the environment, or None; messages mask the password from now on."""
        password = os.environ.get(self.password_variable) or None
        learn("password", password)
        return password


class Credentials:
    """User and password of a server, read from the environment for each new connection."""

    def __init__(self, address: ServerAddress) -> None:
        self._address = address

    def __bool__(self) -> bool:
        return self._address.user is not None or self._address.password() is not None

    def get_credentials(self) -> tuple[str, ...]:
        """Return the words of the command AUTH."""
        user, password = self._address.user, self._address.password()
        if password is None:
            # With an exception of its own, valkey-py closes the connection; it would keep it after any other.
            from valkey.exceptions import AuthenticationError

            raise AuthenticationError(f"the environment variable {self._address.password_variable} is not set")
        return (password,) if user is None else (user, password)
