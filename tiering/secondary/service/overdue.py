"""Count of the primary rows that a tier's overdue loads hold."""

from __future__ import annotations

import heapq


class OverdueLoads:
    """Loads whose I/O still runs after their deadline, and the primary rows that they hold.

    Args:
        limit_rows: number of primary rows that overdue loads may hold; at least 1.
    """

    def __init__(self, limit_rows: int) -> None:
        self.limit_rows = max(1, limit_rows)
        """Number of primary rows that overdue loads may hold."""
        self.rows = 0
        """Number of rows that overdue loads hold."""
        self.deadlines: list[tuple[float, int]] = []
        """Heap of the deadlines that have not passed, with job numbers; some jobs may have ended."""
        self._running: dict[int, int] = {}
        self._overdue: dict[int, int] = {}

    def begin(self, job_id: int, deadline: float, rows: int) -> None:
        """Record that a load of ``rows`` blocks was submitted.

        Args:
            job_id: number of the job.
            deadline: deadline in monotonic seconds.
            rows: number of primary rows of the load.
        """
        self._running[job_id] = rows
        heapq.heappush(self.deadlines, (deadline, job_id))

    def end(self, job_id: int) -> bool:
        """Record that a load's I/O has ended, and return True if the load had been counted as overdue."""
        if self._running.pop(job_id, None) is not None:
            return False
        self.rows -= self._overdue.pop(job_id, 0)
        return True

    def expire(self, now: float) -> list[int]:
        """Count the loads that are overdue at ``now``, and return the rows of each newly counted load."""
        expired: list[int] = []
        while self.deadlines and self.deadlines[0][0] <= now:
            _, job_id = heapq.heappop(self.deadlines)
            rows = self._running.pop(job_id, 0)
            if rows:
                self._overdue[job_id] = rows
                expired.append(rows)
                self.rows += rows
        return expired

    @property
    def spent(self) -> bool:
        """True if overdue loads hold their whole share of rows.

        Loads never use more rows than this share, so the count cannot exceed it.
        """
        return self.rows >= self.limit_rows
