"""The counters of the scheduler half, and the time that it takes on the scheduler's thread."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from time import perf_counter
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from tiering.api.keys import PRIMARY_TIER
from tiering.api.metric import counter, gauge

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@dataclass(slots=True)
class SchedulerCounters:
    """Counters of the scheduler half since the start, and the present number of jobs and requests."""

    queried_tokens: int = counter(
        "tokens",
        "Tokens beyond the engine's own cache for which the tiers were asked",
        "`hit_tokens` / `queried_tokens` is the share of prefill that the tiers save.",
    )
    hit_tokens: int = counter(
        "tokens",
        "Tokens for which loads to the GPU were ordered",
        "If the share of `queried_tokens` falls, see the hit rates of the tiers.",
    )
    queried_blocks: int = 0
    """Blocks that the first match of each request probed: ``queries`` of the primary tier."""
    hit_blocks: int = 0
    """Those of ``queried_blocks`` that the primary tier held without a promotion: its ``hits``."""
    loads: int = counter("loads", "Loads from the CPU tier to the GPU that were ordered", "One per hit of a request.")
    loads_within_step: int = counter(
        "loads",
        "Loads from the CPU tier to the GPU that ran within the step of their request",
        "Small hits. A part of `loads`; beside running requests none whose copy takes more than a millisecond.",
    )
    loads_failed: int = counter(
        "loads",
        "Loads from the CPU tier to the GPU that failed",
        "The requests compute their tokens. See the log of the workers.",
    )
    stores: int = counter(
        "stores", "Stores from the GPU to the CPU tier that were ordered", "One per request and step."
    )
    stores_failed: int = counter(
        "stores", "Stores from the GPU to the CPU tier that failed", "See the log of the workers."
    )
    stores_refused: int = counter(
        "offers",
        "Offers of a request's blocks that the CPU tier did not take",
        "See `stores_without_room`; the blocks are offered again at later steps.",
    )
    late_stores: int = counter(
        "blocks",
        "Blocks that were stored because they were about to leave the engine's own cache",
        "Only with `primary.inclusion: exclusive`: the copies that it makes.",
    )
    exclusive_losses: int = counter(
        "blocks",
        "Blocks that left the engine's own cache and were not stored",
        "Only with `primary.inclusion: exclusive`. Normal when the engine's cache is reset or sleeps; else raise "
        "`primary.capacity`.",
    )
    hits_shrunk: int = counter(
        "hits",
        "Hits that had lost blocks before they were loaded",
        "Blocks are evicted within a step: raise `primary.capacity`.",
    )
    jobs_flushed: int = counter(
        "jobs",
        "Copies that a step waited for because it reused their GPU blocks",
        "Steps are delayed by stores: give the GPU more blocks, or look for copies without pinned rows.",
    )
    sharer_waits: int = counter(
        "requests",
        "Requests that waited for a load of another request",
        "Many requests with one prefix arrive together; bounded by `sharer_wait`.",
    )
    scheduler_seconds: float = counter(
        "seconds",
        "Seconds that the connector took on the scheduler's thread",
        "Its rate is the share of the scheduler's time; above 5%, report the workload.",
    )
    sessions_released: int = counter(
        "sessions",
        "Sessions that a hint has ended and whose blocks were followed",
        "0 although clients send hints: the requests of a session carry no `session_id`, or `hints.blocks` is too low.",
    )
    hints_ignored: int = counter(
        "hints",
        "Malformed hints of requests",
        "The log has the first of them.",
    )
    hints_unknown: int = counter(
        "hints",
        "Hints of a type that has no effect",
        "A router sends actions that this version does not know, or that `hints` in the stack turns off.",
    )
    session_blocks: int = gauge(
        "blocks",
        "Blocks whose sessions are followed",
        "At `hints.blocks`, the sessions that were used longest ago are followed no more.",
    )
    snapshots_dropped: int = counter(
        "blocks",
        "Blocks whose KV events lost their tokens to the bound on snapshots",
        "Routers know these blocks by their hash only.",
    )
    snapshots_restored: int = counter(
        "blocks",
        "Blocks on a disk that KV events describe with what the engine had written before its restart",
        "Grows for seconds after a start; 0 without `self_describing_kv_events` or a local tier.",
    )
    requests_recorded: int = counter(
        "requests",
        "Finished requests that were written to the trace",
        "0 with `record_trace` in the stack: see the log.",
    )
    records_dropped: int = counter(
        "requests",
        "Finished requests that the recorded trace lacks",
        "The trace's disk is full or too slow; the trace has gaps.",
    )
    jobs_active: int = gauge("jobs", "Copies that have not ended on all workers", "See `jobs_flushed`.")
    requests_active: int = gauge(
        "requests", "Requests that have not ended", "The load of the engine, waiting requests included."
    )

    def as_dict(self) -> dict[str, int | float]:
        """Return the counters by name."""
        return dict(zip(self.__slots__, attrgetter(*self.__slots__)(self), strict=True))


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
