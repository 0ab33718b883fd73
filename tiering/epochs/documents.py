"""Epoch documents, stored beside the blocks: their names and their content.

The fingerprint of a block covers the epoch. Blocks of an epoch whose document is gone are therefore foreign to all
processes.

An epoch's life on a shared medium, in the states of :class:`EpochState`::

             conditional put            epoch new, documents lost
    none -----------------------> current ------------------------> abandoned ----> removed by kv-tiering gc
                                     :                                  ^
         a process leaves it alone   : reset without revision           | its lease is older than the grace
                                     v                                  |
                                  leased: private, the process renews --+

On a medium of one process, a reset removes the document before it writes the next one. A revision names its epoch, so
all processes with the same text are in the same one.
"""

from __future__ import annotations

import re
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from tiering.api.namespace import EPOCH_BYTES, NO_EPOCH, Namespace, revision_digest
from tiering.medium.sealed import SealedLayout
from tiering.runtime.json_text import parse_json

PARAMETERS = "namespace-"
"""Prefix of the names of all documents with parameters."""

EPOCHS = "epoch-"

LEASES = "lease-"

_FIELDS = "H4x16s16s16s"
_LAYOUT = SealedLayout(b"KVTEPOCH\x01\x00", _FIELDS)
_LAYOUT_WITH_COMMON = SealedLayout(b"KVTEPOCH\x02\x00", _FIELDS)
"""Layout of documents with common epochs; an older release takes such a document for damaged."""
_COMMON = struct.Struct("<16s16s")
MAX_COMMON = 32
"""Maximum number of common epochs in one document."""
MAX_REMEMBERED = 64
"""Maximum number of invalidations that the document of a medium of its own remembers, the last ones."""
_PRIVATE = 1
_HINT = re.compile(r"(?:hot|speeds)-([0-9a-f]{32})-[0-9a-f]{16}|described-([0-9a-f]{32})-[0-9]{2}")


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


def parse_parameters(content: bytes) -> Mapping[str, Any] | None:
    """Return the parameters in a document; None if it is damaged."""
    try:
        found = parse_json(content)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def lease_document(namespace: Namespace) -> str:
    """Return the name of the lease on the epoch of ``namespace``; while fresh, a process uses that epoch."""
    return f"{LEASES}{namespace.directory}-{namespace.fingerprint.hex()}"


def hint_namespace(name: str) -> str | None:
    """Return the namespace in the name of a document of hints, as 32 hex digits; None for other names.

    Hints are hot keys, speeds and descriptions.
    """
    match = _HINT.fullmatch(name)
    return None if match is None else match[1] or match[2]


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
    common: tuple[tuple[bytes, bytes], ...] = ()
    """Shared media, and the common epoch of each in which the blocks were stored; default: none.

    Media and epochs are identifiers of 16 bytes each. At most the last :data:`MAX_COMMON` are kept.
    """
    invalidations: tuple[bytes, ...] = ()
    """Identifiers of the invalidations that all blocks of the epoch are younger than; default: none.

    They have 16 bytes each. An invalidation is one ``kv-tiering epoch new``; it has the same identifier on all media.
    """

    @classmethod
    def of(
        cls,
        namespace: Namespace,
        revision: str | None,
        *,
        private: bool,
        common: Mapping[bytes, bytes] | None = None,
        invalidations: Sequence[bytes] = (),
    ) -> Self:
        """Return the document of the epoch of ``namespace``.

        Args:
            namespace: namespace in the epoch.
            revision: text that names the weights; None: no revision.
            private: True if only this process may read the blocks of the epoch.
            common: common epochs of shared media, by medium; default: none.
            invalidations: invalidations that the blocks are younger than; default: none.
        """
        recorded = tuple((common or {}).items())[-MAX_COMMON:]
        return cls(namespace.base, namespace.epoch, _digest(revision), private, recorded, tuple(invalidations))

    def pack(self) -> bytes:
        """Return the bytes of the document, with a checksum at the end."""
        flags = _PRIVATE if self.private else 0
        # A pair of equal identifiers is an invalidation. Releases that do not know them keep such pairs as they are.
        pairs = [*self.common, *((mark, mark) for mark in self.invalidations)]
        layout, content = _LAYOUT_WITH_COMMON if pairs else _LAYOUT, b"".join(_COMMON.pack(*pair) for pair in pairs)
        return layout.pack(flags, self.base, self.epoch, self.revision, content=content)

    @classmethod
    def parse(cls, data: bytes) -> Self | None:
        """Return the document in ``data``; None if ``data`` is not a valid document."""
        plain, with_common = _LAYOUT.parse(data), _LAYOUT_WITH_COMMON.parse(data)
        if (found := plain or with_common) is None:
            return None
        (flags, base, epoch, revision), recorded = found
        if (
            bool(recorded) != (with_common is not None)
            or len(recorded) % _COMMON.size
            or flags not in (0, _PRIVATE)
            or epoch == NO_EPOCH
        ):
            return None
        pairs = list(_COMMON.iter_unpack(recorded))
        common = tuple((medium, met) for medium, met in pairs if medium != met)
        marks = tuple(medium for medium, met in pairs if medium == met)
        return cls(base, epoch, revision, flags == _PRIVATE, common, marks)

    def admits(self, namespace: Namespace, revision: str | None) -> bool:
        """Return True if a process that starts now may read the blocks of this epoch.

        Args:
            namespace: namespace of the process.
            revision: revision of the process; None: no revision.
        """
        return not self.private and self.base == namespace.base and not self.is_of_another(revision)

    def is_of_another(self, revision: str | None) -> bool:
        """Return True if the blocks of this epoch were computed with another revision; None: with any."""
        return self.revision != _digest(revision)


def new_invalidation() -> bytes:
    """Return the identifier of a new invalidation, which no other one has."""
    return secrets.token_bytes(EPOCH_BYTES)


def _digest(revision: str | None) -> bytes:
    return bytes(16) if revision is None else revision_digest(revision)
