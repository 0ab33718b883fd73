"""Hints of half of the sessions: hits, and how far they close the gap from LRU to the optimum.

Traces are replayed through a CPU tier alone. Half of the sessions release themselves at their end and expect their next
request at its time; each seed draws another half. With lies, one in ten hinted requests states the opposite: a session
that goes on is released, and one that is over is expected in half an hour. The optimum evicts the block whose
next use is farthest away; like the tier, it admits all blocks, and requests hit with leading blocks only. `KV_TRACES`
may name further trace files, separated by colons; their names are shown without directories.

Then three engines without a model serve the same prompts of 50 to 200 blocks in turn, each prompt in two requests: one
follows no hints; one follows them while 100,000 blocks of other sessions are followed, but these requests carry none;
and with one the requests name a session, which they expect or release. The cost of hints is the CPU time of the
scheduler's thread beyond the first engine's, in the median of the rounds. The memory is that of 64,000 blocks that are
followed, in sessions of one block, and of 16 blocks that are also expected, without the keys that the tiers have.
"""

from __future__ import annotations

import os
import random
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.bench_scheduler import BLOCK, Engine, Request
from benchmarks.harness import Bench, Cell, Sample, spread
from tests.connector.fakes import make_spec
from tiering.api.hints import KeptBlocks, tenant_of
from tiering.config.stack_file import load_stack
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.manager.manager import TieringOffloadingManager
from tiering.manager.sessions import Sessions
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.replay.generate import generate
from tiering.replay.hints import TraceHints
from tiering.replay.model import ReplayModel
from tiering.replay.optimum import Optimum
from tiering.replay.readers import Trace
from tiering.replay.replay import Replay
from tiering.replay.trace import TraceRequest
from tiering.table.block_table import BlockTable

BLOCK_BYTES = 1 << 20
MODEL = ReplayModel(prefill_tokens_per_second=1e9)
LIES = 0.1
HINTED = "requests with hints"
COSTS = ("no hints are followed", "requests without hints", HINTED)
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


@dataclass(slots=True, eq=False)
class HintedRequest(Request):
    """A request that may carry hints."""

    kv_transfer_params: Any = None
    session_id: str | None = None


def prompts(count: int, seed: int, *, hinted: bool) -> list[Request]:
    """Return two requests of a session for each of ``count`` prompts: it is expected, then released."""
    dice = random.Random(seed)
    made: list[Request] = []
    for number in range(count):
        tokens = dice.randrange(50, 200) * BLOCK
        hashes = [dice.randbytes(32) for _ in range(tokens // BLOCK + 2)]
        for turn, action in enumerate(
            ({"action_type": "expect", "payload": {"seconds": 60}}, {"action_type": "release"})
        ):
            request = HintedRequest(f"{seed}-{number}-{turn}", tokens, 2, hashes, [])
            if hinted:
                request.session_id = f"session {seed}-{number}"
                request.kv_transfer_params = {"kv_tiering": {"hints": [action]}}
            made.append(request)
    return made


def follower(*, follows: bool) -> OffloadingConnectorScheduler:
    """Return a scheduler half with a CPU tier; other sessions have 100,000 blocks if it follows any."""
    spec = make_spec(
        gpu_block_size=BLOCK, session_blocks=1 << 18 if follows else 0, hints={"retain": 0.5} if follows else {}
    )
    rows = CPUPrimaryTierOffloadingManager(np.zeros((1 << 14, 1), np.uint8).data)
    manager = TieringOffloadingManager(rows, [])
    spec.get_manager = lambda: manager  # type: ignore[method-assign]
    made = OffloadingConnectorScheduler(spec)
    if follows and made._hints is not None:
        for number in range(1000):
            made._hints.sessions.computed([random.randbytes(36) for _ in range(100)], number.to_bytes(15, "big"))
    return made


def bytes_of(make: Callable[[], object], blocks: int) -> float:
    """Return the bytes per block that an object takes."""
    tracemalloc.start()
    kept = make()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del kept
    return size / blocks


def memory(size: int, *, expected: bool) -> float:
    """Return the bytes per block of sessions of ``size`` blocks that are followed, and also expected."""
    blocks = 64_000
    keys = [random.randbytes(36) for _ in range(blocks)]
    table = BlockTable(2 * blocks)
    rows = table.allocate(keys)
    if rows is not None:
        table.commit(keys, rows[0])
    parts = [keys[first : first + size] for first in range(0, blocks, size)]

    def make() -> object:
        sessions = Sessions(1 << 18)
        for number, part in enumerate(parts):
            sessions.computed(part, number.to_bytes(15, "big"))
            if expected:
                table.keep(KeptBlocks(part, 60.0, 0.5, tenant=tenant_of(None), is_own=True), time.monotonic)
        return sessions

    return bytes_of(make, blocks)


def costs(bench: Bench) -> None:
    """Measure what hints cost the scheduler's thread, and their memory."""
    count = 20 if bench.quick else 200
    schedulers = {name: follower(follows=name != "no hints are followed") for name in COSTS}
    seeds = dict.fromkeys(COSTS, 0)

    def serve(name: str) -> Sample:
        seeds[name] += 1
        work = prompts(count, seeds[name], hinted=name == HINTED)
        blocks, began = sum(request.num_prompt_tokens // BLOCK for request in work), time.thread_time()
        Engine(schedulers[name]).serve(work)
        return Sample(1e6 * (time.thread_time() - began) / blocks)

    stats = bench.compare(
        "CPU time of the scheduler's thread per block, with the engine's part",
        {name: partial(serve, name) for name in COSTS},
        unit="µs",
    )
    base = stats[COSTS[0]].samples
    for name, most in zip(COSTS[1:], (0.2, 1.0), strict=True):
        beyond = spread([cost - without for cost, without in zip(stats[name].samples, base, strict=True)])
        bench.target(f"cost per block, {name}", beyond, most, "max", "µs")
    bench.target("memory per block, sessions of one block", memory(1, expected=False), 240, "max", "bytes")
    bench.target("memory per block, expected sessions of 16", memory(16, expected=True), 240, "max", "bytes")


def run(bench: Bench) -> None:
    costs(bench)
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
