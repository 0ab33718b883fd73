"""A block tier in simulated time, whose calls return at once while nothing can have changed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tiering.block_tier.life import PlacePrefix
from tiering.block_tier.tier import BlockTier
from tiering.index.tier_index import TierIndex
from tiering.medium.layers.breaker import BreakerState
from tiering.replay.simulated import Clock, SimulatedIo
from tiering.secondary.contract import JobResult, TierContext, TransferJob
from tiering.secondary.options import BlockTierOptions

LOOK_AGAIN = 1.0
"""Longest simulated time between two looks, in seconds. The tier's own chores are due after minutes."""


@contextmanager
def quiet_log() -> Iterator[None]:
    """Let the package log errors only: what happens to simulated media is told by the result of a replay."""
    log = logging.getLogger("kv_tiering")
    level = log.level
    log.setLevel(max(log.getEffectiveLevel(), logging.ERROR))
    try:
        yield
    finally:
        log.setLevel(level)


class QuietTier(BlockTier):
    """A block tier that processes jobs and deadlines only if some are due.

    The manager asks each tier several times per step, and simulated time mostly stands still in between. The I/O side
    knows when its next job or task ends.

    Args:
        context: environment of the tier; its clock is ``clock``.
        options: options of the tier.
        index: index of the blocks on the medium.
        io: the simulated I/O side.
        clock: simulated time.
        place_prefix: prefix of the places in a namespace, for media whose places are names; default: none.
    """

    def __init__(
        self,
        context: TierContext,
        options: BlockTierOptions,
        index: TierIndex,
        io: SimulatedIo,
        clock: Clock,
        place_prefix: PlacePrefix | None = None,
    ) -> None:
        self._simulated = io
        self._breakers = io.breakers
        self._now = clock
        self._look_at = 0.0
        self._broken = False
        """True while a breaker is not closed, as far as the last look has found."""
        self._out_of_service = 0.0
        self._out_since: float | None = None
        super().__init__(context, options, io.store, index, place_prefix=place_prefix, io=io)
        self.announces_news = False  # The simulated I/O side announces nothing, and nobody waits for it.

    def submit_store(self, job: TransferJob) -> None:
        submitted = self._simulated.stores.jobs
        super().submit_store(job)
        if self._simulated.stores.jobs == submitted:
            self._look_at = 0.0  # The tier has answered the job by itself.

    def submit_load(self, job: TransferJob) -> None:
        submitted = self._simulated.loads.jobs
        super().submit_load(job)
        answered = self._simulated.loads.jobs == submitted
        if answered or self.index.shared:
            self._look_at = 0.0  # The pace of loads from a shared medium is measured from look to look.
        if not answered:
            ends, request = self._now.load_ends, job.req_context.req_id
            ends[request] = max(self._simulated.loads.free_at, ends.get(request, 0.0))

    def get_finished(self) -> Iterable[JobResult]:
        now = self._now.now
        if now < self._look_at and now < self._simulated.due and not (self._broken and self._probe_is_due()):
            return ()
        finished = super().get_finished()
        reads, writes = self._breakers.reads.state, self._breakers.writes.state
        self._broken = reads is not BreakerState.CLOSED or writes is not BreakerState.CLOSED
        self._look_at = now + LOOK_AGAIN
        if reads is not BreakerState.CLOSED:
            if self._out_since is None:
                self._out_since = now
        elif self._out_since is not None:
            self._out_of_service += now - self._out_since
            self._out_since = None
        return finished

    def _probe_is_due(self) -> bool:
        """Return True if a breaker that is not closed allows a probe, which has a time of its own."""
        breakers = (self._breakers.reads, self._breakers.writes)
        return any(breaker.state is not BreakerState.CLOSED and breaker.allows() for breaker in breakers)

    @property
    def out_of_service(self) -> float:
        """Number of seconds during which the tier answered no lookups, because its loads came too late."""
        since = self._out_since
        return self._out_of_service + (0.0 if since is None else self._now.now - since)

    def drain(self, deadline: float) -> bool:
        self._look_at = 0.0
        return super().drain(deadline)

    def on_schedule_end(self) -> None:
        now = self._now.now
        if now >= self._look_at or now >= self._simulated.due or (self._broken and self._probe_is_due()):
            super().on_schedule_end()
