"""Resident memory per block of the tiering manager over a full primary tier.

A child process fills the primary tier to a million blocks and goes on until as many again have been evicted. The growth
of its resident size, keys included, is divided by the number of blocks. The benchmark ``slot_index`` does the same with
the local tier's index.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.harness import Bench, Sample

BATCH = 64


def resident_bytes() -> int:
    """Return the resident size of this process in bytes."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _batches(blocks: int) -> list[bytes]:
    blob = os.urandom(32 * blocks)
    return [blob[start : start + 32] + b"\0\0\0\0" for start in range(0, len(blob), 32)]


def fill_primary(blocks: int) -> float:
    """Return the bytes per block of the manager over a full primary tier."""
    from tiering.api.request import ReqContext
    from tiering.manager.manager import TieringOffloadingManager
    from tiering.primary.manager import CPUPrimaryTierOffloadingManager

    buffer = np.zeros((blocks, 1), np.uint8).data
    before = resident_bytes()
    manager = TieringOffloadingManager(CPUPrimaryTierOffloadingManager(buffer))
    ctx = ReqContext("request")
    manager.on_new_request(ctx)
    for _ in range(2 * blocks // BATCH):
        output = manager.prepare_store(_batches(BATCH), ctx)
        if output is not None:
            manager.complete_store(output.keys_to_store, ctx)
        manager.on_schedule_end()
    held = len(manager.primary_tier.readable)
    return (resident_bytes() - before) / held


def in_child(work: Callable[[int], float], blocks: int) -> float:
    """Run ``work`` in a fresh process, so that no memory of this process is counted or reused."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, (blocks,))


def run(bench: Bench) -> None:
    blocks = 20_000 if bench.quick else 1_000_000
    name = f"manager and primary tier, {blocks:,} blocks"
    stats = bench.compare(
        name, {"tiering manager": lambda: Sample(in_child(fill_primary, blocks))}, 3, unit="bytes/block", warmup=0
    )
    bench.target("resident bytes per primary block", stats["tiering manager"].median, 300, "max", "B")
