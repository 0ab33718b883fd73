"""The options of the Valkey tier in a stack file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from tiering.api.units import Duration, FilePath
from tiering.secondary.options import BlockTierOptions, SharedOptions, TtlOptions
from tiers.valkey.client import ServerAddress

MAX_VALUE_BYTES = 512 << 20
"""Largest value of a server, in bytes (its setting proto-max-bulk-len)."""

_SERVER_EVICTS = "the server evicts; set its maxmemory, and maxmemory-policy volatile-lru"
_NO_SECRETS = (
    "secrets are not written into a stack; use the environment variable VALKEY_PASSWORD, or ?auth_env=NAME in url"
)


class ValkeyOptions(BlockTierOptions, SharedOptions, TtlOptions):
    """The options of the Valkey tier. The password comes from the environment only."""

    unsupported: ClassVar[Mapping[str, str]] = {
        "capacity": "all engines share the server; its maxmemory bounds the pool",
        "high_watermark": _SERVER_EVICTS,
        "low_watermark": _SERVER_EVICTS,
        "eviction": _SERVER_EVICTS,
        "compression": "reading from the pool is faster than zstd; use compression in an object store behind it",
        "password": _NO_SECRETS,
        "username": "the user belongs into url: valkey://user@host",
    }

    type: str = "valkey"
    """The tier's type in a stack file."""
    url: str
    """Address of the server: ``valkey://[user@]host[:port][/database]``, or ``valkeys://`` for TLS.

    ``redis://`` and ``rediss://`` mean the same. The environment variable VALKEY_PASSWORD has the password, or the
    variable that ``?auth_env=NAME`` at the end names.
    """
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$")] = "kv-tiering"
    """Beginning of all keys on the server, of letters, digits and ``._:/-``; default "kv-tiering".

    Several stacks can share a server.
    """
    ttl: Duration = Field(default=86400.0, ge=1.0)
    """Age at which the server drops a block; default 1 day."""
    present_ttl: Duration = 60.0
    """Time for which a positive probe result stays valid; default 60."""
    lookup_deadline: Duration = 0.1
    """Seconds that a lookup may stay undecided before the answer is no; default 0.1."""
    load_deadline: Duration | None = 1.0
    """Seconds that a request waits for a load; default 1. Stores have ``deadline``.

    Blocks that arrive later are misses. The blocks in front of them that arrived in time count.
    """
    ca_file: FilePath | None = None
    """PEM file of the authorities that may sign the server's certificate; default: the system's."""
    connect_timeout: Duration = 1.0
    """Seconds within which a connection must be established; default 1."""
    request_timeout: Duration = 5.0
    """Seconds within which the server must answer a command; default 5."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        ServerAddress.parse(url)
        return url

    @property
    def address(self) -> ServerAddress:
        """The server."""
        return ServerAddress.parse(self.url)

    @property
    def location(self) -> str:
        """Server and prefix, as text for people."""
        return f"{self.address} {self.prefix}"
