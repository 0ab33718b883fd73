"""Jobs of the secondary tiers in flight, and the order of those that may be withdrawn."""

from __future__ import annotations

from dataclasses import dataclass

from tiering.api.transfer import Rows
from tiering.manager.promotions import Promotion
from tiering.manager.tiers import TierState


@dataclass(slots=True, eq=False)
class Job:
    """A job that its tier has not reported yet: a cascade or a promotion."""

    job_id: int
    """Number of the job."""
    state: TierState
    """The tier."""
    rows: Rows
    """Rows that the job reads or writes; those of a cascade are pinned."""
    deadline: float
    """Time by which the tier should have reported the job."""
    promotion: Promotion | None = None
    """The promotion; None for a cascade."""
    linked: bool = False
    """True while the job is in a :class:`CascadeOrder`."""
    older: Job | None = None
    """Neighbour in the order."""
    newer: Job | None = None
    """Neighbour in the order."""


class CascadeOrder:
    """The cascades that may be withdrawn, the oldest first, and the place at which the next search begins.

    A search looks at a bounded number of rows. If it finds too few of them to take, the next search goes on behind
    them. Rows that nothing can free, however many, thus keep no search from the rows behind them for ever. Once the
    searches have reached the cascade that was the newest at their begin, they begin again with the oldest.
    """

    def __init__(self) -> None:
        self.rows = 0
        """Number of rows of all these cascades, those included that have begun."""
        self._oldest: Job | None = None
        self._newest: Job | None = None
        self._next: Job | None = None
        self._last = 0

    def append(self, job: Job) -> None:
        """Add the newest cascade."""
        job.linked, job.older = True, self._newest
        if self._newest is None:
            self._oldest = job
        else:
            self._newest.newer = job
        self._newest = job
        self.rows += len(job.rows)

    def remove(self, job: Job) -> None:
        """Remove a cascade, if it is in the order."""
        if not job.linked:
            return
        if job.older is None:
            self._oldest = job.newer
        else:
            job.older.newer = job.newer
        if job.newer is None:
            self._newest = job.older
        else:
            job.newer.older = job.older
        if self._next is job:
            self._next = job.newer
        job.linked, job.older, job.newer = False, None, None
        self.rows -= len(job.rows)

    def shrink(self, job: Job, rows: Rows) -> None:
        """Replace the rows of a cascade that lost some; one without rows is removed."""
        self.rows -= len(job.rows) - len(rows)
        job.rows = rows
        if not len(rows):
            self.remove(job)

    def window(self, rows: int) -> tuple[list[Job], Job | None]:
        """Return the next cascades to look at.

        Args:
            rows: number of rows after which the window ends, with the cascade that reaches it.

        Returns:
            The cascades, the oldest first, and the first one behind them; None if there is none.
        """
        if self._newest is not None and (self._next is None or self._next.job_id > self._last):
            self._next, self._last = self._oldest, self._newest.job_id
        jobs: list[Job] = []
        job = self._next
        while job is not None and rows > 0:
            jobs.append(job)
            rows -= len(job.rows)
            job = job.newer
        return jobs, job

    def go_on(self, job: Job | None) -> None:
        """Begin the next search with ``job``; None: with the oldest cascade."""
        self._next = job
