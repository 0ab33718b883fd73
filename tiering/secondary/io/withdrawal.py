"""Withdrawal of stored blocks whose units still wait in the queue of a tier's I/O side.

A unit belongs to the thread that removes it from the queue. A unit that the scheduler's thread removes is therefore not
begun by any other thread.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from operator import attrgetter

from tiering.secondary.io.lanes import JobState, Lane, Unit

_START = attrgetter("start")


class StoreUnits:
    """Units of stores that no thread has begun, by job.

    The scheduler's thread calls all methods.

    Args:
        lane: lane of the stores.
        lock: lock that guards the states of jobs.
    """

    def __init__(self, lane: Lane, lock: threading.Lock) -> None:
        self.states: dict[int, JobState] = {}
        """State of each store that has not been reported, by the number of its job."""
        self._lane = lane
        self._lock = lock

    def waiting_rows(self, job_id: int) -> list[int]:
        """Return the rows of a store's blocks that no thread has begun, the tail first; none for other jobs."""
        state = self.states.get(job_id)
        if state is None or not state.waiting:
            return []
        rows = state.job.rows
        # A list of a set is made in one operation: threads that take units meanwhile do not disturb it.
        units = list(state.waiting)
        if len(units) > 1:
            units.sort(key=_START, reverse=True)
        return [row for unit in units for row in reversed(rows[unit.start : unit.stop])]

    def take_back(self, job_id: int, rows: Collection[int]) -> Iterator[tuple[Unit, list[int]]]:
        """Remove blocks of a store from the queue, as far as no thread has begun them.

        The other blocks of their units are queued again, at the same place, in units of their own. The caller ends the
        units that this method yields, and wakes a thread for the others.

        Args:
            job_id: number of the job.
            rows: rows of the blocks.

        Yields:
            Each unit that lost blocks, and their positions in the job.
        """
        state = self.states.get(job_id)
        for unit in () if state is None else sorted(state.waiting, key=_START):
            held = unit.state.job.rows
            chosen = [position for position in range(unit.start, unit.stop) if held[position] in rows]
            if chosen and self._remove(unit, chosen):
                yield unit, chosen

    def _remove(self, unit: Unit, positions: Sequence[int]) -> bool:
        """Remove ``positions`` of a unit from the queue, and return False if a thread has begun the unit."""
        queue = self._lane.waiting
        try:
            # The oldest stores are withdrawn first, so the unit is near the head of the queue.
            at = queue.index(unit)
            queue.remove(unit)
        except (ValueError, IndexError):
            return False
        unit.state.waiting.discard(unit)
        if len(positions) < unit.stop - unit.start:
            self._put_back(unit, positions, at)
        return True

    def _put_back(self, unit: Unit, without: Sequence[int], at: int) -> None:
        """Queue a unit again ``without`` some positions, at position ``at`` of the queue."""
        kept: list[Unit] = []
        start = unit.start
        for position in (*without, unit.stop):
            if start < position:
                kept.append(Unit(unit.state, start, position, whole=unit.whole))
            start = position + 1
        with self._lock:
            unit.state.unfinished += len(kept)
        unit.state.waiting.update(kept)
        for part in reversed(kept):
            self._lane.waiting.insert(at, part)
