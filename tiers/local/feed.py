"""The merging of recovered blocks into a tier's index, on the scheduler's thread.

Batches come from the I/O side and are merged in bounded pieces per step. A recovery that fails goes on where it was,
after growing waits, without a limit. Until it succeeds, the slots that recovery has not returned stay unused.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from tiering.tier import SEQUENCE, Backoff, Chore, OffloadKey, TierStats
from tiers.local.recovery import RecoveredBatch, Recovery
from tiers.local.store import LocalParts

logger = logging.getLogger("kv_tiering.local")

MERGE_BLOCKS = 64
"""Recovered blocks that are merged before the clock is read.

Their slots may be anywhere, so that each block may be the first to use a page of each of the index's arrays.
"""

MERGE_SECONDS = 0.002
"""Approximate limit of the time for merging in one step, in seconds."""

_BATCHES_AHEAD = 2


class RecoveryFeed(Chore):
    """The recovery of one tier's directory into the tier's index.

    Args:
        parts: parts of the tier, whose index receives the blocks.
        backoff: waits between attempts.
        stats: counts the blocks that a checkpoint names and that are lost.
        announce: called with the keys that became held.
        on_end: called when everything is merged.
    """

    def __init__(
        self,
        parts: LocalParts,
        backoff: Backoff,
        stats: TierStats,
        announce: Callable[[Sequence[OffloadKey]], None],
        on_end: Callable[[], None],
    ) -> None:
        super().__init__("recovery", parts.io, parts.clock, self._fetch, backoff)
        self.scanned = False
        """True if headers contained blocks that the checkpoint does not have."""
        self.foreign = False
        """True if the recovered blocks belong to an epoch that was left meanwhile. Their slots become free."""
        self._name, self._index, self._stop = parts.name, parts.index, parts.stop
        self._stats = stats
        self._announce = announce
        self._on_end = on_end
        self._recovery: Recovery | None = None
        self._complete = False
        self._interruptions = 0
        """Number of errors of this recovery."""
        self._batches: deque[RecoveredBatch] = deque()
        self._merged = 0
        """Number of blocks of the first batch that are merged already."""

    @property
    def active(self) -> bool:
        """True until everything is merged."""
        return self._recovery is not None

    def begin(self, recovery: Recovery) -> None:
        """Begin a recovery."""
        self._recovery = recovery
        self._complete = self.foreign = False
        self._interruptions = 0
        self._index.begin_recovery()
        self.start()

    @property
    def failing(self) -> bool:
        """True if the last attempt ended with an error."""
        return self.active and self.failures > 0

    def drop(self) -> None:
        """Drop the blocks that are not merged yet, because another directory is in place of the opened one.

        A task may still be running (:attr:`running`).
        """
        if not self.active:
            return
        self._recovery = None
        self._batches.clear()
        self._merged = 0
        self.succeeded()
        self._index.end_recovery()

    def tick(self, now: float) -> None:
        """Merge the batches that have arrived, and repeat a failed fetch when it is due."""
        if self._batches:
            self._merge()
        super().tick(now)

    def push(self) -> bool:
        """Merge the batches that have arrived, and return True if everything is merged."""
        self._merge()
        return not self.active

    def _fetch(self) -> None:
        """Request the next batch, unless enough batches are waiting."""
        recovery = self._recovery
        if recovery is None or self._stop.is_set():
            return
        if not self._complete and len(self._batches) < _BATCHES_AHEAD:
            self.run(lambda: next(recovery, None), self._fetched)

    def _fetched(self, batch: RecoveredBatch | Exception | None, error: BaseException | None) -> None:
        if not self.active or (self._stop.is_set() and batch is None):
            return
        if not isinstance(batch, RecoveredBatch):
            self._interruptions += 1
            if self._interruptions == 1:
                logger.warning(
                    "tier %s: recovery is interrupted and is tried again until it is complete; slots that were not "
                    "read stay unused: %s",
                    self._name,
                    batch or error,
                )
            self.failed()
            return
        self.succeeded()
        self._complete = batch.last
        self._batches.append(batch)
        self._merge()
        self.start()

    def _merge(self) -> None:
        """Merge arrived batches for a few milliseconds."""
        end = time.perf_counter() + MERGE_SECONDS
        while self._batches:
            batch = self._batches[0]
            start, stop = self._merged, self._merged + MERGE_BLOCKS
            if start == 0:
                self.scanned = self.scanned or batch.scanned
                self._stats.blocks_lost += batch.lost
                SEQUENCE.advance_past(batch.seen)
                self._index.add_free(batch.free)
                self._index.states.add_foreign(batch.foreign)
            # A batch has its most recent block first, and the index takes the last merged block for the most recent:
            # merge from the end.
            last = len(batch.keys) - start
            first = max(0, len(batch.keys) - stop)
            if last > first:
                self._merge_blocks(batch, first, last)
            self._merged = stop
            if first == 0:
                self._batches.popleft()
                self._merged = 0
                if self._complete:
                    self._end()
                else:
                    self.start()
            if time.perf_counter() >= end:
                return

    def _merge_blocks(self, batch: RecoveredBatch, first: int, last: int) -> None:
        slots = batch.slots[first:last]
        if self.foreign:
            self._index.add_free(slots)
        else:
            self._announce(self._index.merge(batch.keys[first:last], slots, batch.sequences[first:last]))

    def _end(self) -> None:
        """End the recovery if all batches are merged. The last batch has arrived."""
        if self._batches:
            return
        if self._interruptions:
            logger.info("tier %s: recovery is complete after %d interruption(s)", self._name, self._interruptions)
        self._recovery = None
        self.foreign = False
        self._index.end_recovery()
        self._on_end()
