"""The time for which a step without work waits until the lookups of its requests are answered.

Such a step costs an engine half a millisecond or more. A lookup that a tier asks its medium for therefore begins when
the request arrives, if the engine runs nothing. The step that finds no other work waits for its answer, so that it is
the step in which the request runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any

from tiering.api.manager import OffloadingManager
from tiering.connector.half import SchedulerHalf
from tiering.connector.hits import HitSearch
from tiering.connector.protocols import EngineRequest
from tiering.connector.suspects import EngineBlockPool
from tiering.connector.tracked import TrackedRequest

MOST_REQUESTS = 64
"""Largest number of requests of an engine for which lookups begin when they come."""

Answer = tuple[int | None, bool]
"""Answer to a match; the number is None while it is not known."""


class LookupWaits:
    """Lookups that wait for an answer, and the steps that wait for them.

    Args:
        half: the scheduler half, which answers the matches.
        manager: the tiers.
        search: determines the blocks that are looked up.
        copies: the copies that run; their ends are reported by steps alone, so that no step waits meanwhile.
        end_step: ends the manager's step, which takes the results of its tiers.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        half: SchedulerHalf[Any],
        manager: OffloadingManager,
        search: HitSearch,
        copies: Sized,
        end_step: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._states, self._match, self._search = half.states, half.get_num_new_matched_tokens, search
        self._manager, self._copies, self._end_step, self._clock = manager, copies, end_step, clock
        # Windows and states are looked up from the right, from an end that only the search knows.
        self._is_possible = len(half.groups) == 1 and half.measure.is_full
        self.begins = False
        """True if lookups begin when requests come.

        A lookup was pending then, and none since was answered at once.
        """
        self._waited = self._rested = 0.0
        """Seconds for which the present schedule, and the one that has just ended, have waited."""
        self._answered = set[str]()
        """Requests whose answers the present schedule has waited for."""

    def arrived(self, state: TrackedRequest[Any], pool: EngineBlockPool | None) -> None:
        """Begin the lookup of a request that has just come, if this is the time and the engine runs nothing.

        Args:
            state: the request.
            pool: the engine's block pool; a prefix that its cache holds is not looked up. None: it is not known.
        """
        if not self.begins:
            return
        cached = getattr(pool, "get_cached_block", None)
        if cached is None or state.touched or state.variant is not None or not state.may_load:
            return
        if len(self._states) > MOST_REQUESTS or len(self._copies) or not self._all_wait(state):
            return
        group, hashes = self._search.measure, state.request.block_hashes
        if not hashes or cached(hashes[0], [group.group_idx]) is not None:
            return
        state.extend_keys((group,))
        limit = state.request.num_tokens - self._search.tokens_to_leave
        if state.policy.max_load_tokens is not None:
            limit = min(limit, state.policy.max_load_tokens)
        keys = state.groups[0].keys[: max(0, limit) // group.offloaded_block_size]
        self.begins = state.is_asked_early = bool(keys) and self._manager.held(keys, state.ctx).pending

    def within_step(self, request: EngineRequest, computed: int, seconds: float) -> Answer:
        """Return the answer to a pending question, for which a step that has no other work waits.

        Args:
            request: the request.
            computed: tokens that the engine's own cache holds of it.
            seconds: longest time for which a step waits.
        """
        answer: Answer = (None, False)
        self._rested = 0.0
        state, left = self._states.get(request.request_id), seconds - self._waited
        if state is None or left <= 0.0 or not self._is_possible or len(self._copies):
            return answer
        self.begins = True
        if len(self._states) > MOST_REQUESTS or not (state.is_asked_early and self._all_wait(state)):
            return answer

        def answered() -> bool:
            nonlocal answer
            self._end_step()  # takes the tiers' results
            answer = self._match(request, computed)
            return answer[0] is not None

        began = self._clock()
        self._manager.wait_until(answered, left)
        self._waited += self._clock() - began
        self._answered.add(request.request_id)
        return answer

    def at_end(self, seconds: float) -> None:
        """Wait at the end of a step until the answers to all pending lookups are known.

        Args:
            seconds: longest time for which the step waits, with what it has waited before.
        """
        asked = [(state.request, state.open_question[0]) for state in self._states.values() if state.open_question]
        left, self._rested = seconds - self._rested, 0.0

        def answered() -> bool:
            asked[:] = [question for question in asked if self._match(*question)[0] is None]
            self._end_step()  # what the answers begin goes on
            return not asked

        if asked and left > 0.0 and not len(self._copies):
            self._manager.wait_until(answered, left)

    def end_schedule(self) -> None:
        """Note that the engine has asked about all requests of a step."""
        if self._answered:
            self._answered.clear()
            self._rested, self._waited = self._waited, 0.0

    def _all_wait(self, asking: TrackedRequest[Any]) -> bool:
        """Return True if no request but ``asking`` can run before its lookup is answered."""
        for name, state in self._states.items():
            waits = state.open_question is not None or (state.is_asked_early and not state.touched)
            if not waits and state is not asking and name not in self._answered:
                return False
        return True
