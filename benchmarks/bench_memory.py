"""Resident memory per block of the tables on the scheduler's side: the primary tier's rows and a local tier's slot index.

A child process builds each table, fills it to a million blocks and goes on until as many again have been evicted; the growth of its
resident size, keys included, is divided by the number of blocks.
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
    """Resident size of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _batches(blocks: int) -> list[bytes]:
    blob = os.urandom(32 * blocks)
    return [blob[start : start + 32] + b"\0\0\0\0" for start in range(0, len(blob), 32)]


def fill_primary(blocks: int) -> float:
    """Bytes per block of the manager over a full primary tier."""
    from tiering.base import ReqContext
    from tiering.manager import TieringOffloadingManager
    from tiering.primary.manager import CPUPrimaryTierOffloadingManager

    buffer = memoryview(np.zeros((blocks, 1), np.uint8))
    before = resident_bytes()
    manager = TieringOffloadingManager(CPUPrimaryTierOffloadingManager(buffer))
    ctx = ReqContext("request")
    manager.on_new_request(ctx)
    for _ in range(2 * blocks // BATCH):
        output = manager.prepare_store(_batches(BATCH), ctx)
        if output is not None:
            manager.complete_store(output.keys_to_store, ctx)
        manager.on_schedule_end()
    held = len(manager.primary_tier.table.readable)
    return (resident_bytes() - before) / held


def fill_slots(blocks: int) -> float:
    """Bytes per block of a local tier's index."""
    from tiering.secondary.index.slots import SlotIndex

    before = resident_bytes()
    index = SlotIndex(blocks)
    index.add_free(np.arange(blocks))
    for _ in range(2 * blocks // BATCH):
        keys = _batches(BATCH)
        plan = index.plan_store(keys, 0.0)
        stored = [keys[position] for position in plan.positions]
        index.end_store(stored, plan.places, [True] * len(stored), 0.0)
    return (resident_bytes() - before) / index.blocks


def in_child(work: Callable[[int], float], blocks: int) -> float:
    """Run ``work`` in a fresh process, so that nothing resident before is counted or reused."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, (blocks,))


def run(bench: Bench) -> None:
    blocks = 20_000 if bench.quick else 1_000_000
    limits = {"primary tier": (fill_primary, 300), "local tier's index": (fill_slots, 250)}
    for name, (work, limit) in limits.items():
        stats = bench.compare(
            f"{name}, {blocks:,} blocks", {name: lambda work=work: Sample(in_child(work, blocks))}, 3, unit="bytes/block", warmup=0
        )
        bench.target(f"resident bytes per block, {name}", stats[name].median, limit, "max", "B")
