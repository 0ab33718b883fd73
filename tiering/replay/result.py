"""The result of a replay: hits, time, bytes, requests and dollars."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

FASTEST = 1e-4
"""Shortest time to first token that :class:`Times` tells apart, in seconds."""
STEP = 1.02
"""Ratio of neighbouring bounds of :class:`Times`."""
BOUNDS = 1200
"""Number of bounds of :class:`Times`; the largest is more than a month."""

_LOG_STEP = math.log(STEP)


class Times:
    """A distribution of durations in bounded memory; quantiles are exact within 2%."""

    def __init__(self) -> None:
        self._counts = [0] * BOUNDS
        self.count = 0
        """Number of durations."""
        self.total = 0.0
        """Sum of the durations in seconds."""
        self._shortest, self._longest = math.inf, 0.0

    def add(self, seconds: float) -> None:
        """Count a duration in its bucket."""
        index = 0 if seconds <= FASTEST else int(math.log(seconds / FASTEST) / _LOG_STEP) + 1
        self._counts[min(index, BOUNDS - 1)] += 1
        self.count += 1
        self.total += seconds
        self._shortest, self._longest = min(self._shortest, seconds), max(self._longest, seconds)

    @property
    def mean(self) -> float:
        """Mean duration in seconds; 0 if there are none."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """Return the seconds that a ``share`` of all durations does not exceed; 0 if there are none."""
        if not self.count:
            return 0.0
        index = int(np.searchsorted(np.cumsum(self._counts), share * self.count))
        found = 0.0 if index == 0 else float(FASTEST * STEP ** (index - 0.5))
        return min(max(found, self._shortest), self._longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierResult:
    """Hits, traffic and price of one tier in a replay."""

    name: str
    """Name of the tier; "device" for the engine's own cache, "cpu" for the primary tier."""
    capacity_bytes: int | None
    """Capacity in bytes; None for a tier without one."""
    hit_blocks: int
    """Prompt blocks that were loaded from this tier."""
    hit_rate: float
    """Share of all prompt blocks that were loaded from this tier."""
    bytes_read: int
    """Bytes that loads read from the medium, compressed if the tier compresses."""
    bytes_written: int = 0
    """Bytes that stores wrote to the medium, compressed if the tier compresses."""
    requests: int = 0
    """Requests to the medium: blocks written and read, and probes."""
    blocks_declined: int = 0
    """Blocks that admission declined, or that had no room."""
    blocks_dropped: int = 0
    """Blocks that were not stored because the medium was too slow, those included that gave up their rows."""
    loads_overdue: int = 0
    """Blocks whose load missed the tier's deadline."""
    seconds_out_of_service: float = 0.0
    """Seconds during which the tier served nothing, because so many loads missed its deadline."""
    blocks_at_end: int
    """Blocks that the tier holds after the last request."""
    bytes_paid: int
    """Bytes that are paid for: the capacity, or what a tier without one holds in the steady state."""
    dollars_per_month: float
    """Price of the tier for a month: its bytes, requests and traffic."""
    dollars_saved_per_month: float
    """Price of the prefill time that the tier's hits saved, extrapolated to a month."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """One replay of a trace through one stack."""

    settings: dict[str, str]
    """Swept words and their values; empty for a single replay."""
    requests: int
    """Requests that were replayed."""
    blocks: int
    """Prompt blocks of the trace."""
    prompt_tokens: int
    """Tokens of all prompts together."""
    trace_seconds: float
    """Time between the first and the last request, in seconds."""
    hit_rate: float
    """Share of all prompt blocks that were not computed."""
    tiers: list[TierResult]
    """The tiers, fastest first; the engine's own cache first if it is modelled."""
    computed_tokens: int
    """Prompt tokens that were computed."""
    ttft_mean: float
    """Mean time to first token, in seconds."""
    ttft_p50: float
    """Median time to first token, in seconds."""
    ttft_p99: float
    """Time to first token that 1% of the requests exceed, in seconds."""
    ttft_mean_without: float
    """Mean time to first token without any tier, in seconds."""
    ttft_p50_without: float
    """Median time to first token without any tier, in seconds."""
    ttft_p99_without: float
    """Time to first token that 1% of the requests exceed without any tier, in seconds."""
    device_seconds_saved: float
    """Seconds of prefill that the tiers saved."""
    dollars_saved_per_month: float
    """Price of the saved prefill time, extrapolated to a month."""
    dollars_per_month: float
    """Price of all tiers for a month."""
    stores_without_room: int
    """Stores that found no room in the primary tier at once."""
    evicted_blocks: int
    """Blocks evicted from the primary tier."""
    is_exclusive: bool
    """True if the primary tier prefers blocks that the engine's own cache does not hold."""
    copied_blocks: int
    """Blocks copied from the accelerator into the primary tier."""
    lost_blocks: int
    """Blocks that left the engine's own cache, and for which an exclusive primary tier had no room."""
    seconds: float
    """Duration of the replay itself, in seconds."""
    optimum: float | None = None
    """Share of the blocks that the optimum serves with the same memory; None without hints.

    The optimum has no other tiers, and evicts the block whose next use is farthest away.
    """
    causes: Mapping[str, int] | None = None
    """Computed tokens by cause, the most expensive first; None without the word ``explain`` in the stack."""
    stack: str = field(default="", compare=False)
    """The stack file of this replay, with secrets masked."""

    @property
    def waits_longer(self) -> bool:
        """True if requests wait longer than without tiers: in the mean, or the slowest 1% of them."""
        # Both tails are quantiles of the same bounds, so they differ by one step at least if they differ.
        return self.ttft_mean > self.ttft_mean_without or self.ttft_p99 > self.ttft_p99_without * STEP

    @property
    def net_dollars_per_month(self) -> float:
        """Price of the saved prefill time minus the price of the tiers, for a month."""
        return self.dollars_saved_per_month - self.dollars_per_month

    def as_dict(self) -> dict[str, Any]:
        """Return all values as plain data."""
        return asdict(self) | {"net_dollars_per_month": self.net_dollars_per_month}
