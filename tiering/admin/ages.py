"""Ages of blocks in bounded memory, and the choice of those that a bound on the total removes.

Blocks carry no position in their prefix. Their time of writing stands for it: a prefix is written from its head on, and
heads in use are written again (renewed). So whole eras go, the oldest first; of the last era that has to go in part,
the newest blocks go first. They are the tails of its prefixes, and all that remains can still be reached.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

ERA = 4096
"""Seconds within which tails go before heads."""

MOST_BINS = 1 << 16
"""Maximum number of bins. Bins become twice as wide when more would be needed."""


@dataclass(slots=True)
class Cut:
    """The blocks that go, by their time of writing in seconds since 1970; by default, none.

    :meth:`takes` is asked about each block once.
    """

    before: int = 0
    """Blocks that were written before go: whole eras."""
    since: int = 0
    """First time from which on blocks of the next era go."""
    until: int = 0
    """End of that era."""
    partial: tuple[int, int] = (0, 0)
    """Begin and end of the times of that era whose blocks go until ``remaining`` bytes are removed."""
    remaining: int = 0
    """Bytes that still go from the partial times."""

    def takes(self, modified: float, nbytes: int) -> bool:
        """Return True if a block goes."""
        if modified < self.before or self.since <= modified < self.until:
            return True
        if self.remaining > 0 and self.partial[0] <= modified < self.partial[1]:
            self.remaining -= nbytes
            return True
        return False


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
        at = int(modified) // self.width
        self._bins[at] = self._bins.get(at, 0) + nbytes
        while len(self._bins) > self.most_bins:
            wider: dict[int, int] = {}
            for number, held in self._bins.items():
                wider[number // 2] = wider.get(number // 2, 0) + held
            self._bins, self.width = wider, self.width * 2

    def cut(self, max_total: int) -> Cut:
        """Return the blocks that must go so that at most ``max_total`` bytes remain."""
        excess, cut = self.total - max_total, Cut()
        for begin, end, held in self._eras() if excess > 0 else ():
            if held > excess:
                # The era goes in part, its newest blocks first.
                cut.since = cut.until = end
                for number in sorted((at for at in self._bins if begin <= at * self.width < end), reverse=True):
                    if self._bins[number] > excess:
                        cut.partial, cut.remaining = (number * self.width, (number + 1) * self.width), excess
                        break
                    excess -= self._bins[number]
                    cut.since = number * self.width
                break
            excess -= held
            cut.before = end
        return cut

    def _eras(self) -> Iterator[tuple[int, int, int]]:
        """Yield begin, end and bytes of each era, the oldest first."""
        length = max(ERA, self.width)
        eras: dict[int, int] = {}
        for number, held in self._bins.items():
            at = number * self.width // length
            eras[at] = eras.get(at, 0) + held
        for at in sorted(eras):
            yield at * length, (at + 1) * length, eras[at]
