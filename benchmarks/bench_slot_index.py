"""The index of a local tier with a million blocks: lookups, memory, and a restart from a checkpoint.

Lookups are runs of 64 neighbouring keys that are all held, by the batch call, beside ``list(map(dict.__contains__,
keys))`` on the same keys. The keys are equal to those in the table, but other objects. Memory is the growth of the
resident size while a million blocks are entered, keys included. A restart is measured from the reading of the file to
the merge of the last block, with the scheduler's steps and the reading in turns.
"""

from __future__ import annotations

import gc
import os
import random
import secrets
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.harness import Bench, Sample, ratio
from tiering.index.slots import SlotIndex
from tiering.medium.files import Files
from tiers.local.checkpoint import CheckpointWriter, WrittenMarks
from tiers.local.checkpoints import SLICE_SLOTS
from tiers.local.layout import SegmentGeometry
from tiers.local.recovery import recover, remember
from tiers.local.segments import Segments

RUN = 64
BATCH = 64
MERGE = 4096


def _resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _fresh(count: int) -> list[bytes]:
    return [secrets.token_bytes(32) + b"\0\0\0\0" for _ in range(count)]


def _fill(index: SlotIndex, count: int) -> None:
    """Enter ``count`` blocks in batches, as jobs do."""
    for start in range(0, count, BATCH):
        keys = _fresh(min(BATCH, count - start))
        plan = index.plan_store(keys, 0.0)
        index.end_store(keys, plan.places, [True] * len(keys), 0.0)


def run(bench: Bench) -> None:
    count = 20_000 if bench.quick else 1_000_000
    before = _resident()
    index = SlotIndex(count)
    index.add_free(np.arange(count))
    _fill(index, count)
    per_block = (_resident() - before) / count
    bench.table("memory of the index", ("blocks", "bytes per block, keys included"), [(count, per_block)])

    held = list(index.slice(0, count).keys)
    _lookups(bench, index, held)
    _checkpoints(bench, index, held, count)

    bench.target("memory per block in the index", per_block, 250, "max", "bytes")


def _lookups(bench: Bench, index: SlotIndex, held: list[bytes]) -> None:
    rng = random.Random(0)
    starts = [rng.randrange(len(held) - RUN) for _ in range(200 if bench.quick else 4000)]
    runs = [[bytes(bytearray(key)) for key in held[start : start + RUN]] for start in starts]
    table = dict.fromkeys(held, 1)
    contains = table.__contains__

    def bare() -> Sample:
        begin = time.perf_counter()
        for keys in runs:
            list(map(contains, keys))
        return Sample((time.perf_counter() - begin) / len(runs) / RUN * 1e9)

    def batch() -> Sample:
        begin = time.perf_counter()
        for keys in runs:
            index.lookup_prefix(keys, 0.0)
        return Sample((time.perf_counter() - begin) / len(runs) / RUN * 1e9)

    stats = bench.compare(
        "lookup, runs of 64 held keys", {"map(dict.__contains__)": bare, "SlotIndex": batch}, unit="ns per key"
    )
    bench.target(
        "lookup against map(dict.__contains__)",
        ratio(stats["SlotIndex"], stats["map(dict.__contains__)"]),
        1.5,
        "max",
        "x",
    )


def _checkpoints(bench: Bench, index: SlotIndex, held: list[bytes], count: int) -> None:
    geometry = SegmentGeometry(2 << 20, 512, -(-count // 512))
    files = Files()
    marks = WrittenMarks(Segments(bench.directory, geometry, files), durable=False)
    begin = time.perf_counter()
    writer = CheckpointWriter(Segments(bench.directory, geometry, files), bytes(16), marks.begin(), 1)
    longest = copying = 0.0
    for start in range(0, geometry.num_slots, SLICE_SLOTS):
        step = time.perf_counter()
        part = index.slice(start, start + SLICE_SLOTS)
        longest = max(longest, time.perf_counter() - step)
        copying += time.perf_counter() - step
        writer.add(part)
    writer.finish({})
    bench.table(
        "writing a checkpoint",
        ("blocks", "longest step, ms", "all steps, ms", "writing (I/O side), s"),
        [(count, longest * 1e3, copying * 1e3, time.perf_counter() - begin - copying)],
    )
    restored: list[SlotIndex] = []

    def restart() -> Sample:
        restored.clear()
        fresh = SlotIndex(geometry.num_slots)
        segments = Segments(bench.directory, geometry, files)
        reopened = WrittenMarks(Segments(bench.directory, geometry, files), durable=False)
        begin = time.perf_counter()
        longest = 0.0
        fresh.begin_recovery()
        everything = tuple(range(geometry.max_segments))
        remembered = replace(remember(segments, reopened), segments=everything, changed=frozenset())
        for batch in recover(segments, remembered, bytes(16), threading.Event()):
            if isinstance(batch, Exception):
                raise batch
            step = time.perf_counter()
            fresh.add_free(batch.free)
            longest = max(longest, time.perf_counter() - step)
            for start in range(0, len(batch.keys), MERGE):
                step = time.perf_counter()
                stop = start + MERGE
                fresh.merge(batch.keys[start:stop], batch.slots[start:stop], batch.sequences[start:stop])
                longest = max(longest, time.perf_counter() - step)
        fresh.end_recovery()
        seconds = time.perf_counter() - begin
        reopened.close()
        restored.append(fresh)
        return Sample(seconds, extra={"longest step, ms": longest * 1e3})

    stats = bench.compare("restart from a checkpoint", {"all blocks": restart}, unit="s")
    if restored[0].lookup_prefix(held, 0.0).held != count:
        raise RuntimeError("the checkpoint did not bring everything back")
    bench.target("restart of a million slots from a checkpoint", stats["all blocks"].median, 10.0, "max", "s")
