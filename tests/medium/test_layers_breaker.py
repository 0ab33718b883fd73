"""The circuit breaker: when it opens, which attempts it admits, and how it closes again."""

from __future__ import annotations

import pytest

from tests.medium.io_fakes import make_blocks, outcome_names
from tiering.errors import (
    CorruptBlockError,
    DeviceError,
    OutOfSpaceError,
    OverdueError,
    PermanentStoreError,
    ReadOnlyError,
    TemporaryStoreError,
)
from tiering.medium.block_store import BlockIO, Done, Outcome, Place, StoreProbe
from tiering.medium.layers.breaker import LOG_PERIOD, Breaker, BreakerLayer, Breakers, BreakerState
from tiering.secondary.options import BreakerOptions
from tiering.testing.chaos import ChaosLayer, Fault
from tiering.testing.clock import FakeClock
from tiering.testing.faults import DictStore

OPTIONS = BreakerOptions(failures=3, probe_after=1.0, probe_max=5.0)


def state_of(breaker: Breaker) -> BreakerState:
    """Return the current state; a call, so that mypy does not narrow the type after an assertion."""
    return breaker.state


def new_breaker(clock: FakeClock) -> Breaker:
    return Breaker(OPTIONS, name="t", clock=clock, jitter=lambda: 1.0)


def new_breakers() -> Breakers:
    return Breakers.build(OPTIONS, name="t", clock=FakeClock(), jitter=lambda: 1.0)


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
    assert state_of(breaker) is BreakerState.OPEN
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


def opens_again(breaker: Breaker, clock: FakeClock) -> float:
    """Open a closed breaker, close it with the first probe, and return the seconds in between."""
    begun = clock()
    for _ in range(3):
        breaker.record_failure("down again")
    while not breaker.admit():
        clock.advance(0.25)
    breaker.record_success()
    return clock() - begun


def test_a_breaker_that_keeps_opening_waits_longer_each_time_until_it_was_healthy_for_long() -> None:
    clock = FakeClock()
    breaker = new_breaker(clock)
    assert [opens_again(breaker, clock) for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    clock.advance(OPTIONS.probe_max - 0.5)
    assert opens_again(breaker, clock) == 5.0
    clock.advance(OPTIONS.probe_max)
    assert opens_again(breaker, clock) == 1.0
    assert breaker.opened == 7


def test_a_breaker_that_keeps_opening_says_so_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    breaker = new_breaker(clock)
    for _ in range(200):
        opens_again(breaker, clock)
    outages = [record.getMessage() for record in caplog.records if "out of service, next try" in record.getMessage()]
    assert len(outages) <= 200 * OPTIONS.probe_max / LOG_PERIOD + 1
    assert "outages since the last such line" in outages[1]
    assert len(caplog.records) <= 2 * len(outages)


def test_waits_differ_so_that_engines_do_not_probe_in_step_and_are_never_too_short() -> None:
    waits = []
    for _ in range(50):
        clock = FakeClock()
        breaker = Breaker(OPTIONS, name="t", clock=clock)
        breaker.trip("down")
        while not breaker.allows():
            clock.advance(0.01)
        waits.append(clock() - 1000.0)
    assert 0.74 <= min(waits) <= max(waits) <= 1.02
    assert len({round(wait, 2) for wait in waits}) > 5


def test_one_bad_place_never_opens_it_and_as_many_different_ones_do() -> None:
    breaker = new_breaker(FakeClock())
    blocks = make_blocks(3)
    for _ in range(100):
        breaker.record_failure(DeviceError("bad sector"), blocks[0])
        breaker.record_failure(DeviceError("bad sector"), blocks[1])
    assert breaker.state is BreakerState.CLOSED
    breaker.record_failure(DeviceError("bad sector"), blocks[2])
    assert state_of(breaker) is BreakerState.OPEN
    assert breaker.failed_blocks == tuple((block.key, block.place) for block in blocks)


def test_bad_places_with_successes_between_them_never_open_it() -> None:
    breakers = new_breakers()
    store = ChaosLayer(DictStore())
    layer = BreakerLayer(store, breakers)
    for _ in range(20):
        store.inject(Fault.DEVICE, gets=2)
        layer.get(make_blocks(2))
        layer.get(make_blocks(1))
    assert breakers.state is BreakerState.CLOSED


def test_reads_and_writes_have_health_of_their_own() -> None:
    breakers, store = new_breakers(), ChaosLayer(DictStore())
    layer = BreakerLayer(store, breakers)
    store.inject(Fault.PERMANENT, puts=3)
    for _ in range(3):
        layer.put(make_blocks(1))
        layer.get(make_blocks(1))
    assert (breakers.reads.state, breakers.writes.state) == (BreakerState.CLOSED, BreakerState.OPEN)
    assert outcome_names(layer.put(make_blocks(1))) == ["BreakerOpenError"]
    assert outcome_names(layer.get(make_blocks(1))) == ["ABSENT"]
    assert (breakers.state, breakers.opened) == (BreakerState.OPEN, 1)
    assert breakers.allows(load=True)
    assert not breakers.allows(load=False)


@pytest.mark.parametrize("error", [OutOfSpaceError("full"), ReadOnlyError("read-only")])
def test_a_medium_of_our_own_that_refuses_writes_gets_no_second_one(error: PermanentStoreError) -> None:
    class _Refuses(DictStore):
        def put_one(self, block: BlockIO) -> None:
            raise error

    breakers, store = new_breakers(), _Refuses()
    layer = BreakerLayer(store, breakers)
    assert outcome_names(layer.put(make_blocks(2))) == [type(error).__name__] * 2
    assert outcome_names(layer.put(make_blocks(2))) == ["BreakerOpenError"] * 2
    assert len(store.calls) == 1
    assert breakers.reads.state is BreakerState.CLOSED


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
    """A store that answers each get with one given outcome."""

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
        (OverdueError("late"), BreakerState.CLOSED),
        (TemporaryStoreError("reset"), BreakerState.OPEN),
        (PermanentStoreError("EIO"), BreakerState.OPEN),
    ],
)
def test_only_failures_of_the_medium_open_it(outcome: Outcome, state: BreakerState) -> None:
    breakers = new_breakers()
    layer = BreakerLayer(_Answers(outcome), breakers)
    for _ in range(5):
        layer.get(make_blocks(2))
    assert breakers.reads.state is state
    assert breakers.writes.state is BreakerState.CLOSED


