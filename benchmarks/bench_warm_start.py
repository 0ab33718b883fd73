"""Warm starts in simulated time: hits of the CPU tier of an engine that joins a fleet at mid-trace.

Four engines share the requests of a trace at random until the middle of its time, and five from then on. All have a CPU
tier with a share of the trace's distinct blocks, and one bucket. The fifth engine starts cold, or with `warm_start`,
which is over before its first request; neither finds in the bucket what the other one has stored. "Old" are the four
others in the same time. Each seed draws another assignment of the requests to engines. `KV_TRACES` may name further
trace files, separated by colons; their names are shown without directories.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from unittest.mock import patch

from benchmarks.harness import Bench, Cell
from tiering.config.stack_file import load_stack
from tiering.replay.generate import generate
from tiering.replay.model import ReplayModel
from tiering.replay.readers import Trace
from tiering.replay.replay import Replay
from tiering.replay.stack import SimulatedFleet
from tiering.replay.trace import TraceRequest
from tiering.secondary import hot_prefixes

BLOCK_BYTES = 1 << 20
MODEL = ReplayModel(prefill_tokens_per_second=1e9)
OLD, WINDOW = 4, 120.0
SHAPES = {"chat and documents": {"chat": 1.0, "documents": 0.2}, "agents and chat": {"chat": 2.0, "agents": 1.0}}


class Hits:
    """Hits of CPU tiers, and the blocks that were asked for."""

    def __init__(self) -> None:
        self.hits = self.blocks = 0

    def add(self, replay: Replay, requests: Sequence[TraceRequest], sign: int = 1) -> None:
        """Replay ``requests``, and add the CPU tier's hits times ``sign``."""
        result = replay.run(requests)
        self.hits += sign * result.tiers[0].hit_blocks
        self.blocks += sign * result.blocks

    @property
    def percent(self) -> float:
        """Share of the blocks that hit, in percent."""
        return 100 * self.hits / max(1, self.blocks)


def joined(
    trace: Sequence[TraceRequest], tokens: int, rows: int, seed: int, found: dict[str, Hits]
) -> tuple[int, float]:
    """Let a fifth engine join; return its blocks after the warm start, and the seconds that this took.

    Args:
        found: hits of the old engines, the cold one and the warm one, which are added to.
    """
    words = {"primary": {"capacity": rows * BLOCK_BYTES}, "secondary": [{"type": "s3", "bucket": "kv-cache"}]}
    stack, warm = load_stack(words), load_stack({**words, "warm_start": {"bandwidth": "2GiB"}})
    middle = (trace[0].time + trace[-1].time) / 2
    dice = random.Random(seed)
    shares: list[list[TraceRequest]] = [[] for _ in range(OLD + 1)]
    for request in trace:
        if request.time < middle + WINDOW:
            shares[dice.randrange(OLD + (request.time >= middle))].append(request)
    fleet, beside, later = SimulatedFleet(), SimulatedFleet(), SimulatedFleet()
    with patch.multiple(hot_prefixes, PUBLISH_SECONDS=math.inf, REFRESH_SECONDS=math.inf):
        # An engine publishes at its end: of the publications before, the next one would replace each.
        for share in shares[:OLD]:
            before = [request for request in share if request.time < middle]
            found["old"].add(Replay(stack, tokens, BLOCK_BYTES, MODEL, fleet=later), share)
            found["old"].add(Replay(warm, tokens, BLOCK_BYTES, MODEL, fleet=fleet), before, -1)
            Replay(warm, tokens, BLOCK_BYTES, MODEL, fleet=beside).run(before)
    found["cold"].add(Replay(stack, tokens, BLOCK_BYTES, MODEL, fleet=beside), shares[OLD])
    new = Replay(warm, tokens, BLOCK_BYTES, MODEL, fleet=fleet)
    seconds = new.start_warm()
    blocks = int(new.stack.manager.get_stats()["primary"]["blocks"])
    found["warm"].add(new, shares[OLD])
    return blocks, seconds


def run(bench: Bench) -> None:
    requests, seeds = (300, range(1)) if bench.quick else (3000, range(5))
    traces = {
        f"generated, {name}": (128, list(generate(kinds, requests, 4.0, 128, seed=seed)))
        for seed, (name, kinds) in enumerate(SHAPES.items(), start=11)
    }
    for path in filter(None, os.environ.get("KV_TRACES", "").split(":")):
        opened = Trace([Path(path)])
        traces[Path(path).name] = (opened.info.block_tokens, list(opened))
    rows: list[tuple[Cell, ...]] = []
    gains: list[float] = []
    for name, (tokens, trace) in traces.items():
        distinct = len({key for request in trace for key in request.hashes.tolist()})
        for part in (0.025, 0.1):
            room = max(1, int(distinct * part))
            found = {which: Hits() for which in ("old", "cold", "warm")}
            starts = [joined(trace, tokens, room, seed, found) for seed in seeds]
            old, cold, warm = (found[which].percent for which in ("old", "cold", "warm"))
            loaded = 100 * fmean(blocks for blocks, _ in starts) / room
            rows.append((name, f"{part:.1%}", old, cold, warm, loaded, fmean(seconds for _, seconds in starts)))
            gains.append(warm / max(cold, 1e-9))
    bench.table(
        f"Hits of the CPU tier within {WINDOW:g} s, in percent of the blocks",
        ("trace", "CPU tier", "old engines", "new, cold", "new, warm", "of the CPU tier loaded, %", "warm start, s"),
        rows,
    )
    bench.target("hits of a warm engine by those of a cold one, least", min(gains), 1.0, "min", "x")
