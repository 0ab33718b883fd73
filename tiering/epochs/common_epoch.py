"""The common epoch of a shared medium, in which all processes are without a revision or a reset.

Its documents are numbered and never replaced. The last one counts, and a new epoch begins by the creation of the next
document. A damaged document stays, because another process may be able to read it; if it is the last one, the next
process that starts begins a new epoch.

Each document names the invalidations (``kv-tiering epoch new``) that the blocks of its epoch are younger than. An
invalidation has one identifier on all media, so that a medium that lacks one is recognised, and gets a new epoch.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from tiering.api.namespace import EPOCH_BYTES, Namespace
from tiering.epochs.epoch import EpochDocument, epoch_document
from tiering.errors import PermanentStoreError, TemporaryStoreError

MAX_DOCUMENTS = 10_000
"""Maximum number of epoch documents of one namespace."""

_ATTEMPTS = 32
"""Maximum number of documents that one call tries to create while others create documents too."""


class EpochDocuments(Protocol):
    """The part of a :class:`~tiering.medium.block_store.BlockStore` that epochs need."""

    def read_document(self, name: str) -> bytes | None: ...

    def create_document(self, name: str, data: bytes) -> bytes | None: ...

    def list_documents(self, prefix: str) -> Iterable[str]: ...

    def prove_damage(self, name: str, content: bytes) -> None: ...


@dataclass(frozen=True)
class CommonEpoch:
    """The documents of a namespace's common epoch, as one process found them."""

    documents: tuple[EpochDocument | None, ...] = ()
    """The documents in order; None for one that is damaged, or missing before others. Default: none."""
    loss: int = 0
    """Number of the last loss that may include documents which no process remembers; 0 (default): none.

    Blocks of this machine may then be older than an invalidation that no process remembers.
    """

    @property
    def unexplained(self) -> bool:
        """True if documents were lost, perhaps with some that this process did not know."""
        return self.loss > 0

    @property
    def epoch(self) -> bytes | None:
        """The epoch; None if there is no document, or if the last one is damaged."""
        last = self.documents[-1] if self.documents else None
        return None if last is None else last.epoch

    @property
    def count(self) -> int:
        """Number of documents: the first number without a document."""
        return len(self.documents)

    @cached_property
    def history(self) -> frozenset[bytes]:
        """All epochs, the present one included."""
        return frozenset(document.epoch for document in self.documents if document is not None)

    @cached_property
    def invalidations(self) -> tuple[bytes, ...]:
        """The invalidations that all blocks of the epoch are younger than, in the order of their documents.

        Earlier releases named none: the epoch of such a document stands for its invalidation, unless it is the first.
        """
        found: dict[bytes, None] = {}
        for number, document in enumerate(self.documents):
            if document is None:
                continue
            named = document.invalidations
            found.update(dict.fromkeys(named if named or not number else (document.epoch,)))
        return tuple(found)

    @cached_property
    def _covered(self) -> frozenset[bytes]:
        """The invalidations that the last document vouches for.

        A document names all of the documents before it. If it does not, it is older than one of them: the medium lost
        the older ones, and a new epoch began in the place of one before all were written again.
        """
        covered: set[bytes] = set()
        for number, document in enumerate(self.documents):
            if document is not None and document.invalidations:
                covered = set(document.invalidations)
            elif document is not None and number:
                covered.add(document.epoch)
        return frozenset(covered)

    def covers(self, invalidations: Iterable[bytes] = ()) -> bool:
        """Return True if all blocks of the epoch are younger than ``invalidations`` and those of the medium."""
        return self._covered.issuperset((*self.invalidations, *invalidations))

    def damaged(self, namespace: Namespace) -> list[str]:
        """Return the names of the documents that are damaged."""
        return [epoch_document(namespace, number) for number, found in enumerate(self.documents) if found is None]

    def continues(self, known: CommonEpoch) -> bool:
        """Return True if all documents of ``known`` are still there; a damaged one says nothing."""
        return self.count >= known.count and all(
            found == before or before is None for found, before in zip(self.documents, known.documents, strict=False)
        )


def new_invalidation() -> bytes:
    """Return the identifier of a new invalidation, which no other one has."""
    return secrets.token_bytes(EPOCH_BYTES)


def find_common(
    store: EpochDocuments, namespace: Namespace, *, known: CommonEpoch | None = None, proof: bool = True
) -> CommonEpoch:
    """Return the common epoch of ``namespace``.

    Args:
        store: the medium.
        namespace: namespace of the engine's blocks.
        known: the epoch that was found before; default: none. If its last two documents have not changed, only newer
            documents are read.
        proof: True (default) if a document counts as damaged only if the medium proves the damage.

    Raises:
        StoreError: a document cannot be read, or reads damaged without a proof.
    """
    documents: list[EpochDocument | None] = []
    if known is not None and _confirmed(store, namespace, known):
        documents = list(known.documents)
    listed: int | None = None
    for number in range(len(documents), MAX_DOCUMENTS):
        document = _read(store, epoch_document(namespace, number), namespace)
        if document is None and listed is None:
            # The epoch before a document that was lost must not come back, nor a new one begin before later ones. It
            # must not go on either, in a process that has not read the document before the loss.
            listed = _last_number(store, namespace)
            if listed >= number:
                document = _read(store, epoch_document(namespace, number), namespace)
        if document is None and number >= (listed or 0):
            return CommonEpoch(tuple(documents))
        if proof and isinstance(document, bytes):
            # All machines lose their blocks with a new epoch. A faulty way to one of them must not begin one.
            store.prove_damage(epoch_document(namespace, number), document)
        # Blocks of the epoch before a damaged document must not come back: if the document stays the last one, a new
        # epoch begins.
        documents.append(document if isinstance(document, EpochDocument) else None)
    raise PermanentStoreError(f"namespace {namespace.directory} has {MAX_DOCUMENTS} epoch documents; use another one")


