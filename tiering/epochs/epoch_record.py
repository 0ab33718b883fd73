"""Record of the common epochs in which the blocks of a medium of its own were stored."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from tiering.api.namespace import Namespace
from tiering.epochs.epoch import MAX_REMEMBERED
from tiering.epochs.opener import Opener
from tiering.medium.chore import Backoff, Chore
from tiering.medium.side import IoSide
from tiering.secondary.agreement import EpochAgreement, MetEpoch

logger = logging.getLogger("kv_tiering.tier")

RETRY_SECONDS = 60.0
"""Seconds until a record that could not be written is tried again."""


class EpochRecord(Chore):
    """Compares a medium's record with the common epochs that were met, and keeps the record current.

    The scheduler's thread owns this object; the I/O side writes the documents. A record that is written late does no
    harm: at the next start, an epoch that is missing there counts as unknown.

    Args:
        name: name of the tier.
        opener: opener of the tier, which reads and writes the record.
        agreement: common epochs that the shared tiers have met.
        io: I/O side that writes the record.
        clock: function that returns monotonic seconds.
        stored_into: function that returns True if the tier has begun a store since it entered its epoch.
    """

    def __init__(
        self,
        name: str,
        opener: Opener,
        agreement: EpochAgreement,
        io: IoSide,
        clock: Callable[[], float],
        stored_into: Callable[[], bool],
    ) -> None:
        super().__init__("record", io, clock, self._write, Backoff(RETRY_SECONDS))
        self._name = name
        self._opener = opener
        self._agreement = agreement
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
