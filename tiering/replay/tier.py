"""A block tier in simulated time, which records how long it serves nothing."""

from __future__ import annotations

from collections.abc import Iterable

from tiering.block_tier.tier import BlockTier
from tiering.index.tier_index import TierIndex
from tiering.medium.layers.breaker import BreakerState
from tiering.replay.simulated import SimulatedIo, SimulatedStore
from tiering.secondary.contract import JobResult, TierContext
from tiering.secondary.options import BlockTierOptions


class SimulatedTier(BlockTier):
    """A block tier over a simulated I/O side.

    Args:
        context: environment of the tier; its clock is that of ``io``.
        options: options of the tier.
        index: index of the blocks on the medium.
        io: the simulated I/O side.
    """

    io: SimulatedIo
    store: SimulatedStore

    def __init__(self, context: TierContext, options: BlockTierOptions, index: TierIndex, io: SimulatedIo) -> None:
        self._out_of_service = 0.0
        self._out_since: float | None = None
        super().__init__(context, options, io.store, index, place_prefix=lambda namespace: "", io=io)

    def get_finished(self) -> Iterable[JobResult]:
        finished, now = super().get_finished(), self._clock()
        if self.io.breakers.reads.state is not BreakerState.CLOSED:
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
        return self._out_of_service + (0.0 if since is None else self._clock() - since)
