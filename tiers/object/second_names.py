"""Second names of blocks whose first object reads corrupt and cannot be deleted for the present.

The object ``<name>`` stays. This process stores and looks for the block as ``<name>.1``, and if that object reads
corrupt too, as ``<name>.2``. A process comes to a second name only by reading the first object corrupt itself, so sound
blocks cost no further request. After an hour the first name is tried again: the object may have been deleted meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tiering.tier import Place

MOST_NAMES = 3
"""Number of further names of one block."""

MOST_BLOCKS = 64
"""Number of blocks of one process that have a second name.

A machine that damages all that it reads must not copy the bucket.
"""

SECONDS = 3600.0
"""Seconds for which a second name is used."""


class SecondNames:
    """The second names that one process uses. Threads of the I/O side call it.

    Args:
        clock: function that returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._used: dict[Place, tuple[int, float]] = {}
        """The number of a block's name, and the time until which it is used, by place."""

    def suffix(self, place: Place) -> str:
        """Return the end of the name of the block at ``place``; empty for its first name."""
        if not self._used:
            return ""
        number, until = self._used.get(place, (0, 0.0))
        return f".{number}" if number and self._clock() < until else ""

    def add(self, place: Place) -> bool:
        """Use the next name for the block at ``place`` from now on.

        Returns:
            False if the block has had all its names, or too many blocks have a second name.
        """
        now = self._clock()
        number, until = self._used.get(place, (0, 0.0))
        if until <= now:
            number = 0
        if number == MOST_NAMES:
            return False
        if len(self._used) >= MOST_BLOCKS and place not in self._used:
            for old in [old for old, (_, ends) in list(self._used.items()) if ends <= now]:
                self._used.pop(old, None)
            if len(self._used) >= MOST_BLOCKS:
                return False
        self._used[place] = (number + 1, now + SECONDS)
        return True
