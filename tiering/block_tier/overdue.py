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
        """Heap of the deadlines that have not passed, with job numbers; the first one's job has not ended."""
        self._running: dict[int, tuple[int, str]] = {}
        self._overdue: dict[int, int] = {}

    def begin(self, job_id: int, deadline: float, rows: int, req_id: str) -> None:
        """Record that a load of ``rows`` blocks was submitted.

        Args:
            job_id: number of the job.
            deadline: deadline in monotonic seconds.
            rows: number of primary rows of the load.
            req_id: id of the request that loads.
        """
        self._running[job_id] = rows, req_id
        heapq.heappush(self.deadlines, (deadline, job_id))

    def end(self, job_id: int) -> bool:
        """Record that a load's I/O has ended, and return True if the load had been counted as overdue."""
        if self._running.pop(job_id, None) is not None:
            while self.deadlines and self.deadlines[0][1] not in self._running:
                heapq.heappop(self.deadlines)
            return False
        self.rows -= self._overdue.pop(job_id, 0)
        return True

    def expire(self, now: float) -> list[int]:
        """Count the loads that are overdue at ``now``, and return the rows of each newly counted load.

        Jobs of one request with the same deadline are parts of one load.
        """
        expired: dict[tuple[float, str], int] = {}
        while self.deadlines and self.deadlines[0][0] <= now:
            deadline, job_id = heapq.heappop(self.deadlines)
            rows, req_id = self._running.pop(job_id, (0, ""))
            if rows:
                self._overdue[job_id] = rows
                expired[deadline, req_id] = expired.get((deadline, req_id), 0) + rows
                self.rows += rows
        return list(expired.values())

    @property
    def spent(self) -> bool:
        """True if overdue loads hold their whole share of rows.

        Loads never use more rows than this share, so the count cannot exceed it.
        """
        return self.rows >= self.limit_rows
