"""Queues of a simulated medium: when its loads and its stores begin and end.

Each direction moves one job after the other. :mod:`tiering.replay.model` describes the duration of a job.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tiering.block_store import Done, Outcome
from tiering.errors import OverdueError
from tiering.secondary.io.messages import IoJob, IoResult


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of a medium in one direction."""

    bytes_per_second: float
    """Bandwidth."""
    latency: float
    """Time until the first byte of a block arrives, in seconds."""
    at_once: int
    """Number of blocks that are moved at the same time."""

    def seconds(self, blocks: int, moved: int) -> float:
        """Return the duration of a job, in seconds.

        Args:
            blocks: number of its blocks.
            moved: bytes that the medium moves for them.
        """
        if blocks <= self.at_once:
            return self.latency + moved / self.bytes_per_second
        waves = math.ceil(blocks / self.at_once)
        return max(self.latency + moved / self.bytes_per_second, waves * self.latency)


class LoadQueue:
    """The loads of one medium; a load's end is certain when it is submitted.

    Args:
        speed: speed of the medium.
    """

    def __init__(self, speed: Speed) -> None:
        self._speed = speed
        self.free_at = 0.0
        """Time at which all submitted loads will have ended."""
        self.jobs = 0
        """Number of loads submitted."""
        self.blocks = 0
        """Number of blocks moved."""

    def add(self, start: float, blocks: int, moved: int) -> float:
        """Add a load that begins at ``start``, and return its duration in seconds."""
        seconds = self._speed.seconds(blocks, moved)
        self.free_at = start + seconds
        self.blocks += blocks
        return seconds


@dataclass(slots=True, eq=False)
class _Store:
    """One store that has not ended."""

    job: IoJob
    blocks: int
    """Number of blocks that were not withdrawn."""
    raw_bytes: int
    """Raw bytes of these blocks."""
    left: list[int] | None = None
    """Positions of the blocks that were not withdrawn; None: all of them."""
    begun: float = 0.0
    """Time at which its first block began."""
    end: float = math.inf
    """Time at which its last block will have been written; infinity before its first block begins."""

    def rows(self, begun: int) -> list[int]:
        """Return the rows of its blocks behind the ``begun`` first ones, the tail first."""
        rows, left = self.job.rows, self.left
        if left is None:
            return list(reversed(rows[begun:] if begun else rows))
        return [rows[at] for at in reversed(left[begun:] if begun else left)]

    def keep(self, left: list[int]) -> None:
        """Keep the blocks at the positions ``left`` only."""
        sizes = self.job.sizes
        self.left, self.blocks, self.raw_bytes = left, len(left), sum([sizes[at] for at in left])


