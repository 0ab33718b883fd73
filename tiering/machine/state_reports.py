"""The states of a tier that its engines have been sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tiering.machine.counts import COLD_START
from tiering.machine.engine_jobs import Engine
from tiering.machine.messages import Kind, Record
from tiering.machine.words import State
from tiering.secondary.tier_stats import TierStats

MOST_STORES = 256
"""Largest number of blocks of stores that all engines together may have with a tier."""

RECOVERY_SECONDS = 1.0
"""Seconds from the building of a tier for which engines wait until the blocks of before are found."""

STATE_SECONDS = 1.0
"""Seconds after which an engine gets the statistics although nothing has changed."""


class StateReports:
    """Sends the state of one tier to its engines, when it has changed, and the statistics once in a while."""

    def __init__(self) -> None:
        self._sent: dict[Engine, tuple[object, float]] = {}
        self.cold_start: Callable[[], str | None] = lambda: None
        """Returns what differs in the nearest blocks of others if the tier began empty, and None otherwise."""

    def drop(self, engine: Engine) -> None:
        """Drop what ``engine`` has been sent, so that it gets the state again."""
        self._sent.pop(engine, None)

    def send(
        self, engines: Sequence[Engine], now: float, generation: int, flags: int, state: State, stats: TierStats
    ) -> None:
        """Send what is due, with the window of each engine.

        Args:
            engines: the engines.
            now: seconds of the service's clock.
            generation: generation of the tier.
            flags: flags of the state.
            state: the state, without statistics; the window is 0 if no further store is taken.
            stats: the statistics.
        """
        beside = {COLD_START: differs} if (differs := self.cold_start()) else {}
        for engine in engines:
            window = state.window and max(1, min(MOST_STORES, engine.num_rows // 4) // len(engines))
            words = (flags, generation, state.weights, state.epoch, window)
            sent, when = self._sent.get(engine, (None, 0.0))
            if engine.behind or (sent == words and now < when + STATE_SECONDS):
                continue
            self._sent[engine] = words, now
            text = replace(state, window=window, stats={**stats.as_dict(), **beside}).text()
            engine.send(Record(Kind.STATE, generation, flags, text=text))
