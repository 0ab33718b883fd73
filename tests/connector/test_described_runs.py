"""Described runs in the documents of a tier: when they are written, and how they come back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import pytest

from tests.connector.test_run_codec import make_run, words_of
from tiering.api.descriptions import Described, Description, TierDescriptions
from tiering.connector import described_runs
from tiering.connector.described_runs import (
    GATHER_SECONDS,
    RUNS_PER_STEP,
    RUNS_PER_WRITE,
    WRITE_SECONDS,
    DescribedRuns,
)
from tiering.connector.run_codec import packed_size
from tiering.connector.snapshots import Run
from tiering.testing.clock import FakeClock


class Documents(TierDescriptions):
    """A tier that has its documents in memory.

    Attributes:
        content: number and content of each document, by slot.
        known: False while the documents are not read.
    """

    def __init__(self, slots: int = 4) -> None:
        self.slots, self.tier = slots, "disk"
        self.content: dict[int, tuple[int, bytes]] = {}
        self.known = True
        self.busy = False
        self.serves = True

    @property
    def writing(self) -> bool:
        return self.busy

    def write(self, documents: Sequence[Description]) -> bool:
        if self.serves:
            self.content |= {slot: (number, content()) for slot, number, content in documents}
        return self.serves

    def gather(self, read: Callable[[bytes], Any]) -> Sequence[Described[Any]] | None:
        if not self.known:
            return None
        return [Described(slot, number, read(content)) for slot, (number, content) in self.content.items()]


class Engine:
    """One start of an engine on the documents.

    Attributes:
        restored: runs that came back, in their order.
    """

    def __init__(self, documents: Documents) -> None:
        self.clock = FakeClock()
        self.restored: list[Run] = []
        self.runs = DescribedRuns(documents, self._restore, self.clock)

    def _restore(self, run: Run) -> Iterable[Run]:
        run.live = len(run.keys)
        run.lasting = (1 << run.live) - 1
        self.restored.append(run)
        return [run]

    def start(self) -> Engine:
        while self.runs.steps_idle:
            self.runs.step()
        return self

    def store(self, *runs: Run) -> None:
        for run in runs:
            run.live = len(run.keys)
            run.lasting = (1 << run.live) - 1
            self.runs.add(run)

    def later(self) -> None:
        self.clock.advance(WRITE_SECONDS)
        self.runs.step()


def firsts(runs: Iterable[Run]) -> list[int]:
    return [run.token_ids[0] for run in runs]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of two runs."""
    size = packed_size(make_run())
    monkeypatch.setattr(described_runs, "DOCUMENT_BYTES", 2 * size)


def test_the_next_engine_gets_back_what_is_in_use() -> None:
    first = Engine(documents := Documents()).start()
    kept, dropped = make_run(1), make_run(20)
    first.store(kept, dropped)
    dropped.live = 0
    first.later()
    (found,) = Engine(documents).start().restored
    assert words_of(found) == words_of(kept)


def test_runs_are_written_again_and_again_but_not_more_often_than_every_half_minute() -> None:
    engine = Engine(documents := Documents()).start()
    runs = [make_run(number) for number in (1, 20, 40)]
    engine.store(runs[0])
    engine.runs.step()
    engine.store(runs[1])
    engine.clock.advance(WRITE_SECONDS / 2)
    engine.runs.step()
    assert firsts(Engine(documents).start().restored) == [1]
    engine.later()
    engine.store(runs[2])
    engine.runs.write()  # the end of the engine
    assert sorted(firsts(Engine(documents).start().restored)) == [1, 20, 40]
    assert documents.content.keys() == {0}


def test_nothing_is_written_before_the_documents_are_read_or_while_the_tier_does_not_take_it() -> None:
    engine = Engine(documents := Documents())
    documents.known = False
    run = make_run(1)
    engine.store(run)
    engine.runs.step()
    engine.runs.write()
    assert not documents.content
    documents.known, documents.serves = True, False
    engine.start().later()
    documents.serves, documents.busy = True, True
    engine.later()
    assert not documents.content
    documents.busy = False
    engine.later()
    assert firsts(Engine(documents).start().restored) == [1]


@pytest.mark.usefixtures("small")
def test_a_full_document_is_followed_by_the_next_one_and_the_latest_comes_back_first() -> None:
    engine = Engine(documents := Documents(slots=3)).start()
    runs = [make_run(10 * number) for number in range(1, 6)]
    engine.store(*runs)
    engine.later()
    assert documents.content.keys() == {0, 1, 2}
    assert firsts(Engine(documents).start().restored) == [50, 40, 30, 20, 10]


