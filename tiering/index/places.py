"""Places of blocks on a shared medium: the namespace's name, the epoch's fingerprint, and the key."""

from __future__ import annotations

import re
from typing import NamedTuple

from tiering.api.namespace import Namespace

_PLACE = re.compile(r"([0-9a-f]{32})/([0-9a-f]{32})/[0-9a-f]{2}/((?:[0-9a-f]{2})+)")


class NamedPlace(NamedTuple):
    """The parts of a place whose name states namespace, epoch and key."""

    namespace: str
    """Base of the namespace as 32 hex digits."""
    fingerprint: str
    """Fingerprint of namespace and epoch as 32 hex digits."""
    key: bytes
    """Key of the block."""


def place_prefix(namespace: Namespace) -> str:
    """Return the prefix of the places of one namespace and epoch."""
    return f"{namespace.directory}/{namespace.fingerprint.hex()}/"


def parse_place(place: str) -> NamedPlace | None:
    """Return the parts of ``place``; None if no shared index has named such a place."""
    match = _PLACE.fullmatch(place)
    return None if match is None else NamedPlace(match[1], match[2], bytes.fromhex(match[3]))
