"""The local tier on a real disk with all its parts, beside bare I/O on the same disk.

"Tier" means jobs that are submitted to the tier and collected. Every block has a header and an xxh3-128, which loads
check. The tier uses O_DIRECT and is full, so that each store evicts. "One file per block" is an O_DIRECT write to a
temporary name and a rename, into a new directory, without checksum and sync. "Preadv loop" means bare reads of the same
slots. All variants use a pool of threads; where several numbers of threads are measured, the best of each variant is
compared. The loads of a round read the blocks that the same round stored.
"""

from __future__ import annotations

import itertools
import mmap
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.harness import Bench, Sample, Stats, open_tier, ratio, timed
from tiering.api.namespace import ModelIdentity, Namespace
from tiering.api.request import ReqContext
from tiering.medium.host import IoHost
from tiering.secondary.contract import TierContext, TransferJob
from tiers.local.layout import PAGE
from tiers.local.local_options import LocalOptions
from tiers.local.tier import LocalTier

THREADS = (4, 8)
DEPTHS: tuple[Literal["auto"] | int, ...] = ("auto", 4, 8, 16)
LEARNING_ROUNDS = 24
"""Most rounds of stores and of loads before the measurement, in which ``auto`` finds its depths."""
REQUEST = ReqContext("bench")
Rows = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(slots=True)
class Workload:
    """Rows that hold blocks, rows to fill, and the files beside the tier."""

    directory: Path
    block_bytes: int
    count: int
    rows: Rows
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @classmethod
    def make(cls, directory: Path, block_bytes: int, total: int) -> Workload:
        count = total // block_bytes
        rows = np.frombuffer(mmap.mmap(-1, 2 * count * block_bytes), np.uint8).reshape(2 * count, block_bytes)
        rows[:count] = np.random.default_rng(0).integers(0, 256, (count, block_bytes), np.uint8)
        rows[count:] = 1
        return cls(directory, block_bytes, count, rows)

    @property
    def nbytes(self) -> int:
        return self.count * self.block_bytes


class TierRun:
    """One tier with one number of threads, which is full before the measurement begins."""

    def __init__(
        self, work: Workload, threads: Literal["auto"] | int, durability: Literal["none", "fsync"] = "none"
    ) -> None:
        self.work = work
        capacity = int(1.2 * work.count * (work.block_bytes + PAGE)) + (16 << 20)
        path = work.directory / f"tier-{work.block_bytes}-{threads}-{durability}"
        options = LocalOptions(
            type="local",
            path=str(path),
            capacity=capacity,
            durability=durability,
            max_inflight=threads,
            deadline=600,
        )
        model = ModelIdentity(name="bench", weights="0", dtype="int8", layout="bench")
        namespace = Namespace.build(model, (work.block_bytes,))
        self.tier = LocalTier(TierContext("local", work.rows.data, (work.block_bytes,), namespace), options)
        open_tier(self.tier, 30)
        self.jobs = itertools.count()
        self.keys: list[bytes] = []
        while self.tier.index.growing or self.tier.index.free:
            self.store(complete=False)

    def store(self, blocks_per_job: int = 16, *, complete: bool = True) -> None:
        work = self.work
        self.keys = [secrets.token_bytes(32) + b"\0\0\0\0" for _ in range(work.count)]
        self._run(np.arange(work.count), blocks_per_job, self.tier.submit_store, promotion=False, complete=complete)

    def load(self, blocks_per_job: int = 16) -> None:
        work = self.work
        self._run(
            np.arange(work.count, 2 * work.count), blocks_per_job, self.tier.submit_load, promotion=True, complete=True
        )

    def _run(
        self,
        rows: np.ndarray[Any, Any],
        size: int,
        submit: Callable[[TransferJob], None],
        *,
        promotion: bool,
        complete: bool,
    ) -> None:
        for start in range(0, len(rows), size):
            keys, part = self.keys[start : start + size], rows[start : start + size]
            submit(TransferJob(next(self.jobs), keys, part, promotion, REQUEST))
        self.tier.on_schedule_end()
        while True:  # at least once: that a tier has grown is a result, too
            for result in self.tier.get_finished():
                if complete and not result.success:
                    raise RuntimeError(f"job {result.job_id} failed")
            self.tier.on_schedule_end()
            if self.tier.idle:
                break
            self.tier.io.wait(0.1)

    def close(self) -> None:
        self.tier.shutdown(time.monotonic() + 30)


