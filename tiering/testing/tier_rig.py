"""A test rig: rows of a primary tier, and one secondary tier that stores and loads them.

It calls the tier through :class:`tiering.secondary.contract.SecondaryTierManager`.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from tiering.api.keys import OffloadKey
from tiering.api.namespace import ModelIdentity, Namespace
from tiering.api.request import ReqContext
from tiering.api.transfer import Rows
from tiering.secondary.contract import (
    JobResult,
    SecondaryTierManager,
    StepEnd,
    TierContext,
    TierIntake,
    TransferJob,
)
from tiering.testing.clock import until
from tiering.testing.frames import random_bytes

REQUEST = ReqContext("conformance")
"""The request in whose name all calls are made."""
PATIENCE_SECONDS = 60.0
"""Seconds that every wait may take at most."""


def make_namespace(name: str, group_bytes: tuple[int, ...]) -> Namespace:
    """Return the namespace of a model called ``name``.

    Args:
        name: the model's name.
        group_bytes: bytes of a block, per KV-cache group.
    """
    return Namespace.build(ModelIdentity(name=name, weights="w1", dtype="bfloat16", layout="conformance"), group_bytes)


class TierRig:
    """Rows, a tier, and jobs between them.

    Blocks are stored from rows whose bytes depend on the key, and loaded into rows with other bytes.

    Args:
        make_tier: returns the tier for a context. Called once.
        group_bytes: bytes of a block, per KV-cache group.
        model: name of the model, which determines the namespace; default: "model-a".
        num_rows: number of rows; default: 64.
        events: events are enabled in the context; default: False.
        revision: revision of the weights in the context; default: none.
        clock: function that returns monotonic seconds, which pass by themselves; default: the real ones.
        shares_rows: the context has a descriptor of the rows; default: False.
    """

    def __init__(
        self,
        make_tier: Callable[[TierContext], SecondaryTierManager],
        *,
        group_bytes: tuple[int, ...],
        model: str = "model-a",
        num_rows: int = 64,
        events: bool = False,
        revision: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        shares_rows: bool = False,
    ) -> None:
        stride = -(-max(group_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        rows_fd = None
        self._closing: Callable[[], object] = lambda: None
        if shares_rows:
            rows_fd = os.memfd_create("kv-tiering-rig")
            self._closing = weakref.finalize(self, os.close, rows_fd)
            os.ftruncate(rows_fd, num_rows * stride)
            os.fchmod(rows_fd, 0o600)
        memory = mmap.mmap(-1 if rows_fd is None else rows_fd, num_rows * stride)
        self.rows = np.frombuffer(memory, np.uint8).reshape(num_rows, stride)
        """The rows, shape (num_rows, row bytes)."""
        self.group_bytes = group_bytes
        namespace = make_namespace(model, group_bytes)
        self.context = TierContext(
            "conformance",
            self.rows.data,
            group_bytes,
            namespace,
            enable_events=events,
            clock=clock,
            revision=revision,
            rows_fd=rows_fd,
        )
        self.tier = make_tier(self.context)
        self.intake = TierIntake() if self.tier.traits.intake is None else self.tier.traits.intake
        """The part of the tier that chooses its blocks; without one, it takes all."""
        self.results: list[JobResult] = []
        self._jobs = 0
        self._stores: dict[int, dict[int, OffloadKey]] = {}

    def open(self) -> TierRig:
        """Open the tier, and return the rig once the tier stores blocks.

        Raises:
            TimeoutError: the tier does not serve in time.
        """
        if not self.tier.open(self.context.clock() + PATIENCE_SECONDS):
            raise TimeoutError("the tier did not come into service")
        self.tier.on_new_request(REQUEST)
        return self

    def close(self) -> bool:
        """Shut the tier down, and return True if it ended in time."""
        ended = self.tier.shutdown(self.context.clock() + PATIENCE_SECONDS)
        self._closing()
        return ended

    def content(self, key: OffloadKey) -> bytes:
        """Return the content of the block of ``key``."""
        return random_bytes(self.size(key), int.from_bytes(key[:7], "big")).tobytes()

    def size(self, key: OffloadKey) -> int:
        """Return the bytes of the block of ``key``."""
        return self.group_bytes[key[-1]]

    def submit_store(self, keys: Sequence[OffloadKey], first_row: int = 0) -> int:
        """Fill rows with the blocks of ``keys``, submit a store, and return the job's id."""
        rows = np.arange(first_row, first_row + len(keys))
        for row, key in zip(rows.tolist(), keys, strict=True):
            self.rows[row, : self.size(key)] = np.frombuffer(self.content(key), np.uint8)
        self._jobs += 1
        self._stores[self._jobs] = dict(zip(rows.tolist(), keys, strict=True))
        self.tier.submit_store(self._job(keys, rows, load=False))
        return self._jobs

    def submit_load(self, keys: Sequence[OffloadKey], first_row: int = 32) -> int:
        """Wipe rows, submit a load of ``keys`` into them, and return the job's id."""
        rows = np.arange(first_row, first_row + len(keys))
        self.rows[rows] = 0xEE
        self._jobs += 1
        self.tier.submit_load(self._job(keys, rows, load=True))
        return self._jobs

    def _job(self, keys: Sequence[OffloadKey], rows: Rows, *, load: bool) -> TransferJob:
        now = self.context.clock()
        deadline = self.tier.traits.deadline(now, load=load)
        return TransferJob(self._jobs, list(keys), rows, load, REQUEST, now, deadline=deadline)

    def step(self) -> StepEnd:
        """End a step, and return the tier's state."""
        return self.tier.on_schedule_end() or StepEnd()

    def wait(self, predicate: Callable[[], object]) -> None:
        """Run steps until ``predicate()`` holds.

        Raises:
            AssertionError: a job ended without an announcement while the tier rested.
            TimeoutError: the condition does not hold in time.
        """
        end, resting_since = time.monotonic() + PATIENCE_SECONDS, None
        announced = threading.Event()
        with self.context.news.listening(announced.set):
            while True:
                announced.clear()
                heard, results = self.context.news.count, list(self.tier.get_finished())
                if results and resting_since is not None:
                    self._wait_for_announcement(resting_since)
                self.results += results
                resting_since = heard if self.step().rest else None
                if predicate():
                    return
                if time.monotonic() >= end:
                    raise TimeoutError("the condition did not hold in time")
                announced.wait(0.001)

    def _wait_for_announcement(self, before: int) -> None:
        """Wait until the tier has announced something after the announcement number ``before``."""
        if not until(lambda: self.context.news.count != before, PATIENCE_SECONDS):
            raise AssertionError("the tier rested, and did not announce that a job has ended")

    def result(self, job_id: int) -> JobResult:
        """Wait for a job and return its only result."""
        self.wait(lambda: any(result.job_id == job_id for result in self.results))
        (result,) = [result for result in self.results if result.job_id == job_id]
        return result

    def store(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Store those of ``keys`` that the tier admits, as it has credit for them, and return those stored."""
        stored: list[OffloadKey] = []
        admitted = self.intake.admit(tuple(keys), REQUEST, False)
        left = list(keys) if admitted is None else [keys[position] for position in admitted]
        while left:
            self.wait(lambda: self.intake.credit(len(left), 0.0) != 0)
            credit = self.intake.credit(len(left), 0.0)
            count = len(left) if credit is None else min(credit, len(left))
            stored += self.stored(self.submit_store(left[:count]))
            del left[:count]
        return stored

    def load(self, keys: Sequence[OffloadKey], first_row: int = 32) -> list[OffloadKey]:
        """Load ``keys``, and return those that were loaded.

        Raises:
            AssertionError: a block was loaded with other bytes than were stored.
        """
        arrived = self._succeeded(self.submit_load(keys, first_row), keys)
        for row, key in enumerate(keys, start=first_row):
            if key in arrived and self.rows[row, : self.size(key)].tobytes() != self.content(key):
                raise AssertionError(f"WRONG KV: block {key.hex()} arrived with other bytes than were stored")
        return arrived

    def stored(self, job_id: int) -> list[OffloadKey]:
        """Wait for a store, and return the keys that were stored."""
        return self._succeeded(job_id, list(self._stores[job_id].values()))

    def lookup(self, keys: Sequence[OffloadKey]) -> int:
        """Return the number of leading ``keys`` that are held, once the tier knows."""
        answers = [self.tier.lookup_prefix(keys, REQUEST)]

        def decided() -> bool:
            answers[0] = self.tier.lookup_prefix(keys, REQUEST)
            return not answers[0].undecided

        self.wait(decided)
        return answers[0].held

    def reports(self) -> Counter[int]:
        """Return the number of results of each job, by id."""
        return Counter(result.job_id for result in self.results)

    def _succeeded(self, job_id: int, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        result = self.result(job_id)
        if result.successful_keys is None:
            return list(keys) if result.success else []
        return list(result.successful_keys)
