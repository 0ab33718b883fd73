"""The credit follows the rate of the medium, between its depth and a share of the rows."""

from __future__ import annotations

from tiering.block_tier.transfers import SHORTEST_WINDOW, STORE_SHARE, StoreCredit
from tiering.testing.clock import FakeClock

ROWS = 10_000
LEAST = 64


def make_credit() -> tuple[StoreCredit, FakeClock]:
    clock = FakeClock()
    return StoreCredit(lambda: LEAST, ROWS, clock), clock


def test_a_medium_that_has_not_moved_anything_gets_what_keeps_its_places_busy() -> None:
    credit, clock = make_credit()
    assert credit.limit(0.4) == LEAST
    clock.advance(100.0)
    assert credit.limit(0.4) == LEAST


def test_the_credit_doubles_in_each_step_until_the_medium_sets_the_pace() -> None:
    credit, clock = make_credit()
    step, fastest, limits = 0.25, 400, []
    for _ in range(6):
        limits.append(credit.limit(2 * step))
        credit.ended(min(limits[-1], fastest))
        clock.advance(step)
    assert limits == [LEAST, 128, 256, 512, 800, 800], "two steps of the medium"


def test_no_medium_gets_more_than_its_share_of_the_rows() -> None:
    credit, clock = make_credit()
    credit.ended(10**9)
    clock.advance(1.0)
    assert credit.limit(10.0) == int(STORE_SHARE * ROWS)


def test_a_slower_rate_is_believed_slowly_and_short_windows_are_not_measured() -> None:
    credit, clock = make_credit()
    credit.ended(1000)
    clock.advance(1.0)
    assert credit.limit(1.0) == 1000
    clock.advance(SHORTEST_WINDOW / 2)
    assert credit.limit(1.0) == 1000, "too short to be measured"
    clock.advance(1.0)
    assert 850 < credit.limit(1.0) < 950


def test_a_tiny_tier_has_credit_for_one_block() -> None:
    credit = StoreCredit(lambda: 0, 1, FakeClock())
    assert credit.limit(0.0) == 1
