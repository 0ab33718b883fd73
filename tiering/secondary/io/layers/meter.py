"""Layer for metering: counts the requests, bytes and seconds of the medium."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiering.block_store import BlockIO, BlockStore, Done, Outcome, Place, StoreProbe
from tiering.secondary.io.layers.layer import StoreLayer
from tiering.secondary.io.stats import IoStats


class MeterLayer(StoreLayer):
    """Counts every attempt into ``stats``.

    This layer is directly around the medium: every attempt is a request, and costs money on some media.
    """

    def __init__(self, inner: BlockStore, stats: IoStats, *, clock: Callable[[], float]) -> None:
        super().__init__(inner)
        self._stats = stats
        self._clock = clock

    def put(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        begun = self._clock()
        outcomes: list[Outcome] = []
        try:
            outcomes = self.inner.put(blocks)
        finally:
            moved = [block for block, outcome in zip(blocks, outcomes, strict=False) if outcome is Done.DONE]
            size = sum([len(block.header) + len(block.payload) for block in moved])
            stats = self._stats
            with stats.lock:
                stats.requests += len(blocks)
                stats.written_bytes += size
                stats.written_seconds += self._clock() - begun
        return outcomes

    def get(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        begun = self._clock()
        outcomes: list[Outcome] = []
        try:
            outcomes = self.inner.get(blocks)
        finally:
            moved = [block for block, outcome in zip(blocks, outcomes, strict=False) if outcome is Done.DONE]
            size = sum(
                [len(block.header) + (block.filled if block.filled >= 0 else len(block.payload)) for block in moved]
            )
            stats = self._stats
            with stats.lock:
                stats.requests += len(blocks)
                stats.read_bytes += size
                stats.read_seconds += self._clock() - begun
        return outcomes

    def delete(self, places: Sequence[Place]) -> None:
        self._count(len(places))
        self.inner.delete(places)

    def probe(self, places: Sequence[Place]) -> StoreProbe:
        self._count(len(places))
        return self.inner.probe(places)

    def _count(self, requests: int) -> None:
        with self._stats.lock:
            self._stats.requests += requests
