"""Hints of half of the sessions: hits, and how far they close the gap from LRU to the optimum.

Traces are replayed through a CPU tier alone. Half of the sessions release themselves at their end and expect their next
request at its time; each seed draws another half. With lies, one in ten hinted requests states the opposite: a session
that goes on is released, and one that is over is expected in half an hour. The optimum evicts the block whose
next use is farthest away; like the tier, it admits all blocks, and requests hit with leading blocks only. `KV_TRACES`
may name further trace files, separated by colons; their names are shown without directories.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.harness import Bench, Cell
from tiering.config.stack_file import load_stack
from tiering.replay.generate import generate
from tiering.replay.hints import TraceHints
from tiering.replay.model import ReplayModel
from tiering.replay.optimum import Optimum
from tiering.replay.readers import Trace
from tiering.replay.replay import Replay
from tiering.replay.trace import TraceRequest

BLOCK_BYTES = 1 << 20
MODEL = ReplayModel(prefill_tokens_per_second=1e9)
LIES = 0.1
SHAPES = {"chat and documents": {"chat": 1.0, "documents": 0.2}, "agents and chat": {"chat": 2.0, "agents": 1.0}}


def hit_rate(
    trace: Sequence[TraceRequest],
    tokens: int,
    rows: int,
    share: float,
    lies: float = 0.0,
    seed: int = 0,
    **words: object,
) -> float:
    """Return the hit rate of a CPU tier in percent."""
    stack = load_stack({"primary": {"capacity": rows * BLOCK_BYTES}, "hints": words})
    hints = TraceHints(share, tokens, stack.hints.bounds, lies=lies, seed=seed)
    for request in trace:
        hints.add(request)
    return 100 * Replay(stack, tokens, BLOCK_BYTES, MODEL, hints).run(trace).hit_rate


def run(bench: Bench) -> None:
    requests, seeds = (300, range(2)) if bench.quick else (3000, range(5))
    traces = {
        f"generated, {name}": (128, list(generate(kinds, requests, 4.0, 128, seed=seed)))
        for seed, (name, kinds) in enumerate(SHAPES.items(), start=11)
    }
    for path in filter(None, os.environ.get("KV_TRACES", "").split(":")):
        found = Trace([Path(path)])
        traces[Path(path).name] = (found.info.block_tokens, list(found))
    rows: list[tuple[Cell, ...]] = []
    closed: list[float] = []
    lost: list[float] = []
    for name, (tokens, trace) in traces.items():
        optimum = Optimum()
        for request in trace:
            optimum.add(request.hashes)
        distinct = len({key for request in trace for key in request.hashes.tolist()})
        for part in (0.05, 0.1):
            room = max(1, int(distinct * part))
            best, lru = 100 * optimum.hit_rate(room), hit_rate(trace, tokens, room, 0.0)
            release = [hit_rate(trace, tokens, room, 0.5, seed=seed, expect=False) for seed in seeds]
            both = [hit_rate(trace, tokens, room, 0.5, seed=seed) for seed in seeds]
            lying = [hit_rate(trace, tokens, room, 0.5, LIES, seed) for seed in seeds]
            share = 100 * (fmean(both) - lru) / (best - lru)
            spread = f"{min(both):.1f} to {max(both):.1f}"
            cells = (fmean(release), fmean(both), spread, fmean(lying), hit_rate(trace, tokens, room, 1.0), best, share)
            rows.append((name, f"{part:.0%}", lru, *cells))
            closed.append(share)
            lost.append(lru - fmean(lying))
    bench.table(
        "Hits in percent: means of the seeds",
        (
            "trace",
            "CPU tier",
            "LRU",
            "half release",
            "half release and expect",
            "lowest to highest",
            "with lies",
            "all release and expect",
            "optimum",
            "share of the gap closed by half, %",
        ),
        rows,
    )
    bench.note(f"Seeds: {', '.join(map(str, seeds))}.")
    bench.target("share of the gap between LRU and the optimum, least", min(closed), 100 / 3, "min", "%")
    bench.target("points that lies cost below LRU, most", max(lost), 0.2, "max", "points")
