"""Chores of a tier's epoch: looks for a new one, the lease, and the record of a disk's blocks."""

from __future__ import annotations

import logging
import os
import random
import socket
from collections.abc import Callable, Mapping

from tiering.api.namespace import Namespace
from tiering.block_tier.parts import TierParts
from tiering.epochs.documents import MAX_REMEMBERED, lease_document
from tiering.epochs.driver import CommonHistory
from tiering.epochs.opener import Opener
from tiering.epochs.state import CommonEpoch
from tiering.medium.chore import NEVER, Backoff, Chore
from tiering.secondary.agreement import MetEpoch

logger = logging.getLogger("kv_tiering.tier")

LOOK_SECONDS = 30.0
"""Seconds between two looks for a new common epoch."""

_LOOK_AGAIN_SECONDS = 5.0
"""Seconds after a look that failed until the next one."""

RENEWAL_SECONDS = 3600.0
"""Seconds between two renewals of a lease.

A collector should wait many times as long before it takes a lease for abandoned.
"""

RETRY_SECONDS = 60.0
"""Seconds until a lease or a record that could not be written is tried again."""


class EpochWatch(Chore):
    """Looks for changes of the common epoch on the I/O side; owned by the scheduler's thread.

    Args:
        parts: parts of the tier.
        history: documents of the common epoch.
        on_found: function that the scheduler's thread calls with the common epoch that a look found.
    """

    def __init__(self, parts: TierParts, history: CommonHistory, on_found: Callable[[CommonEpoch], None]) -> None:
        super().__init__("epoch", parts.io, parts.context.clock, self._look)
        self._name = parts.context.name
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
            self._plan(LOOK_SECONDS if error is None else _LOOK_AGAIN_SECONDS)
            if error is not None:
                logger.debug("tier %s: cannot look for a new common epoch: %s", self._name, error)
            elif found is not None and self._namespace is namespace:
                self._on_found(found)

        self.run(self._history.look, ended)

    def _plan(self, seconds: float) -> None:
        in_a_while = self._clock() + seconds * random.uniform(0.75, 1.0)
        self.due = NEVER if self._namespace is None else in_a_while


class Lease(Chore):
    """Renews the lease of an epoch on a shared medium for as long as a tier uses the epoch.

    Private epochs, and epochs named by a revision, need a lease. The scheduler's thread owns this object; the I/O side
    writes the documents. A lease that is late by a failed write does no harm: the blocks are still too young to be
    collected.
    """

    def __init__(self, parts: TierParts) -> None:
        super().__init__("lease", parts.io, parts.context.clock, self._renew, Backoff(RETRY_SECONDS))
        self._name, self._store = parts.context.name, parts.store
        self._document: str | None = None

    def hold(self, namespace: Namespace | None) -> None:
        """Renew the lease of the epoch of ``namespace`` from now on, and no other lease; None: no lease."""
        self._document = None if namespace is None else lease_document(namespace)
        self.due = NEVER if namespace is None else self._clock()

    def _renew(self) -> None:
        if (document := self._document) is None:
            return

        def write() -> None:
            self._store.write_document(document, f"process {os.getpid()} on {socket.gethostname()}\n".encode())

        self.run(write, self._ended)
        self.wake(RENEWAL_SECONDS * random.uniform(0.8, 1.0))

    def _ended(self, result: None, error: BaseException | None) -> None:
        if error is None:
            self.succeeded()
            return
        self.failed()
        if self.failures == 1:
            logger.warning(
                "tier %s: the lease of its epoch could not be renewed and will be tried again: %s", self._name, error
            )


