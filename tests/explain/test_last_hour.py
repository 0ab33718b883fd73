"""The tokens of the last hour, and the multiples of the capacities that would have kept them."""

from __future__ import annotations

from tiering.explain.causes import MissCause, Reason
from tiering.explain.explanation import Span
from tiering.explain.last_hour import MINUTES, LastHour


def evicted(tokens: int, factor: float | None, tier: str = "cpu") -> Span:
    return Span(0, tokens, MissCause.EVICTED, tier, factor=factor)


def test_multiples_are_weighted_by_tokens() -> None:
    hour = LastHour()
    hour.add(1, [evicted(60, 1.5), evicted(29, 4.0), evicted(11, 40.0)])
    assert hour.multiples(1, "cpu") == (1.55, 41.5)  # in steps of an eighth of a doubling, rounded up
    hour.add(2, [evicted(1000, 4.0)])
    assert hour.multiples(2, "cpu") == (4.0, 4.0)


def test_tiers_have_multiples_of_their_own() -> None:
    hour = LastHour()
    hour.add(1, [evicted(8, 2.0), evicted(8, 8.0, "local"), evicted(8, None, "bucket")])
    assert hour.multiples(1, "cpu") == (2.0, 2.0)
    assert hour.multiples(1, "local") == (8.0, 8.0)
    assert hour.multiples(1, "bucket") is None


def test_what_is_older_than_an_hour_is_forgotten() -> None:
    hour = LastHour()
    hour.add(1, [evicted(8, 2.0)])
    assert hour.tokens(MINUTES)[MissCause.EVICTED, "cpu", Reason.NONE] == 8
    assert not hour.tokens(MINUTES + 1)
    assert hour.multiples(MINUTES + 1, "cpu") is None
