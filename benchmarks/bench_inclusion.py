"""Inclusion of the CPU tier: hits that it adds to the GPU's cache, and copies out of the GPU, inclusive and exclusive.

The traces are replayed with infinite prefill speed, so that only the two caches count. The GPU's cache has a share of
the trace's distinct blocks, and the CPU tier a multiple of the GPU's cache. `KV_TRACES` may name further trace files,
separated by colons; their names are shown without directories.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Bench
from tiering.config.stack_file import load_stack
from tiering.replay.curve import LruCurve
from tiering.replay.generate import generate
from tiering.replay.model import ReplayModel
from tiering.replay.readers import Trace
from tiering.replay.replay import DEVICE, Replay
from tiering.replay.result import ReplayResult
from tiering.replay.trace import TraceRequest

BLOCK_BYTES = 1 << 20
DISK = {"type": "local", "path": "/var/cache/kv", "capacity": "100TiB"}
RATIOS = (1, 2, 4, 8)


def replayed(
    trace: Sequence[TraceRequest], block_tokens: int, device: int, rows: int, inclusion: str, *tiers: object
) -> ReplayResult:
    primary = {"capacity": rows * BLOCK_BYTES, "inclusion": inclusion}
    model = ReplayModel(prefill_tokens_per_second=1e9, device_cache=device * BLOCK_BYTES)
    return Replay(load_stack({"primary": primary, "secondary": list(tiers)}), block_tokens, BLOCK_BYTES, model).run(
        trace
    )


def run(bench: Bench) -> None:
    kinds, requests = {"chat": 1.0, "documents": 0.2}, 300 if bench.quick else 6000
    traces = {"generated": (128, list(generate(kinds, requests, 4.0, 128, seed=3)))}
    for path in filter(None, os.environ.get("KV_TRACES", "").split(":")):
        found = Trace([Path(path)])
        traces[Path(path).name] = (found.info.block_tokens, list(found))
    rows = []
    for name, (tokens, trace) in traces.items():
        exact = LruCurve([1])
        for request in trace:
            exact.add(request.hashes)
        for share in (0.02, 0.05):
            device = max(1, int(exact.distinct * share))
            sums = [device * (1 + ratio) for ratio in RATIOS]
            lru = LruCurve(sums)
            for request in trace:
                lru.add(request.hashes)
            for ratio, both in zip(RATIOS, sums, strict=True):
                tiers = {
                    inclusion: replayed(trace, tokens, device, ratio * device, inclusion)
                    for inclusion in ("inclusive", "exclusive")
                }
                one, other = tiers.values()
                rows.append(
                    (
                        name,
                        share,
                        ratio,
                        *[100 * sum(t.hit_rate for t in r.tiers if t.name == "cpu") for r in (one, other)],
                        100 * other.hit_rate,
                        100 * lru.hit_rate(both),
                        other.copied_blocks / one.copied_blocks,
                        other.lost_blocks,
                    )
                )
                print(rows[-1])
