"""The limit of loads: the delivered bandwidth of the medium decides how many loads are started."""

from __future__ import annotations

import pytest

from tiering.block_tier.pace import WINDOW, LoadPace
from tiering.testing.clock import FakeClock

SIZE = 1000


class Medium:
    """A medium that delivers ``bandwidth`` bytes per second, in the order of the loads."""

    def __init__(self, bandwidth: float, deadline: float = 2.0, at_once: int = 4) -> None:
        self.clock = FakeClock()
        self.pace = LoadPace(deadline, lambda: at_once, self.clock)
        self.bandwidth = bandwidth

    def load(self, jobs: int, blocks: int = 4) -> None:
        """Submit ``jobs`` loads at once, and deliver them one after another."""
        sizes = [SIZE] * blocks
        for _ in range(jobs):
            self.pace.begin(sizes)
        for _ in range(jobs):
            self.clock.advance(sum(sizes) / self.bandwidth)
            self.pace.end(sizes, sum(sizes))


def test_nothing_is_limited_before_the_bandwidth_was_the_limit() -> None:
    medium = Medium(bandwidth=1.0)
    medium.load(jobs=1)
    assert medium.pace.bandwidth is None
    assert medium.pace.fitting([SIZE] * 10_000) == 10_000


def test_a_load_is_cut_to_what_bandwidth_and_deadline_can_carry() -> None:
    medium = Medium(bandwidth=20_000.0)
    medium.load(jobs=4)
    assert medium.pace.bandwidth == pytest.approx(20_000.0)
    assert medium.pace.fitting([SIZE] * 200) == pytest.approx(20 * 2 * 1.25, abs=1)


def test_loads_on_their_way_count() -> None:
    medium = Medium(bandwidth=20_000.0)
    medium.load(jobs=4)
    medium.pace.begin([SIZE] * 40)
    assert medium.pace.fitting([SIZE] * 200) == pytest.approx(10, abs=1)


def test_a_slow_medium_still_gets_as_many_blocks_as_the_tier_moves_at_once() -> None:
    medium = Medium(bandwidth=100.0)
    medium.load(jobs=4)
    assert medium.pace.fitting([SIZE] * 200) == 4
    medium.pace.begin([SIZE] * 4)
    assert medium.pace.fitting([SIZE] * 200) == 0


def test_a_medium_that_became_faster_is_noticed_without_a_measurement() -> None:
    medium = Medium(bandwidth=100.0)
    medium.load(jobs=4)
    medium.bandwidth = 1e9
    known = medium.pace.bandwidth
    assert known is not None
    for _ in range(20):
        fitting = medium.pace.fitting([SIZE] * 200)
        medium.load(jobs=1, blocks=fitting)
    assert medium.pace.fitting([SIZE] * 200) > 4
    assert (medium.pace.bandwidth or 0.0) > 10 * known


def test_an_outage_is_no_measurement_of_the_bandwidth() -> None:
    medium = Medium(bandwidth=20_000.0)
    medium.load(jobs=4)
    known = medium.pace.bandwidth
    for _ in range(4):
        medium.pace.begin([SIZE] * 4)
    for _ in range(4):
        medium.clock.advance(30)
        medium.pace.end([SIZE] * 4, 0)
    assert medium.pace.bandwidth == known


def test_the_latest_measurements_count_most() -> None:
    medium = Medium(bandwidth=20_000.0)
    medium.load(jobs=4)
    medium.bandwidth = 200_000.0
    for _ in range(6):
        medium.load(jobs=int(WINDOW * 200_000 / 4 / SIZE) + 4)
    assert medium.pace.bandwidth == pytest.approx(200_000.0, rel=0.1)


def test_a_medium_that_delivers_nothing_for_the_whole_deadline_has_stalled() -> None:
    medium = Medium(bandwidth=1.0)
    medium.pace.begin([SIZE])
    assert not medium.pace.stalled(0)
    medium.clock.advance(1.9)
    assert not medium.pace.stalled(0)
    medium.clock.advance(0.1)
    assert medium.pace.stalled(0)
    assert not medium.pace.stalled(SIZE), "a block has arrived"


def test_a_medium_without_loads_has_not_stalled() -> None:
    medium = Medium(bandwidth=1000.0)
    medium.clock.advance(100)
    assert not medium.pace.stalled(0)
    medium.pace.begin([SIZE])
    assert not medium.pace.stalled(0), "the time before the load does not count"
