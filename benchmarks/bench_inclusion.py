"""Inclusive and exclusive CPU tiers: hits that they add to the GPU's cache, and copies out of the GPU.

The traces are replayed with infinite prefill speed, so that only the caches count. The GPU's cache has a share of the
trace's distinct blocks, and the CPU tier a multiple of the GPU's cache. The generated traces are long enough that the
GPU's cache is large beside the blocks of two steps, which an exclusive tier stores ahead. `KV_TRACES` may name further
trace files, separated by colons; their names are shown without directories.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Bench, Cell
from tiering.advisor.shards import Shards
from tiering.config.stack_file import load_stack
from tiering.replay.generate import generate
from tiering.replay.model import ReplayModel
from tiering.replay.readers import Trace
from tiering.replay.replay import Replay
from tiering.replay.result import ReplayResult
from tiering.replay.trace import TraceRequest

BLOCK_BYTES = 1 << 20
DISK = {"type": "local", "path": "/var/cache/kv", "capacity": "10TiB"}
RATIOS = (1, 2, 3, 4, 8)
WITH_A_DISK = (1, 2, 4)
SHARE = 0.05
SMALL_SHARE = 0.02
"""Share that files are replayed with as well; of a generated trace it would be few blocks."""
LIMIT = 1.3
WITH_DISK = 2.0
SHAPES: dict[str, tuple[dict[str, float], int, int]] = {
    "chats": ({"chat": 1.0}, 5000, 5),
    "documents": ({"documents": 1.0}, 1000, 11),
    "agents": ({"agents": 1.0}, 1500, 13),
    "chats and documents": ({"chat": 1.0, "documents": 0.2}, 4000, 3),
    "all kinds": ({"chat": 1.0, "system": 1.0, "documents": 0.2, "agents": 0.2}, 2000, 19),
}
"""Kinds of sessions, requests and seeds of the generated traces."""


def replayed(
    trace: Sequence[TraceRequest], tokens: int, device: int, rows: int, *tiers: object
) -> tuple[ReplayResult, ReplayResult]:
    """Return the results with an inclusive and with an exclusive CPU tier."""
    model = ReplayModel(prefill_tokens_per_second=1e9, device_cache=device * BLOCK_BYTES)
    stacks = (
        load_stack({"primary": {"capacity": rows * BLOCK_BYTES, "inclusion": word}, "secondary": list(tiers)})
        for word in ("inclusive", "exclusive")
    )
    inclusive, exclusive = (Replay(stack, tokens, BLOCK_BYTES, model).run(trace) for stack in stacks)
    return inclusive, exclusive


def compared(results: tuple[ReplayResult, ReplayResult]) -> tuple[float, float, float]:
    """Return the points of hits of both CPU tiers, and the copies by those of the inclusive one."""
    inclusive, exclusive = results
    one, other = (100 * result.tiers[1].hit_rate for result in results)
    return one, other, exclusive.copied_blocks / inclusive.copied_blocks


def run(bench: Bench) -> None:
    traces: dict[str, tuple[int, list[TraceRequest], tuple[float, ...]]] = {}
    for name, (kinds, requests, seed) in SHAPES.items():
        made = generate(kinds, requests // 20 if bench.quick else requests, 4.0, 128, seed=seed)
        traces[name] = (128, list(made), (SHARE,))
    for path in filter(None, os.environ.get("KV_TRACES", "").split(":")):
        found = Trace([Path(path)])
        traces[Path(path).name] = (found.info.block_tokens, list(found), (SMALL_SHARE, SHARE))
    alone: list[tuple[float, float, float]] = []
    behind: list[tuple[float, float, float]] = []
    rows: list[tuple[Cell, ...]] = []
    with_disk: list[tuple[Cell, ...]] = []
    short: dict[str, float] = {}
    for name, (tokens, trace, shares) in traces.items():
        exact = Shards([1], 1 << 16)
        for request in trace:
            exact.add(request.hashes)
        for share in shares:
            device = max(1, int(exact.distinct * share))
            lru = Shards([device * (1 + ratio) for ratio in RATIOS], 1 << 16)
            for request in trace:
                lru.add(request.hashes)
            for ratio in RATIOS:
                results = replayed(trace, tokens, device, ratio * device)
                own = 100 * results[0].tiers[0].hit_rate
                both = 100 * lru.hit_rate(device * (1 + ratio)) - own
                alone.append(compared(results))
                *hits, copies = alone[-1]
                rows.append((name, f"{share:.0%}, {device:,}", own, f"{ratio} x", *hits, both, copies))
                if ratio == 1:
                    short[name] = max(short.get(name, 0.0), both - hits[1])
            for ratio in WITH_A_DISK if share == SHARE else ():
                results = replayed(trace, tokens, device, ratio * device, DISK)
                written = results[1].tiers[2].bytes_written / results[0].tiers[2].bytes_written
                behind.append(compared(results))
                with_disk.append((name, f"{ratio} x", *behind[-1], written))
    bench.table(
        "Points of hits that a CPU tier adds, and copies out of the GPU by those of an inclusive tier",
        (
            "trace",
            "GPU's cache, blocks",
            "its hits",
            "CPU",
            "inclusive",
            "exclusive",
            "one LRU of both sizes",
            "copies",
        ),
        rows,
    )
    bench.note(
        "An exclusive tier copies a block whenever it leaves the GPU without a row. Above the GPU's size, copies of "
        "blocks that were loaded are bounded by those of blocks that were computed."
    )
    bench.table(
        f"The same at {SHARE:.0%} with a disk of 10 TiB behind the CPU tier, which is fed as blocks are computed",
        ("trace", "CPU", "inclusive", "exclusive", "copies", "blocks written to the disk"),
        with_disk,
    )
    generated = max(short[name] for name in SHAPES)
    files = max((points for name, points in short.items() if name not in SHAPES), default=None)
    missing = "exclusive, CPU = 1 x GPU, short of one LRU cache of both sizes"
    if files is not None:
        bench.target(f"{missing}, recorded traces", files, 1.0, "max", "points")
    bench.target(f"{missing}, generated traces", generated, 2.0, "max", "points")
    bench.target("exclusive, hits above those of inclusive, least", least(alone), 0.0, "min", "points")
    bench.target("exclusive, copies by inclusive's, most", max(copies for *_, copies in alone), LIMIT, "max", "x")
    bench.target("with a disk, hits above those of inclusive, least", least(behind), 0.0, "min", "points")
    bench.target(
        "with a disk, copies by inclusive's, most", max(copies for *_, copies in behind), WITH_DISK, "max", "x"
    )


def least(cells: Sequence[tuple[float, float, float]]) -> float:
    """Return the fewest points of hits that an exclusive tier has above an inclusive one."""
    return min(exclusive - inclusive for inclusive, exclusive, _ in cells)
