"""Looks for changes of the common epoch of a shared medium, and for losses of its documents."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from tiering.api.namespace import Namespace
from tiering.epochs.common_epoch import (
    CommonEpoch,
    ensure_common,
    find_common,
    new_invalidation,
    restore_common,
)
from tiering.epochs.epoch import epoch_document, parameters_document
from tiering.errors import TemporaryStoreError
from tiering.medium.block_store import BlockStore
from tiering.medium.chore import NEVER, Chore
from tiering.medium.side import IoSide
from tiering.secondary.agreement import EpochAgreement

logger = logging.getLogger("kv_tiering.tier")

LOOK_SECONDS = 30.0
"""Seconds between two looks for a new common epoch."""

RETRY_SECONDS = 5.0
"""Seconds after a look that failed until the next one."""

SURE_SECONDS = 60.0
"""Seconds since the last look within which lost documents include none that is unknown here.

``kv-tiering epoch new`` watches over its document for as long on a medium that may lose all documents.
"""


class CommonHistory:
    """The documents of a medium's common epoch, as this process knows them; used on the I/O side.

    Args:
        name: name of the tier.
        store: the medium.
        namespace: namespace of the engine's blocks.
        agreement: common epochs that the shared tiers of the stack have met.
        writes: False for a tier that stores nothing, which begins no epoch.
        clock: function that returns monotonic seconds.
        wall: function that returns seconds since 1970, which pass in a sleep too; default: ``time.time``.
    """

    def __init__(
        self,
        name: str,
        store: BlockStore,
        namespace: Namespace,
        agreement: EpochAgreement,
        *,
        writes: bool,
        clock: Callable[[], float],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._name = name
        self._store = store
        self._namespace = namespace
        self._agreement = agreement
        self._writes = writes
        self._clocks = (clock, wall)
        self._lock = threading.Lock()
        self._known: CommonEpoch | None = None
        self._seen = (0.0, 0.0)
        """Times at which the last look began that succeeded, one of each clock."""
        self._losses = 0
        """Number of losses so far that may include documents which this process did not know."""
        self._accepted = 0
        """Number of the last of these losses that :meth:`accept` was told of."""
        self._told = False

    def look(self, *, opening: bool = False, used: bool = False) -> CommonEpoch:
        """Return the common epoch, whose blocks are younger than all invalidations that the stack knows.

        An epoch begins if there is none, or if the medium lacks an invalidation. Documents that this process knew and
        that the medium has lost are created again if they include the last one that anybody created. If that is not
        certain, the answer is ``unexplained``, until :meth:`accept`.

        Args:
            opening: True if the tier opens: the last document must be valid, or a new epoch begins; default: False.
            used: True if a process has used the namespace on this medium before; default: False.

        Raises:
            StoreError: the documents cannot be read or written.
        """
        with self._lock:
            began = self._times()
            known = self._known
            found = find_common(self._store, self._namespace, known=known)
            if known is not None and not found.continues(known):
                found = self._lost(known, found)
            if self._needs(found, opening):
                found = self._begin(found, opening=opening, used=used and known is None)
            self._known, self._seen = found, began
            return replace(found, loss=self._losses) if self._losses > self._accepted else found

    def accept(self, found: CommonEpoch) -> CommonEpoch:
        """Return ``found`` without its loss, because the machine holds no block that may be older than it.

        A loss that another look has found later still counts. The scheduler's thread calls this method.
        """
        self._accepted = max(self._accepted, found.loss)
        return replace(found, loss=0)

    def _times(self) -> tuple[float, float]:
        """Return the present time of each clock."""
        monotonic, wall = self._clocks
        return monotonic(), wall()

    def _lost(self, known: CommonEpoch, found: CommonEpoch) -> CommonEpoch:
        """Return the common epoch after documents that were known have gone, or have others in their place."""
        # The loss happened at any time until now; reading may have taken long. Monotonic time stops while the machine
        # sleeps, and a wall clock may be set back: the larger of the two spans counts.
        unseen = max(now - seen for now, seen in zip(self._times(), self._seen, strict=True))
        sure = unseen <= SURE_SECONDS or self._agreement.vouched(self._name)
        logger.warning(
            "tier %s: its medium has lost documents of its common epoch, as after a restart, a flush or the return to "
            "an older copy; %s",
            self._name,
            "they are written again"
            if sure
            else "whether a new epoch had begun is unknown, so the engine drops all blocks that were stored before",
        )
        if not sure:
            self._losses += 1
        elif self._writes:
            found = restore_common(self._store, self._namespace, known, found)
            parameters = parameters_document(self._namespace)
            if self._store.read_document(parameters) is None:
                self._store.write_document(parameters, self._namespace.parameters.encode())
        return found

    def _needs(self, found: CommonEpoch, opening: bool) -> bool:
        """Return True if a new epoch must begin."""
        if found.epoch is None and found.count and not opening:
            # Another process may be able to read the document that seems to be damaged.
            return False
        if not opening and not self._writes:
            return False
        return found.epoch is None or not found.covers(self._agreement.known)

    def _begin(self, found: CommonEpoch, *, opening: bool, used: bool) -> CommonEpoch:
        if not self._writes:
            name = epoch_document(self._namespace, found.count)
            reason = (
                "nothing was stored in this namespace yet"
                if found.epoch is None
                else "the medium has not begun the new epoch that another tier of the stack is in"
            )
            raise TemporaryStoreError(f"document {name} is missing: {reason}, and this tier stores nothing itself")
        marks = self._agreement.known
        if found.epoch is None and (found.count or used):
            # The document that is damaged or missing may have been that of an invalidation.
            marks = (*marks, new_invalidation())
            if not found.count and not self._told:
                self._told = True
                logger.warning(
                    "tier %s: document %s is missing: a new epoch begins, and no block that was stored before "
                    "is served",
                    self._name,
                    epoch_document(self._namespace),
                )
        elif found.epoch is not None:
            logger.warning(
                "tier %s: its medium lacks a new epoch that the stack knows of; the epoch begins there now", self._name
            )
        return ensure_common(self._store, self._namespace, marks, known=found)


class EpochWatch(Chore):
    """Looks for changes of the common epoch on the I/O side; owned by the scheduler's thread.

    Args:
        name: name of the tier.
        history: documents of the common epoch.
        io: I/O side that reads the documents.
        clock: function that returns monotonic seconds.
        on_found: function that the scheduler's thread calls with the common epoch that a look found.
    """

    def __init__(
        self,
        name: str,
        history: CommonHistory,
        io: IoSide,
        clock: Callable[[], float],
        on_found: Callable[[CommonEpoch], None],
    ) -> None:
        super().__init__("epoch", io, clock, self._look)
        self._name = name
        self._history = history
        self._on_found = on_found
        self._namespace: Namespace | None = None

    def watch(self, namespace: Namespace | None) -> None:
        """Look for successors of the common epoch of ``namespace`` from now on; None: look for nothing."""
        self._namespace = namespace
        self._plan(LOOK_SECONDS)

    def _look(self) -> None:
        if (namespace := self._namespace) is None:
            return

        def ended(found: CommonEpoch | None, error: BaseException | None) -> None:
            self._plan(LOOK_SECONDS if error is None else RETRY_SECONDS)
            if error is not None:
                logger.debug("tier %s: cannot look for a new common epoch: %s", self._name, error)
            elif found is not None and self._namespace is namespace:
                self._on_found(found)

        self.run(self._history.look, ended)

    def _plan(self, seconds: float) -> None:
        in_a_while = self._clock() + seconds * random.uniform(0.75, 1.0)
        self.due = NEVER if self._namespace is None else in_a_while
