"""The end of a step in the secondary tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiering.api.keys import OffloadKey
from tiering.manager.answers import PROCESS_ENDS, TRUTH, WANTED
from tiering.manager.cascade_queue import NOBODY
from tiering.manager.jobs import TierJobs
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

    def end(self) -> bool:
        """End the step of all tiers, and return True if the common epoch of one of them has a successor.

        A tier that raises is taken out of service, as by :meth:`SecondaryTiers.call`, which would cost three more calls
        in every step.
        """
        any_superseded = False
        for state in self._states:
            if not state.in_service:
                if state.resetting:
                    self._tiers.end_reset(state)
                continue
            tier = state.tier
            method: Callable[[], object] = tier.take_wanted_keys
            wanted: Sequence[OffloadKey] | None = ()
            try:
                answer = tier.take_wanted_keys()
                if type(answer) not in (tuple, list) or answer:
                    wanted = self._tiers.read(state, WANTED, method, answer)
                    if wanted is None:
                        continue
                method = tier.on_schedule_end
                tier.on_schedule_end()
                method = tier.superseded
                superseded = tier.superseded()
            except PROCESS_ENDS:
                raise
            except BaseException as error:
                self._tiers.retire_raising(state, method, error)
                continue
            if wanted:
                self._jobs.cascade_held((state,), wanted, NOBODY)
            if superseded is not False and self._tiers.read(state, TRUTH, method, superseded):
                any_superseded = True
        return any_superseded
