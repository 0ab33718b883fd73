"""Reset epochs as documents beside the blocks: their names, their bytes, and the epoch that a reset moves to.

Blocks carry a fingerprint that covers the epoch, so blocks whose epoch nobody can read any more are foreign to
everybody.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Self

from xxhash import xxh3_128

from tiering.api.namespace import EPOCH_BYTES, NO_EPOCH, Namespace, revision_digest

PARAMETERS = "namespace-"
"""How the names of all documents with parameters begin."""

EPOCHS = "epoch-"
"""How the names of all epoch documents begin."""

LEASES = "lease-"
"""How the names of all leases begin."""

_LAYOUT = struct.Struct("<8sHH4x16s16s16s")
_MAGIC = b"KVTEPOCH"
_VERSION = 1
_PRIVATE = 1
_DIGEST_BYTES = 16


def epoch_document(namespace: Namespace, number: int = 0) -> str:
    """The name of the document that holds the epoch of ``namespace``.

    ``number``: on shared media, where documents are never replaced, the next one counts where a document is damaged
    (default 0).
    """
    return f"{EPOCHS}{namespace.directory}" + (f"-{number}" if number else "")


def parameters_document(namespace: Namespace) -> str:
    """The name of the document that holds the readable parameters of ``namespace``."""
    return f"{PARAMETERS}{namespace.directory}.json"


def lease_document(namespace: Namespace) -> str:
    """The name of the document that says, while it is fresh, that somebody uses the epoch of ``namespace``."""
    return f"{LEASES}{namespace.directory}-{namespace.fingerprint.hex()}"


@dataclass(frozen=True, slots=True)
class EpochDocument:
    """The content of an epoch document: which epoch the blocks on the medium have, and who may read them."""

    base: bytes
    """The base of the namespace (16 bytes)."""
    epoch: bytes
    """The epoch (16 bytes)."""
    revision: bytes = bytes(16)
    """Digest of the revision that the blocks were computed with; zeros without one (default zeros)."""
    private: bool = False
    """True if only the process that began the epoch may read its blocks (default False).

    What a process computes after a reset (with other weights, say) is not what the namespace's parameters describe,
    because they were taken at the start of the process.
    """

    @classmethod
    def of(cls, namespace: Namespace, revision: str | None, *, private: bool) -> Self:
        """The document of the epoch of ``namespace``."""
        return cls(namespace.base, namespace.epoch, _digest(revision), private)

    def pack(self) -> bytes:
        """The bytes of the document, a checksum at their end."""
        flags = _PRIVATE if self.private else 0
        body = _LAYOUT.pack(_MAGIC, _VERSION, flags, self.base, self.epoch, self.revision)
        return body + xxh3_128(body).digest()

    @classmethod
    def parse(cls, data: bytes) -> Self | None:
        """The document in ``data``; None for anything that is not entirely right."""
        if len(data) != _LAYOUT.size + _DIGEST_BYTES or xxh3_128(data[: _LAYOUT.size]).digest() != data[_LAYOUT.size :]:
            return None
        magic, version, flags, base, epoch, revision = _LAYOUT.unpack_from(data)
        if (
            magic != _MAGIC
            or version != _VERSION
            or flags not in (0, _PRIVATE)
            or epoch == NO_EPOCH
            or len(epoch) != EPOCH_BYTES
        ):
            return None
        return cls(base, epoch, revision, flags == _PRIVATE)

    def admits(self, namespace: Namespace, revision: str | None) -> bool:
        """Whether a process of ``namespace`` and ``revision`` that starts now may read the blocks of this epoch."""
        return not self.private and self.base == namespace.base and self.revision == _digest(revision)


@dataclass(frozen=True, slots=True)
class Target:
    """Where a reset goes."""

    namespace: Namespace
    """The namespace in the epoch that begins."""
    revision: str | None = None
    """The revision that names the weights from now on; None if the epoch is private (default None)."""


def _digest(revision: str | None) -> bytes:
    return bytes(16) if revision is None else revision_digest(revision)
