"""The rest of the tiers: steps in which nothing happens end without calls of any tier."""

from __future__ import annotations

from tiering.runtime.news import News

LONGEST_REST = 0.1
"""Longest time in seconds for which the ends of steps leave the tiers out.

Work of a tier that is due at some time begins this much later at most; a tier may ask for less.
"""


class Rest:
    """The time for which the ends of steps may leave the tiers of one manager out.

    The rest begins at the end of a step, if all tiers agree. It ends with an announcement of a tier, with its time, and
    whenever :attr:`until` is set to None. The manager itself compares both attributes, because every step does.

    Args:
        news: receiver of the tiers' announcements.
    """

    __slots__ = ("_news", "heard", "until")

    def __init__(self, news: News) -> None:
        self._news = news
        self.heard = news.count
        """The last announcement whose result was collected; the rest goes on until another one comes."""
        self.until: float | None = None
        """Time at which the rest ends; None if the tiers do not rest, which any use of the manager must set."""

    def listen(self) -> None:
        """Note that the results of all announcements until now are collected next."""
        self.until = None
        self.heard = self._news.count
