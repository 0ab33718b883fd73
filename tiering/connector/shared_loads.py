"""The wait of a request for blocks that are being loaded for another request.

Without the wait, requests that share a prefix and arrive together each load its blocks into GPU blocks of their own.
After the wait, the engine's own prefix cache holds the blocks.
"""

from __future__ import annotations

from collections.abc import Callable

from tiering.api.engine import OffloadingSpec
from tiering.api.units import parse_duration
from tiering.connector.counters import SchedulerCounters
from tiering.connector.hits import HitSearch
from tiering.connector.loads import LoadPlanner
from tiering.connector.requests import RequestState
from tiering.errors import ConfigError

DEFAULT_SHARER_WAIT = 1.0
"""Total time in seconds that a request waits for blocks that are being loaded for other requests."""


class SharedLoads:
    """Decides which requests wait for loads of other requests.

    Args:
        loads: the load planner, which knows the blocks that are being loaded.
        search: determines the blocks that a hit needs.
        longest_wait: total time in seconds that a request may wait; 0: no request waits.
        counters: counters of the scheduler half.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        loads: LoadPlanner,
        search: HitSearch,
        longest_wait: float,
        counters: SchedulerCounters,
        clock: Callable[[], float],
    ) -> None:
        self._loads = loads
        self._search = search
        self._longest_wait = longest_wait
        self._counters = counters
        self._clock = clock

    def holds_up(self, state: RequestState, computed: int, end: int) -> bool:
        """Return True if a request is to wait for another request's load of the same blocks.

        The total waiting time in the life of a request is bounded.

        Args:
            state: the request.
            computed: leading tokens that the engine's own prefix cache holds.
            end: end of the request's hit, in tokens.
        """
        if self._longest_wait <= 0 or not self._loads.is_shared(self._search.needed(state.keys, computed, end)):
            return False
        now = self._clock()
        if state.sharer_deadline is None:
            state.sharer_deadline = now + self._longest_wait
            self._counters.sharer_waits += 1
        return now < state.sharer_deadline


def sharer_wait(spec: OffloadingSpec) -> float:
    """Return the option ``sharer_wait`` in seconds.

    An engine without a prefix cache cannot share the loaded blocks, so its requests do not wait: the value is 0.

    Raises:
        ConfigError: the option is not a duration, or is negative.
    """
    value = spec.extra_config.get("sharer_wait", DEFAULT_SHARER_WAIT)
    try:
        seconds = parse_duration(value)
    except ValueError as error:
        raise ConfigError(f"sharer_wait: {error}") from error
    if seconds < 0:
        raise ConfigError(f"sharer_wait: {value!r} is negative; 0 means not to wait")
    return seconds if spec.engine.enable_prefix_caching else 0.0
