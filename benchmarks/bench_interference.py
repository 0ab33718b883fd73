"""Cost of a busy local tier to the scheduler, beside the same I/O in a process of its own.

The step is that of ``control_plane`` (100,000 rows, always evicting) on the main thread, in wall time. Beside it, a
local tier moves verified blocks of 2 MiB in jobs of 16, half of them loads and half of them stores. The tier works
either in the same process, where it is fed between the steps and outside the measured time, or in a child process with
rows and a directory of its own. A tier in the same process needs the interpreter lock and moves fewer bytes in the same
time. So the child is measured both flat out and held to the rate that the tier in the process reached last. For the
target, the time that the child adds to a step is scaled to the rate of the tier in the process.

There are two engines. The steps of the first follow each other without a pause: its thread wants the interpreter all
the time, which is the hardest case and no real engine. The second computes 5 ms between steps without the interpreter,
as an engine does while it waits for its accelerator. "Blocked steps" are the steps per thousand in which the
scheduler's thread went to sleep. Only the interpreter lock makes this thread sleep, so the number hardly depends on the
load of the machine, unlike wall times.
"""

from __future__ import annotations

import gc
import itertools
import mmap
import multiprocessing
import os
import resource
import secrets
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from benchmarks.bench_control_plane import Subject
from benchmarks.harness import Bench, Sample, open_tier
from tiering.api.keys import OffloadKey
from tiering.api.namespace import ModelIdentity, Namespace
from tiering.api.request import ReqContext
from tiering.secondary.contract import TierContext, TransferJob
from tiers.local.local_options import LocalOptions
from tiers.local.tier import LocalTier

BLOCK_BYTES = 2 << 20
JOB_BLOCKS = 16
JOBS_AHEAD = 4
"""Jobs of each kind that are kept in flight."""

COMPUTE_SECONDS = 0.005
PIECE_STEPS = 50
ROUNDS = 15
REQUEST = ReqContext("flow")


class Flow:
    """A local tier that works flat out: as many jobs of stores as jobs of loads of stored blocks."""

    def __init__(self, directory: Path) -> None:
        rows = JOBS_AHEAD * JOB_BLOCKS
        data = np.frombuffer(mmap.mmap(-1, 2 * rows * BLOCK_BYTES), np.uint8).reshape(2 * rows, BLOCK_BYTES)
        data[:rows] = np.random.default_rng(0).integers(0, 256, (rows, BLOCK_BYTES), np.uint8)
        data[rows:] = 1
        options = LocalOptions(type="local", path=str(directory), capacity=2 << 30, deadline=600)
        model = ModelIdentity(name="bench", weights="0", dtype="int8", layout="bench")
        context = TierContext("local", data.data, (BLOCK_BYTES,), Namespace.build(model, (BLOCK_BYTES,)))
        self.tier = LocalTier(context, options)
        open_tier(self.tier, 30)
        self._source = np.arange(JOB_BLOCKS)
        self._free = [rows + np.arange(start, start + JOB_BLOCKS) for start in range(0, rows, JOB_BLOCKS)]
        self._numbers = itertools.count()
        self._loads: dict[int, np.ndarray] = {}
        self._stores: dict[int, list[OffloadKey]] = {}
        self._held: deque[list[OffloadKey]] = deque(maxlen=2 * JOBS_AHEAD)
        self._rate = 0.0
        self._began = (0.0, 0)
        # Until every slot was written once: what is measured is a tier that runs, not one that begins.
        while self.tier.index.growing or self.tier.index.free:
            self._pump_and_wait()
        self.drain()

    @property
    def moved(self) -> int:
        """Number of bytes read and written since the start."""
        stats = self.tier.io.stats
        return int(stats.read_bytes + stats.written_bytes)

    def begin(self, rate: float = 0.0) -> None:
        """Begin a measurement with at most ``rate`` bytes/s; 0 means no limit."""
        self._rate = rate
        self._began = (time.monotonic(), self.moved)

    def pump(self) -> None:
        """Collect finished jobs and submit the next ones, as a scheduler does once per step."""
        for result in self.tier.get_finished():
            if not result.success:
                raise RuntimeError(f"job {result.job_id} failed")
            if (keys := self._stores.pop(result.job_id, None)) is not None:
                self._held.append(keys)
            else:
                self._free.append(self._loads.pop(result.job_id))
        while len(self._stores) < JOBS_AHEAD and (self._free or not self._held) and not self._ahead():
            if self.tier.index.places_ready < JOB_BLOCKS:
                break  # A segment is being prepared.
            self._submit_pair()
        self.tier.on_schedule_end()

    def rest(self) -> None:
        """Call :meth:`pump` with nothing to do, so that all steps find the same processor caches."""
        self.tier.get_finished()
        self.tier.on_schedule_end()

    def drain(self) -> None:
        """Wait until all jobs have ended."""
        while not self.tier.idle:
            self._rate = 1e-9
            self.tier.io.wait(0.05)
            self.pump()
        self._rate = 0.0

    def _ahead(self) -> bool:
        if not self._rate:
            return False
        began, moved = self._began
        in_flight = (len(self._stores) + len(self._loads)) * JOB_BLOCKS * BLOCK_BYTES
        return self.moved + in_flight - moved > self._rate * (time.monotonic() - began)

    def _submit_pair(self) -> None:
        keys = [secrets.token_bytes(32) + b"\0\0\0\0" for _ in range(JOB_BLOCKS)]
        number = next(self._numbers)
        self._stores[number] = keys
        self.tier.submit_store(TransferJob(number, keys, self._source, False, REQUEST))
        if self._held:
            number = next(self._numbers)
            rows = self._loads[number] = self._free.pop()
            self.tier.submit_load(TransferJob(number, self._held[number % len(self._held)], rows, True, REQUEST))

    def _pump_and_wait(self) -> None:
        self.pump()
        self.tier.io.wait(0.02)

    def run_until(self, ended: Callable[[], bool]) -> None:
        while not ended():
            self._pump_and_wait()

    def close(self) -> None:
        self.drain()
        self.tier.shutdown(time.monotonic() + 30)