class StoreQueue:
    """The stores of one medium; blocks that have not begun can be withdrawn.

    A store's blocks begin evenly over its duration, as many of them at once as the medium moves at the same time.

    Args:
        speed: speed of the medium.
        bytes_ratio: stored bytes by raw bytes, below 1 for a tier that compresses.
    """

    def __init__(self, speed: Speed, bytes_ratio: float) -> None:
        self._speed = speed
        self._ratio = bytes_ratio
        self._running: _Store | None = None
        self._waiting: dict[int, _Store] = {}
        self._ended: list[IoResult] = []
        self._last_end = 0.0
        self.next_end = math.inf
        """Time at which the next store ends or misses its deadline; infinity if there is none."""
        self.jobs = 0
        """Number of stores submitted."""
        self.blocks = 0
        """Number of blocks written."""
        self.written_bytes = 0
        """Bytes written."""
        self.written_seconds = 0.0
        """Seconds during which the medium wrote."""

    def submit(self, job: IoJob, now: float) -> None:
        """Add a store, which begins at once if the medium writes nothing."""
        self.jobs += 1
        store = _Store(job, len(job.keys), sum(job.sizes))
        if self._running is None:
            self._begin(store, now)
            self._find_next_end()
            return
        self._waiting[job.job_id] = store
        if len(self._waiting) == 1:
            self._find_next_end()

    def take_ended(self, now: float) -> list[IoResult]:
        """Return the results of the stores that have ended until ``now`` and were not returned yet."""
        ended, self._ended = self._ended, []
        waiting = self._waiting
        while (running := self._running) is not None:
            head = next(iter(waiting.values()), None)
            if head is not None and head.job.deadline <= min(running.end, now):
                del waiting[head.job.job_id]
                ended.append(_result(head, OverdueError("the store waited longer than the tier's deadline")))
                continue
            if running.end > now:
                break
            ended.append(self._end(running))
            if head is not None:
                del waiting[head.job.job_id]
                self._begin(head, running.end)
        self._find_next_end()
        return ended

    def run_out(self) -> float:
        """Let all stores end, for :meth:`take_ended`, and return the time at which the last one has ended."""
        self._ended = self.take_ended(math.inf)
        self._find_next_end()
        return self._last_end

    def _find_next_end(self) -> None:
        running = self._running
        if self._ended:
            self.next_end = -math.inf
        elif running is None:
            self.next_end = math.inf
        else:
            self.next_end = running.end
            for store in self._waiting.values():
                self.next_end = min(running.end, store.job.deadline)
                break

    def waiting_rows(self, job_id: int, now: float) -> list[int]:
        """Return the rows of a store's blocks that have not begun, the tail first; none for other jobs."""
        store = self._waiting.get(job_id)
        if store is not None:
            return store.rows(0)
        running = self._running
        if running is None or running.job.job_id != job_id:
            return []
        return running.rows(self._begun(running, now))

    def withdraw(self, rows: Mapping[int, Collection[int]], now: float) -> list[tuple[int, list[int]]]:
        """Take back blocks of stores that have not begun.

        Args:
            rows: rows of the blocks, by the number of their job.
            now: current time, in seconds.

        Returns:
            The number of each job that lost blocks, and their rows.
        """
        withdrawn: list[tuple[int, list[int]]] = []
        running = self._running
        for job_id, wanted in rows.items():
            if (store := self._waiting.get(job_id)) is not None:
                begun = 0
            elif running is not None and running.job.job_id == job_id:
                store, begun = running, self._begun(running, now)
            else:
                continue
            lost = self._shorten(store, begun, wanted)
            if not lost:
                continue
            withdrawn.append((job_id, lost))
            if store is running:
                store.end = max(now, store.begun + self._seconds(store))
            elif not store.left:
                del self._waiting[job_id]
                self._ended.append(_result(store, Done.DONE))
        self._find_next_end()
        return withdrawn

    @staticmethod
    def _shorten(store: _Store, begun: int, rows: Collection[int]) -> list[int]:
        """Remove those of ``rows`` from a store whose blocks have not begun, and return them."""
        held, wanted = store.job.rows, frozenset(rows)
        left = list(range(len(held))) if store.left is None else store.left
        waiting = left[begun:]
        lost = [held[at] for at in waiting if held[at] in wanted]
        if lost:
            store.keep(left[:begun] + [at for at in waiting if held[at] not in wanted])
        return lost

    def _begun(self, running: _Store, now: float) -> int:
        """Return the number of blocks of the running store that have begun."""
        share = (now - running.begun) / (running.end - running.begun) if running.end > running.begun else 1.0
        return min(running.blocks, self._speed.at_once + int(share * running.blocks))

    def _seconds(self, store: _Store) -> float:
        return self._speed.seconds(store.blocks, int(store.raw_bytes * self._ratio))

    def _begin(self, store: _Store, now: float) -> None:
        store.begun, store.end = now, now + self._seconds(store)
        self._running = store

    def _end(self, running: _Store) -> IoResult:
        self._running = None
        self._last_end = running.end
        self.blocks += running.blocks
        self.written_bytes += int(running.raw_bytes * self._ratio)
        self.written_seconds += running.end - running.begun
        return _result(running, Done.DONE)


def _result(store: _Store, outcome: Outcome) -> IoResult:
    """Return the result of a store whose remaining blocks have ended with ``outcome``."""
    job = store.job
    moved = store.raw_bytes if outcome is Done.DONE else 0
    if store.left is None:
        return IoResult(job, [outcome] * len(job.keys), moved, 0.0)
    outcomes: list[Outcome] = [Done.ABSENT] * len(job.keys)
    for at in store.left:
        outcomes[at] = outcome
    return IoResult(job, outcomes, moved, 0.0)
