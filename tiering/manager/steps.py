"""The end of a step in the secondary tiers."""

from __future__ import annotations

from tiering.api.keys import OffloadKey
from tiering.manager.cascade_queue import NOBODY
from tiering.manager.jobs import TierJobs
from tiering.manager.rest import LONGEST_REST
from tiering.manager.tier_state import TierState
from tiering.manager.tiers import SecondaryTiers
from tiering.table.key_rows import KeyRows

MOST_MISSING = 4096
"""Number of blocks beyond which no more are looked for in the engine's cache."""


class TierSteps:
    """Ends each step in the secondary tiers of one manager, and cascades the blocks that they want.

    Args:
        tiers: the tiers.
        jobs: the jobs of the tiers.
        readable: the readable blocks of the primary tier.
    """

    __slots__ = ("_jobs", "_readable", "_states", "_tiers", "missing")

    def __init__(self, tiers: SecondaryTiers, jobs: TierJobs, readable: KeyRows) -> None:
        self._tiers = tiers
        self._states = tiers.states
        self._jobs = jobs
        self._readable = readable
        self.missing: dict[OffloadKey, TierState] | None = None
        """Blocks that a tier wants and the primary tier lacks, with the tier; None: they are not looked for."""

    def end(self) -> tuple[bool, float]:
        """End the step of all tiers.

        Returns:
            True if the common epoch of a tier has a successor, and the seconds for which all tiers rest.
        """
        any_superseded, longest = False, LONGEST_REST
        for state in self._states:
            if state.resetting:
                self._tiers.end_reset(state)
            elif state.in_service:
                wanted, rest, superseded, _ = self._tiers.end_step(state)
                longest = min(longest, rest)
                if superseded:
                    any_superseded, longest = True, 0.0
                if wanted:
                    self._jobs.cascade_held((state,), wanted, NOBODY)
                    if self.missing is not None and len(self.missing) < MOST_MISSING:
                        self.missing.update((key, state) for key in wanted if key not in self._readable)
                    longest = 0.0
                continue
            longest = 0.0
        return any_superseded, longest