def _child(directory: Path, orders: Connection) -> None:
    """Run a process that owns a tier.

    Its orders come through a pipe. A rate begins a measurement, and is confirmed once the measurement runs. None ends
    the measurement, and is answered with bytes/s.
    """
    flow = Flow(directory)
    orders.send(None)
    while (rate := orders.recv()) is not None:
        flow.begin(rate)
        flow.run_until(lambda moved=flow.moved: flow.moved > moved)  # type: ignore[misc]
        flow.begin(rate)
        begun, moved = time.monotonic(), flow.moved
        orders.send(None)
        flow.run_until(orders.poll)
        orders.recv()
        orders.send((flow.moved - moved) / (time.monotonic() - begun))
        flow.drain()
        orders.send(None)
    flow.close()


class Child:
    """The parent's side of the child process."""

    def __init__(self, directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._orders, theirs = context.Pipe()
        self._process = context.Process(target=_child, args=(directory, theirs), daemon=True)
        self._process.start()
        self._orders.recv()

    @contextmanager
    def flowing(self, rate: float, reached: list[float]) -> Iterator[None]:
        """Keep the child's tier at work while the context lasts, and append its bytes/s to ``reached``."""
        self._orders.send(rate)
        self._orders.recv()
        try:
            yield
        finally:
            self._orders.send(None)
            reached.append(self._orders.recv())
            self._orders.recv()

    def close(self) -> None:
        self._orders.send(None)
        self._process.join()


@dataclass(slots=True)
class Engine:
    """Steps of an engine: the control plane, the feeding of the tier, computation without the interpreter.

    Only the control plane is measured.
    """

    subject: Subject
    steps: int
    compute: Callable[[], object]

    def run(self, between: Callable[[], object]) -> Sample:
        """Run the steps, and return wall µs per step, CPU, percentiles, and the time of the computation."""
        step, compute, clock, cpu_clock = self.subject.manager_step, self.compute, time.perf_counter, time.thread_time
        walls: list[float] = []
        cpu = computing = 0.0
        blocked = 0
        for new, hit, missed in self._work():
            sleeps = _sleeps()
            cpu -= cpu_clock()
            begun = clock()
            step(new, hit, missed)
            ended = clock()
            cpu += cpu_clock()
            blocked += _sleeps() > sleeps
            walls.append(ended - begun)
            between()
            begun = clock()
            compute()
            computing += clock() - begun
        scale = 1e6 / len(walls)
        extra = {
            "CPU µs/step": cpu * scale,
            "p50 µs": float(np.percentile(walls, 50)) * 1e6,
            "p99 µs": float(np.percentile(walls, 99)) * 1e6,
            "blocked steps, ‰": blocked / len(walls) * 1e3,
            "compute, ms": computing * scale / 1e3,
        }
        return Sample(sum(walls) * scale, extra=extra)

    def _work(self) -> Iterator[tuple[list[OffloadKey], list[OffloadKey], list[OffloadKey]]]:
        """Yield the keys of all steps in pieces, because a block must not be evicted before its hit."""
        for start in range(0, self.steps, PIECE_STEPS):
            yield from self.subject.work(min(PIECE_STEPS, self.steps - start))


def _sleeps() -> int:
    """Return the number of times that the calling thread has gone to sleep."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _nothing() -> None:
    pass


def compute_for(seconds: float) -> Callable[[], object]:
    """Return a function that computes for about ``seconds`` on one core without the interpreter lock."""
    torch.set_num_threads(1)
    size = 128
    while True:
        a, out = torch.rand(size, size), torch.empty(size, size)
        times = []
        for _ in range(5):
            begun = time.perf_counter()
            torch.mm(a, a, out=out)
            times.append(time.perf_counter() - begun)
        if min(times) >= seconds:
            return lambda: torch.mm(a, a, out=out)
        size += max(16, size // 16)


def _measure(bench: Bench, title: str, engine: Engine, flow: Flow, child: Child) -> None:
    rates = [0.0]
    """Rate that the tier in this process reached last, in bytes/s."""

    taken: dict[str, list[tuple[float, float]]] = {"alone": [], "inside": [], "same": [], "flat": []}
    """µs per step and GB/s, run by run."""

    def with_rate(variant: str, sample: Sample, rate: float) -> Sample:
        taken[variant].append((sample.value, rate / 1e9))
        return Sample(sample.value, extra={**sample.extra, "tier GB/s": rate / 1e9})

    def alone() -> Sample:
        return with_rate("alone", engine.run(flow.rest), 0.0)

    def inside() -> Sample:
        flow.begin()
        flow.run_until(lambda moved=flow.moved: flow.moved > moved)  # type: ignore[misc]
        begun, moved = time.monotonic(), flow.moved
        sample = engine.run(flow.pump)
        rates[0] = (flow.moved - moved) / (time.monotonic() - begun)
        flow.drain()
        return with_rate("inside", sample, rates[0])

    def beside(variant: str, rate: float) -> Sample:
        reached: list[float] = []
        with child.flowing(rate, reached):
            sample = engine.run(flow.rest)
        return with_rate(variant, sample, reached[0])

    bench.compare(
        title,
        {
            "no tier at work": alone,
            "tier in the process": inside,
            "tier in a child, same rate": lambda: beside("same", rates[0]),
            "tier in a child, flat out": lambda: beside("flat", 0.0),
        },
        repeats=ROUNDS,
        unit="wall µs/step",
    )
    rounds = 1 if bench.quick else ROUNDS
    ratios = [
        ours / (none + (theirs - none) * our_rate / their_rate)
        for (none, _), (ours, our_rate), (theirs, their_rate) in zip(
            taken["alone"][-rounds:], taken["inside"][-rounds:], taken["same"][-rounds:], strict=True
        )
    ]
    bench.target(f"{title}: step against a child that does the same", statistics.median(ratios), 1.10, "max", "x")


def disk_bytes(quick: bool) -> int:
    """Return the most bytes that its files take."""
    return 5 << 30


def run(bench: Bench) -> None:
    load = os.getloadavg()[0]
    subject = Subject(10_000 if bench.quick else 100_000)
    gc.freeze()
    flow = Flow(bench.directory / "ours")
    child = Child(bench.directory / "child")
    try:
        _measure(bench, "steps without a pause", Engine(subject, 100 if bench.quick else 2000, _nothing), flow, child)
        _measure(
            bench,
            "5 ms of computing between steps",
            Engine(subject, 20 if bench.quick else 150, compute_for(COMPUTE_SECONDS)),
            flow,
            child,
        )
    finally:
        flow.close()
        child.close()
        gc.unfreeze()
    bench.note(
        f"Load average before the run: {load:.1f} on {len(os.sched_getaffinity(0))} cores; "
        "wall times mean little where it is above zero."
    )
