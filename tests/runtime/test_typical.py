"""The typical one of the latest durations."""

from __future__ import annotations

import math

from tiering.runtime.typical import Typical


def test_the_median_counts_and_two_outliers_do_not() -> None:
    typical = Typical(100.0, 10.0, 0.0)
    assert typical.value(0.0) == math.inf
    for seconds in (4.0, 9.0, 5.0, 9.0, 3.0):
        typical.add(seconds, 1.0)
    assert typical.value(1.0) == 5.0
    typical.add(9.0, 1.0)
    assert typical.value(1.0) == 9.0


def test_it_falls_towards_the_shortest_one_while_nothing_is_measured() -> None:
    typical = Typical(100.0, 10.0, 0.0)
    for seconds in (2.0, 6.0, 6.0):
        typical.add(seconds, 0.0)
    assert [typical.value(now) for now in (0.0, 10.0, 20.0)] == [6.0, 4.0, 3.0]
    typical.add(6.0, 20.0)
    assert typical.value(20.0) == 6.0
    assert typical.value(220.0) == math.inf


def test_a_queue_counts_up_to_three_times_the_shortest_one() -> None:
    typical = Typical(100.0, 10.0, 0.0)
    for seconds in (2.0, 50.0, 50.0):
        typical.add(seconds, 0.0)
    assert typical.value(0.0) == 6.0
