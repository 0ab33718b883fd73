"""Limit of a tier's loads to the blocks that its medium can deliver before their deadline.

A load that arrives too late costs its request the whole deadline, and computing its blocks would have been faster. The
bandwidth is measured while more blocks are on their way than the tier moves at once: only then does it limit them. As
long as that has not happened, nothing is limited.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

WINDOW = 0.1
"""Shortest time over which the bandwidth is measured, in seconds."""

_WEIGHT = 0.5
"""Weight of the latest measurement in the estimate."""

_MARGIN = 1.25
"""Factor of the estimate up to which blocks are loaded: a medium that became faster must be noticed."""


class LoadPace:
    """Loads on their way from one medium, and an estimate of its bandwidth.

    The scheduler's thread calls all methods.

    Args:
        deadline: seconds that a load may take.
        at_once: function that returns the number of blocks that the tier moves at the same time.
        clock: function that returns monotonic seconds.
    """

    def __init__(self, deadline: float, at_once: Callable[[], int], clock: Callable[[], float]) -> None:
        self._deadline = deadline
        self._at_once = at_once
        self._clock = clock
        self._blocks = 0
        self._bytes = 0
        self._limited = False
        self._window_begun: float | None = None
        self._window_bytes = 0
        self._progress = clock()
        self._read_bytes = 0
        self.bandwidth: float | None = None
        """Estimate in bytes per second; None until it was measured."""

    def fitting(self, sizes: Sequence[int]) -> int:
        """Return how many leading blocks of a load with ``sizes`` bytes can arrive before the deadline.

        As many blocks as the tier moves at once are always worth a try.
        """
        if self.bandwidth is None:
            return len(sizes)
        room = self.bandwidth * self._deadline * _MARGIN - self._bytes
        count = 0
        for size in sizes:
            room -= size
            if room < 0 and self._blocks + count >= self._at_once():
                self._limited = True
                break
            count += 1
        return count

    def begin(self, sizes: Sequence[int]) -> None:
        """Record that a load of blocks with ``sizes`` bytes was submitted."""
        if not self._blocks:
            self._progress = self._clock()
        self._blocks += len(sizes)
        self._bytes += sum(sizes)
        if self._window_begun is None and self._blocks > self._at_once():
            self._window_begun, self._window_bytes = self._clock(), 0

    def end(self, sizes: Sequence[int], arrived: int) -> None:
        """Record that a load has ended.

        Args:
            sizes: bytes of its blocks, as given to :meth:`begin`.
            arrived: bytes that arrived.
        """
        now = self._clock()
        if self._window_begun is not None:
            self._window_bytes += arrived
            elapsed = now - self._window_begun
            if elapsed >= WINDOW:
                if self._window_bytes:
                    # A window without a block is a sign of an outage, which is the breaker's affair.
                    self._measure(self._window_bytes / elapsed)
                self._window_begun, self._window_bytes = now, 0
        self._blocks -= len(sizes)
        self._bytes -= sum(sizes)
        if self._blocks <= self._at_once():
            self._window_begun = None
            if self._limited and arrived and self.bandwidth is not None:
                # Too few blocks are let through for a measurement: try more next time.
                self.bandwidth *= _MARGIN
        self._limited = self._limited and self._blocks > 0

    def stalled(self, read_bytes: int) -> bool:
        """Return True if no block has arrived for as long as a load may take, while loads were under way.

        Call this method at least once per step.

        Args:
            read_bytes: bytes read from the medium since the start.
        """
        now = self._clock()
        if read_bytes != self._read_bytes:
            self._read_bytes, self._progress = read_bytes, now
        return self._blocks > 0 and now - self._progress >= self._deadline

    def _measure(self, bandwidth: float) -> None:
        known = self.bandwidth
        self.bandwidth = bandwidth if known is None else known + _WEIGHT * (bandwidth - known)
