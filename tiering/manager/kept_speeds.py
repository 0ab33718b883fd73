"""The speeds of the engine and the tiers' loads, from one life of an engine to the next.

An engine that starts knows neither how fast it computes nor how fast its tiers are. Until it has measured both, it
takes what an engine on the same hardware has measured before: the tiers whose loads are chosen by their duration keep
it (:class:`~tiering.secondary.speeds.TierSpeeds`). A wrong speed costs little: that of the engine counts until it has
computed a prompt, within :data:`TRUSTED`, and that of a tier until its first load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tiering.manager.answers import SPEEDS
from tiering.manager.prefix_search import PrefixSearch
from tiering.manager.tier_state import TierState
from tiering.manager.tiers import SecondaryTiers
from tiering.secondary.speeds import Speeds

TRUSTED = (0.01, 20.0)
"""Bounds of a time of computing that an engine takes over, in times of the assumed one.

They are those of engines with 500 to 1,000,000 tokens per second.
"""

FIRST_SECONDS = 10.0
"""Seconds after the first measured prompt until the speeds are published."""

AGAIN_SECONDS = 3600.0
"""Seconds until they are published again; they are at the shutdown, too."""


class KeptSpeeds:
    """Publishes what one manager has measured, and takes over what was published before.

    Args:
        tiers: the secondary tiers.
        search: the search whose times of computing are measured.
        note_compute: function that gets times of computing that were not measured by this engine.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        tiers: SecondaryTiers,
        search: PrefixSearch,
        note_compute: Callable[[Sequence[float]], None],
        clock: Callable[[], float],
    ) -> None:
        self._tiers = tiers
        self._search = search
        self._note_compute = note_compute
        self._clock = clock
        self._states = [state for state in tiers.states if state.gate is not None and state.traits.speeds is not None]
        self.gathering = list(self._states)
        """Tiers whose speeds are not known yet."""
        self._compute: float | None = None
        """Seconds of computing a block by a document."""
        self._loads: dict[int, Speeds] = {}
        """Per tier rank, what was found."""
        self._next_at = math.inf

    def gather(self) -> None:
        """Take over what tiers have read."""
        for state in list(self.gathering):
            part = state.traits.speeds
            if part is None or not (state.in_service or state.resetting):
                self.gathering.remove(state)
                continue
            found = self._tiers.ask(state, SPEEDS, part.gather)
            if found is None:
                continue
            self.gathering.remove(state)
            if found:
                self._take(state, found[0])

    def _take(self, state: TierState, speeds: Speeds) -> None:
        self._loads[state.rank] = speeds
        if state.gate is not None and speeds.load_per_block > 0.0:
            state.gate.assume(speeds.load_fixed, speeds.load_per_block, self._clock())
        if self._compute is None:
            self._compute = speeds.compute
            if self._search.is_assumed:
                self._note_compute(self._search.compute_seconds)

    def assumed(self, seconds: Sequence[float]) -> Sequence[float]:
        """Return the times of computing by what was found, for those that the engine assumes without it."""
        base = _first(seconds)
        if self._compute is None or base is None:
            return seconds
        factor = min(max(self._compute / base, TRUSTED[0]), TRUSTED[1])
        return [factor * value for value in seconds]

    def step(self) -> None:
        """Do what is due at the end of a step."""
        if self.gathering:
            self.gather()
        if self._search.is_assumed or not self._states:
            return
        now = self._clock()
        if self._next_at == math.inf:
            self._next_at = now + FIRST_SECONDS
        elif now >= self._next_at:
            self._next_at = now + AGAIN_SECONDS
            self.publish()

    def publish(self) -> None:
        """Let the tiers begin to write what was measured, if it was."""
        compute = _first(self._search.compute_seconds)
        if self._search.is_assumed or compute is None:
            return
        for state in self._states:
            gate, part = state.gate, state.traits.speeds
            if not state.in_service or gate is None or part is None:
                continue
            measured = gate.measured
            if measured is None:
                before = self._loads.get(state.rank, Speeds(compute, 0.0, 0.0))
                measured = before.load_fixed, before.load_per_block
            self._tiers.call(state, part.publish, Speeds(compute / (1.0 + self._search.others), *measured))


def _first(seconds: Sequence[float]) -> float | None:
    """Return the time of the first group that grows with the prompt."""
    return next((value for value in seconds if 0.0 < value < math.inf), None)
