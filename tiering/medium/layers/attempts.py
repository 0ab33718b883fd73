"""Layers for the attempts at a medium, which are counted, start in time, and are repeated."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tiering.errors import OverdueError, StoreError
from tiering.medium.block_store import BlockIO, BlockStore, Done, Outcome, Place, StoreProbe
from tiering.medium.layers.layer import Attempt, StoreLayer
from tiering.secondary.options import RetryOptions


@dataclass(slots=True)
class IoStats:
    """Counters of a tier's I/O since the start.

    Its threads write, and the scheduler's thread reads without a lock.
    """

    read_bytes: int = 0
    """Bytes read from the medium, headers included."""
    read_seconds: float = 0.0
    """Seconds spent in reads, summed over threads."""
    written_bytes: int = 0
    """Bytes written to the medium, headers included."""
    written_seconds: float = 0.0
    """Seconds spent in writes, summed over threads."""
    requests: int = 0
    """Blocks requested of the medium, including failed attempts, probes and deletions."""
    retries: int = 0
    """Blocks that were sent again."""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    """Lock to hold for writing, never for reading."""


class MeterLayer(StoreLayer):
    """Counts every attempt into ``stats``.

    This layer is directly around the medium: every attempt is a request, and costs money on some media.
    """

    def __init__(self, inner: BlockStore, stats: IoStats, *, clock: Callable[[], float]) -> None:
        super().__init__(inner)
        self._stats = stats
        self._clock = clock

    def around(self, attempt: Attempt, blocks: Sequence[BlockIO], *, load: bool) -> list[Outcome]:
        begun = self._clock()
        outcomes: list[Outcome] = []
        try:
            outcomes = attempt(blocks)
        finally:
            moved = [block for block, outcome in zip(blocks, outcomes, strict=False) if outcome is Done.DONE]
            size = sum(
                [
                    len(block.header) + (block.filled if load and block.filled >= 0 else len(block.payload))
                    for block in moved
                ]
            )
            stats = self._stats
            with stats.lock:
                stats.requests += len(blocks)
                if load:
                    stats.read_bytes += size
                    stats.read_seconds += self._clock() - begun
                else:
                    stats.written_bytes += size
                    stats.written_seconds += self._clock() - begun
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


class DeadlineLayer(StoreLayer):
    """Returns :class:`OverdueError` once the deadline of the blocks has passed, and passes them on before.

    A medium that moves one block after the other receives blocks one by one, so that the clock is read between them.
    Attempts that have begun are not interrupted: their row is in use until they end.
    """

    def __init__(self, inner: BlockStore, *, clock: Callable[[], float]) -> None:
        super().__init__(inner)
        self._clock = clock
        self._one_by_one = not inner.traits.batches

    def around(self, attempt: Attempt, blocks: Sequence[BlockIO], *, load: bool) -> list[Outcome]:
        if self._one_by_one and len(blocks) > 1:
            return [self.around(attempt, (block,), load=load)[0] for block in blocks]
        if blocks and blocks[0].deadline <= self._clock():
            return [OverdueError("the deadline passed before an attempt")] * len(blocks)
        return attempt(blocks)


class RetryLayer(StoreLayer):
    """Retries those blocks of a batch that failed with a temporary error, with the same frame and buffers.

    An attempt starts when the previous one has returned, so that no two attempts write one row. Wait n is between half
    and all of ``backoff`` · 2ⁿ, at most ``backoff_max``. Nothing is retried if the wait would end after the blocks'
    deadline, or once ``stopping`` returns True. The outcome is then the last error.

    Args:
        inner: the store to call.
        options: number of attempts and lengths of the waits.
        stats: counters to update.
        clock: function that returns monotonic seconds.
        sleep: function that waits for some seconds.
        stopping: function that returns True once no retry shall start.
        rng: source of the jitter; default: a new one.
    """

    def __init__(
        self,
        inner: BlockStore,
        options: RetryOptions,
        stats: IoStats,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], object],
        stopping: Callable[[], bool] = lambda: False,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(inner)
        self._options = options
        self._stats = stats
        self._clock = clock
        self._sleep = sleep
        self._stopping = stopping
        self._rng = random.Random() if rng is None else rng

    def around(self, attempt: Attempt, blocks: Sequence[BlockIO], *, load: bool) -> list[Outcome]:
        outcomes = attempt(blocks)
        for retry in range(self._options.attempts - 1):
            failed = [
                at for at, outcome in enumerate(outcomes) if isinstance(outcome, StoreError) and outcome.temporary
            ]
            if not failed or self._stopping():
                break
            longest = min(self._options.backoff * 2.0**retry, self._options.backoff_max)
            wait = longest * self._rng.uniform(0.5, 1.0)
            if blocks[0].deadline <= self._clock() + wait:
                break
            self._sleep(wait)
            if self._stopping():
                break
            with self._stats.lock:
                self._stats.retries += len(failed)
            for at, outcome in zip(failed, attempt([blocks[at] for at in failed]), strict=True):
                outcomes[at] = outcome
        return outcomes
