"""The longest calls of the scheduler's thread into the index of a local tier.

The index has 1, 4 and 10 million blocks. Blocks are stored and looked up in batches of 64, a checkpoint is copied and
written, the index is cleared as at a reset, blocks are stored while the old dictionaries are freed, and the
checkpoint is read into another index. Writing, freeing and reading run on threads of their own meanwhile, and the
garbage collector is on. Objects from before the measurement are frozen, as vLLM's engine core freezes its heap at the
start. All this is done three times with the same keys, and a call counts with the median of its three times: the host
of a virtual machine stops a core for some milliseconds at times, which the guest counts as CPU time of a call. The
table has the longest call of each kind, in time and in CPU time, and the longest single one of all rounds. The time
includes the wait for the interpreter lock and, on a busy machine, for a core. The checkpoint's memory is the growth of
the resident size while it is copied and written.

The longest stores and merges build a dictionary anew, in memory that was not used before. Their page faults are in the
table: on a virtual machine, the host gives some of these pages at the same moment, in up to 12 us each. Each slice of a
checkpoint is written before the next one is copied, so that the checkpoint takes the memory of one slice.
"""

from __future__ import annotations

import gc
import os
import queue
import random
import resource
import statistics
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np

from benchmarks.harness import Bench
from tiering.index.slots import SlotIndex, SlotsSlice
from tiering.medium.files import Files
from tiering.table.disposal import DISPOSAL
from tiers.local.checkpoint import CheckpointWriter, WrittenMarks
from tiers.local.checkpoints import SLICE_SLOTS
from tiers.local.feed import MERGE_BLOCKS
from tiers.local.layout import SegmentGeometry
from tiers.local.recovery import RecoveredBatch, recover, remember
from tiers.local.segments import Segments

BATCH = 64
ROUNDS = 3
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Longest:
    """The longest calls of each kind over several rounds of the same calls."""

    def __init__(self) -> None:
        self._rounds: list[dict[str, array[float]]] = []

    def begin_round(self) -> None:
        """Begin the next round."""
        self._rounds.append({})

    def call(
        self, kind: str, function: Callable[Arguments, Result], *args: Arguments.args, **kw: Arguments.kwargs
    ) -> Result:
        """Call ``function``, and note how long it takes."""
        before = _page_faults()
        cpu, begin = time.thread_time(), time.perf_counter()
        result = function(*args, **kw)
        wall, cpu = time.perf_counter() - begin, time.thread_time() - cpu
        self._rounds[-1].setdefault(kind, array("d")).extend((wall * 1e3, cpu * 1e3, _page_faults() - before))
        return result

    def rows(self) -> list[tuple[str, int, float, float, int, float]]:
        """Return a row of the table for each kind of calls; times are in milliseconds."""
        rows = []
        for kind in self._rounds[0]:
            times = np.array([notes[kind] for notes in self._rounds]).reshape(len(self._rounds), -1, 3)
            wall, cpu, faults = np.median(times, axis=0).T
            at = int(cpu.argmax())
            most = float(times[:, :, 1].max())
            rows.append((kind, len(cpu), float(wall.max()), float(cpu[at]), int(faults[at]), most))
        return rows


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(bench: Bench) -> None:
    gc.collect()
    gc.freeze()
    try:
        _measure_all(bench)
    finally:
        gc.unfreeze()


def _measure_all(bench: Bench) -> None:
    for count in (20_000,) if bench.quick else (1_000_000, 4_000_000, 10_000_000):
        longest, memory = Longest(), []
        for _ in range(ROUNDS):
            longest.begin_round()
            memory.append(_measure(bench, count, longest))
        rows = longest.rows()
        columns = ("call", "calls", "longest, ms", "longest CPU, ms", "its page faults", "longest CPU of one round, ms")
        bench.table(f"longest calls, {count:,} blocks", columns, rows)
        most = max(cpu for kind, _, _, cpu, *_ in rows if kind != "create")
        bench.target(f"longest call in CPU time, {count:,} blocks", most, 5.0, "max", "ms")
        grown = statistics.median(memory) / 2**20
        bench.target(f"memory of a checkpoint, {count:,} blocks", grown, 64.0, "max", "MiB")


