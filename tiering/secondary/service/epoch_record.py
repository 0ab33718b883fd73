"""Record of the common epochs in which the blocks of a medium of its own were stored."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping

from tiering.api.namespace import Namespace
from tiering.secondary.agreement import EpochAgreement, MetEpoch
from tiering.secondary.io.messages import IoTask
from tiering.secondary.io.side import IoSide
from tiering.secondary.service.opener import Opener

logger = logging.getLogger("kv_tiering.tier")

RETRY_SECONDS = 60.0
"""Seconds until a record that could not be written is tried again."""


class EpochRecord:
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
        self._name = name
        self._opener = opener
        self._agreement = agreement
        self._io = io
        self._clock = clock
        self._stored_into = stored_into
        self._namespace: Namespace | None = None
        self.written: Mapping[bytes, MetEpoch] | None = None
        """The common epochs that the medium's record holds; None: not compared in this epoch.

        :meth:`tick` has work only while this is not the agreement's mapping ``met`` itself.
        """
        self._due = 0.0
        self._running = False
        self._failing = False
        agreement.join(self)

    def keep(self, namespace: Namespace | None) -> None:
        """Keep the record of the epoch of ``namespace`` from now on; None: the tier has no epoch."""
        self._namespace = namespace
        self.written = None

    def admits(self, namespace: Namespace) -> bool:
        """Return True if no block in the epoch of ``namespace`` is older than a common epoch that was met."""
        return all(self._compare(namespace, medium, met) is not False for medium, met in self._agreement.met.items())

    def compare(self, medium: bytes, met: MetEpoch) -> bool | None:
        """Return True if all blocks were stored in ``met``, False if some may be older, None if none can be."""
        return None if self._namespace is None else self._compare(self._namespace, medium, met)

    def _compare(self, namespace: Namespace, medium: bytes, met: MetEpoch) -> bool | None:
        recorded = self._opener.recorded
        # The epoch alone decides, so that a tier with another name finds its record.
        if met.epoch in recorded.values():
            return True
        if self._opener.begun == namespace.epoch and not self._stored_into():
            return None
        # No record: the medium is new in this stack, or its blocks are from a version that kept no record.
        return None if medium not in recorded and met.never_moved else False

    def tick(self, now: float) -> None:
        """Write the record if it lacks a common epoch."""
        namespace, met = self._namespace, self._agreement.met
        if namespace is None or met is self.written or self._running or now < self._due:
            return
        recorded = self._opener.recorded
        if all(recorded.get(medium) == found.epoch for medium, found in met.items()):
            self.written = met
            return
        self._running = True
        self._io.run(IoTask("record", lambda: self._opener.record(namespace), self._ended, background=True))

    def _ended(self, result: None, error: BaseException | None) -> None:
        self._running = False
        if error is not None:
            self._due = self._clock() + RETRY_SECONDS * random.uniform(0.8, 1.2)
            if not self._failing:
                logger.warning(
                    "tier %s: the common epoch of its blocks could not be recorded and will be tried again; after a "
                    "restart before then, the tier may begin empty: %s",
                    self._name,
                    error,
                )
        self._failing = error is not None
