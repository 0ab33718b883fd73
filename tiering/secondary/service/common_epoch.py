"""The common epoch of a shared medium, in which all processes are without a revision or a reset.

Its documents are numbered and never replaced. The last one counts, and a new epoch begins by the creation of the next
document. A damaged document stays, because another process may be able to read it; if it is the last one, the next
process that starts begins a new epoch.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tiering.api.namespace import Namespace
from tiering.errors import PermanentStoreError, TemporaryStoreError
from tiering.secondary.io.messages import IoTask
from tiering.secondary.io.side import IoSide
from tiering.secondary.service.epoch import EpochDocument, epoch_document

logger = logging.getLogger("kv_tiering.tier")

MAX_DOCUMENTS = 10_000
"""Maximum number of epoch documents of one namespace."""

LOOK_SECONDS = 30.0
"""Seconds between two looks for a new common epoch."""

SETTLE_SECONDS = 10.0
"""Seconds that an operator may take to begin new common epochs on all shared media of a stack."""

_ERROR_SECONDS = 1.0
"""Seconds between two looks while the common epoch is in doubt."""

_ATTEMPTS = 3


class Documents(Protocol):
    """The part of a :class:`~tiering.block_store.BlockStore` that epochs need."""

    def read_document(self, name: str) -> bytes | None: ...

    def create_document(self, name: str, data: bytes) -> bytes | None: ...


@dataclass(frozen=True, slots=True)
class CommonEpoch:
    """The documents of a namespace's common epoch, as one process found them."""

    epoch: bytes | None
    """The epoch; None if there is no document, or if the last one is damaged."""
    count: int
    """Number of documents: the first number without a document."""
    damaged: tuple[str, ...] = ()
    """Names of the documents that are damaged."""

    @property
    def never_moved(self) -> bool:
        """True if the epoch is the first one, so that no block was ever invalidated by a new one."""
        return self.epoch is not None and self.count == 1


def find_common(store: Documents, namespace: Namespace, *, known: CommonEpoch | None = None) -> CommonEpoch:
    """Return the common epoch of ``namespace``.

    Args:
        store: the medium.
        namespace: namespace of the engine's blocks.
        known: the epoch that was found before; only newer documents are read (default: none).

    Raises:
        StoreError: a document cannot be read.
    """
    epoch, damaged = (known.epoch, list(known.damaged)) if known else (None, [])
    for number in range(known.count if known else 0, MAX_DOCUMENTS):
        name = epoch_document(namespace, number)
        document = _read(store, name, namespace)
        if document is None:
            return CommonEpoch(epoch, number, tuple(damaged))
        if isinstance(document, EpochDocument):
            epoch = document.epoch
        else:
            # Blocks of the epoch before must not come back: if this document stays the last one, a new epoch begins.
            epoch = None
            damaged.append(name)
    raise PermanentStoreError(f"namespace {namespace.directory} has {MAX_DOCUMENTS} epoch documents; use another one")


def begin_common(store: Documents, namespace: Namespace, *, known: CommonEpoch | None = None) -> CommonEpoch:
    """Begin a new common epoch: every older block is foreign to all processes once they notice.

    Running processes notice within a minute. If several processes begin one at once, all get the same.

    Args:
        store: the medium.
        namespace: namespace of the engine's blocks.
        known: the documents found just before (default: they are read now).

    Raises:
        StoreError: the document cannot be written or read.
    """
    for attempt in range(_ATTEMPTS):
        if known is None or attempt:
            known = find_common(store, namespace, known=known)
        fresh = EpochDocument.of(namespace.next_epoch(), None, private=False)
        name = epoch_document(namespace, known.count)
        stored = store.create_document(name, fresh.pack())
        found = None if stored is None else EpochDocument.parse(bytes(stored))
        if found is not None and found.admits(namespace, None):
            return CommonEpoch(found.epoch, known.count + 1, known.damaged)
    raise TemporaryStoreError(f"document {name} was written, and is damaged or missing when it is read back")


def _read(store: Documents, name: str, namespace: Namespace) -> EpochDocument | bytes | None:
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


class EpochWatch:
    """Looks for a new common epoch on the I/O side; owned by the scheduler's thread.

    Args:
        name: name of the tier.
        store: the medium.
        io: I/O side that reads the documents.
        clock: function that returns monotonic seconds.
        on_new: function that the scheduler's thread calls with the namespace in the new common epoch.

    Attributes:
        doubted: True while the medium must not be used, because its common epoch may have a successor.
        due: time from which :meth:`tick` has work, in monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        store: Documents,
        io: IoSide,
        clock: Callable[[], float],
        on_new: Callable[[Namespace], None],
    ) -> None:
        self._name = name
        self._store = store
        self._io = io
        self._clock = clock
        self._on_new = on_new
        self._namespace: Namespace | None = None
        self._known: CommonEpoch | None = None
        self.due = float("inf")
        self._running = False
        self._settled = 0.0
        """Time from which a look ends the doubt."""
        self.doubted = False

    def watch(self, namespace: Namespace | None, known: CommonEpoch | None) -> None:
        """Look for successors of the common epoch of ``namespace`` from now on; None: look for nothing."""
        self._namespace = namespace if known is not None else None
        self._known = known
        self.doubted = self._namespace is not None and self._clock() < self._settled
        self._plan()

    def doubt(self) -> None:
        """Doubt the common epoch until a look in :data:`SETTLE_SECONDS` or later finds no successor.

        A common epoch that is entered before then is doubted as well. Elsewhere, the call has no effect.
        """
        self._settled = self._clock() + SETTLE_SECONDS
        if self._known is not None and self._namespace is not None:
            logger.warning(
                "tier %s: not used until a look for a new common epoch has ended, because another tier has one",
                self._name,
            )
            self.doubted = True
            self._plan()

    def tick(self, now: float) -> None:
        """Look if it is time."""
        namespace, known = self._namespace, self._known
        if namespace is None or known is None or self._running or now < self.due:
            return
        self._running = True

        def ended(found: CommonEpoch | None, error: BaseException | None) -> None:
            self._running = False
            self._plan()
            if error is not None:
                logger.debug("tier %s: cannot look for a new common epoch: %s", self._name, error)
            if found is None or self._namespace is not namespace:
                return
            self._known = found
            if found.epoch is not None and found.epoch != namespace.epoch:
                logger.warning(
                    "tier %s: a new common epoch has begun; the engine drops all blocks that were stored before",
                    self._name,
                )
                self._on_new(namespace.with_epoch(found.epoch))
            elif now >= self._settled:
                self.doubted = False

        self._io.run(IoTask("epoch", lambda: find_common(self._store, namespace, known=known), ended, background=True))

    def _plan(self) -> None:
        if self._namespace is None:
            self.due = float("inf")
            return
        now = self._clock()
        self.due = now + LOOK_SECONDS * random.uniform(0.75, 1.0)
        if self.doubted:
            self.due = min(self.due, max(now + _ERROR_SECONDS, self._settled))
