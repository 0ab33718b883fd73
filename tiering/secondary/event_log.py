"""The events of one tier, in the order in which its blocks came and went."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import repeat

from tiering.base import OffloadingEvent, OffloadKey

MAX_ANNOUNCED = 1 << 20
"""Keys on a shared medium of which is remembered that we announced them."""


class EventLog:
    """Collects events until they are taken; inert unless ``enabled``.

    On a shared medium a removal is announced only for what was announced as stored: the rest is not ours.  On a medium of our own
    the index announces everything it holds.
    """

    def __init__(self, medium: str, *, enabled: bool, shared: bool, max_announced: int = MAX_ANNOUNCED) -> None:
        self._medium = medium
        self._enabled = enabled
        self._announced: OrderedDict[OffloadKey, None] | None = OrderedDict() if shared else None
        self._max_announced = max_announced
        self._events: list[OffloadingEvent] = []

    def stored(self, keys: Sequence[OffloadKey]) -> None:
        """``keys`` became readable on the medium."""
        if not self._enabled or not keys:
            return
        self._events.append(OffloadingEvent(list(keys), self._medium, removed=False))
        if self._announced is not None:
            self._announced.update(zip(keys, repeat(None), strict=False))
            if len(self._announced) > self._max_announced:
                self._forget_oldest()

    def removed(self, keys: Sequence[OffloadKey]) -> None:
        """``keys`` are no longer held."""
        if not self._enabled or not keys:
            return
        gone = list(keys)
        if self._announced is not None:
            gone = [key for key in keys if key in self._announced]
            for key in gone:
                del self._announced[key]
        if gone:
            self._events.append(OffloadingEvent(gone, self._medium, removed=True))

    def take(self) -> Iterable[OffloadingEvent]:
        """The events since the last call."""
        if not self._events:
            return ()
        events, self._events = self._events, []
        return events

    def _forget_oldest(self) -> None:
        """What we can no longer vouch for is announced as removed, so that consumers do not keep it for ever."""
        if self._announced is None:
            return
        surplus = len(self._announced) - self._max_announced
        self._events.append(OffloadingEvent([self._announced.popitem(last=False)[0] for _ in range(surplus)], self._medium, True))
