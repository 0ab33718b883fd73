"""Inclusive and exclusive CPU tiers: hits that they add to the GPU's cache, and copies out of the GPU.

The traces are replayed with infinite prefill speed, so that only the caches count. The GPU's cache has a share of the
trace's distinct blocks, and the CPU tier a multiple of the GPU's cache. `KV_TRACES` may name further trace files,
separated by colons; their names are shown without directories.
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
LIMIT = 1.3


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
    kinds, requests = {"chat": 1.0, "documents": 0.2}, 300 if bench.quick else 3000
    traces = {"generated": (128, list(generate(kinds, requests, 4.0, 128, seed=3)))}
    for path in filter(None, os.environ.get("KV_TRACES", "").split(":")):
        found = Trace([Path(path)])
        traces[Path(path).name] = (found.info.block_tokens, list(found))
    rows: list[tuple[Cell, ...]] = []
    with_disk: list[tuple[Cell, ...]] = []
    short: list[float] = []
    gains: list[float] = []
    copies: list[float] = []
    for name, (tokens, trace) in traces.items():
        exact = Shards([1], 1 << 16)
        for request in trace:
            exact.add(request.hashes)
        for share in (0.02, 0.05):
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
                if ratio != 2:
                    copies.append(copied)
            inclusive, exclusive = replayed(trace, tokens, device, device, DISK)
            with_disk.append((
                name,
                f"{share:.0%}",
                *(100 * result.tiers[1].hit_rate for result in (inclusive, exclusive)),
                exclusive.copied_blocks / inclusive.copied_blocks,
                exclusive.tiers[2].bytes_written / inclusive.tiers[2].bytes_written,
            ))  # fmt: skip
    bench.table(
        "Points of hits that a CPU tier adds, and copies out of the GPU by those of an inclusive tier",
        ("trace", "GPU's cache", "its hits", "CPU", "inclusive", "exclusive", "one LRU of both sizes", "copies"),
        rows,
    )
    bench.note(
        "An exclusive tier copies a block whenever it leaves the GPU without a row. From 2.5 times the GPU's cache on, "
        "the copies are bounded by 1.2 for each computed block. At 2 x they are not: there, hits count for more."
    )
    bench.table(
        "The same at 1 x with a disk behind the CPU tier, which is fed as blocks are computed",
        ("trace", "GPU's cache", "inclusive", "exclusive", "copies", "blocks written to the disk"),
        with_disk,
    )
    bench.target("exclusive, CPU = 1 x GPU, short of one LRU cache of both sizes", max(short), 1.0, "max", "points")
    bench.target("exclusive, hits above those of inclusive, least", min(gains), 0.0, "min", "points")
    bench.target("exclusive, copies by inclusive's at 1, 4 and 8 x, most", max(copies), LIMIT, "max", "x")
