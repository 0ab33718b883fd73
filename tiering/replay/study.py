"""A study: one trace through several stacks, beside one LRU cache of all capacities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from tiering.advisor.shards import Shards
from tiering.errors import ConfigError
from tiering.replay.hints import TraceHints
from tiering.replay.model import ReplayModel
from tiering.replay.optimum import Optimum
from tiering.replay.readers import Trace
from tiering.replay.replay import Replay
from tiering.replay.result import ReplayResult
from tiering.replay.sweep import Point

GRID = tuple(sorted({round(2 ** (step / 4)) for step in range(160)}))
"""Capacities in blocks at which LRU's curve is computed: four per octave."""
SAMPLE = 1 << 16
"""Number of keys from which the curve is estimated; exact for traces with fewer distinct blocks."""
_SMALLEST_SHARE = 1 / 512
"""Smallest capacity of a curve, as a share of the distinct blocks."""

Progress = Callable[[str, int, int], None]
"""Function ``progress(what, done, total)``, called now and then; ``total`` is 0 while it is not known."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Hit rate at one capacity, of an exact cache of blocks without any cost."""

    capacity_bytes: int
    """Bytes of blocks that the cache may hold."""
    lru: float
    """Share of the accesses that hit with least-recently-used eviction."""


@dataclass(frozen=True, slots=True)
class Study:
    """The results of all stacks, the curve of one LRU cache, and their circumstances."""

    trace: tuple[str, ...]
    """Paths of the trace."""
    format: str
    """Format of the trace."""
    block_tokens: int
    """Tokens of one block."""
    block_bytes: int
    """Bytes of one block."""
    accesses: int
    """Prompt blocks of the trace."""
    distinct_blocks: int
    """Distinct blocks of the trace; estimated for long traces."""
    reuse: float
    """Share of the prompt blocks that came before: the hit rate of a cache without limit."""
    curve: list[CurvePoint]
    """Hit rate by capacity."""
    results: list[ReplayResult]
    """One result per stack."""
    model: ReplayModel
    """Speeds and prices."""

    @property
    def best(self) -> ReplayResult:
        """The result with the largest net saving.

        Results whose requests wait longer than without tiers count only if those of all do."""
        good = [result for result in self.results if not result.waits_longer]
        return max(good or self.results, key=lambda result: result.net_dollars_per_month)

    def lru(self, capacity: int) -> float:
        """Return the hit rate of one LRU cache of ``capacity`` bytes, between two points of the curve."""
        sizes = [math.log(point.capacity_bytes) for point in self.curve]
        return float(np.interp(math.log(max(capacity, 1)), sizes, [point.lru for point in self.curve]))

    @property
    def pays(self) -> bool:
        """True if the best result saves more than it costs, and requests do not wait longer."""
        return self.best.net_dollars_per_month > 0 and not self.best.waits_longer

    def as_dict(self) -> dict[str, Any]:
        """Return all values as plain data."""
        return asdict(self) | {
            "results": [result.as_dict() for result in self.results],
            "best_buy": self.best.settings if self.pays else None,
            "model": self.model.model_dump(mode="json"),
        }


def run_study(
    trace: Trace,
    points: Sequence[Point],
    model: ReplayModel,
    block_bytes: int,
    progress: Progress = lambda what, done, total: None,
) -> Study:
    """Replay ``trace`` through the stacks of ``points``, and compute the curve of one LRU cache.

    The trace is read once for the curve and once per stack. Memory grows with the capacities, not with the trace; a
    bucket without a ttl holds the name of each block that is stored there. With hints, the optimum keeps 8 bytes for
    each block of the trace.

    Args:
        trace: the trace.
        points: the stacks.
        model: speeds and prices.
        block_bytes: bytes of one block.
        progress: reports progress, by blocks; default none.

    Raises:
        ConfigError: the trace cannot be read or has no blocks, or a stack has no room for a block.
    """
    tokens = trace.info.block_tokens
    hints = TraceHints(model.hinted_sessions, tokens, points[0].stack.hints.bounds) if model.hinted_sessions else None
    replays = [Replay(point.stack, tokens, block_bytes, model, hints) for point in points[:1]]
    cache, optimum = Shards(GRID, SAMPLE), Optimum()
    reported = 0
    for request in trace:
        cache.add(request.hashes)
        if hints is not None:
            hints.add(request)
            optimum.add(request.hashes)
        if cache.accesses - reported >= 1 << 16:
            reported = cache.accesses
            progress("reading the trace", trace.bytes_read, trace.total_bytes or 0)
    if not cache.accesses:
        raise ConfigError(f"{trace.paths[0]}: has no request with blocks")
    distinct = cache.distinct
    wanted = [blocks for blocks in GRID if distinct * _SMALLEST_SHARE <= blocks < 2 * distinct]
    curve = [CurvePoint(blocks * block_bytes, cache.hit_rate(blocks)) for blocks in wanted]
    results = []
    for number, point in enumerate(points):
        replay = replays[0] if not number else Replay(point.stack, tokens, block_bytes, model, hints)
        what = ", ".join(f"{word}={value}" for word, value in point.settings.items()) or "replaying"
        total = cache.accesses * len(points)

        def report(blocks: int, what: str = what, number: int = number, total: int = total) -> None:
            progress(what, number * cache.accesses + blocks, total)

        result = replay.run(trace, report)
        best = None
        if hints is not None:
            room = (model.device_cache or 0) // block_bytes + point.stack.primary.capacity // block_bytes
            best = optimum.hit_rate(room)
        results.append(replace(result, settings=point.settings, stack=point.text, optimum=best))
    return Study(
        tuple(map(str, trace.paths)),
        trace.info.format,
        trace.info.block_tokens,
        block_bytes,
        cache.accesses,
        distinct,
        cache.reuse,
        curve,
        results,
        model,
    )
