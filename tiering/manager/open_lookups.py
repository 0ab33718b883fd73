"""Lookups that are pending, and whose repetition would give the same answer."""

from __future__ import annotations

from collections.abc import Callable

from tiering.runtime.news import News

LOOK_AGAIN = 0.01
"""Longest time for which a pending lookup is not repeated, in seconds.

Some answers change with time alone, such as a lookup that a tier decides at its deadline.
"""


class OpenLookups:
    """The requests whose last lookup was pending.

    An answer changes when a job or task of a tier ends, which tiers announce, when a store ends, or with time.

    Args:
        news: receiver of the tiers' announcements.
        announced: True if all tiers announce the ends of their jobs and tasks; if False, every lookup is repeated.
        clock: monotonic clock, in seconds.
    """

    __slots__ = ("_announced", "_clock", "_news", "_open", "_seen")

    def __init__(self, news: News, announced: bool, clock: Callable[[], float]) -> None:
        self._news = news
        self._announced = announced
        self._clock = clock
        self._seen = news.count
        self._open: dict[str, tuple[int, float]] = {}
        """By request id: the last announcement before the answer, and the time until which the answer holds."""

    def collecting(self) -> None:
        """Note that the results of all announcements until now are collected next."""
        self._seen = self._news.count

    def note(self, req_id: str, until: float) -> None:
        """Record that the lookup of a request is pending, and repeat it at ``until`` at the latest."""
        if self._announced:
            self._open[req_id] = (self._seen, min(self._clock() + LOOK_AGAIN, until))

    def drop(self, req_id: str) -> None:
        """Let the next lookup of a request search, whatever was pending before."""
        self._open.pop(req_id, None)

    def still_pending(self, req_id: str) -> bool:
        """Return True if the lookup of a request was pending and would give the same answer now."""
        seen, until = self._open.get(req_id, (-1, 0.0))
        return seen == self._news.count and self._clock() < until
