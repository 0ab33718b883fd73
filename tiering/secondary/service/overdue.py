"""Loads whose deadline has passed while their I/O still runs: their rows are lost to the primary tier until it ends."""

from __future__ import annotations

import heapq


class OverdueLoads:
    """Counts the rows of overdue loads.  ``limit_rows``: their share of the primary rows, one at least."""

    def __init__(self, limit_rows: int) -> None:
        self.limit_rows = max(1, limit_rows)
        self.rows = 0
        self._heap: list[tuple[float, int]] = []
        self._running: dict[int, int] = {}
        self._overdue: dict[int, int] = {}

    def begin(self, job_id: int, deadline: float, rows: int) -> None:
        """A load of ``rows`` blocks was handed over; ``deadline`` in monotonic seconds."""
        self._running[job_id] = rows
        heapq.heappush(self._heap, (deadline, job_id))

    def end(self, job_id: int) -> bool:
        """The load's I/O has ended; whether it had been counted as overdue."""
        if self._running.pop(job_id, None) is not None:
            return False
        self.rows -= self._overdue.pop(job_id, 0)
        return True

    def expire(self, now: float) -> list[int]:
        """Count what is overdue at ``now``; returns the rows of each load that was not counted before."""
        expired: list[int] = []
        while self._heap and self._heap[0][0] <= now:
            _, job_id = heapq.heappop(self._heap)
            rows = self._running.pop(job_id, 0)
            if rows:
                self._overdue[job_id] = rows
                expired.append(rows)
                self.rows += rows
        return expired

    @property
    def spent(self) -> bool:
        """Whether overdue loads hold all of their share: nobody loads into more rows than that, so more it never becomes."""
        return self.rows >= self.limit_rows
