"""Ages of blocks in bounded memory, and the choice of those that a bound on the total removes.

Blocks carry no position in their prefix. Their time of writing stands for it: a prefix is written from its head on, and
heads in use are written again (renewed). So whole eras go, the oldest first; of the last era that has to go in part,
the newest blocks go first. They are the tails of its prefixes, and all that remains can still be reached.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ERA = 4096
"""Seconds within which tails go before heads; a power of two, so that bins end with eras."""

MOST_BINS = 1 << 16
"""Maximum number of bins. Bins become twice as wide when more would be needed."""


def _turn(modified: float) -> int:
    """Return a number by which blocks go: eras in order, and the times of an era backwards."""
    return int(modified) ^ (ERA - 1)


@dataclass(slots=True)
class Cut:
    """The blocks that go; :meth:`takes` is asked about each block once."""

    width: int
    """Width of a bin in seconds."""
    before: int = 0
    """Bins in front of this one go; default: none does."""
    remaining: int = 0
    """Bytes that still go from this bin."""

    def takes(self, modified: float, nbytes: int) -> bool:
        """Return True if a block goes."""
        at = _turn(modified) // self.width
        if at != self.before or self.remaining <= 0:
            return at < self.before
        self.remaining -= nbytes
        return True


@dataclass(slots=True)
class Ages:
    """Bytes by time of writing."""

    most_bins: int = MOST_BINS
    """Maximum number of bins; default :data:`MOST_BINS`."""
    total: int = 0
    """Bytes of all blocks."""
    width: int = 1
    """Width of a bin in seconds, a power of two."""
    _bins: dict[int, int] = field(default_factory=dict)

    def add(self, modified: float, nbytes: int) -> None:
        """Count a block."""
        self.total += nbytes
        at = _turn(modified) // self.width
        self._bins[at] = self._bins.get(at, 0) + nbytes
        while len(self._bins) > self.most_bins:
            wider: dict[int, int] = {}
            for number, held in self._bins.items():
                wider[number // 2] = wider.get(number // 2, 0) + held
            self._bins, self.width = wider, self.width * 2

    def cut(self, max_total: int) -> Cut:
        """Return the blocks that must go so that at most ``max_total`` bytes remain."""
        excess, cut = self.total - max_total, Cut(self.width)
        for number in sorted(self._bins) if excess > 0 else ():
            cut.before, cut.remaining = number, excess
            excess -= self._bins[number]
            if excess <= 0:
                break
        return cut
