"""Documents with the speeds that an engine has measured, for engines that start later.

Engines of one namespace on machines of one kind replace one document, ``speeds-NAMESPACE-HARDWARE``. A document is a
hint and never trusted: it counts until the engine has measured itself. It counts for :data:`SPEED_SECONDS` after it was
written, in every epoch.
"""

from __future__ import annotations

from xxhash import xxh3_64_digest

from tiering.api.namespace import Namespace
from tiering.medium.sealed import SealedLayout
from tiering.secondary.speeds import Speeds

SPEEDS = "speeds-"
"""Prefix of the names of all documents with speeds."""

SPEED_SECONDS = 30 * 86400.0
"""Seconds after its writing, or before it by a clock that is wrong, for which a document counts."""

MOST_SECONDS = 3600.0
"""Longest duration that a document may have."""

_LAYOUT = SealedLayout(b"KVTSPEED\x01\x00", "6x16s8sd3d")

DOCUMENT_BYTES = _LAYOUT.size
"""Size of a document in bytes."""


def speeds_document(namespace: Namespace, hardware: str) -> str:
    """Return the name of the document of a namespace and a kind of machine."""
    return f"{SPEEDS}{namespace.directory}-{_hash(hardware).hex()}"


def pack(namespace: Namespace, hardware: str, written: float, speeds: Speeds) -> bytes:
    """Return a document.

    Args:
        namespace: namespace of the engine, in any epoch.
        hardware: text that names the kind of machine.
        written: time of the writing, in seconds since 1970.
        speeds: the speeds.
    """
    return _LAYOUT.pack(namespace.base, _hash(hardware), written, *speeds)


def parse(data: bytes, namespace: Namespace, hardware: str, now: float) -> Speeds | None:
    """Return the speeds of a document; None if it does not count.

    It may be damaged, stale, or of another namespace, machine or version.

    Args:
        data: bytes of the document, of any origin.
        namespace: namespace of the engine, in any epoch.
        hardware: text that names the kind of machine.
        now: seconds since 1970.
    """
    if (found := _LAYOUT.parse(data)) is None:
        return None
    (base, machine, written, *seconds), rest = found
    if rest or (base, machine) != (namespace.base, _hash(hardware)):
        return None
    speeds = Speeds(*seconds)
    if not abs(now - written) <= SPEED_SECONDS or not all(0.0 <= value <= MOST_SECONDS for value in speeds):
        return None
    return speeds if speeds.compute > 0.0 else None


def _hash(hardware: str) -> bytes:
    return bytes(xxh3_64_digest(hardware.encode(errors="replace")))
