"""The shortest one of the latest durations."""

from __future__ import annotations

import math

from tiering.runtime.shortest import Shortest


def test_the_shortest_duration_of_two_periods_counts() -> None:
    shortest = Shortest(10.0, 0.0)
    assert shortest.value(0.0) == math.inf
    shortest.add(3.0, 1.0)
    shortest.add(2.0, 9.0)
    shortest.add(4.0, 9.5)
    assert shortest.value(9.9) == 2.0
    shortest.add(5.0, 12.0)
    assert shortest.value(21.9) == 2.0
    assert shortest.value(22.0) == 5.0


def test_what_was_long_ago_does_not_count() -> None:
    shortest = Shortest(10.0, 0.0)
    shortest.add(2.0, 1.0)
    assert shortest.value(19.9) == 2.0
    other = Shortest(10.0, 0.0)
    other.add(2.0, 1.0)
    assert other.value(20.0) == math.inf
