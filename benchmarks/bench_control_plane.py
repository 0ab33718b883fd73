"""CPU time of one scheduler step in the tiering manager, beside a bare dict with an LRU order.

In a step, 64 blocks are stored, 64 blocks are hit, touched and loaded, and one request of 64 keys misses. The CPU tier
is full, so that 64 blocks are evicted. Calls are in batches, events are off, and the secondary tier accepts every block
and does nothing. The dict (the *floor*) does the same on an OrderedDict, in loops without a function call per block; it
has no locks, no accounting and no tiers. Keys are fresh random bytes; hits are equal to the stored keys but not
identical objects.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from benchmarks.harness import Bench, Sample, ratio
from tiering.api.keys import OffloadKey
from tiering.api.request import ReqContext
from tiering.manager.manager import TieringOffloadingManager
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.secondary.contract import JobResult, PrefixAnswer, SecondaryTierManager, TierTraits, TransferJob

BATCH = 64
Batch = list[OffloadKey]
Work = list[tuple[Batch, Batch, Batch]]
"""Per step: what is stored, what is hit, what is missed."""


class NoopTier(SecondaryTierManager):
    """A tier that accepts every store at once and holds nothing."""

    name = "noop"
    traits = TierTraits()

    def __init__(self) -> None:
        self._done: list[JobResult] = []

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return False

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrefixAnswer:
        return PrefixAnswer(0, False)

    def submit_store(self, job: TransferJob) -> None:
        self._done.append(JobResult(job.job_id, True))

    def submit_load(self, job: TransferJob) -> None:
        self._done.append(JobResult(job.job_id, False))

    def get_finished(self) -> Iterable[JobResult]:
        done, self._done = self._done, []
        return done


class Floor:
    """A dict with an LRU order."""

    def __init__(self, num_rows: int) -> None:
        self._lru: OrderedDict[OffloadKey, int] = OrderedDict()
        self._free = list(range(num_rows))

    def store(self, keys: Batch) -> None:
        lru, free = self._lru, self._free
        for key in keys:
            if key not in lru:
                lru[key] = free.pop() if free else lru.popitem(last=False)[1]

    def step(self, new: Batch, hit: Batch, missed: Batch) -> int:
        lru = self._lru
        hits = 0
        for key in hit:
            if key not in lru:
                break
            hits += 1
        for key in reversed(hit):
            lru.move_to_end(key)
        rows = [lru[key] for key in hit]
        for key in missed:
            if key in lru:
                hits += 1
        self.store(new)
        return hits + len(rows)


def fresh_keys() -> Batch:
    """Return a batch of new random keys."""
    blob = os.urandom(32 * BATCH)
    return [blob[start : start + 32] + b"\0\0\0\0" for start in range(0, len(blob), 32)]


def copied(batch: Batch) -> Batch:
    """Return equal keys that are other objects."""
    return [bytes(bytearray(key)) for key in batch]


class Subject:
    """A full manager and a full floor with the same history."""

    def __init__(self, num_rows: int, pinned: int = 0) -> None:
        buffer = np.zeros((num_rows, 1), np.uint8).data
        self.manager = TieringOffloadingManager(CPUPrimaryTierOffloadingManager(buffer), [NoopTier()])
        self.floor = Floor(num_rows)
        self.ctx = ReqContext("request")
        self.manager.on_new_request(self.ctx)
        self.history = [fresh_keys() for _ in range(num_rows // BATCH + 2)]
        self._random = random.Random(0)
        for batch in self.history:
            self.floor.store(batch)
            self._store(batch)
            self.manager.on_schedule_end()
        if pinned:
            keys = [key for batch in self.history[-pinned // BATCH :] for key in batch][:pinned]
            self.manager.prepare_load(keys, ReqContext("pins"))
        self.history = self.history[len(self.history) * 3 // 4 :]

    def _store(self, batch: Batch) -> None:
        output = self.manager.prepare_store(batch, self.ctx)
        if output is None:
            raise RuntimeError("the manager found no room")
        self.manager.complete_store(output.keys_to_store, self.ctx)

    def work(self, steps: int) -> Work:
        """Return the keys of ``steps`` steps: new ones, recent ones (as other objects) and unknown ones."""
        hits = [self._random.choice(self.history) for _ in range(steps)]
        new = [fresh_keys() for _ in range(steps)]
        self.history += new
        del self.history[:steps]
        return [(batch, copied(hit), fresh_keys()) for batch, hit in zip(new, hits, strict=True)]

    def manager_step(self, new: Batch, hit: Batch, missed: Batch) -> None:
        manager, ctx = self.manager, self.ctx
        if manager.match_prefix(hit, ctx).hits != BATCH or manager.match_prefix(missed, ctx).hits:
            raise RuntimeError("wrong hits")
        manager.touch(hit, ctx)
        manager.prepare_load(hit, ctx)
        manager.complete_load(hit, ctx)
        self._store(new)
        manager.on_schedule_end()


def timed_turn(step: Callable[[Batch, Batch, Batch], object], turn: Callable[[], Work]) -> Sample:
    """Time the next turn's work, which is made before the clock starts."""
    return microseconds_per_step(step, turn())


def microseconds_per_step(step: Callable[[Batch, Batch, Batch], object], work: Work) -> Sample:
    gc.collect()
    start = time.process_time()
    for new, hit, missed in work:
        step(new, hit, missed)
    cpu = time.process_time() - start
    return Sample(cpu / len(work) * 1e6)


def run(bench: Bench) -> None:
    steps = 50 if bench.quick else 400
    sizes = [(10_000, 0)] if bench.quick else [(100_000, 0), (100_000, 10_000), (1_000_000, 0), (1_000_000, 10_000)]
    ratios: dict[tuple[int, int], float] = {}
    for num_rows, pinned in sizes:
        subject = Subject(num_rows, pinned)
        gc.freeze()
        turns: list[Work] = []

        def turn(subject: Subject = subject, turns: list[Work] = turns) -> Work:
            """Return equal keys to both variants of a round, but not the same objects.

            Python computes the hash of a bytes object once per object.
            """
            if not turns:
                work = subject.work(steps)
                turns += [work, [(copied(new), copied(hit), copied(missed)) for new, hit, missed in work]]
            return turns.pop()

        stats = bench.compare(
            f"{num_rows:,} rows, {pinned:,} pinned",
            {
                "bare dict + LRU": partial(timed_turn, subject.floor.step, turn),
                "tiering manager": partial(timed_turn, subject.manager_step, turn),
            },
            repeats=9,
            unit="CPU µs/step",
        )
        ratios[num_rows, pinned] = ratio(stats["tiering manager"], stats["bare dict + LRU"])
        gc.unfreeze()
    if bench.quick:
        return
    base = ratios[100_000, 0]
    bench.target("step at 100,000 rows against the floor", base, 2.2, "max", "x")
    bench.target("ratio at 1,000,000 rows against that at 100,000", ratios[1_000_000, 0] / base, 1.25, "max", "x")
    bench.target("the same with 10,000 rows pinned, 100,000 rows", ratios[100_000, 10_000] / base, 1.25, "max", "x")
    bench.target("the same with 10,000 rows pinned, 1,000,000 rows", ratios[1_000_000, 10_000] / base, 1.25, "max", "x")