@pytest.mark.usefixtures("small")
def test_what_a_replaced_document_described_is_written_again_if_it_is_in_use() -> None:
    engine = Engine(documents := Documents(slots=3)).start()
    lasting, kept = make_run(1), list[Run]()
    engine.store(lasting)
    for number in range(2, 25):
        for run in kept:
            run.live = 0
        kept.append(make_run(4 * number))
        engine.store(kept[-1])
        engine.later()
    assert set(firsts(Engine(documents).start().restored)) == {1, 4 * 24}


@pytest.mark.usefixtures("small")
def test_beyond_all_documents_the_oldest_runs_are_left_out() -> None:
    engine = Engine(documents := Documents(slots=2)).start()
    runs = [make_run(4 * number) for number in range(1, 30)]
    for run in runs:
        engine.store(run)
        engine.later()
    found = firsts(Engine(documents).start().restored)
    assert runs[-1].token_ids[0] in found
    assert 2 <= len(set(found)) <= 4
    assert documents.content.keys() == {0, 1}


@pytest.mark.usefixtures("small")
def test_documents_are_used_in_turn_also_across_starts() -> None:
    documents, number, kept = Documents(slots=3), count(1), list[Run]()
    for _ in range(6):
        engine = Engine(documents).start()
        kept.append(make_run(8 * next(number)))
        engine.store(kept[-1])
        engine.runs.write()
    numbers = sorted((number, slot) for slot, (number, _) in documents.content.items())
    assert [slot for _, slot in numbers] == [0, 1, 2]
    assert firsts(Engine(documents).start().restored)[0] == 48


def test_a_step_restores_few_runs_and_an_idle_engine_steps_until_all_are() -> None:
    engine = Engine(documents := Documents()).start()
    runs = [make_run(number) for number in range(1, 100, 10)]
    engine.store(*runs)
    engine.later()
    second = Engine(documents)
    second.runs.step()
    assert second.restored == []
    second.runs.step()
    assert len(second.restored) == RUNS_PER_STEP
    assert second.runs.steps_idle
    second.start()
    assert len(second.restored) == len(runs)


def test_only_the_blocks_of_a_run_that_the_tier_has_announced_are_written() -> None:
    engine = Engine(documents := Documents()).start()
    run = make_run(1, blocks=4)
    run.live = 4
    run.lasting = 0b101
    engine.runs.add(run)
    engine.later()
    assert firsts(Engine(documents).start().restored) == [1 + 2 * 8, 1]
    run.lasting |= 0b010
    engine.runs.add(run)
    engine.later()
    (found,) = Engine(documents).start().restored
    assert list(found.token_ids) == list(run.token_ids[: 3 * 8])


def test_many_new_runs_are_written_a_few_at_a_time_and_all_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(described_runs, "RUNS_PER_WRITE", 2)
    engine = Engine(documents := Documents()).start()
    runs = [make_run(30 * number) for number in range(1, 6)]
    engine.store(*runs)
    engine.later()
    assert firsts(Engine(documents).start().restored) == [60, 30]
    engine.runs.step()
    assert firsts(Engine(documents).start().restored) == [120, 90, 60, 30]
    engine.runs.step()
    engine.store(make_run(200), *(more := [make_run(7 * number) for number in range(1, 6)]))
    engine.runs.step()
    assert len(Engine(documents).start().restored) == 5, "the next writing is due half a minute later"
    engine.runs.write()
    assert len(Engine(documents).start().restored) == 5 + len(more)


@pytest.mark.parametrize("known", [False, True], ids=["not read", "read"])
def test_runs_that_describe_nothing_any_more_are_forgotten_though_the_tier_takes_no_documents(known: bool) -> None:
    documents = Documents()
    documents.serves, documents.known = False, known
    engine, lasting = Engine(documents), make_run(1)
    engine.store(lasting)
    for _ in range(10 * RUNS_PER_WRITE):
        engine.store(run := make_run(2))
        run.live = 0
    engine.runs.step()
    assert engine.runs.waiting <= 2 * RUNS_PER_WRITE
    documents.serves, documents.known = True, True
    engine.start().later()
    assert firsts(Engine(documents).start().restored) == [1]


def test_a_document_with_a_number_that_no_engine_gives_is_left_out() -> None:
    engine = Engine(documents := Documents()).start()
    engine.store(make_run(1))
    engine.later()
    documents.content[0] = (1 << 63, documents.content[0][1])
    assert Engine(documents).start().restored == []


def test_an_idle_engine_does_not_wait_for_ever_for_a_tier() -> None:
    documents = Documents()
    documents.known = False
    engine = Engine(documents)
    engine.runs.step()
    assert engine.runs.steps_idle
    engine.clock.advance(GATHER_SECONDS)
    assert not engine.runs.steps_idle


def test_a_run_that_describes_nothing_any_more_does_not_stay_in_memory() -> None:
    from weakref import ref

    engine = Engine(Documents()).start()
    run = make_run(1)
    engine.store(run)
    engine.later()
    held = ref(run)
    run.live = 0
    del run
    assert held() is None
