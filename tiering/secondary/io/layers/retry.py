"""Layer for retries of temporary errors: exponential backoff with jitter, within block deadlines."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from tiering.block_store import BlockIO, BlockStore, Outcome
from tiering.errors import StoreError
from tiering.secondary.io.layers.layer import StoreLayer
from tiering.secondary.io.stats import IoStats
from tiering.secondary.options import RetryOptions


class RetryLayer(StoreLayer):
    """Retries those blocks of a batch that failed with a temporary error, with the same frame and buffers.

    An attempt starts when the previous one has returned, so that no two attempts write one row. Wait n is between half
    and all of ``backoff`` · 2ⁿ, at most ``backoff_max``. A block is not retried if the wait would end after its
    deadline, or once ``stopping`` returns True. Its outcome is then the last error.

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

    def put(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        return self._retry(self.inner.put, blocks)

    def get(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        return self._retry(self.inner.get, blocks)

    def _retry(self, attempt: Callable[[Sequence[BlockIO]], list[Outcome]], blocks: Sequence[BlockIO]) -> list[Outcome]:
        outcomes = attempt(blocks)
        for retry in range(self._options.attempts - 1):
            failed = [
                at for at, outcome in enumerate(outcomes) if isinstance(outcome, StoreError) and outcome.temporary
            ]
            if not failed or self._stopping():
                break
            wait = self._wait(retry)
            end = self._clock() + wait
            failed = [at for at in failed if blocks[at].deadline > end]
            if not failed:
                break
            self._sleep(wait)
            if self._stopping():
                break
            with self._stats.lock:
                self._stats.retries += len(failed)
            for at, outcome in zip(failed, attempt([blocks[at] for at in failed]), strict=True):
                outcomes[at] = outcome
        return outcomes

    def _wait(self, retry: int) -> float:
        longest = min(self._options.backoff * 2.0**retry, self._options.backoff_max)
        return longest * self._rng.uniform(0.5, 1.0)
