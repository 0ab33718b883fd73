"""A primary buffer and a secondary tier around it, for tests at the level of :class:`tiering.secondary.contract.SecondaryTierManager`."""

from __future__ import annotations

import mmap
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from tiering.api.keys import OffloadKey
from tiering.api.namespace import ModelIdentity, Namespace
from tiering.api.request import ReqContext
from tiering.secondary.contract import JobResult, SecondaryTierManager, TierContext, TransferJob
from tiering.testing.frames import random_bytes

REQUEST = ReqContext("conformance")
PATIENCE_SECONDS = 20.0


def make_namespace(name: str, group_bytes: tuple[int, ...]) -> Namespace:
    """The namespace of a model called ``name``."""
    return Namespace.build(ModelIdentity(name=name, weights="w1", dtype="bfloat16", layout="conformance"), group_bytes)


class TierRig:
    """Rows, a tier, and jobs between them.

    ``make_tier(context)`` is called once.  Blocks are stored from rows that hold bytes made of their keys, and loaded
    into rows that hold something else.
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
    ) -> None:
        stride = -(-max(group_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.rows = np.frombuffer(mmap.mmap(-1, num_rows * stride), np.uint8).reshape(num_rows, stride)
        self.group_bytes = group_bytes
        namespace = make_namespace(model, group_bytes)
        self.context = TierContext(
            "conformance", self.rows.data, group_bytes, namespace, enable_events=events, revision=revision
        )
        self.tier = make_tier(self.context)
        self.results: list[JobResult] = []
        self._jobs = 0

    def open(self) -> TierRig:
        """Open the tier and wait until it stores blocks."""
        if not self.tier.open(time.monotonic() + PATIENCE_SECONDS):
            raise TimeoutError("the tier did not come into service")
        self.tier.on_new_request(REQUEST)
        return self

    def close(self) -> bool:
        """Shut the tier down."""
        return self.tier.shutdown(time.monotonic() + PATIENCE_SECONDS)

    def content(self, key: OffloadKey) -> bytes:
        """What the block of ``key`` contains."""
        return random_bytes(self.size(key), int.from_bytes(key[:7], "big")).tobytes()

    def size(self, key: OffloadKey) -> int:
        """Bytes of the block of ``key``."""
        return self.group_bytes[key[-1]]

    # ------------------------------------------------------------------------------------------------------------- jobs

    def submit_store(self, keys: Sequence[OffloadKey], first_row: int = 0) -> int:
        """Fill rows with the blocks of ``keys`` and submit them; returns the job's id."""
        rows = np.arange(first_row, first_row + len(keys))
        for row, key in zip(rows.tolist(), keys, strict=True):
            self.rows[row, : self.size(key)] = np.frombuffer(self.content(key), np.uint8)
        self._jobs += 1
        self.tier.submit_store(TransferJob(self._jobs, list(keys), rows, False, REQUEST))
        return self._jobs

    def submit_load(self, keys: Sequence[OffloadKey], first_row: int = 32) -> int:
        """Wipe rows and submit a load of ``keys`` into them; returns the job's id."""
        rows = np.arange(first_row, first_row + len(keys))
        self.rows[rows] = 0xEE
        self._jobs += 1
        self.tier.submit_load(TransferJob(self._jobs, list(keys), rows, True, REQUEST))
        return self._jobs

    def wait(self, predicate: Callable[[], object]) -> None:
        """Run steps until ``predicate()`` holds.  Raises :class:`TimeoutError`."""
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            self.results += self.tier.get_finished()
            self.tier.on_schedule_end()
            if predicate():
                return
            if time.monotonic() >= end:
                raise TimeoutError("the tier did not get there in time")
            time.sleep(0.001)

    def result(self, job_id: int) -> JobResult:
        """Wait for a job and return its only result."""
        self.wait(lambda: any(result.job_id == job_id for result in self.results))
        (result,) = [result for result in self.results if result.job_id == job_id]
        return result

    def store(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Store ``keys``; those that were."""
        return self._succeeded(self.submit_store(keys), keys)

    def load(self, keys: Sequence[OffloadKey], first_row: int = 32) -> list[OffloadKey]:
        """Load ``keys``; those that arrived.  Raises :class:`AssertionError` if one of them arrived with other bytes."""
        arrived = self._succeeded(self.submit_load(keys, first_row), keys)
        for row, key in enumerate(keys, start=first_row):
            if key in arrived and self.rows[row, : self.size(key)].tobytes() != self.content(key):
                raise AssertionError(f"WRONG KV: block {key.hex()} arrived with other bytes than were stored")
        return arrived

    def lookup(self, keys: Sequence[OffloadKey]) -> int:
        """How many leading ``keys`` are held, once the tier knows."""
        answers = [self.tier.lookup_prefix(keys, REQUEST)]

        def decided() -> bool:
            answers[0] = self.tier.lookup_prefix(keys, REQUEST)
            return not answers[0].undecided

        self.wait(decided)
        return answers[0].held

    def reports(self) -> Counter[int]:
        """How often each job was reported."""
        return Counter(result.job_id for result in self.results)

    def _succeeded(self, job_id: int, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        result = self.result(job_id)
        if result.successful_keys is None:
            return list(keys) if result.success else []
        return list(result.successful_keys)
