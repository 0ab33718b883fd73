"""Documents that describe the blocks of a medium of one engine, for KV events after a restart.

An engine that publishes KV events with tokens appends what it announces to ``described-NAMESPACE-SLOT`` documents,
whose slots it uses in turn. The next engine on the medium announces the blocks that it finds by what it reads there. A
document is a hint and never trusted: it describes names of blocks, and only blocks that the medium holds are announced.
"""

from __future__ import annotations

import re
import struct

from xxhash import xxh3_128

from tiering.api.namespace import Namespace

DESCRIBED = "described-"
"""Prefix of the names of all documents that describe blocks."""

MAX_BYTES = 1 << 20
"""Largest size of a document in bytes."""

MOST_SLOTS = 64
"""Largest number of documents of one namespace."""

_NAME = re.compile(rf"{DESCRIBED}([0-9a-f]{{32}})-[0-9]{{2}}")
_LAYOUT = struct.Struct("<8sHH4x16sQ")
_MAGIC = b"KVTDESCR"
_VERSION = 1
_DIGEST_BYTES = 16
MAX_CONTENT = MAX_BYTES - _LAYOUT.size - _DIGEST_BYTES
"""Largest content of a document in bytes."""


def described_document(namespace: Namespace, slot: int) -> str:
    """Return the name of the document in ``slot``, a number below :data:`MOST_SLOTS`."""
    return f"{DESCRIBED}{namespace.directory}-{slot:02d}"


def described_namespace(name: str) -> str | None:
    """Return the namespace that the name of such a document holds, as 32 hex digits; None for other names."""
    match = _NAME.fullmatch(name)
    return None if match is None else match[1]


def pack(namespace: Namespace, number: int, content: bytes) -> bytes:
    """Return a document.

    Args:
        namespace: namespace in the present epoch.
        number: number of the document; a later one has a larger number.
        content: the descriptions, :data:`MAX_CONTENT` bytes at most.
    """
    body = _LAYOUT.pack(_MAGIC, _VERSION, 0, namespace.fingerprint, number) + content
    return body + xxh3_128(body).digest()


def parse(data: bytes, namespace: Namespace) -> tuple[int, bytes] | None:
    """Return number and content of a document; None if it is damaged, or of another epoch or version.

    Args:
        data: bytes of the document, of any origin.
        namespace: namespace in the present epoch.
    """
    if not _LAYOUT.size + _DIGEST_BYTES <= len(data) <= MAX_BYTES:
        return None
    magic, version, _, fingerprint, number = _LAYOUT.unpack_from(data)
    body = data[:-_DIGEST_BYTES]
    if (magic, version, fingerprint) != (_MAGIC, _VERSION, namespace.fingerprint):
        return None
    return (number, body[_LAYOUT.size :]) if xxh3_128(body).digest() == data[-_DIGEST_BYTES:] else None
