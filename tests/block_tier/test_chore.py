"""A chore by itself: when it is due, one run at a time, waits after failures."""

from __future__ import annotations

from tests.block_tier.fakes import FakeIo, FakeStore
from tiering.errors import StoreError, TemporaryStoreError
from tiering.medium.chore import NEVER, Backoff, Chore
from tiering.secondary.options import BreakerOptions
from tiering.testing.clock import FakeClock


class Rig:
    """A chore over a fake I/O side, whose runs end when a test lets them."""

    def __init__(self, backoff: Backoff | None = None) -> None:
        self.clock = FakeClock()
        self.io = FakeIo(FakeStore(), self.clock, BreakerOptions())
        self.chore = Chore("sweep", self.io, self.clock, self.begin, backoff)
        self.idle = False
        self.failure: StoreError | None = None
        self.ended: list[tuple[str | None, BaseException | None, bool]] = []

    def begin(self) -> None:
        if not self.idle:
            self.chore.run(self.task, lambda result, error: self.ended.append((result, error, self.chore.running)))

    def task(self) -> str:
        if self.failure is not None:
            raise self.failure
        return "swept"

    def tick(self, after: float = 0.0) -> int:
        """Advance the clock, and return the number of runs that were started."""
        before = len(self.io.ran)
        self.clock.advance(after)
        self.chore.tick(self.clock())
        return len(self.io.ran) - before

    def end(self) -> None:
        self.io.run_tasks()
        self.io.poll()


def test_nothing_runs_before_something_is_due() -> None:
    rig = Rig()
    assert (rig.tick(1e9), rig.chore.due, rig.chore.running) == (0, NEVER, False)
    rig.chore.wake(10.0)
    assert [rig.tick(9.0), rig.tick(1.0)] == [0, 1]
    assert (rig.io.ran[0].name, rig.chore.running, rig.chore.due) == ("sweep", True, NEVER)


def test_an_end_is_reported_after_the_run_and_starts_nothing() -> None:
    rig = Rig()
    rig.chore.wake()
    assert rig.tick() == 1
    rig.end()
    assert rig.ended == [("swept", None, False)]
    assert rig.tick(1e9) == 0


def test_an_error_is_reported_like_a_result() -> None:
    rig = Rig()
    rig.failure = TemporaryStoreError("no")
    rig.chore.start()
    rig.end()
    assert rig.ended == [(None, rig.failure, False)]
    assert rig.tick(1e9) == 0


def test_the_earlier_of_two_wishes_counts() -> None:
    rig = Rig()
    rig.chore.wake(5.0)
    rig.chore.wake(50.0)
    assert [rig.tick(4.0), rig.tick(1.0)] == [0, 1]


def test_one_run_at_a_time_and_a_wish_during_a_run_leads_to_another() -> None:
    rig = Rig()
    rig.chore.start()
    rig.chore.start()
    rig.chore.wake()
    assert (rig.tick(), len(rig.io.ran)) == (0, 1)
    rig.end()
    assert rig.tick() == 1


def test_a_chore_with_nothing_to_do_stays_due() -> None:
    rig = Rig()
    rig.idle = True
    rig.chore.wake()
    assert (rig.tick(), rig.chore.running) == (0, False)
    rig.idle = False
    assert rig.tick() == 1


def test_after_a_failure_a_run_is_due_after_its_wait_or_when_it_was_due_anyway() -> None:
    rig = Rig(Backoff(10.0, jitter=0.0))
    rig.chore.start()
    rig.end()
    rig.chore.failed()
    assert (rig.chore.failures, rig.tick(9.0), rig.tick(1.0)) == (1, 0, 1)
    rig.chore.wake(1.0)
    rig.end()
    rig.chore.failed()
    assert [rig.tick(0.5), rig.tick(0.5)] == [0, 1]
    rig.chore.succeeded()
    assert rig.chore.failures == 0


def test_waits_double_up_to_their_bound_and_start_over_after_a_success() -> None:
    backoff = Backoff(1.0, 60.0)
    for expected in [1, 2, 4, 8, 16, 32, 60, 60, 60]:
        assert 0.8 * expected <= backoff.failed() <= 1.2 * expected
    backoff.succeeded()
    assert backoff.failed() <= 1.2
    assert backoff.failed(at_most=0.5) <= 0.6


def test_waits_are_equal_without_a_longest_one_and_exact_without_jitter() -> None:
    backoff = Backoff(60.0, jitter=0.0)
    assert [backoff.failed() for _ in range(3)] == [60.0] * 3


def test_the_number_of_failures_never_makes_a_wait_overflow() -> None:
    backoff = Backoff(1.0, 60.0)
    assert max(backoff.failed() for _ in range(5000)) <= 72.0
