"""The moving share of the time that work takes."""

from __future__ import annotations

import pytest

from tiering.runtime.time_share import TimeShare


def test_a_young_share_is_that_of_the_time_since_the_start() -> None:
    share = TimeShare(30.0, 1.0, 100.0)
    assert share.value == 0.0
    share.add(0.25, 101.0)
    assert share.value == pytest.approx(0.25)
    share.add(0.75, 102.0)
    assert share.value == pytest.approx(0.5, rel=0.02)


def test_half_of_the_weight_has_faded_after_the_half_life() -> None:
    share = TimeShare(30.0, 1.0, 0.0)
    share.add(1000.0, 1000.0)
    share.add(0.0, 1030.0)
    assert share.value == pytest.approx(0.5)
    share.add(0.0, 1060.0)
    assert share.value == pytest.approx(0.25)


def test_no_more_than_the_largest_share_counts() -> None:
    share = TimeShare(30.0, 0.5, 0.0)
    share.add(9.0, 1.0)
    assert share.value == pytest.approx(0.5)
    share.add(0.0, 31.0)
    assert share.value < 0.1


def test_work_that_ends_at_the_same_time_counts_with_the_next_time() -> None:
    share = TimeShare(30.0, 1.0, 0.0)
    share.add(0.5, 1.0)
    share.add(0.5, 1.0)
    share.add(0.0, 2.0)
    assert share.value == pytest.approx(0.5, rel=0.02)
