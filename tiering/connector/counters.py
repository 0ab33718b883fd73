"""The counters of the scheduler half, and the time that it takes on the scheduler's thread."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from tiering.api.keys import PRIMARY_TIER

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@dataclass(slots=True)
class SchedulerCounters:
    """Counters of the scheduler half since the start, and the present number of jobs and requests."""

    queried_tokens: int = 0
    """Tokens beyond the engine's own cache, counted at the first match of each request."""
    hit_tokens: int = 0
    """Tokens for which loads were planned."""
    queried_blocks: int = 0
    """Blocks that the first match of each request probed."""
    hit_blocks: int = 0
    """Those of ``queried_blocks`` that the primary tier held without a promotion."""
    loads: int = 0
    """Loads that were planned."""
    loads_failed: int = 0
    """Loads that failed."""
    hits_shrunk: int = 0
    """Hits that had lost blocks before they were loaded."""
    stores: int = 0
    """Stores that were ordered."""
    stores_failed: int = 0
    """Stores that failed."""
    stores_refused: int = 0
    """Offers of blocks that found no room in the primary tier."""
    jobs_flushed: int = 0
    """Jobs that a step had to wait for, because the step reused their blocks."""
    sharer_waits: int = 0
    """Requests that waited for a load of another request."""
    scheduler_seconds: float = 0.0
    """Seconds that the connector took on the scheduler's thread; resets are not included."""
    snapshots_dropped: int = 0
    """Blocks whose KV events lost their tokens because the bound on snapshots was reached.

    Events about such a block carry only its own hash.
    """
    requests_recorded: int = 0
    """Finished requests that were written to the trace (``record_trace`` in the stack)."""
    records_dropped: int = 0
    """Finished requests that were not written to the trace: the queue was full, or the disk failed."""
    jobs_active: int = 0
    """Jobs that have not ended on all workers."""
    requests_active: int = 0
    """Requests that have not ended."""

    def as_dict(self) -> dict[str, int | float]:
        """Return the counters by name."""
        return {name: getattr(self, name) for name in self.__slots__}


def report(manager: Mapping[str, Any], counters: SchedulerCounters, missed_blocks: int) -> dict[str, Any]:
    """Return the manager's statistics with the primary tier among the tiers, and the connector's counters.

    Args:
        manager: the manager's statistics.
        counters: the connector's counters; hits count for the primary tier.
        missed_blocks: blocks that requests have asked for and the primary tier did not hold.
    """
    stats = dict(manager)
    asked = {"queries": counters.queried_blocks, "hits": counters.hit_blocks, "misses": missed_blocks}
    primary = {**stats.pop("primary", {}), **asked}
    return {
        **stats,
        "tiers": {PRIMARY_TIER: primary, **stats.get("tiers", {})},
        "connector": counters.as_dict(),
    }


class _Counting(Protocol):
    _counters: SchedulerCounters


Counting = TypeVar("Counting", bound=_Counting)


def counts_seconds(
    method: Callable[Concatenate[Counting, Parameters], Result],
) -> Callable[Concatenate[Counting, Parameters], Result]:
    """Return ``method`` with its duration added to ``scheduler_seconds``.

    Methods with this decorator must not call each other. ``build_connector_meta``, which every step calls, adds its
    duration itself: the decorator's call would be about a fifth of a step in which nothing happens.
    """

    @functools.wraps(method)
    def timed(half: Counting, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        began = perf_counter()
        try:
            return method(half, *args, **kwargs)
        finally:
            half._counters.scheduler_seconds += perf_counter() - began

    return timed