class EpochRecord(Chore):
    """Compares a medium's record with the common epochs that were met, and keeps the record current.

    The scheduler's thread owns this object; the I/O side writes the documents. A record that is written late does no
    harm: at the next start, an epoch that is missing there counts as unknown.

    Args:
        parts: parts of the tier.
        opener: opener of the tier, which reads and writes the record.
        stored_into: function that returns True if the tier has begun a store since it entered its epoch.
    """

    def __init__(self, parts: TierParts, opener: Opener, stored_into: Callable[[], bool]) -> None:
        super().__init__("record", parts.io, parts.context.clock, self._write, Backoff(RETRY_SECONDS))
        self._name, self._agreement = parts.context.name, parts.context.agreement
        self._opener = opener
        self._stored_into = stored_into
        self._namespace: Namespace | None = None
        self._proven: tuple[bytes, ...] = ()
        """Invalidations that the blocks of the present epoch are younger than, as far as this process knows."""
        self.written: Mapping[bytes, MetEpoch] | None = None
        """The common epochs that the medium's record holds, with all invalidations; None: not compared yet.

        :meth:`tick` has work only while this is not the agreement's mapping ``met`` itself.
        """
        self.wake()

    def keep(self, namespace: Namespace | None) -> None:
        """Keep the record of the epoch of ``namespace`` from now on; None: the tier has no epoch.

        The epoch was admitted (:meth:`admits`) just before.
        """
        self._namespace = namespace
        self._proven = self._agreement.known
        self.written = None

    def admits(self, namespace: Namespace) -> bool:
        """Return True if no block in the epoch of ``namespace`` is older than what the stack's tiers have met."""
        compared = [self._compare(namespace, medium, met) for medium, met in self._agreement.met.items()]
        return False not in compared and self._younger(namespace, self._agreement.known)

    def compare(self, medium: bytes, met: MetEpoch) -> bool | None:
        """Return True if all blocks were stored in ``met``, False if some may be older, None if none can be."""
        return None if self._namespace is None else self._compare(self._namespace, medium, met)

    def invalidated(self, *, dropped: bool) -> bool:
        """Return False if blocks may be older than an invalidation that has just become known.

        Args:
            dropped: True if the manager is dropping all older blocks at this moment.
        """
        if self._namespace is None:
            return True
        if not dropped and not self._younger(self._namespace, self._agreement.known):
            return False
        self._proven = self._agreement.known
        self.written = None
        return True

    def _compare(self, namespace: Namespace, medium: bytes, met: MetEpoch) -> bool | None:
        recorded = self._opener.recorded
        # The epoch alone decides, so that a tier with another name finds its record.
        if met.epoch in recorded.values():
            return True
        if self._is_empty(namespace):
            return None
        if not self._younger(namespace, met.invalidations):
            return False
        if medium in recorded:
            # The medium has begun another epoch, but none that the blocks are older than; if it has lost documents,
            # it may have lost such an epoch.
            return recorded[medium] in met.history
        # The medium is new in this stack, or the blocks are from a version that kept no record.
        return True if met.invalidations else None

    def _is_empty(self, namespace: Namespace) -> bool:
        """Return True if nothing was stored in the epoch of ``namespace``, which this process has begun."""
        return self._opener.begun == namespace.epoch and not self._stored_into()

    def _younger(self, namespace: Namespace, invalidations: tuple[bytes, ...]) -> bool:
        """Return True if all blocks in the epoch of ``namespace`` are younger than ``invalidations``."""
        proven = {*self._opener.invalidations, *(self._proven if namespace is self._namespace else ())}
        if proven.issuperset(invalidations) or self._is_empty(namespace):
            return True
        epochs = set(self._opener.recorded.values())
        for met in self._agreement.met.values():
            if met.epoch in epochs:
                proven.update(met.invalidations)
        return proven.issuperset(invalidations)

    def _write(self) -> None:
        """Write the record if it lacks a common epoch or an invalidation."""
        namespace, met, proven = self._namespace, self._agreement.met, self._proven
        if namespace is None or met is self.written:
            return
        recorded = self._opener.recorded
        if all(recorded.get(medium) == found.epoch for medium, found in met.items()) and set(
            self._opener.invalidations
        ).issuperset(proven[-MAX_REMEMBERED:]):
            self.written = met
            return
        if not self.admits(namespace):
            return  # the tier is about to leave the epoch
        # What is recorded is decided here: what becomes known later may be younger than the blocks.
        epochs = {medium: found.epoch for medium, found in met.items()}
        self.run(lambda: self._opener.record(namespace, epochs, proven), self._ended)

    def _ended(self, result: None, error: BaseException | None) -> None:
        if error is None:
            self.succeeded()
            self.wake()
            return
        self.failed()
        if self.failures == 1:
            logger.warning(
                "tier %s: the common epoch of its blocks could not be recorded and will be tried again; after a "
                "restart before then, the tier may begin empty: %s",
                self._name,
                error,
            )
