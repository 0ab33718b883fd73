"""The circuit breaker: when it opens, what it lets through, and that it closes again."""

from __future__ import annotations

import pytest

from tests.secondary.io_fakes import make_blocks, outcome_names
from tiering.block_store import BlockIO, Done, Outcome, Place, StoreProbe
from tiering.errors import CorruptBlockError, OutOfSpaceError, OverdueError, PermanentStoreError, TemporaryStoreError
from tiering.options import BreakerOptions
from tiering.secondary.layers.breaker import Breaker, BreakerLayer, BreakerState
from tiering.secondary.layers.chaos import Fault
from tiering.testing.clock import FakeClock
from tiering.testing.faults import DictStore, FaultyStore

OPTIONS = BreakerOptions(failures=3, probe_after=1.0, probe_max=5.0)


def new_breaker(clock: FakeClock) -> Breaker:
    return Breaker(OPTIONS, name="t", clock=clock)


def opened(clock: FakeClock) -> Breaker:
    breaker = new_breaker(clock)
    for _ in range(3):
        breaker.record_failure("down")
    return breaker


def test_it_opens_after_so_many_failures_in_a_row() -> None:
    breaker = new_breaker(FakeClock())
    breaker.record_failure("down")
    breaker.record_failure("down")
    breaker.record_success()
    breaker.record_failure("down")
    breaker.record_failure("down")
    assert breaker.state is BreakerState.CLOSED
    breaker.record_failure("down")
    assert breaker.state is BreakerState.OPEN
    assert (breaker.allows(), breaker.admit(), breaker.opened) == (False, False, 1)


def test_one_probe_is_let_through_and_its_success_closes() -> None:
    clock = FakeClock()
    breaker = opened(clock)
    clock.advance(1.0)
    assert breaker.allows()
    assert [breaker.admit(), breaker.admit(), breaker.allows()] == [True, False, False]
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.record_success()
    assert (breaker.state, breaker.allows()) == (BreakerState.CLOSED, True)


def test_a_failed_probe_doubles_the_wait_up_to_the_longest() -> None:
    clock = FakeClock()
    breaker = opened(clock)
    for wait in (1.0, 2.0, 4.0, 5.0, 5.0):
        clock.advance(wait - 0.01)
        assert not breaker.admit()
        clock.advance(0.01)
        assert breaker.admit()
        breaker.record_failure("still down")
    assert breaker.opened == 1


def test_closing_forgets_the_doubled_waits() -> None:
    clock = FakeClock()
    breaker = opened(clock)
    clock.advance(1.0)
    breaker.admit()
    breaker.record_failure("still down")
    clock.advance(2.0)
    breaker.admit()
    breaker.record_success()
    for _ in range(3):
        breaker.record_failure("down again")
    clock.advance(1.0)
    assert breaker.admit()
    assert breaker.opened == 2


def test_a_probe_that_never_reports_does_not_keep_it_open_for_ever() -> None:
    clock = FakeClock()
    breaker = opened(clock)
    clock.advance(1.0)
    assert breaker.admit()
    clock.advance(1.0)
    assert breaker.allows()
    assert breaker.admit()
    breaker.record_success()
    assert breaker.state is BreakerState.CLOSED


def test_failures_that_come_late_do_not_lengthen_the_wait() -> None:
    clock = FakeClock()
    breaker = opened(clock)
    for _ in range(10):
        breaker.record_failure("late")
    clock.advance(1.0)
    assert breaker.admit()


def test_a_late_success_makes_a_probe_due_at_once() -> None:
    breaker = opened(FakeClock())
    breaker.record_success()
    assert breaker.state is BreakerState.OPEN
    assert breaker.allows()


def test_it_can_be_opened_by_hand_and_recovers_the_same_way() -> None:
    clock = FakeClock()
    breaker = new_breaker(clock)
    breaker.trip("too many rows held")
    assert (breaker.state, breaker.allows(), breaker.opened) == (BreakerState.OPEN, False, 1)
    clock.advance(1.0)
    assert breaker.admit()
    breaker.record_success()
    assert breaker.state is BreakerState.CLOSED


class _Answers(DictStore):
    """Answers each get with one given outcome."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome

    def get_one(self, block: BlockIO) -> Done:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (Done.ABSENT, BreakerState.CLOSED),
        (CorruptBlockError("rotten"), BreakerState.CLOSED),
        (OutOfSpaceError("full"), BreakerState.CLOSED),
        (OverdueError("late"), BreakerState.CLOSED),
        (TemporaryStoreError("reset"), BreakerState.OPEN),
        (PermanentStoreError("EIO"), BreakerState.OPEN),
    ],
)
def test_only_failures_of_the_medium_open_it(outcome: Outcome, state: BreakerState) -> None:
    breaker = new_breaker(FakeClock())
    layer = BreakerLayer(_Answers(outcome), breaker)
    for _ in range(5):
        layer.get(make_blocks(2))
    assert breaker.state is state


def test_a_batch_with_one_answer_is_a_success() -> None:
    breaker = new_breaker(FakeClock())
    store = FaultyStore()
    layer = BreakerLayer(store, breaker)
    for _ in range(5):
        store.inject(Fault.PERMANENT, puts=3)
        assert outcome_names(layer.put(make_blocks(4))) == ["PermanentStoreError"] * 3 + ["DONE"]
    assert breaker.state is BreakerState.CLOSED


def test_an_open_breaker_keeps_everything_from_the_medium() -> None:
    breaker, store = new_breaker(FakeClock()), DictStore()
    layer = BreakerLayer(store, breaker)
    breaker.trip("test")
    assert outcome_names(layer.put(make_blocks(2))) == ["BreakerOpenError"] * 2
    assert layer.probe(["a", "b"]).held == (None, None)
    assert store.calls == []


def test_an_exception_of_a_store_is_a_failure_and_goes_on() -> None:
    class _Broken(DictStore):
        def get_one(self, block: BlockIO) -> Done:
            raise ZeroDivisionError

    breaker = new_breaker(FakeClock())
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            BreakerLayer(_Broken(), breaker).get(make_blocks(1))
    assert breaker.state is BreakerState.OPEN


def test_probes_that_cannot_be_answered_open_it_and_an_answer_closes_it() -> None:
    class _Shared(DictStore):
        reachable = False

        def probe(self, places: list[Place] | tuple[Place, ...]) -> StoreProbe:  # type: ignore[override]
            return super().probe(places) if self.reachable else StoreProbe((None,) * len(places))

    clock, store = FakeClock(), _Shared()
    breaker = new_breaker(clock)
    layer = BreakerLayer(store, breaker)
    for _ in range(3):
        layer.probe(["a"])
    assert breaker.state is BreakerState.OPEN
    store.reachable = True
    clock.advance(1.0)
    assert layer.probe(["a"]).held == (False,)
    assert breaker.state is BreakerState.CLOSED
