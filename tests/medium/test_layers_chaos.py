"""Fault injection: repeatable from a seed, and without any effect on a row that is read."""

from __future__ import annotations

import threading

import pytest

from tests.medium.io_fakes import make_blocks, outcome_names
from tiering.medium.block_store import Done
from tiering.testing.chaos import ChaosLayer, ChaosPlan, Fault
from tiering.testing.clock import FakeClock, until
from tiering.testing.faults import DictStore

EVERYTHING = ChaosPlan(
    puts={Fault.TEMPORARY: 0.2, Fault.PERMANENT: 0.1, Fault.OUT_OF_SPACE: 0.1, Fault.BIT_FLIP: 0.2, Fault.TORN: 0.1},
    gets={Fault.TEMPORARY: 0.2, Fault.BIT_FLIP: 0.2, Fault.TRUNCATE: 0.2},
)


def history(seed: int, order: int) -> dict[int, list[str]]:
    """Return the outcomes of 50 blocks in five rounds; ``order`` -1 reverses the order of the blocks."""
    store = ChaosLayer(DictStore(), seed=seed, plan=EVERYTHING)
    seen: dict[int, list[str]] = {}
    for _ in range(5):
        for block in make_blocks(50)[::order]:
            seen.setdefault(int(block.place), []).extend(outcome_names(store.put([block]) + store.get([block])))
    return seen


def test_the_same_seed_brings_the_same_faults_whatever_the_order() -> None:
    assert history(3, 1) == history(3, -1)
    assert history(3, 1) != history(4, 1)


def test_faults_come_about_as_often_as_the_plan_says() -> None:
    store = ChaosLayer(DictStore(), seed=5, plan=ChaosPlan(puts={Fault.TEMPORARY: 0.25}))
    store.put(make_blocks(2000))
    assert 420 < store.injected[Fault.TEMPORARY] < 580


def test_commands_come_before_chance_and_end() -> None:
    store = ChaosLayer(DictStore())
    store.inject(Fault.OUT_OF_SPACE, puts=1)
    store.inject(Fault.TEMPORARY, puts=1)
    assert outcome_names(store.put(make_blocks(3))) == ["OutOfSpaceError", "TemporaryStoreError", "DONE"]


def test_healing_ends_all_faults() -> None:
    store = ChaosLayer(DictStore(), seed=0, plan=ChaosPlan(puts={Fault.PERMANENT: 1.0}))
    store.inject(Fault.TEMPORARY, puts=5)
    store.heal()
    assert store.put(make_blocks(3)) == [Done.DONE] * 3


@pytest.mark.parametrize("fault", [Fault.BIT_FLIP, Fault.TRUNCATE, Fault.TORN, Fault.SWAP])
@pytest.mark.parametrize("variable_size", [False, True])
def test_a_damaged_write_leaves_the_row_alone(fault: Fault, variable_size: bool) -> None:
    medium = DictStore(variable_size=variable_size)
    store = ChaosLayer(medium)
    blocks = make_blocks(3)
    store.put(blocks[:2])
    before = [bytes(block.payload) for block in blocks]
    store.inject(fault, puts=1)
    (outcome,) = store.put(blocks[2:])
    assert (outcome is Done.DONE) == (fault is not Fault.TORN)
    assert [bytes(block.payload) for block in blocks] == before
    assert bytes(medium.frames.get(2, b"")) != bytes(blocks[2].header) + bytes(blocks[2].payload)


@pytest.mark.parametrize("fault", [Fault.BIT_FLIP, Fault.TRUNCATE, Fault.SWAP])
def test_a_damaged_read_says_nothing_of_it(fault: Fault) -> None:
    store = ChaosLayer(DictStore())
    store.put(make_blocks(3))
    store.inject(fault, gets=1)
    (block,) = make_blocks(3)[2:]
    original = bytes(block.header) + bytes(block.payload)
    assert store.get([block]) == [Done.DONE]
    assert bytes(block.header) + bytes(block.payload) != original


def test_a_torn_read_fails() -> None:
    store = ChaosLayer(DictStore())
    store.put(make_blocks(1))
    store.inject(Fault.TORN, gets=1)
    assert outcome_names(store.get(make_blocks(1))) == ["TemporaryStoreError"]


def test_a_hanging_call_goes_on_when_it_is_released() -> None:
    store = ChaosLayer(DictStore())
    store.inject(Fault.HANG, puts=1)
    outcomes: list[object] = []
    thread = threading.Thread(target=lambda: outcomes.extend(store.put(make_blocks(1))))
    thread.start()
    assert until(lambda: store.hanging)
    assert outcomes == []
    store.release()
    thread.join()
    assert outcomes == [Done.DONE]
    assert store.hanging == 0


def test_a_delay_sleeps_through_what_it_was_given() -> None:
    clock = FakeClock()
    store = ChaosLayer(DictStore(), plan=ChaosPlan(gets={Fault.DELAY: 1.0}, delay=0.5), sleep=clock.sleep)
    store.get(make_blocks(2))
    assert clock.slept == [0.5, 0.5]
