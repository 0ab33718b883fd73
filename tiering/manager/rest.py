"""The rest of the tiers: steps in which nothing happens end without calls of any tier."""

from __future__ import annotations

from collections.abc import Callable

from tiering.manager.answers import PROCESS_ENDS, SECONDS
from tiering.manager.tiers import SecondaryTiers, TierState
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
        tiers: the tiers.
        news: receiver of the tiers' announcements.
        clock: monotonic clock, in seconds.
    """

    __slots__ = ("_clock", "_news", "_tiers", "heard", "until")

    def __init__(self, tiers: SecondaryTiers, news: News, clock: Callable[[], float]) -> None:
        self._tiers = tiers
        self._news = news
        self._clock = clock
        self.heard = news.count
        """The last announcement whose result was collected; the rest goes on until another one comes."""
        self.until: float | None = None
        """Time at which the rest ends; None if the tiers do not rest, which any use of the manager must set."""

    def listen(self) -> None:
        """Note that the results of all announcements until now are collected next."""
        self.until = None
        self.heard = self._news.count

    def begin(self, next_due: float) -> None:
        """Let the tiers rest if all of them agree.

        The caller has called all of them since :meth:`listen`.

        Args:
            next_due: time at which the manager itself has something to do.
        """
        longest = LONGEST_REST
        for state in self._tiers.states:
            seconds = self._rest_of(state) if state.in_service else None
            if not seconds:
                return
            longest = min(longest, seconds)
        self.until = min(self._clock() + longest, next_due)

    def _rest_of(self, state: TierState) -> float | None:
        """Return the seconds for which a tier may be left out; None if its answer takes it out of service.

        The answer of a tier that keeps its contract costs fewer calls than :meth:`SecondaryTiers.ask` takes.
        """
        try:
            seconds = state.tier.rest()
        except PROCESS_ENDS:
            raise
        except BaseException as error:
            self._tiers.retire_raising(state, state.tier.rest, error)
            return None
        if type(seconds) is float and seconds >= 0.0:
            return seconds
        return self._tiers.read(state, SECONDS, state.tier.rest, seconds)
