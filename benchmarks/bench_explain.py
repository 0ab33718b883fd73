"""CPU time on the scheduler's thread of the explanation of misses, and of its own thread off the step.

Prompts of 512 blocks that no tier holds pass a tiering manager over a CPU tier that they overflow, so that each block
is missed, stored and evicted. Variants are the scheduler half of the connector with and without ``explain``. The target
is the difference per missed block, in CPU time of the scheduler's thread.
"""

from __future__ import annotations

import random
import time

import numpy as np

from benchmarks.harness import Bench, Sample
from tests.connector.fakes import FakeBlocks, FakeRequest, FakeSchedulerOutput, finished, make_spec
from tiering.api.engine import MissExplaining
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.manager.manager import TieringOffloadingManager
from tiering.primary.manager import CPUPrimaryTierOffloadingManager

BLOCK = 4
BLOCKS = 512
"""Blocks of a prompt."""
ROWS = 2048


def _prompts(count: int, dice: random.Random) -> list[FakeRequest]:
    requests = []
    for number in range(count):
        request = FakeRequest(f"r{number}", list(range(BLOCKS * BLOCK)), hash_block_size=BLOCKS * BLOCK)
        request.block_hashes = [dice.randbytes(32) for _ in range(BLOCKS)]
        requests.append(request)
    return requests


def _run(bench: Bench, count: int, *, explains: bool) -> Sample:
    """Return the CPU microseconds per missed block of the scheduler's thread, and of the other thread."""
    primary = CPUPrimaryTierOffloadingManager(np.zeros((ROWS, 16), np.uint8).data, enable_events=explains)
    manager = TieringOffloadingManager(primary, enable_events=explains)
    spec = make_spec()
    spec.manager = manager  # type: ignore[assignment]
    if explains:
        spec.explaining = MissExplaining({"cpu": ROWS}, socket=bench.directory / "why.sock")
    scheduler = OffloadingConnectorScheduler(spec)
    misses = scheduler._misses
    if misses is not None:
        misses.service.stop(30)  # the notes are processed at the end, and timed
    requests, blocks = _prompts(count, random.Random(count)), list(range(1, BLOCKS + 1))
    spent = settled = 0.0
    for request in requests:
        began = time.thread_time()
        scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.update_state_after_alloc(request, FakeBlocks((blocks,)), 0)
        meta = scheduler.build_connector_meta(FakeSchedulerOutput().new(request, BLOCKS * BLOCK, blocks))
        request.num_computed_tokens = BLOCKS * BLOCK
        for order in meta.reqs_to_store.values():
            scheduler.update_connector_output(finished(order.job_id))
        scheduler.request_finished(request, blocks)
        scheduler.build_connector_meta(FakeSchedulerOutput())
        spent += time.thread_time() - began
    if misses is not None:
        began = time.thread_time()
        misses.explainer.settle()
        settled = time.thread_time() - began
    if misses is not None and sum(misses.explainer.totals.values()) != count * BLOCKS * BLOCK:
        raise AssertionError("not all tokens were explained")
    scheduler.shutdown()
    per_block = 1e6 / (count * BLOCKS)
    return Sample(spent * per_block, extra={"off the step": settled * per_block})


def run(bench: Bench) -> None:
    count = 20 if bench.quick else 100  # their notes fit into the queue
    stats = bench.compare(
        "scheduler's thread, CPU us per missed block",
        {
            "without": lambda: _run(bench, count, explains=False),
            "explain": lambda: _run(bench, count, explains=True),
        },
        unit="us",
    )
    added = [on - off for on, off in zip(stats["explain"].samples, stats["without"].samples, strict=True)]
    bench.target("explain, per missed block on the step", float(np.median(added)), 0.3, "max", "us")
