"""Objects of 128 KiB to 8 MiB: what the size of an offloaded block costs in a bucket.

KV takes 8 KiB per token here, so that a block of 64 tokens is an object of 512 KiB. A tier stores a prompt of 4,096
tokens (32 MiB). Another tier, which has no record of it, looks up a prompt that shares its first 3,000 tokens, and
loads what it finds. The server in memory answers after 25 ms in the median and sends at most 250 MB/s. CPU is that of
this process; the server is another one. "Lost" are the shared tokens in a block that differs at its end: they are
computed.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import NamedTuple

import numpy as np

from benchmarks.bench_bucket_latency import credentials, new_keys
from benchmarks.harness import Bench, Cell
from benchmarks.slow_s3 import BUCKET, SlowS3, slow_s3
from tiering.api.keys import OffloadKey
from tiering.api.request import ReqContext
from tiering.secondary.contract import JobResult, TransferJob
from tiering.testing.tier_rig import TierRig
from tiers.object import S3_TIER, S3Options

BYTES_PER_TOKEN = 8 << 10
PROMPT, SHARED = 4096, 3000
SIZES = (128 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20)
LATENCY, BANDWIDTH = 0.025, 250e6
STEP = 0.002
"""Seconds between two looks at a lookup or a job."""


class Cost(NamedTuple):
    """Cost of one prompt and of one partial hit."""

    stored_requests: int
    stored_cpu: float
    hit_requests: int
    hit_cpu: float
    lookup: float
    load: float
    found: int
    """Tokens that were found and loaded."""


def run(bench: Bench) -> None:
    """Measure all sizes in turns, then write the table."""
    rounds = 1 if bench.quick else 7
    costs: dict[int, list[Cost]] = {size: [] for size in SIZES}
    with slow_s3() as server, credentials(server):
        for number in range(rounds):
            for size in SIZES:
                costs[size].append(one_prompt(server, size, f"{number}-{size}"))
    rows: list[list[Cell]] = []
    for size, measured in costs.items():
        tokens, found = size // BYTES_PER_TOKEN, measured[0].found
        stored, cpu = measured[0].stored_requests, statistics.median(cost.stored_cpu for cost in measured)
        hit, hit_cpu = measured[0].hit_requests, statistics.median(cost.hit_cpu for cost in measured)
        rows.append(
            [
                f"{size >> 10:,} KiB",
                tokens,
                stored,
                cpu / PROMPT * 1e6,
                hit,
                hit_cpu / found * 1e6,
                SHARED - found,
                statistics.median(cost.lookup for cost in measured) * 1e3,
                statistics.median(cost.load for cost in measured) * 1e3,
            ]
        )
    bench.table(
        f"A prompt of {PROMPT:,} tokens, and a hit of {SHARED:,} of them; medians of {rounds} rounds",
        (
            "object",
            "tokens",
            "stored: requests",
            "stored: CPU us/token",
            "hit: requests",
            "hit: CPU us/token",
            "hit: tokens lost",
            "hit: lookup ms",
            "hit: load ms",
        ),
        rows,
    )
    bench.note(f"Load of the machine at the end: {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores.")


def one_prompt(server: SlowS3, size: int, prefix: str) -> Cost:
    """Store a prompt in one process, then find and load the head of another prompt in a second one."""
    tokens = size // BYTES_PER_TOKEN
    words = {"bucket": BUCKET, "endpoint_url": server.endpoint, "prefix": prefix, "lookup_deadline": "5s"}
    options = S3Options.model_validate(words)
    blocks, same = PROMPT // tokens, SHARED // tokens
    rigs = [
        TierRig(lambda context: S3_TIER.build(options, context), group_bytes=(size,), num_rows=2 * blocks)
        for _ in range(2)
    ]
    writer, reader = rigs
    for rig in rigs:
        rig.open()
    try:
        stored = new_keys(blocks)
        writer.rows[:blocks] = np.random.default_rng(7).integers(0, 256, (blocks, writer.rows.shape[1]), np.uint8)
        requests, cpu = server.requests(), time.process_time()
        writer.tier.submit_store(a_job(writer, stored, load=False))
        end(writer)
        requests, cpu = server.requests() - requests, time.process_time() - cpu
        prompt = [*stored[:same], *new_keys(blocks - same)]
        server.delay(head=LATENCY, get=LATENCY, put=LATENCY)
        server.bound(BANDWIDTH)
        asked, hit_cpu, begun = server.requests(), time.process_time(), time.perf_counter()
        while (answer := reader.tier.lookup_prefix(prompt, ReqContext("hit"))).undecided:
            step(reader)
        looked = time.perf_counter()
        if answer.held != same:
            raise RuntimeError(f"{answer.held} blocks were found, not {same}")
        reader.tier.submit_load(a_job(reader, prompt[:same], load=True))
        end(reader)
        ended = time.perf_counter()
        hit_cpu, asked = time.process_time() - hit_cpu, server.requests() - asked
        if not np.array_equal(reader.rows[:same], writer.rows[:same]):
            raise RuntimeError("what came back is not what was stored")
    finally:
        server.delay(head=0.0005, get=0.0005, put=0.0005)
        server.bound(0)
        for rig in rigs:
            rig.close()
    return Cost(requests, cpu, asked, hit_cpu, looked - begun, ended - looked, same * tokens)


def a_job(rig: TierRig, keys: list[OffloadKey], *, load: bool) -> TransferJob:
    """Return a job of the rig's first rows, as a manager makes it."""
    now = time.monotonic()
    deadline = rig.tier.traits.deadline(now, load=load)
    return TransferJob(1, keys, np.arange(len(keys)), load, ReqContext("prompt"), now, deadline=deadline)


def end(rig: TierRig) -> None:
    """Run steps until the rig's only job has ended."""
    results: list[JobResult] = []
    while not results:
        results = step(rig)
    if not results[0].success:
        raise RuntimeError("a block was not moved")


def step(rig: TierRig) -> list[JobResult]:
    """End a step of the tier, and return the results of its jobs."""
    rig.tier.on_schedule_end()
    time.sleep(STEP)
    return list(rig.tier.get_finished())
