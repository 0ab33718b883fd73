"""Lanes of a tier's I/O side: loads and stores that wait and run, each up to a depth of its own.

The scheduler's thread only appends to the lanes' queues and takes from them. It never waits for the lock, which I/O
threads hold when they begin or end a unit.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tiering.runtime.depth import DepthBounds, DepthFinder
from tiering.secondary.contract import TransferJob


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Blocks [start, stop) of those that a job moves, which one thread moves."""

    job: TransferJob
    start: int
    """Position of the first block."""
    stop: int
    """Position behind the last block."""
    whole: bool = False
    """True if no thread has cut these blocks into units yet; default False."""


class Lane:
    """Units of one direction.

    Args:
        bounds: bounds of the depth.
    """

    def __init__(self, bounds: DepthBounds) -> None:
        self.waiting: deque[Unit] = deque()
        """Units that no thread has begun, the most urgent one first."""
        self.finder = DepthFinder(bounds)
        self.running: dict[threading.Thread, float] = {}
        """Deadline of the unit that each thread runs."""

    def active(self, now: float) -> int:
        """Return the number of running units, without those that hang in the medium after their deadline.

        At most as many units as the depth count as hanging.
        """
        running = len(self.running)
        if running < self.finder.depth:
            return running
        return running - min(self.stuck(now), self.finder.depth)

    def stuck(self, now: float) -> int:
        """Return the number of threads that run a unit after its deadline."""
        return sum([deadline <= now for deadline in list(self.running.values())])


class Lanes:
    """Both lanes of a tier.

    All threads together run at most as many units as the larger depth, loads first.

    Args:
        bounds: bounds of the depth of each direction.
        clock: function that returns monotonic seconds.
    """

    def __init__(self, bounds: DepthBounds, clock: Callable[[], float]) -> None:
        self.loads = Lane(bounds)
        self.stores = Lane(bounds)
        self.most = bounds.most
        """Largest number of units that may run at once, without those that hang."""
        self.startable = bounds.most
        """Number of threads that ran when another one could not be started, to be looked at by :meth:`end`."""
        self._clock = clock
        self._lock = threading.Lock()

    def of(self, job: TransferJob) -> Lane:
        """Return the lane of a job's direction: its waiting and running units."""
        return self.loads if job.is_promotion else self.stores

    @property
    def has_work(self) -> bool:
        """True if a unit waits for which there is a place."""
        loads, stores = self.loads, self.stores
        if not loads.waiting and not stores.waiting:
            return False
        now = self._clock()
        load_units, store_units = loads.active(now), stores.active(now)
        if load_units + store_units >= max(loads.finder.depth, stores.finder.depth):
            return False
        if loads.waiting and load_units < loads.finder.depth:
            return True
        return bool(stores.waiting) and store_units < stores.finder.depth

    def refused(self, threads: int) -> None:
        """Record that no more than ``threads`` threads can be started now; any thread may call."""
        self.startable = max(1, threads)

    def stuck(self) -> int:
        """Return the number of threads that run a unit after its deadline, at most :attr:`most`."""
        now = self._clock()
        return min(self.loads.stuck(now) + self.stores.stuck(now), self.most)

    def take_any(self) -> Unit | None:
        """Return and remove a unit that no thread has begun; None if none waits. Any thread may call."""
        load = take_unit(self.loads.waiting)
        return take_unit(self.stores.waiting) if load is None else load

    def begin(self) -> Unit | None:
        """Take the most urgent unit for which there is a place; the calling thread runs the unit from now on."""
        with self._lock:
            if not self.has_work:
                return None
            now = self._clock()
            for lane in (self.loads, self.stores):
                if lane.waiting and lane.active(now) < lane.finder.depth and (unit := take_unit(lane.waiting)):
                    lane.running[threading.current_thread()] = unit.job.deadline
                    return unit
        return None

    def end(self, job: TransferJob, moved: int, *, failed: bool) -> None:
        """Record that the calling thread's unit has ended.

        Args:
            job: the job of the unit.
            moved: bytes that the unit moved.
            failed: True if some block was not moved; such a unit teaches nothing about the depth.
        """
        lane, now = self.of(job), self._clock()
        with self._lock:
            full = not failed and bool(lane.waiting) and len(lane.running) == lane.finder.depth
            lane.running.pop(threading.current_thread(), None)
            if self.startable < lane.finder.depth:
                lane.finder.limit(self.startable)
                self.startable = self.most
            if not lane.waiting:
                if lane.finder.attentive:
                    lane.finder.starved()
            elif full or lane.finder.measuring:
                lane.finder.ended(now, moved, full=full)


def take_unit(queue: deque[Unit]) -> Unit | None:
    """Return and remove the head of a lane's queue; None if it is empty. The caller owns the unit."""
    try:
        return queue.popleft()
    except IndexError:
        return None