def _measure(bench: Bench, count: int, longest: Longest) -> int:
    """Take one round, and return the memory of its checkpoint in bytes."""
    dice = random.Random(count)
    geometry = SegmentGeometry(2 << 20, 512, -(-count // 512))
    index = longest.call("create", SlotIndex, geometry.num_slots)
    for start in range(0, geometry.num_slots, 8192):
        slots = np.arange(start, min(start + 8192, geometry.num_slots))
        longest.call("free slots", index.add_free, slots)
    keys = _store(index, count, longest, "store", dice)
    for start in range(0, len(keys), BATCH):
        longest.call("lookup", index.lookup_prefix, keys[start : start + BATCH], 0.0)
    memory = _write(bench, index, geometry, longest)
    tables = longest.call("reset", index.clear)
    longest.call("reset", DISPOSAL.add, tables)
    del tables, keys
    _store(index, min(count, 2_000_000), longest, "store after a reset", dice)
    while DISPOSAL.busy:
        time.sleep(0.01)
    del index
    _read(bench, geometry, longest, count)
    return memory


def _store(index: SlotIndex, count: int, longest: Longest, kind: str, dice: random.Random) -> list[bytes]:
    """Store blocks, and return some runs of neighbouring keys."""
    sample: list[bytes] = []
    for start in range(0, count, BATCH):
        keys = [dice.randbytes(32) + b"\0\0\0\0" for _ in range(min(BATCH, count - start))]
        plan = longest.call(kind, index.plan_store, keys, 0.0)
        longest.call(kind, index.end_store, keys, plan.places, [True] * len(keys), 0.0)
        if start < 1 << 16:
            sample += keys
    return sample


def _write(bench: Bench, index: SlotIndex, geometry: SegmentGeometry, longest: Longest) -> int:
    """Copy and write a checkpoint while blocks are looked up, and return the growth of the resident size."""
    files = Files()
    marks = WrittenMarks(Segments(bench.directory, geometry, files), durable=False)
    before = most = _resident()
    writer = CheckpointWriter(Segments(bench.directory, geometry, files), bytes(16), marks.begin(), 1)
    slices: queue.SimpleQueue[SlotsSlice | None] = queue.SimpleQueue()
    written: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def write() -> None:
        while (part := slices.get()) is not None:
            writer.add(part)
            written.put(True)
        writer.finish({})

    thread = threading.Thread(target=write)
    thread.start()
    for start in range(0, geometry.num_slots, SLICE_SLOTS):
        slices.put(longest.call("copy for a checkpoint", index.slice, start, start + SLICE_SLOTS))
        keys = [os.urandom(36) for _ in range(BATCH)]
        longest.call("lookup while it is written", index.lookup_prefix, keys, 0.0)
        written.get()
        most = max(most, _resident())
    slices.put(None)
    thread.join()
    marks.close()
    return max(most, _resident()) - before


def _read(bench: Bench, geometry: SegmentGeometry, longest: Longest, count: int) -> None:
    index = SlotIndex(geometry.num_slots)
    segments = Segments(bench.directory, geometry, Files())
    marks = WrittenMarks(Segments(bench.directory, geometry, Files()), durable=False)
    batches: queue.Queue[RecoveredBatch | None] = queue.Queue(2)
    everything = tuple(range(geometry.max_segments))

    def read() -> None:
        remembered = replace(remember(segments, marks), segments=everything, changed=frozenset())
        for batch in recover(segments, remembered, bytes(16), threading.Event()):
            if isinstance(batch, Exception):
                raise batch
            batches.put(batch)
        batches.put(None)

    reader = threading.Thread(target=read)
    reader.start()
    longest.call("begin a recovery", index.begin_recovery)
    while (batch := batches.get()) is not None:
        longest.call("merge", index.add_free, batch.free)
        for start in range(0, len(batch.keys), MERGE_BLOCKS):
            part = slice(start, start + MERGE_BLOCKS)
            keys, slots, sequences = batch.keys[part], batch.slots[part], batch.sequences[part]
            longest.call("merge", index.merge, keys, slots, sequences)
    longest.call("end a recovery", index.end_recovery)
    reader.join()
    marks.close()
    if index.blocks != count:
        raise RuntimeError(f"the checkpoint brought {index.blocks} of {count} blocks back")
