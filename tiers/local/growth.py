"""The growth of a local tier: segments are added before their slots are needed.

The scheduler's thread decides when; :mod:`tiers.local.new_segments` creates the files on the I/O side.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from tiering.secondary.index.slots import SlotIndex
from tiering.secondary.io.messages import IoTask
from tiering.secondary.io.side import IoSide
from tiers.local.new_segments import Pace
from tiers.local.store import Inspection, LocalStore

logger = logging.getLogger("kv_tiering.local")

RETRY_SPACE_SECONDS = 60.0
"""Seconds from a full disk to the next attempt to add a segment."""


class Growth:
    """The segments of one tier, as far as its index knows them.

    Args:
        name: the tier's name, for log lines.
        store: the tier's store.
        index: the index that receives the slots.
        io: runs the tasks.
        clock: returns monotonic seconds.
        examine: receives the comparison of the directory that precedes each new segment. It returns True if the
            directory is still the opened one.
        waiting_blocks: returns the number of blocks of stores that wait for slots.
        recovering: returns True while recovery goes on to return slots.
    """

    def __init__(
        self,
        name: str,
        store: LocalStore,
        index: SlotIndex,
        io: IoSide,
        clock: Callable[[], float],
        examine: Callable[[Inspection], bool],
        waiting_blocks: Callable[[], int],
        recovering: Callable[[], bool],
    ) -> None:
        self._name = name
        self._store = store
        self._index = index
        self._io = io
        self._clock = clock
        self._examine = examine
        self._waiting_blocks = waiting_blocks
        self._recovering = recovering
        self._per_segment = store.geometry.slots_per_segment
        self._seen: set[int] = set()
        """Segments whose slots are in the index. A number that is returned again is not added again."""
        self._pace: Pace | None = None
        self._complete = False
        self._no_space_until = float("-inf")
        self._tidy_due = float("inf")
        self._stopped = False

    @property
    def running(self) -> bool:
        """True while a segment is being created."""
        return self._pace is not None

    def begin(self, existing: tuple[int, ...], fresh: list[int]) -> None:
        """Begin with an opened directory.

        Args:
            existing: segments with content, whose slots recovery returns.
            fresh: new segments, whose slots are all free.
        """
        for number in fresh:
            self._add(number)
        self._seen.update(existing)
        self._tidy_due = self._clock()
        self._grow()

    def tick(self) -> None:
        """Bring the directory within the capacity, and add a segment, where that is due."""
        now = self._clock()
        if now >= self._tidy_due:
            self._tidy_due = float("inf")
            self._io.run(IoTask("tidy", self._store.tidy, self._tidied, background=True))
        grows = self._index.growing and self._pace is None and not self._complete and now >= self._no_space_until
        if not grows or self._index.free < self._per_segment or self._waiting_blocks():
            self._grow()

    def stop(self) -> None:
        """Add no more segments, because the tier shuts down."""
        self._stopped = True
        self._tell_index()
        if self._pace is not None:
            self._pace.abandon()

    def start_over(self) -> None:
        """Forget all segments, because another directory is in place of the opened one."""
        self._seen.clear()
        self._complete = False
        self._no_space_until = float("-inf")
        self._tell_index()
        if self._pace is not None:
            self._pace.abandon()

    def lose(self, number: int) -> None:
        """Forget a damaged segment; it is replaced."""
        self._seen.discard(number)
        self._complete = False
        self._tell_index()

    def out_of_space(self, reason: str) -> None:
        """Wait before the next segment, because the disk is full.

        Args:
            reason: the text for the log line.
        """
        self._complete = False
        now = self._clock()
        if now >= self._no_space_until:
            logger.warning("tier %s: %s; trying again in %.0f s", self._name, reason, RETRY_SPACE_SECONDS)
        self._no_space_until = now + RETRY_SPACE_SECONDS
        self._tell_index()

    def _tell_index(self) -> bool:
        """Keep the index from evicting blocks while a part of the capacity is unused, or not recovered yet.

        Returns:
            True if the capacity and the disk may have room for another segment.
        """
        may_add = not (self._complete or self._stopped or self._clock() < self._no_space_until)
        self._index.growing = may_add or (self._recovering() and not self._stopped)
        return may_add

    def _grow(self) -> None:
        may_add = self._tell_index()
        free, waiting = self._index.free, self._waiting_blocks()
        if self._pace is not None:
            if not free or waiting:
                self._pace.hurry()
            return
        if not may_add or free >= max(self._per_segment, waiting):
            return
        if self._index.states.full:
            self._index.states.restore_full()
        pace = self._pace = Pace()
        store = self._store
        taken = self._seen | {slot // self._per_segment for slot in self._index.states.leaving}

        def create() -> tuple[Inspection, int | None]:
            inspection = store.inspect()
            return inspection, None if inspection.moved else store.new_segments.add(pace, taken)

        self._io.run(IoTask("segment", create, self._created, background=True))

    def _created(self, found: tuple[Inspection, int | None] | None, error: BaseException | None) -> None:
        self._pace = None
        if found is None:
            self.out_of_space(str(error))
            return
        inspection, number = found
        if not self._examine(inspection):
            return
        if number is not None:
            self._add(number)
            if self._waiting_blocks():
                self._grow()
        elif not inspection.damaged:
            self._complete = not self._index.states.full
            self._tell_index()

    def _add(self, number: int) -> None:
        self._seen.add(number)
        self._index.add_free(number * self._per_segment + np.arange(self._per_segment))

    def _tidied(self, result: None, error: BaseException | None) -> None:
        if error is not None:
            logger.warning("tier %s: %s; it is tried again", self._name, error)
            self._tidy_due = self._clock() + RETRY_SPACE_SECONDS
