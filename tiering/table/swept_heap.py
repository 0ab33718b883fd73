"""A heap whose entries become void while they wait, and whose calls all take a short time."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Members = NDArray[np.int64]
"""The rows of an entry, or its numbers of tenants."""

MOST_LISTED = 4
"""Quotient of the listed members and those that count, beyond which a push looks at other entries."""

LOOKS = 2
"""Quotient of the members that such a push looks at, and those that it adds.

One more than :data:`MOST_LISTED` / (:data:`MOST_LISTED` - 1) suffices to keep the heap small.
"""

FEW = 64
"""Number of listed members up to which a push looks at none."""


class SweptHeap:
    """A heap of members by a number, the smallest number first.

    Members lose their number while they are listed. Pushes to a heap of many such members therefore look at some older
    entries, drop the members that have lost it, and entries without any. No call makes the whole heap anew, for which
    the scheduler's thread would wait.

    The heap is two: the last entry in the list of the older one goes to the newer one, which keeps both in order, until
    the older one is empty. Then they change places.

    Args:
        valid: function that returns a mask of the members that still have a number.
    """

    __slots__ = ("_credit", "_newer", "_older", "_valid", "listed")

    def __init__(self, valid: Callable[[float, Members], NDArray[np.bool_]]) -> None:
        self._valid = valid
        self._newer: list[tuple[float, int, Members]] = []
        self._older: list[tuple[float, int, Members]] = []
        self._credit = 0
        """Entries and members of the older heap that may still be looked at."""
        self.listed = 0
        """Number of members in all entries, with those that have lost their number."""

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    def push(self, number: float, order: int, members: Members, count: int) -> None:
        """Add an entry, and look at some older ones if many members have lost their numbers.

        Args:
            number: the number; the smallest one comes first.
            order: order of entries with equal numbers; no two entries have the same.
            members: the members; none of them: no entry.
            count: largest number of members that can have a number now.
        """
        if not len(members):
            return
        heapq.heappush(self._newer, (number, order, members))
        self.listed += len(members)
        if self.listed > FEW + MOST_LISTED * count:
            self._sweep(LOOKS * (1 + len(members)))

    def _sweep(self, credit: int) -> None:
        """Look at as many more entries and members as ``credit`` says."""
        if not self._older:
            self._newer, self._older, self._credit = self._older, self._newer, 0
        older, self._credit = self._older, self._credit + credit
        while older and self._credit >= (size := 1 + len(older[-1][2])):
            self._credit -= size
            entry = older.pop()
            number, order, members = entry
            mask = self._valid(number, members)
            if (lost := len(members) - int(np.count_nonzero(mask))) == 0:
                heapq.heappush(self._newer, entry)
                continue
            self.listed -= lost
            if lost < len(members):
                heapq.heappush(self._newer, (number, order, members[mask]))

    @property
    def first(self) -> float | None:
        """The smallest number, of members that may have lost it; None without entries."""
        return heap[0][0] if (heap := self._first()) else None

    def pop(self) -> tuple[float, int, Members, int]:
        """Remove the first entry.

        Returns:
            The number, the order, those members that still have the number, and how many the entry had.
        """
        number, order, members = heapq.heappop(self._first())
        self.listed -= len(members)
        return number, order, members[self._valid(number, members)], len(members)

    def _first(self) -> list[tuple[float, int, Members]]:
        """Return the heap whose first entry comes before that of the other."""
        newer, older = self._newer, self._older
        return newer if newer and (not older or newer[0][:2] < older[0][:2]) else older
