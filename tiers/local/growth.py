"""The growth of a local tier: segments are added before their slots are needed.

The scheduler's thread decides when; :mod:`tiers.local.new_segments` creates the files on the I/O side.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import numpy as np

from tiering.tier import Backoff, Chore, RateLimit
from tiers.local.new_segments import SegmentPace
from tiers.local.store import Inspection, LocalParts

logger = logging.getLogger("kv_tiering.local")

RETRY_SPACE_SECONDS = 60.0
"""Seconds from a full disk to the next attempt to write or to add a segment.

They double while segments cannot be added.
"""

RETRY_SPACE_MOST = 900.0
"""Longest seconds between two attempts to add a segment."""

RECOVERY_FIRST_SECONDS = 1.0
"""Seconds from the opening in which recovery, which may return free slots, comes before a new segment."""

AFTER_DROP_SECONDS = 3600.0
"""Seconds after segments were dropped on a full disk, for which none is added."""

_LOG_PERIOD = 3600.0
"""Seconds between two lines about a disk that stays full."""


class Growth(Chore):
    """The segments of one tier, whose slots are in its index or will be.

    Args:
        parts: parts of the tier, whose index receives the slots.
        examine: receives the comparison of the directory that precedes each new segment. It returns True if the
            directory is still the opened one.
        places_wanted: returns the number of places that stores wait for.
        recovering: returns True while recovery goes on to return slots.
        added: called when a segment was added, because the last checkpoint does not name the segment.
    """

    def __init__(
        self,
        parts: LocalParts,
        examine: Callable[[Inspection], bool],
        places_wanted: Callable[[], int],
        recovering: Callable[[], bool],
        added: Callable[[], None],
    ) -> None:
        waits = Backoff(RETRY_SPACE_SECONDS, RETRY_SPACE_MOST, jitter=0.0)
        super().__init__("segment", parts.io, parts.clock, self._grow, waits)
        self._name, self._store, self._index = parts.name, parts.store, parts.index
        self._examine = examine
        self._places_wanted = places_wanted
        self._recovering = recovering
        self._added = added
        self._recovery_first_until = float("-inf")
        self._refused = self._dropped = False
        """True from refused writes until the disk takes writes again, and if segments were dropped meanwhile."""
        self._per_segment = parts.store.geometry.slots_per_segment
        self._seen: set[int] = set()
        """Segments whose slots are in the index. A number that is returned again is not added again."""
        self._pace = SegmentPace()
        """Pace of the segment that is being created."""
        self._spares_strangers = False
        """True if the next segment would cost files of another shape.

        The segment waits until slots are needed.
        """
        self._add_lines, self._write_lines = RateLimit(_LOG_PERIOD, parts.clock), RateLimit(_LOG_PERIOD, parts.clock)
        self._tidy = Chore("tidy", parts.io, parts.clock, lambda: self._tidy.run(parts.store.tidy, self._tidied))
        self._stopped = False

    def begin(self, existing: tuple[int, ...], fresh: list[int]) -> None:
        """Begin with an opened directory.

        Args:
            existing: segments with content, whose slots recovery returns.
            fresh: new segments, whose slots are all free.
        """
        for number in fresh:
            self._add(number)
        self._seen.update(existing)
        if existing:
            self._recovery_first_until = self._clock() + RECOVERY_FIRST_SECONDS
        self._tidy.wake()
        self.due = self._clock()
        self._grow()

    def tick(self, now: float) -> None:
        """Bring the directory within the capacity, and add a segment, where that is due."""
        if now >= self._tidy.due:
            self._tidy.tick(now)
        grows = self._index.growing and not self.running and now >= self.due
        if not grows or self._index.free < max(self._per_segment, self._places_wanted()):
            self._grow()

    def stop(self) -> None:
        """Add no more segments, because the tier shuts down."""
        self._stopped = True
        self._set_growing()
        self._pace.drop()

    def start_over(self) -> None:
        """Drop all segments, because another directory is in place of the opened one."""
        self._seen.clear()
        self._spares_strangers = self._refused = self._dropped = False
        self.succeeded()
        self.due = self._clock()
        self._set_growing()
        self._pace.drop()

    def drop(self, number: int) -> None:
        """Drop a damaged segment; a new one takes its place."""
        self._seen.discard(number)
        self._go_on()

    def writes_refused(self, blocks: int, reason: str) -> None:
        """Drop segments after a while if the disk still takes no writes to slots.

        Args:
            blocks: number of blocks that could not be written.
            reason: the text for the log line.
        """
        if count := self._write_lines.admit(blocks):
            logger.warning(
                "tier %s: %d block(s) could not be written, using %d slots: %s; trying again in %.0f s, and dropping "
                "a segment then if that is still so",
                self._name,
                count,
                self._index.slots,
                reason,
                RETRY_SPACE_SECONDS,
            )
        self._refused = True
        self._go_on(RETRY_SPACE_SECONDS)

    def _no_segment(self, reason: str) -> None:
        """Wait before the next segment, longer each time, because the disk is full."""
        seconds = self._backoff.failed()
        if count := self._add_lines.admit():
            logger.warning(
                "tier %s: %s; going on with %d slots; attempt %d since the last line, and the next is in %.0f s",
                self._name,
                reason,
                self._index.slots,
                count,
                seconds,
            )
        self._go_on(seconds)

    def _go_on(self, seconds: float = 0.0) -> None:
        """Add a segment after ``seconds``, or after the present wait, if the capacity has room for it."""
        now = self._clock()
        if self.due <= now or self.due == math.inf:
            self.due = now + seconds
        self._set_growing()

    def _set_growing(self) -> bool:
        """Keep the index from evicting blocks while a part of the capacity is unused, or not recovered yet.

        Returns:
            True if the capacity and the disk may have room for another segment.
        """
        may_add = not self._stopped and (self._clock() >= self.due or (self.running and self.due == math.inf))
        self._index.growing = may_add or (self._recovering() and not self._stopped)
        return may_add

    def _grow(self) -> None:
        may_add = self._set_growing()
        free, wanted = self._index.free, self._places_wanted()
        if self.running:
            if free < max(1, wanted):
                self._pace.hurry()
            return
        if not may_add:
            return
        if self._refused:
            self.run(lambda: (self._store.regain(), self._store.inspect()), self._regained)
            return
        if free >= wanted and self._recovering() and self._clock() < self._recovery_first_until:
            return
        needed = free < max(1, wanted)
        if free >= max(self._per_segment, wanted) or (self._spares_strangers and not needed):
            return
        pace = self._pace = SegmentPace()
        store = self._store
        taken = self._seen | {slot // self._per_segment for slot in self._index.states.leaving}

        def create() -> tuple[Inspection, int | None, bool]:
            inspection = store.inspect()
            number = None if inspection.moved else store.new_segments.add(pace, taken, delete=needed)
            return inspection, number, number is None and not needed and bool(store.new_segments.strangers())

        self.run(create, self._created)

    def _created(self, found: tuple[Inspection, int | None, bool] | None, error: BaseException | None) -> None:
        if found is None:
            self._no_segment(str(error))
            return
        inspection, number, self._spares_strangers = found
        if not self._examine(inspection):
            return
        if number is None and not inspection.damaged and not self._spares_strangers:
            # The capacity is used up: nothing is due any more.
            self._set_growing()
            return
        self._go_on()
        if number is not None:
            self.succeeded()
            self._add(number)
            if self._index.free < self._places_wanted():
                self._grow()

    def _regained(self, found: tuple[bool, Inspection] | None, error: BaseException | None) -> None:
        if found is None:
            self._no_segment(str(error))
            return
        regained, inspection = found
        if self._examine(inspection):
            self._go_on(RETRY_SPACE_SECONDS if not regained else AFTER_DROP_SECONDS if self._dropped else 0.0)
            self._refused, self._dropped = not regained, not regained

    def _add(self, number: int) -> None:
        self._seen.add(number)
        self._added()
        self._index.add_free(number * self._per_segment + np.arange(self._per_segment))

    def _tidied(self, result: None, error: BaseException | None) -> None:
        if error is not None:
            logger.warning("tier %s: %s; it is tried again", self._name, error)
            self._tidy.wake(RETRY_SPACE_SECONDS)
