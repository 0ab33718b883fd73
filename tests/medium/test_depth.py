"""The search for a depth: simulated devices, and the rules by which a comparison teaches something."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tiering.runtime.depth import AUTO_DEPTH, WINDOW_ROUNDS, DepthBounds, DepthFinder, fixed_depth

UNIT = 4 << 20
SEEDS = range(3)


class Device:
    """A device whose throughput depends on the number of units that run; its units share it.

    Args:
        throughput: bytes per second by number of running units.
        noise: spread of the units' durations, as the standard deviation of their logarithm.
        seed: seed of the noise.
    """

    def __init__(self, throughput: Callable[[int], float], noise: float = 0.1, seed: int = 0) -> None:
        self.throughput = throughput
        self.finder = DepthFinder(AUTO_DEPTH)
        self.now = 0.0
        self.seen: list[int] = []
        """Depth after each unit."""
        self._noise = noise
        self._dice = random.Random(seed)
        self._running: list[float] = []

    def busy(self, seconds: float) -> None:
        """Move units for ``seconds``, while more wait than the depth takes."""
        end = self.now + seconds
        while self.now < end:
            depth = self.finder.depth
            while len(self._running) < depth:
                self._running.append(UNIT * self._dice.lognormvariate(0.0, self._noise))
            self._end_one(full=True)

    def burst(self, units: int) -> None:
        """Move ``units`` that arrive together, until none is left."""
        self._running.clear()
        while units or self._running:
            while units and len(self._running) < self.finder.depth:
                self._running.append(UNIT * self._dice.lognormvariate(0.0, self._noise))
                units -= 1
            if not units:
                self.finder.starved()
            self._end_one(full=units > 0)

    def trickle(self, units: int) -> None:
        """Move units one after another, without any that waits."""
        self._running.clear()
        for _ in range(units):
            self._running.append(float(UNIT))
            self._end_one(full=False)
            self.finder.starved()

    def _end_one(self, *, full: bool) -> None:
        count = len(self._running)
        share = self.throughput(count) / count
        seconds = min(self._running) / share
        self._running = [left - seconds * share for left in self._running]
        self._running.remove(min(self._running))
        self.now += seconds
        self.finder.ended(self.now, UNIT, full=full and count == self.finder.depth)
        self.seen.append(self.finder.depth)


def scales_to(best: int, one: float = 200e6) -> Callable[[int], float]:
    """A device that becomes faster up to ``best`` units."""
    return lambda running: one * min(running, best) ** 0.8


def falls_past(best: int) -> Callable[[int], float]:
    """A device that is fastest with ``best`` units, and loses 15% with each doubling."""
    return lambda running: 1.5e9 * (min(running, best) / best) ** 0.7 * 0.85 ** max(0, (running / best) ** 0.5 - 1)


def bucket(latency: float, bandwidth: float) -> Callable[[int], float]:
    """A bucket with ``latency`` seconds per request, on a line of ``bandwidth`` bytes per second."""
    return lambda running: min(running * UNIT / latency, bandwidth)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("throughput", "depths"),
    [
        pytest.param(scales_to(16), {16}, id="a fast disk that scales to 16"),
        pytest.param(scales_to(64), {32}, id="a disk that scales further"),
        pytest.param(falls_past(4), {4}, id="a disk that is slower past 4"),
        pytest.param(falls_past(8), {8}, id="a disk that is fastest where the search begins"),
        pytest.param(lambda running: 500e6, {2}, id="a disk that one unit saturates"),
        pytest.param(bucket(0.1, 4e9), {32}, id="a bucket that is far away"),
        pytest.param(bucket(0.05, 0.8e9), {16}, id="a bucket behind a line that is full with 10"),
    ],
)
def test_the_depth_is_found(throughput: Callable[[int], float], depths: set[int], seed: int) -> None:
    device = Device(throughput, seed=seed)
    device.busy(60.0)
    assert device.finder.chosen in depths, f"seed {seed}"


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_does_not_lead_far_away(seed: int) -> None:
    device = Device(scales_to(16), noise=0.6, seed=seed)
    device.busy(300.0)
    assert device.finder.chosen in {8, 16, 32}, f"seed {seed}"


def test_a_medium_that_changes_is_followed() -> None:
    device = Device(falls_past(4))
    device.busy(60.0)
    assert device.finder.chosen == 4
    device.throughput = scales_to(16)
    device.busy(600.0)
    assert device.finder.chosen == 16


def test_the_search_rests_longer_and_longer_while_nothing_is_better() -> None:
    device = Device(falls_past(8))
    device.busy(60.0)
    early = sum(depth != 8 for depth in device.seen) / len(device.seen)
    device.seen.clear()
    device.busy(600.0)
    late = sum(depth != 8 for depth in device.seen) / len(device.seen)
    assert late < early / 2
    assert late < 0.05


def test_an_idle_medium_teaches_nothing() -> None:
    device = Device(scales_to(16))
    device.trickle(100_000)
    assert set(device.seen) == {AUTO_DEPTH.start}


def test_pauses_between_bursts_do_not_count() -> None:
    """The time without full depth belongs to no window: bursts find the depth that steady work finds."""
    device = Device(scales_to(16))
    for _ in range(600):
        device.busy(0.2)
        device.trickle(1)
        device.now += 5.0
    assert device.finder.chosen == 16


@pytest.mark.parametrize("seed", SEEDS)
def test_units_of_a_burst_that_end_together_do_not_count_as_speed(seed: int) -> None:
    """A larger depth must not look faster because the first units of a burst end together."""
    device = Device(lambda running: 2e9, noise=0.02, seed=seed)
    for _ in range(300):
        device.burst(40)
        device.now += 1.0
    assert device.finder.chosen <= AUTO_DEPTH.start


def test_a_trial_whose_windows_short_bursts_cannot_fill_is_given_up() -> None:
    device = Device(scales_to(32))
    while device.finder.depth == AUTO_DEPTH.start:
        device.busy(0.05)
    for _ in range(100):
        device.burst(2 * AUTO_DEPTH.start)
    assert (device.finder.depth, device.finder.chosen) == (AUTO_DEPTH.start, AUTO_DEPTH.start)
    device.busy(300.0)
    assert device.finder.chosen == 32


def test_a_depth_that_is_given_is_kept() -> None:
    finder = DepthFinder(fixed_depth(3))
    for number in range(100_000):
        finder.ended(number * 1e-3, UNIT, full=True)
    assert (finder.depth, finder.chosen) == (3, 3)


def test_a_window_needs_time_and_units() -> None:
    """A few units, or a short time, are no measurement of the first depth: no other depth is tried."""
    few, short = DepthFinder(AUTO_DEPTH), DepthFinder(AUTO_DEPTH)
    for number in range(AUTO_DEPTH.start * WINDOW_ROUNDS):
        few.ended(float(number), UNIT, full=True)
    for number in range(2000):
        short.ended(number * 49e-6, UNIT, full=True)
    assert (few.depth, short.depth) == (AUTO_DEPTH.start, AUTO_DEPTH.start)
    few.ended(1e3, UNIT, full=True)
    short.ended(1e3, UNIT, full=True)
    assert (few.depth, short.depth) == (2 * AUTO_DEPTH.start, 2 * AUTO_DEPTH.start)


def test_a_depth_above_the_threads_that_can_be_started_is_given_up_and_tried_again_later() -> None:
    device = Device(scales_to(16))
    device.busy(0.5)
    while device.finder.depth != 16:
        device.busy(0.01)
    device.finder.limit(5)
    assert (device.finder.depth, device.finder.chosen) == (5, 5)
    device.busy(300.0)
    assert device.finder.chosen > 8


def test_without_any_further_thread_the_least_depth_remains() -> None:
    finder = DepthFinder(DepthBounds(2, 8, 32))
    finder.limit(1)
    assert finder.depth == 2


def test_a_limit_above_the_depth_changes_nothing() -> None:
    finder = DepthFinder(AUTO_DEPTH)
    finder.limit(AUTO_DEPTH.start)
    assert finder.depth == AUTO_DEPTH.start