def test_a_batch_with_one_answer_is_a_success() -> None:
    breakers, store = new_breakers(), ChaosLayer(DictStore())
    layer = BreakerLayer(store, breakers)
    for _ in range(5):
        store.inject(Fault.PERMANENT, puts=3)
        assert outcome_names(layer.put(make_blocks(4))) == ["PermanentStoreError"] * 3 + ["DONE"]
    assert breakers.state is BreakerState.CLOSED


def test_an_open_breaker_keeps_everything_from_the_medium() -> None:
    breakers, store = new_breakers(), DictStore()
    layer = BreakerLayer(store, breakers)
    breakers.trip("test")
    assert outcome_names(layer.put(make_blocks(2))) == ["BreakerOpenError"] * 2
    assert layer.probe(["a", "b"]).held == (None, None)
    assert store.calls == []


def test_an_exception_of_a_store_is_a_failure_and_goes_on() -> None:
    class _Broken(DictStore):
        def get_one(self, block: BlockIO) -> Done:
            raise ZeroDivisionError

    breakers = new_breakers()
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            BreakerLayer(_Broken(), breakers).get(make_blocks(1))
    assert breakers.reads.state is BreakerState.OPEN


def test_probes_that_cannot_be_answered_open_it_and_an_answer_closes_it() -> None:
    class _Shared(DictStore):
        reachable = False

        def probe(self, places: list[Place] | tuple[Place, ...]) -> StoreProbe:  # type: ignore[override]
            return super().probe(places) if self.reachable else StoreProbe((None,) * len(places))

    clock, store = FakeClock(), _Shared()
    breakers = Breakers.build(OPTIONS, name="t", clock=clock)
    layer = BreakerLayer(store, breakers)
    for _ in range(3):
        layer.probe(["a"])
    assert breakers.reads.state is BreakerState.OPEN
    store.reachable = True
    clock.advance(1.0)
    assert layer.probe(["a"]).held == (False,)
    assert state_of(breakers.reads) is BreakerState.CLOSED