def ensure_common(
    store: EpochDocuments,
    namespace: Namespace,
    invalidations: Sequence[bytes],
    *,
    known: CommonEpoch | None = None,
    proof: bool = True,
) -> CommonEpoch:
    """Return a common epoch whose blocks are all younger than ``invalidations``; begin one if need be.

    If several processes begin one at once, all get the same. An epoch is always new: no block was stored in it before.

    Args:
        store: the medium.
        namespace: namespace of the engine's blocks.
        invalidations: identifiers of the invalidations.
        known: the documents found just before; default: they are read now.
        proof: as for :func:`find_common`.

    Raises:
        StoreError: the document cannot be written or read.
    """
    found = known
    name = ""
    for _ in range(_ATTEMPTS):
        if found is None:
            found = find_common(store, namespace, proof=proof)
        if found.epoch is not None and found.covers(invalidations):
            return found
        marks = tuple(dict.fromkeys((*found.invalidations, *invalidations)))
        fresh = EpochDocument.of(namespace.next_epoch(), None, private=False, invalidations=marks)
        name = epoch_document(namespace, found.count)
        stored = store.create_document(name, fresh.pack())
        created = None if stored is None else EpochDocument.parse(bytes(stored))
        valid = created is not None and created.admits(namespace, None)
        # If the medium went back to an older copy meanwhile, the document stands after a gap, and others do not see it.
        found = CommonEpoch((*found.documents, created)) if valid and _confirmed(store, namespace, found) else None
    raise TemporaryStoreError(f"document {name} was written, and is damaged or missing when it is read back")


def begin_common(store: EpochDocuments, namespace: Namespace, invalidation: bytes | None = None) -> CommonEpoch:
    """Begin a new common epoch: every older block is foreign to all processes once they notice.

    Running processes notice within a minute, and carry the invalidation over to the other shared media that they use.
    A person asks for this, so that documents that read damaged need no proof.

    Args:
        store: the medium.
        namespace: namespace of the engine's blocks.
        invalidation: identifier of the invalidation, if it concerns several media; default: a new one. Nothing
            happens if the medium has it already.

    Raises:
        StoreError: the document cannot be written or read.
    """
    return ensure_common(store, namespace, (invalidation or new_invalidation(),), proof=False)


def restore_common(store: EpochDocuments, namespace: Namespace, known: CommonEpoch, found: CommonEpoch) -> CommonEpoch:
    """Create the documents again that the medium has lost, and return the common epoch.

    Documents that the medium has are not replaced.

    Args:
        store: the medium.
        namespace: namespace of the engine's blocks.
        known: the documents that this process knew.
        found: the documents that are left.

    Raises:
        StoreError: a document cannot be written or read.
    """
    if found.count >= known.count or not known.continues(found):
        return found
    for number in range(found.count, known.count):
        document = known.documents[number]
        if document is None:
            break
        stored = store.create_document(epoch_document(namespace, number), document.pack())
        if stored is None or EpochDocument.parse(bytes(stored)) != document:
            # Somebody has begun another epoch in this place. Older documents after it would end that epoch.
            break
    return find_common(store, namespace)


def _confirmed(store: EpochDocuments, namespace: Namespace, known: CommonEpoch) -> bool:
    """Return True if the last two documents of ``known`` are still there, unchanged.

    The last one alone does not tell that the medium has lost older ones, before or after its creation.
    """
    if not known.count or known.documents[-1] is None:
        return False
    for number in range(max(known.count - 2, 0), known.count):
        document = _read(store, epoch_document(namespace, number), namespace)
        if (document if isinstance(document, EpochDocument) else None) != known.documents[number]:
            return False
    return True


def _last_number(store: EpochDocuments, namespace: Namespace) -> int:
    """Return the highest number of an epoch document that the medium lists; -1 if it lists none."""
    first = epoch_document(namespace)
    numbers = [-1]
    for name in store.list_documents(first):
        tail = name.removeprefix(first)
        if not tail:
            numbers.append(0)
        elif tail[0] == "-" and tail[1:].isdecimal():
            numbers.append(int(tail[1:]))
    return max(numbers)


def _read(store: EpochDocuments, name: str, namespace: Namespace) -> EpochDocument | bytes | None:
    """Return a document, its bytes if two reads find it damaged, or None if there is none."""
    stored: bytes | None = None
    for _ in range(2):
        stored = store.read_document(name)
        found = None if stored is None else EpochDocument.parse(bytes(stored))
        if stored is None:
            return None
        if found is not None and found.admits(namespace, None):
            return found
    return stored
