"""Retries: the blocks that are sent again, the waits, and the number of attempts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.medium.io_fakes import make_blocks, outcome_names
from tiering.errors import CorruptBlockError, OutOfSpaceError, PermanentStoreError, TemporaryStoreError
from tiering.medium.block_store import BlockIO, Done, Outcome
from tiering.medium.layers.attempts import IoStats, RetryLayer
from tiering.secondary.options import RetryOptions
from tiering.testing.chaos import ChaosLayer, Fault
from tiering.testing.clock import FakeClock
from tiering.testing.faults import DictStore


class Scripted(DictStore):
    """A store that answers puts and gets with given outcomes, batch by batch, and records the blocks."""

    def __init__(self, *script: list[Outcome]) -> None:
        super().__init__()
        self.script = list(script)
        self.handed: list[list[BlockIO]] = []

    def put(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        self.handed.append(list(blocks))
        return self.script.pop(0)

    get = put


def retrying(
    store: DictStore | ChaosLayer,
    clock: FakeClock,
    attempts: int = 4,
    stats: IoStats | None = None,
    **options: float,
) -> RetryLayer:
    chosen = RetryOptions(attempts=attempts, **options)
    return RetryLayer(store, chosen, stats or IoStats(), clock=clock, sleep=clock.sleep, rng=random.Random(1))


@pytest.mark.parametrize("operation", ["put", "get"])
def test_only_blocks_that_failed_are_sent_again_with_the_same_frame(operation: str) -> None:
    busy = TemporaryStoreError("busy")
    store = Scripted([Done.DONE, busy, Done.DONE, busy], [Done.DONE, busy], [Done.ABSENT])
    blocks = make_blocks(4)
    outcomes = getattr(retrying(store, FakeClock()), operation)(blocks)
    assert outcomes == [Done.DONE, Done.DONE, Done.DONE, Done.ABSENT]
    assert [[block.place for block in batch] for batch in store.handed] == [[0, 1, 2, 3], [1, 3], [3]]
    assert store.handed[2][0] is blocks[3]


@pytest.mark.parametrize("error", [PermanentStoreError("no"), OutOfSpaceError("full"), CorruptBlockError("rotten")])
def test_permanent_errors_are_not_tried_again(error: PermanentStoreError) -> None:
    store = Scripted([error])
    assert retrying(store, FakeClock()).put(make_blocks(1)) == [error]
    assert len(store.handed) == 1


def test_attempts_are_counted_from_the_first() -> None:
    store = ChaosLayer(DictStore())
    store.inject(Fault.TEMPORARY, puts=10)
    stats = IoStats()
    layer = retrying(store, FakeClock(), attempts=3, stats=stats)
    assert outcome_names(layer.put(make_blocks(1))) == ["TemporaryStoreError"]
    assert store.injected[Fault.TEMPORARY] == 3
    assert stats.retries == 2


def test_waits_double_up_to_the_longest_with_jitter_below_half() -> None:
    clock = FakeClock()
    store = ChaosLayer(DictStore())
    store.inject(Fault.TEMPORARY, puts=10)
    retrying(store, clock, attempts=6, backoff=0.1, backoff_max=0.5).put(make_blocks(1))
    assert len(clock.slept) == 5
    for wait, longest in zip(clock.slept, [0.1, 0.2, 0.4, 0.5, 0.5], strict=True):
        assert longest / 2 <= wait <= longest
    assert len(set(clock.slept)) == 5


def test_no_wait_begins_that_would_end_after_the_deadline() -> None:
    clock = FakeClock()
    store = ChaosLayer(DictStore())
    store.inject(Fault.TEMPORARY, puts=10)
    deadline = clock() + 0.35
    outcomes = retrying(store, clock, attempts=10, backoff=0.1).put(make_blocks(1, deadline=deadline))
    assert outcome_names(outcomes) == ["TemporaryStoreError"]
    assert clock() < deadline
    assert 1 < store.injected[Fault.TEMPORARY] < 10


def test_nothing_is_sent_again_once_the_tier_stops() -> None:
    clock = FakeClock()
    store = ChaosLayer(DictStore())
    store.inject(Fault.TEMPORARY, puts=10)
    stopped: list[bool] = []
    layer = RetryLayer(
        store,
        RetryOptions(),
        IoStats(),
        clock=clock,
        sleep=lambda seconds: stopped.append(True),
        stopping=lambda: bool(stopped),
    )
    assert outcome_names(layer.put(make_blocks(1))) == ["TemporaryStoreError"]
    assert store.injected[Fault.TEMPORARY] == 1
