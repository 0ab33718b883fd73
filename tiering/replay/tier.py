"""A block tier in simulated time, which records when its loads end and how long it serves nothing."""

from __future__ import annotations

from collections.abc import Iterable

from tiering.block_tier.life import PlacePrefix
from tiering.block_tier.tier import BlockTier
from tiering.index.tier_index import TierIndex
from tiering.medium.layers.breaker import BreakerState
from tiering.replay.simulated import Clock, SimulatedIo
from tiering.secondary.contract import JobResult, TierContext, TransferJob
from tiering.secondary.options import BlockTierOptions


class SimulatedBlockTier(BlockTier):
    """A block tier over a simulated I/O side.

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
        self._now = clock
        self._out_of_service = 0.0
        self._out_since: float | None = None
        super().__init__(context, options, io.store, index, place_prefix=place_prefix, io=io)

    def submit_load(self, job: TransferJob) -> None:
        submitted = self._simulated.loads.jobs
        super().submit_load(job)
        if self._simulated.loads.jobs > submitted:
            ends, request = self._now.load_ends, job.req_context.req_id
            ends[request] = max(self._simulated.loads.free_at, ends.get(request, 0.0))

    def get_finished(self) -> Iterable[JobResult]:
        finished, now = super().get_finished(), self._now.now
        if self._simulated.breakers.reads.state is not BreakerState.CLOSED:
            if self._out_since is None:
                self._out_since = now
        elif self._out_since is not None:
            self._out_of_service += now - self._out_since
            self._out_since = None
        return finished

    @property
    def out_of_service(self) -> float:
        """Number of seconds during which the tier answered no lookups, because its loads came too late."""
        since = self._out_since
        return self._out_of_service + (0.0 if since is None else self._now.now - since)
