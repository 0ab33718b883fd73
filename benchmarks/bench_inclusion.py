"""Inclusive and exclusive CPU tiers: hits that they add to the GPU's cache, and copies out of the GPU.

The traces are replayed with infinite prefill speed, so that only the caches count. The GPU's cache has a share of the
trace's distinct blocks, and the CPU tier a multiple of the GPU's cache. "Mixed" has chats and documents. `KV_TRACES`
may name further trace files, separated by colons; their names are shown without directories.
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
RATIOS = (1, 2, 4, 8)
SHARES = (0.02, 0.05)
LIMIT = 1.3
WITH_DISK = 2.2
SHAPES: dict[str, tuple[dict[str, float], int]] = {
    "mixed": ({"chat": 1.0, "documents": 0.2}, 3),
    "chats": ({"chat": 1.0}, 5),
    "documents": ({"documents": 1.0}, 11),
    "agents": ({"agents": 1.0}, 13),
}
"""Kinds of sessions and seeds of the generated traces."""


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


def run(bench: Bench) -> None:
    requests = 200 if bench.quick else 1000
    traces = {
        name: (128, list(generate(kinds, requests, 4.0, 128, seed=seed))) for name, (kinds, seed) in SHAPES.items()
    }
    for path in filter(None, os.environ.get("KV_TRACES", "").split(":")):
        found = Trace([Path(path)])
        traces[Path(path).name] = (found.info.block_tokens, list(found))
    rows: list[tuple[Cell, ...]] = []
    with_disk: list[tuple[Cell, ...]] = []
    short: list[float] = []
    gains: list[float] = []
    copies: list[float] = []
    disk_gains: list[float] = []
    disk_copies: list[float] = []
    for name, (tokens, trace) in traces.items():
        exact = Shards([1], 1 << 16)
        for request in trace:
            exact.add(request.hashes)
        for share in SHARES:
            device = max(1, int(exact.distinct * share))
            lru = Shards([device * (1 + ratio) for ratio in RATIOS], 1 << 16)
            for request in trace:
                lru.add(request.hashes)
            for ratio in RATIOS:
                inclusive, exclusive = replayed(trace, tokens, device, ratio * device)
                own, one = (100 * tier.hit_rate for tier in inclusive.tiers)
                _, other = (100 * tier.hit_rate for tier in exclusive.tiers)
                both = 100 * lru.hit_rate(device * (1 + ratio)) - own
                copied = exclusive.copied_blocks / inclusive.copied_blocks
                rows.append((name, f"{share:.0%}", own, f"{ratio} x", one, other, both, copied))
                gains.append(other - one)
                if ratio == 1:
                    short.append(both - other)
                copies.append(copied)
            for ratio in (1, 2, 4) if share == SHARES[-1] else ():
                inclusive, exclusive = replayed(trace, tokens, device, ratio * device, DISK)
                one, other = (100 * result.tiers[1].hit_rate for result in (inclusive, exclusive))
                copied = exclusive.copied_blocks / inclusive.copied_blocks
                written = exclusive.tiers[2].bytes_written / inclusive.tiers[2].bytes_written
                with_disk.append((name, f"{ratio} x", one, other, copied, written))
                disk_gains.append(other - one)
                disk_copies.append(copied)
    bench.table(
        "Points of hits that a CPU tier adds, and copies out of the GPU by those of an inclusive tier",
        ("trace", "GPU's cache", "its hits", "CPU", "inclusive", "exclusive", "one LRU of both sizes", "copies"),
        rows,
    )
    bench.note(
        "An exclusive tier copies a block whenever it leaves the GPU without a row. Above the GPU's size, copies of "
        "blocks that were loaded are bounded by those of blocks that were computed."
    )
    bench.table(
        f"The same at {SHARES[-1]:.0%} with a disk behind the CPU tier, which is fed as blocks are computed",
        ("trace", "CPU", "inclusive", "exclusive", "copies", "blocks written to the disk"),
        with_disk,
    )
    bench.target("exclusive, CPU = 1 x GPU, short of one LRU cache of both sizes", max(short), 1.0, "max", "points")
    bench.target("exclusive, hits above those of inclusive, least", min(gains), 0.0, "min", "points")
    bench.target("exclusive, copies by inclusive's, most", max(copies), LIMIT, "max", "x")
    bench.target("with a disk, hits above those of inclusive, least", min(disk_gains), 0.0, "min", "points")
    bench.target("with a disk, copies by inclusive's, most", max(disk_copies), WITH_DISK, "max", "x")
