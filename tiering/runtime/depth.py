"""Search for the depth at which one direction of a medium no longer becomes faster.

The depth is the number of units that run at the same time. A finder compares the present depth with its half or its
double, in windows that alternate between both. The larger depth must move clearly more bytes per second to be chosen;
the smaller one need only not be slower. A window counts time and bytes only while every place of the depth is taken and
more units wait. An idle medium therefore teaches nothing. After a search without a better depth, the finder rests; each
rest is longer than the one before, up to a bound.

Units that begin together, at the start of a burst or of a larger depth, also end together. Their bytes were moved
before the window and would make it look faster, the more of them there are. So as many units as the depth end uncounted
first.
"""

from __future__ import annotations

import math
from typing import NamedTuple

GAIN = 0.05
"""Share by which twice the depth must be faster to be chosen."""

LOSS = 0.02
"""Share by which half the depth may be slower and is chosen nevertheless."""

WINDOW_SECONDS = 0.1
"""Shortest time with full depth that one window measures, in seconds."""

WINDOW_ROUNDS = 4
"""Smallest number of units that one window measures, as a multiple of the depth."""

FEWEST_PAIRS, MOST_PAIRS = 3, 8
"""Bounds of the pairs of windows that one comparison needs."""

MOST_STARVED = 16
"""Largest number of units that may end while no other waits before a trial is given up.

The number is a multiple of the depth. With short bursts only, the windows of a larger depth would never fill, and the
trial would never end.
"""

FIRST_REST, LONGEST_REST = 4.0, 128.0
"""Bounds of the rest after a search without a better depth, in seconds with full depth."""


class DepthBounds(NamedTuple):
    """Bounds of a depth; with ``least`` equal to ``most``, the depth never changes."""

    least: int
    start: int
    most: int


AUTO_DEPTH = DepthBounds(2, 8, 32)
"""Bounds of ``max_inflight: auto``.

The least is 2, so that one slow block never holds up all others. The most bounds the threads and their buffers.
"""


def fixed_depth(depth: int) -> DepthBounds:
    """Return the bounds of a depth that never changes."""
    return DepthBounds(depth, depth, depth)


class DepthFinder:
    """Depth of one direction, as found so far.

    The caller holds a lock around :meth:`ended`; any thread may read :attr:`depth`.
    """

    def __init__(self, bounds: DepthBounds) -> None:
        self.depth = bounds.start
        """Number of units that shall run now. During a comparison, it alternates between both sides."""
        self.measuring = False
        """True between the ends of two units with full depth; until then, only such an end need be recorded."""
        self.attentive = False
        """True if the end of a unit that leaves no other one waiting changes something."""
        self._bounds = bounds
        self.chosen = bounds.start
        """Depth that the last comparison chose."""
        self._mark = 0.0
        self._seconds, self._bytes, self._units = 0.0, 0, 0
        self._unsettled = 0
        """Number of units that will end before the window counts again."""
        self._starved = 0
        """Number of units that ended without another one waiting since the present window began."""
        self._upward = True
        self._failed = 0
        """Number of comparisons in a row that changed nothing."""
        self._rest = 0.0
        """Seconds with full depth until the next comparison begins."""
        self._next_rest = FIRST_REST
        self._base = 0.0
        """Rate of the chosen depth in the present pair of windows; 0 before its window has ended."""
        self._gains: list[float] = []
        """Logarithm of the ratio of rates, candidate to chosen, for each pair of this comparison."""

    @property
    def resting(self) -> bool:
        """True while no comparison is under way, because the last ones found no better depth."""
        return self._rest > 0.0

    def ended(self, now: float, moved: int, *, full: bool) -> None:
        """Record that a unit has ended.

        Args:
            now: monotonic time in seconds.
            moved: bytes that the unit moved.
            full: True if as many units as :attr:`depth` ran until now, more wait, and the unit met no failure.
        """
        if self._bounds.least == self._bounds.most:
            return
        mark, measuring = self._mark, self.measuring
        self._mark, self.measuring, self.attentive = now, full, True
        if not full:
            return
        if self._unsettled > 0:
            self._unsettled -= 1
            return
        if not measuring:
            return
        self._seconds += now - mark
        self._bytes += moved
        self._units += 1
        if self._rest > 0.0:
            self._rest -= now - mark
            if self._rest > 0.0:
                return
            self._drop_window()
        elif self._seconds >= WINDOW_SECONDS and self._units >= WINDOW_ROUNDS * self.depth:
            rate = self._bytes / self._seconds
            self._drop_window()
            self._end_window(rate)

    def starved(self) -> None:
        """Record that a unit has ended while no other waits."""
        self._unsettled = self.depth
        self.measuring = False
        self.attentive = bool(self._base) and self.depth != self.chosen
        if self.attentive:
            self._starved += 1
            if self._starved > MOST_STARVED * self.depth:
                self._drop_window()
                self._base = 0.0
                self._conclude(better=False)

    def limit(self, threads: int) -> None:
        """Give up depths above ``threads``, because no more can be started now.

        A later comparison tries again.
        """
        bounds = self._bounds
        if bounds.least == bounds.most or threads >= self.depth:
            return
        self._drop_window()
        self.attentive = True
        self._base, self._gains, self._upward, self._failed = 0.0, [], False, 0
        self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)
        self.chosen = max(bounds.least, min(self.chosen, threads))
        self.depth = self.chosen

    def _drop_window(self) -> None:
        self.measuring, self._seconds, self._bytes, self._units, self._starved = False, 0.0, 0, 0, 0

    def _end_window(self, rate: float) -> None:
        if rate <= 0.0:
            return
        if not self._base:
            self._base = rate
            self._run(self._candidate())
            return
        self._gains.append(math.log(rate / self._base))
        self._base = 0.0
        better = self._judge()
        if better is None:
            self._run(self.chosen)
        else:
            self._conclude(better)

    def _run(self, depth: int) -> None:
        self.depth = self._unsettled = depth

    def _candidate(self) -> int:
        """Return the depth to compare with; the search turns round at the bounds."""
        chosen, (least, _, most) = self.chosen, self._bounds
        if self._upward and chosen >= most:
            self._upward = False
        elif not self._upward and chosen <= least:
            self._upward = True
        return min(2 * chosen, most) if self._upward else max(chosen // 2, least)

    def _judge(self) -> bool | None:
        """Return True if the candidate is to be chosen, False if not, None if more windows are needed."""
        gains, count = self._gains, len(self._gains)
        if count < FEWEST_PAIRS:
            return None
        wanted = math.log1p(GAIN) if self._upward else math.log1p(-LOSS)
        mean = sum(gains) / count
        if count >= MOST_PAIRS:
            return mean >= wanted
        error = math.sqrt(sum((gain - mean) ** 2 for gain in gains) / (count - 1) / count)
        if mean - error >= wanted:
            return True
        return False if mean + error < wanted else None

    def _conclude(self, better: bool) -> None:
        self._gains = []
        if better:
            # The depth behind the new one has just lost: only the next one in this direction is worth a comparison.
            self.chosen, self._failed, self._next_rest = self._candidate(), 1, FIRST_REST
        else:
            self._failed += 1
            self._upward = not self._upward
            if self._failed > 1 or self.chosen in (self._bounds.least, self._bounds.most):
                self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)
        self._run(self.chosen)
