"""Layer for deadlines: no attempt starts for a block whose deadline has passed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiering.block_store import BlockIO, BlockStore, Outcome
from tiering.errors import OverdueError
from tiering.secondary.io.layers.layer import StoreLayer
from tiering.secondary.io.stats import IoStats


class DeadlineLayer(StoreLayer):
    """Returns :class:`OverdueError` for overdue blocks, and passes the others on.

    A medium that moves one block after the other receives blocks one by one, so that the clock is read between them.
    Attempts that have begun are not interrupted: their row is in use until they end.
    """

    def __init__(self, inner: BlockStore, stats: IoStats, *, clock: Callable[[], float]) -> None:
        super().__init__(inner)
        self._stats = stats
        self._clock = clock
        self._one_by_one = not inner.traits.batches

    def put(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        return self._in_time(self.inner.put, blocks)

    def get(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        return self._in_time(self.inner.get, blocks)

    def _in_time(
        self, attempt: Callable[[Sequence[BlockIO]], list[Outcome]], blocks: Sequence[BlockIO]
    ) -> list[Outcome]:
        if self._one_by_one and len(blocks) > 1:
            return [self._in_time(attempt, (block,))[0] for block in blocks]
        now = self._clock()
        live = [block for block in blocks if block.deadline > now]
        if len(live) == len(blocks):
            return attempt(blocks)
        with self._stats.lock:
            self._stats.overdue += len(blocks) - len(live)
        done = iter(attempt(live)) if live else iter(())
        return [
            next(done) if block.deadline > now else OverdueError("the deadline passed before an attempt")
            for block in blocks
        ]
