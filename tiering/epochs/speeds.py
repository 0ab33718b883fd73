"""Documents with the speeds that an engine has measured, for engines that start later.

Engines of one namespace on machines of one kind replace one document, ``speeds-NAMESPACE-HARDWARE``. A document is a
hint and never trusted: it counts until the engine has measured itself. It counts for :data:`SPEED_SECONDS` after it was
written, in every epoch.
"""

from __future__ import annotations

import re
import struct

from xxhash import xxh3_64_digest, xxh3_128

from tiering.api.namespace import Namespace
from tiering.secondary.speeds import Speeds

SPEEDS = "speeds-"
"""Prefix of the names of all documents with speeds."""

SPEED_SECONDS = 30 * 86400.0
"""Seconds after its writing, or before it by a clock that is wrong, for which a document counts."""

MOST_SECONDS = 3600.0
"""Longest duration that a document may have."""

_NAME = re.compile(rf"{SPEEDS}([0-9a-f]{{32}})-[0-9a-f]{{16}}")
_LAYOUT = struct.Struct("<8sHH4x16s8sd3d")
_MAGIC = b"KVTSPEED"
_VERSION = 1
_DIGEST_BYTES = 16

DOCUMENT_BYTES = _LAYOUT.size + _DIGEST_BYTES
"""Size of a document in bytes."""


def speeds_document(namespace: Namespace, hardware: str) -> str:
    """Return the name of the document of a namespace and a kind of machine."""
    return f"{SPEEDS}{namespace.directory}-{_hash(hardware).hex()}"


def speeds_namespace(name: str) -> str | None:
    """Return the namespace that the name of such a document holds, as 32 hex digits; None for other names."""
    match = _NAME.fullmatch(name)
    return None if match is None else match[1]


def pack(namespace: Namespace, hardware: str, written: float, speeds: Speeds) -> bytes:
    """Return a document.

    Args:
        namespace: namespace of the engine, in any epoch.
        hardware: text that names the kind of machine.
        written: time of the writing, in seconds since 1970.
        speeds: the speeds.
    """
    body = _LAYOUT.pack(_MAGIC, _VERSION, 0, namespace.base, _hash(hardware), written, *speeds)
    return body + xxh3_128(body).digest()


def parse(data: bytes, namespace: Namespace, hardware: str, now: float) -> Speeds | None:
    """Return the speeds of a document; None if it does not count.

    It may be damaged, stale, or of another namespace, machine or version.

    Args:
        data: bytes of the document, of any origin.
        namespace: namespace of the engine, in any epoch.
        hardware: text that names the kind of machine.
        now: seconds since 1970.
    """
    body = data[:-_DIGEST_BYTES]
    if len(data) != DOCUMENT_BYTES or xxh3_128(body).digest() != data[-_DIGEST_BYTES:]:
        return None
    magic, version, _, base, machine, written, *seconds = _LAYOUT.unpack(body)
    if (magic, version, base, machine) != (_MAGIC, _VERSION, namespace.base, _hash(hardware)):
        return None
    speeds = Speeds(*seconds)
    if not abs(now - written) <= SPEED_SECONDS or not all(0.0 <= value <= MOST_SECONDS for value in speeds):
        return None
    return speeds if speeds.compute > 0.0 else None


def _hash(hardware: str) -> bytes:
    return bytes(xxh3_64_digest(hardware.encode(errors="replace")))
