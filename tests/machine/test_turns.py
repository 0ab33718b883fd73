"""Engines take turns with their loads: one that floods a tier does not delay another's beyond a bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.machine.engines import key_of
from tiering.machine import hosted as hosted_module
from tiering.machine.counts import EngineCounts
from tiering.machine.hosted import HostedTier
from tiering.machine.messages import Kind, MessageError, Record
from tiering.machine.words import START
from tiering.runtime.pool import ThreadPool
from tiering.testing.clock import FakeClock
from tiering.testing.fake_tier import FakeTier

PART, BLOCK, FLOOD = 4, 64, 40


@dataclass(eq=False)
class FakeEngine:
    """A connection whose records are kept."""

    name: str
    first_row: int
    num_rows: int = 1000
    weights: str = START
    reset_at: float = 0.0
    generation: int = 1
    jobs: int = 0
    tier: str = "local"
    counts: EngineCounts = field(default_factory=EngineCounts)
    leaving: bool = False
    behind: bool = False
    follows: bool = False
    sent: list[Record] = field(default_factory=list)

    def send(self, record: Record) -> None:
        self.sent.append(record)

    def results(self) -> dict[int, bytes]:
        return {record.number: record.text for record in self.sent if record.kind == Kind.RESULT}


class CopiesAtOnce(ThreadPool):
    """Copies in the calling thread; none succeeds, because the fake tier notes no digests."""

    def __init__(self) -> None:
        super().__init__("kv-test-copy", 1)

    def run(self, work: Callable[[], object], refused: Callable[..., object]) -> None:
        work()


class Setup:
    """A tier of the service, and engines that load from it."""

    def __init__(self) -> None:
        self.tier = FakeTier("fake", held={key_of(number) for number in range(10_000)}, max_load_blocks=PART)
        self.clock = FakeClock()
        rows = np.zeros((4000, BLOCK), np.uint8)
        self.hosted = HostedTier(self.tier, rows, (BLOCK, BLOCK), CopiesAtOnce(), lambda: None, self.clock, START, 1)
        self.engines = [FakeEngine(f"engine-{number}", 1000 * number) for number in range(3)]
        self.hosted.engines += self.engines

    def load(self, engine: FakeEngine, number: int, blocks: Sequence[int], seconds: float = 60.0) -> None:
        rows = [PART * number + at for at in range(len(blocks))]
        self.hosted.take(engine, Record(Kind.LOAD, number, 0, seconds, b"r", [key_of(each) for each in blocks], rows))

    def flood(self, engine: FakeEngine, first: int = 0) -> None:
        for number in range(FLOOD):
            self.load(engine, number, range(first + PART * number, first + PART * (number + 1)))

    def finish_oldest(self) -> None:
        self.tier.finish(self.tier.loads[0])
        self.hosted.step()

    def drain(self) -> None:
        while self.tier.loads:
            self.finish_oldest()
        self.hosted.step()  # takes what the last copies have left


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Setup:
    monkeypatch.setattr(hosted_module, "FEW_LOADS", 2 * PART)
    monkeypatch.setattr(hosted_module, "LOAD_BYTES", 1)
    return Setup()


def test_a_load_waits_for_one_turn_of_each_other_engine(setup: Setup) -> None:
    flooding, other, third = setup.engines
    setup.flood(flooding)
    setup.flood(third, 5000)
    setup.load(other, 7, [9000])
    for _ in range(6):  # those that the tier has, and a turn of each engine
        setup.finish_oldest()
    assert other.results() == {7: b"\1"}
    assert len(flooding.results()) < 6
    setup.drain()
    assert len(flooding.results()) == len(third.results()) == FLOOD
    assert set(flooding.results().values()) == {b"\1" * PART}
    assert setup.hosted.idle


def test_turns_are_of_bytes(setup: Setup) -> None:
    """An engine with many small loads gets as many bytes as one with large ones."""
    small, large, _ = setup.engines
    for number in range(FLOOD * PART):
        setup.load(small, number, [number])
    setup.flood(large, 5000)
    while len(large.results()) < FLOOD // 2:
        setup.finish_oldest()
    assert 0.8 <= len(small.results()) / (PART * len(large.results())) <= 1.4


def test_a_block_of_a_long_queue_is_read_in_the_turn_of_a_short_one(setup: Setup) -> None:
    flooding, other, _ = setup.engines
    setup.flood(flooding)
    last = PART * FLOOD - 1
    setup.load(other, 7, [last])
    for _ in range(6):
        setup.finish_oldest()
    assert other.results() == {7: b"\1"}
    assert len(flooding.results()) < 6
    setup.drain()
    # The block was read once, for the short queue; the long one would have got a copy.
    assert flooding.results()[FLOOD - 1] == b"\1\1\1\0"
    assert setup.hosted.idle


def test_a_read_that_others_wait_for_goes_on_without_the_engine_that_leaves(setup: Setup) -> None:
    flooding, other, third = setup.engines
    setup.flood(flooding)
    setup.flood(other)  # as long a queue: waits for the reads of the first
    setup.hosted.leave(flooding)
    flooding.leaving = True
    setup.drain()
    assert len(other.results()) == FLOOD
    failed = [number for number, text in other.results().items() if text != b"\1" * PART]
    assert len(failed) <= 2  # those whose read had begun, and could not be copied
    assert flooding.jobs == other.jobs == third.jobs == 0
    assert setup.hosted.idle


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "overdue"])
def test_a_block_whose_earlier_reader_gives_up_is_read_once(setup: Setup, leaves: bool) -> None:
    """A row must not be read into after its job was reported: it holds another block by then."""
    flooding, other, _ = setup.engines
    setup.flood(flooding)
    setup.load(other, 7, [PART * FLOOD - 1], seconds=1.0)
    if leaves:
        setup.hosted.leave(other)
        other.leaving = True
    else:
        setup.clock.advance(2.0)
        setup.hosted.step()
    while setup.tier.loads:
        reading = [row for load in setup.tier.loads for row in load.block_ids.tolist()]
        assert len({*reading}) == len(reading)
        assert not {row // PART for row in reading} & flooding.results().keys()
        setup.finish_oldest()
    assert set(flooding.results().values()) == {b"\1" * PART}
    assert flooding.jobs == 0


def test_a_read_that_has_begun_goes_on_although_a_later_part_of_its_job_is_overdue(setup: Setup) -> None:
    """The part was queued for a block whose earlier reader gave up, and its row is being read into."""
    flooding, other, _ = setup.engines
    for number in range(4):
        setup.load(flooding, number, range(PART * number, PART * (number + 1)), seconds=5.0)
    setup.load(other, 7, [4 * PART - 1], seconds=1.0)
    setup.hosted.leave(other)
    other.leaving = True
    setup.finish_oldest()
    setup.finish_oldest()
    assert [load.block_ids.tolist()[0] for load in setup.tier.loads] == [2 * PART, 3 * PART]
    setup.clock.advance(6.0)
    setup.hosted.step()
    assert flooding.results().keys() == {0, 1}
    setup.drain()
    assert flooding.results()[3] == b"\1" * PART


def test_a_load_that_waits_beyond_its_deadline_ends(setup: Setup) -> None:
    flooding, other, _ = setup.engines
    setup.flood(flooding)
    setup.load(other, 7, [9000], seconds=1.0)
    setup.clock.advance(2.0)
    setup.hosted.step()
    assert other.results() == {7: b"\0"}
    assert len(setup.tier.loads) == 2
    setup.drain()
    assert setup.hosted.idle


def test_a_reset_ends_the_loads_that_wait(setup: Setup) -> None:
    flooding, other, _ = setup.engines
    setup.flood(flooding)
    setup.load(other, 7, [PART * FLOOD - 1, 0])
    setup.hosted.take(flooding, Record(Kind.RESET, text=b"revision:two"))
    assert other.results() == {7: b"\0\0"}
    assert len(flooding.results()) == FLOOD - 2
    setup.drain()
    assert flooding.jobs == other.jobs == 0
    assert setup.hosted.idle


def test_an_engine_may_have_as_many_jobs_as_rows(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long queue for a slow bucket is no broken protocol: each job has a row of its own at least."""
    monkeypatch.setattr(hosted_module, "MOST_JOBS", 4)
    engine = setup.engines[0]
    engine.num_rows = 12
    for number in range(12):
        setup.hosted.take(engine, Record(Kind.LOAD, number, 0, 60.0, b"r", [key_of(number)], [number]))
    with pytest.raises(MessageError, match="too many jobs"):
        setup.hosted.take(engine, Record(Kind.LOAD, 12, 0, 60.0, b"r", [key_of(12)], [0]))
    setup.drain()
    assert sorted(engine.results()) == list(range(12))