def store_files(work: Workload, pool: ThreadPoolExecutor) -> Sample:
    directory = work.directory / f"files-{next(work.numbers)}"
    directory.mkdir()

    def write(number: int) -> None:
        path = directory / f"{number:08x}"
        fresh = path.with_suffix(".tmp")
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            os.pwrite(fd, memoryview(work.rows[number]), 0)
        finally:
            os.close(fd)
        fresh.rename(path)

    sample = timed(lambda: list(pool.map(write, range(work.count))), nbytes=work.nbytes)
    shutil.rmtree(directory)
    return sample


def preadv_loop(run: TierRun, pool: ThreadPoolExecutor) -> Sample:
    """Read the slots that the tier's last store wrote, one call per block."""
    work, geometry = run.work, run.tier.store.geometry
    segments = run.tier.store.segments
    places = [place for place in run.tier.index.begin_load(run.keys) if isinstance(place, int)]
    run.tier.index.end_load(run.keys, places, [False] * len(places), 0.0)
    flags = os.O_RDONLY | os.O_DIRECT
    names = {geometry.locate(place)[0] for place in places}
    fds = {number: os.open(segments.directory / geometry.segment_name(number), flags) for number in names}
    headers = memoryview(mmap.mmap(-1, work.count * PAGE))

    def read(number: int) -> None:
        segment, offset = geometry.locate(places[number])
        buffers = [headers[number * PAGE : (number + 1) * PAGE], memoryview(work.rows[work.count + number])]
        if os.preadv(fds[segment], buffers, offset) != geometry.slot_bytes:
            raise RuntimeError("short read")

    try:
        return timed(lambda: list(pool.map(read, range(work.count))), nbytes=work.nbytes)
    finally:
        for fd in fds.values():
            os.close(fd)


def best(stats: dict[str, Stats], word: str) -> Stats:
    """Return the best of the variants whose name begins with ``word``."""
    return max((stat for name, stat in stats.items() if name.startswith(word)), key=lambda stat: stat.median)


def disk_bytes(quick: bool) -> int:
    """Return the most bytes that its files take."""
    return 1 << 30 if quick else 11 << 30


