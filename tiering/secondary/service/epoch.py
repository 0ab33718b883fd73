"""Reset epochs, stored as documents beside the blocks: names and content of these documents.

The fingerprint of a block covers the epoch. Blocks of an epoch whose document is gone are therefore foreign to all
processes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Self

from xxhash import xxh3_128

from tiering.api.namespace import EPOCH_BYTES, NO_EPOCH, Namespace, revision_digest

PARAMETERS = "namespace-"
"""Prefix of the names of all documents with parameters."""

EPOCHS = "epoch-"
"""Prefix of the names of all epoch documents."""

LEASES = "lease-"
"""Prefix of the names of all leases."""

_LAYOUT = struct.Struct("<8sHH4x16s16s16s")
_MAGIC = b"KVTEPOCH"
_VERSION = 1
_PRIVATE = 1
_DIGEST_BYTES = 16


def epoch_document(namespace: Namespace, number: int = 0) -> str:
    """Return the name of the document that holds the epoch of ``namespace``.

    Args:
        namespace: namespace of the engine's blocks.
        number: number of the document, for shared media, where documents are never replaced; the next number replaces a
            damaged document. Default 0.
    """
    return f"{EPOCHS}{namespace.directory}" + (f"-{number}" if number else "")


def parameters_document(namespace: Namespace) -> str:
    """Return the name of the document that holds the readable parameters of ``namespace``."""
    return f"{PARAMETERS}{namespace.directory}.json"


def lease_document(namespace: Namespace) -> str:
    """Return the name of the lease on the epoch of ``namespace``; while fresh, a process uses that epoch."""
    return f"{LEASES}{namespace.directory}-{namespace.fingerprint.hex()}"


@dataclass(frozen=True, slots=True)
class EpochDocument:
    """Content of an epoch document: the epoch of the blocks on the medium, and its allowed readers."""

    base: bytes
    """Base of the namespace, 16 bytes."""
    epoch: bytes
    """Identifier of the epoch, 16 bytes."""
    revision: bytes = bytes(16)
    """Digest of the revision with which the blocks were computed; zeros (default): no revision."""
    private: bool = False
    """True if only the process that began the epoch may read its blocks; default False.

    The namespace's parameters were taken at the start of the process. They do not describe blocks computed after a
    reset, for example with other weights.
    """

    @classmethod
    def of(cls, namespace: Namespace, revision: str | None, *, private: bool) -> Self:
        """Return the document of the epoch of ``namespace``."""
        return cls(namespace.base, namespace.epoch, _digest(revision), private)

    def pack(self) -> bytes:
        """Return the bytes of the document, with a checksum at the end."""
        flags = _PRIVATE if self.private else 0
        body = _LAYOUT.pack(_MAGIC, _VERSION, flags, self.base, self.epoch, self.revision)
        return body + xxh3_128(body).digest()

    @classmethod
    def parse(cls, data: bytes) -> Self | None:
        """Return the document in ``data``; None if ``data`` is not a valid document."""
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
        """Return True if a process that starts now may read the blocks of this epoch.

        Args:
            namespace: namespace of the process.
            revision: revision of the process; None: no revision.
        """
        return not self.private and self.base == namespace.base and self.revision == _digest(revision)


@dataclass(frozen=True, slots=True)
class Target:
    """Target of a reset."""

    namespace: Namespace
    """Namespace in the epoch that begins."""
    revision: str | None = None
    """Revision that names the weights from now on; None (default): the epoch is private."""


def _digest(revision: str | None) -> bytes:
    return bytes(16) if revision is None else revision_digest(revision)
