"""The events of the blocks of one tier, in the order in which they happened."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

from tiering.api.manager import OffloadingEvent
from tiering.table.disposal import Table

CLEARED_AT_ONCE = 4096
"""Keys of a reset that are returned in one call, about; the others follow with the next calls."""


class EventQueue:
    """Events until they are taken.

    A reset may remove millions of keys at once. They are queued as the dictionaries that had them.
    """

    def __init__(self) -> None:
        self._events: deque[OffloadingEvent | tuple[OffloadingEvent, deque[Table]]] = deque()

    def add(self, event: OffloadingEvent) -> None:
        """Queue an event."""
        self._events.append(event)

    def clear(self, event: OffloadingEvent, tables: Iterable[Table]) -> None:
        """Queue the removal of all keys in ``tables``, which the caller does not use any more.

        Args:
            event: the event, without keys.
            tables: dictionaries with the keys.
        """
        self._events.append((event, deque(table for table in tables if table)))

    def take(self, most: int | None = None) -> list[OffloadingEvent]:
        """Return the events since the last call.

        Args:
            most: maximum number of events; default: no limit.
        """
        taken: list[OffloadingEvent] = []
        while self._events and (most is None or len(taken) < most):
            first = self._events[0]
            if isinstance(first, OffloadingEvent):
                taken.append(first)
            else:
                event, tables = first
                keys: list[bytes] = []
                while tables and len(keys) < CLEARED_AT_ONCE:
                    table = tables[0]
                    keys += [table.popitem()[0] for _ in islice(range(len(table)), CLEARED_AT_ONCE - len(keys))]
                    if not table:
                        tables.popleft()
                if keys:
                    taken.append(replace(event, keys=keys[::-1]))
                if tables:
                    break
            self._events.popleft()
        return taken
