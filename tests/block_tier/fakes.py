"""Doubles for a tier's I/O side: events happen and time passes only when a test says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tiering.api.namespace import ModelIdentity, Namespace
from tiering.errors import StoreError
from tiering.medium.block_store import BlockIO, BlockStore, Done, Outcome, Place, StoreProbe, StoreTraits
from tiering.medium.layers.attempts import IoStats
from tiering.medium.layers.breaker import Breakers
from tiering.medium.side import IoTask
from tiering.secondary.contract import TierContext, TransferJob
from tiering.secondary.options import BreakerOptions
from tiering.testing.clock import FakeClock, until

BLOCK_BYTES = 4096
NUM_ROWS = 64


class FakeStore(BlockStore):
    """A store with documents and names that records its calls.

    Attributes:
        failure: the error that every call raises; None: none.
        touched: ("put" or "get", place) of each call, in order.
    """

    traits = StoreTraits(medium="FAKE")

    def __init__(self) -> None:
        self.documents: dict[str, bytes] = {}
        self.held: set[Place] = set()
        self.failure: StoreError | None = None
        self.rounds: list[list[Place]] = []
        self.touched: list[tuple[str, Place]] = []
        self.opened = 0
        self.closed = 0

    def open(self) -> None:
        if self.failure is not None:
            raise self.failure
        self.opened += 1

    def close(self) -> None:
        self.closed += 1

    def put_one(self, block: BlockIO) -> None:
        self.touched.append(("put", block.place))
        if self.failure is not None:
            raise self.failure

    def get_one(self, block: BlockIO) -> Done:
        self.touched.append(("get", block.place))
        if self.failure is not None:
            raise self.failure
        return Done.ABSENT

    def probe(self, places: Sequence[Place]) -> StoreProbe:
        self.rounds.append(list(places))
        return StoreProbe(tuple(place in self.held for place in places))

    def list_documents(self, prefix: str) -> list[str]:
        return [name for name in self.documents if name.startswith(prefix)]

    def read_document(self, name: str) -> bytes | None:
        if self.failure is not None:
            raise self.failure
        return self.documents.get(name)

    def write_document(self, name: str, data: bytes) -> None:
        if self.failure is not None:
            raise self.failure
        self.documents[name] = data


class FakeIo:
    """An I/O side that a test drives: :meth:`finish` ends a job, :meth:`run_tasks` runs requested tasks.

    A wait runs tasks, unless ``hold`` is set, and advances the clock.
    """

    def __init__(self, store: BlockStore, clock: FakeClock, options: BreakerOptions) -> None:
        self.store = store
        self.clock = clock
        self.breakers = Breakers.build(options, name="fake", clock=clock, jitter=lambda: 1.0)
        self.stats = IoStats()
        self.jobs: list[TransferJob] = []
        self.tasks: list[IoTask] = []
        self.ran: list[IoTask] = []
        self.hold = False
        self.load_depth = self.store_depth = 8
        self.hanging_stores = 0
        self.busy_bytes = 16 * BLOCK_BYTES
        self._ended: list[TransferJob] = []
        self._done: list[tuple[IoTask, Any, BaseException | None]] = []

    def submit(self, job: TransferJob) -> None:
        self.jobs.append(job)

    def start(self, deadline: float, *, lookups: bool) -> None:
        """Do nothing: there are no threads."""

    def run(self, task: IoTask) -> None:
        self.ran.append(task)
        self.tasks.append(task)

    def finish(self, job_id: int, outcomes: Sequence[Outcome] | None = None) -> TransferJob:
        """End a job with ``outcomes``; default: every block is done."""
        (job,) = [job for job in self.jobs if job.job_id == job_id]
        self.jobs.remove(job)
        job.outcomes = list(outcomes or [Done.DONE] * len(job.moved))
        self._ended.append(job)
        return job

    def finish_all(self) -> None:
        for job in list(self.jobs):
            self.finish(job.job_id)

    def run_tasks(self, *names: str) -> None:
        """Run the waiting tasks, or only those called ``names``."""
        chosen = [task for task in self.tasks if not names or task.name in names]
        self.tasks = [task for task in self.tasks if task not in chosen]
        for task in chosen:
            try:
                self._done.append((task, task.run(), None))
            except StoreError as error:
                self._done.append((task, None, error))

    def poll(self) -> Sequence[TransferJob]:
        done, self._done = self._done, []
        for task, result, error in done:
            task.on_done(result, error)
        ended, self._ended = self._ended, []
        return ended

    def wait(self, timeout: float) -> bool:
        if not self.hold:
            self.run_tasks()
        self.clock.advance(timeout)
        return bool(self._ended or self._done)

    def drop_waiting(self) -> None:
        """Keep the jobs: a test decides how each of them ends."""

    def drain(self, deadline: float) -> bool:
        if not self.hold:
            self.run_tasks()
        return self._pass_until(deadline)

    def close(self, deadline: float) -> bool:
        return self._pass_until(deadline)

    def join(self) -> None:
        """Wait until a test has ended all jobs."""
        until(lambda: not self.jobs)

    def _pass_until(self, deadline: float) -> bool:
        if self.jobs:
            self.clock.advance(max(deadline - self.clock(), 0.0))
        return not self.jobs


def make_namespace(name: str = "demo", group_bytes: tuple[int, ...] = (BLOCK_BYTES,)) -> Namespace:
    return Namespace.build(ModelIdentity(name=name, weights="w1", dtype="bfloat16", layout="test"), group_bytes)


def make_context(
    clock: FakeClock, *, group_bytes: tuple[int, ...] = (BLOCK_BYTES,), events: bool = True
) -> TierContext:
    """Return a tier's context with an ordinary array as the primary buffer."""
    view = np.zeros((NUM_ROWS, max(group_bytes)), np.uint8).data
    return TierContext("t", view, group_bytes, make_namespace(group_bytes=group_bytes), clock, enable_events=events)
