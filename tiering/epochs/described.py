"""Documents that describe the blocks of a medium of one engine, for KV events after a restart.

An engine that publishes KV events with tokens appends what it announces to ``described-NAMESPACE-SLOT`` documents,
whose slots it uses in turn. The next engine on the medium announces the blocks that it finds by what it reads there. A
document is a hint and never trusted: it describes names of blocks, and only blocks that the medium holds are announced.
"""

from __future__ import annotations

from tiering.api.namespace import Namespace
from tiering.medium.sealed import SealedLayout

DESCRIBED = "described-"
"""Prefix of the names of all documents that describe blocks."""

MAX_BYTES = 1 << 20
"""Largest size of a document in bytes."""

MOST_SLOTS = 64
"""Largest number of documents of one namespace."""

_LAYOUT = SealedLayout(b"KVTDESCR\x01\x00", "6x16sQ")
MAX_CONTENT = MAX_BYTES - _LAYOUT.size
"""Largest content of a document in bytes."""


def described_document(namespace: Namespace, slot: int) -> str:
    """Return the name of the document in ``slot``, a number below :data:`MOST_SLOTS`."""
    return f"{DESCRIBED}{namespace.directory}-{slot:02d}"


def pack(namespace: Namespace, number: int, content: bytes) -> bytes:
    """Return a document.

    Args:
        namespace: namespace in the present epoch.
        number: number of the document; a later one has a larger number.
        content: the descriptions, :data:`MAX_CONTENT` bytes at most.
    """
    return _LAYOUT.pack(namespace.fingerprint, number, content=content)


def parse(data: bytes, namespace: Namespace) -> tuple[int, bytes] | None:
    """Return number and content of a document; None if it is damaged, or of another epoch or version.

    Args:
        data: bytes of the document, of any origin.
        namespace: namespace in the present epoch.
    """
    if len(data) > MAX_BYTES or (found := _LAYOUT.parse(data)) is None:
        return None
    (fingerprint, number), content = found
    return (number, content) if fingerprint == namespace.fingerprint else None
