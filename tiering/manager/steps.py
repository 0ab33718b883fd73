"""The end of a step in the secondary tiers."""

from __future__ import annotations

from tiering.manager.cascade_queue import NOBODY
from tiering.manager.jobs import TierJobs
from tiering.manager.rest import LONGEST_REST
from tiering.manager.tiers import SecondaryTiers


class TierSteps:
    """Ends each step in the secondary tiers of one manager, and cascades the blocks that they want.

    Args:
        tiers: the tiers.
        jobs: the jobs of the tiers.
    """

    __slots__ = ("_jobs", "_states", "_tiers")

    def __init__(self, tiers: SecondaryTiers, jobs: TierJobs) -> None:
        self._tiers = tiers
        self._states = tiers.states
        self._jobs = jobs

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
                    longest = 0.0
                continue
            longest = 0.0
        return any_superseded, longest
