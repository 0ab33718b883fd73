"""Replay and size advisor: blocks per second of a replay, and the advisor's error and cost.

The traces are generated, with 16 and with 512 tokens per block. `KV_TRACES` may name further trace files, separated by
colons; their names are shown without directories.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.harness import Bench, Sample, timed
from tiering.advisor.advisor import FACTORS, FIELDS, SizeAdvisor
from tiering.advisor.shards import Shards
from tiering.config.stack_file import StackConfig, load_stack
from tiering.replay.generate import generate
from tiering.replay.model import ReplayModel
from tiering.replay.readers import Trace
from tiering.replay.replay import Replay
from tiering.replay.trace import TraceRequest, keys_of

MODEL = ReplayModel()
TIERS = (
    {"type": "local", "path": "/var/cache/kv", "capacity": "1TiB"},
    {"type": "s3", "bucket": "kv-cache"},
)


def stack(tiers: int, blocks: int, block_bytes: int) -> StackConfig:
    return load_stack({"primary": {"capacity": blocks * block_bytes}, "secondary": list(TIERS[:tiers])})


def replayed(trace: Sequence[TraceRequest], block_tokens: int, tiers: int) -> Sample:
    block_bytes = block_tokens * MODEL.kv_bytes_per_token
    replay = Replay(stack(tiers, max(1, (64 << 30) // block_bytes), block_bytes), block_tokens, block_bytes, MODEL)
    start = time.process_time()
    result = replay.run(trace)
    seconds = time.process_time() - start
    return Sample(result.blocks / seconds, seconds)


def run(bench: Bench) -> None:
    requests = 300 if bench.quick else 3000
    kinds = {"chat": 2.0, "agents": 1.0, "documents": 1.0}
    traces: dict[str, tuple[int, list[TraceRequest]]] = {
        f"generated, {tokens} tokens per block": (tokens, list(generate(kinds, requests, 4.0, tokens, seed=1)))
        for tokens in (16, 512)
    }
    for path in filter(None, os.environ.get("KV_TRACES", "").split(":")):
        found = Trace([Path(path)])
        traces[Path(path).name] = (found.info.block_tokens, list(found))
    for name, (tokens, trace) in traces.items():
        stats = bench.compare(
            f"replay: {name}",
            {
                label: partial(replayed, trace, tokens, tiers)
                for label, tiers in (("CPU", 0), ("CPU and NVMe", 1), ("CPU, NVMe and bucket", 2))
            },
            repeats=3,
            unit="blocks per CPU second",
        )
        for label in ("CPU and NVMe", "CPU, NVMe and bucket"):
            bench.target(f"replay, {name}, {label}", stats[label].median, 100_000, "min", "blocks/s")
    advisor(bench, traces)


def advisor(bench: Bench, traces: dict[str, tuple[int, list[TraceRequest]]]) -> None:
    rows = []
    for name, (_, trace) in traces.items():
        exact = Shards([1], 1 << 16)
        for request in trace:
            exact.add(request.hashes)
        prompts = [keys_of(request.hashes) for request in trace]
        for share in (0.02, 0.1, 0.4):
            capacity = max(1, int(exact.distinct * share))
            sizes = [max(1, int(capacity * factor)) for factor in FACTORS]
            truth = Shards(sizes, exact.accesses)  # A sample of all keys gives the exact curve.
            for request in trace:
                truth.access((request.hashes >> np.uint64(32)).tolist())
            made = SizeAdvisor({"cpu": capacity})

            def feed(made: SizeAdvisor = made, prompts: list[list[bytes]] = prompts) -> None:
                for keys in prompts:
                    made.looked_up({}, keys)
                    if keys:
                        made.stored(keys)

            cost = timed(feed, per=exact.accesses)
            estimates = made.estimates("cpu")
            errors = [
                100 * abs(estimates[field] - truth.hit_rate(size))
                for field, size in zip(FIELDS.values(), sizes, strict=True)
            ]
            spent = (cost.cpu or 0.0) * 1e6
            rows.append((name, exact.distinct, capacity, sum(errors) / len(errors), max(errors), spent))
    bench.note("Each prompt is looked up, then stored entirely; the CPU time of both counts per block looked up.")
    bench.table(
        "The advisor at 1/4 to 16 times a capacity",
        ("trace", "distinct blocks", "capacity", "mean error, points", "largest", "CPU µs per access"),
        rows,
    )
    bench.target("advisor, mean error", sum(row[3] for row in rows) / len(rows), 1.0, "max", "points")
    bench.target("advisor, CPU per access at most", max(row[5] for row in rows), 1.0, "max", "µs")