def run(bench: Bench) -> None:
    total = (64 if bench.quick else 1024) << 20
    _large_blocks(bench, total)
    _small_blocks(bench, total)
    for block_bytes in (512 << 10, 2 << 20):
        _depths(bench, block_bytes, total // 2)


def _large_blocks(bench: Bench, total: int) -> None:
    work = Workload.make(bench.directory, 2 << 20, total)
    runs = {threads: TierRun(work, threads) for threads in THREADS}
    pools = {threads: ThreadPoolExecutor(threads) for threads in THREADS}
    try:
        variants: dict[str, Callable[[], Sample]] = {}
        for threads in THREADS:
            variants[f"tier, {threads} threads"] = lambda t=threads: timed(runs[t].store, nbytes=work.nbytes)  # type: ignore[misc]
            variants[f"one file per block, {threads} threads"] = lambda t=threads: store_files(work, pools[t])  # type: ignore[misc]
        stores = bench.compare("store, 2 MiB blocks", variants, unit="GB/s")
        variants = {}
        for threads in THREADS:
            variants[f"tier, {threads} threads"] = lambda t=threads: timed(runs[t].load, nbytes=work.nbytes)  # type: ignore[misc]
            variants[f"preadv loop, {threads} threads"] = lambda t=threads: preadv_loop(runs[t], pools[t])  # type: ignore[misc]
        loads = bench.compare("load, 2 MiB blocks", variants, unit="GB/s")
        one = runs[THREADS[-1]]
        jobs = bench.compare(
            "one job or many, 2 MiB blocks, stores",
            {
                "many small jobs": lambda: timed(lambda: one.store(4), nbytes=work.nbytes),
                "one job": lambda: timed(lambda: one.store(work.count), nbytes=work.nbytes),
            },
            unit="GB/s",
        )
        job_loads = bench.compare(
            "one job or many, 2 MiB blocks, loads",
            {
                "many small jobs": lambda: timed(lambda: one.load(4), nbytes=work.nbytes),
                "one job": lambda: timed(lambda: one.load(work.count), nbytes=work.nbytes),
            },
            unit="GB/s",
        )
    finally:
        for tier in runs.values():
            tier.close()
        for pool in pools.values():
            pool.shutdown()
    ours, files = best(stores, "tier"), best(stores, "one file")
    bench.target("store, 2 MiB, against one file per block", ratio(ours, files), 1.4, "min", "x")
    bench.target("store, 2 MiB, CPU", ours.cpu, 0.22, "max", "s/GB")
    ours, loop = best(loads, "tier"), best(loads, "preadv")
    bench.target("load, 2 MiB, against a bare preadv loop", ratio(ours, loop), 0.9, "min", "x")
    bench.target("load, 2 MiB, CPU", ours.cpu, 0.20, "max", "s/GB")
    bench.target("one job of stores against many", ratio(jobs["one job"], jobs["many small jobs"]), 0.9, "min", "x")
    bench.target(
        "one job of loads against many", ratio(job_loads["one job"], job_loads["many small jobs"]), 0.9, "min", "x"
    )


def _small_blocks(bench: Bench, total: int) -> None:
    work = Workload.make(bench.directory, 512 << 10, total)
    runs = {threads: TierRun(work, threads) for threads in THREADS}
    pools = {threads: ThreadPoolExecutor(threads) for threads in THREADS}
    try:
        variants: dict[str, Callable[[], Sample]] = {}
        for threads in THREADS:
            variants[f"tier, {threads} threads"] = lambda t=threads: timed(runs[t].store, nbytes=work.nbytes)  # type: ignore[misc]
            variants[f"one file per block, {threads} threads"] = lambda t=threads: store_files(work, pools[t])  # type: ignore[misc]
        stores = bench.compare("store, 512 KiB blocks", variants, unit="GB/s")
    finally:
        for tier in runs.values():
            tier.close()
        for pool in pools.values():
            pool.shutdown()
    bench.target(
        "store, 512 KiB, against one file per block",
        ratio(best(stores, "tier"), best(stores, "one file")),
        2.0,
        "min",
        "x",
    )


def _depths(bench: Bench, block_bytes: int, total: int) -> None:
    """Compare ``max_inflight: auto`` with fixed numbers, for durable stores and for loads of their blocks."""
    size = f"{block_bytes >> 10} KiB" if block_bytes < 1 << 20 else f"{block_bytes >> 20} MiB"
    work = Workload.make(bench.directory, block_bytes, total)
    runs = {depth: TierRun(work, depth, "fsync") for depth in DEPTHS}
    try:
        learn(bench, runs["auto"], size)
        names = {depth: "auto" if depth == "auto" else f"{depth} threads" for depth in DEPTHS}
        stores = bench.compare(
            f"durable stores, {size} blocks, by max_inflight",
            {names[d]: lambda d=d: timed(runs[d].store, nbytes=work.nbytes) for d in DEPTHS},  # type: ignore[misc]
            unit="GB/s",
        )
        loads = bench.compare(
            f"loads, {size} blocks, by max_inflight",
            {names[d]: lambda d=d: timed(runs[d].load, nbytes=work.nbytes) for d in DEPTHS},  # type: ignore[misc]
            unit="GB/s",
        )
    finally:
        for tier in runs.values():
            tier.close()
    for kind, stats in (("durable stores", stores), ("loads", loads)):
        fixed = max((stat for name, stat in stats.items() if name != "auto"), key=lambda stat: stat.median)
        bench.target(f"{kind}, {size}, auto against the best number", ratio(stats["auto"], fixed), 0.95, "min", "x")


def learn(bench: Bench, tier: TierRun, size: str) -> None:
    """Store and load until the finder of each direction rests, and tell the depths that it has found."""
    host = tier.tier.io
    if not isinstance(host, IoHost):
        raise TypeError(f"{type(host).__name__} finds no depth")
    for kind, work, lane in (("stores", tier.store, host.lanes.stores), ("loads", tier.load, host.lanes.loads)):
        rounds = 0
        while rounds < (1 if bench.quick else LEARNING_ROUNDS) and not lane.finder.resting:
            work()
            rounds += 1
        bench.note(f"{size}: after {rounds} rounds, auto runs {lane.finder.chosen} {kind} at once.")
