"""Shared parts of the I/O tests: a primary buffer, jobs, and a host around a store."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tiering.api.namespace import Namespace
from tiering.api.request import ReqContext
from tiering.medium.block_store import BlockIO, BlockStore, Done, Outcome, Place
from tiering.medium.host import IoHost
from tiering.secondary.contract import TierContext, TransferJob
from tiering.secondary.options import BlockTierOptions, BreakerOptions, CompressionOptions, RetryOptions
from tiering.testing.clock import FakeClock, until
from tiering.testing.keys import key_of

PAGE = mmap.PAGESIZE
LOAD, STORE = True, False
NAMESPACE = Namespace("tests")


class _Options(BlockTierOptions, CompressionOptions):
    """Options of the host, which may compress."""


class Primary:
    """A page-aligned primary buffer whose rows hold random bytes."""

    def __init__(self, rows: int, size: int = PAGE, seed: int = 0) -> None:
        self.size = size
        stride = -(-size // PAGE) * PAGE
        self.rows: NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, rows * stride), np.uint8).reshape(rows, stride)
        self.rows[:] = np.random.default_rng(seed).integers(0, 256, self.rows.shape, np.uint8)

    def block(self, row: int) -> bytes:
        return self.rows[row, : self.size].tobytes()

    def context(self, clock: Callable[[], float], name: str = "t") -> TierContext:
        return TierContext(name, self.rows.data, (self.size,), NAMESPACE, clock)


def make_job(
    primary: Primary,
    load: bool,
    numbers: Sequence[int],
    *,
    rows: Sequence[int] | None = None,
    places: Sequence[Place] | None = None,
    job_id: int = 0,
    deadline: float = float("inf"),
    fingerprint: bytes = NAMESPACE.fingerprint,
) -> TransferJob:
    """Return a job on blocks ``numbers``; by default their rows and slots have the same numbers."""
    keys, at = [key_of(number) for number in numbers], list(numbers if rows is None else rows)
    job = TransferJob(job_id, keys, np.array(at, np.int64), load, ReqContext("r"), deadline=deadline)
    job.move(keys, at, list(numbers if places is None else places), [primary.size] * len(numbers))
    job.fingerprint = fingerprint
    return job


def finish(host: IoHost, jobs: int = 1) -> list[TransferJob]:
    """Return the results of the next ``jobs`` jobs."""
    results: list[TransferJob] = []

    def arrived() -> bool:
        results.extend(host.poll())
        return len(results) >= jobs

    assert until(arrived), f"only {len(results)} of {jobs} jobs ended"
    return results


@contextmanager
def running_host(
    store: BlockStore,
    primary: Primary,
    *,
    threads: int | Literal["auto"] = 2,
    clock: FakeClock | None = None,
    attempts: int = 1,
    failures: int = 8,
    compression: str = "none",
    single_units: bool = True,
    release: Callable[[], None] = lambda: None,
) -> Iterator[IoHost]:
    """A host on ``store``; at the end ``release`` is called and the host closed.

    Jobs are cut down to single blocks if threads are free for them, unless ``single_units`` is False.
    """
    clock = FakeClock() if clock is None else clock
    options = _Options(
        type="test",
        max_inflight=threads,
        retries=RetryOptions(attempts=attempts),
        breaker=BreakerOptions(failures=failures),
        compression=compression,
    )
    host = IoHost(store, options, primary.context(clock), sleep=clock.sleep)
    if single_units:
        host.least_unit_bytes = 0
    try:
        yield host
    finally:
        release()
        assert until(lambda: host.close(clock() + 1.0))


def outcome_names(outcomes: Sequence[Outcome]) -> list[str]:
    """Return outcomes as words, for comparison."""
    return [type(outcome).__name__ if isinstance(outcome, Exception) else outcome.name for outcome in outcomes]


def all_done(outcomes: Sequence[Outcome]) -> bool:
    return all(outcome is Done.DONE for outcome in outcomes)


def make_blocks(count: int, size: int = 64, deadline: float = float("inf")) -> list[BlockIO]:
    """Return blocks with buffers of their own, each filled with its number."""
    return [
        BlockIO(
            key_of(number), number, memoryview(bytearray(128)), memoryview(bytearray([number % 256] * size)), deadline
        )
        for number in range(count)
    ]
