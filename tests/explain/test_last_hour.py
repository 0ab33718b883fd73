"""The tokens of the last hour, and the multiples of the capacities that would have kept them."""

from __future__ import annotations

from tiering.explain.causes import MissCause, Reason
from tiering.explain.explanation import Span
from tiering.explain.last_hour import MINUTES, LastHour, Tokens


def evicted(tokens: int, factor: float | None, tier: str = "cpu") -> Span:
    return Span(0, tokens, MissCause.EVICTED, tier, factor=factor)


def test_multiples_are_weighted_by_tokens() -> None:
    hour = LastHour()
    hour.add(1, 100, [evicted(60, 1.5), evicted(29, 4.0), evicted(11, 40.0)])
    assert hour.last(1).multiples("cpu") == (1.55, 41.5)  # in steps of an eighth of a doubling, rounded up
    hour.add(2, 1000, [evicted(1000, 4.0)])
    assert hour.last(2).multiples("cpu") == (4.0, 4.0)


def test_tiers_have_multiples_of_their_own() -> None:
    hour = LastHour()
    hour.add(1, 24, [evicted(8, 2.0), evicted(8, 8.0, "local"), evicted(8, None, "bucket")])
    last = hour.last(1)
    assert last.multiples("cpu") == (2.0, 2.0)
    assert last.multiples("local") == (8.0, 8.0)
    assert last.multiples("bucket") is None


def test_what_is_older_than_an_hour_is_forgotten() -> None:
    hour = LastHour()
    hour.add(1, 20, [evicted(8, 2.0)])
    last = hour.last(MINUTES + 1)
    assert (last.prompt, last.causes) == (20, {(MissCause.EVICTED, "cpu", Reason.NONE): 8})
    assert hour.last(MINUTES + 2) == Tokens()
    assert hour.last(MINUTES + 2).multiples("cpu") is None


def test_the_last_minutes_are_summed_alone() -> None:
    hour = LastHour()
    for minute in range(1, 100):
        hour.add(minute, 10 * minute, [evicted(minute, 2.0)])
    assert hour.last(99, 1).prompt == 990 + 980
    assert hour.last(99, 1).causes.total() == 99 + 98
    assert hour.last(99).causes.total() == sum(range(99 - MINUTES, 100))
